"""OpenMVG's `sfm_data.json`, regions and matches, for its SfM commands.

Pixels as ours: OpenMVG keeps what its detectors give, the centre of the first pixel being (0, 0).
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from matcher.collection.exporting.cameras import HALF_PIXEL, CameraChoice, Intrinsics, group_cameras
from matcher.collection.exporting.hloc import features_of
from matcher.collection.exporting.output import ExportReport, whole_folder
from matcher.collection.exporting.validation import (
    begin_export,
    refuse_collisions,
    valid_keypoints,
    valid_pairs,
)
from matcher.data.camera import CAMERA_MODELS
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage, StoredPair
    from matcher.collection.store import Store

_NEW = 1 << 31  # cereal's mark of an object that is written for the first time
_PLAIN = 1 << 30  # cereal's mark of an object of the declared type itself
_RADIAL = ("SIMPLE_RADIAL", "RADIAL")  # x · (1 + k1 r² + k2 r⁴), as OpenMVG has it
_MATCH_FILES = {"fundamental": "f", "essential": "e", "homography": "h"}


def write_openmvg(
    store: Store, out: Path, choice: CameraChoice | None = None, *, overwrite: bool = False
) -> ExportReport:
    """A folder with `sfm_data.json`, `*.feat`, `image_describer.json`, putative and verified matches.

    Descriptors are not written: its SfM needs none. Cameras are pinhole with three radial terms.

    Args:
        store: the run.
        out: the folder; it must not exist, or be empty.
        choice: the cameras.
        overwrite: see `output.whole_folder`.

    Raises:
        UsageError: nothing to write, a camera with another distortion, or photos of one name in several
            folders: OpenMVG names their regions by the last part of the name without its ending.
        OSError: the disk is full.
    """
    report, images = begin_export(store, out, utf8="JSON")
    names = [image.name for image in images]
    refuse_collisions(names, _stem, "file of regions, which OpenMVG names without folder and ending")
    numbers = {name: number for number, name in enumerate(names)}
    with whole_folder(out, overwrite=overwrite) as part:
        cameras = group_cameras(images, choice)
        scene = _scene(store.image_folder, images, cameras)
        (part / "sfm_data.json").write_text(json.dumps(scene, indent=1), encoding="utf-8")
        describer = {"regions_type": _pointer("SIFT_Regions", _PLAIN, {})}
        (part / "image_describer.json").write_text(json.dumps(describer, indent=1), encoding="utf-8")
        read = features_of(store, report)
        for image in images:
            points = valid_keypoints(store, image)
            _write_regions(part / f"{_stem(image.name)}.feat", points, read(image.name))
        _write_matches(part, valid_pairs(store, images, report), numbers)
    return report


def _stem(name: str) -> str:
    return PurePosixPath(name).stem


def _pointer(name: str | None, polymorphic: int, data: dict[str, Any], number: int = 1) -> dict[str, Any]:
    named = {} if name is None else {"polymorphic_name": name}
    return {"polymorphic_id": polymorphic, **named, "ptr_wrapper": {"id": _NEW + number, "data": data}}


def _scene(
    folder: Path, images: list[StoredImage], cameras: list[tuple[Intrinsics, list[StoredImage]]]
) -> dict[str, Any]:
    camera_of = {image.name: number for number, (_, group) in enumerate(cameras) for image in group}
    views = []
    for number, image in enumerate(images):
        path = PurePosixPath(image.name)
        data = {
            "local_path": "" if str(path.parent) == "." else f"{path.parent}/",
            "filename": path.name,
            "width": image.size[0],
            "height": image.size[1],
            "id_view": number,
            "id_intrinsic": camera_of[image.name],
            "id_pose": number,
        }
        views.append({"key": number, "value": _pointer(None, _PLAIN, data, number + 1)})
    intrinsics = [
        {"key": number, "value": _intrinsic(camera, number, len(views) + 1 + number)}
        for number, (camera, _) in enumerate(cameras)
    ]
    return {
        "sfm_data_version": "0.3",
        "root_path": str(folder),
        "views": views,
        "intrinsics": intrinsics,
        "extrinsics": [],
        "structure": [],
        "control_points": [],
    }


def _intrinsic(camera: Intrinsics, number: int, pointer: int) -> dict[str, Any]:
    """OpenMVG has one focal length; its name for the model is written once, and later ones refer to it."""
    focals, _ = CAMERA_MODELS[camera.model]
    principal, distortion = camera.params[focals : focals + 2], camera.params[focals + 2 :]
    if camera.model not in _RADIAL and any(distortion):
        raise UsageError(
            f"openmvg supports pinhole cameras with radial distortion, but this is {camera.model}: export "
            "to colmap or kapture"
        )
    data = {
        "width": camera.size[0],
        "height": camera.size[1],
        "focal_length": float(np.mean(camera.params[:focals])),
        "principal_point": [value - HALF_PIXEL for value in principal],
        "disto_k3": [*distortion, 0.0, 0.0, 0.0][:3] if camera.model in _RADIAL else [0.0, 0.0, 0.0],
    }
    first = number == 0
    return _pointer("pinhole_radial_k3" if first else None, _NEW + 1 if first else 1, data, pointer)


def _write_regions(path: Path, points: np.ndarray, features: Any | None) -> None:
    """A line per keypoint: x, y, scale (a radius), direction in radians."""
    scales, angles = np.ones(len(points)), np.zeros(len(points))
    if features is not None and features.scales is not None:
        scales = to_numpy(features.scales) / 2
    if features is not None and features.orientations is not None:
        angles = to_numpy(features.orientations)
    np.savetxt(path, np.column_stack([points, scales, angles]), fmt="%.8g")


def _write_matches(folder: Path, pairs: Any, numbers: dict[str, int]) -> None:
    """Files of all matches and of the verified ones, by the kind of their geometry."""
    files: dict[str, TextIO] = {}
    try:
        for pair in pairs:
            _append(files, folder, "putative", pair, numbers, np.asarray(pair.matches.indices))
            kind = _MATCH_FILES.get(pair.geometry.kind)
            if pair.geometry.status == "ok" and kind is not None:
                _append(files, folder, kind, pair, numbers, pair.matches.indices[pair.geometry.inliers])
    finally:
        for file in files.values():
            file.close()


def _append(
    files: dict[str, TextIO],
    folder: Path,
    kind: str,
    pair: StoredPair,
    numbers: dict[str, int],
    indices: np.ndarray,
) -> None:
    if kind not in files:
        files[kind] = (folder / f"matches.{kind}.txt").open("w", encoding="ascii")
    file = files[kind]
    file.write(f"{numbers[pair.name0]} {numbers[pair.name1]}\n{len(indices)}\n")
    file.writelines(f"{i} {j}\n" for i, j in indices.tolist())
