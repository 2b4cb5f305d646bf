"""The network's layers on a training batch, each with the ground truth of the points that it has left.

After one of the first layers only the points that are likeliest to match may go on, as pruning has it in use.
Our network that had been trained on all points only was much worse without pruning than with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.data.matches import UNMATCHED
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.stage import mixed_precision
from matcher.match.network.correspondence import Side
from matcher.match.network.model import MatchingNetwork
from matcher.match.network.packed import Layout
from matcher.match.network.position import normalise_positions
from matcher.match.network.tokens import Tokens

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
    """Tokens of images with equally many points as (B, N, …)."""
    columns = [x for x in (tokens.x, tokens.positions, tokens.predicted) if x is not None]
    columns = [x.float().view(-1, 2, tokens.layout.uniform, x.shape[-1]) for x in columns]
    return Side(*(x[:, 0] for x in columns)), Side(*(x[:, 1] for x in columns))


def _pruned(
    model: MatchingNetwork, tokens: Tokens, labels: Labels, pruning: Pruning
) -> tuple[Tokens, Labels]:
    """The likeliest points of each image. One whose partner is dropped has none."""
    count = tokens.layout.uniform
    kept_count = max(1, round(pruning.share * count))
    # In half precision many points would be equally likely.
    with torch.no_grad(), torch.autocast(tokens.x.device.type, enabled=False):
        probabilities = model.match_probabilities(tokens.x.float(), pruning.after).view(-1, count)
        kept = probabilities.topk(kept_count, dim=1).indices.sort(dim=1).values  # (2B, K)
    images = torch.arange(len(kept), device=kept.device).unsqueeze(1)
    flat = (kept + images * count).flatten()
    columns = {
        name: None if (x := getattr(tokens, name)) is None else x[flat]
        for name in ("x", "rotations", "index", "positions", "predicted")
    }
    layout = Layout(((kept_count, kept_count),) * len(tokens.pairs))
    places = torch.full_like(probabilities, UNMATCHED, dtype=torch.int64)
    places.scatter_(1, kept, torch.arange(kept_count, device=kept.device).expand_as(kept))
    sides = (kept[0::2], places[1::2]), (kept[1::2], places[0::2])
    partners, targets = [], []
    for (own, others), partner, target in zip(sides, labels.partners, labels.targets, strict=True):
        before = partner.gather(1, own)
        partners.append(torch.where(before >= 0, others.gather(1, before.clamp_min(0)), before))
        targets.append(target.gather(1, own.unsqueeze(2).expand(-1, -1, 2)))
    return replace(tokens, layout=layout, **columns), Labels(tuple(partners), tuple(targets))
