"""Batches of features as tables of one length, both images of a pair side by side."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from matcher.data.features import Features

_PER_PAIR = ("size", "scale", "exif_orientation", "view_orientation", "grid")


def padded_length(points: int) -> int:
    """The length of the table for images of so many points.

    Steps grow with the length: at most a fifth is padding from 512 points on, and lengths are few, because
    CUDA graphs are kept for each. All are multiples of what attention kernels are fast at.
    """
    step = 64 if points <= 512 else 128 if points <= 1024 else 256 if points <= 4096 else 512
    return max(step, -(-points // step) * step)


def paired(features0: Features, features1: Features, length: int) -> Features:
    """Two batches of B images as one of 2·B images and `length` points: pair 0 image 0, pair 0 image 1, …

    Padding is zeros under a mask that is False. Fields that one side lacks are left out, as are maps.
    """
    columns: dict[str, Tensor | None] = {}
    for name in (f.name for f in fields(Features) if f.name not in ("kind", "maps")):
        sides = [getattr(features, name) for features in (features0, features1)]
        if name == "view_orientation" and any(side is not None for side in sides):
            sides = [features.matched_orientation for features in (features0, features1)]
        if any(side is None for side in sides):
            columns[name] = None
        elif name in _PER_PAIR:
            columns[name] = torch.stack(sides, dim=1).flatten(0, 1)
        else:
            columns[name] = _table(*sides, length)
    return features0.with_valid(**columns, maps=None)


def _table(side0: Tensor, side1: Tensor, length: int) -> Tensor:
    """(B, N, …), (B, M, …) → (2·B, length, …)."""
    out = side0.new_zeros(len(side0), 2, length, *side0.shape[2:])
    out[:, 0, : side0.shape[1]], out[:, 1, : side1.shape[1]] = side0, side1
    return out.flatten(0, 1)


def uploaded(features: Features, device: torch.device) -> Features:
    """Features on a device; what lies on the processor is copied there without waiting."""
    values = {f.name: getattr(features, f.name) for f in fields(Features) if f.name != "kind"}
    return features.with_valid(
        **{name: None if value is None else to_device(value, device) for name, value in values.items()}
    )


def to_device(value: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device, copied from memory that the device reads by itself."""
    if value.device.type == "cpu" and device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)
