"""The front end's finest maps in the compiled kernels: half of the resolution, 16 channels, bfloat16.

The first of them is made of the pixels, and the scores of pixels of the last, without the maps in between: to
write and read these takes as long as their convolutions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.kernels.calls import threads_for
from matcher.kernels.library import kernels
from matcher.kernels.maps import add_enlarged_compiled, have_maps, score_pixels_compiled, suit
from matcher.kernels.trials import Trial, granted

_CHANNELS = 16


def begin_maps_compiled(
    centred: Tensor, deviation: Tensor, first: nn.Conv2d, second: nn.Conv2d
) -> Tensor | None:
    """(B, 16, h, w) bfloat16: two convolutions of pixels divided by their deviation, each ended by a ReLU.

    Args:
        centred: (B, 1, 2h, 2w) float32.
        deviation: (B, 1, 1, 1).
        first: 5 × 5, of 1 channel to 16, with a step of 2; bfloat16, its channels last, as of `second`.
        second: 3 × 3, of 16 channels to 16.

    Returns:
        None where the kernel is not there, not made for this processor, or slower.
    """
    if not _have_finest(first.weight):
        return None
    batch, _, height, width = centred.shape
    centred, deviations = centred.contiguous(), deviation.flatten().tolist()
    out = _channels_last(torch.empty(batch, _CHANNELS, height // 2, width // 2, dtype=torch.bfloat16))
    given = [x for convolution in (first, second) for x in _parameters(convolution)]
    for b in range(batch):
        sizes, places = (deviations[b], height // 2, width // 2), (x.data_ptr() for x in given)
        made = (out[b].data_ptr(), threads_for(height))
        if not kernels().matcher_begin_maps(centred[b].data_ptr(), *sizes, *places, *made):
            return None
    return out


def end_maps_compiled(fine: Tensor, coarse: Tensor, mix: nn.Conv2d, last: nn.Conv2d) -> Tensor | None:
    """(B, 4h, 4w) float32 scores of pixels: of fine (B, 16, 2h, 2w) + coarse (B, 16, h, w) enlarged.

    Args:
        fine, coarse: bfloat16, channels last.
        mix: 3 × 3, of 16 channels to 16, followed by a ReLU; bfloat16, its channels last.
        last: 3 × 3, of 16 channels to 4, which are 2 × 2 pixels; float32.

    Returns:
        None where the kernel is not there, not made for this processor, or slower.
    """
    if not (suit((fine, coarse)) and _have_finest(mix.weight)):
        return None
    batch, _, height, width = coarse.shape
    out = torch.empty(batch, 4 * height, 4 * width)
    given = [*_parameters(mix), *_parameters(last)]
    for b in range(batch):
        maps, places = (fine[b].data_ptr(), coarse[b].data_ptr()), (x.data_ptr() for x in given)
        made = (out[b].data_ptr(), threads_for(height * 16))
        if not kernels().matcher_end_maps(*maps, height, width, *places, *made):
            return None
    return out


def _have_finest(weight: Tensor) -> bool:
    """Whether there are kernels for the finest maps of a network of such weights, without gradients."""
    fits = len(weight) == _CHANNELS and weight.dtype == torch.bfloat16 and suit((weight,))
    return fits and granted("finest maps", try_finest)


def _parameters(convolution: nn.Conv2d) -> tuple[Tensor, Tensor]:
    """Weights (outputs, height, width, inputs), and the bias in float32."""
    return convolution.weight.permute(0, 2, 3, 1).contiguous(), convolution.bias.float()


def _channels_last(maps: Tensor) -> Tensor:
    return maps.contiguous(memory_format=torch.channels_last)


def try_finest() -> Trial:
    """The finest map and the scores of an image of 640 × 480."""
    rng = torch.Generator().manual_seed(0)
    first, second, mix, last = (
        _convolution(rng, *sizes) for sizes in ((1, 16, 5, 2), (16, 16, 3), (16, 16, 3), (16, 4, 3))
    )
    last = last.float()
    pixels, deviation = torch.randn(1, 1, 480, 640, generator=rng), torch.ones(1, 1, 1, 1)
    coarse = _channels_last(torch.randn(1, _CHANNELS, 120, 160, generator=rng).bfloat16())

    def stock() -> Tensor:  # with the kernels that there would be otherwise
        finest = _ended_by_relu(second, _ended_by_relu(first, _channels_last(pixels.bfloat16())))
        if have_maps(finest):
            mixed = _ended_by_relu(mix, add_enlarged_compiled(finest, coarse))
            scores = score_pixels_compiled(mixed, last.weight, last.bias)
        else:
            enlarged = F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
            scores = F.pixel_shuffle(last(_ended_by_relu(mix, finest + enlarged).float()), 2)
        return torch.cat([finest.flatten().float(), scores.flatten()])

    def kernel() -> Tensor | None:
        finest = begin_maps_compiled(pixels, deviation, first, second)
        scores = None if finest is None else end_maps_compiled(finest, coarse, mix, last)
        return None if scores is None else torch.cat([finest.flatten().float(), scores.flatten()])

    return Trial(kernel, stock, 0.1)


def _ended_by_relu(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    fused = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
    if fused is None:
        return convolution(x).relu_()
    sizes = (convolution.padding, convolution.stride, convolution.dilation, convolution.groups)
    return fused(x, convolution.weight, convolution.bias, *sizes, "relu", [], "")


def _convolution(rng: torch.Generator, inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    with torch.random.fork_rng(devices=[]):
        made = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2).requires_grad_(False)
    made.weight.copy_(torch.randn(made.weight.shape, generator=rng) / (side * inputs**0.5))
    made.bias.copy_(torch.randn(outputs, generator=rng) / 8)
    return made.to(dtype=torch.bfloat16, memory_format=torch.channels_last)
