"""From features of frames to tracks: links are verified, missed ones searched, points get identities.

The right images of rectified pairs are linked to the left ones in the same way, which gives depths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np

from matcher.config import RefineConfig
from matcher.match.nearest import mutual_minima
from matcher.match.steering import STEERABLE_KIND, best_turn, rotated_descriptors, turned
from matcher.refine import ImagePyramid, fit_affine_maps, nearest, refine_matches
from matcher.sequence.frames import FrameLinks, KeptFrame
from matcher.types import REFINEMENTS, Estimator, Features, Matches
from matcher.verify.adjustment import threshold_scale

MIN_LINKS = 12  # consistent ones; with fewer, two frames do not show one scene
NEIGHBOURS = 6  # links whose median motion predicts a point's; fewer predict none

MatchPairs = Callable[[Sequence[tuple[Features, Features]]], list[Matches]]


@dataclass(frozen=True, eq=False)
class Linker:
    """Verifies links by one epipolar geometry and adds those that it predicts."""

    estimator: Estimator  # of kind "fundamental"
    max_epipolar_error: float  # pixels of the resized image; the estimator's own threshold

    def link(
        self, frame0: KeptFrame, frame1: KeptFrame, indices: np.ndarray, scores: np.ndarray | None = None
    ) -> FrameLinks:
        """Links of two frames by matches (or tracks) (K, 2), none consistent where fewer than 12 agree. In
        the place of those that do not agree come searched ones: a partner lies near where the links around
        predict it and near its epipolar line, as near as the links themselves, since what is found further
        off is often wrong and spoils poses. It looks as similar as they do, is clearly the best, and
        mutual."""
        scale = threshold_scale(frame0.scale, frame1.scale, "fundamental")
        points = frame0.keypoints[indices[:, 0]], frame1.keypoints[indices[:, 1]]
        geometry = self.estimator(*points, thresholds_scale=scale)
        enough = geometry.verified and np.count_nonzero(geometry.inliers) >= MIN_LINKS
        inliers = geometry.inliers if enough else np.zeros_like(geometry.inliers)
        scores = np.ones(len(indices), np.float32) if scores is None else scores
        links, F = FrameLinks(frame0.index, indices, scores, inliers), geometry.matrix
        if not enough:
            return links
        known = links.inliers
        start, end = frame0.keypoints[known[:, 0]], frame1.keypoints[known[:, 1]]
        free0 = np.setdiff1d(np.arange(len(frame0.keypoints)), known[:, 0])
        free1 = np.setdiff1d(np.arange(len(frame1.keypoints)), known[:, 1])

        def predicted(points: np.ndarray) -> np.ndarray:
            return points + np.median((end - start)[nearest(start, points, NEIGHBOURS)], axis=1)

        def beside_lines(points0: np.ndarray, points1: np.ndarray) -> np.ndarray:
            if F is None:  # points of a plane fix none
                return np.zeros(len(points0))
            lines = np.column_stack([points0, np.ones(len(points0))]) @ F.T
            residual = np.sum(lines[:, :2] * points1, axis=1) + lines[:, 2]
            return np.abs(residual) / np.maximum(np.linalg.norm(lines[:, :2], axis=1), 1e-12)

        usual = np.percentile(np.linalg.norm(predicted(start) - end, axis=1), 80)
        radius = min(0.02 * float(np.hypot(*frame1.size)), max(2.0 * scale, float(usual)))
        tolerance = min(self.max_epipolar_error * scale, float(np.median(beside_lines(start, end))))
        apart = frame0.descriptors[known[:, 0]] - frame1.descriptors[known[:, 1]]
        limit = float(np.percentile(np.linalg.norm(apart, axis=1), 98))

        points0, points1 = frame0.keypoints[free0], frame1.keypoints[free1]
        expected = predicted(points0)
        squares = (expected[:, :1] - points1[:, 0]) ** 2 + (expected[:, 1:] - points1[:, 1]) ** 2
        rows, columns = np.nonzero(squares <= radius**2)
        good = beside_lines(points0[rows], points1[columns]) <= tolerance
        rows, columns = rows[good], columns[good]
        distance = np.full(squares.shape, np.inf, np.float32)
        apart = frame0.descriptors[free0[rows]] - frame1.descriptors[free1[columns]]
        distance[rows, columns] = np.linalg.norm(apart, axis=1)
        rows, columns = mutual_minima(distance)
        best, others = distance[rows, columns], distance[rows]
        others[np.arange(len(rows)), columns] = 2 * limit
        second = np.minimum(others.min(axis=1, initial=np.inf), 2 * limit)
        keep = (best <= limit) & (best <= 0.95 * second)
        found = np.stack([free0[rows[keep]], free1[columns[keep]]], axis=1)
        scores = (1 - best[keep] / np.maximum(second[keep], 1e-12)).astype(np.float32)
        replaced = np.isin(links.indices[:, 0], found[:, 0]) | np.isin(links.indices[:, 1], found[:, 1])
        kept = links.consistent | ~replaced
        return FrameLinks(
            links.frame,
            np.concatenate([links.indices[kept], found]),
            np.concatenate([links.scores[kept], scores]),
            np.concatenate([links.consistent[kept], np.ones(len(found), bool)]),
        )

    def best(
        self, match: MatchPairs, frame: KeptFrame, keyframes: Sequence[KeptFrame]
    ) -> tuple[KeptFrame, FrameLinks] | None:
        """Of three keyframes whose 256 strongest descriptors are most like the frame's, the one that most
        points agree with, and the links to it; None: with none."""
        turns = rotated_descriptors(frame.descriptors[:256], frame.features.kind)

        def likeness(keyframe: KeptFrame) -> float:
            known = keyframe.descriptors[:256].T
            return max(float((turn @ known).max(axis=1).mean()) for turn in turns)

        described = (each for each in keyframes if len(each.descriptors))
        candidates = sorted(described, key=likeness, reverse=True)[:3]
        found = []
        pairs = [(candidate.features, frame.features) for candidate in candidates]
        for candidate, matches in zip(candidates, match(pairs), strict=True):
            facing = copy(frame)  # with descriptors turned as those of the candidate are
            if frame.features.kind == STEERABLE_KIND and len(candidate.descriptors):
                turn = best_turn(candidate.descriptors, frame.descriptors)
                facing.descriptors = turned(frame.descriptors, turn)
            found.append((candidate, self.link(candidate, facing, matches.indices, matches.scores)))
        best = max(found, key=lambda each: each[1].consistent.sum(), default=None)
        return best if best is not None and best[1].consistent.any() else None


class TrackIds:
    """Hands out track ids: a linked point has the id of its partner, any other a number never used before.
    Only the tracks of the frames that the caller still names are remembered, so memory is bounded."""

    def __init__(self) -> None:
        self._next = 0
        self._lengths: dict[int, int] = {}

    def extend(
        self, count: int, links: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids (N,) int64 of the points of a new frame, and how many frames each was seen in, this one too.
        `links` are ids (M,) of an earlier frame and indices (K, 2) into that frame and this one, the most
        trusted first: a point takes the first id that is offered to it, and an id goes to one point only."""
        ids = np.full(count, -1, np.int64)
        for earlier, indices in links:
            offered = earlier[indices[:, 0]]
            free = (ids[indices[:, 1]] < 0) & ~np.isin(offered, ids)
            offered, takers = offered[free], indices[free, 1]
            _, first = np.unique(offered, return_index=True)
            ids[takers[first]] = offered[first]
        new = np.flatnonzero(ids < 0)
        ids[new] = np.arange(self._next, self._next + len(new))
        self._next += len(new)
        lengths = [self._lengths.get(track, 0) + 1 for track in ids.tolist()]
        self._lengths |= zip(ids.tolist(), lengths, strict=True)
        return ids, np.array(lengths, np.int64)

    def forget(self, *kept: np.ndarray) -> None:
        """Remember the lengths of these tracks only."""
        alive = np.unique(np.concatenate(kept)).tolist()
        self._lengths = {track: self._lengths[track] for track in alive if track in self._lengths}


def share_left(keyframe: KeptFrame, links: FrameLinks, close: float | None) -> float:
    """Share of a keyframe's links that a later frame still has, of the most that any had, which it records.
    Of those nearer than `close`, if that is smaller: only they show how far the camera moved, and they are
    the first to leave the image (Mur-Artal and Tardós 2017, section III-E)."""
    rows = links.inliers[:, 0]
    keyframe.most_links = max(keyframe.most_links, len(rows))
    share = len(rows) / max(keyframe.most_links, 1)
    if close is None:
        return share
    near = int(np.count_nonzero(keyframe.depths[rows] < close))  # NaN is not
    keyframe.most_close_links = max(keyframe.most_close_links, near)
    # With fewer than 20 close links their share means nothing.
    return min(share, near / keyframe.most_close_links) if keyframe.most_close_links >= 20 else share


# --- Rectified pairs: where the right image shows the left one's points, and how far away they are.

SURFACE = 8  # links that the surface around a point is fitted to
# Points of the learned front end often lie on contours, where windows show two surfaces: this is strict.
LEAST_CORRELATION = (0.9, 0.95)  # of a point that was linked, and of one that was not


def complete_partners(
    images: tuple[ImagePyramid, ImagePyramid], points: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The right image's points, located exactly where `right` (N, 2) is not NaN, searched for elsewhere. And
    (N,) standard deviations of x in pixels, NaN where windows could not be compared. A link whose windows do
    not correlate is left out; where a window has no texture it stays as it was. Nothing is assumed of rows
    but that those of neighbouring points differ equally."""
    linked = np.isfinite(right[:, 0])
    deviations = np.full(len(points), np.nan)
    if np.count_nonzero(linked) < NEIGHBOURS:
        return right, deviations
    known, there = points[linked].astype(np.float64), right[linked].astype(np.float64)
    # A link whose row differs from its neighbours' would be compared with another place.
    around = nearest(known, known, min(NEIGHBOURS + 1, len(known)))
    there[:, 1] = known[:, 1] + np.median((there - known)[around, 1], axis=1)
    first, status = _located(images, known, there, fit_affine_maps(known, there, SURFACE)[0])
    good = (status == 0) & (first.refinement.correlations >= LEAST_CORRELATION[0])
    found = right.copy()
    deviations[linked] = np.where(good, np.sqrt(first.refinement.covariances[:, 0, 0]), np.nan)
    found[linked] = np.where((good | (status == REFINEMENTS.index("flat")))[:, None], first.points1, np.nan)
    if np.count_nonzero(good) < NEIGHBOURS or linked.all():
        return found, deviations
    known, there = known[good], first.points1[good].astype(np.float64)
    maps, _ = fit_affine_maps(known, there, SURFACE)
    asked = points[~linked].astype(np.float64)
    rows = nearest(known, asked, NEIGHBOURS)
    moved = there[rows] + np.einsum("nkij,nkj->nki", maps[rows], asked[:, None] - known[rows])
    predicted = np.median(moved, axis=1)
    own = maps[rows[:, 0]]
    second, status = _located(images, asked, predicted, own)
    back, returned = _located(images[::-1], second.points1, asked, np.linalg.inv(own))
    good = (status == 0) & (returned == 0) & (second.refinement.correlations >= LEAST_CORRELATION[1])
    good &= np.linalg.norm(back.points1 - asked, axis=1) <= 0.5
    found[~linked] = np.where(good[:, None], second.points1, np.nan)
    deviations[~linked] = np.sqrt(second.refinement.covariances[:, 0, 0])
    return found, deviations


def _located(
    images: tuple[ImagePyramid, ImagePyramid], points0: np.ndarray, points1: np.ndarray, maps: np.ndarray
) -> tuple[Matches, np.ndarray]:
    """Matches refined on the images, and (K,) what became of each, an index into `REFINEMENTS`."""
    config = RefineConfig(window=11, max_shift=4.0)
    indices = np.tile(np.arange(len(points0))[:, None], 2)
    scores = np.ones(len(points0), np.float32)
    matches = Matches(indices, points0.astype(np.float32), points1.astype(np.float32), scores)
    refined = refine_matches(*images, matches, config, (maps, np.ones(len(maps), bool)))
    return refined, refined.refinement.status
