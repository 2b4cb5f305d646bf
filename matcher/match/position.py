"""Where points lie, for the network: position encodings, and guidance by predicted correspondences."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import mapped
from matcher.config import ContextConfig, PositionConfig
from matcher.errors import UsageError
from matcher.geometry import UPRIGHT
from matcher.types import Features, converted

CHANNELS = {
    "xy": 2,
    "scale": 1,
    "orientation": 2,
    "score": 1,
    "raw_scale": 1,
    "raw_sigma": 1,
    "raw_orientation": 1,
    "raw_counterclockwise": 1,
    "frame": 4,
}
# Longer side of the images that LightGlue's networks were trained on, of which their raw scales are pixels.
TRAINED_SIDE = 1024.0


def normalise_positions(features: Features, extent: float = 0.5) -> Tensor:
    """(…, N, 2) upright positions (p − size/2) / (extent · max(size)), in about [−1, 1], float32.

    `features.size` is the stored size; the view matched (EXIF) turns both the points and the size.
    """
    size = features.size.unsqueeze(-2)
    centred = (features.keypoints - (size - 1) / 2) @ _turn(features)
    return (centred - 0.5) / (size.amax(-1, keepdim=True) * extent)


def position_inputs(features: Features, names: tuple[str, ...], extent: float = 0.5) -> Tensor:
    """(…, N, C) the inputs of the encoding.

    `scale` is log2 of the keypoint's diameter relative to the image, `orientation` is (cos, sin) so that it
    has no seam at ±π; both are of order one. The others are what LightGlue's networks were trained with:

    - `raw_scale`: OpenCV's diameter, in pixels of the image resized to 1024 on its longer side, whatever
      size the keypoints were found at; `raw_sigma` is COLMAP's scale, half of it.
    - `raw_orientation`: radians from x towards y in (−π, π], as COLMAP has it; `raw_counterclockwise`: from x
      towards −y in [0, 2π), as kornia's patches have it.
    - `frame`: where the two axes of the described patch end, as positions.
    """
    columns = [_column(features, name, extent) for name in names]
    return torch.cat(columns, dim=-1) if len(columns) > 1 else columns[0]


def _column(features: Features, name: str, extent: float) -> Tensor:
    if name == "xy":
        return normalise_positions(features, extent)
    if name == "score":
        return features.scores.unsqueeze(-1)
    if name == "frame":
        # Normalised ends of the x and of the y axis of the described patch.
        axes = _turn(features).mT.unsqueeze(-3) @ _required(features.affine_frames, "affine_frame")
        reach = (features.size.amax(-1) * extent)[..., None, None, None]
        ends = normalise_positions(features, extent).unsqueeze(-1) + axes / reach
        return ends.transpose(-1, -2).flatten(-2)
    if name == "orientation":
        return _upright_directions(features)
    if name in ("raw_orientation", "raw_counterclockwise"):
        x, y = _upright_directions(features).split(1, dim=-1)
        return torch.atan2(y, x) if name == "raw_orientation" else torch.atan2(-y, x) % (2 * math.pi)
    side = features.size.amax(-1, keepdim=True)
    scales = _required(features.scales, "scale")
    if name in ("raw_scale", "raw_sigma"):
        return (scales * TRAINED_SIDE / side).unsqueeze(-1) * (0.5 if name == "raw_sigma" else 1.0)
    relative = scales.clamp_min(1e-3) / side
    return (relative.log2().unsqueeze(-1) + 6) / 2


def _upright_directions(features: Features) -> Tensor:
    angles = _required(features.orientations, "orientation")
    return torch.stack([angles.cos(), angles.sin()], dim=-1) @ _turn(features)


def _turn(features: Features) -> Tensor:
    """(…, 2, 2) the map from stored directions, as rows, to those of the view that is matched."""
    codes = features.matched_orientation
    return torch.as_tensor(UPRIGHT.transpose(0, 2, 1), dtype=torch.float32, device=codes.device)[codes]


def _required(value: Tensor | None, name: str) -> Tensor:
    if value is None:
        raise UsageError(f"this matcher needs {name}s of the keypoints: Features({name}s=…)")
    return value


def _channels(config: PositionConfig) -> int:
    """How many numbers describe a point's position; `UsageError` for unknown inputs, or none."""
    unknown = set(config.inputs) - set(CHANNELS)
    if unknown or not config.inputs:
        what = f"unknown position inputs {sorted(unknown)}" if unknown else "position.inputs is empty"
        raise UsageError(f"{what}; known: {', '.join(CHANNELS)}")
    return sum(CHANNELS[name] for name in config.inputs)


class RotaryPosition(nn.Module):
    """Learned frequencies: phases = W·inputs, which turn pairs of channels, in all layers and heads alike.

    LightGlue (Lindenberger et al. 2023), eq. 4; rotary embeddings after Su et al. 2021.
    """

    def __init__(self, config: PositionConfig, head_dim: int) -> None:
        super().__init__()
        self.frequencies = nn.Linear(_channels(config), head_dim // 2, bias=False)
        # Wavelengths from the whole image down to a few hundredths of it.
        with torch.no_grad():
            self.frequencies.weight.normal_()
            spread = torch.logspace(math.log10(0.5), math.log10(12.0), head_dim // 2)
            self.frequencies.weight[:, :2] *= spread[:, None]

    def forward(self, inputs: Tensor) -> Tensor:
        """`position_inputs` (…, N, C) → (…, N, 2, head_dim) for `rotate`, float32 whatever the rest runs in.

        The cosine of every channel, then its sine, negative in the first half of a head.
        """
        with torch.autocast(inputs.device.type, enabled=False):
            phases = F.linear(*(converted(x, torch.float32) for x in (inputs, self.frequencies.weight)))
            cos, sin = phases.cos(), phases.sin()
            return torch.cat([cos, cos, -sin, sin], dim=-1).unflatten(-1, (2, -1))


class MlpPosition(nn.Module):
    """A multilayer perceptron of position and score, added to the descriptor (SuperGlue, eq. 2)."""

    def __init__(self, config: PositionConfig, dim: int) -> None:
        super().__init__()
        widths = (_channels(config), *config.hidden)
        self.hidden = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(a, b), "norm": nn.BatchNorm1d(b)}) for a, b in pairwise(widths)
        )
        self.out = nn.Linear(widths[-1], dim)
        nn.init.zeros_(self.out.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """`position_inputs` (…, N, C) → (…, N, dim), float32."""
        x = inputs.flatten(0, -2)
        for block in self.hidden:
            x = block["norm"](block["linear"](x)).relu()
        return self.out(x).unflatten(0, inputs.shape[:-1])


class SinePosition(nn.Module):
    """Sines and cosines of a cell's column and row, added to the descriptor (Carion et al. 2020).

    As LoFTR has it (Sun et al. 2021, section 3.2): channels 4k … 4k+3 are sin and cos of ω_k times the
    column, then of ω_k times the row, both counted from 1. ω_k = 10000^(−4k/dim), or e^(−2k) ("steep"): a
    slip of operators in the published code, with which the first indoor and outdoor networks were trained.
    """

    def __init__(self, config: PositionConfig, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.decay = 2.0 if config.frequencies == "steep" else 4 * math.log(10000.0) / dim

    def forward(self, cells: Tensor) -> Tensor:
        """Columns and rows (…, N, 2) → (…, N, dim), float32."""
        # Far cells have phases of many turns; Metal has no float64.
        exact = torch.float32 if cells.device.type == "mps" else torch.float64
        steps = torch.arange(self.dim // 4, device=cells.device, dtype=exact)
        phases = (cells.to(exact) + 1).unsqueeze(-2) * torch.exp(-self.decay * steps).unsqueeze(-1)
        return torch.stack([phases.sin(), phases.cos()], dim=-1).flatten(-3).float()


def rotate(x: Tensor, rotations: Tensor) -> Tensor:
    """Turn the channel pairs of queries and keys x (B, T, 2, heads, head_dim), in any precision, by angles.

    Channel c of the first half of a head is paired with channel c of the second half. Rotations are cosines
    and sines (B, T, 2, head_dim) float32 as `RotaryPosition` gives them.
    """
    (cos, sin), exact = rotations.unsqueeze(3).split(1, dim=2), x.float()
    return (exact * cos).addcmul_(exact.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def build_position(config: PositionConfig, context: ContextConfig) -> nn.Module | None:
    """The position encoding that a configuration names; its input is `encoded`."""
    if config.kind == "rotary":
        return RotaryPosition(config, context.dim // context.heads)
    added = {"mlp": MlpPosition, "sine": SinePosition}
    return added[config.kind](config, context.dim) if config.kind in added else None


def encoded(config: PositionConfig, features: Features) -> Tensor | None:
    """What the encoding takes of features: (…, N, C), cells of a grid (…, N, 2), or nothing."""
    if config.kind == "sine":
        return _required(features.cells, "cell")
    return None if config.kind == "none" else position_inputs(features, config.inputs, config.extent)


# Guidance by predicted correspondences: every token knows its position and predicts that of its partner.

_FREQUENCIES = 32
_FARTHEST = 1.5  # in normalised positions: a partner may lie outside the image, but not arbitrarily far


class Points(NamedTuple):
    """The points of both images after a layer, those of image 0 first."""

    x: Tensor  # (…, T, dim) states
    positions: Tensor  # (…, T, 2) normalised positions
    predicted: Tensor | None = None  # (…, T, 2) predicted positions of partners in the other image, if guided


class CorrespondenceGuidance(nn.Module):
    """Encodings of positions, and a predicted correspondence after each layer; all in float32."""

    def __init__(
        self, dim: int, depth: int, inputs: tuple[str, ...] = ("xy", "scale", "orientation")
    ) -> None:
        super().__init__()
        self.frequencies = nn.Linear(2, _FREQUENCIES, bias=False)
        others = sum(CHANNELS[name] for name in inputs) - 2
        self.encode_position = nn.Linear(2 * _FREQUENCIES + others, dim, bias=False)
        self.predict = nn.ModuleList(nn.Linear(dim, 2) for _ in range(depth))
        self.encode = nn.ModuleList(nn.Linear(2 * _FREQUENCIES, dim, bias=False) for _ in range(depth))
        self.confidence = nn.ModuleList(nn.Linear(dim, 1) for _ in range(depth))
        self.weight = nn.ParameterList(torch.full((_FREQUENCIES,), 0.02) for _ in range(depth))
        # Wavelengths from beyond the image to a tenth of it; encodings too weak to disturb descriptors.
        with torch.no_grad():
            self.frequencies.weight.normal_()
            self.frequencies.weight *= torch.logspace(-0.3, 1.4, _FREQUENCIES)[:, None]
        nn.init.normal_(self.encode_position.weight, std=0.04)  # zero here and below would be a saddle
        for predict, encode, confidence in zip(self.predict, self.encode, self.confidence, strict=True):
            nn.init.normal_(predict.weight, std=0.02)
            for start in (predict.bias, encode.weight, confidence.weight, confidence.bias):
                nn.init.zeros_(start)

    def begin(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Tokens (…, T, dim), their inputs (…, T, C), positions first → tokens that know where they are."""
        with torch.autocast(x.device.type, enabled=False):
            columns = inputs.split([2, inputs.shape[-1] - 2], dim=-1)
            code = torch.cat([self._waves(columns[0]), *columns[1:]], dim=-1)
            return x + mapped(self.encode_position, code)

    def forward(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Tokens (…, T, dim) after layer `depth` → tokens, and the predicted positions (…, T, 2) of partners.

        Predictions are as `normalise_positions` gives them; no gradient flows back from their encodings.
        """
        with torch.autocast(x.device.type, enabled=False):
            predicted = self.predict[depth](x)
            return x + mapped(self.encode[depth], self._predicted_waves(predicted)), predicted

    def factors(self, points: Points, depth: int) -> tuple[Tensor, Tensor]:
        """(…, T, C) twice: products of the first in one image with the second in the other are what scores
        gain where predictions and positions agree.

        Σ_k w_k cos(ω_k · (predicted − own)), weighted by each point's confidence in its prediction.
        """
        with torch.autocast(points.x.device.type, enabled=False):
            sure = self.confidence[depth](converted(points.x, torch.float32)).sigmoid()
            weights = sure * (2 * self.weight[depth]).repeat(2)
            return weights * self._predicted_waves(points.predicted), self._waves(points.positions)

    def _waves(self, positions: Tensor) -> Tensor:
        phases = self.frequencies(positions)
        return torch.cat([phases.cos(), phases.sin()], dim=-1)

    def _predicted_waves(self, predicted: Tensor) -> Tensor:
        with torch.no_grad():
            within = predicted.clamp(-_FARTHEST, _FARTHEST)
        return self._waves(within)
