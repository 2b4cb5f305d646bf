"""Photos with true poses and cameras in the order of time, from the layouts of the benchmark sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from matcher.collection.reconstruction.given_poses import read_given_poses
from matcher.data.camera import Camera
from matcher.data.photos import data_folder, find_images
from matcher.errors import UsageError
from matcher.lab.pairs.folders import read_array, read_rows
from matcher.lab.pairs.multiview import read_object

Split = Literal["last", "blocks", "even"]
SPLITS: tuple[Split, ...] = ("last", "blocks", "even")
_BLOCK = 15  # photos of a block
_NAMED = {
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
            asked = (index // _BLOCK) % 3 == 2
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
    folder = data_folder() / _NAMED[where] if where in _NAMED else Path(where)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; sets with poses are {', '.join(_NAMED)}, or a folder")
    if (folder / "cameras.json").is_file():
        return _recorded(folder)
    if (folder / "calib.txt").is_file():
        return _stereo(folder)
    if (folder / "poses.json").is_file() and (folder / "images").is_dir():
        return _listed(folder)
    given = read_given_poses(folder)  # COLMAP's layout: sparse/ beside images/
    names = sorted(given.cam_from_world)
    return PosedPhotos(
        folder.name, folder / "images", tuple(names), dict(given.cam_from_world), dict(given.cameras)
    )


def find_other_photos(folder: Path, count: int) -> list[Path]:
    """So many photos of a folder, spread over it."""
    found = find_images(folder)
    chosen = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    return [found[index] for index in chosen]


def _recorded(folder: Path) -> PosedPhotos:
    path = folder / "cameras.json"
    values = read_object(path, ("K", "frames"))
    poses = {
        row["image"]: np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        for row in values["frames"]
    }
    camera = Camera.from_K(read_array(values["K"], (3, 3), path))
    return PosedPhotos(
        folder.name, folder / "images", tuple(sorted(poses)), poses, dict.fromkeys(poses, camera)
    )


def _listed(folder: Path) -> PosedPhotos:
    poses, cameras = {}, {}
    for row in read_rows(folder / "poses.json", ("image", "K", "R", "C")):
        name = Path(row["image"]).name
        if not (folder / "images" / name).is_file():
            continue  # the castle's list has one more than there are photos
        pose = np.eye(4)
        pose[:3, :3] = row["R"]
        pose[:3, 3] = -pose[:3, :3] @ np.array(row["C"], dtype=np.float64)
        poses[name], cameras[name] = pose, Camera.from_K(row["K"])
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
    images = sorted((folder / "image_l").iterdir())
    for row, image in zip(rows, images, strict=False):
        pose = np.linalg.inv(np.vstack([row, [0, 0, 0, 1]]))
        yield f"image_l/{image.name}", pose
        yield f"image_r/{image.name}", right_from_left @ pose
