"""Small textures, scenes and batches for the tests of training."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

from matcher.config import AssignmentConfig, ContextConfig, NetworkConfig
from matcher.evaluate.synthetic import NOTHING, Plane, SceneRecipe, View
from matcher.train.cached_pairs import IGNORED, LABEL_STRIDE, CachedView, PairBatch
from matcher.train.recipe import OptimiserRecipe, PairRecipe, Recipe
from matcher.train.relief import Surface, ViewCamera, rectangle, render
from matcher.types import UNMATCHED, Features

TINY = Recipe(
    name="tiny",
    network=NetworkConfig(
        context=ContextConfig(dim=32, heads=2, depth=2), guided=True, assignment=AssignmentConfig(consensus=1)
    ),
    scene=SceneRecipe(scenes=6, views=3, width=160, height=120, max_keypoints=160),
    pair=PairRecipe(points=(32,), points_per_batch=256),
    optimiser=OptimiserRecipe(steps=6, warmup_steps=2, confidence_steps=4, inner_layers=1),
    validate_every=3,
    validation_scenes=6,
    validation_pairs=8,
    save_every=2,
)


def texture(rng: np.random.Generator, height: int = 120, width: int = 160, finest: int = 3) -> np.ndarray:
    """(height, width) uint8 noise of several scales; the finest detail spans about `finest` pixels."""
    total = np.zeros((height, width), np.float32)
    for cell in (finest, 2 * finest, 5 * finest, 12 * finest):
        coarse = rng.normal(size=(height // cell + 2, width // cell + 2)).astype(np.float32)
        total += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return (128 + 35 * total).clip(0, 255).astype(np.uint8)


def write_photos(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder of `count` generated pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        cv2.imwrite(str(folder / f"{number:02d}.png"), texture(np.random.default_rng([seed, number])))
    return folder


def write_views(folder: Path, seed: int) -> None:
    """A set of three stored views of a wall; depth of every second pixel, with a hole in it."""
    folder.mkdir(parents=True)
    pixels = texture(np.random.default_rng(seed), 600, 600, finest=6)
    wall = rectangle(pixels, np.array([0, 0, 3.0]), np.array([5.0, 0, 0]), np.array([0, 5.0, 0]))
    views = [_write_view(folder, wall, number) for number in range(3)]
    content = {"depth_step": 2, "views": views}
    (folder / "cameras.json").write_text(json.dumps(content), encoding="utf-8")


def _write_view(folder: Path, wall: Surface, number: int) -> dict:
    K = np.array([[300.0, 0, 159.5], [0, 300.0, 119.5], [0, 0, 1]])
    camera = ViewCamera(K, np.eye(3), -np.array([0.3 * number, 0, 0]), (320, 240))
    view = render([wall], camera, np.zeros((240, 320), np.uint8))
    cv2.imwrite(str(folder / f"{number}.png"), np.stack([view.pixels] * 3, -1))
    depth = np.rint(1000 / view.inverse_depth[::2, ::2]).astype(np.uint16)
    depth[:10] = 0
    cv2.imwrite(str(folder / f"{number}_depth.png"), depth)
    return {
        "image": f"{number}.png",
        "depth": f"{number}_depth.png",
        "group": 0,
        "K": K.tolist(),
        "E": camera.cam_from_world.tolist(),
    }


def cached(view: View, points: np.ndarray, rng: np.random.Generator) -> CachedView:
    """A rendered view with chosen points and random descriptors."""
    count, (height, width) = len(points), view.pixels.shape
    return CachedView(
        keypoints=points.astype(np.float32),
        scales=np.ones(count, np.float32),
        angles=np.zeros(count, np.float32),
        descriptors=rng.integers(0, 256, (count, 128)).astype(np.uint8),
        labels=view.labels[::LABEL_STRIDE, ::LABEL_STRIDE],
        homographies=view.homographies,
        size=(width, height),
    )


def flat_view(points: np.ndarray, homography: np.ndarray, rng: np.random.Generator) -> CachedView:
    """A view of 160 × 120 pixels that shows one plane everywhere."""
    empty = np.zeros((120, 160), np.uint8)
    return cached(View(empty, empty, homography[None].astype(float)), points, rng)


def look(planes: list[Plane], camera: tuple, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By rays and planes in space: which plane each pixel (N, 2) shows, and the place (N, 3) that it sees."""
    K, R, t = camera
    eye = -R.T @ t
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(K).T @ R
    label, place = np.full(len(points), NOTHING), np.full((len(points), 3), np.nan)
    nearest = np.full(len(points), np.inf)
    for number, plane in enumerate(planes):
        height, width = plane.texture.shape
        # eye + depth·ray = origin + u·right + v·down
        for i, ray in enumerate(rays):
            u, v, depth = np.linalg.solve(
                np.column_stack([plane.right, plane.down, -ray]), eye - plane.origin
            )
            on_it = -0.5 <= u <= width - 0.5 and -0.5 <= v <= height - 0.5
            if on_it and 0 < depth < nearest[i]:
                label[i], nearest[i], place[i] = number, depth, eye + depth * ray
    return label, place


def random_batch(rng: np.random.Generator, pairs: int = 3, points: int = 12) -> PairBatch:
    """Features whose second picture is the first one, shuffled and shifted, with some strangers."""
    descriptors = np.abs(rng.normal(size=(pairs, points, 128))).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=2, keepdims=True)
    order = np.stack([rng.permutation(points) for _ in range(pairs)])
    places = rng.uniform(0, 100, (pairs, points, 2)).astype(np.float32)
    taken = order[..., None]
    second = np.take_along_axis(descriptors, taken, 1)
    partner0, partner1 = np.argsort(order, axis=1), order.copy()
    for row0, row1 in zip(partner0, partner1, strict=True):
        row1[row0[:2]], row0[:2] = (UNMATCHED, IGNORED), (UNMATCHED, IGNORED)
    moved = np.take_along_axis(places, taken, 1) + 5
    features = [
        Features(
            keypoints=xy,
            descriptors=values,
            size=np.full((pairs, 2), 120.0),
            scales=np.full((pairs, points), 3.0),
            orientations=np.zeros((pairs, points)),
            kind="sift",
        )
        for xy, values in ((places, descriptors), (moved, second))
    ]
    there0, there1 = (torch.from_numpy(x.astype(np.float32)) for x in (places + 5, moved - 5))
    there0[:, 2] = torch.nan  # out of sight
    return PairBatch(*features, torch.from_numpy(partner0), torch.from_numpy(partner1), there0, there1)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, optimiser=replace(recipe.optimiser, steps=steps))
