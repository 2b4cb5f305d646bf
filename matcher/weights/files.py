"""Trained networks: strict loading and saving.

A weights file is safetensors whose header carries the network's configuration as JSON under "config", so that
it rebuilds its network by itself. Shipped files are checked against the manifest before they are read.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as parse
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

from matcher.config import ALL_LAYERS, NetworkConfig, architecture, from_dict
from matcher.errors import IntegrityError, UsageError
from matcher.files import read_given, write_whole
from matcher.match.network import MatchingNetwork

# --- renames: Names that weights files had in earlier versions, and what they are called now.

T = TypeVar("T")

# Regular expressions on the beginning of a tensor's name.
TENSORS = (
    (r"((?:fine\.)?layers\.\d+)\.within\.(qkv|out)\.", r"\1.self_block.attention.\2."),
    (r"((?:fine\.)?layers\.\d+)\.across\.(qkv|out)\.", r"\1.cross_block.attention.\2."),
    (r"((?:fine\.)?layers\.\d+)\.within\.attention\.", r"\1.self_block.attention.score."),
    (r"((?:fine\.)?layers\.\d+)\.across\.attention\.", r"\1.cross_block.attention.score."),
    (r"((?:fine\.)?layers\.\d+)\.within\.", r"\1.self_block."),
    (r"((?:fine\.)?layers\.\d+)\.across\.", r"\1.cross_block."),
    (r"guidance\.waves\.", "guidance.frequencies."),
    (r"guidance\.place\.", "guidance.encode_position."),
    (r"guidance\.partner\.", "guidance.predict."),
    (r"guidance\.echo\.", "guidance.encode."),
    (r"guidance\.trust\.", "guidance.confidence."),
    (r"consensus\.widen\.", "consensus.hidden."),
    (r"consensus\.judge\.", "consensus.out."),
    (r"prospect\.", "match_probability."),
)
# Keys of a network's configuration, in whichever of its tables they lie.
KEYS = {
    "in_turn": "sequential_cross",
    "prospects": "match_probability",
    "least_pruned": "min_pruned_share",
    "doubt": "threshold_doubles_at",
}

# Of the policy, where the old form had them at the top.
BESIDE_THE_POLICY = ("match_threshold", "threshold_doubles_at")


def current_name(name: str) -> str:
    """The present name of a tensor.

    >>> current_name("layers.3.within.qkv.weight")
    'layers.3.self_block.attention.qkv.weight'
    >>> current_name("layers.3.self_block.attention.qkv.weight")
    'layers.3.self_block.attention.qkv.weight'
    """
    for pattern, replacement in TENSORS:
        changed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return changed
    return name


def current_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under their present names.

    Raises:
        ValueError: a tensor is there under its old and its present name.
    """
    renamed = {current_name(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = sorted(
            name for name in tensors if current_name(name) != name and current_name(name) in tensors
        )
        raise ValueError(f"under an old and a new name: {', '.join(twice)}")
    return renamed


def current_config(values: Any) -> Any:
    """A network's configuration as plain tables in its present form; the old one had thresholds beside it.

    >>> current_config({"doubt": 20.0, "adaptivity": {"prospects": True, "exit_share": 0.9}})
    {'match_probability': True, 'policy': {'exit_share': 0.9, 'threshold_doubles_at': 20.0}}
    """
    if not isinstance(values, dict):
        return values
    values = _renamed(values)
    policy = values.pop("adaptivity", {})
    if "match_probability" in policy:
        values["match_probability"] = policy.pop("match_probability")
    policy |= {key: values.pop(key) for key in BESIDE_THE_POLICY if key in values}
    return values | {"policy": policy | values.get("policy", {})} if policy else values


def _renamed(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {KEYS.get(key, key): _renamed(value) for key, value in values.items()}


# --- header: The header of a weights file in memory: whose parameters it holds; no torch.


def read_header(data: bytes) -> dict[str, str]:
    """The metadata in the header, which is 8 bytes of length (little endian), then JSON.

    Raises:
        IntegrityError: the bytes are not those of a safetensors file.
    """
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
    return metadata if isinstance(metadata, dict) else {}


def network_config(data: bytes) -> NetworkConfig:
    """The network that the file holds, which runs all layers on all points until a policy is given.

    Raises:
        IntegrityError: there is no configuration, or none that can be used.
    """
    text = read_header(data).get("config")
    if not isinstance(text, str):
        raise IntegrityError("carries no configuration in its header, so it is not one of our weights files")
    try:
        return replace(from_dict(NetworkConfig, current_config(json.loads(text))), policy=ALL_LAYERS)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise IntegrityError(f"carries a configuration that cannot be used ({error})") from error


def front_end_of(data: bytes, kind: str) -> None:
    """Refuse a file that is not of the front end `kind`.

    Raises:
        IntegrityError: it is of another one, or of none.
    """
    found = read_header(data).get("frontend")
    if found != kind:
        whose = f"of the front end {found}" if found else "of no front end"
        raise IntegrityError(f"holds parameters {whose}, not of {kind}")


# --- manifest: The manifest of shipped weights, and their files as bytes, checked; no torch.

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


# --- tensors: The tensors of safetensors files in memory, checked against those that a network has.


def all_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their present names, numbers with a fraction as float32.

    Raises:
        IntegrityError: the bytes are damaged.
    """
    try:
        tensors = current_names(parse_tensors(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def read_tensors(data: bytes, expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that holds exactly the expected ones; as `all_tensors`, `checked`."""
    return checked(all_tensors(data), expected, owner)


def checked(tensors: dict[str, Tensor], expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """These tensors, if they are exactly the expected ones.

    Args:
        tensors: by name.
        expected: names and shapes.
        owner: whose tensors they are, for the message.

    Raises:
        IntegrityError: tensors are missing, extra, misshaped or not finite.
    """
    if problems := list_differences(expected, tensors):
        raise IntegrityError(f"does not hold the tensors that {owner} asks for ({'; '.join(problems)})")
    return tensors


def list_differences(expected: dict[str, Tensor], found: dict[str, Tensor], limit: int = 8) -> list[str]:
    """Missing, extra, misshaped and not finite tensors in words, `limit` of each; empty when all is well."""
    common = [name for name in expected if name in found]
    fitting = [name for name in common if found[name].shape == expected[name].shape]
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
        for name in common
        if found[name].shape != expected[name].shape
    ]
    cases = {
        "missing": [name for name in expected if name not in found],
        "extra": sorted(name for name in found if name not in expected),
        "misshaped": shapes,
        "not finite": [name for name in fitting if not bool(found[name].isfinite().all())],
    }
    return [
        f"{case}: {', '.join(names[:limit])}{f' and {len(names) - limit} more' if len(names) > limit else ''}"
        for case, names in cases.items()
        if names
    ]


# --- files: Trained networks: strict loading and saving.


@runtime_checkable
class _OfSeveralSizes(Protocol):
    """A network that takes the sizes of given parameters."""

    def fit(self, shapes: Mapping[str, Sequence[int]]) -> None: ...


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
    file = weights_bytes(weights, folder, remedy=remedy)
    try:
        model = _build(file.data)
    except (IntegrityError, UsageError) as error:
        raise IntegrityError(f"{file.path} {error}: {file.remedy}") from error
    return model, file.sha256, file.name


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
    remedy = "give a file that `matcher train` wrote, or leave it out for the shipped one"
    if kind != "learned":
        remedy = f"get it by `matcher weights fetch {kind}`, or convert a file by `matcher weights import`"
    if path is None:
        raise IntegrityError(
            f"the front end {kind} needs trained parameters, given as frontend_weights: {remedy}"
        )
    path = Path(path)
    data = read_bytes(path, remedy)
    try:
        front_end_of(data, kind)
        tensors = all_tensors(data)
        if isinstance(network, _OfSeveralSizes):
            network.fit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        network.load_state_dict(checked(tensors, network.state_dict(), f"the front end {kind}"))
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


def _build(data: bytes) -> MatchingNetwork:
    """The network of a file's bytes; errors read on after the file's name."""
    config = network_config(data)
    # Building draws random numbers; the caller's generator must not notice.
    with torch.random.fork_rng(devices=[]):
        try:
            model = MatchingNetwork(config)
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise IntegrityError(f"has a configuration that no network can have ({error})") from error
    model.load_state_dict(read_tensors(data, model.state_dict(), "its configuration"))
    return model.eval()


# --- arrays: The parameters of weights files as NumPy arrays, for engines without torch.


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file by their present names, numbers with a fraction as float32.

    Raises:
        IntegrityError: the bytes are damaged, or numbers are not finite.
    """
    try:
        arrays = current_names(parse(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    arrays = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    if broken := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise IntegrityError(f"holds numbers that are not finite: {', '.join(broken[:8])}")
    return arrays
