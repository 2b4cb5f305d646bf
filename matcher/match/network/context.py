"""Context: alternating self- and cross-attention, and how sure each point is of what it knows.

Every block is x + ffn([x | message]), the form that SuperGlue, LightGlue and LoFTR share; `ContextConfig`
says where they differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.attention import build_attention
from matcher.config import ContextConfig
from matcher.match.network.packed import Layout, attend, attend_to
from matcher.match.network.position import rotate
from matcher.match.network.prepared import PreparedFeedForward, TurnedProjection, joined, linear


def outer_norm(config: ContextConfig) -> nn.Module:
    """Normalisation of a message and of an update, where the configuration has it there (LoFTR)."""
    return nn.LayerNorm(config.dim) if config.norm == "output" else nn.Identity()


class FeedForward(nn.Module):
    """x + ffn([x | message]); what comes last starts at zero, so an untrained block changes nothing."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        wide = 2 * config.dim
        self.widen = nn.Linear(wide, wide, bias=config.bias)
        inner_norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "output": nn.Identity}
        self.norm = inner_norms[config.norm](wide)
        self.activate = nn.GELU() if config.activation == "gelu" else nn.ReLU()
        self.narrow = nn.Linear(wide, config.dim, bias=config.bias)
        self.output_norm = outer_norm(config)
        for parameter in (self.output_norm if config.norm == "output" else self.narrow).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        """Tokens (T, dim) and what they heard (T, dim) → tokens (T, dim)."""
        hidden = self.widen(torch.cat([x.to(message.dtype), message], dim=-1))
        return x + self.output_norm(self.narrow(self.activate(self.norm(hidden))))

    def prepare(self, out: nn.Linear, dtype: torch.dtype) -> PreparedFeedForward | None:
        """This part and the projection of the message before it in one, where the form allows it."""
        if not isinstance(self.output_norm, nn.Identity):
            return None
        gelu = isinstance(self.activate, nn.GELU)
        return PreparedFeedForward(out, self.widen, self.norm, self.narrow, gelu, dtype)


def initialise_orthogonal(*weights: Tensor) -> None:
    """Orthogonal weights, so that what is heard is as loud as what was said."""
    for weight in weights:
        nn.init.orthogonal_(weight)


class SelfBlock(nn.Module):
    """Every point listens to its own picture; positions may turn queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim, bias=config.bias)
        self.attention = build_attention(config.attention, config.dim // config.heads)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.message_norm = outer_norm(config)
        self.ffn = FeedForward(config)
        self.prepared: tuple[TurnedProjection, PreparedFeedForward] | None = None
        self._initialise_local(config)

    @torch.no_grad()
    def _initialise_local(self, config: ContextConfig) -> None:
        """Constant queries and keys, which the positions turn: at first a point listens to its neighbours."""
        width = config.dim // config.heads
        reach = torch.linspace(4.0, 12.0, config.heads)  # peak of the logits, head by head
        constant = (reach / width**0.5).sqrt().repeat_interleave(width)
        if config.bias:
            self.qkv.weight[: 2 * config.dim] *= 0.5
            self.qkv.bias[: 2 * config.dim] = constant.repeat(2)
        initialise_orthogonal(self.qkv.weight[2 * config.dim :], self.out.weight)

    def prepare(self, dtype: torch.dtype) -> None:
        """From now on run without gradients in `dtype`, with the weights as they are now."""
        feed = self.ffn.prepare(self.out, dtype)
        self.prepared = None if feed is None else (TurnedProjection(self.qkv, self.heads, dtype), feed)

    def forward(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim), rotary rotations (T, 2, head_dim/2) or none → tokens (T, dim)."""
        if self.prepared is not None:
            project, feed = self.prepared
            joint, tokens, message = joined(x, self.qkv.weight.dtype)
            message.copy_(attend(*project(tokens, rotations), layout, self.attention, cross=False))
            return feed(x, joint)
        qkv = self.qkv(x.to(self.qkv.weight.dtype)).unflatten(-1, (3 * self.heads, -1))  # (T, 3·heads, d)
        qk, v = qkv.split((2 * self.heads, self.heads), dim=1)
        q, k = (qk if rotations is None else rotate(qk, rotations)).chunk(2, dim=1)
        message = attend(q, k, v, layout, self.attention, cross=False)
        return self.ffn(x, self.message_norm(self.out(message)))


class CrossBlock(nn.Module):
    """Every point listens to the other picture; queries and keys may be one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.heads, self.shared, self.sequential_cross = (
            config.heads,
            config.shared_qk,
            config.sequential_cross,
        )
        self.qkv = nn.Linear(config.dim, (2 if self.shared else 3) * config.dim, bias=config.bias)
        self.attention = build_attention(config.attention, config.dim // config.heads)
        self.out = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.message_norm = outer_norm(config)
        self.ffn = FeedForward(config)
        self.prepared: PreparedFeedForward | None = None
        self._initialise_similar(config)

    @torch.no_grad()
    def _initialise_similar(self, config: ContextConfig) -> None:
        """At first a point listens to the points of the other picture that look like it."""
        gain = (20 / (config.dim / config.heads) ** 0.5) ** 0.5
        nn.init.orthogonal_(self.qkv.weight[: config.dim], gain=gain)
        if not self.shared:
            self.qkv.weight[config.dim : 2 * config.dim] = self.qkv.weight[: config.dim]
        if config.bias:
            nn.init.zeros_(self.qkv.bias)
        initialise_orthogonal(self.qkv.weight[-config.dim :], self.out.weight)

    def prepare(self, dtype: torch.dtype) -> None:
        """From now on run without gradients in `dtype`, with the weights as they are now."""
        self.prepared = None if self.sequential_cross else self.ffn.prepare(self.out, dtype)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim)."""
        if self.sequential_cross:
            return self._listen_in_turn(x, layout)
        if self.prepared is not None:
            joint, tokens, message = joined(x, self.qkv.weight.dtype)
            message.copy_(self._hear(tokens, layout))
            return self.prepared(x, joint)
        return self.ffn(x, self.message_norm(self.out(self._hear(x, layout))))

    def _hear(self, x: Tensor, layout: Layout) -> Tensor:
        """(T, dim) what tokens (T, dim) are told by the other picture."""
        parts = self._project(x)
        q, k, v = parts[:, 0], parts[:, -2], parts[:, -1]
        return attend(q, k, v, layout, self.attention, cross=True)

    def _project(self, x: Tensor, first: int = 0, end: int | None = None) -> Tensor:
        """Rows first to end of the projection of tokens (T, dim) → (T, parts, heads, head_dim)."""
        weight, bias = self.qkv.weight[first:end], self.qkv.bias
        y = linear(x.to(weight.dtype), weight, None if bias is None else bias[first:end])
        return y.unflatten(-1, (-1, self.heads, x.shape[-1] // self.heads))

    def _listen_in_turn(self, x: Tensor, layout: Layout) -> Tensor:
        """Image 0 listens first; what it has become is what image 1 then hears."""
        sides = [side.to(x.device) for side in layout.sides]
        states, dim = [x[side] for side in sides], x.shape[-1]
        for side in (0, 1):
            query = self._project(states[side], 0, dim)[:, 0]
            key, value = self._project(states[1 - side], -2 * dim).unbind(1)
            counts = [(pair[side], pair[1 - side]) for pair in layout.counts]
            message = attend_to(query, key, value, counts, self.attention)
            states[side] = self.ffn(states[side], self.message_norm(self.out(message)))
        return torch.cat(states)[torch.cat(sides).argsort()]


class Layer(nn.Module):
    """One self- and one cross-attention block."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.self_block = SelfBlock(config)
        self.cross_block = CrossBlock(config)

    def forward(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim), float32 between blocks."""
        return self.cross_block(self.self_block(x, rotations, layout), layout)

    def prepare(self, dtype: torch.dtype) -> None:
        """From now on run without gradients in `dtype`, with the weights as they are now."""
        self.self_block.prepare(dtype)
        self.cross_block.prepare(dtype)
