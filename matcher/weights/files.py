"""Trained networks as files: the shipped and the published ones, strict loading and saving.

A weights file is safetensors whose header carries the network's configuration as JSON under "config" (a front
end's file its name under "frontend"), so that it rebuilds its network by itself. Shipped files are checked
against the manifest before they are read. torch is imported only where a network of torch is filled or saved.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as parse_arrays

from matcher.config import ALL_LAYERS, ExtractorConfig, NetworkConfig, architecture, from_dict
from matcher.errors import IntegrityError, UsageError, unknown_name
from matcher.files import cache_folder, open_given, read_given, write_whole

if TYPE_CHECKING:
    from torch import Tensor, nn

    from matcher.match.network import MatchingNetwork

_PACKAGE = Path(__file__).parents[1]
# In a wheel the weights lie inside the package, in a checkout beside it.
FOLDERS = (_PACKAGE / "weights" / "shipped", _PACKAGE.parent / "weights")
LARGEST_WEIGHTS = 1 << 32  # bytes; a hundred times what most networks take
RESTORE = "restore it with `git checkout -- weights` in a checkout, or install the package again"
_LISTED = 8  # tensors of each fault that a message names


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


@dataclass(frozen=True)
class WeightsBytes:
    """A weights file in memory, checked against the manifest if it is one of its files."""

    path: Path
    name: str  # in the manifest, or the file's stem
    data: bytes
    sha256: str
    remedy: str  # what an error about it advises


def weights_folder() -> Path:
    """The folder that holds `manifest.toml`."""
    for folder in FOLDERS:
        if (folder / "manifest.toml").is_file():
            return folder
    raise IntegrityError(f"{FOLDERS[-1] / 'manifest.toml'} is absent: {RESTORE}")


def read_manifest(folder: Path | None = None, *, remedy: str = RESTORE) -> dict[str, WeightsRow]:
    """The shipped weights by name, or those of another folder, with what an error advises."""
    path = (folder or weights_folder()) / "manifest.toml"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("weights", [])
        rows = [from_dict(WeightsRow, table) for table in tables]
        if outside := [row.file for row in rows if Path(row.file).name != row.file]:
            raise ValueError(f"the file must lie beside the manifest, not at {outside[0]!r}")
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is damaged ({error}): {remedy}") from error
    return {row.name: row for row in rows}


def weights_bytes(weights: str | Path, folder: Path | None = None, *, remedy: str = RESTORE) -> WeightsBytes:
    """The bytes of a weights file: a name in the manifest, shipped or of a folder, or a path."""
    if isinstance(weights, Path) or weights != Path(weights).name or Path(weights).suffix:
        path = Path(weights)
        data = read_bytes(path, "check the path")
        digest = hashlib.sha256(data).hexdigest()
        return WeightsBytes(path, path.stem, data, digest, "fetch or export the file again")
    rows = read_manifest(folder, remedy=remedy)
    if weights not in rows:
        known = ", ".join(rows) or "none"
        raise IntegrityError(
            f"no weights are named {weights!r}; shipped: {known}; a file is NAME.safetensors"
        )
    return verify(rows[weights], folder, remedy=remedy)


def read_bytes(path: Path, remedy: str, *, header_alone: bool = False) -> bytes:
    """A file's bytes, or those of its header and no more; the remedy is for the message."""
    try:
        if header_alone:
            with open_given(path) as file:
                length = file.read(8)
                return length + file.read(min(int.from_bytes(length, "little"), LARGEST_WEIGHTS))
        return read_given(path, LARGEST_WEIGHTS)
    except OSError as error:
        fault = "is absent" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise IntegrityError(f"{path} {fault}: {remedy}") from error


def verify(row: WeightsRow, folder: Path | None = None, *, remedy: str = RESTORE) -> WeightsBytes:
    """A file of a manifest, if it is as its row says."""
    path = (folder or weights_folder()) / row.file
    data = read_bytes(path, remedy)
    digest = hashlib.sha256(data).hexdigest()
    if (len(data), digest) != (row.bytes, row.sha256):
        raise IntegrityError(
            f"{path} is damaged: {len(data)} bytes with sha256 {digest} instead of {row.bytes} with "
            f"{row.sha256}; {remedy}"
        )
    return WeightsBytes(path, row.name, data, digest, remedy)


# What a file in memory holds; messages of `IntegrityError` read on after the file's name.


def read_header(data: bytes) -> dict[str, str]:
    """The metadata in the header, which is 8 bytes of length (little endian), then JSON."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length]) if 2 <= length <= len(data) - 8 else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        if data[:2] == b"PK" or data[:1] == b"\x80":
            raise IntegrityError("is a PyTorch pickle, not a safetensors file")
        raise IntegrityError("is not a safetensors file, or is cut short")
    metadata = header.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def network_config(data: bytes) -> NetworkConfig:
    """The network that the file holds, which runs all layers on all points until a policy is given."""
    text = read_header(data).get("config")
    if not isinstance(text, str):
        raise IntegrityError("carries no configuration in its header, so it is not one of our weights files")
    try:
        return replace(from_dict(NetworkConfig, json.loads(text)), policy=ALL_LAYERS)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise IntegrityError(f"carries a configuration that cannot be used ({error})") from error


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
    """All arrays of a safetensors file, finite, numbers with a fraction as float32."""
    try:
        arrays = parse_arrays(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file of NumPy's numbers ({error})") from error
    arrays = {name: a.astype(np.float32) if a.dtype.kind == "f" else a for name, a in arrays.items()}
    if broken := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
        raise IntegrityError(f"holds numbers that are not finite: {', '.join(broken[:_LISTED])}")
    return arrays


def load_model(weights: str | Path | WeightsBytes) -> tuple[MatchingNetwork, str, str]:
    """The trained network of a name in the manifest, of a path, or of what `weights_bytes` gave, in float32
    on the CPU, as `network_config` has it; the sha256 of its file; its name (for a path, the file's stem)."""
    import torch

    from matcher.match.network import MatchingNetwork

    file = weights if isinstance(weights, WeightsBytes) else weights_bytes(weights)
    try:
        config, tensors = network_config(file.data), read_tensors(file.data)
        contexts = [part.context for part in (config, config.refinement) if part]
        sides = [(context.depth * context.dim, context.dim) for context in contexts]  # of matrices
        hidden = config.position.hidden if config.position.kind == "mlp" else ()
        sides += pairwise((config.descriptor_dim, config.context.dim, *hidden[::-1]))
        sides += [(width, width) for width in (config.backbone.widths if config.backbone else ())]
        if max(a * b for a, b in sides) > len(file.data):  # built, it would fill the memory
            raise IntegrityError("has a configuration of more parameters than the file has bytes")
        with torch.random.fork_rng(devices=[]):  # building draws numbers; the caller must not notice
            try:
                model = MatchingNetwork(config).eval()
            except (ValueError, RuntimeError, ArithmeticError) as error:
                raise IntegrityError(f"has a configuration that no network can have ({error})") from error
        model.load_state_dict(checked(tensors, model.state_dict(), "its configuration asks for"))
    except (IntegrityError, UsageError) as error:
        raise IntegrityError(f"{file.path} {error}: {file.remedy}") from error
    return model, file.sha256, file.name


def save_model(
    model: MatchingNetwork,
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    dtype: str = "float16",
) -> str:
    """Write a network with its configuration in the header; the file's sha256."""
    header = {**(metadata or {}), "config": json.dumps(architecture(model.config))}
    return _write(model, path, header, dtype)


def save_front_end(
    network: nn.Module,
    kind: str,
    path: str | Path,
    metadata: Mapping[str, str] | None = None,
    dtype: str = "float32",
) -> str:
    """As `save_model`, of a front end: its `kind` is in the header as "frontend"."""
    return _write(network, path, {**(metadata or {}), "frontend": kind}, dtype)


def _write(network: nn.Module, path: str | Path, header: dict[str, str], dtype: str) -> str:
    import torch
    from safetensors.torch import save

    wanted = getattr(torch, dtype)
    tensors = {
        name: t.detach().to("cpu", wanted if t.is_floating_point() else t.dtype).contiguous()
        for name, t in network.state_dict().items()
    }
    if broken := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        raise IntegrityError(f"{path} is not written: not finite in {dtype}: {', '.join(broken[:_LISTED])}")
    data = save(tensors, metadata=header)
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file in memory, numbers with a fraction as float32."""
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def checked(tensors: dict[str, Tensor], expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """These tensors, if they have the expected names and shapes and are finite; `owner` is named if not."""
    both = [name for name in expected if name in tensors]
    wrong = [name for name in both if tensors[name].shape != expected[name].shape]
    faults = {
        "missing": [name for name in expected if name not in tensors],
        "extra": sorted(set(tensors) - set(expected)),
        "misshaped": [f"{n} is {tuple(tensors[n].shape)}, not {tuple(expected[n].shape)}" for n in wrong],
        "not finite": [name for name in both if not bool(tensors[name].isfinite().all())],
    }
    problems = []
    for fault, names in faults.items():
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        problems += [f"{fault}: {', '.join(names[:_LISTED])}{more}"] if names else []
    if problems:
        raise IntegrityError(f"does not hold the tensors that {owner} ({'; '.join(problems)})")
    return tensors


CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True)
class PublishedFile:
    """One file, wherever it lies."""

    urls: tuple[str, ...]  # the source first, then its mirrors
    sha256: str = ""  # empty where it is not known
    sha256_from: str = ""  # how it is known: "measured", "several reports", "one report"
    bytes: int = 0  # 0 where it is not known
    part: str = ""  # what our names have before the file's

    @property
    def name(self) -> str:
        """As it is published."""
        return PurePosixPath(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class Published:
    """Published weights of one preset's network or one front end."""

    name: str  # as the authors write it; of several networks of one front end, its variant
    files: tuple[PublishedFile, ...]
    megabytes: float  # about
    licence: str
    commercial: bool  # whether the licence allows commercial use
    source: str
    paper: str
    preset: str = ""  # whose network it is, or
    frontend: str = ""  # which front end
    variant: str = ""  # of the front end
    note: str = ""
    constants: tuple[str, ...] = ()  # beginnings of names of ours that are not trained and in no file

    @property
    def folder(self) -> Path:
        """Where the file and what is made of it lie on this machine."""
        return cache_folder() / "weights" / self.name

    @property
    def is_here(self) -> bool:
        """Whether it lies there, complete if perhaps damaged."""
        return (self.folder / "manifest.toml").is_file()

    @property
    def command(self) -> str:
        """What a user types to get it."""
        return f"matcher weights fetch {self.name}{'' if self.commercial else ' --accept-licence'}"


def read_catalogue() -> dict[str, Published]:
    """Published weights by name."""
    tables = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))["published"]
    return {table["name"]: from_dict(Published, table) for table in tables}


def find_published(name: str) -> Published:
    """The row of that name; a front end of several networks stands for its first."""
    rows = read_catalogue()
    found = rows.get(name) or next((row for row in rows.values() if row.frontend == name), None)
    if found is None:
        files = {Path(file.name).stem: row.name for row in rows.values() for file in row.files}
        if name in files:
            raise UsageError(f"the published weights {name} are called {files[name]!r} here")
        raise UsageError(unknown_name("published weights", name, rows))
    return found


def locate(row: Published) -> WeightsBytes:
    """The checked weights file on this machine that was made of published weights."""
    if not row.is_here:
        raise IntegrityError(
            f"the published weights {row.name} are not on this machine: run `{row.command}`, or"
            f" `matcher weights import FILE --preset {row.name}` with a file that you have"
            f" ({row.licence}; {row.source})"
        )
    return weights_bytes(row.name, row.folder, remedy=f"run `{row.command}` again")


def find_weights(weights: str | Path) -> WeightsBytes:
    """The file of a matcher's network, by a name in our manifest or in the catalogue, or by its path."""
    row = None if isinstance(weights, Path) else read_catalogue().get(weights)
    if row is None:
        found = weights_bytes(weights)
        with suppress(IntegrityError):  # which is told where the network is read
            if "frontend" in read_header(found.data):
                raise UsageError(f"{found.path} is a front end, no matcher's: name it as frontend_weights")
        return found
    if not row.preset:
        raise UsageError(f"{row.name} is a front end, not a matcher's network")
    return locate(row)


def published_front_end(config: ExtractorConfig) -> Published | None:
    """The row of a front end's parameters in the catalogue; None: it has none there."""
    rows = {} if config.kind in ("sift", "learned") else read_catalogue()  # which takes 25 ms
    rows = [row for row in rows.values() if row.frontend == config.kind]
    return next((row for row in rows if config.variant in (None, row.variant)), None)


def locate_front_end(config: ExtractorConfig) -> Path:
    """The checked file of a front end's parameters: the shipped one, or that of `matcher weights fetch`."""
    if (row := published_front_end(config)) is not None:
        return locate(row).path
    if config.kind not in (shipped := read_manifest()):
        raise IntegrityError(f"no weights of {config.kind!r} are known: give a file as frontend_weights")
    return verify(shipped[config.kind]).path


def front_end_bytes(path: Path, kind: str, *, header_alone: bool = False) -> bytes:
    """The bytes of a file, or of its header, of the front end `kind`; `IntegrityError`: it is of another."""
    data = read_bytes(path, _remedy(kind), header_alone=header_alone)
    try:
        found = read_header(data).get("frontend")
        if found != kind:
            whose = f"of the front end {found}" if found else "of no front end"
            raise IntegrityError(f"holds parameters {whose}, not of {kind}")
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: {_remedy(kind)}") from error
    return data


def _remedy(kind: str) -> str:
    """What to do without a usable file of a front end."""
    if kind == "learned":
        return "give a file that `matcher train` wrote, or leave it out for the shipped one"
    return f"get it by `matcher weights fetch {kind}`, or convert a file by `matcher weights import`"


def fill_extractor(network: nn.Module, config: ExtractorConfig, path: str | Path | None = None) -> None:
    """Put the parameters of a file, or those that `config` selects, into a front end's network, or none."""
    path, kind = locate_front_end(config) if path is None else Path(path), config.kind
    data = front_end_bytes(path, kind)
    try:
        tensors = read_tensors(data)
        if hasattr(network, "fit"):
            network.fit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        network.load_state_dict(checked(tensors, network.state_dict(), f"the front end {kind} asks for"))
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: {_remedy(kind)}") from error
