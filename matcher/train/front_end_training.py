"""A matcher that is trained along with the front end: the labels of a batch's keypoints, its loss, its F1.

Descriptors alone cannot know what a matcher makes of them; its loss reaches them here, as in SuperGlue's
end-to-end training (Sarlin et al. 2020, section 5.4).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from matcher.config import ExtractorConfig, to_dict
from matcher.errors import UsageError
from matcher.evaluate.folders import build_mixture
from matcher.evaluate.posed import HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE
from matcher.evaluate.protocols import PhotoSet, split_photos
from matcher.extract.learned import (
    BORDER,
    NMS_RADIUS,
    Architecture,
    FeatureNetwork,
    candidates,
    folded,
    grown,
    refine,
    unfolded,
)
from matcher.match.network import MatchingNetwork
from matcher.match.sinkhorn import mutual_best
from matcher.match.steering import STEERABLE, steered, turned_by
from matcher.torch_engine import build_extractor
from matcher.train import losses
from matcher.train.cached_pairs import IGNORED, PairBatch, keep_memory
from matcher.train.losses import (
    Pruning,
    Stage,
    assignments,
    decisions,
    labelled_layers,
    matching_loss,
    mixed_precision,
    other_of_pair,
)
from matcher.train.losses import (
    mean_of as masked_mean,
)
from matcher.train.matcher_training import (
    ConfidenceTrainer,
    Log,
    LogRow,
    Loop,
    RunOptions,
    Stopped,
    blend_with_start,
    train_heads,
)
from matcher.train.optimisers import build_optimisers, prunes
from matcher.train.recipe import (
    FrontEndRecipe,
    JointRecipe,
    OptimiserRecipe,
    PairRecipe,
    claim_folder,
    load_state,
)
from matcher.train.views import (
    BatchSampler,
    DeviceImageSampler,
    ImageBatch,
    Transferred,
    constant,
    load_views,
    partners,
    uploaded,
)
from matcher.types import Features
from matcher.weights.files import load_model, save_front_end, save_model

# --- joint: A matcher that is trained along with the front end: the labels of a batch's keypoints, its
# loss, its F1.

OPTIMISER = OptimiserRecipe(inner_layers=1)
LABELS = PairRecipe()


@dataclass(frozen=True, eq=False)
class BatchKeypoints:
    """The keypoints of a batch of 2B images; images 2b and 2b + 1 are a pair."""

    positions: Tensor  # (2B, K, 2), the strongest first
    descriptors: Tensor  # (2B, K, D), as the images are turned
    corresponding: Tensor  # (2B, K, 2) positions in the other image
    visible: Tensor  # (2B, K) bool, in the other image
    valid: Tensor  # (2B, K) bool, keypoints that exist

    def first(self, pairs: int) -> BatchKeypoints:
        """Those of the first pairs."""
        return BatchKeypoints(*(values[: 2 * pairs] for values in vars(self).values()))

    def strongest(self, count: int) -> BatchKeypoints:
        """The first of each image."""
        return BatchKeypoints(*(values[:, :count] for values in vars(self).values()))


def labelled(points: BatchKeypoints, batch: ImageBatch, count: int) -> PairBatch:
    """The first `count` keypoints of each image as pairs with ground-truth partners.

    Keypoints are ignored that do not exist, whose visibility is unknown, or that are hidden beside a contour.
    """
    points = points.strongest(count)
    positions, corresponding = points.positions.detach(), points.corresponding.detach()
    visible, valid = points.visible, points.valid
    hidden = torch.where(batch.surely_hidden(positions), HIDDEN_STATE, UNKNOWN_STATE)
    states = torch.where(visible, VISIBLE_STATE, hidden).masked_fill(~valid, UNKNOWN_STATE)
    found = corresponding.masked_fill(~visible[..., None], torch.nan)
    there = positions.masked_fill(~valid[..., None], torch.inf)
    labels = partners(
        there[0::2],
        there[1::2],
        Transferred(found[0::2], states[0::2]),
        Transferred(found[1::2], states[1::2]),
        LABELS,
    )
    sides = [_features(points, batch, side) for side in (0, 1)]
    return PairBatch(*sides, *labels, found[0::2], found[1::2])


def _features(points: BatchKeypoints, batch: ImageBatch, side: int) -> Features:
    """The keypoints of one image of each pair, turned as the first image of the pair."""
    height, width = batch.pixels.shape[2:]
    positions = points.positions[side::2].detach()
    features = Features.of_valid(
        keypoints=positions,
        descriptors=points.descriptors[side::2].float(),
        size=constant((width, height), positions.dtype, positions.device).expand(len(positions), 2),
        view_orientation=torch.ones(len(positions), dtype=torch.int64, device=positions.device),
        kind="learned",
    )
    return turned_by(features, -batch.turns[side::2] % 4)


def drawn_count(recipe: JointRecipe, rng: torch.Generator) -> int:
    """Keypoints of each image that are matched in a step."""
    return recipe.points[int(torch.randint(len(recipe.points), (1,), generator=rng))]


def matched_pairs(points: BatchKeypoints, batch: ImageBatch, count: int, recipe: JointRecipe) -> PairBatch:
    """As `labelled`, of as many of the pairs as the recipe has points for."""
    pairs = len(batch)
    if recipe.points_per_batch:
        pairs = min(pairs, max(1, recipe.points_per_batch // (2 * count)))
    return labelled(points.first(pairs), batch.first(pairs), count)


def joint_loss(
    matcher: MatchingNetwork,
    pairs: PairBatch,
    recipe: JointRecipe,
    device: torch.device,
    rng: torch.Generator,
) -> Tensor:
    """The loss of the matcher, with gradients to the descriptors."""
    optimiser = replace(OPTIMISER, kept_shares=recipe.kept_shares)
    pruning = Pruning.drawn(recipe.kept_shares, len(matcher.layers), rng)
    layers = labelled_layers(matcher, pairs, device, pruning, align=False)
    return matching_loss(matcher, layers, optimiser, rng)


@torch.no_grad()
def match_scores(
    matcher: MatchingNetwork, batches: Sequence[PairBatch], device: torch.device
) -> dict[str, float]:
    """Precision, recall and F1 of the most probable partners, over keypoints whose partner is known."""
    counts = torch.stack([_counted(matcher, pairs, device) for pairs in batches]).sum(0)
    right, found, wanted = counts.tolist()
    precision, recall = right / max(found, 1), right / max(wanted, 1)
    f1 = 2 * right / max(found + wanted, 1)
    return {"precision": precision, "recall": recall, "f1": f1}


def _counted(matcher: MatchingNetwork, pairs: PairBatch, device: torch.device) -> Tensor:
    """(3,) right matches, matches, and matches there are."""
    sides = labelled_layers(matcher, pairs, device, align=False)[-1].sides
    with mixed_precision(device):
        scores = matcher.scores(*sides, len(matcher.layers) - 1)
    rounds = matcher.config.assignment.consensus
    found = decisions(assignments(matcher, scores, sides, OPTIMISER, rounds)[-1])
    wanted = torch.cat([pairs.partner0, pairs.partner1], dim=1).to(device)
    known = wanted != IGNORED
    return torch.stack(
        [
            ((found == wanted) & (wanted >= 0)).sum(),
            ((found >= 0) & known).sum(),
            (wanted >= 0).sum(),
        ]
    )


# --- averaging: Averages of the parameters of several front ends.

SHIPPED = "learned"


def mean_of(files: Sequence[str], sizes: Architecture) -> FeatureNetwork:
    """The network with the mean parameters of weights files, `SHIPPED` among them, each grown to the sizes.

    Raises:
        IntegrityError: a file is absent, damaged, or of another network.
        UsageError: one holds a larger network.
    """
    networks = [_read(file, sizes) for file in files]
    for number, network in enumerate(networks[1:], start=2):
        blend(networks[0], network, 1 / number)
    return networks[0]


@torch.no_grad()
def blend(network: FeatureNetwork, other: FeatureNetwork, share: float) -> None:
    """Move the parameters of `network` towards those of `other` by `share`, 0 to 1."""
    for ours, theirs in zip(network.parameters(), other.parameters(), strict=True):
        ours.lerp_(theirs.to(ours), share)


def _read(file: str, sizes: Architecture) -> FeatureNetwork:
    path = None if file == SHIPPED else file
    network = build_extractor(ExtractorConfig(kind="learned"), path, precision="float32").network
    if not sizes.contains(network.sizes):
        raise UsageError(f"network: {sizes} is smaller than that of {file}, {network.sizes}")
    return grown(network, sizes)


# --- trainer: Training steps of the front end.

APART = 4.0  # pixels; descriptors of nearer points need not differ
FIRST_SCALE = 20.0  # of the similarities, initially; it is learned


class Describer(nn.Module):
    """The network; the scale of the similarities, which is needed in training only; a matcher, if any."""

    def __init__(self, sizes: Architecture, matcher: MatchingNetwork | None) -> None:
        super().__init__()
        self.network = FeatureNetwork(sizes, normalised=True)
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))
        self.matcher = matcher


class FrontEndTrainer(Stage[Describer, ImageBatch]):
    """Trains the positions, scores and descriptors of keypoints, and a matcher along if the recipe has one.

    Raises:
        IntegrityError: weights to start from are absent, damaged, or of another network.
        UsageError: the matcher is for another front end; a network to start from is larger than the recipe's.
    """

    def __init__(self, recipe: FrontEndRecipe, device: torch.device) -> None:
        start = [recipe.start, *recipe.start_also]
        self._trained = mean_of(start, recipe.network) if recipe.start else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = Describer(recipe.network, load_matcher(recipe.matcher)).to(device)
        model = model.to(memory_format=torch.channels_last)
        optimisers = optimisers_of(model, recipe)
        matching = recipe.matcher.learning_rate
        rates = (1.0, matching, matching * recipe.matcher.muon_rate)[: len(optimisers)]
        super().__init__(recipe, recipe.optimiser, model, optimisers, device, rates)

    def step(self, batch: ImageBatch) -> float:
        """As `Stage.step`; the first one of loaded weights restores batch normalisation from the images."""
        if self.progress.step == 0 and self._trained is not None:
            network = unfolded(self._trained.to(self.device), batch.pixels.to(self.device))
            for describer in (self.model, self.average):
                describer.network.load_state_dict(network.state_dict())
        return super().step(batch)

    def loss(self, batch: ImageBatch) -> Tensor:
        """The weighted sum of the losses; random choices depend on the step only."""
        network, batch, points = self.model.network, batch.to(self.device), self.recipe.optimiser.points
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        matched = drawn_count(self.recipe.matcher, rng) if self.model.matcher is not None else 0
        with mixed_precision(self.device):
            logits, maps = network(batch.pixels)
        maxima, valid = strongest(logits, max(points, matched))
        positions = refine(logits, maxima)
        corresponding, visible = batch.transfer(positions)
        with mixed_precision(self.device):
            # Descriptors of an image at its own keypoints and at those transferred from the other image.
            both = torch.cat([positions, losses.other_of_pair(corresponding[:, :points])], dim=1).detach()
            described = network.describe(maps, both)
        found = BatchKeypoints(
            positions, described[:, : positions.shape[1]], corresponding, visible & valid, valid
        )
        at = maxima[..., 1] * logits.shape[2] + maxima[..., 0]
        scored = logits.flatten(1).gather(1, at[:, :points])
        total = self._keypoint_loss(found.strongest(points), described[:, -points:], scored, batch.turns, rng)
        if self.model.matcher is not None:
            total = total + self.recipe.matcher.weight * self._matcher_loss(found, batch, matched, rng)
        return total

    def _keypoint_loss(
        self, points: BatchKeypoints, others: Tensor, logits: Tensor, turns: Tensor, rng: torch.Generator
    ) -> Tensor:
        """That of positions, scores and descriptors (2B, K).

        Args:
            points: keypoints.
            others: (2B, K, D) descriptors of each image at the keypoints of the other one.
            logits: (2B, K) of their scores.
            turns: (2B,) of the images.
            rng: draws the keypoints whose descriptors are supervised.
        """
        recipe, (positions, corresponding) = self.recipe.optimiser, (points.positions, points.corresponding)
        nearest, distance, mutual = nearest_of_other(corresponding, positions, points.valid)
        own, others = (steered(each, -turns) for each in (points.descriptors, others))
        chosen = uploaded(torch.randperm(recipe.points, generator=rng)[: recipe.described], self.device)
        near = points.visible & mutual & (distance.amin(2) < 1.5 * recipe.match_distance)
        repeatable = self._matched(own, points.valid, distance)
        described = losses.DescribedKeypoints(
            own, losses.other_of_pair(others), positions.detach(), corresponding.detach(), points.valid
        )
        refinement = losses.refinement_loss(corresponding, losses.other_of_pair(positions), nearest, near)
        reliability = losses.reliability_loss(logits, repeatable, points.visible)
        description = losses.description_loss(
            described, chosen, points.visible[:, chosen], self.model.log_scale.exp(), APART
        )
        return (
            recipe.refinement_weight * refinement
            + recipe.reliability_weight * reliability
            + recipe.description_weight * description
        )

    def _matcher_loss(
        self, points: BatchKeypoints, batch: ImageBatch, count: int, rng: torch.Generator
    ) -> Tensor:
        """That of the matcher."""
        recipe = self.recipe.matcher
        descriptors = points.descriptors.detach().lerp(points.descriptors, recipe.gradient)
        pairs = matched_pairs(replace(points, descriptors=descriptors), batch, count, recipe)
        return joint_loss(self.model.matcher, pairs, recipe, self.device, rng)

    @torch.no_grad()
    def _matched(self, own: Tensor, valid: Tensor, distance: Tensor) -> Tensor:
        """(2B, K) bool: keypoints whose descriptor has a mutual nearest neighbour at the correct position."""
        chosen, mutual = mutual_nearest(own @ losses.other_of_pair(own).mT, valid)
        near = distance.gather(2, chosen[..., None])[..., 0] < self.recipe.optimiser.match_distance
        return mutual & near


def load_matcher(recipe: JointRecipe) -> MatchingNetwork | None:
    """The matcher of the weights that the recipe starts from; None if it names none.

    Its heads for early exit are not trained along, those for pruning only if the recipe drops points.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: they are not for our front end, or have no heads that the recipe needs.
    """
    if not recipe.start:
        return None
    matcher, _, name = load_model(recipe.start)
    if matcher.config.kind != STEERABLE:
        raise UsageError(f"matcher.start: {name} matches the keypoints of {matcher.config.kind}, not ours")
    if recipe.confidence_steps and not len(matcher.confidence):
        raise UsageError(f"matcher.confidence_steps: {name} has no heads for early exit; leave it out")
    matcher.float().requires_grad_(True)
    matcher.confidence.requires_grad_(False)
    if not prunes(recipe):
        matcher.match_probability.requires_grad_(False)
    elif not len(matcher.match_probability):
        raise UsageError(f"matcher.kept_shares: {name} has no heads for pruning; leave it out")
    return matcher


def optimisers_of(model: Describer, recipe: FrontEndRecipe) -> list[Optimizer]:
    """AdamW for the front end; those of the matcher if there is one.

    Raises:
        UsageError: as `build_optimisers`.
    """
    front_end, rate = [*model.network.parameters(), model.log_scale], recipe.optimiser.learning_rate
    groups = [
        {"params": [p for p in front_end if p.ndim >= 2], "weight_decay": recipe.optimiser.weight_decay},
        {"params": [p for p in front_end if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimisers: list[Optimizer] = [torch.optim.AdamW(groups, lr=rate)]
    if model.matcher is not None:
        matching = OptimiserRecipe(
            learning_rate=rate,
            weight_decay=0.0,
            muon_rate=recipe.matcher.muon_rate,
            kept_shares=recipe.matcher.kept_shares,
        )
        optimisers += build_optimisers(model.matcher, matching)
    return optimisers


@torch.no_grad()
def strongest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The strongest local maxima (B, K, 2) int64 xy of logits (B, H, W), and (B, K) bool which exist."""
    width, allowed = logits.shape[2], candidates(logits, NMS_RADIUS, BORDER)
    top = logits.masked_fill(~allowed, -torch.inf).flatten(1).topk(count, dim=1)
    return torch.stack([top.indices % width, top.indices // width], dim=-1), top.values.isfinite()


@torch.no_grad()
def nearest_of_other(corresponding: Tensor, points: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For transferred keypoints (2B, K, 2): index (2B, K) of the nearest keypoint of the other image, all
    distances (2B, K, K), and (2B, K) bool whether they are mutual nearest neighbours."""
    distance = torch.cdist(corresponding, losses.other_of_pair(points))
    distance = distance.masked_fill(~losses.other_of_pair(valid)[:, None], 1e4)
    nearest = distance.argmin(2)
    backward = distance.argmin(1).gather(1, nearest)
    return nearest, distance, backward == torch.arange(nearest.shape[1], device=nearest.device)


def mutual_nearest(similarity: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Index (2B, K) of the nearest neighbour by similarities (2B, K, K) to the other image's keypoints, and
    whether it is mutual. `valid` (2B, K) bool: keypoints that exist."""
    similarity = similarity.masked_fill(~(valid[:, :, None] & losses.other_of_pair(valid)[:, None]), -2)
    _, chosen, mutual = mutual_best(similarity)
    return chosen, mutual & valid


# --- validation: Repeatability, and nearest-neighbour matches, on photos that are not trained on.

THRESHOLD = 3.0  # pixels


@torch.no_grad()
def validate(model: Describer, batches: Sequence[ImageBatch], points: int) -> dict[str, float]:
    """Means over all images of `batches`, with `points` keypoints per image, at 3 pixels.

    Returns:
        `repeatability`: share of the covisible keypoints that are detected in the other image too.
        `precision`: share of mutual nearest neighbours that are correct; `recall`: share of the repeatable
        keypoints that are matched correctly; `f1`: their harmonic mean. `error`: of correct matches in
        pixels. Where a matcher is trained along, precision, recall and `f1` are its own.
    """
    network = model.network
    was_training = network.training
    network.eval()
    rows = torch.cat([_measure(network, batch, points) for batch in batches])
    network.train(was_training)
    repeatability, precision, recall, error = (
        float(masked_mean(column.nan_to_num(0), ~column.isnan())) for column in rows.T
    )
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    scores = {"repeatability": repeatability, "precision": precision, "recall": recall}
    return {**scores, "error": error, "f1": f1, **_matched(model, batches, points)}


def _matched(model: Describer, batches: Sequence[ImageBatch], points: int) -> dict[str, float]:
    """The scores of the matcher, none without one."""
    if model.matcher is None:
        return {}
    device = model.log_scale.device
    batches = [batch.to(device) for batch in batches]
    pairs = [labelled(keypoints_of(model.network, batch, points), batch, points) for batch in batches]
    return match_scores(model.matcher, pairs, device)


def keypoints_of(network: FeatureNetwork, batch: ImageBatch, count: int) -> BatchKeypoints:
    """The strongest keypoints of each image, with their positions in the other one of its pair."""
    logits, maps = network(batch.pixels)
    maxima, valid = strongest(logits, count)
    points = refine(logits, maxima)
    corresponding, visible = batch.transfer(points)
    return BatchKeypoints(points, network.describe(maps, points), corresponding, visible & valid, valid)


def _measure(network: FeatureNetwork, batch: ImageBatch, count: int) -> Tensor:
    """(2B, 4) metrics, one row per image; NaN where the denominator is 0."""
    batch = batch.to(network.points.weight.device)
    points = keypoints_of(network, batch, count)
    visible = points.visible
    _, distance, _ = nearest_of_other(points.corresponding, points.positions, points.valid)
    own = steered(points.descriptors, -batch.turns)
    chosen, mutual = mutual_nearest(own @ other_of_pair(own).mT, points.valid)
    error = distance.gather(2, chosen[..., None])[..., 0]
    repeatable = visible & (distance.amin(2) < THRESHOLD)
    correct = mutual & visible & (error < THRESHOLD)
    shares = [
        repeatable.sum(1) / visible.sum(1),
        correct.sum(1) / mutual.sum(1),
        correct.sum(1) / repeatable.sum(1),
        (error * correct).sum(1) / correct.sum(1),
    ]
    return torch.stack(shares, dim=1).cpu()


# --- run: From a folder of photos to the front end's weights file.

VALIDATION_ENLARGED = 1.5  # sides of validation images, relative to those of training
CUDA_READERS = 12  # threads that prepare batches for a GPU


def train_front_end(
    recipe: FrontEndRecipe,
    options: RunOptions,
    log: Log,
    *,
    stopped: Callable[[], bool] = lambda: False,
    on_validation: Callable[[Sequence[LogRow]], None] = lambda rows: None,
) -> Path | None:
    """Train until the recipe's steps are done, from the last checkpoint if the folder has one.

    Arguments, result and errors are those of `matcher.train.matcher_training.train`. A matcher that is
    trained along has its own weights file beside the front end's.
    """
    options.stored_folders(recipe.sources.shares())  # before anything is made
    training, held_out = split_photos(options.photos, options.validation_photos, recipe.seed)
    log(f"{len(training)} photos to train on, {len(held_out)} to validate on")
    if options.view_workers > 1:
        raise UsageError("a front end's pairs are made while it trains; leave out `--view-workers`")
    claim_folder(options.folder, recipe, held_out)
    keep_memory()
    trainer = FrontEndTrainer(recipe, torch.device(options.device))
    validation = _validation_sampler(recipe, held_out)
    batches = [validation.batch(number) for number in range(recipe.validation_pairs)]
    photo_set = PhotoSet(training, colour=True)

    def scores_of(model: Describer) -> LogRow:
        return validate(model, batches, recipe.validation_points)

    loop = Loop(
        trainer,
        lambda: scores_of(trainer.average),
        options.folder,
        log,
        stopped,
        on_validation,
        _reporting_unreadable(photo_set, log),
    )
    loop.resume()
    readers = CUDA_READERS if options.device == "cuda" else 1
    sampler = _training_sampler(recipe, photo_set, options, log)
    drawn = partial(sampler.batches, readers=readers)
    try:
        loop.run(drawn(trainer.progress.step, recipe.optimiser.steps))
        _finish(loop, drawn)
    except Stopped:
        return None
    return _write(loop, scores_of)


def _reporting_unreadable(photos: PhotoSet, log: Log) -> Callable[[], None]:
    """A function that logs each photo that could not be read since it was called."""
    reported: set[int] = set()

    def report() -> None:
        for number in photos.unreadable - reported:
            log(f"skipped {photos.photos[number]}: it cannot be read")
        reported.update(photos.unreadable)

    return report


def _training_sampler(
    recipe: FrontEndRecipe, photos: PhotoSet, options: RunOptions, log: Log
) -> BatchSampler | DeviceImageSampler:
    """Pairs made on the device, or read and warped by threads."""
    shares = recipe.sources.shares()
    if recipe.pairs_on_device:
        device, used = torch.device(options.device), photos.photos if shares["planes"] else ()
        return DeviceImageSampler(
            load_views(used, options.stored_folders(shares), device, log), recipe, device
        )
    stored = {"rendered": options.rendered, "real": options.real}
    return BatchSampler(build_mixture(photos, shares, **stored, scene=recipe.scene), recipe)


def _validation_sampler(recipe: FrontEndRecipe, photos: Sequence[Path]) -> BatchSampler:
    """Single pairs of larger images; relief replaces stored views, none of which are held out."""
    width, height = recipe.scene.width, recipe.scene.height
    if recipe.batch.turned_share:  # only square images can be turned here
        width = height = min(width, height)
    stride = recipe.network.stride
    width, height = (stride * round(VALIDATION_ENLARGED * side / stride) for side in (width, height))
    scene = replace(recipe.scene, width=width, height=height)
    shares = recipe.sources.shares()
    shares["relief"] += shares.pop("rendered") + shares.pop("real")
    ours = replace(recipe, seed=recipe.seed + 1, scene=scene, batch=replace(recipe.batch, pairs=1))
    return BatchSampler(build_mixture(PhotoSet(photos, colour=True), shares, scene=scene), ours)


def _finish(loop: Loop, batches: Callable[[int, int], Iterator[ImageBatch]]) -> None:
    """Take the best averaged parameters, batch normalisation folded into the convolutions; then train the
    heads for early exit and pruning.

    With `start_share` the parameters are averaged with those that training started from.
    """
    trainer, recipe = loop.trainer, loop.trainer.recipe
    model, share = trainer.average, recipe.optimiser.start_share
    model.load_state_dict(load_state(loop.folder / "best.pt"))
    model.network = folded(model.network).to(trainer.device)
    if share:
        start = [recipe.start, *recipe.start_also]
        blend(model.network, mean_of(start, recipe.network), share)
    if share and model.matcher is not None:
        blend_with_start(model.matcher, recipe.matcher.start, share)
    matching = recipe.matcher
    if not matching.confidence_steps:
        return

    def pairs(first: int, last: int) -> Iterator[PairBatch]:
        for step, batch in enumerate(batches(first, last), start=first):
            there, rng = batch.to(trainer.device), torch.Generator().manual_seed(step)
            count = drawn_count(matching, rng)
            yield matched_pairs(keypoints_of(model.network, there, count), there, count, matching)

    stage = OptimiserRecipe(confidence_steps=matching.confidence_steps)
    heads = ConfidenceTrainer(model.matcher, stage, trainer.device)
    train_heads(heads, pairs, loop.folder / "confidence.pt", recipe.save_every, loop.log, loop.stopped)


def _write(loop: Loop, scores_of: Callable[[Describer], LogRow]) -> Path:
    """Weights files of what `_finish` left; returns the front end's."""
    trainer, recipe = loop.trainer, loop.trainer.recipe
    model, validations = trainer.average.cpu(), [row for row in trainer.progress.history if "f1" in row]
    summary = {"recipe": to_dict(recipe), "validation": scores_of(model), "history": validations}
    header = {"training": json.dumps(summary)}
    path = loop.folder / f"{recipe.name}.safetensors"
    save_front_end(model.network, "learned", path, header, dtype=torch.float16)
    loop.log(f"wrote {path}")
    if model.matcher is not None:
        matcher = loop.folder / f"{recipe.matcher.name}.safetensors"
        save_model(model.matcher, matcher, header)
        loop.log(f"wrote {matcher}")
    return path
