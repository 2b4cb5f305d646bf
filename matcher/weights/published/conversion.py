"""Tensors of a published checkpoint into the parameters of a network of ours, strictly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from matcher.config import AssignmentConfig, NetworkConfig
from matcher.errors import IntegrityError, UsageError
from matcher.match.network.model import MatchingNetwork
from matcher.presets import LOFTR_TRANSPORT, find_preset
from matcher.weights.files import save_model
from matcher.weights.published.layouts import CheckpointLayout, TensorSource
from matcher.weights.published.reading import read_checkpoint
from matcher.weights.published.tables import LAYOUTS
from matcher.weights.tensors import list_differences

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
