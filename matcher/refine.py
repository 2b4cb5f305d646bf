"""Windows around matches in two images, sampled on one grid in a frame halfway between the two views."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np

from matcher.config import RefineConfig
from matcher.images import gradient_image
from matcher.kernels import calls as compiled
from matcher.processes import compute_threads
from matcher.types import REFINEMENTS, Image, Matches, MatchRefinement

# --- windows: Windows around matches in two images, sampled on one grid in a frame halfway between the two
# views.

SIGMA = 0.7  # standard deviation of the window's Gaussian weights, as a share of half its side
_BORDER = {"borderMode": cv2.BORDER_REPLICATE}


class Grid(NamedTuple):
    """The samples of a window, row by row."""

    side: int  # samples along one side
    offsets: np.ndarray  # (3, n) float32: (1, x, y) of every sample relative to the centre
    outer: np.ndarray  # (3, m) the same with one more sample on every side, for derivatives
    weights: np.ndarray  # (n,) float32, sum 1; isotropic, so that they do not depend on rotation

    @staticmethod
    def of(side: int) -> Grid:
        """A square window with an odd number of samples along one side."""
        inner, outer = (_offsets(n) for n in (side, side + 2))
        sigma = SIGMA * (side - 1) / 2
        weights = np.exp(-(inner[1] ** 2 + inner[2] ** 2) / (2 * sigma**2))
        return Grid(side, inner, outer, weights / weights.sum())


def _offsets(side: int) -> np.ndarray:
    y, x = np.mgrid[:side, :side].reshape(2, -1).astype(np.float32) - np.float32((side - 1) / 2)
    return np.stack([np.ones_like(x), x, y])


def middle_frames(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Maps (K, 2, 2) from a frame halfway between the views to image 0 and to image 1, for maps 1 from 0.

    Half of the deformation lies on either side, and a pixel of the frame is one of the image that shows the
    surface at the lower resolution. Swapping the images rotates the frame and changes nothing else.
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


class Pyramid:
    """An image at full, half, quarter … resolution, computed on first use."""

    def __init__(self, grey: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Grey values (H, W) of uint8, uint16 or float32, and (H, W) bool, True where they may be used."""
        self._grey = grey
        self._levels: list[np.ndarray] = []
        self.mask = None if mask is None else mask.astype(np.uint8)
        self.shape = grey.shape

    def release(self) -> None:
        """Free the memory of all levels; they are computed again when they are needed."""
        self._levels = []

    @property
    def in_memory(self) -> bool:
        """Whether any level is."""
        return bool(self._levels)

    def level(self, index: int) -> np.ndarray:
        """The image at 2^-index times the size; its pixel (x, y) is at (x, y) · 2^index of level 0."""
        if not self._levels:
            values = np.ascontiguousarray(self._grey, dtype=np.float32)
            self._levels = [values / np.float32(257) if self._grey.dtype == np.uint16 else values]
        while len(self._levels) <= index:
            self._levels.append(cv2.pyrDown(self._levels[-1]))
        return self._levels[index]

    def level_of(self, maps: np.ndarray) -> np.ndarray:
        """(K,) the level whose pixel size is nearest to the scale of maps (K, 2, 2)."""
        most = max(0, int(np.log2(min(self.shape))) - 3)
        return np.rint(np.log2(zoom_of(maps).clip(1e-9))).clip(0, most).astype(np.int64)

    def sample(self, affine: np.ndarray, level: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32 values by bilinear interpolation; the edge is replicated beyond the image.

        Args:
            affine: (K, 2, 3), from (1, x, y) in the frame to pixels of level 0.
            level: (K,) to sample, from `level_of`.
            offsets: (3, n) of a grid.
        """
        affine = (affine * np.exp2(-level)[:, None, None]).astype(np.float32)
        first = int(level[0]) if len(level) else 0
        if (level == first).all():
            return cv2.remap(self.level(first), *_coordinates(affine, offsets), cv2.INTER_LINEAR, **_BORDER)
        found = np.empty((len(affine), offsets.shape[1]), np.float32)
        for index in np.unique(level).tolist():
            chosen = np.flatnonzero(level == index)
            coordinates = _coordinates(affine[chosen], offsets)
            found[chosen] = cv2.remap(self.level(index), *coordinates, cv2.INTER_LINEAR, **_BORDER)
        return found

    def usable(self, affine: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(K, n) float32: 1 for samples on the image and in its mask, else 0; arguments as in `sample`."""
        x, y = _coordinates(affine.astype(np.float32), offsets)
        height, width = self.shape
        found = (x >= 0) & (y >= 0) & (x <= width - 1) & (y <= height - 1)
        if self.mask is not None:
            found &= cv2.remap(self.mask, x, y, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT) > 0
        return found.astype(np.float32)

    def contains(self, affine: np.ndarray, half: float) -> np.ndarray:
        """(K,) bool: windows of half side `half` entirely inside the image; all False if there is a mask."""
        if self.mask is not None:
            return np.zeros(len(affine), dtype=bool)
        reach = np.abs(affine[:, :, 1:]).sum(axis=2) * half
        most = np.array([self.shape[1] - 1, self.shape[0] - 1])
        return ((affine[:, :, 0] >= reach) & (affine[:, :, 0] + reach <= most)).all(axis=1)


def _coordinates(affine: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return affine[:, 0] @ offsets, affine[:, 1] @ offsets


# --- least_squares: Least-squares matching: the affine warp under which a window of image 1 best fits one
# of image 0.

TOLERANCE = 0.02  # step length, in pixels of the frame, below which a match has converged
DEFORMATION = 0.05  # prior standard deviation of the entries of the affine map
ROBUST_SCALE = 2.0  # mean absolute residuals at which the Geman-McClure weight is a quarter
# Inflation of the variance of a shift, because neighbouring samples are correlated. Chosen so that half of
# the refined matches of warped training photos lie within the 50 % confidence ellipse.
VARIANCE_INFLATION = 3.0
MIN_RESIDUAL = 1e-3  # mean squared residual of windows of variance 1 that compression alone causes
# Gradient energy due to noise alone, as a share of the residual variance. It is 1/8 for white noise and less
# for interpolated images; chosen on warped training photos.
NOISE_ENERGY = 0.08
MAX_DAMPING = 1e3  # fixes a match along a direction in which the gradient is no more than noise
INITIAL_NOISE = 0.3  # share of the initial residual that is attributed to noise
_EPSILON = 1e-12
_MAX_SHARE = 1e9  # of noise in what is left of a structure tensor without it
_COMPACT_BELOW = 0.7  # converged matches leave the active set once the others are less than this share of it


class Windows(NamedTuple):
    """Where K windows lie in both images, as maps from a common intermediate frame."""

    pyramid0: Pyramid
    pyramid1: Pyramid
    affine0: np.ndarray  # (K, 2, 3) from (1, x, y) in the frame to pixels
    affine1: np.ndarray
    deviation: np.ndarray  # (K,) prior standard deviation of the shift along an axis, frame pixels

    def select(self, rows: slice) -> Windows:
        """Some of the windows."""
        return Windows(self.pyramid0, self.pyramid1, *(each[rows] for each in self[2:]))


class Fit(NamedTuple):
    """Least-squares estimates for K matches, in pixels of the intermediate frame."""

    change: np.ndarray  # (K, 6) shift x, y of the window in image 1 and its deformation xx, yx, xy, yy
    covariance: np.ndarray  # (K, 2, 2) of the shift
    correlation: np.ndarray  # (K,) robustly weighted correlation coefficient of the windows
    contrast: np.ndarray  # (K,) the smaller of both windows' standard deviations, grey values of 255
    last_step: np.ndarray  # (K,) length of the last change of the shift
    visible: np.ndarray  # (K,) share of the window inside both images and their masks


class _Illumination(NamedTuple):
    """Removes a linear illumination gradient by weighted least squares, and normalises to unit variance."""

    basis: np.ndarray  # (n, 3)
    weights: np.ndarray  # (n,) or (K, n), sum 1
    inverse: np.ndarray  # (3, 3) or (K, 3, 3), of the weighted basis

    @staticmethod
    def of(grid: Grid, weights: np.ndarray) -> _Illumination:
        basis = np.ascontiguousarray(grid.offsets.T) / np.array([1, grid.side / 2, grid.side / 2], np.float32)
        products = (basis[:, :, None] * basis[:, None]).reshape(len(basis), 9)
        return _Illumination(
            basis, weights, np.linalg.inv((weights @ products).reshape(*weights.shape[:-1], 3, 3))
        )

    def select(self, rows: np.ndarray) -> _Illumination:
        shared = self.weights.ndim == 1
        return self if shared else _Illumination(self.basis, self.weights[rows], self.inverse[rows])

    def moments(self, values: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """(K, c) weighted sums of values (K, n) times columns (n, c)."""
        if self.weights.ndim == 1:
            return values @ (self.weights[:, None] * columns)
        return (values * self.weights) @ columns

    def mean(self, values: np.ndarray) -> np.ndarray:
        """(K,) weighted means of values (K, n)."""
        if self.weights.ndim == 1:
            return values @ self.weights
        return np.einsum("kn,kn->k", values, self.weights)

    def normalised(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (K, n) without the gradient and of unit norm, and (K, 1) the norm that they had."""
        gradient = (self.moments(values, self.basis)[:, None] @ self.inverse)[:, 0]
        centred = values - gradient @ self.basis.T
        norm = np.sqrt(self.mean(centred * centred) + _EPSILON)[:, None]
        centred /= norm
        return centred, norm


class _Equations(NamedTuple):
    """Normal equations of K windows, linearised once."""

    illumination: _Illumination
    z: np.ndarray  # (K, n) normalised window of image 0
    dx: np.ndarray  # (K, n) derivatives
    dy: np.ndarray
    blur: np.ndarray  # (K, n) Laplacian, normalised: the effect of a little blur
    weakest: np.ndarray  # (K, 2) eigenvector of the least eigenvalue of the structure tensor
    damping: np.ndarray  # (K,) added along that direction, against the aperture problem
    inverse: np.ndarray  # (K, 6, 6)
    prior: np.ndarray  # (K, 6) diagonal of the prior's precision, scaled by the noise

    def select(self, rows: np.ndarray) -> _Equations:
        return _Equations(self.illumination.select(rows), *(each[rows] for each in self[1:]))

    def without_blur(self, residual: np.ndarray) -> np.ndarray:
        """Residuals (K, n) with their projection on a difference of blur removed, in place."""
        residual -= self.blur * self.illumination.mean(residual * self.blur)[:, None]
        return residual

    def step(self, values: np.ndarray, change: np.ndarray, linear: np.ndarray) -> np.ndarray:
        """(K, 6) Gauss-Newton step for windows (K, n) of image 1 that are `change` (K, 6) from their prior.

        The shift is limited to one pixel of the frame.
        """
        z, _ = self.illumination.normalised(values)
        residual = self.without_blur(np.subtract(self.z, z, out=z))
        sides = np.empty((len(values), 3, 2), np.float32)
        for axis, derivative in enumerate((self.dx, self.dy)):
            sides[:, :, axis] = self.illumination.moments(derivative * residual, linear)
        sides = sides.reshape(-1, 6) - self.prior * change
        along = self.damping * np.einsum("ki,ki->k", self.weakest, change[:, :2])
        sides[:, :2] -= along[:, None] * self.weakest
        step = (self.inverse @ sides[:, :, None])[:, :, 0]
        length = np.hypot(step[:, 0], step[:, 1])
        return step / np.maximum(length, 1)[:, None]


class Fitting:
    """Least-squares matching of K windows."""

    def __init__(self, windows: Windows, grid: Grid, change: np.ndarray) -> None:
        """`change` (K, 6), as in `Fit`, is both the initial value and the mean of the prior."""
        self.windows, self.grid, self.change = windows, grid, change.copy()
        self.expected = change
        self.linear = np.ascontiguousarray(grid.offsets.T)
        self.level0 = windows.pyramid0.level_of(windows.affine0[:, :, 1:])
        self.level1 = windows.pyramid1.level_of(windows.affine1[:, :, 1:])
        self.last_step = np.full(len(change), np.inf)
        illumination = _Illumination.of(grid, grid.weights)
        self.outer0 = windows.pyramid0.sample(windows.affine0, self.level0, grid.outer)
        z, norm = illumination.normalised(_inner(self.outer0, grid.side))
        z1, _ = illumination.normalised(self._sample1(grid.offsets))
        # The initial residual is mostly due to the error of the match, not to noise.
        self.equations = self._linearised(illumination, z, self.outer0 / norm, INITIAL_NOISE * (z - z1))

    def iterate(self, steps: int, tolerance: float = TOLERANCE) -> None:
        """Gauss-Newton steps, of each match until they are shorter than the tolerance."""
        rows, equations = np.arange(len(self.change)), self.equations
        moving = np.ones(len(rows), dtype=bool)
        for _ in range(steps):
            if not moving.any():
                break
            values = self._sample1(self.grid.offsets, rows)
            step = equations.step(values, self.change[rows] - self.expected[rows], self.linear)
            step[~moving] = 0  # so that a match does not depend on how long others take
            self.change[rows] += step
            length = np.hypot(step[:, 0], step[:, 1])
            self.last_step[rows[moving]] = length[moving]
            moving &= length > tolerance
            if moving.mean() < _COMPACT_BELOW:
                rows, equations, moving = rows[moving], equations.select(moving), moving[moving]

    def finish(self) -> Fit:
        """The estimates and their covariances; call `reweigh` at least once before."""
        equations, illumination = self.equations, self.equations.illumination
        z, norm = illumination.normalised(self._sample1(self.grid.offsets))
        correlation = illumination.mean(equations.z * z)
        residual = equations.without_blur(np.subtract(equations.z, z, out=z))
        weakest, inverse = equations.weakest, equations.inverse[:, :2, :2]
        variance = self._noise(residual)[:, None, None] * inverse
        # Share of the prior in the estimate along the weakest direction, 0 to 1.
        prior_share = equations.damping * np.einsum("ki,kij,kj->k", weakest, inverse, weakest)
        along = weakest[:, :, None] * weakest[:, None]
        variance += along * ((prior_share * self.windows.deviation) ** 2)[:, None, None]
        variance += (self.last_step**2)[:, None, None] * np.eye(2)
        contrast = np.minimum(self.norm0, norm)[:, 0]
        return Fit(self.change, variance, correlation, contrast, self.last_step, self.visible)

    def reweigh(self) -> None:
        """Update the robust weights from the residuals, and relinearise about both windows."""
        outer0, outer1 = self.outer0, self._sample1(self.grid.outer)
        illumination = self.equations.illumination
        inner0, inner1 = (_inner(outer, self.grid.side) for outer in (outer0, outer1))
        weights, self.visible = self._weights(
            np.abs(illumination.normalised(inner0)[0] - illumination.normalised(inner1)[0])
        )
        illumination = _Illumination.of(self.grid, weights)
        (z0, self.norm0), (z1, norm1) = (illumination.normalised(inner) for inner in (inner0, inner1))
        mean = 0.5 * (outer0 / self.norm0 + outer1 / norm1)
        self.equations = self._linearised(illumination, z0, mean, z0 - z1)

    def _affine1(self, rows: np.ndarray | slice) -> np.ndarray:
        """(k, 2, 3) current maps from the frame to pixels of image 1."""
        affine = self.windows.affine1[rows]
        moved = self.change[rows].reshape(-1, 3, 2).transpose(0, 2, 1).copy()
        moved[:, 0, 1] += 1
        moved[:, 1, 2] += 1
        found = affine[:, :, 1:] @ moved
        found[:, :, 0] += affine[:, :, 0]
        return found

    def _sample1(self, offsets: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        rows = slice(None) if rows is None else rows
        return self.windows.pyramid1.sample(self._affine1(rows), self.level1[rows], offsets)

    def _noise(self, residual: np.ndarray) -> np.ndarray:
        """(K,) factor from the inverse normal matrix to a covariance."""
        square = np.maximum(residual * residual @ self.grid.weights, MIN_RESIDUAL)
        return VARIANCE_INFLATION * square * np.square(self.grid.weights).sum()

    def _weights(self, residual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(K, n) weights from absolute residuals, 0 where not visible; (K,) visible share."""
        grid, windows, affine1 = self.grid, self.windows, self._affine1(slice(None))
        sides = ((windows.pyramid0, windows.affine0), (windows.pyramid1, affine1))
        partial = ~np.logical_and(*(pyramid.contains(affine, grid.side / 2) for pyramid, affine in sides))
        weights = np.tile(grid.weights, (len(residual), 1))
        if partial.any():
            weights[partial] *= np.multiply(
                *(pyramid.usable(a[partial], grid.offsets) for pyramid, a in sides)
            )
        visible = weights.sum(axis=1)
        mean = np.einsum("kn,kn->k", residual, weights) / np.maximum(visible, _EPSILON)
        scale = np.maximum(ROBUST_SCALE * 1.25 * mean, 0.05)[:, None]
        weights /= (1 + (residual / scale) ** 2) ** 2
        weights[visible < 0.1] = grid.weights  # these are rejected, but their equations must stay regular
        return weights / weights.sum(axis=1, keepdims=True), visible

    def _linearised(
        self, illumination: _Illumination, z: np.ndarray, outer: np.ndarray, residual: np.ndarray
    ) -> _Equations:
        """Normal equations of windows `z` (K, n): derivatives from `outer` (K, m), noise from `residual`."""
        dx, dy, blur = _derivatives(outer, self.grid.side)
        blur, _ = illumination.normalised(blur)
        residual = residual - blur * illumination.mean(residual * blur)[:, None]
        noise = self._noise(residual)
        prior = np.empty((len(z), 6), np.float32)
        prior[:, :2] = (noise / self.windows.deviation**2)[:, None]
        prior[:, 2:] = noise[:, None] / DEFORMATION**2
        matrix = _normal_matrix(illumination, dx, dy, blur, self.linear)
        weakest, damping = _weakest_direction(
            matrix[:, :2, :2], NOISE_ENERGY * (residual * residual @ self.grid.weights)
        )
        # In float32 the huge equations of a window without contrast would swallow the prior, and be singular.
        matrix = matrix.astype(np.float64)
        matrix[:, range(6), range(6)] += prior
        matrix[:, :2, :2] += damping[:, None, None] * weakest[:, :, None] * weakest[:, None]
        inverse = np.linalg.inv(matrix).astype(np.float32)
        return _Equations(illumination, z, dx, dy, blur, weakest, damping, inverse, prior)


def _inner(outer: np.ndarray, side: int) -> np.ndarray:
    """Values (K, n) of windows without their margin."""
    return np.ascontiguousarray(outer.reshape(-1, side + 2, side + 2)[:, 1:-1, 1:-1]).reshape(len(outer), -1)


def _derivatives(outer: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(K, n) derivatives along x and y, by central differences, and the Laplacian."""
    square = outer.reshape(-1, side + 2, side + 2)
    left, right, above, below = (
        square[:, 1:-1, :-2],
        square[:, 1:-1, 2:],
        square[:, :-2, 1:-1],
        square[:, 2:, 1:-1],
    )
    found = (
        0.5 * (right - left),
        0.5 * (below - above),
        left + right + above + below - 4 * square[:, 1:-1, 1:-1],
    )
    return tuple(each.reshape(len(outer), -1) for each in found)


def _weakest_direction(matrix: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weakest eigenvectors (K, 2) of structure tensors (K, 2, 2), and (K,) the damping along them.

    `noise` (K,) is the eigenvalue that noise alone causes. Damping is negligible where the eigenvalue is many
    times that, equals the eigenvalue where it is twice that, and fixes the match where it is no more, as
    along an edge.
    """
    xx, xy, yy = matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 1]
    angle = 0.5 * np.arctan2(2 * xy, xx - yy) + np.pi / 2
    eigenvalue = 0.5 * (xx + yy) - np.hypot(0.5 * (xx - yy), xy)
    # Beyond the bound the match is fixed anyway; its square must not overflow in windows without contrast.
    share = np.minimum(noise / np.maximum(eigenvalue - noise, _EPSILON), _MAX_SHARE)
    damping = eigenvalue * share**2
    return np.stack([np.cos(angle), np.sin(angle)], axis=1), damping.clip(0, MAX_DAMPING)


def _normal_matrix(
    illumination: _Illumination, dx: np.ndarray, dy: np.ndarray, blur: np.ndarray, linear: np.ndarray
) -> np.ndarray:
    """(K, 6, 6) for derivatives times 1, x and y, x before y in each; illumination and blur eliminated."""
    count = len(dx)
    products = (linear[:, :, None] * linear[:, None]).reshape(len(linear), 9)
    cross_products = (linear[:, :, None] * illumination.basis[:, None]).reshape(len(linear), 9)
    xx, xy, yy = (illumination.moments(d, products).reshape(count, 3, 3) for d in (dx * dx, dx * dy, dy * dy))
    matrix, shading = np.empty((count, 6, 6), np.float32), np.empty((count, 6, 3), np.float32)
    blurred = np.empty((count, 6, 1), np.float32)
    matrix[:, 0::2, 0::2], matrix[:, 1::2, 1::2] = xx, yy
    matrix[:, 0::2, 1::2] = matrix[:, 1::2, 0::2] = xy  # symmetric blocks
    for axis, derivative in enumerate((dx, dy)):
        shading[:, axis::2] = illumination.moments(derivative, cross_products).reshape(count, 3, 3)
        blurred[:, axis::2, 0] = illumination.moments(derivative * blur, linear)
    matrix -= shading @ illumination.inverse @ shading.transpose(0, 2, 1)
    return matrix - blurred @ blurred.transpose(0, 2, 1)


# --- fitting: Least-squares fits of any number of windows: by the compiled kernel where it is there, else
# by NumPy.

FIRST_STEPS, STEPS = 3, 3  # Gauss-Newton steps before the first reweighting, and after each
_BLOCK = 256  # windows that NumPy fits together, so that they stay in a core's cache


def fit_windows(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit:
    """Fit K windows; `prior` (K, 6), as `Fit.change`, is both the initial value and the mean of the prior."""
    found = _compiled(windows, grid, prior, reweighings)
    return _by_numpy(windows, grid, prior, reweighings) if found is None else found


def _compiled(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit | None:
    settings = compiled.FitSettings(
        grid.side,
        FIRST_STEPS,
        STEPS,
        reweighings,
        DEFORMATION,
        ROBUST_SCALE,
        VARIANCE_INFLATION,
        MIN_RESIDUAL,
        NOISE_ENERGY,
        MAX_DAMPING,
        INITIAL_NOISE,
        TOLERANCE,
    )
    sides = (windows.pyramid0, windows.affine0), (windows.pyramid1, windows.affine1)
    views = [_view(*side) for side in sides]
    found = compiled.fit_windows(views, settings, grid.weights, windows.deviation, prior)
    return None if found is None else Fit(*found[:2], *found[2])


def _view(pyramid: Pyramid, affine: np.ndarray) -> compiled.WindowView:
    level = pyramid.level_of(affine[:, :, 1:])
    levels = [pyramid.level(index) for index in range(int(level.max(initial=0)) + 1)]
    return compiled.WindowView(levels, pyramid.mask, affine, level)


def _by_numpy(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit:
    """Blocks on as many threads as this process may use; NumPy and OpenCV release the interpreter lock."""

    def fit(block: slice) -> Fit:
        fitting = Fitting(windows.select(block), grid, prior[block])
        fitting.iterate(FIRST_STEPS)
        for _ in range(reweighings):
            fitting.reweigh()
            fitting.iterate(STEPS)
        return fitting.finish()

    blocks = [slice(i, i + _BLOCK) for i in range(0, len(prior), _BLOCK)]
    threads = min(compute_threads(), len(blocks), os.cpu_count() or 1)
    if threads < 2:
        fits = [fit(block) for block in blocks]
    else:
        with ThreadPoolExecutor(threads) as pool:
            fits = list(pool.map(fit, blocks))
    return Fit(*map(np.concatenate, zip(*fits, strict=True)))


# --- local_maps: The local affine map at every match, fitted to its nearest neighbours.

SCALES = (0.5, 0.2, 0.1)  # of the robust loss, one per iteration, as a share of the neighbourhood's radius
MIN_NEIGHBOURS = 3  # that determine a map
RIDGE = 1e-3
LEAST_RADIUS = 1e-3  # pixels, of matches that coincide
_KD_TREE = {"algorithm": 4}  # FLANN's exact search in one tree
MAX_ANISOTROPY, MAX_SCALE = 6.0, 10.0


def fit_affine_maps(
    points0: np.ndarray, points1: np.ndarray, neighbours: int
) -> tuple[np.ndarray, np.ndarray]:
    """Local affine maps from image 0 to image 1 at every match, under the robust loss of Geman and McClure.

    Args:
        points0, points1: (K, 2) matched points, finite.
        neighbours: number of nearest matches that a map is fitted to, the match itself excluded.

    Returns:
        (K, 2, 2) float64 maps and (K,) bool, whether the neighbours determine a plausible one: no reflection,
        no extreme scale or anisotropy. The others are the identity.
    """
    count = len(points0)
    if count <= MIN_NEIGHBOURS:
        return np.tile(np.eye(2), (count, 1, 1)), np.zeros(count, dtype=bool)
    # Neighbours come first, (n, K), so that sums over them run along the matches.
    nearest = np.ascontiguousarray(_nearest(points0, min(neighbours, count - 1)).T)
    offsets0, offsets1 = (
        [(side[nearest] - side).astype(np.float32) for side in points.T] for points in (points0, points1)
    )
    square = offsets0[0] ** 2 + offsets0[1] ** 2
    radius = np.sqrt(square.max(axis=0)).clip(LEAST_RADIUS)
    base = np.exp(-0.5 * (1.5 / radius) ** 2 * square)
    weights = base
    for scale in (*SCALES, None):
        maps, residual = _fit(offsets0, offsets1, weights, radius)
        if scale is not None:
            weights = base / (1 + residual / (scale * radius) ** 2) ** 2
    return _plausible(maps)


def _nearest(points: np.ndarray, wanted: int) -> np.ndarray:
    """(K, wanted) indices of the nearest other points, unordered."""
    tree = cv2.flann_Index(np.ascontiguousarray(points, dtype=np.float32), _KD_TREE)
    found, _ = tree.knnSearch(
        np.ascontiguousarray(points, dtype=np.float32), wanted + 1, params={"checks": -1}
    )
    own = found == np.arange(len(points))[:, None]
    own[~own.any(axis=1), -1] = True  # among coincident points the search may omit the point itself
    return found[~own].reshape(len(points), wanted)


def _fit(
    offsets0: list[np.ndarray], offsets1: list[np.ndarray], weights: np.ndarray, radius: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Maps (K, 2, 2) by weighted least squares with a translation, and squared residuals (n, K).

    Args:
        offsets0, offsets1: x and y (n, K) of the neighbours of each match, in image 0 and in image 1.
        weights: (n, K).
        radius: (K,) of the neighbourhood.
    """
    share = weights / weights.sum(axis=0)
    x, y = (offset - (share * offset).sum(axis=0) for offset in offsets0)
    share_x, share_y, ridge = share * x, share * y, RIDGE * radius**2
    xx, xy, yy = (
        (share_x * x).sum(axis=0) + ridge,
        (share_x * y).sum(axis=0),
        (share_y * y).sum(axis=0) + ridge,
    )
    determinant = xx * yy - xy * xy
    maps, residual = np.empty((len(radius), 2, 2)), 0.0
    for k, offset in enumerate(offsets1):
        t = offset - (share * offset).sum(axis=0)
        xt, yt = (share_x * t).sum(axis=0), (share_y * t).sum(axis=0)
        along_x, along_y = (xt * yy - yt * xy) / determinant, (yt * xx - xt * xy) / determinant
        residual = residual + (t - along_x * x - along_y * y) ** 2
        maps[:, k, 0], maps[:, k, 1] = along_x, along_y
    return maps, residual


def _plausible(maps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The maps, with implausible ones replaced by the identity, and (K,) bool, which are plausible."""
    determinant = np.linalg.det(maps)
    size = (maps**2).sum(axis=(1, 2)) / 2
    # For singular values a ≥ b: size / determinant = (a / b + b / a) / 2.
    plausible = (determinant > MAX_SCALE**-2) & (determinant < MAX_SCALE**2)
    plausible &= size < determinant * (MAX_ANISOTROPY + 1 / MAX_ANISOTROPY) / 2
    return np.where(plausible[:, None, None], maps, np.eye(2)), plausible


# --- refinement: The stage between matching and verification: subpixel refinement of every match on the
# images.

DEVIATION = 1.0  # prior standard deviation of a match along an axis, in pixels of the resized images
MAX_LAST_STEP = 0.25  # pixels of the frame; after a longer last step a match has not converged
MIN_CONTRAST = 1.0  # grey values of 255; below it there is only compression and noise
MIN_VISIBLE = 0.5  # share of a window that must be inside both images
MAX_HALVINGS = 4


class ImagePyramid(NamedTuple):
    """The pyramid of an image, at the file's resolution where that is available."""

    pyramid: Pyramid
    linear: np.ndarray  # (2, 2) pixels of the pyramid from stored pixels
    offset: np.ndarray  # (2,)
    zoom: float  # pixels of the pyramid per pixel of the resized image, in which keypoints were found

    @staticmethod
    def of(image: Image) -> ImagePyramid:
        """The pyramid of `Image.stored` if it was kept, else of the resized pixels."""
        if image.stored is not None:
            zoom = 1 / float(np.sqrt(image.scale[0] * image.scale[1]))
            pyramid = Pyramid(image.stored, image.stored_mask)
            return ImagePyramid(pyramid, np.eye(2), np.zeros(2), zoom)
        linear = np.linalg.inv(image.axes_to_stored)
        return ImagePyramid(
            Pyramid(image.grey(), image.mask), linear, -linear @ image.to_stored(np.zeros(2)), 1.0
        )

    def release(self) -> None:
        """Free memory that can be computed again."""
        self.pyramid.release()

    def from_stored(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → float64 pixels of the pyramid."""
        return points.astype(np.float64) @ self.linear.T + self.offset


def refine_matches(
    image0: ImagePyramid,
    image1: ImagePyramid,
    matches: Matches,
    config: RefineConfig,
    maps: tuple[np.ndarray, np.ndarray] | None = None,
) -> Matches:
    """The matches with their points of image 1 refined by least-squares matching against image 0.

    The windows around a match, related at first by the affine map fitted to its neighbours, are aligned by
    least squares (Gruen 1985); see `matcher.refine`. Points of image 0 stay. A match that is
    not accepted, for whatever reason, keeps its position: correct matches between different sensors, whose
    windows do not correlate, are unchanged.

    Args:
        image0, image1: the pyramids of both images.
        matches: from any matcher.
        config: window size and acceptance thresholds.
        maps: (K, 2, 2) local affine maps, image 1 from image 0, and (K,) whether each is known; None fits
            them to the matches.

    Returns:
        The same matches with `refinement`: its covariances are pixels² of the stored image 1.
    """
    if not len(matches):
        none = np.zeros(0, np.float32)
        nothing = MatchRefinement(none.astype(np.uint8), np.zeros((0, 2, 2), np.float32), none)
        return replace(matches, refinement=nothing)
    points0, points1 = image0.from_stored(matches.points0), image1.from_stored(matches.points1)
    usable = np.isfinite(points0).all(axis=1) & np.isfinite(points1).all(axis=1)
    points0[~usable], points1[~usable] = 0.0, 0.0
    maps, known = _maps(points0, points1, usable, config) if maps is None else maps
    frames = middle_frames(maps)
    deviation = _deviation(image0, image1, *frames)
    sides = (_affine(*side) for side in zip((points0, points1), frames, strict=True))
    found, status = _coarse_to_fine(image0.pyramid, image1.pyramid, *sides, deviation, config)
    status[~known] = REFINEMENTS.index("no_map")
    status[~usable] = REFINEMENTS.index("outside")
    return _moved(matches, found, status, np.linalg.inv(image1.linear) @ frames[1], deviation)


def _affine(points: np.ndarray, maps: np.ndarray) -> np.ndarray:
    return np.concatenate([points[:, :, None], maps], axis=2)


def _maps(
    points0: np.ndarray, points1: np.ndarray, usable: np.ndarray, config: RefineConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Local affine maps (K, 2, 2) at the matches and whether each is known."""
    maps, known = np.tile(np.eye(2), (len(points0), 1, 1)), np.zeros(len(points0), dtype=bool)
    maps[usable], known[usable] = fit_affine_maps(points0[usable], points1[usable], config.neighbours)
    return maps, known


def _deviation(
    image0: ImagePyramid, image1: ImagePyramid, frame0: np.ndarray, frame1: np.ndarray
) -> np.ndarray:
    """(K,) prior standard deviation along an axis, in frame pixels; both keypoints are uncertain."""
    sides = ((image0, frame0), (image1, frame1))
    return DEVIATION * np.sqrt(sum((image.zoom / zoom_of(frame)) ** 2 for image, frame in sides) / 2)


def _coarse_to_fine(
    pyramid0: Pyramid,
    pyramid1: Pyramid,
    affine0: np.ndarray,
    affine1: np.ndarray,
    deviation: np.ndarray,
    config: RefineConfig,
) -> tuple[Fit, np.ndarray]:
    """Coarse to fine, from the resolution at which keypoints were found to the images' own; (K,) statuses.

    The estimate of one level is the prior of the next. A match that a level rejects keeps that of the level
    before.
    """
    grid, prior, spread = Grid.of(config.window), np.zeros((len(affine0), 6)), deviation
    halvings = min(int(np.rint(np.log2(np.median(deviation).clip(1)))), MAX_HALVINGS)
    best, status = None, None
    for level in range(halvings, -1, -1):
        step = 2.0**level
        wide, unit = np.array([1, step, step]), np.array([step, step, 1, 1, 1, 1])
        windows = Windows(pyramid0, pyramid1, affine0 * wide, affine1 * wide, spread / step)
        found = fit_windows(windows, grid, prior / unit, config.reweighings)
        found = found._replace(change=found.change * unit, covariance=found.covariance * step**2)
        now = _statuses(found, deviation, config)
        if best is not None:
            kept = np.flatnonzero((now > 0) & (status == 0))
            now[kept] = 0
            for ours, theirs in zip(found, best, strict=True):
                ours[kept] = theirs[kept]
        best, status = found, now
        prior = np.where(status[:, None] == 0, best.change, 0)
        known = np.sqrt(np.linalg.eigvalsh(best.covariance)[:, 1].clip(0)).clip(step / 2, deviation)
        spread = np.where(status == 0, known, deviation)
    return best, status


def _statuses(found: Fit, deviation: np.ndarray, config: RefineConfig) -> np.ndarray:
    """(K,) uint8 codes of `REFINEMENTS`; the first reason for rejection that applies."""
    shift = np.hypot(found.change[:, 0], found.change[:, 1])
    rejections = [
        ("outside", found.visible < MIN_VISIBLE),
        ("flat", ~(found.contrast >= MIN_CONTRAST)),
        ("moved_far", ~(shift <= config.max_shift * deviation)),
        ("low_correlation", ~(found.correlation >= config.min_correlation)),
        ("not_converged", ~(found.last_step <= MAX_LAST_STEP)),
    ]
    status = np.full(len(shift), REFINEMENTS.index("refined"), dtype=np.uint8)
    for name, rejected in reversed(rejections):
        status[rejected] = REFINEMENTS.index(name)
    return status


def _moved(
    matches: Matches, found: Fit, status: np.ndarray, to_stored: np.ndarray, deviation: np.ndarray
) -> Matches:
    accepted = status == REFINEMENTS.index("refined")
    shift = (to_stored @ found.change[:, :2, None])[:, :, 0]
    spread = np.where(accepted[:, None, None], found.covariance, (deviation**2)[:, None, None] * np.eye(2))
    points1 = matches.points1.astype(np.float32)
    points1[accepted] = (matches.points1[accepted] + shift[accepted]).astype(np.float32)
    covariances = (to_stored @ spread @ to_stored.transpose(0, 2, 1)).astype(np.float32)
    correlations = np.nan_to_num(found.correlation).astype(np.float32)
    return replace(matches, points1=points1, refinement=MatchRefinement(status, covariances, correlations))


# --- image_pair: Refinement of the matches of two images: on grey values, or on gradients where those do
# not correlate.

FEW = 0.3  # share of the matches; with half, rooms seen from far apart lose a little
SMOOTHING = 1.0  # pixels; chosen like that of the pass on gradients, .7 and 1.4 being level


def refine_image_pair(image0: Image, image1: Image, matches: Matches, config: RefineConfig) -> Matches:
    """The matches refined on grey values and, where few of them were, the others on gradient magnitudes.

    Infrared and visible light, or day and night, agree about where edges are, not about which side of them
    is the brighter one.

    Args:
        image0, image1: at the file's resolution where that was kept; gradients are those of the resized ones.
        matches: from any matcher.
        config: window size and acceptance thresholds.
    """
    refined = refine_matches(ImagePyramid.of(image0), ImagePyramid.of(image1), matches, config)
    before = refined.refinement
    if not len(refined) or before.accepted.mean() >= FEW:
        return refined
    sides = (ImagePyramid.of(gradient_image(image, SMOOTHING)) for image in (image0, image1))
    again = refine_matches(*sides, refined, config)
    moved = np.flatnonzero(~before.accepted & again.refinement.accepted)
    points1 = refined.points1.copy()
    points1[moved] = again.points1[moved]
    chosen = {name: values.copy() for name, values in vars(before).items()}
    for name, values in chosen.items():
        values[moved] = getattr(again.refinement, name)[moved]
    return replace(refined, points1=points1, refinement=MatchRefinement(**chosen))
