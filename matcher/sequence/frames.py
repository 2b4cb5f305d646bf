"""What a tracker returns for a frame; NumPy only, C-contiguous.

Letters for shapes: N keypoints of the frame, K links. A pose b_from_a (4, 4) takes points in the
coordinates of a to those of b; cameras look along z, x is right, y is down. The world is the camera of the
first frame.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from matcher.data.camera import Camera

FrameStatus = Literal[
    "first",  # there is none before it
    "tracked",  # linked to an earlier frame
    "lost",  # linked to no frame that is still held; new tracks begin
    "blank",  # no keypoints (a black frame, a lens covered): it is skipped
    "dropped",  # None instead of an image
    "out_of_order",  # older than the frame before: it is skipped
]
PoseStatus = Literal[
    "ok",
    "no_camera",  # none was given
    "other_size",  # the frame's sides have another ratio than those of the images that the camera is for
    "starting",  # one camera only: not enough parallax yet
    "too_few",  # points of known depth agree with a pose
    "bridged",  # tracking was lost: the last motion, extrapolated
    "none",  # the frame was skipped
]


@dataclass(frozen=True, eq=False, repr=False)
class FrameLinks:
    """Which keypoints of an earlier frame are which of this one."""

    frame: int  # index of the earlier frame
    indices: np.ndarray  # (K, 2) int64: keypoint of the earlier frame, of this one
    scores: np.ndarray  # (K,) float32 in [0, 1]
    consistent: np.ndarray  # (K,) bool: agree with one epipolar geometry; only these carry track ids

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
    """

    index: int  # frames pushed before it
    timestamp: float | None  # as it was given
    status: FrameStatus
    size: tuple[int, int]  # (width, height) in pixels; (0, 0) when dropped
    keypoints: np.ndarray  # (N, 2) float32 xy pixels
    track_ids: np.ndarray  # (N,) int64, the same number as long as a point is seen; never used again
    track_lengths: np.ndarray  # (N,) int64 frames that the track has been seen in, this one included
    to_previous: FrameLinks | None = None  # the last frame that was not skipped
    to_keyframe: FrameLinks | None = None
    is_keyframe: bool = False
    keyframe: int | None = None  # index of the keyframe it is linked to; None for the first
    parallax: float | None = None  # median displacement of the keypoints since the keyframe, pixels
    kept: float | None = (
        None  # share of the keyframe's links still seen; with pairs, of the close ones if fewer
    )
    pose_status: PoseStatus = "none"
    cam_from_keyframe: np.ndarray | None = None  # (4, 4) float64
    world_from_cam: np.ndarray | None = None  # (4, 4) float64
    camera: Camera | None = None  # the tracker's, rescaled where the frame has another size; None: unknown
    right: np.ndarray | None = None  # (N, 2) float32 pixels in the right image of a pair, NaN where unknown
    depths: np.ndarray | None = None  # (N,) float64 along z, NaN where unknown; metres with a baseline
    map_from_cam: np.ndarray | None = None  # (4, 4) float64, in the map of `Tracker.load_map`
    milliseconds: dict[str, float] = field(default_factory=dict)  # by stage

    @classmethod
    def skipped(
        cls,
        index: int,
        timestamp: float | None,
        status: FrameStatus,
        size: tuple[int, int],
        milliseconds: dict[str, float],
    ) -> FrameResult:
        """The result of a frame that is passed over."""
        nothing = np.zeros((0, 2), np.float32), np.zeros(0, np.int64), np.zeros(0, np.int64)
        return cls(index, timestamp, status, size, *nothing, milliseconds=milliseconds)

    @property
    def passed_over(self) -> bool:
        """Whether the frame was skipped: no other frame is linked to it."""
        return self.status in ("blank", "dropped", "out_of_order")

    @property
    def T_to_world(self) -> np.ndarray | None:
        """The old name of `world_from_cam`."""
        _warn_renamed("T_to_world", "world_from_cam")
        return self.world_from_cam

    @property
    def T_keyframe_to_frame(self) -> np.ndarray | None:
        """The old name of `cam_from_keyframe`."""
        _warn_renamed("T_keyframe_to_frame", "cam_from_keyframe")
        return self.cam_from_keyframe

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


@dataclass(frozen=True, eq=False, repr=False)
class Relocalisation:
    """Where an image was taken, as far as the kept keyframes show the same place."""

    keyframe: int | None  # index of the keyframe with the most consistent links; None: not found
    candidates: tuple[int, ...]  # keyframes that were matched, the most similar first
    links: FrameLinks | None = None  # keyframe → image
    keypoints: np.ndarray | None = None  # (N, 2) float32, of the image
    cam_from_keyframe: np.ndarray | None = None  # (4, 4); unit translation where no depths are known
    world_from_cam: np.ndarray | None = None  # (4, 4); None where no depths are known

    def __repr__(self) -> str:
        """One line."""
        if self.keyframe is None:
            return f"Relocalisation(no keyframe, {len(self.candidates)} tried)"
        pose = (
            "with a pose in the world" if self.world_from_cam is not None else "without a pose in the world"
        )
        links = 0 if self.links is None else int(self.links.consistent.sum())
        return f"Relocalisation(keyframe {self.keyframe}, {links} consistent links, {pose})"


def _warn_renamed(old: str, new: str) -> None:
    warnings.warn(f"FrameResult.{old} is now FrameResult.{new}", DeprecationWarning, stacklevel=3)
