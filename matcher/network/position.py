"""Where a point lies, as rotations of its query and key channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from matcher.config import PositionConfig
from matcher.geometry import UPRIGHT
from matcher.types import Features, UsageError

CHANNELS = {"xy": 2, "scale": 1, "orientation": 2}


def normalise_positions(features: Features) -> Tensor:
    """(…, N, 2) upright positions (p − size/2) / (max(size)/2), in about [−1, 1], float32.

    `features.size` is the stored size; EXIF turns both the points and the size.
    """
    turn = torch.as_tensor(UPRIGHT, dtype=torch.float32, device=features.keypoints.device)[features.exif]
    size = features.size.unsqueeze(-2)
    centred = (features.keypoints - (size - 1) / 2) @ turn.transpose(-1, -2)
    return (centred - 0.5) / (size.amax(-1, keepdim=True) / 2)


def position_inputs(features: Features, names: tuple[str, ...]) -> Tensor:
    """(…, N, C) what the encoding turns on, each of order one.

    `scale` is log2 of the keypoint's diameter relative to the picture, `orientation` is (cos, sin) so that it
    has no seam at ±π.
    """
    columns = []
    for name in names:
        if name == "xy":
            columns.append(normalise_positions(features))
        elif name == "scale":
            scales = _required(features.scales, name)
            relative = scales.clamp_min(1e-3) / features.size.amax(-1, keepdim=True)
            columns.append((relative.log2().unsqueeze(-1) + 6) / 2)
        else:
            columns.append(_upright_directions(features))
    return torch.cat(columns, dim=-1)


def _upright_directions(features: Features) -> Tensor:
    angles = _required(features.orientations, "orientation")
    turn = torch.as_tensor(UPRIGHT, dtype=torch.float32, device=angles.device)[features.exif]
    return torch.stack([angles.cos(), angles.sin()], dim=-1) @ turn.transpose(-1, -2)


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise UsageError(f"this matcher needs {name}s of the keypoints: Features({name}s=…)")
    return value


class RotaryPosition(nn.Module):
    """Learned frequencies: phases = W·inputs, which turn pairs of channels.

    LightGlue (Lindenberger et al. 2023), eq. 4; rotary embeddings after Su et al. 2021. One table for all
    layers and heads. Channel c of the first half of a head is paired with channel c of its second half.

    Raises:
        UsageError: no inputs, or one that is not in `CHANNELS`.
    """

    def __init__(self, config: PositionConfig, head_dim: int) -> None:
        super().__init__()
        unknown = set(config.inputs) - set(CHANNELS)
        if unknown or not config.inputs:
            what = f"unknown position inputs {sorted(unknown)}" if unknown else "position.inputs is empty"
            raise UsageError(f"{what}; known: {', '.join(CHANNELS)}")
        self.names = config.inputs
        self.frequencies = nn.Linear(sum(CHANNELS[n] for n in config.inputs), head_dim // 2, bias=False)
        # Wavelengths from the whole picture down to a few hundredths of it.
        with torch.no_grad():
            self.frequencies.weight.normal_()
            spread = torch.logspace(math.log10(0.5), math.log10(12.0), head_dim // 2)
            self.frequencies.weight[:, :2] *= spread[:, None]

    def forward(self, features: Features) -> Tensor:
        """(…, N, 2, head_dim/2) cosines and sines, float32 whatever the rest runs in."""
        inputs = position_inputs(features, self.names)
        phases = inputs.float() @ self.frequencies.weight.float().t()
        return torch.stack([phases.cos(), phases.sin()], dim=-2)


class _Rotate(torch.autograd.Function):
    """Rotation of channel pairs whose gradient to the angles needs no more than what it returned."""

    @staticmethod
    def forward(ctx, x: Tensor, turns: Tensor) -> Tensor:
        out = _rotated(x, turns[:, None, 0].to(x.dtype), turns[:, None, 1].to(x.dtype))
        ctx.save_for_backward(out, turns)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        out, turns = ctx.saved_tensors
        cos, sin = turns[:, None, 0].to(grad.dtype), turns[:, None, 1].to(grad.dtype)
        # d(out)/d(angle) is `out` turned by a quarter; the angle's gradient goes back through (cos, sin).
        first, second = out.chunk(2, dim=-1)
        grad_first, grad_second = grad.chunk(2, dim=-1)
        angle = (first * grad_second - second * grad_first).sum(1).to(turns.dtype)
        grad_turns = torch.stack([-angle * turns[:, 1], angle * turns[:, 0]], dim=1)
        return _rotated(grad, cos, -sin), grad_turns


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the channel pairs of x (T, heads, head_dim) by `turns` (T, 2, head_dim/2) = (cos, sin)."""
    return _Rotate.apply(x, turns)
