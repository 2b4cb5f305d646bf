"""Consensus rounds as ONNX operations: the same steps as `matcher.match.consensus`, for one pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from matcher.onnx.builder import Builder, Value
from matcher.onnx.layers import Arrays
from matcher.onnx.reading import best_of_both
from matcher.onnx.transport import Masses, PotentialValues, raised, sinkhorn

NEIGHBOURS = 16
SCALES = (0.2, 0.08, 0.03, 0.015)  # of residuals, one per pass, in units of normalised positions
_LEAST_CONFIDENCE = 0.05
_SETTLED = 0.85  # share of the matches that a round left unchanged, which makes it the last
_ROUGH_ITERATIONS, _ROUGH_TOLERANCE = 7, 1e-2  # of Sinkhorn between the rounds
_RIDGE, _TINY = 1e-3, 1e-6
_UNUSABLE = 1e6  # squared distance of a match that must not count for a point
_FAR = 1e30


class SoftMatchValues(NamedTuple):
    """Present mutual matches, from one side."""

    partner: Value  # (N,) int64, meaningless without confidence
    confidence: Value  # (N,)


class PriorValues(NamedTuple):
    """Where the points of one image expect their partners; (N, 1) each but the position."""

    position: Value  # (N, 2)
    gain: Value
    penalty: Value
    tolerance: Value  # squared distance that halves the gain
    dustbin: Value


@dataclass(frozen=True)
class ConsensusGraph:
    """Writes the rounds in which points are assigned again, guided by their neighbours' matches."""

    graph: Builder
    arrays: Arrays
    rounds: int
    early_exit: bool

    def __call__(
        self, scores: Value, positions0: Value, positions1: Value, mass: Masses, start: PotentialValues
    ) -> tuple[Value, PotentialValues]:
        """Scores with dustbins (N+1, M+1), corrected, and potentials to begin with.

        Args:
            scores: as the head gives them.
            positions0, positions1: normalised, (N, 2) and (M, 2).
            mass: of rows and columns.
            start: potentials to begin with.
        """
        g, enough = self.graph, _SETTLED if self.early_exit else 1.0
        count0 = g.size(positions0, 0)

        def step(number: Value, corrected: Value, u: Value, v: Value, partner: Value, confidence: Value):
            found = sinkhorn(g, corrected, mass, PotentialValues(u, v), _ROUGH_ITERATIONS, _ROUGH_TOLERANCE)
            now = self._matches(raised(g, corrected, found))
            same = self._agreement(SoftMatchValues(partner, confidence), now[0])
            settled = (same > enough) & (number > 0)
            (following,) = g.either(
                settled,
                lambda: [corrected],
                lambda: [self._corrected(scores, positions0, positions1, *now)],
            )
            return ~settled, [following, *found, *now[0]], []

        none = [g.full(count0, 0), g.full(count0, 0.0)]
        corrected, u, v, *_ = g.loop(self.rounds, [scores, *start, *none], step)
        return corrected, PotentialValues(u, v)

    def _matches(self, log_scores: Value) -> tuple[SoftMatchValues, SoftMatchValues]:
        g = self.graph
        best, partner, mutual = best_of_both(g, log_scores, dustbins=True)
        confidence = g.Min(g.Exp(best) * g.real(mutual), 1.0)
        confidence = g.Where(confidence < _LEAST_CONFIDENCE, 0.0, confidence)
        # Rows without a match write into the dustbin's column, which is cut off.
        beyond = g.size(log_scores, 1)
        column = g.Where(confidence > 0.0, partner, beyond - 1)
        back = g.ScatterElements(g.full(beyond, 0), column, g.range(g.size(best, 0)), axis=0)
        reverse = g.ScatterElements(g.full(beyond, 0.0), column, confidence, axis=0)
        return (
            SoftMatchValues(partner, confidence),
            SoftMatchValues(g.slice(back, 0, 0, -1), g.slice(reverse, 0, 0, -1)),
        )

    def _agreement(self, before: SoftMatchValues, after: SoftMatchValues) -> Value:
        """() share of the matches, by confidence, that two rounds have in common."""
        g = self.graph
        same = g.real(g.Equal(before.partner, after.partner))
        common = g.total(g.Min(before.confidence, after.confidence) * same, 0)
        either = g.total(before.confidence, 0) + g.total(after.confidence, 0) - common
        return g.Where(g.Equal(either, 0.0), 1.0, common / g.Max(either, _TINY))

    def _corrected(
        self, scores: Value, positions0: Value, positions1: Value, m0: SoftMatchValues, m1: SoftMatchValues
    ) -> Value:
        """Scores with what both sides add: a gain near the predictions, a penalty elsewhere."""
        g = self.graph
        p0, p1 = self._prior(positions0, positions1, m0), self._prior(positions1, positions0, m1)
        height0, height1 = ((_border(g, p.gain + p.penalty, 0.0)) for p in (p0, p1))
        away0 = g.real(self._from_predictions(p0, 1) @ self._from_points(positions1, 0))
        away1 = g.real(self._from_points(positions0, 1) @ self._from_predictions(p1, 0))
        near = height0 / g.Max(away0, 1.0) + g.Transpose(height1, perm=[1, 0]) / g.Max(away1, 1.0)
        # Penalties of both sides and what the dustbins gain, as one product.
        points0, points1 = (g.Concat(g.full(g.Shape(p.gain), 1.0), [[0.0]], axis=0) for p in (p0, p1))
        left = [-_border(g, p0.penalty, 0.0), points0, _border(g, p0.dustbin, 0.0), 1.0 - points0]
        right = [points1, -_border(g, p1.penalty, 0.0), 1.0 - points1, _border(g, p1.dustbin, 0.0)]
        rest = g.Concat(*left, axis=1) @ g.Transpose(g.Concat(*right, axis=1), perm=[1, 0])
        return scores + near + rest

    def _from_predictions(self, prior: PriorValues, axis: int) -> Value:
        """The predictions' factor of 1 + |position − other|² / tolerance, five numbers along `axis`.

        Far for dustbins. In float64, since large numbers cancel, as in `matcher.match.consensus`;
        turned before, because ONNX Runtime 1.17 cannot join a product of float64 with transposing.
        """
        g, number = self.graph, self._number
        a, tolerance = (self._exact(self._turned(x, axis)) for x in (prior.position, prior.tolerance))
        inverse = number(1) / tolerance
        square = g.total(a * a, axis, keep=True)
        factor = g.Concat(a * number(-2) * inverse, inverse, square * inverse + number(1), axis=axis)
        factor = g.Concat(factor, inverse * number(0) + number(1), axis=axis)
        return g.Concat(factor, self._dustbin([0, 0, 0, 0, 0], axis), axis=1 - axis)

    def _from_points(self, others: Value, axis: int) -> Value:
        """The other factor, of points; see `_from_predictions`."""
        g, number = self.graph, self._number
        b = self._exact(self._turned(others, axis))
        squares = g.total(b * b, axis, keep=True)
        nothing = squares * number(0)
        factor = g.Concat(b, squares, nothing + number(1), nothing, axis=axis)
        return g.Concat(factor, self._dustbin([0, 0, 0, 0, _FAR], axis), axis=1 - axis)

    def _turned(self, rows: Value, axis: int) -> Value:
        """Rows (N, k) as they are or, with their entries along axis 0, as columns."""
        return rows if axis else self.graph.Transpose(rows, perm=[1, 0])

    def _dustbin(self, row: list[float], axis: int) -> Value:
        return self._number(np.expand_dims(row, 1 - axis))

    def _exact(self, x: Value) -> Value:
        return self.graph.double(x)

    def _number(self, constant: ArrayLike) -> Value:
        return self._exact(self.graph.value(np.array(constant, np.float32)))

    def _prior(self, positions: Value, others: Value, matches: SoftMatchValues) -> PriorValues:
        g = self.graph
        targets = g.Gather(others, matches.partner, axis=0)
        confidence = g.Unsqueeze(matches.confidence, [1])
        position, support, spread = self._fit(positions, targets, matches.confidence)
        away = targets - position
        residual = g.Sqrt(g.total(away * away, 1, keep=True))
        own = g.Where(confidence > 0.0, g.Log(residual + 1e-3) + 4.0, 0.0)
        seen = [g.Log(support + 1.0), (g.Log(spread + 1e-3) + 4.0) * 0.5, own * 0.5, confidence]
        hidden = g.Gelu(self._linear("consensus.hidden", g.Concat(*seen, axis=1)))
        prior = self._linear("consensus.out", hidden)
        column = [g.slice(prior, 1, k, k + 1) for k in range(4)]
        gate = support / (support + 1.0)
        tolerance = g.Exp(g.Min(g.Max(column[2], -2.0), 2.0)) * 0.012
        tolerance = tolerance * tolerance + spread * spread
        gain, penalty = (g.Softplus(column[k]) * gate for k in (0, 1))
        return PriorValues(position, gain, penalty, tolerance, column[3])

    def _linear(self, name: str, x: Value) -> Value:
        weight, bias = self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"]
        return x @ np.ascontiguousarray(weight.T) + bias

    def _fit(self, positions: Value, targets: Value, confidence: Value) -> tuple[Value, Value, Value]:
        """What affine maps fitted to the nearest matches predict: position (N, 2), support, spread (N, 1)."""
        g = self.graph
        owners = self._owners(confidence)
        distances, nearest = self._nearest(positions, targets, confidence, owners)
        matches = g.Gather(g.Concat(positions, targets, g.Unsqueeze(confidence, [1]), axis=1), owners, axis=0)
        planes = g.Gather(g.Transpose(matches, perm=[1, 0]), nearest, axis=1)  # (5, N, k)
        steps = g.slice(planes, 0, 0, 2) - g.Unsqueeze(g.Transpose(positions, perm=[1, 0]), [2])
        usable = g.real(distances < _UNUSABLE / 2)
        square = g.total(steps * steps, 0) * usable
        reach = g.Max(g.Sqrt(g.maximum(square, 1, keep=True)), 0.02) / 1.5
        weight = g.Exp(square / (reach * reach * -2.0)) * g.entry(planes, 4) * usable
        return self._robust(g.Concat(steps / reach, g.slice(planes, 0, 2, 4), axis=0), weight)

    def _owners(self, confidence: Value) -> Value:
        """(K,) the points with a match; with no match at all, one without confidence."""
        g = self.graph
        used = g.Squeeze(g.NonZero(confidence > 0.0), [0])
        some = g.scalar(g.size(used, 0)) > 0
        return g.either(some, lambda: [used], lambda: [np.zeros(1, np.int64)])[0]

    def _nearest(
        self, positions: Value, targets: Value, confidence: Value, owners: Value
    ) -> tuple[Value, Value]:
        """Squared distances and indices (N, k) of the matches nearest to each position, its own left out."""
        g = self.graph
        places = g.Gather(positions, owners, axis=0)
        lengths = g.total(places * places, 1, keep=True)
        invalid = g.real(g.Equal(g.Gather(confidence, owners, axis=0), 0.0))
        lengths = lengths + g.Unsqueeze(invalid, [1]) * _UNUSABLE
        squares = g.total(positions * positions, 1, keep=True)
        left = g.Concat(positions * -2.0, squares, g.full(g.Shape(squares), 1.0), axis=1)
        right = g.Concat(places, g.full(g.Shape(lengths), 1.0), lengths, axis=1)
        distances = left @ g.Transpose(right, perm=[1, 0])
        own = g.Unsqueeze(owners, [0])
        distances = g.ScatterElements(distances, own, g.full(g.Shape(own), _UNUSABLE), axis=0)
        wanted = g.Min(g.size(owners, 0), [NEIGHBOURS])
        return g.TopK(distances, wanted, outputs=2, axis=1, largest=0, sorted=0)

    def _robust(self, points: Value, base: Value) -> tuple[Value, Value, Value]:
        """y ≈ A x + b under a robust loss, from planes x, y (4, N, k) and base weights (N, k)."""
        g, weight = self.graph, base
        for scale in SCALES:
            share = weight / (g.total(weight, 1, keep=True) + _TINY)
            means = g.total(points * share, 2, keep=True)  # (4, N, 1)
            offsets = points - means
            x0, x1 = g.slice(offsets, 0, 0, 1), g.slice(offsets, 0, 1, 2)
            from0, from1 = (g.total(offsets * x * share, 2, keep=True) for x in (x0, x1))
            xx0 = g.slice(from0, 0, 0, 1) + _RIDGE
            xx1, xy = g.slice(from1, 0, 1, 2) + _RIDGE, g.slice(from0, 0, 1, 2)
            along0, along1 = g.slice(from0, 0, 2), g.slice(from1, 0, 2)
            determinant = xx0 * xx1 - xy * xy
            slope0 = (along0 * xx1 - along1 * xy) / determinant
            slope1 = (along1 * xx0 - along0 * xy) / determinant
            rest = g.slice(offsets, 0, 2) - slope0 * x0 - slope1 * x1
            square = g.total(rest * rest, 0)
            factor = square / scale**2 + 1.0
            weight = base / (factor * factor)
        position = g.slice(means, 0, 2) - slope0 * g.slice(means, 0, 0, 1) - slope1 * g.slice(means, 0, 1, 2)
        support = g.total(weight, 1, keep=True)
        spread = g.Sqrt(g.total(weight * square, 1, keep=True) / (support + _TINY))
        return g.Transpose(g.Squeeze(position, [2]), perm=[1, 0]), support, spread


def _border(g: Builder, x: Value, last: float) -> Value:
    """(N, 1) → (N+1, 1)."""
    return g.Concat(x, [[last]], axis=0)
