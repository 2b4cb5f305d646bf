"""Matches between all images of a scene: of SIFT and of the learned front end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np

from matcher.config import ExtractorConfig
from matcher.data.descriptors import root_sift
from matcher.data.image import Image
from matcher.match.nearest import mutual_nearest
from matcher.torch_engine import build_extractor

SIFT_POINTS, LEARNED_POINTS = 2500, 2048
RATIOS = (0.8, 0.9)  # of distances to the nearest and the second nearest descriptor: SIFT, learned
ALL_PAIRS_UP_TO = 45  # images; of more only pairs that match with few keypoints
PRESELECTION_POINTS, PRESELECTION_MATCHES = 400, 8  # learned keypoints compared, and matches needed
NEXT = 3  # images, by name, that are matched in any case
MIN_MATCHES = 15


@dataclass(frozen=True, eq=False)
class CombinedFeatures:
    """Keypoints of both kinds, SIFT first."""

    points: np.ndarray  # (N, 2) float32; the centre of the first pixel is (0, 0)
    sift: np.ndarray  # (S, 128) float32 unit vectors of the first S points
    learned: np.ndarray  # (N − S, D) float32 unit vectors of the others, strongest first


def extract_features(paths: Sequence[Path]) -> list[CombinedFeatures]:
    """SIFT and learned features of images."""
    sift = cv2.SIFT_create(SIFT_POINTS, contrastThreshold=0.015)
    extractor = build_extractor(ExtractorConfig(kind="learned", max_keypoints=LEARNED_POINTS))
    found = []
    for path in paths:
        grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        points, descriptors = sift.detectAndCompute(grey, None)
        (features,) = extractor([Image(grey, grey.shape[::-1])])
        learned = features.descriptors.float().numpy().reshape(len(features.keypoints), -1)
        positions = np.array([p.pt for p in points], np.float32).reshape(-1, 2)
        found.append(
            CombinedFeatures(
                np.concatenate([positions, features.keypoints.numpy()]),
                root_sift(descriptors) if len(positions) else np.zeros((0, 128), np.float32),
                learned / np.maximum(np.linalg.norm(learned, axis=1, keepdims=True), 1e-9),
            )
        )
    return found


def match_images(images: Sequence[CombinedFeatures]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pairs (i, j) and indices (M, 2) of their matches; pairs with few are left out."""
    for i, j in combinations(range(len(images)), 2):
        first, second = images[i], images[j]
        if len(images) > ALL_PAIRS_UP_TO and j - i > NEXT:
            preselected = mutual_matches(
                first.learned[:PRESELECTION_POINTS], second.learned[:PRESELECTION_POINTS], RATIOS[1]
            )
            if len(preselected) < PRESELECTION_MATCHES:
                continue
        sift = mutual_matches(first.sift, second.sift, RATIOS[0])
        learned = mutual_matches(first.learned, second.learned, RATIOS[1])
        learned += np.array([len(first.sift), len(second.sift)])
        found = np.concatenate([sift, learned])
        if len(found) >= MIN_MATCHES:
            yield i, j, found


def mutual_matches(first: np.ndarray, second: np.ndarray, ratio: float) -> np.ndarray:
    """(M, 2) int64 indices of unit descriptors (N, D) and (K, D), mutual nearest neighbours that pass the
    ratio test; none where either image has fewer than two."""
    if min(len(first), len(second)) < 2:
        return np.zeros((0, 2), np.int64)
    indices, _ = mutual_nearest(first, second, ratio)
    return indices
