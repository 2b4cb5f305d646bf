"""Trained weights: the manifest of shipped files, their check, and strict loading and saving.

A weights file is safetensors whose header carries the network's configuration as JSON under "config", so that
it rebuilds its network by itself. Shipped files are checked against the manifest before they are read.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor

from matcher.config import NetworkConfig, from_dict, to_dict
from matcher.files import write_whole
from matcher.network.model import Model
from matcher.types import IntegrityError, UsageError

_PACKAGE = Path(__file__).parent
# In a wheel the weights lie inside the package, in a checkout beside it.
FOLDERS = (_PACKAGE / "data" / "weights", _PACKAGE.parent / "weights")
_RESTORE = "restore it with `git checkout -- weights` in a checkout, or install the package again"
_FETCH_AGAIN = "fetch or export the file again"


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
    raise IntegrityError(f"{FOLDERS[-1] / 'manifest.toml'} is absent: {_RESTORE}")


def read_manifest(folder: Path | None = None) -> dict[str, WeightsRow]:
    """The shipped weights by name.

    Args:
        folder: where `manifest.toml` lies; the shipped one when absent.

    Raises:
        IntegrityError: the manifest is absent or not what it should be.
    """
    path = (folder or weights_folder()) / "manifest.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("weights", [])
        rows = [_row(table) for table in tables]
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {_RESTORE}") from error
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged ({error}): {_RESTORE}") from error
    return {row.name: row for row in rows}


def _row(table: dict[str, Any]) -> WeightsRow:
    row = from_dict(WeightsRow, table)
    if Path(row.file).name != row.file:
        raise ValueError(f"{row.name}: the file must lie beside the manifest, not at {row.file!r}")
    return row


def verify(row: WeightsRow, folder: Path | None = None) -> Path:
    """Check a shipped file against its manifest row and return its path.

    Raises:
        IntegrityError: the file is absent, or its size or sha256 is another.
    """
    path = (folder or weights_folder()) / row.file
    _check_hash(path, _read(path, _RESTORE), row)
    return path


def load_model(weights: str | Path, folder: Path | None = None) -> tuple[Model, str, str]:
    """Rebuild a trained network.

    Args:
        weights: a name in the manifest, or the path of a safetensors file written by `save_model`.
        folder: of the manifest; the shipped one when absent.

    Returns:
        The model in float32 on the CPU, the sha256 of its file, and its name (for a path, the file's stem).

    Raises:
        IntegrityError: no such name or file, or the file is damaged, not a weights file, or its tensors do
            not fit its configuration.
    """
    row = None if _is_path(weights) else _find_row(str(weights), folder)
    if row is None:
        path, remedy = Path(weights), _FETCH_AGAIN
        data = _read(path, "check the path")
        digest = hashlib.sha256(data).hexdigest()
    else:
        path, remedy = (folder or weights_folder()) / row.file, _RESTORE
        data = _read(path, remedy)
        digest = _check_hash(path, data, row)
    try:
        model = _build(data)
    except (IntegrityError, UsageError) as error:
        raise IntegrityError(f"{path} {error}: {remedy}") from error
    return model, digest, path.stem if row is None else row.name


def save_model(model: Model, path: str | Path, metadata: dict[str, str] | None = None) -> str:
    """Write a network's parameters as float16 with its configuration in the header, whole or not at all.

    Args:
        model: to be written.
        path: of the new file; an existing one is replaced.
        metadata: further header entries, such as the recipe; the key "config" is taken.

    Returns:
        The sha256 of the file.

    Raises:
        IntegrityError: a parameter is not finite in float16; nothing is written.
    """
    tensors = {
        name: t.detach().to("cpu", torch.float16).contiguous() for name, t in model.state_dict().items()
    }
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise IntegrityError(f"{path} is not written: not finite in float16: {', '.join(broken)}")
    header = {**(metadata or {}), "config": json.dumps(to_dict(model.config))}
    data = pack_tensors(tensors, metadata=header)
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


def _is_path(weights: str | Path) -> bool:
    return isinstance(weights, Path) or weights != Path(weights).name or Path(weights).suffix != ""


def _find_row(name: str, folder: Path | None) -> WeightsRow:
    rows = read_manifest(folder)
    if name not in rows:
        known = ", ".join(rows) or "none"
        raise IntegrityError(
            f"no weights are named {name!r}; shipped: {known}. A file is given as NAME.safetensors"
        )
    return rows[name]


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is absent: {remedy}") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {remedy}") from error


def _check_hash(path: Path, data: bytes, row: WeightsRow) -> str:
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != row.bytes:
        raise IntegrityError(f"{path} is damaged: {len(data)} bytes instead of {row.bytes}; {_RESTORE}")
    if digest != row.sha256:
        raise IntegrityError(f"{path} is damaged: sha256 {digest} instead of {row.sha256}; {_RESTORE}")
    return digest


def _build(data: bytes) -> Model:
    """The network of a file's bytes; errors read on after the file's name."""
    config = _read_config(data)
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    # Building draws random numbers; the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]):
        try:
            model = Model(config)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise IntegrityError(f"has a configuration that no network can have ({error})") from error
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    problems = _compare(model.state_dict(), tensors)
    if problems:
        raise IntegrityError(
            f"does not hold the tensors that its configuration asks for ({'; '.join(problems)})"
        )
    model.load_state_dict(tensors)
    return model.eval()


def _read_config(data: bytes) -> NetworkConfig:
    """The configuration in the header: 8 bytes of length (little endian), then JSON."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]) if 2 <= length <= len(data) - 8 else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        pickle = data[:2] == b"PK" or data[:1] == b"\x80"
        what = (
            "is a PyTorch pickle, not a safetensors file"
            if pickle
            else "is not a safetensors file, or is cut short"
        )
        raise IntegrityError(what)
    metadata = header.get("__metadata__")
    text = metadata.get("config") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise IntegrityError("carries no configuration in its header, so it is not one of our weights files")
    try:
        return from_dict(NetworkConfig, json.loads(text))
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"carries a configuration that cannot be used ({error})") from error


def _compare(expected: dict[str, Tensor], found: dict[str, Tensor], limit: int = 8) -> list[str]:
    """What is wrong, in words; empty when nothing is."""
    common = [name for name in expected if name in found]
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
        for name in common
        if found[name].shape != expected[name].shape
    ]
    cases = {
        "missing": [name for name in expected if name not in found],
        "extra": [name for name in found if name not in expected],
        "misshaped": shapes,
        "not finite": [name for name in common if not bool(found[name].isfinite().all())],
    }
    return [
        f"{case}: {', '.join(names[:limit])}{f' and {len(names) - limit} more' if len(names) > limit else ''}"
        for case, names in cases.items()
        if names
    ]
