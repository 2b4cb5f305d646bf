"""The manifest of shipped weights, and their files as bytes, checked; no torch."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matcher.config_tables import from_dict
from matcher.errors import IntegrityError
from matcher.files import read_given

_PACKAGE = Path(__file__).parents[1]
# In a wheel the weights lie inside the package, in a checkout beside it.
FOLDERS = (_PACKAGE / "weights" / "shipped", _PACKAGE.parent / "weights")
_FETCH_AGAIN = "fetch or export the file again"
LARGEST_WEIGHTS = 1 << 32  # bytes; a hundred times what most networks take
RESTORE = "restore it with `git checkout -- weights` in a checkout, or install the package again"


@dataclass(frozen=True)
class WeightsRow:
    """One shipped file, as the manifest describes it."""

    name: str  # what `load(weights=…)` and the presets call it
    file: str  # beside the manifest
    sha256: str
    bytes: int
    preset: str
    licence: str
    source: str  # who trained it, with what
    trained_on: str
    metrics: str  # measured figures, with the command that measured them


def weights_folder() -> Path:
    """The folder that holds `manifest.toml`.

    Raises:
        IntegrityError: there is none.
    """
    for folder in FOLDERS:
        if (folder / "manifest.toml").is_file():
            return folder
    raise IntegrityError(f"{FOLDERS[-1] / 'manifest.toml'} is absent: {RESTORE}")


def read_manifest(folder: Path | None = None, *, remedy: str = RESTORE) -> dict[str, WeightsRow]:
    """The shipped weights by name.

    Args:
        folder: where `manifest.toml` lies; the shipped one when absent.
        remedy: what an error advises.

    Raises:
        IntegrityError: the manifest is absent or not what it should be.
    """
    path = (folder or weights_folder()) / "manifest.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("weights", [])
        rows = [_row(table) for table in tables]
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged ({error}): {remedy}") from error
    return {row.name: row for row in rows}


def _row(table: dict[str, Any]) -> WeightsRow:
    row = from_dict(WeightsRow, table)
    if Path(row.file).name != row.file:
        raise ValueError(f"{row.name}: the file must lie beside the manifest, not at {row.file!r}")
    return row


def verify(row: WeightsRow, folder: Path | None = None, *, remedy: str = RESTORE) -> Path:
    """Check a shipped file against its manifest row and return its path.

    Raises:
        IntegrityError: the file is absent, or its size or sha256 is another.
    """
    path = (folder or weights_folder()) / row.file
    check_hash(path, read_bytes(path, remedy), row, remedy)
    return path


@dataclass(frozen=True)
class WeightsBytes:
    """A weights file in memory, checked against the manifest if it is one of its files."""

    path: Path
    name: str  # in the manifest, or the file's stem
    data: bytes
    sha256: str
    remedy: str  # what an error about it advises


def weights_bytes(weights: str | Path, folder: Path | None = None, *, remedy: str = RESTORE) -> WeightsBytes:
    """The bytes of a weights file.

    Args:
        weights: a name in the manifest, or the path of a safetensors file.
        folder: of the manifest; the shipped one when absent.
        remedy: what an error about a file of the manifest advises.

    Raises:
        IntegrityError: no such name or file, or not the file of the manifest.
    """
    if _is_path(weights):
        path = Path(weights)
        data = read_bytes(path, "check the path")
        return WeightsBytes(path, path.stem, data, hashlib.sha256(data).hexdigest(), _FETCH_AGAIN)
    row = _find_row(str(weights), folder, remedy)
    path = (folder or weights_folder()) / row.file
    data = read_bytes(path, remedy)
    return WeightsBytes(path, row.name, data, check_hash(path, data, row, remedy), remedy)


def _is_path(weights: str | Path) -> bool:
    return isinstance(weights, Path) or weights != Path(weights).name or Path(weights).suffix != ""


def _find_row(name: str, folder: Path | None, remedy: str) -> WeightsRow:
    rows = read_manifest(folder, remedy=remedy)
    if name not in rows:
        known = ", ".join(rows) or "none"
        raise IntegrityError(
            f"no weights are named {name!r}; shipped: {known}. A file is given as NAME.safetensors"
        )
    return rows[name]


def read_bytes(path: Path, remedy: str) -> bytes:
    """A file's bytes; `IntegrityError` with the remedy if it is absent or cannot be read."""
    try:
        return read_given(path, LARGEST_WEIGHTS)
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is absent: {remedy}") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {remedy}") from error


def check_hash(path: Path, data: bytes, row: WeightsRow, remedy: str) -> str:
    """The sha256 of a file's bytes; `IntegrityError` if they are not those of its row."""
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != row.bytes:
        raise IntegrityError(f"{path} is damaged: {len(data)} bytes instead of {row.bytes}; {remedy}")
    if digest != row.sha256:
        raise IntegrityError(f"{path} is damaged: sha256 {digest} instead of {row.sha256}; {remedy}")
    return digest
