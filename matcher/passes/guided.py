"""Guided matching: keypoints without a partner look where the homographies around them predict it.

A homography says where a partner is to a few pixels, so that descriptors decide among very few keypoints. An
epipolar line does not, and a local affine map only roughly; what is found along them is wrong too often,
so other geometries are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np

from matcher.geometry import warp_points
from matcher.match.steering import rotated_descriptors
from matcher.types import Features, Matches, MatchRefinement, TwoViewGeometry, best_first
from matcher.verify.adjustment import threshold_scale

GUIDED = "guided matching"  # among the stages of `Result.seconds`
# Chosen on ten pairs of a room and 16 warps of training photos: of what is found so 67 and 100 % are
# right, as many as of the inliers there. At 2 pixels 60 and 94 % are.
_AROUND = 4  # nearest inliers of a keypoint, which must all be of one plane
_REACH = 1.5  # pixels of the resized image 1 between a partner and its predicted place, at most
_LESS_SIMILAR = 1.25  # times the 95th percentile of the inliers' descriptor distances, at most
_CANDIDATES = 3  # nearest keypoints to a predicted place that are compared
_LEAST_INLIERS = 12  # that have descriptors, to know that percentile
_ONE_TREE, _EXACT = {"algorithm": 4}, {"checks": -1}  # of FLANN


def guided_matches(
    features0: Features,
    features1: Features,
    matches: Matches,
    geometry: TwoViewGeometry,
    same_point: float = 1.5,
) -> tuple[np.ndarray, np.ndarray]:
    """Further matches: (L, 2) int64 keypoints of both images, and (L, 4) the inliers around each.

    A keypoint without a match whose nearest inliers all lie on one plane is carried over by its homography.
    Of the keypoints of image 1 without a match near there, it takes the most similar one, if that is nearly
    as similar as inliers are, and if the choice is mutual.

    Args:
        features0, features1: with descriptors.
        matches: of the pair. An index beyond the features is of a point of another front end.
        geometry: verified, of kind "homography" or "homographies".
        same_point: pixels of the resized images within which a keypoint counts as matched already.
    """
    counts = [len(features0), len(features1)]
    known = matches.indices[geometry.inliers & (matches.indices < counts).all(axis=1)]
    if len(known) < _LEAST_INLIERS:
        return _none()
    descriptors, similar = _comparable(features0, features1, known)
    given = zip((features0, features1), (matches.points0, matches.points1), strict=True)
    (index0, points0), (index1, points1) = (_without_partner(*side, same_point) for side in given)
    if not len(index0) or len(index1) < _CANDIDATES:
        return _none()
    inliers = np.flatnonzero(geometry.inliers)
    around = inliers[_nearest(matches.points0[inliers], points0, _AROUND)[0]]
    reach = _REACH * threshold_scale(features0.scale.tolist(), features1.scale.tolist(), geometry.kind)
    rows, columns = _near_predicted(points0, points1, around, geometry, reach)
    distance = np.linalg.norm(descriptors[0][index0[rows]] - descriptors[1][index1[columns]], axis=1)
    keep = distance <= _LESS_SIMILAR * np.percentile(similar, 95)
    rows, columns = _mutual(rows[keep], columns[keep], distance[keep])
    return np.stack([index0[rows], index1[columns]], axis=1), around[rows]


def with_guided(
    features0: Features,
    features1: Features,
    matches: Matches,
    geometry: TwoViewGeometry,
    refine: Callable[[Matches], Matches] | None = None,
) -> tuple[Matches, TwoViewGeometry]:
    """The matches with guided ones among them, best first, and the same homographies with their inliers.

    A guided match is as probable as the inliers around it are on average.

    Args:
        features0, features1, matches: as `guided_matches` takes them.
        geometry: of any kind and status; where it has no homography, all is returned as it is.
        refine: moves matches to where the images look most alike. Those that were there stay as they are.
    """
    if geometry.status != "ok" or geometry.kind not in ("homography", "homographies"):
        return matches, geometry
    indices, around = guided_matches(features0, features1, matches, geometry)
    if not len(indices):
        return matches, geometry
    points = [f.numpy()["keypoints"][side] for f, side in zip((features0, features1), indices.T, strict=True)]
    both = replace(
        matches,
        indices=np.concatenate([matches.indices, indices]),
        points0=np.concatenate([matches.points0, points[0]]),
        points1=np.concatenate([matches.points1, points[1]]),
        scores=_with_means(matches.scores, around),
        refinement=None,
        prior=_with_means(matches.prior_scores, around),
    )
    if refine is not None:
        both = _as_they_were(matches, refine(both))
    scale = threshold_scale(features0.scale.tolist(), features1.scale.tolist(), geometry.kind)
    return best_first(both, _extended(geometry, both, _REACH * scale))


def _none() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((0, 2), np.int64), np.zeros((0, _AROUND), np.int64)


def _with_means(scores: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Scores (K,), and after them the means of those `around` (L, n) each further match."""
    return np.concatenate([scores, scores[around].mean(axis=1)])


def _extended(geometry: TwoViewGeometry, matches: Matches, reach: float) -> TwoViewGeometry:
    """The geometry with the matches that follow its own; refinement may have moved some away."""
    new = slice(len(geometry.inliers), None)
    points0, points1 = matches.points0[new].astype(np.float64), matches.points1[new]
    matrices = geometry.matrix[None] if geometry.matrices is None else geometry.matrices
    errors = np.array([np.linalg.norm(warp_points(points0, matrix) - points1, axis=1) for matrix in matrices])
    errors = np.nan_to_num(errors, nan=np.inf)
    inliers = np.concatenate([geometry.inliers, errors.min(axis=0) <= reach])
    if geometry.planes is None:
        return replace(geometry, inliers=inliers)
    planes = np.concatenate([geometry.planes, errors.argmin(axis=0)])
    return replace(geometry, inliers=inliers, planes=np.where(inliers, planes, -1))


def _as_they_were(before: Matches, refined: Matches) -> Matches:
    """Refined matches, but those of before, which come first, at their places of before."""
    count, known = len(before), before.refinement
    points1 = np.concatenate([before.points1, refined.points1[count:]])
    if known is None:
        return replace(refined, points1=points1)
    kinds = zip(vars(known).values(), vars(refined.refinement).values(), strict=True)
    joined = MatchRefinement(*(np.concatenate([old, new[count:]]) for old, new in kinds))
    return replace(refined, points1=points1, refinement=joined)


def _comparable(
    features0: Features, features1: Features, known: np.ndarray
) -> tuple[list[np.ndarray], np.ndarray]:
    """Descriptors of both images, in one orientation where they can be steered, and distances of matches."""
    own, other = (features.numpy()["descriptors"] for features in (features0, features1))
    turns = rotated_descriptors(other, features1.kind)
    distances = [np.linalg.norm(own[known[:, 0]] - turn[known[:, 1]], axis=1) for turn in turns]
    best = int(np.argmin([distance.mean() for distance in distances]))
    return [own, turns[best]], distances[best]


def _without_partner(
    features: Features, matched: np.ndarray, same_point: float
) -> tuple[np.ndarray, np.ndarray]:
    """The valid keypoints that lie on no matched point: rows (N,), and positions (N, 2)."""
    values = features.numpy()
    points = values["keypoints"].astype(np.float64)
    squares = _nearest(matched, points, 1)[1][:, 0] * np.prod(values["scale"])
    index = np.flatnonzero(values["mask"] & (squares > same_point**2))
    return index, points[index]


def _near_predicted(
    points0: np.ndarray, points1: np.ndarray, around: np.ndarray, geometry: TwoViewGeometry, reach: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both sides (C,) that may be partners; `around` (N, n) are the inliers next to each point."""
    several = geometry.matrices is not None
    matrices = geometry.matrices if several else geometry.matrix[None]
    planes = geometry.planes[around] if several else np.zeros(around.shape, np.int64)
    found = [np.zeros((2, 0), np.int64)]
    for plane, matrix in enumerate(matrices):
        rows = np.flatnonzero((planes == plane).all(axis=1))
        places = warp_points(points0[rows], matrix)
        before = np.isfinite(places).all(axis=1)  # the horizon
        rows, places = rows[before], places[before]
        if len(rows):
            columns, squares = _nearest(points1, places, _CANDIDATES)
            at, rank = np.nonzero(squares <= reach**2)
            found.append(np.stack([rows[at], columns[at, rank]]))
    return tuple(np.concatenate(found, axis=1))


def _mutual(rows: np.ndarray, columns: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of candidates (C,) those that are the nearest of their row and of their column."""
    order = np.argsort(distance, kind="stable")
    rows, columns = rows[order], columns[order]
    first = [
        np.isin(np.arange(len(order)), np.unique(side, return_index=True)[1]) for side in (rows, columns)
    ]
    return rows[first[0] & first[1]], columns[first[0] & first[1]]


def _nearest(points: np.ndarray, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, count) rows of the points nearest to each query, the nearest first, and their squared distances."""
    known, asked = (np.ascontiguousarray(each, dtype=np.float32) for each in (points, queries))
    return cv2.flann_Index(known, _ONE_TREE).knnSearch(asked, count, params=_EXACT)
