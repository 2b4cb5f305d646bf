"""One photo: similar images, matches with points, a pose, and the same with refined keypoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import dist
from pathlib import Path
from time import perf_counter

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.config import RefineConfig
from matcher.localization.pose import (
    MapImages,
    Matches3d,
    Pose,
    PoseEstimate,
    PoseStatus,
    any_camera,
    cameras_to_try,
    estimate_pose,
    log10_false_alarms,
    refine_pose,
    refined_positions,
    reprojection_errors,
    spread,
)
from matcher.localization.sparse_map import LocalizationConfig, RetrievalIndex, SparseMap
from matcher.pipeline import Pipeline
from matcher.refine import ImagePyramid
from matcher.types import Features, Matches, strongest, strongest_rows

# --- correspondences: Matches of a photo with the points of a map, through the tracks of the images it is
# matched with.


@dataclass(eq=False)
class Correspondences:
    """What is known of a photo so far: rows of keypoint, point, map image and its keypoint, and the score."""

    model: SparseMap
    positions: np.ndarray  # (N, 2) of the photo's keypoints, stored pixels
    rows: list[np.ndarray] = field(default_factory=list)  # (k, 4) int64 each: keypoint, point, image, its own
    scores: list[np.ndarray] = field(default_factory=list)  # (k,) each
    images: list[int] = field(default_factory=list)  # matched so far

    def add(self, image: int, matches: Matches) -> int:
        """The matches of a map image (image 0) with the photo (image 1); returns those that have a point."""
        self.images.append(image)
        theirs, ours = matches.indices.T if len(matches) else np.zeros((2, 0), np.int64)
        points = self.model.points[image][theirs]
        kept = points >= 0
        columns = (ours[kept], points[kept], np.full(int(kept.sum()), image), theirs[kept])
        self.rows.append(np.column_stack(columns).astype(np.int64).reshape(-1, 4))
        self.scores.append(np.asarray(matches.scores[kept], dtype=np.float64))
        return int(kept.sum())

    def table(self, images: Sequence[int] | None = None) -> np.ndarray:
        """(M, 4) rows, each pair of keypoint and point once, by its best score.

        Args:
            images: only the matches of these; all when absent.
        """
        if not self.rows:
            return np.zeros((0, 4), np.int64)
        rows, scores = np.concatenate(self.rows), np.concatenate(self.scores)
        if images is not None:
            kept = np.isin(rows[:, 2], list(images))
            rows, scores = rows[kept], scores[kept]
        rows = rows[np.argsort(-scores, kind="stable")]
        _, first = np.unique(rows[:, :2], axis=0, return_index=True)
        return rows[np.sort(first)]

    def matches(self, table: np.ndarray, positions: np.ndarray | None = None) -> Matches3d:
        """Those of a table, at the keypoints' positions or others (M, 2)."""
        points2d = self.positions[table[:, 0]] if positions is None else positions
        return Matches3d(points2d.astype(np.float64), self.model.xyz[table[:, 1]], table[:, 0])

    def inliers_by_image(self, table: np.ndarray, inliers: np.ndarray) -> dict[int, int]:
        """How many of the inliers each image that was matched shows."""
        agreeing = {tuple(row) for row in table[inliers][:, :2].tolist()}
        counts = {}
        for image, rows in zip(self.images, self.rows, strict=True):
            counts[image] = sum(tuple(row) in agreeing for row in rows[:, :2].tolist())
        return counts


# --- covisibility: Clusters of images that see common points: similar images of several places are
# localised apart.

MIN_SHARED = 10  # points that connect two images


def covisibility_clusters(model: SparseMap, images: Sequence[int]) -> list[list[int]]:
    """The images in groups connected by common points, as in hloc (Sarlin et al. 2019).

    Args:
        model: the map.
        images: rows, most similar first; images between them do not connect them.

    Returns:
        The groups, the one with most images first, each in the order given.
    """
    groups: list[list[int]] = []
    for image in images:
        joined, apart = [image], []
        for group in groups:
            if any(model.shared(image, other) >= MIN_SHARED for other in group):
                joined += group
            else:
                apart.append(group)
        groups = [*apart, joined]
    rank = {image: place for place, image in enumerate(images)}
    ordered = [sorted(group, key=rank.__getitem__) for group in groups]
    return sorted(ordered, key=lambda group: (-len(group), rank[group[0]]))


# --- likely_images: Images of a map worth matching with all keypoints, found by matching the strongest few
# first.


def likely_images(
    pipeline: Pipeline,
    model: SparseMap,
    features: Callable[[str], Features],
    photo: Features,
    images: Sequence[int],
    *,
    keypoints: int,
    least: int,
) -> list[int]:
    """Those of whose points enough match a photo's strongest keypoints, the ones with most first.

    Most similar images of a photo that is hard to localise do not show its place. A network finds that out
    last: it uses all layers, and tries another turn. With a few hundred keypoints that costs a third or less
    (preemptive matching, Wu 2013).

    Args:
        pipeline: of the map.
        model: the map.
        features: of an image by name.
        photo: its features.
        images: rows of the model.
        keypoints: of the photo and of each image.
        least: matches with points of an image that is kept.
    """
    ours = strongest(photo, keypoints)
    theirs, rows = [], []
    for image in images:
        whole = features(model.names[image])
        rows.append(strongest_rows(whole, keypoints))
        theirs.append(whole.select(rows[-1]))
    found = pipeline.match_features_batch([(each, ours) for each in theirs])
    counts = [
        int(np.count_nonzero(model.points[image][row[matches.indices[:, 0]]] >= 0)) if len(matches) else 0
        for image, row, matches in zip(images, rows, found, strict=True)
    ]
    order = np.argsort(-np.array(counts, dtype=np.int64), kind="stable")
    return [images[index] for index in order if counts[index] >= least]


# --- judgement: Whether an estimated pose is accepted, and in words why not.

# A camera that is given is doubted where fewer of the keypoints than this share agree, and this many times as
# many do with a focal length that is so many times longer or shorter, or with a principal point in the middle
# that is so many focal lengths away.
_DOUBTED_BELOW, _MORE, _OTHER_FOCAL, _OTHER_CENTRE = 0.6, 1.5, 1.15, 0.05
# An accepted pose is doubted where its matches fit a focal length better that is so many times longer or
# shorter, by this share of their squared errors.
_NEAR_FOCAL, _LESS_ERROR = 1.04, 0.2
# Another pose rivals the accepted one where this share as many other keypoints agree with it, which are so
# many times the largest error off by the accepted one. In a kitchen with like tables a wrong pose had .65,
# right ones at most .43.
_RIVAL, _ELSEWHERE = 0.55, 5.0


def doubt_camera(
    verdict: tuple[PoseStatus, str, float],
    estimate: PoseEstimate | None,
    matches: Matches3d,
    camera: Camera,
    max_error: float,
    config: LocalizationConfig,
    estimate_freely: Callable[[], PoseEstimate | None],
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "wrong_camera" where another camera than the given one explains far more.

    Args:
        verdict: of `judge`.
        estimate: with the given camera.
        matches: M of them.
        camera: the given one.
        max_error: of an inlier, stored pixels.
        config: what is asked of a pose.
        estimate_freely: a pose with its focal length, the principal point in the middle; called only where
            few agree with the given camera.
    """
    total = len(np.unique(matches.keypoints))
    agreeing = _agreeing(estimate, matches)
    if agreeing >= _DOUBTED_BELOW * total or (free := estimate_freely()) is None:
        return verdict
    more, given, found = _agreeing(free, matches), _focal(camera), _focal(free.camera)
    centre, middle = (camera.cx, camera.cy), (free.camera.cx, free.camera.cy)
    other_focal = max(given, found) >= _OTHER_FOCAL * min(given, found)
    other_centre = dist(centre, middle) >= _OTHER_CENTRE * given
    if more < _MORE * agreeing or not (other_focal or other_centre):
        return verdict
    if judge(free, matches, max_error, config, focal_known=False)[0] != "ok":
        return verdict
    return (
        "wrong_camera",
        f"{agreeing} of {total} matched keypoints agree with the camera that is given, of a focal length of "
        f"{given:.0f} pixels and a principal point at {_place(centre)}, and {more} with one of "
        f"{found:.0f} and {_place(middle)}: correct the camera, or give none",
        verdict[2],
    )


def doubt_focal(
    verdict: tuple[PoseStatus, str, float],
    estimate: PoseEstimate,
    matches: Matches3d,
    max_error: float,
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "wrong_camera" where the matches of an accepted pose fit another focal length better.

    Errors beyond `max_error` count as that. A difference that is only significant would say too little: the
    points of a map have errors of their own, which a focal length may take up.

    Args:
        verdict: of `judge`.
        estimate: the accepted pose, with the given camera.
        matches: M of them.
        max_error: of an inlier, stored pixels.
    """
    fixed, free = (refine_pose(estimate, matches, max_error, refine_focal=each) for each in (False, True))
    if fixed is None or free is None:
        return verdict
    given, found = estimate.camera, free.camera
    changes = np.log([found.fx / given.fx, found.fy / given.fy])  # of one sign where the zoom is wrong
    if max(changes.min(), -changes.max()) < np.log(_NEAR_FOCAL):
        return verdict
    errors = [reprojection_errors(matches, each.cam_from_world, each.camera) for each in (fixed, free)]
    before, after = (float(np.square(np.minimum(each, max_error)).sum()) for each in errors)
    if after > (1 - _LESS_ERROR) * before:
        return verdict
    return (
        "wrong_camera",
        f"the matches fit a focal length of {_focal(found):.0f} pixels, and the camera that is given has "
        f"one of {_focal(given):.0f} pixels: correct the camera, or give none",
        verdict[2],
    )


def doubt_alone(
    verdict: tuple[PoseStatus, str, float],
    estimates: Sequence[PoseEstimate],
    matches: Sequence[Matches3d],
    max_errors: Sequence[float],
    config: LocalizationConfig,
    estimate_others: Callable[[list[Matches3d]], Sequence[PoseEstimate | None] | None],
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "ambiguous" where the other matches agree with another pose nearly as well.

    Where things look alike, such as the tables of a room, wrong matches agree with each other.

    Args:
        verdict: of `judge`.
        estimates: the accepted pose of each picture: of one, or of those of a rig.
        matches: of each.
        max_errors: of an inlier in each, stored pixels.
        config: what is asked of a pose.
        estimate_others: poses from other matches of the same pictures.
    """
    agreeing = sum(map(_agreeing, estimates, matches))
    if agreeing >= config.enough_inliers:
        return verdict
    others = [
        each.select(np.flatnonzero(~np.isin(each.keypoints, each.keypoints[estimate.inliers])))
        for estimate, each in zip(estimates, matches, strict=True)
    ]
    rivals = estimate_others(others)
    count = 0 if rivals is None else sum(map(_agreeing, rivals, others))
    if count < _RIVAL * agreeing:
        return verdict
    off = [
        reprojection_errors(rest, estimate.cam_from_world, estimate.camera)[rival.inliers] / limit
        for rest, estimate, rival, limit in zip(others, estimates, rivals, max_errors, strict=True)
    ]
    if np.median(np.concatenate(off)) < _ELSEWHERE:
        return verdict  # it is the same place, seen less exactly
    reason = f"{agreeing} matched keypoints agree with a pose, and {count} others with another one"
    return "ambiguous", reason, verdict[2]


def _agreeing(estimate: PoseEstimate | None, matches: Matches3d) -> int:
    return 0 if estimate is None else len(np.unique(matches.keypoints[estimate.inliers]))


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2


def _place(point: tuple[float, float]) -> str:
    return f"({point[0]:.0f}, {point[1]:.0f})"


def judge(
    estimate: PoseEstimate | None,
    matches: Matches3d,
    max_error: float,
    config: LocalizationConfig,
    *,
    focal_known: bool,
) -> tuple[PoseStatus, str, float]:
    """Status, reason, and log10 of the number of false alarms.

    Args:
        estimate: from these matches.
        matches: M of them.
        max_error: of an inlier, stored pixels.
        config: what is asked of a pose.
        focal_known: before the estimation.
    """
    count = len(np.unique(matches.keypoints))
    if count < config.min_inliers:
        return (
            "too_few_matches",
            f"{count} keypoints match points of the map, {config.min_inliers} needed",
            0.0,
        )
    if estimate is None:
        return "no_model", f"no pose agrees with the {count} matches", 0.0
    size = estimate.camera.size
    inliers = estimate.inliers
    agreeing = _agreeing(estimate, matches)
    alarms = log10_false_alarms(
        matches, inliers, float(size[0] * size[1]), max_error, focal_known=focal_known
    )
    least = max(config.min_inliers, min(config.min_share * count, config.enough_inliers))
    if agreeing < least or alarms > config.max_log10_false_alarms:
        return "not_significant", f"only {agreeing} of {count} matched keypoints agree with a pose", alarms
    covered = spread(matches.points2d[inliers], size)
    if covered < (config.min_spread_of_few if agreeing < config.few_share * count else config.min_spread):
        share = f"{100 * covered:.1f} %"
        return (
            "implausible",
            f"the {agreeing} of {count} that agree lie in one spot, {share} of the photo",
            alarms,
        )
    return "ok", "", alarms


# --- localizer: One photo: similar images, matches with points, a pose, and the same with refined
# keypoints.

_FREED = 1.1  # times the inliers, for which a focal length is refined


@dataclass(eq=False)
class Query:
    """A photo on its way through the stages."""

    features: Features
    camera: Camera | None  # None: to be found
    path: Path | None = None
    pyramid: ImagePyramid | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) as stored."""
        return self.features.image_size

    def stored_pixels(self, resized: float) -> float:
        """A length in pixels of the resized photo in stored ones."""
        return resized / float(np.sqrt(np.prod(self.features.scale.tolist())))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage's seconds."""
        start = perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start


@dataclass(frozen=True, eq=False)
class Attempt:
    """The best pose from the images of one cluster."""

    table: np.ndarray  # (M, 4) of `Correspondences`
    matches: Matches3d
    estimate: PoseEstimate | None
    verdict: tuple[str, str, float]  # of `judge`

    @property
    def count(self) -> int:
        """Inliers."""
        return 0 if self.estimate is None else int(self.estimate.inliers.sum())


@dataclass(frozen=True, eq=False)
class Localizer:
    """The parts of a map that localise a photo."""

    model: SparseMap
    pipeline: Pipeline
    index: RetrievalIndex
    rows: np.ndarray  # (J,) the row in `model` of each image of the index, or −1
    features: Callable[[str], Features]
    images: MapImages
    config: LocalizationConfig

    def localize(self, query: Query) -> Pose:
        """The pose of a photo; without "ok" there is none."""
        if len(query.features) < self.config.min_inliers:
            return Pose(
                "no_keypoints", f"the photo has {len(query.features)} keypoints", seconds=query.seconds
            )
        found = self.correspond(query)
        if found is None or not found[0].images:
            return Pose("no_similar_image", "the map holds nothing to compare with", seconds=query.seconds)
        correspondences, best = found
        if best.verdict[0] == "ok" and self.config.refine:
            with query.timed("refine"):
                best = self._refined(query, correspondences, best)
        if best.verdict[0] == "ok":
            with query.timed("pose"):
                best = self._doubted(query, best)
        return as_pose(query, correspondences, best)

    def _doubted(self, query: Query, accepted: Attempt) -> Attempt:
        """The same, refused where another pose or another focal length fits the matches too."""
        estimate, matches = accepted.estimate, accepted.matches
        max_error = query.stored_pixels(self.config.max_error)

        def estimate_others(others: list[Matches3d]) -> list[PoseEstimate | None]:
            how = dict(max_error=max_error, focal_known=True, seed=self.config.seed)
            return [estimate_pose(others[0], estimate.camera, **how)]

        what = [estimate], [matches], [max_error], self.config, estimate_others
        verdict = doubt_alone(accepted.verdict, *what)
        if verdict[0] == "ok" and query.camera is not None:
            verdict = doubt_focal(verdict, estimate, matches, max_error)
        return replace(accepted, verdict=verdict)

    def similar_clusters(self, query: Query) -> list[list[int]]:
        """Rows of the images to match with, in groups that see the same."""
        with query.timed("retrieve"):
            # Images of the run that are not in the map may be among the most similar.
            missing = int((self.rows < 0).sum())
            nearest, _ = self.index.similar(query.features, self.config.neighbours + missing)
            rows = [int(row) for row in self.rows[nearest] if row >= 0]
            return covisibility_clusters(self.model, rows[: self.config.neighbours])

    def correspond(self, query: Query) -> tuple[Correspondences, Attempt] | None:
        """Match with similar images until a pose is sure; the best attempt of all clusters.

        The first batch of images is matched with all keypoints. Where that is not enough, the others are
        matched so only if their strongest keypoints match, the best ones first.
        """
        positions = to_numpy(query.features.keypoints).astype(np.float64)
        best: tuple[Correspondences, Attempt] | None = None
        likely: list[int] | None = None  # known after the first batch
        for cluster in (clusters := self.similar_clusters(query)):
            found = Correspondences(self.model, positions)
            left = cluster if likely is None else [image for image in likely if image in cluster]
            while left:
                batch, left = left[: self.config.batch], left[self.config.batch :]
                self.match(query, found, batch)
                with query.timed("pose"):
                    attempt = self.attempt(query, found)
                if best is None or attempt.count > best[1].count:
                    best = found, attempt
                if attempt.verdict[0] == "ok" and attempt.count >= self.config.enough_inliers:
                    return found, attempt
                if likely is None:
                    likely = self._likely(query, [i for group in clusters for i in group if i not in batch])
                    left = [image for image in likely if image in left]
        return best

    def _likely(self, query: Query, images: list[int]) -> list[int]:
        """Those worth matching with all keypoints, best first; all where there is no network to spare."""
        config = self.config
        if not (images and config.preemptive_keypoints and self.pipeline.layers):
            return images
        how = dict(keypoints=config.preemptive_keypoints, least=config.preemptive_matches)
        with query.timed("match"):
            return likely_images(self.pipeline, self.model, self.features, query.features, images, **how)

    def match(self, query: Query, found: Correspondences, images: list[int]) -> None:
        """Match the photo with these images and add what has points."""
        with query.timed("match"):
            pairs = [(self.features(self.model.names[image]), query.features) for image in images]
            for image, matches in zip(images, self.pipeline.match_features_batch(pairs), strict=True):
                found.add(image, matches)

    def attempt(self, query: Query, found: Correspondences) -> Attempt:
        """The pose from all correspondences so far."""
        table = found.table()
        matches = found.matches(table)
        max_error = query.stored_pixels(self.config.max_error)
        how = {"max_error": max_error, "seed": self.config.seed}
        known = query.camera is not None
        tried = [query.camera] if known else cameras_to_try(query.path, query.size, self.model)
        best, verdict = None, None
        for camera, focal_known in [*((camera, True) for camera in tried), (any_camera(query.size), False)]:
            if not focal_known and (known or (verdict is not None and verdict[0] == "ok")):
                break
            estimate = estimate_pose(matches, camera, focal_known=focal_known, **how)
            if estimate is not None and not known and focal_known:
                estimate = self._with_focal(estimate, matches, max_error)
            if verdict is None or _count(estimate) > _count(best):
                best = estimate
                verdict = judge(estimate, matches, max_error, self.config, focal_known=known)
        if known and verdict[0] != "too_few_matches":
            free = any_camera(query.size)
            verdict = doubt_camera(
                verdict,
                best,
                matches,
                query.camera,
                max_error,
                self.config,
                lambda: estimate_pose(matches, free, focal_known=False, **how),
            )
        return Attempt(table, matches, best, verdict)

    def _with_focal(self, estimate: PoseEstimate, matches: Matches3d, max_error: float) -> PoseEstimate:
        """The pose with its focal length refined; a camera of the map only if clearly more matches agree.

        A free focal length makes the distance uncertain, and the map's cameras are calibrated well.
        """
        freed = refine_pose(estimate, matches, max_error, refine_focal=True)
        least = _count(estimate) * (_FREED if estimate.camera in self.model.cameras else 0.9)
        return freed if freed is not None and _count(freed) > least else estimate

    def _refined(self, query: Query, found: Correspondences, before: Attempt) -> Attempt:
        """The pose from keypoints that were refined on the images; the one before where that fails."""
        config: RefineConfig | None = self.pipeline.config.refine
        if config is None or query.pyramid is None:
            return before
        inliers = np.flatnonzero(before.estimate.inliers)
        positions = before.matches.points2d.copy()
        positions[inliers] = refined_positions(
            self.images, self.model, query.pyramid, found.positions, before.table[inliers], config
        )
        matches = found.matches(before.table, positions)
        max_error = query.stored_pixels(self.config.max_error)
        known = query.camera is not None
        fixed = known or before.estimate.camera in self.model.cameras
        estimate = refine_pose(before.estimate, matches, max_error, refine_focal=not fixed)
        verdict = judge(estimate, matches, max_error, self.config, focal_known=known)
        return Attempt(before.table, matches, estimate, verdict) if verdict[0] == "ok" else before


def as_pose(query: Query, found: Correspondences, attempt: Attempt) -> Pose:
    """What is returned for an attempt; a pose that is refused is not."""
    status, reason, alarms = attempt.verdict
    estimate = attempt.estimate
    inliers = np.zeros(len(attempt.table), bool) if estimate is None else estimate.inliers
    counts: Mapping[int, int] = found.inliers_by_image(attempt.table, inliers)
    seen = {found.model.names[image]: count for image, count in counts.items()}
    if status != "ok":
        nearest = found.model.names[found.images[0]]
        reason = f"{reason}; the most similar of the map's {len(found.model.names)} images is {nearest}"
    accepted = estimate if status == "ok" else None
    return Pose(
        status=status,
        reason=reason,
        cam_from_world=None if accepted is None else accepted.cam_from_world,
        camera=query.camera if accepted is None else accepted.camera,
        points2d=attempt.matches.points2d,
        points3d=attempt.matches.points3d,
        point_ids=found.model.ids[attempt.table[:, 1]],
        inliers=inliers,
        covariance=None if accepted is None else accepted.covariance,
        images=dict(sorted(seen.items(), key=lambda item: -item[1])),
        log10_false_alarms=alarms,
        seconds={**query.seconds, "total": sum(query.seconds.values())},
    )


def _count(estimate: PoseEstimate | None) -> int:
    return 0 if estimate is None else int(estimate.inliers.sum())
