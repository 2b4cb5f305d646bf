"""Random numbers on a device, the same for the same seed and kind of device."""

from __future__ import annotations

import torch
from torch import Tensor


class Draws:
    """A generator of uniform and normal numbers on a device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers from `low` to `high`."""
        return torch.rand(*shape, generator=self.generator, device=self.device) * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """Numbers of mean 0 and variance 1."""
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def happens(self, count: int, share: float) -> Tensor:
        """(count,) bool, true with the probability `share`."""
        return self.uniform(count) < share
