"""Readers of multi-view sets: calibrated views of a scene with depth maps.

Both kinds have a `cameras.json`. A recorded set has frames with tracked poses, and `pairs.json` lists the
pairs to measure; a rendered set, also by `scripts/trace_views.py` or `scripts/label_views.py`, has groups of
views with depth and poses, maybe under several lights, and pairs to measure only where it lists some.
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
from matcher.lab.pairs.protocols import DepthPair, HomographyPair, PairImage, PairSet
from matcher.lab.pairs.stored import pairs_of

OVERLAPS = (0.0, 0.3, 0.5, 1.01)  # bounds of the overlap groups
ANGLES = (0, 15, 30, 60, 181)  # degrees between the optical axes
DRAWN_ANGLES = (8, 30, 60, 110, 181)  # of pairs that are drawn, as many between each two
DRAWN_OVERLAPS = (0.2, 0.75)  # between which they share their views, the smaller one of both directions
MIN_OVERLAP = 0.15  # the smaller one of both directions; pairs below are left out
_TRACKED = (
    "The poses come from the headset's own tracking and reproject to within about 3 px over ten frames: rely "
    "on the pose AUC and on precision@10 px"
)
_SAMPLING = 16  # pixels between the points by which overlap is measured


def is_recorded(folder: Path) -> bool:
    """Whether a folder has the layout of `read_recorded`."""
    return (folder / "cameras.json").is_file() and not is_rendered(folder)


def is_rendered(folder: Path) -> bool:
    """Whether a folder has the layout of `read_rendered`."""
    path = folder / "cameras.json"
    return path.is_file() and (not (folder / "pairs.json").exists() or b'"views"' in path.read_bytes())


def read_recorded(folder: Path) -> list[PairSet]:
    """`images/`, `depth/`, `cameras.json` (K, frames with image and world_from_camera) and `pairs.json`."""
    frames, pairs = _frames(folder), []
    for row in read_rows(folder / "pairs.json", ("image0", "image1", "overlap")):
        names = row["image0"], row["image1"]
        if not set(names) <= frames.keys():
            raise UsageError(
                f"{folder / 'pairs.json'}: {names} are not both among the frames of {folder / 'cameras.json'}"
            )
        pairs.append(_recorded_pair(folder, names, frames, row["overlap"], ANGLES))
    return [PairSet(folder.resolve().name, "depth", tuple(pairs), note=_TRACKED)]


def draw_recorded(folder: Path, count: int, seed: int) -> PairSet:
    """Pairs that `pairs.json` does not list, drawn at random, as many of each kind of angle between views.

    Args:
        folder: as `read_recorded` reads it.
        count: pairs in all, rounded down to as many of every kind; fewer where the frames have no more.
        seed: of what is drawn.
    """
    frames, names = _frames(folder), ("image0", "image1")
    listed = {frozenset(row[n] for n in names) for row in read_rows(folder / "pairs.json", names)}
    wanted = count // (len(DRAWN_ANGLES) - 1)
    drawn: dict[tuple[float, float], list[DepthPair]] = {}
    for pair in np.random.default_rng(seed).permutation(list(combinations(frames, 2))).tolist():
        views, angle = [frames[name] for name in pair], _angle(*(frames[name] for name in pair))
        kind = drawn.setdefault(_between(angle, DRAWN_ANGLES), [])
        if frozenset(pair) in listed or angle < DRAWN_ANGLES[0] or len(kind) == wanted:
            continue
        overlap = overlap_of(*views)
        if overlap > DRAWN_OVERLAPS[0]:
            overlap = min(overlap, overlap_of(*reversed(views)))
        if DRAWN_OVERLAPS[0] < overlap < DRAWN_OVERLAPS[1]:
            kind.append(_recorded_pair(folder, pair, frames, overlap, DRAWN_ANGLES))
    pairs = [pair for _, kind in sorted(drawn.items()) for pair in kind]
    return PairSet(f"{folder.resolve().name}_angles", "depth", tuple(pairs), note=_TRACKED)


def read_rendered(folder: Path) -> list[PairSet]:
    """Two sets: pairs of views of one group from different viewpoints, and pairs from one viewpoint under
    two lights."""
    path = folder / "cameras.json"
    scene = read_object(path, ("views", "depth_step"))
    posed, relit = [], []
    for pair in pairs_of(folder, scene["views"]):
        row0, row1 = (scene["views"][number] for number in pair)
        sides = [PairImage(folder / row["image"]) for row in (row0, row1)]
        views = [_rendered_camera(row, folder, int(scene["depth_step"]), path) for row in (row0, row1)]
        name = "-".join(Path(row["image"]).stem for row in (row0, row1))
        if row0["E"] == row1["E"]:
            group = " and ".join(sorted(_light(row, scene) for row in (row0, row1)))
            relit.append(HomographyPair(name, group, *sides, np.eye(3)))
            continue
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= MIN_OVERLAP:
            light = "same light" if row0.get("light") == row1.get("light") else "different lights"
            groups = _overlap_group(overlap), _angle_group(_angle(*views), ANGLES), light
            posed.append(depth_pair(name, groups, sides, views))
    title = folder.resolve().name
    found = [PairSet(title, "depth", tuple(posed), oracle=True, note="Depth and poses are exact")]
    if relit:
        found.append(PairSet(f"{title}-light", "homography", tuple(relit), oracle=True))
    return found


def _frames(folder: Path) -> dict[str, DepthCamera]:
    """The views of a recorded set, by the names of their images."""
    path = folder / "cameras.json"
    cameras = read_object(path, ("K", "frames"))
    K = read_array(cameras["K"], (3, 3), path)
    frames, stride = {}, int(cameras.get("depth_step", 2))
    for row in cameras["frames"]:
        pose = np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        depth = folder / "depth" / f"{Path(row['image']).stem}.png"
        frames[row["image"]] = DepthCamera(depth, stride, K, pose)
    return frames


def _recorded_pair(
    folder: Path,
    names: Sequence[str],
    frames: dict[str, DepthCamera],
    overlap: float,
    angles: Sequence[float],
) -> DepthPair:
    views = [frames[name] for name in names]
    groups = _overlap_group(overlap), _angle_group(_angle(*views), angles)
    sides = [PairImage(folder / "images" / name) for name in names]
    return depth_pair("-".join(Path(name).stem for name in names), groups, sides, views)


def depth_pair(
    name: str, groups: tuple[str, ...], sides: Sequence[PairImage], views: Sequence[DepthCamera]
) -> DepthPair:
    """A pair with the relative pose of its two views."""
    view0, view1 = views
    pose = view1.cam_from_world @ np.linalg.inv(view0.cam_from_world)
    return DepthPair(name, groups[0], *sides, view0.K, view1.K, pose, view0, view1, groups[1:])


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that are visible in view 1."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, _SAMPLING) for side in (width, height)))
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    reprojected, visible = reproject(points, view0, view1)
    known = ~np.isnan(reprojected[:, 0])
    return float(visible[known].mean()) if known.any() else 0.0


def _light(row: dict[str, Any], scene: dict[str, Any]) -> str:
    """The kind of light of a view, which the scene lists or the view names itself."""
    lights = scene.get("lights")
    return str(row["light"] if lights is None else lights[row["light"]]["kind"])


def _rendered_camera(row: dict[str, Any], folder: Path, stride: int, path: Path) -> DepthCamera:
    K, pose = read_array(row["K"], (3, 3), path), read_array(row["E"], (4, 4), path)
    return DepthCamera(folder / row["depth"], stride, K, pose)


def _overlap_group(overlap: float) -> str:
    low, high = _between(overlap, OVERLAPS)
    return f"overlap {100 * low:.0f}–{min(100, 100 * high):.0f} %"


def _angle(view0: DepthCamera, view1: DepthCamera) -> float:
    """Degrees between the optical axes."""
    axes = view0.cam_from_world[2, :3] @ view1.cam_from_world[2, :3]
    return float(np.degrees(np.arccos(np.clip(axes, -1, 1))))


def _angle_group(angle: float, bounds: Sequence[float]) -> str:
    low, high = _between(angle, bounds)
    return f"angle {low}–{min(180, high)}°"


def _between(value: float, bounds: Sequence[float]) -> tuple[float, float]:
    at = int(np.clip(np.searchsorted(bounds, value, side="right"), 1, len(bounds) - 1))
    return bounds[at - 1], bounds[at]


def read_object(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a file, which has these members.

    Raises:
        UsageError: it cannot be read, or lacks one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UsageError(f"{path}: not in the layout of a multi-view set; {', '.join(keys)} are needed")
    return found
