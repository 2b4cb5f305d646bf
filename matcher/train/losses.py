"""Losses: negative log-likelihood of the ground-truth assignment, matchability, positions, confidences."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import binary_cross_entropy_with_logits, smooth_l1_loss
from torch.optim import Optimizer

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.protocols import PhotoSet
from matcher.extract.front_end import grey
from matcher.extract.learned import BORDER, NMS_RADIUS, FeatureNetwork, candidates, refine
from matcher.match.consensus import soft_matches
from matcher.match.network import MatchingNetwork, Tokens, resolve_precision
from matcher.match.position import Side, normalise_positions
from matcher.match.sinkhorn import dual_softmax, log_assignment
from matcher.match.steering import TURNS, steered
from matcher.torch_engine import build_extractor
from matcher.train.cached_pairs import PairBatch
from matcher.train.optimisers import Schedule, done_share, learning_rate_share, prunes, set_learning_rate
from matcher.train.recipe import OptimiserRecipe, fingerprint, load_state, save_state
from matcher.types import UNMATCHED, Features, Image

# --- losses: Losses: negative log-likelihood of the ground-truth assignment, matchability, positions,
# confidences.

POSITION_SCALE = 0.05  # in normalised positions


def log_dual_softmax(scores: Tensor) -> Tensor:
    """Log P (B, N+1, M+1) of `dual_softmax`; the corner, which no loss reads, is 0."""
    found = dual_softmax(scores)
    rows = torch.cat([found.log_scores, found.log_unmatched0.unsqueeze(2)], dim=2)
    return torch.cat([rows, F.pad(found.log_unmatched1, (0, 1)).unsqueeze(1)], dim=1)


def assignment_loss(log_p: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Mean −log P of ground-truth matches and of the dustbins of unmatched points, weighted equally.

    SuperGlue, eq. 10.

    Args:
        log_p: (B, N+1, M+1), from `log_assignment`.
        partner0, partner1: (B, N), (B, M) ground-truth partners, UNMATCHED or IGNORED.
    """
    matched = log_p[:, :-1].gather(2, partner0.clamp_min(0).unsqueeze(2)).squeeze(2)
    unmatched0 = _mean(log_p[:, :-1, -1], partner0 == UNMATCHED)
    unmatched1 = _mean(log_p[:, -1, :-1], partner1 == UNMATCHED)
    return -0.5 * _mean(matched, partner0 >= 0) - 0.25 * (unmatched0 + unmatched1)


def matchability_loss(scores: Tensor, partner0: Tensor, partner1: Tensor) -> Tensor:
    """Binary cross-entropy that calibrates the matchability logits, so that pruning can use a threshold."""
    return _matchability_loss(-scores[:, :-1, -1], partner0) + _matchability_loss(
        -scores[:, -1, :-1], partner1
    )


def mean_similarity_loss(scores: Tensor) -> Tensor:
    """Mean square of each point's mean similarity, over the points of both images.

    What is added to all scores of a point, its dustbin's included, changes no assignment, so that nothing in
    `assignment_loss` keeps it small: without this, similarities drift to hundreds, where rounding and the
    limited number of Sinkhorn iterations spoil assignments.

    Args:
        scores: (B, N+1, M+1) with dustbins, as the head gives them.
    """
    similarities = scores[:, :-1, :-1]
    return similarities.mean(2).square().mean() + similarities.mean(1).square().mean()


def correspondence_loss(predicted: Tensor, ground_truth: Tensor, visible: Tensor) -> Tensor:
    """Robust distance of predicted positions (…, N, 2) from the ground truth, over `visible` points (…, N).

    Logarithmic: steep for small errors, which rewards accuracy, and flat for outliers.
    """
    distance = (predicted - ground_truth).norm(dim=-1)
    return 0.25 * _mean(torch.log1p(distance / POSITION_SCALE), visible)


def _matchability_loss(logits: Tensor, partner: Tensor) -> Tensor:
    known = (partner >= 0) | (partner == UNMATCHED)
    return _mean(F.binary_cross_entropy_with_logits(logits, (partner >= 0).float(), reduction="none"), known)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return (values * chosen).sum() / chosen.sum().clamp_min(1)


def decisions(log_p: Tensor) -> Tensor:
    """(B, N + M) the assigned point of the other image for each point, or UNMATCHED."""
    columns, rows = log_p.shape[2] - 1, log_p.shape[1] - 1
    partner0, partner1 = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    return torch.cat(
        [p.masked_fill(p == dustbin, UNMATCHED) for p, dustbin in ((partner0, columns), (partner1, rows))],
        dim=1,
    )


def confidence_loss(logits: Tensor, current: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "this layer has the same assignment as the last one" (LightGlue, section 3.3).

    Points that are unmatched in the last layer are left out: nearly all of them are unmatched from the first
    layer on, and would dominate the loss.

    Args:
        logits: (B, N + M) of the confidence head.
        current, final: (B, N + M) `decisions` of this and of the last layer.
    """
    same = (current == final).float()
    return _mean(F.binary_cross_entropy_with_logits(logits, same, reduction="none"), final >= 0)


def match_probability_loss(logits: Tensor, final: Tensor) -> Tensor:
    """Binary cross-entropy of "matched in the last layer"; arguments as in `confidence_loss`."""
    return F.binary_cross_entropy_with_logits(logits, (final >= 0).float())


# --- stage: The steps of a training: optimisers, a moving average of the parameters, checkpoints.


class Batch(Protocol):
    """The data of one step; its length is the number of pairs."""

    def __len__(self) -> int: ...


Net = TypeVar("Net", bound=nn.Module)
TrainingBatch = TypeVar("TrainingBatch", bound=Batch)


@dataclass
class Progress:
    """The progress of a run; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # of steps and of waiting for batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    history: list[dict[str, float]] = field(default_factory=list)  # rows of the log


class Stage(Generic[Net, TrainingBatch]):
    """A network, its moving average and its optimisers; `step` takes one batch.

    A subclass defines the loss.

    Args:
        recipe: of the subclass.
        schedule: learning rate, moving average and end.
        model: the network.
        optimisers: of its parameters.
        device: that it is on.
        rates: learning rate of each optimiser, relative to the schedule's.
    """

    def __init__(
        self,
        recipe: Any,
        schedule: Schedule,
        model: Net,
        optimisers: Sequence[Optimizer],
        device: torch.device,
        rates: Sequence[float],
    ) -> None:
        self.recipe, self.schedule, self.device = recipe, schedule, device
        self.model, self.optimisers, self.rates = model, list(optimisers), rates
        self.average = copy.deepcopy(model).requires_grad_(False).eval()
        self.progress = Progress()

    def loss(self, batch: TrainingBatch) -> Tensor:
        """The loss of one batch, with gradients."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the time is over."""
        return done_share(self.schedule, self.progress.step, self.progress.seconds) == 1

    def step(self, batch: TrainingBatch) -> float:
        """One update; returns the loss, NaN if it or its gradient was not finite and the step was skipped."""
        schedule, progress = self.schedule, self.progress
        rate = schedule.learning_rate * learning_rate_share(schedule, progress.step, progress.seconds)
        set_learning_rate(self.optimisers, [rate * relative for relative in self.rates])
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self.loss(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), schedule.gradient_clip)
        # The only time in a step that a GPU is waited for: both numbers are read together.
        value, norm = torch.stack([loss.detach(), norm]).tolist()
        finite = math.isfinite(value) and math.isfinite(norm)
        if finite:
            for optimiser in self.optimisers:
                optimiser.step()
            self._update_average()
        progress.skipped += not finite
        progress.step += 1
        progress.pairs += len(batch)
        return value if finite else math.nan

    @torch.no_grad()
    def _update_average(self) -> None:
        """Exponential moving average, over few steps at first, so that early validations are meaningful."""
        decay = min(self.schedule.average_decay, (1 + self.progress.step) / (10 + self.progress.step))
        for mean, value in zip(self._values(self.average), self._values(self.model), strict=True):
            mean.lerp_(value, 1 - decay)

    @staticmethod
    def _values(model: nn.Module) -> list[Tensor]:
        """Parameters, and the statistics of batch normalisation."""
        return [value for value in (*model.parameters(), *model.buffers()) if value.is_floating_point()]

    def save(self, path: Path) -> None:
        """Write a checkpoint, whole or not at all.

        Raises:
            OSError: the disk is full; an earlier checkpoint is kept.
        """
        state = {
            "recipe": fingerprint(self.recipe),
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "progress": vars(self.progress),
        }
        save_state(path, state)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            IntegrityError: the checkpoint is damaged.
            UsageError: it belongs to another recipe.
        """
        state = load_state(path)
        # Checkpoints of the first version do not name their recipe; recipe.json in their folder does.
        if state.get("recipe", fingerprint(self.recipe)) != fingerprint(self.recipe):
            raise UsageError(f"{path} is a checkpoint of another recipe; give another --run folder")
        try:
            self._restore(state)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise IntegrityError(
                f"{path} does not fit this network ({reason}); delete it to start again"
            ) from error

    def _restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)
        self.progress = Progress(**state["progress"])


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 where the device is fast at it, else float32."""
    fast = resolve_precision("auto", device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


# --- labelled_layers: The network's layers on a training batch, each with the ground truth of the points
# that it has left.

PRUNED_AFTER = 3  # points are dropped after one of so many first layers, never after the last


@dataclass(frozen=True, eq=False)
class Labels:
    """Ground truth of the points of both images of B pairs."""

    partners: tuple[Tensor, Tensor]  # (B, N), (B, M) int64, UNMATCHED or IGNORED
    targets: tuple[Tensor, Tensor]  # (B, N, 2), (B, M, 2) normalised, in the other image; NaN if not visible

    @classmethod
    def of(cls, batch: PairBatch, device: torch.device) -> Labels:
        """Those of a batch, with all its points."""
        targets = (
            _targets(batch.corresponding0, batch.features1),
            _targets(batch.corresponding1, batch.features0),
        )
        partners = batch.partner0.to(device), batch.partner1.to(device)
        return cls(partners, tuple(target.to(device) for target in targets))


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
        layers = min(PRUNED_AFTER, depth - 1)
        if share == 1 or not layers:
            return None
        return cls(int(torch.randint(layers, (1,), generator=rng)), share)


def labelled_layers(
    model: MatchingNetwork,
    batch: PairBatch,
    device: torch.device,
    pruning: Pruning | None = None,
    *,
    align: bool = True,
) -> list[LabelledLayer]:
    """All layers on a batch, without early exit.

    Args:
        model: the network.
        batch: pairs with as many points in every image.
        device: of the network.
        pruning: which points are dropped; None: none.
        align: whether to turn descriptors to fit, where the batch does not know the turn of each image.
    """
    labels, layers = Labels.of(batch, device), []
    with mixed_precision(device):
        features0, features1 = batch.features0.to(device), batch.features1.to(device)
        tokens = model.tokens(features0, features1, align=align and not batch.turns_known, complete=True)
        for depth in range(len(model.layers)):
            tokens = model.advance(tokens, depth)
            layers.append(LabelledLayer(_paired(tokens), labels))
            if pruning is not None and depth == pruning.after:
                tokens, labels = _pruned(model, tokens, labels, pruning)
    return layers


def _targets(positions: Tensor, other: Features) -> Tensor:
    """Positions (B, N, 2) in the other image, normalised; NaN stays."""
    normalised = normalise_positions(other.with_valid(keypoints=positions.nan_to_num(0.0)))
    return normalised.masked_fill(positions.isnan(), torch.nan)


def _paired(tokens: Tokens) -> tuple[Side, Side]:
    """Tokens of both images in float32."""
    first, second = (Side(*(None if x is None else x.float() for x in side)) for side in tokens.sides)
    return first, second


def _pruned(
    model: MatchingNetwork, tokens: Tokens, labels: Labels, pruning: Pruning
) -> tuple[Tokens, Labels]:
    """The likeliest points of each image. One whose partner is dropped has none."""
    count = tokens.n
    kept_count = max(1, round(pruning.share * count))
    # In half precision many points would be equally likely.
    with torch.no_grad(), torch.autocast(tokens.x.device.type, enabled=False):
        probabilities = model.match_probabilities(tokens.x.float(), pruning.after).reshape(-1, count)
        kept = probabilities.topk(kept_count, dim=1).indices.sort(dim=1).values  # (2B, K)
    marked = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, kept, True)
    entries = range(len(tokens.pairs))
    tokens = tokens.take(entries, marked.unflatten(0, (-1, 2)).flatten(1), [[kept_count] * 2] * len(entries))
    places = torch.full_like(probabilities, UNMATCHED, dtype=torch.int64)
    places.scatter_(1, kept, torch.arange(kept_count, device=kept.device).expand_as(kept))
    sides = (kept[0::2], places[1::2]), (kept[1::2], places[0::2])
    partners, targets = [], []
    for (own, others), partner, target in zip(sides, labels.partners, labels.targets, strict=True):
        before = partner.gather(1, own)
        partners.append(torch.where(before >= 0, others.gather(1, before.clamp_min(0)), before))
        targets.append(target.gather(1, own.unsqueeze(2).expand(-1, -1, 2)))
    return tokens, Labels(tuple(partners), tuple(targets))


# --- matching_loss: The matcher's loss on a batch of labelled pairs: assignment at several layers,
# predicted positions.


def matching_loss(
    model: MatchingNetwork, layers: list[LabelledLayer], recipe: OptimiserRecipe, rng: torch.Generator
) -> Tensor:
    """Mean over some inner layers, drawn at random, and the last one, plus the loss of the last one.

    Args:
        model: the network. Where points are dropped in training, its heads for that learn along, from batches
            with all points; the network gets no gradient from them.
        layers: from `labelled_layers`.
        recipe: weights of the losses, number of inner layers.
        rng: draws the inner layers.
    """
    device = layers[-1].sides[0].x.device
    learning = len(layers) - 1 - recipe.frozen_layers
    inner = torch.randperm(learning, generator=rng)[: recipe.inner_layers] + recipe.frozen_layers
    inner = inner.tolist()
    if not model.config.assignment.every_layer:  # one head, for the last layer only
        inner = []
    losses = []
    for depth in (*inner, len(layers) - 1):
        sides, partners = layers[depth].sides, layers[depth].labels.partners
        with mixed_precision(device):
            scores = model.scores(*sides, depth)
        steady = recipe.matchability_weight * matchability_loss(scores, *partners)
        steady = steady + recipe.mean_similarity_weight * mean_similarity_loss(scores)
        rounds = 0 if depth in inner else model.config.assignment.consensus
        found = assignments(model, scores, sides, recipe, rounds)
        losses += [assignment_loss(log_p, *partners) + steady for log_p in found]
    loss = torch.stack(losses).mean() + losses[-1]
    if prunes(recipe) and layers[0].labels is layers[-1].labels:
        loss = loss + _pruning_loss(model, layers, decisions(found[-1].detach()))
    if model.guidance is None:
        return loss
    return loss + recipe.correspondence_weight * _correspondence_loss(layers)


def _pruning_loss(model: MatchingNetwork, layers: list[LabelledLayer], final: Tensor) -> Tensor:
    """That of the match-probability heads; `final` (B, N + M) are the decisions of the last layer."""
    losses = []
    for head, layer in zip(model.match_probability, layers[:-1], strict=True):
        x = torch.cat([side.x for side in layer.sides], dim=1).detach()
        losses.append(match_probability_loss(head(x).squeeze(2), final))
    return torch.stack(losses).mean()


def _correspondence_loss(layers: list[LabelledLayer]) -> Tensor:
    """Mean over all layers and both images."""
    losses = []
    for layer in layers:
        for side, target in zip(layer.sides, layer.labels.targets, strict=True):
            visible = target.isfinite().all(-1)
            losses.append(correspondence_loss(side.predicted, target.nan_to_num(0.0), visible))
    return torch.stack(losses).mean()


def assignments(
    model: MatchingNetwork, scores: Tensor, sides: tuple[Side, Side], recipe: OptimiserRecipe, rounds: int
) -> list[Tensor]:
    """Differentiable log P (B, N+1, M+1) of scores, and after each round of consensus."""
    if model.config.assignment.kind == "dual_softmax":
        return [log_dual_softmax(scores)]
    found = [log_assignment(scores, recipe.sinkhorn_iterations, recipe.unrolled_iterations)]
    for _ in range(rounds):
        matches = soft_matches(found[-1][:, :-1, :-1])
        updated = model.consensus(scores, *(side.positions for side in sides), matches)
        found.append(log_assignment(updated, recipe.sinkhorn_iterations, recipe.unrolled_iterations))
    return found


# --- projection: Fitting a trained matcher's projection of descriptors to another front end.

PHOTOS, POINTS = 60, 800  # photos, and keypoints of each
SEED = 7


@torch.no_grad()
def fit_projection(model: MatchingNetwork, before: str, now: str, photos: Sequence[Path]) -> float:
    """Change the projection so that descriptors of a new front end give the tokens of the old one.

    Least squares over keypoints of the new front end in photos, with the descriptors of both, in all four
    rotations by 90 degrees.

    Args:
        model: its `project` is replaced in place.
        before: weights file of the front end that the matcher was trained for; empty: the shipped one.
        now: weights file of the new front end; empty: the shipped one.
        photos: in which keypoints are detected.

    Returns:
        The share of the tokens' variance that the fit explains, on held-out photos.

    Raises:
        IntegrityError: a weights file is absent, damaged, or of another front end.
        UsageError: the network has no projection, or no photo can be read.
    """
    if not isinstance(model.project, torch.nn.Linear):
        raise UsageError("start_front_end: this network does not project descriptors; remove it")
    old, new = _network(before), _network(now)
    drawn = PhotoSet(photos).draw(min(PHOTOS, len(photos)), np.random.default_rng(SEED)).values()
    descriptors = [_descriptors(old, new, photo) for photo in drawn]
    tokens = [model.project(olds) for olds, _ in descriptors]
    kept = max(1, len(descriptors) * 4 // 5)
    inputs = torch.cat([_with_one(news) for _, news in descriptors[:kept]])
    solution = torch.linalg.lstsq(inputs.double(), torch.cat(tokens[:kept]).double()).solution.float()
    model.project.weight.copy_(solution[:-1].T)
    model.project.bias.copy_(solution[-1])
    held_out = slice(kept, None) if kept < len(descriptors) else slice(None)
    target = torch.cat(tokens[held_out])
    error = target - torch.cat([model.project(news) for _, news in descriptors[held_out]])
    return float(1 - error.square().sum() / (target - target.mean(0)).square().sum())


def _network(weights: str) -> FeatureNetwork:
    return build_extractor(ExtractorConfig(kind="learned"), weights or None, precision="float32").network


def _descriptors(old: FeatureNetwork, new: FeatureNetwork, photo: np.ndarray) -> tuple[Tensor, Tensor]:
    """Descriptors (4N, 64) of the new front end's keypoints by both networks, in each rotation."""
    image = Image(photo, photo.shape[1::-1])
    pixels = grey(image, torch.device("cpu"))
    (_, olds), (logits, news) = old(pixels), new(pixels)
    y, x = candidates(logits, NMS_RADIUS, BORDER)[0].nonzero().T
    best = logits[0, y, x].topk(min(POINTS, len(x))).indices
    points = refine(logits, torch.stack([x, y], dim=-1)[None, best])
    pair = old.describe(olds, points), new.describe(news, points)
    turns = torch.arange(TURNS)
    return tuple(steered(found.expand(TURNS, -1, -1), turns).flatten(0, 1) for found in pair)


def _with_one(values: Tensor) -> Tensor:
    return torch.cat([values, values.new_ones(len(values), 1)], dim=1)


# --- losses: Losses for repeatable, accurate and distinctive keypoints. Images 2b and 2b + 1 of a batch are
# a pair.

_MASKED = -1e4  # a logit without probability


def other_of_pair(values: Tensor) -> Tensor:
    """For each image, the values of the other image of its pair."""
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


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


@dataclass(frozen=True)
class DescribedKeypoints:
    """Keypoints of 2B images with their descriptors; images 2b and 2b + 1 are a pair."""

    descriptors: Tensor  # (2B, K, D)
    corresponding_descriptors: Tensor  # (2B, K, D) at their positions in the other image
    positions: Tensor  # (2B, K, 2)
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist


def description_loss(
    points: DescribedKeypoints, chosen: Tensor, visible: Tensor, scale: Tensor, apart: float
) -> Tensor:
    """Negative log-likelihood (dual softmax) of matching keypoints to their positions in the other image.

    Negatives are the other chosen points and every keypoint that was detected, in this image and in the other
    one, whether it is visible in both or not.

    Args:
        points: all keypoints.
        chosen: (N,) int64, those that are supervised.
        visible: (2B, N) bool, which of them are visible in the other image.
        scale: of the similarities.
        apart: pixels; the descriptors of nearer points need not differ.
    """
    own, corresponding = points.descriptors[:, chosen], points.corresponding[:, chosen]
    matching = points.corresponding_descriptors[:, chosen]
    itself = chosen.unsqueeze(1) == torch.arange(points.valid.shape[1], device=own.device)
    # Each chosen point with the corresponding positions and the keypoints of the other image.
    near = (torch.cdist(corresponding, corresponding) < apart) | ~visible[:, None]
    near &= ~torch.eye(len(chosen), dtype=torch.bool, device=own.device)
    others = other_of_pair(points.positions)
    masked = (torch.cdist(corresponding, others) < apart) | ~other_of_pair(points.valid)[:, None]
    similarity = torch.cat([own @ matching.mT, own @ other_of_pair(points.descriptors).mT], dim=2)
    similarity = (scale * similarity).masked_fill(torch.cat([near, masked], dim=2), _MASKED)
    forward = similarity.log_softmax(2)[:, :, : len(chosen)].diagonal(dim1=1, dim2=2)
    # Each corresponding position with the keypoints of this image.
    masked = torch.cdist(points.positions[:, chosen], points.positions) < apart
    masked = (masked | ~points.valid[:, None]) & ~itself
    similarity = (scale * matching @ points.descriptors.mT).masked_fill(masked, _MASKED)
    backward = similarity.log_softmax(2).gather(2, chosen.expand(len(own), -1).unsqueeze(2)).squeeze(2)
    return mean_of(-(forward + backward), visible)


def mean_of(values: Tensor, chosen: Tensor) -> Tensor:
    """Mean of the chosen values; 0 without any."""
    return (values * chosen).sum() / chosen.sum().clamp(min=1)
