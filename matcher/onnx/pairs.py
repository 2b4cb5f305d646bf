"""The model of a matcher: a batch of pairs in, matches out, whatever the numbers of keypoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matcher.config import NetworkConfig, to_dict
from matcher.errors import UsageError
from matcher.match.steering import (
    ACCEPTED_GAIN,
    ACCEPTED_PART,
    OTHER_TURNS,
    PROBED,
    PROMISING,
    STEERABLE,
    TURNS,
)
from matcher.onnx.builder import LAST, Builder, Value
from matcher.onnx.interface import EXTRA
from matcher.onnx.linear import Linear, Numbers
from matcher.onnx.network import FoundValues, NetworkGraph, no_matches
from matcher.onnx.steering import quarter_turns, steered, turned_view
from matcher.onnx.tokens import Points


def matcher_model(
    config: NetworkConfig,
    arrays: Mapping[str, np.ndarray],
    *,
    numbers: Numbers = "float32",
    fused_attention: bool = False,
) -> bytes:
    """An ONNX file that matches B pairs, each as if it were alone.

    Inputs, with N and M keypoints, 0 or more, S standing for 0 and 1: `keypointsS` (B, N, 2) in stored
    pixels, `descriptorsS` (B, N, D), `maskS` (B, N) bool, `sizeS` (B, 2) width and height, `orientationS`
    (B,) int64 EXIF codes, 1 for none; where the network needs them `scoresS`, `scalesS`, `anglesS` (B, N)
    and `affine_framesS` (B, N, 2, 2), as in `Features`. Outputs: `matches` (B, min(N, M), 2) int64, best
    first, −1 where there are no more; `scores`, 0 there; `layers` (B,) how many ran; `kept` (B, 2) points
    that were not dropped; `turns` (B,) clockwise quarter turns by which image 1 was rotated.

    Args:
        config: of the network, with the policy.
        arrays: its parameters by name, float32.
        numbers: what weights are written in.
        fused_attention: by an operator that only ONNX Runtime has; it takes less time and memory.

    Raises:
        UsageError: a network without keypoints, or with attention that is not softmax.
    """
    check_exportable(config)
    graph = Builder("matcher")
    network = NetworkGraph(graph, config, arrays, Linear(graph, numbers), fused_attention)
    PairsGraph(graph, config, network).write()
    return graph.encode({"kind": config.kind, "config": json.dumps(to_dict(config))})


def check_exportable(config: NetworkConfig) -> None:
    """Refuse a network that cannot be written as ONNX.

    Raises:
        UsageError: it says why.
    """
    context = config.context
    if config.backbone is not None or config.refinement is not None or config.position.kind == "sine":
        raise UsageError("networks that match the cells of a grid (LoFTR) cannot be written as ONNX")
    if context.attention != "softmax":
        raise UsageError(f"only softmax attention can be written as ONNX, not {context.attention}")
    if context.norm == "output" or context.sequential_cross:
        raise UsageError("networks that normalise messages cannot be written as ONNX")


@dataclass(frozen=True)
class PairsGraph:
    """Writes the matching of pairs by a network."""

    graph: Builder
    config: NetworkConfig
    network: NetworkGraph

    def write(self) -> None:
        """Inputs, the loop over pairs, and outputs."""
        g = self.graph
        sides = [self._inputs(side) for side in (0, 1)]
        most = g.Min(*(g.size(side["mask"], 1) for side in sides))
        (*_, indices, scores, layers, kept, turns) = g.loop(
            g.scalar(g.size(sides[0]["mask"], 0)), [], lambda pair: self._pair(pair, sides, most), gathered=5
        )
        g.output("matches", indices, "int64", "B", "K", 2)
        g.output("scores", scores, "float32", "B", "K")
        g.output("layers", layers, "int64", "B")
        g.output("kept", kept, "int64", "B", 2)
        g.output("turns", turns, "int64", "B")

    def _inputs(self, side: int) -> dict[str, Value]:
        g, count = self.graph, "NM"[side]
        names = {EXTRA[name] for name in self.config.position.inputs if name in EXTRA}
        inputs = {
            "keypoints": g.input(f"keypoints{side}", "float32", "B", count, 2),
            "descriptors": g.input(f"descriptors{side}", "float32", "B", count, self.config.descriptor_dim),
            "mask": g.input(f"mask{side}", "bool", "B", count),
            "size": g.input(f"size{side}", "float32", "B", 2),
            "orientation": g.input(f"orientation{side}", "int64", "B"),
        }
        for name, shape in sorted(names):
            inputs[name] = g.input(f"{name}{side}", "float32", "B", count, *shape)
        return inputs

    def _pair(self, pair: Value, sides: list[dict[str, Value]], most: Value):
        """One repetition: the matches of a pair, in the indices of its input points, padded."""
        g = self.graph
        points, index = zip(*(self._points(pair, side) for side in sides), strict=True)
        counts = [g.size(each, 0) for each in index]
        empty = g.Equal(g.scalar(g.Min(*counts)), 0)

        def nothing() -> list[Value]:
            return [*no_matches(g), g.value(0), g.Concat(*counts, axis=0), g.value(0)]

        *found, turns = g.either(empty, nothing, lambda: self._best_view(*points))
        found = FoundValues(*found)
        ends = [
            g.Gather(each, g.slice(found.indices, 1, side, side + 1), axis=0)
            for side, each in enumerate(index)
        ]
        rest = most - g.size(found.scores, 0)
        none = g.value(np.zeros(1, np.int64))
        indices = g.Pad(g.Concat(*ends, axis=1), g.Concat(none, none, rest, none, axis=0), -1)
        scores = g.Pad(found.scores, g.Concat(none, rest, axis=0), 0.0)
        return True, [], [indices, scores, found.layers, found.kept, turns]

    def _points(self, pair: Value, side: dict[str, Value]) -> tuple[Points, Value]:
        """The valid points of one image, and their indices (N,)."""
        g = self.graph
        one = {name: g.entry(value, pair) for name, value in side.items()}
        valid = {
            name: g.Compress(value, one["mask"], axis=0)
            for name, value in one.items()
            if name not in ("mask", "size", "orientation")
        }
        keypoints, descriptors = valid.pop("keypoints"), valid.pop("descriptors")
        index = g.Squeeze(g.NonZero(one["mask"]), [0])
        return Points(keypoints, descriptors, one["size"], one["orientation"], valid), index

    def _best_view(self, points0: Points, points1: Points) -> list[Value]:
        """The matches of a pair, and the turn of image 1 that gave them; steps as of `try_other_turns`.

        One loop, so that the network is written once: all keypoints, and for each other turn the strongest
        and, if these have matches, all.
        """
        g, least = self.graph, self.config.policy.other_turns_below
        if self.config.kind != STEERABLE:
            return [*self.network(points0, points1), g.value(0)]
        counts = [g.size(points.keypoints, 0) for points in (points0, points1)]
        enough = g.scalar(g.real(g.Min(*counts))) * least
        small = g.scalar(g.Max(*counts)) < PROBED + 1  # the strongest are all
        first = quarter_turns(g, points0.descriptors, points1.descriptors)
        further = np.array([0, *np.repeat(OTHER_TURNS, 2)])  # quarter turns of every step

        def step(_: Value, number: Value, *before: Value):
            *found, found_turns = before
            strongest = g.Equal(g.Mod(number, 2), 1)
            whole = ~strongest | small
            turns = g.Mod(first + g.Gather(further, number), TURNS)
            descriptors, view = steered(g, points1.descriptors, turns), turned_view(g, points1.view, turns)
            seen = replace(points1, descriptors=descriptors, view=view)
            end = g.Where(strongest, np.array([PROBED]), np.array([LAST]))
            other = self.network(*(self._first(points, end) for points in (points0, seen)))
            count, old = (g.scalar(g.real(g.size(each, 0))) for each in (other.scores, found[1]))
            gain = count > g.Max(enough * ACCEPTED_PART, old * ACCEPTED_GAIN)
            better = g.Equal(number, 0) | (whole & gain)
            kept = g.either(better, lambda: [*other, turns], lambda: [*found, found_turns])
            few = g.scalar(g.real(g.size(kept[1], 0))) < enough
            following = number + g.Where(strongest & (whole | (count < float(PROMISING))), 2, 1)
            return few & (following < len(further)), [following, *kept], []

        start = [0, *no_matches(g), 0, g.Concat(*counts, axis=0), 0]
        return list(g.loop(len(further), start, step)[1:])

    def _first(self, points: Points, end: Value) -> Points:
        """The first (1,) `end` points of an image, which are its strongest."""
        first = partial(self.graph.slice, axis=0, end=end)
        extra = {name: first(value) for name, value in points.extra.items()}
        columns = dict(keypoints=first(points.keypoints), descriptors=first(points.descriptors))
        return replace(points, **columns, extra=extra)
