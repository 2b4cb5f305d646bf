"""What a tracker returns for a frame, and what it keeps of one.

Letters for shapes: N keypoints of the frame, K links. A pose b_from_a (4, 4) takes points in the
coordinates of a to those of b; cameras look along z, x is right, y is down. The world is the camera of the
first frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.refine import ImagePyramid
from matcher.types import Features

FrameStatus = Literal["first", "tracked", "lost", "blank", "dropped", "out_of_order"]
PoseStatus = Literal["ok", "uncertain", "no_camera", "other_size", "starting", "too_few", "bridged", "none"]


@dataclass(frozen=True, eq=False, repr=False)
class FrameLinks:
    """Which keypoints of an earlier frame are which of this one."""

    frame: int  # index of the earlier frame
    indices: np.ndarray  # (K, 2) int64: keypoint of the earlier frame, of this one
    scores: np.ndarray  # (K,) float32 in [0, 1]
    consistent: np.ndarray  # (K,) bool: agree with one epipolar geometry; only these carry track ids

    @property
    def inliers(self) -> np.ndarray:
        """(C, 2) the indices of the consistent ones."""
        return self.indices[self.consistent]

    def __len__(self) -> int:
        """The number of links K."""
        return len(self.indices)

    def __repr__(self) -> str:
        """One line."""
        return f"FrameLinks(to frame {self.frame}, {int(self.consistent.sum())} of {len(self)} consistent)"


@dataclass(frozen=True, eq=False, repr=False)
class FrameResult:
    """Everything known of one frame once it has been seen; `Tracker.push` returns it.

    Its arrays are copies, free to be changed.

    >>> import matcher, numpy as np
    >>> frame = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> result = matcher.Tracker("nearest", max_keypoints=200).push(frame)
    >>> result.index, result.size, len(result.keypoints) == len(result.track_ids)
    (0, (320, 240), True)
    >>> repr(result).startswith("FrameResult(0, first, ")
    True

    Attributes:
        index: number of frames pushed before it.
        timestamp: seconds, as it was given, or None.
        status: "first": there is none before it; "tracked": linked to an earlier frame; "lost": linked to no
            frame that is still held, so new tracks begin. The others are skipped: "blank" (no keypoints: a
            black frame, a lens covered), "dropped" (None instead of an image), "out_of_order" (older than the
            frame before).
        size: (width, height) in pixels; (0, 0) when dropped.
        keypoints: (N, 2) float32 xy pixels.
        track_ids: (N,) int64, the same number as long as a point is seen; never used again.
        track_lengths: (N,) int64 frames that the track has been seen in, this one included.
        to_previous: links to the last frame that was not skipped.
        to_keyframe: links to the keyframe.
        is_keyframe: whether later frames are compared with this one.
        keyframe: index of the keyframe it is linked to; None for the first.
        parallax: median displacement of the keypoints since the keyframe, pixels.
        kept: share of the keyframe's links still seen; with pairs, of the close ones if those are fewer.
        pose_status: "ok": measured; "uncertain": measured, but the points leave the camera's position open by
            more than a tenth of its last step, as when all are far away, a third of them moves otherwise, as
            cars do, one camera has just begun, another motion explains half as much of the scene, or the
            motion has changed by more than
            a half at once; "no_camera": none was given;
            "other_size": the frame's sides have another ratio than those of the images that the camera is
            for; "starting": one camera only, not enough parallax yet; "too_few" points of known depth
            agree with a pose; "bridged": tracking was lost, and the pose is the last motion, extrapolated;
            "none": the frame was skipped.
        cam_from_keyframe: (4, 4) float64, or None.
        world_from_cam: (4, 4) float64, or None.
        camera: the tracker's, rescaled where the frame has another size; None: unknown.
        right: (N, 2) float32 pixels in the right image of a pair, NaN where unknown.
        depths: (N,) float64 along z, NaN where unknown; in the baseline's unit, with one camera in any unit.
        map_from_cam: (4, 4) float64, in the map of `Tracker.load_map`; None where it is not known.
        milliseconds: by stage, and their "total".
    """

    index: int
    timestamp: float | None
    status: FrameStatus
    size: tuple[int, int]
    keypoints: np.ndarray
    track_ids: np.ndarray
    track_lengths: np.ndarray
    to_previous: FrameLinks | None = None
    to_keyframe: FrameLinks | None = None
    is_keyframe: bool = False
    keyframe: int | None = None
    parallax: float | None = None
    kept: float | None = None
    pose_status: PoseStatus = "none"
    cam_from_keyframe: np.ndarray | None = None
    world_from_cam: np.ndarray | None = None
    camera: Camera | None = None
    right: np.ndarray | None = None
    depths: np.ndarray | None = None
    map_from_cam: np.ndarray | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def skipped(
        cls, index: int, timestamp: float | None, status: FrameStatus, size: tuple[int, int], **known: object
    ) -> FrameResult:
        """The result of a frame that is passed over."""
        nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return cls(index, timestamp, status, size, *nothing, **known)

    @property
    def is_measured(self) -> bool:
        """Whether it has a pose in the world that was measured, be it uncertain."""
        return self.pose_status in ("ok", "uncertain") and self.world_from_cam is not None

    @property
    def passed_over(self) -> bool:
        """Whether the frame was skipped: no other frame is linked to it."""
        return self.status in ("blank", "dropped", "out_of_order")

    def __repr__(self) -> str:
        """One line."""
        parts = [f"{self.index}", self.status.replace("_", " ")]
        if not self.passed_over:
            parts.append(f"{len(self.keypoints)} keypoints")
            parts.append(f"{int(np.count_nonzero(self.track_lengths > 1))} seen before")
        if self.depths is not None:
            parts.append(f"{int(np.isfinite(self.depths).sum())} with depth")
        if self.pose_status != "none":
            parts.append(f"pose {self.pose_status.replace('_', ' ')}")
        parts += ["keyframe"] if self.is_keyframe else []
        if "total" in self.milliseconds:
            parts.append(f"{self.milliseconds['total']:.0f} ms")
        return f"FrameResult({', '.join(parts)})"


class MeasuredDisparities(NamedTuple):
    """What a rectified pair says of the points of its left image."""

    disparities: np.ndarray  # (N,) pixels of the camera, as measured; NaN where unknown
    deviations: np.ndarray  # (N,) their standard deviations
    offset: float  # that was added to them for the depths
    focal_baseline: float  # depth times disparity


@dataclass(eq=False)
class KeptFrame:
    """A frame's features and what has become known of it; nothing of it is extracted or matched twice."""

    index: int
    features: Features
    keypoints: np.ndarray  # (N, 2) float32 pixels
    descriptors: np.ndarray  # (N, D) float32
    track_ids: np.ndarray  # (N,) int64
    depths: np.ndarray  # (N,) float64, NaN where unknown
    inverse_errors: np.ndarray  # (N,) standard deviations of inverse depths, NaN where unknown
    world_from_cam: np.ndarray | None = None  # (4, 4)
    most_links: int = 0  # that a later frame had to it
    most_close_links: int = 0  # the same, of points that are close
    begins_anew: bool = False  # it was linked to nothing before it
    measured: MeasuredDisparities | None = None  # where depths come from a pair
    pyramid: ImagePyramid | None = None  # its image; None where points are not refined

    @classmethod
    def of(cls, index: int, features: Features, pyramid: ImagePyramid | None) -> KeptFrame:
        """A frame of which nothing is known yet but its features, and its image where points are refined."""
        points, descriptors = (
            np.array(to_numpy(values), np.float32)  # copied: refinement moves the points of the frame only
            for values in (features.keypoints, features.descriptors)
        )
        unknown = np.full(len(points), -1, np.int64), *np.full((2, len(points)), np.nan)
        return cls(index, features, points, descriptors, *unknown, pyramid=pyramid)

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in stored pixels."""
        width, height = self.features.size.tolist()
        return int(width), int(height)

    @property
    def scale(self) -> tuple[float, float]:
        """(sx, sy): size in which its points were found / stored size."""
        sx, sy = self.features.scale.tolist()
        return sx, sy


class Clock:
    """Distinguishes a frame that came too late from a clock that was set back.

    A frame older than the last accepted one is refused. If the next one is older too, but not older than the
    refused one, the clock has been set back, and from then on its new time counts.
    """

    def __init__(self) -> None:
        self._last, self._refused = -math.inf, math.inf

    def accepts(self, timestamp: float | None) -> bool:
        """Whether a frame of this time (seconds; None: unknown, always accepted) is in order.

        Raises:
            UsageError: a time that is not a finite number.
        """
        if timestamp is None:
            return True
        if not isinstance(timestamp, (int, float)) or not math.isfinite(timestamp):
            raise UsageError(f"a timestamp must be a finite number of seconds, not {timestamp!r}")
        if timestamp < self._last and timestamp < self._refused:
            self._refused = timestamp
            return False
        self._last, self._refused = timestamp, math.inf
        return True


class StageTimes:
    """Milliseconds of the stages of one frame."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what passes to a stage."""
        start = perf_counter()
        yield
        self._spent[stage] = self._spent.get(stage, 0.0) + 1000 * (perf_counter() - start)

    def milliseconds(self) -> dict[str, float]:
        """Stage → milliseconds, and their total."""
        return {**self._spent, "total": sum(self._spent.values())}


def percentiles(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Stage → {"p50", "p95", "p99", "max"} of the milliseconds of frames; empty where there is none."""
    table = {}
    for stage in dict.fromkeys(stage for row in rows for stage in row):
        values = [row[stage] for row in rows if stage in row]
        found = np.percentile(values, (50, 95, 99, 100)).tolist()
        table[stage] = dict(zip(("p50", "p95", "p99", "max"), found, strict=True))
    return table
