"""What several pictures agree on: depth confirmed by others, pairs confirmed by independent matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cv2
import numpy as np

from matcher.lab.pairs.dense import HIDDEN, SEEN_STATE, UNKNOWN, transfer
from matcher.lab.pairs.labelling.matching import mutual_matches
from matcher.lab.pairs.posed import PosedView, dense_positions, sparse_positions

CONFIRMED_BY = 2  # neighbours (one where there is only one)
SPECKLE = 60  # pixels; smaller islands of depth are dropped
LEAST_SEEN, MOST_SEEN = 0.01, 0.95  # of the pixels of either picture
LEAST_MOVED = 0.03  # of the width, median, for pairs that are seen almost whole
LEAST_MATCHES = 12  # independent matches within `FAR` that judge a pair
FAR = 12.0  # pixels
MEDIAN_ERROR = 1.0  # pixels
RATIO = 0.8
PROBES = 400  # pixels for a first look


def agreeing(views: Sequence[PosedView], neighbours: Sequence[Sequence[int]]) -> list[PosedView]:
    """The views with depth only where enough neighbours have the same surface at the same place."""
    kept = []
    for view, others in zip(views, neighbours, strict=True):
        votes = np.zeros(view.pixels.shape, np.uint8)
        for other in others:
            votes += dense_positions(view, views[other])[0] >= 0
        confirmed = votes >= min(CONFIRMED_BY, max(len(others), 1))
        kept.append(replace(view, inverse_depth=_without_specks(view.inverse_depth, confirmed)))
    return kept


def _without_specks(inverse: np.ndarray, confirmed: np.ndarray) -> np.ndarray:
    mask = (confirmed & (inverse > 0)).astype(np.uint8)
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    large = stats[:, cv2.CC_STAT_AREA] >= SPECKLE
    large[0] = False
    return np.where(large[labels], inverse, 0).astype(np.float32)


def choose_pairs(views: Sequence[PosedView]) -> list[tuple[int, int, float]]:
    """Pairs (i, j, share seen) that show enough in common, from different places, and that SIFT confirms."""
    described = [described_by_sift(view.pixels) for view in views]
    chosen = []
    for i in range(len(views)):
        for j in range(i + 1, len(views)):
            if not _anything_common(views[i], views[j]):
                continue
            positions = dense_positions(views[i], views[j])
            seen = float((positions[0] >= 0).mean())
            back = float((dense_positions(views[j], views[i])[0] >= 0).mean()) if seen > LEAST_SEEN else 0.0
            if min(seen, back) < LEAST_SEEN or _stands_still(positions):
                continue
            if sift_error(described[i], described[j], positions) <= MEDIAN_ERROR:
                chosen.append((i, j, round(min(seen, back), 3)))
    return chosen


def _anything_common(view0: PosedView, view1: PosedView) -> bool:
    """Whether any of a few pixels of known depth is seen in the other view: quick, for pairs far apart."""
    rows, columns = np.nonzero(view0.inverse_depth > 0)
    some = slice(None, None, max(1, len(rows) // PROBES))
    points = np.column_stack([columns[some], rows[some]]).astype(np.float32)
    return len(points) > 0 and bool((sparse_positions(view0, view1, points)[:, 0] >= 0).any())


def _stands_still(positions: np.ndarray) -> bool:
    seen = positions[0] >= 0
    width = seen.shape[1]
    rows, columns = np.nonzero(seen)
    moved = np.hypot(positions[0][seen] - columns, positions[1][seen] - rows)
    known = max((positions[0] != UNKNOWN).sum(), 1)
    mostly = seen.sum() / known > MOST_SEEN or (positions[0] == HIDDEN).mean() < 0.05
    return bool(mostly and np.median(moved) < LEAST_MOVED * width)


Described = tuple[np.ndarray, np.ndarray]


def described_by_sift(pixels: np.ndarray) -> Described:
    """SIFT's points (N, 2) and root descriptors (N, 128)."""
    points, descriptors = cv2.SIFT_create(2000).detectAndCompute(pixels, None)
    if descriptors is None:
        return np.zeros((0, 2), np.float32), np.zeros((0, 128), np.float32)
    shares = descriptors / np.maximum(descriptors.sum(1, keepdims=True), 1e-9)
    return np.array([point.pt for point in points], np.float32), np.sqrt(shares)


def match_errors(first: Described, second: Described, positions: np.ndarray) -> np.ndarray:
    """(M,) pixels between SIFT's mutual matches that pass the ratio test and positions (2, H, W), where those
    are seen."""
    index0, index1 = mutual_matches(first[1], second[1], RATIO).T
    moved, state = transfer(first[0][index0], positions)
    return np.linalg.norm(moved - second[0][index1], axis=1)[state == SEEN_STATE]


def sift_error(first: Described, second: Described, positions: np.ndarray) -> float:
    """Median pixels between SIFT's matches and positions (2, H, W), of those within `FAR`; infinite for few,
    or where more than half of those that are seen lie farther off."""
    error = match_errors(first, second, positions)
    near = error[error < FAR]
    return float(np.median(near)) if len(near) >= max(LEAST_MATCHES, len(error) / 2) else float("inf")
