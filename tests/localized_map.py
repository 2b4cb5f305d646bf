"""A map of five rendered photos with known poses, two more photos of the same place, and one of another."""

from pathlib import Path

import numpy as np
import PIL.Image
from collection_scene import render_photos, texture

import matcher
from matcher.cameras import Camera
from matcher.sfm.models import GivenPoses
from matcher.sfm.reconstruct import reconstruct

SIZE = (480, 360)
CAMERA = Camera(528.0, 528.0, 239.5, 179.5, SIZE)
CAMERA_TEXT = "528,528,239.5,179.5"
QUERIES = ("photo2.png", "photo4.png")


def make_map(folder: Path) -> dict[str, np.ndarray]:
    """Fill a folder with `photos`, `queries`, `elsewhere`, `model`, `model-run`; the true poses by name."""
    poses = render_photos(folder / "photos", count=7)
    (folder / "queries").mkdir()
    for name in QUERIES:
        (folder / "photos" / name).rename(folder / "queries" / name)
    truth = {f"photo{number}.png": pose for number, pose in enumerate(poses)}
    collection = matcher.Collection.open(folder / "model-run", preset="nearest", max_keypoints=600, workers=0)
    collection.add_images(folder / "photos")
    collection.add_pairs(exhaustive=True)
    collection.run()
    with collection.store as store:
        given = GivenPoses(truth, dict.fromkeys(truth, CAMERA))
        reconstruct(store, folder / "model", poses=given, threads=1)
    (folder / "elsewhere").mkdir()
    elsewhere = texture(np.random.default_rng(77), 480)[:360]
    PIL.Image.fromarray(elsewhere).save(folder / "elsewhere" / "wall.png")
    return truth


def pose_error(pose: matcher.Pose, truth: np.ndarray) -> tuple[float, float]:
    """Distance of the centres and angle in degrees."""
    turn = pose.cam_from_world[:3, :3].T @ truth[:3, :3]
    angle = np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1)))
    return np.linalg.norm(pose.centre - np.linalg.inv(truth)[:3, 3]), angle
