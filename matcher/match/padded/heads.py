"""Scores of pairs that stopped at different layers: each by the heads of its own layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.match.network.correspondence import Side


class LayerHeads:
    """The assignment heads of all layers, and their guidance, as tables where each pair finds its own."""

    def __init__(self, network: nn.Module) -> None:
        """Copy the parameters of a `MatchingNetwork` with a head for every layer."""
        heads, guidance = network.heads, network.guidance
        self.head, self.guidance = heads[0], guidance
        self.projection = _table([head.projection for head in heads])
        self.matchability = _table([getattr(head, "matchability", None) for head in heads])
        self.confidence = None if guidance is None else _table(list(guidance.confidence))
        self.wave_weights = None if guidance is None else torch.stack(list(guidance.weight)).detach()

    def scores(self, side0: Side, side1: Side, layers: Tensor) -> Tensor:
        """(B, N+1, M+1) float32 with dustbins, as `MatchingNetwork.scores` of the last `layers` (B,)."""
        compared0, compared1 = (self._compared(side.x, layers) for side in (side0, side1))
        bins0, bins1 = (self._dustbins(side.x, layers) for side in (side0, side1))
        if self.guidance is not None:
            weights = [self._wave_weights(side.x, layers) for side in (side0, side1)]
            more0, more1 = self.guidance.weighted_factors(side0, side1, *weights)
            compared0 = torch.cat([compared0, more0], dim=-1)
            compared1 = torch.cat([compared1, more1], dim=-1)
        return bordered(compared0, compared1, bins0, bins1, self._corner(bins1))

    def _compared(self, x: Tensor, layers: Tensor) -> Tensor:
        projected = x if self.projection is None else _mapped(x, self.projection, layers)
        return projected.float() / self.head.divisor

    def _dustbins(self, x: Tensor, layers: Tensor) -> Tensor:
        if self.matchability is None:
            return self.head.dustbin.float().expand(x.shape[:2])
        return -_mapped(x, self.matchability, layers)[..., 0]

    def _corner(self, bins: Tensor) -> Tensor:
        return bins.new_zeros(()) if self.matchability is not None else self.head.dustbin.float()

    def _wave_weights(self, x: Tensor, layers: Tensor) -> Tensor:
        confidence = 2 * _mapped(x.float(), self.confidence, layers).sigmoid()
        return confidence * self.wave_weights[layers].repeat(1, 2)[:, None]


def _table(layers: list[nn.Linear | None]) -> tuple[Tensor, Tensor] | None:
    """Weights (D, outputs, inputs) and biases (D, outputs) of one map in all layers."""
    if layers[0] is None:
        return None
    weights, biases = ([getattr(layer, part) for layer in layers] for part in ("weight", "bias"))
    return torch.stack(weights).detach(), torch.stack(biases).detach()


def _mapped(x: Tensor, table: tuple[Tensor, Tensor], layers: Tensor) -> Tensor:
    """x (B, N, inputs) by the map of each pair's layer (B,) → (B, N, outputs), float32."""
    weight, bias = (values[layers] for values in table)
    return torch.baddbmm(bias[:, None], x.to(weight.dtype), weight.mT).float()


def bordered(left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, corner: Tensor) -> Tensor:
    """Products of (B, N, D), (B, M, D) with the scores of dustbins (B, N), (B, M) and of their corner ()."""
    scores = left.new_empty(len(left), left.shape[1] + 1, right.shape[1] + 1)
    scores[:, :-1, :-1] = left @ right.mT
    scores[:, :-1, -1], scores[:, -1, :-1], scores[:, -1, -1] = bins0, bins1, corner
    return scores
