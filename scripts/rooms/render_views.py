"""Render training views with exact depth and poses of a furnished world (GLB) by Blender's Cycles.

    python render_views.py WORLD.glb OUT --photos DIR --hdri DIR [--views 40] [--seed 1] [--samples 5]

Runs in an environment of its own: Python 3.11, `pip install bpy==5.0.1 OpenEXR opencv-python-headless numpy`.
The seed randomises materials (plain or photos), posters, clutter and the furniture's positions; each group of
views has its own lights. The output is a set as `matcher.evaluate.folders` reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bpy
import cv2
import numpy as np
import OpenEXR
from mathutils import Vector
from mathutils.bvhtree import BVHTree
from render_world import develop, dress, furnish, light_up

WIDTH, HEIGHT, DEPTH_STEP = 640, 480, 2
FAR = 60.0  # metres; farther points have no depth
ANCHORS = 3  # candidates, of which the one with the most varied depth is used
CLEARANCE = 0.35  # metres between a camera and the nearest surface
COARSE = np.stack(np.meshgrid(np.arange(20, WIDTH, 40.0), np.arange(20, HEIGHT, 40.0)), -1).reshape(-1, 2)


@dataclass
class Camera:
    """x = f (R X + t) + middle; `centre` in the world (metres, z up)."""

    focal: float
    rotation: np.ndarray  # (3, 3) camera (OpenCV axes) from world
    centre: np.ndarray
    overlap: float = 1.0

    @property
    def K(self) -> np.ndarray:
        """(3, 3)."""
        return np.array([[self.focal, 0, (WIDTH - 1) / 2], [0, self.focal, (HEIGHT - 1) / 2], [0, 0, 1]])

    @property
    def cam_from_world(self) -> np.ndarray:
        """(4, 4)."""
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = self.rotation, -self.rotation @ self.centre
        return pose

    def rays(self, pixels: np.ndarray) -> np.ndarray:
        """(N, 3) directions in the world of depth 1 of pixels (N, 2)."""
        return np.c_[(pixels - self.K[:2, 2]) / self.focal, np.ones(len(pixels))] @ self.rotation


def looking(centre: np.ndarray, target: np.ndarray, roll: float, focal: float) -> Camera:
    """A camera at `centre` that looks at `target`, rolled by radians."""
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross(forward, [0, 0, 1.0])
    right /= np.linalg.norm(right)
    down = np.cross(forward, right)
    c, s = math.cos(roll), math.sin(roll)
    return Camera(focal, np.stack([c * right + s * down, c * down - s * right, forward]), centre)


class World:
    """The triangles of the scene, for ray casting."""

    def __init__(self) -> None:
        vertices, faces, count = [], [], 0
        depsgraph = bpy.context.evaluated_depsgraph_get()
        for instance in depsgraph.object_instances:
            if instance.object.type != "MESH" or not instance.object.original.visible_camera:
                continue
            mesh = instance.object.to_mesh()
            mesh.calc_loop_triangles()
            corners = np.empty(len(mesh.vertices) * 3, np.float32)
            triangles = np.empty(len(mesh.loop_triangles) * 3, np.int32)
            mesh.vertices.foreach_get("co", corners)
            mesh.loop_triangles.foreach_get("vertices", triangles)
            matrix = np.array(instance.matrix_world)
            vertices.append(corners.reshape(-1, 3) @ matrix[:3, :3].T + matrix[:3, 3])
            faces.append(triangles.reshape(-1, 3) + count)
            count += len(mesh.vertices)
            instance.object.to_mesh_clear()
        points = np.concatenate(vertices)
        self.tree = BVHTree.FromPolygons(points.tolist(), np.concatenate(faces).tolist())
        self.low, self.high = np.quantile(points, 0.002, 0), np.quantile(points, 0.998, 0)

    def distances(self, origin: np.ndarray, directions: np.ndarray) -> np.ndarray:
        """(N,) lengths of rays to the first hit, in units of each direction (N, 3); inf without one."""
        start, cast = Vector(origin), self.tree.ray_cast
        metres = np.array([cast(start, d)[3] or np.inf for d in directions.tolist()])
        return metres / np.linalg.norm(directions, axis=1)

    def is_free(self, point: np.ndarray) -> bool:
        """Whether a camera could be held there: free space around, a floor below, walls at the sides."""
        if self.tree.find_nearest(Vector(point), CLEARANCE)[0] is not None:
            return False
        turn = np.arange(10) * 2 * math.pi / 10
        around = np.c_[np.cos(turn), np.sin(turn), np.zeros(10)]
        around = self.distances(point, around)
        below = self.distances(point, np.array([[0, 0, -1.0]]))[0]
        return 0.4 < below < 2.6 and np.isfinite(around).sum() >= 7 and float(np.median(around)) > 0.8

    def depth(self, camera: Camera, pixels: np.ndarray) -> np.ndarray:
        """(N,) z at pixels (N, 2), inf where nothing is hit."""
        return self.distances(camera.centre, camera.rays(pixels))


def shares(world: World, camera: Camera, other: Camera) -> float:
    """Share of a coarse grid of pixels of one camera that are visible to the other one."""
    z = world.depth(camera, COARSE)
    hit = np.isfinite(z)
    points = camera.centre + camera.rays(COARSE[hit]) * z[hit, None]
    projected = (points - other.centre) @ other.rotation.T
    ahead = projected[:, 2] > 0.1
    pixels = projected[:, :2] / np.maximum(projected[:, 2:], 0.1) * other.focal + other.K[:2, 2]
    ahead &= ((pixels >= 0) & (pixels < [WIDTH, HEIGHT])).all(1)
    depth = world.depth(other, pixels[ahead])
    return float((np.abs(depth - projected[ahead, 2]) < 0.02 * depth).sum() / len(COARSE))


def draw_anchor(world: World, rng: np.random.Generator) -> Camera:
    """A hand-held camera in free space, whose image is neither all wall nor all empty."""
    while True:
        height = rng.uniform(0.7, 1.9)
        centre = np.append(rng.uniform(world.low[:2], world.high[:2]), world.low[2] + height)
        if not world.is_free(centre):
            continue
        yaw, pitch = rng.uniform(0, 2 * math.pi), math.radians(rng.normal(-10, 14))
        ahead = np.array([math.cos(yaw) * math.cos(pitch), math.sin(yaw) * math.cos(pitch), math.sin(pitch)])
        focal = WIDTH * float(np.exp(rng.uniform(math.log(0.65), math.log(1.5))))
        camera = looking(centre, centre + ahead, math.radians(rng.normal(0, 4)), focal)
        z = world.depth(camera, COARSE)
        near = np.isfinite(z)
        spread = np.std(1 / z[near]) * np.median(z[near]) if near.any() else 0
        if near.mean() > 0.8 and 0.7 < np.median(z[near]) < 7 and (z < 0.4).mean() < 0.1 and spread > 0.08:
            return camera


def variety(world: World, camera: Camera) -> float:
    """Mean change of log depth between coarse pixels; plain walls are of little use for training."""
    z = world.depth(camera, COARSE).clip(0.1, FAR).reshape(-1, len(np.unique(COARSE[:, 0])))
    return float(np.abs(np.diff(np.log(z), axis=0)).mean() + np.abs(np.diff(np.log(z), axis=1)).mean())


def draw_neighbour(world: World, anchor: Camera, rng: np.random.Generator) -> Camera | None:
    """Another camera with an overlap of 15 to 85 % with the anchor; None if none is found."""
    depth = float(np.median(world.depth(anchor, COARSE)))
    for _ in range(40):
        step = rng.normal(0, 1, 3) * [1, 1, 0.35]
        centre = anchor.centre + step / np.linalg.norm(step) * rng.uniform(0.1, 0.7) * min(depth, 3.5)
        if not world.is_free(centre):
            continue
        target = anchor.centre + anchor.rotation[2] * depth + rng.normal(0, 0.2 * depth, 3)
        focal = anchor.focal * float(np.exp(rng.normal(0, 0.2))) if rng.random() < 0.4 else anchor.focal
        camera = looking(centre, target, math.radians(rng.normal(0, 6)), focal)
        both = shares(world, anchor, camera), shares(world, camera, anchor)
        if min(both) > 0.15 and max(both) < 0.85:
            camera.overlap = sum(both) / 2
            return camera
    return None


def set_up(samples: int, threads: int) -> bpy.types.Object:
    """Cycles on the processor, few samples and a denoiser; the camera object."""
    scene = bpy.context.scene
    scene.render.engine = "CYCLES"
    scene.render.threads_mode, scene.render.threads = "FIXED", threads
    scene.render.resolution_x, scene.render.resolution_y = WIDTH, HEIGHT
    scene.render.use_persistent_data = True
    cycles = scene.cycles
    cycles.device, cycles.samples, cycles.use_adaptive_sampling = "CPU", samples, False
    cycles.max_bounces, cycles.diffuse_bounces, cycles.glossy_bounces = 3, 2, 1
    cycles.caustics_reflective = cycles.caustics_refractive = False
    cycles.sample_clamp_indirect = 4.0
    cycles.use_fast_gi, cycles.fast_gi_method, cycles.ao_bounces_render = True, "REPLACE", 1
    cycles.use_denoising, cycles.denoiser, cycles.denoising_quality = True, "OPENIMAGEDENOISE", "FAST"
    output = scene.render.image_settings
    output.media_type, output.file_format = "MULTI_LAYER_IMAGE", "OPEN_EXR_MULTILAYER"
    camera = bpy.data.objects.new("camera", bpy.data.cameras.new("camera"))
    camera.data.sensor_fit, camera.data.sensor_width, camera.data.clip_start = "HORIZONTAL", 36.0, 0.01
    scene.collection.objects.link(camera)
    scene.camera = camera
    return camera


def expose(thing: bpy.types.Object, camera: Camera, folder: Path) -> np.ndarray:
    """(H, W, 3) float32 linear red, green and blue."""
    matrix = np.eye(4)
    matrix[:3, :3], matrix[:3, 3] = camera.rotation.T @ np.diag([1, -1, -1]), camera.centre
    thing.matrix_world = matrix.T.tolist()
    thing.data.lens = camera.focal * 36.0 / WIDTH
    path = folder / "view.exr"
    bpy.context.scene.render.filepath = str(path)
    bpy.ops.render.render(write_still=True)
    with OpenEXR.File(str(path), separate_channels=True) as stored:
        channels = {name: c.pixels for part in stored.parts for name, c in part.channels.items()}
    return np.stack(
        [np.array(next(v for k, v in channels.items() if k.endswith(f"Combined.{c}"))) for c in "RGB"], -1
    ).astype(np.float32)


def main() -> None:
    """Parse, dress the world, and render group after group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("world", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--hdri", type=Path, required=True)
    for name, value in {"views": 40, "seed": 1, "samples": 5, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(asked.seed)
    bpy.ops.wm.read_factory_settings(use_empty=True)
    bpy.ops.import_scene.gltf(filepath=str(asked.world))
    thing = set_up(asked.samples, asked.threads)
    photos = sorted(asked.photos.rglob("*.jpg"))
    furnish(World(), photos, rng)
    dress(photos, rng)
    world, views = World(), []
    panoramas = sorted(asked.hdri.glob("*.hdr"))
    while len(views) < asked.views:
        anchors = [draw_anchor(world, rng) for _ in range(ANCHORS)]
        cameras = [max(anchors, key=lambda camera: variety(world, camera))]
        cameras += [c for c in (draw_neighbour(world, cameras[0], rng) for _ in range(4)) if c]
        if len(cameras) > 2:
            group = views[-1]["group"] + 1 if views else 0
            views += shoot_group(world, thing, cameras, panoramas, asked.out, len(views), group, rng)
            write_list(asked, views)


def shoot_group(
    world: World,
    thing: bpy.types.Object,
    cameras: list[Camera],
    panoramas: list[Path],
    out: Path,
    first: int,
    group: int,
    rng: np.random.Generator,
) -> list[dict]:
    """Render the cameras of a group, some of them again with other lights; rows for cameras.json."""
    jobs = [(cameras, light_up(world.tree, cameras[0], panoramas, rng))]
    rows: list[dict] = []
    grid = np.stack(np.meshgrid(np.arange(0, WIDTH, DEPTH_STEP), np.arange(0, HEIGHT, DEPTH_STEP)), -1)
    with tempfile.TemporaryDirectory() as scratch:
        while jobs:
            shot, light = jobs.pop()
            for camera in shot:
                begin, name = time.time(), f"{first + len(rows):04d}"
                z = world.depth(camera, grid.reshape(-1, 2).astype(float)).reshape(grid.shape[:2])
                z = np.where(z < FAR, z, 0)
                cv2.imwrite(str(out / f"{name}_depth.png"), np.rint(z * 1000).astype(np.uint16))
                image = develop(expose(thing, camera, Path(scratch)), rng)
                quality = [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(82, 97))]
                cv2.imwrite(str(out / f"{name}.jpg"), image, quality)
                rows.append(
                    {"image": f"{name}.jpg", "depth": f"{name}_depth.png", "group": group, "light": light,
                     "overlap_with_anchor": round(camera.overlap, 3), "K": camera.K.tolist(),
                     "E": camera.cam_from_world.tolist()}
                )  # fmt: skip
                print(f"{name} {light} {time.time() - begin:.1f} s", flush=True)
            if light and len(rows) == len(cameras) and rng.random() < 0.4:
                again = [cameras[i] for i in rng.permutation(len(cameras))[:2]]
                jobs.append((again, light_up(world.tree, cameras[0], panoramas, rng)))
    return rows


def write_list(asked: argparse.Namespace, views: list[dict]) -> None:
    """Write cameras.json, replaced as a whole so that readers never see an unfinished file."""
    content = {
        "scene": asked.world.name, "seed": asked.seed, "width": WIDTH, "height": HEIGHT,
        "depth_step": DEPTH_STEP, "views": views,
        "convention": "x = K (R X + t), OpenCV axes, first pixel's centre at (0, 0), E camera from world, m",
    }  # fmt: skip
    temporary = asked.out / "cameras.json.new"
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(asked.out / "cameras.json")


if __name__ == "__main__":
    main()
