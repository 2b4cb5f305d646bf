"""Readers of the benchmark folders used in development: each turns a folder into a `PairSet`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.data.images import read_image
from matcher.errors import UsageError
from matcher.lab.pairs.protocols import CorrespondencePair, HomographyPair, PairImage, PairSet, PosePair

MAX_LANDMARK_RESIDUAL = 3.0  # pixels; coarser pairs of `multimodal` are left out
FRAME_GAPS = (3, 8, 15)
_VIEW_SUFFIXES = (".png", ".ppm", ".pgm", ".jpg")


def read_affine(folder: Path) -> PairSet:
    """The Oxford affine-covariant layout: img1 … imgN, H1toNp (3×3 text), in the folder or its subfolders."""
    pairs = []
    for sequence in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        for homography in sorted(sequence.glob("H1to*p")):
            number = homography.name.removeprefix("H1to").removesuffix("p")
            if number == "1":
                continue
            sides = (PairImage(_view(sequence, "img1")), PairImage(_view(sequence, f"img{number}")))
            name = f"{sequence.name} 1-{number}"
            pairs.append(HomographyPair(name, sequence.name, *sides, read_matrix(homography, (3, 3))))
    return PairSet(folder.resolve().name, "homography", tuple(pairs), oracle=True)


def read_opencv_homography(folder: Path) -> PairSet:
    """The graf pair of OpenCV's samples: graf1.png → graf3.png, H1to3p.xml (FileStorage)."""
    path = folder / "H1to3p.xml"
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    try:
        matrix = storage.getNode("H13").mat()
    finally:
        storage.release()
    if matrix is None or matrix.shape != (3, 3):
        raise UsageError(f"{path}: no 3×3 matrix named H13; fetch the file again")
    sides = (PairImage(folder / "graf1.png"), PairImage(folder / "graf3.png"))
    pair = HomographyPair("graf 1-3", "graf", *sides, matrix)
    return PairSet(f"{folder.resolve().name}-homography", "homography", (pair,), oracle=True)


def read_opencv_stereo(folder: Path) -> PairSet:
    """The aloe pair of OpenCV's samples: aloeL.jpg, aloeR.jpg, aloeGT.png (disparity, 0 = unknown)."""
    points0, points1 = _disparity_points(folder / "aloeGT.png", 1.0)
    sides = (PairImage(folder / "aloeL.jpg"), PairImage(folder / "aloeR.jpg"))
    pair = CorrespondencePair("aloe", "aloe", *sides, points0, points1)
    return PairSet(f"{folder.resolve().name}-stereo", "correspondences", (pair,), oracle=True)


def read_middlebury(folder: Path) -> PairSet:
    """Middlebury 2003 stereo: SCENE/im2.png, im6.png, disp2.pgm (disparity × 4, 0 = unknown)."""
    pairs = []
    for scene in sorted(path.parent for path in folder.glob("*/disp2.pgm")):
        sides = (PairImage(scene / "im2.png"), PairImage(scene / "im6.png"))
        points = _disparity_points(scene / "disp2.pgm", 0.25)
        pairs.append(CorrespondencePair(scene.name, scene.name, *sides, *points))
    return PairSet(folder.resolve().name, "correspondences", tuple(pairs), oracle=True)


def read_multimodal(folder: Path) -> PairSet:
    """Remote-sensing pairs with homographies fitted to landmarks; coarse and non-rigid pairs are left out."""
    pairs, left_out = [], 0
    keys = ("pair", "category", "image_fix", "image_mov", "landmark_median_residual_px", "nonrigid")
    for row in read_rows(folder / "pairs.json", keys):
        if not row["landmark_median_residual_px"] < MAX_LANDMARK_RESIDUAL or row["nonrigid"]:
            left_out += 1
            continue
        path = folder / f"{row['pair']}_gt.json"
        (row_of_pair,) = read_rows(path, ("H_mov_to_fix_0based",))
        matrix = read_array(row_of_pair["H_mov_to_fix_0based"], (3, 3), path)
        sides = (PairImage(folder / row["image_mov"]), PairImage(folder / row["image_fix"]))
        pairs.append(HomographyPair(row["pair"], Path(row["category"]).name, *sides, matrix))
    note = (
        f"The ground truth is accurate to 1-2 px. {left_out} pairs that are not rigid or whose median "
        f"landmark residual is {MAX_LANDMARK_RESIDUAL:g} px or more are left out"
    )
    return PairSet(folder.resolve().name, "homography", tuple(pairs), oracle=True, note=note)


def read_kitti(folder: Path) -> PairSet:
    """KITTI-like sequences: image_l/*.png, calib.txt (P0 first), poses.txt (world_from_cam)."""
    pairs = []
    for sequence, frames, rows in _sequences(folder):
        K = read_matrix(sequence / "calib.txt", (-1, 12))[0].reshape(3, 4)[:, :3]
        world_from_cam = [np.vstack([pose, [0, 0, 0, 1]]) for pose in rows]
        for gap in FRAME_GAPS:
            for a in range(len(frames) - gap):
                b = a + gap
                name, pose = f"{sequence.name} {a}-{b}", np.linalg.inv(world_from_cam[b]) @ world_from_cam[a]
                sides = (PairImage(frames[a]), PairImage(frames[b]))
                pairs.append(PosePair(name, f"gap {gap}", *sides, K, K, pose))
    return PairSet(folder.resolve().name, "pose", tuple(pairs))


def distant_frames(folder: Path, metres: float) -> list[tuple[Path, Path]]:
    """Pairs of left frames of one of these sequences whose cameras are so many metres apart, or more."""
    return [
        (frames[a], frames[b])
        for _, frames, poses in _sequences(folder)
        for a, b in combinations(range(len(frames)), 2)
        if np.linalg.norm(poses[a][:, 3] - poses[b][:, 3]) >= metres
    ]


def _sequences(folder: Path) -> Iterator[tuple[Path, list[Path], np.ndarray]]:
    """Each sequence, its left frames, and their (N, 3, 4) world_from_cam in metres."""
    for sequence in sorted(path.parent for path in folder.rglob("poses.txt")):
        frames = sorted((sequence / "image_l").glob("*.png"))
        poses = read_matrix(sequence / "poses.txt", (-1, 12)).reshape(-1, 3, 4)
        if len(frames) != len(poses):
            raise UsageError(f"{sequence}: {len(frames)} images but {len(poses)} poses; fetch it again")
        yield sequence, frames, poses


def read_posed(folder: Path) -> PairSet:
    """All pairs of the photos in poses.json: image, K, R (cam_from_world), C (centre); arbitrary scale."""
    path = folder / "poses.json"
    rows = read_rows(path, ("image", "K", "R", "C"))
    present = [view for view in rows if (folder / view["image"]).is_file()]
    pairs = []
    for view0, view1 in combinations(present, 2):
        (K0, pose0), (K1, pose1) = (_camera(view, path) for view in (view0, view1))
        sides = (PairImage(folder / view0["image"]), PairImage(folder / view1["image"]))
        name = f"{Path(view0['image']).stem}-{Path(view1['image']).stem}"
        pairs.append(PosePair(name, "", *sides, K0, K1, pose1 @ np.linalg.inv(pose0)))
    note = "The poses come from structure from motion and are not independent ground truth"
    if len(present) < len(rows):
        note += f". {len(rows) - len(present)} of {len(rows)} listed photos are absent"
    return PairSet(folder.resolve().name, "pose", tuple(pairs), note=note)


def read_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The numbers of a text file as a float64 array of that shape; −1 stands for any length.

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        matrix = np.loadtxt(path, dtype=np.float64).reshape(shape)
    except (OSError, ValueError) as error:
        wanted = "×".join("n" if side < 0 else str(side) for side in shape)
        raise UsageError(
            f"{path}: not a text file of {wanted} numbers ({error}); fetch the file again"
        ) from error
    if not np.isfinite(matrix).all():
        raise UsageError(f"{path}: has numbers that are not finite; fetch the file again")
    return matrix


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file, one or a list, each with at least these keys.

    Raises:
        UsageError: the file cannot be read, or an object lacks a key.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    rows = found if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows):
        raise UsageError(f"{path}: not the file of a benchmark; objects with {', '.join(keys)} are needed")
    return rows


def read_array(values: Any, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Values read from `path` as a float64 array of that shape.

    Raises:
        UsageError: the values do not have that shape or are not numbers.
    """
    try:
        return np.array(values, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {shape} numbers are needed ({error}); fetch the file again") from error


def _view(folder: Path, stem: str) -> Path:
    for suffix in _VIEW_SUFFIXES:
        if (path := folder / f"{stem}{suffix}").is_file():
            return path
    raise UsageError(f"{folder}: no image {stem} ({', '.join(_VIEW_SUFFIXES)}) for its homography")


def _disparity_points(path: Path, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """(K, 2), (K, 2) float32: the pixels of known disparity and their positions in the right image."""
    disparity = read_image(path, resize=None).pixels
    if disparity.ndim == 3:
        disparity = disparity[..., 0]
    y, x = np.nonzero(disparity)
    points0 = np.stack([x, y], axis=1).astype(np.float32)
    points1 = points0.copy()
    points1[:, 0] -= disparity[y, x].astype(np.float32) * np.float32(factor)
    return points0, points1


def _camera(view: dict[str, Any], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """K (3, 3) and cam_from_world (4, 4)."""
    pose = np.eye(4)
    pose[:3, :3] = read_array(view["R"], (3, 3), path)
    pose[:3, 3] = -pose[:3, :3] @ read_array(view["C"], (3,), path)
    return read_array(view["K"], (3, 3), path), pose
