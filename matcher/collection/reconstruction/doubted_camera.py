"""Whether the camera that the user gave fits the photos: told from the fundamental matrices of their pairs.

With the right focal length f, KᵀFK is an essential matrix, of which both singular values are equal; how far
they are from it is the measure of self-calibration by Mendonça and Cipolla (1999). Planes and cameras that
only move ahead say nothing of f, so the median over many pairs decides, and only where it does so clearly.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matcher.collection.store import Store
    from matcher.data.camera import Camera

_OCTAVES, _STEPS = 3, 8  # the given focal length is made longer and shorter by; steps of each
_PAIRS, _MOST = 8, 2000  # that tell it at least; more say no more
_INLIERS = 50  # of a pair whose matrix is exact enough
_BETTER = 2.0  # times as unequal as with another focal length, singular values are a doubt
_UNEQUAL = 0.015  # so far the singular values are apart at least; less can be noise
_OTHER = 1.25  # times as long or short, at least, as the given one


def better_focal(store: Store, camera: Camera, only: Collection[str] | None = None) -> float | None:
    """About the focal length (pixels) that the pairs of a run imply, where they contradict the given one.

    None where they agree with it, or say too little.
    """
    matrices = []
    for pair in store.pairs():
        selected = only is None or (pair.name0 in only and pair.name1 in only)
        found = pair.geometry
        exact = found.status == "ok" and np.count_nonzero(found.inliers) >= _INLIERS
        if selected and exact and found.kind == "fundamental" and found.matrix is not None:
            matrices.append(found.matrix)
        if len(matrices) == _MOST:
            break
    if len(matrices) < _PAIRS:
        return None
    factor = _better_factor(np.array(matrices), camera)
    return None if factor is None else factor * camera.fx


def _better_factor(matrices: np.ndarray, camera: Camera) -> float | None:
    """The factor of the focal length with which fundamental matrices (P, 3, 3) are essential ones."""
    factors = 2.0 ** (np.arange(-_OCTAVES * _STEPS, _OCTAVES * _STEPS + 1) / _STEPS)
    unequal = np.array([np.median(_inequality(matrices, camera, factor)) for factor in factors])
    best = int(np.argmin(unequal))
    given = unequal[_OCTAVES * _STEPS]
    inside = 0 < best < len(factors) - 1  # at the end, none of them fits
    far = abs(np.log(factors[best])) >= np.log(_OTHER)
    clear = given >= max(_UNEQUAL, _BETTER * unequal[best])
    return float(factors[best]) if inside and far and clear else None


def _inequality(matrices: np.ndarray, camera: Camera, factor: float) -> np.ndarray:
    """(P,) in [0, 1]: how unequal both singular values of KᵀFK are."""
    k = np.array([[factor * camera.fx, 0, camera.cx], [0, factor * camera.fy, camera.cy], [0, 0, 1]])
    values = np.linalg.svd(k.T @ matrices @ k, compute_uv=False)
    return (values[:, 0] - values[:, 1]) / (values[:, 0] + values[:, 1])
