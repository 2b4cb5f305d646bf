"""Matchers of fewer or more layers than the weights that they start from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# One of a layer's tensors, such as `heads.5.projection.weight`.
_OF_A_LAYER = re.compile(r"((?:layers|heads|confidence|match_probability|guidance\.\w+)\.)(\d+)(\..+)?")
# What a layer adds to its tokens.
_ADDED = re.compile(r"layers\.\d+\.\w+\.ffn\.narrow\..+|guidance\.encode\.\d+\.weight")


def layer_of(name: str) -> int | None:
    """The layer, the first is 0, that a tensor belongs to, or None."""
    entry = _OF_A_LAYER.fullmatch(name)
    return None if entry is None else int(entry[2])


def chosen(found: Mapping[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of some layers, and of what belongs to none, as a network of so many layers has them.

    Args:
        found: trained tensors by name.
        layers: in the order that they will have.
    """
    kept = {name: value for name, value in found.items() if layer_of(name) is None}
    for name, value in found.items():
        if (entry := _OF_A_LAYER.fullmatch(name)) is not None and int(entry[2]) in layers:
            kept[f"{entry[1]}{layers.index(int(entry[2]))}{entry[3] or ''}"] = value
    return kept


def deepened(found: Mapping[str, Tensor], before: int, depth: int) -> dict[str, Tensor]:
    """The tensors of a network of `before` layers for one of `depth` that computes the same.

    The last layer stays the last. What is put before it are copies of the layer there that leave tokens as
    they are; the heads of these copies see what its heads saw.

    Args:
        found: trained tensors by name.
        before: layers of their network.
        depth: layers of the network that they are for, no fewer.
    """
    deeper = {name: value for name, value in found.items() if layer_of(name) is None}
    for name, value in found.items():
        if (entry := _OF_A_LAYER.fullmatch(name)) is None:
            continue
        part, number, rest = entry[1], int(entry[2]), entry[3] or ""
        if number == before - 1:
            deeper[f"{part}{depth - 1}{rest}"] = value
        else:
            deeper[name] = value
        if number == max(0, before - 2):
            silent = _ADDED.fullmatch(name) is not None
            for added in range(before - 1, depth - 1):
                deeper[f"{part}{added}{rest}"] = torch.zeros_like(value) if silent else value.clone()
    return deeper
