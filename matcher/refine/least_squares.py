"""Least-squares matching: the affine warp under which a window of image 1 best fits one of image 0.

Shift and affine deformation of the window in image 1 minimise the weighted sum of squared differences, after
a linear illumination gradient is removed from both windows and their contrast is normalised (Gruen 1985,
"Adaptive least squares correlation"). The derivatives are the mean of those of both windows (Benhimane and
Malis 2004), so neither image is preferred. Shift and deformation have Gaussian priors: the uncertainty of the
match, and that of the affine map fitted to its neighbours. Along an edge (the aperture problem) a match
therefore stays at its prior, and its covariance says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matcher.refine.windows import Grid, Pyramid

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
