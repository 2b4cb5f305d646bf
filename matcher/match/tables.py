"""Constant tables, kept on every device that uses them: to bring one there each time would hold a GPU up."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from matcher.data.geometry import UPRIGHT
from matcher.match.turns import TURNED_EXIF


@cache
def upright_maps(device: torch.device) -> Tensor:
    """(9, 2, 2) float32: stored directions to upright ones, by EXIF orientation."""
    with torch.inference_mode(False):
        return torch.as_tensor(UPRIGHT, dtype=torch.float32).to(device)


@cache
def turned_orientations(device: torch.device) -> Tensor:
    """(9,) int64: the EXIF orientation with one more clockwise quarter turn."""
    with torch.inference_mode(False):
        return torch.tensor(TURNED_EXIF).to(device)
