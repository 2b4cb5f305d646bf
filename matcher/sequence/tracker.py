"""The tracker: frames go in one by one; tracks, keyframes, poses and depths come out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np

from matcher.budget.choice import Choice
from matcher.data.camera import Camera, as_camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.options import LoadOptions
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET
from matcher.refine.refinement import ImagePyramid
from matcher.sequence.clock import Clock
from matcher.sequence.disparity import complete_partners
from matcher.sequence.extraction import FrameExtractor
from matcher.sequence.frames import FrameLinks, FrameResult, FrameStatus, Relocalisation
from matcher.sequence.keyframe_refinement import KeyframeRefinement
from matcher.sequence.keyframes import KeptFrame, KeyframeRule
from matcher.sequence.latency import Latency, StageTimes
from matcher.sequence.linking import Linker
from matcher.sequence.local_map import CANDIDATES, LocalMap
from matcher.sequence.pipelines import check_settings, link_estimator, tracking_pipeline
from matcher.sequence.pose_tracking import PoseTracker
from matcher.sequence.relocalisation import verify_candidates
from matcher.sequence.stereo import partners, within
from matcher.sequence.tracker_maps import TrackerMaps

if TYPE_CHECKING:
    from matcher.sequence.keyframe_map import KeyframeMap


class Tracker(TrackerMaps):
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
    fits, new tracks begin and the last motion is extrapolated.
    """

    def __init__(
        self,
        preset: str | Pipeline = DEFAULT_PRESET,
        camera: Camera | None = None,
        *,
        baseline: float | None = None,
        budget_ms: float | None = None,
        window: int = 30,
        epipolar_window: float | None = None,
        guided: bool = True,
        rule: KeyframeRule = KeyframeRule(),
        keyframe_map: KeyframeMap | None = None,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Set up; nothing is measured or matched before the first frame.

        Args:
            preset: a name in `PRESETS`, or a pipeline, whose estimator and thresholds verify the links (of
                geometry "fundamental").
            camera: a pinhole camera, fx, fy, cx, cy or K (3, 3), for frames of `camera.size` or, where that
                is None, of the first frame's size; it is rescaled for frames of another size
                (`FrameResult.camera`). Without it there are no poses.
            baseline: distance between the cameras of rectified pairs, usually in metres. Poses and depths are
                then in its unit, and depths come from pairs only.
            budget_ms: time for a frame; points and layers are chosen to fit, anew where frames take longer.
            window: number of keyframes held.
            epipolar_window: largest difference of rows, in pixels, of a left/right match; None keeps all.
            guided: search for links that matching missed, near where the others predict them and, in pairs,
                along the rows.
            rule: when a frame becomes a keyframe.
            keyframe_map: takes in every frame that is tracked; `save_map` makes the map.
            options: those of `matcher.load`; geometry can only be "fundamental", and `match_threshold` is 0.2
                unless given.

        Raises:
            UsageError: a value that cannot be used, another geometry, a camera with distortion, or a preset
                without keypoints.
        """
        check_settings(baseline, budget_ms, window, epipolar_window)
        pipeline = tracking_pipeline(preset, options)
        self._frames = FrameExtractor(pipeline, budget_ms)
        self.camera = camera = None if camera is None else as_camera(camera)
        self.baseline, self.budget_ms = baseline, budget_ms
        self._window, self._clock, self._latency = epipolar_window, Clock(), Latency()
        estimation = pipeline.config.estimation
        linker = Linker(link_estimator(pipeline.estimator), estimation.max_epipolar_error, guided)
        poses = PoseTracker(camera, measured=baseline is not None, estimation=estimation)
        refinement = KeyframeRefinement(pipeline.config.refine)
        self._map = LocalMap(linker, poses, window, rule, baseline, refinement)
        self._count, self._watch, self.keyframe_map = 0, StageTimes(), keyframe_map

    @property
    def pipeline(self) -> Pipeline:
        """Reads and extracts frames, and matches those far apart."""
        return self._frames.pipeline

    @property
    def choice(self) -> Choice | None:
        """What the time budget allowed the last frame; None before the first one or without a budget."""
        return self._frames.choice

    def __repr__(self) -> str:
        """One line."""
        parts = [self.pipeline.preset, f"{self._count} frames", f"{len(self.keyframes)} keyframes kept"]
        parts += [] if self.camera is None else [f"camera of f = {self.camera.fx:g} pixels"]
        parts += [] if self.baseline is None else [f"baseline {self.baseline:g}"]
        return f"Tracker({', '.join(parts)})"

    @property
    def keyframes(self) -> tuple[int, ...]:
        """Indices of the frames that are kept as keyframes, oldest first."""
        return tuple(keyframe.index for keyframe in self._map.keyframes)

    @property
    def disparity_offset(self) -> float:
        """Pixels of the camera that disparities of pairs are short of, as the motion has shown so far."""
        return self._map.poses.offset.value

    def latency(self) -> dict[str, dict[str, float]]:
        """Stage → p50, p95, p99 and max in milliseconds, over the last 512 frames that were not skipped."""
        return self._latency.percentiles()

    def forget_latency(self) -> None:
        """Start the percentiles afresh, for example after the first frames, which are slower."""
        self._latency = Latency()

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
        with self._for_a_frame():
            return self._push(frame, None, timestamp, mask)

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
        as in `push`.

        Raises:
            ImageError: also where the images differ in size.
        """
        if left is None or right is None:
            return self.push(None, timestamp)
        with self._for_a_frame():
            return self._push(left, right, timestamp, mask)

    def relocalise(
        self, frame: ImageInput, candidates: int = CANDIDATES, *, mask: Mask | None = None
    ) -> Relocalisation:
        """Find the keyframe that shows the same place as an image; the tracker is unchanged.

        Args:
            frame, mask: as in `push`.
            candidates: number of keyframes that are matched, those of the most similar global descriptor.

        Raises:
            ImageError, UsageError: as in `push`.
        """
        image = self.pipeline.read(frame, mask)
        kept = self._kept(self._frames.extract([image])[0], image)
        likely = self._map.index.candidates(kept, self._map.keyframes, candidates)
        tried = tuple(keyframe.index for keyframe in likely)
        found = verify_candidates(self.pipeline.match_features_batch, self._map.linker, kept, likely)
        if found is None:
            return Relocalisation(None, tried, keypoints=kept.keypoints)
        keyframe, links = found
        T, world = self._map.poses.relative(keyframe, kept, links)
        return Relocalisation(keyframe.index, tried, links, kept.keypoints, T, world)

    def _push(
        self,
        frame: ImageInput | None,
        right: ImageInput | None,
        timestamp: float | None,
        mask: Mask | None,
    ) -> FrameResult:
        self._watch = StageTimes()
        if frame is None:
            return self._pass_over("dropped", timestamp)
        with self._watch.timed("read"):
            images = self._frames.read([frame] if right is None else [frame, right], mask)
        if not self._clock.accepts(timestamp):
            return self._pass_over("out_of_order", timestamp, images[0].size)
        with self._watch.timed("extract"):
            features = self._frames.extract(images)
        if len(features[0]) == 0:
            return self._pass_over("blank", timestamp, images[0].size)
        features = self._frames.within_budget(features, self._watch.milliseconds())
        current, *others = map(self._kept, features, images)
        with self._watch.timed("match"):
            earlier, pair = self._match(features)
        with self._watch.timed("verify"):
            match = self.pipeline.match_features_batch
            status, to_previous, to_keyframe = self._map.link(current, earlier, match)
            lengths = self._map.identify(current, to_previous, to_keyframe)
        self._refine(current, to_keyframe)
        with self._watch.timed("verify"):
            partner = self._look_right(current, others, images, pair)
        with self._watch.timed("pose"):
            found = self._map.place(current, status, to_keyframe)
        self._map.close(current)
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
            camera=self._map.poses.camera_of(current),
            right=partner,
            depths=current.depths.copy() if np.isfinite(current.depths).any() else None,
            **found,
        )
        return self._timed(self._mapped(result, frame, mask))

    def _timed(self, result: FrameResult) -> FrameResult:
        """The result, from whose time the next plan learns."""
        self._latency.add(result.milliseconds)
        self._frames.took(result.milliseconds["total"])
        return result

    def _kept(self, features: Features, image: Image) -> KeptFrame:
        pyramid = None if self.pipeline.config.refine is None else ImagePyramid.of(image)
        return KeptFrame.of(self._count, features, pyramid)

    def _match(self, features: list[Features]) -> tuple[Matches | None, Matches | None]:
        """Matches previous → this and left → right, in one batch."""
        previous, has_right = self._map.previous, len(features) > 1 and len(features[1]) > 0
        pairs = [] if previous is None else [(previous.features, features[0])]
        pairs += [(features[0], features[1])] if has_right else []
        found = self._frames.near.match_features_batch(pairs)
        return (None if previous is None else found[0]), (found[-1] if has_right else None)

    def _refine(self, current: KeptFrame, links: FrameLinks | None) -> None:
        if current.pyramid is not None:
            with self._watch.timed("refine"):
                self._map.refine(current, links)

    def _look_right(
        self, current: KeptFrame, others: list[KeptFrame], images: list[Image], pair: Matches | None
    ) -> np.ndarray | None:
        """Where the right image shows the keypoints, verified and searched; sets their depths."""
        if pair is None:
            return None
        links, _ = self._map.linker.verify(current, others[0], pair)
        right = partners(current.keypoints, others[0].keypoints, links)
        if self._map.linker.guided:
            right = complete_partners((images[0], images[1]), current.keypoints, right)
        if self._window is not None:
            right = within(current.keypoints, right, self._window)
        if self.baseline is not None:
            self._map.poses.measure(current, right, self.baseline)
        return right

    def _pass_over(
        self, status: FrameStatus, timestamp: float | None, size: tuple[int, int] = (0, 0)
    ) -> FrameResult:
        """The result of a skipped frame; the next one is linked to the last frame that was tracked."""
        self._count += 1
        return FrameResult.skipped(self._count - 1, timestamp, status, size, self._watch.milliseconds())
