"""Context: alternating self- and cross-attention over packed tokens.

Every block is x + ffn([x | message]), the form that SuperGlue, LightGlue and LoFTR share; `ContextConfig`
says where they differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from matcher.attention import Kernel, MultiHeadAttention
from matcher.config import ContextConfig
from matcher.match.network.packed import Layout, attend, attend_to, scaled_queries, scaled_queries_to
from matcher.match.network.position import rotate

QueriesKeys = tuple[Tensor, Tensor]  # (T, heads, head_dim) each


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
        """Tokens (T, dim) and their messages (T, dim) → tokens (T, dim)."""
        hidden = self.widen(torch.cat([x.to(message.dtype), message], dim=-1))
        return x + self.output_norm(self.narrow(self.activate(self.norm(hidden))))


def initialise_orthogonal(*weights: Tensor) -> None:
    """Orthogonal weights, so that messages keep the norm of the values."""
    for weight in weights:
        nn.init.orthogonal_(weight)


class SelfBlock(nn.Module):
    """Every point attends to its own image; positions may rotate queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(config.dim, config.heads, config.attention, bias=config.bias)
        self.scale_above = config.scale_logits_above
        self.message_norm = outer_norm(config)
        self.ffn = FeedForward(config)
        self._initialise_local(config)

    @torch.no_grad()
    def _initialise_local(self, config: ContextConfig) -> None:
        """Constant queries and keys, rotated by positions: at first a point attends to its neighbours."""
        width, qkv = config.dim // config.heads, self.attention.qkv
        reach = torch.linspace(4.0, 12.0, config.heads)  # peak of the logits, head by head
        constant = (reach / width**0.5).sqrt().repeat_interleave(width)
        if config.bias:
            qkv.weight[: 2 * config.dim] *= 0.5
            qkv.bias[: 2 * config.dim] = constant.repeat(2)
        initialise_orthogonal(qkv.weight[2 * config.dim :], self.attention.out.weight)

    def forward(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim), rotations (T, 2, head_dim/2) or none → tokens (T, dim)."""
        q, k, v = self._project(x, rotations, layout)
        message = attend(q, k, v, layout, self.attention.score, cross=False)
        return self.ffn(x, self.message_norm(self.attention.out(message)))

    @property
    def score(self) -> Kernel:
        """The score function."""
        return self.attention.score

    def queries_keys(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> QueriesKeys:
        """Of tokens (T, dim): whose products the attention weights are made of."""
        return self._project(x, rotations, layout)[:2]

    def _project(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.attention.project(x)  # (T, 3, heads, head_dim)
        qk, v = parts[:, :2].flatten(1, 2), parts[:, 2]
        q, k = (qk if rotations is None else rotate(qk, rotations)).chunk(2, dim=1)
        return scaled_queries(q, layout, self.scale_above, cross=False), k, v


class CrossBlock(nn.Module):
    """Every point attends to the other image; queries and keys may be one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.sequential, self.scale_above = config.sequential_cross, config.scale_logits_above
        self.attention = MultiHeadAttention(
            config.dim, config.heads, config.attention, bias=config.bias, shared_qk=config.shared_qk
        )
        self.message_norm = outer_norm(config)
        self.ffn = FeedForward(config)
        self._initialise_similar(config)

    @torch.no_grad()
    def _initialise_similar(self, config: ContextConfig) -> None:
        """At first a point attends to the points of the other image that look like it."""
        gain, qkv = (20 / (config.dim / config.heads) ** 0.5) ** 0.5, self.attention.qkv
        nn.init.orthogonal_(qkv.weight[: config.dim], gain=gain)
        if not config.shared_qk:
            qkv.weight[config.dim : 2 * config.dim] = qkv.weight[: config.dim]
        if config.bias:
            nn.init.zeros_(qkv.bias)
        initialise_orthogonal(qkv.weight[-config.dim :], self.attention.out.weight)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim)."""
        if self.sequential:
            return self._sequential(x, layout)
        q, k, v = self._project(x, layout)
        message = attend(q, k, v, layout, self.attention.score, cross=True)
        return self.ffn(x, self.message_norm(self.attention.out(message)))

    @property
    def score(self) -> Kernel:
        """The score function."""
        return self.attention.score

    def queries_keys(self, x: Tensor, layout: Layout) -> QueriesKeys:
        """Of tokens (T, dim): whose products the attention weights are made of."""
        q, k, _ = self._project(x, layout)
        if self.sequential:  # the keys of image 0 are those of its updated points
            first = layout.sides[0].to(x.device)
            k = k.index_copy(0, first, self.attention.project(self(x, layout)[first], -2)[:, 0])
        return q, k

    def _project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.attention.project(x)  # (T, 2 or 3, heads, head_dim)
        q = scaled_queries(parts[:, 0], layout, self.scale_above, cross=True)
        return q, parts[:, -2], parts[:, -1]

    def _sequential(self, x: Tensor, layout: Layout) -> Tensor:
        """Image 0 attends first; image 1 then attends to its updated points."""
        sides = [side.to(x.device) for side in layout.sides]
        states = [x[side] for side in sides]
        for side in (0, 1):
            query = self.attention.project(states[side], 0, 1)[:, 0]
            key, value = self.attention.project(states[1 - side], -2).unbind(1)
            counts = [(pair[side], pair[1 - side]) for pair in layout.counts]
            query = scaled_queries_to(query, counts, self.scale_above)
            message = attend_to(query, key, value, counts, self.attention.score)
            states[side] = self.ffn(states[side], self.message_norm(self.attention.out(message)))
        return torch.cat(states)[torch.cat(sides).argsort()]


class Layer(nn.Module):
    """A self- and a cross-attention block, as they are trained or fused for inference."""

    def __init__(self, self_block: nn.Module, cross_block: nn.Module) -> None:
        super().__init__()
        self.self_block, self.cross_block = self_block, cross_block

    def forward(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim), float32 between blocks."""
        return self.cross_block(self.self_block(x, rotations, layout), layout)

    def queries_keys(
        self, x: Tensor, rotations: Tensor | None, layout: Layout
    ) -> tuple[QueriesKeys, QueriesKeys]:
        """Queries and keys of self- and of cross-attention, for tokens (T, dim) that the layer takes."""
        middle = self.self_block(x, rotations, layout)
        own = self.self_block.queries_keys(x, rotations, layout)
        return own, self.cross_block.queries_keys(middle, layout)


def build_layer(config: ContextConfig) -> Layer:
    """An untrained layer."""
    return Layer(SelfBlock(config), CrossBlock(config))
