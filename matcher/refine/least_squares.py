"""Least-squares matching of windows: where in image 1 does a window look as it does in image 0?

The window of image 1 is shifted and deformed until the weighted squares of the differences are least, both
windows taken without a linear gradient of light and at the same contrast (Gruen 1985, "Adaptive least squares
correlation"). Derivatives are the mean of both windows' (Benhimane and Malis 2004), so the images are treated
alike. Shift and deformation have priors: the uncertainty of the match, and what neighbouring matches leave
open of the affine map. So along an edge a match stays where it was, and its covariance says so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matcher.refine.windows import Grid, Pyramid

TOLERANCE = 0.02  # the step, in pixels of the frame, after which a match is at rest
_DEFORMATION = 0.05  # deviation of the affine maps' entries
_ROBUST = 2.0  # times the mean residual at which Geman and McClure's weight has fallen to a quarter
# Variance of a shift over that of independent samples: they are not. Chosen so that half of the refined
# matches of warped training photos lie within the ellipse that should hold half of them.
_NOISE = 3.0
_LEAST_RESIDUAL = 1e-3  # mean square of the difference of windows of variance 1; compression leaves as much
# Of the residual's variance: energy of derivatives that noise alone makes. Of white noise it is 1/8, less
# where the images are interpolated; chosen on warped training photos.
_BLIND = 0.08
_STIFFEST = 1e3  # holds a match where a window shows no more than that
_AT_START = 0.3  # share of the first difference of the windows that is taken for noise
_DARK = 1e-12
_WORTH_LEAVING = 0.7  # share of matches still moving below which those at rest are taken out


class Windows(NamedTuple):
    """Where K windows lie in both images, from one frame between them."""

    pyramid0: Pyramid
    pyramid1: Pyramid
    affine0: np.ndarray  # (K, 2, 3) from 1, x and y of a place in the frame to pixels
    affine1: np.ndarray
    deviation: np.ndarray  # (K,) of the place that is expected, along an axis, in steps of the frame


class Fit(NamedTuple):
    """What least squares say of K matches, in steps of the frame between the images."""

    change: np.ndarray  # (K, 6) shift x, y of the window in image 1 and its deformation xx, yx, xy, yy
    covariance: np.ndarray  # (K, 2, 2) of the shift
    correlation: np.ndarray  # (K,) of the two windows, robustly weighted
    contrast: np.ndarray  # (K,) the smaller of both windows' standard deviations, grey values of 255
    last_step: np.ndarray  # (K,) length of the last change of the shift
    seen: np.ndarray  # (K,) share of the window that is on both images and in their masks


class _Light(NamedTuple):
    """Removes a linear gradient of light under weights, and brings the rest to norm 1."""

    basis: np.ndarray  # (n, 3)
    weights: np.ndarray  # (n,) or (K, n), sum 1
    inverse: np.ndarray  # (3, 3) or (K, 3, 3), of the weighted basis

    @staticmethod
    def of(grid: Grid, weights: np.ndarray) -> _Light:
        basis = np.ascontiguousarray(grid.places.T) / np.array([1, grid.side / 2, grid.side / 2], np.float32)
        products = (basis[:, :, None] * basis[:, None]).reshape(len(basis), 9)
        return _Light(basis, weights, np.linalg.inv((weights @ products).reshape(*weights.shape[:-1], 3, 3)))

    def chosen(self, rows: np.ndarray) -> _Light:
        shared = self.weights.ndim == 1
        return self if shared else _Light(self.basis, self.weights[rows], self.inverse[rows])

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
        """Values (K, n) without the gradient and of norm 1, and (K, 1) their norm."""
        gradient = (self.moments(values, self.basis)[:, None] @ self.inverse)[:, 0]
        rest = values - gradient @ self.basis.T
        norm = np.sqrt(self.mean(rest * rest) + _DARK)[:, None]
        rest /= norm
        return rest, norm


class _Equations(NamedTuple):
    """Normal equations of K windows, linearised once."""

    light: _Light
    z: np.ndarray  # (K, n) normalised window of image 0
    dx: np.ndarray  # (K, n) derivatives
    dy: np.ndarray
    blur: np.ndarray  # (K, n) what blur takes from the windows, of norm 1
    blind: np.ndarray  # (K, 2) direction in which the window shows least
    stiff: np.ndarray  # (K,) what a step along it costs
    inverse: np.ndarray  # (K, 6, 6)
    prior: np.ndarray  # (K, 6) what a deviation from the match as it was costs

    def chosen(self, rows: np.ndarray) -> _Equations:
        return _Equations(self.light.chosen(rows), *(each[rows] for each in self[1:]))

    def without_blur(self, rest: np.ndarray) -> np.ndarray:
        """Differences (K, n) of windows without what a different blur of the images explains."""
        rest -= self.blur * self.light.mean(rest * self.blur)[:, None]
        return rest

    def step(self, values: np.ndarray, change: np.ndarray, linear: np.ndarray) -> np.ndarray:
        """(K, 6) the next step for windows (K, n) of image 1 that lie `change` (K, 6) from what is expected.

        No longer than a pixel of the frame.
        """
        z, _ = self.light.normalised(values)
        rest = self.without_blur(np.subtract(self.z, z, out=z))
        sides = np.empty((len(values), 3, 2), np.float32)
        for axis, derivative in enumerate((self.dx, self.dy)):
            sides[:, :, axis] = self.light.moments(derivative * rest, linear)
        sides = sides.reshape(-1, 6) - self.prior * change
        along = self.stiff * np.einsum("ki,ki->k", self.blind, change[:, :2])
        sides[:, :2] -= along[:, None] * self.blind
        step = (self.inverse @ sides[:, :, None])[:, :, 0]
        length = np.hypot(step[:, 0], step[:, 1])
        return step / np.maximum(length, 1)[:, None]


class Fitting:
    """Least-squares matching of K windows."""

    def __init__(self, windows: Windows, grid: Grid, change: np.ndarray) -> None:
        """`change` (K, 6), as of `Fit`, is where to start and what is expected."""
        self.windows, self.grid, self.change = windows, grid, change.copy()
        self.expected = change
        self.linear = np.ascontiguousarray(grid.places.T)
        self.level0 = windows.pyramid0.level_of(windows.affine0[:, :, 1:])
        self.level1 = windows.pyramid1.level_of(windows.affine1[:, :, 1:])
        self.last_step = np.full(len(change), np.inf)
        light = _Light.of(grid, grid.weights)
        self.outer0 = windows.pyramid0.sample(windows.affine0, self.level0, grid.outer)
        z, norm = light.normalised(_inner(self.outer0, grid.side))
        here, _ = light.normalised(self._sample1(grid.places))
        # At the start the difference is mostly the error of the match, which is no noise.
        self.equations = self._linearised(light, z, self.outer0 / norm, _AT_START * (z - here))

    def iterate(self, steps: int, tolerance: float = TOLERANCE) -> None:
        """Gauss and Newton's steps, until they are shorter than the tolerance."""
        rows, equations = np.arange(len(self.change)), self.equations
        for _ in range(steps):
            if not len(rows):
                break
            values = self._sample1(self.grid.places, rows)
            step = equations.step(values, self.change[rows] - self.expected[rows], self.linear)
            self.change[rows] += step
            length = np.hypot(step[:, 0], step[:, 1])
            self.last_step[rows] = length
            moving = length > tolerance
            if moving.mean() < _WORTH_LEAVING:
                rows, equations = rows[moving], equations.chosen(moving)

    def finish(self) -> Fit:
        """What is known of the matches where the windows lie now, after at least one `reweigh`."""
        equations, light = self.equations, self.equations.light
        z, norm = light.normalised(self._sample1(self.grid.places))
        correlation = light.mean(equations.z * z)
        rest = equations.without_blur(np.subtract(equations.z, z, out=z))
        blind, inverse = equations.blind, equations.inverse[:, :2, :2]
        variance = self._noise(rest)[:, None, None] * inverse
        held = equations.stiff * np.einsum("ki,kij,kj->k", blind, inverse, blind)  # share of a shift, to 1
        along = blind[:, :, None] * blind[:, None]
        variance += along * ((held * self.windows.deviation) ** 2)[:, None, None]
        variance += (self.last_step**2)[:, None, None] * np.eye(2)
        contrast = np.minimum(self.norm0, norm)[:, 0]
        return Fit(self.change, variance, correlation, contrast, self.last_step, self.seen)

    def reweigh(self) -> None:
        """Set robust weights by what is left, and linearise by the derivatives of both windows."""
        outer0, outer1, light = self.outer0, self._sample1(self.grid.outer), self.equations.light
        inner0, inner1 = (_inner(outer, self.grid.side) for outer in (outer0, outer1))
        weights, self.seen = self._weights(np.abs(light.normalised(inner0)[0] - light.normalised(inner1)[0]))
        light = _Light.of(self.grid, weights)
        (z0, self.norm0), (z1, norm1) = (light.normalised(inner) for inner in (inner0, inner1))
        mean = 0.5 * (outer0 / self.norm0 + outer1 / norm1)
        self.equations = self._linearised(light, z0, mean, z0 - z1)

    def _affine1(self, rows: np.ndarray | slice) -> np.ndarray:
        """(k, 2, 3) from places to pixels of image 1 as the windows lie now."""
        affine = self.windows.affine1[rows]
        moved = self.change[rows].reshape(-1, 3, 2).transpose(0, 2, 1).copy()
        moved[:, 0, 1] += 1
        moved[:, 1, 2] += 1
        found = affine[:, :, 1:] @ moved
        found[:, :, 0] += affine[:, :, 0]
        return found

    def _sample1(self, places: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        rows = slice(None) if rows is None else rows
        return self.windows.pyramid1.sample(self._affine1(rows), self.level1[rows], places)

    def _noise(self, rest: np.ndarray) -> np.ndarray:
        """(K,) variance of a shift for a unit of the normal equations' inverse."""
        square = np.maximum(rest * rest @ self.grid.weights, _LEAST_RESIDUAL)
        return _NOISE * square * np.square(self.grid.weights).sum()

    def _weights(self, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(K, n) weights by absolute residuals, 0 for what an image or mask hides; (K,) share seen."""
        grid, windows, affine1 = self.grid, self.windows, self._affine1(slice(None))
        sides = ((windows.pyramid0, windows.affine0), (windows.pyramid1, affine1))
        cut = ~np.logical_and(*(pyramid.holds(affine, grid.side / 2) for pyramid, affine in sides))
        weights = np.tile(grid.weights, (len(rest), 1))
        if cut.any():
            weights[cut] *= np.multiply(*(pyramid.usable(a[cut], grid.places) for pyramid, a in sides))
        seen = weights.sum(axis=1)
        mean = np.einsum("kn,kn->k", rest, weights) / np.maximum(seen, _DARK)
        scale = np.maximum(_ROBUST * 1.25 * mean, 0.05)[:, None]
        weights /= (1 + (rest / scale) ** 2) ** 2
        weights[seen < 0.1] = grid.weights  # these are refused; their equations must have a solution
        return weights / weights.sum(axis=1, keepdims=True), seen

    def _linearised(self, light: _Light, z: np.ndarray, outer: np.ndarray, rest: np.ndarray) -> _Equations:
        """Equations of windows `z` (K, n), their derivatives being those of `outer` (K, m), for `rest`."""
        dx, dy, blur = _derivatives(outer, self.grid.side)
        blur, _ = light.normalised(blur)
        rest = rest - blur * light.mean(rest * blur)[:, None]
        noise = self._noise(rest)
        prior = np.empty((len(z), 6), np.float32)
        prior[:, :2] = (noise / self.windows.deviation**2)[:, None]
        prior[:, 2:] = noise[:, None] / _DEFORMATION**2
        matrix = _normal_matrix(light, dx, dy, blur, self.linear)
        blind, stiff = _blind_direction(matrix[:, :2, :2], _BLIND * (rest * rest @ self.grid.weights))
        matrix[:, range(6), range(6)] += prior
        matrix[:, :2, :2] += stiff[:, None, None] * blind[:, :, None] * blind[:, None]
        return _Equations(light, z, dx, dy, blur, blind, stiff, np.linalg.inv(matrix), prior)


def _inner(outer: np.ndarray, side: int) -> np.ndarray:
    """Values (K, n) of windows without their margin."""
    return np.ascontiguousarray(outer.reshape(-1, side + 2, side + 2)[:, 1:-1, 1:-1]).reshape(len(outer), -1)


def _derivatives(outer: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(K, n) derivatives along x and y, by central differences, and the Laplacian, what blur takes away."""
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


def _blind_direction(matrix: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The direction (K, 2) in which windows of matrix (K, 2, 2) show least, and (K,) how stiff it is held.

    `noise` (K,) is what noise alone adds to the matrix. A direction with many times that is free, one with
    twice that is held by as much as it shows, and one with no more, as along an edge, is not left.
    """
    xx, xy, yy = matrix[:, 0, 0], matrix[:, 0, 1], matrix[:, 1, 1]
    angle = 0.5 * np.arctan2(2 * xy, xx - yy) + np.pi / 2
    shown = 0.5 * (xx + yy) - np.hypot(0.5 * (xx - yy), xy)
    stiff = shown * (noise / np.maximum(shown - noise, _DARK)) ** 2
    return np.stack([np.cos(angle), np.sin(angle)], axis=1), stiff.clip(0, _STIFFEST)


def _normal_matrix(
    light: _Light, dx: np.ndarray, dy: np.ndarray, blur: np.ndarray, linear: np.ndarray
) -> np.ndarray:
    """(K, 6, 6) for derivatives times 1, x and y, x before y in each; without what light and blur explain."""
    count = len(dx)
    products = (linear[:, :, None] * linear[:, None]).reshape(len(linear), 9)
    crossed = (linear[:, :, None] * light.basis[:, None]).reshape(len(linear), 9)
    xx, xy, yy = (light.moments(d, products).reshape(count, 3, 3) for d in (dx * dx, dx * dy, dy * dy))
    matrix, shading = np.empty((count, 6, 6), np.float32), np.empty((count, 6, 3), np.float32)
    blurred = np.empty((count, 6, 1), np.float32)
    matrix[:, 0::2, 0::2], matrix[:, 1::2, 1::2] = xx, yy
    matrix[:, 0::2, 1::2] = matrix[:, 1::2, 0::2] = xy  # symmetric blocks
    for axis, derivative in enumerate((dx, dy)):
        shading[:, axis::2] = light.moments(derivative, crossed).reshape(count, 3, 3)
        blurred[:, axis::2, 0] = light.moments(derivative * blur, linear)
    matrix -= shading @ light.inverse @ shading.transpose(0, 2, 1)
    return matrix - blurred @ blurred.transpose(0, 2, 1)
