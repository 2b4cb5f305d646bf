"""Pairs of images of scenes with relief."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np

from matcher.lab.pairs.dense import DensePair
from matcher.lab.pairs.framing import with_distortion
from matcher.lab.pairs.photometric import capture
from matcher.lab.pairs.posed import PosedView, dense_positions
from matcher.lab.pairs.relief.lighting import draw_lights, illuminate
from matcher.lab.pairs.relief.render import ViewCamera, render
from matcher.lab.pairs.relief.scenes import Scene, draw_scene
from matcher.lab.pairs.relief.textures import photo_texture
from matcher.lab.pairs.textures import DrawnPhotos, PhotoSet

ATTEMPTS = 8  # for the second camera, before the scene is given up
SAME_LIGHT_SHARE = 0.5
LENS_SHARE, PHOTO_BACKDROP_SHARE = 0.3, 0.4
ANYWHERE_SHARE = 0.1  # of the pairs, whose second camera may be on the opposite side of what it looks at
MIN_OVERLAP, MAX_OVERLAP = 0.12, 0.9  # smaller share of covisible pixels of the two images


class Relief:
    """A source of pairs: scenes made of photos and plain surfaces, two cameras in each.

    Args:
        photos: textures, grey or in colour.
    """

    def __init__(self, photos: PhotoSet) -> None:
        self.photos = photos

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """Two views of a new scene; see `dense.PairSource`.

        Raises:
            UsageError: not one photo can be read.
        """
        anywhere = rng.random() < ANYWHERE_SHARE
        while True:
            photos = DrawnPhotos(self.photos)
            scene = draw_scene(photos, rng)
            cameras = _cameras(scene, size, anywhere, rng)
            if cameras is None:
                continue
            views = _rendered(scene, cameras, photos, rng)
            if rng.random() < LENS_SHARE:
                views = tuple(with_distortion(view, rng) for view in views)
            pair = DensePair(
                *(capture(view.pixels, rng) for view in views),
                dense_positions(*views),
                dense_positions(*views[::-1]),
                source="relief",
                scenes=frozenset(photos.names),
            )
            if pair.visible_share > MIN_OVERLAP / 2:
                return pair


def _rendered(
    scene: Scene, cameras: tuple[ViewCamera, ViewCamera], photos: DrawnPhotos, rng: np.random.Generator
) -> tuple[PosedView, ...]:
    lights = draw_lights(*scene.lamps, rng)
    views = []
    for camera in cameras:
        backdrop = np.full(camera.size[::-1], int(rng.integers(256)), np.uint8)
        if rng.random() < PHOTO_BACKDROP_SHARE:
            backdrop = cv2.resize(photo_texture(photos, rng), camera.size, interpolation=cv2.INTER_AREA)
        views.append(render(illuminate(scene.surfaces, lights, camera, rng), camera, backdrop))
        lights = lights if rng.random() < SAME_LIGHT_SHARE else draw_lights(*scene.lamps, rng)
    return tuple(views)


def _cameras(
    scene: Scene, size: tuple[int, int], anywhere: bool, rng: np.random.Generator
) -> tuple[ViewCamera, ViewCamera] | None:
    """Two cameras whose views overlap, by a coarse rendering of the scene; None where none are found."""
    first = _first_camera(scene, size, rng)
    view0 = _coarse_view(scene, first)
    covered = view0.inverse_depth > 0
    if covered.mean() < 0.6 or np.median(view0.inverse_depth[covered]) > 2.5:
        return None
    for _ in range(ATTEMPTS):
        depth = 1 / float(np.median(view0.inverse_depth[covered]))
        second = _second_camera(scene, first, depth, anywhere, rng)
        view1 = _coarse_view(scene, second)
        shares = [
            float((dense_positions(*views)[0] >= 0).mean()) for views in ((view0, view1), (view1, view0))
        ]
        if MIN_OVERLAP < min(shares) < MAX_OVERLAP:
            return first, second
    return None


def _coarse_view(scene: Scene, camera: ViewCamera) -> PosedView:
    """The scene in a twelfth of the resolution, without relief: only its depth is used."""
    scale = 12
    size = tuple(max(8, round(side / scale)) for side in camera.size)
    K = np.diag([1 / scale, 1 / scale, 1]) @ camera.K
    bare = [replace(s, heights=None, texture=s.texture) for s in scene.surfaces]
    return render(bare, replace(camera, K=K, size=size), np.zeros(size[::-1], np.uint8))


def _first_camera(scene: Scene, size: tuple[int, int], rng: np.random.Generator) -> ViewCamera:
    """A camera in the scene's space that looks roughly at one of its targets, held roughly upright."""
    width, height = size
    focal = rng.uniform(0.7, 1.3) * max(size)
    K = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])
    centre = rng.uniform(scene.low, scene.high)
    target = scene.targets[rng.integers(len(scene.targets))] + rng.normal(0, 0.2, 3)
    R = _look_at(centre, target, rng.normal(0, 6))
    return ViewCamera(K, R, -R @ centre, size)


def _look_at(centre: np.ndarray, target: np.ndarray, roll: float) -> np.ndarray:
    """(3, 3) camera from world of a camera at `centre` that looks at `target`, rolled by degrees."""
    forward = (target - centre) / np.linalg.norm(target - centre)
    right = np.cross([0, 1.0, 0], forward)
    right /= max(np.linalg.norm(right), 1e-6)
    R = np.stack([right, np.cross(forward, right), forward])
    return cv2.Rodrigues(np.array([0, 0, np.deg2rad(roll)]))[0] @ R


def _second_camera(
    scene: Scene, first: ViewCamera, depth: float, anywhere: bool, rng: np.random.Generator
) -> ViewCamera:
    """A camera near the first, or anywhere, that looks roughly at the point `depth` metres ahead of it."""
    width, height = first.size
    zoom = float(np.exp(rng.normal(0, 0.35)).clip(0.4, 2.5))
    K = np.diag([zoom, zoom, 1]) @ first.K
    K[0, 2], K[1, 2] = (width - 1) / 2, (height - 1) / 2
    step = rng.normal(0, 1, 3) * [1, 0.5, 1]
    step *= rng.uniform(0.05, 0.8) * depth / max(np.linalg.norm(step), 1e-6)
    centre = (first.centre + step).clip(scene.low, scene.high)
    if anywhere:
        centre = rng.uniform(scene.low, scene.high)
    target = first.centre + first.R[2] * depth + rng.normal(0, 0.15 * depth, 3)
    any_roll = rng.random() < 0.12
    R = _look_at(centre, target, rng.uniform(-180, 180) if any_roll else rng.normal(0, 8))
    return ViewCamera(K, R, -R @ centre, first.size)
