"""A folder of numbered files of arrays, each written whole; several processes may fill or read it at once."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
import tomllib
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType

import cv2
import numpy as np
import torch
from torch import Tensor

from matcher.config import ExtractorConfig, from_dict
from matcher.errors import IntegrityError, MatcherError, UsageError
from matcher.evaluate.folders import build_mixture
from matcher.evaluate.posed import (
    HIDDEN_STATE,
    UNKNOWN_STATE,
    VISIBLE_STATE,
    PairSource,
    transfer,
    views_digest,
)
from matcher.evaluate.protocols import PhotoSet, augment, photos_digest
from matcher.evaluate.synthetic import NOTHING, View, build_planes, place_camera, render
from matcher.extract.sift import detect_sift, root_sift
from matcher.files import open_given
from matcher.geometry import inside
from matcher.match.nearest import mutual_minima
from matcher.match.network import check_config
from matcher.match.steering import EXIF_TURNS, aligned, rotated_descriptors
from matcher.processes import safe_path
from matcher.torch_engine import build_extractor
from matcher.train.recipe import FrontEndRecipe, PairRecipe, Recipe, fingerprint
from matcher.types import UNMATCHED, Extractor, Features, Image
from matcher.weights.files import FOLDERS, read_manifest

# --- cache_folder: A folder of numbered files of arrays, each written whole; several processes may fill or
# read it at once.

ABANDONED_AFTER = 3600.0  # seconds after which an unfinished file belongs to no running process


class CacheFolder:
    """Files `000000.npz`, `000001.npz`, … in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        """The file of a number."""
        return self.folder / f"{number:06d}.npz"

    def ready(self) -> list[int]:
        """The numbers of the files written so far."""
        return sorted(int(path.stem) for path in self.folder.glob("??????.npz"))

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a file, whole or not at all.

        Raises:
            OSError: the disk is full.
        """
        temporary = self.folder / f".{number:06d}.{os.getpid()}.npz"
        try:
            np.savez(temporary, **arrays)
            temporary.replace(self.path(number))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def opened(self, number: int) -> Iterator[Mapping[str, np.ndarray]]:
        """The arrays of a file, within a `with` block.

        Raises:
            IntegrityError: the file is absent or damaged.
        """
        path = self.path(number)
        try:
            with np.load(path, allow_pickle=False) as stored:
                yield stored
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise IntegrityError(f"{path} is damaged ({error}): delete it, it will be made again") from error

    def remove_unfinished(self) -> None:
        """Delete what killed processes left unfinished."""
        for leftover in self.folder.glob(".*.npz"):
            if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER:
                leftover.unlink(missing_ok=True)


# --- views: Photos → scenes → rendered views → features, detected once and kept on disk.

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


# --- pair_cache: Features of image pairs from any source, cached on disk for training.

_ARRAYS = ("keypoints", "scales", "angles", "descriptors", "corresponding", "states")
_SCENES = "shows"  # name of that array in the files


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrespondingView(CachedView):
    """Features of one image of a pair, with the position of each keypoint in the other image."""

    corresponding: np.ndarray  # (N, 2) float32 pixels in the other image; NaN where not visible
    states: np.ndarray  # (N,) int8 VISIBLE_STATE, HIDDEN_STATE or UNKNOWN_STATE
    scenes: frozenset[str] = frozenset()  # names of photos or scenes; unrelated views have none in common

    def select(self, index: np.ndarray) -> CorrespondingView:
        """The view with only some of its keypoints."""
        chosen = super().select(index)
        return replace(chosen, corresponding=self.corresponding[index], states=self.states[index])

    @property
    def visible(self) -> np.ndarray:
        """(N,) bool: keypoints that are visible in the other image."""
        return self.states == VISIBLE_STATE

    @property
    def known(self) -> np.ndarray:
        """(N,) bool: keypoints that are known to be visible or hidden in the other image."""
        return self.states != UNKNOWN_STATE

    def as_unrelated(self) -> CorrespondingView:
        """The view as part of an unrelated pair: nothing of it is visible in the other image."""
        return replace(
            self,
            corresponding=np.full_like(self.corresponding, np.nan),
            states=np.full_like(self.states, HIDDEN_STATE),
        )


CorrespondingPair = tuple[CorrespondingView, CorrespondingView]


class PairCache(CacheFolder):
    """A folder of pairs with their features, one file each.

    Args:
        root: the folder that contains it.
        recipe: its `sources`, seed and front end decide what the pairs are.
        photos: textures.
        rendered, real: folders of stored views, where the recipe has a share for them.
    """

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        photos: Sequence[Path],
        rendered: Path | None = None,
        real: Path | None = None,
    ) -> None:
        self.recipe, self.rendered, self.real = recipe, rendered, real
        self.wanted = recipe.sources.pairs
        made_of = "|".join((photos_digest(photos), views_digest(rendered), views_digest(real)))
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        suffix = front_end_suffix(recipe)
        shape = fingerprint(replace(recipe.sources, pairs=0, share=0.0))
        super().__init__(root / f"image-pairs-{shape}-{recipe.seed}{suffix}-{made_of}")
        self.folder.mkdir(parents=True, exist_ok=True)

    def photo_set(self, photos: Sequence[Path]) -> PhotoSet:
        """The photos as `make` needs them."""
        return PhotoSet(photos, colour=True)

    def make(self, photos: PhotoSet, numbers: Sequence[int]) -> Iterator[int]:
        """Make the pairs that are missing; yields each number as it is done.

        Raises:
            UsageError: not one photo can be read, or a source of the recipe has no views.
            OSError: the disk is full.
        """
        sources, shares = self.recipe.sources, self.recipe.sources.shares()
        missing = [number for number in numbers if not self.path(number).exists()]
        if missing:
            mixture = build_mixture(photos, shares, rendered=self.rendered, real=self.real)
        for number in missing:
            rng = np.random.default_rng([self.recipe.seed, 5, number])
            pair = make_pair(mixture, self.recipe, (sources.width, sources.height), rng)
            arrays = {f"{name}{i}": getattr(view, name) for i, view in enumerate(pair) for name in _ARRAYS}
            scenes = np.array(sorted(pair[0].scenes), dtype=np.str_)
            self.write(number, {**arrays, _SCENES: scenes})
            yield number

    def read(self, number: int) -> CorrespondingPair:
        """A pair.

        Raises:
            IntegrityError: the file is damaged.
        """
        sources = self.recipe.sources
        with self.opened(number) as stored:
            scenes = frozenset(stored[_SCENES].tolist())
            view0, view1 = (
                CorrespondingView(
                    **{name: stored[f"{name}{side}"] for name in _ARRAYS},
                    labels=np.zeros((0, 0), np.uint8),
                    homographies=np.zeros((0, 3, 3)),
                    size=(sources.width, sources.height),
                    kind=self.recipe.network.kind,
                    scenes=scenes,
                )
                for side in (0, 1)
            )
            return view0, view1


def make_pair(
    source: PairSource, recipe: Recipe, size: tuple[int, int], rng: np.random.Generator
) -> CorrespondingPair:
    """The next pair of a source, with the features of the recipe's front end."""
    pair = source.pair(rng, size)
    views = []
    for pixels, positions in ((pair.pixels0, pair.positions0), (pair.pixels1, pair.positions1)):
        points, scales, angles, descriptors = detect_and_describe(
            pixels, recipe.network.kind, recipe.sources.max_keypoints, recipe.front_end
        )
        corresponding, states = transfer(points, positions)
        views.append(
            CorrespondingView(
                points,
                scales,
                angles,
                descriptors,
                np.zeros((0, 0), np.uint8),
                np.zeros((0, 3, 3)),
                size,
                kind=recipe.network.kind,
                corresponding=corresponding,
                states=states,
                scenes=pair.scenes,
            )
        )
    return views[0], views[1]


# --- labels: Training labels: the ground-truth partner of each keypoint of two views, by reprojection.

IGNORED = -2  # a value of partners, beside UNMATCHED: losses ignore the keypoint
QUARTER_TURNS = (1, 8, 3, 6)  # EXIF orientations that are rotations

ViewPair = tuple[CachedView, CachedView]


@dataclass(frozen=True, eq=False)
class PartnerLabels:
    """The partner of each keypoint (UNMATCHED, IGNORED), and its position in the other image."""

    partner0: np.ndarray  # (N,) int64
    partner1: np.ndarray  # (M,)
    corresponding0: np.ndarray  # (N, 2) positions in image 1 of the keypoints of image 0; NaN if not visible
    corresponding1: np.ndarray  # (M, 2)


@dataclass(frozen=True, eq=False)
class PairBatch:
    """B pairs with the same number of keypoints in every image."""

    features0: Features
    features1: Features
    partner0: Tensor  # (B, N) int64
    partner1: Tensor  # (B, M)
    corresponding0: Tensor  # (B, N, 2) float32
    corresponding1: Tensor  # (B, M, 2)
    turns_known: bool = False  # whether features1 are turned to fit by geometry rather than by descriptors

    def __len__(self) -> int:
        """Pairs."""
        return len(self.partner0)


def reproject(points: np.ndarray, source: CachedView, target: CachedView) -> np.ndarray:
    """Project points (N, 2) of one view into another of the same scene; NaN where they are not visible."""
    plane = plane_of(points, source.labels)
    found = np.full((len(points), 2), np.nan)
    for p in np.intersect1d(plane[plane != NOTHING], target.labels):
        on_plane = plane == p
        H = target.homographies[p] @ np.linalg.inv(source.homographies[p])
        projected = np.column_stack([points[on_plane], np.ones(on_plane.sum())]) @ H.T
        # Depths are positive in both views where the plane is visible, so the sign of their ratio decides.
        front = projected[:, 2] > 1e-9
        pixels = np.where(
            front[:, None], projected[:, :2] / np.where(front, projected[:, 2], 1)[:, None], np.nan
        )
        pixels[plane_of(pixels, target.labels) != p] = np.nan
        found[on_plane] = pixels
    return found


def correspondences(view: CachedView, other: CachedView) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 2) of a view's keypoints in the other view of its pair, NaN where not visible; and (N,)
    bool, whether their visibility is known."""
    if isinstance(view, CorrespondingView):
        return view.corresponding, view.known
    return reproject(view.keypoints, view, other), np.ones(len(view.keypoints), bool)


def label_partners(view0: CachedView, view1: CachedView, recipe: PairRecipe) -> PartnerLabels:
    """Label the partners of two views; among candidates at one position the most similar descriptor wins."""
    if not len(view0.keypoints) or not len(view1.keypoints):
        unmatched = (np.full(len(view.keypoints), UNMATCHED, np.int64) for view in (view0, view1))
        return PartnerLabels(
            *unmatched, *(np.full((len(view.keypoints), 2), np.nan) for view in (view0, view1))
        )
    (corresponding0, known0), (corresponding1, known1) = (
        correspondences(view0, view1),
        correspondences(view1, view0),
    )
    forward = _distances(corresponding0, view1.keypoints)
    backward = _distances(corresponding1, view0.keypoints).T
    # Where one direction is unknown, the other one counts twice.
    error = (np.where(known0[:, None], forward, backward) + np.where(known1, backward, forward)) / 2
    # SIFT has one keypoint per orientation at a position; descriptors decide which of them correspond.
    similarity = view0.unit_descriptors() @ view1.unit_descriptors().T
    cost = np.where(error < recipe.match_distance, error + 2 * (1 - similarity), np.inf)
    rows, columns = mutual_minima(cost)
    partner0 = np.where((error.min(1) > recipe.unmatched_distance) & known0, UNMATCHED, IGNORED)
    partner1 = np.where((error.min(0) > recipe.unmatched_distance) & known1, UNMATCHED, IGNORED)
    partner0[rows], partner1[columns] = columns, rows
    return PartnerLabels(partner0, partner1, corresponding0, corresponding1)


def _distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N, M) distances of points (N, 2) and (M, 2); infinite from points that are NaN."""
    x = points[:, :1] - others[:, 0]
    y = points[:, 1:] - others[:, 1]
    return np.nan_to_num(np.sqrt(x * x + y * y), nan=np.inf)


def as_unrelated(view: CachedView) -> CachedView:
    """The view as part of an unrelated pair: nothing of it is visible in the other image."""
    if isinstance(view, CorrespondingView):
        return view.as_unrelated()
    return replace(view, labels=np.full_like(view.labels, NOTHING))


def to_features(view: CachedView, orientation: int = 1) -> Features:
    """The features of a cached view, upright or rotated by an EXIF orientation."""
    rotations = rotated_descriptors(view.unit_descriptors(), view.kind)
    return Features(
        keypoints=view.keypoints,
        descriptors=rotations[EXIF_TURNS[orientation] % len(rotations)],
        size=np.asarray(view.size, dtype=np.float32),
        scales=view.scales,
        orientations=view.angles,
        view_orientation=np.asarray(orientation),
        kind=view.kind,
    )


def draw_turns(recipe: PairRecipe, rng: np.random.Generator) -> tuple[int, int]:
    """EXIF orientations by which the two images of a pair are rotated."""
    turned = rng.random() < recipe.turned_share
    first = int(rng.integers(4)) if turned else 0
    second = int(rng.integers(4)) if turned and rng.random() < 0.3 else first
    return QUARTER_TURNS[first], QUARTER_TURNS[second]


def collate(pairs: Sequence[ViewPair], recipe: PairRecipe, rng: np.random.Generator) -> PairBatch:
    """A batch of pairs of views with equally many keypoints, with labels; some are rotated by 90° steps."""
    labels = [label_partners(view0, view1, recipe) for view0, view1 in pairs]
    turns = [draw_turns(recipe, rng) for _ in pairs]
    features0, features1 = (
        Features.stack([to_features(pair[side], turn[side]) for pair, turn in zip(pairs, turns, strict=True)])
        for side in (0, 1)
    )
    return PairBatch(
        features0,
        aligned(features0, features1, features0.kind),
        *(_stacked(labels, name, torch.int64) for name in ("partner0", "partner1")),
        *(_stacked(labels, name, torch.float32) for name in ("corresponding0", "corresponding1")),
    )


def _stacked(labels: Sequence[PartnerLabels], name: str, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.stack([getattr(label, name) for label in labels])).to(dtype)


# --- sampler: Batches of pairs drawn from cached views.

REFRESH_EVERY = 50  # batches
ATTEMPTS = 100  # for each pair of a batch
UNRELATED_ATTEMPTS = 10  # to find two scenes without a common photo


class PairSampler:
    """Batches of pairs, the same for the same seed, step and set of scenes."""

    def __init__(self, cache: ViewCache, recipe: PairRecipe, seed: int) -> None:
        self.cache, self.recipe, self.seed = cache, recipe, seed
        self.scenes = cache.ready()

    def refresh(self) -> None:
        """Also use scenes that were made meanwhile."""
        self.scenes = self.cache.ready()

    def batch(self, step: int) -> PairBatch:
        """The batch of a step.

        Raises:
            UsageError: hardly any view has as many keypoints as the recipe asks for.
            IntegrityError: a cached scene is damaged.
        """
        rng = np.random.default_rng([self.seed, 1, step])
        count = int(rng.choice(self.recipe.points))
        wanted = max(1, self.recipe.points_per_batch // (2 * count))
        pairs: list[ViewPair] = []
        for _ in range(ATTEMPTS * wanted):
            chosen = self._crop(self.draw(rng), count, rng)
            if min(len(view.keypoints) for view in chosen) == count:
                pairs.append(chosen)
            if len(pairs) == wanted:
                return collate(pairs, self.recipe, rng)
        raise UsageError(
            f"hardly any view of the photos has {count} keypoints; "
            "lower pair.points in the recipe or use sharper, larger photos"
        )

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[PairBatch]:
        """The batches of steps start … stop−1, as many as there are readers (threads) prepared ahead."""
        with ThreadPoolExecutor(readers) as pool:
            ahead = deque(pool.submit(self.batch, step) for step in range(start, min(stop, start + readers)))
            for step in range(start, stop):
                batch = ahead.popleft().result()
                if step % REFRESH_EVERY == 0:
                    self.refresh()
                if step + readers < stop:
                    ahead.append(pool.submit(self.batch, step + readers))
                yield batch

    def draw(self, rng: np.random.Generator) -> ViewPair:
        """Two views of one scene, mostly with enough overlap, or sometimes an unrelated pair."""
        first, second = (int(v) for v in rng.choice(self.cache.recipe.scene.views, 2, replace=False))
        if rng.random() < self.recipe.negative_share:
            pair = self._unrelated_pair(first, second, rng)
            if pair:
                return pair
        while True:
            views = self.cache.read(int(rng.choice(self.scenes)), [first, second])
            if overlap(*views, rng) > self.recipe.min_overlap or rng.random() < 0.1:
                return views[0], views[1]

    def _unrelated_pair(self, first: int, second: int, rng: np.random.Generator) -> ViewPair | None:
        """Views of two scenes without a common photo; None where there are too few photos for that."""
        for _ in range(UNRELATED_ATTEMPTS):
            scene0, scene1 = (int(s) for s in rng.choice(self.scenes, 2, replace=False))
            view0, view1 = self.cache.read(scene0, [first])[0], self.cache.read(scene1, [second])[0]
            if not view0.photos & view1.photos:
                return view0, as_unrelated(view1)
        return None

    def _crop(self, views: ViewPair, count: int, rng: np.random.Generator) -> ViewPair:
        """At most `count` keypoints of each view, sometimes from a window around a covisible point."""
        cropped = rng.random() < self.recipe.crop_share
        centres = window_centres(*views, rng) if cropped else (None, None)
        view0, view1 = (
            choose_points(view, count, self.recipe, centre, rng)
            for view, centre in zip(views, centres, strict=True)
        )
        return view0, view1


def choose_points(
    view: CachedView, count: int, recipe: PairRecipe, centre: np.ndarray | None, rng: np.random.Generator
) -> CachedView:
    """The strongest `count` keypoints after dropout, of the view or of a window around `centre` (2,)."""
    alive = np.flatnonzero(rng.random(len(view.keypoints)) >= rng.uniform(0, recipe.dropout))
    if centre is not None:
        offset = np.abs(view.keypoints[alive] - centre) / view.size
        pool = int(rng.uniform(1.0, 2.0) * count)
        alive = np.sort(alive[np.argsort(offset.max(1), kind="stable")[:pool]])
    return view.select(alive[:count])


def window_centres(
    view0: CachedView, view1: CachedView, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """A keypoint of view 0 and its position in view 1; None where none is covisible."""
    if not len(view0.keypoints):
        return None, None
    chosen = rng.choice(len(view0.keypoints), 8)
    candidates, corresponding = view0.keypoints[chosen], correspondences(view0.select(chosen), view1)[0]
    visible = np.flatnonzero(np.isfinite(corresponding[:, 0]))
    return (candidates[visible[0]], corresponding[visible[0]]) if len(visible) else (None, None)


def overlap(view0: CachedView, view1: CachedView, rng: np.random.Generator) -> float:
    """Share of the keypoints of view 0 that are visible in view 1, by a sample of 64."""
    if not len(view0.keypoints):
        return 0.0
    sample = view0.keypoints[rng.choice(len(view0.keypoints), 64)]
    return float(np.isfinite(reproject(sample, view0, view1)[:, 0]).mean())


# --- mixed: Batches of pairs of planes and of other sources, with the shares of the recipe.


class MixedSampler(PairSampler):
    """As `PairSampler`, with a share of the pairs from a second cache.

    Args:
        cache: scenes of planes.
        pairs: pairs of other sources.
        recipe: shares, and how pairs are drawn.
        seed: of the random draws.
    """

    def __init__(self, cache: ViewCache, pairs: PairCache, recipe: Recipe, seed: int) -> None:
        super().__init__(cache, recipe.pair, seed)
        self.pairs, self.share = pairs, recipe.sources.share
        self.numbers = pairs.ready()

    def refresh(self) -> None:
        """Also use what was made meanwhile."""
        super().refresh()
        self.numbers = self.pairs.ready()

    def draw(self, rng: np.random.Generator) -> ViewPair:
        """A pair of either kind, or an unrelated pair."""
        if len(self.numbers) < 2 or rng.random() >= self.share:
            return super().draw(rng)
        if rng.random() < self.recipe.negative_share:
            pair = self._unrelated(rng)
            if pair is not None:
                return pair
        return self._read(rng)

    def _read(self, rng: np.random.Generator) -> CorrespondingPair:
        view0, view1 = self.pairs.read(int(rng.choice(self.numbers)))
        return (view0, view1) if rng.random() < 0.5 else (view1, view0)

    def _unrelated(self, rng: np.random.Generator) -> ViewPair | None:
        """Images of two pairs without a common scene; None where random draws find none."""
        for _ in range(UNRELATED_ATTEMPTS):
            view0, view1 = self._read(rng)[0], self._read(rng)[1]
            if not view0.scenes & view1.scenes:
                return as_unrelated(view0), as_unrelated(view1)
        return None


# --- memory: Memory allocation of the training process.

_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # names of glibc's mallopt(3)


def keep_memory() -> None:
    """Make glibc keep freed blocks: large tensors are otherwise mapped again, page by page, at every step.

    Halves the time of a training step on a CPU. Only this process is affected; without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


# --- workers: Processes that render views during training.


class ViewWorkers:
    """Worker processes that fill a cache, stopped when the `with` block ends."""

    def __init__(
        self, cache: ViewCache | PairCache, photos: Sequence[Path], count: int, log: Callable[[str], None]
    ) -> None:
        self.cache, self._log = cache, log
        self.wanted = cache.wanted
        self._unreadable: set[Path] = set()
        spawn = multiprocessing.get_context("spawn")
        with safe_path():  # its locks start a process, too
            self._reports: SimpleQueue = spawn.SimpleQueue()
        missing = len(cache.ready()) < self.wanted
        self._processes = [
            spawn.Process(
                target=make_views,
                args=(cache, photos, range(number, self.wanted, count), self._reports),
                daemon=True,
            )
            for number in range(count if missing else 0)
        ]

    def __enter__(self) -> ViewWorkers:
        self.cache.remove_unfinished()
        for process in self._processes:
            with safe_path():
                process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def alive(self) -> bool:
        """Whether any worker is still running."""
        return any(process.is_alive() for process in self._processes)

    def log_unreadable(self) -> None:
        """Log photos that were found unreadable since the last call.

        Raises:
            MatcherError, OSError: the error that ended a worker, such as a full disk.
        """
        new: set[Path] = set()
        while not self._reports.empty():
            report = self._reports.get()
            if isinstance(report, Exception):
                raise report
            new |= set(report)
        new -= self._unreadable
        if new:
            self._unreadable |= new
            names = ", ".join(path.name for path in sorted(new)[:5])
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            self._log(f"skipped {len(self._unreadable)} photos that cannot be read: {names}{more}")


def make_views(
    cache: ViewCache | PairCache, photos: Sequence[Path], scenes: Sequence[int], reports: SimpleQueue
) -> None:
    """Fill a cache; the body of a worker process.

    Reports lists of unreadable photos, or the error that ended the work. Ends with the parent process,
    even if that was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    cv2.setNumThreads(1)
    parent, photo_set, reported = multiprocessing.parent_process(), cache.photo_set(photos), 0
    try:
        for _ in cache.make(photo_set, scenes):
            if len(photo_set.unreadable) > reported:
                reported = len(photo_set.unreadable)
                reports.put([photo_set.photos[number] for number in photo_set.unreadable])
            if parent is not None and not parent.is_alive():
                return
    except (MatcherError, OSError) as error:
        reports.put(error)


# --- reading: Recipes from TOML files, checked.

_LARGEST = 32 * 1024  # bytes


def read_recipe(path: Path) -> Recipe | FrontEndRecipe:
    """A recipe from TOML: of the front end if it has `trains = "front end"`, else of a matcher.

    Raises:
        UsageError: unreadable, not TOML, an unknown key, a wrong type or an impossible value; the message
            names the key.
    """
    try:
        with open_given(path) as file:
            data = file.read(_LARGEST + 1)
        # The time that TOML takes grows with the square of its length.
        if len(data) > _LARGEST:
            raise UsageError(
                f"{path}: a recipe has a few kilobytes, and this file more than {_LARGEST // 1024}"
            )
        values = tomllib.loads(data.decode("utf-8"))
        recipe = from_dict(FrontEndRecipe if "trains" in values else Recipe, values, where=path.name)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not a TOML file ({error})") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    check_recipe(recipe, path.name)
    return recipe


def shipped_recipe(name: str) -> Path:
    """The recipe of shipped weights, beside them.

    Raises:
        UsageError: there is none of that name.
    """
    for folder in FOLDERS:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    raise UsageError(f"{FOLDERS[-1] / f'{name}.toml'} is absent; give a recipe with --recipe FILE.toml")


def check_recipe(recipe: Recipe | FrontEndRecipe, where: str = "recipe") -> None:
    """Refuse values of the right type that cannot be trained with.

    Raises:
        UsageError: names the first such key and what it must be.
    """
    for kept, rule in recipe.rules():
        if not kept:
            raise UsageError(f"{where}: {rule}")
    if isinstance(recipe, Recipe):
        try:
            check_config(recipe.network)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
