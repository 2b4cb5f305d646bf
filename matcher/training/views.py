"""Photos → scenes → rendered views → SIFT features, detected once and kept on disk.

One file a scene, about 0.6 MB with four views; the folder is bound to the part of the recipe that shapes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np

from matcher.config import ExtractorConfig
from matcher.frontends.sift import detect_sift
from matcher.training.photometric import disturb
from matcher.training.recipe import Recipe, fingerprint
from matcher.training.scenes import NOTHING, build_planes, place_camera, render
from matcher.types import UsageError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
ARRAYS = ("keypoints", "scales", "angles", "descriptors", "labels", "homographies")
LABEL_STRIDE = 4  # visibility is kept at a quarter of the resolution


@dataclass(frozen=True, eq=False)
class CachedView:
    """Features of a rendered view and the geometry that ties it to the other views of its scene."""

    keypoints: np.ndarray  # (N, 2) float32, strongest first
    scales: np.ndarray  # (N,) float32
    angles: np.ndarray  # (N,) float32
    descriptors: np.ndarray  # (N, 128) uint8, raw SIFT
    labels: np.ndarray  # (H/4, W/4) uint8
    homographies: np.ndarray  # (P, 3, 3) float64
    size: tuple[int, int]

    def select(self, index: np.ndarray) -> CachedView:
        """The same view with only some of its points."""
        names = ("keypoints", "scales", "angles", "descriptors")
        return replace(self, **{name: getattr(self, name)[index] for name in names})


def find_photos(folder: Path) -> list[Path]:
    """All pictures below `folder`, sorted.

    Raises:
        UsageError: there are none.
    """
    photos = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not photos:
        raise UsageError(f"{folder}: no photos here (looked for {', '.join(sorted(SUFFIXES))})")
    return photos


def folder_weights(photos: Sequence[Path]) -> np.ndarray:
    """Probabilities that damp large folders by the square root of their size, so that no source dominates."""
    counts: dict[Path, int] = {}
    for photo in photos:
        counts[photo.parent] = counts.get(photo.parent, 0) + 1
    weights = np.array([counts[photo.parent] ** -0.5 for photo in photos])
    return weights / weights.sum()


class ViewCache:
    """A folder of scenes, made in order and each only once; several processes may make or read it at once."""

    def __init__(self, folder: Path, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = folder / f"views-{fingerprint(recipe.scene)}-{recipe.seed}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, scene: int) -> Path:
        """Where a scene is kept."""
        return self.folder / f"{scene:06d}.npz"

    def ready(self) -> list[int]:
        """Scenes made so far."""
        return sorted(int(p.stem) for p in self.folder.glob("??????.npz"))

    def make(self, photos: Sequence[Path], scenes: Sequence[int]) -> Iterator[int]:
        """Make the scenes that are missing; yields each number as it is done. Unreadable photos are skipped."""
        weights = folder_weights(photos)
        for scene in scenes:
            if not self.path(scene).exists():
                self._write(scene, make_scene(photos, weights, self.recipe, scene))
            yield scene

    def _write(self, scene: int, views: list[CachedView]) -> None:
        columns = {f"{name}{v}": getattr(view, name) for v, view in enumerate(views) for name in ARRAYS}
        temporary = self.folder / f".{scene:06d}.{os.getpid()}.npz"
        sizes = json.dumps([view.size for view in views])
        np.savez(temporary, sizes=np.array(sizes), **columns)
        temporary.replace(self.path(scene))

    def read(self, scene: int, views: Sequence[int]) -> list[CachedView]:
        """Some of the views of a scene."""
        with np.load(self.path(scene), allow_pickle=False) as stored:
            sizes = json.loads(str(stored["sizes"]))
            return [
                CachedView(**{name: stored[f"{name}{v}"] for name in ARRAYS}, size=tuple(sizes[v]))
                for v in views
            ]


def make_scene(photos: Sequence[Path], weights: np.ndarray, recipe: Recipe, scene: int) -> list[CachedView]:
    """Render and describe the views of one scene; the same for the same photos, recipe and number."""
    rng = np.random.default_rng([recipe.seed, scene])
    spatial = rng.random() < recipe.scene.spatial_share
    textures = _textures(photos, weights, int(rng.integers(3, 6)) if spatial else 1, rng)
    planes = build_planes(textures, recipe.scene, rng)
    views = []
    for _ in range(recipe.scene.views):
        backdrop = _backdrop(photos, weights, recipe, rng)
        view = render(planes, place_camera(recipe.scene, spatial, rng), backdrop)
        pixels = disturb(view.pixels, rng)
        config = ExtractorConfig(max_keypoints=recipe.scene.max_keypoints)
        points, scales, angles, _, descriptors = detect_sift(pixels, None, config)
        views.append(
            CachedView(
                points,
                scales,
                angles,
                descriptors.clip(0, 255).astype(np.uint8),
                view.labels[::LABEL_STRIDE, ::LABEL_STRIDE].copy(),
                view.homographies,
                (recipe.scene.width, recipe.scene.height),
            )
        )
    return views


def _textures(
    photos: Sequence[Path], weights: np.ndarray, count: int, rng: np.random.Generator
) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for _ in range(20 * count):
        photo = cv2.imread(str(photos[rng.choice(len(photos), p=weights)]), cv2.IMREAD_GRAYSCALE)
        if photo is not None and min(photo.shape) >= 32:
            found.append(photo)
        if len(found) == count:
            return found
    raise UsageError("hardly any of the photos can be read; check the folder given by --photos")


def _backdrop(
    photos: Sequence[Path], weights: np.ndarray, recipe: Recipe, rng: np.random.Generator
) -> np.ndarray:
    """What is seen beside the scene: another photo, or one grey."""
    size = (recipe.scene.width, recipe.scene.height)
    if rng.random() < 0.5:
        return cv2.resize(_textures(photos, weights, 1, rng)[0], size, interpolation=cv2.INTER_AREA)
    return np.full(size[::-1], int(rng.integers(0, 256)), np.uint8)


def plane_of(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) index of the plane seen at each point (N, 2), NOTHING outside the picture; NaN is outside."""
    finite = np.nan_to_num(points, nan=-1e6).clip(-1e6, 1e6)
    cells = np.floor((finite + 0.5) / LABEL_STRIDE).astype(np.int64)
    height, width = labels.shape
    within = (cells >= 0).all(1) & (cells[:, 0] < width) & (cells[:, 1] < height)
    found = np.full(len(points), NOTHING, np.uint8)
    found[within] = labels[cells[within, 1], cells[within, 0]]
    return found
