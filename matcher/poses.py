"""Poses of images and trajectories in the files of other programs: COLMAP, hloc, TUM, KITTI, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matcher.cameras import Camera
from matcher.errors import MALFORMED, UsageError
from matcher.files import MARK, read_given, write_output, write_whole
from matcher.geometry import as_quaternion, as_rotation, check_poses

# Poses world_from_cam as lines of trajectory files: of TUM, with times, and of KITTI, without.


def tum_lines(timestamps: Sequence[float], poses: Sequence[np.ndarray]) -> list[str]:
    """A comment, which lets a later run replace the file unasked, and for each of N seconds and poses
    world_from_cam (4, 4) a line `t x y z qx qy qz qw`."""
    lines = [f"# {MARK.decode()}: timestamp x y z qx qy qz qw of world_from_cam"]
    for time, pose in zip(timestamps, poses, strict=True):
        lines.append(f"{time:.6f} {numbers([*pose[:3, 3], *as_quaternion(pose[:3, :3])])}")
    return lines


def kitti_lines(poses: Iterable[np.ndarray]) -> list[str]:
    """The 12 numbers of the upper 3×4 part of each world_from_cam (4, 4)."""
    return [numbers(pose[:3].ravel()) for pose in poses]


def numbers(values: Iterable[float]) -> str:
    """Numbers to nine digits, with spaces between."""
    return " ".join(f"{value:.9g}" for value in values)


# Poses of images by name, in the files of other programs.

SUFFIXES = (".txt", ".tum", ".json", ".kitti")
COLMAP_IMAGES = "images.txt"


def read_named_poses(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Camera]]:
    """Poses cam_from_world (4, 4) by name of image, and the cameras of those that have one.

    They are of COLMAP's `images.txt` (whose cameras are beside it and not read here), result lines of hloc
    (`.txt`), or JSON: name → {"cam_from_world": (3, 4) or (4, 4), "camera": …} or the matrix itself.

    Raises:
        UsageError: the file cannot be read, or holds something else, such as a trajectory.
    """
    path = Path(path)
    if path.suffix.lower() in (".tum", ".kitti"):
        raise UsageError(f"{path}: a trajectory has no names of images; give images.txt, .txt or .json")
    try:
        text = read_given(path).decode("utf-8")
        if path.suffix.lower() == ".json":
            found = _from_json(json.loads(text))
        elif path.name == COLMAP_IMAGES:
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            rows = (line.split(maxsplit=9) for line in lines[::2])  # between them are the lines of points
            found = _from_rows((row[9], row[1:8]) for row in rows if row), {}
        else:
            lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
            rows = (line.rsplit(maxsplit=7) for line in lines)
            found = _from_rows((row[0], row[1:]) for row in rows), {}
    except MALFORMED as error:
        raise UsageError(
            f"{path}: cannot be read as poses of images ({error}): lines `name qw qx qy qz tx ty tz`, "
            "COLMAP's images.txt, or JSON with cam_from_world by name are needed"
        ) from error
    if not found[0]:
        raise UsageError(f"{path} holds no pose")
    return found


def write_named_poses(
    path: str | Path,
    poses: Mapping[str, np.ndarray],
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    **common: Any,
) -> None:
    """Write poses cam_from_world (4, 4) by name of image in the format that the file's name asks for.

    `images.txt` is COLMAP's, any other `.txt` has hloc's result lines, `.tum` has timestamps (the number that
    an image is named by if all have another one, else its place, and comments say of which image it is),
    `.kitti` a line for each image, `.json` all, with the `facts` of images, also of those without a pose, and
    `common` members beside "poses".

    Raises:
        UsageError: a name that the format cannot hold, or another suffix.
        OSError: the file cannot be written.
    """
    path, facts = Path(path), facts or {}
    suffix = path.suffix.lower()
    if suffix == ".json":
        names = dict.fromkeys([*facts, *poses])
        found = {name: np.asarray(pose, np.float64).tolist() for name, pose in poses.items()}
        rows = {name: {"cam_from_world": found.get(name), **facts.get(name, {})} for name in names}
        write_output(path, json.dumps({**common, "poses": rows}, indent=1, allow_nan=False).encode())
        return
    if suffix == ".tum":
        lines = _tum_lines(poses)
    elif suffix == ".kitti":
        lines = kitti_lines(map(np.linalg.inv, poses.values()))
    elif path.name == COLMAP_IMAGES:
        lines = [
            f"# {MARK.decode()}: IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME of cam_from_world; no points"
        ]
        for number, (name, pose) in enumerate(poses.items(), start=1):
            lines += [f"{number} {numbers(_wxyz(pose))} {number} {name}", ""]
    elif suffix == ".txt":
        if spaced := [name for name in poses if len(name.split()) != 1]:
            raise UsageError(f"{path}: hloc's lines cannot hold the name {spaced[0]!r}, which has a space")
        lines = [f"{name} {numbers(_wxyz(pose))}" for name, pose in poses.items()]
    else:
        raise UsageError(f"{path}: the name of a file of poses must end in {' or '.join(SUFFIXES)}")
    write_whole(path, "".join(f"{line}\n" for line in lines).encode())


def _tum_lines(poses: Mapping[str, np.ndarray]) -> list[str]:
    times, said = [_time(name) for name in poses], []
    if None in times or len(set(times)) < len(times):
        times = [float(index) for index in range(len(poses))]
        said = [f"# {time:.6f} is {json.dumps(name)}" for time, name in zip(times, poses, strict=True)]
    ordered = sorted(zip(times, poses.values(), strict=True), key=lambda row: row[0])
    first, *lines = tum_lines([time for time, _ in ordered], [np.linalg.inv(pose) for _, pose in ordered])
    return [first, *said, *lines]


def _time(name: str) -> float | None:
    """The number that an image is named by, such as its timestamp."""
    try:
        return float(Path(name).stem)
    except ValueError:
        return None


def _wxyz(pose: np.ndarray) -> list[float]:
    x, y, z, w = as_quaternion(pose[:3, :3])
    return [w, x, y, z, *pose[:3, 3]]


def _from_rows(rows: Iterable[tuple[str, list[str]]]) -> dict[str, np.ndarray]:
    """Poses (4, 4) by name, of rows of a name and the words qw qx qy qz tx ty tz; any other row raises."""
    names, values = [], []
    for name, words in rows:
        if len(words) != 7:
            raise ValueError(f"{len(words)} numbers in a line that needs 7")
        names.append(name)
        values.append([float(word) for word in words])
    values = np.array(values).reshape(-1, 7)
    poses = np.tile(np.eye(4), (len(values), 1, 1))
    poses[:, :3, :3], poses[:, :3, 3] = as_rotation(np.roll(values[:, :4], -1, axis=1)), values[:, 4:]
    check_poses(poses)
    return dict(zip(names, poses, strict=True))


def _from_json(values: Any) -> tuple[dict[str, np.ndarray], dict[str, Camera]]:
    poses, cameras = {}, {}
    for name, row in (values["poses"] if isinstance(values.get("poses"), dict) else values).items():
        if name == "software":
            continue
        row = row if isinstance(row, dict) else {"cam_from_world": row}
        if row["cam_from_world"] is None:
            continue
        pose = np.eye(4)
        pose[:3] = np.array(row["cam_from_world"], dtype=np.float64)[:3].reshape(3, 4)
        check_poses(pose[None])
        poses[name] = pose
        if (camera := row.get("camera")) is not None:
            cameras[name] = Camera.from_colmap(camera["model"], camera["params"], tuple(camera["size"]))
    return poses, cameras
