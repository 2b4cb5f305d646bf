"""The networks that are trained, the steps of their training, and its validation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from matcher.config import ALL_LAYERS
from matcher.errors import UsageError
from matcher.extract.learned import FeatureNetwork, folded, grown, subpixel, unfolded
from matcher.match.network import MatchingNetwork
from matcher.match.sinkhorn import mutual_best
from matcher.match.steering import TURNS, steered
from matcher.train import losses
from matcher.train.pairs import (
    IGNORED,
    Describer,
    Draws,
    ImagePairs,
    Keypoints,
    PairBatch,
    PairSampler,
    detected,
    front_end,
    labelled,
    other_of_pair,
    strongest,
)
from matcher.train.recipe import FrontEndRecipe, Recipe
from matcher.train.views import VISIBLE, DeviceViews
from matcher.weights.files import load_model

LogRow = dict[str, float]
CORRECT = 3.0  # pixels; validation
INNER_HEADS = ("confidence", "match_probability")


@dataclass(frozen=True, eq=False)
class Batch:
    """New pairs, and their keypoints where the front end is not trained."""

    pairs: ImagePairs
    points: int  # of an image, which are matched
    keypoints: Keypoints | None


def batch_maker(recipe: Recipe, views: DeviceViews, describer: Describer | None) -> Callable[[int], Batch]:
    """What makes the batch of a step, the same for the same recipe, views and kind of device."""
    sampler = PairSampler(views, recipe)

    def made(step: int) -> Batch:
        rng = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        points = recipe.pair.points[int(torch.randint(len(recipe.pair.points), (1,), generator=rng))]
        pairs = sampler.batch(recipe.pairs_of(points), step)
        draws = Draws(int(torch.randint(2**62, (1,), generator=rng)), sampler.device)
        dropout = recipe.pair.dropout
        return Batch(pairs, points, describer and describer(pairs.images, points, draws, dropout))

    return made


def known_matches(batch: Batch, keypoints: Keypoints, recipe: Recipe) -> PairBatch:
    """As many keypoints and pairs as the matcher sees, with their partners."""
    pairs = recipe.matched_pairs_of(batch.points)
    return labelled(keypoints.first(pairs, batch.points), batch.pairs.leading(pairs), recipe)


def found_keypoints(networks: Networks, batch: Batch) -> Keypoints:
    """The keypoints of a batch, by the front end where it is trained."""
    if batch.keypoints is not None:
        return batch.keypoints
    return detected(networks.front_end.eval(), batch.pairs.images, batch.points)


def turned_alike(descriptors: Tensor, pairs: ImagePairs) -> Tensor:
    """Descriptors (2B, …, D) with those of image 1 as image 0 is turned."""
    return steered(descriptors, -torch.cat([torch.zeros_like(pairs.turns), pairs.turns]) % TURNS)


class Networks(nn.Module):
    """What is trained: a front end, a matcher, or both; and the scale of similarities, needed in training."""

    def __init__(self, front_end: FeatureNetwork | None, matcher: MatchingNetwork | None) -> None:
        super().__init__()
        self.front_end, self.matcher = front_end, matcher
        self.log_scale = nn.Parameter(torch.tensor(math.log(20.0)))


def start_of_front_end(recipe: FrontEndRecipe) -> FeatureNetwork:
    """The front end that a recipe starts from, grown to its sizes."""
    network = front_end(recipe.start, precision="float32")
    if not recipe.network.contains(network.sizes):
        raise UsageError(f"front_end.network: {recipe.network} is smaller than {network.sizes} of its start")
    return grown(network, recipe.network)


def continue_from(model: MatchingNetwork, start: str) -> None:
    """Load parameters of a shipped name or a file; inner heads that it lacks keep their values."""
    trained, _, name = load_model(start)
    wanted, found = model.state_dict(), trained.state_dict()
    found |= {key: wanted[key] for key in wanted.keys() - found.keys() if key.startswith(INNER_HEADS)}
    found = {key: value for key, value in found.items() if key in wanted or not key.startswith(INNER_HEADS)}
    shapes = [{key: value.shape for key, value in state.items()} for state in (wanted, found)]
    different = sorted(key for key, _ in shapes[0].items() ^ shapes[1].items())
    if different or trained.config.kind != model.config.kind:
        raise UsageError(
            f"matcher.start: [matcher.network] is not that of {name}, for keypoints of {trained.config.kind} "
            f"({len({*different})} tensors differ, such as {different[:1]}); make it that or remove start"
        )
    model.load_state_dict(found)


@torch.no_grad()
def finished(networks: Networks, recipe: Recipe) -> Networks:
    """The networks as they are written: batch normalisation folded, and a share of the initial parameters,
    which recovers accuracy outside the training data (WiSE-FT, Wortsman et al. 2022)."""
    share, starts = recipe.optimiser.start_share, []
    if networks.front_end is not None:
        networks.front_end = folded(networks.front_end).to(networks.log_scale.device)
        if share:
            starts.append((networks.front_end, start_of_front_end(recipe.front_end)))
    if share and networks.matcher is not None:
        start = copy.deepcopy(networks.matcher)
        continue_from(start, recipe.matcher.start)
        starts.append((networks.matcher, start))
    for network, start in starts:
        for ours, theirs in zip(network.parameters(), start.parameters(), strict=True):
            ours.lerp_(theirs.to(ours), share)
    return networks


def optimisers_of(networks: Networks, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon (Jordan et al. 2024) for matrices of the matcher's layers if the recipe asks for it; a
    group's learning rate is `relative` to the recipe's."""
    found, matcher = [], recipe.matcher

    def adam(parameters: list[nn.Parameter], decay: float) -> None:
        matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        groups = {"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}
        found.append(torch.optim.AdamW([group | {"relative": 1.0} for group in groups]))

    if networks.front_end is not None:
        adam([*networks.front_end.parameters(), networks.log_scale], recipe.front_end.weight_decay)
    if networks.matcher is not None:
        if matcher.muon_rate and not hasattr(torch.optim, "Muon"):
            raise UsageError("matcher.muon_rate: set it to 0, or install PyTorch 2.9 or later")
        layers = networks.matcher.layers.parameters() if matcher.muon_rate else ()
        matrices = {id(p): p for p in layers if p.ndim == 2}
        rest = [p for p in networks.matcher.parameters() if p.requires_grad and id(p) not in matrices]
        adam(rest, matcher.weight_decay)
        if matrices:
            group = {"params": list(matrices.values()), "relative": matcher.muon_rate}
            adjust = {"weight_decay": matcher.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            found.append(torch.optim.Muon([group], **adjust))
    return found


@dataclass
class Progress:
    """The progress of a stage; kept in its checkpoint."""

    step: int = 0
    pairs: int = 0
    seconds: float = 0.0  # of steps and of waiting for batches
    skipped: int = 0  # steps whose loss or gradient was not finite
    best: float = -math.inf  # F1 of the best validation
    history: list[LogRow] = field(default_factory=list)  # rows of the log


class Stage:
    """Steps over batches, each of which gives its loss, NaN if it was skipped; a checkpoint has the state of
    the networks, the optimisers and the progress."""

    name, file = "", "checkpoint.pt"  # in the lines of the log; of the checkpoint

    def __init__(self, recipe: Recipe, steps: int, networks: dict[str, nn.Module]) -> None:
        self.recipe, self.steps, self.networks, self.progress = recipe, steps, networks, Progress()
        self.optimisers: list[torch.optim.Optimizer] = []

    @property
    def share(self) -> float:
        """How much is done; 1 at the end."""
        return self.progress.step / self.steps if self.steps else 1.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        state = {name: network.state_dict() for name, network in self.networks.items()}
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        return state | {"optimisers": optimisers, "progress": vars(self.progress)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; KeyError, TypeError, ValueError or RuntimeError where it does not fit."""
        for name, network in self.networks.items():
            network.load_state_dict(state[name])
        for optimiser, values in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(values)
        self.progress = Progress(**state["progress"])


class Trainer(Stage):
    """The networks of a recipe from the parameters that they start with; their moving average; optimisers."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.device = device
        self._start: FeatureNetwork | None = None  # whose batch normalisation is restored from images
        detector, matcher = None, None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            if recipe.front_end.train:
                detector = FeatureNetwork(recipe.front_end.network, normalised=True)
                self._start = start_of_front_end(recipe.front_end) if recipe.front_end.start else None
            if recipe.matcher.train:
                matcher = MatchingNetwork(replace(recipe.matcher.network, policy=ALL_LAYERS))
                if recipe.matcher.start:
                    continue_from(matcher, recipe.matcher.start)
                matcher.confidence.requires_grad_(False)
                matcher.match_probability.requires_grad_(recipe.matcher.prunes)
        self.model = Networks(detector, matcher).to(device)
        if detector is not None:
            detector.to(memory_format=torch.channels_last)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        super().__init__(recipe, recipe.optimiser.steps, {"model": self.model, "average": self.average})
        self.optimisers = optimisers_of(self.model, recipe)

    @property
    def share(self) -> float:
        """How much is done, by steps or by time, whichever is more."""
        recipe, progress = self.recipe.optimiser, self.progress
        by_time = progress.seconds / (60 * recipe.minutes) if recipe.minutes else 0.0
        return min(1.0, max(progress.step / recipe.steps, by_time))

    def step(self, batch: Batch) -> float:
        """One update of the networks and of their average.

        The learning rate rises, stays, and falls linearly: on its plateau a run can be prolonged and ended.
        """
        recipe, progress = self.recipe.optimiser, self.progress
        if progress.step == 0:  # batch normalisation is restored from images, a new projection scaled
            for networks in (self.model, self.average):
                if self._start is not None:
                    network = unfolded(self._start.to(self.device), batch.pairs.images)
                    networks.front_end.load_state_dict(network.state_dict())
                if networks.matcher and not self.recipe.matcher.start and batch.keypoints is not None:
                    descriptors = batch.keypoints.descriptors[batch.keypoints.valid].float()
                    networks.matcher.standardise(descriptors)
        fall = (1 - self.share) / max(1e-9, 1 - recipe.hold_share)
        rise = min(1.0, (progress.step + 1) / max(1, recipe.warmup_steps))
        rate = recipe.learning_rate * max(recipe.final_share, min(1.0, fall)) * rise
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["relative"]
            optimiser.zero_grad(set_to_none=True)
        # Random choices depend on the step only.
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + progress.step)
        keypoints, loss = batch.keypoints, 0.0
        if self.recipe.front_end.train:
            keypoints, loss = self._keypoint_loss(batch, rng)
            own, gradient = keypoints.descriptors, self.recipe.matcher.gradient
            keypoints = replace(keypoints, descriptors=own.detach().lerp(own, gradient))
        if self.recipe.matcher.train:
            known = known_matches(batch, keypoints, self.recipe)
            loss = loss + losses.matching_loss(self.model.matcher, known, self.recipe.matcher, rng)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_clip)
        # The only time in a step that a GPU is waited for: both numbers are read together.
        value, norm = torch.stack([loss.detach(), norm]).tolist()
        finite = math.isfinite(value) and math.isfinite(norm)
        if finite:
            for optimiser in self.optimisers:
                optimiser.step()
            # The mean is over few steps at first, so that early validations are meaningful.
            decay = min(recipe.average_decay, (1 + progress.step) / (10 + progress.step))
            means, latest = (networks.state_dict().values() for networks in (self.average, self.model))
            for mean, own in zip(means, latest, strict=True):
                if own.is_floating_point():
                    mean.lerp_(own, 1 - decay)
        progress.skipped += not finite
        progress.step += 1
        progress.pairs += len(batch.pairs.flat)
        return value if finite else math.nan

    def _keypoint_loss(self, batch: Batch, rng: torch.Generator) -> tuple[Keypoints, Tensor]:
        """The keypoints of a batch, and the loss of their positions, scores and descriptors."""
        recipe, network, count = self.recipe.front_end, self.model.front_end, self.recipe.front_end.points
        matched = batch.points if self.recipe.matcher.train else 0
        with losses.mixed_precision(self.device):
            logits, maps = network(batch.pairs.images)
        maxima, valid = strongest(logits, max(count, matched))
        positions = subpixel(logits, maxima)
        corresponding, states = batch.pairs.transfer(positions)
        corresponding, visible = corresponding.nan_to_num(0.0), (states == VISIBLE) & valid
        with losses.mixed_precision(self.device):
            # Descriptors of an image at its own keypoints and at those transferred from the other image.
            both = torch.cat([positions, other_of_pair(corresponding[:, :count])], dim=1).detach()
            described = network.describe(maps, both)
        found = Keypoints(positions, described[:, : positions.shape[1]], valid)
        at = maxima[..., 1] * logits.shape[2] + maxima[..., 0]
        scored = logits.flatten(1).gather(1, at[:, :count])
        every = positions, corresponding, visible, valid
        positions, corresponding, visible, valid = (x[:, :count] for x in every)
        nearest, distance, mutual = losses.nearest_of_other(corresponding, positions, valid)
        own, others = (turned_alike(x, batch.pairs) for x in (described[:, :count], described[:, -count:]))
        chosen = torch.randperm(count, generator=rng)[: recipe.described].to(self.device, non_blocking=True)
        near = visible & mutual & (distance.amin(2) < 1.5 * recipe.match_distance)
        repeatable = matched_correctly(own, valid, distance, recipe.match_distance)[0]
        points, scale = Keypoints(positions.detach(), own, valid), self.model.log_scale.exp()
        truth = corresponding.detach(), other_of_pair(others)
        total = losses.description_loss(points, *truth, chosen, visible[:, chosen], scale)
        # Scores are probabilities of being repeatable and matched correctly, as the current descriptors match
        # (SiLK, Gleize et al. 2023, section 3.2).
        total = total + losses.cross_entropy(scored, repeatable, visible)
        # Distance of each transferred keypoint from the nearest one there (ALIKE, Zhao et al. 2022, eq. 6).
        there = other_of_pair(positions).gather(1, nearest[..., None].expand(-1, -1, 2))
        error = smooth_l1_loss(corresponding, there, reduction="none", beta=0.25).sum(-1)
        return found, total + recipe.refinement_weight * losses.mean_of(error, near)


class HeadTrainer(Stage):
    """The last stage: the heads for early exit and pruning on the finished network (LightGlue, 3.3)."""

    name, file = "confidence ", "confidence.pt"

    def __init__(self, recipe: Recipe, networks: Networks) -> None:
        self.trained, matcher = networks, networks.matcher
        heads = nn.ModuleList([matcher.confidence, matcher.match_probability]).requires_grad_(True)
        super().__init__(recipe, recipe.matcher.confidence_steps, {"heads": heads})
        self.optimisers = [torch.optim.AdamW(heads.parameters(), weight_decay=0.0)]

    def step(self, batch: Batch) -> float:
        """One update of the heads; the learning rate falls linearly to zero."""
        optimiser = self.optimisers[0]
        optimiser.param_groups[0]["lr"] = 2e-3 * (1 - self.share)
        known = known_matches(batch, found_keypoints(self.trained, batch), self.recipe)
        loss = losses.head_loss(self.trained.matcher, known, self.recipe.matcher)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        self.progress.step += 1
        self.progress.pairs += len(known.partner0)
        return float(loss.detach())


@torch.no_grad()
def matched_correctly(own: Tensor, valid: Tensor, distance: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """(2B, K) bool: keypoints whose mutual nearest neighbour, by descriptors `own` (2B, K, D) turned alike,
    lies nearer than `limit` to their place in the other image, by `distance` (2B, K, K); and which have
    one."""
    similarity = own @ other_of_pair(own).mT
    similarity = similarity.masked_fill(~(valid[:, :, None] & other_of_pair(valid)[:, None]), -2)
    _, chosen, mutual, _ = mutual_best(similarity)
    mutual &= valid
    return mutual & (distance.gather(2, chosen[..., None])[..., 0] < limit), mutual


@torch.no_grad()
def validate(networks: Networks, batches: Iterable[Batch], recipe: Recipe) -> LogRow:
    """`precision`, `recall` and `f1` of matches: of the matcher, over keypoints whose partner is known, or
    without one of mutual nearest neighbours, at 3 pixels; of a trained front end also `repeatability`, the
    share of the covisible keypoints that are detected in the other image too."""
    counts = torch.zeros(5, dtype=torch.float64)  # right, matches, wanted, repeated, visible
    matcher = networks.matcher
    for batch in batches:
        points = found_keypoints(networks, batch)
        if networks.front_end is not None:
            there, states = batch.pairs.transfer(points.positions)
            visible, there = (states == VISIBLE) & points.valid, there.nan_to_num(0.0)
            _, distance, _ = losses.nearest_of_other(there, points.positions, points.valid)
            repeated = visible & (distance.amin(2) < CORRECT)
            counts[3:] += torch.stack([repeated.sum(), visible.sum()]).cpu()
        if matcher is None:
            own = turned_alike(points.descriptors, batch.pairs)
            right, mutual = matched_correctly(own, points.valid, distance, CORRECT)
            right, matched, wanted = right & visible, mutual & visible, repeated
        else:
            layer = losses.labelled_layers(matcher, labelled(points, batch.pairs, recipe))[-1]
            scores = losses.scores_of(matcher, layer, len(matcher.layers) - 1)
            iterations = recipe.matcher.sinkhorn_iterations
            found = losses.decisions(losses.assignments(matcher, layer, scores, iterations)[-1])
            partners = torch.cat([labels.partner for labels in layer.labels], dim=1)
            right, matched = (found == partners) & (partners >= 0), (found >= 0) & (partners != IGNORED)
            wanted = partners >= 0
        counts[:3] += torch.stack([right.sum(), matched.sum(), wanted.sum()]).cpu()
    right, matches, wanted, repeated, visible = counts.tolist()
    scores = {
        "precision": right / max(matches, 1),
        "recall": right / max(wanted, 1),
        "f1": 2 * right / max(matches + wanted, 1),
    }
    return {"repeatability": repeated / max(visible, 1), **scores} if visible else scores
