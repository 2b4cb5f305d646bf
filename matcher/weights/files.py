"""Trained weights: the manifest of shipped files, their check, and strict loading and saving.

A weights file is safetensors whose header carries the network's configuration as JSON under "config", so that
it rebuilds its network by itself. Shipped files are checked against the manifest before they are read.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as pack_tensors
from torch import nn

from matcher.config import ALL_LAYERS, NetworkConfig, architecture, from_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import write_whole
from matcher.match.network.model import MatchingNetwork
from matcher.weights.renames import current_config
from matcher.weights.tensors import read_header, read_tensors

_PACKAGE = Path(__file__).parents[1]
# In a wheel the weights lie inside the package, in a checkout beside it.
FOLDERS = (_PACKAGE / "weights" / "shipped", _PACKAGE.parent / "weights")
RESTORE = "restore it with `git checkout -- weights` in a checkout, or install the package again"
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
    _check_hash(path, _read(path, remedy), row, remedy)
    return path


def load_model(
    weights: str | Path, folder: Path | None = None, *, remedy: str = RESTORE
) -> tuple[MatchingNetwork, str, str]:
    """Rebuild a trained network.

    Args:
        weights: a name in the manifest, or the path of a safetensors file written by `save_model`.
        folder: of the manifest; the shipped one when absent.
        remedy: what an error about a file of the manifest advises.

    Returns:
        The model in float32 on the CPU, which runs all layers on all points until a policy is given
        (`MatchingNetwork.with_policy`), the sha256 of its file, and its name (for a path, the file's stem).

    Raises:
        IntegrityError: no such name or file, or the file is damaged, not a weights file, or its tensors do
            not fit its configuration.
    """
    row = None if _is_path(weights) else _find_row(str(weights), folder, remedy)
    if row is None:
        path, remedy = Path(weights), _FETCH_AGAIN
        data = _read(path, "check the path")
        digest = hashlib.sha256(data).hexdigest()
    else:
        path = (folder or weights_folder()) / row.file
        data = _read(path, remedy)
        digest = _check_hash(path, data, row, remedy)
    try:
        model = _build(data)
    except (IntegrityError, UsageError) as error:
        raise IntegrityError(f"{path} {error}: {remedy}") from error
    return model, digest, path.stem if row is None else row.name


def save_model(
    model: MatchingNetwork,
    path: str | Path,
    metadata: dict[str, str] | None = None,
    *,
    dtype: torch.dtype = torch.float16,
) -> str:
    """Write a network's parameters with its configuration in the header, whole or not at all.

    Args:
        model: to be written.
        path: of the new file; an existing one is replaced.
        metadata: further header entries, such as the recipe; the key "config" is taken.
        dtype: of the numbers in the file; integers stay what they are.

    Returns:
        The sha256 of the file.

    Raises:
        IntegrityError: a parameter is not finite in `dtype`; nothing is written.
    """
    header = {**(metadata or {}), "config": json.dumps(architecture(model.config))}
    return _write(model, path, header, dtype)


def save_front_end(
    network: nn.Module,
    kind: str,
    path: str | Path,
    metadata: dict[str, str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Write a front end's parameters with `kind` in the header, whole or not at all.

    Args:
        network: of the front end.
        kind: its name, such as "superpoint".
        path: of the new file; an existing one is replaced.
        metadata: further header entries; the key "frontend" is taken.
        dtype: of the numbers in the file; integers stay what they are.

    Returns:
        The sha256 of the file.

    Raises:
        IntegrityError: a parameter is not finite in `dtype`; nothing is written.
    """
    return _write(network, path, {**(metadata or {}), "frontend": kind}, dtype)


def fill_front_end(network: nn.Module, kind: str, path: str | Path | None) -> None:
    """Put a front end's trained parameters into its network, all of them or none.

    Args:
        network: on the CPU, in float32.
        kind: the front end's name, which the file must carry.
        path: a file written by `save_front_end`; None is absent.

    Raises:
        IntegrityError: the file is absent, damaged, of another front end, or its tensors do not fit.
    """
    remedy = f"get it by `matcher weights fetch {kind}`, or convert a file by `matcher weights import`"
    if path is None:
        raise IntegrityError(
            f"the front end {kind} needs trained parameters, given as frontend_weights: {remedy}"
        )
    path = Path(path)
    data = _read(path, remedy)
    try:
        found = read_header(data).get("frontend")
        if found != kind:
            whose = f"of the front end {found}" if found else "of no front end"
            raise IntegrityError(f"holds parameters {whose}, not of {kind}")
        network.load_state_dict(read_tensors(data, network.state_dict(), f"the front end {kind}"))
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: {remedy}") from error


def _write(network: nn.Module, path: str | Path, header: dict[str, str], dtype: torch.dtype) -> str:
    tensors = {
        name: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype).contiguous()
        for name, t in network.state_dict().items()
    }
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if broken:
        kind = str(dtype).removeprefix("torch.")
        raise IntegrityError(f"{path} is not written: not finite in {kind}: {', '.join(broken)}")
    data = pack_tensors(tensors, metadata=header)
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


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


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is absent: {remedy}") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {remedy}") from error


def _check_hash(path: Path, data: bytes, row: WeightsRow, remedy: str) -> str:
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != row.bytes:
        raise IntegrityError(f"{path} is damaged: {len(data)} bytes instead of {row.bytes}; {remedy}")
    if digest != row.sha256:
        raise IntegrityError(f"{path} is damaged: sha256 {digest} instead of {row.sha256}; {remedy}")
    return digest


def _build(data: bytes) -> MatchingNetwork:
    """The network of a file's bytes; errors read on after the file's name."""
    config = _read_config(data)
    # Building draws random numbers; the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]):
        try:
            model = MatchingNetwork(config)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise IntegrityError(f"has a configuration that no network can have ({error})") from error
    model.load_state_dict(read_tensors(data, model.state_dict(), "its configuration"))
    return model.eval()


def _read_config(data: bytes) -> NetworkConfig:
    text = read_header(data).get("config")
    if not isinstance(text, str):
        raise IntegrityError("carries no configuration in its header, so it is not one of our weights files")
    try:
        return replace(from_dict(NetworkConfig, current_config(json.loads(text))), policy=ALL_LAYERS)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"carries a configuration that cannot be used ({error})") from error
