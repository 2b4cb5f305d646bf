"""The HDF5 files of hloc (Sarlin et al. 2019): features.h5, matches.h5 and pairs.txt.

Pixels as ours: the centre of the first one is (0, 0); hloc adds the half pixel when it imports into COLMAP.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.arrays import to_numpy
from matcher.collection.sources import Extracted, Photos, Selection, name_fault, stamp_of
from matcher.config import NetworkConfig
from matcher.errors import ImageError, IntegrityError, UsageError, install_command
from matcher.export.output import (
    ExportReport,
    begin_export,
    refuse_collisions,
    refuse_names,
    valid_keypoints,
    valid_pairs,
    whole_file,
    whole_folder,
)
from matcher.files import MARK
from matcher.geometry import resized
from matcher.pipeline import Pipeline
from matcher.types import Features

if TYPE_CHECKING:
    from matcher.collection.schema import StoredImage, StoredPair
    from matcher.collection.sources import FeatureSource
    from matcher.collection.store import Store


# --- hloc: The HDF5 files of hloc (Sarlin et al. 2019): features.h5, matches.h5 and pairs.txt.

FEATURES, MATCHES, PAIRS = "features.h5", "matches.h5", "pairs.txt"
_INT16 = 32_767
_UNCERTAINTY = 1.0  # pixels, what hloc writes for a detector at the resolution of the photo


def import_h5py() -> Any:
    """The module h5py.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise UsageError(f"this needs h5py: {install_command('sfm')}") from error
    return h5py


def pair_key(name0: str, name1: str) -> str:
    """The group of a pair in matches.h5: slashes of the names become dashes."""
    return f"{_flat(name0)}/{_flat(name1)}"


def _flat(name: str) -> str:
    return name.replace("/", "-")


def write_hloc(store: Store, out: Path, *, overwrite: bool = False) -> ExportReport:
    """A folder with hloc's three files; every match is written, verified or not, as hloc verifies itself.

    Args:
        store: the run.
        out: the folder; it must not exist, or be empty.
        overwrite: see `output.whole_folder`.

    Raises:
        UsageError: h5py is absent, nothing to write, names with spaces (pairs.txt is split at them) or names
            that fall together once their slashes are dashes.
        OSError: the disk is full.
    """
    h5py = import_h5py()
    report, images = begin_export(store, out, utf8="HDF5")
    names = [image.name for image in images]
    refuse_names(names, lambda name: len(name.split()) != 1, "hold spaces, at which hloc splits pairs.txt")
    refuse_collisions(names, _flat, "in matches.h5, where / becomes -")
    counts = {image.name: image.count for image in images}
    with whole_folder(out, overwrite=overwrite) as part:
        with h5py.File(part / FEATURES, "w", libver="latest") as file:
            for image in images:
                _write_features(file.create_group(image.name), store, image, features_of(store, report))
        with (
            h5py.File(part / MATCHES, "w", libver="latest") as file,
            (part / PAIRS).open("w", encoding="utf-8") as lines,
        ):
            for pair in valid_pairs(store, images, report):
                _write_matches(file.create_group(pair_key(pair.name0, pair.name1)), pair, counts[pair.name0])
                lines.write(f"{pair.name0} {pair.name1}\n")
    return report


def features_of(store: Store, report: ExportReport) -> Callable[[str], Features | None]:
    """A reader of an image's features that gives None, and notes it once, where descriptors were deleted."""

    def read(name: str) -> Features | None:
        try:
            return store.features(name)
        except IntegrityError as error:
            note = f"without descriptors: {error}"
            if not any(known.startswith("without descriptors") for known in report.notes):
                report.notes.append(note)
            return None

    return read


def _write_features(
    group: Any, store: Store, image: StoredImage, read: Callable[[str], Features | None]
) -> None:
    points = group.create_dataset("keypoints", data=valid_keypoints(store, image))
    points.attrs["uncertainty"] = _UNCERTAINTY
    group.create_dataset("image_size", data=np.array(image.size))
    features = read(image.name)
    if features is None:
        return
    group.create_dataset("descriptors", data=np.ascontiguousarray(to_numpy(features.descriptors).T))
    group.create_dataset("scores", data=to_numpy(features.scores))
    for name, values in (("scales", features.scales), ("oris", features.orientations)):
        if values is not None:
            group.create_dataset(name, data=to_numpy(values))


def _write_matches(group: Any, pair: StoredPair, count0: int) -> None:
    """hloc's int16 would wrap beyond 32,767 keypoints; its reader takes int32 as well."""
    indices = np.asarray(pair.matches.indices).reshape(-1, 2)
    largest = int(indices[:, 1].max(initial=0))
    matches0 = np.full(count0, -1, np.int16 if largest <= _INT16 else np.int32)
    scores0 = np.zeros(count0, np.float16)
    matches0[indices[:, 0]] = indices[:, 1]
    scores0[indices[:, 0]] = pair.matches.scores
    group.create_dataset("matches0", data=matches0)
    group.create_dataset("matching_scores0", data=scores0)


# --- hloc_features: Existing features in hloc's HDF5 layout.

_OPTIONAL = {"scores": "scores", "scales": "scales", "oris": "orientations"}
_SMALL, _MOST_PACKED = 1 << 20, 1100  # bytes; how much smaller compression makes data at most
_DEEPEST = 64  # groups in groups; HDF5's own search of them takes a time that grows with the square
_DATASETS = ("keypoints", "descriptors", "image_size", *_OPTIONAL)


@dataclass(frozen=True)
class HlocFeatures:
    """A file of features; the images themselves are not read."""

    folder: Path  # where the images are, for exports that name them
    file: Path
    selection: Selection = field(default_factory=Selection)
    uses_front_end = False

    def settings(self) -> dict[str, Any]:
        """That the features come from a file; the file is identified by its content."""
        return {"kind": "hloc"}

    def names(self) -> tuple[list[str], list[str]]:
        """Sorted names of the selected images in the file, and those that no store can hold.

        Raises:
            UsageError: the file is absent, not HDF5, or holds no features, or a selection that fits nothing.
        """
        with self._open() as file:
            try:
                names = [*_entries(file)]
            except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, UsageError):
                    raise
                raise UsageError(f"{self.file} is damaged ({error}); export it again") from None
        if not names:
            raise UsageError(f"{self.file} holds no group with keypoints; it is no features file of hloc's")
        unusable = [name for name in names if name_fault(name) is not None]
        return self.selection.apply(sorted(set(names) - set(unusable))), [*map(ascii, unusable)]

    def masked(self, names: Sequence[str]) -> None:
        """There are no masks."""

    def stamp(self, name: str) -> str:
        """Length and times of the file."""
        try:
            return stamp_of(self.file)
        except OSError:
            return ""

    def digest(self, name: str) -> str:
        """The sha256 of the image's entry; `ImageError` where there is none."""
        return _digest(self._read(name))

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The features of one image.

        They are treated as found at the pipeline's `resize`, which only affects thresholds in pixels.

        Raises:
            ImageError: an entry that is missing, damaged, incomplete, or unsuitable for the matcher.
        """
        arrays = self._read(name)
        digest = _digest(arrays)
        if absent := [key for key in ("keypoints", "descriptors", "image_size") if key not in arrays]:
            raise ImageError(f"{self.file}: {name} has no {absent[0]}")
        optional = {ours: arrays[theirs] for theirs, ours in _OPTIONAL.items() if theirs in arrays}
        try:
            size = _size(arrays["image_size"])
            if (angles := optional.get("orientations")) is not None and _in_degrees(angles):
                optional["orientations"] = np.deg2rad(angles.astype(np.float32))
            optional["scale"] = resized(size, pipeline.config.extractor.resize)[1]
            features = Features(arrays["keypoints"][:, :2], arrays["descriptors"].T, size=size, **optional)
            self._check(features, pipeline)
        except (UsageError, IndexError, ValueError) as error:
            raise ImageError(f"{self.file}: {name}: {error}") from error
        return Extracted(features, digest, self.stamp(name))

    def query(self, name: str, pipeline: Pipeline) -> Features:
        """The features of an image that is to be matched with those of a run; errors as `read`."""
        return self.read(name, pipeline).features

    def _check(self, features: Features, pipeline: Pipeline) -> None:
        config = pipeline.config.matcher
        if not isinstance(config, NetworkConfig):
            return
        found = features.descriptors.shape[-1]
        if found != config.descriptor_dim:
            raise UsageError(
                f"descriptors have {found} numbers, {pipeline.preset} takes {config.descriptor_dim}; give the"
                " preset of the front end that made them"
            )
        inputs = " ".join(config.position.inputs)
        for dataset, values in (("scale", features.scales), ("orientation", features.orientations)):
            if dataset in inputs and values is None:
                raise UsageError(f"{pipeline.preset} needs every keypoint's {dataset} (`scales`, `oris`)")

    def _read(self, name: str) -> dict[str, np.ndarray]:
        with self._open() as file:
            try:
                if name not in file:
                    raise ImageError(f"{self.file} has no features of {name}; names are paths below a folder")
                group = file[name]
                return {key: _array(group, key) for key in _DATASETS if key in _keys(group)}
            except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise ImageError(f"{self.file}: {name} cannot be read ({error})") from None

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            import h5py
        except ModuleNotFoundError:
            raise UsageError(f"features in HDF5 need h5py: {install_command('sfm')}") from None
        if not self.file.is_file():
            raise UsageError(f"{self.file} is not a file; check the path of the features")
        try:
            file = h5py.File(self.file, "r")
        except OSError as error:
            raise UsageError(f"{self.file} is not a readable HDF5 file ({error})") from None
        with file:
            yield file


def find_source(
    folder: Path, masks: str | Path | None, features: str | Path | None, selection: Selection
) -> FeatureSource:
    """The source of a collection's features: a features file, or else the images themselves.

    Raises:
        UsageError: both masks and features.
    """
    if features is None:
        return Photos(folder, None if masks is None else Path(masks), selection)
    if masks is not None:
        raise UsageError(
            "masks and features cannot be combined: masks only affect the extraction of keypoints"
        )
    return HlocFeatures(folder, Path(features), selection)


def _size(values: np.ndarray) -> tuple[int, int]:
    if values.size != 2 or not np.isfinite(values).all() or not 1 <= values.min() <= values.max() <= 2**30:
        raise UsageError(f"its image_size is {np.asarray(values).reshape(-1)[:4].tolist()}")
    width, height = (int(side) for side in values.reshape(-1))
    return width, height


def _in_degrees(angles: np.ndarray) -> bool:
    return bool(np.abs(angles).max(initial=0) > 2 * np.pi + 1e-3)


def _array(group: Any, key: str) -> np.ndarray:
    """A dataset of numbers that lie in the file itself, and are no more than it can hold."""
    import h5py

    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(f"{key} is a link")
    found = group[key]
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise ValueError(f"{key} is not in the file itself")
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{key} holds {found.dtype}, not numbers")
    if found.nbytes > _SMALL + _MOST_PACKED * found.id.get_storage_size():
        raise ValueError(f"{key} would be {found.nbytes} bytes, more than the file can hold")
    return np.asarray(found)


def _entries(file: Any) -> Iterator[str]:
    """Names of the groups with keypoints, each group once, whatever links there are to it.

    Raises:
        UsageError: groups in groups, too deep for names of images.
    """
    import h5py

    seen, waiting = set(), [("", file)]
    while waiting:
        above, group = waiting.pop()
        for key in group:
            if group.get(key, getclass=True, getlink=True) is not h5py.HardLink:
                continue
            name, item = above + key, group[key]
            if not isinstance(item, h5py.Group) or (place := h5py.h5o.get_info(item.id).addr) in seen:
                continue
            seen.add(place)
            if name.count("/") > _DEEPEST:
                raise UsageError(f"{file.filename} has groups in groups, more than {_DEEPEST} deep")
            if "keypoints" in _keys(item):
                yield name
            waiting.append((f"{name}/", item))


def _keys(item: Any) -> set[str]:
    return set(item.keys()) if hasattr(item, "keys") else set()


def _digest(arrays: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


# --- npz: One NumPy archive of a whole run, written in a stream: a collection need not fit in memory.


def write_npz(store: Store, out: Path) -> ExportReport:
    """An `.npz` to be opened with `np.load`; image i has the rows offsets[i] … offsets[i + 1].

    Images: `names` (I,), `sizes` (I, 2) width and height, `keypoints` (ΣN, 2) float32 with
    `keypoint_offsets` (I + 1,), and of a run that was refined their `covariances` (ΣN, 3), xx, xy and yy.
    Pairs: `pairs` (P, 2) into names, `match_offsets` (P + 1,), `matches` (ΣK, 2) int32 into the keypoints of
    either image, `scores` (ΣK,) float32, `inliers` (ΣK,) bool, `kinds` and `statuses` (P,) of the geometries,
    `matrices` (P, 3, 3) F, H or E, NaN where there is none, and `cam1_from_cam0` (P, 4, 4), NaN but for
    essential geometry.

    Raises:
        UsageError: nothing to write, or a place that cannot be written.
        OSError: the disk is full.
    """
    report, images = begin_export(store, out)
    number = {image.name: index for index, image in enumerate(images)}
    with whole_file(out) as part, tempfile.TemporaryDirectory(dir=part.parent, prefix=".npz-") as spool:
        keypoints = _Rows(Path(spool) / "keypoints", np.float32, 2)
        covariances = _Rows(Path(spool) / "covariances", np.float32, 3)
        for image in images:
            keypoints.append(valid_keypoints(store, image))
            if (refined := store.refined_keypoints(image.name)) is not None:
                covariances.append(refined.covariances.reshape(-1, 4)[:, [0, 1, 3]])
        pairs = _Pairs(Path(spool))
        for pair in valid_pairs(store, images, report):
            pairs.append(pair, number)
        small = {
            "names": np.array([image.name for image in images]),
            "sizes": np.array([image.size for image in images], dtype=np.int32),
            "keypoint_offsets": keypoints.offsets(),
            **pairs.small(),
        }
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.comment = MARK
            image_rows = {"keypoints": keypoints}
            if covariances.offsets()[-1] == keypoints.offsets()[-1]:
                image_rows["covariances"] = covariances
            for name, rows in {**image_rows, **pairs.columns}.items():
                rows.write(archive, name)
            for name, array in small.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    return report


class _Pairs:
    """Matches on their way to the archive, and what there is once per pair."""

    def __init__(self, spool: Path) -> None:
        self.columns = {
            "matches": _Rows(spool / "matches", np.int32, 2),
            "scores": _Rows(spool / "scores", np.float32),
            "inliers": _Rows(spool / "inliers", np.bool_),
        }
        self._models = _Rows(spool / "models", np.float64, 9 + 16)
        self._ends: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        self._statuses: list[str] = []

    def append(self, pair: StoredPair, number: dict[str, int]) -> None:
        """Add one pair."""
        geometry = pair.geometry
        self.columns["matches"].append(pair.matches.indices)
        self.columns["scores"].append(pair.matches.scores)
        self.columns["inliers"].append(geometry.inliers)
        models = ((geometry.matrix, 9), (geometry.cam1_from_cam0, 16))
        flat = [np.full(size, np.nan) if model is None else np.ravel(model) for model, size in models]
        self._models.append(np.concatenate(flat)[None])
        self._ends.append((number[pair.name0], number[pair.name1]))
        self._kinds.append(geometry.kind)
        self._statuses.append(geometry.status)

    def small(self) -> dict[str, np.ndarray]:
        """The arrays with a row per pair."""
        models = self._models.read()
        return {
            "match_offsets": self.columns["matches"].offsets(),
            "pairs": np.array(self._ends, dtype=np.int32).reshape(-1, 2),
            "kinds": np.array(self._kinds, dtype=np.str_),
            "statuses": np.array(self._statuses, dtype=np.str_),
            "matrices": models[:, :9].reshape(-1, 3, 3),
            "cam1_from_cam0": models[:, 9:].reshape(-1, 4, 4),
        }


class _Rows:
    """Rows of one type that go to a file, because the header of an array begins with their number."""

    def __init__(self, path: Path, dtype: type[np.generic], width: int | None = None) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._width = width
        self._counts = [0]
        path.touch()

    def append(self, rows: np.ndarray) -> None:
        """Add rows."""
        shape = (-1,) if self._width is None else (-1, self._width)
        array = np.ascontiguousarray(rows, dtype=self._dtype).reshape(shape)
        self._counts.append(len(array))
        with self._path.open("ab") as file:
            file.write(array.tobytes())

    def offsets(self) -> np.ndarray:
        """(A + 1,) int64: where each appended block begins, and the end."""
        return np.cumsum(self._counts, dtype=np.int64)

    def read(self) -> np.ndarray:
        """All rows."""
        rows = np.fromfile(self._path, self._dtype)
        return rows if self._width is None else rows.reshape(-1, self._width)

    def write(self, archive: zipfile.ZipFile, name: str) -> None:
        """Put the rows into an archive as one array."""
        total = int(sum(self._counts))
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (total,) if self._width is None else (total, self._width),
        }
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member, self._path.open("rb") as file:
            np.lib.format.write_array_header_2_0(member, header)
            shutil.copyfileobj(file, member, 1 << 20)
