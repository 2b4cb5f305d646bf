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

from matcher.kernels.library import kernels, library_in_use
from matcher.kernels.linear import linear_at_once
from matcher.kernels.trials import Trial, granted

WIDEST_HEAD = 128  # channels
WIDEST_ROW = 4096  # channels
_LEAST_SHARE = 16  # rows that are worth a thread


def attend_compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """softmax(q kᵀ / √d) v, or None where the kernel is not there, not made for this, or slower here.

    Args:
        q: (…, heads, N, d) bfloat16 or float32 on the CPU. k, v: (…, heads, M, d).

    Returns:
        (…, heads, N, d), N before heads in memory. None also if the matrix unit's kernel finds a number that
        is not finite.
    """
    width, library, half = q.shape[-1], kernels(), q.dtype == torch.bfloat16
    suits = (half or q.dtype == torch.float32) and q.dim() >= 3 and width % 32 == 0 and width <= WIDEST_HEAD
    suits = suits and q.dtype == k.dtype == v.dtype and q.device.type == "cpu"
    suits = suits and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    if library is None or not suits or not q.numel() or not k.numel():
        return None
    if not granted(f"attention {q.dtype}", try_half_attention if half else try_attention):
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (heads, n), m, leading = q.shape[-3:-1], k.shape[-2], q.shape[:-3]
    out = q.new_empty(*leading, n, heads, width).transpose(-2, -3)
    strides = (ctypes.c_long * 6)(*(x.stride(axis) for x in (q, k, v) for axis in (-2, -3)))
    sizes, threads = (n, m, heads, width), min(torch.get_num_threads(), math.ceil(n / 32) * heads)
    tiles = half and library_in_use().startswith("amx")
    for index in product(*map(range, leading)):
        given = (*(x[index].data_ptr() for x in (q, k, v, out)), strides)
        if not tiles:
            library.matcher_attend_vectors(*given, half, *sizes, threads)
        elif library.matcher_attend(*given, *sizes, threads):
            return None
    return out


def try_attention(dtype: torch.dtype = torch.float32) -> Trial:
    """Attention of 768 points."""
    rng = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 768, 64, generator=rng).to(dtype) for _ in range(3)]
    return Trial(lambda: attend_compiled(*given), lambda: F.scaled_dot_product_attention(*given), 5e-3)


def try_half_attention() -> Trial:
    """The same in half precision."""
    return try_attention(torch.bfloat16)


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
    """Whether `feed_forward_compiled` takes such rows (T, C), and maps of them, here."""
    return _take_rows(x) and granted(f"rows {x.dtype}", try_half_rows if _half(x) else try_rows)


def have_turns(x: Tensor) -> bool:
    """Whether `turn_compiled` takes such rows (T, C), and maps of them, here."""
    return _take_rows(x) and granted(f"turns {x.dtype}", try_half_turns if _half(x) else try_turns)


def _half(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _take_rows(x: Tensor) -> bool:
    suits = x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and x.dim() == 2
    # Autocast would change the precision of products between the kernels.
    if not suits or x.shape[1] > WIDEST_ROW // 4 or torch.is_autocast_enabled("cpu"):
        return False
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling() or kernels() is None)


def try_rows(dtype: torch.dtype = torch.float32) -> Trial:
    """The feed-forward steps of 512 points."""
    rng = torch.Generator().manual_seed(0)
    x, joint = torch.randn(512, 128, generator=rng), torch.randn(512, 256, generator=rng).to(dtype)
    widen, narrow = (torch.randn(*size, generator=rng).to(dtype) / 16 for size in ((256, 256), (128, 256)))
    bias, last, out = torch.zeros(256), torch.zeros(128), torch.empty_like(x)
    steps = FeedForwardSteps(widen, narrow, bias, bias + 1, bias, 1e-5, last)

    def stock() -> Tensor:
        hidden = F.layer_norm(
            F.linear(joint, widen, bias.to(dtype)), (256,), (bias + 1).to(dtype), bias.to(dtype)
        )
        return x + F.linear(F.gelu(hidden), narrow, last.to(dtype))

    def kernel() -> Tensor:
        feed_forward_compiled(x, joint, steps, out)
        return out

    return Trial(kernel, stock, 0.1 if dtype == torch.bfloat16 else 1e-3)


def try_half_rows() -> Trial:
    """The same in half precision."""
    return try_rows(torch.bfloat16)


def feed_forward_compiled(x: Tensor, joint: Tensor, steps: FeedForwardSteps, out: Tensor) -> None:
    """What the steps make of `joint` (T, D), added to `x` (T, C), goes to `out` (T, C).

    Args:
        x: float32, no gaps between its rows, as in `out`.
        joint: in the precision of the weights, D at least C and half of H; `have_kernels(joint)`.
    """
    library, half, threads = kernels(), joint.dtype == torch.bfloat16, threads_for(len(x))
    hidden = linear_at_once(joint, steps.widen)
    pointers = (y.data_ptr() for y in (steps.bias, steps.gain, steps.shift))
    library.matcher_normalise_gelu(hidden.data_ptr(), half, *hidden.shape, *pointers, steps.epsilon, threads)
    update = linear_at_once(hidden, steps.narrow)
    pointers = (steps.last_bias.data_ptr(), out.data_ptr(), threads)
    library.matcher_add(x.data_ptr(), update.data_ptr(), half, *update.shape, *pointers)


def turn_compiled(x: Tensor, bias: Tensor, turns: Tensor, heads: int) -> None:
    """x + bias, whose first `heads` heads are multiplied by `turns` as complex numbers, in place.

    Args:
        x: (T, C) without gaps; real and imaginary parts lie side by side; `have_turns(x)`.
        bias: (C,) float32.
        turns: (T, 2, P) float32, real parts, then imaginary ones.
    """
    turns, pairs = turns.float().contiguous(), turns.shape[2]
    sizes = (x.dtype == torch.bfloat16, len(x), heads, pairs, x.shape[1] - 2 * heads * pairs)
    pointers = (x.data_ptr(), bias.data_ptr(), turns.data_ptr())
    kernels().matcher_turn(pointers[0], *sizes, *pointers[1:], threads_for(len(x)))


def try_turns(dtype: torch.dtype = torch.float32) -> Trial:
    """Queries and keys of 1,024 points turned."""
    rng = torch.Generator().manual_seed(0)
    x, angles = torch.randn(1024, 384, generator=rng).to(dtype), torch.rand(1024, 32, generator=rng)
    bias, turns = torch.zeros(384), torch.stack([angles.cos(), angles.sin()], dim=1)

    def stock() -> Tensor:
        out = x + bias.to(dtype)
        pairs = torch.view_as_complex(out[:, :256].float().unflatten(1, (4, -1, 2)))
        turned = pairs * torch.complex(*turns.unbind(1)).unsqueeze(1)
        out[:, :256] = torch.view_as_real(turned).flatten(1).to(dtype)
        return out

    def kernel() -> Tensor:
        out = x.clone()
        turn_compiled(out, bias, turns, 4)
        return out

    return Trial(kernel, stock, 0.05 if dtype == torch.bfloat16 else 1e-4)


def try_half_turns() -> Trial:
    """The same in half precision."""
    return try_turns(torch.bfloat16)


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
    if library is None or not suits or scores.requires_grad or not granted("absorb", try_absorb):
        return None
    out, u, v = scores.new_empty(scores.shape), u.contiguous(), v.contiguous()
    sizes, pointers = (*scores.shape, scores.stride(0)), (u.data_ptr(), v.data_ptr())
    library.matcher_absorb(
        scores.data_ptr(), *sizes, *pointers, least, out.data_ptr(), threads_for(len(scores))
    )
    return out


def try_absorb() -> Trial:
    """Scores of 768 points beside 768."""
    rng = torch.Generator().manual_seed(0)
    scores, u, v = (torch.randn(*size, generator=rng) for size in ((768, 768), (768,), (768,)))

    def stock() -> Tensor:
        return torch.add(scores, u[:, None]).add_(v).clamp_min_(-80.0).exp_()

    return Trial(lambda: absorb_compiled(scores, u, v, -80.0), stock, 1e-4)


def threads_for(rows: int) -> int:
    """How many threads so many rows are worth."""
    return max(1, min(torch.get_num_threads(), rows // _LEAST_SHARE))
