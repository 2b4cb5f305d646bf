"""The compiled kernels on tensors, without gradients. Where one is not there, or not made for its arguments,
the caller does the same by stock operators."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import addressof, c_long
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from matcher.kernels.loader import Trial, granted, kernels, library_in_use, processor_flags, processor_maker
from matcher.processes import compute_threads

# --- linear: Linear maps of rows without gradients, as a CPU is fast at them.

# Channels of rows that one thread takes at a time; what goes into and comes out of a map fits its cache.
CACHED_ROWS = 2**18
# oneDNN's products are compiled again for every number of rows, which takes as long as a dozen of them: they
# only see multiples of this.
ROW_STEP = 64
_LEAST_WEIGHTS = 2**12  # of a map that is worth oneDNN


def rows_at_once(rows: int, channels: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` that stay in the caches of all threads; all rows at once on other devices, and where
    a compiler decides.

    Their lengths are multiples of `ROW_STEP` if there are as many rows; for that the last one reaches back
    over rows of the one before, which are computed twice.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        yield from [slice(0, rows)] if rows else []
        return
    step = CACHED_ROWS * torch.get_num_threads() // channels
    step = max(step // ROW_STEP, 1) * ROW_STEP
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        even = start + (stop - start) // ROW_STEP * ROW_STEP
        if even > start:
            yield slice(start, even)
        if even < stop:
            yield slice(max(stop - ROW_STEP, 0), stop)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, inputs) weightᵀ + bias → (T, outputs), on a CPU `rows_at_once` where oneDNN computes it."""
    if x.device.type != "cpu" or not len(x) % ROW_STEP or not _by_onednn(x, weight):
        return linear_at_once(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for rows in rows_at_once(len(x), max(weight.shape), x.device):
        out[rows] = linear_at_once(x[rows], weight, bias)
    return out


def linear_at_once(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of all rows at once."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and _by_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether such rows on a CPU are multiplied by oneDNN."""
    if x.dtype != torch.float32:
        return True
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return len(x) >= ROW_STEP and weight.numel() >= _LEAST_WEIGHTS and x.dim() == 2 and mkl_is_slow()


@cache
def mkl_is_slow() -> bool:
    """Whether this processor has AVX-512, is not Intel's, and this PyTorch has oneDNN's linear maps."""
    if "avx512f" not in processor_flags() or processor_maker() in (None, "GenuineIntel"):
        return False
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


# --- calls: The compiled kernels on tensors, without gradients. Where one is not there, or not made for its
# arguments,

WIDEST_HEAD = 128  # channels
WIDEST_ROW = 4096  # channels
_LEAST_SHARE_CALLS = 16  # rows that are worth a thread


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
    return _take_rows(x) and granted(f"rows {x.dtype}", try_half_rows if _half_calls(x) else try_rows)


def have_turns(x: Tensor) -> bool:
    """Whether `turn_compiled` takes such rows (T, C), and maps of them, here."""
    return _take_rows(x) and granted(f"turns {x.dtype}", try_half_turns if _half_calls(x) else try_turns)


def _half_calls(x: Tensor) -> bool:
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
    return max(1, min(torch.get_num_threads(), rows // _LEAST_SHARE_CALLS))


# --- candidates: Assignment by candidates, and consensus, in the compiled kernels; without gradients, on
# the CPU.


class CandidateSet(NamedTuple):
    """Which candidates there are: E of them, ordered by row and then by column; int32."""

    starts: Tensor  # (N+1,) where the candidates of each row begin
    columns: Tensor  # (E,)
    column_starts: Tensor  # (M+1,) the same ordered by column and then by row
    rows: Tensor  # (E,)
    order: Tensor  # (E,) the place of each of these in the order by rows

    @property
    def sizes(self) -> tuple[int, int]:
        """N and M."""
        return len(self.starts) - 1, len(self.column_starts) - 1


def have_candidates(x: Tensor) -> bool:
    """Whether the functions of this file are there for tensors on the device of `x`, without gradients."""
    if x.device.type != "cpu" or torch.is_grad_enabled() or kernels() is None:
        return False
    return granted("candidates", try_candidates)


def try_candidates() -> Trial:
    """Beside dense scores and twenty iterations of Sinkhorn, fewer than a match takes."""
    rng = torch.Generator().manual_seed(0)
    left, bins, most = torch.randn(1200, 128, generator=rng) / 4, torch.zeros(1200), 16
    right = left.roll(1, 0) + torch.randn(1200, 128, generator=rng) / 16

    def stock() -> Tensor:
        scores = left @ right.t()
        kernel = scores.exp()
        for _ in range(20):
            columns = torch.mv(kernel, bins)
            torch.mv(kernel.t(), columns)
        return scores.amax(1)

    def kernel() -> Tensor:
        where, values, *_ = find_candidates(left, right, bins, bins, most)
        rows = torch.repeat_interleave(torch.arange(1200), where.starts.long().diff())
        return torch.full((1200,), -torch.inf).scatter_reduce(0, rows, values, "amax")

    return Trial(kernel, stock, 0.02)


def find_candidates(
    left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, most: int
) -> tuple[CandidateSet, Tensor, tuple[Tensor, Tensor], Tensor]:
    """The `most` best of every row and column of left rightᵀ − bins0 − bins1; needs `have_candidates`.

    Args:
        left, right: (N, D), (M, D) float32, neither empty.
        bins0, bins1: (N,), (M,) float32, finite scores of the dustbins.
        most: at least 1.

    Returns:
        The set; its values (E,), to 16 bits or better; Σ exp of the other values of every row (N,) and
        column (M,), none counted as more than e⁸; and these exponentials (N, M) bfloat16, 0 for candidates.
    """
    library = kernels()
    left, right, bins0, bins1 = (x.float().contiguous() for x in (left, right, bins0, bins1))
    (n, width), m = left.shape, len(right)
    most = min(most, max(n, m))
    columns, rows = (torch.empty(count, most, dtype=torch.int32) for count in (n, m))
    values, column_values = left.new_empty(n, most), left.new_empty(m, most)
    rests, weights = (left.new_empty(n), left.new_empty(m)), left.new_empty(n, m, dtype=torch.bfloat16)
    lists = _places(columns, values, rows, column_values)
    given = _places(left, right, bins0, bins1)
    library.matcher_candidates(*given, n, m, width, most, *lists, *_places(*rests, weights), threads_for(n))
    room = (n + m) * most
    starts, column_starts, others, turned, order = (
        torch.empty(size, dtype=torch.int32) for size in (n + 1, m + 1, room, room, room)
    )
    joined = left.new_empty(room)
    made = _places(starts, others, joined, column_starts, turned, order, *rests, weights)
    count = library.matcher_join(n, m, most, *lists, *made)
    found = CandidateSet(starts, others[:count], column_starts, turned[:count], order[:count])
    return found, joined[:count], rests, weights


def transport_candidates(
    where: CandidateSet,
    scores: Tensor,
    bins: tuple[Tensor, Tensor, float],
    rests: tuple[Tensor, Tensor],
    weights: Tensor | None,
    start: tuple[Tensor, Tensor] | None,
    limits: tuple[int, float],
    columns_first: bool,
) -> tuple[Tensor, Tensor, int, bool]:
    """Dual potentials of the transport problem of candidates and dustbins.

    Args:
        where, scores: the candidates and their scores (E,).
        bins: scores of the dustbins (N,), (M,), and of their corner.
        rests: (N,), (M,); row i weighs exp(rests_i + rests_j) with every column j beside its candidates,
            times weights_ij where these are given.
        weights: (N, M) bfloat16, 0 for candidates; or None.
        start: potentials (N+1,), (M+1,) to begin with.
        limits: most iterations, and the error of the rows at which they end.
        columns_first: update the columns before the rows.

    Returns:
        Potentials (N+1,), (M+1,), iterations, and whether the error fell to its limit.
    """
    n, m = where.sizes
    begun = start is not None
    u, v = (x.clone() for x in start) if begun else (scores.new_empty(n + 1), scores.new_empty(m + 1))
    weighed = [x.contiguous() for x in (scores, *bins[:2], *rests)]
    iterations = c_long(0)
    others = 0 if weights is None else weights.data_ptr()
    given, potentials = (*_places(*where, *weighed), others), _places(u, v)
    threads = threads_for(len(scores) // 32)
    converged = kernels().matcher_transport(
        n, m, *given, bins[2], *potentials, begun, columns_first, *limits, addressof(iterations), threads
    )
    return u, v, iterations.value, bool(converged)


def best_candidates(
    where: CandidateSet, scores: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The best column of every row under scores (E,) + u (N+1,) + v (M+1,).

    Returns:
        Sums (N,), columns (N,) int64, and whether the row is the column's best and first too (N,) bool.
    """
    n, m = where.sizes
    best, partners, mutual = (
        u.new_empty(n),
        torch.empty(n, dtype=torch.int64),
        torch.empty(n, dtype=torch.bool),
    )
    given = (where.starts, where.columns, scores.contiguous(), u.contiguous(), v.contiguous())
    kernels().matcher_best(n, m, *_places(*given, best, partners, mutual))
    return best, partners, mutual


def supported_candidates(
    where: CandidateSet, scores: Tensor, priors: tuple[Tensor, Tensor], positions: tuple[Tensor, Tensor]
) -> Tensor:
    """Scores (E,) with what the priors of both sides add where a position is the predicted one.

    Args:
        where, scores: the candidates and their scores (E,).
        priors: (N, 5), (M, 5): predicted x and y, 1 / squared tolerance, height there, penalty elsewhere.
        positions: (N, 2), (M, 2).
    """
    out, n = torch.empty_like(scores, memory_format=torch.contiguous_format), where.sizes[0]
    given = (scores.contiguous(), *(x.contiguous() for x in (*priors, *positions)))
    kernels().matcher_support(n, *_places(where.starts, where.columns, *given, out), threads_for(n))
    return out


def fit_compiled(
    positions: Tensor, targets: Tensor, confidence: Tensor, trial: Callable[[], Trial]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """What local affine maps predict, as `consensus.fit_local_maps`, or None where the kernel is not there.

    Args:
        positions, targets: (B, N, 2) float32 on the CPU.
        confidence: (B, N), 0 for points without a match.
        trial: that of this kernel beside stock operators.

    Returns:
        Predicted positions (B, N, 2), support (B, N), spread (B, N).
    """
    library = kernels()
    given = (positions, targets, confidence)
    suits = all(x.dtype == torch.float32 and x.device.type == "cpu" for x in given)
    if library is None or not suits or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        return None
    if not granted("local maps", trial):
        return None
    given = tuple(x.contiguous() for x in given)
    made = (torch.empty_like(given[0]), torch.empty_like(given[2]), torch.empty_like(given[2]))
    for b, count in enumerate([positions.shape[1]] * len(positions)):
        into = _places(*(x[b] for x in made))
        library.matcher_fit(*_places(*(x[b] for x in given)), count, *into, threads_for(count))
    return made


def _places(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(x.data_ptr() for x in tensors)


# --- maps: The front end's maps in the compiled kernels; without gradients, on the CPU, channels side by
# side.

_LEAST_PEAKS = 4096  # of an image that room is made for, and one for every so many pixels
_PIXELS_A_PEAK = 8


def have_maps(*maps: Tensor) -> bool:
    """Whether maps (B, C, h, w) can be enlarged and their pixels scored here."""
    dtypes = {x.dtype for x in maps}
    return _suit(maps) and all(
        granted(f"maps {x}", try_half_maps if _half_maps(x) else try_maps) for x in dtypes
    )


def have_samples(*maps: Tensor) -> bool:
    """Whether `sample_compiled` takes such maps (B, C, h, w) here."""
    dtypes = {x.dtype for x in maps}
    return _suit(maps) and all(
        granted(f"samples {x}", try_half_samples if _half_maps(x) else try_samples) for x in dtypes
    )


def _half_maps(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16


def _suit(maps: Sequence[Tensor]) -> bool:
    suit = all(
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.is_contiguous(memory_format=torch.channels_last)
        for x in maps
    )
    if not suit or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return not torch.compiler.is_compiling() and kernels() is not None


def try_maps(dtype: torch.dtype = torch.float32) -> Trial:
    """Pixels scored on maps, and maps enlarged, of a small image."""
    rng = torch.Generator().manual_seed(0)
    fine, coarse = (
        torch.randn(1, 32, *size, generator=rng).to(dtype).contiguous(memory_format=torch.channels_last)
        for size in ((120, 160), (60, 80))
    )
    weight, bias = torch.randn(4, 32, 3, 3, generator=rng) / 16, torch.randn(4, generator=rng)

    def stock() -> Tensor:
        scores = F.pixel_shuffle(F.conv2d(fine.float(), weight, bias, padding=1), 2)
        enlarged = fine + F.interpolate(coarse, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.cat([scores.flatten(), enlarged.flatten().float()])

    def kernel() -> Tensor:
        scores = score_pixels_compiled(fine, weight, bias)
        return torch.cat([scores.flatten(), add_enlarged_compiled(fine, coarse).flatten().float()])

    return Trial(kernel, stock, 0.05 if dtype == torch.bfloat16 else 1e-4)


def try_half_maps() -> Trial:
    """The same in half precision."""
    return try_maps(torch.bfloat16)


def add_enlarged_compiled(fine: Tensor, coarse: Tensor) -> Tensor:
    """fine (B, C, 2h, 2w) + coarse (B, C, h, w) enlarged bilinearly, of one precision; needs `have_maps`."""
    batch, channels, height, width = coarse.shape
    if fine.shape != (batch, channels, 2 * height, 2 * width):  # the kernel would write beyond its memory
        raise ValueError(
            f"a map of {tuple(fine.shape)} is not twice as large as one of {tuple(coarse.shape)}"
        )
    out = torch.empty_like(fine)
    for b in range(batch):
        given = (
            fine[b].data_ptr(),
            coarse[b].data_ptr(),
            fine.dtype == torch.bfloat16,
            height,
            width,
            channels,
        )
        kernels().matcher_add_enlarged(*given, out[b].data_ptr(), threads_for(height * 16))
    return out


def score_pixels_compiled(maps: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(B, 2h, 2w) float32: maps (B, C, h, w) convolved to 4 channels, which are then 2 × 2 pixels.

    Args:
        maps: as `have_maps` takes them.
        weight: (4, C, 3, 3) float32.
        bias: (4,) float32.
    """
    batch, channels, height, width = maps.shape
    out = torch.empty(batch, 2 * height, 2 * width)
    weight = weight.permute(0, 2, 3, 1).contiguous()
    for b in range(batch):
        given = (maps[b].data_ptr(), maps.dtype == torch.bfloat16, height, width, channels)
        parameters = (weight.data_ptr(), bias.data_ptr())
        kernels().matcher_score_pixels(*given, *parameters, out[b].data_ptr(), threads_for(height * 16))
    return out


def sample_compiled(maps: Sequence[Tensor], points: Tensor, scales: Sequence[float]) -> Tensor:
    """(B, N, ΣC) float32 of maps (B, C, h, w) at points (B, N, 2) xy times a scale; needs `have_samples`."""
    points = points.float().contiguous()
    batch, count = points.shape[:2]
    out, first = torch.empty(batch, count, sum(x.shape[1] for x in maps)), 0
    for level, scale in zip(maps, scales, strict=True):
        _, channels, height, width = level.shape
        half = level.dtype == torch.bfloat16
        for b in range(batch):
            given = (level[b].data_ptr(), half, height, width, channels, points[b].data_ptr(), count, scale)
            made = (out[b, :, first:].data_ptr(), out.stride(1), threads_for(count))
            kernels().matcher_sample(*given, *made)
        first += channels
    return out


def try_samples(dtype: torch.dtype = torch.float32) -> Trial:
    """Samples of 512 points."""
    rng = torch.Generator().manual_seed(0)
    level = torch.randn(1, 64, 60, 80, generator=rng).to(dtype).contiguous(memory_format=torch.channels_last)
    points = torch.rand(1, 512, 2, generator=rng) * torch.tensor([160.0, 120.0])

    def stock() -> Tensor:
        grid = (points + 1) / torch.tensor([80.0, 60.0]) - 1  # (2 · points / 2 + 1) / size − 1
        found = F.grid_sample(level.float(), grid[:, :, None], padding_mode="border", align_corners=False)
        return found[..., 0].transpose(1, 2)

    return Trial(lambda: sample_compiled([level], points, [0.5]), stock, 1e-3)


def try_half_samples() -> Trial:
    """The same in half precision."""
    return try_samples(torch.bfloat16)


def peaks_compiled(scores: Tensor, radius: int, border: int, trial: Callable[[], Trial]) -> Tensor | None:
    """Pixels (N, 2) int64 xy that are the largest within `radius`, row by row, or None without the kernel.

    Args:
        scores: (H, W) float32.
        radius: in x and in y.
        border: pixels along the edge that are none.
        trial: that of this kernel beside stock operators.

    Returns:
        None also where there are more than the kernel expects.
    """
    suits = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.stride(1) == 1
    if not suits or torch.is_grad_enabled() or kernels() is None:
        return None
    if not granted("peaks", trial):
        return None
    room = max(_LEAST_PEAKS, scores.numel() // _PIXELS_A_PEAK)
    points = torch.empty(room, 2, dtype=torch.int64)
    given = (scores.data_ptr(), *scores.shape, scores.stride(0), radius, border)
    count = kernels().matcher_peaks(*given, points.data_ptr(), room, threads_for(len(scores)))
    return points[:count] if count <= room else None


# --- windows: The compiled least-squares matching of windows on NumPy arrays, as in `matcher.refine`.

_LARGEST = 1 << 30  # pixels of an image
_LEAST_SHARE_WINDOWS = 16  # matches that are worth a thread


class WindowView(NamedTuple):
    """Where K windows lie in one image."""

    levels: Sequence[np.ndarray]  # float32 (H, W), those of its pyramid that are sampled
    mask: np.ndarray | None  # (H, W) uint8 of the first level, not 0 where it may be used
    affine: np.ndarray  # (K, 2, 3) from (1, x, y) in the frame to pixels of the first level
    level: np.ndarray  # (K,) int


class FitSettings(ctypes.Structure):
    """Constants of the fit, as they are named in `matcher.refine`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("side", "first_steps", "steps", "reweighings")),
        *((name, ctypes.c_float) for name in ("deformation", "robust_scale", "inflation", "min_residual")),
        *((name, ctypes.c_float) for name in ("noise_energy", "max_damping", "initial_noise", "tolerance")),
    ]


def fit_windows_compiled(
    view0: WindowView,
    view1: WindowView,
    settings: FitSettings,
    weights: np.ndarray,
    deviation: np.ndarray,
    prior: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Least-squares fits of K windows, or None where the kernel is not there or not made for this.

    Args:
        view0, view1: both images.
        settings: side of the window and constants.
        weights: (side²,) of its samples, sum 1.
        deviation: (K,) prior standard deviation of the shift along an axis.
        prior: (K, 6) initial shift and deformation, and mean of their prior.

    Returns:
        (K, 6) shift and deformation; (K, 2, 2) covariance of the shift; (4, K) correlation, contrast, length
        of the last step, visible share.
    """
    library, count = kernels(), len(prior)
    if library is None or any(view.levels[0].size > _LARGEST for view in (view0, view1)):
        return None
    kept: list[object] = []  # what the pointers point to
    views = [ctypes.byref(_view(view, kept)) for view in (view0, view1)]
    change = np.array(prior, dtype=np.float64, order="C")
    covariance, numbers = np.empty((count, 2, 2)), np.empty((4, count))
    results = _pointers(change, covariance, numbers)
    weights, deviation = _dense(weights, np.float32), _dense(deviation, np.float64)
    threads = max(1, min(compute_threads(), count // _LEAST_SHARE_WINDOWS))
    given = (ctypes.byref(settings), weights.ctypes.data, deviation.ctypes.data, count)
    if library.matcher_fit_windows(*views, *given, ctypes.byref(results), threads):
        return None
    return change, covariance, numbers


def _view(view: WindowView, kept: list[object]) -> ctypes.Array[ctypes.c_void_p]:
    """The structure `View` of the kernel: five pointers."""
    levels = [_dense(level, np.float32) for level in view.levels]
    sizes = np.array([level.shape[::-1] for level in levels], dtype=np.int32)
    arrays = sizes, _dense(view.affine, np.float64), _dense(view.level, np.int32)
    mask = None if view.mask is None else _dense(view.mask, np.uint8)
    images = _pointers(*levels)
    kept += [levels, arrays, mask, images]
    sizes, affine, level = (each.ctypes.data for each in arrays)
    masked = None if mask is None else mask.ctypes.data
    return (ctypes.c_void_p * 5)(ctypes.addressof(images), sizes, masked, affine, level)


def _pointers(*arrays: np.ndarray) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def _dense(array: np.ndarray, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=dtype)


# --- cpu: Softmax attention without masks on a CPU, above all in half precision.

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
