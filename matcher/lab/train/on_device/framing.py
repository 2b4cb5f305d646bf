"""New images of views: zooms, crops and rotations of the camera as homographies; `lab/pairs/framing.py` in
batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.lab.pairs.dense import VISIBLE_STATE
from matcher.lab.pairs.framing import ANY_ROLL_SHARE, BORDER_SHARE, ROLL, ROTATION
from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.small import constant, inverse
from matcher.lab.train.on_device.transfer import project, transfer
from matcher.lab.train.on_device.views import DeviceViews

PROBES = 256  # pixels of view 0 among which a covisible one is looked for
WHOLE_SHARE = 0.4  # pairs whose images are not zoomed in
PHOTO_ROLL, PHOTO_ROTATION, PHOTO_STRETCH = 15.0, 11.0, 0.22  # degrees; deviation of the log of the aspect
# Rotations of an image by clockwise quarter turns.
_QUARTERS = (((1, 0), (0, 1)), ((0, -1), (1, 0)), ((-1, 0), (0, -1)), ((0, 1), (-1, 0)))
_SHRINKING = 0.7  # of the area, below which an image is smoothed first


def draw_framings(
    views: DeviceViews,
    first: Tensor,
    second: Tensor,
    flat: Tensor,
    size: tuple[int, int],
    draws: Draws,
    turned_share: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Homographies (B, 3, 3) float64 from pixels of both views to those of new images of one size.

    Args:
        views: to cut from.
        first, second: (B,) views of each pair.
        flat: (B,) bool, pairs of a photo and itself.
        size: width and height of the new images.
        draws: the source of randomness.
        turned_share: pairs of which the second image is rotated by 90, 180 or 270 degrees.
    """
    count = len(first)
    centre0, centre1 = _covisible(views, first, second, flat, draws)
    new = constant(size, views.sizes.dtype, views.sizes.device).expand(count, 2)
    turns = torch.where(draws.happens(count, turned_share), (3 * draws.uniform(count)).long() + 1, 0)
    new1 = torch.where((turns % 2 == 1).unsqueeze(1), new.flip(1), new)  # before it is turned
    fitting0, fitting1 = (
        (sides / views.sizes[side]).amax(1) for side, sides in ((first, new), (second, new1))
    )
    whole = draws.happens(count, WHOLE_SHARE)
    zoom = torch.where(whole, 1.0, draws.uniform(count, high=math.log(1.8)).exp())
    change = (draws.normal(count) * torch.where(whole, 0.15, 0.35)).exp().clamp(0.4, 2.5)
    least = torch.where(draws.happens(count, BORDER_SHARE), 0.6, 1.0)
    zoom1 = torch.minimum(torch.maximum(zoom * change, least), torch.full_like(zoom, 2.5))
    roll, tilt = torch.where(flat, PHOTO_ROLL, ROLL), torch.where(flat, PHOTO_ROTATION, ROTATION)
    stretch = PHOTO_STRETCH * flat.float()
    framing0 = _framing(views, first, centre0, fitting0 * zoom, (roll / 2, tilt / 3, 0 * tilt), new, draws)
    framing1 = _framing(views, second, centre1, fitting1 * zoom1, (roll, tilt, stretch), new1, draws)
    return framing0, _turned(framing1, turns, new1, new)


def _turned(framing: Tensor, turns: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Framings (B, 3, 3) of images after clockwise quarter turns (B,), which change their sizes (B, 2)."""
    quarter = constant(_QUARTERS, framing.dtype, framing.device)
    turn = torch.eye(3, dtype=framing.dtype, device=framing.device).repeat(len(framing), 1, 1)
    turn[:, :2, :2] = quarter[turns]
    centre, new_centre = (((size - 1) / 2).to(framing).unsqueeze(2) for size in (before, after))
    turn[:, :2, 2:] = new_centre - turn[:, :2, :2] @ centre
    return turn @ framing


def _covisible(
    views: DeviceViews, first: Tensor, second: Tensor, flat: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """(B, 2) a pixel of view 0 that view 1 sees, and its position there; the centres where none is found."""
    sizes0, rows = views.sizes[first], torch.arange(len(first), device=first.device)
    probes = draws.uniform(len(first), PROBES, 2) * (sizes0 - 1).unsqueeze(1)
    positions, states = transfer(views, first, second, probes)
    seen = (states == VISIBLE_STATE) | flat.unsqueeze(1)
    chosen, some = seen.float().argmax(1), seen.any(1, keepdim=True)
    here, there = probes[rows, chosen], positions[rows, chosen]
    there = torch.where(flat.unsqueeze(1), here, there)
    return torch.where(some, here, sizes0 / 2), torch.where(some, there, views.sizes[second] / 2)


def _framing(
    views: DeviceViews,
    chosen: Tensor,
    centre: Tensor,
    zoom: Tensor,
    spread: tuple[Tensor, Tensor, Tensor],
    sizes: Tensor,
    draws: Draws,
) -> Tensor:
    """(B, 3, 3) of views `chosen` with the pixel `centre` (B, 2) near the middle of images of `sizes` (B, 2);
    `spread` of roll, tilts and stretch."""
    count, (roll_spread, tilt_spread, stretch_spread) = len(chosen), spread
    K = views.K[chosen]
    middle = _window_centre(centre, zoom, views.sizes[chosen], sizes, draws).double()
    any_roll = draws.happens(count, ANY_ROLL_SHARE)
    roll = torch.where(any_roll, draws.uniform(count, low=-180, high=180), draws.normal(count) * roll_spread)
    tilts = draws.normal(count, 2) * tilt_spread.unsqueeze(1)
    rotation = _rotations(torch.deg2rad(torch.cat([tilts, roll.unsqueeze(1)], dim=1)).double())
    focal = zoom.double().unsqueeze(1) * K.diagonal(dim1=1, dim2=2)[:, :2]
    focal[:, 0] *= (draws.normal(count) * stretch_spread).exp()
    back = inverse(K)
    ray = (rotation @ back @ F.pad(middle, (0, 1), value=1.0).unsqueeze(2))[..., 0]
    half = (sizes.to(focal) - 1) / 2
    new = torch.diag_embed(F.pad(focal, (0, 1), value=1.0))
    new[:, :2, 2] = half - focal * ray[:, :2] / ray[:, 2:]
    return new @ rotation @ back


def _window_centre(centre: Tensor, zoom: Tensor, old: Tensor, sizes: Tensor, draws: Draws) -> Tensor:
    """(B, 2) centre of a window that contains `centre` and usually stays inside the old image."""
    half = sizes / zoom.unsqueeze(1) / 2
    middle = centre + draws.uniform(len(centre), 2, low=-0.6, high=0.6) * half
    inside = torch.where(half * 2 < old, torch.minimum(torch.maximum(middle, half), old - half), old / 2)
    return torch.where(draws.happens(len(centre), BORDER_SHARE).unsqueeze(1), middle, inside)


def _rotations(axes: Tensor) -> Tensor:
    """Rotation matrices (B, 3, 3) of rotation vectors (B, 3), by Rodrigues' formula."""
    x, y, z = axes.unbind(1)
    nothing = torch.zeros_like(x)
    cross = torch.stack([nothing, -z, y, z, nothing, -x, -y, x, nothing], dim=1).view(-1, 3, 3)
    angle = axes.norm(dim=1).view(-1, 1, 1) / math.pi
    straight = torch.eye(3, dtype=axes.dtype, device=axes.device)
    return straight + torch.sinc(angle) * cross + torch.sinc(angle / 2).square() / 2 * (cross @ cross)


def render(views: DeviceViews, chosen: Tensor, framing: Tensor, size: tuple[int, int]) -> Tensor:
    """(B, 1, height, width) in [0, 1]: views `chosen` as their framings show them, black beyond."""
    width, height = size
    device = views.images.device
    y, x = (torch.arange(side, dtype=torch.float32, device=device) for side in (height, width))
    pixels = torch.cartesian_prod(y, x).flip(1).unsqueeze(0)
    old, depth = project(inverse(framing).float(), pixels.expand(len(chosen), -1, -1))
    old = old.masked_fill((depth <= 0).unsqueeze(2), -1e4)
    images = views.images[chosen].unsqueeze(1).float() / 255
    area = framing[:, 0, 0] * framing[:, 1, 1] - framing[:, 0, 1] * framing[:, 1, 0]
    shrinking = area.abs() < _SHRINKING
    images = torch.where(shrinking.view(-1, 1, 1, 1), F.avg_pool2d(images, 3, 1, 1), images)
    canvas = constant((images.shape[-1], images.shape[-2]), old.dtype, device)
    grid = ((2 * old + 1) / canvas - 1).view(-1, height, width, 2)
    return F.grid_sample(images, grid, align_corners=False)
