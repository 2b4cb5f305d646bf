"""Least-squares matching of windows as ONNX operations: the same as `matcher.refine`.

Changes of a window, and the unknowns of its equations, are (K, 2, 3) here: shift, and deformation along x and
along y, of the window's x and then of its y.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from matcher import refine as numbers
from matcher.onnx.builder import Builder, Value
from matcher.onnx.matrices import Square, inverse_of_3, inverse_of_6, on_diagonal, on_shift, weakest_direction
from matcher.onnx.pyramid import PyramidValues
from matcher.refine import FIRST_STEPS, STEPS, Grid

_EPSILON = 1e-12
_KEPT = ((0, 1, 0), (0, 0, 1))  # no shift, no deformation


class ImageWindows(NamedTuple):
    """Where the windows lie in one image."""

    pyramid: PyramidValues
    affine: Value  # (K, 2, 3) from (1, x, y) in the frame to pixels
    level: Value  # (K,) int64 of the pyramid


class FitValues(NamedTuple):
    """As `matcher.refine.Fit`."""

    change: Value  # (K, 2, 3)
    covariance: Square
    correlation: Value
    contrast: Value  # of images from 0 to 1
    last_step: Value
    visible: Value


class _Light(NamedTuple):
    """Illumination: weights (1 or K, n) and (1 or K, 3, 3) the inverse of the weighted basis."""

    weights: Value
    inverse: Value


class _Equations(NamedTuple):
    light: _Light
    z: Value  # (K, n), as the next three
    dx: Value
    dy: Value
    blur: Value
    fixed: Square  # damping along the weakest direction
    damping: Value  # (K,)
    weakest: Square  # projection on that direction
    inverse: Value  # (K, 6, 6)
    prior: Value  # (K, 2, 3) precision, scaled by the noise


@dataclass(frozen=True)
class FitGraph:
    """Writes the fit of any number of windows."""

    graph: Builder
    grid: Grid
    reweighings: int

    def __call__(self, side0: ImageWindows, side1: ImageWindows, deviation: Value, prior: Value) -> FitValues:
        """The fits of K windows.

        Args:
            side0, side1: where the windows are.
            deviation: (K,) prior standard deviation of the shift along an axis, frame pixels.
            prior: (K, 2, 3) both the initial change and the mean of the prior.
        """
        g, weights = self.graph, self.graph.value(self.grid.weights[None])
        light = self._light(weights)
        outer0 = side0.pyramid.sample(side0.affine, side0.level, self.grid.outer)
        z, norm = self._normalised(light, self._inner(outer0))
        z1, _ = self._normalised(light, self._sample(side1, prior))
        # The initial residual is mostly due to the error of the match, not to noise.
        equations = self._linearised(light, z, outer0 / norm, (z - z1) * numbers.INITIAL_NOISE, deviation)
        last = g.full(g.size(prior, 0), float("inf"))
        change, last = self._iterated(side1, equations, prior, last, prior, FIRST_STEPS)
        for _ in range(self.reweighings):
            outer1 = side1.pyramid.sample(_moved(g, side1.affine, change), side1.level, self.grid.outer)
            inner0, inner1 = self._inner(outer0), self._inner(outer1)
            away = g.Abs(
                self._normalised(equations.light, inner0)[0] - self._normalised(equations.light, inner1)[0]
            )
            weights, visible = self._weights(away, side0, side1, change)
            light = self._light(weights)
            (z0, norm0), (z1, norm1) = (self._normalised(light, each) for each in (inner0, inner1))
            mean = (outer0 / norm0 + outer1 / norm1) * 0.5
            equations = self._linearised(light, z0, mean, z0 - z1, deviation)
            change, last = self._iterated(side1, equations, change, last, prior, STEPS)
        return self._finished(side1, equations, deviation, change, last, visible, norm0)

    def _iterated(
        self,
        side: ImageWindows,
        equations: _Equations,
        change: Value,
        last: Value,
        expected: Value,
        steps: int,
    ) -> tuple[Value, Value]:
        """Change and last step after Gauss-Newton steps, of each match until they are below the tolerance."""
        g = self.graph

        def step(number: Value, change: Value, last: Value, moving: Value):
            found = self._step(equations, self._sample(side, change), change - expected)
            shift = g.entry(found, 0, axis=2)
            length = g.Sqrt(g.total(shift * shift, 1))
            change = change + g.Where(g.Unsqueeze(moving, [1, 2]), found, 0.0)
            last = g.Where(moving, length, last)
            moving = moving & (length > numbers.TOLERANCE)
            return g.scalar(g.maximum(g.integer(moving), 0, keep=True)) > 0, [change, last, moving], []

        change, last, _ = g.loop(steps, [change, last, g.full(g.size(change, 0), True)], step)
        return change, last

    def _step(self, equations: _Equations, values: Value, away: Value) -> Value:
        """(K, 2, 3) step for windows (K, n) of image 1 that are `away` from their prior."""
        g, weights = self.graph, equations.light.weights
        z, _ = self._normalised(equations.light, values)
        residual = self._without_blur(equations.blur, weights, equations.z - z) * weights
        sides = [g.Unsqueeze((each * residual) @ self._linear, [1]) for each in (equations.dx, equations.dy)]
        sides = g.Concat(*sides, axis=1) - equations.prior * away
        fixed = g.total(equations.fixed.stacked() * g.Unsqueeze(g.entry(away, 0, axis=2), [1]), 2)
        sides = sides - g.Concat(g.Unsqueeze(fixed, [2]), g.Unsqueeze(fixed, [2]) * _nothing(2), axis=2)
        step = g.total(equations.inverse * g.Reshape(sides, [-1, 1, 6]), 2)
        step = g.Reshape(step, [-1, 2, 3])
        shift = g.entry(step, 0, axis=2)
        length = g.Sqrt(g.total(shift * shift, 1))
        return step / g.Unsqueeze(g.Max(length, 1.0), [1, 2])

    @property
    def _linear(self) -> np.ndarray:
        return np.ascontiguousarray(self.grid.offsets.T)

    @property
    def _basis(self) -> np.ndarray:
        return self._linear / np.array([1, self.grid.side / 2, self.grid.side / 2], np.float32)

    def _light(self, weights: Value) -> _Light:
        g, basis = self.graph, self._basis
        products = (basis[:, :, None] * basis[:, None]).reshape(len(basis), 9)
        moments = g.double(g.Reshape(weights @ products, [-1, 3, 3]))
        return _Light(weights, g.real(inverse_of_3(g, moments)))

    def _normalised(self, light: _Light, values: Value) -> tuple[Value, Value]:
        """Values (K, n) without a gradient of illumination and of unit norm, and (K, 1) the norm they had."""
        g = self.graph
        moments = g.Unsqueeze((values * light.weights) @ self._basis, [1])
        gradient = g.total(moments * light.inverse, 2)
        centred = values - gradient @ np.ascontiguousarray(self._basis.T)
        norm = g.Sqrt(g.total(centred * centred * light.weights, 1, keep=True) + _EPSILON)
        return centred / norm, norm

    def _without_blur(self, blur: Value, weights: Value, residual: Value) -> Value:
        """Residuals (K, n) without their projection on a difference of blur."""
        return residual - blur * self.graph.total(residual * blur * weights, 1, keep=True)

    def _sample(self, side: ImageWindows, change: Value) -> Value:
        return side.pyramid.sample(_moved(self.graph, side.affine, change), side.level, self.grid.offsets)

    def _inner(self, outer: Value) -> Value:
        g, side = self.graph, self.grid.side
        square = g.Reshape(outer, [-1, side + 2, side + 2])
        return g.Reshape(g.Slice(square, [1, 1], [side + 1] * 2, [1, 2]), [-1, side * side])

    def _noise(self, residual: Value) -> Value:
        """(K,) factor from the inverse normal matrix to a covariance."""
        share = numbers.VARIANCE_INFLATION * float(np.square(self.grid.weights).sum())
        return self.graph.Max(self._spread(residual), numbers.MIN_RESIDUAL) * share

    def _spread(self, residual: Value) -> Value:
        """(K,) mean square under the grid's own weights."""
        return self.graph.Squeeze((residual * residual) @ self.grid.weights[:, None], [1])

    def _weights(
        self, residual: Value, side0: ImageWindows, side1: ImageWindows, change: Value
    ) -> tuple[Value, Value]:
        """(K, n) weights from absolute residuals, 0 where not visible; (K,) visible share."""
        g, own = self.graph, self.grid.weights[None]
        sides = (side0.pyramid, side0.affine), (side1.pyramid, _moved(g, side1.affine, change))
        whole = [pyramid.contains(affine, self.grid.side / 2) for pyramid, affine in sides]
        partial = g.scalar(g.maximum(g.integer(~(whole[0] & whole[1])), 0, keep=True)) > 0

        def cut() -> list[Value]:
            first, second = (pyramid.usable(affine, self.grid.offsets) for pyramid, affine in sides)
            return [first * second * own]

        (weights,) = g.either(partial, cut, lambda: [g.Expand(own, g.Shape(residual))])
        visible = g.total(weights, 1, keep=True)
        mean = g.total(residual * weights, 1, keep=True) / g.Max(visible, _EPSILON)
        ratio = residual / g.Max(mean * (numbers.ROBUST_SCALE * 1.25), 0.05)
        robust = ratio * ratio + 1.0
        weights = g.Where(visible < 0.1, own, weights / (robust * robust))  # the equations must stay regular
        return weights / g.total(weights, 1, keep=True), g.Squeeze(visible, [1])

    def _linearised(
        self, light: _Light, z: Value, outer: Value, residual: Value, deviation: Value
    ) -> _Equations:
        """Normal equations of windows `z` (K, n): derivatives from `outer` (K, m), noise from `residual`."""
        g = self.graph
        dx, dy, blur = self._derivatives(outer)
        blur, _ = self._normalised(light, blur)
        residual = self._without_blur(blur, light.weights, residual)
        noise = g.Unsqueeze(self._noise(residual), [1, 2])
        spread = g.Unsqueeze(deviation, [1, 2])
        deformed = noise * np.full((1, 2, 2), numbers.DEFORMATION**-2, np.float32)
        prior = g.Concat(noise / (spread * spread) * _ones(2, 1), deformed, axis=2)
        matrix = self._normal_matrix(light, dx, dy, blur)
        flat = g.Reshape(matrix, [-1, 36])
        structure = [g.entry(flat, place, axis=1) for place in (0, 3, 18, 21)]
        weakest, damping = weakest_direction(
            Square(*structure), self._spread(residual) * numbers.NOISE_ENERGY
        )
        fixed = weakest.scaled(damping)
        flat = flat + g.Reshape(prior, [-1, 6]) @ on_diagonal()
        flat = flat + g.Reshape(fixed.stacked(), [-1, 4]) @ on_shift()
        inverse = inverse_of_6(g, g.Reshape(flat, [-1, 6, 6]))
        return _Equations(light, z, dx, dy, blur, fixed, damping, weakest, inverse, prior)

    def _derivatives(self, outer: Value) -> tuple[Value, Value, Value]:
        """(K, n) derivatives along x and y, by central differences, and the Laplacian."""
        g, side = self.graph, self.grid.side
        square = g.Reshape(outer, [-1, side + 2, side + 2])

        def part(y: int, x: int) -> Value:
            return g.Slice(square, [1 + y, 1 + x], [side + 1 + y, side + 1 + x], [1, 2])

        left, right, above, below = part(0, -1), part(0, 1), part(-1, 0), part(1, 0)
        found = (
            (right - left) * 0.5,
            (below - above) * 0.5,
            left + right + above + below - part(0, 0) * 4.0,
        )
        return tuple(g.Reshape(each, [-1, side * side]) for each in found)

    def _normal_matrix(self, light: _Light, dx: Value, dy: Value, blur: Value) -> Value:
        """(K, 6, 6) for derivatives times 1, x and y; illumination and blur eliminated."""
        g, linear, basis = self.graph, self._linear, self._basis
        products = (linear[:, :, None] * linear[:, None]).reshape(len(linear), 9)
        cross_products = (linear[:, :, None] * basis[:, None]).reshape(len(linear), 9)

        def block(values: Value, columns: np.ndarray) -> Value:
            return g.Reshape(values @ columns, [-1, 3, 3])

        heavy_x, heavy_y = dx * light.weights, dy * light.weights
        xx, xy, yy = (block(each, products) for each in (heavy_x * dx, heavy_x * dy, heavy_y * dy))
        matrix = g.Concat(g.Concat(xx, xy, axis=2), g.Concat(xy, yy, axis=2), axis=1)
        shading = g.Concat(block(heavy_x, cross_products), block(heavy_y, cross_products), axis=1)
        blurred = g.Concat((heavy_x * blur) @ linear, (heavy_y * blur) @ linear, axis=1)
        matrix = matrix - shading @ light.inverse @ g.Transpose(shading, perm=[0, 2, 1])
        return matrix - g.Unsqueeze(blurred, [2]) * g.Unsqueeze(blurred, [1])

    def _finished(
        self,
        side: ImageWindows,
        equations: _Equations,
        deviation: Value,
        change: Value,
        last: Value,
        visible: Value,
        norm0: Value,
    ) -> FitValues:
        g, weights = self.graph, equations.light.weights
        z, norm = self._normalised(equations.light, self._sample(side, change))
        correlation = g.total(equations.z * z * weights, 1)
        noise = self._noise(self._without_blur(equations.blur, weights, equations.z - z))
        flat = g.Reshape(equations.inverse, [-1, 36])
        inverse = Square(*(g.entry(flat, place, axis=1) for place in (0, 3, 18, 21)))
        along = equations.weakest
        # Share of the prior in the estimate along the weakest direction, 0 to 1.
        within = inverse.times(along)
        share = equations.damping * (within.a + within.d) * deviation
        share = share * share
        moved = last * last
        covariance = Square(
            noise * inverse.a + along.a * share + moved,
            noise * inverse.b + along.b * share,
            noise * inverse.c + along.c * share,
            noise * inverse.d + along.d * share + moved,
        )
        contrast = g.Squeeze(g.Min(norm0, norm), [1])
        return FitValues(change, covariance, correlation, contrast, last, visible)


def _moved(g: Builder, affine: Value, change: Value) -> Value:
    """(K, 2, 3) maps from the frame to pixels after a change of the window."""
    linear = g.slice(affine, 2, 1)
    still = g.Concat(g.slice(affine, 2, 0, 1), _nothing(2) * g.slice(affine, 2, 1), axis=2)
    return linear @ (change + np.array(_KEPT, np.float32)) + still


def _nothing(columns: int) -> np.ndarray:
    return np.zeros((1, 1, columns), np.float32)


def _ones(*shape: int) -> np.ndarray:
    return np.ones((1, *shape), np.float32)
