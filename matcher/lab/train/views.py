"""Photos → scenes → rendered views → features, detected once and kept on disk.

One file per scene, about 0.6 MB with four views. The name of the folder depends on the photos, the front end
and the part of the recipe that decides what the views are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import cv2
import numpy as np

from matcher.config import ExtractorConfig
from matcher.data.geometry import inside
from matcher.data.image import Image
from matcher.data.protocols import Extractor
from matcher.errors import UsageError
from matcher.extract.sift import detect_sift, root_sift
from matcher.lab.pairs.photometric import augment
from matcher.lab.pairs.planes import NOTHING, View, build_planes, place_camera, render
from matcher.lab.pairs.textures import PhotoSet, photos_digest
from matcher.lab.train.cache_folder import CacheFolder
from matcher.lab.train.recipe import Recipe, fingerprint
from matcher.torch_engine import build_extractor
from matcher.weights.manifest import read_manifest

ARRAYS = ("keypoints", "scales", "angles", "descriptors", "labels", "homographies")
LABEL_STRIDE = 4  # plane labels are kept at a quarter of the resolution


@dataclass(frozen=True, eq=False)
class CachedView:
    """Features of a rendered view, and the geometry that relates it to the other views of its scene."""

    keypoints: np.ndarray  # (N, 2) float32, strongest first
    scales: np.ndarray  # (N,) float32
    angles: np.ndarray  # (N,) float32
    descriptors: np.ndarray  # (N, 128) uint8, raw SIFT; (N, D) int8, unit vectors times 127
    labels: np.ndarray  # (H/4, W/4) uint8
    homographies: np.ndarray  # (P, 3, 3) float64
    size: tuple[int, int]
    photos: frozenset[int] = frozenset()  # numbers of all photos of its scene
    kind: str = "sift"  # the front end

    def unit_descriptors(self) -> np.ndarray:
        """(N, D) float32, as the front end gives them."""
        if self.kind == "sift":
            return root_sift(self.descriptors)
        values = self.descriptors.astype(np.float32)
        return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1)

    def select(self, index: np.ndarray) -> CachedView:
        """The view with only some of its keypoints."""
        names = ("keypoints", "scales", "angles", "descriptors")
        return replace(self, **{name: getattr(self, name)[index] for name in names})


class ViewCache(CacheFolder):
    """A folder of scenes, one file each."""

    def __init__(self, root: Path, recipe: Recipe, photos: Sequence[Path]) -> None:
        super().__init__(_own_folder(root, recipe, photos_digest(photos)))
        self.recipe = recipe
        self.wanted = recipe.scene.scenes

    def photo_set(self, photos: Sequence[Path]) -> PhotoSet:
        """The photos as `make` needs them."""
        return PhotoSet(photos)

    def make(self, photos: PhotoSet, scenes: Sequence[int]) -> Iterator[int]:
        """Make the scenes that are missing; yields each number as it is done.

        Raises:
            UsageError: not one photo can be read.
            OSError: the disk is full.
        """
        for scene in scenes:
            if not self.path(scene).exists():
                self.write(scene, _arrays(make_scene(photos, self.recipe, scene)))
            yield scene

    def read(self, scene: int, views: Sequence[int]) -> list[CachedView]:
        """Some of the views of a scene.

        Raises:
            IntegrityError: the file is damaged.
        """
        with self.opened(scene) as stored:
            sizes = json.loads(str(stored["sizes"]))
            # Older caches do not name the photos of a scene.
            photos = frozenset(stored["photos"].tolist() if "photos" in stored else ())
            return [
                CachedView(
                    **{name: stored[f"{name}{v}"] for name in ARRAYS},
                    size=tuple(sizes[v]),
                    photos=photos,
                    kind=self.recipe.network.kind,
                )
                for v in views
            ]


def _arrays(views: Sequence[CachedView]) -> dict[str, np.ndarray]:
    """The views of a scene as arrays for its file."""
    arrays = {f"{name}{v}": getattr(view, name) for v, view in enumerate(views) for name in ARRAYS}
    sizes = np.array(json.dumps([view.size for view in views]))
    return {**arrays, "sizes": sizes, "photos": np.array(sorted(views[0].photos), dtype=np.int64)}


def _own_folder(root: Path, recipe: Recipe, digest: str) -> Path:
    """The folder of these views: named after scene recipe, seed and front end, and also after the photos
    if a folder of other photos has that name."""
    name = f"views-{fingerprint(recipe.scene)}-{recipe.seed}{front_end_suffix(recipe)}"
    plain = root / name
    if plain.exists():
        note = plain / "photos"
        # Older caches do not say which photos they were made of, and are used as they are.
        if not note.exists() or note.read_text(encoding="utf-8") == digest:
            return plain
        plain = plain.with_name(f"{plain.name}-{digest}")
    plain.mkdir(parents=True, exist_ok=True)
    (plain / "photos").write_text(digest, encoding="utf-8")
    return plain


def front_end_suffix(recipe: Recipe) -> str:
    """The front end and its weights in the name of a cache; nothing for SIFT, which has no weights.

    Raises:
        UsageError: the weights file of the recipe cannot be read.
    """
    kind = recipe.network.kind
    if kind == "sift":
        return ""
    if not recipe.front_end:
        return f"-{kind}-{read_manifest()[kind].sha256[:8]}"
    try:
        digest = hashlib.sha256(Path(recipe.front_end).read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"front_end: cannot read {recipe.front_end} ({error.strerror})") from None
    return f"-{kind}-{digest[:8]}"


def make_scene(photos: PhotoSet, recipe: Recipe, scene: int) -> list[CachedView]:
    """Render the views of one scene and extract their features, reproducibly.

    Raises:
        UsageError: not one photo can be read.
    """
    rng = np.random.default_rng([recipe.seed, scene])
    spatial = rng.random() < recipe.scene.spatial_share
    textures = photos.draw(int(rng.integers(3, 6)) if spatial else 1, rng)
    planes = build_planes(list(textures.values()), recipe.scene, rng)
    used, views = set(textures), []
    for _ in range(recipe.scene.views):
        backdrop = _backdrop(photos, used, recipe, rng)
        camera = place_camera(recipe.scene, len(planes) > 1, rng)
        views.append(_extracted(render(planes, camera, backdrop), recipe, rng))
    return [replace(view, photos=frozenset(used)) for view in views]


def _extracted(view: View, recipe: Recipe, rng: np.random.Generator) -> CachedView:
    """The features of a rendered view after photometric augmentation."""
    kind, size = recipe.network.kind, (recipe.scene.width, recipe.scene.height)
    found = detect_and_describe(augment(view.pixels, rng), kind, recipe.scene.max_keypoints, recipe.front_end)
    labels = view.labels[::LABEL_STRIDE, ::LABEL_STRIDE].copy()
    return CachedView(*found, labels, view.homographies, size, kind=kind)


def detect_and_describe(
    pixels: np.ndarray, kind: str, max_keypoints: int, weights: str = ""
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keypoints, scales, angles and descriptors of a grey image, in the form that `CachedView` keeps."""
    if kind == "sift":
        found = detect_sift(pixels, None, ExtractorConfig(max_keypoints=max_keypoints))
        points, scales, angles, _, descriptors = found
        return points, scales, angles, descriptors.clip(0, 255).astype(np.uint8)
    (features,) = _extractor(kind, max_keypoints, weights)([Image(pixels, pixels.shape[::-1])])
    nothing = np.zeros(len(features.keypoints), np.float32)
    descriptors = (features.descriptors * 127).round().numpy().astype(np.int8)
    return features.keypoints.numpy(), nothing, nothing, descriptors


@cache
def _extractor(kind: str, max_keypoints: int, weights: str) -> Extractor:
    return build_extractor(ExtractorConfig(kind=kind, max_keypoints=max_keypoints), weights or None)


def _backdrop(photos: PhotoSet, used: set[int], recipe: Recipe, rng: np.random.Generator) -> np.ndarray:
    """The background: one grey value, or a photo that is not yet in the scene, which is added to `used`."""
    size = (recipe.scene.width, recipe.scene.height)
    if rng.random() < 0.5:
        for number, photo in photos.draw(1, rng, avoid=used).items():
            used.add(number)
            return cv2.resize(photo, size, interpolation=cv2.INTER_AREA)
    return np.full(size[::-1], int(rng.integers(0, 256)), np.uint8)


def plane_of(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) index of the plane at each point (N, 2), NOTHING outside the image; NaN counts as outside."""
    finite = np.nan_to_num(points, nan=-1e6).clip(-1e6, 1e6)
    height, width = labels.shape
    within = inside(finite, (width * LABEL_STRIDE, height * LABEL_STRIDE))
    # Label (i, j) belongs to pixel (i, j)·stride; the nearest one is used.
    cells = np.rint(finite[within] / LABEL_STRIDE).astype(np.int64).clip(0, (width - 1, height - 1))
    found = np.full(len(points), NOTHING, np.uint8)
    found[within] = labels[cells[:, 1], cells[:, 0]]
    return found
