"""Guidance by predicted correspondences: every token knows its position and predicts that of its partner.

Rotary positions encode how far apart two points of one image are; nothing encodes where in the other image
the points lie that resemble a token. Here a token starts with an encoding of its own position, so that
cross-attention can fetch the positions of likely partners. After each layer it predicts the position of its
partner (a linear map of its state, trained by reprojection), and an encoding of that position is added to it.
Neighbours whose displacements agree support each other, and scores rise where predicted and true positions
agree. Repeating prediction, encoding and attention refines the correspondence layer by layer, as RAFT refines
optical flow (Teed and Deng 2020, section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from matcher.data.features import Features
from matcher.kernels.linear import linear
from matcher.match.network.position import CHANNELS, position_inputs

_FREQUENCIES = 32
_FARTHEST = 1.5  # in normalised positions: a partner may lie outside the image, but not arbitrarily far


class Side(NamedTuple):
    """The points of one image after a layer."""

    x: Tensor  # (…, N, dim) states
    positions: Tensor  # (…, N, 2) normalised positions
    predicted: Tensor | None = None  # (…, N, 2) predicted positions of partners in the other image, if guided


class CorrespondenceGuidance(nn.Module):
    """Encodings of positions, and a predicted correspondence after each layer; all in float32."""

    def __init__(
        self, dim: int, depth: int, inputs: tuple[str, ...] = ("xy", "scale", "orientation")
    ) -> None:
        super().__init__()
        self.names = inputs  # positions first
        self.frequencies = nn.Linear(2, _FREQUENCIES, bias=False)
        others = sum(CHANNELS[name] for name in inputs) - 2
        self.encode_position = nn.Linear(2 * _FREQUENCIES + others, dim, bias=False)
        self.predict = nn.ModuleList(nn.Linear(dim, 2) for _ in range(depth))
        self.encode = nn.ModuleList(nn.Linear(2 * _FREQUENCIES, dim, bias=False) for _ in range(depth))
        self.confidence = nn.ModuleList(nn.Linear(dim, 1) for _ in range(depth))
        self.weight = nn.ParameterList(torch.full((_FREQUENCIES,), 0.02) for _ in range(depth))
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Wavelengths from beyond the image to a tenth of it; encodings too weak to disturb descriptors."""
        self.frequencies.weight.normal_()
        self.frequencies.weight *= torch.logspace(-0.3, 1.4, _FREQUENCIES)[:, None]
        nn.init.normal_(self.encode_position.weight, std=0.04)  # zero here and below would be a saddle
        for predict, encode, confidence in zip(self.predict, self.encode, self.confidence, strict=True):
            nn.init.normal_(predict.weight, std=0.02)
            for start in (predict.bias, encode.weight, confidence.weight, confidence.bias):
                nn.init.zeros_(start)

    def inputs(self, features: Features) -> Tensor:
        """(…, N, C) the inputs of `begin`: the normalised position first, then what else is configured."""
        return position_inputs(features, self.names)

    def begin(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Tokens (T, dim) and their inputs (T, C) → tokens with an encoding of their own position."""
        with torch.autocast(x.device.type, enabled=False):
            code = torch.cat([self._waves(inputs[:, :2]), inputs[:, 2:]], dim=1)
            return x + linear(code, self.encode_position.weight)

    def forward(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Tokens (T, dim) after layer `depth` → tokens, and the predicted positions (T, 2) of their partners.

        Predictions are positions in the other image as `normalise_positions` gives them. No gradient flows
        from their encodings back into the prediction.
        """
        with torch.autocast(x.device.type, enabled=False):
            predicted = self.predict[depth](x)
            return x + linear(self._predicted_waves(predicted), self.encode[depth].weight), predicted

    def agreement(self, side0: Side, side1: Side, depth: int) -> Tensor:
        """(…, N, M) what scores gain where a predicted position is the other point's own, from both sides.

        Σ_k w_k cos(ω_k · (predicted − own)), weighted by each point's confidence in its prediction.
        """
        with torch.autocast(side0.x.device.type, enabled=False):
            left, right = self.factors(side0, side1, depth)
            return left @ right.transpose(-1, -2)

    def factors(self, side0: Side, side1: Side, depth: int) -> tuple[Tensor, Tensor]:
        """(…, N, C), (…, M, C) whose products are the agreement."""
        weights = [self._weights(side, depth) for side in (side0, side1)]
        return self.weighted_factors(side0, side1, *weights)

    def weighted_factors(
        self, side0: Side, side1: Side, weights0: Tensor, weights1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `factors`, for weights (…, N, 64), (…, M, 64) of the waves of predicted positions."""
        waves0, waves1 = (self._predicted_waves(side.predicted) for side in (side0, side1))
        left = torch.cat([weights0 * waves0, self._waves(side0.positions)], dim=-1)
        right = torch.cat([self._waves(side1.positions), weights1 * waves1], dim=-1)
        return left, right

    def _waves(self, positions: Tensor) -> Tensor:
        phases = positions @ self.frequencies.weight.t()
        return torch.cat([phases.cos(), phases.sin()], dim=-1)

    def _predicted_waves(self, predicted: Tensor) -> Tensor:
        return self._waves(predicted.detach().clamp(-_FARTHEST, _FARTHEST))

    def _weights(self, side: Side, depth: int) -> Tensor:
        return 2 * self.confidence[depth](side.x.float()).sigmoid() * self.weight[depth].repeat(2)
