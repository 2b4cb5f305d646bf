"""Why points matched or not: the network's run of one pair, recorded layer by layer.

Matching records nothing. Here the same run is consumed with more questions: at each layer, what the asked
points attend to and how all points would be assigned. Exits, pruning and matches are those of matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.data.matches import MATCHED, UNMATCHED
from matcher.errors import UsageError
from matcher.explain.attention import (
    Attention,
    AttentionInputs,
    attention_inputs,
    rollout,
    strongest_attention,
)
from matcher.explain.layers import LayerReport, layer_report
from matcher.match.network.inference import AttentionMatcher, off_border
from matcher.match.network.model import MatchingNetwork
from matcher.match.network.states import LayerState
from matcher.pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class Explanation:
    """All layers that ran for one pair, and what became of every point."""

    asked: tuple[np.ndarray, np.ndarray]  # input points whose attention was recorded
    layers: tuple[LayerReport, ...]
    matches: np.ndarray  # (K, 2) int64, above the threshold, best first
    scores: np.ndarray  # (K,)
    fates: tuple[np.ndarray, np.ndarray]  # (N,), (M,) int64: MATCHED, UNMATCHED, or the layer (from 1)
    traced: tuple[np.ndarray, np.ndarray]  # input points whose rollout was computed
    rollout: tuple[np.ndarray, np.ndarray]  # (A0, N+M), (A1, N+M) float32 of those, rows sum to 1


def network_of(pipeline: Pipeline) -> AttentionMatcher:
    """The network that a pipeline matches with.

    Raises:
        UsageError: it has none.
    """
    if not isinstance(pipeline.matcher, AttentionMatcher):
        raise UsageError(f"preset {pipeline.preset!r} has no network to explain; choose one that has")
    return pipeline.matcher


@torch.inference_mode()
def explain(
    matcher: AttentionMatcher,
    features0: Features,
    features1: Features,
    asked0: Sequence[int] = (),
    asked1: Sequence[int] = (),
    *,
    strongest: int = 8,
    traced: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Explanation:
    """Run a network on one pair and record what it does.

    Args:
        matcher: the network, with its precision and device.
        features0, features1: of one image each, not batched.
        asked0, asked1: indices of keypoints whose attention is recorded.
        strongest: attended points kept for each asked point and head.
        traced: keypoints of either image whose rollout is computed, which takes longer than attention; all
            that are asked when absent.

    Raises:
        UsageError: indices that are no keypoints, or features that the network does not take.
    """
    sizes = (len(features0), len(features1))
    asked = (_indices(asked0, sizes[0], 0), _indices(asked1, sizes[1], 1))
    traced = asked if traced is None else tuple(_indices(traced[i], sizes[i], i) for i in (0, 1))
    batch = [Features.stack([f]).to(matcher.device) for f in (features0, features1)]
    batch[1] = matcher.matched_view(*batch)
    network, reports, inputs, known = matcher.model, [], [], np.zeros((0, 2), np.int64)
    inner, total = _inner(network, batch), sum(sizes)
    for state in network.run(network.tokens(*batch, align=False)):
        blocks, attended = _asked_attention(state, asked, sizes[0], strongest)
        report, prediction = layer_report(state, attended, known, total, inner)
        known = report.matches
        reports.append(report)
        inputs.append(blocks)
    found = matcher.read(prediction, 0, *batch)
    flow = rollout(inputs, np.concatenate([traced[0], traced[1] + sizes[0]]), total)
    return Explanation(
        asked,
        tuple(reports),
        found.indices,
        found.scores,
        _fates(found.indices, reports, sizes),
        traced,
        (flow[: len(traced[0])], flow[len(traced[0]) :]),
    )


def nearest_keypoint(features: Features, point: tuple[float, float]) -> int:
    """The keypoint nearest to a position in stored pixels.

    Raises:
        UsageError: the position is outside the image, or the image has no keypoints.
    """
    width, height = features.size.tolist()
    if not (-0.5 <= point[0] <= width - 0.5 and -0.5 <= point[1] <= height - 0.5):
        raise UsageError(
            f"the point {point[0]:g},{point[1]:g} lies outside the image, {width:g} x {height:g}"
        )
    if not len(features):
        raise UsageError("no keypoint was found in this image, so none can be asked")
    away = features.keypoints - torch.tensor(point, device=features.keypoints.device)
    return int(away.square().sum(-1).argmin())


def _indices(points: Sequence[int], size: int, image: int) -> np.ndarray:
    points = np.unique(np.asarray(points, dtype=np.int64))
    if len(points) and not (points[0] >= 0 and points[-1] < size):
        raise UsageError(f"image {image} has the keypoints 0 to {size - 1}; asked for {points.tolist()[:5]}")
    return points


def _asked_attention(
    state: LayerState, asked: tuple[np.ndarray, np.ndarray], offset: int, strongest: int
) -> tuple[list[AttentionInputs], list[Attention]]:
    """The inputs of a layer's attention, and what the asked points of either image attend to."""
    blocks = attention_inputs(state.network.layers[state.layer], state.before, offset)
    points = (asked[0], asked[1] + offset) * 2
    return blocks, [
        strongest_attention(block, own, strongest, offset) for block, own in zip(blocks, points, strict=True)
    ]


def _inner(model: MatchingNetwork, batch: list[Features]) -> tuple[Tensor, Tensor] | None:
    """(N,), (M,) bool, the points that may have a partner; None where all may."""
    border = model.config.assignment.border
    return tuple(off_border(features, border)[0] for features in batch) if border else None


def _fates(
    matches: np.ndarray, reports: Sequence[LayerReport], sizes: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    fates = tuple(np.full(size, UNMATCHED, np.int64) for size in sizes)
    for side, fate in enumerate(fates):
        for number, report in enumerate(reports, 1):
            fate[report.pruned[side]] = number
        fate[matches[:, side]] = MATCHED
    return fates
