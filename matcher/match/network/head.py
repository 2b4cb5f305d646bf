"""The assignment head: from token states to scores with dustbins."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from matcher.config import AssignmentConfig
from matcher.kernels.linear import linear


class AssignmentHead(nn.Module):
    """One projection for similarities, and a dustbin score: a logit of each point, one number, or −∞."""

    def __init__(
        self, dim: int, dustbin: str = "point", *, project: bool = True, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.projection = nn.Linear(dim, dim) if project else None
        self.divisor = (temperature * (dim**0.5 if project else dim)) ** 0.5  # of either side
        if dustbin == "point":
            self.matchability = nn.Linear(dim, 1)
        elif dustbin == "learned":
            self.dustbin = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("dustbin", torch.tensor(-math.inf), persistent=False)

    def forward(self, x0: Tensor, x1: Tensor) -> Tensor:
        """Tokens (…, N, dim), (…, M, dim) → scores with dustbins (…, N+1, M+1), float32.

        Similarities of projected tokens are scaled by 1/√dim, those of tokens (LoFTR, section 3.3) by 1/dim,
        both by 1/temperature. A point's dustbin score is minus its matchability logit, the corner is 0; one
        number (SuperGlue, eq. 8) is the score of all dustbins and of the corner.
        """
        m0, m1 = self.compared(x0, x1)
        bin0, bin1, corner = self.dustbins(x0, x1)
        with torch.autocast(x0.device.type, enabled=False):
            if m0.dim() == 3 and not (m0.requires_grad or bin0.requires_grad):
                return _bordered(m0, m1, bin0, bin1, corner)
            similarity = m0 @ m1.transpose(-1, -2)
        rows = torch.cat([similarity, bin0.unsqueeze(-1)], dim=-1)
        last = torch.cat([bin1, corner.expand(*bin1.shape[:-1], 1)], dim=-1)
        return torch.cat([rows, last.unsqueeze(-2)], dim=-2)

    def compared(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor]:
        """(…, N, dim), (…, M, dim) float32, whose products are the similarities."""
        return tuple(self._compared(x) / self.divisor for x in (x0, x1))

    def dustbins(self, x0: Tensor, x1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the dustbins (…, N), (…, M) and of their corner ()."""
        if hasattr(self, "dustbin"):
            corner = self.dustbin.float()
            return corner.expand(x0.shape[:-1]), corner.expand(x1.shape[:-1]), corner
        bin0, bin1 = (-self.logits(x) for x in (x0, x1))
        return bin0, bin1, bin1.new_zeros(())

    def _compared(self, x: Tensor) -> Tensor:
        if self.projection is None:
            return x.float()
        weight, bias = self.projection.weight, self.projection.bias
        return linear(x.to(weight.dtype).flatten(0, -2), weight, bias).float().unflatten(0, x.shape[:-1])

    def logits(self, x: Tensor) -> Tensor:
        """Matchability logit (…, N) of tokens (…, N, dim), float32."""
        return self.matchability(x.to(self.matchability.weight.dtype)).squeeze(-1).float()


def _bordered(m0: Tensor, m1: Tensor, bin0: Tensor, bin1: Tensor, corner: Tensor) -> Tensor:
    """Products m0 m1ᵀ of (B, N, dim), (B, M, dim) with dustbins, written once: allocations are slow."""
    scores = m0.new_empty(len(m0), m0.shape[1] + 1, m1.shape[1] + 1)
    for pair, inner in enumerate(scores[:, :-1, :-1]):
        torch.mm(m0[pair], m1[pair].t(), out=inner)
    scores[:, :-1, -1], scores[:, -1, :-1], scores[:, -1, -1] = bin0, bin1, corner
    return scores


def build_head(config: AssignmentConfig, dim: int) -> AssignmentHead:
    """The assignment head that a configuration names, for tokens of `dim` channels."""
    return AssignmentHead(dim, config.dustbin, project=config.project, temperature=config.temperature)
