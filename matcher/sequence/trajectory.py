"""Trajectories: TUM and KITTI files, the record of a run, and errors against true poses."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from matcher.cameras import Camera, kitti_lines, tum_lines
from matcher.errors import UsageError
from matcher.files import read_text, write_whole
from matcher.geometry import as_rotation, check_poses
from matcher.sequence.frames import FrameResult
from matcher.sequence.pose_tracking import MIN_POINTS


def changes_of(stretches: Sequence[int]) -> list[int]:
    """The rows from which poses are of another stretch (`FrameResult`) than before."""
    return [row for row, (a, b) in enumerate(pairwise(stretches), 1) if a != b]


def write_trajectory(
    path: str | Path,
    timestamps: Sequence[float],
    poses: Sequence[np.ndarray],
    *,
    frames: int | None = None,
    bridged: Sequence[bool] = (),
    stretches: Sequence[int] = (),
) -> None:
    """Write poses world_from_cam (4, 4) of times in seconds as TUM's lines, `t x y z qx qy qz qw`. Where the
    suffix is .kitti, they are KITTI's, 12 numbers, 3×4, refused if the sequence has more `frames`. A comment
    lists poses that are `bridged`: extrapolated instead of measured, others where another of the `stretches`
    begins: from there on poses are relative to an extrapolated one, or in stretch 0 to the first."""
    path = Path(path)
    if path.suffix.lower() != ".kitti":
        lines, names = tum_lines(timestamps, poses), [f"{time:.6f}" for time in timestamps]
    elif frames is not None and len(poses) < frames:
        raise UsageError(
            f"{path}: KITTI's lines have no times, and {frames - len(poses)} of {frames} frames have no "
            "measured pose; use .tum"
        )
    else:
        lines, names = kitti_lines(poses), list(map(str, range(len(poses))))
    guessed = " ".join(names[row] for row in np.flatnonzero(bridged))
    comments = [f"# extrapolated, not measured: {guessed}"] if guessed else []
    for row in changes_of(stretches):
        origin = "the first" if stretches[row] == 0 else "an extrapolated"
        comments.append(f"# from here on relative to {origin} pose: {names[row]}")
    write_whole(path, "".join(f"{line}\n" for line in [*comments, *lines]).encode())


def read_poses(path: str | Path) -> tuple[np.ndarray | None, np.ndarray]:
    """Timestamps (N,), or None, and poses world_from_cam (N, 4, 4) from a file of TUM or KITTI."""
    rows, where = [], ""
    try:
        for number, line in enumerate(read_text(path).splitlines(), start=1):
            if line.strip() and not line.startswith("#"):
                where = f"line {number}: "
                rows.append([float(word) for word in line.split()])
                if len(rows[-1]) not in (8, 12) or len(rows[-1]) != len(rows[0]):
                    raise ValueError(f"{len(rows[-1])} numbers")
        where, values = "", np.array(rows)
        if not rows or not np.isfinite(values).all():
            raise ValueError("no pose, or one that is not finite")
        poses = np.tile(np.eye(4), (len(values), 1, 1))
        if values.shape[1] == 12:
            poses[:, :3] = values.reshape(-1, 3, 4)
        else:
            poses[:, :3, :3], poses[:, :3, 3] = as_rotation(values[:, 4:]), values[:, 1:4]
        check_poses(poses)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read as poses ({where}{error!s:.90}); wanted: lines of 8 numbers, t x y z "
            "qx qy qz qw (TUM), or of 12 (KITTI), with spaces between"
        ) from error
    return (values[:, 0] if values.shape[1] == 8 else None), poses


@dataclass(frozen=True)
class SegmentError:
    """Mean error over all segments of one length."""

    length: float  # metres along the true path
    count: int  # segments
    translation: float  # share of the length
    rotation: float  # degrees per metre
    left_out: int = 0  # segments that lead from one stretch to another


def path_length(poses: np.ndarray) -> np.ndarray:
    """(N,) distance travelled up to each pose (N, 4, 4)."""
    steps = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def segment_errors(
    ground_truth: np.ndarray, found: np.ndarray, lengths: Sequence[float] = (10, 20, 40), stretch: Any = None
) -> list[SegmentError]:
    """Relative errors as in KITTI's odometry benchmark (Geiger et al. 2012), of segments from every frame.
    Poses (N, 4, 4) are camera to world, the true ones in metres. Lengths, in metres of the true path, are
    left out where they are longer than it, or 0, and segments from one `stretch` (N,) to another."""
    travelled, errors, rounding = path_length(ground_truth), [], 1e-6
    for length in (each for each in lengths if each > rounding):
        rows, left_out = [], 0
        for start in range(len(ground_truth)):
            end = int(np.searchsorted(travelled, travelled[start] + length - rounding))
            if end < len(ground_truth) and stretch is not None and stretch[start] != stretch[end]:
                left_out += 1
            elif end < len(ground_truth):
                moved, truth = (np.linalg.inv(poses[end]) @ poses[start] for poses in (found, ground_truth))
                error = moved @ np.linalg.inv(truth)
                turn = np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)
                rows.append((np.linalg.norm(error[:3, 3]), np.rad2deg(np.arccos(turn))))
        if rows:
            mean = (np.mean(rows, axis=0) / length).tolist()
            errors.append(SegmentError(float(length), len(rows), *mean, left_out))
    return errors


def align(ground_truth: np.ndarray, found: np.ndarray, *, with_scale: bool) -> np.ndarray:
    """The found poses (N, 4, 4), moved so that the first is the true one; scaled if asked, to fit best."""
    local = np.linalg.inv(found[0]) @ found
    if with_scale:
        wanted = (np.linalg.inv(ground_truth[0]) @ ground_truth)[:, :3, 3]
        squares = np.sum(local[:, :3, 3] ** 2)
        local[:, :3, 3] *= np.sum(wanted * local[:, :3, 3]) / squares if squares > 0 else 1.0
    return ground_truth[0] @ local


def nearest_rows(stamps: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(P,) row of the true time (T,) nearest to each stamp, −1 where none is within 20 ms."""
    order = np.argsort(times)
    after = np.clip(np.searchsorted(times[order], stamps), 0, len(times) - 1)
    before = np.maximum(after - 1, 0)
    closer = np.abs(times[order][before] - stamps) <= np.abs(times[order][after] - stamps)
    best = order[np.where(closer, before, after)]
    return np.where(np.abs(times[best] - stamps) <= 0.02, best, -1)


def _different_times(stamps: np.ndarray, times: np.ndarray) -> str:
    """Why no frame has the time of a true pose: both ranges, and the likely unit."""
    if not len(stamps):
        return "no frame has a pose"
    message = (
        f"the frames are of {stamps.min():.10g} to {stamps.max():.10g} s, the true poses of "
        f"{times.min():.10g} to {times.max():.10g}"
    )
    for unit, factor in (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9)):
        for what, one, other in (("true poses'", times, stamps), ("frames'", stamps, times)):
            if one.min() / factor <= other.max() and one.max() / factor >= other.min() > 0:
                return f"{message}: the {what} times are likely {unit}, so write them in seconds"
    return (
        f"{message}: are they of this sequence? Frames are counted at the frame rate unless files named by "
        "their time, or times.txt, timestamps.txt, data.csv or rgb.txt beside them say when they were taken"
    )


_REMEDIES = {  # by `pose_status`, or the status of frames that are skipped
    "starting": "one camera has to move sideways, past things that stand still and not all on one plane",
    "too_few": "other intrinsics, more keypoints or frames closer in time may help",
    "bridged": "more keypoints or frames closer in time may help",
    "other_size": "they have another shape than the first; give frames of one shape",
    "blank": "are the images black or blurred?",
}


class TrackingLog:
    """Collects results frame by frame; 40 bytes per keypoint."""

    def __init__(self) -> None:
        self._frames: list[FrameResult] = []  # without their links and keypoints
        self._names: list[str] = []  # of what each frame was read from
        self._points: list[np.ndarray] = []  # (N, 3) float32 x, y, depth
        self._lengths: Counter[int] = Counter()
        self._disparities: list[np.ndarray] = []  # (2,) of each pair: median x, and |y|
        self.map_poses: dict[int, np.ndarray] = {}  # (4, 4) by frame; `late_poses_in_map` may be added
        self.in_map = False  # the trajectory is that in the map which was loaded

    def add(self, result: FrameResult, name: str = "") -> None:
        """Take in the next frame; `name`: of its file."""
        self._names.append(name)
        depths = np.full(len(result.keypoints), np.nan) if result.depths is None else result.depths
        self._points.append(np.column_stack([result.keypoints, depths]).astype(np.float32))
        self._lengths.update(result.track_ids.tolist())
        if result.map_from_cam is not None:
            self.map_poses[result.index] = result.map_from_cam
        if result.right is not None and np.isfinite(result.right[:, 0]).sum() >= MIN_POINTS:
            across, rows = (result.keypoints - result.right).T
            self._disparities.append(np.nanmedian([across, np.abs(rows)], axis=1))
        large = "keypoints", "track_lengths", "to_previous", "to_keyframe", "right", "depths", "map_from_cam"
        self._frames.append(replace(result, **dict.fromkeys(large)))

    def __len__(self) -> int:
        return len(self._frames)

    def counts(self) -> dict[str, int]:
        """How many frames had each status, became keyframes, have uncertain poses, or none for a reason."""
        found = Counter(frame.status for frame in self._frames)
        found["keyframes"] = sum(frame.is_keyframe for frame in self._frames)
        poses = Counter(frame.pose_status for frame in self._frames)
        found.update({name: poses[name] for name in ("uncertain", "starting", "too_few", "other_size")})
        return {name: count for name, count in found.items() if count or name == "keyframes"}

    def why_no_poses(self, camera: Camera | None) -> str | None:
        """Where most frames have no measured pose, what is likely wrong and the remedy; `camera`: theirs."""
        lacking = [frame for frame in self._frames if not frame.is_measured]
        if camera is None or 2 * len(lacking) <= len(self):
            return None
        reasons = (frame.status if frame.passed_over else frame.pose_status for frame in lacking)
        most = Counter(reasons).most_common(1)[0][0]
        if most == "too_few" and self._disparities:
            across, rows = np.median(self._disparities, axis=0)
            if rows > 2.0:  # these bounds are those of `PoseTracker.measure`
                return f"the pairs are not rectified, rows differ by {rows:.1f} pixels: rectify them"
            if abs(across) < 0.5:
                return "both images of a pair are the same: give those of both cameras"
            if across < 0:
                return "left and right are exchanged: swap the folders"
        if most == "other_size" and camera.size is not None:
            size = next(frame.size for frame in lacking if frame.pose_status == most)
            return f"the camera is of images of {camera.size} pixels, and the frames have {size}: give theirs"
        return _REMEDIES.get(most)

    def mean_track_length(self) -> float:
        """Mean number of frames of a track seen in two or more; 0 without any."""
        return float(np.mean([length for length in self._lengths.values() if length > 1] or [0.0]))

    def _poses(self, in_map: bool) -> list[np.ndarray]:
        """Of each frame, in the map or the world; NaN where there is none."""
        unknown = np.full((4, 4), np.nan)
        if in_map:
            return [self.map_poses.get(frame.index, unknown) for frame in self._frames]
        return [unknown if (pose := frame.world_from_cam) is None else pose for frame in self._frames]

    def trajectory(self, *, bridged: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Frames (P,) int64 with a measured (or bridged) pose, their timestamps (P,) and poses (P, 4, 4). A
        frame without a timestamp has its index as one. Poses are camera to world, or to map if `in_map`."""
        poses = np.reshape(self._poses(self.in_map), (-1, 4, 4))
        measured = np.array([bridged or frame.pose_status != "bridged" for frame in self._frames], bool)
        rows = np.flatnonzero(np.isfinite(poses).all(axis=(1, 2)) & measured)
        times = [float(row) if (t := self._frames[row].timestamp) is None else t for row in rows.tolist()]
        return rows, np.array(times, np.float64), poses[rows]

    def write(self, path: Path, *, bridged: bool = False) -> None:
        """Write the trajectory by `write_trajectory`."""
        known, times, poses = self.trajectory(bridged=bridged)
        guessed = [self._frames[row].pose_status == "bridged" for row in known]
        parts = [] if self.in_map else [self._frames[row].stretch for row in known]
        write_trajectory(path, times, list(poses), frames=len(self), bridged=guessed, stretches=parts)

    def breaks(self, *, back: bool = False) -> list[int]:
        """The frames from which poses are measured again, but relative to an extrapolated one: how far the
        camera moved while tracking was lost is not known. None in a map, where poses are found anew. `back`:
        instead those from which they are relative to the first again, as a known place was found."""
        measured = [frame for frame in self._frames if frame.is_measured and not self.in_map]
        changes = [measured[row] for row in changes_of([frame.stretch for frame in measured])]
        return [frame.index for frame in changes if (frame.stretch == 0) == back]

    def keyframe_rows(self) -> list[int]:
        """Rows of the trajectory that are keyframes."""
        known = self.trajectory()[0].tolist()
        return [row for row, index in enumerate(known) if self._frames[index].is_keyframe]

    def as_npz(self) -> bytes:
        """An .npz file: a row per frame, and a row for each observation of a track. frame_index, name,
        timestamp, status, pose_status, stretch, is_keyframe (F,); world_from_cam and map_from_cam (F, 4, 4),
        NaN where there is none; observation_frame, observation_track (O,); observation_xy (O, 2);
        observation_depth (O,). Poses of `pose_status` "bridged" are extrapolated."""
        kinds = {"timestamp": np.float64, "status": np.str_, "pose_status": np.str_}
        kinds |= {"stretch": np.int64, "is_keyframe": bool}
        frames = self._frames
        columns = {name: np.array([getattr(f, name) for f in frames], kind) for name, kind in kinds.items()}
        points = np.concatenate([np.zeros((0, 3), np.float32), *self._points])
        ids = [frame.track_ids for frame in frames]
        buffer = io.BytesIO()
        np.savez_compressed(
            buffer,
            **columns,
            name=np.array(self._names, np.str_),
            frame_index=np.array([frame.index for frame in frames], np.int64),
            world_from_cam=np.reshape(self._poses(in_map=False), (-1, 4, 4)),
            map_from_cam=np.reshape(self._poses(in_map=True), (-1, 4, 4)),
            observation_frame=np.repeat(np.arange(len(ids)), [len(each) for each in ids]),
            observation_track=np.concatenate([np.zeros(0, np.int64), *ids]),
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
        numbers: Sequence[int] | None = None,
    ) -> tuple[np.ndarray, np.ndarray, list[SegmentError]]:
        """Estimated and true poses of the frames that have both, aligned, and the errors of segments. True
        poses (T, 4, 4) are camera to world at `times` (T,) in seconds, or without them of the frames in
        order, or by their `numbers`. `UsageError`: fewer than two frames have one."""
        known, stamps, poses = self.trajectory()
        if times is None:
            rows = known if numbers is None else np.asarray(numbers, np.int64)[known]
            rows = np.where(rows < len(ground_truth), rows, -1)
            why = f"{len(known)} frames have a pose, and the file has {len(ground_truth)}"
        else:
            rows, why = nearest_rows(stamps, times), _different_times(stamps, times)
        both = rows >= 0
        if (count := np.count_nonzero(both)) < 2:
            raise UsageError(f"{count} frames have an estimated and a true pose, and 2 are needed; {why}")
        true = ground_truth[rows[both]]
        found = align(true, poses[both], with_scale=with_scale)
        stretches = np.array([0 if self.in_map else self._frames[row].stretch for row in known[both]])
        apart, total = found.copy(), 0.0  # each stretch by itself: with one camera it has a unit of its own
        for rows in (stretches == stretch for stretch in np.unique(stretches)):
            apart[rows] = align(true[rows], found[rows], with_scale=with_scale)
            total = max(total, float(path_length(true[rows])[-1]))
        # Of 10, 20, 40 … m while two segments of that length would fit into the path; a third of a short one.
        fitting = [float(length) for length in (10, 20, 40, 100, 200, 400, 800) if 1.25 * length <= total]
        return found, true, segment_errors(true, apart, fitting or [total / 3], stretches)
