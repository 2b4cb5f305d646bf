"""What a map is: points by the keypoints that observe them, the policy of localising, an index of images."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from matcher.cameras import Camera
from matcher.collection.schema import INDEX
from matcher.collection.store import Store
from matcher.errors import IntegrityError, UsageError
from matcher.export.colmap import HALF_PIXEL
from matcher.files import open_given, write_whole
from matcher.match import retrieval
from matcher.match.retrieval import Vocabulary
from matcher.match.steering import rotated_descriptors
from matcher.sfm.models import as_our_camera, check_numbers, find_model, poses_of, read_model, registered
from matcher.types import Features
from matcher.weights.files import read_header


@dataclass(frozen=True, eq=False)
class SparseMap:
    """I images, P points."""

    names: tuple[str, ...]
    cam_from_world: np.ndarray  # (I, 4, 4)
    cameras: tuple[Camera, ...]
    keypoints: tuple[np.ndarray, ...]  # (N, 2) of each image, stored pixels
    points: tuple[np.ndarray, ...]  # (N,) the row in `xyz` that a keypoint observes, or −1
    xyz: np.ndarray  # (P, 3)
    ids: np.ndarray  # (P,) int64 in the model


def read_sparse_map(folder: str | Path, store: Store) -> SparseMap:
    """The model in a folder (see `find_model`), refused where it has no points or is not of the run."""
    place = find_model(Path(folder))
    model = read_model(place)
    rows = {number: row for row, number in enumerate(sorted(model.point3D_ids()))}
    if not rows:
        raise UsageError(f"{place} has no points: make them by `matcher sfm DIR --poses {folder} --out NEW`")
    images = sorted(registered(model), key=lambda image: image.name)
    known = {image.name for image in store.images() if image.status == "done"}
    if absent := [image.name for image in images if image.name not in known]:
        raise UsageError(
            f"the run {store.folder} lacks {len(absent)} of the {len(images)} images of {place}, such as "
            f"{absent[0]}: name its run, or make one by `matcher sfm PHOTOS --poses {folder} --out NEW_MODEL`"
        )
    keypoints, points = [], []
    for image in images:
        seen = list(image.points2D)
        keypoints.append(np.array([p.xy for p in seen], np.float64).reshape(-1, 2) - HALF_PIXEL)
        points.append(np.array([rows[p.point3D_id] if p.has_point3D() else -1 for p in seen], np.int64))
        check_numbers(place, f"a keypoint of {image.name}", keypoints[-1])
        own, most = store.keypoints(image.name), 4 / min(store.scale(image.name))  # 4: as refinement moves
        same = len(own) == len(seen)
        if not same or (len(own) and np.median(np.linalg.norm(own - keypoints[-1], axis=1)) >= most):
            raise IntegrityError(
                f"{place}: the {len(seen)} keypoints of {image.name} are not the {len(own)} of the run "
                f"{store.folder}, which has changed since, or is another model's: make the model again with "
                f"`matcher sfm {store.folder} --out NEW_MODEL`, and `--poses {place}` to keep its poses"
            )
    names, poses = tuple(image.name for image in images), poses_of(model)
    return SparseMap(
        names,
        np.array([poses[name] for name in names]),
        tuple(as_our_camera(model.camera(image.camera_id)) for image in images),
        tuple(keypoints),
        tuple(points),
        np.array([model.point3D(number).xyz for number in rows], dtype=np.float64).reshape(-1, 3),
        np.array(list(rows), dtype=np.int64),
    )


@dataclass(frozen=True)
class LocalizationConfig:
    """Policy of `Map.localize`; pixels are those of the resized photo; `UsageError`: a value out of range."""

    neighbours: int = 10  # most similar images of the map that a photo is matched with, at most
    batch: int = 2  # images matched before the pose is tried
    enough_inliers: int = 150  # after which no more images are matched
    # Where the first batch is not enough, the other images are matched by so many keypoints at first
    # (preemptive matching, Wu 2013), and with all only if so many of these match points; 0: all at once.
    preemptive_keypoints: int = 256
    preemptive_matches: int = 4
    max_error: float = 4.0  # of an inlier
    # Keypoints that agree with a pose, at least, and log10 of the poses with as many that chance would give:
    # in a room with several like tables up to 27 (SIFT: 32) agreed with a pose at the wrong one: −40 (−73).
    min_inliers: int = 35
    max_log10_false_alarms: float = -80.0
    # Of the matched keypoints, unless `enough_inliers` agree: with a wrong pose at such a table 57 of 313 did
    # once (SIFT), with right ones 23 % or more.
    min_share: float = 0.2
    min_spread: float = 0.005  # share of the photo that the inliers cover
    # And where less than this share of the matched keypoints agree, as elsewhere in the photo they disagree.
    # Where points of the map were inexact 27 to 39 % agreed with poses .4 to .9 m off, on 11 to 13 % of the
    # photo; right ones of as few cover more, but for one of SIFT's.
    few_share: float = 0.45
    min_spread_of_few: float = 0.14
    refine: bool = True  # keypoints of the photo are refined on the images
    seed: int = 0  # of the sampling

    def __post_init__(self) -> None:
        for name in ("neighbours", "batch", "enough_inliers", "min_inliers", "max_error"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)!r}")
        for name in ("preemptive_keypoints", "preemptive_matches"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, but it is {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class RetrievalIndex:
    """Global descriptors of the images of a run; a photo is compared in all orientations."""

    vocabulary: Vocabulary
    table: np.ndarray  # (I, G) float16 of unit length, zeros for images without keypoints
    kind: str  # of the features

    def similar(self, features: Features, k: int) -> np.ndarray:
        """(k,) rows of the most similar images, best first."""
        if not bool(features.mask.any()):
            return np.zeros(0, np.int64)
        turned = rotated_descriptors(retrieval.strongest_descriptors(features), self.kind)
        queries = np.array([self.vocabulary.describe(each) for each in turned], dtype=np.float32)
        blocks = (self.table[i : i + 128] for i in range(0, len(self.table), 128))  # which fit a core's cache
        similarity = np.concatenate([(each.astype(np.float32) @ queries.T).max(axis=1) for each in blocks])
        return np.argsort(-similarity, kind="stable")[:k]


def open_index(
    folder: Path, names: Sequence[str], digests: Sequence[str], features: Callable[[str], Features]
) -> RetrievalIndex:
    """The index of a run, read from its folder, or made and kept there where it can be written."""
    wanted = hashlib.sha256("\n".join(map(" ".join, zip(names, digests, strict=True))).encode()).hexdigest()
    with suppress(OSError, ValueError, KeyError, TypeError, SafetensorError):
        # Anybody may have made it; absent or damaged, it can be made again.
        with open_given(folder / INDEX) as file:
            data = file.read()
        arrays, about = load(data), read_header(data)
        words, target, sign, table = (arrays[name] for name in ("words", "target", "sign", "table"))
        sound = about["of"] == wanted and words.ndim == table.ndim == 2 and len(table) == len(names)
        sound = sound and np.isfinite(table).all() and np.isfinite(words).all() and target.dtype.kind == "i"
        sound = sound and target.shape == sign.shape == (words.size,) and (np.abs(sign) == 1).all()
        if sound and words.size and ((target >= 0) & (target < table.shape[1])).all():
            return RetrievalIndex(Vocabulary(words, target, sign, table.shape[1]), table, about["kind"])
    # There is a vocabulary, as the images of a map's points have keypoints.
    own, kind = retrieval.collection_vocabulary(names, features)
    table = np.zeros((len(names), own.length), np.float16)
    for row, name in enumerate(names):
        if len(local := retrieval.strongest_descriptors(features(name))):
            table[row] = own.describe(local)
    arrays = dict(words=own.words, target=own.target, sign=own.sign, table=table)
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    with suppress(OSError):  # a folder that cannot be written costs time only
        write_whole(folder / INDEX, save(arrays, {"kind": kind, "of": wanted}))
    return RetrievalIndex(own, table, kind)
