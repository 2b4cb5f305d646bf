"""Matrices a block of rows at a time, so that what is read again still lies in a core's cache."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import Kernel, linear_attention, merge_heads, scaled_dot_product
from matcher.config import BackboneConfig

# --- blocks: Matrices a block of rows at a time, so that what is read again still lies in a core's cache.

LEAST_EXPONENT = -80.0
BLOCK = 2**18  # float32 numbers, half of a core's cache


def exponentials(scores: Tensor) -> Tensor:
    """exp in place, of at least e⁻⁸⁰: where it underflows it is fifty times slower on some processors."""
    return scores.clamp_min_(LEAST_EXPONENT).exp_()


def row_blocks(rows: int, columns: int, device: torch.device, numbers: int = BLOCK) -> list[slice]:
    """Rows whose numbers stay in the caches of all threads; all at once on other devices than a CPU."""
    step = rows if device.type != "cpu" else max(1, numbers * torch.get_num_threads() // max(columns, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, max(step, 1))]


def raised(scores: Tensor, u: Tensor, v: Tensor, factor: float = 1.0) -> Tensor:
    """factor · scores (B, N, M) + u (B, N) + v (B, M)."""
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    for part in row_blocks(*scores.shape[1:], scores.device):
        torch.add(u[:, part, None], scores[:, part], alpha=factor, out=out[:, part]).add_(v.unsqueeze(1))
    return out


# --- backbone: The residual pyramid that describes an image without a detector (LoFTR, Sun et al. 2021,
# section 3.1).


class ConvNorm(nn.Module):
    """A convolution without bias, then batch normalisation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.norm(self.conv(x))

    def fuse(self) -> None:
        """Fold the normalisation, as it is in evaluation, into the convolution; for `fuse_backbone`."""
        norm, conv = self.norm, self.conv
        gain = norm.weight / (norm.running_var + norm.eps).sqrt()
        conv.weight = nn.Parameter(conv.weight * gain[:, None, None, None], requires_grad=False)
        conv.bias = nn.Parameter(norm.bias - gain * norm.running_mean, requires_grad=False)
        self.norm = nn.Identity()


class Residual(nn.Module):
    """Two 3×3 convolutions beside a skip (He et al. 2016, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, outputs, 3, stride)
        self.second = ConvNorm(outputs, outputs, 3)
        self.skip = ConvNorm(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, H, W) → (B, outputs, ⌈H/stride⌉, ⌈W/stride⌉)."""
        return self.second(torch.relu_(self.first(x))).add_(self.skip(x)).relu_()


class Merge(nn.Module):
    """A stage joined with the coarser map above it, smoothed."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inner = ConvNorm(inputs, inputs, 3)
        self.outer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)

    def forward(self, lateral: Tensor, above: Tensor) -> Tensor:
        """(B, inputs, H, W) and (B, inputs, ⌈H/2⌉, ⌈W/2⌉) → (B, outputs, H, W)."""
        height, width = lateral.shape[-2:]
        # Corners on corners, as the weights were trained; a map is one longer than an odd side needs.
        raised = F.interpolate(above, scale_factor=2.0, mode="bilinear", align_corners=True)
        joint = self.inner(raised[..., :height, :width].add_(lateral))
        return self.outer(F.leaky_relu_(joint))


class Backbone(nn.Module):
    """Grey images → a coarse map, one vector per cell, and a fine one."""

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        widths = config.widths
        self.stem = ConvNorm(1, widths[0], 7, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(Residual(inputs, outputs, 1 if stage == 0 else 2), Residual(outputs, outputs, 1))
            for stage, (inputs, outputs) in enumerate(zip((widths[0], *widths), widths, strict=False))
        )
        self.laterals = nn.ModuleList(
            nn.Conv2d(inputs, outputs, 1, bias=False)
            for inputs, outputs in zip(widths, (*widths[1:], widths[-1]), strict=True)
        )
        self.merges = nn.ModuleList(Merge(inputs, outputs) for outputs, inputs in pairwise(widths))

    @property
    def stride(self) -> int:
        """Pixels from one cell of the coarse map to the next."""
        return 2 ** len(self.stages)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Grey pixels (B, 1, H, W) in [0, 1] → (B, C, ⌈H/8⌉, ⌈W/8⌉) and (B, c, ⌈H/2⌉, ⌈W/2⌉), float32."""
        x, levels = torch.relu_(self.stem(pixels.to(self.stem.conv.weight.dtype))), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        coarse = fine = self.laterals[-1](levels.pop())
        for level in range(len(levels) - 1, -1, -1):
            fine = self.merges[level](self.laterals[level](levels[level]), fine)
        return coarse.float(), fine.float()


@torch.no_grad()
def fuse_backbone(backbone: Backbone, dtype: torch.dtype) -> Backbone:
    """A frozen copy for inference in `dtype`, its normalisations folded into its convolutions."""
    fused = copy.deepcopy(backbone).eval().requires_grad_(False)
    for part in list(fused.modules()):
        if isinstance(part, ConvNorm):
            part.fuse()
    return fused.to(dtype=dtype, memory_format=torch.channels_last)


# --- depth: Matchers with fewer layers than their network has.


def with_layers(
    matcher: object, layers: int, iterations: int | None = None, *, pruning: bool = True
) -> object:
    """An attention matcher with its first layers only; every other matcher as it is.

    Each layer of a network that may stop early has a head of its own, so any depth gives an assignment.
    `iterations`, if given, is the most that Sinkhorn takes; without `pruning` no point is dropped.
    """
    if not can_be_cut(matcher) or (layers >= len(matcher.model.layers) and iterations is None):
        return matcher
    policy = matcher.model.config.policy
    policy = replace(policy, pruning=pruning and policy.pruning)
    return matcher.adjusted(layers, max_iterations=iterations, policy=policy)


def can_be_cut(matcher: object) -> bool:
    """Whether any number of its layers gives an assignment."""
    return hasattr(matcher, "adjusted") and matcher.model.config.assignment.every_layer


# --- precision: Number types of a device.


def widest_float(device: torch.device) -> torch.dtype:
    """float64, but float32 on Metal, which has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64


# --- packed: Attention over packed tokens: every point of every image in one list, without padding.


@dataclass(frozen=True)
class Layout:
    """Points (N, M) of every pair; tokens are ordered pair 0 image 0, pair 0 image 1, pair 1 image 0, …"""

    counts: tuple[tuple[int, int], ...]
    # (2·B, N) bool: which of equally many points of every image are attended to; None: all
    live: Tensor | None = field(default=None, compare=False)

    # Points of each image in token order, 2·B of them, and their number where it is the same for all and not
    # zero; known from the start, because a compiler does not follow what is computed at first use.
    lengths: list[int] = field(init=False, compare=False, repr=False)
    uniform: int | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        lengths = [n for pair in self.counts for n in pair]
        different = set(lengths)
        same = different.pop() if len(different) == 1 and 0 not in different else None
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "uniform", same)

    @cached_property
    def starts(self) -> list[int]:
        """First token of each image, and the total at the end."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Which tokens (int64, on the CPU) are points of an image 0 and which of an image 1."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        side = (torch.arange(len(lengths)) % 2).repeat_interleave(lengths)
        return (side == 0).nonzero().squeeze(1), (side == 1).nonzero().squeeze(1)

    @cached_property
    def slots(self) -> Tensor:
        """Where each token lies in a table of images, padded to the longest (int64, on the CPU)."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        first = torch.arange(len(lengths)) * int(lengths.max()) - torch.tensor(self.starts[:-1])
        return torch.arange(self.starts[-1]) + first.repeat_interleave(lengths)

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Tokens (T, …) as a list of pairs of views (N, …), (M, …)."""
        parts = x.split(self.lengths)
        return list(zip(parts[0::2], parts[1::2], strict=True))


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, kernel: Kernel = scaled_dot_product, *, cross: bool
) -> Tensor:
    """Attention of every image to itself or, `cross`, to the other image of its pair.

    Args:
        q, k, v: (T, heads, head_dim).
        layout: which tokens are which image.
        kernel: the score function, from `build_attention`.
        cross: False for self-, True for cross-attention.

    Returns:
        (T, heads · head_dim); zeros for points that have nothing to attend to.
    """
    if layout.uniform:
        return _attend_uniform(q, k, v, layout, cross, kernel)
    if q.device.type != "cpu" and kernel is scaled_dot_product and len(q):
        return _attend_padded(q, k, v, layout, cross)
    return _attend_ragged(q, k, v, layout, cross, kernel)


def scaled_queries(q: Tensor, layout: Layout, above: int | None, *, cross: bool) -> Tensor:
    """Queries (T, heads, head_dim) whose attention logits are scaled by the number of keys.

    With n > `above` keys they are multiplied by log n / log `above` (Chiang and Cholak 2022, "Overcoming a
    theoretical limitation of self-attention"): softmax over more keys is flatter, and this undoes it.

    Args:
        q: (T, heads, head_dim).
        layout: which tokens are which image.
        above: number of keys up to which logits stay as they are; None: always.
        cross: the keys are the tokens of the other image.
    """
    if above is None or not len(q):
        return q
    if layout.live is not None:
        live = _other_images(layout.live) if cross else layout.live
        gains = (live.sum(1).clamp_min(above).log() / math.log(above)).repeat_interleave(layout.uniform)
        return q * gains[:, None, None].to(q.dtype)
    if layout.uniform:  # no copy to the device, which no CUDA graph may hold
        return q if layout.uniform <= above else q * _logit_gain(layout.uniform, above)
    pairs = (((n, m), (m, n)) if cross else ((n, n), (m, m)) for n, m in layout.counts)
    return scaled_queries_to(q, [sides for pair in pairs for sides in pair], above)


def scaled_queries_to(q: Tensor, counts: Sequence[tuple[int, int]], above: int | None) -> Tensor:
    """The same of queries (ΣN, heads, head_dim), of which N each have the M keys of `counts` (N, M)."""
    if above is None or all(keys <= above for _, keys in counts):
        return q
    queries = torch.tensor([n for n, _ in counts])
    gains = torch.tensor([_logit_gain(keys, above) for _, keys in counts]).repeat_interleave(queries)
    return q * gains[:, None, None].to(q.device, q.dtype)


def _logit_gain(keys: int, above: int) -> float:
    return math.log(max(keys, above)) / math.log(above)


def _attend_uniform(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool, kernel: Kernel) -> Tensor:
    heads, width = q.shape[1:]
    q, k, v = (x.view(-1, layout.uniform, heads, width).transpose(1, 2) for x in (q, k, v))
    if cross:
        k, v = (_other_images(x) for x in (k, v))
    if layout.live is None:
        return merge_heads(kernel(q, k, v)).reshape(-1, heads * width)
    live = _other_images(layout.live) if cross else layout.live
    mask = live[:, None] if kernel is linear_attention else live[:, None, None]
    return merge_heads(kernel(q, k, v, mask)).reshape(-1, heads * width)


def _other_images(x: Tensor) -> Tensor:
    """(2·B, …) of all images, as their partners have it."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _attend_ragged(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool, kernel: Kernel) -> Tensor:
    heads, width = q.shape[1:]
    out = q.new_zeros(q.shape[0], heads * width)
    for image, count in enumerate(layout.lengths):
        source = image ^ 1 if cross else image
        if not count or not layout.lengths[source]:
            continue
        here = slice(layout.starts[image], layout.starts[image + 1])
        there = slice(layout.starts[source], layout.starts[source + 1])
        message = kernel(*(x.transpose(0, 1).unsqueeze(0) for x in (q[here], k[there], v[there])))
        out[here] = merge_heads(message[0])
    return out


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, layout: Layout, cross: bool) -> Tensor:
    """One masked call for all images: on a GPU many small calls cost more than padding does."""
    images, longest = len(layout.lengths), max(layout.lengths)
    slots = layout.slots.to(q.device)
    q, k, v = (
        x.new_zeros(images * longest, *x.shape[1:]).index_copy(0, slots, x).unflatten(0, (images, longest))
        for x in (q, k, v)
    )
    filled = torch.zeros(images * longest, dtype=torch.bool, device=q.device).index_fill(0, slots, True)
    filled = filled.view(images, longest)
    if cross:
        k, v, filled = (_other_images(x) for x in (k, v, filled))
    message = scaled_dot_product(*(x.transpose(1, 2) for x in (q, k, v)), filled[:, None, None])
    return merge_heads(message).flatten(0, 1)[slots]


def attend_to(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[tuple[int, int]], kernel: Kernel = scaled_dot_product
) -> Tensor:
    """Attention of the points of one side to those of the other.

    Args:
        q: (ΣN, heads, head_dim), pair after pair. k, v: (ΣM, heads, head_dim).
        counts: (N, M) of every pair.
        kernel: the score function, from `build_attention`.

    Returns:
        (ΣN, heads · head_dim); zeros for points that have nothing to attend to.
    """
    heads, width = q.shape[1:]
    if len(set(counts)) == 1 and 0 not in counts[0]:
        q, k, v = (x.reshape(len(counts), -1, heads, width).transpose(1, 2) for x in (q, k, v))
        return merge_heads(kernel(q, k, v)).reshape(-1, heads * width)
    messages = [q.new_zeros(0, heads * width)]
    lengths, sources = ([pair[side] for pair in counts] for side in (0, 1))
    for here, *there in zip(q.split(lengths), k.split(sources), v.split(sources), strict=True):
        if len(here) and len(there[0]):
            message = kernel(*(x.transpose(0, 1) for x in (here, *there)))
            messages.append(merge_heads(message))
        else:
            messages.append(here.new_zeros(len(here), heads * width))
    return torch.cat(messages)


def image_sums(values: Tensor, layout: Layout) -> Tensor:
    """Sums of values (T,) over each image of the layout (2·B,)."""
    starts = torch.tensor(layout.starts, device=values.device)
    sums = values.cumsum(0)
    totals = torch.cat([sums.new_zeros(1), sums])
    return totals[starts[1:]] - totals[starts[:-1]]


def interleave(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """Per-pair tensors of image 0 and image 1 as one packed list in the order of `Layout`."""
    return torch.cat([x for pair in zip(first, second, strict=True) for x in pair])
