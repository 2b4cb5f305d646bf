"""Match probabilities that hold: what a network says, corrected by how many keypoints find a partner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from matcher.config import CalibrationConfig

_LEAST = 1e-4  # probabilities nearer to 0 or 1 are taken as this near


def calibrated(scores: np.ndarray, counts: Sequence[int], config: CalibrationConfig | None) -> np.ndarray:
    """The probabilities that matches are within 3 pixels, by Platt scaling with one number of the pair.

    A network is trained on the pairs of its recipe; where fewer keypoints find a partner, because the scene
    has depth or the images overlap little, its matches are wrong more often than it says. So
    log odds = offset + slope · log odds of the network + share_slope · log(Σ scores / keypoints).
    Platt, Probabilistic Outputs for Support Vector Machines, 1999. The order of matches stays.

    >>> import numpy as np
    >>> from matcher.config import CalibrationConfig
    >>> few = calibrated(np.array([0.9, 0.5]), (20, 30), CalibrationConfig(0.0, 1.0, 1.0))
    >>> [round(float(score), 2) for score in few]
    [0.39, 0.07]

    Args:
        scores: (K,) of the matches of one pair.
        counts: keypoints of its images.
        config: None leaves the scores as they are.

    Returns:
        (K,) float32.
    """
    if config is None or not len(scores):
        return scores
    logits = config.offset + evidence(scores, counts) @ [config.slope, config.share_slope]
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def evidence(scores: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """(K, 2) the log odds of matches, and the logarithm of the share of keypoints that find a partner.

    Arguments are those of `calibrated`.
    """
    inner = np.clip(np.asarray(scores, dtype=np.float64), _LEAST, 1 - _LEAST)
    share = max(float(np.sum(scores, dtype=np.float64)) / max(1, min(counts)), _LEAST)
    return np.column_stack([np.log(inner / (1 - inner)), np.full(len(inner), np.log(share))])
