"""One photo: similar images, matches with points, a pose, and the same with refined keypoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from matcher.config import RefineConfig
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.tensors import to_numpy
from matcher.localization.absolute_pose import Matches3d, PoseEstimate, estimate_pose, refine_pose
from matcher.localization.correspondences import Correspondences
from matcher.localization.covisibility import covisibility_clusters
from matcher.localization.judgement import doubt_alone, doubt_camera, doubt_focal, judge
from matcher.localization.likely_images import likely_images
from matcher.localization.pose import Pose
from matcher.localization.retrieval_index import RetrievalIndex
from matcher.localization.settings import LocalizationConfig
from matcher.localization.sparse_map import SparseMap
from matcher.localization.subpixel import MapImages, refined_positions
from matcher.localization.unknown_camera import any_camera, cameras_to_try
from matcher.pipeline import Pipeline
from matcher.refine.refinement import ImagePyramid

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
