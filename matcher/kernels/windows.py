"""The compiled least-squares matching of windows on NumPy arrays, as in `matcher.refine`; no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from matcher.kernels.loader import kernels
from matcher.processes import compute_threads

_LARGEST = 1 << 30  # pixels of an image
_LEAST_SHARE = 16  # matches that are worth a thread


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
    threads = max(1, min(compute_threads(), count // _LEAST_SHARE))
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
