"""Kapture 1.1 (Humenberger et al. 2020): text tables and raw arrays in folders.

Kapture's pixels are COLMAP's: the corner of the first pixel is (0, 0), its centre (0.5, 0.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.collection.exporting.cameras import CameraChoice, group_cameras
from matcher.collection.exporting.colmap import to_colmap
from matcher.collection.exporting.hloc import features_of
from matcher.collection.exporting.output import ExportReport, whole_folder
from matcher.collection.exporting.validation import begin_export, refuse_names, valid_keypoints, valid_pairs
from matcher.data.tensors import to_numpy

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage
    from matcher.collection.store import Store

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
