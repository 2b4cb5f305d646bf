"""The record of a run: tracks, trajectory, arrays to save, errors against ground truth."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from matcher.errors import UsageError
from matcher.sequence.frames import FrameResult
from matcher.sequence.trajectory import SegmentError, align, path_length, segment_errors

_SAME_TIME = 0.02  # seconds between a frame and the true pose it is compared with


class TrackingLog:
    """Collects results frame by frame; 40 bytes per keypoint."""

    def __init__(self) -> None:
        self._frames: list[tuple[int, float, str, str, bool]] = []
        self._poses: list[np.ndarray] = []
        self._map_poses: list[np.ndarray] = []
        self.in_map = False  # the trajectory is that in the map which was loaded
        self.localized = 0  # frames that were localised in it; the others follow by tracking
        self.problem: str | None = None  # why nothing more was found in a map
        self._points: list[np.ndarray] = []  # (N, 3) float32 x, y, depth
        self._ids: list[np.ndarray] = []
        self._lengths: Counter[int] = Counter()

    def add(self, result: FrameResult) -> None:
        """Take in the next frame."""
        time = np.nan if result.timestamp is None else result.timestamp
        self._frames.append((result.index, time, result.status, result.pose_status, result.is_keyframe))
        for column, pose in ((self._poses, result.world_from_cam), (self._map_poses, result.map_from_cam)):
            column.append(np.full((4, 4), np.nan) if pose is None else pose)
        depths = np.full(len(result.keypoints), np.nan) if result.depths is None else result.depths
        self._points.append(np.column_stack([result.keypoints, depths]).astype(np.float32))
        self._ids.append(result.track_ids)
        self._lengths.update(result.track_ids.tolist())

    def complete(self, map_poses: Mapping[int, np.ndarray]) -> None:
        """Take in poses in the map, (4, 4) by frame, that were not known, or not as well, in time."""
        for row, (index, *_) in enumerate(self._frames):
            if index in map_poses:
                self._map_poses[row] = map_poses[index]

    def __len__(self) -> int:
        """Frames."""
        return len(self._frames)

    def counts(self) -> dict[str, int]:
        """How many frames had each status, and how many became keyframes."""
        found = Counter(row[2] for row in self._frames)
        return {**found, "keyframes": sum(row[4] for row in self._frames)}

    def mean_track_length(self) -> float:
        """Mean number of frames of a track seen in two or more; 0 without any."""
        lengths = [length for length in self._lengths.values() if length > 1]
        return float(np.mean(lengths)) if lengths else 0.0

    def trajectory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Frames (P,) int64 that have a pose, their timestamps (P,) and poses (P, 4, 4) camera to world.

        A frame without a timestamp has its index as one. Where `in_map` is set, poses are those in the map.
        """
        given = self._map_poses if self.in_map else self._poses
        known = np.array([i for i, pose in enumerate(given) if np.isfinite(pose).all()], np.int64)
        times = np.array([row[1] for row in self._frames], np.float64)
        times = np.where(np.isfinite(times), times, np.arange(len(times)))
        poses = np.array([given[i] for i in known]).reshape(-1, 4, 4)
        return known, times[known], poses

    def keyframe_rows(self) -> list[int]:
        """Rows of the trajectory that are keyframes."""
        known, _, _ = self.trajectory()
        return [row for row, index in enumerate(known.tolist()) if self._frames[index][4]]

    def as_npz(self) -> bytes:
        """An .npz file: a row per frame, and a row for each observation of a track.

        frame_index, timestamp, status, pose_status, is_keyframe (F,); world_from_cam and map_from_cam
        (F, 4, 4), NaN where there is none; observation_frame, observation_track (O,); observation_xy (O, 2);
        observation_depth (O,).
        """
        columns = list(zip(*self._frames, strict=True)) or [()] * 5
        points = np.concatenate(self._points) if self._points else np.zeros((0, 3), np.float32)
        sizes = [len(ids) for ids in self._ids]
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            frame_index=np.array(columns[0], np.int64),
            timestamp=np.array(columns[1], np.float64),
            status=np.array(columns[2], np.str_),
            pose_status=np.array(columns[3], np.str_),
            is_keyframe=np.array(columns[4], bool),
            world_from_cam=np.array(self._poses).reshape(-1, 4, 4),
            map_from_cam=np.array(self._map_poses).reshape(-1, 4, 4),
            observation_frame=np.repeat(np.arange(len(sizes)), sizes).astype(np.int64),
            observation_track=np.concatenate(self._ids) if self._ids else np.zeros(0, np.int64),
            observation_xy=points[:, :2],
            observation_depth=points[:, 2],
        )
        return buffer.getvalue()

    def compared_with(
        self,
        times: np.ndarray | None,
        ground_truth: np.ndarray,
        *,
        with_scale: bool,
    ) -> tuple[np.ndarray, np.ndarray, list[SegmentError]]:
        """Estimated and true poses of the frames that have both, aligned, and the errors of segments.

        Args:
            times: (T,) seconds of the true poses; None: they are those of the frames in order.
            ground_truth: (T, 4, 4) camera to world.
            with_scale: one camera does not know the scale; it is fitted.

        Raises:
            UsageError: fewer than two frames have a true pose.
        """
        known, stamps, poses = self.trajectory()
        rows = (
            nearest_rows(stamps, times)
            if times is not None
            else np.where(known < len(ground_truth), known, -1)
        )
        both = rows >= 0
        if np.count_nonzero(both) < 2:
            raise UsageError(
                f"{np.count_nonzero(both)} frames have an estimated and a true pose, and 2 are needed; "
                "check that the poses are those of this sequence"
            )
        true = ground_truth[rows[both]]
        found = align(true, poses[both], with_scale=with_scale)
        return found, true, segment_errors(true, found, _lengths_for(true))


def nearest_rows(stamps: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(P,) row of the true time nearest to each stamp, −1 where none is within 20 ms."""
    order = np.argsort(times)
    right = (
        np.clip(np.searchsorted(times[order], stamps), 1, len(times) - 1) if len(times) > 1 else 0 * stamps
    )
    right = right.astype(np.int64)
    left = np.maximum(right - 1, 0)
    closer = np.abs(times[order][left] - stamps) <= np.abs(times[order][right] - stamps)
    best = order[np.where(closer, left, right)]
    return np.where(np.abs(times[best] - stamps) <= _SAME_TIME, best, -1)


def _lengths_for(ground_truth: np.ndarray) -> Sequence[float]:
    """10, 20, 40 … m while two segments of that length would fit into the path; a third of a short one."""
    total = float(path_length(ground_truth)[-1])
    fitting = [float(length) for length in (10, 20, 40, 100, 200, 400, 800) if 1.25 * length <= total]
    return fitting or [total / 3]
