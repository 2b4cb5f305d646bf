"""What a sequence says of one frame; NumPy only, C-contiguous.

Letters for shapes: N keypoints of the frame, K links. A pose T_a_to_b (4, 4) takes points of a to points of
b; cameras look along z, x is right, y is down. The world is the camera of the first frame.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

FrameStatus = Literal[
    "first",  # nothing before it
    "tracked",  # linked to an earlier frame
    "lost",  # no earlier frame that is kept shows the same; tracks begin anew
    "blank",  # no keypoints (a black frame, a lens covered): it is passed over
    "dropped",  # None instead of a picture
    "out_of_order",  # older than the frame before: it is passed over
]
PoseStatus = Literal[
    "ok",
    "no_camera",  # none was given
    "other_size",  # the frame does not have the size that the camera is for
    "starting",  # one camera only: not enough parallax yet
    "too_few",  # points with a known depth that agree
    "bridged",  # after a loss: the last motion carried on, a guess
    "none",  # the frame was passed over
]


@dataclass(frozen=True, eq=False)
class FrameLinks:
    """Which keypoints of an earlier frame are which of this one."""

    frame: int  # index of the earlier frame
    indices: np.ndarray  # (K, 2) int64: keypoint of the earlier frame, of this one
    scores: np.ndarray  # (K,) float32 in [0, 1]
    consistent: np.ndarray  # (K,) bool: agree with one epipolar geometry; only these carry track ids

    def __len__(self) -> int:
        """The number of links K."""
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class FrameResult:
    """Everything known of one frame when it has been seen; `Tracker.push` returns it.

    >>> import matcher, numpy as np
    >>> frame = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
    >>> result = matcher.Tracker("nearest", max_keypoints=200).push(frame)
    >>> result.index, result.size, len(result.keypoints) == len(result.track_ids)
    (0, (320, 240), True)
    """

    index: int  # frames pushed before it
    timestamp: float | None  # as it was given
    status: FrameStatus
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) when dropped
    keypoints: np.ndarray  # (N, 2) float32 xy pixels
    track_ids: np.ndarray  # (N,) int64, the same number as long as a point is seen; never used again
    track_lengths: np.ndarray  # (N,) int64 frames that the track has been seen in, this one included
    to_previous: FrameLinks | None = None  # the last frame that was not passed over
    to_keyframe: FrameLinks | None = None
    is_keyframe: bool = False
    keyframe: int | None = None  # index of the keyframe that it was compared with; None for the first
    parallax: float | None = None  # median way of the points since the keyframe, in pixels
    kept: float | None = None  # share of the keyframe's tracks that are still seen
    pose_status: PoseStatus = "none"
    cam_from_keyframe: np.ndarray | None = None  # (4, 4) float64
    world_from_cam: np.ndarray | None = None  # (4, 4) float64, camera to world
    right: np.ndarray | None = None  # (N, 2) float32 pixels in the right picture of a pair, NaN where unknown
    depths: np.ndarray | None = None  # (N,) float64 along z, NaN where unknown; metres with a baseline
    milliseconds: dict[str, float] = field(default_factory=dict)  # read, extract, match, verify, pose, total

    @property
    def passed_over(self) -> bool:
        """Whether the frame was left out: nothing is linked to it, neither before nor after."""
        return self.status in ("blank", "dropped", "out_of_order")


@dataclass(frozen=True, eq=False)
class Relocalisation:
    """Where a picture was taken, as far as the kept keyframes know the place."""

    keyframe: int | None  # index of the frame it agrees with best; None: of none
    candidates: tuple[int, ...]  # frames that were tried, the likeliest first
    links: FrameLinks | None = None  # keyframe → picture
    keypoints: np.ndarray | None = None  # (N, 2) float32, of the picture
    cam_from_keyframe: np.ndarray | None = None  # (4, 4); unit translation where no depths are known
    world_from_cam: np.ndarray | None = None  # (4, 4); None where no depths are known
