"""What a camera does to grey images, in batches: blur, vignette, tone, shading, noise, compression.

As `capture` in `lab/pairs/photometric.py`, and a few images as another sensor or a negative has them.
Compression quantises the cosines of blocks of 8 × 8 pixels as JPEG does (ITU-T T.81, annexes A and K).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.lab.train.on_device.draws import Draws
from matcher.lab.train.on_device.small import constant

_BLUR_RADIUS = 5  # pixels of the kernel on either side
_BLOCK = 8
_KNOTS = 7  # of a tone curve
_SHARP = 0.05  # a blur so small that nothing changes
# Steps of quantisation of a block's cosines at quality 50 (T.81, table K.1).
_STEPS = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)


def capture(images: Tensor, clean: Tensor, draws: Draws) -> Tensor:
    """Images (B, 1, H, W) in [0, 1] as cameras would take and store them; H and W multiples of 8.

    Args:
        images: grey.
        clean: (B,) bool, images that need sensor noise, as no camera took them; half of the others get none.
        draws: the source of randomness.
    """
    count = len(images)

    def some(share: float) -> Tensor:
        return draws.happens(count, share).view(-1, 1, 1, 1)

    def between(low: float, high: float) -> Tensor:
        return draws.uniform(count, 1, 1, 1, low=low, high=high)

    images = _blurred(images, draws)
    images = torch.where(some(0.5), images * _vignette(images, between(0.05, 0.35)), images)
    light = (images.clamp(0, 1) + 1e-6) ** between(-0.7, 0.7).exp()
    toned = ((light - 0.5) * between(0.5, 1.3) + 0.5 + between(-0.15, 0.15)).clamp(0, 1)
    images = torch.where(some(0.6), toned, images)
    curved = _curved(images, draws.uniform(count, _KNOTS))
    images = torch.where(some(0.04), curved, torch.where(some(0.02), 1 - images, images))
    coarse = draws.uniform(count, 1, 3, 4, low=0.5, high=1.2)
    shading = F.interpolate(coarse, images.shape[2:], mode="bicubic", align_corners=True)
    images = torch.where(some(0.25), images * shading, images)
    quiet = some(0.5) & ~clean.view(-1, 1, 1, 1)
    images = images + torch.where(quiet, 0.0, _noise(images, some(0.4), draws))
    images = torch.where(some(0.6), _compressed(images, between(30, 96)), images)
    return (images.clamp(0, 1) * 255).floor() / 255


def _blurred(images: Tensor, draws: Draws) -> Tensor:
    """A third out of focus; of these some in one direction only, as by motion along x or y."""
    count = len(images)
    width = torch.where(draws.happens(count, 0.38), draws.uniform(count, low=0.4, high=2.0), _SHARP)
    moving, along_y = draws.happens(count, 0.3), draws.happens(count, 0.5)
    offsets = torch.arange(-_BLUR_RADIUS, _BLUR_RADIUS + 1, device=images.device)
    for axis in (2, 3):
        along = along_y if axis == 2 else ~along_y
        spread = torch.where(moving, torch.where(along & (width > _SHARP), 2 * width, _SHARP), width)
        kernel = (-offsets.square() / (2 * spread.view(-1, 1).square())).exp()
        kernel = kernel / kernel.sum(1, keepdim=True)
        shape = (count, 1, -1, 1) if axis == 2 else (count, 1, 1, -1)
        reach = (_BLUR_RADIUS, 0) if axis == 2 else (0, _BLUR_RADIUS)
        images = F.conv2d(images.transpose(0, 1), kernel.view(shape), padding=reach, groups=count)
        images = images.transpose(0, 1)
    return images


def _curved(images: Tensor, knots: Tensor) -> Tensor:
    """Any tone curve: grey values in [0, 1] of knots (B, K), linear in between, as other sensors have it."""
    place = (images.clamp(0, 1) * (knots.shape[1] - 1)).flatten(1)
    lower = place.long().clamp_max(knots.shape[1] - 2)
    low, high = knots.gather(1, lower), knots.gather(1, lower + 1)
    return (low + (high - low) * (place - lower)).view(images.shape)


def _vignette(images: Tensor, strength: Tensor) -> Tensor:
    """(B, 1, H, W): 1 in the middle, darker towards the corners."""
    y, x = (torch.linspace(-1, 1, side, device=images.device) for side in images.shape[2:])
    return 1 - strength * (x.square() + y.square().unsqueeze(1)) / 2


def _noise(images: Tensor, coarse: Tensor, draws: Draws) -> Tensor:
    """Read and shot noise, where `coarse` of more than a pixel's size."""
    count = len(images)
    noise = draws.normal(*images.shape)
    noise = torch.where(coarse, 2.2 * F.avg_pool2d(noise, 3, 1, 1), noise)
    low, high = math.log(0.002), math.log(0.025)
    reading, shot = (draws.uniform(count, 1, 1, 1, low=low, high=high).exp() for _ in range(2))
    return noise * (reading + shot * images.clamp(0, 1).sqrt())


def _compressed(images: Tensor, quality: Tensor) -> Tensor:
    """As JPEG of a quality (B, 1, 1, 1) from 1 to 100 would store them, but for the rounding of pixels."""
    count, _, height, width = images.shape
    scale = torch.where(quality < 50, 50 / quality, 2 - quality / 50)
    steps = (constant(_STEPS, images.dtype, images.device) * scale).clamp_min(1).unsqueeze(1)
    cosines = _cosines(images.device)
    blocks = (255 * images[:, 0] - 128).view(count, height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK)
    levels = (cosines @ blocks.transpose(2, 3) @ cosines.T / steps).round() * steps
    pixels = (cosines.T @ levels @ cosines).transpose(2, 3).reshape(images.shape)
    return (pixels + 128) / 255


def _cosines(device: torch.device) -> Tensor:
    """(8, 8) orthonormal discrete cosine transform."""
    k = torch.arange(_BLOCK, device=device)
    table = torch.cos(math.pi * (2 * k + 1) * k.unsqueeze(1) / (2 * _BLOCK)) / 2
    table[0] /= 2**0.5
    return table
