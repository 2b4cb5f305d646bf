"""Calibrated views of a scene with depth maps: pairs to measure on, and views to train on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from matcher.errors import MALFORMED, IntegrityError, UsageError
from matcher.evaluate.folders import read_array, read_rows
from matcher.evaluate.protocols import DepthCamera, DepthPair, HomographyPair, PairImage, reproject

DRAWN_ANGLES = (8, 30, 60, 110, 181)  # degrees between optical axes; of drawn pairs as many between each two
TRACKED = (
    "The poses come from the headset's own tracking and reproject to within about 3 px over ten frames: rely "
    "on the pose AUC and on precision@10 px"
)


def recorded(folder: Path) -> Iterator[DepthPair]:
    """`images/`, `depth/`, `cameras.json` (K, frames with image and world_from_camera) and `pairs.json`."""
    if _is_rendered(folder):
        return
    frames, path = frames_of(folder), folder / "pairs.json"
    for row in read_rows(path, ("image0", "image1", "overlap")):
        names = row["image0"], row["image1"]
        if not set(names) <= frames.keys():
            raise UsageError(f"{path}: {names} are not both among the frames of {folder / 'cameras.json'}")
        yield _pair(folder / "images", names, [frames[name] for name in names], row["overlap"])


def drawn(folder: Path, count: int, seed: int) -> tuple[DepthPair, ...]:
    """`count` pairs of a `recorded` set, if it has as many, that `pairs.json` does not list, drawn at random:
    the same number of each kind of angle between views."""
    frames, names = frames_of(folder), ("image0", "image1")
    listed = {frozenset(row[n] for n in names) for row in read_rows(folder / "pairs.json", names)}
    wanted = count // (len(DRAWN_ANGLES) - 1)
    found: dict[tuple[float, float], list[DepthPair]] = {}
    for pair in np.random.default_rng(seed).permutation(list(combinations(frames, 2))).tolist():
        views = [frames[name] for name in pair]
        angle = _angle(*views)
        kind = found.setdefault(_between(angle, DRAWN_ANGLES), [])
        if frozenset(pair) in listed or angle < DRAWN_ANGLES[0] or len(kind) == wanted:
            continue
        overlap = overlap_of(*views)
        if overlap > 0.2:
            overlap = min(overlap, overlap_of(*reversed(views)))
        if 0.2 < overlap < 0.75:  # neither hopeless nor easy
            kind.append(_pair(folder / "images", pair, views, overlap, DRAWN_ANGLES))
    return tuple(pair for _, kind in sorted(found.items()) for pair in kind)


def frames_of(folder: Path) -> dict[str, DepthCamera]:
    """The views of a recorded set, by the names of their images."""
    path = folder / "cameras.json"
    cameras = read_rows(path, ("K", "frames"))[0]
    K, stride, frames = read_array(cameras["K"], (3, 3), path), int(cameras.get("depth_step", 2)), {}
    for row in cameras["frames"]:
        pose = np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        depth = folder / "depth" / f"{Path(row['image']).stem}.png"
        frames[row["image"]] = DepthCamera(depth, stride, K, pose)
    return frames


def rendered(folder: Path, relit: bool = False) -> Iterator[DepthPair | HomographyPair]:
    """`cameras.json` (depth_step, views with image, depth, K, E and group): pairs of different viewpoints, or
    those of one viewpoint under two lights."""
    if not _is_rendered(folder):
        return
    path = folder / "cameras.json"
    scene = read_rows(path, ("views", "depth_step"))[0]
    for pair in pairs_of(folder, scene["views"]):
        rows = [scene["views"][number] for number in pair]
        images, lights = [row["image"] for row in rows], [row.get("light") for row in rows]
        if (rows[0]["E"] == rows[1]["E"]) != relit:
            continue
        if relit:
            kinds = (str(scene["lights"][k]["kind"] if scene.get("lights") else k) for k in lights)
            yield HomographyPair(*_named(folder, images, " and ".join(sorted(kinds))), np.eye(3))
            continue
        views = []
        for row in rows:
            K, E = read_array(row["K"], (3, 3), path), read_array(row["E"], (4, 4), path)
            views.append(DepthCamera(folder / row["depth"], int(scene["depth_step"]), K, E))
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= 0.15:  # less is hopeless
            light = "same light" if lights[0] == lights[1] else "different lights"
            yield _pair(folder, images, views, overlap, more=f"; {light}")


def _is_rendered(folder: Path) -> bool:
    return not (folder / "pairs.json").exists() or b'"views"' in (folder / "cameras.json").read_bytes()


def _named(folder: Path, images: Sequence[str], group: str) -> tuple[str, str, PairImage, PairImage]:
    return "-".join(Path(name).stem for name in images), group, *(PairImage(folder / n) for n in images)


def _pair(
    folder: Path,
    images: Sequence[str],
    views: Sequence[DepthCamera],
    overlap: float,
    angles: Sequence[float] = (0, 15, 30, 60, 181),
    more: str = "",
) -> DepthPair:
    least, most = _between(overlap, (0.0, 0.3, 0.5, 1.01))
    low, high = _between(_angle(*views), angles)
    group = f"overlap {100 * least:.0f}–{min(100, 100 * most):.0f} %; angle {low}–{min(180, high)}°{more}"
    pose = views[1].cam_from_world @ np.linalg.inv(views[0].cam_from_world)
    return DepthPair(*_named(folder, images, group), views[0].K, views[1].K, pose, *views)


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that are visible in view 1."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, 16) for side in (width, height)))  # enough
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    reprojected, visible = reproject(points, view0, view1)
    known = ~np.isnan(reprojected[:, 0])
    return float(visible[known].mean()) if known.any() else 0.0


def _angle(view0: DepthCamera, view1: DepthCamera) -> float:
    """Degrees between the optical axes."""
    axes = view0.cam_from_world[2, :3] @ view1.cam_from_world[2, :3]
    return float(np.degrees(np.arccos(np.clip(axes, -1, 1))))


def _between(value: float, bounds: Sequence[float]) -> tuple[float, float]:
    at = int(np.clip(np.searchsorted(bounds, value, side="right"), 1, len(bounds) - 1))
    return bounds[at - 1], bounds[at]


# Stored views: folders in the layout of `rendered` that are trained on, rendered or of real places.


class StoredSet(NamedTuple):
    """One folder of views."""

    folder: Path
    views: list[dict[str, Any]]  # as in cameras.json
    step: int  # pixels from one sample of the depth maps to the next
    pairs: np.ndarray  # (P, 2) int64


def find_stored_sets(root: Path) -> list[StoredSet]:
    """All sets below a folder, sorted, that have pairs; `UsageError` without any."""
    sets = []
    for path in sorted(root.rglob("cameras.json")):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            views, step = list(stored["views"]), int(stored["depth_step"])
        except MALFORMED as error:
            raise IntegrityError(f"{path} is damaged ({error})") from error
        sets.append(StoredSet(path.parent, views, step, pairs_of(path.parent, views)))
    sets = [each for each in sets if len(each.pairs)]
    if not sets:
        raise UsageError(f"{root}: no views here (looked for folders with cameras.json)")
    return sets


def pairs_of(folder: Path, views: Sequence[dict[str, Any]]) -> np.ndarray:
    """(P, 2) int64 the pairs of views that `pairs.json` lists, or without it all pairs of a group."""
    path = folder / "pairs.json"
    try:
        if path.exists():
            pairs = [row[:2] for row in json.loads(path.read_text(encoding="utf-8"))]
        else:
            path, groups = folder / "cameras.json", [view["group"] for view in views]
            pairs = [(i, j) for i, j in combinations(range(len(views)), 2) if groups[i] == groups[j]]
        found = np.array(pairs, np.int64).reshape(-1, 2)
    except MALFORMED as error:
        raise IntegrityError(f"{path} is damaged ({error})") from error
    if found.size and not 0 <= found.min() <= found.max() < len(views):
        raise IntegrityError(f"{path} lists views that are not in {folder / 'cameras.json'}")
    return found
