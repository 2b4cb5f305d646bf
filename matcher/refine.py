"""Subpixel refinement: least-squares matching (Gruen 1985) of windows around matches.

Both windows are sampled on one grid in a frame halfway between the two views.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from matcher.config import RefineConfig
from matcher.images import gradient_image, white
from matcher.kernels import calls as compiled
from matcher.processes import compute_threads
from matcher.types import REFINEMENTS, Image, Matches, MatchRefinement


def nearest(points: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """(N, count) rows of the `points` (K, 2), K ≥ count, nearest to each query (N, 2), the nearest first."""
    if len(queries) == 0:
        return np.zeros((0, count), np.int64)
    known, asked = (np.ascontiguousarray(each, dtype=np.float32) for each in (points, queries))
    tree = cv2.flann_Index(known, {"algorithm": 4})  # FLANN's exact tree of few dimensions
    return tree.knnSearch(asked, count, params={"checks": -1})[0]


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, neighbours: int = 16
) -> tuple[np.ndarray, np.ndarray]:
    """Affine maps (K, 2, 2) float64 around matches, image 1 from image 0, each fitted to so many of its
    nearest matches under the loss of Geman and McClure, as `consensus.fit_local_maps` fits them for the
    network, and (K,) bool, whether these determine a plausible one: no reflection, no extreme scale or
    anisotropy. The others are the identity."""
    count = len(points0)
    if count <= 3:  # three neighbours determine a map
        return np.tile(np.eye(2), (count, 1, 1)), np.zeros(count, dtype=bool)
    wanted = min(neighbours, count - 1)
    found = nearest(points0, points0, wanted + 1)
    own = found == np.arange(count)[:, None]
    own[~own.any(axis=1), -1] = True  # among coincident points the search may omit the point itself
    # Neighbours come first, (n, K), so that sums over them run along the matches.
    rows = np.ascontiguousarray(found[~own].reshape(count, wanted).T)
    offsets0, offsets1 = (
        [(side[rows] - side).astype(np.float32) for side in points.T] for points in (points0, points1)
    )
    square = offsets0[0] ** 2 + offsets0[1] ** 2
    radius = np.sqrt(square.max(axis=0)).clip(1e-3)  # pixels; matches may coincide
    base = np.exp(-0.5 * (1.5 / radius) ** 2 * square)
    weights, maps, ridge = base, np.empty((count, 2, 2)), 1e-3 * radius**2
    for scale in (0.5, 0.2, 0.1, None):  # of the robust loss, as a share of the radius
        share = weights / weights.sum(axis=0)
        x, y = (offset - (share * offset).sum(axis=0) for offset in offsets0)
        share_x, share_y = share * x, share * y
        xx, yy = (share_x * x).sum(axis=0) + ridge, (share_y * y).sum(axis=0) + ridge
        xy = (share_x * y).sum(axis=0)
        determinant, residual = xx * yy - xy * xy, 0.0
        for k, offset in enumerate(offsets1):
            t = offset - (share * offset).sum(axis=0)
            xt, yt = (share_x * t).sum(axis=0), (share_y * t).sum(axis=0)
            along_x, along_y = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
            residual = residual + (t - along_x * x - along_y * y) ** 2
            maps[:, k, 0], maps[:, k, 1] = along_x, along_y
        if scale is not None:
            weights = base / (1 + residual / (scale * radius) ** 2) ** 2
    determinant, size = np.linalg.det(maps), (maps**2).sum(axis=(1, 2)) / 2
    # A scale up to 10 and an anisotropy up to 6: with singular values a ≥ b,
    # size / determinant = (a / b + b / a) / 2.
    known = (determinant > 0.01) & (determinant < 100) & (size < determinant * (6 + 1 / 6) / 2)
    return np.where(known[:, None, None], maps, np.eye(2)), known


class Grid(NamedTuple):
    """The samples of a window, row by row."""

    side: int  # samples along one side
    offsets: np.ndarray  # (3, n) float32: (1, x, y) of every sample relative to the centre
    outer: np.ndarray  # (3, m) the same with one more sample on every side, for derivatives
    weights: np.ndarray  # (n,) float32, sum 1; isotropic, so that they do not depend on rotation

    @staticmethod
    def of(side: int) -> Grid:
        """A square window with an odd number of samples along one side."""
        both = []
        for count in (side, side + 2):
            y, x = np.mgrid[:count, :count].reshape(2, -1).astype(np.float32) - np.float32((count - 1) / 2)
            both.append(np.stack([np.ones_like(x), x, y]))
        sigma = 0.7 * (side - 1) / 2
        weights = np.exp(-(both[0][1] ** 2 + both[0][2] ** 2) / (2 * sigma**2))
        return Grid(side, *both, weights / weights.sum())


def middle_frames(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps (K, 2, 2) from a frame halfway between the views to image 0 and to image 1, for maps 1 from 0.

    A pixel of the frame is one of the image that shows the surface at the lower resolution. Swapping the
    images rotates the frame and changes nothing else.
    """
    half = _square_root(_square_root(np.swapaxes(maps, 1, 2) @ maps))  # V √S Vᵀ of maps U S Vᵀ
    inverse, area = np.linalg.inv(half), zoom_of(maps) ** 2
    zoom = np.maximum(area, 1 / area)[:, None, None] ** 0.25
    return zoom * inverse, zoom * maps @ inverse


def _square_root(matrices: np.ndarray) -> np.ndarray:
    """Of symmetric positive definite matrices (K, 2, 2), in closed form."""
    product = zoom_of(matrices)  # of the two roots of its eigenvalues
    both = np.sqrt(matrices[:, 0, 0] + matrices[:, 1, 1] + 2 * product)  # their sum
    return (matrices + product[:, None, None] * np.eye(2)) / both[:, None, None]


def zoom_of(maps: np.ndarray) -> np.ndarray:
    """(K,) scale of maps (K, 2, 2): the geometric mean of their singular values."""
    return np.sqrt(np.abs(maps[:, 0, 0] * maps[:, 1, 1] - maps[:, 0, 1] * maps[:, 1, 0]))


class ImagePyramid:
    """An image at full, half, quarter … resolution, computed on first use."""

    def __init__(self, grey: np.ndarray, mask: np.ndarray | None = None, zoom: float = 1.0) -> None:
        """Grey values (H, W) of uint8, uint16 or float32; (H, W) bool, True where they may be used; pixels of
        it per pixel of the resized image, in which keypoints were found."""
        self._grey, self.shape, self.zoom = grey, grey.shape, zoom
        self._levels: list[np.ndarray] = []
        self.mask = None if mask is None else mask.astype(np.uint8)
        self.linear, self._offset = np.eye(2), np.zeros(2)  # its pixels from stored ones

    @staticmethod
    def of(image: Image, zoom: float | None = None) -> ImagePyramid:
        """That of `Image.stored` if it was kept, at the file's resolution, else of the resized pixels."""
        if image.stored is not None:
            zoom = zoom or 1 / float(np.sqrt(image.scale[0] * image.scale[1]))
            return ImagePyramid(image.stored, image.stored_mask, zoom)
        made = ImagePyramid(image.grey(), image.mask, zoom or 1.0)
        made.linear = np.linalg.inv(image.axes_to_stored)
        made._offset = -made.linear @ image.to_stored(np.zeros(2))
        return made

    def release(self) -> None:
        """Free the memory of all levels; they are computed again when they are needed."""
        self._levels = []

    def from_stored(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → float64 pixels of the pyramid."""
        return points.astype(np.float64) @ self.linear.T + self._offset

    def in_mask(self, points: np.ndarray) -> np.ndarray:
        """(K,) bool: stored points (K, 2) where keypoints may lie."""
        if self.mask is None:
            return np.ones(len(points), dtype=bool)
        last = np.array(self.mask.shape[::-1]) - 1
        x, y = np.rint(np.nan_to_num(self.from_stored(points)).clip(0, last)).astype(int).T
        return self.mask[y, x] > 0

    def level(self, index: int) -> np.ndarray:
        """The image at 2^-index times the size; its pixel (x, y) is at (x, y) · 2^index of level 0."""
        if not self._levels:
            grey = np.ascontiguousarray(self._grey, dtype=np.float32)
            deep = self._grey.dtype == np.uint16
            self._levels = [np.minimum(grey * np.float32(255 / white(self._grey)), 255) if deep else grey]
        while len(self._levels) <= index:
            self._levels.append(cv2.pyrDown(self._levels[-1]))
        return self._levels[index]

    def level_of(self, maps: np.ndarray) -> np.ndarray:
        """(K,) the level whose pixel size is nearest to the scale of maps (K, 2, 2)."""
        most = max(0, int(np.log2(min(self.shape))) - 3)
        return np.rint(np.log2(zoom_of(maps).clip(1e-9))).clip(0, most).astype(np.int64)

    def sample(self, affine: np.ndarray, level: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32 values by bilinear interpolation of offsets (3, n) under maps (K, 2, 3) to level 0,
        each at its `level` (K,); the edge is replicated beyond the image."""
        affine = (affine * np.exp2(-level)[:, None, None]).astype(np.float32)
        values = np.empty((len(affine), offsets.shape[1]), np.float32)
        for index in np.unique(level).tolist():
            rows, border = level == index, cv2.BORDER_REPLICATE
            x, y = affine[rows, 0] @ offsets, affine[rows, 1] @ offsets
            values[rows] = cv2.remap(self.level(index), x, y, cv2.INTER_LINEAR, borderMode=border)
        return values

    def usable(self, affine: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32: 1 for samples on the image and in its mask, else 0; arguments as in `sample`."""
        affine, (height, width) = affine.astype(np.float32), self.shape
        x, y = affine[:, 0] @ offsets, affine[:, 1] @ offsets
        on_image = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
        if self.mask is not None:
            on_image &= cv2.remap(self.mask, x, y, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT) > 0
        return on_image.astype(np.float32)


class Windows(NamedTuple):
    """Where K windows lie in both images, as maps from a common intermediate frame."""

    pyramid0: ImagePyramid
    pyramid1: ImagePyramid
    affine0: np.ndarray  # (K, 2, 3) from (1, x, y) in the frame to pixels
    affine1: np.ndarray
    deviation: np.ndarray  # (K,) prior standard deviation of the shift along an axis, frame pixels

    def select(self, rows: slice) -> Windows:
        """Some of the windows."""
        return Windows(self.pyramid0, self.pyramid1, *(each[rows] for each in self[2:]))


# Least-squares matching: the affine warp under which a window of image 1 best fits one of image 0


def fit_settings(side: int) -> compiled.FitSettings:
    """The numbers of a fit of windows of so many samples a side, for the kernel and for NumPy."""
    return compiled.FitSettings(
        side=side,
        first_steps=3,  # Gauss-Newton steps before the first reweighting
        steps=3,  # and after each
        reweighings=2,  # how often pixels that do not fit lose weight
        deformation=0.05,  # prior standard deviation of the entries of the affine map
        robust_scale=2.0,  # mean absolute residuals at which the Geman-McClure weight is a quarter
        # Of the variance of a shift, because neighbouring samples are correlated. Chosen so that half of the
        # refined matches of warped training photos lie within the 50 % confidence ellipse.
        inflation=3.0,
        min_residual=1e-3,  # mean squared, of windows of variance 1; compression alone causes it
        # Gradient energy due to noise alone, as a share of the residual variance. It is 1/8 for white noise
        # and less for interpolated images; chosen on warped training photos.
        noise_energy=0.08,
        max_damping=1e3,  # fixes a match along a direction in which the gradient is no more than noise
        initial_noise=0.3,  # share of the initial residual that is attributed to noise
        tolerance=0.02,  # step length, in pixels of the frame, below which a match has converged
    )


class Fit(NamedTuple):
    """Least-squares estimates for K matches, in pixels of the intermediate frame."""

    change: np.ndarray  # (K, 6) shift x, y of the window in image 1 and its deformation xx, yx, xy, yy
    covariance: np.ndarray  # (K, 2, 2) of the shift
    correlation: np.ndarray  # (K,) robustly weighted correlation coefficient of the windows
    contrast: np.ndarray  # (K,) the smaller of both windows' standard deviations, grey values of 255
    last_step: np.ndarray  # (K,) length of the last change of the shift
    visible: np.ndarray  # (K,) share of the window inside both images and their masks


def fit_windows(windows: Windows, grid: Grid, prior: np.ndarray) -> Fit:
    """Fits by the compiled kernel or NumPy; `prior` (K, 6), as `Fit.change`, is also the initial value."""
    views = []
    for pyramid, affine in zip(windows[:2], windows[2:4], strict=True):
        level = pyramid.level_of(affine[:, :, 1:])
        levels = [pyramid.level(index) for index in range(int(level.max(initial=0)) + 1)]
        views.append((levels, pyramid.mask, affine, level))
    settings = fit_settings(grid.side)
    fitted = compiled.fit_windows(views, settings, grid.weights, windows.deviation, prior)
    if fitted is not None:
        return Fit(*fitted[:2], *fitted[2])

    def fit(block: slice) -> Fit:
        fitting = _Fitting(windows.select(block), grid, prior[block])
        fitting.iterate(settings.first_steps)
        for _ in range(settings.reweighings):
            fitting.reweigh()
            fitting.iterate(settings.steps)
        return fitting.finish()

    # Blocks stay in a core's cache. NumPy and OpenCV release the interpreter lock.
    blocks = [slice(i, i + 256) for i in range(0, len(prior), 256)]
    with ThreadPoolExecutor(max(1, min(compute_threads(), len(blocks), os.cpu_count() or 1))) as pool:
        fits = list(pool.map(fit, blocks))
    return Fit(*map(np.concatenate, zip(*fits, strict=True)))


class _Fitting:
    """Least-squares matching of K windows by NumPy; `change` is what it estimates."""

    def __init__(self, windows: Windows, grid: Grid, prior: np.ndarray) -> None:
        self.windows, self.grid, self.settings = windows, grid, fit_settings(grid.side)
        self.prior, self.change, self.last_step = prior, prior.copy(), np.full(len(prior), np.inf)
        self.linear = np.ascontiguousarray(grid.offsets.T)
        self.basis = self.linear / np.array([1, grid.side / 2, grid.side / 2], np.float32)
        level0 = windows.pyramid0.level_of(windows.affine0[:, :, 1:])
        self.level1 = windows.pyramid1.level_of(windows.affine1[:, :, 1:])
        self.outer0 = windows.pyramid0.sample(windows.affine0, level0, grid.outer)
        self._weigh(grid.weights[None])
        z, norm = self._normalised(self._inner(self.outer0))
        z1, _ = self._normalised(self._sample1(grid.offsets))
        # The initial residual is mostly due to the error of the match, not to noise.
        self._linearise(z, self.outer0 / norm, self.settings.initial_noise * (z - z1))

    def iterate(self, steps: int) -> None:
        """Gauss-Newton steps of at most a pixel, of each match until they are shorter than the tolerance."""
        moving = np.ones(len(self.change), dtype=bool)
        for _ in range(steps):
            if not moving.any():
                break
            residual = self._residual(self._normalised(self._sample1(self.grid.offsets))[0])
            change = self.change - self.prior
            sides = np.stack([self._moments(d * residual, self.linear) for d in (self.dx, self.dy)], axis=2)
            sides = sides.reshape(-1, 6) - self.precision * change
            along = self.damping * np.einsum("ki,ki->k", self.weakest, change[:, :2])
            sides[:, :2] -= along[:, None] * self.weakest
            step = (self.inverse @ sides[:, :, None])[:, :, 0]
            step /= np.maximum(np.hypot(step[:, 0], step[:, 1]), 1)[:, None]
            step[~moving] = 0  # so that a match does not depend on how long others take
            self.change += step
            length = np.hypot(step[:, 0], step[:, 1])
            self.last_step[moving] = length[moving]
            moving &= length > self.settings.tolerance

    def reweigh(self) -> None:
        """Update the robust weights from the residuals, and linearise about both windows."""
        grid, windows = self.grid, self.windows
        outer0, outer1 = self.outer0, self._sample1(grid.outer)
        inner0, inner1 = self._inner(outer0), self._inner(outer1)
        residual = np.abs(self._normalised(inner0)[0] - self._normalised(inner1)[0])
        sides = (windows.pyramid0, windows.affine0), (windows.pyramid1, self._affine1())
        seen = (pyramid.usable(affine, grid.offsets) for pyramid, affine in sides)
        weights = grid.weights * np.multiply(*seen)
        self.visible = weights.sum(axis=1)
        mean = np.einsum("kn,kn->k", residual, weights) / np.maximum(self.visible, 1e-12)
        scale = np.maximum(self.settings.robust_scale * 1.25 * mean, 0.05)[:, None]
        weights /= (1 + (residual / scale) ** 2) ** 2
        weights[self.visible < 0.1] = grid.weights  # to be rejected, but their equations must stay regular
        self._weigh(weights / weights.sum(axis=1, keepdims=True))
        (z0, self.norm0), (z1, norm1) = (self._normalised(inner) for inner in (inner0, inner1))
        self._linearise(z0, 0.5 * (outer0 / self.norm0 + outer1 / norm1), z0 - z1)

    def finish(self) -> Fit:
        """The estimates and their covariances; call `reweigh` at least once before."""
        z, norm = self._normalised(self._sample1(self.grid.offsets))
        correlation, inverse = self._mean(self.z * z), self.inverse[:, :2, :2]
        variance = self._noise(self._residual(z))[:, None, None] * inverse
        # Share of the prior in the estimate along the weakest direction, 0 to 1.
        prior_share = self.damping * np.einsum("ki,kij,kj->k", self.weakest, inverse, self.weakest)
        along = self.weakest[:, :, None] * self.weakest[:, None]
        variance += along * ((prior_share * self.windows.deviation) ** 2)[:, None, None]
        variance += (self.last_step**2)[:, None, None] * np.eye(2)
        contrast = np.minimum(self.norm0, norm)[:, 0]
        return Fit(self.change, variance, correlation, contrast, self.last_step, self.visible)

    def _affine1(self) -> np.ndarray:
        """(K, 2, 3) current maps from the frame to pixels of image 1."""
        moved = self.change.reshape(-1, 3, 2).transpose(0, 2, 1) + np.eye(2, 3, 1)
        current = self.windows.affine1[:, :, 1:] @ moved
        current[:, :, 0] += self.windows.affine1[:, :, 0]
        return current

    def _sample1(self, offsets: np.ndarray) -> np.ndarray:
        return self.windows.pyramid1.sample(self._affine1(), self.level1, offsets)

    def _inner(self, outer: np.ndarray) -> np.ndarray:
        """Values (K, n) of windows without their margin."""
        square = outer.reshape(-1, self.grid.side + 2, self.grid.side + 2)
        return np.ascontiguousarray(square[:, 1:-1, 1:-1]).reshape(len(outer), -1)

    def _weigh(self, weights: np.ndarray) -> None:
        """Weights (1 or K, n) of sum 1, under which a linear gradient of illumination is removed."""
        products = (self.basis[:, :, None] * self.basis[:, None]).reshape(-1, 9)
        # Regular even where nothing of a window has weight.
        moments = (weights @ products).reshape(-1, 3, 3) + 1e-9 * np.eye(3)
        self.weights, self.of_basis = weights, np.linalg.inv(moments)

    def _moments(self, values: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """(K, c) weighted sums of values (K, n) times columns (n, c)."""
        return (values * self.weights) @ columns

    def _mean(self, values: np.ndarray) -> np.ndarray:
        return (values * self.weights).sum(axis=1)

    def _normalised(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (K, n) without a gradient of illumination and of unit norm, and (K, 1) their norm before."""
        gradient = (self._moments(values, self.basis)[:, None] @ self.of_basis)[:, 0]
        centred = values - gradient @ self.basis.T
        norm = np.sqrt(self._mean(centred * centred) + 1e-12)[:, None]
        return centred / norm, norm

    def _residual(self, z: np.ndarray) -> np.ndarray:
        """(K, n) from normalised windows of image 1, without a difference of blur."""
        residual = self.z - z
        return residual - self.blur * self._mean(residual * self.blur)[:, None]

    def _noise(self, residual: np.ndarray) -> np.ndarray:
        """(K,) factor from the inverse normal matrix to a covariance."""
        square = np.maximum(residual * residual @ self.grid.weights, self.settings.min_residual)
        return self.settings.inflation * square * np.square(self.grid.weights).sum()

    def _linearise(self, z: np.ndarray, outer: np.ndarray, residual: np.ndarray) -> None:
        """Normal equations of windows `z` (K, n): derivatives from `outer` (K, m), noise of `residual`; what
        a gradient of illumination (shading) or a little more blur of one window changes does not count."""
        square = outer.reshape(-1, self.grid.side + 2, self.grid.side + 2)
        settings, count = self.settings, len(z)
        left, right = square[:, 1:-1, :-2], square[:, 1:-1, 2:]
        above, below = square[:, :-2, 1:-1], square[:, 2:, 1:-1]
        blur = left + right + above + below - 4 * square[:, 1:-1, 1:-1]  # what a little more blur adds
        self.z = z
        self.dx, self.dy = (0.5 * each.reshape(count, -1) for each in (right - left, below - above))
        self.blur, _ = self._normalised(blur.reshape(count, -1))
        residual = residual - self.blur * self._mean(residual * self.blur)[:, None]
        noise = self._noise(residual)
        self.precision = np.empty((count, 6), np.float32)  # of the prior, scaled by the noise
        self.precision[:, :2] = (noise / self.windows.deviation**2)[:, None]
        self.precision[:, 2:] = noise[:, None] / settings.deformation**2
        # The normal matrix of derivatives times 1, x and y, x before y; illumination and blur are eliminated.
        dx, dy, linear = self.dx, self.dy, self.linear
        products = (linear[:, :, None] * linear[:, None]).reshape(-1, 9)
        cross_products = (linear[:, :, None] * self.basis[:, None]).reshape(-1, 9)
        squares = (self._moments(d, products).reshape(-1, 3, 3) for d in (dx * dx, dx * dy, dy * dy))
        matrix, shading = np.empty((count, 6, 6), np.float32), np.empty((count, 6, 3), np.float32)
        matrix[:, 0::2, 0::2], matrix[:, 0::2, 1::2], matrix[:, 1::2, 1::2] = squares
        matrix[:, 1::2, 0::2] = matrix[:, 0::2, 1::2]  # symmetric blocks
        blurred = np.empty((count, 6, 1), np.float32)
        for axis, derivative in enumerate((dx, dy)):
            shading[:, axis::2] = self._moments(derivative, cross_products).reshape(-1, 3, 3)
            blurred[:, axis::2, 0] = self._moments(derivative * self.blur, linear)
        matrix -= shading @ self.of_basis @ shading.transpose(0, 2, 1)
        matrix -= blurred @ blurred.transpose(0, 2, 1)
        # The weakest direction of the structure tensor is damped, against the aperture problem: negligibly
        # where its eigenvalue is many times what noise alone causes, by as much as the eigenvalue where it is
        # twice that, and so that the match is fixed where it is no more, as along an edge.
        energy = settings.noise_energy * (residual * residual @ self.grid.weights)
        xx, xy, yy = matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 1]
        angle = 0.5 * np.arctan2(2 * xy, xx - yy) + np.pi / 2
        self.weakest = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        eigenvalue = 0.5 * (xx + yy) - np.hypot(0.5 * (xx - yy), xy)
        # Beyond the bound the match is fixed anyway; its square must not overflow without contrast.
        share = np.minimum(energy / np.maximum(eigenvalue - energy, 1e-12), 1e9)
        self.damping = (eigenvalue * share**2).clip(0, settings.max_damping)
        # In float32 the huge equations of a window without contrast would swallow the prior, and be singular.
        matrix = matrix.astype(np.float64)
        matrix[:, range(6), range(6)] += self.precision
        matrix[:, :2, :2] += self.damping[:, None, None] * self.weakest[:, :, None] * self.weakest[:, None]
        self.inverse = np.linalg.inv(matrix).astype(np.float32)


DEVIATION = 1.0  # prior standard deviation of a match along an axis, in pixels of the resized images


def refine_matches(
    image0: ImagePyramid,
    image1: ImagePyramid,
    matches: Matches,
    config: RefineConfig,
    maps: tuple[np.ndarray, np.ndarray] | None = None,
) -> Matches:
    """The matches with their points of image 1 refined by least-squares matching against image 0.

    The windows around a match, related at first by the affine map fitted to its neighbours, or by `maps`
    (K, 2, 2), image 1 from image 0, and (K,) whether each is known, are aligned by least squares (Gruen
    1985). Points of image 0 stay. A match that is not accepted, for whatever reason, keeps its position:
    correct matches between different sensors, whose windows do not correlate, are unchanged. Covariances of
    `refinement` are pixels² of the stored image 1.
    """
    if not len(matches):
        fields = np.zeros(0, np.uint8), np.zeros((0, 2, 2), np.float32), np.zeros(0, np.float32)
        return replace(matches, refinement=MatchRefinement(*fields))
    points0, points1 = image0.from_stored(matches.points0), image1.from_stored(matches.points1)
    usable = np.isfinite(points0).all(axis=1) & np.isfinite(points1).all(axis=1)
    points0[~usable], points1[~usable] = 0.0, 0.0
    if maps is None:
        maps = np.tile(np.eye(2), (len(points0), 1, 1)), np.zeros(len(points0), dtype=bool)
        maps[0][usable], maps[1][usable] = fit_affine_maps(points0[usable], points1[usable])
    maps, known = maps
    frame0, frame1 = middle_frames(maps)
    both = (image0.zoom / zoom_of(frame0)) ** 2 + (image1.zoom / zoom_of(frame1)) ** 2
    deviation = DEVIATION * np.sqrt(both / 2)  # in frame pixels; both keypoints are uncertain
    sides = (points0, frame0), (points1, frame1)
    affine = (np.concatenate([points[:, :, None], frame], axis=2) for points, frame in sides)
    windows = Windows(image0, image1, *affine, deviation)
    fit, status = _coarse_to_fine(windows, config)
    outside = REFINEMENTS.index("outside")
    status[~known] = REFINEMENTS.index("no_map")
    status[~usable] = outside
    to_stored = np.linalg.inv(image1.linear) @ frame1
    shift = (to_stored @ fit.change[:, :2, None])[:, :, 0]
    status[(status == 0) & ~image1.in_mask(matches.points1 + shift)] = outside
    accepted = status == REFINEMENTS.index("refined")
    refined1 = matches.points1.astype(np.float32)
    refined1[accepted] = (matches.points1[accepted] + shift[accepted]).astype(np.float32)
    spread = np.where(accepted[:, None, None], fit.covariance, (deviation**2)[:, None, None] * np.eye(2))
    covariances = (to_stored @ spread @ to_stored.transpose(0, 2, 1)).astype(np.float32)
    correlations = np.nan_to_num(fit.correlation).astype(np.float32)
    return replace(matches, points1=refined1, refinement=MatchRefinement(status, covariances, correlations))


def _coarse_to_fine(windows: Windows, config: RefineConfig) -> tuple[Fit, np.ndarray]:
    """Fits from the resolution at which keypoints were found to the images' own, and (K,) uint8 codes of
    `REFINEMENTS`, by the first reason for rejection that applies; what a level rejects stays as before it."""
    deviation = spread = windows.deviation
    grid, prior = Grid.of(config.window), np.zeros((len(deviation), 6))
    halvings = min(int(np.rint(np.log2(np.median(deviation).clip(1)))), 4)
    best, status = None, None
    for level in range(halvings, -1, -1):
        step = 2.0**level
        wide, unit = np.array([1, step, step]), np.array([step, step, 1, 1, 1, 1])
        affine0, affine1 = windows.affine0 * wide, windows.affine1 * wide
        scaled = windows._replace(affine0=affine0, affine1=affine1, deviation=spread / step)
        fit = fit_windows(scaled, grid, prior / unit)
        fit = fit._replace(change=fit.change * unit, covariance=fit.covariance * step**2)
        reasons = {
            "outside": fit.visible < 0.5,  # half of the window
            "flat": ~(fit.contrast >= 1.0),  # a grey value; below it there is only compression and noise
            "moved_far": ~(np.hypot(*fit.change[:, :2].T) <= config.max_shift * deviation),
            "low_correlation": ~(fit.correlation >= 0.7),
            "not_converged": ~(fit.last_step <= 0.25),  # pixels of the frame
        }
        codes = [REFINEMENTS.index(name) for name in reasons]
        now = np.select(list(reasons.values()), codes, REFINEMENTS.index("refined")).astype(np.uint8)
        if best is not None:
            kept = np.flatnonzero((now > 0) & (status == 0))
            now[kept] = 0
            for ours, theirs in zip(fit, best, strict=True):
                ours[kept] = theirs[kept]
        best, status = fit, now
        prior = np.where(status[:, None] == 0, best.change, 0)
        known = np.sqrt(np.linalg.eigvalsh(best.covariance)[:, 1].clip(0)).clip(step / 2, deviation)
        spread = np.where(status == 0, known, deviation)
    return best, status


def refine_image_pair(image0: Image, image1: Image, matches: Matches, config: RefineConfig) -> Matches:
    """The matches refined on grey values and, where few of them were, the others on gradient magnitudes.

    Infrared and visible light, or day and night, agree about where edges are, not about which side of them
    is the brighter one. Gradients are those of the resized images.
    """
    refined = refine_matches(ImagePyramid.of(image0), ImagePyramid.of(image1), matches, config)
    before = refined.refinement
    # With half of the matches instead, rooms seen from far apart lose a little.
    if not len(refined) or before.accepted.mean() >= 0.3:
        return refined
    # Smoothed by a pixel, as in the pass on gradients, .7 and 1.4 being level.
    sides = (ImagePyramid.of(gradient_image(image, 1.0)) for image in (image0, image1))
    again = refine_matches(*sides, refined, config)
    moved = ~before.accepted & again.refinement.accepted
    both = ((each.points1, *vars(each.refinement).values()) for each in (refined, again))
    for ours, theirs in zip(*both, strict=True):
        ours[moved] = theirs[moved]
    return refined
