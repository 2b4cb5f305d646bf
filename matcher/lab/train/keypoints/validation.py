"""Repeatability, and nearest-neighbour matches, on photos that are not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from matcher.extract.feature_network import FeatureNetwork
from matcher.extract.learned import refine
from matcher.lab.train.keypoints.batches import ImageBatch
from matcher.lab.train.keypoints.joint import BatchKeypoints, labelled, match_scores
from matcher.lab.train.keypoints.losses import mean_of, other_of_pair
from matcher.lab.train.keypoints.trainer import Describer, mutual_nearest, nearest_of_other, strongest
from matcher.match.steering import steered

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
        float(mean_of(column.nan_to_num(0), ~column.isnan())) for column in rows.T
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
