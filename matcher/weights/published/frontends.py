"""Published files of a front end into one weights file of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError
from matcher.extract.registry import find_front_end
from matcher.extract.shared import resolve
from matcher.weights.files import save_front_end
from matcher.weights.published.conversion import COUNTER, fill_network
from matcher.weights.published.reading import read_checkpoint
from matcher.weights.tensors import list_differences

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
