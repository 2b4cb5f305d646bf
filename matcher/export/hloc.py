"""The HDF5 files of hloc (Sarlin et al. 2019): features.h5, matches.h5 and pairs.txt, out and in.

Pixels as ours: the centre of the first one is (0, 0); hloc adds the half pixel when it imports into COLMAP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.arrays import to_numpy
from matcher.collection.sources import Extracted, Photos, Selection, stamp_of
from matcher.config import NetworkConfig
from matcher.errors import ImageError, MatcherError, UsageError, install_command
from matcher.export.output import ExportedRun, ExportReport, whole_folder
from matcher.geometry import resized
from matcher.pipeline import Pipeline
from matcher.types import Features

if TYPE_CHECKING:
    from matcher.collection.sources import FeatureSource
    from matcher.collection.store import Store

_OPTIONAL = {"scores": "scores", "scales": "scales", "oris": "orientations"}  # hloc's name → ours


def import_h5py() -> Any:
    """The module h5py; `UsageError`: it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise UsageError(f"this needs h5py: {install_command('h5py')}") from error
    return h5py


def write_hloc(store: Store, out: Path, *, overwrite: bool = False) -> ExportReport:
    """A folder with hloc's three files; every match is written, verified or not, as hloc verifies itself.

    `UsageError`: h5py is absent, nothing to write, names with spaces (pairs.txt is split at them) or names
    that fall together once their slashes are dashes.
    """
    h5py, run = import_h5py(), ExportedRun(store, out, utf8="HDF5")
    counts = {image.name: image.count for image in run.images}
    run.refuse_names(lambda name: len(name.split()) != 1, "hold spaces, at which hloc splits pairs.txt")
    run.refuse_collisions(lambda name: name.replace("/", "-"), "in matches.h5, where / becomes -")
    with whole_folder(out, overwrite=overwrite) as part:
        with h5py.File(part / "features.h5", "w", libver="latest") as file:
            for image in run.images:
                group = file.create_group(image.name)
                points = group.create_dataset("keypoints", data=run.keypoints(image.name))
                points.attrs["uncertainty"] = 1.0  # pixels, as hloc has it at the photo's resolution
                group.create_dataset("image_size", data=np.array(image.size))
                if (features := run.features(image.name)) is None:
                    continue
                descriptors = np.ascontiguousarray(to_numpy(features.descriptors).T)
                group.create_dataset("descriptors", data=descriptors)
                for theirs, ours in _OPTIONAL.items():
                    if (values := getattr(features, ours)) is not None:
                        group.create_dataset(theirs, data=to_numpy(values))
        with (
            h5py.File(part / "matches.h5", "w", libver="latest") as file,
            (part / "pairs.txt").open("w", encoding="utf-8") as lines,
        ):
            for pair in run.pairs():
                key = "/".join(name.replace("/", "-") for name in (pair.name0, pair.name1))
                group, indices = file.create_group(key), pair.matches.indices
                # Beyond 32,767 keypoints hloc's int16 would wrap; its reader takes int32 as well.
                wide = indices[:, 1].max(initial=0) > 32_767
                matches0 = np.full(counts[pair.name0], -1, np.int32 if wide else np.int16)
                scores0 = np.zeros(counts[pair.name0], np.float16)
                matches0[indices[:, 0]], scores0[indices[:, 0]] = indices[:, 1], pair.matches.scores
                group.create_dataset("matches0", data=matches0)
                group.create_dataset("matching_scores0", data=scores0)
                lines.write(f"{pair.name0} {pair.name1}\n")
    return run.report


# Existing features in this layout, which may be anybody's: HDF5 can link to other files, and says sizes that
# no memory holds.


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
        """Sorted names of the selected images in the file, and those that no store can hold; `UsageError`:
        it is absent, not HDF5, or holds no features, or a selection that fits nothing."""
        with self._open() as file:
            names = set(_entries(file))
        if not names:
            raise UsageError(f"{self.file} holds no group with keypoints; it is no features file of hloc's")
        return self.selection.of_usable(names)

    def masked(self, names: Sequence[str]) -> None:
        """There are no masks."""

    def stamp(self, name: str) -> str:
        """Length and times of the file; empty where there is none."""
        return stamp_of(self.file)

    def digest(self, name: str) -> str:
        """The sha256 of the image's entry; `ImageError` where there is none."""
        return _digest(self._read(name))

    def read(self, name: str, pipeline: Pipeline) -> Extracted:
        """The features of one image, treated as found at the pipeline's `resize`, as thresholds need it.
        `ImageError`: an entry that is missing, damaged, incomplete, or unsuitable for the matcher."""
        arrays = self._read(name)
        digest, optional = _digest(arrays), {}
        try:
            if absent := [key for key in ("keypoints", "descriptors", "image_size") if key not in arrays]:
                raise UsageError(f"it has no {absent[0]}")
            sides = arrays["image_size"].reshape(-1)
            if len(sides) != 2 or not np.all((sides >= 1) & (sides <= 2**30)):
                raise UsageError(f"its image_size is {sides[:4].tolist()}")
            size = (int(sides[0]), int(sides[1]))
            optional = {ours: arrays[theirs] for theirs, ours in _OPTIONAL.items() if theirs in arrays}
            angles = optional.get("orientations")
            if angles is not None and np.abs(angles).max(initial=0) > 2 * np.pi + 1e-3:  # degrees
                optional["orientations"] = np.deg2rad(angles.astype(np.float32))
            scale = resized(size, pipeline.config.extractor.resize)[1]
            points, descriptors = arrays["keypoints"][:, :2], arrays["descriptors"].T
            features = Features(points, descriptors, size=size, scale=scale, **optional)
            config = pipeline.config.matcher
            if isinstance(config, NetworkConfig):
                if (dim := features.descriptors.shape[-1]) != config.descriptor_dim:
                    raise UsageError(
                        f"descriptors have {dim} numbers, {pipeline.preset} takes {config.descriptor_dim}; "
                        "give the preset of the front end that made them"
                    )
                inputs = " ".join(config.position.inputs)
                for dataset, found in (("scale", features.scales), ("orientation", features.orientations)):
                    if dataset in inputs and found is None:
                        raise UsageError(
                            f"{pipeline.preset} needs every keypoint's {dataset} (`scales`, `oris`)"
                        )
        except (UsageError, IndexError, ValueError) as error:
            raise ImageError(f"{self.file}: {name}: {error}") from error
        return Extracted(name, features, digest, self.stamp(name))

    def _read(self, name: str) -> dict[str, np.ndarray]:
        with self._open(ImageError, f"{name} ") as file:
            if name not in file:
                raise ImageError(f"{self.file} has no features of {name}; names are paths below a folder")
            group, wanted = file[name], {"keypoints", "descriptors", "image_size", *_OPTIONAL}
            return {key: _array(group, key) for key in wanted.intersection(getattr(group, "keys", tuple)())}

    @contextmanager
    def _open(self, kind: type[MatcherError] = UsageError, what: str = "") -> Iterator[Any]:
        """The file, opened; errors of HDF5 in the block are of that kind, as it may be damaged anywhere."""
        h5py = import_h5py()
        if not self.file.is_file():
            raise UsageError(f"{self.file} is not a file; check the path of the features")
        try:
            with h5py.File(self.file, "r") as file:
                yield file
        except MatcherError:
            raise
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise kind(f"{self.file}: {what}cannot be read as HDF5 ({error}); export it again") from None


def find_source(
    folder: Path, masks: str | Path | None, features: str | Path | None, selection: Selection
) -> FeatureSource:
    """The source of a collection's features: a features file, or else the images themselves, maybe with
    masks; `UsageError`: both."""
    if features is None:
        return Photos(folder, None if masks is None else Path(masks), selection)
    if masks is not None:
        raise UsageError(
            "masks and features cannot be combined: masks only affect the extraction of keypoints"
        )
    return HlocFeatures(folder, Path(features), selection)


def _array(group: Any, key: str) -> np.ndarray:
    """A dataset of numbers that lie in the file itself, and are no more than it can hold."""
    h5py = import_h5py()
    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(f"{key} is a link")
    found = group[key]
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise ValueError(f"{key} is not in the file itself")
    if found.dtype.kind not in "fiu":
        raise ValueError(f"{key} holds {found.dtype}, not numbers")
    if found.nbytes > (1 << 20) + 1100 * found.id.get_storage_size():  # compression makes it no smaller
        raise ValueError(f"{key} would be {found.nbytes} bytes, more than the file can hold")
    return np.asarray(found)


def _entries(file: Any) -> Iterator[str]:
    """Names of the groups with keypoints, each group once, whatever links there are to it; `UsageError` for
    groups in groups, too deep for names of images."""
    h5py = import_h5py()
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
            if name.count("/") > 64:  # HDF5's own search takes a time that grows with the square
                raise UsageError(f"{file.filename} has groups in groups, more than 64 deep")
            if "keypoints" in set(item):  # a link is not followed to see it
                yield name
            waiting.append((f"{name}/", item))


def _digest(arrays: dict[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
