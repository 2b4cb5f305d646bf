"""Quarter turns of steerable descriptors of one pair; NumPy.

A descriptor of the front end `learned` is trained to have four groups of values that are permuted cyclically
when its image is rotated by 90 degrees (the C4 steerer of Bökman et al. 2024, section 4). Whatever the
rotation between two images, the right quarter turn of one's descriptors leaves at most 45 degrees of it, and
no features are extracted again.
"""

from __future__ import annotations

import math

import numpy as np

TURNS = 4  # quarter turns of a full one; a descriptor has a group of values for each
STEERABLE = "learned"  # the front end with steerable descriptors
# Clockwise quarter turns of the EXIF orientations without reflection.
EXIF_TURNS = {1: 0, 6: 1, 3: 2, 8: 3}
# The EXIF orientation with one more clockwise turn than orientation 1 … 8; index 0 is unused.
TURNED_EXIF = (0, 6, 7, 8, 5, 2, 3, 4, 1)

COMPARED = 1024  # keypoints of each image, the strongest when they come from a front end
FEW = 384  # keypoints that are compared first
# Least ratio of the evidence of the best turn to that of the second best at which a few keypoints decide. On
# hard indoor pairs that is so for two thirds, and the decision was always that of all keypoints.
DECISIVE = 1.5
MIN_DISTANCE = 1e-6  # cosine distance below which descriptors count as equal
# Evidence per keypoint for no turn above which no other is tried; unrelated images have 0.002.
CERTAIN = 0.04
MIN_GAIN = 0.2  # margin of evidence by which a turn must exceed no turn
# Where the turn that the descriptors suggest gives few matches, others are tried until one does not: first
# upside down, as an image is seen from the other side of a table. All keypoints are matched where so many of
# the strongest have so many matches. A turn is accepted if it gives this part of the matches below which it
# was tried, and this many times the matches of the best one before.
OTHER_TURNS, PROBED, PROMISING = (2, 1, 3), 768, 3
ACCEPTED_PART, ACCEPTED_GAIN = 0.5, 1.5


def turned(descriptors: np.ndarray, turns: int) -> np.ndarray:
    """Steerable descriptors (N, D) as they would be after clockwise quarter turns of their image."""
    groups = descriptors.reshape(len(descriptors), TURNS, descriptors.shape[1] // TURNS)
    return np.roll(groups, turns, axis=1).reshape(descriptors.shape)


def rotated_descriptors(descriptors: np.ndarray, kind: str) -> list[np.ndarray]:
    """Descriptors (N, D) of an image as it is and, if they are steerable, after each quarter turn."""
    turns = TURNS if kind == STEERABLE else 1
    return [turned(descriptors, turn) if turn else descriptors for turn in range(turns)]


def best_turn(descriptors0: np.ndarray, descriptors1: np.ndarray) -> int:
    """Clockwise quarter turns of image 1 after which its steerable descriptors fit those of image 0 best.

    A few of the strongest keypoints decide most pairs; for the others more keypoints are compared.
    """
    few = evidence_of_turns(descriptors0, descriptors1, STEERABLE, strongest=FEW, certain=CERTAIN)
    few[0] += MIN_GAIN
    if len(few) < 2 or max(len(descriptors0), len(descriptors1)) <= FEW:
        return int(few.argmax())
    second, best = np.sort(few)[-2:]
    if best > DECISIVE * second:
        return int(few.argmax())
    many = evidence_of_turns(descriptors0, descriptors1, STEERABLE)
    many[0] += MIN_GAIN
    return int(many.argmax())


def evidence_of_turns(
    descriptors0: np.ndarray,
    descriptors1: np.ndarray,
    kind: str,
    *,
    strongest: int = COMPARED,
    certain: float = math.inf,
) -> np.ndarray:
    """(T,) evidence that image 1 matches image 0 after 0 … T - 1 clockwise quarter turns.

    It measures how distinctive mutual nearest neighbours are: the sum of (1 - r)², with r the ratio of the
    distances to the nearest and to the second nearest descriptor, the larger one of both images. (A sum of
    similarities is dominated by wrong neighbours where views differ by more than a rotation.)

    Args:
        descriptors0, descriptors1: (N, D), (M, D) of norm 1, best first.
        kind: their front end; T is 1 if its descriptors are not steerable.
        strongest: how many keypoints of each image are compared.
        certain: evidence per keypoint for no turn above which no other turn is tried (T is 1).
    """
    own, others = (each[:strongest].astype(np.float32, copy=False) for each in (descriptors0, descriptors1))
    evidence: list[float] = []
    for candidate in rotated_descriptors(others, kind):
        evidence.append(_evidence(own @ candidate.T))
        if evidence[0] > certain * len(own):
            break
    return np.array(evidence)


def _evidence(similarity: np.ndarray) -> float:
    """Of similarities (N, M)."""
    if not similarity.size:
        return 0.0
    best0, best1 = similarity.max(axis=1, keepdims=True), similarity.max(axis=0, keepdims=True)
    top0, top1 = similarity == best0, similarity == best1
    row, column = np.nonzero(top0 & top1)
    second0 = np.where(top0, np.float32(-1), similarity).max(axis=1)[row]
    second1 = np.where(top1, np.float32(-1), similarity).max(axis=0)[column]
    second_distance = 1 - np.maximum(second0, second1)  # the larger ratio is that of the smaller distance
    ratio = (1 - best0[row, 0]) / np.maximum(second_distance, MIN_DISTANCE)
    return float((np.maximum(1 - ratio, 0) ** 2).sum())
