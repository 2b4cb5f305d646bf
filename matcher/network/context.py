"""Context: alternating self- and cross-attention, and how sure each point is of what it knows.

Every block is x + ffn([x | message]), the form that SuperGlue, LightGlue and LoFTR share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.config import ContextConfig
from matcher.network.attention import Layout, attend, build_attention
from matcher.network.position import rotate


class FeedForward(nn.Module):
    """x + ffn([x | message]); the last projection starts at zero, so an untrained block changes nothing."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        wide = 2 * config.dim
        self.widen = nn.Linear(wide, wide)
        self.norm = nn.LayerNorm(wide) if config.norm == "layer" else nn.BatchNorm1d(wide)
        self.activate = nn.GELU() if config.activation == "gelu" else nn.ReLU()
        self.narrow = nn.Linear(wide, config.dim)
        nn.init.zeros_(self.narrow.weight)
        nn.init.zeros_(self.narrow.bias)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        """Tokens (T, dim) and what they heard (T, dim) → tokens (T, dim)."""
        hidden = self.widen(torch.cat([x.to(message.dtype), message], dim=-1))
        update = self.narrow(self.activate(self.norm(hidden)))
        return x + update


def start_loud(*weights: Tensor) -> None:
    """Orthogonal weights, so that what is heard is as loud as what was said."""
    for weight in weights:
        nn.init.orthogonal_(weight)


class SelfBlock(nn.Module):
    """Every point listens to its own picture; positions may turn queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.attention = build_attention(config.attention, config.dim // config.heads)
        self.out = nn.Linear(config.dim, config.dim)
        self.ffn = FeedForward(config)
        self._start_local(config)

    @torch.no_grad()
    def _start_local(self, config: ContextConfig) -> None:
        """Constant queries and keys, which the positions turn: at first a point listens to its neighbours."""
        width = config.dim // config.heads
        reach = torch.linspace(4.0, 12.0, config.heads)  # peak of the logits, head by head
        constant = (reach / width**0.5).sqrt().repeat_interleave(width)
        self.qkv.weight[: 2 * config.dim] *= 0.5
        self.qkv.bias[: 2 * config.dim] = constant.repeat(2)
        start_loud(self.qkv.weight[2 * config.dim :], self.out.weight)

    def forward(self, x: Tensor, turns: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim), rotary turns (T, 2, head_dim/2) or none → tokens (T, dim)."""
        qkv = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (3 * self.heads, -1))  # (T, 3·heads, d)
        qk, v = qkv.split((2 * self.heads, self.heads), dim=1)
        q, k = (qk if turns is None else rotate(qk, turns)).chunk(2, dim=1)
        return self.ffn(x, self.out(attend(q, k, v, layout, self.attention, across=False)))


class CrossBlock(nn.Module):
    """Every point listens to the other picture; queries and keys may be one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads, self.shared = config.heads, config.shared_qk
        self.qkv = nn.Linear(config.dim, (2 if self.shared else 3) * config.dim)
        self.attention = build_attention(config.attention, config.dim // config.heads)
        self.out = nn.Linear(config.dim, config.dim)
        self.ffn = FeedForward(config)
        self._start_alike(config)

    @torch.no_grad()
    def _start_alike(self, config: ContextConfig) -> None:
        """At first a point listens to the points of the other picture that look like it."""
        gain = (20 / (config.dim / config.heads) ** 0.5) ** 0.5
        nn.init.orthogonal_(self.qkv.weight[: config.dim], gain=gain)
        if not self.shared:
            self.qkv.weight[config.dim : 2 * config.dim] = self.qkv.weight[: config.dim]
        nn.init.zeros_(self.qkv.bias)
        start_loud(self.qkv.weight[-config.dim :], self.out.weight)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim)."""
        width = x.shape[-1] // self.heads
        parts = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (-1, self.heads, width))
        q, k, v = parts[:, 0], parts[:, -2], parts[:, -1]
        return self.ffn(x, self.out(attend(q, k, v, layout, self.attention, across=True)))


class Layer(nn.Module):
    """One self- and one cross-attention block."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.within = SelfBlock(config)
        self.across = CrossBlock(config)

    def forward(self, x: Tensor, turns: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim), float32 between blocks."""
        return self.across(self.within(x, turns, layout), layout)
