"""The compiled kernels on tensors, without gradients. Where one is not there, or not made for its arguments,
the caller does the same by stock operators."""

from __future__ import annotations

import ctypes
import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.library import kernels

WIDEST_HEAD = 128  # channels
WIDEST_ROW = 4096  # channels
_LEAST_SHARE = 16  # rows that are worth a thread


def attend_compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """softmax(q kᵀ / √d) v, or None where the kernel is not there or not made for this.

    Args:
        q: (…, heads, N, d) bfloat16 on the CPU. k, v: (…, heads, M, d).

    Returns:
        (…, heads, N, d), N before heads in memory. None also if scores may be too large to do without their
        maximum.
    """
    width, library = q.shape[-1], kernels()
    suits = q.dtype == torch.bfloat16 and q.dim() >= 3 and width % 32 == 0 and width <= WIDEST_HEAD
    suits = suits and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    if library is None or not suits or not q.numel() or not k.numel():
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (heads, n), m, leading = q.shape[-3:-1], k.shape[-2], q.shape[:-3]
    out = q.new_empty(*leading, n, heads, width).transpose(-2, -3)
    strides = (ctypes.c_long * 6)(*(x.stride(axis) for x in (q, k, v) for axis in (-2, -3)))
    threads = min(torch.get_num_threads(), math.ceil(n / 32) * heads)
    for index in product(*map(range, leading)):
        pointers = (x[index].data_ptr() for x in (q, k, v, out))
        if library.matcher_attend(*pointers, strides, n, m, heads, width, threads):
            return None
    return out


class FeedForwardSteps(NamedTuple):
    """x + narrow(gelu(layer normalisation(widen(·)))): weights in the precision of the products, the rest in
    float32."""

    widen: Tensor  # (H, D)
    narrow: Tensor  # (C, H)
    bias: Tensor  # (H,)
    gain: Tensor  # (H,) of the normalisation
    shift: Tensor  # (H,)
    epsilon: float
    last_bias: Tensor  # (C,)


def have_kernels(x: Tensor) -> bool:
    """Whether `feed_forward_compiled` and `turn_compiled` take such rows (T, C), and maps of them, here."""
    suits = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and x.dim() == 2
    # Autocast would change the precision of products between the kernels.
    if not suits or x.shape[1] > WIDEST_ROW // 4 or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.is_grad_enabled() and kernels() is not None


def feed_forward_compiled(x: Tensor, joint: Tensor, steps: FeedForwardSteps, out: Tensor) -> None:
    """What the steps make of `joint` (T, D), added to `x` (T, C), goes to `out` (T, C).

    Args:
        x: float32, no gaps between its rows, as in `out`.
        joint: in the precision of the weights, D at least C and half of H; `have_kernels(joint)`.
    """
    library, half, threads = kernels(), joint.dtype == torch.bfloat16, threads_for(len(x))
    hidden = F.linear(joint, steps.widen)
    pointers = (y.data_ptr() for y in (steps.bias, steps.gain, steps.shift))
    library.matcher_normalise_gelu(hidden.data_ptr(), half, *hidden.shape, *pointers, steps.epsilon, threads)
    update = F.linear(hidden, steps.narrow)
    pointers = (steps.last_bias.data_ptr(), out.data_ptr(), threads)
    library.matcher_add(x.data_ptr(), update.data_ptr(), half, *update.shape, *pointers)


def turn_compiled(x: Tensor, bias: Tensor, turns: Tensor, heads: int) -> None:
    """x + bias, whose first `heads` heads are multiplied by `turns` as complex numbers, in place.

    Args:
        x: (T, C) without gaps; real and imaginary parts lie side by side; `have_kernels(x)`.
        bias: (C,) float32.
        turns: (T, 2, P) float32, real parts, then imaginary ones.
    """
    turns, pairs = turns.float().contiguous(), turns.shape[2]
    sizes = (x.dtype == torch.bfloat16, len(x), heads, pairs, x.shape[1] - 2 * heads * pairs)
    pointers = (x.data_ptr(), bias.data_ptr(), turns.data_ptr())
    kernels().matcher_turn(pointers[0], *sizes, *pointers[1:], threads_for(len(x)))


def absorb_compiled(scores: Tensor, u: Tensor, v: Tensor, least: float) -> Tensor | None:
    """exp(scores + u + v), from e^least to e^87, or None where the kernel is not there or not made for this.

    Args:
        scores: (N, M) float32 on the CPU, or such a matrix transposed. u, v: (N,), (M,).
    """
    if scores.stride(1) != 1 and scores.stride(0) == 1:
        turned = absorb_compiled(scores.t(), v, u, least)
        return None if turned is None else turned.t()
    library = kernels()
    suits = scores.dtype == torch.float32 and scores.device.type == "cpu" and scores.stride(1) == 1
    if library is None or not suits or scores.requires_grad:
        return None
    out, u, v = scores.new_empty(scores.shape), u.contiguous(), v.contiguous()
    sizes, pointers = (*scores.shape, scores.stride(0)), (u.data_ptr(), v.data_ptr())
    library.matcher_absorb(
        scores.data_ptr(), *sizes, *pointers, least, out.data_ptr(), threads_for(len(scores))
    )
    return out


def threads_for(rows: int) -> int:
    """How many threads so many rows are worth."""
    return max(1, min(torch.get_num_threads(), rows // _LEAST_SHARE))
