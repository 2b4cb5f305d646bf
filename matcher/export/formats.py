"""The export formats by name; a writer is imported when it is used, so that help needs none of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import CAMERA_MODELS
from matcher.errors import UsageError, unknown_name
from matcher.export.colmap import HALF_PIXEL, CameraChoice, Intrinsics, group_cameras, to_colmap
from matcher.export.hloc import features_of
from matcher.export.output import (
    ExportReport,
    begin_export,
    check_folder,
    refuse_collisions,
    refuse_names,
    valid_keypoints,
    valid_pairs,
    whole_folder,
)
from matcher.files import check_output

if TYPE_CHECKING:
    from matcher.collection.schema import StoredImage, StoredPair
    from matcher.collection.store import Store
    from matcher.export.colmap import CameraChoice


# --- formats: The export formats by name; a writer is imported when it is used, so that help needs none of
# them.


@dataclass(frozen=True)
class Format:
    """How a run is exported to another program."""

    writer: str  # module and function, as "package.module:function"
    suffixes: tuple[str, ...] = ()  # of a file; a format without is a folder
    has_cameras: bool = False

    @property
    def write(self) -> Callable[..., ExportReport]:
        """The function that writes a run, imported at first use."""
        return resolve_name(self.writer)


FORMATS = {
    "colmap": Format("matcher.export.colmap:write_colmap", (".db",), has_cameras=True),
    "hloc": Format("matcher.export.hloc:write_hloc"),
    "npz": Format("matcher.export.hloc:write_npz", (".npz",)),
    "openmvg": Format("matcher.export.formats:write_openmvg", has_cameras=True),
    "kapture": Format("matcher.export.formats:write_kapture", has_cameras=True),
}


def export(
    store: Store,
    form: str,
    out: str | Path,
    choice: CameraChoice | None = None,
    *,
    overwrite: bool = False,
) -> ExportReport:
    """Export a run; indices are checked first, and the output is complete or absent.

    Args:
        store: the run, opened.
        form: a name in `FORMATS`.
        out: a file (colmap: `.db`, npz: `.npz`) or a folder (the others).
        choice: the cameras, for formats that have some.
        overwrite: replace an existing file, or write into a folder that holds files; without it only an
            `.npz` that an earlier export wrote is replaced. A database never is, since COLMAP adds to it.

    Raises:
        UsageError: an unknown format, an output that exists or is of another kind, names that the format
            cannot hold, cameras for a format without, or a library that is not installed.
        IntegrityError: the store is damaged.
        OSError: the disk is full.
    """
    out = Path(out)
    kind = FORMATS.get(form)
    if kind is None:
        raise UsageError(unknown_name("format", form, FORMATS))
    if choice is not None and not kind.has_cameras:
        others = ", ".join(name for name, known in FORMATS.items() if known.has_cameras)
        raise UsageError(f"{form} stores no cameras; leave them out, or export to one of {others}")
    if choice is not None and choice.rig is not None and form != "colmap":
        raise UsageError(f"{form} is written without rigs; leave it out, or export to colmap")
    if kind.suffixes:
        check_output(out, kind.suffixes, overwrite=overwrite)
        return kind.write(store, out, choice) if kind.has_cameras else kind.write(store, out)
    check_folder(out, overwrite=overwrite)
    cameras = [choice] if kind.has_cameras else []
    return kind.write(store, out, *cameras, overwrite=overwrite)


# --- openmvg: OpenMVG's `sfm_data.json`, regions and matches, for its SfM commands.

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


# --- kapture: Kapture 1.1 (Humenberger et al. 2020): text tables and raw arrays in folders.

_VERSION = "# kapture format: 1.1"
_BREAKING = frozenset(",\n\r#")


def write_kapture(
    store: Store, out: Path, choice: CameraChoice | None = None, *, overwrite: bool = False
) -> ExportReport:
    """A kapture folder with sensors, records, keypoints, descriptors and all matches with their scores.

    The photos themselves are not copied: link the image folder as `sensors/records_data`.

    Args:
        store: the run.
        out: the folder; it must not exist, or be empty.
        choice: the cameras.
        overwrite: see `output.whole_folder`.

    Raises:
        UsageError: nothing to write, or names with a comma, a line break or `#`, which tables cannot hold.
        OSError: the disk is full.
    """
    report, images = begin_export(store, out, utf8="kapture")
    names = [image.name for image in images]
    refuse_names(names, lambda name: bool(_BREAKING & set(name)), "hold a comma, a line break or #")
    with whole_folder(out, overwrite=overwrite) as part:
        _write_sensors(part / "sensors", images, choice)
        kind = _write_features(part / "reconstruction", store, images, report)
        folder = part / "reconstruction" / "matches" / kind
        for pair in valid_pairs(store, images, report):
            path = folder / f"{pair.name0}.overlapping" / f"{pair.name1}.matches"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.column_stack([pair.matches.indices, pair.matches.scores]).astype("<f8").tofile(path)
    report.notes.append(f"link the photos: ln -s {store.image_folder} {out / 'sensors' / 'records_data'}")
    return report


def _write_sensors(folder: Path, images: list[StoredImage], choice: CameraChoice | None) -> None:
    sensors, sensor_of = [], {}
    for number, (camera, group) in enumerate(group_cameras(images, choice)):
        params = ", ".join(map(repr, (*camera.size, *map(float, camera.params))))
        sensors.append(f"cam{number}, , camera, {camera.model}, {params}")
        sensor_of |= {image.name: f"cam{number}" for image in group}
    records = [f"{time}, {sensor_of[image.name]}, {image.name}" for time, image in enumerate(images)]
    folder.mkdir(parents=True)
    _write_table(folder / "sensors.txt", "sensor_device_id, name, sensor_type, [sensor_params]+", sensors)
    _write_table(folder / "records_camera.txt", "timestamp, device_id, image_path", records)


def _write_features(folder: Path, store: Store, images: list[StoredImage], report: ExportReport) -> str:
    """Keypoints, and descriptors where they are kept; returns the folder name of the front end."""
    read = features_of(store, report)
    kind, dtype, size = "keypoints", "", 0
    features = {}
    first = read(images[0].name)
    if first is not None:
        kind, size = first.kind, first.descriptors.shape[-1]
        dtype = str(to_numpy(first.descriptors).dtype)
    for image in images:
        points = to_colmap(valid_keypoints(store, image)).astype("<f4")
        _write_array(folder / "keypoints" / kind / f"{image.name}.kpt", points)
        features = read(image.name) if size else None
        if features is not None:
            path = folder / "descriptors" / kind / f"{image.name}.desc"
            _write_array(path, to_numpy(features.descriptors).astype(dtype))
    _write_table(folder / "keypoints" / kind / "keypoints.txt", "name, dtype, dsize", [f"{kind}, float32, 2"])
    if size:
        row = f"{kind}, {dtype}, {size}, {kind}, L2"
        header = "name, dtype, dsize, keypoints_type, metric_type"
        _write_table(folder / "descriptors" / kind / "descriptors.txt", header, [row])
    return kind


def _write_array(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.ascontiguousarray(array).tofile(path)


def _write_table(path: Path, header: str, rows: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([_VERSION, f"# {header}", *rows, ""]), encoding="utf-8")
