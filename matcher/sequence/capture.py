"""Where frames come from: folders of images, video files, cameras."""

from __future__ import annotations

import io
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from matcher.errors import ImageError, UsageError
from matcher.files import read_given, write_whole
from matcher.geometry import as_rotation, check_poses
from matcher.images import IMAGE_SUFFIXES, MAX_PIXELS, find_mask, is_image, natural_key, no_mask, read_mask
from matcher.poses import kitti_lines, tum_lines
from matcher.sequence.frames import FrameResult

# --- capture: Where frames come from: folders of images, video files, cameras.

DEFAULT_RATE = 10.0  # frames per second, of folders whose files are not named by their time
_PATIENCE = 30  # frames in a row that a camera may fail to give


@dataclass(frozen=True, eq=False)
class SourceFrame:
    """What a source gives at one time."""

    name: str  # for messages
    timestamp: float  # seconds
    image: Path | np.ndarray | None  # None: dropped
    right: Path | None = None  # of a rectified pair
    mask: Path | np.ndarray | None = None  # of the (left) image


@dataclass(eq=False)
class FrameSource:
    """Frames in order; `problem` is set afterwards if they ended early."""

    name: str
    count: int | None  # frames that are announced
    shots: Callable[[], Iterator[SourceFrame]]
    problem: str | None = None

    def __iter__(self) -> Iterator[SourceFrame]:
        return self.shots()


def open_frames(
    source: str,
    right: str | Path | None = None,
    rate: float | None = None,
    masks: str | Path | None = None,
) -> FrameSource:
    """A folder, a video file or, by its number, a camera.

    Args:
        source: a path, or digits.
        right: the folder of the right images of rectified pairs; for folders only.
        rate: frames per second, of a folder.
        masks: one image file for all frames; or, for folders only, a folder of masks named like the frames.

    Raises:
        UsageError: arguments that do not fit each other, an image, or a folder without images.
        ImageError: a video that cannot be opened, or a camera that is not there.
    """
    path, masks = Path(source), None if masks is None else Path(masks)
    if masks is not None and not masks.is_dir():
        return _with_mask(open_frames(source, right, rate), read_mask(masks, MAX_PIXELS))
    if path.is_dir():
        return _folder(path, None if right is None else Path(right), rate, masks)
    if masks is not None:
        raise UsageError(f"{masks}: a folder of masks is for a folder of frames; {source} takes one file")
    if right is not None:
        raise UsageError(f"{source}: rectified pairs come from two folders of images, and this is no folder")
    if rate is not None:
        raise UsageError(f"{source}: videos and cameras have their own timestamps; leave the frame rate out")
    if source.isdecimal() and not path.exists():
        return _camera(int(source))
    return _video(path)


def _with_mask(source: FrameSource, mask: np.ndarray) -> FrameSource:
    """The same frames, each with that mask."""
    shots = source.shots

    def masked() -> Iterator[SourceFrame]:
        return (replace(shot, mask=mask) for shot in shots())

    source.shots = masked
    return source


def _folder(folder: Path, right: Path | None, rate: float | None, masks: Path | None) -> FrameSource:
    images = _images(folder)
    found = [None if masks is None else find_mask(masks, path.name) for path in images]
    if masks is not None and not any(found):
        raise no_mask(masks, [path.name for path in images], str(folder))
    partners: list[Path | None] = [None] * len(images)
    if right is not None:
        if not right.is_dir():
            raise UsageError(f"{right}: no such folder of right images")
        there = {path.name: path for path in _images(right)}
        partners = [there.get(path.name) for path in images]
        if not any(partners):
            raise UsageError(
                f"{right}: no image there has the same name as one in {folder}; pairs share a name"
            )
    times = _times(images, rate)

    def shots() -> Iterator[SourceFrame]:
        for path, time_, partner, mask in zip(images, times, partners, found, strict=True):
            missing = right is not None and partner is None
            yield SourceFrame(path.name, time_, None if missing else path, partner, mask)

    return FrameSource(str(folder), len(images), shots)


def _images(folder: Path) -> list[Path]:
    found = [path for path in folder.iterdir() if is_image(path) and not path.name.startswith(".")]
    if not found:
        raise UsageError(f"{folder}: no images there ({', '.join(IMAGE_SUFFIXES)})")
    return sorted(found, key=lambda path: natural_key(path.name))


def _times(images: list[Path], rate: float | None) -> list[float]:
    """Seconds: names such as 1305031102.175304.png are times; else as the rate says."""
    if rate is None and all(re.fullmatch(r"\d+\.\d+", path.stem) for path in images):
        return [float(path.stem) for path in images]
    rate = DEFAULT_RATE if rate is None else rate
    if not 0 < rate < float("inf"):
        raise UsageError(f"the frame rate must be a positive number, not {rate}")
    return [index / rate for index in range(len(images))]


def _video(path: Path) -> FrameSource:
    import cv2

    if not path.is_file():
        raise ImageError(f"{path}: no such video, folder or camera; check the path")
    if is_image(path):
        raise UsageError(f"{path}: a single image; name its folder, or use `matcher match`")
    if _is_text(path):  # which OpenCV would show as a film of a terminal
        raise UsageError(f"{path}: a text file, not a video; name a video, a folder of images or a camera")
    capture = cv2.VideoCapture(str(path))
    announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
    if not capture.isOpened() or not capture.grab():
        raise ImageError(
            f"{path}: cannot be read as a video; it is damaged, incomplete or in an unknown format; convert "
            "it, for example with ffmpeg, to MP4"
        )
    source = FrameSource(str(path), announced if announced > 0 else None, lambda: iter(()))

    def shots() -> Iterator[SourceFrame]:
        capture.set(cv2.CAP_PROP_POS_FRAMES, 0)
        held: SourceFrame | None = None
        number = 0
        while True:
            good, pixels = capture.read()
            if not good:
                break
            if held is not None:
                yield held
            seconds = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000
            held = SourceFrame(f"frame {number}", seconds, np.ascontiguousarray(pixels[..., ::-1]))
            number += 1
        capture.release()
        if held is not None and source.count is not None and number < source.count:
            source.problem = f"{path}: ends after {number} of {source.count} frames; the last one is left out"
            held = SourceFrame(held.name, held.timestamp, None)  # the decoder fills what is cut off with grey
        if held is not None:
            yield held

    source.shots = shots
    return source


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4096)
    return bool(start) and b"\0" not in start and start.isascii()


def _camera(number: int) -> FrameSource:
    import cv2

    # OpenCV prints warnings of its own where there is no device, so that is asked first.
    absent = sys.platform == "linux" and not Path(f"/dev/video{number}").exists()
    capture = None if absent else cv2.VideoCapture(number)
    if capture is None or not capture.isOpened():
        raise ImageError(f"no live camera {number}, or it is in use; connect it, or try another number")
    source = FrameSource(f"camera {number}", None, lambda: iter(()))

    def shots() -> Iterator[SourceFrame]:
        index = failures = 0
        try:
            while failures < _PATIENCE:
                good, pixels = capture.read()
                failures = 0 if good else failures + 1
                image = np.ascontiguousarray(pixels[..., ::-1]) if good else None
                yield SourceFrame(f"frame {index}", time.time(), image)
                index += 1
            source.problem = f"camera {number} gave no image {_PATIENCE} times in a row"
        finally:
            capture.release()

    source.shots = shots
    return source


# --- trajectory: Trajectories: TUM and KITTI files, relative errors over segments, scale of a single
# camera's path.

_ROUNDING = 1e-6  # metres
_NUMBERS = "12 numbers (KITTI) or 8 (TUM) in every line"


@dataclass(frozen=True)
class SegmentError:
    """Mean error over all segments of one length."""

    length: float  # metres along the true path
    count: int  # segments
    translation: float  # share of the length
    rotation: float  # degrees per metre


def write_trajectory(
    path: Path, timestamps: Sequence[float], poses: Sequence[np.ndarray], *, frames: int
) -> None:
    """In the form of TUM (.tum), or of KITTI (.kitti): 12 numbers, 3×4, a line for each of `frames` frames.

    Raises:
        UsageError: KITTI's lines have no times, and a frame has no pose.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() != ".kitti":
        write_tum(path, timestamps, poses)
        return
    if len(poses) < frames:
        raise UsageError(
            f"{path}: KITTI's lines have no times, and {frames - len(poses)} of {frames} frames have no "
            "pose; use .tum"
        )
    write_whole(path, "".join(f"{line}\n" for line in kitti_lines(poses)).encode())


def write_tum(path: str | Path, timestamps: Sequence[float], poses: Sequence[np.ndarray]) -> None:
    """A comment, and a line per pose: `t x y z qx qy qz qw`, in the order of the frames.

    Args:
        path: the file, which is replaced.
        timestamps: (N,) seconds.
        poses: N world_from_cam (4, 4).

    Raises:
        OSError: the file cannot be written.
    """
    write_whole(path, "".join(f"{line}\n" for line in tum_lines(timestamps, poses)).encode())


def read_poses(path: str | Path) -> tuple[np.ndarray | None, np.ndarray]:
    """Poses world_from_cam from a file of KITTI (12 numbers per line, 3×4) or TUM (8 numbers).

    Returns:
        timestamps (N,) or None (KITTI has none), and poses (N, 4, 4).

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        text = read_given(path).decode("utf-8")
        rows = (line.split() for line in text.splitlines() if line.strip() and not line.startswith("#"))
        values = np.array([_pose_numbers(row) for row in rows])
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as poses ({error})") from error
    if values.ndim != 2 or not np.isfinite(values).all():
        raise UsageError(f"{path}: a pose file has {_NUMBERS}")
    poses = np.tile(np.eye(4), (len(values), 1, 1))
    try:
        if values.shape[1] == 12:
            poses[:, :3] = values.reshape(-1, 3, 4)
        else:
            poses[:, :3, :3] = as_rotation(values[:, 4:])
            poses[:, :3, 3] = values[:, 1:4]
        check_poses(poses)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    return (values[:, 0] if values.shape[1] == 8 else None), poses


def _pose_numbers(words: list[str]) -> list[float]:
    if len(words) not in (8, 12):
        raise ValueError(f"a pose file has {_NUMBERS}, not {len(words)}")
    return [float(word) for word in words]


def path_length(poses: np.ndarray) -> np.ndarray:
    """(N,) distance travelled up to each pose (N, 4, 4)."""
    steps = np.linalg.norm(np.diff(poses[:, :3, 3], axis=0), axis=1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def segment_errors(
    ground_truth: np.ndarray, found: np.ndarray, lengths: Sequence[float] = (10, 20, 40)
) -> list[SegmentError]:
    """Relative errors as in KITTI's odometry benchmark (Geiger et al. 2012), of segments from every frame.

    Args:
        ground_truth: (N, 4, 4) camera to world, metres.
        found: (N, 4, 4) of the same frames, in any world frame.
        lengths: of the segments in metres of the true path; those longer than the path are left out, as are
            those of a path that stands still, whose errors have no length to be divided by.
    """
    travelled, errors = path_length(ground_truth), []
    for length in (each for each in lengths if each > _ROUNDING):
        rows = []
        for start in range(len(ground_truth)):
            end = int(np.searchsorted(travelled, travelled[start] + length - _ROUNDING))
            if end < len(ground_truth):
                error = _relative(found, start, end) @ np.linalg.inv(_relative(ground_truth, start, end))
                turn = np.clip((np.trace(error[:3, :3]) - 1) / 2, -1, 1)
                rows.append((np.linalg.norm(error[:3, 3]), np.rad2deg(np.arccos(turn))))
        if rows:
            translation, rotation = np.mean(rows, axis=0) / length
            errors.append(SegmentError(float(length), len(rows), float(translation), float(rotation)))
    return errors


def _relative(poses: np.ndarray, start: int, end: int) -> np.ndarray:
    return np.linalg.inv(poses[end]) @ poses[start]


def align(ground_truth: np.ndarray, found: np.ndarray, *, with_scale: bool) -> np.ndarray:
    """The found poses (N, 4, 4) in the frame of the true ones: the first frames are made equal.

    With `with_scale` the path is also scaled so that the positions fit best, which one camera cannot know.
    """
    local = np.linalg.inv(found[0]) @ found
    if with_scale:
        wanted = (np.linalg.inv(ground_truth[0]) @ ground_truth)[:, :3, 3]
        squares = np.sum(local[:, :3, 3] ** 2)
        local[:, :3, 3] *= np.sum(wanted * local[:, :3, 3]) / squares if squares > 0 else 1.0
    return ground_truth[0] @ local


# --- log: The record of a run: tracks, trajectory, arrays to save, errors against ground truth.

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
