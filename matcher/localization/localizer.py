"""From a photo, or the pictures of a rig, to a pose: similar images, matches with points, a pose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.collection.tracks import ImagePyramids
from matcher.errors import UsageError
from matcher.geometry import check_poses
from matcher.localization.checks import (
    Judgement,
    check_ambiguous,
    check_camera,
    check_focal,
    check_rig_pose,
    judge,
)
from matcher.localization.pose import (
    Estimates,
    Matches3d,
    Pose,
    any_camera,
    cameras_to_try,
    estimate_poses,
    refine_poses,
)
from matcher.localization.sparse_map import LocalizationConfig, RetrievalIndex, SparseMap
from matcher.pipeline import Pipeline
from matcher.refine import ImagePyramid, refine_matches
from matcher.types import Features, Matches, strongest, strongest_rows, to_numpy


@dataclass(eq=False)
class Query:
    """A photo on its way through the stages."""

    features: Features
    camera: Camera | None  # of its size; None: to be found
    path: Path | None = None
    pyramid: ImagePyramid | None = None
    cam_from_rig: np.ndarray | None = None  # (4, 4)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage's seconds."""
        start = perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + perf_counter() - start


class Correspondences:
    """Matches of a photo with the points of a map, through the tracks of the images it is matched with."""

    def __init__(self, model: SparseMap, query: Query, max_error: float) -> None:
        """`max_error`: of an inlier, pixels of the resized photo."""
        self.model, self.query = model, query
        self.positions = to_numpy(query.features.keypoints).astype(np.float64)
        self.max_error = max_error / float(np.sqrt(np.prod(query.features.scale.tolist())))
        self.rows: dict[int, np.ndarray] = {}  # of each image, as in `Matches3d.table`
        self.scores = [np.zeros(0)]

    def add(self, image: int, matches: Matches) -> None:
        """The matches of a map image (image 0) with the photo (image 1)."""
        theirs, ours = matches.indices.reshape(-1, 2).T
        points = self.model.points[image][theirs]
        columns = ours, points, np.full(len(ours), image), theirs
        self.rows[image] = np.column_stack(columns)[points >= 0].astype(np.int64)
        self.scores.append(np.asarray(matches.scores[points >= 0], dtype=np.float64))

    def matches(self) -> Matches3d:
        """Each pair of keypoint and point once, by its best score."""
        rows = np.concatenate([np.zeros((0, 4), np.int64), *self.rows.values()])
        rows = rows[np.argsort(-np.concatenate(self.scores), kind="stable")]
        rows = rows[np.sort(np.unique(rows[:, :2], axis=0, return_index=True)[1])]
        points = self.positions[rows[:, 0]], self.model.xyz[rows[:, 1]]
        return Matches3d(*points, rows, self.max_error, self.query.cam_from_rig)

    def inliers_by_image(self, inliers: np.ndarray) -> dict[str, int]:
        """How many rows of the inliers each image that was matched shows, most first."""
        found = set(map(tuple, inliers[:, :2].tolist()))
        shown = {
            self.model.names[image]: sum(map(found.__contains__, map(tuple, rows[:, :2].tolist())))
            for image, rows in self.rows.items()
        }
        return dict(sorted(shown.items(), key=lambda item: -item[1]))


class Attempt(NamedTuple):
    """The pose of all pictures from the images of one cluster; lists have an item for each picture."""

    found: list[Correspondences]
    matches: list[Matches3d]
    estimates: Estimates | None
    verdict: Judgement


@dataclass(frozen=True, eq=False)
class Localizer:
    """The parts of a map that localise a photo."""

    model: SparseMap
    pipeline: Pipeline
    index: RetrievalIndex
    rows: np.ndarray  # (J,) the row in `model` of each image of the index, or −1
    features: Callable[[str], Features]
    images: ImagePyramids  # of the model
    path: Callable[[str], Path]  # of an image of the map
    absent: set[str]  # names of images that were needed, and whose files are gone
    config: LocalizationConfig

    def localize(self, queries: Sequence[Query]) -> list[Pose]:
        """The pose of a photo, or of each of R pictures that are fixed to each other; one status for all."""
        keypoints = sum(len(query.features) for query in queries)
        best, why = None, ("no_keypoints", f"the photo has {keypoints} keypoints")
        if keypoints >= self.config.min_inliers:
            best = self._correspond(queries)
            why = "no_similar_image", "the map holds nothing to compare with"
        if best is None:
            return [Pose(*why, seconds={**q.seconds, "total": sum(q.seconds.values())}) for q in queries]
        if best.verdict.status == "ok":
            with queries[0].timed("refine"):
                best = self._refined(queries, best)
            with queries[0].timed("pose"):
                best = best._replace(verdict=self._checked(queries, best))
        return [self._pose(number, query, best) for number, query in enumerate(queries)]

    def _correspond(self, queries: Sequence[Query]) -> Attempt | None:
        """Match with similar images until a pose is sure; the best attempt of all clusters.

        The first batch of images is matched with all keypoints. Where that is not enough, the others are
        matched so only if their strongest keypoints match, the best ones first.
        """
        config, best, first, todo = self.config, None, True, []
        # Images of the run that are not in the map may be among the most similar.
        asked = config.neighbours + int((self.rows < 0).sum())
        for query in queries:
            with query.timed("retrieve"):
                nearest = self.rows[self.index.similar(query.features, asked)[0]]
                todo.append(nearest[nearest >= 0][: config.neighbours].tolist())
        similar = list(dict.fromkeys(row for rows in todo for row in rows))
        for cluster in covisibility_clusters(self.model, similar):
            found = [Correspondences(self.model, query, config.max_error) for query in queries]
            # A picture of a rig that is like none of the cluster may yet show something of it.
            left = [[row for row in rows if row in cluster] or (cluster if first else []) for rows in todo]
            while any(left):
                for known, rows in zip(found, left, strict=True):
                    self._match(known, rows[: config.batch])
                left = [rows[config.batch :] for rows in left]
                with queries[0].timed("pose"):
                    attempt = self._attempt(found)
                if best is None or _count(attempt.estimates) > _count(best.estimates):
                    best = attempt
                if attempt.verdict.status == "ok" and _count(attempt.estimates) >= config.enough_inliers:
                    return attempt
                if first:
                    first = False
                    todo = [
                        self._likely(k.query, [row for row in similar if row not in k.rows]) for k in found
                    ]
                    left = [[row for row in rows if row in cluster] for rows in todo]
        return best

    def _likely(self, query: Query, images: list[int]) -> list[int]:
        """Those worth matching with all keypoints, best first; all where there is no network to spare.

        Most similar images of a photo that is hard to localise do not show its place, which a network finds
        out last. With a few hundred keypoints that costs a third or less (preemptive matching, Wu 2013).
        """
        config = self.config
        if not (images and len(query.features) and config.preemptive_keypoints and self.pipeline.layers):
            return images
        with query.timed("match"):
            ours = strongest(query.features, config.preemptive_keypoints)
            whole = [self.features(self.model.names[image]) for image in images]
            rows = [strongest_rows(each, config.preemptive_keypoints) for each in whole]
            pairs = [(each.select(row), ours) for each, row in zip(whole, rows, strict=True)]
            found = zip(images, rows, self.pipeline.match_features_batch(pairs), strict=True)
            counts = [
                int((self.model.points[image][row[matches.indices.reshape(-1, 2)[:, 0]]] >= 0).sum())
                for image, row, matches in found
            ]
        order = np.argsort(-np.array(counts, dtype=np.int64), kind="stable")
        return [images[index] for index in order if counts[index] >= config.preemptive_matches]

    def _match(self, found: Correspondences, images: list[int]) -> None:
        """Match the photo with these images and add what has points."""
        if not (images and len(found.query.features)):
            return
        with found.query.timed("match"):
            pairs = [(self.features(self.model.names[image]), found.query.features) for image in images]
            for image, matches in zip(images, self.pipeline.match_features_batch(pairs), strict=True):
                found.add(image, matches)

    def _attempt(self, found: list[Correspondences]) -> Attempt:
        """The pose from all correspondences so far."""
        config, queries = self.config, [each.query for each in found]
        matches = [each.matches() for each in found]
        if queries[0].camera is None:
            return Attempt(found, matches, *self._with_unknown_camera(queries[0], matches))
        estimates = estimate_poses(matches, [query.camera for query in queries], seed=config.seed)
        verdict = judge(estimates, matches, config, focal_known=True)
        for number, (query, own) in enumerate(zip(queries, matches, strict=True)):
            if verdict.status in ("too_few_matches", "wrong_camera"):
                break
            if reason := check_camera(estimates and estimates[number], own, query.camera, config):
                verdict = verdict._replace(status="wrong_camera", reason=_named(queries, number) + reason)
        return Attempt(found, matches, estimates, verdict)

    def _with_unknown_camera(
        self, query: Query, matches: list[Matches3d]
    ) -> tuple[Estimates | None, Judgement]:
        """The pose that most matches agree with, of the cameras that the photo may have."""
        best, verdict, seed, size = None, None, self.config.seed, query.features.image_size
        for camera in [*cameras_to_try(query.path, size, self.model.cameras), None]:
            if camera is None and verdict is not None and verdict.status == "ok":
                break
            if camera is None:
                estimates = estimate_poses(matches, [any_camera(size)], focal_known=False, seed=seed)
            elif (estimates := estimate_poses(matches, [camera], seed=seed)) is not None:
                # A free focal length makes the distance uncertain, and the map's cameras are calibrated well:
                # one of those changes only if clearly more matches agree.
                freed = refine_poses(estimates, refine_focal=True)
                least = _count(estimates) * (1.1 if camera in self.model.cameras else 0.9)
                estimates = freed if _count(freed) > least else estimates
            if verdict is None or _count(estimates) > _count(best):
                best = estimates
                verdict = judge(estimates, matches, self.config, focal_known=False)
        return best, verdict

    def _refined(self, queries: Sequence[Query], before: Attempt) -> Attempt:
        """The pose from keypoints moved to where the photo looks most like the map's images, if there is one.

        Where the pose then fails, and without images, it is the one before.
        """
        if all(query.pyramid is None for query in queries):
            return before
        start = []
        for query, estimate in zip(queries, before.estimates, strict=True):
            table, moved = estimate.matches.table, estimate.matches.points2d.copy()
            of = np.where(estimate.inliers & (query.pyramid is not None), table[:, 2], -1)
            for image in np.unique(of[of >= 0]).tolist():
                if not self.path(self.model.names[image]).is_file():
                    self.absent.add(self.model.names[image])
                    continue
                rows = np.flatnonzero(of == image)
                indices = table[rows][:, [3, 0]]
                ends = self.model.keypoints[image][indices[:, 0]], moved[rows]
                ends = (end.astype(np.float32) for end in ends)
                pairs = Matches(indices, *ends, np.ones(len(rows), np.float32))
                refined = refine_matches(
                    self.images(image), query.pyramid, pairs, self.pipeline.config.refine
                )
                accepted = refined.refinement.accepted
                moved[rows[accepted]] = refined.points1[accepted]
            start.append(replace(estimate, matches=replace(estimate.matches, points2d=moved)))
        known, matches = queries[0].camera is not None, [each.matches for each in start]
        fixed = known or start[0].camera in self.model.cameras
        estimates = refine_poses(start, refine_focal=not fixed)
        verdict = judge(estimates, matches, self.config, focal_known=known)
        return Attempt(before.found, matches, estimates, verdict) if verdict.status == "ok" else before

    def _checked(self, queries: Sequence[Query], accepted: Attempt) -> Judgement:
        """The verdict, against it where another pose or another focal length fits the matches too."""
        _, _, estimates, verdict = accepted
        if reason := check_ambiguous(estimates, self.config):
            return verdict._replace(status="ambiguous", reason=reason)
        for number, estimate in enumerate(estimates if queries[0].camera is not None else ()):
            if len(queries) > 1 and (reason := check_rig_pose(estimate, self.config)):
                return verdict._replace(status="wrong_rig", reason=_named(queries, number) + reason)
            alone = judge([estimate], [estimate.matches], self.config, focal_known=True)
            if alone.status == "ok" and (reason := check_focal(estimate)):
                return verdict._replace(status="wrong_camera", reason=_named(queries, number) + reason)
        return verdict

    def _pose(self, number: int, query: Query, attempt: Attempt) -> Pose:
        """What is returned of a picture; a pose that is refused is not."""
        found, matches, verdict = attempt.found[number], attempt.matches[number], attempt.verdict
        estimate = attempt.estimates and attempt.estimates[number]
        inliers = estimate.inliers if estimate else np.zeros(len(matches), bool)
        accepted, reason = (estimate, "") if verdict.status == "ok" else (None, verdict.reason)
        if accepted is None and found.rows:
            nearest = self.model.names[next(iter(found.rows))]
            reason += f"; the most similar of the map's {len(self.model.names)} images is {nearest}"
        return Pose(
            status=verdict.status,
            reason=reason,
            cam_from_world=accepted and accepted.cam_from_world,
            camera=accepted.camera if accepted else query.camera,
            points2d=matches.points2d,
            points3d=matches.points3d,
            point_ids=self.model.ids[matches.table[:, 1]],
            inliers=inliers,
            covariance=accepted and accepted.covariance,
            images=found.inliers_by_image(matches.table[inliers]),
            log10_false_alarms=verdict.log10_false_alarms,
            seconds={**query.seconds, "total": sum(query.seconds.values())},
        )


def covisibility_clusters(model: SparseMap, images: Sequence[int]) -> list[list[int]]:
    """The images in groups connected by common points, as in hloc (Sarlin et al. 2019).

    The group with most images comes first; each is in the order given.
    """
    groups: list[list[int]] = []
    for image in images:
        near = [g for g in groups if any(model.shared(image, other) >= 10 for other in g)]
        apart = [group for group in groups if group not in near]
        groups = [*apart, [row for row in images if row == image or any(row in group for group in near)]]
    return sorted(groups, key=lambda group: (-len(group), images.index(group[0])))


def mounted(queries: Sequence[Query], cam_from_rig: object) -> Sequence[Query]:
    """R pictures with cameras, at their relative poses (R, 4, 4).

    Raises:
        UsageError: another number of poses than pictures, values that are no poses, or no camera.
    """
    poses = np.asarray(cam_from_rig, dtype=np.float64)
    if poses.shape != (len(queries), 4, 4) or (poses[:, 3] != [0, 0, 0, 1]).any():
        raise UsageError(f"cam_from_rig must be a pose (4, 4) for each of the {len(queries)} pictures")
    try:
        check_poses(poses)
    except ValueError as error:
        raise UsageError(f"cam_from_rig: {error}") from error
    if any(query.camera is None for query in queries):
        raise UsageError("the pictures of a rig need their cameras")
    return [replace(query, cam_from_rig=pose) for query, pose in zip(queries, poses, strict=True)]


def _named(queries: Sequence[Query], number: int) -> str:
    """Which picture of a rig is spoken of."""
    if len(queries) == 1:
        return ""
    path = queries[number].path
    return f"in picture {number} " if path is None else f"in {path.parent.name}/{path.name} "


def _count(estimates: Estimates | None) -> int:
    return sum(int(each.inliers.sum()) for each in estimates or ())
