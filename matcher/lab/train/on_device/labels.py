"""Partners of keypoints, and the quarter turns between images, of batches; as `lab/train/labels.py`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from matcher.data.matches import UNMATCHED
from matcher.lab.pairs.dense import UNKNOWN_STATE
from matcher.lab.train.labels import IGNORED
from matcher.lab.train.on_device.transfer import Transferred
from matcher.lab.train.recipe import PairRecipe
from matcher.match.turns import TURNS

_LEAST_VISIBLE = 8  # points that decide on a turn
_FAR = 1e6  # pixels


def partners(
    points0: Tensor, points1: Tensor, found0: Transferred, found1: Transferred, recipe: PairRecipe
) -> tuple[Tensor, Tensor]:
    """(B, N) and (B, M) int64 partners of points (B, N, 2), (B, M, 2); UNMATCHED, IGNORED.

    Args:
        points0, points1: keypoints.
        found0: points of image 0 in image 1, NaN where not visible.
        found1: points of image 1 in image 0.
        recipe: distances of matched and of unmatched points.
    """
    known0, known1 = (found.states != UNKNOWN_STATE for found in (found0, found1))
    forward = _distances(found0.positions, points1)
    backward = _distances(found1.positions, points0).mT
    # Where one direction is unknown, the other one counts twice.
    error = torch.where(known0.unsqueeze(2), forward, backward)
    error = (error + torch.where(known1.unsqueeze(1), backward, forward)) / 2
    (best0, partner0), (best1, partner1) = error.min(2), error.min(1)
    return (
        _decided(best0, partner0, partner1, known0, recipe),
        _decided(best1, partner1, partner0, known1, recipe),
    )


def _decided(best: Tensor, partner: Tensor, back: Tensor, known: Tensor, recipe: PairRecipe) -> Tensor:
    here = torch.arange(partner.shape[1], device=partner.device)
    mutual = (back.gather(1, partner) == here) & (best < recipe.match_distance)
    alone = torch.where((best > recipe.unmatched_distance) & known, UNMATCHED, IGNORED)
    return torch.where(mutual, partner, alone)


def _distances(found: Tensor, points: Tensor) -> Tensor:
    """(B, N, M) distances of points (B, N, 2) and (B, M, 2), far from those that are NaN.

    By differences: products of coordinates lose a fraction of a pixel, and `torch.cdist` without products is
    made for long vectors: on a GPU it took more than half of a training step.
    """
    dx, dy = (found.nan_to_num(-_FAR)[..., k, None] - points[:, None, :, k] for k in (0, 1))
    return dx.square_().add_(dy.square_()).sqrt_()


def quarter_turns_of(points: Tensor, found: Tensor) -> Tensor:
    """(B,) clockwise quarter turns of image 1 after which it is upright as image 0 is.

    Args:
        points: (B, N, 2) of image 0.
        found: (B, N, 2) their positions in image 1, NaN where not visible; 0 turns where few are.
    """
    seen = found.isfinite().all(2, keepdim=True)
    count = seen.sum(1).clamp_min(1)
    centred = []
    for positions in (points, found.nan_to_num(0.0)):
        mean = (positions * seen).sum(1) / count
        centred.append((positions - mean.unsqueeze(1)) * seen)
    (x0, y0), (x1, y1) = (positions.unbind(2) for positions in centred)
    angle = torch.atan2((x0 * y1 - y0 * x1).sum(1), (x0 * x1 + y0 * y1).sum(1))
    turns = (-(angle / (math.pi / 2)).round()).long() % TURNS
    return torch.where(seen.sum((1, 2)) >= _LEAST_VISIBLE, turns, 0)
