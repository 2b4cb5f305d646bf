"""Repeatability, and matches by nearest neighbours, on photos that the front end never trains on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from matcher.extract.learned import FeatureNetwork, refine
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.losses import mean_of, other_of_pair, transfer
from matcher.lab.train.keypoints.trainer import mutual_nearest, nearest_of_other, strongest
from matcher.match.steering import steered

REACH = 3.0  # pixels


@torch.no_grad()
def validate(network: FeatureNetwork, batches: Sequence[ImageBatch], points: int) -> dict[str, float]:
    """Means over all pictures of `batches`, with `points` points a picture, at 3 pixels.

    Returns:
        `repeatability`: share of the points seen in the other picture that it has, too. `precision`: share of
        mutual nearest neighbours that are right; `recall`: share of the points found again that are matched
        rightly; `f1`: their harmonic mean. `error`: pixels, of right matches.
    """
    was_training = network.training
    network.eval()
    rows = torch.cat([_judge(network, batch, points) for batch in batches])
    network.train(was_training)
    repeatability, precision, recall, error = (
        float(mean_of(column.nan_to_num(0), ~column.isnan())) for column in rows.T
    )
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    scores = {"repeatability": repeatability, "precision": precision, "recall": recall}
    return {**scores, "error": error, "f1": f1}


def _judge(network: FeatureNetwork, batch: ImageBatch, count: int) -> Tensor:
    """(2B, 4): a row a picture; NaN where a share has no whole."""
    device = network.points.weight.device
    batch = batch.to(device)
    logits, maps = network(batch.pixels)
    corners, held = strongest(logits, count)
    points = refine(logits, corners)
    moved, seen = transfer(points, batch.positions)
    seen &= held
    _, distance, _ = nearest_of_other(moved, points, held)
    own = steered(network.describe(maps, points), -batch.turns)
    chosen, mutual = mutual_nearest(own @ other_of_pair(own).mT, held)
    error = distance.gather(2, chosen[..., None])[..., 0]
    again = seen & (distance.amin(2) < REACH)
    right = mutual & seen & (error < REACH)
    shares = [
        again.sum(1) / seen.sum(1),
        right.sum(1) / mutual.sum(1),
        right.sum(1) / again.sum(1),
        (error * right).sum(1) / right.sum(1),
    ]
    return torch.stack(shares, dim=1).cpu()
