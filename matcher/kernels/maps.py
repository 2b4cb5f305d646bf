"""The front end's maps in the compiled kernels; without gradients, on the CPU, channels side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.calls import threads_for
from matcher.kernels.library import kernels
from matcher.kernels.trials import Trial, granted

_LEAST_PEAKS = 4096  # of an image that room is made for, and one for every so many pixels
_PIXELS_A_PEAK = 8


def have_maps(*maps: Tensor) -> bool:
    """Whether maps (B, C, h, w) can be enlarged and their pixels scored here."""
    dtypes = {x.dtype for x in maps}
    return _suit(maps) and all(granted(f"maps {x}", try_half_maps if _half(x) else try_maps) for x in dtypes)


def have_samples(*maps: Tensor) -> bool:
    """Whether `sample_compiled` takes such maps (B, C, h, w) here."""
    dtypes = {x.dtype for x in maps}
    return _suit(maps) and all(
        granted(f"samples {x}", try_half_samples if _half(x) else try_samples) for x in dtypes
    )


def _half(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def _suit(maps: Sequence[Tensor]) -> bool:
    suit = all(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous(memory_format=torch.channels_last)
        for x in maps
    )
    if not suit or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.compiler.is_compiling() and kernels() is not None


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
    batch, channels, height, width = coarse.shape
    if fine.shape != (batch, channels, 2 * height, 2 * width):  # the kernel would write beyond its memory
        raise ValueError(
            f"a map of {tuple(fine.shape)} is not twice as large as one of {tuple(coarse.shape)}"
        )
    out = torch.empty_like(fine)
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
    """(B, N, ΣC) float32 of maps (B, C, h, w) at points (B, N, 2) xy times a scale; needs `have_samples`."""
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


def try_samples(dtype: torch.dtype = torch.float32) -> Trial:
    """Samples of 512 points."""
    rng = torch.Generator().manual_seed(0)
    level = torch.randn(1, 64, 60, 80, generator=rng).to(dtype).contiguous(memory_format=torch.channels_last)
    points = torch.rand(1, 512, 2, generator=rng) * torch.tensor([160.0, 120.0])

    def stock() -> Tensor:
        grid = (points + 1) / torch.tensor([80.0, 60.0]) - 1  # (2 · points / 2 + 1) / size − 1
        found = F.grid_sample(level.float(), grid[:, :, None], padding_mode="border", align_corners=False)
        return found[..., 0].transpose(1, 2)

    return Trial(lambda: sample_compiled([level], points, [0.5]), stock, 1e-3)


def try_half_samples() -> Trial:
    """The same in half precision."""
    return try_samples(torch.bfloat16)


def peaks_compiled(scores: Tensor, radius: int, border: int, trial: Callable[[], Trial]) -> Tensor | None:
    """Pixels (N, 2) int64 xy that are the largest within `radius`, row by row, or None without the kernel.

    Args:
        scores: (H, W) float32.
        radius: in x and in y.
        border: pixels along the edge that are none.
        trial: that of this kernel beside stock operators.

    Returns:
        None also where there are more than the kernel expects.
    """
    suits = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.stride(1) == 1
    if not suits or torch.is_grad_enabled() or kernels() is None:
        return None
    if not granted("peaks", trial):
        return None
    room = max(_LEAST_PEAKS, scores.numel() // _PIXELS_A_PEAK)
    points = torch.empty(room, 2, dtype=torch.int64)
    given = (scores.data_ptr(), *scores.shape, scores.stride(0), radius, border)
    count = kernels().matcher_peaks(*given, points.data_ptr(), room, threads_for(len(scores)))
    return points[:count] if count <= room else None
