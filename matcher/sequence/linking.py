"""From features of frames to tracks: links are verified, missed ones searched, points get identities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import cv2
import numpy as np

from matcher.match.nearest import mutual_minima
from matcher.match.retrieval import learn_vocabulary
from matcher.match.steering import STEERABLE, best_turn, rotated_descriptors, turned
from matcher.sequence.frames import FrameLinks, KeptFrame
from matcher.types import Estimator, Features, Matches
from matcher.verify.adjustment import threshold_scale

MIN_LINKS = 12  # consistent ones; with fewer, two frames do not show one scene
NEIGHBOURS = 6  # links whose median motion predicts a point's

MatchPairs = Callable[[Sequence[tuple[Features, Features]]], list[Matches]]


# --- Guided matching: links that matching missed, searched near where the verified ones predict them.


def nearest(points: np.ndarray, queries: np.ndarray, count: int) -> np.ndarray:
    """(N, count) rows of the `points` (K, 2), K ≥ count, nearest to each query (N, 2), the nearest first."""
    if len(queries) == 0:
        return np.zeros((0, count), np.int64)
    known, asked = (np.ascontiguousarray(each, dtype=np.float32) for each in (points, queries))
    tree = cv2.flann_Index(known, {"algorithm": 4})  # FLANN's exact tree of few dimensions
    return tree.knnSearch(asked, count, params={"checks": -1})[0]


@dataclass(frozen=True, eq=False)
class Guide:
    """What the verified links of two frames predict: where other points are, and how similar they look."""

    start: np.ndarray  # (K, 2) pixels of the links in the earlier frame
    end: np.ndarray  # (K, 2) and in the later one
    limit: float  # distance of descriptors that nearly all links keep below
    radius: float  # pixels around a predicted position in which a partner is searched
    fundamental: np.ndarray | None = None  # (3, 3) of the two frames
    tolerance: float = 1.5  # pixels to the epipolar line in the later frame

    @property
    def usable(self) -> bool:
        """Whether there are links enough to predict anything."""
        return len(self.start) >= NEIGHBOURS

    def motion(self, points: np.ndarray) -> np.ndarray:
        """(N, 2) median motion of the links that begin nearest to each point (N, 2)."""
        return np.median((self.end - self.start)[nearest(self.start, points, NEIGHBOURS)], axis=1)

    def narrowed(self, least_radius: float) -> Guide:
        """Search only as far as the links themselves are from their lines and from what is predicted.

        What is found further off is often a wrong point that looks similar, and poses suffer from it.
        """
        if not self.usable:
            return self
        errors = np.linalg.norm(self.start + self.motion(self.start) - self.end, axis=1)
        radius = min(self.radius, max(least_radius, float(np.percentile(errors, 80))))
        tolerance = self.tolerance
        if self.fundamental is not None:
            sides = (side.astype(np.float64) for side in (self.start, self.end))
            tolerance = min(tolerance, float(np.median(_line_distance(*sides, self.fundamental))))
        return replace(self, radius=radius, tolerance=tolerance)


def _line_distance(points0: np.ndarray, points1: np.ndarray, fundamental: np.ndarray) -> np.ndarray:
    """(C,) distance of points of image 1 (C, 2) to the lines of their partners in image 0 (C, 2)."""
    lines = np.column_stack([points0, np.ones(len(points0))]) @ fundamental.T
    residual = np.sum(lines[:, :2] * points1, axis=1) + lines[:, 2]
    return np.abs(residual) / np.maximum(np.linalg.norm(lines[:, :2], axis=1), 1e-12)


def search_guided(
    points0: np.ndarray,
    descriptors0: np.ndarray,
    points1: np.ndarray,
    descriptors1: np.ndarray,
    guide: Guide,
) -> tuple[np.ndarray, np.ndarray]:
    """Partners near the predicted position and the epipolar line: similar, clearly the best, and mutual.

    Args:
        points0: (N, 2) pixels in the earlier frame that have no partner.
        descriptors0: (N, D) float32, of any one kind; the guide says how similar is similar enough.
        points1: (M, 2) pixels in the later frame that have none.
        descriptors1: (M, D) float32.
        guide: from the links that the two frames have.

    Returns:
        (L, 2) int64 rows of the two sides and (L,) float32 scores, 1 − distance / distance of the second.
    """
    if not guide.usable or 0 in (len(points0), len(points1)):
        return np.zeros((0, 2), np.int64), np.zeros(0, np.float32)
    expected = points0 + guide.motion(points0)
    squares = (expected[:, :1] - points1[:, 0]) ** 2 + (expected[:, 1:] - points1[:, 1]) ** 2
    rows, columns = np.nonzero(squares <= guide.radius**2)
    if guide.fundamental is not None:
        good = _line_distance(points0[rows], points1[columns], guide.fundamental) <= guide.tolerance
        rows, columns = rows[good], columns[good]
    distance = np.full(squares.shape, np.inf, np.float32)
    distance[rows, columns] = np.linalg.norm(descriptors0[rows] - descriptors1[columns], axis=1)
    rows, columns = mutual_minima(distance)
    best, rest = distance[rows, columns], distance[rows]
    rest[np.arange(len(rows)), columns] = np.inf
    second = rest.min(axis=1)
    keep = (best <= guide.limit) & (best <= 0.95 * second)
    scores = 1 - best[keep] / np.maximum(np.minimum(second[keep], 2 * guide.limit), 1e-12)
    pairs = np.stack([rows[keep], columns[keep]], axis=1).astype(np.int64)
    return pairs, np.clip(scores, 0, 1).astype(np.float32)


# --- Links: match, verify, search for what was missed.


@dataclass(frozen=True, eq=False)
class Linker:
    """Verifies links by one epipolar geometry and adds those that it predicts."""

    estimator: Estimator  # of kind "fundamental"
    max_epipolar_error: float = 1.5  # pixels of the resized image; the estimator's own threshold
    guided: bool = True

    def link(
        self, frame0: KeptFrame, frame1: KeptFrame, indices: np.ndarray, scores: np.ndarray | None = None
    ) -> tuple[FrameLinks, Guide]:
        """Verified links of two frames, and what they predict for other points.

        Points of a scene that does not move, and of what moves with it, are consistent. Where fewer than
        `MIN_LINKS` agree, none is.

        Args:
            frame0, frame1: the earlier and the later one.
            indices: (K, 2) of matched points, or of tracks that both see.
            scores: (K,) of the matches; 1 where absent.
        """
        scale = threshold_scale(frame0.scale, frame1.scale, "fundamental")
        points = [f.keypoints[indices[:, side]] for side, f in enumerate((frame0, frame1))]
        geometry = self.estimator(*points, thresholds_scale=scale)
        enough = geometry.verified and np.count_nonzero(geometry.inliers) >= MIN_LINKS
        inliers = geometry.inliers if enough else np.zeros_like(geometry.inliers)
        scores = np.ones(len(indices), np.float32) if scores is None else scores
        links = FrameLinks(frame0.index, indices, scores, inliers)
        known = [f.descriptors[links.inliers[:, side]] for side, f in enumerate((frame0, frame1))]
        distances = np.linalg.norm(known[0] - known[1], axis=1)
        guide = Guide(
            start=points[0][inliers],
            end=points[1][inliers],
            limit=float(np.percentile(distances, 98)) if len(distances) else 0.0,
            radius=0.02 * float(np.hypot(*frame1.size)),
            fundamental=geometry.matrix,
            tolerance=self.max_epipolar_error * scale,
        )
        if self.guided:
            links = _searched(frame0, frame1, links, guide.narrowed(2.0 * scale))
        return links, guide

    def best(
        self, match: MatchPairs, frame: KeptFrame, candidates: Sequence[KeptFrame]
    ) -> tuple[KeptFrame, FrameLinks] | None:
        """The candidate that most points of the frame agree with, and the links to it; None: with none."""
        if not candidates or len(frame.keypoints) == 0:
            return None
        found = []
        pairs = [(candidate.features, frame.features) for candidate in candidates]
        for candidate, matches in zip(candidates, match(pairs), strict=True):
            facing = frame  # with descriptors turned as those of the candidate are
            if frame.features.kind == STEERABLE and len(candidate.descriptors):
                turn = best_turn(candidate.descriptors, frame.descriptors)
                facing = replace(frame, descriptors=turned(frame.descriptors, turn))
            found.append((candidate, self.link(candidate, facing, matches.indices, matches.scores)[0]))
        best = max(found, key=lambda each: each[1].consistent.sum())
        return best if best[1].consistent.any() else None


def _searched(frame0: KeptFrame, frame1: KeptFrame, links: FrameLinks, guide: Guide) -> FrameLinks:
    """The links and those that the guide finds, which take the place of matches that did not agree."""
    free = [
        np.setdiff1d(np.arange(len(f.keypoints)), links.inliers[:, i]) for i, f in enumerate((frame0, frame1))
    ]
    (points0, descriptors0), (points1, descriptors1) = (
        (f.keypoints[rows], f.descriptors[rows]) for f, rows in zip((frame0, frame1), free, strict=True)
    )
    pairs, scores = search_guided(points0, descriptors0, points1, descriptors1, guide)
    found = np.stack([free[0][pairs[:, 0]], free[1][pairs[:, 1]]], axis=1)
    replaced = np.isin(links.indices[:, 0], found[:, 0]) | np.isin(links.indices[:, 1], found[:, 1])
    kept = links.consistent | ~replaced
    return FrameLinks(
        links.frame,
        np.concatenate([links.indices[kept], found]),
        np.concatenate([links.scores[kept], scores]),
        np.concatenate([links.consistent[kept], np.ones(len(found), bool)]),
    )


def most_similar(frame: KeptFrame, keyframes: Sequence[KeptFrame], count: int) -> list[KeptFrame]:
    """At most `count` of the keyframes, the one that looks most like the frame first.

    Global descriptors (VLAD) are compared, over a vocabulary learned from the keyframes: 64 words are enough
    for the few dozen of a window, and learned in milliseconds.
    """
    keyframes = [keyframe for keyframe in keyframes if len(keyframe.descriptors)]
    if not keyframes or len(frame.descriptors) == 0:
        return []
    rng, share = np.random.default_rng(0), max(1, 4096 // len(keyframes))
    samples = [k.descriptors[rng.permutation(len(k.descriptors))[:share]] for k in keyframes]
    vocabulary = learn_vocabulary(np.concatenate(samples), words=64)
    turns = rotated_descriptors(frame.descriptors, frame.features.kind)
    queries = np.stack([vocabulary.describe(turn) for turn in turns])
    known = np.stack([vocabulary.describe(keyframe.descriptors) for keyframe in keyframes])
    similarity = (known @ queries.T).max(axis=1)
    return [keyframes[i] for i in np.argsort(-similarity, kind="stable")[:count]]


# --- Tracks: identities of points over frames.


class TrackIds:
    """Hands out track ids: a linked point has the id of its partner, any other a number never used before.

    Only the tracks of the frames that the caller still names are remembered, so memory is bounded.
    """

    def __init__(self) -> None:
        self._next = 0
        self._lengths: dict[int, int] = {}

    def extend(
        self, count: int, links: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths of the points of a new frame.

        Args:
            count: its points N.
            links: (ids (M,) of an earlier frame, indices (K, 2) into that frame and this one), the most
                trusted first. A point takes the first id that is offered to it, and an id goes to one point
                only.

        Returns:
            ids (N,) int64 and the number of frames that each was seen in, this one included (N,) int64.
        """
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

    def __len__(self) -> int:
        """Tracks that are remembered."""
        return len(self._lengths)


class LostTracks:
    """Points seen up to `patience` frames ago, moved along with what is still seen around them.

    Detectors miss points, and often find them again later.
    """

    def __init__(self, patience: int = 6) -> None:
        self._patience = patience
        self._clear()

    def _clear(self) -> None:
        self._positions = np.zeros((0, 2), np.float32)
        self._descriptors = np.zeros((0, 0), np.float32)
        self.track_ids = np.zeros(0, np.int64)
        self._ages = np.zeros(0, np.int64)

    def find(self, current: KeptFrame, taken: np.ndarray, guide: Guide) -> np.ndarray:
        """(L, 2) int64: entry of `track_ids`, point of the current frame that is not among `taken` (T,)."""
        free = np.setdiff1d(np.arange(len(current.keypoints)), taken)
        pairs, _ = search_guided(
            self._positions, self._descriptors, current.keypoints[free], current.descriptors[free], guide
        )
        return np.stack([pairs[:, 0], free[pairs[:, 1]]], axis=1)

    def update(self, previous: KeptFrame, current: KeptFrame, links: FrameLinks, guide: Guide) -> None:
        """Take in what the previous frame had and the current one, whose ids are known, has not."""
        if not guide.usable or not links.consistent.any():
            self._clear()
            return
        young = self._ages < self._patience
        ids = np.concatenate([self.track_ids[young], previous.track_ids])
        positions = np.concatenate([self._positions[young], previous.keypoints])
        ages = np.concatenate([self._ages[young] + 1, np.ones(len(previous.track_ids), np.int64)])
        parts = [self._descriptors[young]] if young.any() else []
        descriptors = np.concatenate([*parts, previous.descriptors])
        positions = positions + guide.motion(positions)
        inside = (positions >= 0).all(axis=1) & (positions < current.size).all(axis=1)
        gone = ~np.isin(ids, current.track_ids) & inside
        self.track_ids, self._positions = ids[gone], positions[gone].astype(np.float32)
        self._descriptors, self._ages = descriptors[gone], ages[gone]


# --- Keyframes: the frames that later ones are compared with.


@dataclass(frozen=True)
class KeyframeRule:
    """When a frame becomes a keyframe."""

    kept: float = 0.65  # fewer of the tracks that the keyframe's next frame had are left
    parallax: float = 0.12  # median way since the keyframe, as a share of the image's diagonal

    def wants(self, kept: float, parallax: float, size: tuple[int, int]) -> bool:
        """Whether a frame with this share of tracks and this parallax (pixels) is to be the next keyframe."""
        return kept < self.kept or parallax > self.parallax * float(np.hypot(*size))


def share_left(keyframe: KeptFrame, links: FrameLinks, close: float | None) -> float:
    """Share of a keyframe's links that a later frame still has, of the most that any frame had.

    Far points show how the camera turned, only close ones how far it moved (Mur-Artal and Tardós 2017,
    section III-E), and close ones are the first to leave the image. So of all points and the close ones,
    the smaller share counts.

    Args:
        keyframe: its record of the most links is kept up to date.
        links: keyframe → later frame.
        close: depth below which a point is close; None: none is.
    """
    rows = links.inliers[:, 0]
    keyframe.most_links = max(keyframe.most_links, len(rows))
    share = len(rows) / max(keyframe.most_links, 1)
    if close is None:
        return share
    near = int(np.count_nonzero(keyframe.depths[rows] < close))  # NaN is not
    keyframe.most_close_links = max(keyframe.most_close_links, near)
    # With fewer than 20 close links their share means nothing.
    return min(share, near / keyframe.most_close_links) if keyframe.most_close_links >= 20 else share


def through(keyframe: KeptFrame, previous: KeptFrame, links: FrameLinks) -> np.ndarray:
    """(K, 2) int64 points of the keyframe and of a frame that `links` joins to the previous one.

    They are joined where the previous frame's point of a consistent link is on a track of the keyframe.
    """
    _, here, there = np.intersect1d(
        keyframe.track_ids, previous.track_ids[links.inliers[:, 0]], assume_unique=True, return_indices=True
    )
    return np.stack([here, links.inliers[there, 1]], axis=1).astype(np.int64)


def median_parallax(earlier: KeptFrame, keypoints: np.ndarray, links: FrameLinks) -> float:
    """Median way in pixels of the points of consistent links; 0 without any."""
    step = keypoints[links.inliers[:, 1]] - earlier.keypoints[links.inliers[:, 0]]
    return float(np.median(np.linalg.norm(step, axis=1))) if len(step) else 0.0
