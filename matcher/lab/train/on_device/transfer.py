"""Where points of one view lie in another, in batches: `lab/pairs/posed.py` on tensors, for points only."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.lab.pairs.dense import HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE
from matcher.lab.pairs.posed import NOTHING, SAME_DEPTH, SAME_PIXEL, SURELY_SAME_PIXEL
from matcher.lab.train.on_device.small import constant, inverse
from matcher.lab.train.on_device.views import DEPTH_STEP, DeviceViews


class Transferred(NamedTuple):
    """Points of one view in another."""

    positions: Tensor  # (B, N, 2) float32; meaningless where not visible
    states: Tensor  # (B, N) int64 VISIBLE_STATE, HIDDEN_STATE or UNKNOWN_STATE


def project(homographies: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Points (B, N, 2) by homographies (B, 3, 3): (B, N, 2), and (B, N) their third coordinates."""
    x = points @ homographies[:, :, :2].mT + homographies[:, None, :, 2]
    depth = x[..., 2]
    safe = torch.where(depth.abs() > 1e-9, depth, torch.full_like(depth, 1e-9))
    return x[..., :2] / safe.unsqueeze(2), depth


def within(points: Tensor, sizes: Tensor) -> Tensor:
    """(B, N) bool: points (B, N, 2) that lie on images of sizes (B, 2)."""
    return ((points >= 0) & (points <= sizes[:, None] - 1)).all(2)


def transfer(views: DeviceViews, source: Tensor, target: Tensor, points: Tensor) -> Transferred:
    """Points (B, N, 2) of views `source` (B,) in views `target` (B,) of their scenes, by depth and poses."""
    maps = views.inverse_depth.unsqueeze(1)
    linear, nearest = _sampled(maps[source], points)
    near = torch.where((linear - nearest).abs() <= SAME_DEPTH * nearest.abs(), linear, nearest)
    pose = views.cam_from_world[target] @ inverse(views.cam_from_world[source])
    K0, K1 = views.K[source], views.K[target]
    rotation = (K1 @ pose[:, :3, :3] @ inverse(K0)).float()
    translation = (K1 @ pose[:, :3, 3:])[..., 0].float()
    x = points @ rotation[:, :, :2].mT + rotation[:, None, :, 2] + near.unsqueeze(2) * translation[:, None]
    depth = torch.where(x[..., 2] > 1e-6, x[..., 2], torch.ones_like(x[..., 2]))
    found = x[..., :2] / depth.unsqueeze(2)
    inside = (x[..., 2] > 1e-6) & within(found, views.sizes[target])
    found = torch.where(inside.unsqueeze(2), found, torch.zeros_like(found))
    # Pixels in the source by which the way back changes per unit of inverse depth in the target.
    step = (K0 @ inverse(pose)[:, :3, 3:])[..., 0].float()
    rate = torch.hypot(*(step[:, None, k] - points[..., k] * step[:, None, 2] for k in (0, 1))) * depth
    states = _visible(maps[target], found, near / depth, rate).where(inside, HIDDEN_STATE)
    unseen = torch.where(near == NOTHING, HIDDEN_STATE, UNKNOWN_STATE)
    return Transferred(found, torch.where(near > 0, states, unseen))


def _visible(maps: Tensor, points: Tensor, expected: Tensor, rate: Tensor) -> Tensor:
    """(B, N) states of the surface expected at `points`, as `posed` decides them for pixels."""
    linear, nearest = _sampled(maps, points)
    error = torch.minimum((linear - expected).abs(), (nearest - expected).abs())
    same = (error <= SAME_DEPTH * expected) | (error * rate <= SURELY_SAME_PIXEL)
    visible = same & (error * rate <= SAME_PIXEL) & (nearest > 0)
    occluded = ~same & (torch.minimum(linear, nearest) > expected * (1 + SAME_DEPTH))
    states = torch.where(occluded | (nearest == NOTHING), HIDDEN_STATE, UNKNOWN_STATE)
    return torch.where(visible, VISIBLE_STATE, states)


def _sampled(maps: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N) values of maps of inverse depth (B, 1, h, w) at points (B, N, 2): linear and of the nearest."""
    size = constant((maps.shape[-1], maps.shape[-2]), points.dtype, points.device)
    grid = ((2 * points / DEPTH_STEP + 1) / size - 1).nan_to_num(-9.0).clamp(-9, 9).unsqueeze(2)
    linear, nearest = (  # beyond the map everything is NOTHING
        F.grid_sample(maps - NOTHING, grid, mode=mode, align_corners=False)[:, 0, :, 0] + NOTHING
        for mode in ("bilinear", "nearest")
    )
    return linear, nearest


def overlap(views: DeviceViews, first: Tensor, second: Tensor, probes: Tensor) -> Tensor:
    """(B,) share of the probes (B, N, 2) of `first`, of those that are decided, that `second` sees."""
    states = transfer(views, first, second, probes).states
    return (states == VISIBLE_STATE).sum(1) / (states != UNKNOWN_STATE).sum(1).clamp_min(1)
