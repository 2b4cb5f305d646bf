"""Why points matched or not: the network's run of one pair, recorded layer by layer.

Matching records nothing. Here the same run is consumed with more questions: at each layer, what the asked
points attend to and how all points would be assigned. Exits, pruning and matches are those of matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import Kernel, linear_attention
from matcher.errors import UsageError
from matcher.match.blocks import Layer
from matcher.match.calibration import credible_matches
from matcher.match.network import AttentionMatcher, Tokens, off_border
from matcher.types import MATCHED, UNMATCHED, Features


@dataclass(frozen=True, eq=False)
class Attention:
    """What the asked points of one image attend to in one block, the strongest first."""

    points: np.ndarray  # (A, H, k) int64, attended points of the source image; -1 where the point is gone
    weights: np.ndarray  # (A, H, k) float32 of a total of 1
    entropy: np.ndarray  # (A, H) float32, nats; log of the number of points if all weights are equal


class AttentionInputs(NamedTuple):
    """One image attending to itself or the other; points are numbered through both images."""

    here: Tensor  # (n,) int64 input points that attend, image 1 after image 0
    there: Tensor  # (m,) those that are attended to
    q: Tensor  # (heads, n, d)
    k: Tensor  # (heads, m, d)
    kernel: Kernel

    def weights(self, rows: Tensor) -> Tensor:
        """(heads, A, m) float32, what the score function gives each attended point, for the rows (A,)."""
        if not len(self.there):
            return self.q.new_zeros(len(self.q), len(rows), 0, dtype=torch.float32)
        if self.kernel is linear_attention:
            q, k = self._linear(rows)
            return q @ k.transpose(1, 2)
        if not isinstance(self.kernel, nn.Module):  # softmax of scaled products, however it is computed
            q, k = self.q[:, rows].float(), self.k.float()
            return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(1, 2), dim=-1)
        # A learned score function applied to unit vectors as values gives its weights, whichever it is.
        dtype = next(self.kernel.parameters()).dtype
        units = torch.eye(len(self.there), dtype=dtype, device=self.q.device).expand(len(self.q), -1, -1)
        return self.kernel(self.q[:, rows].to(dtype), self.k.to(dtype), units).float()

    def spread(self, shares: Tensor) -> Tensor:
        """Shares (A, n) of the points that attend, handed on to those they attend to: (A, m)."""
        if self.kernel is linear_attention:  # a grid has ten thousand points: never the weights themselves
            q, k = self._linear(slice(None))
            return (shares @ q @ k.transpose(1, 2)).mean(0)
        total = shares.new_zeros(len(shares), len(self.there))
        for rows in torch.arange(len(self.here), device=shares.device).split(256):  # weights held at once
            total += shares[:, rows] @ self.weights(rows).mean(0)
        return total

    def _linear(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """φ = elu + 1 of queries, over what their weights come to and the least total that attention has, and
        of keys (Katharopoulos et al. 2020, eq. 7)."""
        q, k = F.elu(self.q[:, rows].float()) + 1, F.elu(self.k.float()) + 1
        return q / (q @ k.sum(1).unsqueeze(-1) + 1e-6), k

    def strongest(self, asked: np.ndarray, count: int, offset: int) -> Attention:
        """The strongest weights of the asked points (numbered through both images) that are still there."""
        heads, found = len(self.q), min(count, len(self.there))
        points = np.full((len(asked), heads, count), -1, np.int64)
        weights, entropy = np.zeros(points.shape, np.float32), np.zeros(points.shape[:2], np.float32)
        place = {point: row for row, point in enumerate(self.here.tolist())}
        alive = [i for i, point in enumerate(asked.tolist()) if point in place]
        if alive and found:
            rows = torch.tensor([place[int(asked[i])] for i in alive], device=self.q.device)
            given = self.weights(rows).transpose(0, 1)  # (A, heads, m)
            top = given.topk(found, dim=-1)
            there = self.there - offset * int(self.there[0] >= offset)
            points[alive, :, :found] = there[top.indices].cpu().numpy()
            weights[alive, :, :found] = top.values.cpu().numpy()
            entropy[alive] = torch.special.entr(given).sum(-1).cpu().numpy()
        return Attention(points, weights, entropy)


def attention_inputs(layer: Layer, tokens: Tokens, offset: int) -> list[AttentionInputs]:
    """Queries and keys of a layer: self-attention of image 0 and 1, cross-attention of image 0 and 1."""
    n, index = tokens.n, torch.from_numpy(tokens.index[0].copy()).to(tokens.x.device)
    ids, sides = (index[:n], index[n:] + offset), (slice(None, n), slice(n, None))
    scores = [block.attention.score for block in (layer.self_block, layer.cross_block)]
    return [
        AttentionInputs(ids[a], ids[b], q[:, sides[a]], k[:, sides[b]], scores[cross])
        for cross, (q, k) in enumerate(layer.queries_keys(tokens.x, n, tokens.rotations))
        for a, b in (((0, 1), (1, 0)) if cross else ((0, 0), (1, 1)))
    ]


def rollout(inputs: list[list[AttentionInputs]], asked: np.ndarray, total: int) -> np.ndarray:
    """Where the information of asked points came from: the product of (I + mean over heads)/2 of all blocks
    (Abnar and Zuidema 2020, "Quantifying attention flow in transformers", section 3)."""
    device = inputs[0][0].q.device
    flow = torch.zeros(len(asked), total, device=device)
    flow[torch.arange(len(asked), device=device), torch.from_numpy(asked).to(device)] = 1.0
    for blocks in reversed(inputs) if len(asked) else ():
        for pair in (blocks[2:], blocks[:2]):
            source = flow.clone()
            for block in pair:
                if len(block.here) and len(block.there):
                    share = flow[:, block.here] / 2
                    source[:, block.here] -= share
                    source[:, block.there] += block.spread(share)
            flow = source
    return flow.cpu().numpy()


@dataclass(frozen=True, eq=False)
class LayerReport:
    """What was known after one layer."""

    self_attention: tuple[Attention, Attention]  # of the asked points of image 0 and 1
    cross_attention: tuple[Attention, Attention]
    matches: np.ndarray  # (K, 2) int64, input points that would match if the network stopped here
    scores: np.ndarray  # (K,) float32
    appeared: int  # matches that the layer before did not have
    vanished: int
    unmatched: tuple[float | None, float | None]  # mean probability of no partner; None without a dustbin
    certain: float | None  # what early exit compares with `exit_share`; None without heads
    expected: float | None  # matches to be expected in the end; None where no heads predict them
    confidences: np.ndarray | None  # (T,) float32 of the live points, image 1 after image 0
    marginal_errors: tuple[float, ...]  # Sinkhorn: relative error of the rows, at every look
    exited: bool  # the pair stopped here
    pruned: tuple[np.ndarray, np.ndarray]  # input points pruned after this layer
    # (P, 2) of those: probability of a partner (matchability, or what the heads for it predict), confidence
    reasons: tuple[np.ndarray, np.ndarray]


CANDIDATES = 3  # that are told of each point

# Of a point, as of the last layer that it lived through: the probability of no partner, and the likeliest of
# the other image, each with its probability, the point here that it is likeliest to be, and how likely. The
# point stays unmatched where that is another, or its best is less likely than the threshold or no partner.
Told = tuple[float, list[tuple[int, float, int, float]]]


def candidates_of(scores: Tensor, unmatched: Tensor, here: np.ndarray, there: np.ndarray) -> dict[int, Told]:
    """What is told of the points (n,) `here`, from log probabilities (n, m) with the points `there`."""
    alone, count = unmatched.exp().clamp(max=1).tolist(), min(CANDIDATES, scores.shape[1])
    points = here.tolist()
    if not (points and count):
        return {point: (share, []) for point, share in zip(points, alone, strict=True)}
    top, best = scores.topk(count, dim=1), scores.max(dim=0)
    chosen, preferred = (i.cpu().numpy() for i in (top.indices, best.indices[top.indices]))
    columns = there[chosen], top.values.exp(), here[preferred]
    columns = [column.tolist() for column in (*columns, best.values[top.indices].exp())]
    rows = (list(zip(*row, strict=True)) for row in zip(*columns, strict=True))
    return dict(zip(points, zip(alone, rows, strict=True), strict=True))


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
    candidates: tuple[dict[int, Told], dict[int, Told]]  # of the points of image 0 and 1


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
    """Run a network on the features of one pair, not batched, and record what it does.

    `asked0` and `asked1` are indices of keypoints whose attention is recorded, `strongest` attended points
    for each and each head; `traced` those whose rollout is computed, all asked ones by default.
    """
    n, m = sizes = len(features0), len(features1)
    asked = tuple(np.unique(np.asarray(points, dtype=np.int64)) for points in (asked0, asked1))
    for image, points in enumerate(asked):
        if len(points) and not 0 <= points[0] <= points[-1] < sizes[image]:
            wrong = f"asked for {points.tolist()[:5]}"
            raise UsageError(f"image {image} has the keypoints 0 to {sizes[image] - 1}; {wrong}")
    given = asked if traced is None else traced
    traced = tuple(np.unique(np.asarray(points, dtype=np.int64)) for points in given)
    batch = [Features.stack([f]).to(matcher.device) for f in (features0, features1)]
    batch[1] = matcher.matched_view(*batch)
    network, reports, inputs, before = matcher.model, [], [], set()
    policy, assignment = network.config.policy, network.config.assignment
    thresholds = policy.match_threshold, policy.threshold_doubles_at
    inner = [off_border(side, assignment.border)[0].cpu().numpy() for side in batch if assignment.border]
    candidates: tuple[dict[int, Told], dict[int, Told]] = {}, {}
    for state in network.run(network.tokens(*batch)):
        blocks = attention_inputs(network.layers[state.layer], state.before, n)
        places = (asked[0], asked[1] + n) * 2
        attended = [block.strongest(each, strongest, n) for block, each in zip(blocks, places, strict=True)]
        # How all points would be assigned if the network stopped here.
        exits, prediction = bool(state.exiting), state.assign([0])
        found, ids = prediction.assignment, prediction.tokens.index[0]
        here, there = ids[: prediction.tokens.n], ids[prediction.tokens.n :]
        candidates[0].update(candidates_of(found.log_scores[0], found.log_unmatched0[0], here, there))
        candidates[1].update(candidates_of(found.log_scores[0].T, found.log_unmatched1[0], there, here))
        best = (values[0] for values in found.mutual_best.of_rows())
        local, scores = credible_matches(*best, *thresholds)
        matches = np.stack([here[local[:, 0]], there[local[:, 1]]], axis=1)
        if inner:  # a partner off the border
            allowed = inner[0][matches[:, 0]] & inner[1][matches[:, 1]]
            matches, scores = matches[allowed], scores[allowed]
        known, before = before, {tuple(match) for match in matches.tolist()}
        alone = found.log_unmatched0.exp(), found.log_unmatched1.exp()
        alone = tuple(float(share.mean()) if share.numel() else 0.0 for share in alone)
        index, gone = state.tokens.index[0], state.dropped[0]
        why = np.zeros((len(gone), 2), np.float32)
        if gone.any():
            why = np.stack([state.match_probabilities[0], state.confidences[0]], axis=1)
        sides = slice(None, state.tokens.n), slice(state.tokens.n, None)
        certain = expected = None
        if state.confident is not None and network.config.match_probability:
            # The share of the expected matches whose points are confident: unmatched ones are from the start.
            likely, sure = state.match_probabilities, state.confident
            expected = float(likely.sum()) / 2
            certain = 1 - float(likely[~sure].sum()) / (2 * expected) if expected else None
        elif state.confident is not None:  # the share of points that are, pruned ones counted as such
            certain = 1 - float((~state.confident).sum()) / (n + m) if n + m else None
        reports.append(
            LayerReport(
                self_attention=tuple(attended[:2]),
                cross_attention=tuple(attended[2:]),
                matches=matches,
                scores=scores,
                appeared=len(before - known),
                vanished=len(known - before),
                unmatched=(None, None) if assignment.dustbin == "none" else alone,
                certain=certain,
                expected=expected,
                confidences=None if state.confidences is None else state.confidences[0],
                marginal_errors=tuple(found.row_errors) if exits else (),
                exited=exits and not state.is_last,
                pruned=tuple(index[at][gone[at]] for at in sides),
                reasons=tuple(why[at][gone[at]] for at in sides),
            )
        )
        inputs.append(blocks)
    (kept,) = matcher.read(prediction, *batch)
    fates = tuple(np.full(size, UNMATCHED, np.int64) for size in sizes)
    for side, fate in enumerate(fates):
        for number, report in enumerate(reports, 1):
            fate[report.pruned[side]] = number
        fate[kept.indices[:, side]] = MATCHED
    flow = rollout(inputs, np.concatenate([traced[0], traced[1] + n]), n + m)
    flows = flow[: len(traced[0])], flow[len(traced[0]) :]
    return Explanation(asked, tuple(reports), kept.indices, kept.scores, fates, traced, flows, candidates)


def nearest_keypoint(features: Features, point: tuple[float, float]) -> int:
    """The keypoint nearest to a position in stored pixels; `UsageError`: there is none, or no such place."""
    width, height = features.size.tolist()
    if not (-0.5 <= point[0] <= width - 0.5 and -0.5 <= point[1] <= height - 0.5):
        raise UsageError(f"point {point[0]:g},{point[1]:g} lies outside the image, {width:g} x {height:g}")
    if not len(features):
        raise UsageError("no keypoint was found in this image, so none can be asked")
    away = features.keypoints - torch.tensor(point, device=features.keypoints.device)
    return int(away.square().sum(-1).argmin())
