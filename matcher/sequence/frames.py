"""What a tracker returns for a frame, and what it keeps of one.

Letters for shapes: N keypoints of the frame, K links. A pose b_from_a (4, 4) takes points in the
coordinates of a to those of b; cameras look along z, x is right, y is down. The world is the camera of the
first frame.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.refine import ImagePyramid
from matcher.types import Features, to_numpy

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
        return len(self.indices)

    def __repr__(self) -> str:
        return f"FrameLinks(to frame {self.frame}, {int(self.consistent.sum())} of {len(self)} consistent)"


@dataclass(frozen=True, eq=False, repr=False)
class FrameResult:
    """Everything known of one frame once it has been seen; `Tracker.push` returns it.

    >>> import matcher, numpy as np
    >>> frame = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> result = matcher.Tracker("nearest", max_keypoints=200).push(frame)
    >>> result.index, result.size, len(result.keypoints) == len(result.track_ids)
    (0, (320, 240), True)

    `status` is "first": there is none before it; "tracked": linked to an earlier frame; or "lost": linked to
    none that is still held, so new tracks begin. Others are skipped: "blank" (no keypoints: a black frame, a
    lens covered), "dropped" (None instead of an image), "out_of_order" (older than the frame before).

    `pose_status` is "ok": measured; "uncertain": measured, but the points, or how exactly pairs are known to
    be rectified, leave more than a tenth of the last step open, as when all are far away; a third of them
    moves otherwise, as cars do; one camera has just begun, or its unit is known to less than 2 %; another
    motion explains half as much; or it has changed by more than a half at once; "no_camera": none was given;
    "other_size": the frame's sides have another ratio than those of the images that the camera is for;
    "starting": one camera only, and there is not enough parallax yet, or too much moves; "too_few" points of
    known depth agree with a pose; "bridged": tracking was lost, and the pose is the last motion,
    extrapolated; "none": the frame was skipped.

    Poses of one `stretch` hang together by measured steps, in one unit of length. Each "bridged" frame begins
    another one: how the camera moved between two, and with one camera the ratio of their units, is a guess.

    The frame is the `index`-th pushed, from 0; `timestamp` is in seconds, `size` (width, height) in pixels.
    `keypoints` are (N, 2) float32 xy pixels; each has in `track_ids` an int64 number that it keeps as long as
    it is seen, in `track_lengths` the frames it was seen in, in `depths` its z, in the baseline's unit or any
    with one camera, and in `right` its pixel (N, 2) in a pair's right image, both NaN where unknown.
    `to_previous` links to the last frame that was not skipped, `to_keyframe` to the one of index `keyframe`;
    later frames are compared with one that `is_keyframe`. `parallax` is the median displacement since the
    keyframe, pixels; `kept` the share of its links still seen (of a pair's close ones, if fewer). Poses are
    (4, 4) float64: `cam_from_keyframe`, `world_from_cam`, and `map_from_cam`, in `Tracker.load_map`'s map.
    `camera` is rescaled to the frame's size; `milliseconds` are by stage. None: not known. Arrays are copies.
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
    stretch: int = 0
    camera: Camera | None = None
    right: np.ndarray | None = None
    depths: np.ndarray | None = None
    map_from_cam: np.ndarray | None = None
    milliseconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """Whether it has a pose in the world that was measured, be it uncertain."""
        return self.pose_status in ("ok", "uncertain") and self.world_from_cam is not None

    @property
    def passed_over(self) -> bool:
        """Whether the frame was skipped: no other frame is linked to it."""
        return self.status in ("blank", "dropped", "out_of_order")

    def __repr__(self) -> str:
        parts = [f"{self.index}", self.status.replace("_", " ")]
        if not self.passed_over:
            seen = int(np.count_nonzero(self.track_lengths > 1))
            parts += [f"{len(self.keypoints)} keypoints", f"{seen} seen before"]
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
    offset_error: float  # its standard deviation
    focal_baseline: float  # depth times disparity


@dataclass(eq=False)
class KeptFrame:
    """A frame's features and what has become known of it; nothing of it is extracted or matched twice."""

    index: int
    features: Features
    pyramid: ImagePyramid | None = None  # its image; None where points are not refined
    world_from_cam: np.ndarray | None = None  # (4, 4)
    stretch: int = 0  # as in `FrameResult`
    unit_doubt: float = 0.0  # of one camera's unit of length, since it was carried here by few points
    most_links: int = 0  # that a later frame had to it
    most_close_links: int = 0  # the same, of points that are close
    begins_anew: bool = False  # it was linked to nothing before it
    measured: MeasuredDisparities | None = None  # where depths come from a pair

    def __post_init__(self) -> None:
        # Copied: refinement moves the points of the frame only.
        self.keypoints = np.array(to_numpy(self.features.keypoints), np.float32)  # (N, 2) pixels
        self.descriptors = np.array(to_numpy(self.features.descriptors), np.float32)  # (N, D)
        self.track_ids = np.full(len(self.keypoints), -1, np.int64)  # (N,)
        # (N,) depths, and standard deviations of inverse depths, now and before later frames saw the points;
        # NaN where unknown
        self.depths, self.inverse_errors, self.first_errors = np.full((3, len(self.keypoints)), np.nan)
        self.size: tuple[int, int] = self.features.image_size  # (width, height) in stored pixels
        # (sx, sy): size in which its points were found / stored size
        self.scale: tuple[float, float] = tuple(self.features.scale.tolist())


class Clock:
    """Distinguishes a frame that came too late from a clock that was set back. A frame older than the last
    accepted one is refused. If the next one is older too, but not older than the refused one, the clock has
    been set back, and from then on its new time counts."""

    def __init__(self) -> None:
        self._last, self._refused = -math.inf, math.inf

    def accepts(self, timestamp: float | None) -> bool:
        """Whether a frame of this time (seconds; None: unknown, accepted) is in order; `UsageError`: none."""
        if timestamp is None:
            return True
        if not isinstance(timestamp, numbers.Real) or not math.isfinite(timestamp):
            raise UsageError(f"a timestamp must be a finite number of seconds, not {timestamp!r}")
        if timestamp < min(self._last, self._refused):
            self._refused = timestamp
            return False
        self._last, self._refused = timestamp, math.inf
        return True
