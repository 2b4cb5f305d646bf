"""Views of a made-up building with four equal sides, and where they were taken.

    python scripts/rooms/render_building.py ../shared/photos/val OUT
    python scripts/measure.py reconstruction OUT/photos --work NEW_DIR    # one model, and no camera elsewhere

The building stands on ground of photos, among boards that show others: all that tells its sides apart.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from matcher.evaluate.synthetic import degrade, looking, photo, repeating
from matcher.images import find_images

SIZE, FOCAL, FINER = (640, 480), 520.0, 2  # pixels; rays a pixel and side
SIDE, HEIGHT = 10.0, 7.5  # metres, of the building


class Quad(NamedTuple):
    """A picture in the world, y downwards: a corner, and its sides to the right and down."""

    texture: np.ndarray
    corner: np.ndarray
    right: np.ndarray
    down: np.ndarray


def upright(texture: np.ndarray, centre: np.ndarray, angle: float, width: float, height: float) -> Quad:
    """A board or wall that stands on the ground and is seen from the direction of an angle."""
    right = width * np.array([np.cos(angle), 0.0, -np.sin(angle)])
    return Quad(texture, centre - right / 2 - [0, height, 0], right, np.array([0.0, height, 0.0]))


def world(photos: list[Path], rng: np.random.Generator, boards: int) -> list[Quad]:
    """Ground, four equal walls, and boards around."""
    ground = np.vstack([np.hstack([photo(photos, rng, (320, 240)) for _ in range(10)]) for _ in range(13)])
    found = [Quad(ground, np.array([-30.0, 0, -30]), np.array([60.0, 0, 0]), np.array([0.0, 0, 60]))]
    wall = repeating("façade", photos, rng)
    for angle in np.arange(4) * np.pi / 2:
        out = np.array([np.sin(angle), 0, np.cos(angle)])
        found.append(upright(wall, out * SIDE / 2, angle, SIDE, HEIGHT))
    for angle in np.linspace(0, 2 * np.pi, boards, endpoint=False) + rng.uniform(-0.1, 0.1, boards):
        at = rng.uniform(22, 28) * np.array([np.sin(angle), 0, np.cos(angle)])
        found.append(upright(photo(photos, rng, (400, 300)), at, angle + np.pi, 8.0, 6.0))
    return found


def view(quads: list[Quad], cam_from_world: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W, 3): the nearest picture along each ray."""
    width, height = np.multiply(SIZE, FINER)
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    rays = np.stack([x - (width - 1) / 2, y - (height - 1) / 2, np.full(x.shape, FINER * FOCAL)], -1)
    rays, eye = rays @ cam_from_world[:3, :3], -cam_from_world[:3, :3].T @ cam_from_world[:3, 3]
    canvas, nearest = np.full((height, width, 3), 205, np.uint8), np.full(x.shape, np.inf)
    for texture, corner, right, down in quads:
        normal = np.cross(right, down)
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = ((corner - eye) @ normal) / (rays @ normal)
            u, v = ((eye + depth[..., None] * rays - corner) @ side / (side @ side) for side in (right, down))
        seen = (depth > 0) & (depth < nearest) & (u >= 0) & (u <= 1) & (v >= 0) & (v <= 1)
        place = [
            np.float32(np.nan_to_num(s) * n - 0.5) for s, n in zip((u, v), texture.shape[1::-1], strict=True)
        ]
        canvas[seen] = cv2.remap(texture, *place, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)[seen]
        nearest[seen] = depth[seen]
    return degrade(cv2.resize(canvas, SIZE, interpolation=cv2.INTER_AREA), 0.3, rng)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--views", type=int, default=24)
    parser.add_argument("--boards", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, poses = np.random.default_rng(given.seed), []
    quads = world(find_images(given.photos), rng, given.boards)
    (given.out / "photos").mkdir(parents=True)
    for number, angle in enumerate(np.linspace(0, 2 * np.pi, given.views, endpoint=False)):
        eye = rng.uniform(15, 18) * np.array([np.sin(angle), 0, np.cos(angle)]) - [
            0,
            rng.uniform(1.5, 3.5),
            0,
        ]
        pose = looking(eye, (*rng.uniform(-1.5, 1.5, 1), -2.5, *rng.uniform(-1.5, 1.5, 1)))
        name = f"{number:03d}.jpg"
        cv2.imwrite(str(given.out / "photos" / name), view(quads, pose, rng)[..., ::-1])
        poses.append({"image": name, "C": eye.tolist()})
    (given.out / "poses.json").write_text(json.dumps(poses))


if __name__ == "__main__":
    main()
