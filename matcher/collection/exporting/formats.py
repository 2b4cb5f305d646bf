"""The export formats by name; a writer is imported when it is used, so that help needs none of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from matcher.collection.exporting.output import ExportReport, check_folder
from matcher.errors import UsageError, unknown_name
from matcher.files import check_output

if TYPE_CHECKING:
    from matcher.collection.exporting.cameras import CameraChoice
    from matcher.collection.store import Store


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
    "colmap": Format("matcher.collection.exporting.colmap:write_colmap", (".db",), has_cameras=True),
    "hloc": Format("matcher.collection.exporting.hloc:write_hloc"),
    "npz": Format("matcher.collection.exporting.npz:write_npz", (".npz",)),
    "openmvg": Format("matcher.collection.exporting.openmvg:write_openmvg", has_cameras=True),
    "kapture": Format("matcher.collection.exporting.kapture:write_kapture", has_cameras=True),
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
