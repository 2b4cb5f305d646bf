"""Training steps of the front end."""

from __future__ import annotations

import math

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
from matcher.lab.train.keypoints.joint import BatchKeypoints, joint_loss, labelled
from matcher.lab.train.keypoints.recipe import FrontEndRecipe, JointRecipe, KeypointRecipe
from matcher.lab.train.optimisers import prunes
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
        optimisers = build_optimisers(model, recipe.optimiser)
        super().__init__(
            recipe, recipe.optimiser, model, optimisers, device, second_rate=recipe.matcher.learning_rate
        )

    def step(self, batch: ImageBatch) -> float:
        """As `Stage.step`; the first one of loaded weights restores batch normalisation from the images."""
        if self.progress.step == 0 and self._trained is not None:
            network = unfolded(self._trained.to(self.device), batch.pixels.to(self.device))
            for describer in (self.model, self.average):
                describer.network.load_state_dict(network.state_dict())
        return super().step(batch)

    def loss(self, batch: ImageBatch) -> Tensor:
        """The weighted sum of the losses; random choices depend on the step only."""
        recipe, network, batch = self.recipe.optimiser, self.model.network, batch.to(self.device)
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        with mixed_precision(self.device):
            logits, maps = network(batch.pixels)
        points, valid = strongest(logits, recipe.points)
        positions = refine(logits, points)
        corresponding, visible = batch.transfer(positions)
        visible &= valid
        nearest, distance, mutual = nearest_of_other(corresponding, positions, valid)
        with mixed_precision(self.device):
            # Descriptors of an image at its own keypoints and at those transferred from the other image.
            both = torch.cat([positions, losses.other_of_pair(corresponding)], dim=1).detach()
            described = network.describe(maps, both)
            own, others = steered(described, -batch.turns).chunk(2, dim=1)
        corresponding_descriptors = losses.other_of_pair(others)
        matched = self._matched(own, valid, distance)
        chosen = torch.randperm(recipe.points, generator=rng)[: recipe.described].to(self.device)
        at = (points[..., 1] * logits.shape[2] + points[..., 0]).long()
        parts = [
            recipe.refinement_weight
            * losses.refinement_loss(
                corresponding,
                losses.other_of_pair(positions),
                nearest,
                visible & mutual & (distance.amin(2) < 1.5 * recipe.match_distance),
            ),
            recipe.reliability_weight
            * losses.reliability_loss(logits.flatten(1).gather(1, at), matched, visible),
            recipe.description_weight
            * losses.description_loss(
                losses.DescribedKeypoints(
                    own, corresponding_descriptors, positions.detach(), corresponding.detach(), valid
                ),
                chosen,
                visible[:, chosen],
                self.model.log_scale.exp(),
                APART,
            ),
        ]
        if self.model.matcher is not None:
            descriptors = described[:, : recipe.points]
            descriptors = descriptors.detach().lerp(descriptors, self.recipe.matcher.gradient)
            points = BatchKeypoints(positions, descriptors, corresponding.detach(), visible, valid)
            parts.append(self.recipe.matcher.weight * self._matcher_loss(points, batch, rng))
        return torch.stack(parts).sum()

    def _matcher_loss(self, points: BatchKeypoints, batch: ImageBatch, rng: torch.Generator) -> Tensor:
        recipe = self.recipe.matcher
        count = recipe.points[int(torch.randint(len(recipe.points), (1,), generator=rng))]
        matched = recipe.pairs or len(batch)
        pairs = labelled(points.first(matched), batch.first(matched), count)
        return joint_loss(self.model.matcher, pairs, recipe, self.device, rng)

    @torch.no_grad()
    def _matched(self, own: Tensor, valid: Tensor, distance: Tensor) -> Tensor:
        """(2B, K) bool: keypoints whose descriptor has a mutual nearest neighbour at the correct position."""
        chosen, mutual = mutual_nearest(own @ losses.other_of_pair(own).mT, valid)
        near = distance.gather(2, chosen[..., None])[..., 0] < self.recipe.optimiser.match_distance
        return mutual & near


def load_matcher(recipe: JointRecipe) -> MatchingNetwork | None:
    """The matcher of the weights that the recipe starts from; None if it names none.

    Its heads for early exit are not trained, those for pruning only if the recipe drops points.

    Raises:
        IntegrityError: no such weights, or a damaged file.
        UsageError: they are not for our front end, or have no heads for pruning that the recipe needs.
    """
    if not recipe.start:
        return None
    matcher, _, name = load_model(recipe.start)
    if matcher.config.kind != STEERABLE:
        raise UsageError(f"matcher.start: {name} matches the keypoints of {matcher.config.kind}, not ours")
    matcher.float().requires_grad_(True)
    matcher.confidence.requires_grad_(False)
    if not prunes(recipe):
        matcher.match_probability.requires_grad_(False)
    elif not len(matcher.match_probability):
        raise UsageError(f"matcher.kept_shares: {name} has no heads for pruning; leave it out")
    return matcher


def build_optimisers(model: Describer, recipe: KeypointRecipe) -> list[Optimizer]:
    """AdamW for the front end, and a second one for the matcher if there is one."""
    front_end = [*model.network.parameters(), model.log_scale]
    groups = [
        {"params": [p for p in front_end if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in front_end if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimisers: list[Optimizer] = [torch.optim.AdamW(groups, lr=recipe.learning_rate)]
    if model.matcher is not None:
        trained = [p for p in model.matcher.parameters() if p.requires_grad]
        optimisers.append(torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=0.0))
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
