"""Which keypoints are matched with which: windows that correspond by a first pass at an ordinary size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.data.tensors import to_numpy

_OWN = 750  # keypoints of image 0 that a window matches
_SEEN = 2048  # keypoints of either image in a window, context included
_AROUND = 0.2  # of the window's side, added on each side as context
_ASTRAY = 0.05  # of the window's side: error of the first pass in the other image, and
_SPREAD = 2.0  # residuals of the window's affine map (depth, distortion) added to it, up to
_FARTHEST = 0.5  # of the window's side
_LEAST = 6  # least matches of the first pass that locate a window
_AFFINE = 12  # matches from which an affine map is fitted instead of a similarity


@dataclass(frozen=True, eq=False)
class WindowPair:
    """Keypoints of both images to be matched with each other."""

    index0: np.ndarray  # (N,) int64 into the features of image 0
    index1: np.ndarray  # (M,)
    own: np.ndarray  # (N,) bool: keypoints whose matches are kept from this window only


def corresponding(
    points0: np.ndarray, points1: np.ndarray, first0: np.ndarray, first1: np.ndarray
) -> list[WindowPair]:
    """Windows of image 0 and the corresponding keypoints of image 1.

    Args:
        points0, points1: (N, 2) and (M, 2) keypoints, stored pixels, best first.
        first0, first1: (K, 2) verified matches of the first pass.
    """
    pairs = []
    for own, low, high in _split(points0, np.arange(len(points0))):
        side = np.maximum(high - low, 1.0)
        found = _local_map(first0, first1, low, high)
        if found is None:
            continue
        linear, residual = found
        near = _inside(points0, low - _AROUND * side, high + _AROUND * side)
        near[own] = False
        index0 = np.concatenate([own, np.flatnonzero(near)[: max(0, _SEEN - len(own))]])
        # Keypoints of image 1 are mapped to image 0, so that rotated windows are as tight as upright ones.
        back = np.linalg.inv(np.vstack([linear, [0, 0, 1]]))
        moved = points1 @ back[:2, :2].T + back[:2, 2]
        astray = np.minimum(_ASTRAY * side + _SPREAD * residual, _FARTHEST * side)
        reach = _AROUND * side + astray
        index1 = np.flatnonzero(_inside(moved, low - reach, high + reach))[:_SEEN]
        if len(index1):
            pairs.append(WindowPair(index0, index1, np.arange(len(index0)) < len(own)))
    return pairs


def window_features(features: Features, index: np.ndarray) -> Features:
    """Keypoints as if of an image of their own, so that their positions are in the range of training."""
    chosen = features.select(index)
    points = to_numpy(chosen.keypoints)
    low, high = points.min(axis=0), points.max(axis=0)
    return replace(chosen, keypoints=points - low, size=np.maximum(high - low, 1.0) + 1.0)


def joined_matches(
    pairs: list[WindowPair], found: list[Matches], points0: np.ndarray, points1: np.ndarray
) -> Matches:
    """The matches of all windows, indexed in the whole images; one per keypoint, the most probable."""
    rows, scores = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.float32)]
    for pair, matches in zip(pairs, found, strict=True):
        own = pair.own[matches.indices[:, 0]]
        ends = matches.indices[own].T
        rows.append(np.stack([pair.index0[ends[0]], pair.index1[ends[1]]], axis=1))
        scores.append(matches.scores[own])
    indices, probabilities = np.concatenate(rows), np.concatenate(scores)
    order = np.argsort(-probabilities, kind="stable")
    _, first = np.unique(indices[order, 1], return_index=True)
    best = order[np.sort(first)]
    joined = Matches.from_indices(indices[best], points0, points1, probabilities[best])
    return replace(joined, layers_run=max((matches.layers_run for matches in found), default=0))


def _split(points: np.ndarray, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Groups of at most `_OWN` points by recursive median splits, each with its bounding box."""
    low, high = points[index].min(axis=0), points[index].max(axis=0)
    if len(index) <= _OWN or np.array_equal(low, high):
        return [(index, low, high)]
    axis = int(np.argmax(high - low))
    order = index[np.argsort(points[index, axis], kind="stable")]
    half = len(order) // 2
    return [group for part in (order[:half], order[half:]) for group in _split(points, np.sort(part))]


def _local_map(
    first0: np.ndarray, first1: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The (2, 3) map of a window to image 1, from the matches in and next to it, and its 90th
    percentile residual in pixels of image 0; None if there are too few."""
    side = np.maximum(high - low, 1.0)
    beyond = np.maximum(np.maximum(low - first0, first0 - high) / side, 0).max(axis=1)
    near = np.flatnonzero(beyond <= _AROUND)
    if len(near) < _LEAST:
        near = np.argsort(beyond, kind="stable")[:_LEAST]
        near = near[beyond[near] <= 1.0]
    if len(near) < _LEAST:
        return None
    source, target = first0[near].astype(np.float64), first1[near].astype(np.float64)
    centre, goal = source.mean(axis=0), target.mean(axis=0)
    x, y = (source - centre).T
    if len(near) >= _AFFINE:
        solution, _, rank, _ = np.linalg.lstsq(np.stack([x, y], 1), target - goal, rcond=1e-3)
        linear = solution.T
        if rank < 2 or abs(np.linalg.det(linear)) < 1e-4:
            return None
    else:
        u, v = (target - goal).T
        weight = max(float((x * x + y * y).sum()), 1e-9)
        a, b = float((x * u + y * v).sum()) / weight, float((x * v - y * u).sum()) / weight
        linear = np.array([[a, -b], [b, a]])
        if a * a + b * b < 1e-4:
            return None
    away = np.linalg.norm((source - centre) @ linear.T + goal - target, axis=1)
    residual = float(np.percentile(away, 90) / np.sqrt(abs(np.linalg.det(linear))))
    return np.hstack([linear, (goal - linear @ centre)[:, None]]), residual


def _inside(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return ((points >= low) & (points <= high)).all(axis=1)
