"""Descriptor norms and RootSIFT."""

from __future__ import annotations

import numpy as np

from matcher.config import GRID_KIND

SIFT_DIM = 128
# Front ends whose descriptors have any length; those of all others have norm 1.
UNNORMALISED = ("dedodeb", "dedodeg", GRID_KIND)
JOINED = "joined"  # kind of the features of several front ends
_RAW_NORM = 2.0  # RootSIFT has norm 1, OpenCV's SIFT about 512


def root_sift(descriptors: np.ndarray) -> np.ndarray:
    """Raw SIFT (N, 128) → square roots of the L1-normalised values, float32 of norm 1.

    Arandjelović and Zisserman, Three things everyone should know to improve object retrieval, 2012.
    """
    total = np.maximum(descriptors.sum(axis=1, keepdims=True, dtype=np.float32), 1e-6)
    return np.sqrt(descriptors.astype(np.float32) / total)


def typical_norm(descriptors: np.ndarray) -> float:
    """Median Euclidean norm of descriptors (N, D) that are not zero; 1 where there is none."""
    norms = np.linalg.norm(descriptors.astype(np.float32), axis=-1)
    norms = norms[norms > 0]
    return float(np.median(norms)) if len(norms) else 1.0


def is_raw_sift(descriptors: np.ndarray) -> bool:
    """Whether (N, 128) descriptors look like SIFT's as OpenCV gives them: not negative, far from norm 1."""
    some = descriptors[:64]
    return some.shape[-1] == SIFT_DIM and bool((some >= 0).all()) and typical_norm(some) > _RAW_NORM
