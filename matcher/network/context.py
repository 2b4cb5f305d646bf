"""Context: alternating self- and cross-attention, and how sure each point is of what it knows.

Every block is x + ffn([x | message]), the form that SuperGlue, LightGlue and LoFTR share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.config import ContextConfig
from matcher.network.attention import Layout, attend
from matcher.network.position import rotate


class FeedForward(nn.Module):
    """x + ffn([x | message]); the last projection starts at zero, so an untrained block changes nothing."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.widen = nn.Linear(2 * dim, 2 * dim)
        self.norm = nn.LayerNorm(2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        """Tokens (T, dim) and what they heard (T, dim) → tokens (T, dim)."""
        hidden = self.widen(torch.cat([x.to(message.dtype), message], dim=-1))
        update = self.narrow(nn.functional.gelu(self.norm(hidden)))
        return x + update


def start_loud(*weights: Tensor) -> None:
    """Orthogonal weights, so that what is heard is as loud as what was said."""
    for weight in weights:
        nn.init.orthogonal_(weight)


class SelfBlock(nn.Module):
    """Every point listens to its own picture; positions turn queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.ffn = FeedForward(config.dim)
        self._start_local(config)

    @torch.no_grad()
    def _start_local(self, config: ContextConfig) -> None:
        """Constant queries and keys, which the positions turn: at first a point listens to its neighbours."""
        pairs = config.dim // config.heads // 2
        reach = torch.linspace(4.0, 12.0, config.heads)  # peak of the logits, head by head
        constant = (reach * (2 * pairs) ** 0.5 / (2 * pairs)).sqrt().repeat_interleave(2 * pairs)
        self.qkv.weight[: 2 * config.dim] *= 0.5
        self.qkv.bias[: 2 * config.dim] = constant.repeat(2)
        start_loud(self.qkv.weight[2 * config.dim :], self.out.weight)

    def forward(self, x: Tensor, turns: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim), rotary turns (T, 2, head_dim/2) → tokens (T, dim)."""
        qkv = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (3 * self.heads, -1))  # (T, 3·heads, d)
        q, k = rotate(qkv[:, : 2 * self.heads], turns).chunk(2, dim=1)
        message = attend(q, k, qkv[:, 2 * self.heads :], layout, across=False)
        return self.ffn(x, self.out(message))


class CrossBlock(nn.Module):
    """Every point listens to the other picture; queries and keys are one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 2 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.ffn = FeedForward(config.dim)
        self._start_alike(config)

    @torch.no_grad()
    def _start_alike(self, config: ContextConfig) -> None:
        """At first a point listens to the points of the other picture that look like it."""
        nn.init.orthogonal_(self.qkv.weight[: config.dim], gain=(20 / (config.dim / config.heads) ** 0.5) ** 0.5)
        nn.init.zeros_(self.qkv.bias)
        start_loud(self.qkv.weight[config.dim :], self.out.weight)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim)."""
        qk, v = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (2, self.heads, -1)).unbind(1)
        return self.ffn(x, self.out(attend(qk, qk, v, layout, across=True)))


class Layer(nn.Module):
    """One self- and one cross-attention block."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.within = SelfBlock(config)
        self.across = CrossBlock(config)

    def forward(self, x: Tensor, turns: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim), float32 between blocks."""
        return self.across(self.within(x, turns, layout), layout)
