"""The HDF5 files of hloc (Sarlin et al. 2019): features.h5, matches.h5 and pairs.txt.

Pixels as ours: the centre of the first one is (0, 0); hloc adds the half pixel when it imports into COLMAP.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.collection.exporting.output import ExportReport, whole_folder
from matcher.collection.exporting.validation import (
    begin_export,
    refuse_collisions,
    refuse_names,
    valid_keypoints,
    valid_pairs,
)
from matcher.data.features import Features
from matcher.data.tensors import to_numpy
from matcher.errors import IntegrityError, UsageError, install_command

if TYPE_CHECKING:
    from matcher.collection.records import StoredImage, StoredPair
    from matcher.collection.store import Store

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
