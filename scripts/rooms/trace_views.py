"""Draw training views of rooms by ray casting, with exact depth and poses: under a second a view on one core.

    python trace_views.py OUT --worlds DIR --photos DIR [--rooms 100] [--first-seed 1] [--views 24]

Runs in an environment of its own: Python 3.11,
`pip install embreex trimesh numba numpy opencv-python-headless pillow`.
A room is composed from its seed: furniture of the training worlds (`small_house.glb`, `hospital.glb` and
`warehouse.glb` in DIR) and new pieces, materials, posters, clutter and lamps; every fifth or so is one of the
worlds. Cameras look at a common spot from all sides. Each room is a set OUT/roomNNNN as
`matcher.evaluate.folders` reads it, written as a whole; rooms that exist are skipped. The rows of
pairs.json have the angle between the optical axes in degrees as their fourth number.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import cv2
import numpy as np
from tracing.cameras import (
    DEPTH_STEP,
    HEIGHT,
    LARGEST_GROUP,
    SMALLEST_GROUP,
    WIDTH,
    Camera,
    draw_group,
    list_pairs,
    room_around,
)
from tracing.furniture import Maker
from tracing.library import Library, load_library
from tracing.lights import light_up
from tracing.rooms import Composer, Room
from tracing.shading import Lighting, Scene, develop
from tracing.surfaces import Photos

FAR = 60.0  # metres; farther points have no depth
WORLDS_SHARE = 0.2  # of the rooms are worlds as they are
CANDIDATES = 6  # spots, of which the one with the most room around it is used
AGAIN_SHARE = 0.17  # of the views show a pose once more in other light
Shot = tuple[Camera, Lighting, int, str]  # with the group and the name of the light


def plan(scene: Scene, room: Room, views: int, rng: np.random.Generator) -> list[Shot]:
    """Cameras in groups, all of a group in one light, and some of them again in another one."""
    fresh = views - round(AGAIN_SHARE * views)
    shots: list[Shot] = []
    for group in range(100):
        spots = [
            room.spots[rng.integers(len(room.spots))] for _ in range(1 if group % 5 == 4 else CANDIDATES)
        ]
        spot = max(spots, key=lambda place: room_around(scene, place))
        count = int(rng.integers(SMALLEST_GROUP, LARGEST_GROUP + 1))
        left = fresh - len(shots)
        cameras = draw_group(scene, spot, room.bounds, left if left < count + 3 else count, rng)
        if len(cameras) < min(left, SMALLEST_GROUP - 2):
            continue
        light = light_up(room, spot, rng)
        shots += [(camera, light, group, f"{group}a") for camera in cameras]
        if len(shots) >= fresh:
            break
    else:
        raise RuntimeError("no place for cameras in this room")
    for number in rng.permutation(len(shots))[: views - len(shots)]:
        camera, _, group, _ = shots[number]
        shots.append(
            (camera, light_up(room, camera.centre + camera.rotation[2], rng), group, f"{group}b{number}")
        )
    return shots


def draw_room(folder: Path, seed: int, views: int, library: Library, photos: Photos) -> list[list[float]]:
    """Compose, draw and write one room; returns its pairs."""
    rng = np.random.default_rng(seed)
    composer = Composer(library, Maker(rng, photos))
    room = composer.visit() if rng.random() < WORLDS_SHARE else composer.compose()
    scene = Scene(room.parts)
    rows, depths, cameras = [], [], []
    for number, (camera, light, group, name) in enumerate(plan(scene, room, views, rng)):
        colours, z = scene.draw(camera, light)
        z = np.where(z < FAR, z, np.inf)
        image, depth = f"{number:04d}.jpg", f"{number:04d}_depth.png"
        quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(84, 97))]
        cv2.imwrite(str(folder / image), develop(colours, rng), quality)
        stored = np.rint(np.where(np.isfinite(z), z, 0) * 1000).astype(np.uint16)
        cv2.imwrite(str(folder / depth), stored, [cv2.IMWRITE_PNG_COMPRESSION, 1])
        rows.append({"image": image, "depth": depth, "group": group, "light": name,
                     "K": camera.K.tolist(), "E": camera.cam_from_world.tolist()})  # fmt: skip
        depths.append(z)
        cameras.append(camera)
    pairs = list_pairs(cameras, depths)
    content = {
        "seed": seed, "width": WIDTH, "height": HEIGHT, "depth_step": DEPTH_STEP, "views": rows,
        "convention": "x = K (R X + t), OpenCV axes, first pixel's centre at (0, 0), E camera from world, m",
    }  # fmt: skip
    (folder / "cameras.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    return pairs


def main() -> None:
    """Parse, and draw room after room."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--worlds", type=Path, required=True)
    parser.add_argument("--photos", type=Path, required=True)
    for name, value in {"rooms": 100, "first-seed": 1, "views": 24}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    cv2.setNumThreads(1)
    library, photos = load_library(asked.worlds), Photos(asked.photos)
    for seed in range(asked.first_seed, asked.first_seed + asked.rooms):
        folder = asked.out / f"room{seed:04d}"
        if folder.exists():
            continue
        unfinished = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        begin = time.time()
        try:
            pairs = draw_room(unfinished, seed, asked.views, library, photos)
        except RuntimeError as error:
            shutil.rmtree(unfinished)
            print(f"{folder.name}: left out, {error}", flush=True)
            continue
        unfinished.rename(folder)
        angles = np.array([row[3] for row in pairs] or [0])
        print(
            f"{folder.name}: {(time.time() - begin) / asked.views:.2f} s a view, {len(pairs)} pairs, "
            f"{(angles > 45).mean():.0%} over 45°, {(angles > 90).mean():.0%} over 90°",
            flush=True,
        )


if __name__ == "__main__":
    main()
