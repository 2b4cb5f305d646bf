"""The front end's maps in the compiled kernels; without gradients, on the CPU, channels side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.calls import threads_for
from matcher.kernels.library import kernels
from matcher.kernels.trials import Trial, granted

_LEAST_PEAKS = 4096  # of an image that room is made for, and one for every so many pixels
_PIXELS_A_PEAK = 8


def have_maps(*maps: Tensor) -> bool:
    """Whether the functions of this file are there for maps (B, C, h, w)."""
    suit = all(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous(memory_format=torch.channels_last)
        for x in maps
    )
    if not suit or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.compiler.is_compiling() or kernels() is None:
        return False
    dtypes = {x.dtype for x in maps}
    return all(granted(f"maps {x}", try_half_maps if x == torch.bfloat16 else try_maps) for x in dtypes)


def try_maps(dtype: torch.dtype = torch.float32) -> Trial:
    """Pixels scored on maps, and maps enlarged, of a small image."""
    rng = torch.Generator().manual_seed(0)
    fine, coarse = (
        torch.randn(1, 32, *size, generator=rng).to(dtype).contiguous(memory_format=torch.channels_last)
        for size in ((120, 160), (60, 80))
    )
    weight, bias = torch.randn(4, 32, 3, 3, generator=rng) / 16, torch.randn(4, generator=rng)

    def stock() -> Tensor:
        scores = F.pixel_shuffle(F.conv2d(fine.float(), weight, bias, padding=1), 2)
        enlarged = fine + F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.cat([scores.flatten(), enlarged.flatten().float()])

    def kernel() -> Tensor:
        scores = score_pixels_compiled(fine, weight, bias)
        return torch.cat([scores.flatten(), add_enlarged_compiled(fine, coarse).flatten().float()])

    return Trial(kernel, stock, 0.05 if dtype == torch.bfloat16 else 1e-4)


def try_half_maps() -> Trial:
    """The same in half precision."""
    return try_maps(torch.bfloat16)


def add_enlarged_compiled(fine: Tensor, coarse: Tensor) -> Tensor:
    """fine (B, C, 2h, 2w) + coarse (B, C, h, w) enlarged bilinearly, of one precision; needs `have_maps`."""
    out, (batch, channels, height, width) = torch.empty_like(fine), coarse.shape
    for b in range(batch):
        given = (
            fine[b].data_ptr(),
            coarse[b].data_ptr(),
            fine.dtype == torch.bfloat16,
            height,
            width,
            channels,
        )
        kernels().matcher_add_enlarged(*given, out[b].data_ptr(), threads_for(height * 16))
    return out


def score_pixels_compiled(maps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, 2h, 2w) float32: maps (B, C, h, w) convolved to 4 channels, which are then 2 × 2 pixels.

    Args:
        maps: as `have_maps` takes them.
        weight: (4, C, 3, 3) float32.
        bias: (4,) float32.
    """
    batch, channels, height, width = maps.shape
    out = torch.empty(batch, 2 * height, 2 * width)
    weight = weight.permute(0, 2, 3, 1).contiguous()
    for b in range(batch):
        given = (maps[b].data_ptr(), maps.dtype == torch.bfloat16, height, width, channels)
        parameters = (weight.data_ptr(), bias.data_ptr())
        kernels().matcher_score_pixels(*given, *parameters, out[b].data_ptr(), threads_for(height * 16))
    return out


def sample_compiled(maps: Sequence[Tensor], points: Tensor, scales: Sequence[float]) -> Tensor:
    """(B, N, ΣC) float32 of maps (B, C, h, w) at points (B, N, 2) xy times their scale; needs `have_maps`."""
    points = points.float().contiguous()
    batch, count = points.shape[:2]
    out, first = torch.empty(batch, count, sum(x.shape[1] for x in maps)), 0
    for level, scale in zip(maps, scales, strict=True):
        _, channels, height, width = level.shape
        half = level.dtype == torch.bfloat16
        for b in range(batch):
            given = (level[b].data_ptr(), half, height, width, channels, points[b].data_ptr(), count, scale)
            made = (out[b, :, first:].data_ptr(), out.stride(1), threads_for(count))
            kernels().matcher_sample(*given, *made)
        first += channels
    return out


def peaks_compiled(scores: Tensor, radius: int, border: int) -> Tensor | None:
    """Pixels (N, 2) int64 xy that are the largest within `radius`, row by row, or None without the kernel.

    Args:
        scores: (H, W) float32.
        radius: in x and in y.
        border: pixels along the edge that are none.

    Returns:
        None also where there are more than the kernel expects.
    """
    suits = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.stride(1) == 1
    if not suits or torch.is_grad_enabled() or kernels() is None:
        return None
    room = max(_LEAST_PEAKS, scores.numel() // _PIXELS_A_PEAK)
    points = torch.empty(room, 2, dtype=torch.int64)
    given = (scores.data_ptr(), *scores.shape, scores.stride(0), radius, border)
    count = kernels().matcher_peaks(*given, points.data_ptr(), room)
    return points[:count] if count <= room else None
