"""Losses of keypoints and of matches, and a network's layers with the ground truth of their points."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.match.consensus import soft_matches
from matcher.match.network import MatchingNetwork, resolve_precision
from matcher.match.position import Points, normalise_positions
from matcher.match.sinkhorn import IMPOSSIBLE, dual_softmax, log_assignment
from matcher.train.pairs import IGNORED, Keypoints, PairBatch, other_of_pair
from matcher.train.recipe import LEARNED, MatcherRecipe
from matcher.types import UNMATCHED

UNROLLED = 2  # Sinkhorn iterations with gradients
APART = 4.0  # pixels; descriptors of nearer points need not differ


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 without any."""
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def cross_entropy(logits: Tensor, right: Tensor, chosen: Tensor) -> Tensor:
    """Mean binary cross-entropy of "it is right" over the chosen; all of one shape."""
    return mean_of(F.binary_cross_entropy_with_logits(logits, right.float(), reduction="none"), chosen)


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it, else float32."""
    fast = resolve_precision("auto", device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


def assignment_loss(log_p: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Mean −log P (B, N+1, M+1) of true matches and unmatched points, weighed alike (SuperGlue, eq. 10)."""
    matched = log_p[:, :-1].gather(2, partner0.clamp_min(0).unsqueeze(2)).squeeze(2)
    unmatched0 = mean_of(log_p[:, :-1, -1], partner0 == UNMATCHED)
    unmatched1 = mean_of(log_p[:, -1, :-1], partner1 == UNMATCHED)
    return -0.5 * mean_of(matched, partner0 >= 0) - 0.25 * (unmatched0 + unmatched1)


def matchability_loss(scores: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Cross-entropy that calibrates the matchability logits, so that pruning can use a threshold."""
    sides = (scores[:, :-1, -1], partner0), (scores[:, -1, :-1], partner1)
    return sum(cross_entropy(-dustbin, partner >= 0, partner != IGNORED) for dustbin, partner in sides)


def decisions(log_p: Tensor) -> Tensor:
    """(B, N + M) the assigned point of the other image for each point, or UNMATCHED."""
    columns, rows = log_p.shape[2] - 1, log_p.shape[1] - 1
    partner0, partner1 = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    sides = ((partner0, columns), (partner1, rows))
    return torch.cat([p.masked_fill(p == dustbin, UNMATCHED) for p, dustbin in sides], dim=1)


class Labels(NamedTuple):
    """Ground truth of the points of one image of B pairs."""

    partner: Tensor  # (B, N) int64, UNMATCHED or IGNORED
    target: Tensor  # (B, N, 2) normalised, in the other image; NaN if not visible
    mask: Tensor  # (B, N) bool, points that exist


class LabelledLayer(NamedTuple):
    """Tokens after a layer, (B, N+M, …) float32, and their ground truth."""

    points: Points
    n: int  # N
    labels: tuple[Labels, Labels]


def labelled_layers(
    model: MatchingNetwork, batch: PairBatch, after: int | None = None, share: float = 1.0
) -> list[LabelledLayer]:
    """All layers on a batch, without early exit; after the layer `after`, of which the first is 0, a share of
    the points of each image goes on, those likeliest to match."""
    sides = batch.features0, batch.features1
    complete = sides[0].kind == LEARNED  # whose batches are hardly padded; the labels know where
    truths = (batch.partner0, batch.corresponding0), (batch.partner1, batch.corresponding1)
    with mixed_precision(batch.partner0.device):
        tokens = model.tokens(*sides, complete=complete)
        labels, layers, counts = [], [], (tokens.n, tokens.x.shape[1] - tokens.n)
        for own, other, (partner, there), count in zip(sides, sides[::-1], truths, counts, strict=True):
            target = normalise_positions(other.with_valid(keypoints=there.nan_to_num(0.0)))
            target = target.masked_fill(there.isnan(), torch.nan)
            labels.append(Labels(*(x[:, :count] for x in (partner, target, own.mask))))
        for depth in range(len(model.layers)):
            tokens = model.advance(tokens, depth)
            points = Points(*(c if c is None else c.float() for c in tokens.points))
            layers.append(LabelledLayer(points, tokens.n, tuple(labels)))
            if depth != after:
                continue
            # In half precision many points would be equally likely.
            with torch.no_grad(), torch.autocast(tokens.x.device.type, enabled=False):
                logits = model.decision_logits(tokens.x.float(), depth)[..., 0]
                if tokens.mask is not None:
                    logits = logits.masked_fill(~tokens.mask, -torch.inf)
            kept, places = [], []
            for side in (logits[:, : tokens.n], logits[:, tokens.n :]):
                count = max(1, round(share * side.shape[1]))
                kept.append(side.topk(count, dim=1).indices.sort(dim=1).values)
                here = torch.arange(count, device=side.device).expand_as(kept[-1])
                places.append(torch.full_like(side, UNMATCHED, dtype=torch.int64).scatter_(1, kept[-1], here))
            order = torch.cat([kept[0], kept[1] + tokens.n], dim=1)
            rows = torch.arange(len(order), device=order.device).unsqueeze(1)
            names = ("x", "positions", "rotations", "mask", "predicted")
            columns = {name: x[rows, order] for name in names if (x := getattr(tokens, name)) is not None}
            valid = np.ones(order.shape, bool) if tokens.mask is None else columns["mask"].cpu().numpy()
            index = np.take_along_axis(tokens.index, order.cpu().numpy(), 1)
            tokens = replace(tokens, n=kept[0].shape[1], valid=valid, index=index, **columns)
            for side, (chosen, there) in enumerate(zip(kept, places[::-1], strict=True)):
                before, target, mask = (x[rows, chosen] for x in labels[side])
                # A point whose partner is dropped has none.
                partner = torch.where(before >= 0, there.gather(1, before.clamp_min(0)), before)
                labels[side] = Labels(partner, target, mask)
    return layers


def scores_of(model: MatchingNetwork, layer: LabelledLayer, depth: int) -> Tensor:
    """Scores with dustbins (B, N+1, M+1) of a layer; points that do not exist go to their dustbins."""
    mask0, mask1 = (labels.mask for labels in layer.labels)
    with mixed_precision(mask0.device):
        scores = model.scores(layer.points, layer.n, depth)
    valid = F.pad(mask0, (0, 1), value=True).unsqueeze(2) & F.pad(mask1, (0, 1), value=True).unsqueeze(1)
    dustbin = torch.ones_like(valid)
    dustbin[:, :-1, :-1] = False
    return scores.masked_fill(~valid & ~dustbin, IMPOSSIBLE).masked_fill(~valid & dustbin, 0.0)


def assignments(
    model: MatchingNetwork, layer: LabelledLayer, scores: Tensor, iterations: int, rounds: int | None = None
) -> list[Tensor]:
    """Differentiable log P (B, N+1, M+1) of scores, and after each round of consensus; None: all rounds."""
    if model.config.assignment.kind == "dual_softmax":
        found = dual_softmax(scores)
        rows = torch.cat([found.log_scores, found.log_unmatched0.unsqueeze(2)], dim=2)
        return [torch.cat([rows, F.pad(found.log_unmatched1, (0, 1)).unsqueeze(1)], dim=1)]
    found = [log_assignment(scores, iterations, UNROLLED)]
    for _ in range(model.config.assignment.consensus if rounds is None else rounds):
        matches = soft_matches(found[-1][:, :-1, :-1])
        updated = model.consensus(scores, layer.points.positions, matches)
        found.append(log_assignment(updated, iterations, UNROLLED))
    return found


def matching_loss(
    model: MatchingNetwork, batch: PairBatch, recipe: MatcherRecipe, rng: torch.Generator
) -> Tensor:
    """Mean over inner layers drawn by `rng` and the last one, plus the loss of the last one. Where points are
    dropped, the heads for that learn along, from batches with all points; nothing else does from them."""
    share = recipe.kept_shares[int(torch.randint(len(recipe.kept_shares), (1,), generator=rng))]
    first, after = min(3, len(model.layers) - 1), None  # never after the last
    if share < 1 and first:
        after = int(torch.randint(first, (1,), generator=rng))
    layers = labelled_layers(model, batch, after, share)
    last = len(layers) - 1
    inner = torch.randperm(last, generator=rng)[: recipe.inner_layers].tolist()
    if not model.config.assignment.every_layer:  # one head, for the last layer only
        inner = []
    losses = []
    for depth in (*inner, last):
        layer = layers[depth]
        (partner0, _, mask0), (partner1, _, mask1) = layer.labels
        scores = scores_of(model, layer, depth)
        steady = matchability_loss(scores, partner0, partner1)
        # What is added to all scores of a point, its dustbin's included, changes no assignment: unless their
        # mean is held back, similarities drift to hundreds, where rounding spoils assignments.
        valid = mask0.unsqueeze(2) & mask1.unsqueeze(1)
        similarities = scores[:, :-1, :-1] * valid
        means = [similarities.sum(axis) / valid.sum(axis).clamp_min(1) for axis in (2, 1)]
        steady = steady + 1e-3 * (mean_of(means[0].square(), mask0) + mean_of(means[1].square(), mask1))
        rounds = None if depth == last else 0
        found = assignments(model, layer, scores, recipe.sinkhorn_iterations, rounds)
        losses += [assignment_loss(log_p, partner0, partner1) + steady for log_p in found]
    loss = torch.stack(losses).mean() + losses[-1]
    if recipe.prunes and after is None:
        final, valid = decisions(found[-1].detach()), torch.cat([mask0, mask1], dim=1)
        inputs = [layer.points.x.detach() for layer in layers[:-1]]
        logits = [head(x).squeeze(2) for head, x in zip(model.match_probability, inputs, strict=True)]
        loss = loss + torch.stack([cross_entropy(own, final >= 0, valid) for own in logits]).mean()
    if model.guidance is None:
        return loss
    errors = []
    for points, n, both in layers:
        for predicted, labels in zip(points.predicted.tensor_split([n], dim=1), both, strict=True):
            # Logarithmic: steep for small errors, which rewards accuracy, and flat for outliers.
            distance = (predicted - labels.target.nan_to_num(0.0)).norm(dim=-1)
            robust = torch.log1p(distance / 0.05)  # of normalised positions
            errors.append(0.25 * mean_of(robust, labels.target.isfinite().all(-1)))
    return loss + 2.0 * torch.stack(errors).mean()


def head_loss(model: MatchingNetwork, batch: PairBatch, recipe: MatcherRecipe) -> Tensor:
    """The loss of the heads for early exit and pruning below the last layer. Of confidence: "this layer has
    the same assignment as the last one" (LightGlue, section 3.3), of points matched there, as others are
    unmatched from the first layer on; of match probability: "matched in the last layer"."""
    with torch.no_grad():
        layers, decided = labelled_layers(model, batch), []
        for depth, layer in enumerate(layers):
            scores = scores_of(model, layer, depth)
            decided.append(decisions(assignments(model, layer, scores, recipe.sinkhorn_iterations)[-1]))
    losses, final = [], decided[-1]
    valid = torch.cat([labels.mask for labels in layers[0].labels], dim=1)
    for depth, (layer, current) in enumerate(zip(layers[:-1], decided[:-1], strict=True)):
        x = layer.points.x
        losses.append(cross_entropy(model.confidence[depth](x).squeeze(2), current == final, final >= 0))
        if model.config.match_probability:
            losses.append(cross_entropy(model.match_probability[depth](x).squeeze(2), final >= 0, valid))
    return torch.stack(losses).mean()


@torch.no_grad()
def nearest_of_other(corresponding: Tensor, points: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For transferred keypoints (2B, K, 2): index (2B, K) of the nearest keypoint of the other image, all
    distances (2B, K, K), and (2B, K) bool whether they are mutual nearest neighbours."""
    distance = torch.cdist(corresponding, other_of_pair(points))
    distance = distance.masked_fill(~other_of_pair(valid)[:, None], 1e4)
    nearest = distance.argmin(2)
    backward = distance.argmin(1).gather(1, nearest)
    return nearest, distance, backward == torch.arange(nearest.shape[1], device=nearest.device)


def description_loss(
    points: Keypoints, corresponding: Tensor, there: Tensor, chosen: Tensor, visible: Tensor, scale: Tensor
) -> Tensor:
    """Negative log-likelihood (dual softmax) of matching keypoints to their positions `corresponding` (2B, K,
    2) in the other image, whose descriptors are `there` (2B, K, D); `scale` is that of the similarities.

    `chosen` (N,) are supervised where `visible` (2B, N) in the other image; negatives are the others of them
    and every detected keypoint of either image, visible in both or not, but none nearer than `APART`.
    """
    own, corresponding, matching = (x[:, chosen] for x in (points.descriptors, corresponding, there))
    itself = chosen.unsqueeze(1) == torch.arange(points.valid.shape[1], device=own.device)
    # Each chosen point with the corresponding positions and the keypoints of the other image.
    near = (torch.cdist(corresponding, corresponding) < APART) | ~visible[:, None]
    near &= ~torch.eye(len(chosen), dtype=torch.bool, device=own.device)
    others = other_of_pair(points.positions)
    masked = (torch.cdist(corresponding, others) < APART) | ~other_of_pair(points.valid)[:, None]
    similarity = torch.cat([own @ matching.mT, own @ other_of_pair(points.descriptors).mT], dim=2)
    similarity = (scale * similarity).masked_fill(torch.cat([near, masked], dim=2), IMPOSSIBLE)
    forward = similarity.log_softmax(2)[:, :, : len(chosen)].diagonal(dim1=1, dim2=2)
    # Each corresponding position with the keypoints of this image.
    masked = torch.cdist(points.positions[:, chosen], points.positions) < APART
    masked = (masked | ~points.valid[:, None]) & ~itself
    similarity = (scale * matching @ points.descriptors.mT).masked_fill(masked, IMPOSSIBLE)
    backward = similarity.log_softmax(2).gather(2, chosen.expand(len(own), -1).unsqueeze(2)).squeeze(2)
    return mean_of(-(forward + backward), visible)
