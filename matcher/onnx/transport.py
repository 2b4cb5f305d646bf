"""From scores with dustbins to log probabilities, as ONNX operations.

The same steps as `matcher.match.sinkhorn` and `matcher.match.sinkhorn`, for one pair.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from matcher.onnx.builder import Builder, Value

_SCALING_LIMIT = 1e12  # beyond it the scaling vectors are absorbed into the potentials
_LEAST_EXPONENT = -80.0
_LEAST_SUM = 1e-24
_NEVER = np.array([-1e30], np.float32)  # the potential of a dustbin, where points alone are asked for


class PotentialValues(NamedTuple):
    """log P = scores + u + v."""

    u: Value  # (N+1,)
    v: Value  # (M+1,)


class Masses(NamedTuple):
    """Of rows (N+1,) and columns (M+1,): 1 for a point, the other image's points for a dustbin."""

    rows: Value
    columns: Value


def masses(g: Builder, points0: Value, points1: Value) -> Masses:
    """The masses of a problem of (1,) points on either side."""
    return Masses(
        g.Concat(g.full(points0, 1.0), g.real(points1), axis=0),
        g.Concat(g.full(points1, 1.0), g.real(points0), axis=0),
    )


def beginning(g: Builder, scores: Value) -> PotentialValues:
    """Potentials with which every row's maximum is 0."""
    return PotentialValues(-g.maximum(scores, 1), g.full(g.size(scores, 1), 0.0))


def first_potentials(g: Builder, scores: Value) -> PotentialValues:
    """The same, or every column's where the columns are updated first (`_columns_first`)."""

    def turned() -> list[Value]:
        return [g.full(g.size(scores, 0), 0.0), -g.maximum(scores, 0)]

    return PotentialValues(*g.either(_columns_first(g, scores), turned, lambda: [*beginning(g, scores)]))


def sinkhorn(
    g: Builder,
    scores: Value,
    mass: Masses,
    start: PotentialValues,
    max_iterations: int,
    tolerance: float | None,
) -> PotentialValues:
    """Potentials of scores (N+1, M+1), N ≤ M with a tolerance, by stabilised scaling.

    Rows are updated first; with a tolerance and N = M, the side of lower dustbins.
    """

    def straight() -> list[Value]:
        return [*_rows_first(g, scores, mass, start, limits)]

    def turned() -> list[Value]:
        transposed, swapped = g.Transpose(scores, perm=[1, 0]), Masses(*mass[::-1])
        other = PotentialValues(*start[::-1])
        return [*_rows_first(g, transposed, swapped, other, limits)[::-1]]

    limits = (max_iterations, tolerance)
    if tolerance is None:
        return PotentialValues(*straight())
    return PotentialValues(*g.either(_columns_first(g, scores), turned, straight))


def _columns_first(g: Builder, scores: Value) -> Value:
    """() bool: as many columns as rows, and their dustbins are lower."""
    row, column = g.slice(scores, 0, -1), g.slice(scores, 1, -1)
    lower = g.total(g.slice(g.Squeeze(row, [0]), 0, 0, -1), 0)
    lower = lower < g.total(g.slice(g.Squeeze(column, [1]), 0, 0, -1), 0)
    return lower & g.scalar(g.Equal(g.size(scores, 0), g.size(scores, 1)))


def _rows_first(
    g: Builder, scores: Value, mass: Masses, start: PotentialValues, limits: tuple[int, float | None]
) -> PotentialValues:
    """`sinkhorn`, with iterations at most and tolerance, whose rows are updated first."""
    max_iterations, tolerance = limits

    def update(kernel: Value, columns: Value) -> list[Value]:
        rows = mass.rows / _product(g, kernel, columns)
        return [rows, mass.columns / _product(g, g.Unsqueeze(rows, [0]), kernel, row=True)]

    def scale(kernel: Value, a: Value, b: Value, count: Value) -> tuple[Value, ...]:
        """Updates until the rows are right, the limit is reached or the scales grow too large."""

        def step(_: Value, a: Value, b: Value, count: Value, __: Value, ___: Value):
            following = update(kernel, b)
            done = count >= max_iterations
            if tolerance is not None:
                # A row's next scale is its mass over its sum, so this is how much too large its sum is.
                met = row_error(g, a / following[0]) <= tolerance
                done = done | (met & (count > 0))
            a, b = (g.Where(done, *each) for each in zip((a, b), following, strict=True))
            safe = _within_limits(g, a, b)
            count = count + g.integer(~done)
            return ~done & safe, [a, b, count, done, safe], []

        return g.loop(None, [a, b, count, False, True], step)

    def absorbed(number: Value, u: Value, v: Value, a: Value, b: Value, count: Value):
        """Scaling on one kernel; where it left the range of float32, one update in the log domain."""
        a, b, count, done, safe = scale(_kernel(g, scores, u, v), a, b, count)

        def redo() -> list[Value]:
            high = v + g.Log(_finite(g, b))
            fresh_u = g.Log(mass.rows) - _log_sum(g, scores + g.Unsqueeze(high, [0]), 1)
            fresh_v = g.Log(mass.columns) - _log_sum(g, scores + g.Unsqueeze(fresh_u, [1]), 0)
            return [fresh_u, fresh_v, *ones]

        kept = g.either(safe, lambda: [u, v, a, b], redo)
        return ~(done & safe), [*kept, count], []

    ones = [g.full(g.Shape(each), 1.0) for each in mass]
    u, v, a, b, _ = g.loop(None, [*start, *ones, 0], absorbed)
    return PotentialValues(u + g.Log(a), v + g.Log(b))


def row_error(g: Builder, ratios: Value) -> Value:
    """() error of rows, from ratios (N+1,) of sums to masses: relative, as a vector, or the dustbin's."""
    errors = g.Abs(ratios - 1.0)
    points = g.slice(errors, 0, 0, -1)
    norm = g.Sqrt(g.ReduceMean(points * points, [0], keepdims=0))
    return g.Max(norm, g.Squeeze(g.slice(errors, 0, -1), [0]))


def dual_softmax(g: Builder, similarity: Value, logit0: Value, logit1: Value) -> Value:
    """(N, M) log of row softmax × column softmax × matchabilities (LightGlue, eq. 8)."""
    tops = g.maximum(similarity, 1, keep=True)
    weights = g.Exp(g.Max(similarity - tops, _LEAST_EXPONENT))
    rows = g.Log(g.total(weights, 1, keep=True)) + tops
    highest = g.maximum(tops, 0, keep=True)
    sums = g.MatMul(g.Transpose(g.Exp(tops - highest), perm=[1, 0]), weights)
    least = g.ReduceMin(sums, [0, 1], keepdims=0)
    (columns,) = g.either(
        least > _LEAST_SUM,
        lambda: [g.Log(sums) + highest],
        lambda: [g.Unsqueeze(_log_sum(g, similarity, 0), [0])],
    )
    gain0 = g.Unsqueeze(log_sigmoid(g, logit0), [1]) - rows
    gain1 = g.Unsqueeze(log_sigmoid(g, logit1), [0]) - columns
    return similarity * 2.0 + gain0 + gain1


def log_sigmoid(g: Builder, x: Value) -> Value:
    """log(1 / (1 + e⁻ˣ))."""
    return -g.Softplus(-x)


def raised(g: Builder, scores: Value, found: PotentialValues) -> Value:
    """Log probabilities (N+1, M+1) from scores with dustbins, whose row and column come out far below all."""
    # Cutting the dustbins off would copy the matrix.
    u, v = (g.Concat(g.slice(each, 0, 0, -1), _NEVER, axis=0) for each in (found.u, found.v))
    return scores + g.Unsqueeze(u, [1]) + g.Unsqueeze(v, [0])


def _kernel(g: Builder, scores: Value, u: Value, v: Value) -> Value:
    return g.Exp(g.Max(scores + g.Unsqueeze(u, [1]) + g.Unsqueeze(v, [0]), _LEAST_EXPONENT))


def _product(g: Builder, left: Value, right: Value, *, row: bool = False) -> Value:
    """A matrix times a vector, or (`row`) a row times a matrix, as a vector."""
    if row:
        return g.Squeeze(left @ right, [0])
    return g.Squeeze(left @ g.Unsqueeze(right, [1]), [1])


def _within_limits(g: Builder, a: Value, b: Value) -> Value:
    """() bool: float32 holds what becomes of these scales in a few more updates; not so for no numbers."""
    both = g.Concat(a, b, axis=0)
    low, high = (reduce(both, [0], keepdims=0) for reduce in (g.ReduceMin, g.ReduceMax))
    return (low > 1 / _SCALING_LIMIT) & (high < _SCALING_LIMIT) & ~g.IsNaN(g.ReduceSum(both, [0], keepdims=0))


def _finite(g: Builder, scales: Value) -> Value:
    """Scales within the limits; what is no number becomes 1."""
    one = np.float32(1.0)
    return g.Where(g.IsNaN(scales), one, g.Min(g.Max(scales, 1 / _SCALING_LIMIT), _SCALING_LIMIT))


def _log_sum(g: Builder, x: Value, axis: int) -> Value:
    top = g.maximum(x, axis, keep=True)
    return g.Log(g.total(g.Exp(x - top), axis)) + g.Squeeze(top, [axis])
