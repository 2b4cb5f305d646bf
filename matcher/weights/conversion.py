"""Tensors of a published checkpoint into the parameters of a network of ours, strictly."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from matcher.config import AssignmentConfig, ExtractorConfig, NetworkConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.extractor import find_front_end
from matcher.extract.front_end import resolve
from matcher.files import read_given
from matcher.match.network import MatchingNetwork
from matcher.presets import LOFTR_TRANSPORT, find_preset
from matcher.weights.files import LARGEST_WEIGHTS, list_differences, save_front_end, save_model
from matcher.weights.published import LAYOUTS, CheckpointLayout, TensorSource

# --- reading: Reads foreign checkpoint files without running any code in them.

SUFFIXES = (".pth", ".ckpt", ".pt", ".bin", ".safetensors")
PREFIXES = ("matcher.", "module.")
# Keys under which training checkpoints keep the network, beside the optimiser and the rest.
_CONTAINERS = ("state_dict", "model", "model_state_dict", "extractor", "disk", "net")
_PAGES = (b"<!doctype", b"<html", b"<?xml", b"<head")
_POINTER = b"version https://git-lfs"


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, without the prefixes `matcher.` and `module.`.

    Args:
        path: safetensors, or a file of `torch.save` (.pth, .pt, .ckpt, .bin), of which only tensors are read
            and no code runs.

    Raises:
        UsageError: another suffix.
        IntegrityError: the file is absent, cut short, a web page, holds code or other objects, or no tensors.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: a checkpoint ends in {', '.join(SUFFIXES)}")
    try:
        data = read_given(path, LARGEST_WEIGHTS)
    except FileNotFoundError as error:
        raise IntegrityError(f"{path} is absent: check the path") from error
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}): check the path") from error
    if fault := page_fault(data[:512]):
        raise IntegrityError(f"{path} {fault}")
    if path.suffix.lower() == ".safetensors":
        found = _read_safetensors(path, data)
    else:
        found = _find_tensors(path, _unpickle(path, data))
    return _strip(path, found)


def page_fault(start: bytes) -> str | None:
    """What a file is if it is no checkpoint at all, from its first bytes; None when it may be one."""
    start = start.lstrip()
    if start[:16].lower().startswith(_PAGES):
        return "is a web page, not a checkpoint: the link led to a page about the file; fetch the file itself"
    if start.startswith(_POINTER):
        return "is a git-lfs pointer, not the file itself: run `git lfs pull`"
    return None if start else "is empty: fetch it again"


def _read_safetensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        tensors = parse_tensors(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"{path} is not an intact safetensors file ({error}): fetch it again") from error
    if "config" in header.get("__metadata__", {}):
        raise UsageError(
            f"{path} is one of this package's weights files already; give it as weights={path.name}"
        )
    return tensors


def _unpickle(path: Path, data: bytes) -> Any:
    if data[:2] != b"PK" and data[:1] != b"\x80":
        raise IntegrityError(f"{path} is not a file of torch.save, or is damaged: fetch it again")
    if data[:2] == b"PK" and not zipfile.is_zipfile(io.BytesIO(data)):
        raise IntegrityError(f"{path} is cut short: fetch it again")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise IntegrityError(f"{path} {_pickle_fault(str(error))}") from error
    except (RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{path} is damaged or cut short ({reason}): fetch it again") from error
    except (IndexError, AssertionError, OverflowError, RecursionError, ImportError) as error:
        raise IntegrityError(f"{path} is damaged ({type(error).__name__}): fetch it again") from error


def _pickle_fault(reason: str) -> str:
    """Why the reader of tensors stopped: at something that could run, or at nonsense."""
    for mark in ("Unsupported global: GLOBAL ", "Unsupported class "):
        if mark in reason:
            name = reason.split(mark)[1].split()[0].rstrip(".,")
            return (
                f"holds more than tensors ({name}), which could run code, so it was not opened. Save its"
                " tensors alone, torch.save({name: tensor}), where that is safe, or use another copy"
            )
    return f"is damaged or holds more than tensors ({' '.join(reason.split())[-160:]}): fetch it again"


def _find_tensors(path: Path, content: Any, depth: int = 0) -> dict[str, Tensor]:
    """The state dict itself, or the one under a known key of a training checkpoint."""
    if isinstance(content, dict):
        for key in _CONTAINERS if depth < 3 else ():
            if isinstance(content.get(key), dict):
                return _find_tensors(path, content[key], depth + 1)
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors and all(isinstance(name, str) for name in tensors):
            return tensors
    keys = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else type(content).__name__
    raise IntegrityError(
        f"{path} holds no network's tensors (it holds {keys or 'nothing'}): use another file"
    )


def _strip(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    stripped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name
        while short.startswith(PREFIXES):
            short = short.split(".", 1)[1]
        if short in stripped:
            raise IntegrityError(f"{path} holds {short} twice, with and without a prefix: use another file")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
            raise IntegrityError(f"{path} holds {name} in a form that is not plain numbers: use another file")
        stripped[short] = tensor.detach()
    return stripped


# --- conversion: Tensors of a published checkpoint into the parameters of a network of ours, strictly.

# Which system a preset's network is of, by the beginning of the preset's name.
SYSTEMS = {"lightglue-": "LightGlue", "superglue-": "SuperGlue", "loftr-": "LoFTR"}
# Networks that were published beside the preset's own: the tensor that shows one, and how it assigns.
VARIANTS: dict[str, tuple[str, AssignmentConfig]] = {
    "LoFTR": ("coarse_matching.bin_score", LOFTR_TRANSPORT),  # "ot", optimal transport, beside "ds"
}
# Of batch norms: older files lack it, and nothing reads it.
COUNTER = "num_batches_tracked"


def import_checkpoint(
    path: str | Path, preset: str, output: str | Path, metadata: dict[str, str] | None = None
) -> str:
    """Convert a published checkpoint into a weights file that `load(preset, weights=output)` takes.

    A checkpoint of a variant in `VARIANTS` makes a file of that variant; its header names it to `load`.

    Args:
        path: the checkpoint, in one of the layouts of `LAYOUTS`.
        preset: the preset whose network it is.
        output: of the new safetensors file, float32; an existing one is replaced.
        metadata: further header entries.

    Returns:
        The sha256 of the new file.

    Raises:
        UsageError: a preset that has no published checkpoints, or a suffix that is not known.
        IntegrityError: the file cannot be read or its tensors are not those of the preset's network.
    """
    config = find_preset(preset).matcher
    system = next((name for start, name in SYSTEMS.items() if preset.startswith(start)), None)
    if system is None or not isinstance(config, NetworkConfig):
        raise UsageError(f"preset {preset!r} has no published checkpoints; {', '.join(SYSTEMS)}… have")
    tensors = read_checkpoint(path)
    mark, assignment = VARIANTS.get(system, ("", config.assignment))
    if mark in tensors:
        config = replace(config, assignment=assignment)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(config).eval()
    _fill(model, path, tensors, system, config.context.heads)
    return save_model(model, output, metadata, dtype=torch.float32)


def fill_network(network: nn.Module, path: str | Path, system: str, *, heads: int = 1) -> None:
    """Put the parameters of a published checkpoint into a network of ours, all of them or none.

    Args:
        network: on the CPU, in float32.
        path: the checkpoint.
        system: one of the systems in `LAYOUTS`, such as "LightGlue".
        heads: of attention.

    Raises:
        UsageError: a suffix that is not known.
        IntegrityError: the file cannot be read or its tensors are not those of the network.
    """
    _fill(network, path, read_checkpoint(path), system, heads)


def _fill(network: nn.Module, path: str | Path, tensors: dict[str, Tensor], system: str, heads: int) -> None:
    try:
        layout = choose_layout(tensors, system)
        converted = convert(tensors, network.state_dict(), layout, heads)
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}") from error
    network.load_state_dict(converted)


def choose_layout(tensors: dict[str, Tensor], system: str) -> CheckpointLayout:
    """The layout of `system` that knows most of the tensors' names.

    Raises:
        IntegrityError: another system's layout knows more of them, or none knows any; reads on after the
            file's name.
    """
    layouts = sorted(LAYOUTS, key=lambda layout: layout.system != system)  # on a tie the one asked for
    best = max(layouts, key=lambda layout: layout.coverage(tensors))
    if not best.coverage(tensors):
        names = ", ".join(list(tensors)[:4])
        raise IntegrityError(
            f"is no checkpoint of {system}, nor of any system known here; it holds {names}, …"
        )
    if best.system != system:
        raise IntegrityError(f"is a checkpoint of {best.system} ({best.name}), not of {system}")
    return best


def convert(
    tensors: dict[str, Tensor], expected: dict[str, Tensor], layout: CheckpointLayout, heads: int
) -> dict[str, Tensor]:
    """Their tensors as ours, float32.

    Args:
        tensors: by their names.
        expected: our names, with tensors of the shapes that ours have.
        layout: the table.
        heads: of attention, for the order of channels.

    Raises:
        IntegrityError: missing, extra, misshaped or not finite tensors, all named as in the file; reads on
            after the file's name.
    """
    found = {
        layout.tidy(name): tensor for name, tensor in tensors.items() if not name.startswith(layout.ignored)
    }
    sources = {ours: layout.find(ours) for ours in expected}
    for ours in [name for name in sources if name.endswith(COUNTER)]:
        if sources[ours].names[0] not in found:
            del sources[ours]
    wanted = _wanted(sources, expected)
    found = {name: _fit(tensor, wanted.get(name)) for name, tensor in found.items()}
    problems = list_differences(wanted, found) or _differing_copies(sources, found)
    if problems:
        where = f"{layout.system} {layout.name}"
        raise IntegrityError(f"does not hold the tensors of {where} ({'; '.join(problems)})")
    made = {ours: _assemble(source, found, heads) for ours, source in sources.items()}
    return {
        ours: made.get(ours, tensor).to(tensor.dtype).clone(memory_format=torch.contiguous_format)
        for ours, tensor in expected.items()
    }


def _wanted(sources: dict[str, TensorSource], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a file must hold, without their values."""
    wanted = {}
    for ours, source in sources.items():
        shape, count = expected[ours].shape, len(source.names)
        part = (shape[0] // count, *shape[1:]) if count > 1 else shape
        names = (*source.names, source.copy) if source.copy else source.names
        wanted |= {name: torch.empty(part, device="meta") for name in names}
    return wanted


def _differing_copies(sources: dict[str, TensorSource], found: dict[str, Tensor]) -> list[str]:
    return [
        f"{source.copy} differs from {source.names[0]}, but the network has one projection for both"
        for source in sources.values()
        if source.copy and not torch.equal(found[source.copy], found[source.names[0]])
    ]


def _assemble(source: TensorSource, found: dict[str, Tensor], heads: int) -> Tensor:
    parts = [found[name] for name in source.names]
    value = torch.cat(parts) if len(parts) > 1 else parts[0]
    if source.rows is not None:
        value = value[source.rows(value.shape[0], heads)]
    if source.columns is not None and value.dim() > 1:
        value = value[:, source.columns(value.shape[1], heads)]
    return value


def _fit(tensor: Tensor, wanted: Tensor | None) -> Tensor:
    """Sides of length 1 are no difference: a convolution over points is a linear map."""
    if wanted is not None and [n for n in tensor.shape if n != 1] == [n for n in wanted.shape if n != 1]:
        return tensor.reshape(wanted.shape)
    return tensor


# --- frontends: Published files of a front end into one weights file of ours.

# Front ends whose network is ours, and what the layouts call them; in the others names are as published.
_SYSTEMS = {"superpoint": "SuperPoint", "superpoint-open": "SuperPoint-open"}


def import_front_end(
    parts: Sequence[tuple[Path, str]],
    config: ExtractorConfig,
    output: str | Path,
    *,
    constants: tuple[str, ...] = (),
    metadata: dict[str, str] | None = None,
) -> str:
    """Convert a front end's published files into one weights file for `load(…, frontend_weights=output)`.

    Args:
        parts: the files, each with what our names have before the file's.
        config: of the front end; its kind and variant choose the network.
        output: of the new safetensors file, float32; an existing one is replaced.
        constants: beginnings of names of ours that are in no file.
        metadata: further header entries.

    Returns:
        The sha256 of the new file.

    Raises:
        UsageError: an unknown variant or suffix.
        IntegrityError: a file cannot be read or the tensors are not those of the front end.
    """
    front_end = find_front_end(config.kind)
    with torch.random.fork_rng(devices=[]):
        network = front_end.build(resolve(config, front_end.published)).eval()
    if config.kind in _SYSTEMS:
        fill_network(network, parts[0][0], _SYSTEMS[config.kind])
    else:
        _fill_parts(network, parts, config.kind, constants)
    return save_front_end(network, config.kind, output, metadata)


def _fill_parts(
    network: nn.Module, parts: Sequence[tuple[Path, str]], kind: str, constants: tuple[str, ...]
) -> None:
    found = {part + name: tensor for path, part in parts for name, tensor in read_checkpoint(path).items()}
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith(constants) and (name in found or not name.endswith(COUNTER))
    }
    if problems := list_differences(expected, found):
        names = ", ".join(str(path) for path, _ in parts)
        raise IntegrityError(f"{names}: not the tensors of the front end {kind} ({'; '.join(problems)})")
    network.load_state_dict(found, strict=False)
