"""What every exporter reads of a run; COLMAP's database, by pycolmap, as its schema changes between versions.

COLMAP's pixels have their origin in the corner of the first pixel: everything moves by half a pixel. COLMAP
does not check indices and crashes on one out of range, so all are checked here.
"""

from __future__ import annotations

import errno
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from matcher.cameras import CAMERA_MODELS, Camera, RigConfig, check_size, focal_of_film
from matcher.collection.schema import StoredImage, StoredPair, common_camera
from matcher.collection.store import Store, gone
from matcher.collection.tracks import contradicted_pairs
from matcher.errors import IntegrityError, UsageError, counted, few, optional
from matcher.files import whole_file
from matcher.geometry import FROM_CORNER
from matcher.image_files import read_gps, read_header
from matcher.types import Features, TwoViewGeometry


@dataclass
class ExportReport:
    """What an export wrote, and what it had to leave out."""

    path: Path
    photos: list[StoredImage] = field(default_factory=list)  # that are written
    images: int = 0
    keypoints: int = 0
    pairs: int = 0
    verified: int = 0  # pairs with a geometry
    matches: int = 0
    given_cameras: list[int] = field(default_factory=list)  # numbers of those that must not be refined
    cameras: int = 0
    guessed_cameras: int = 0  # photos of which nothing says the focal length
    left_out: list[str] = field(default_factory=list)  # what is damaged or gone, or no format can hold
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report, ready to print."""
        first = (
            f"{self.images} images with {self.keypoints} keypoints, {self.pairs} pairs "
            f"({self.verified} verified) with {self.matches} matches"
        )
        return [first, *self.notes, *(f"left out: {reason}" for reason in self.left_out)]


class ExportedRun:
    """The images of a run that have features, by name, with their keypoints, features and pairs; the report
    counts what is read, and names what is left out."""

    def __init__(
        self, store: Store, out: Path, only: Collection[str] | None = None, kept: Collection[str] = ()
    ) -> None:
        """Of `only` images of these names, with those `gone` left out that are not `kept`; `UsageError`: none
        has features."""
        self.store, self.report, common = store, ExportReport(out), common_camera(store.settings)
        known = [image for image in store.images() if only is None or image.name in only]
        absent = gone(store).difference(kept)
        images = [image for image in known if image.name not in absent]
        if names := [image.name for image in known if image.name in absent]:
            lost = f"{counted(len(names), 'image')} no longer in {store.image_folder}: {few(names)}"
            self.report.left_out.append(f"{lost}; put it back or exclude it")
        for status in ("failed", "waiting"):
            if names := [image.name for image in images if image.status == status]:
                note = f"{len(names)} images {status} in the run are not written: {few(names)}"
                self.report.notes.append(note)
        self.images: list[StoredImage] = [
            replace(image, camera=image.camera or common) for image in images if image.status == "done"
        ]
        self.report.photos, self.names = self.images, [image.name for image in self.images]
        self.sizes = {image.name: image.size for image in self.images}
        if not self.images:
            raise UsageError("the run has no image with features: finish it first")
        chosen = {image.name for image in images if image.status != "failed"}  # that one failed is said above
        waiting, failed = store.waiting(), (pair[:2] for pair in store.failed())
        for ends, what in (
            (waiting, "not matched yet: {}; run the command that made the run again"),
            (failed, "failed: {}; `matcher status RUN_DIR` tells why"),
        ):
            if count := sum(chosen.issuperset(pair) for pair in ends):
                self.report.notes.append(what.format(counted(count, "pair")))
        self.report.images, self.report.keypoints = len(self.images), sum(each.count for each in self.images)

    def keypoints(self, name: str) -> np.ndarray:
        """(N, 2) float32 in stored pixels; refined ones if the run was refined."""
        refined = self.store.refined_keypoints(name)
        points = self.store.keypoints(name) if refined is None else refined.keypoints
        return np.ascontiguousarray(points, dtype=np.float32)

    def features(self, name: str) -> Features | None:
        """An image's features; None, noted once, where descriptors were deleted."""
        try:
            return self.store.features(name)
        except IntegrityError as error:
            if not any(known.startswith("without descriptors") for known in self.report.notes):
                self.report.notes.append(f"without descriptors: {error}")
            return None

    def pairs(self, without: Collection[tuple[str, str]] = (), every: bool = False) -> Iterator[StoredPair]:
        """The pairs of those images, with name0 before name1, but for those `without`, those that others
        contradict, and, as programs that read them would crash, those in which a keypoint is matched
        twice; or `every` one."""
        known, contradicted = set(self.names), () if every else contradicted_pairs(self.store, without)
        self.report.notes += [f"left out: {a} and {b}, as other pairs contradict it" for a, b in contradicted]
        without = {*without, *contradicted}
        for pair in self.store.pairs():
            ends = (pair.name0, pair.name1)
            if not known.issuperset(ends) or ends in without:
                continue
            if not every and any(len(np.unique(column)) != len(column) for column in pair.matches.indices.T):
                self.report.left_out.append(f"the pair {' and '.join(ends)}: a keypoint is matched twice")
                continue
            self.report.pairs += 1
            self.report.matches += len(pair.matches)
            self.report.verified += pair.geometry.verified
            yield pair

    def refuse_names(self, bad: Callable[[str], object], reason: str) -> None:
        """Refuse an export whose format cannot hold some of the names (`UsageError`)."""
        if found := [name for name in self.names if bad(name)]:
            raise UsageError(f"{len(found)} names {reason}; rename them: {few(found)}")

    def refuse_collisions(self, key: Callable[[str], str], reason: str) -> None:
        """Refuse an export whose format would give one key to several names (`UsageError`)."""
        groups: dict[str, list[str]] = {}
        for name in self.names:
            groups.setdefault(key(name), []).append(name)
        if found := [" = ".join(group) for group in groups.values() if len(group) > 1]:
            raise UsageError(f"{len(found)} groups of names become one {reason}; rename them: {few(found)}")


# Which photos share a camera, and what is known about it before the reconstruction.

Sharing = Literal["auto", "single", "each"]
HALF_PIXEL = 0.5
GUESSED_FOCAL = 1.2  # of the longer side, a moderate wide angle, where nothing is known


@dataclass(frozen=True)
class CameraChoice:
    """How an export or a reconstruction sets up cameras; `UsageError`: an unknown model or way of sharing."""

    camera: Camera | None = None  # of all photos, stored pixels; None: from the store, EXIF or a guess
    sharing: Sharing = "auto"  # same size, folder and EXIF · one for all photos · each photo its own
    model: str = "SIMPLE_RADIAL"  # of cameras that are not given
    known: Mapping[str, Camera] = field(default_factory=dict)  # by name of image, such as those of a model
    refine_known: bool = False  # adjust those of `known` in the reconstruction
    rig: RigConfig | None = None  # cameras that are fixed to each other; each has its own intrinsics
    source: str = ""  # what `known` was read from, for messages

    def __post_init__(self) -> None:
        models = [name for name in CAMERA_MODELS if name != "FOV"]  # those that can start without distortion
        if self.model not in models:
            raise UsageError(f"the camera model must be one of {', '.join(models)}, not {self.model!r}")
        if self.sharing not in ("auto", "single", "each"):
            raise UsageError(f"cameras are shared auto, single or each, not {self.sharing!r}")
        if self.rig is not None and self.sharing != "auto":
            raise UsageError("the pictures of each camera of a rig share it: leave the sharing at auto")


@dataclass(frozen=True)
class Intrinsics:
    """One camera in COLMAP's terms; the centre of the first pixel is (0.5, 0.5)."""

    model: str
    size: tuple[int, int]
    params: tuple[float, ...]
    given: bool  # by the user: it is not refined
    focal_known: bool  # given or from EXIF


class Exif(NamedTuple):
    """Camera facts of a photo's header."""

    make: str = ""
    model: str = ""
    focal: float = 0.0  # mm
    focal_35mm: float = 0.0


def check_used(choice: CameraChoice, names: Iterable[str], stored: Iterable[Camera | None] = ()) -> None:
    """`UsageError` for cameras, or a model, of no photo: every photo has another one, as those `stored`, or
    another name; or for a rig whose pictures they are not."""
    others = list(map(known_cameras(choice), names := list(names)))
    if names and choice.known and not any(others):
        read = f"{choice.source}: " if choice.source else ""
        raise UsageError(
            f"{read}the cameras given are those of no photo, such as {next(iter(choice.known))!r}; names are "
            f"paths below the folder of images, such as {names[0]!r}"
        )
    if choice.rig is not None:
        choice.rig.frames(names)
    cameras = (one or choice.camera or own for one, own in zip_longest(others, stored))
    if names and choice.model != CameraChoice.model and all(cameras):
        raise UsageError("every photo has a camera already, so that camera_model has no effect; leave it out")
    given = choice.camera if others else None
    if given is not None and all(other is not None and not _same(other, given) for other in others):
        where = "their poses" if choice.rig is None else f"{choice.rig.source}, or with their poses"
        raise UsageError(f"the camera given is that of no photo: all have theirs in {where}; leave it out")


def known_cameras(choice: CameraChoice) -> Callable[[str], Camera | None]:
    """The camera of an image by name: of its rig's file, or of any picture of the same camera; or its own."""
    if choice.rig is None:
        return choice.known.get
    mounted = {name: choice.rig.camera_of(name) for name in choice.known}
    by_prefix = {each.prefix: choice.known[name] for name, each in mounted.items() if each is not None}
    by_prefix |= choice.rig.intrinsics()

    def known(name: str) -> Camera | None:
        own = choice.rig.camera_of(name)
        return (by_prefix.get(own.prefix) if own else None) or choice.known.get(name)

    return known


def group_cameras(
    images: Sequence[StoredImage], choice: CameraChoice | None = None
) -> list[tuple[Intrinsics, list[StoredImage]]]:
    """The cameras of a collection, each with its photos; `UsageError`: they do not fit the photos."""
    choice, groups, first = choice or CameraChoice(), {}, {}
    check_used(choice, [image.name for image in images], [image.camera for image in images])
    known_camera = known_cameras(choice)
    for image in images:
        (width, height), mounted = image.size, choice.rig and choice.rig.camera_of(image.name)
        known = known_camera(image.name) or choice.camera or image.camera
        if known is not None:
            try:
                check_size(known, image.size, f"the camera of {image.name}")
            except UsageError as error:
                raise UsageError(f"{error}; give each photo a line of its size, or no camera") from None
        exif = Exif() if known is not None else read_exif(image.path)
        own: Any = mounted.prefix if mounted else (Path(image.name).parent, exif) if known is None else None
        own = {"each": image.name, "auto": own, "single": None}[choice.sharing]
        groups.setdefault((image.size, known, own), (exif, []))[1].append(image)
        if mounted and first.setdefault(mounted.prefix, (image.size, known)) != (image.size, known):
            other = f"{image.name} has {width} x {height} pixels or other intrinsics than those before"
            raise UsageError(f"{choice.rig.source}: {mounted.prefix!r} is one camera, but {other}")
    if choice.sharing == "single" and len(groups) > 1:
        sizes = ", ".join(sorted({f"{w}x{h}" for (w, h), *_ in groups}))
        raise UsageError(f"one camera cannot take photos of {sizes} or of several calibrations: use auto")
    adjustable = set(choice.known.values()) if choice.refine_known else set()
    if choice.camera is not None:  # which is not refined, wherever it comes from
        adjustable = {each for each in adjustable if not _same(each, choice.camera)}
    adjustable -= set(choice.rig.intrinsics().values()) if choice.rig is not None else set()
    focals, more = CAMERA_MODELS[choice.model]
    found = []
    for (size, known, _), (exif, group) in groups.items():
        if known is not None:
            params, given = known.to_colmap()[1], known not in adjustable
            found.append((Intrinsics(known.model, size, params, given, focal_known=True), group))
            continue
        focal = focal_of_film(exif.focal_35mm, size)
        start = (focal or GUESSED_FOCAL * max(size),) * focals
        params = (*start, size[0] / 2, size[1] / 2, *(0.0,) * more)
        found.append((Intrinsics(choice.model, size, params, given=False, focal_known=focal > 0), group))
    return found


def check_photos(paths: Mapping[str, Path], choice: CameraChoice) -> None:
    """`UsageError` for cameras that do not fit the headers of photos, by name, before any is matched."""
    if choice.camera is None and not choice.known and choice.rig is None and choice.sharing != "single":
        return
    images = []
    for name, path in paths.items():
        with suppress(Exception):  # what cannot be read is said later
            images.append(StoredImage(name, path, "", read_header(path, 0x8769)[0], 0, None, "done", ""))
    group_cameras(images, choice)


def _same(first: Camera, second: Camera) -> bool:
    """Whether two cameras have the same intrinsics; one may not say its size."""
    return replace(first, size=None) == replace(second, size=None)


def read_exif(path: Path) -> Exif:
    """Camera facts from a photo's EXIF header; empty if it cannot be read."""
    try:
        _, tags, more = read_header(path, 0x8769)
        # FocalLength, FocalLengthIn35mmFilm
        lengths = [float(more.get(tag) or 0) for tag in (0x920A, 0xA405)]
        focals = [length if 0 < length < 1e5 else 0.0 for length in lengths]
        return Exif(*(str(tags.get(tag, "")) for tag in (0x010F, 0x0110)), *focals)
    except Exception:  # a header can be wrong in any way, and nothing depends on it
        return Exif()


def import_pycolmap() -> Any:
    """The module pycolmap; `UsageError`: it is not installed."""
    with optional():
        import pycolmap
    # Take back SIGTERM, which the import gave to glog: it would dump the stack and clean nothing up.
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    return pycolmap


def write_colmap(
    store: Store,
    out: Path,
    choice: CameraChoice | None = None,
    only: Collection[str] | None = None,
    without: Collection[tuple[str, str]] = (),
    kept: Collection[str] = (),
) -> ExportReport:
    """A database for COLMAP: cameras, images (`only` those named) and their GPS positions, keypoints, matches
    and verified pairs, but for the pairs `without`, names in order; a file that exists is replaced. Images
    that are `gone` are left out, but for those `kept`.

    All matches go to `matches`, the inliers of pairs with a geometry to `two_view_geometries`; to verify
    again, clear the latter and run COLMAP's verification.
    """
    pycolmap = import_pycolmap()
    run = ExportedRun(store, out, only, kept)
    report, cameras, rig = run.report, group_cameras(run.images, choice), choice and choice.rig
    report.cameras = len(cameras)
    # Without a DatabaseTransaction, whose end kills the process where the disk is full.
    with whole_file(out) as part, _disk_errors(out, part), pycolmap.Database.open(part) as database:
        camera_of = {}
        for intrinsics, group in cameras:
            width, height = intrinsics.size
            params = list(intrinsics.params)
            camera = pycolmap.Camera(model=intrinsics.model, width=width, height=height, params=params)
            camera.has_prior_focal_length = intrinsics.focal_known
            number = database.write_camera(camera)
            camera_of |= {image.name: number for image in group}
            report.guessed_cameras += 0 if intrinsics.focal_known else len(group)
            if intrinsics.given:
                report.given_cameras.append(number)
        numbers = {}  # ascending with the names, so that image 0 of a pair has the smaller number
        for name in run.names:
            numbers[name] = database.write_image(pycolmap.Image(name=name, camera_id=camera_of[name]))
            database.write_keypoints(numbers[name], to_colmap(run.keypoints(name)))
            if (place := read_gps(store.image_folder / name)) is not None:
                image = pycolmap.Image(name=name, camera_id=camera_of[name], image_id=numbers[name])
                how = dict(position=place, coordinate_system=pycolmap.PosePriorCoordinateSystem.WGS84)
                database.write_pose_prior(pycolmap.PosePrior(corr_data_id=image.data_id, **how))
        for pair in run.pairs(without):
            ends = numbers[pair.name0], numbers[pair.name1]
            indices = np.ascontiguousarray(pair.matches.indices, dtype=np.uint32).reshape(-1, 2)
            database.write_matches(*ends, indices)
            verified = two_view_geometry(pycolmap, pair.geometry, indices)
            if verified is not None:
                database.write_two_view_geometry(*ends, verified)
        if rig is not None:
            pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
            rigs = []  # their intrinsics are the database's
            for first, *others in rig.rigs:
                mounts = [pycolmap.RigConfigCamera(image_prefix=first.prefix, ref_sensor=True)]
                for each in others:
                    pose = None if each.cam_from_rig is None else as_rigid(each.cam_from_rig)
                    mounts.append(pycolmap.RigConfigCamera(image_prefix=each.prefix, cam_from_rig=pose))
                rigs.append(pycolmap.RigConfig(cameras=mounts))
            pycolmap.apply_rig_config(rigs, database)
    return report


def as_rigid(pose: Any) -> Any:
    """A `pycolmap.Rigid3d` of (4, 4) or (3, 4)."""
    pycolmap, matrix = import_pycolmap(), np.asarray(pose, dtype=np.float64)
    return pycolmap.Rigid3d(pycolmap.Rotation3d(matrix[:3, :3]), matrix[:3, 3])


def as_matrix(rigid: Any) -> np.ndarray:
    """(4, 4) of a `pycolmap.Rigid3d`."""
    return np.vstack([rigid.matrix(), [0, 0, 0, 1]])


def to_colmap(points: np.ndarray) -> np.ndarray:
    """Points (…, 2) in stored pixels → COLMAP's pixels."""
    return points + np.asarray(HALF_PIXEL, dtype=points.dtype)


def two_view_geometry(pycolmap: Any, geometry: TwoViewGeometry, indices: np.ndarray) -> Any | None:
    """The verified matches of a pair with their model; None: there is none. The configuration must be set:
    without it, COLMAP's mapper silently ignores the pair."""
    homography = geometry.matrix if geometry.kind == "homography" else geometry.homography
    fixed = geometry.status == "ok" and geometry.matrix is not None
    if not fixed and not (geometry.verified and homography is not None):
        return None
    kinds = pycolmap.TwoViewGeometryConfiguration
    verified = pycolmap.TwoViewGeometry()
    verified.inlier_matches = indices[np.asarray(geometry.inliers, dtype=bool)]
    if not fixed or geometry.kind == "homography":
        verified.config = kinds.PLANAR_OR_PANORAMIC
        verified.H = FROM_CORNER @ homography @ np.linalg.inv(FROM_CORNER)
    elif geometry.kind == "fundamental":
        verified.config = kinds.UNCALIBRATED
        verified.F = np.linalg.inv(FROM_CORNER).T @ geometry.matrix @ np.linalg.inv(FROM_CORNER)
    else:
        verified.config = kinds.CALIBRATED
        verified.E = geometry.matrix
        if geometry.cam1_from_cam0 is not None:
            verified.cam2_from_cam1 = as_rigid(geometry.cam1_from_cam0)
    return verified


@contextmanager
def _disk_errors(out: Path, part: Path) -> Iterator[None]:
    """Translate COLMAP's C++ exceptions, and see a full disk where COLMAP does not."""
    full = OSError(errno.ENOSPC, f"{out}: the disk is full")
    try:
        yield
    except RuntimeError as error:
        # Where little is left, what COLMAP says does not name the disk.
        if "full" in str(error) or shutil.disk_usage(out.absolute().parent).free < 1 << 16:
            raise full from error
        raise OSError(errno.EIO, f"{out}: COLMAP could not write its database ({error})") from error
    if part.with_name(f"{part.name}-wal").exists():  # some is still in SQLite's log
        raise full
