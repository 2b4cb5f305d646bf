"""COLMAP's database, written by pycolmap itself, because its schema changes between versions.

COLMAP's pixels have their origin in the corner of the first pixel: everything moves by half a pixel. COLMAP
does not check indices and crashes on one out of range, so all are checked here.
"""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.collection.exporting.cameras import HALF_PIXEL, CameraChoice, Intrinsics, group_cameras
from matcher.collection.exporting.output import ExportReport, whole_file
from matcher.collection.exporting.rigs import colmap_rigs
from matcher.collection.exporting.validation import begin_export, valid_keypoints, valid_pairs
from matcher.data.matches import TwoViewGeometry
from matcher.errors import UsageError, install_command

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage, StoredPair
    from matcher.collection.store import Store

_ROOM = 1 << 16  # bytes; what COLMAP says where less is left does not name the disk
_ORIGIN = np.array([[1, 0, HALF_PIXEL], [0, 1, HALF_PIXEL], [0, 0, 1]], dtype=np.float64)


def import_pycolmap() -> Any:
    """The module pycolmap.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import pycolmap
    except ImportError as error:
        raise UsageError(f"this needs pycolmap: {install_command('sfm')}") from error
    _keep_termination()
    return pycolmap


def _keep_termination() -> None:
    """Take back SIGTERM, which the import gave to glog: it would dump the stack and clean nothing up."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def write_colmap(
    store: Store,
    out: Path,
    choice: CameraChoice | None = None,
    only: Collection[str] | None = None,
    without: Collection[tuple[str, str]] = (),
) -> ExportReport:
    """A database for COLMAP: cameras, images, keypoints, matches and verified pairs.

    All matches go to `matches`, the inliers of pairs with a geometry to `two_view_geometries`; to verify
    again, clear the latter and run COLMAP's verification.

    Args:
        store: the run.
        out: the database file; one that exists is replaced (`export` and the command line refuse to).
        choice: the cameras, and the rig that they are fixed to.
        only: names of the images to write; all when absent.
        without: pairs to leave out, names in order.

    Raises:
        UsageError: pycolmap is absent, nothing to write, a name that SQLite cannot hold, or a rig that does
            not fit the images.
        OSError: the disk is full.
    """
    pycolmap = import_pycolmap()
    report, images = begin_export(store, out, utf8="COLMAP", only=only)
    report.without = without
    cameras = group_cameras(images, choice)
    rig = None if choice is None else choice.rig
    if rig is not None:
        rig.frames(image.name for image in images)  # they fit
    # Without a DatabaseTransaction, whose end kills the process where the disk is full.
    with (
        whole_file(out) as part,
        _translated_errors(out),
        _whole_database(part),
        pycolmap.Database.open(part) as database,
    ):
        camera_of = _write_cameras(pycolmap, database, cameras, report)
        numbers = {}  # ascending with the names, so that image 0 of a pair has the smaller number
        for image in images:
            row = pycolmap.Image(name=image.name, camera_id=camera_of[image.name])
            numbers[image.name] = database.write_image(row)
            points = to_colmap(valid_keypoints(store, image))
            database.write_keypoints(numbers[image.name], points)
        _write_pairs(pycolmap, database, valid_pairs(store, images, report), numbers)
        if rig is not None:
            pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
            pycolmap.apply_rig_config(colmap_rigs(pycolmap, rig), database)
    return report


def _write_pairs(pycolmap: Any, database: Any, pairs: Iterable[StoredPair], numbers: dict[str, int]) -> None:
    for pair in pairs:
        ends = numbers[pair.name0], numbers[pair.name1]
        indices = np.ascontiguousarray(pair.matches.indices, dtype=np.uint32).reshape(-1, 2)
        database.write_matches(*ends, indices)
        verified = two_view_geometry(pycolmap, pair.geometry, indices)
        if verified is not None:
            database.write_two_view_geometry(*ends, verified)


def _write_cameras(
    pycolmap: Any,
    database: Any,
    cameras: list[tuple[Intrinsics, list[StoredImage]]],
    report: ExportReport,
) -> dict[str, int]:
    """The number of the camera of every image."""
    camera_of = {}
    for intrinsics, group in cameras:
        width, height = intrinsics.size
        params = list(intrinsics.params)
        camera = pycolmap.Camera(model=intrinsics.model, width=width, height=height, params=params)
        camera.has_prior_focal_length = intrinsics.focal_known
        number = database.write_camera(camera)
        camera_of |= {image.name: number for image in group}
        report.cameras += 1
        report.guessed_cameras += 0 if intrinsics.focal_known else len(group)
        if intrinsics.given:
            report.given_cameras.append(number)
    return camera_of


def to_colmap(points: np.ndarray) -> np.ndarray:
    """Points (…, 2) in stored pixels → COLMAP's pixels."""
    return points + np.asarray(HALF_PIXEL, dtype=points.dtype)


def two_view_geometry(pycolmap: Any, geometry: TwoViewGeometry, indices: np.ndarray) -> Any | None:
    """The verified matches of a pair with their model, None where there is none.

    The configuration must be set: without it, COLMAP's mapper silently ignores the pair.
    """
    if geometry.status != "ok" or geometry.matrix is None:
        return None
    kinds = pycolmap.TwoViewGeometryConfiguration
    verified = pycolmap.TwoViewGeometry()
    verified.inlier_matches = indices[np.asarray(geometry.inliers, dtype=bool)]
    if geometry.kind == "homography":
        verified.config = kinds.PLANAR_OR_PANORAMIC
        verified.H = _ORIGIN @ geometry.matrix @ np.linalg.inv(_ORIGIN)
    elif geometry.kind == "fundamental":
        verified.config = kinds.UNCALIBRATED
        verified.F = np.linalg.inv(_ORIGIN).T @ geometry.matrix @ np.linalg.inv(_ORIGIN)
    else:
        verified.config = kinds.CALIBRATED
        verified.E = geometry.matrix
        if geometry.cam1_from_cam0 is not None:
            rotation = pycolmap.Rotation3d(geometry.cam1_from_cam0[:3, :3])
            verified.cam2_from_cam1 = pycolmap.Rigid3d(rotation, geometry.cam1_from_cam0[:3, 3])
    return verified


@contextmanager
def _whole_database(path: Path) -> Iterator[None]:
    """Refuse a closed database of which some is still in SQLite's log, because the disk is full."""
    yield
    if path.with_name(f"{path.name}-wal").exists():
        raise OSError(errno.ENOSPC, f"{path.parent}: the disk is full")


@contextmanager
def _translated_errors(out: Path) -> Iterator[None]:
    """Translate COLMAP's C++ exceptions."""
    try:
        yield
    except RuntimeError as error:
        if "full" in str(error) or shutil.disk_usage(out.absolute().parent).free < _ROOM:
            raise OSError(errno.ENOSPC, f"{out}: the disk is full") from error
        raise OSError(errno.EIO, f"{out}: COLMAP could not write its database ({error})") from error
