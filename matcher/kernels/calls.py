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
from typing import TYPE_CHECKING

import numpy as np

from matcher.kernels.loader import kernels
from matcher.processes import compute_threads

if TYPE_CHECKING:
    from torch import Tensor


def takes(x: Tensor) -> bool:
    """Whether there is a kernel for such queries, keys or values (…, heads, N, d), without gradients."""
    import torch  # only here: windows are refined where it is not installed

    known = x.dtype in (torch.bfloat16, torch.float32) and x.device.type == "cpu" and x.dim() >= 3
    known = known and x.shape[-1] in (32, 64, 96, 128)
    return known and not (torch.is_grad_enabled() and x.requires_grad) and kernels() is not None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, gain: float = 1.0, turns: Tensor | None = None
) -> Tensor | None:
    """softmax(gain · q kᵀ / √d) v of q (…, heads, N, d) and k, v (…, heads, M, d), in memory N before heads.

    `turns` (…, ≥ N and M, 2, d) are float32 cosines and sines by which rows of q and of k are rotated first
    (`matcher.match.position.rotate`).
    """
    import torch

    width, half = q.shape[-1], q.dtype == torch.bfloat16
    if not q.dtype == k.dtype == v.dtype or not all(map(takes, (q, k, v))) or not q.numel() or not k.numel():
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (heads, n), m, leading = q.shape[-3:-1], k.shape[-2], q.shape[:-3]
    out = q.new_empty(*leading, n, heads, width).transpose(-2, -3)
    strides = (ctypes.c_long * 6)(*(x.stride(axis) for x in (q, k, v) for axis in (-2, -3)))
    threads, library = min(torch.get_num_threads(), math.ceil(n / 32) * heads), kernels()
    for index in product(*map(range, leading)):
        offsets = (sum(i * s for i, s in zip(index, x.stride(), strict=False)) for x in (q, k, v, out))
        places = (x.data_ptr() + x.element_size() * o for x, o in zip((q, k, v, out), offsets, strict=True))
        own = None if turns is None else turns[index].contiguous()
        turn = None if own is None else own.data_ptr()
        library.matcher_attend(*places, strides, half, n, m, heads, width, gain, turn, threads)
    return out


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
        *places, end = (x.data_ptr() + 4 * pair * x[0].numel() for x in (*given, out))
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
