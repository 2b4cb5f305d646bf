"""Losses of keypoints and of matches, and a network's layers with the ground truth of their points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss

from matcher.match.consensus import soft_matches
from matcher.match.network import MatchingNetwork, Tokens, resolve_precision
from matcher.match.position import Side, normalise_positions
from matcher.match.sinkhorn import dual_softmax, log_assignment
from matcher.train.keypoints import IGNORED, PairBatch
from matcher.train.pairs import other_of_pair
from matcher.train.recipe import LEARNED, MatcherRecipe
from matcher.types import UNMATCHED, Features

UNROLLED = 2  # Sinkhorn iterations with gradients
MASKED = -1e4  # a logit without probability


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 without any."""
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it, else float32."""
    fast = resolve_precision("auto", device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


# --- Matches.


def assignment_loss(log_p: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Mean −log P of ground-truth matches and of the dustbins of unmatched points, weighted equally.

    SuperGlue, eq. 10.

    Args:
        log_p: (B, N+1, M+1).
        partner0, partner1: (B, N), (B, M) ground-truth partners, UNMATCHED or IGNORED.
    """
    matched = log_p[:, :-1].gather(2, partner0.clamp_min(0).unsqueeze(2)).squeeze(2)
    unmatched0 = mean_of(log_p[:, :-1, -1], partner0 == UNMATCHED)
    unmatched1 = mean_of(log_p[:, -1, :-1], partner1 == UNMATCHED)
    return -0.5 * mean_of(matched, partner0 >= 0) - 0.25 * (unmatched0 + unmatched1)


def matchability_loss(scores: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Binary cross-entropy that calibrates the matchability logits, so that pruning can use a threshold."""
    losses = []
    for logits, partner in ((-scores[:, :-1, -1], partner0), (-scores[:, -1, :-1], partner1)):
        loss = binary_cross_entropy_with_logits(logits, (partner >= 0).float(), reduction="none")
        losses.append(mean_of(loss, partner != IGNORED))
    return losses[0] + losses[1]


def mean_similarity_loss(scores: Tensor, mask0: Tensor, mask1: Tensor) -> Tensor:
    """Mean square of each point's mean similarity, over the valid points of both images.

    What is added to all scores of a point, its dustbin's included, changes no assignment, so that nothing in
    `assignment_loss` keeps it small: without this, similarities drift to hundreds, where rounding and the
    limited number of Sinkhorn iterations spoil assignments.
    """
    valid = mask0.unsqueeze(2) & mask1.unsqueeze(1)
    similarities = scores[:, :-1, :-1] * valid
    means = (similarities.sum(axis) / valid.sum(axis).clamp_min(1) for axis in (2, 1))
    return sum(mean_of(mean.square(), mask) for mean, mask in zip(means, (mask0, mask1), strict=True))


def correspondence_loss(predicted: Tensor, ground_truth: Tensor, visible: Tensor) -> Tensor:
    """Robust distance of predicted positions (…, N, 2) from the ground truth, over `visible` points (…, N).

    Logarithmic: steep for small errors, which rewards accuracy, and flat for outliers.
    """
    distance = (predicted - ground_truth).norm(dim=-1)
    return 0.25 * mean_of(torch.log1p(distance / 0.05), visible)  # normalised positions


def confidence_loss(logits: Tensor, current: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "this layer has the same assignment as the last one" (LightGlue, section 3.3).

    Points that are unmatched in the last layer are left out: nearly all of them are unmatched from the first
    layer on, and would dominate the loss.

    Args:
        logits: (B, N + M) of the confidence head.
        current, final: (B, N + M) `decisions` of this and of the last layer.
    """
    loss = binary_cross_entropy_with_logits(logits, (current == final).float(), reduction="none")
    return mean_of(loss, final >= 0)


def match_probability_loss(logits: Tensor, final: Tensor, valid: Tensor) -> Tensor:
    """Binary cross-entropy of "matched in the last layer", over valid points; all (B, N + M)."""
    return mean_of(binary_cross_entropy_with_logits(logits, (final >= 0).float(), reduction="none"), valid)


def decisions(log_p: Tensor) -> Tensor:
    """(B, N + M) the assigned point of the other image for each point, or UNMATCHED."""
    columns, rows = log_p.shape[2] - 1, log_p.shape[1] - 1
    partner0, partner1 = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    sides = ((partner0, columns), (partner1, rows))
    return torch.cat([p.masked_fill(p == dustbin, UNMATCHED) for p, dustbin in sides], dim=1)


@dataclass(frozen=True, eq=False)
class Labels:
    """Ground truth of the points of both images of B pairs."""

    partners: tuple[Tensor, Tensor]  # (B, N), (B, M) int64, UNMATCHED or IGNORED
    targets: tuple[Tensor, Tensor]  # (B, N, 2), (B, M, 2) normalised, in the other image; NaN if not visible
    masks: tuple[Tensor, Tensor]  # (B, N), (B, M) bool, points that exist

    @classmethod
    def of(cls, batch: PairBatch) -> Labels:
        """Those of a batch, with all its points."""
        sides = (batch.corresponding0, batch.features1), (batch.corresponding1, batch.features0)
        targets = tuple(_normalised(positions, other) for positions, other in sides)
        masks = batch.features0.mask, batch.features1.mask
        return cls((batch.partner0, batch.partner1), targets, masks)

    def first(self, *counts: int) -> Labels:
        """Those of so many points of the images 0 and of the images 1, beyond which none exist."""
        sides = (self.partners, self.targets, self.masks)
        return Labels(*(tuple(x[:, :n] for x, n in zip(side, counts, strict=True)) for side in sides))


def _normalised(positions: Tensor, other: Features) -> Tensor:
    """Positions (B, N, 2) in the other image, normalised; NaN stays."""
    normalised = normalise_positions(other.with_valid(keypoints=positions.nan_to_num(0.0)))
    return normalised.masked_fill(positions.isnan(), torch.nan)


@dataclass(frozen=True, eq=False)
class LabelledLayer:
    """Tokens after a layer, (B, N, …) and (B, M, …) float32, and their ground truth."""

    sides: tuple[Side, Side]
    labels: Labels


@dataclass(frozen=True)
class Pruning:
    """Which points go on in training."""

    after: int  # layer, 0 is the first
    share: float  # of the points of each image, the likeliest to match

    @classmethod
    def drawn(cls, shares: Sequence[float], depth: int, rng: torch.Generator) -> Pruning | None:
        """One of the `shares` of points after one of the first layers; None where all points go on."""
        share = shares[int(torch.randint(len(shares), (1,), generator=rng))]
        layers = min(3, depth - 1)  # never after the last
        if share == 1 or not layers:
            return None
        return cls(int(torch.randint(layers, (1,), generator=rng)), share)


def labelled_layers(
    model: MatchingNetwork, batch: PairBatch, pruning: Pruning | None = None
) -> list[LabelledLayer]:
    """All layers on a batch, without early exit; `pruning` says which points are dropped."""
    complete = batch.features0.kind == LEARNED  # whose batches are hardly padded; the labels know where
    with mixed_precision(batch.partner0.device):
        tokens = model.tokens(batch.features0, batch.features1, align=False, complete=complete)
        labels, layers = Labels.of(batch).first(tokens.n, tokens.x.shape[1] - tokens.n), []
        for depth in range(len(model.layers)):
            tokens = model.advance(tokens, depth)
            side0, side1 = (Side(*(c if c is None else c.float() for c in side)) for side in tokens.sides)
            layers.append(LabelledLayer((side0, side1), labels))
            if pruning is not None and depth == pruning.after:
                tokens, labels = _pruned(model, tokens, labels, pruning)
    return layers


def _pruned(
    model: MatchingNetwork, tokens: Tokens, labels: Labels, pruning: Pruning
) -> tuple[Tokens, Labels]:
    """The likeliest points of each image. One whose partner is dropped has none."""
    # In half precision many points would be equally likely.
    with torch.no_grad(), torch.autocast(tokens.x.device.type, enabled=False):
        logits = model.match_logits(tokens.x.float(), pruning.after)
        if tokens.mask is not None:
            logits = logits.masked_fill(~tokens.mask, -torch.inf)
    kept, places = [], []
    for side in (logits[:, : tokens.n], logits[:, tokens.n :]):
        count = max(1, round(pruning.share * side.shape[1]))
        kept.append(side.topk(count, dim=1).indices.sort(dim=1).values)
        here = torch.arange(count, device=side.device).expand_as(kept[-1])
        places.append(torch.full_like(side, UNMATCHED, dtype=torch.int64).scatter_(1, kept[-1], here))
    order = torch.cat([kept[0], kept[1] + tokens.n], dim=1)
    rows = torch.arange(len(order), device=order.device).unsqueeze(1)
    names = ("x", "index", "positions", "rotations", "mask", "predicted")
    columns = {name: None if (c := getattr(tokens, name)) is None else c[rows, order] for name in names}
    partners, targets, masks = [], [], []
    for side in (0, 1):
        before = labels.partners[side].gather(1, kept[side])
        after = places[1 - side].gather(1, before.clamp_min(0))
        partners.append(torch.where(before >= 0, after, before))
        targets.append(labels.targets[side].gather(1, kept[side].unsqueeze(2).expand(-1, -1, 2)))
        masks.append(labels.masks[side].gather(1, kept[side]))
    valid = np.ones(order.shape, bool) if tokens.mask is None else columns["mask"].cpu().numpy()
    return replace(tokens, n=kept[0].shape[1], valid=valid, **columns), Labels(
        tuple(partners), tuple(targets), tuple(masks)
    )


def assigned(model: MatchingNetwork, layer: LabelledLayer, depth: int, iterations: int) -> Tensor:
    """Log P (B, N+1, M+1) after a layer, with all rounds of consensus."""
    return _assignments(
        model, layer, scores_of(model, layer, depth), iterations, model.config.assignment.consensus
    )[-1]


def scores_of(model: MatchingNetwork, layer: LabelledLayer, depth: int) -> Tensor:
    """Scores with dustbins (B, N+1, M+1) of a layer; points that do not exist go to their dustbins."""
    mask0, mask1 = layer.labels.masks
    with mixed_precision(mask0.device):
        scores = model.scores(*layer.sides, depth)
    valid = F.pad(mask0, (0, 1), value=True).unsqueeze(2) & F.pad(mask1, (0, 1), value=True).unsqueeze(1)
    dustbin = torch.ones_like(valid)
    dustbin[:, :-1, :-1] = False
    return scores.masked_fill(~valid & ~dustbin, MASKED).masked_fill(~valid & dustbin, 0.0)


def _assignments(
    model: MatchingNetwork, layer: LabelledLayer, scores: Tensor, iterations: int, rounds: int
) -> list[Tensor]:
    """Differentiable log P (B, N+1, M+1) of scores, and after each round of consensus."""
    if model.config.assignment.kind == "dual_softmax":
        found = dual_softmax(scores)
        rows = torch.cat([found.log_scores, found.log_unmatched0.unsqueeze(2)], dim=2)
        return [torch.cat([rows, F.pad(found.log_unmatched1, (0, 1)).unsqueeze(1)], dim=1)]
    found = [log_assignment(scores, iterations, UNROLLED)]
    for _ in range(rounds):
        matches = soft_matches(found[-1][:, :-1, :-1])
        updated = model.consensus(scores, *(side.positions for side in layer.sides), matches)
        found.append(log_assignment(updated, iterations, UNROLLED))
    return found


def matching_loss(
    model: MatchingNetwork, batch: PairBatch, recipe: MatcherRecipe, rng: torch.Generator
) -> Tensor:
    """Mean over some inner layers, drawn at random, and the last one, plus the loss of the last one.

    Where points are dropped, the heads for that learn along, from batches with all points; the network gets
    no gradient from them.

    Args:
        model: the network.
        batch: keypoints with their partners.
        recipe: what is drawn.
        rng: draws the inner layers, and the points that go on.
    """
    pruning = Pruning.drawn(recipe.kept_shares, len(model.layers), rng)
    layers = labelled_layers(model, batch, pruning)
    last = len(layers) - 1
    inner = torch.randperm(last, generator=rng)[: recipe.inner_layers].tolist()
    if not model.config.assignment.every_layer:  # one head, for the last layer only
        inner = []
    losses = []
    for depth in (*inner, last):
        layer, partners = layers[depth], layers[depth].labels.partners
        scores = scores_of(model, layer, depth)
        steady = matchability_loss(scores, *partners)
        # A small weight: only a drift of scores is held back, which no assignment shows.
        steady = steady + 1e-3 * mean_similarity_loss(scores, *layer.labels.masks)
        rounds = model.config.assignment.consensus if depth == last else 0
        found = _assignments(model, layer, scores, recipe.sinkhorn_iterations, rounds)
        losses += [assignment_loss(log_p, *partners) + steady for log_p in found]
    loss = torch.stack(losses).mean() + losses[-1]
    if recipe.prunes and pruning is None:
        final, valid = decisions(found[-1].detach()), torch.cat(layers[0].labels.masks, dim=1)
        tokens = [torch.cat([side.x for side in layer.sides], dim=1).detach() for layer in layers[:-1]]
        heads = [
            match_probability_loss(head(x).squeeze(2), final, valid)
            for head, x in zip(model.match_probability, tokens, strict=True)
        ]
        loss = loss + torch.stack(heads).mean()
    if model.guidance is None:
        return loss
    errors = [
        correspondence_loss(side.predicted, target.nan_to_num(0.0), target.isfinite().all(-1))
        for layer in layers
        for side, target in zip(layer.sides, layer.labels.targets, strict=True)
    ]
    return loss + 2.0 * torch.stack(errors).mean()


def head_loss(model: MatchingNetwork, batch: PairBatch, recipe: MatcherRecipe) -> Tensor:
    """The loss of the heads for early exit and pruning below the last layer; nothing else gets gradients."""
    with torch.no_grad():
        layers = labelled_layers(model, batch)
        decided = [
            decisions(assigned(model, layer, depth, recipe.sinkhorn_iterations))
            for depth, layer in enumerate(layers)
        ]
    losses, valid = [], torch.cat(layers[0].labels.masks, dim=1)
    for depth, (layer, current) in enumerate(zip(layers[:-1], decided[:-1], strict=True)):
        x = torch.cat([side.x for side in layer.sides], dim=1)
        losses.append(confidence_loss(model.confidence[depth](x).squeeze(2), current, decided[-1]))
        if model.config.match_probability:
            logits = model.match_probability[depth](x).squeeze(2)
            losses.append(match_probability_loss(logits, decided[-1], valid))
    return torch.stack(losses).mean()


# --- Keypoints. Images and their pairs are in the order of `pairs`.

APART = 4.0  # pixels; descriptors of nearer points need not differ


@torch.no_grad()
def nearest_of_other(corresponding: Tensor, points: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For transferred keypoints (2B, K, 2): index (2B, K) of the nearest keypoint of the other image, all
    distances (2B, K, K), and (2B, K) bool whether they are mutual nearest neighbours."""
    distance = torch.cdist(corresponding, other_of_pair(points))
    distance = distance.masked_fill(~other_of_pair(valid)[:, None], 1e4)
    nearest = distance.argmin(2)
    backward = distance.argmin(1).gather(1, nearest)
    return nearest, distance, backward == torch.arange(nearest.shape[1], device=nearest.device)


def refinement_loss(corresponding: Tensor, others: Tensor, nearest: Tensor, counted: Tensor) -> Tensor:
    """Distance of each transferred keypoint from the nearest keypoint of the other image.

    The reprojection loss of ALIKE (Zhao et al. 2022, eq. 6).

    Args:
        corresponding: (2B, K, 2) positions of the keypoints in the other image.
        others: (2B, K, 2) keypoints of the other image.
        nearest: (2B, K) index of the nearest of them.
        counted: (2B, K) bool, keypoints that count.
    """
    target = others.gather(1, nearest[..., None].expand(-1, -1, 2))
    return mean_of(smooth_l1_loss(corresponding, target, reduction="none", beta=0.25).sum(-1), counted)


def reliability_loss(logits: Tensor, matched: Tensor, visible: Tensor) -> Tensor:
    """Binary cross-entropy of keypoint scores, as probabilities of being repeatable and matched correctly.

    As in SiLK (Gleize et al. 2023, section 3.2), the current descriptors decide which keypoints match.
    """
    return mean_of(binary_cross_entropy_with_logits(logits, matched.float(), reduction="none"), visible)


@dataclass(frozen=True, eq=False)
class DescribedKeypoints:
    """Keypoints of 2B images with their descriptors."""

    descriptors: Tensor  # (2B, K, D)
    corresponding_descriptors: Tensor  # (2B, K, D) at their positions in the other image
    positions: Tensor  # (2B, K, 2)
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist


def description_loss(points: DescribedKeypoints, chosen: Tensor, visible: Tensor, scale: Tensor) -> Tensor:
    """Negative log-likelihood (dual softmax) of matching keypoints to their positions in the other image.

    Negatives are the other chosen points and every keypoint that was detected, in this image and in the other
    one, whether it is visible in both or not; but none nearer than `APART`.

    Args:
        points: all keypoints.
        chosen: (N,) int64, those that are supervised.
        visible: (2B, N) bool, which of them are visible in the other image.
        scale: of the similarities.
    """
    own, corresponding = points.descriptors[:, chosen], points.corresponding[:, chosen]
    matching = points.corresponding_descriptors[:, chosen]
    itself = chosen.unsqueeze(1) == torch.arange(points.valid.shape[1], device=own.device)
    # Each chosen point with the corresponding positions and the keypoints of the other image.
    near = (torch.cdist(corresponding, corresponding) < APART) | ~visible[:, None]
    near &= ~torch.eye(len(chosen), dtype=torch.bool, device=own.device)
    others = other_of_pair(points.positions)
    masked = (torch.cdist(corresponding, others) < APART) | ~other_of_pair(points.valid)[:, None]
    similarity = torch.cat([own @ matching.mT, own @ other_of_pair(points.descriptors).mT], dim=2)
    similarity = (scale * similarity).masked_fill(torch.cat([near, masked], dim=2), MASKED)
    forward = similarity.log_softmax(2)[:, :, : len(chosen)].diagonal(dim1=1, dim2=2)
    # Each corresponding position with the keypoints of this image.
    masked = torch.cdist(points.positions[:, chosen], points.positions) < APART
    masked = (masked | ~points.valid[:, None]) & ~itself
    similarity = (scale * matching @ points.descriptors.mT).masked_fill(masked, MASKED)
    backward = similarity.log_softmax(2).gather(2, chosen.expand(len(own), -1).unsqueeze(2)).squeeze(2)
    return mean_of(-(forward + backward), visible)
