"""Training steps of the front end."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from matcher.errors import UsageError
from matcher.extract.architecture import Architecture
from matcher.extract.feature_network import FeatureNetwork, unfolded
from matcher.extract.learned import BORDER, NMS_RADIUS, candidates, refine
from matcher.lab.train.keypoints import losses
from matcher.lab.train.keypoints.averaging import mean_of
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.joint import BatchKeypoints, drawn_count, joint_loss, matched_pairs
from matcher.lab.train.keypoints.recipe import FrontEndRecipe, JointRecipe
from matcher.lab.train.on_device.small import uploaded
from matcher.lab.train.optimisers import build_optimisers, prunes
from matcher.lab.train.recipe import OptimiserRecipe
from matcher.lab.train.stage import Stage, mixed_precision
from matcher.match.mutual import mutual_best
from matcher.match.network.model import MatchingNetwork
from matcher.match.steering import steered
from matcher.match.turns import STEERABLE
from matcher.weights.files import load_model

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
