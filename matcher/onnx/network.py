"""The matching network of one pair as ONNX operations: layers, early exit, pruning, assignment.

The same steps as `matcher.match.network`. Each layer after which a pair may stop lies in a branch of
the layer before, and what follows the last layer that ran is written once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from matcher.config import NetworkConfig
from matcher.match.adaptivity import NEGLIGIBLE, confidence_threshold
from matcher.onnx.builder import Builder, Value
from matcher.onnx.consensus import ConsensusGraph
from matcher.onnx.layers import Arrays, Layers
from matcher.onnx.linear import Linear
from matcher.onnx.reading import mutual_matches
from matcher.onnx.tokens import Encoder, Points
from matcher.onnx.transport import beginning, dual_softmax, first_potentials, masses, raised, sinkhorn


@dataclass(frozen=True)
class TokenValues:
    """The live points of a pair, those of image 0 first."""

    x: Value  # (T, dim)
    rotations: tuple[Value, Value] | None  # cosines and sines (T, 1, head_dim/2)
    index: Value  # (T,) int64, of the input points
    positions: Value  # (T, 2)
    points0: Value  # (1,) how many are of image 0
    predicted: Value | None = None  # (T, 2)

    def keep(self, g: Builder, mask: Value) -> TokenValues:
        """Those marked in (T,) bool."""
        columns = {name: getattr(self, name) for name in ("x", "index", "positions", "predicted")}
        kept = {name: x if x is None else g.Compress(x, mask, axis=0) for name, x in columns.items()}
        rotations = self.rotations and tuple(g.Compress(each, mask, axis=0) for each in self.rotations)
        own = g.total(g.integer(g.slice(mask, 0, 0, self.points0)), 0, keep=True)
        return replace(self, **kept, rotations=rotations, points0=own)


class Compared(NamedTuple):
    """What is compared of one image after the last layer that ran."""

    factors: Value  # (N, k), whose products are similarities
    dustbin: Value  # (N,)
    positions: Value  # (N, 2)
    index: Value  # (N,) int64


class FoundValues(NamedTuple):
    """The matches of a pair."""

    indices: Value  # (K, 2) int64
    scores: Value  # (K,)
    layers: Value  # () int64, how many ran
    kept: Value  # (2,) int64, points of either image that were not dropped


@dataclass(frozen=True)
class NetworkGraph:
    """Writes the network for one pair."""

    graph: Builder
    config: NetworkConfig
    arrays: Arrays
    linear: Linear
    fused_attention: bool

    def __call__(self, points0: Points, points1: Points) -> FoundValues:
        """Matches of two images that both have points."""
        sides = self._after_layers(points0, points1)
        count = len(Compared._fields)
        side0, side1, layers = Compared(*sides[:count]), Compared(*sides[count : 2 * count]), sides[-1]
        g = self.graph
        counts = [g.size(side.index, 0) for side in (side0, side1)]
        kept = g.Concat(*counts, axis=0)
        nothing = g.Equal(g.Min(*(g.scalar(each) for each in counts)), 0)
        found = g.either(nothing, lambda: no_matches(g), lambda: list(self._assigned(side0, side1)))
        return FoundValues(*found, layers, kept)

    def _encoder(self) -> Encoder:
        return Encoder(self.graph, self.config, self.arrays)

    def _after_layers(self, points0: Points, points1: Points) -> tuple[Value, ...]:
        g, config = self.graph, self.config
        encoder, both = self._encoder(), (points0, points1)
        x = g.Concat(*(points.descriptors for points in both), axis=0)
        if config.project:
            x = self.linear("project", x, self.arrays["project.weight"], self.arrays["project.bias"])
        extent, rotations = config.position.extent, None
        if config.guided:
            inputs = [g.Concat(*encoder.inputs(points, 0.5), axis=1) for points in both]
            x = encoder.own_position(x, g.Concat(*inputs, axis=0))
        inputs = [g.Concat(*encoder.inputs(points, extent), axis=1) for points in both]
        inputs = g.Concat(*inputs, axis=0)
        if config.position.kind == "rotary":
            rotations = encoder.rotations(inputs)
        elif config.position.kind == "mlp":
            x = x + encoder.perceptron(inputs)
        counts = [g.size(points.keypoints, 0) for points in both]
        index = g.Concat(*map(g.range, counts), axis=0)
        positions = g.Concat(*(encoder.positions(points, 0.5) for points in both), axis=0)
        return self._from_layer(
            0, TokenValues(x, rotations, index, positions, counts[0]), counts[0] + counts[1]
        )

    def _from_layer(self, number: int, tokens: TokenValues, total: Value) -> tuple[Value, ...]:
        """What is compared after the layers from `number` on, as many as the pair needs."""
        g, policy = self.graph, self.config.policy
        layers = Layers(g, self.config.context, self.arrays, self.linear, self.fused_attention)
        tokens = replace(tokens, x=layers.layer(number, tokens.x, tokens.rotations, tokens.points0))
        if self.config.guided:
            tokens = self._predicted(number, tokens)
        if number + 1 == self.config.context.depth:
            return self._compared(number, tokens)
        if not (policy.early_exit or policy.pruning):
            return self._from_layer(number + 1, tokens, total)
        confident, probability = self._heads(number, tokens.x)
        keep = probability > policy.prune_matchability if policy.pruning else None
        if keep is not None and policy.prune_confident_only:
            keep = keep | ~confident
        following = tokens if keep is None else tokens.keep(g, self._unless_few(keep))
        here = tokens if keep is None or not self.config.match_probability else tokens.keep(g, keep)
        left = g.size(following.index, 0)
        stop = g.scalar(g.Equal(following.points0, 0) | g.Equal(left, following.points0))
        if policy.early_exit:
            stop = stop | self._ready(confident, probability, total)
        return g.either(
            stop,
            lambda: self._compared(number, here),
            lambda: self._from_layer(number + 1, following, total),
        )

    def _predicted(self, number: int, tokens: TokenValues) -> TokenValues:
        encoder = self._encoder()
        predicted = self._map(f"guidance.predict.{number}", tokens.x)
        waves = encoder.predicted_waves(predicted)
        return replace(
            tokens, x=tokens.x + self._map(f"guidance.encode.{number}", waves), predicted=predicted
        )

    def _map(self, name: str, x: Value) -> Value:
        found = x @ np.ascontiguousarray(self.arrays[f"{name}.weight"].T)
        return found + self.arrays[f"{name}.bias"] if f"{name}.bias" in self.arrays else found

    def _probability(self, name: str, x: Value) -> Value:
        return self.graph.Sigmoid(self.graph.Squeeze(self._map(name, x), [1]))

    def _heads(self, number: int, x: Value) -> tuple[Value, Value]:
        """Whether a point is confident of its partner (T,) bool, and the probability that it has one (T,)."""
        least = confidence_threshold(number, self.config.context.depth)
        own = "match_probability.{}" if self.config.match_probability else "heads.{}.matchability"
        confident = self._probability(f"confidence.{number}", x) > least
        return confident, self._probability(own.format(number), x)

    def _ready(self, confident: Value, probability: Value, total: Value) -> Value:
        """() bool: enough points are confident for the pair to stop."""
        g, open_share = self.graph, 1 - self.config.policy.exit_share
        if self.config.match_probability:
            unconfident = g.total(g.Where(confident, 0.0, probability), 0)
            return unconfident < g.total(probability, 0) * open_share + NEGLIGIBLE
        return g.total(g.real(~confident), 0) < g.scalar(g.real(total)) * open_share

    def _unless_few(self, keep: Value) -> Value:
        """`keep` (T,) bool, or everything where that drops too few points to save time."""
        g, least = self.graph, self.config.policy.min_pruned_share
        kept = g.total(g.real(keep), 0)
        return keep | (kept > g.scalar(g.real(g.size(keep, 0))) * (1 - least))

    def _compared(self, number: int, tokens: TokenValues) -> tuple[Value, ...]:
        g, assignment = self.graph, self.config.assignment
        head = f"heads.{number if assignment.every_layer else 0}"
        factors, divisor = tokens.x, (assignment.temperature * self._width()) ** 0.5
        if assignment.project:
            weight, bias = (self.arrays[f"{head}.projection.{part}"] for part in ("weight", "bias"))
            factors = self.linear(f"{head}.projection", tokens.x, weight / divisor, bias / divisor)
        else:
            factors = factors / divisor
        dustbin = self._dustbins(head, tokens.x)
        own, other = (factors, factors) if not self.config.guided else self._guided(number, tokens, factors)
        sides = []
        for half, compared in ((0, own), (1, other)):
            bounds = (0, tokens.points0) if half == 0 else (tokens.points0,)
            columns = (compared, dustbin, tokens.positions, tokens.index)
            sides += [g.slice(column, 0, *bounds) for column in columns]
        return (*sides, g.value(number + 1))

    def _width(self) -> float:
        dim = self.config.context.dim
        return dim**0.5 if self.config.assignment.project else float(dim)

    def _dustbins(self, head: str, x: Value) -> Value:
        g = self.graph
        if self.config.assignment.dustbin == "learned":
            return g.full(g.size(x, 0), float(self.arrays[f"{head}.dustbin"]))
        return -g.Squeeze(self._map(f"{head}.matchability", x), [1])

    def _guided(self, number: int, tokens: TokenValues, factors: Value) -> tuple[Value, Value]:
        """Factors with those of the agreement of predicted and true positions."""
        g, encoder = self.graph, self._encoder()
        confidence = g.Sigmoid(self._map(f"guidance.confidence.{number}", tokens.x)) * 2.0
        weight = np.tile(self.arrays[f"guidance.weight.{number}"], 2)
        theirs = confidence * encoder.predicted_waves(tokens.predicted) * weight
        own = encoder.waves(tokens.positions)
        return g.Concat(factors, theirs, own, axis=1), g.Concat(factors, own, theirs, axis=1)

    def _assigned(self, side0: Compared, side1: Compared) -> tuple[Value, Value]:
        g, assignment, policy = self.graph, self.config.assignment, self.config.policy
        reading = (policy.match_threshold, policy.threshold_doubles_at)
        if assignment.kind == "dual_softmax":
            similarity = side0.factors @ g.Transpose(side1.factors, perm=[1, 0])
            log_scores = dual_softmax(g, similarity, -side0.dustbin, -side1.dustbin)
            local, scores = mutual_matches(g, log_scores, *reading, dustbins=False)
            return self._indices(local, side0.index, side1.index), scores
        if assignment.tolerance is None:
            local, scores = mutual_matches(g, self._transported(side0, side1), *reading, dustbins=True)
            return self._indices(local, side0.index, side1.index), scores
        # The side of fewer points is updated first; `sinkhorn` chooses between equals.
        count0, count1 = (g.scalar(g.size(side.index, 0)) for side in (side0, side1))
        swapped = count1 < count0
        sides = g.either(swapped, lambda: [*side1, *side0], lambda: [*side0, *side1])
        first, second = Compared(*sides[: len(side0)]), Compared(*sides[len(side0) :])
        local, scores = mutual_matches(g, self._transported(first, second), *reading, dustbins=True)
        found = self._indices(local, first.index, second.index)
        return g.Gather(found, g.Where(swapped, [1, 0], [0, 1]), axis=1), scores

    def _indices(self, local: Value, index0: Value, index1: Value) -> Value:
        g = self.graph
        ends = [
            g.Gather(index, g.slice(local, 1, k, k + 1), axis=0) for k, index in enumerate((index0, index1))
        ]
        return g.Concat(*ends, axis=1)

    def _transported(self, side0: Compared, side1: Compared) -> Value:
        """Log probabilities (N+1, M+1) by optimal transport, after the rounds of consensus, as `raised`."""
        g, assignment = self.graph, self.config.assignment
        scores = self._scores(side0, side1)
        mass = masses(g, *(g.size(side.index, 0) for side in (side0, side1)))
        start = (beginning if assignment.tolerance is None else first_potentials)(g, scores)
        if assignment.consensus:
            consensus = ConsensusGraph(g, self.arrays, assignment.consensus, self.config.policy.early_exit)
            scores, start = consensus(scores, side0.positions, side1.positions, mass, start)
        found = sinkhorn(g, scores, mass, start, assignment.max_iterations, assignment.tolerance)
        return raised(g, scores, found)

    def _scores(self, side0: Compared, side1: Compared) -> Value:
        """Scores with dustbins (N+1, M+1), as one product."""
        g, corner = self.graph, 0.0
        if self.config.assignment.dustbin == "learned":
            corner = float(self.arrays["heads.0.dustbin"])
        rows = []
        for side, column, last in ((side0, 0, [corner, 1.0]), (side1, 1, [1.0, 0.0])):
            dustbin = g.Unsqueeze(side.dustbin, [1])
            pair = [dustbin, dustbin * 0.0]
            points = g.Concat(side.factors, *(pair if column == 0 else pair[::-1]), axis=1)
            width = g.slice(g.Shape(side.factors), 0, 1, 2)
            end = g.Concat(g.full(width, 0.0), g.value(np.array(last, np.float32)), axis=0)
            rows.append(g.Concat(points, g.Unsqueeze(end, [0]), axis=0))
        return rows[0] @ g.Transpose(rows[1], perm=[1, 0])


def no_matches(g: Builder) -> list[Value]:
    """Indices (0, 2) and scores (0,)."""
    return [g.value(np.zeros((0, 2), np.int64)), g.value(np.zeros(0, np.float32))]
