"""Poses of the pictures of a folder: COLMAP's incremental mapping (extra `sfm`) of SIFT's and our matches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from matcher.data.photos import find_images
from matcher.lab.pairs.labelling.matching import describe_pictures, match_pictures

MIN_IMAGES = 4  # of a model
MAX_ERROR = 1.0  # pixels, mean reprojection error of a point


@dataclass(frozen=True, eq=False)
class PlacedPicture:
    """A picture without lens distortion, its camera, and the points that it shows."""

    name: str
    pixels: np.ndarray  # (H, W, 3) uint8 blue, green, red
    K: np.ndarray  # (3, 3); the centre of the first pixel is (0, 0)
    cam_from_world: np.ndarray  # (4, 4)
    points: np.ndarray  # (P,) int64 numbers of the points it shows, in three pictures or more
    depths: np.ndarray  # (P,) z of them
    positions: np.ndarray  # (P, 2) pixels, projected


def place_pictures(folder: Path, work: Path) -> list[list[PlacedPicture]]:
    """Models of the pictures below `folder`, the largest first; `work` is filled with what COLMAP needs.

    Raises:
        UsageError: no pictures.
        ImportError: pycolmap is not installed.
    """
    import pycolmap

    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    pictures = work / "pictures"
    for photo in find_images(folder):
        # Upright and without EXIF, in a folder a size: pictures of one folder share a camera.
        colour = cv2.imread(str(photo), cv2.IMREAD_COLOR)
        place = pictures / f"{colour.shape[1]}x{colour.shape[0]}"
        place.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(place / f"{photo.stem}.png"), colour)
    database = work / "database.db"
    if not database.exists():
        _match(pycolmap, database, pictures)
    models = _map(pycolmap, database, pictures, work)
    chosen, placed = [], set()
    for model in models:
        names = {model.image(number).name for number in model.reg_image_ids()}
        if len(names - placed) >= MIN_IMAGES:  # else it shows once more what a larger one has
            chosen.append(_placed(model, pictures))
            placed |= names
    return chosen


def _match(pycolmap: object, database: Path, pictures: Path) -> None:
    """Fill COLMAP's database: cameras, points, matches, and what of them is geometrically sound."""
    new = database.with_suffix(".new")
    new.unlink(missing_ok=True)
    pycolmap.Database.open(new).close()
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = "SIMPLE_RADIAL"
    pycolmap.import_images(new, pictures, camera_mode=pycolmap.CameraMode.PER_FOLDER, options=reader)
    store = pycolmap.Database.open(new)
    images = sorted(store.read_all_images(), key=lambda image: Path(image.name).name)
    described = describe_pictures([pictures / image.name for image in images])
    for image, picture in zip(images, described, strict=True):
        store.write_keypoints(image.image_id, picture.points + 0.5)
    lines = []
    for i, j, found in match_pictures(described):
        store.write_matches(images[i].image_id, images[j].image_id, found.astype(np.uint32))
        lines.append(f"{images[i].name} {images[j].name}")
    store.close()
    listed = database.with_name("pairs.txt")
    listed.write_text("\n".join(lines), encoding="utf-8")
    pycolmap.verify_matches(new, listed)
    new.rename(database)


def _map(pycolmap: object, database: Path, pictures: Path, work: Path) -> list[object]:
    options = pycolmap.IncrementalPipelineOptions()
    options.num_threads, options.random_seed, options.min_model_size = 1, 0, MIN_IMAGES
    options.mapper.init_min_tri_angle, options.mapper.filter_max_reproj_error = 8.0, 2.0
    output = work / "models"
    output.mkdir(exist_ok=True)
    models = pycolmap.incremental_mapping(database, pictures, output, options)
    return sorted(models.values(), key=lambda model: -model.num_reg_images())


def _placed(model: object, pictures: Path) -> list[PlacedPicture]:
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda i: i.name)
    return [_undistorted(model, image, pictures) for image in images]


def _undistorted(model: object, image: object, pictures: Path) -> PlacedPicture:
    focal, cx, cy, radial = model.camera(image.camera_id).params
    K = np.array([[focal, 0, cx - 0.5], [0, focal, cy - 0.5], [0, 0, 1]])
    pose = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
    pixels = cv2.imread(str(pictures / image.name), cv2.IMREAD_COLOR)
    shown = [point.point3D_id for point in image.points2D if point.has_point3D()]
    shown = [number for number in shown if _reliable(model.point3D(number))]
    xyz = np.array([model.point3D(number).xyz for number in shown]).reshape(-1, 3)
    seen = xyz @ pose[:3, :3].T + pose[:3, 3]
    positions = (seen @ K.T)[:, :2] / seen[:, 2:]
    pixels = cv2.undistort(pixels, K, np.array([radial, 0.0, 0, 0]))
    numbers = np.array(shown, np.int64)
    return PlacedPicture(Path(image.name).stem, pixels, K, pose, numbers, seen[:, 2], positions)


def _reliable(point: object) -> bool:
    return len(point.track.elements) >= 3 and point.error < MAX_ERROR


def viewing_angles(pictures: Sequence[PlacedPicture]) -> tuple[np.ndarray, np.ndarray]:
    """(N, N) common points, and (N, N) angles in degrees under which two cameras see their surroundings: that
    of their baseline at the median depth of the first."""
    count = len(pictures)
    common, angles = np.zeros((count, count), int), np.zeros((count, count))
    centres = [-p.cam_from_world[:3, :3].T @ p.cam_from_world[:3, 3] for p in pictures]
    for i in range(count):
        for j in range(count):
            shared = np.isin(pictures[i].points, pictures[j].points)
            common[i, j] = shared.sum() if i != j else 0
            if common[i, j]:
                depth = float(np.median(pictures[i].depths[shared]))
                baseline = float(np.linalg.norm(centres[i] - centres[j]))
                angles[i, j] = np.rad2deg(np.arctan2(baseline, depth))
    return common, angles
