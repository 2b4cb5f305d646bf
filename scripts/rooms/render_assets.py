"""Render the views in `assets/`: a still life of photographs, with exact cameras.

    python scripts/rooms/render_assets.py [--output assets]

`view0.jpg` to `view2.jpg` are three views far apart; `walk/` holds twelve along an arc, which the tutorials
reconstruct, follow as a video, and localise.

Needs the `[test]` extra: the photographs come inside scikit-image's wheel (see `assets/README.md`). World
units are metres, x right, y down, z away from the viewer; floor y = 0, wall z = 0. Pixel coordinates follow
`matcher/geometry.py`: the centre of the first pixel is (0, 0).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from skimage import data

SIZE = (800, 600)
K = np.array([[780.0, 0.0, 399.5], [0.0, 780.0, 299.5], [0.0, 0.0, 1.0]])
SUPERSAMPLE = 3
LIGHT = (np.array([-1.7, -3.4, -3.0]), 0.35)  # centre and radius of the lamp
AMBIENT = 0.42


@dataclass(frozen=True)
class Panel:
    """A textured parallelogram: `corner` is its top left, `right` and `down` its edges."""

    corner: np.ndarray
    right: np.ndarray
    down: np.ndarray
    texture: np.ndarray  # (h, w, 3) linear light

    @property
    def texel_to_world(self) -> np.ndarray:
        """(3, 3) matrix from homogeneous texture pixels to world points."""
        height, width = self.texture.shape[:2]
        right, down = self.right / width, self.down / height
        return np.stack([right, down, self.corner + 0.5 * (right + down)], axis=1)


@dataclass(frozen=True)
class View:
    """Position, target and exposure of a camera."""

    centre: tuple[float, float, float]
    target: tuple[float, float, float]
    roll: float  # degrees
    gain: tuple[float, float, float]  # per channel, in linear light
    gamma: float

    @property
    def cam_from_world(self) -> np.ndarray:
        """(4, 4) rigid transform."""
        z = np.subtract(self.target, self.centre)
        z /= np.linalg.norm(z)
        x = np.cross([0.0, 1.0, 0.0], z)
        x /= np.linalg.norm(x)
        a = np.deg2rad(self.roll)
        turn = np.array([[np.cos(a), -np.sin(a), 0.0], [np.sin(a), np.cos(a), 0.0], [0.0, 0.0, 1.0]])
        T = np.eye(4)
        T[:3, :3] = turn @ np.stack([x, np.cross(z, x), z])
        T[:3, 3] = -T[:3, :3] @ np.asarray(self.centre)
        return T


VIEWS = (
    View((-0.75, -1.08, -3.3), (-0.02, -0.76, -0.7), 0.0, (1.05, 1.03, 1.0), 1.0),
    View((0.62, -1.3, -3.1), (-0.02, -0.74, -0.7), 3.0, (0.88, 0.91, 0.95), 1.06),
    View((0.1, -0.85, -3.05), (0.0, -0.74, -0.6), -14.0, (1.2, 1.13, 1.0), 0.96),
)


WALK, WALK_SIZE = 12, (600, 450)


def walk_view(index: int) -> View:
    """A camera on an arc around the still life, a little higher and lower on the way."""
    a = np.deg2rad(-26 + 52 * index / (WALK - 1))
    centre = (3.1 * np.sin(a), -1.1 + 0.12 * np.sin(5 * a), -0.6 - 2.7 * np.cos(a))
    return View(centre, (0.05 * np.sin(3 * a), -0.74, -0.6), 2 * np.sin(4 * a), (1.0, 1.0, 1.0), 1.0)


def quaternion(turn: np.ndarray) -> np.ndarray:
    """(4,) x, y, z, w of a rotation of less than half a turn."""
    w = np.sqrt(1 + np.trace(turn)) / 2
    return np.array([*(turn - turn.T)[[2, 0, 1], [1, 2, 0]] / (4 * w), w])


def write_walk(scene: list[Panel], folder: Path) -> None:
    """The walk's views as JPEG, its poses as TUM's lines (t x y z qx qy qz qw, world_from_cam)."""
    folder.mkdir(exist_ok=True)
    lines = []
    for index in range(WALK):
        view = walk_view(index)
        picture = cv2.resize(render(scene, view, seed=index), WALK_SIZE, interpolation=cv2.INTER_AREA)
        Image.fromarray(picture).save(folder / f"{index:02d}.jpg", quality=85, optimize=True)
        world_from_cam = np.linalg.inv(view.cam_from_world)
        row = [index / 10, *world_from_cam[:3, 3], *quaternion(world_from_cam[:3, :3])]
        lines.append(" ".join(f"{value:.9g}" for value in row))
    (folder / "poses.tum").write_text("\n".join(lines) + "\n", encoding="utf-8")


def linear(photo: np.ndarray, tint: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> np.ndarray:
    """A grey or RGB uint8 photograph as (h, w, 3) float32 linear light, tinted."""
    photo = photo if photo.ndim == 3 else np.repeat(photo[..., None], 3, axis=2)
    return ((photo / 255.0) ** 2.2 * tint).astype(np.float32)


def tiled(texture: np.ndarray, across: int, down: int) -> np.ndarray:
    """The texture repeated, every second copy mirrored, so that no seam shows."""
    row = np.concatenate([texture if i % 2 == 0 else texture[:, ::-1] for i in range(across)], axis=1)
    return np.concatenate([row if i % 2 == 0 else row[::-1] for i in range(down)], axis=0)


def framed(photo: np.ndarray, mat: float, wood: tuple[float, float, float]) -> np.ndarray:
    """A photograph with a white mat (share of its height) and a wooden border."""
    photo = cv2.resize(photo, None, fx=1.5, fy=1.5, interpolation=cv2.INTER_CUBIC).clip(0, 1)
    pad, rim = round(photo.shape[0] * mat), round(photo.shape[0] * 0.06)
    photo = cv2.copyMakeBorder(photo, pad, pad, pad, pad, cv2.BORDER_CONSTANT, value=(0.78, 0.76, 0.72))
    return cv2.copyMakeBorder(photo, rim, rim, rim, rim, cv2.BORDER_CONSTANT, value=wood)


def box(
    foot: tuple[float, float, float],
    size: tuple[float, float, float],
    yaw: float,
    lean: float,
    faces: tuple[np.ndarray, np.ndarray],
) -> list[Panel]:
    """A cuboid whose front bottom edge is centred on `foot`; `faces` texture the front and the other sides.

    `size` is (width, height, depth); `yaw` turns it about the vertical, `lean` tips it backwards, in degrees.
    """
    y, t = np.deg2rad(yaw), np.deg2rad(lean)
    right = np.array([np.cos(y), 0.0, np.sin(y)])
    back = np.array([-np.sin(y), 0.0, np.cos(y)])
    down = np.array([0.0, np.cos(t), 0.0]) - np.sin(t) * back
    away = np.array([0.0, np.sin(t), 0.0]) + np.cos(t) * back
    r, d, a = right * size[0], down * size[1], away * size[2]
    corner = np.asarray(foot) - r / 2 - d
    front, side = faces
    return [
        Panel(corner, r, d, front),
        Panel(corner + a, -a, d, side),
        Panel(corner + r, a, d, side),
        Panel(corner + a, r, -a, side),
    ]


def build_scene() -> list[Panel]:
    """Framed photographs in front of a plastered wall, on gravel."""
    x, y, z = np.eye(3)
    plaster = 0.55 + 0.3 * (linear(data.grass()) - linear(data.grass()).mean())
    wall = tiled(plaster * np.array([1.0, 0.93, 0.8], np.float32), 6, 3)
    floor = tiled(linear(data.gravel(), (1.35, 1.25, 1.12)), 6, 4)
    brick = linear(np.rot90(data.brick())[20:220, 30:470], (2.0, 1.05, 0.78))
    dark, oak, black = (0.05, 0.025, 0.012), (0.28, 0.14, 0.06), (0.012, 0.012, 0.014)
    sides = {wood: np.full((8, 8, 3), wood, np.float32) for wood in (dark, oak, black)}
    frames = [
        ((-0.6, -0.92, -0.03), (0.84, 0.74, 0.03), 0, 0, data.hubble_deep_field(), 0.0, black),
        ((0.48, -1.0, -0.03), (0.8, 0.56, 0.03), 0, 0, data.rocket(), 0.08, dark),
        ((-0.62, 0.0, -0.95), (0.94, 0.66, 0.04), 16, 12, data.coffee(), 0.07, oak),
        ((0.44, -0.34, -0.92), (0.68, 0.48, 0.04), -14, 9, data.chelsea(), 0.08, dark),
    ]
    scene = [
        Panel(-3 * x - 2.6 * y, 6 * x, 2.6 * y, wall),
        Panel(-3 * x, 6 * x, -3.2 * z, floor),
        *box((0.44, 0.0, -1.04), (0.86, 0.34, 0.46), -14, 0, (brick, brick)),
    ]
    for foot, size, yaw, lean, photo, mat, wood in frames:
        scene += box(foot, size, yaw, lean, (framed(linear(photo), mat, wood), sides[wood]))
    return scene


def lit(panel: Panel, scene: list[Panel], lamps: np.ndarray) -> Panel:
    """The panel with the lamps' light and shadows (Lambert) baked into its texture."""
    height, width = panel.texture.shape[:2]
    columns, rows = (max(6, round(np.linalg.norm(edge) / 0.015)) for edge in (panel.right, panel.down))
    u, v = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    points = panel.corner + u[..., None] * panel.right + v[..., None] * panel.down
    normal = np.cross(panel.right, panel.down)
    normal /= np.linalg.norm(normal)
    light = np.zeros((rows, columns))
    for lamp in lamps:
        ray = lamp - points
        visible = np.ones((rows, columns), bool)
        for other in scene:
            if other is not panel:
                visible &= ~blocks(other, points, ray)
        light += visible * np.abs(ray @ normal) / np.linalg.norm(ray, axis=-1) / len(lamps)
    light = cv2.resize((AMBIENT + light).astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    return Panel(panel.corner, panel.right, panel.down, panel.texture * light[..., None])


def blocks(panel: Panel, points: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """(…,) bool: the panel lies between a point and the end of its ray."""
    inverse = np.linalg.inv(np.stack([panel.right, panel.down, np.cross(panel.right, panel.down)]).T)
    start, step = (points - panel.corner) @ inverse.T, rays @ inverse.T
    with np.errstate(divide="ignore", invalid="ignore"):
        t = -start[..., 2] / step[..., 2]
        u, v = start[..., 0] + t * step[..., 0], start[..., 1] + t * step[..., 1]
        return (t > 2e-3) & (t < 1) & (u > 0) & (u < 1) & (v > 0) & (v < 1)


def render(scene: list[Panel], view: View, seed: int) -> np.ndarray:
    """(H, W, 3) uint8 image of the scene: nearest panel by depth, box-filtered, with exposure and noise."""
    width, height = SIZE[0] * SUPERSAMPLE, SIZE[1] * SUPERSAMPLE
    fine = np.diag([SUPERSAMPLE, SUPERSAMPLE, 1.0])
    fine[:2, 2] = (SUPERSAMPLE - 1) / 2  # (p + 0.5)·s − 0.5
    T = view.cam_from_world
    xs, ys = np.meshgrid(np.arange(width, dtype=np.float64), np.arange(height, dtype=np.float64))
    nearest, image = np.zeros((height, width)), np.zeros((height, width, 3), np.float32)
    for panel in scene:
        to_camera = T[:3, :3] @ panel.texel_to_world
        to_camera[:, 2] += T[:3, 3]
        if np.linalg.cond(to_camera) > 1e9:  # seen exactly from its edge
            continue
        G = np.linalg.inv(fine @ K @ to_camera)  # texel = G·pixel / depth, so its last row is 1 / depth
        inverse_depth = G[2, 0] * xs + G[2, 1] * ys + G[2, 2]
        with np.errstate(divide="ignore", invalid="ignore"):
            u = (G[0, 0] * xs + G[0, 1] * ys + G[0, 2]) / inverse_depth
            v = (G[1, 0] * xs + G[1, 1] * ys + G[1, 2]) / inverse_depth
        rows, columns = panel.texture.shape[:2]
        visible = (
            (inverse_depth > nearest) & (u >= -0.5) & (u < columns - 0.5) & (v >= -0.5) & (v < rows - 0.5)
        )
        if visible.any():
            u, v = u[visible].astype(np.float32), v[visible].astype(np.float32)
            image[visible] = sampled(panel.texture, u, v)
            nearest[visible] = inverse_depth[visible]
    image = cv2.resize(image, SIZE, interpolation=cv2.INTER_AREA)
    return exposed(image, view, seed)


def sampled(texture: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(K, 3) bilinear samples at texture pixels."""
    count = len(u)
    pad = -count % 1024  # cv2.remap takes at most 32767 columns or rows
    u, v = (np.pad(a, (0, pad)).reshape(-1, 1024) for a in (u, v))
    return cv2.remap(texture, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).reshape(-1, 3)[:count]


def exposed(image: np.ndarray, view: View, seed: int) -> np.ndarray:
    """Linear light → uint8 sRGB-like values, with vignetting, white balance and sensor noise."""
    x, y = np.meshgrid(np.linspace(-1, 1, SIZE[0]), np.linspace(-1, 1, SIZE[1]))
    vignette = 1 - 0.13 * (x**2 + y**2)
    values = (image * vignette[..., None] * view.gain).clip(0, 1) ** (view.gamma / 2.2)
    values += np.random.default_rng(seed).normal(0, 0.008, (*image.shape[:2], 1))
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Render the demo views and their cameras.")
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parents[2] / "assets")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    offsets = np.random.default_rng(0).normal(size=(16, 3))
    lamps = LIGHT[0] + LIGHT[1] * offsets / np.linalg.norm(offsets, axis=1, keepdims=True)
    bare = build_scene()
    scene = [lit(panel, bare, lamps) for panel in bare]
    for index, view in enumerate(VIEWS):
        Image.fromarray(render(scene, view, seed=index)).save(
            output / f"view{index}.jpg", quality=90, optimize=True
        )
    write_walk(scene, output / "walk")
    poses = [view.cam_from_world for view in VIEWS]
    ground_truth = {
        "pixel_convention": "the centre of the first pixel is (0, 0); b_from_a: points of a to b; metres",
        "size": SIZE,
        "K": K.tolist(),
        "cam_from_world": {f"view{i}.jpg": T.tolist() for i, T in enumerate(poses)},
        "cam1_from_cam0": (poses[1] @ np.linalg.inv(poses[0])).tolist(),
        "cam2_from_cam0": (poses[2] @ np.linalg.inv(poses[0])).tolist(),
    }
    (output / "poses.json").write_text(json.dumps(ground_truth, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
