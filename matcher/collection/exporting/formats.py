"""The export formats by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from matcher.collection.exporting.cameras import CameraChoice
from matcher.collection.exporting.colmap import write_colmap
from matcher.collection.exporting.hloc import write_hloc
from matcher.collection.exporting.kapture import write_kapture
from matcher.collection.exporting.npz import write_npz
from matcher.collection.exporting.openmvg import write_openmvg
from matcher.collection.exporting.output import ExportReport, check_folder
from matcher.errors import UsageError
from matcher.files import check_output

if TYPE_CHECKING:
    from matcher.collection.store import Store


@dataclass(frozen=True)
class Format:
    """How a run is exported to another program."""

    write: Callable[..., ExportReport]
    suffixes: tuple[str, ...] = ()  # of a file; a format without is a folder
    has_cameras: bool = False


FORMATS = {
    "colmap": Format(write_colmap, (".db",), has_cameras=True),
    "hloc": Format(write_hloc),
    "npz": Format(write_npz, (".npz",)),
    "openmvg": Format(write_openmvg, has_cameras=True),
    "kapture": Format(write_kapture, has_cameras=True),
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
        raise UsageError(f"unknown format {form!r}; there are {', '.join(FORMATS)}")
    if choice is not None and not kind.has_cameras:
        raise UsageError(f"{form} stores no cameras, so none can be given")
    if kind.suffixes:
        check_output(out, kind.suffixes, overwrite=overwrite)
        return kind.write(store, out, choice) if kind.has_cameras else kind.write(store, out)
    check_folder(out, overwrite=overwrite)
    cameras = [choice] if kind.has_cameras else []
    return kind.write(store, out, *cameras, overwrite=overwrite)
