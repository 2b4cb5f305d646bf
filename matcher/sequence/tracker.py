"""The tracker: frames go in one by one; tracks, keyframes, poses and depths come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Unpack

import numpy as np

from matcher.budget import BUDGETS, Choice, Costs, choose, limited, measure_costs, strongest, updated_pace
from matcher.cameras import CameraInput, as_camera
from matcher.config import GRID_KIND
from matcher.errors import ImageError, UsageError, check_number
from matcher.loading import open_pipeline, takes
from matcher.match.adaptivity import with_layers
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions, from_file, refuse_further_passes
from matcher.refine import ImagePyramid, refine_matches
from matcher.sequence.frames import Clock, FrameLinks, FrameResult, FrameStatus, KeptFrame
from matcher.sequence.keyframe_map import ClosedTrajectory, KeyframeMap, MapTracking
from matcher.sequence.linking import Linker, TrackIds, complete_partners, share_left
from matcher.sequence.pose_tracking import MOST_DOUBT, PoseTracker
from matcher.types import Features, Image, Matches
from matcher.verify.estimation import RobustEstimator

# Tracks and poses live on matches that are right, not on many; single pairs do with less.
MATCH_THRESHOLD = 0.2
# A frame becomes a keyframe where fewer of the tracks are left that the keyframe's next frame had, or where
# the median way of the points since is a larger share of the image's diagonal.
LEAST_KEPT, MOST_PARALLAX = 0.65, 0.12


def for_neighbours(pipeline: Pipeline) -> Pipeline:
    """The pipeline with half its layers and ten Sinkhorn iterations: tracks as long, links as right."""
    layers = (pipeline.layers + 1) // 2
    return replace(pipeline, matcher=with_layers(pipeline.matcher, layers, 10, pruning=False))


class Tracker:
    """Tracks keypoints through a sequence of frames and, with a camera, estimates its poses.

    >>> import matcher, numpy as np
    >>> tracker = matcher.Tracker("nearest", max_keypoints=200)
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 340), dtype=np.uint8)
    >>> for shift in (0, 4):
    ...     result = tracker.push(scene[:, shift : shift + 320])
    >>> result.index, bool(result.track_lengths.max() == 2)
    (1, True)

    The features of a frame are extracted once. It is matched to the previous frame with the first half of the
    network's layers, which is enough for views this close; links to the keyframe follow from the tracks and a
    guided search, and linked points are refined against the keyframe's on the images. Blank, dropped and late
    frames are skipped. When tracking is lost, the keyframes still held are tried with all layers; if none
    fits, new tracks begin and the last motion is extrapolated (`pose_status` "bridged").
    """

    def __init__(
        self,
        preset: str | Pipeline = DEFAULT_PRESET,
        camera: CameraInput | None = None,
        *,
        baseline: float | None = None,
        budget_ms: float | None = None,
        window: int = 30,
        epipolar_window: float | None = None,
        keyframe_map: KeyframeMap | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Set up; nothing is measured or matched before the first frame.

        Args:
            preset: a name in `PRESETS`, or a pipeline, which verifies the links by fundamental matrices.
            camera: a pinhole camera, fx, fy, cx, cy or K (3, 3), for frames of `camera.size` or of the first
                frame's size; rescaled for frames of another (`FrameResult.camera`). Without it no poses.
            baseline: distance between the cameras of rectified pairs, usually in metres. Poses and depths are
                then in its unit, and depths come from pairs only.
            budget_ms: time for a frame; points and layers are chosen to fit, anew where frames take longer.
            window: number of keyframes held.
            epipolar_window: largest difference of rows, in pixels, of a left/right match; None keeps all.
            keyframe_map: takes in every frame that is tracked; `save_map` makes the map.
            options: those of `matcher.load`; `match_threshold` is 0.2 unless given.

        Raises:
            UsageError: a value that cannot be used, another geometry, a camera with distortion, or a preset
                without keypoints.
        """
        for name, value, limits in (
            ("baseline", baseline, (1e-6, 1e6)),  # in the unit of the poses, such as metres
            ("budget_ms", budget_ms, BUDGETS),
            ("epipolar_window", epipolar_window, (1e-3, 1e6)),
        ):
            if value is not None:
                check_number(value, name, *limits)
        if type(window) is not int or window < 2:
            raise UsageError(f"window must be a whole number of at least 2 keyframes, not {window!r}")
        if not isinstance(preset, Pipeline):
            preset, options = from_file(preset, options)  # without those that are None
        refuse_further_passes(options, "frames are matched by one pass each")
        if not isinstance(preset, Pipeline) and takes(preset, "match_threshold"):
            options = {"match_threshold": MATCH_THRESHOLD, **options}
        pipeline = open_pipeline(preset, options)
        if (kind := pipeline.config.estimation.kind) != "fundamental":
            raise UsageError(f"a tracker verifies links by fundamental matrices: leave geometry {kind!r} out")
        if pipeline.config.extractor.kind == GRID_KIND:
            raise UsageError("a tracker follows keypoints; this preset has only cells of a grid: use another")
        self.pipeline = self._whole = pipeline  # reads and extracts frames, and matches those far apart
        self._near = for_neighbours(pipeline) if budget_ms is None else pipeline
        # What the time budget allowed the last frame; None before the first one or without a budget.
        self.choice: Choice | None = None
        self._first: list[Image] = []  # what showed how much time steps take
        self._costs: Costs = {}
        self._pace, self._planned = 1.0, False
        self._decided = budget_ms is None and pipeline.config.extractor.soft_resize is None
        self.camera = camera = None if camera is None else as_camera(camera)
        self.baseline, self.budget_ms, self.keyframe_map = baseline, budget_ms, keyframe_map
        self._window, self._clock = epipolar_window, Clock()
        self._times: deque[dict[str, float]] = deque(maxlen=512)  # milliseconds of the last frames
        estimator, estimation = pipeline.estimator, pipeline.config.estimation
        if isinstance(estimator, RobustEstimator):
            # Fundamental matrices tell right links from wrong ones; adjusted ones cost a tenth of a frame's
            # time and improve neither links nor odometry.
            estimator = replace(estimator, adjusted=False)
        self._linker = Linker(estimator, estimation.max_epipolar_error)
        self._poses = PoseTracker(camera, baseline, estimation)
        # The depths of points nearer than 40 baselines show how far the camera moved (Mur-Artal and Tardós).
        self._close = None if baseline is None else 40 * baseline
        self._tracks = TrackIds()
        self._keyframes: deque[KeptFrame] = deque(maxlen=window)
        self._previous: KeptFrame | None = None
        self._keyframe: KeptFrame | None = None
        self._refined: KeptFrame | None = None  # the keyframe that the last frame was refined against
        self._in_map: MapTracking | None = None
        self._count, self._spent = 0, {}  # frames; stage → milliseconds of the last one

    def __repr__(self) -> str:
        parts = [self.pipeline.preset, f"{self._count} frames", f"{len(self.keyframes)} keyframes kept"]
        parts += [] if self.camera is None else [f"camera of f = {self.camera.fx:g} pixels"]
        parts += [] if self.baseline is None else [f"baseline {self.baseline:g}"]
        return f"Tracker({', '.join(parts)})"

    @property
    def keyframes(self) -> tuple[int, ...]:
        """Indices of the frames that are kept as keyframes, oldest first."""
        return tuple(keyframe.index for keyframe in self._keyframes)

    def latency(self) -> dict[str, dict[str, float]]:
        """Stage → p50, p95, p99 and max in milliseconds, over the last 512 frames that were not skipped."""
        table = {}
        for stage in dict.fromkeys(stage for row in self._times for stage in row):
            values = [row[stage] for row in self._times if stage in row]
            found = np.percentile(values, (50, 95, 99, 100)).tolist()
            table[stage] = dict(zip(("p50", "p95", "p99", "max"), found, strict=True))
        return table

    def push(
        self, frame: ImageInput | None, timestamp: float | None = None, *, mask: Mask | None = None
    ) -> FrameResult:
        """Track the next frame.

        Args:
            frame: a path, an array as `Pipeline.match` takes it, or None for one that was dropped.
            timestamp: in seconds; a frame older than the last one is skipped, unless the clock turns out to
                have been set back.
            mask: as `Pipeline.match` takes it; no keypoint lies where it is 0.

        Raises:
            ImageError: the image cannot be read; the tracker is unchanged, so None may be pushed instead.
            UsageError: an array or a timestamp that cannot be used; likewise.
        """
        return self._push([frame], timestamp, mask)

    def push_stereo(
        self,
        left: ImageInput | None,
        right: ImageInput | None,
        timestamp: float | None = None,
        *,
        mask: Mask | None = None,
    ) -> FrameResult:
        """Track the next rectified pair; keypoints are the left image's, with depth where both show them.

        Without a camera and a baseline there is no depth. The mask is of the left image. Arguments and errors
        as in `push`; `ImageError` also where the images differ in size.
        """
        return self._push([left, right], timestamp, mask)

    def save_map(self, *, close_loops: bool = True) -> ClosedTrajectory:
        """Make the map of the keyframes so far, to be localised in and loaded by a later run.

        As `KeyframeMap.finish`; `UsageError` also where the tracker has no `keyframe_map`.
        """
        if self.keyframe_map is None:
            raise UsageError("no keyframes were kept: Tracker(camera=C, keyframe_map=KeyframeMap(FOLDER, C))")
        return self.keyframe_map.finish(close_loops=close_loops)

    def load_map(self, folder: str | Path, **options: Unpack[LoadOptions]) -> None:
        """Follow in a map that exists: from now on `FrameResult.map_from_cam` is the pose in it, once known.

        Keyframes are localised in it while tracking waits, and every frame until the first is; the others
        follow by tracking. The folder is of `save_map`, or any model that `Map.open` takes, whose options and
        errors these are; `UsageError` also without a camera.
        """
        self.unload_map()
        if self.camera is None:
            raise UsageError("a map needs poses, and poses need a camera: Tracker(camera=matcher.Camera(…))")
        self._in_map = MapTracking(folder, measured=self.baseline is not None, **options)

    def unload_map(self) -> None:
        """Stop following in a map."""
        if self._in_map is not None:
            self._in_map.close()
        self._in_map = None

    @property
    def localized_in_map(self) -> int:
        """Frames that were localised in the loaded map."""
        return 0 if self._in_map is None else self._in_map.localized

    def late_poses_in_map(self) -> dict[int, np.ndarray]:
        """map_from_cam (4, 4) by frame, known by now, of frames whose `FrameResult` has none."""
        return {} if self._in_map is None else self._in_map.late_poses()

    @property
    def problem(self) -> str | None:
        """Why nothing more is found in the loaded map, None where all is well."""
        return None if self._in_map is None else self._in_map.problem

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self._spent[stage] = self._spent.get(stage, 0.0) + 1000 * (perf_counter() - start)

    def _read(self, frames: list[ImageInput], mask: Mask | None = None) -> list[Image]:
        """One image, or left and right, as the front end wants them; the mask is of the first. The first with
        keypoints decides how a time budget is spent and, by its sharpness, the size of all."""
        given = list(zip(frames, (mask, None), strict=False))
        images = [self.pipeline.read(*each) for each in given]
        if images[0].size != images[-1].size:
            sizes = f"{images[0].size} and {images[1].size}"
            what = f"{images[0].path or 'a pair'}: a rectified pair has one size, not {sizes}"
            raise ImageError(f"{what}; rectify both to one size")
        if self._decided or not len(self._extract(images[:1])[0]):
            return images
        self._decided = True
        if self.budget_ms is None:  # all images are resized as this one was
            config = self.pipeline.config.extractor
            reduced = images[0].is_reduced(config.resize)
            resize = max(images[0].pixels.shape[:2]) if reduced else config.resize
            config = replace(self.pipeline.config, extractor=config.of_size(resize))
            self.pipeline = replace(self.pipeline, config=config)
            return [images[0], *(self.pipeline.read(frame) for frame in frames[1:])]
        self._first, self._costs = images, measure_costs(self.pipeline, images, pairs=False)
        self._plan()
        return [self.pipeline.read(*each) for each in given]

    def _extract(self, images: list[Image]) -> list[Features]:
        """Features of each image; beyond the points that a budget allows, the weakest are left out."""
        features, choice = self.pipeline.extractor(images), self.choice
        return features if choice is None else [strongest(found, choice.max_keypoints) for found in features]

    def _plan(self) -> None:
        budget = self.budget_ms, 0.0, self._pace
        self.choice = choose(self._costs, self._whole, self._first, *budget)
        self.pipeline = self._near = limited(self._whole, self.choice)
        self._planned = True

    def _link(
        self, current: KeptFrame, matches: Matches | None
    ) -> tuple[FrameStatus, FrameLinks | None, FrameLinks | None]:
        """Links to the previous frame and the keyframe; where both fail, to any keyframe that fits."""
        previous, keyframe, match = self._previous, self._keyframe, self.pipeline.match_features_batch
        if previous is None:
            return "first", None, None
        to_previous = to_keyframe = self._linker.link(previous, current, matches.indices, matches.scores)
        if keyframe is not previous:
            links = to_previous.inliers  # and by them the tracks of the keyframe lead to this frame
            both = keyframe.track_ids, previous.track_ids[links[:, 0]]
            _, here, there = np.intersect1d(*both, assume_unique=True, return_indices=True)
            joined = np.stack([here, links[there, 1]], axis=1).astype(np.int64)
            to_keyframe = self._linker.link(keyframe, current, joined)
            if not to_keyframe.consistent.any():
                direct = match([(keyframe.features, current.features)])[0]
                to_keyframe = self._linker.link(keyframe, current, direct.indices, direct.scores)
        if not to_keyframe.consistent.any() and to_previous.consistent.any():
            if previous.world_from_cam is None:
                self._poses.bridge(previous)
            self._keep(previous)  # the keyframe is out of sight before another was made
            to_keyframe = to_previous
        elif not to_keyframe.consistent.any():
            others = [kept for kept in self._keyframes if kept is not keyframe and kept is not previous]
            found = self._linker.best(match, current, others)
            if found is None:
                return "lost", to_previous, None
            self._keyframe, to_keyframe = found
        return "tracked", to_previous, to_keyframe

    def _refine(self, current: KeptFrame, links: FrameLinks) -> None:
        """Move linked points to where the keyframe shows them, so that errors do not add up over frames."""
        keyframe = self._keyframe
        if keyframe.pyramid is None:
            return
        if self._refined is not None and self._refined is not keyframe:
            self._refined.pyramid.release()
        self._refined, rows = keyframe, links.inliers
        points = keyframe.keypoints[rows[:, 0]], current.keypoints[rows[:, 1]]
        matches = Matches(rows, *points, links.scores[links.consistent])
        refined = refine_matches(keyframe.pyramid, current.pyramid, matches, self.pipeline.config.refine)
        accepted = refined.refinement.accepted
        current.keypoints[rows[accepted, 1]] = refined.points1[accepted]

    def _place(self, current: KeptFrame, status: FrameStatus, links: FrameLinks | None) -> dict[str, object]:
        """Pose of the frame and whether it becomes a keyframe: fields of its result."""
        keyframe = self._keyframe
        if links is None:
            pose_status = self._poses.begin(current) if status == "first" else self._poses.bridge(current)
            current.begins_anew = status == "lost"
            if self._keyframes and self._keyframes[-1].begins_anew and not self._keyframes[-1].most_links:
                self._keyframes.pop()  # one lost frame after the other must not push out what is known
            self._keep(current)
            return {"is_keyframe": True, "pose_status": pose_status}
        pose_status, T = self._poses.locate(keyframe, current, links)
        kept = share_left(keyframe, links, self._close)
        rows, here = links.inliers.T
        ways = np.linalg.norm(current.keypoints[here] - keyframe.keypoints[rows], axis=1)
        parallax = float(np.median(ways))
        wanted = kept < LEAST_KEPT or parallax > MOST_PARALLAX * float(np.hypot(*current.size))
        wanted |= self._poses.doubt > MOST_DOUBT / 2  # which grows as near points leave
        if wanted and (pose_status in ("ok", "uncertain", "no_camera") or kept < LEAST_KEPT / 2):
            self._poses.promote(keyframe, current, links, T)
            if pose_status in ("too_few", "starting"):  # later frames could not go on without a pose
                pose_status = self._poses.bridge(current)
            self._keep(current)
        return {
            "is_keyframe": self._keyframe is current,
            "keyframe": keyframe.index,
            "parallax": parallax,
            "kept": kept,
            "pose_status": pose_status,
            "cam_from_keyframe": T,
        }

    def _keep(self, frame: KeptFrame) -> None:
        self._keyframe = frame
        self._keyframes.append(frame)

    def _push(
        self, frames: list[ImageInput | None], timestamp: float | None, mask: Mask | None
    ) -> FrameResult:
        def skipped(status: FrameStatus, size: tuple[int, int]) -> FrameResult:
            """The next one is linked to the last frame that was tracked."""
            self._count += 1
            nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
            spent = {**self._spent, "total": sum(self._spent.values())}
            return FrameResult(self._count - 1, timestamp, status, size, *nothing, milliseconds=spent)

        self._spent = {}
        if any(frame is None for frame in frames):
            return skipped("dropped", (0, 0))
        with self._timed("read"):
            images = self._read(frames, mask)
        if not self._clock.accepts(timestamp):
            return skipped("out_of_order", images[0].size)
        with self._timed("extract"):
            features = self._extract(images)
        if len(features[0]) == 0:
            return skipped("blank", images[0].size)
        pyramids = tuple(map(ImagePyramid.of, images))
        refines, previous = self.pipeline.config.refine is not None, self._previous
        current = KeptFrame(self._count, features[0], pyramids[0] if refines else None)
        with self._timed("match"):  # previous → this and left → right, in one batch
            pairs = [] if previous is None else [(previous.features, features[0])]
            pairs += [(features[0], other) for other in features[1:] if len(other)]
            matched = self._near.match_features_batch(pairs)
            earlier = None if previous is None else matched.pop(0)
        with self._timed("verify"):
            status, to_previous, to_keyframe = self._link(current, earlier)
            found = ((self._previous, to_previous), (self._keyframe, to_keyframe))
            offers = [(frame.track_ids, links.inliers) for frame, links in found if links is not None]
            current.track_ids, lengths = self._tracks.extend(len(current.keypoints), offers)
        if refines and to_keyframe is not None:
            with self._timed("refine"):
                self._refine(current, to_keyframe)
        right = None
        with self._timed("verify"):
            for pair in matched:  # where the right image shows the keypoints, and so how far away they are
                other = KeptFrame(self._count, features[1])
                links = self._linker.link(current, other, pair.indices, pair.scores)
                right = np.full((len(current.keypoints), 2), np.nan, np.float32)
                right[links.inliers[:, 0]] = other.keypoints[links.inliers[:, 1]]
                right, deviations = complete_partners(pyramids, current.keypoints, right)
                if self._window is not None:
                    step = current.keypoints - right
                    with np.errstate(invalid="ignore"):  # rows that differ, and points behind the cameras
                        good = (np.abs(step[:, 1]) <= self._window) & (step[:, 0] > 0)
                    right = np.where(good[:, None], right, np.float32(np.nan))
                self._poses.measure(current, right, deviations)
        with self._timed("pose"):
            found = self._place(current, status, to_keyframe)
        self._previous = current
        self._tracks.forget(current.track_ids, self._keyframe.track_ids)
        self._count += 1
        result = FrameResult(
            index=current.index,
            timestamp=timestamp,
            status=status,
            size=current.size,
            keypoints=current.keypoints.copy(),
            track_ids=current.track_ids.copy(),
            track_lengths=lengths,
            to_previous=to_previous,
            to_keyframe=to_keyframe,
            world_from_cam=None if current.world_from_cam is None else current.world_from_cam.copy(),
            stretch=current.stretch,
            camera=self._poses.camera_of(current.size),
            right=right,
            depths=current.depths.copy() if np.isfinite(current.depths).any() else None,
            **found,
        )
        if self.keyframe_map is not None:
            with self._timed("map"):
                self.keyframe_map.add(result, frames[0], mask=mask)
        if self._in_map is not None:
            with self._timed("map"):
                how = dict(mask=mask, alpha_mask=self.pipeline.alpha_mask, bgr=self.pipeline.bgr)
                result = replace(result, map_from_cam=self._in_map.follow(result, frames[0], **how))
        spent = {**self._spent, "total": sum(self._spent.values())}
        self._times.append(spent)
        if self.choice is None or self._planned:
            self._planned = False  # a first frame also measures, and those of a new size select kernels
        else:  # plan anew where frames take longer, since other programs run, or no longer do
            predicted = self.choice.predicted_ms / self.choice.pace
            self._pace = updated_pace(self._pace, spent["total"], predicted)
            if abs(self._pace - self.choice.pace) > 0.1 * self.choice.pace:
                self._plan()
        return replace(result, milliseconds=spent)
