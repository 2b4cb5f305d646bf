"""Blocks fused for inference: maps that follow each other are one, and steps run on rows in the cache.

`fuse_layer` makes them from trained blocks; their numbers are copies, so what happens to the trained blocks
afterwards does not matter. The function computed does not change: the output projection of a message is
multiplied into the map that widens it, batch normalisation into the same map, channels that rotate together
lie side by side, and the feed-forward part goes through the CPU's cache some rows at a time.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.attention import MultiHeadAttention
from matcher.kernels.calls import (
    FeedForwardSteps,
    feed_forward_compiled,
    have_kernels,
    have_turns,
    turn_compiled,
)
from matcher.kernels.linear import CACHED_ROWS, linear, linear_at_once, rows_at_once
from matcher.match.network.context import CrossBlock, FeedForward, Layer, QueriesKeys, SelfBlock
from matcher.match.network.packed import Layout, attend, scaled_queries


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
