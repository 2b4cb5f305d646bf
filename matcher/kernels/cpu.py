"""Softmax attention without masks on a CPU, above all in half precision."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels import attend_compiled

BLOCK_ROWS = 512  # of attention in half precision on a CPU
EVEN = 64  # points of which the stock kernel takes multiples
BLOCK_WEIGHTS = 2**19  # fewer weights than this, all heads together, are one block


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v by whole matrix products."""
    return torch.softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2), dim=-1) @ v


def half_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The compiled kernel if there is one, the stock kernel where it uses matrix units, else blocks."""
    if (found := attend_compiled(q, k, v)) is not None:
        return found
    if q.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        return _even(q, k, v)
    return _blocked(q, k, v)


def _even(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The stock kernel on multiples of `EVEN` points: it compiles its products for every number it meets."""
    rows, columns = q.shape[-2], k.shape[-2]
    if rows % EVEN:
        q = F.pad(q, (0, 0, 0, -rows % EVEN))
    if columns % EVEN == 0:
        return F.scaled_dot_product_attention(q, k, v)[..., :rows, :]
    k, v = (F.pad(x, (0, 0, 0, -columns % EVEN)) for x in (k, v))
    mask = q.new_zeros((1,) * (q.dim() - 1) + (k.shape[-2],))
    mask[..., columns:] = -torch.inf
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[..., :rows, :]


def _blocked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Matrix products of blocks in the cache: without matrix units twice as fast as the stock kernel."""
    leading = q.shape[:-2]
    if leading.numel() * q.shape[-2] * k.shape[-2] <= BLOCK_WEIGHTS:
        return whole(q, k, v)
    out = torch.empty_like(q)  # dense, in q's order of axes
    for head in product(*map(range, leading)):
        for rows in range(0, q.shape[-2], BLOCK_ROWS):
            block = (*head, slice(rows, rows + BLOCK_ROWS))
            out[block] = whole(q[block], k[head], v[head])
    return out
