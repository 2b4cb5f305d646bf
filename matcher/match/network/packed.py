"""Attention over packed tokens: every point of every image in one list, without padding.

`Layout` says which tokens are of which image, so that what happens point by point runs once over all and
only attention looks at images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from matcher.attention import Kernel, linear_attention, merge_heads, scaled_dot_product


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
