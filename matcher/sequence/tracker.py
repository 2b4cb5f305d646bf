"""The session: one frame after the other in; tracks, keyframes, poses and depth out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Unpack

import numpy as np

from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.errors import UsageError
from matcher.options import LoadOptions
from matcher.pipeline import Picture, Pipeline
from matcher.presets import DEFAULT_PRESET
from matcher.sequence.budget import Choice
from matcher.sequence.clock import Clock
from matcher.sequence.disparity import complete_partners
from matcher.sequence.extraction import FrameExtractor
from matcher.sequence.frames import FrameResult, FrameStatus, Relocalisation
from matcher.sequence.keyframes import KeptFrame, KeyframeRule
from matcher.sequence.latency import Latency
from matcher.sequence.linking import Linker
from matcher.sequence.local_map import CANDIDATES, LocalMap
from matcher.sequence.pipelines import open_pipeline
from matcher.sequence.pose_tracking import PoseTracker
from matcher.sequence.relocalisation import verify_candidates
from matcher.sequence.stereo import partners, within


class Tracker:
    """Follows points through frames that come in order; what it says of each is NumPy.

    >>> import matcher, numpy as np
    >>> tracker = matcher.Tracker("nearest", max_keypoints=200)
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 340), dtype=np.uint8)
    >>> for shift in (0, 4):
    ...     result = tracker.push(scene[:, shift : shift + 320])
    >>> result.index, bool(result.track_lengths.max() == 2)
    (1, True)

    A frame's features are extracted once and matched to the last one by the first half of the layers, which
    views so near are content with; links to the keyframe follow from tracks and a search near them. Blank,
    dropped and late frames are passed over; after a loss the kept keyframes are tried, by all layers, and
    where none fits tracks begin anew and the last motion is carried on.
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
        **options: Unpack[LoadOptions],
    ) -> None:
        """Set up; nothing is measured or matched before the first frame.

        Args:
            preset: a name in `PRESETS`, or a pipeline.
            camera: in pixels of the first frame; without it there are no poses.
            baseline: distance between the cameras of rectified pairs, for depth; its unit is that of poses,
                which then come from pairs alone.
            budget_ms: for a frame; points and layers are chosen for it at the first frame (`choice`).
            window: keyframes that are kept.
            epipolar_window: pixels that the rows of a left/right match may differ by; None keeps all matches.
            guided: search near predicted places for links that matching missed, and along the rows of pairs.
            rule: when a frame becomes a keyframe.
            options: as `matcher.load` takes them, but for geometry; `match_threshold` is 0.2 where
                it is not given.

        Raises:
            UsageError: a value that cannot be used, or a preset without keypoints.
        """
        _check(baseline, budget_ms, window, epipolar_window)
        pipeline = open_pipeline(preset, options)
        self._frames = FrameExtractor(pipeline, budget_ms)
        self.camera, self.baseline, self.budget_ms = camera, baseline, budget_ms
        self._window, self._clock, self._latency = epipolar_window, Clock(), Latency()
        estimation = pipeline.config.estimation
        linker = Linker(pipeline.estimator, estimation.max_epipolar_error, guided)
        poses = PoseTracker(camera, measured=baseline is not None, estimation=estimation)
        self._map = LocalMap(linker, poses, window, rule, baseline)
        self._count = 0
        self._spent: dict[str, float] = {}

    @property
    def pipeline(self) -> Pipeline:
        """What frames are read, extracted and, where they are far apart, matched with."""
        return self._frames.pipeline

    @property
    def choice(self) -> Choice | None:
        """What a time budget led to; None before the first frame and without a budget."""
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

    def latency(self) -> dict[str, dict[str, float]]:
        """Stage → p50, p95, p99 and max in milliseconds, of the last 512 frames that were not passed over."""
        return self._latency.percentiles()

    def forget_latency(self) -> None:
        """Begin the percentiles anew, as after the first frames, which are slower."""
        self._latency = Latency()

    def push(self, frame: Picture | None, timestamp: float | None = None) -> FrameResult:
        """Take in the next frame.

        Args:
            frame: a path, an array as `Pipeline.match` takes it, or None for one that was dropped.
            timestamp: in seconds; a frame older than the last one is passed over, unless the clock was set
                back for good.

        Raises:
            ImageError: the picture cannot be read; the sequence is as before, so None may follow.
            UsageError: an array or a timestamp that cannot be used; likewise.
        """
        return self._push(frame, None, timestamp)

    def push_stereo(
        self, left: Picture | None, right: Picture | None, timestamp: float | None = None
    ) -> FrameResult:
        """Take in a rectified pair; keypoints are the left picture's, with depth where the right has them.

        Without a camera and a baseline there is no depth. Arguments and errors as in `push`.

        Raises:
            ImageError: also where the pictures differ in size.
        """
        if left is None or right is None:
            return self._push(None, None, timestamp)
        return self._push(left, right, timestamp)

    def relocalise(self, frame: Picture, candidates: int = CANDIDATES) -> Relocalisation:
        """Find the kept keyframe that shows the same place; the sequence is left as it was.

        Args:
            frame: as in `push`.
            candidates: keyframes that are matched, the likeliest by global descriptor.

        Raises:
            ImageError, UsageError: as in `push`.
        """
        kept = self._kept(self._frames.extract([self.pipeline.read(frame)])[0])
        likely = self._map.index.candidates(kept, self._map.keyframes, candidates)
        tried = tuple(keyframe.index for keyframe in likely)
        found = verify_candidates(self.pipeline.match_features_batch, self._map.linker, kept, likely)
        if found is None:
            return Relocalisation(None, tried, keypoints=kept.keypoints)
        keyframe, links = found
        T, world = self._map.poses.relative(keyframe, kept, links)
        return Relocalisation(keyframe.index, tried, links, kept.keypoints, T, world)

    def _push(self, frame: Picture | None, right: Picture | None, timestamp: float | None) -> FrameResult:
        self._spent = {}
        if frame is None:
            return self._pass_over("dropped", timestamp)
        with self._timed("read"):
            images = self._frames.read([frame] if right is None else [frame, right])
        if not self._clock.accepts(timestamp):
            return self._pass_over("out_of_order", timestamp, images[0].size)
        with self._timed("extract"):
            features = self._frames.extract(images)
        if len(features[0]) == 0:
            return self._pass_over("blank", timestamp, images[0].size)
        current, *others = [self._kept(each) for each in features]
        with self._timed("match"):
            earlier, pair = self._match(features)
        with self._timed("verify"):
            match = self.pipeline.match_features_batch
            status, to_previous, to_keyframe = self._map.link(current, earlier, match)
            lengths = self._map.identify(current, to_previous, to_keyframe)
            partner = self._look_right(current, others, images, pair)
        with self._timed("pose"):
            found = self._map.place(current, status, to_keyframe)
        milliseconds = {**self._spent, "total": sum(self._spent.values())}
        self._latency.add(milliseconds)
        self._map.close(current)
        self._count += 1
        return FrameResult(
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
            milliseconds=milliseconds,
            **found,
        )

    def _kept(self, features: Features) -> KeptFrame:
        arrays = [tensor.float().cpu().numpy() for tensor in (features.keypoints, features.descriptors)]
        points, descriptors = (np.ascontiguousarray(array) for array in arrays)
        return KeptFrame(
            index=self._count,
            features=features,
            keypoints=points,
            descriptors=descriptors,
            track_ids=np.full(len(points), -1, np.int64),
            depths=np.full(len(points), np.nan),
        )

    def _match(self, features: list[Features]) -> tuple[Matches | None, Matches | None]:
        """Matches previous → this and left → right, in one batch."""
        previous, has_right = self._map.previous, len(features) > 1 and len(features[1]) > 0
        pairs = [] if previous is None else [(previous.features, features[0])]
        pairs += [(features[0], features[1])] if has_right else []
        found = self._frames.near.match_features_batch(pairs)
        return (None if previous is None else found[0]), (found[-1] if has_right else None)

    def _look_right(
        self, current: KeptFrame, others: list[KeptFrame], images: list[Image], pair: Matches | None
    ) -> np.ndarray | None:
        """The points in the right picture of a pair, verified and searched; sets the depths."""
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
        """A frame that nothing is linked to; the next one is linked to the last that was seen."""
        self._count += 1
        milliseconds = {**self._spent, "total": sum(self._spent.values())}
        return FrameResult(
            index=self._count - 1,
            timestamp=timestamp,
            status=status,
            size=size,
            keypoints=np.zeros((0, 2), np.float32),
            track_ids=np.zeros(0, np.int64),
            track_lengths=np.zeros(0, np.int64),
            milliseconds=milliseconds,
        )

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self._spent[stage] = 1000 * (perf_counter() - start)


def _check(
    baseline: float | None, budget_ms: float | None, window: int, epipolar_window: float | None
) -> None:
    for name, value in (
        ("baseline", baseline),
        ("budget_ms", budget_ms),
        ("epipolar_window", epipolar_window),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name} must be a positive number, not {value!r}")
    if type(window) is not int or window < 2:
        raise UsageError(f"window must be a whole number of at least 2 keyframes, not {window!r}")
