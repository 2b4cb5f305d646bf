"""Existing features in hloc's HDF5 layout.

One group per image, with the image's name: `keypoints` (N, 2), the centre of the first pixel being (0, 0);
`descriptors` (D, N); `image_size` (width, height); `scores` (N), and `scales` (N) and `oris` (N) where there
are any: degrees if any of them is beyond a full turn in radians, else radians.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.selection import Selection
from matcher.collection.sources import Extracted, FeatureSource, Photos, name_fault, stamp_of
from matcher.config import NetworkConfig
from matcher.data.features import Features
from matcher.data.geometry import resized
from matcher.errors import ImageError, UsageError, install_command
from matcher.pipeline import Pipeline

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
    uses_front_end: bool = False

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
