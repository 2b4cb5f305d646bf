"""Softmax attention without masks on a CPU, above all in half precision."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.calls import attend_compiled

BLOCK_ROWS = 512  # of attention in half precision on a CPU
# Products in half precision are compiled and kept for every number of points, more than half a megabyte each:
# they only see multiples of this, of twice this beyond 512 points, and of four times this beyond 2048.
EVEN = 64
BLOCK_WEIGHTS = 2**19  # fewer weights than this, all heads together, are one block


def whole(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √d + mask) v by whole matrix products."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return torch.softmax(scores if mask is None else scores.add_(mask), dim=-1) @ v


def half_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The compiled kernel if there is one, the stock kernel where it uses matrix units, else blocks."""
    if (found := attend_compiled(q, k, v)) is not None:
        return found
    rows, columns = q.shape[-2], k.shape[-2]
    if not rows or not columns:
        return whole(q, k, v)
    q, k, v = (F.pad(x, (0, 0, 0, even_size(x.shape[-2]) - x.shape[-2])) for x in (q, k, v))
    mask = None
    if k.shape[-2] > columns:
        mask = q.new_zeros((1,) * (q.dim() - 1) + (k.shape[-2],))
        mask[..., columns:] = -torch.inf
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[..., :rows, :]
    return _blocked(q, k, v, mask)[..., :rows, :]


def even_size(count: int) -> int:
    """The number of points, this or a little more, for which products are compiled."""
    step = EVEN * (1 if count <= 8 * EVEN else 2 if count <= 32 * EVEN else 4)
    return -(-count // step) * step


def _blocked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Matrix products of blocks in the cache: without matrix units twice as fast as the stock kernel."""
    leading = q.shape[:-2]
    if leading.numel() * q.shape[-2] * k.shape[-2] <= BLOCK_WEIGHTS:
        return whole(q, k, v, mask)
    mask = None if mask is None else mask.reshape(-1)
    out = torch.empty_like(q)  # dense, in q's order of axes
    for head in product(*map(range, leading)):
        for rows in range(0, q.shape[-2], BLOCK_ROWS):
            block = (*head, slice(rows, rows + BLOCK_ROWS))
            out[block] = whole(q[block], k[head], v[head], mask)
    return out
