"""Quarter turns of descriptors as ONNX operations: the same steps as `matcher.match.steering`."""

from __future__ import annotations

import numpy as np

from matcher.match.steering import (
    CERTAIN,
    COMPARED,
    DECISIVE,
    FEW,
    MIN_DISTANCE,
    MIN_GAIN,
    TURNED_EXIF,
    TURNS,
)
from matcher.onnx.builder import Builder, Value


def steered(g: Builder, descriptors: Value, turns: Value) -> Value:
    """Descriptors (N, D) after () int64 clockwise quarter turns of their image."""
    groups = g.Reshape(descriptors, [0, TURNS, -1])
    order = g.Mod(np.arange(TURNS) - turns + TURNS, TURNS)
    return g.Reshape(g.Gather(groups, order, axis=1), g.Shape(descriptors))


def turned_view(g: Builder, view: Value, turns: Value) -> Value:
    """() EXIF orientation of a view after () int64 clockwise quarter turns."""
    table, orders = np.arange(9), []
    for _ in range(TURNS):
        orders.append(table)
        table = np.array(TURNED_EXIF)[table]
    return g.entry(g.entry(g.value(np.stack(orders)), turns), view)


def quarter_turns(g: Builder, descriptors0: Value, descriptors1: Value) -> Value:
    """() int64 clockwise quarter turns of image 1 after which its descriptors fit those of image 0 best."""
    counts = [g.scalar(g.size(each, 0)) for each in (descriptors0, descriptors1)]
    more = g.Max(*counts) > FEW

    def settled() -> list[Value]:
        return [g.value(0)]

    def compared() -> list[Value]:
        few = g.Concat(upright, *(evidence(turn, FEW) for turn in range(1, TURNS)), axis=0)
        two, order = g.TopK(_with_gain(few), [2], outputs=2, axis=0)
        decided = (g.entry(two, 0) > g.entry(two, 1) * DECISIVE) | ~more

        def many() -> list[Value]:
            all_ = g.Concat(*(evidence(turn, COMPARED) for turn in range(TURNS)), axis=0)
            return [g.ArgMax(_with_gain(all_), axis=0, keepdims=0)]

        return list(g.either(decided, lambda: [g.entry(order, 0)], many))

    def evidence(turn: int, most: int) -> Value:
        own, others = (g.slice(each, 0, 0, most) for each in (descriptors0, descriptors1))
        others = steered(g, others, g.value(turn)) if turn else others
        return g.Unsqueeze(turn_evidence(g, own @ g.Transpose(others, perm=[1, 0])), [0])

    upright = evidence(0, FEW)
    certain = g.scalar(upright) > g.real(g.Min(counts[0], FEW)) * CERTAIN
    (turns,) = g.either(certain, settled, compared)
    return turns


def _with_gain(evidence: Value) -> Value:
    """A turn must exceed no turn by a margin."""
    return evidence + np.array([MIN_GAIN, 0, 0, 0], np.float32)


def turn_evidence(g: Builder, similarity: Value) -> Value:
    """() evidence from similarities (N, M): how distinctive mutual nearest neighbours are."""
    best0, best1 = g.maximum(similarity, 1, keep=True), g.maximum(similarity, 0, keep=True)
    second0 = g.maximum(g.Where(g.Equal(similarity, best0), -1.0, similarity), 1)
    second1 = g.maximum(g.Where(g.Equal(similarity, best1), -1.0, similarity), 0)
    partner, best0, best1 = (
        g.ArgMax(similarity, axis=1, keepdims=0),
        g.Squeeze(best0, [1]),
        g.Squeeze(best1, [0]),
    )
    mutual = g.real(g.Equal(best0, g.Gather(best1, partner, axis=0)))
    # The larger ratio is that of the smaller distance.
    second = 1.0 - g.Max(second0, g.Gather(second1, partner, axis=0))
    part = g.Max(1.0 - (1.0 - best0) / g.Max(second, MIN_DISTANCE), 0.0)
    return g.total(part * part * mutual, 0)
