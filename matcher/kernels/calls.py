"""The compiled kernels on tensors and arrays, without gradients.

Where they are not there, or not made for their arguments, these functions give None and the caller does the
same by stock operators: `matcher.attention.scaled_dot_product`, `matcher.match.consensus.fit_local_maps`, and
NumPy in `matcher.refine`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from matcher.kernels.loader import kernels
from matcher.processes import compute_threads

if TYPE_CHECKING:
    from torch import Tensor


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for such queries, keys or values (…, d), without gradients."""
    import torch  # only here: windows are refined where it is not installed

    known = x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu" and x.dim() >= 3
    known = known and x.shape[-1] in (32, 64, 96, 128)
    return known and not (torch.is_grad_enabled() and x.requires_grad) and kernels() is not None


class Span(NamedTuple):
    """Consecutive queries, and the consecutive keys that they attend to."""

    query: int  # the first
    queries: int
    key: int  # the first
    keys: int
    gain: float = 1.0  # of the logits


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, spans: Sequence[Span] = (), turns: Tensor | None = None
) -> Tensor | None:
    """softmax(gain · q kᵀ / √d) v of q (…, N, heads, d) and k, v (…, M, heads, d) → (…, N, heads · d).

    All queries attend to all keys, or each to those of its span. `turns` (…, T, 2, d) are cosines and
    sines by which queries and keys are rotated first (`matcher.match.position.rotate`), those of a span from
    its first query on.
    """
    import torch

    given, width, half = (q, k, v), q.shape[-1], q.dtype == torch.bfloat16
    known = k.shape == v.shape and (*q.shape[:-3], *q.shape[-2:]) == (*k.shape[:-3], *k.shape[-2:])
    known = known and q.dtype == k.dtype == v.dtype and all(map(takes, given))
    if not known or not q.numel() or not k.numel():
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in given)
    (n, heads), leading, library = q.shape[-3:-1], q.shape[:-3], kernels()
    out = q.new_empty(*leading, n, heads * width)
    if turns is not None:
        turns = (turns if turns.dtype == torch.float32 else turns.float()).contiguous()
    strides = (ctypes.c_long * 6)(*(x.stride(axis) for x in (q, k, v) for axis in (-3, -2)))
    for index, span in product(product(*map(range, leading)), spans or [Span(0, n, 0, k.shape[-3])]):
        rows = ((q, span.query, -3), (k, span.key, -3), (v, span.key, -3), (out, span.query, -2))
        places = [_place(x, index) + row * x.stride(axis) * x.element_size() for x, row, axis in rows]
        turn = None if turns is None else _place(turns, (*index, span.query))
        threads = min(torch.get_num_threads(), math.ceil(span.queries / 32) * heads)
        sizes = (span.queries, span.keys, heads, width)
        library.matcher_attend(*places, strides, half, *sizes, span.gain, turn, threads)
    return out


def _place(x: Tensor, index: Sequence[int]) -> int:
    """The address of an entry along the first axes."""
    return x.data_ptr() + x.element_size() * sum(i * s for i, s in zip(index, x.stride(), strict=False))


def local_maps(positions: Tensor, targets: Tensor, confidence: Tensor) -> Tensor | None:
    """(B, N, 4) predicted position, support and spread by the affine maps around points that
    `matcher.match.consensus.fit_local_maps` fits; positions and targets (B, N, 2), confidence (B, N)."""
    import torch

    library, given = kernels(), (positions, targets, confidence)
    suits = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    suits = suits and not (torch.is_grad_enabled() and any(x.requires_grad for x in given))
    if library is None or not suits or any(x.dtype != torch.float32 for x in given):
        return None
    given, points = [x.contiguous() for x in given], positions.shape[1]
    out, threads = positions.new_empty(*positions.shape[:2], 4), torch.get_num_threads()
    for pair in range(len(positions)):
        *places, end = (_place(x, (pair,)) for x in (*given, out))
        library.matcher_local_maps(*places, points, end, min(threads, math.ceil(points / 64)))
    return out


class FitSettings(ctypes.Structure):
    """Numbers of the fit; `matcher.refine.fit_settings` says what they are."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("side", "first_steps", "steps", "reweighings")),
        *((name, ctypes.c_float) for name in ("deformation", "robust_scale", "inflation", "min_residual")),
        *((name, ctypes.c_float) for name in ("noise_energy", "max_damping", "initial_noise", "tolerance")),
    ]


def fit_windows(
    views: Sequence[tuple],
    settings: FitSettings,
    weights: np.ndarray,
    deviation: np.ndarray,
    prior: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Fits of K windows: (K, 6) shift and deformation; (K, 2, 2) covariance of the shift; (4, K) correlation,
    contrast, length of the last step, visible share.

    `views` of both images: the levels of its pyramid that are sampled, float32 (H, W); a mask (H, W) of the
    first or None, not 0 where it may be used; (K, 2, 3) from (1, x, y) in the frame to pixels of the first;
    (K,) levels. `weights` (side²,) of the samples of a window, sum 1; `deviation` (K,) prior standard
    deviation of the shift along an axis; `prior` (K, 6) initial shift and deformation, the mean of theirs.
    """
    library, count = kernels(), len(prior)
    if library is None or any(levels[0].size > 1 << 30 for levels, *_ in views):  # places are 32-bit numbers
        return None
    kept: list[np.ndarray] = []  # what the pointers point to

    def place(array: np.ndarray | None, dtype: type) -> int | None:
        if array is None:
            return None
        kept.append(np.ascontiguousarray(array, dtype=dtype))
        return kept[-1].ctypes.data

    given = []
    for levels, mask, affine, level in views:
        images = (ctypes.c_void_p * len(levels))(*(place(each, np.float32) for each in levels))
        sizes = place(np.array([each.shape[::-1] for each in levels]), np.int32)
        rest = (place(mask, np.uint8), place(affine, np.float64), place(level, np.int32))
        given.append((images, (ctypes.c_void_p * 5)(ctypes.addressof(images), sizes, *rest)))
    made = np.array(prior, dtype=np.float64, order="C"), np.empty((count, 2, 2)), np.empty((4, count))
    results = (ctypes.c_void_p * 3)(*(array.ctypes.data for array in made))
    threads = max(1, min(compute_threads(), count // 16))
    numbers = (place(weights, np.float32), place(deviation, np.float64), count)
    failed = library.matcher_fit_windows(
        *(each[1] for each in given), ctypes.byref(settings), *numbers, results, threads
    )
    return None if failed else made
