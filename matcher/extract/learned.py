"""Our own front end: a small convolutional network that detects and describes keypoints.

The score of a pixel is the logit of the probability that a point there is found again in another view of the
scene and matched by its descriptor. A point's position is the centroid of the softmax of the scores around it
(as in ALIKE, Zhao et al. 2022, section III-B), and its descriptor is made of what the maps of all resolutions
hold at that position; nothing is described that is not a point. Training alone makes them steerable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, grid_sample, interpolate, pad, pixel_shuffle
from torch.nn.utils.rnn import pad_sequence

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError
from matcher.extract.front_end import Found, FrontEnd, grey, inner_pixels, mask_of, padded
from matcher.types import Image, converted

DESCRIPTOR_DIM = 64


@dataclass(frozen=True)
class Architecture:
    """An encoder's maps, finest first, and the MLP that describes points; the shipped sizes by default."""

    widths: tuple[int, ...] = (16, 32, 64, 128, 192)  # channels of maps at 1/2, 1/4, 1/8, … of the resolution
    depths: tuple[int, ...] = (2, 2, 3, 4, 3)  # convolutions of each
    hidden: int = 384  # of the MLP

    @property
    def stride(self) -> int:
        """Pixels from one sample of the coarsest map to the next."""
        return 2 ** len(self.widths)

    def rules(self) -> list[tuple[bool, str]]:
        """Conditions, each with the message where it does not hold."""
        sizes = (*self.widths, *self.depths, self.hidden)
        return [
            (2 <= len(self.widths) == len(self.depths), "network: as many widths as depths, at least 2"),
            (len(self.widths) <= 6, "network.widths: at most 6"),
            (all(1 <= size <= 4096 for size in sizes), "network: sizes from 1 to 4096"),
        ]

    def __str__(self) -> str:
        widths, depths = (" ".join(map(str, each)) for each in (self.widths, self.depths))
        return f"widths {widths}, depths {depths}, hidden {self.hidden}"

    def contains(self, smaller: Architecture) -> bool:
        """Whether a network of those sizes can grow to these."""
        return self.hidden >= smaller.hidden and all(
            len(own) >= len(other) and all(a >= b for a, b in zip(own, other, strict=False))
            for own, other in ((self.widths, smaller.widths), (self.depths, smaller.depths))
        )


def shapes_of(sizes: Architecture) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the parameters of such a network, batch normalisation folded away."""
    with torch.device("meta"):  # without values
        return {name: tuple(value.shape) for name, value in FeatureNetwork(sizes).named_parameters()}


def architecture_of(shapes: Mapping[str, Sequence[int]]) -> Architecture:
    """The sizes of the network whose parameters have these names and shapes; `IntegrityError` without one."""
    depths: list[int] = []
    weight = "encoder.{}.{}.0.weight".format  # of a stage and a block of it
    while (depth := next(n for n in count() if weight(len(depths), n) not in shapes)) > 0:
        depths.append(depth)
    try:
        widths = [shapes[weight(stage, 0)][0] for stage in range(len(depths))]
        sizes = Architecture(tuple(widths), tuple(depths), shapes["descriptor.0.weight"][0])
    except (KeyError, IndexError):
        sizes = Architecture((), ())
    expected = shapes_of(sizes) if all(holds for holds, _ in sizes.rules()) else {}
    found = {name: tuple(shape) for name, shape in shapes.items()}
    if not expected or found != expected:
        strange = sorted(name for name in found | expected if found.get(name) != expected.get(name))
        raise IntegrityError(f"does not hold the tensors of our front end: {', '.join(strange[:8])}")
    return sizes


_UNNORMALISED = ("lift", "points", "descriptor")  # parts of the network without batch normalisation


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
        # oneDNN's convolution that ends with a ReLU spares a pass over the map. It is missing in some builds
        # of PyTorch, and refuses bfloat16 on processors without AVX-512.
        half = half and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        fused = getattr(torch.ops.mkldnn, "_convolution_pointwise", None) if half else None
        if fused is None or isinstance(norm, nn.BatchNorm2d):
            return super().forward(x)
        sizes = (convolution.padding, convolution.stride, convolution.dilation, convolution.groups)
        return fused(x, convolution.weight, convolution.bias, *sizes, "relu", [], "")


class FeatureNetwork(nn.Module):
    """An encoder of several resolutions, a decoder that scores pixels, an MLP that describes points.

    `normalised`: with batch normalisation, for training; `folded` makes a network without.
    """

    def __init__(self, sizes: Architecture = Architecture(), *, normalised: bool = False) -> None:
        super().__init__()
        self.normalised = normalised
        self._build(sizes)

    def _build(self, sizes: Architecture) -> None:
        normalised, widths = self.normalised, sizes.widths
        self.sizes, self.squares = sizes, None
        self.encoder = nn.ModuleList()
        before = 1
        for width, depth in zip(widths, sizes.depths, strict=True):
            blocks = [ConvNormRelu(before, width, 3 if self.encoder else 5, 2, normalised=normalised)]
            blocks += [ConvNormRelu(width, width, 3, 1, normalised=normalised) for _ in range(depth - 1)]
            self.encoder.append(nn.Sequential(*blocks))
            before = width
        self.lift = nn.ModuleList(nn.Conv2d(upper, lower, 1) for lower, upper in pairwise(widths))
        self.mix = ConvNormRelu(widths[0], widths[0], 3, 1, normalised=normalised)
        self.points = nn.Conv2d(widths[0], 4, 3, padding=1)
        self.descriptor = nn.Sequential(
            nn.Linear(sum(widths), sizes.hidden), nn.ReLU(), nn.Linear(sizes.hidden, DESCRIPTOR_DIM)
        )

    def fit(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Become a network of the sizes that parameters of these names and shapes have."""
        sizes = architecture_of(shapes)
        if sizes != self.sizes:
            self._build(sizes)

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Grey (B, 1, H, W) in [0, 1] → logits (B, H, W) float32, and the maps to describe points with."""
        height, width = pixels.shape[2:]
        pixels = padded(pixels, self.sizes.stride)
        centred = pixels - pixels.mean((2, 3), keepdim=True)
        # A standard deviation; torch's own takes eight times as long.
        deviation = centred.square().mean((2, 3), keepdim=True).sqrt()
        x = (centred / (deviation + 0.02)).to(self.mix[0].weight.dtype)  # a constant image stays constant
        x = x.contiguous(memory_format=torch.channels_last)
        maps = []
        for stage in self.encoder:
            x = stage(x)
            maps.append(x)
        for lower, lift in zip(maps[-2::-1], reversed(self.lift), strict=True):
            # In float32: rounded twice to half precision, keypoints are less exact.
            enlarged = interpolate(lift(x).float(), scale_factor=2, mode="bilinear", align_corners=False)
            x = enlarged.add_(lower).to(lower.dtype)
        x = self.mix(x)
        # Half precision would make neighbouring pixels equal.
        with torch.autocast(x.device.type, enabled=False):
            ready = self.squares is not None and not torch.compiler.is_compiling()
            weight, bias = self.squares if ready else self._squares()
            logits = pixel_shuffle(conv2d(x.float(), weight, bias, 2, 1), 4).squeeze(1)
        return logits[:, :height, :width], maps

    def _squares(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of `points` and a pixel shuffle as one convolution of stride 2, which takes half
        the time: it has an output for each pixel of a square of 4 x 4."""
        shifts = [(dx, 1 - dx, dy, 1 - dy) for dy in (0, 1) for dx in (0, 1)]
        weight = torch.stack([pad(self.points.weight, shift) for shift in shifts])
        weight = weight.unflatten(1, (2, 2)).unflatten(0, (2, 2)).transpose(1, 2).flatten(0, 3)
        bias = self.points.bias.view(2, 2).repeat(2, 2).flatten()
        return weight.contiguous(memory_format=torch.channels_last), bias

    def describe(self, maps: Sequence[Tensor], points: Tensor) -> Tensor:
        """Unit descriptors (B, N, 64) float32 at points (B, N, 2) xy."""
        return self.described(sample(maps, points))

    def described(self, samples: Tensor) -> Tensor:
        """Unit descriptors (…, N, 64) float32 of what the maps hold at points, (…, N, C)."""
        found = converted(self.descriptor(samples), torch.float32)
        return found / found.norm(dim=-1, keepdim=True).clamp_min(1e-12)

    def prepare(self, dtype: torch.dtype) -> None:
        """Keep the convolutions in `dtype`, but for the last, and everything in the order that suits them;
        parameters change no more."""
        self.to(memory_format=torch.channels_last)
        for part in (self.encoder, self.lift, self.mix):
            part.to(dtype)
        self.squares = self._squares()


def folded(network: FeatureNetwork) -> FeatureNetwork:
    """The network in evaluation without batch normalisation, which has become part of its convolutions."""
    plain = FeatureNetwork(network.sizes).eval()
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
    network, seen = FeatureNetwork(plain.sizes, normalised=True), []
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


@torch.no_grad()
def grown(plain: FeatureNetwork, sizes: Architecture) -> FeatureNetwork:
    """A larger network that computes the same: what is new weighs 0 where it meets what was there.

    With more maps it is the same on images whose sides are multiples of its stride; others are repeated
    further at the edge, which changes their mean and deviation.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # grown again, it is the same
        network = FeatureNetwork(sizes).eval()
    old = dict(plain.named_parameters())
    for name, value in network.named_parameters():
        if name == "descriptor.0.weight":
            continue
        if name in old:
            value[: len(old[name])] = 0  # old outputs ignore new inputs
            value[tuple(slice(side) for side in old[name].shape)] = old[name]
        elif name.startswith("lift"):
            value.zero_()
        elif name.startswith("encoder") and int(name.split(".")[1]) < len(plain.encoder):
            # Of a map that was there: its last values pass on, as none of them is negative.
            nn.init.dirac_(value) if value.ndim == 4 else value.zero_()
    # Columns of the first layer are the channels of all maps, one map after the other.
    first, before = network.descriptor[0].weight, plain.descriptor[0].weight
    first[: len(before)] = 0
    starts = [sum(sizes.widths[:level]) for level in range(len(plain.sizes.widths))]
    for start, columns in zip(starts, before.split(plain.sizes.widths, dim=1), strict=True):
        first[: len(before), start : start + columns.shape[1]] = columns
    return network


def sample(maps: Sequence[Tensor], points: Tensor) -> Tensor:
    """(B, N, C) float32 values of all maps at points (B, N, 2) xy of the image; outside, those of the edge.

    The first sample of each map, (B, C, H/2, W/2), (B, C, H/4, W/4), …, is centred on the first pixel.
    """
    height, width = (2 * side for side in maps[0].shape[-2:])
    # Numbers, since a tensor of both sizes would have to be uploaded, which a GPU's queue waits for.
    pixel = torch.stack([points.new_full((), 2 / side) for side in (width, height)])
    grid, found = (points * pixel - 1).unsqueeze(2), []
    for level, each in enumerate(maps):
        at = torch.add(grid, pixel, alpha=2**level)
        found.append(grid_sample(each.float(), at, padding_mode="border", align_corners=False))
    return torch.cat(found, dim=1).squeeze(3).mT


NMS_RADIUS = 3  # pixels within which a point scores highest
SCORE_THRESHOLD = 0.004  # below it lie noise and plain surfaces; rooms with few keypoints need those above
BORDER = 4  # pixels along the edge without points
WINDOW = 5  # pixels a side, in which a point's position is refined


def candidates(logits: Tensor, radius: int, border: int) -> Tensor:
    """(B, H, W) bool: the largest within `radius` pixels in x and y, `border` or more away from the edge."""
    largest = _running_maximum(_running_maximum(logits, radius, -1), radius, -2)
    return (logits == largest) & inner_pixels(logits, border)


def _running_maximum(values: Tensor, radius: int, axis: int) -> Tensor:
    """(…, H, W) → the largest within `radius` rows or columns, by windows of doubling width."""
    side, ends = 2 * radius + 1, (0, 0) * (-1 - axis)
    values, width = pad(values, (*ends, radius, radius), value=-torch.inf), 1
    while width < side:
        step = min(width, side - width)
        count = values.shape[axis] - step
        values = torch.maximum(values.narrow(axis, 0, count), values.narrow(axis, step, count))
        width += step
    return values


def subpixel(logits: Tensor, points: Tensor) -> Tensor:
    """(B, N, 2) int64 xy → float32 xy: the centroid of the softmax of the logits in each one's window."""
    half, steps = WINDOW // 2, torch.arange(WINDOW, device=logits.device)
    window = torch.cartesian_prod(steps, steps).flip(1)  # xy
    beyond = pad(logits, (half, half, half, half), value=-torch.inf)
    corner, step = (torch.add(*xy.unbind(-1), alpha=beyond.shape[2]) for xy in (points, window))
    place = corner.unsqueeze(-1) + step
    weight = beyond.flatten(1).gather(1, place.flatten(1)).view_as(place).softmax(dim=-1)
    return points + (weight @ window.to(weight.dtype) - half)


def _build(_: ExtractorConfig) -> nn.Module:
    return FeatureNetwork()


def _find_together(network: FeatureNetwork, images: Sequence[Image], config: ExtractorConfig) -> list[Found]:
    """The best points of images of one size, refined and described."""
    device, least, limit = network.points.weight.device, config.score_threshold, config.max_keypoints
    least = math.log(least / (1 - least)) if 0 < least < 1 else math.copysign(math.inf, least - 0.5)
    logits, maps = network(grey(images, device))
    chosen = candidates(logits, config.nms_radius, BORDER) & (logits > least)
    points, scores = [], []
    for entry, image in enumerate(images):
        allowed = mask_of(image, device)
        places = (chosen[entry] if allowed is None else chosen[entry] & allowed).nonzero()  # yx
        strength, order = logits[entry][tuple(places.T)].sort(descending=True, stable=True)
        points.append(places[order[:limit]].flip(1))
        scores.append(strength[:limit].sigmoid())
    refined = subpixel(logits, pad_sequence(points, batch_first=True))
    samples, found = sample(maps, refined), []
    for entry, strength in enumerate(scores):
        count = len(strength)  # products of other sizes round differently, and an image is as it is alone
        described = network.described(samples[entry : entry + 1, :count])[0]
        found.append(Found(refined[entry, :count], strength, described))
    return found


_PUBLISHED = {"score_threshold": SCORE_THRESHOLD, "nms_radius": NMS_RADIUS}
FRONT_ENDS = {"learned": FrontEnd(_build, None, _PUBLISHED, _find_together)}
