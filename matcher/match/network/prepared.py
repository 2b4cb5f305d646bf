"""Blocks made ready for inference: maps that follow each other are one, and steps run on rows in the cache.

What the weights say does not change: the output projection of a message is multiplied into the map that
widens it, batch normalisation into the same map, channels that turn together lie side by side, and the
feed-forward part goes through a processor's cache some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.kernels import FeedForwardSteps, feed_forward_compiled, have_kernels, turn_compiled

# Channels of rows that one thread takes at a time; what goes into and comes out of a map fits its cache.
CACHED_ROWS = 2**18
# A processor's matrix products in half precision are compiled anew for every number of rows, which takes as
# long as a dozen of them: they only see multiples of this.
ROW_STEP = 64


def rows_at_once(rows: int, channels: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` that stay in the caches of all threads; all rows at once on other devices.

    Their lengths are multiples of `ROW_STEP` if there are as many rows; for that the last one reaches back
    over rows of the one before, which are computed twice.
    """
    step = rows if device.type != "cpu" else CACHED_ROWS * torch.get_num_threads() // channels
    step = max(step // ROW_STEP, 1) * ROW_STEP if device.type == "cpu" else max(rows, 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        even = start + (stop - start) // ROW_STEP * ROW_STEP if device.type == "cpu" else stop
        if even > start:
            yield slice(start, even)
        if even < stop:
            yield slice(max(stop - ROW_STEP, 0), stop)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, inputs) weightᵀ + bias → (T, outputs), on a processor in half precision `rows_at_once`."""
    if x.device.type != "cpu" or x.dtype == torch.float32 or not len(x) % ROW_STEP:
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    for rows in rows_at_once(len(x), max(weight.shape), x.device):
        out[rows] = F.linear(x[rows], weight, bias)
    return out


class PreparedFeedForward:
    """x + narrow(activate(norm(widen([x | out(message)])))) of a block, in the precision of its weights."""

    def __init__(
        self,
        out: nn.Linear,
        widen: nn.Linear,
        norm: nn.Module,
        narrow: nn.Linear,
        gelu: bool,
        dtype: torch.dtype,
    ) -> None:
        dim = out.in_features
        weight, message = widen.weight.double(), out.weight.double()
        bias = weight.new_zeros(len(weight)) if widen.bias is None else widen.bias.double()
        if out.bias is not None:
            bias = bias + weight[:, dim:] @ out.bias.double()
        weight = torch.cat([weight[:, :dim], weight[:, dim:] @ message], dim=1)
        if isinstance(norm, nn.BatchNorm1d):
            gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
            weight, bias = gain[:, None] * weight, gain * (bias - norm.running_mean) + norm.bias
        self.norm = norm if isinstance(norm, nn.LayerNorm) else None
        self.weight, self.bias, self.narrow, self.gelu = weight.to(dtype), bias.to(dtype), narrow, gelu
        self.steps: FeedForwardSteps | None = None
        if self.norm is not None and gelu:
            last = bias.new_zeros(dim) if narrow.bias is None else narrow.bias
            vectors = [x.detach().float() for x in (bias, norm.weight, norm.bias)]
            maps = self.weight, narrow.weight.detach().to(dtype)
            self.steps = FeedForwardSteps(*maps, *vectors, norm.eps, last.detach().float())

    def __call__(self, x: Tensor, joint: Tensor) -> Tensor:
        """Tokens (T, dim) in float32 and [x | message] (T, 2·dim) → tokens (T, dim)."""
        out = torch.empty_like(x)
        for rows in rows_at_once(len(x), joint.shape[1], x.device):
            if (
                self.steps is not None
                and have_kernels(joint)
                and x.dtype == torch.float32
                and x.is_contiguous()
            ):
                feed_forward_compiled(x[rows], joint[rows], self.steps, out[rows])
                continue
            hidden = F.linear(joint[rows], self.weight, self.bias)
            if self.norm is not None:
                hidden = self.norm(hidden)
            update = self.narrow(torch.ops.aten.gelu_(hidden) if self.gelu else hidden.relu_())
            if update.dtype == x.dtype:
                torch.add(x[rows], update, out=out[rows])
            else:  # a sum of two precisions takes twice the time of both steps
                out[rows].copy_(update).add_(x[rows])
        return out


class TurnedProjection:
    """Queries, keys and values of tokens, queries and keys turned by their positions, if any, in float32."""

    def __init__(self, qkv: nn.Linear, heads: int, dtype: torch.dtype) -> None:
        dim = qkv.in_features
        # Channel c of the first half of a head turns with channel c of its second half: side by side they are
        # one complex number. Queries and keys are permuted alike, so their products stay.
        order = torch.arange(2 * dim).view(2 * heads, 2, -1).transpose(1, 2).flatten()
        order = torch.cat([order, torch.arange(2 * dim, 3 * dim)]).to(qkv.weight.device)
        bias = qkv.weight.new_zeros(len(order)) if qkv.bias is None else qkv.bias
        self.heads, self.turned = heads, 2 * dim  # channels that turn
        self.weight, self.bias = qkv.weight[order].to(dtype), bias[order].to(dtype)
        self.exact_bias = bias[order].detach().float()

    def __call__(self, x: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (T, dim), rotations (T, 2, head_dim/2) or none → q, k, v (T, heads, head_dim)."""
        if rotations is not None and have_kernels(x):
            qkv = linear(x, self.weight)
            turn_compiled(qkv, self.exact_bias, rotations, 2 * self.heads)
        else:
            qkv = linear(x, self.weight, self.bias)
            if rotations is not None and len(x):
                self._turn(qkv[:, : self.turned], torch.complex(*rotations.unbind(1)).unsqueeze(1))
        return qkv.unflatten(1, (3, self.heads, -1)).unbind(1)

    def _turn(self, qk: Tensor, rotations: Tensor) -> None:
        """Turn queries and keys (T, 2·dim) in place by rotations (T, 1, head_dim/2), complex."""
        if qk.dtype == torch.float32:
            _complex(qk, 2 * self.heads).mul_(rotations)
            return
        step = max(64, CACHED_ROWS // self.turned)
        exact = qk.new_empty(min(step, len(qk)), self.turned, dtype=torch.float32)
        for part, angles in zip(qk.split(step), rotations.split(step), strict=True):
            turned = exact[: len(part)].copy_(part)
            _complex(turned, 2 * self.heads).mul_(angles)
            part.copy_(turned)


def _complex(x: Tensor, heads: int) -> Tensor:
    """x (T, channels) in float32 as complex numbers (T, heads, channels of a head / 2), the same memory."""
    return torch.view_as_complex(x.unflatten(1, (heads, -1, 2)))


def joined(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """An empty (T, 2·dim) whose first half is tokens (T, dim), and its two halves."""
    joint = x.new_empty(len(x), 2 * x.shape[1], dtype=dtype)
    first, second = joint.chunk(2, dim=1)
    return joint, first.copy_(x), second
