"""Steps of the front end's training."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from matcher.config import ExtractorConfig
from matcher.extract.learned import BORDER, NMS_RADIUS, FeatureNetwork, candidates, refine, unfolded
from matcher.lab.train.keypoints import losses
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.recipe import FrontEndRecipe
from matcher.lab.train.stage import Stage, mixed_precision
from matcher.loading import build_extractor
from matcher.match.mutual import mutual_best
from matcher.match.steering import steered

APART = 4.0  # pixels; descriptors of nearer points need not differ
FIRST_SCALE = 20.0  # of the similarities, learned from there


class Describer(nn.Module):
    """The network and the scale of its similarities, which only training needs."""

    def __init__(self) -> None:
        super().__init__()
        self.network = FeatureNetwork(normalised=True)
        self.log_scale = nn.Parameter(torch.tensor(math.log(FIRST_SCALE)))


class FrontEndTrainer(Stage[Describer, ImageBatch]):
    """Of the front end: where points lie, how likely they are found again, and what describes them.

    Raises:
        IntegrityError: weights to start from are absent, damaged, or of another network.
    """

    def __init__(self, recipe: FrontEndRecipe, device: torch.device) -> None:
        self._trained = _trained(recipe.start) if recipe.start else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = Describer().to(device).to(memory_format=torch.channels_last)
        values = recipe.optimiser
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": values.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimiser = torch.optim.AdamW(groups, lr=values.learning_rate)
        super().__init__(recipe, values, model, [optimiser], device)

    def step(self, batch: ImageBatch) -> float:
        """As `Stage.step`; the first one of a continued front end looks at the pictures before."""
        if self.progress.step == 0 and self._trained is not None:
            network = unfolded(self._trained, batch.pixels)
            for describer in (self.model, self.average):
                describer.network.load_state_dict(network.state_dict())
        return super().step(batch)

    def loss(self, batch: ImageBatch) -> Tensor:
        """Weighted sum over the batch; what is random is drawn by the step."""
        recipe, network, batch = self.recipe.optimiser, self.model.network, batch.to(self.device)
        rng = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        with mixed_precision(self.device):
            logits, maps = network(batch.pixels)
        points, held = strongest(logits, recipe.points)
        positions = refine(logits, points)
        moved, seen = losses.transfer(positions, batch.positions)
        seen &= held
        near, distance, mutual = nearest_of_other(moved, positions, held)
        with mixed_precision(self.device):
            # A picture describes its own points and those that the other one's points became in it.
            both = torch.cat([positions, losses.other_of_pair(moved)], dim=1).detach()
            own, others = steered(network.describe(maps, both), -batch.turns).chunk(2, dim=1)
        there = losses.other_of_pair(others)
        found = self._found(own, held, distance)
        some = torch.randperm(recipe.points, generator=rng)[: recipe.described].to(self.device)
        at = (points[..., 1] * logits.shape[2] + points[..., 0]).long()
        parts = [
            recipe.refinement_weight
            * losses.refinement_loss(
                moved,
                losses.other_of_pair(positions),
                near,
                seen & mutual & (distance.gather(2, near[..., None])[..., 0] < 1.5 * recipe.match_distance),
            ),
            recipe.reliability_weight * losses.reliability_loss(logits.flatten(1).gather(1, at), found, seen),
            recipe.description_weight
            * losses.description_loss(
                losses.Described(own, there, positions.detach(), moved.detach(), held),
                some,
                seen[:, some],
                self.model.log_scale.exp(),
                APART,
            ),
        ]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def _found(self, own: Tensor, held: Tensor, distance: Tensor) -> Tensor:
        """(2B, K) bool: points whose mutually nearest descriptor belongs to a point of their own place."""
        chosen, mutual = mutual_nearest(own @ losses.other_of_pair(own).mT, held)
        near = distance.gather(2, chosen[..., None])[..., 0] < self.recipe.optimiser.match_distance
        return mutual & near


def _trained(start: str) -> FeatureNetwork:
    """The network of a weights file, without batch normalisation."""
    path = None if start == "learned" else start
    return build_extractor(ExtractorConfig(kind="learned"), path, precision="float32").network


@torch.no_grad()
def strongest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` peaks (B, K, 2) int64 xy of logits (B, H, W), and (B, K) bool which there are."""
    width, allowed = logits.shape[2], candidates(logits, NMS_RADIUS, BORDER)
    top = logits.masked_fill(~allowed, -torch.inf).flatten(1).topk(count, dim=1)
    return torch.stack([top.indices % width, top.indices // width], dim=-1), top.values.isfinite()


@torch.no_grad()
def nearest_of_other(moved: Tensor, points: Tensor, held: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For points carried over (2B, K, 2): index (2B, K) of the nearest point of the other picture, all
    distances (2B, K, K), and (2B, K) bool whether that point's nearest is this one."""
    distance = torch.cdist(moved, losses.other_of_pair(points))
    distance = distance.masked_fill(~losses.other_of_pair(held)[:, None], 1e4)
    near = distance.argmin(2)
    back = distance.argmin(1).gather(1, near)
    return near, distance, back == torch.arange(near.shape[1], device=near.device)


def mutual_nearest(similarity: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """(2B, K, K) similarities to the other picture's points → index (2B, K) of the most alike, and whether
    that is mutual. `held` (2B, K) bool are points that exist."""
    similarity = similarity.masked_fill(~(held[:, :, None] & losses.other_of_pair(held)[:, None]), -2)
    _, chosen, mutual = mutual_best(similarity)
    return chosen, mutual & held
