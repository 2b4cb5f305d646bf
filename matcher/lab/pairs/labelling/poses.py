"""Poses of the photos of a folder: COLMAP's incremental mapping (extra `sfm`) of SIFT and learned matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.data.photos import find_images
from matcher.lab.pairs.labelling.matching import extract_features, match_images

MIN_IMAGES = 4  # of a model
MAX_ERROR = 1.0  # pixels, mean reprojection error of a point


@dataclass(frozen=True, eq=False)
class PosedImage:
    """An undistorted image, its camera, and the 3D points that are visible in it."""

    name: str
    pixels: np.ndarray  # (H, W, 3) uint8 blue, green, red
    K: np.ndarray  # (3, 3); the centre of the first pixel is (0, 0)
    cam_from_world: np.ndarray  # (4, 4)
    points: np.ndarray  # (P,) int64 ids of its 3D points, each visible in three images or more
    depths: np.ndarray  # (P,) z of them
    positions: np.ndarray  # (P, 2) pixels, projected


def estimate_poses(folder: Path, work: Path) -> list[list[PosedImage]]:
    """Models of the photos below `folder`, the largest first; COLMAP's files are written to `work`.

    Raises:
        UsageError: no photos.
        ImportError: pycolmap is not installed.
    """
    import pycolmap

    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    images = work / "images"
    for photo in find_images(folder):
        # Upright and without EXIF, one folder per size: images of one folder share a camera.
        colour = cv2.imread(str(photo), cv2.IMREAD_COLOR)
        target = images / f"{colour.shape[1]}x{colour.shape[0]}"
        target.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / f"{photo.stem}.png"), colour)
    database = work / "database.db"
    if not database.exists():
        _match(pycolmap, database, images)
    models = _map(pycolmap, database, images, work)
    chosen, posed = [], set()
    for model in models:
        names = {model.image(number).name for number in model.reg_image_ids()}
        if len(names - posed) >= MIN_IMAGES:  # otherwise a larger model has the same images
            chosen.append(_posed_images(model, images))
            posed |= names
    return chosen


def _match(pycolmap: object, database: Path, folder: Path) -> None:
    """Fill COLMAP's database: cameras, keypoints, matches and verified matches."""
    new = database.with_suffix(".new")
    new.unlink(missing_ok=True)
    pycolmap.Database.open(new).close()
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = "SIMPLE_RADIAL"
    pycolmap.import_images(new, folder, camera_mode=pycolmap.CameraMode.PER_FOLDER, options=reader)
    store = pycolmap.Database.open(new)
    images = sorted(store.read_all_images(), key=lambda image: Path(image.name).name)
    features = extract_features([folder / image.name for image in images])
    for image, found in zip(images, features, strict=True):
        store.write_keypoints(image.image_id, found.points + 0.5)
    lines = []
    for i, j, found in match_images(features):
        store.write_matches(images[i].image_id, images[j].image_id, found.astype(np.uint32))
        lines.append(f"{images[i].name} {images[j].name}")
    store.close()
    listed = database.with_name("pairs.txt")
    listed.write_text("\n".join(lines), encoding="utf-8")
    pycolmap.verify_matches(new, listed)
    new.rename(database)


def _map(pycolmap: object, database: Path, folder: Path, work: Path) -> list[object]:
    options = pycolmap.IncrementalPipelineOptions()
    options.num_threads, options.random_seed, options.min_model_size = 1, 0, MIN_IMAGES
    options.mapper.init_min_tri_angle, options.mapper.filter_max_reproj_error = 8.0, 2.0
    output = work / "models"
    output.mkdir(exist_ok=True)
    models = pycolmap.incremental_mapping(database, folder, output, options)
    return sorted(models.values(), key=lambda model: -model.num_reg_images())


def _posed_images(model: object, folder: Path) -> list[PosedImage]:
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda i: i.name)
    return [_undistorted(model, image, folder) for image in images]


def _undistorted(model: object, image: object, folder: Path) -> PosedImage:
    focal, cx, cy, radial = model.camera(image.camera_id).params
    K = np.array([[focal, 0, cx - 0.5], [0, focal, cy - 0.5], [0, 0, 1]])
    pose = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
    pixels = cv2.imread(str(folder / image.name), cv2.IMREAD_COLOR)
    ids = [point.point3D_id for point in image.points2D if point.has_point3D()]
    ids = [number for number in ids if _reliable(model.point3D(number))]
    xyz = np.array([model.point3D(number).xyz for number in ids]).reshape(-1, 3)
    points = xyz @ pose[:3, :3].T + pose[:3, 3]
    positions = (points @ K.T)[:, :2] / points[:, 2:]
    pixels = cv2.undistort(pixels, K, np.array([radial, 0.0, 0, 0]))
    return PosedImage(
        Path(image.name).stem, pixels, K, pose, np.array(ids, np.int64), points[:, 2], positions
    )


def _reliable(point: object) -> bool:
    return len(point.track.elements) >= 3 and point.error < MAX_ERROR


def viewing_angles(images: Sequence[PosedImage]) -> tuple[np.ndarray, np.ndarray]:
    """(N, N) numbers of common points, and (N, N) triangulation angles in degrees: of the baseline of two
    cameras at the median depth of their common points."""
    count = len(images)
    common, angles = np.zeros((count, count), int), np.zeros((count, count))
    centres = [-p.cam_from_world[:3, :3].T @ p.cam_from_world[:3, 3] for p in images]
    for i in range(count):
        for j in range(count):
            shared = np.isin(images[i].points, images[j].points)
            common[i, j] = shared.sum() if i != j else 0
            if common[i, j]:
                depth = float(np.median(images[i].depths[shared]))
                baseline = float(np.linalg.norm(centres[i] - centres[j]))
                angles[i, j] = np.rad2deg(np.arctan2(baseline, depth))
    return common, angles
