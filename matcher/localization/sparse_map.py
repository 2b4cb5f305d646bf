"""The points of a COLMAP model as arrays, by the keypoints of a run that observe them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.collection.reconstruction.given_poses import (
    camera_of_model,
    check_finite,
    check_model_poses,
    check_points,
    find_model,
    read_model,
)
from matcher.data.camera import Camera
from matcher.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from matcher.collection.store import Store

_HALF_PIXEL = 0.5  # COLMAP's origin is the corner of the first pixel
_MOVED = 4.0  # pixels of the resized image by which refinement may have moved half of the keypoints


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

    def shared(self, first: int, second: int) -> int:
        """Points that two images both observe."""
        return len(np.intersect1d(self._seen(first), self._seen(second), assume_unique=True))

    def _seen(self, image: int) -> np.ndarray:
        return np.unique(self.points[image][self.points[image] >= 0])


def read_sparse_map(folder: str | Path, store: Store) -> SparseMap:
    """The model in a folder (see `find_model`), whose keypoints are those of the run.

    Raises:
        UsageError: no model, or one without points or whose images the run does not have.
        IntegrityError: the model is damaged, or its keypoints are not the run's.
    """
    place = find_model(Path(folder))
    model = read_model(place)
    rows = {number: row for row, number in enumerate(sorted(model.point3D_ids()))}
    if not rows:
        raise UsageError(
            f"{place} has no points, so nothing can be matched with it: triangulate them by `matcher sfm "
            f"PHOTOS --poses {folder} --out NEW_MODEL`"
        )
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda image: image.name)
    known = {image.name: image for image in store.images() if image.status == "done"}
    if absent := [image.name for image in images if image.name not in known]:
        raise UsageError(
            f"the run {store.folder} lacks {len(absent)} of the {len(images)} images of {place}, such as "
            f"{absent[0]}: name the run of this model, or triangulate its poses anew by `matcher sfm PHOTOS "
            f"--poses {folder} --out NEW_MODEL`"
        )
    columns = [_observations(image, rows) for image in images]
    for image, (points, _) in zip(images, columns, strict=True):
        check_finite(place, f"a keypoint of {image.name}", points)
        _check_keypoints(store, image.name, points, place)
    poses = np.tile(np.eye(4), (len(images), 1, 1))
    poses[:, :3] = [image.cam_from_world().matrix() for image in images]
    xyz = np.array([model.point3D(number).xyz for number in rows], dtype=np.float64).reshape(-1, 3)
    check_model_poses(place, "a pose", poses)
    check_points(place, xyz)
    return SparseMap(
        names=tuple(image.name for image in images),
        cam_from_world=poses,
        cameras=tuple(camera_of_model(place, model.camera(image.camera_id)) for image in images),
        keypoints=tuple(points for points, _ in columns),
        points=tuple(partners for _, partners in columns),
        xyz=xyz,
        ids=np.array(list(rows), dtype=np.int64),
    )


def _observations(image: Any, rows: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Keypoints (N, 2) in our pixels and their points (N,)."""
    seen = list(image.points2D)
    xy = np.array([point.xy for point in seen], dtype=np.float64).reshape(-1, 2) - _HALF_PIXEL
    return xy, np.array([rows[p.point3D_id] if p.has_point3D() else -1 for p in seen], dtype=np.int64)


def _check_keypoints(store: Store, name: str, points: np.ndarray, place: Path) -> None:
    own = store.keypoints(name)
    far = _MOVED / min(store.scale(name))
    if len(own) == len(points) and (len(own) == 0 or np.median(np.linalg.norm(own - points, axis=1)) < far):
        return
    raise IntegrityError(
        f"{place}: the {len(points)} keypoints of {name} are not the {len(own)} of the run {store.folder}, "
        "whose images or settings have changed since, or which is another model's: reconstruct again with "
        f"`matcher sfm {store.folder} --out NEW_MODEL`, or triangulate the model's poses anew with "
        "`matcher sfm PHOTOS --poses MODEL --out NEW_MODEL`"
    )
