"""Our own front end: a small convolutional network that detects and describes keypoints.

The score of a pixel is the logit of the probability that a point there is found again in another view of the
scene and matched by its descriptor. A point's position is the centroid of the softmax of the scores around it
(as in ALIKE, Zhao et al. 2022, section III-B), and its descriptor is made of what the maps of all resolutions
hold at that position; nothing is described that is not a point.

Map k has a sample at every 2ᵏ-th pixel, beginning with the first, so pixel x lies at x/2ᵏ on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, interpolate, normalize, pad, pixel_shuffle

from matcher.config import ExtractorConfig
from matcher.data.image import Image
from matcher.extract.on_device import allowed_pixels, best_pixels, inner_pixels, read_together
from matcher.extract.shared import Found, FrontEnd, grey, padded, strongest
from matcher.kernels.linear import linear
from matcher.kernels.maps import (
    add_enlarged_compiled,
    have_maps,
    have_samples,
    peaks_compiled,
    sample_compiled,
    score_pixels_compiled,
)
from matcher.kernels.trials import Trial

WIDTHS = (16, 32, 64, 128)  # channels of the maps at 1/2, 1/4, 1/8 and 1/16 of the resolution
DEPTHS = (2, 2, 3, 3)  # convolutions of each
STRIDE = 16  # pixels from one sample of the coarsest map to the next
DESCRIPTOR_DIM = 64
NMS_RADIUS = 3  # pixels within which a point scores highest
SCORE_THRESHOLD = 0.004  # below it lie noise and plain surfaces; rooms with few keypoints need those above
BORDER = 4  # pixels along the edge without points
WINDOW = 5  # pixels a side, in which a point's position is refined

_UNNORMALISED = ("lift", "points", "descriptor")  # parts of the network without batch normalisation
_HIDDEN = 256  # of the descriptor's MLP
_LEAST_CONTRAST = 0.02  # added to the deviation of the pixels, so that a constant image stays constant


def _fused_convolution() -> Callable[..., Tensor] | None:
    """oneDNN's convolution that ends with a ReLU, which spares a pass over the map; None without it.

    It is missing in some builds of PyTorch, and refuses bfloat16 on processors without AVX-512.
    """
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return getattr(torch.ops.mkldnn, "_convolution_pointwise", None)


class ConvNormRelu(nn.Sequential):
    """Convolution, batch normalisation, ReLU; once trained, the second is part of the first."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, *, normalised: bool) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=not normalised),
            nn.BatchNorm2d(outputs) if normalised else nn.Identity(),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, H / stride, W / stride)."""
        convolution, norm, _ = self
        half = x.dtype == torch.bfloat16 and x.device.type == "cpu" and not torch.is_grad_enabled()
        fused = _fused_convolution() if half and not isinstance(norm, nn.BatchNorm2d) else None
        if fused is None:
            return super().forward(x)
        sizes = (convolution.padding, convolution.stride, convolution.dilation, convolution.groups)
        return fused(x, convolution.weight, convolution.bias, *sizes, "relu", [], "")


def _add_enlarged(fine: Tensor, coarse: Tensor) -> Tensor:
    """fine (B, C, 2h, 2w) + coarse (B, C, h, w) enlarged."""
    if fine.dtype == coarse.dtype and have_maps(fine, coarse):
        return add_enlarged_compiled(fine, coarse)
    return fine + interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)


class FeatureNetwork(nn.Module):
    """An encoder of four resolutions, a decoder that scores pixels, an MLP that describes points.

    Args:
        normalised: with batch normalisation, for training; `folded` makes a network without.
    """

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        self.encoder = nn.ModuleList()
        before = 1
        for width, depth in zip(WIDTHS, DEPTHS, strict=True):
            blocks = [ConvNormRelu(before, width, 5 if before == 1 else 3, 2, normalised=normalised)]
            blocks += [ConvNormRelu(width, width, 3, 1, normalised=normalised) for _ in range(depth - 1)]
            self.encoder.append(nn.Sequential(*blocks))
            before = width
        self.lift = nn.ModuleList(nn.Conv2d(upper, lower, 1) for lower, upper in pairwise(WIDTHS))
        self.mix = ConvNormRelu(WIDTHS[0], WIDTHS[0], 3, 1, normalised=normalised)
        self.points = nn.Conv2d(WIDTHS[0], 4, 3, padding=1)
        self.descriptor = nn.Sequential(
            nn.Linear(sum(WIDTHS), _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, DESCRIPTOR_DIM)
        )

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Score every pixel.

        Args:
            pixels: (B, 1, H, W) grey in [0, 1], H and W multiples of 16.

        Returns:
            Logits (B, H, W) float32, and the encoder's maps, finest first, to describe points with.
        """
        centred = pixels - pixels.mean((2, 3), keepdim=True)
        # A standard deviation; torch's own takes eight times as long.
        deviation = centred.square().mean((2, 3), keepdim=True).sqrt()
        x = (centred / (deviation + _LEAST_CONTRAST)).to(self.mix[0].weight.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        maps = []
        for stage in self.encoder:
            x = stage(x)
            maps.append(x)
        for lower, lift in zip(maps[-2::-1], reversed(self.lift), strict=True):
            x = _add_enlarged(lower, lift(x))
        x = self.mix(x)
        if have_maps(x):
            return score_pixels_compiled(x, self.points.weight, self.points.bias), maps
        # Half precision would make neighbouring pixels equal.
        with torch.autocast(x.device.type, enabled=False):
            return pixel_shuffle(self.points(x.float()), 2)[:, 0], maps

    def describe(self, maps: Sequence[Tensor], points: Tensor) -> Tensor:
        """Unit descriptors (B, N, 64) float32 at points (B, N, 2) xy."""
        if have_samples(*maps):
            sampled = sample_compiled(maps, points, [2.0**-k for k in range(1, len(maps) + 1)])
        else:
            columns = [sample(level, points / 2**k) for k, level in enumerate(maps, start=1)]
            sampled = torch.cat(columns, dim=-1)
        widen, activate, narrow = self.descriptor
        hidden = activate(linear(sampled.flatten(0, -2), widen.weight, widen.bias))
        described = linear(hidden, narrow.weight, narrow.bias).unflatten(0, sampled.shape[:-1])
        return normalize(described.float(), dim=-1)

    def prepare(self, dtype: torch.dtype) -> None:
        """Keep the convolutions in `dtype`, but for the last, and everything in the order that suits them."""
        self.to(memory_format=torch.channels_last)
        for part in (self.encoder, self.lift, self.mix):
            part.to(dtype)


def folded(network: FeatureNetwork) -> FeatureNetwork:
    """The network in evaluation without batch normalisation, which has become part of its convolutions."""
    plain = FeatureNetwork().eval()
    network = network.eval()
    for ours, trained in zip(plain.modules(), network.modules(), strict=True):
        if isinstance(ours, ConvNormRelu):
            convolution, norm, _ = trained
            gain = norm.weight / (norm.running_var + norm.eps).sqrt()
            ours[0].weight.data.copy_(convolution.weight * gain[:, None, None, None])
            ours[0].bias.data.copy_(norm.bias - norm.running_mean * gain)
    for name in _UNNORMALISED:
        getattr(plain, name).load_state_dict(getattr(network, name).state_dict())
    return plain


@torch.no_grad()
def unfolded(plain: FeatureNetwork, pixels: Tensor) -> FeatureNetwork:
    """A network to train on: batch normalisation begins with the statistics of `pixels` (B, 1, H, W), so that
    what is computed of them stays as it is."""
    network, seen = FeatureNetwork(normalised=True), []
    blocks = [part for part in plain.modules() if isinstance(part, ConvNormRelu)]

    def look(_: nn.Module, __: tuple[Tensor], maps: Tensor) -> None:
        seen.append(torch.var_mean(maps, (0, 2, 3), correction=0))

    hooks = [block[0].register_forward_hook(look) for block in blocks]
    plain(pixels)
    for hook in hooks:
        hook.remove()
    fresh = [part for part in network.modules() if isinstance(part, ConvNormRelu)]
    for (convolution, norm, _), ours, (variance, mean) in zip(fresh, blocks, seen, strict=True):
        convolution.weight.copy_(ours[0].weight)
        norm.weight.copy_((variance + norm.eps).sqrt())
        norm.bias.copy_(mean)
        norm.running_mean.copy_(mean - ours[0].bias)
        norm.running_var.copy_(variance)
    for name in _UNNORMALISED:
        getattr(network, name).load_state_dict(getattr(plain, name).state_dict())
    return network


def sample(maps: Tensor, points: Tensor, beyond: str = "border") -> Tensor:
    """(B, N, C) float32 values of maps (B, C, h, w) at (B, N, 2) xy, bilinear; outside, those of the edge, or
    "zeros"."""
    size = points.new_tensor([maps.shape[-1], maps.shape[-2]])
    grid = (2 * points + 1) / size - 1
    found = grid_sample(maps.float(), grid[:, :, None], padding_mode=beyond, align_corners=False)
    return found[..., 0].transpose(1, 2)


def peaks(logits: Tensor, radius: int) -> Tensor:
    """(B, H, W) bool: pixels that are the largest within `radius` pixels in x and y."""
    return logits == _running_maximum(_running_maximum(logits, radius).mT, radius).mT


def candidates(logits: Tensor, radius: int, border: int) -> Tensor:
    """(B, H, W) bool: peaks that are `border` pixels or more away from the edge."""
    return peaks(logits, radius) & inner_pixels(logits, border)


def _running_maximum(rows: Tensor, radius: int) -> Tensor:
    """(…, W) → the largest within `radius` columns, by windows of doubling width."""
    side = 2 * radius + 1
    rows, width = pad(rows, (radius, radius), value=-torch.inf), 1
    while width < side:
        step = min(width, side - width)
        rows, width = torch.maximum(rows[..., :-step], rows[..., step:]), width + step
    return rows


def refine(logits: Tensor, points: Tensor) -> Tensor:
    """(B, N, 2) int64 xy → float32 xy: the centroid of the softmax of the logits in each one's window."""
    offsets = torch.arange(WINDOW, device=logits.device) - WINDOW // 2
    dy, dx = (grid.flatten() for grid in torch.meshgrid(offsets, offsets, indexing="ij"))
    height, width = logits.shape[1:]
    x, y = points[..., 0, None] + dx, points[..., 1, None] + dy
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    place = y.clamp(0, height - 1) * width + x.clamp(0, width - 1)
    around = logits.flatten(1).gather(1, place.flatten(1)).view(place.shape)
    weight = around.masked_fill(~inside, -torch.inf).softmax(dim=-1)
    return points + torch.stack([(weight * dx).sum(-1), (weight * dy).sum(-1)], dim=-1)


def _build(_: ExtractorConfig) -> nn.Module:
    return FeatureNetwork()


def _find_together(network: FeatureNetwork, images: Sequence[Image], config: ExtractorConfig) -> list[Found]:
    """Points of images of one size; what lies in the padding is cut off before peaks are looked for."""
    device = network.points.weight.device
    logits, maps = network(torch.cat([padded(grey(image, device), STRIDE) for image in images]))
    height, width = images[0].pixels.shape[:2]
    if device.type == "cuda":
        return _points_of_all(network, logits[:, :height, :width], maps, images, config)
    return [
        _points_of(
            network, logits[b : b + 1, :height, :width], [level[b : b + 1] for level in maps], image, config
        )
        for b, image in enumerate(images)
    ]


def _points_of_all(
    network: FeatureNetwork,
    logits: Tensor,
    maps: list[Tensor],
    images: Sequence[Image],
    config: ExtractorConfig,
) -> list[Found]:
    """The best points of images of one size, as many of each, so that a GPU is read only once."""
    logits = logits.contiguous()
    keep = candidates(logits, config.nms_radius, config.border) & allowed_pixels(images, logits.device)
    points, scores = best_pixels(logits.sigmoid(), keep, config.score_threshold, config.max_keypoints)
    refined = refine(logits, points)
    return read_together(refined, scores, network.describe(maps, refined), config.score_threshold)


def _points_of(
    network: FeatureNetwork, logits: Tensor, maps: list[Tensor], image: Image, config: ExtractorConfig
) -> Found:
    """The best points of one image, refined and described."""
    points = peaks_compiled(logits[0], config.nms_radius, config.border, try_peaks)
    if points is None:
        points = candidates(logits, config.nms_radius, config.border)[0].nonzero().flip(1)
    scores = logits[0, points[:, 1], points[:, 0]].sigmoid()
    found = (scores > config.score_threshold).nonzero()[:, 0]
    index = found[strongest(points[found].float(), scores[found], image, config.max_keypoints)]
    refined = refine(logits, points[None, index])
    return Found(refined[0], scores[index], network.describe(maps, refined)[0])


def try_peaks() -> Trial:
    """Peaks of a small image."""
    logits = torch.randn(240, 320, generator=torch.Generator().manual_seed(0))
    return Trial(
        lambda: peaks_compiled(logits, NMS_RADIUS, BORDER, try_peaks),
        lambda: candidates(logits[None], NMS_RADIUS, BORDER)[0].nonzero().flip(1),
        0.0,
    )


FRONT_ENDS = {
    "learned": FrontEnd(
        _build,
        None,
        {"score_threshold": SCORE_THRESHOLD, "nms_radius": NMS_RADIUS, "border": BORDER},
        _find_together,
    )
}
