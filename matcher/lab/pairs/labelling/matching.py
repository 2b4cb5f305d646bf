"""Matches between all pictures of a place: SIFT's and those of the learned front end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import torch

from matcher.config import ExtractorConfig
from matcher.data.descriptors import root_sift
from matcher.data.image import Image
from matcher.loading import build_extractor
from matcher.match.nearest import mutual_nearest

SIFT_POINTS, LEARNED_POINTS = 2500, 2048
RATIOS = (0.8, 0.9)  # of distances to the nearest and the next descriptor: SIFT's, learned ones
ALL_PAIRS_UP_TO = 45  # pictures; of more only those pairs that a first look finds alike
FIRST_LOOK, FIRST_MATCHES = 400, 8  # learned points compared, and matches of them that are wanted
NEXT = 3  # pictures, by name, that are compared in any case
LEAST_MATCHES = 15


@dataclass(frozen=True, eq=False)
class DescribedPicture:
    """Points of both kinds, SIFT's first."""

    points: np.ndarray  # (N, 2) float32; the centre of the first pixel is (0, 0)
    sift: np.ndarray  # (S, 128) float32 unit vectors of the first S points
    learned: np.ndarray  # (N − S, D) float32 unit vectors of the others, strongest first


def describe_pictures(paths: Sequence[Path]) -> list[DescribedPicture]:
    """SIFT's and learned features of pictures."""
    sift = cv2.SIFT_create(SIFT_POINTS, contrastThreshold=0.015)
    extractor = build_extractor(ExtractorConfig(kind="learned", max_keypoints=LEARNED_POINTS))
    described = []
    for path in paths:
        grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        points, descriptors = sift.detectAndCompute(grey, None)
        (features,) = extractor([Image(grey, grey.shape[::-1])])
        learned = features.descriptors.float().numpy().reshape(len(features.keypoints), -1)
        positions = np.array([p.pt for p in points], np.float32).reshape(-1, 2)
        described.append(
            DescribedPicture(
                np.concatenate([positions, features.keypoints.numpy()]),
                root_sift(descriptors) if len(positions) else np.zeros((0, 128), np.float32),
                learned / np.maximum(np.linalg.norm(learned, axis=1, keepdims=True), 1e-9),
            )
        )
    return described


def match_pictures(pictures: Sequence[DescribedPicture]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pairs (i, j) and indices (M, 2) of their matches; pairs with few are left out."""
    for i, j in combinations(range(len(pictures)), 2):
        first, second = pictures[i], pictures[j]
        if len(pictures) > ALL_PAIRS_UP_TO and j - i > NEXT:
            looked = mutual_matches(first.learned[:FIRST_LOOK], second.learned[:FIRST_LOOK], RATIOS[1])
            if len(looked) < FIRST_MATCHES:
                continue
        sift = mutual_matches(first.sift, second.sift, RATIOS[0])
        learned = mutual_matches(first.learned, second.learned, RATIOS[1])
        learned += np.array([len(first.sift), len(second.sift)])
        found = np.concatenate([sift, learned])
        if len(found) >= LEAST_MATCHES:
            yield i, j, found


def mutual_matches(first: np.ndarray, second: np.ndarray, ratio: float) -> np.ndarray:
    """(M, 2) int64 indices of unit descriptors (N, D) and (K, D), each the other's nearest, that pass the
    ratio test; none where either image has fewer than two."""
    if min(len(first), len(second)) < 2:
        return np.zeros((0, 2), np.int64)
    indices, _ = mutual_nearest(torch.from_numpy(first), torch.from_numpy(second), ratio)
    return indices.numpy()
