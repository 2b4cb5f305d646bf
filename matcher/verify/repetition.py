"""Whether matches are between things that occur several times: wallpaper, equal windows, tiles, letters.

Such matches agree with a geometry though the images may show other ones of the same things. An image says by
itself what it repeats: a keypoint with nearly the same descriptor elsewhere. In images of one place the
keypoints that do not repeat find their partners as often as the repeated ones around them; between two
walls with one paper they do not.
"""

from __future__ import annotations

import numpy as np

from matcher.arrays import to_numpy
from matcher.types import Features, Matches, Repetition

_KIND = "learned"  # the front end whose similarities are known; others have their own scale
_ELSEWHERE = 16.0  # pixels of the resized image
_UNIQUE, _REPEATED = 0.7, 0.9  # similarity to the most similar descriptor elsewhere, of one or the other
_CELL = 64.0  # pixels of the resized image, around inliers, in which keypoints are counted
_SAMPLE = 400  # keypoints of an image that are compared with all others
_GLANCE = 64  # inliers that tell whether a closer look is worth its time
_SCARCELY = 0.75  # share of unrepeated ones above which no closer look is needed
_PSEUDO = 8.0  # keypoints added to the unrepeated ones that are counted, matched as often as repeated ones


def repetition(
    features0: Features, features1: Features, matches: Matches, inliers: np.ndarray
) -> Repetition | None:
    """That of a pair with inliers (K,); None without any, without descriptors, or of other front ends.

    Nothing is asked of matches of keypoints beyond those of the features.
    """
    sides = []
    for side, features in enumerate((features0, features1)):
        descriptors = to_numpy(features.descriptors)
        index = matches.indices[inliers, side]
        index = index[index < len(descriptors)]
        if not len(index) or not descriptors.shape[1] or features.kind != _KIND:
            return None
        sides.append((descriptors, to_numpy(features.keypoints) * to_numpy(features.scale), index))
    glance = [unrepeated(*side[:2], side[2][:: -(-len(side[2]) // _GLANCE)]).mean() for side in sides]
    if min(glance) > _SCARCELY:
        return Repetition(float(min(glance)), 1.0)
    found = [_counted(*side) for side in sides]
    return Repetition(*(float(min(values)) for values in zip(*found, strict=True)))


def unrepeated(descriptors: np.ndarray, points: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How little keypoints in some rows (R,) resemble others elsewhere in their image, (R,) in [0, 1]."""
    similar = descriptors[rows].astype(np.float32) @ descriptors.astype(np.float32).T
    x, y = points.astype(np.float32).T
    near = (x[rows, None] - x) ** 2 + (y[rows, None] - y) ** 2 <= _ELSEWHERE**2
    similar[near] = -1.0
    return ((_REPEATED - similar.max(axis=1)) / (_REPEATED - _UNIQUE)).clip(0, 1)


def _counted(descriptors: np.ndarray, points: np.ndarray, index: np.ndarray) -> tuple[float, float]:
    """`Repetition` of one image, of whose keypoints those in `index` are inliers."""
    cells = np.floor(points / _CELL).astype(np.int64) @ [1 << 20, 1]
    around = np.flatnonzero(np.isin(cells, cells[index]))
    rows = around[:: -(-len(around) // _SAMPLE)]
    alone, matched = unrepeated(descriptors, points, rows), np.isin(rows, index)
    often = ((1 - alone) @ matched + 1e-6) / ((1 - alone).sum() + 1e-6)
    found = (alone @ matched + _PSEUDO * often) / ((alone.sum() + _PSEUDO) * often)
    return float(alone @ matched / max(matched.sum(), 1)), float(found)
