"""The mean of the poses that explain the matches of a pair nearly as well as the likeliest one.

Where parallax is small or a scene nearly flat, poses some degrees apart explain the matches about equally
well, and which of them is the likeliest is up to chance. The mean of all, each with its posterior
probability, has the least expected squared error. Errors of neighbouring matches are alike, so likelihoods
are tempered: a difference of `_TEMPERATURE` counts as a factor of e.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from matcher.verify.hypotheses import Hypothesis

_TEMPERATURE = 10.0
_NEAR = 10.0  # degrees between rotations, and between directions of translation, of poses that are averaged


def mean_pose(hypotheses: Sequence[Hypothesis], likeliest: Hypothesis) -> np.ndarray | None:
    """The mean pose (4, 4) with a translation of length 1; None where no other is near the likeliest.

    Rotations have the chordal mean (Hartley et al. 2013, section 5.3), translations the mean direction.

    Args:
        hypotheses: with poses.
        likeliest: the one among them that others must be near.
    """
    best = likeliest.model.cam1_from_cam0
    near = [
        one
        for one in hypotheses
        if np.isfinite(one.likelihood) and degrees_apart(one.model.cam1_from_cam0, best) < _NEAR
    ]
    if len(near) < 2 or not np.isfinite(likeliest.likelihood):
        return None
    gains = np.array([one.likelihood for one in near]) - likeliest.likelihood
    weights = np.exp(gains / _TEMPERATURE)
    total = np.einsum("n,nij->ij", weights, np.stack([one.model.cam1_from_cam0 for one in near]))
    left, _, right = np.linalg.svd(total[:3, :3])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = left @ right, total[:3, 3] / np.linalg.norm(total[:3, 3])
    return pose


def degrees_apart(pose0: np.ndarray, pose1: np.ndarray) -> float:
    """The larger of the angles between two rotations and between two directions of translation."""
    between = (np.trace(pose0[:3, :3] @ pose1[:3, :3].T) - 1) / 2
    cosines = np.array([between, pose0[:3, 3] @ pose1[:3, 3]])
    return float(np.degrees(np.arccos(cosines.clip(-1, 1))).max())
