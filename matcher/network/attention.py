"""Attention over packed tokens: every point of every picture in one list, no padding.

`Layout` says which tokens belong to which picture, so that what happens point by point (projections, norms,
activations) runs once over all of them and only attention looks at pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Layout:
    """Points (N, M) of every pair; tokens are ordered pair 0 image 0, pair 0 image 1, pair 1 image 0, …"""

    counts: tuple[tuple[int, int], ...]

    @cached_property
    def lengths(self) -> list[int]:
        """Points of each picture in token order, 2·B of them."""
        return [n for pair in self.counts for n in pair]

    @cached_property
    def starts(self) -> list[int]:
        """First token of each picture, and the total at the end."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def uniform(self) -> int | None:
        """The number of points of every picture if it is the same and not zero, else None."""
        lengths = set(self.lengths)
        return lengths.pop() if len(lengths) == 1 and 0 not in lengths else None

    def split(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Tokens (T, …) as a list of pairs of views (N, …), (M, …)."""
        parts = x.split(self.lengths)
        return list(zip(parts[0::2], parts[1::2], strict=True))


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v of (B, heads, N, d), (B, heads, M, d) (Vaswani et al. 2017, eq. 1)."""
    if q.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
        # On CPUs the stock kernel's backward pass takes twice the time of these matrix products.
        return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, across: bool) -> Tensor:
    """Attention of every picture to itself or, `across`, to the other picture of its pair.

    Args:
        q, k, v: (T, heads, head_dim).
        layout: which tokens are which picture.
        across: False for self-, True for cross-attention.

    Returns:
        (T, heads · head_dim); zeros for points that have nothing to attend to.
    """
    gather = _attend_uniform if layout.uniform else _attend_ragged
    return gather(q, k, v, layout, across, scaled_dot_product)


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def _attend_uniform(q: Tensor, k: Tensor, v: Tensor, layout: Layout, across: bool, kernel: Kernel) -> Tensor:
    heads, width = q.shape[1:]
    q, k, v = (x.view(-1, layout.uniform, heads, width).transpose(1, 2) for x in (q, k, v))
    if across:
        k, v = (x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1) for x in (k, v))
    return kernel(q, k, v).transpose(1, 2).reshape(-1, heads * width)


def _attend_ragged(q: Tensor, k: Tensor, v: Tensor, layout: Layout, across: bool, kernel: Kernel) -> Tensor:
    heads, width = q.shape[1:]
    out = q.new_zeros(q.shape[0], heads * width)
    for picture, count in enumerate(layout.lengths):
        source = picture ^ 1 if across else picture
        if not count or not layout.lengths[source]:
            continue
        here = slice(layout.starts[picture], layout.starts[picture + 1])
        there = slice(layout.starts[source], layout.starts[source + 1])
        message = kernel(*(x.transpose(0, 1).unsqueeze(0) for x in (q[here], k[there], v[there])))
        out[here] = message[0].transpose(0, 1).reshape(count, heads * width)
    return out


def interleave(first: list[Tensor], second: list[Tensor]) -> Tensor:
    """Per-pair tensors of image 0 and image 1 as one packed list in the order of `Layout`."""
    return torch.cat([x for pair in zip(first, second, strict=True) for x in pair])
