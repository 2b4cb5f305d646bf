"""Readers of sets of several calibrated views of a place with depth.

Both have a `cameras.json`. A recorded set has frames with tracked poses and the pairs to measure in
`pairs.json`; a rendered one has views in groups, with exact depth, exact poses and lights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from matcher.errors import UsageError
from matcher.lab.pairs.depth import DepthCamera, reproject
from matcher.lab.pairs.folders import read_array, read_rows
from matcher.lab.pairs.protocols import DepthPair, HomographyPair, PairSet, Picture

OVERLAPS = (0.0, 0.3, 0.5, 1.01)  # bounds of the groups
ANGLES = (0, 15, 30, 60, 181)  # degrees between the optical axes
LEAST_OVERLAP = 0.15  # of the picture that shows less; pairs below are left out
_SAMPLED = 16  # pixels between the points whose overlap is looked at


def is_recorded(folder: Path) -> bool:
    """Whether a folder holds frames with poses and a list of pairs."""
    return (folder / "cameras.json").is_file() and (folder / "pairs.json").is_file()


def is_rendered(folder: Path) -> bool:
    """Whether a folder holds rendered views with depth and poses."""
    return (folder / "cameras.json").is_file() and not (folder / "pairs.json").exists()


def read_recorded(folder: Path) -> list[PairSet]:
    """`images/`, `depth/`, `cameras.json` (K, frames with image and world_from_camera) and `pairs.json`."""
    path = folder / "cameras.json"
    cameras = _read_object(path, ("K", "frames"))
    K = read_array(cameras["K"], (3, 3), path)
    frames, stride = {}, int(cameras.get("depth_step", 2))
    for row in cameras["frames"]:
        pose = np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        depth = folder / "depth" / f"{Path(row['image']).stem}.png"
        frames[row["image"]] = DepthCamera(depth, stride, K, pose)
    pairs = []
    for row in read_rows(folder / "pairs.json", ("image0", "image1", "overlap")):
        names = row["image0"], row["image1"]
        if not set(names) <= frames.keys():
            raise UsageError(f"{folder / 'pairs.json'}: {names} are not both among the frames of {path}")
        sides = [Picture(folder / "images" / name) for name in names]
        views = [frames[name] for name in names]
        groups = _overlap_group(row["overlap"]), _angle_group(*views)
        pairs.append(depth_pair("-".join(Path(name).stem for name in names), groups, sides, views))
    note = (
        "the poses are a headset's own tracking, good to about 3 px of reprojection over ten frames: read "
        "the pose AUC, and precision at 10 px"
    )
    return [PairSet(folder.resolve().name, "depth", tuple(pairs), note=note)]


def read_rendered(folder: Path) -> list[PairSet]:
    """Pairs of views of one group from different places, and, as a set of their own, pairs from one place
    under two lights."""
    path = folder / "cameras.json"
    scene = _read_object(path, ("views", "lights", "depth_step"))
    kinds = [str(light["kind"]) for light in scene["lights"]]
    moved, relit = [], []
    for row0, row1 in combinations(scene["views"], 2):
        if row0["group"] != row1["group"]:
            continue
        sides = [Picture(folder / row["image"]) for row in (row0, row1)]
        views = [_rendered_camera(row, folder, int(scene["depth_step"]), path) for row in (row0, row1)]
        name = "-".join(Path(row["image"]).stem for row in (row0, row1))
        lights = [kinds[row["light"]] for row in (row0, row1)]
        if row0["pose"] == row1["pose"]:
            group = " and ".join(sorted(lights))
            relit.append(HomographyPair(name, group, *sides, np.eye(3)))
            continue
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= LEAST_OVERLAP:
            alike = "same light" if row0["light"] == row1["light"] else "another light"
            groups = _overlap_group(overlap), _angle_group(*views), alike
            moved.append(depth_pair(name, groups, sides, views))
    title = folder.resolve().name
    found = [PairSet(title, "depth", tuple(moved), oracle=True, note="depth and poses are exact")]
    if relit:
        found.append(PairSet(f"{title}-light", "homography", tuple(relit), oracle=True))
    return found


def depth_pair(
    name: str, groups: tuple[str, ...], sides: Sequence[Picture], views: Sequence[DepthCamera]
) -> DepthPair:
    """A pair of two pictures with their cameras."""
    view0, view1 = views
    pose = view1.camera_from_world @ np.linalg.inv(view0.camera_from_world)
    return DepthPair(name, groups[0], *sides, view0.K, view1.K, pose, view0, view1, groups[1:])


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that view 1 shows."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, _SAMPLED) for side in (width, height)))
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    moved, seen = reproject(points, view0, view1)
    judged = ~np.isnan(moved[:, 0])
    return float(seen[judged].mean()) if judged.any() else 0.0


def _rendered_camera(row: dict[str, Any], folder: Path, stride: int, path: Path) -> DepthCamera:
    K, pose = read_array(row["K"], (3, 3), path), read_array(row["E"], (4, 4), path)
    return DepthCamera(folder / row["depth"], stride, K, pose)


def _overlap_group(overlap: float) -> str:
    low, high = _between(overlap, OVERLAPS)
    return f"overlap {100 * low:.0f}–{min(100, 100 * high):.0f} %"


def _angle_group(view0: DepthCamera, view1: DepthCamera) -> str:
    axes = view0.camera_from_world[2, :3] @ view1.camera_from_world[2, :3]
    low, high = _between(np.degrees(np.arccos(np.clip(axes, -1, 1))), ANGLES)
    return f"angle {low}–{min(180, high)}°"


def _between(value: float, bounds: Sequence[float]) -> tuple[float, float]:
    at = int(np.clip(np.searchsorted(bounds, value, side="right"), 1, len(bounds) - 1))
    return bounds[at - 1], bounds[at]


def _read_object(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UsageError(f"{path}: cameras of another layout; {', '.join(keys)} are needed")
    return found
