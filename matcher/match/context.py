"""Context: alternating self- and cross-attention over packed tokens.

Every block is x + ffn([x | message]), the form that SuperGlue, LightGlue and LoFTR share; `ContextConfig`
says where they differ.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import Kernel, MultiHeadAttention
from matcher.config import ContextConfig
from matcher.kernels.calls import (
    CACHED_ROWS,
    FeedForwardSteps,
    feed_forward_compiled,
    have_kernels,
    have_turns,
    linear,
    linear_at_once,
    rows_at_once,
    turn_compiled,
)
from matcher.match.blocks import Layout, attend, attend_to, image_sums, scaled_queries, scaled_queries_to
from matcher.match.position import Side, rotate

# --- context: Context: alternating self- and cross-attention over packed tokens.

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


# --- tokens: The points of a batch of pairs as one packed list, and which pair and image each is of.

TOGETHER = 1024  # tokens of a batch that run at once on a CPU; one pair may have more


@dataclass(frozen=True, eq=False)
class Tokens:
    """The live points of the pairs still running, packed."""

    x: Tensor  # (T, dim)
    rotations: Tensor | None  # (T, 2, head_dim/2) cosines and sines that turn queries and keys
    index: Tensor  # (T,) int64, the input point each token is
    layout: Layout
    pairs: tuple[int, ...]  # which input pair each entry of the layout is
    positions: Tensor  # (T, 2) normalised positions
    predicted: Tensor | None = None  # (T, 2) positions of partners as the last layer predicts them, if guided

    def keep(self, keep: Tensor, pairs: list[int]) -> Tokens:
        """Only the tokens marked in `keep` (T,) bool and only the entries `pairs` of the layout."""
        lengths = [int(n) for n in image_sums(keep, self.layout)]
        counts = tuple((lengths[2 * p], lengths[2 * p + 1]) for p in pairs)
        alive = torch.zeros_like(keep)
        for p in pairs:
            alive[self.layout.starts[2 * p] : self.layout.starts[2 * p + 2]] = True
        chosen = (keep & alive).nonzero().squeeze(1)
        return replace(
            self,
            x=self.x[chosen],
            rotations=None if self.rotations is None else self.rotations[chosen],
            index=self.index[chosen],
            positions=self.positions[chosen],
            predicted=None if self.predicted is None else self.predicted[chosen],
            layout=Layout(counts),
            pairs=tuple(self.pairs[p] for p in pairs),
        )


def split_sides(tokens: Tokens) -> list[tuple[Side, Side]]:
    """The two images of every pair."""
    columns = [
        tokens.layout.split(x) for x in (tokens.x, tokens.positions, tokens.predicted) if x is not None
    ]
    return [tuple(Side(*side) for side in zip(*pair, strict=True)) for pair in zip(*columns, strict=True)]


def groups(tokens: Tokens) -> Iterator[Tokens]:
    """Pairs that run together: on a CPU as many as its caches and a few allocations hold, else all.

    Large batches gain nothing there, and memory that is touched for the first time costs more than they save.
    """
    counts = [n + m for n, m in tokens.layout.counts]
    if tokens.x.device.type != "cpu" or sum(counts) <= TOGETHER or len(counts) < 2:
        yield tokens
        return
    everything = torch.ones(len(tokens.x), dtype=torch.bool)
    group: list[int] = []
    for entry, count in enumerate(counts):
        if group and sum(counts[e] for e in group) + count > TOGETHER:
            yield tokens.keep(everything, group)
            group = []
        group.append(entry)
    yield tokens.keep(everything, group)


# --- fused: Blocks fused for inference: maps that follow each other are one, and steps run on rows in the
# cache.


def _exact(parameter: Tensor) -> Tensor:
    """float64; on the CPU if it is on Metal, which has none."""
    return (parameter.cpu() if parameter.device.type == "mps" else parameter).double()


class FusedFeedForward(nn.Module):
    """x + narrow(activate(norm(widen([x | out(message)])))) of a block, in one precision."""

    def __init__(self, attention: MultiHeadAttention, ffn: FeedForward, dtype: torch.dtype) -> None:
        super().__init__()
        out, widen, narrow = attention.out, ffn.widen, ffn.narrow
        dim, self._device = out.in_features, out.weight.device
        weight, message = _exact(widen.weight), _exact(out.weight)
        bias = weight.new_zeros(len(weight)) if widen.bias is None else _exact(widen.bias)
        if out.bias is not None:
            bias = bias + weight[:, dim:] @ _exact(out.bias)
        weight = torch.cat([weight[:, :dim], weight[:, dim:] @ message], dim=1)
        if isinstance(ffn.norm, nn.BatchNorm1d):
            norm = ffn.norm
            gain = _exact(norm.weight) / (_exact(norm.running_var) + norm.eps).sqrt()
            weight = gain[:, None] * weight
            bias = gain * (bias - _exact(norm.running_mean)) + _exact(norm.bias)
        self.gelu = isinstance(ffn.activate, nn.GELU)
        self.epsilon = ffn.norm.eps if isinstance(ffn.norm, nn.LayerNorm) else None
        last = bias.new_zeros(dim) if narrow.bias is None else narrow.bias
        self._keep(dtype, weight=weight, bias=bias, narrow=narrow.weight, last_bias=last)
        exact = {"exact_bias": bias, "exact_last_bias": last}
        if self.epsilon is not None:
            self._keep(dtype, gain=ffn.norm.weight, shift=ffn.norm.bias)
            exact |= {"exact_gain": ffn.norm.weight, "exact_shift": ffn.norm.bias}
        self._keep(torch.float32, **exact)

    def _keep(self, dtype: torch.dtype, **values: Tensor) -> None:
        for name, value in values.items():
            self.register_buffer(name, value.detach().to(self._device, dtype, copy=True))

    def forward(self, x: Tensor, joint: Tensor) -> Tensor:
        """Tokens (T, dim) in float32 and [x | message] (T, 2·dim) → tokens (T, dim)."""
        out = torch.empty_like(x)
        compiled = self.gelu and self.epsilon is not None and have_kernels(joint)
        compiled = compiled and x.dtype == torch.float32 and x.is_contiguous()
        for rows in rows_at_once(len(x), joint.shape[1], x.device):
            if compiled:
                feed_forward_compiled(x[rows], joint[rows], self._steps(), out[rows])
                continue
            hidden = linear_at_once(joint[rows], self.weight, self.bias)
            if self.epsilon is not None:
                hidden = F.layer_norm(hidden, hidden.shape[-1:], self.gain, self.shift, self.epsilon)
            hidden = torch.ops.aten.gelu_(hidden) if self.gelu else hidden.relu_()
            update = linear_at_once(hidden, self.narrow, self.last_bias)
            if update.dtype == x.dtype:
                torch.add(x[rows], update, out=out[rows])
            else:  # a sum of two precisions takes twice the time of both steps
                out[rows].copy_(update).add_(x[rows])
        return out

    def _steps(self) -> FeedForwardSteps:
        vectors = self.exact_bias, self.exact_gain, self.exact_shift
        return FeedForwardSteps(self.weight, self.narrow, *vectors, self.epsilon, self.exact_last_bias)


class FusedSelfBlock(nn.Module):
    """A `SelfBlock` of softmax or linear attention, in one precision, without gradients."""

    def __init__(self, block: SelfBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.score, qkv = block.attention.heads, block.attention.score, block.attention.qkv
        self.scale_above = block.scale_above
        dim = qkv.in_features
        # Channel c of the first half of a head rotates with channel c of its second half: side by side they
        # are one complex number. Queries and keys are permuted equally, so their products stay.
        order = torch.arange(2 * dim).view(2 * self.heads, 2, -1).transpose(1, 2).flatten()
        order = torch.cat([order, torch.arange(2 * dim, 3 * dim)]).to(qkv.weight.device)
        bias = qkv.weight.new_zeros(len(order)) if qkv.bias is None else qkv.bias
        self.rotated = 2 * dim  # channels of queries and keys
        self.register_buffer("weight", qkv.weight.detach()[order].to(dtype))
        self.register_buffer("bias", bias.detach()[order].to(dtype))
        self.register_buffer("exact_bias", bias.detach()[order].float())
        self.ffn = FusedFeedForward(block.attention, block.ffn, dtype)

    def forward(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> Tensor:
        """Tokens (T, dim), rotations (T, 2, head_dim/2) or none → tokens (T, dim)."""
        joint, tokens, message = joined(x, self.weight.dtype)
        message.copy_(attend(*self._project(tokens, rotations, layout), layout, self.score, cross=False))
        return self.ffn(x, joint)

    def queries_keys(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> QueriesKeys:
        """Of tokens (T, dim), their channels in one and the same order."""
        return self._project(x.to(self.weight.dtype), rotations, layout)[:2]

    def _project(self, x: Tensor, rotations: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (T, dim), rotations (T, 2, head_dim/2) or none → q, k, v (T, heads, head_dim)."""
        if rotations is not None and have_turns(x):
            qkv = linear(x, self.weight)
            turn_compiled(qkv, self.exact_bias, rotations, 2 * self.heads)
        else:
            qkv = linear(x, self.weight, self.bias)
            if rotations is not None and len(x):
                self._rotate(qkv[:, : self.rotated], torch.complex(*rotations.unbind(1)).unsqueeze(1))
        q, k, v = qkv.unflatten(1, (3, self.heads, -1)).unbind(1)
        return scaled_queries(q, layout, self.scale_above, cross=False), k, v

    def _rotate(self, qk: Tensor, rotations: Tensor) -> None:
        """Rotate queries and keys (T, 2·dim) in place by rotations (T, 1, head_dim/2), complex."""
        if qk.dtype == torch.float32:
            _complex(qk, 2 * self.heads).mul_(rotations)
            return
        step = max(64, CACHED_ROWS // self.rotated) if qk.device.type == "cpu" else len(qk)
        exact = qk.new_empty(min(step, len(qk)), self.rotated, dtype=torch.float32)
        for part, angles in zip(qk.split(step), rotations.split(step), strict=True):
            rotated = exact[: len(part)].copy_(part)
            _complex(rotated, 2 * self.heads).mul_(angles)
            part.copy_(rotated)


class FusedCrossBlock(nn.Module):
    """A `CrossBlock` whose images attend at once, in one precision, without gradients."""

    def __init__(self, block: CrossBlock, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.score, qkv = block.attention.heads, block.attention.score, block.attention.qkv
        self.scale_above = block.scale_above
        self.register_buffer("weight", qkv.weight.detach().to(dtype, copy=True))
        self.register_buffer("bias", None if qkv.bias is None else qkv.bias.detach().to(dtype, copy=True))
        self.ffn = FusedFeedForward(block.attention, block.ffn, dtype)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """Tokens (T, dim) → tokens (T, dim)."""
        joint, tokens, message = joined(x, self.weight.dtype)
        message.copy_(attend(*self._project(tokens, layout), layout, self.score, cross=True))
        return self.ffn(x, joint)

    def queries_keys(self, x: Tensor, layout: Layout) -> QueriesKeys:
        """Of tokens (T, dim)."""
        return self._project(x.to(self.weight.dtype), layout)[:2]

    def _project(self, x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        y = linear(x, self.weight, self.bias)
        parts = y.unflatten(-1, (-1, self.heads, x.shape[-1] // self.heads))
        q = scaled_queries(parts[:, 0], layout, self.scale_above, cross=True)
        return q, parts[:, -2], parts[:, -1]


def fuse_layer(layer: Layer, dtype: torch.dtype) -> Layer:
    """A layer for inference in `dtype`, without gradients, that shares nothing with the trained one.

    Blocks whose form does not allow it are copied as they are: those that normalise the message (LoFTR), and
    those with learned score functions, which the order of channels matters to.
    """
    with torch.no_grad():
        own, cross = (copy.deepcopy(block).eval() for block in (layer.self_block, layer.cross_block))
        if _plain(own) and not isinstance(own.attention.score, nn.Module):
            own = FusedSelfBlock(own, dtype)
        if _plain(cross) and not isinstance(cross.attention.score, nn.Module) and not cross.sequential:
            cross = FusedCrossBlock(cross, dtype)
    return Layer(own, cross).requires_grad_(False).eval()


def _plain(block: SelfBlock | CrossBlock) -> bool:
    return isinstance(block.message_norm, nn.Identity)


def _complex(x: Tensor, heads: int) -> Tensor:
    """x (T, channels) in float32 as complex numbers (T, heads, channels of a head / 2), the same memory."""
    return torch.view_as_complex(x.unflatten(1, (heads, -1, 2)))


def joined(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """An empty (T, 2·dim) whose first half is tokens (T, dim), and its two halves."""
    joint = x.new_empty(len(x), 2 * x.shape[1], dtype=dtype)
    first, second = joint.chunk(2, dim=1)
    return joint, first.copy_(x), second
