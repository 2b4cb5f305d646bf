"""Trained networks: strict loading and saving.

A weights file is safetensors whose header carries the network's configuration as JSON under "config", so that
it rebuilds its network by itself. Shipped files are checked against the manifest before they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors.torch import save as pack_tensors
from torch import nn

from matcher.config import architecture
from matcher.errors import IntegrityError, UsageError
from matcher.files import write_whole
from matcher.match.network.model import MatchingNetwork
from matcher.weights.header import front_end_of, network_config
from matcher.weights.manifest import RESTORE, read_bytes, weights_bytes
from matcher.weights.tensors import all_tensors, checked, read_tensors


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
