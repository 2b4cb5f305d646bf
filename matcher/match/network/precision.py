"""Number types of a device."""

import torch


def widest_float(device: torch.device) -> torch.dtype:
    """float64, but float32 on Metal, which has nothing wider."""
    return torch.float32 if device.type == "mps" else torch.float64
