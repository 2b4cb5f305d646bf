"""Consistency of several images: depth confirmed by other views, pairs confirmed by independent matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cv2
import numpy as np

from matcher.lab.pairs.dense import HIDDEN, UNKNOWN, VISIBLE_STATE, transfer
from matcher.lab.pairs.labelling.matching import mutual_matches
from matcher.lab.pairs.posed import PosedView, dense_positions, sparse_positions

MIN_CONSISTENT = 2  # neighbouring views (one where there is only one)
SPECKLE = 60  # pixels; smaller islands of depth are dropped
MIN_OVERLAP, MAX_OVERLAP = 0.01, 0.95  # visible share of the pixels of either image
MIN_MOTION = 0.03  # median, relative to the width, for pairs with an overlap above MAX_OVERLAP
MIN_MATCHES = 12  # independent matches within OUTLIER that are needed to accept a pair
OUTLIER = 12.0  # pixels
MAX_MEDIAN_ERROR = 1.0  # pixels
RATIO = 0.8
PROBES = 400  # pixels of a first test


def keep_consistent_depth(views: Sequence[PosedView], neighbours: Sequence[Sequence[int]]) -> list[PosedView]:
    """The views with depth only where enough neighbouring views are consistent with it."""
    kept = []
    for view, others in zip(views, neighbours, strict=True):
        votes = np.zeros(view.pixels.shape, np.uint8)
        for other in others:
            votes += dense_positions(view, views[other])[0] >= 0
        confirmed = votes >= min(MIN_CONSISTENT, max(len(others), 1))
        kept.append(replace(view, inverse_depth=_without_speckles(view.inverse_depth, confirmed)))
    return kept


def _without_speckles(inverse: np.ndarray, confirmed: np.ndarray) -> np.ndarray:
    mask = (confirmed & (inverse > 0)).astype(np.uint8)
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    large = stats[:, cv2.CC_STAT_AREA] >= SPECKLE
    large[0] = False
    return np.where(large[labels], inverse, 0).astype(np.float32)


def choose_pairs(views: Sequence[PosedView]) -> list[tuple[int, int, float]]:
    """Pairs (i, j, overlap) with enough overlap, from different viewpoints, and confirmed by SIFT matches."""
    features = [sift_features(view.pixels) for view in views]
    chosen = []
    for i in range(len(views)):
        for j in range(i + 1, len(views)):
            if not _may_overlap(views[i], views[j]):
                continue
            positions = dense_positions(views[i], views[j])
            overlap = float((positions[0] >= 0).mean())
            back = (
                float((dense_positions(views[j], views[i])[0] >= 0).mean()) if overlap > MIN_OVERLAP else 0.0
            )
            if min(overlap, back) < MIN_OVERLAP or _same_viewpoint(positions):
                continue
            if sift_error(features[i], features[j], positions) <= MAX_MEDIAN_ERROR:
                chosen.append((i, j, round(overlap, 3)))
    return chosen


def _may_overlap(view0: PosedView, view1: PosedView) -> bool:
    """Whether any of a few pixels of known depth is visible in the other view: a quick test."""
    rows, columns = np.nonzero(view0.inverse_depth > 0)
    some = slice(None, None, max(1, len(rows) // PROBES))
    points = np.column_stack([columns[some], rows[some]]).astype(np.float32)
    return len(points) > 0 and bool((sparse_positions(view0, view1, points)[:, 0] >= 0).any())


def _same_viewpoint(positions: np.ndarray) -> bool:
    """Whether nearly everything is visible in the other image and hardly moves."""
    visible = positions[0] >= 0
    width = visible.shape[1]
    rows, columns = np.nonzero(visible)
    motion = np.hypot(positions[0][visible] - columns, positions[1][visible] - rows)
    known = max((positions[0] != UNKNOWN).sum(), 1)
    mostly = visible.sum() / known > MAX_OVERLAP or (positions[0] == HIDDEN).mean() < 0.05
    return bool(mostly and np.median(motion) < MIN_MOTION * width)


SiftFeatures = tuple[np.ndarray, np.ndarray]


def sift_features(pixels: np.ndarray) -> SiftFeatures:
    """SIFT keypoints (N, 2) and RootSIFT descriptors (N, 128)."""
    points, descriptors = cv2.SIFT_create(2000).detectAndCompute(pixels, None)
    if descriptors is None:
        return np.zeros((0, 2), np.float32), np.zeros((0, 128), np.float32)
    normalised = descriptors / np.maximum(descriptors.sum(1, keepdims=True), 1e-9)
    return np.array([point.pt for point in points], np.float32), np.sqrt(normalised)


def match_errors(first: SiftFeatures, second: SiftFeatures, positions: np.ndarray) -> np.ndarray:
    """(M,) errors in pixels of mutual SIFT matches that pass the ratio test, under positions (2, H, W), where
    the point is visible."""
    index0, index1 = mutual_matches(first[1], second[1], RATIO).T
    transferred, state = transfer(first[0][index0], positions)
    return np.linalg.norm(transferred - second[0][index1], axis=1)[state == VISIBLE_STATE]


def sift_error(first: SiftFeatures, second: SiftFeatures, positions: np.ndarray) -> float:
    """Median of `match_errors` below `OUTLIER`; infinite for few matches or mostly outliers."""
    error = match_errors(first, second, positions)
    near = error[error < OUTLIER]
    return float(np.median(near)) if len(near) >= max(MIN_MATCHES, len(error) / 2) else float("inf")
