"""Calibrated views of a scene with depth maps: sets of pairs, views to train on, and photos to localise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from matcher.cameras import Camera
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import camera_of, read_array, read_object, read_rows
from matcher.evaluate.protocols import DepthCamera, DepthPair, HomographyPair, PairImage, PairSet, reproject
from matcher.images import data_folder, find_images
from matcher.sfm.models import read_given_poses

OVERLAPS = (0.0, 0.3, 0.5, 1.01)  # bounds of the overlap groups
ANGLES = (0, 15, 30, 60, 181)  # degrees between the optical axes
DRAWN_ANGLES = (8, 30, 60, 110, 181)  # of pairs that are drawn, as many between each two
DRAWN_OVERLAPS = (0.2, 0.75)  # between which they share their views, the smaller one of both directions
MIN_OVERLAP = 0.15  # the smaller one of both directions; pairs below are left out
SAMPLING = 16  # pixels between the points by which overlap is measured
TRACKED = (
    "The poses come from the headset's own tracking and reproject to within about 3 px over ten frames: rely "
    "on the pose AUC and on precision@10 px"
)


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
    return [PairSet(folder.resolve().name, "depth", tuple(pairs), note=TRACKED)]


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
    return PairSet(f"{folder.resolve().name}_angles", "depth", tuple(pairs), note=TRACKED)


def read_rendered(folder: Path) -> list[PairSet]:
    """Two sets: pairs of views of one group from different viewpoints, and pairs from one viewpoint under
    two lights."""
    path = folder / "cameras.json"
    scene = read_object(path, ("views", "depth_step"))
    posed, relit, lights = [], [], scene.get("lights")
    for pair in pairs_of(folder, scene["views"]):
        rows = [scene["views"][number] for number in pair]
        sides = [PairImage(folder / row["image"]) for row in rows]
        name, kinds = "-".join(Path(row["image"]).stem for row in rows), [row.get("light") for row in rows]
        if rows[0]["E"] == rows[1]["E"]:
            names = sorted(str(kind if lights is None else lights[kind]["kind"]) for kind in kinds)
            relit.append(HomographyPair(name, " and ".join(names), *sides, np.eye(3)))
            continue
        views = [
            DepthCamera(
                folder / row["depth"],
                int(scene["depth_step"]),
                read_array(row["K"], (3, 3), path),
                read_array(row["E"], (4, 4), path),
            )
            for row in rows
        ]
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= MIN_OVERLAP:
            light = "same light" if kinds[0] == kinds[1] else "different lights"
            groups = _overlap_group(overlap), _angle_group(_angle(*views), ANGLES), light
            posed.append(_depth_pair(name, groups, sides, views))
    title = folder.resolve().name
    found = [PairSet(title, "depth", tuple(posed), note="Depth and poses are exact")]
    if relit:
        found.append(PairSet(f"{title}-light", "homography", tuple(relit)))
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
    return _depth_pair("-".join(Path(name).stem for name in names), groups, sides, views)


def _depth_pair(
    name: str, groups: tuple[str, ...], sides: Sequence[PairImage], views: Sequence[DepthCamera]
) -> DepthPair:
    view0, view1 = views
    pose = view1.cam_from_world @ np.linalg.inv(view0.cam_from_world)
    return DepthPair(name, groups[0], *sides, view0.K, view1.K, pose, view0, view1, groups[1:])


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that are visible in view 1."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, SAMPLING) for side in (width, height)))
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    reprojected, visible = reproject(points, view0, view1)
    known = ~np.isnan(reprojected[:, 0])
    return float(visible[known].mean()) if known.any() else 0.0


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


# --- Stored views: folders in the layout of `read_rendered` that are trained on, rendered or of real places.


@dataclass(frozen=True, eq=False)
class StoredSet:
    """One folder of views."""

    folder: Path
    views: list[dict[str, Any]]  # as in cameras.json
    step: int  # pixels from one sample of the depth maps to the next
    pairs: np.ndarray  # (P, 2) int64

    @property
    def scene(self) -> str:
        """The scene: sets of one scene are named after it and a number, as `castle_7` or `castle-1`."""
        return re.sub(r"[-_]\d+$", "", self.folder.name)


def find_stored_sets(root: Path) -> list[StoredSet]:
    """All sets below a folder, sorted, that have pairs.

    Raises:
        UsageError: there is none.
        IntegrityError: a set's cameras.json or pairs.json is damaged.
    """
    sets = []
    for path in sorted(root.rglob("cameras.json")):
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            views, step = list(stored["views"]), int(stored["depth_step"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{path} is damaged ({error})") from error
        sets.append(StoredSet(path.parent, views, step, pairs_of(path.parent, views)))
    sets = [each for each in sets if len(each.pairs)]
    if not sets:
        raise UsageError(f"{root}: no views here (looked for folders with cameras.json)")
    return sets


def pairs_of(folder: Path, views: Sequence[dict[str, Any]]) -> np.ndarray:
    """(P, 2) int64 the pairs of views that `pairs.json` lists; without it all pairs of a group.

    Raises:
        IntegrityError: the views have no groups, or `pairs.json` is damaged or not of these views.
    """
    path = folder / "pairs.json"
    try:
        if path.exists():
            pairs = [row[:2] for row in json.loads(path.read_text(encoding="utf-8"))]
        else:
            path, groups = folder / "cameras.json", [view["group"] for view in views]
            pairs = [(i, j) for i, j in combinations(range(len(views)), 2) if groups[i] == groups[j]]
        found = np.array(pairs, np.int64).reshape(-1, 2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged ({error})") from error
    if found.size and not 0 <= found.min() <= found.max() < len(views):
        raise IntegrityError(f"{path} lists views that are not in {folder / 'cameras.json'}")
    return found


# --- Photos with true poses and cameras in the order of time, to localise.

Split = Literal["last", "blocks", "even"]
BLOCK = 15  # photos of a block
NAMED = {
    "kitchen": Path("multiview") / "val" / "kitchen",
    "sceaux_castle": Path("bench") / "sceaux_castle",
    "kitti_mini": Path("bench") / "kitti_mini" / "KITTI_sequence_1",
}


@dataclass(frozen=True, eq=False)
class PosedPhotos:
    """Photos below a folder, their poses cam_from_world (4, 4) and cameras, by name."""

    title: str
    folder: Path
    names: tuple[str, ...]  # in the order of time
    poses: dict[str, np.ndarray]
    cameras: dict[str, Camera]
    with_map: dict[str, str] = field(default_factory=dict)  # photos that enter the map with another: stereo

    def split(self, how: Split) -> tuple[list[str], list[str]]:
        """Photos of the map, and those to localise.

        "last": the last third is localised. "blocks": every third block of 15 photos in the order of time.
        "even": photos of even number are the map, the others are localised.
        """
        count = len(self.names)
        index = np.arange(count)
        if how == "last":
            asked = index >= -(-2 * count // 3)
        elif how == "blocks":
            asked = (index // BLOCK) % 3 == 2
        else:
            asked = index % 2 == 1
        kept = [name for name, out in zip(self.names, asked, strict=True) if not out]
        beside = [self.with_map[name] for name in kept if name in self.with_map]
        return kept + beside, [name for name, out in zip(self.names, asked, strict=True) if out]

    def extent(self) -> float:
        """Largest distance between two of the cameras."""
        centres = np.array([np.linalg.inv(self.poses[name])[:3, 3] for name in self.names])
        return float(np.linalg.norm(centres[:, None] - centres, axis=2).max())


def find_posed_photos(where: str) -> PosedPhotos:
    """The photos of a set's name, or of a folder: a recorded set, a castle, KITTI, or COLMAP's layout.

    Raises:
        UsageError: no such folder, or none of these layouts.
    """
    folder = data_folder() / NAMED[where] if where in NAMED else Path(where)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; sets with poses are {', '.join(NAMED)}, or a folder")
    if (folder / "cameras.json").is_file():
        frames = _frames(folder)
        poses = {name: frame.cam_from_world for name, frame in frames.items()}
        cameras = {name: Camera.from_K(frame.K) for name, frame in frames.items()}
        return PosedPhotos(folder.name, folder / "images", tuple(sorted(poses)), poses, cameras)
    if (folder / "calib.txt").is_file():
        return _stereo(folder)
    if (folder / "poses.json").is_file() and (folder / "images").is_dir():
        return _listed(folder)
    given = read_given_poses(folder)  # COLMAP's layout: sparse/ beside images/
    poses, cameras = dict(given.cam_from_world), dict(given.cameras)
    return PosedPhotos(folder.name, folder / "images", tuple(sorted(poses)), poses, cameras)


def find_other_photos(folder: Path, count: int) -> list[Path]:
    """So many photos of a folder, spread over it."""
    found = find_images(folder)
    chosen = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    return [found[index] for index in chosen]


def _listed(folder: Path) -> PosedPhotos:
    poses, cameras = {}, {}
    path = folder / "poses.json"
    for row in read_rows(path, ("image", "K", "R", "C")):
        name = Path(row["image"]).name
        if (folder / "images" / name).is_file():  # the castle's list has one more than there are photos
            K, poses[name] = camera_of(row, path)
            cameras[name] = Camera.from_K(K)
    return PosedPhotos(folder.name, folder / "images", tuple(sorted(poses)), poses, cameras)


def _stereo(folder: Path) -> PosedPhotos:
    left, right = np.loadtxt(folder / "calib.txt").reshape(-1, 3, 4)[:2]
    baseline = np.eye(4)
    baseline[0, 3] = right[0, 3] / right[0, 0]  # of right_from_left
    camera = Camera.from_K(left[:, :3])
    poses = dict(_stereo_poses(folder, baseline))
    names = tuple(sorted(name for name in poses if name.startswith("image_l/")))
    beside = {name: name.replace("image_l/", "image_r/") for name in names}
    return PosedPhotos(folder.name, folder, names, poses, dict.fromkeys(poses, camera), beside)


def _stereo_poses(folder: Path, right_from_left: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    rows = np.loadtxt(folder / "poses.txt").reshape(-1, 3, 4)
    for row, image in zip(rows, sorted((folder / "image_l").iterdir()), strict=False):
        pose = np.linalg.inv(np.vstack([row, [0, 0, 0, 1]]))
        yield f"image_l/{image.name}", pose
        yield f"image_r/{image.name}", right_from_left @ pose
