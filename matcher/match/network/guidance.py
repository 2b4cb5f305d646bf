"""Guidance: every token knows where it is and states where its partner seems to be.

Rotary positions say how far apart two points of one picture are; nothing tells a token where in the other
picture the points lie that it resembles. Here a token begins with a code of its own place, so that
cross-attention can fetch the places of likely partners; after each layer it states the place of its partner
(a linear map of its state, trained by reprojection), and a code of that place joins it. Neighbours with
agreeing displacements support each other, and scores rise where stated and real places agree. Stating,
encoding and listening again refines the correspondence layer by layer, as RAFT refines flow (Teed and Deng
2020, section 3.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from matcher.data.features import Features
from matcher.match.network.position import CHANNELS, position_inputs

_WAVES = 32
_FARTHEST = 1.5  # in units of normalised positions: a partner may lie outside the picture, but not anywhere


class Side(NamedTuple):
    """The points of one picture after a layer."""

    x: Tensor  # (…, N, dim) states
    places: Tensor  # (…, N, 2) normalised positions
    stated: Tensor | None = None  # (…, N, 2) normalised positions of partners in the other picture, if guided


class Guidance(nn.Module):
    """Codes of places, and a statement of the partner's place after each layer; all in float32."""

    def __init__(
        self, dim: int, depth: int, inputs: tuple[str, ...] = ("xy", "scale", "orientation")
    ) -> None:
        super().__init__()
        self.names = inputs  # positions first
        self.waves = nn.Linear(2, _WAVES, bias=False)
        others = sum(CHANNELS[name] for name in inputs) - 2
        self.place = nn.Linear(2 * _WAVES + others, dim, bias=False)
        self.partner = nn.ModuleList(nn.Linear(dim, 2) for _ in range(depth))
        self.echo = nn.ModuleList(nn.Linear(2 * _WAVES, dim, bias=False) for _ in range(depth))
        self.trust = nn.ModuleList(nn.Linear(dim, 1) for _ in range(depth))
        self.weight = nn.ParameterList(torch.full((_WAVES,), 0.02) for _ in range(depth))
        self._start_faint()

    @torch.no_grad()
    def _start_faint(self) -> None:
        """Wavelengths from beyond the picture to a tenth of it; codes too weak to disturb the descriptors."""
        self.waves.weight.normal_()
        self.waves.weight *= torch.logspace(-0.3, 1.4, _WAVES)[:, None]
        nn.init.normal_(self.place.weight, std=0.04)  # zero here and below would be a saddle
        for partner, echo, trust in zip(self.partner, self.echo, self.trust, strict=True):
            nn.init.normal_(partner.weight, std=0.02)
            for start in (partner.bias, echo.weight, trust.weight, trust.bias):
                nn.init.zeros_(start)

    def _code(self, places: Tensor) -> Tensor:
        phases = places @ self.waves.weight.t()
        return torch.cat([phases.cos(), phases.sin()], dim=-1)

    def inputs(self, features: Features) -> Tensor:
        """(…, N, C) what `begin` takes: normalised position first, then what else is known of a point."""
        return position_inputs(features, self.names)

    def begin(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Tokens (T, dim) and their inputs (T, C) → tokens that know their place."""
        with torch.autocast(x.device.type, enabled=False):
            return x + self.place(torch.cat([self._code(inputs[:, :2]), inputs[:, 2:]], dim=1))

    def forward(self, x: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Tokens (T, dim) after layer `depth` → tokens, and the stated places (T, 2) of their partners.

        Places are positions in the other picture as `normalise_positions` gives them. No gradient flows from
        their codes back into the statement.
        """
        with torch.autocast(x.device.type, enabled=False):
            stated = self.partner[depth](x)
            return x + self.echo[depth](self._stated_code(stated)), stated

    def _stated_code(self, stated: Tensor) -> Tensor:
        return self._code(stated.detach().clamp(-_FARTHEST, _FARTHEST))

    def agreement(self, side0: Side, side1: Side, depth: int) -> Tensor:
        """(…, N, M) what scores gain where a stated place is the other point's own, from both sides.

        Σ_k w_k cos(ω_k · (stated − own)), weighted by how far each point trusts what it states.
        """
        with torch.autocast(side0.x.device.type, enabled=False):
            mine = torch.cat([self._said(side0, depth), self._code(side0.places)], dim=-1)
            yours = torch.cat([self._code(side1.places), self._said(side1, depth)], dim=-1)
            return mine @ yours.transpose(-1, -2)

    def _said(self, side: Side, depth: int) -> Tensor:
        trust = 2 * self.trust[depth](side.x.float()).sigmoid()
        return trust * self.weight[depth].repeat(2) * self._stated_code(side.stated)
