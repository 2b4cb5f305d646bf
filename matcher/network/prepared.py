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

# Channels of rows that one thread takes at a time; what goes into and comes out of a map fits its cache.
CACHED_ROWS = 2**18


def rows_at_once(rows: int, channels: int, device: torch.device) -> Iterator[slice]:
    """Slices of `rows` that stay in the caches of all threads; all rows at once on other devices."""
    step = rows if device.type != "cpu" else max(64, CACHED_ROWS * torch.get_num_threads() // channels)
    for start in range(0, rows, max(step, 1)):
        yield slice(start, min(start + step, rows))


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

    def __call__(self, x: Tensor, joint: Tensor) -> Tensor:
        """Tokens (T, dim) in float32 and [x | message] (T, 2·dim) → tokens (T, dim)."""
        out = torch.empty_like(x)
        for rows in rows_at_once(len(x), joint.shape[1], x.device):
            hidden = F.linear(joint[rows], self.weight, self.bias)
            if self.norm is not None:
                hidden = self.norm(hidden)
            hidden = torch.ops.aten.gelu_(hidden) if self.gelu else hidden.relu_()
            # Converted first: a sum of two precisions takes twice the time of both steps.
            out[rows].copy_(self.narrow(hidden)).add_(x[rows])
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
        self.heads, channels = heads, 2 * dim
        self.turned, self.turned_bias = (x[order][:channels].to(dtype) for x in (qkv.weight, bias))
        self.value, self.value_bias = (x[channels:].to(dtype) for x in (qkv.weight, bias))

    def __call__(self, x: Tensor, turns: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (T, dim) in the weights' precision, turns (T, 2, head_dim/2) → (T, heads, head_dim) each."""
        if turns is None or not len(x):
            qk = F.linear(x, self.turned, self.turned_bias)
        else:
            qk = self._turn(x, torch.complex(*turns.unbind(1)).unsqueeze(1))
        v = F.linear(x, self.value, self.value_bias)
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (*qk.chunk(2, dim=1), v))
        return q, k, v

    def _turn(self, x: Tensor, turns: Tensor) -> Tensor:
        """Tokens (T, dim), turns (T, 1, head_dim/2) complex → turned queries and keys (T, 2·dim)."""
        qk = x.new_empty(len(x), len(self.turned))
        steps = list(rows_at_once(len(x), len(self.turned), x.device))
        exact = x.new_empty(steps[0].stop, len(self.turned), dtype=torch.float32)
        for rows in steps:
            turned = exact[: rows.stop - rows.start].copy_(F.linear(x[rows], self.turned, self.turned_bias))
            torch.view_as_complex(turned.view(len(turned), 2 * self.heads, -1, 2)).mul_(turns[rows])
            qk[rows] = turned
        return qk


def joined(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """An empty (T, 2·dim) whose first half is tokens (T, dim), and its two halves."""
    joint = x.new_empty(len(x), 2 * x.shape[1], dtype=dtype)
    first, second = joint.chunk(2, dim=1)
    return joint, first.copy_(x), second
