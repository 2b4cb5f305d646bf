"""The layers of the network: self-attention in each image, then cross-attention between the two.

Every block is x + ffn([x | message]), the form that SuperGlue (Sarlin et al. 2020), LightGlue (Lindenberger
et al. 2023) and LoFTR (Sun et al. 2021) share; `ContextConfig` says where they differ. The points of both
images of a pair are one sequence, (B, N + M, dim): N points of image 0, then M of image 1. Linear maps run on
all of them at once, attention image by image.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher import attention
from matcher.config import ContextConfig
from matcher.kernels.calls import Span, attend
from matcher.match.position import rotate
from matcher.types import converted


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of the channels of x (…, C) over all points."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, C)."""
        return super().forward(x.flatten(0, -2)).view_as(x)


class FeedForward(nn.Module):
    """x + ffn([x | message]); what comes last starts at zero, so an untrained block changes nothing."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        wide = 2 * config.dim
        self.widen = nn.Linear(wide, wide, bias=config.bias)
        self.norm = {"layer": nn.LayerNorm, "batch": TokenBatchNorm, "output": nn.Identity}[config.norm](wide)
        self.activate = nn.GELU() if config.activation == "gelu" else nn.ReLU()
        self.narrow = nn.Linear(wide, config.dim, bias=config.bias)
        self.output_norm = nn.LayerNorm(config.dim) if config.norm == "output" else nn.Identity()
        for parameter in (self.output_norm if config.norm == "output" else self.narrow).parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, message: Tensor, given: Tensor) -> Tensor:
        """Tokens (…, dim), their messages (…, dim), and the tokens as attention was given them → tokens
        (…, dim), in the precision of the tokens."""
        hidden = attention.mapped(self.widen, torch.cat([converted(given, message.dtype), message], dim=-1))
        hidden = self.activate(self.norm(hidden))
        return x + self.output_norm(attention.mapped(self.narrow, hidden))


class Block(nn.Module):
    """What self- and cross-attention share."""

    def __init__(self, config: ContextConfig, *, shared_qk: bool = False) -> None:
        super().__init__()
        how = dict(bias=config.bias, shared_qk=shared_qk)
        self.attention = attention.MultiHeadAttention(config.dim, config.heads, config.attention, **how)
        self.scale_above = config.scale_logits_above
        self.message_norm = nn.LayerNorm(config.dim) if config.norm == "output" else nn.Identity()
        self.ffn = FeedForward(config)

    def _messages(
        self,
        given: Tensor,
        counts: tuple[int, int],
        mask: Tensor | None,
        *,
        across: bool,
        rotations: Tensor | None = None,
    ) -> Tensor:
        """Tokens of both images (B, T, dim) → messages (B, T, dim).

        `counts` are points of image 0 and of image 1; queries beyond them count with image 1 and are no
        keys, nor are those outside `mask` (B, T). Each image attends to itself or `across`. `rotations`
        (B, T, 2, d) turn queries and keys.
        """
        (n, m), parts = counts, self.attention.project(given)
        plain = mask is None and 0 not in counts and self.attention.score is attention.scaled_dot_product
        if plain and attention.by_kernel(parts):  # one call attends in both images
            queries, keys = ((0, n), (n, parts.shape[1] - n)), ((0, n), (n, m))
            asked = zip(queries, reversed(keys) if across else keys, strict=True)
            spans = [Span(*own, *other, self._gain_of(other[1])) for own, other in asked]
            return attend(*_queries_keys_values(parts), spans=spans, turns=rotations)
        q, k, v = (each.transpose(1, 2) for each in _queries_keys_values(parts, rotations))
        queries = q.split([n, q.shape[2] - n], dim=2)
        parts = [n, m] if n + m == q.shape[2] else [n, m, q.shape[2] - n - m]
        keys, values = k.split(parts, dim=2)[:2], v.split(parts, dim=2)[:2]
        masks = (None, None) if mask is None else mask.split(parts, dim=1)[:2]
        sources = (1, 0) if across else (0, 1)
        found = [self._attend(queries[side], keys[s], values[s], masks[s]) for side, s in enumerate(sources)]
        return torch.cat([message.transpose(1, 2) for message in found], dim=1).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, heads, N, d), (B, heads, M, d) twice, mask (B, M) of the M → message (B, heads, N, d)."""
        if not q.shape[2] or not k.shape[2]:  # a point that has nothing to attend to gets no message
            return torch.zeros_like(q)
        score, gain = self.attention.score, self._gain(k, mask)
        q = q if isinstance(gain, float) and gain == 1 else q * gain
        if mask is None:
            return score(q, k, v)
        if score is attention.linear_attention:
            return score(q, k, v, mask[:, None])
        # Finite, so that rows without any valid key are no NaN; their message is 0, because values are.
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -1e4)[:, None, None]
        v = v.masked_fill(~mask[:, None, :, None], 0.0)
        if score is attention.scaled_dot_product:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return score(q, k, v, bias)

    def _gain(self, k: Tensor, mask: Tensor | None = None) -> float | Tensor:
        """By how much logits of keys (B, heads, M, d) are multiplied, with those of `mask` (B, M)."""
        traced = torch.compiler.is_compiling()  # when nobody knows how many keys there will be
        if not traced and (mask is None or self.scale_above is None or k.shape[2] <= self.scale_above):
            return self._gain_of(k.shape[2])
        if self.scale_above is None:
            return 1.0
        counts = k.new_ones(len(k), k.shape[2]) if mask is None else mask
        gain = counts.sum(1).clamp_min(self.scale_above).log() / math.log(self.scale_above)
        return gain[:, None, None, None].to(k.dtype)

    def _gain_of(self, keys: int) -> float:
        """log n / log k for n keys, if these are more than k (`ContextConfig.scale_logits_above`)."""
        above = self.scale_above
        return 1.0 if above is None or keys <= above else math.log(keys) / math.log(above)

    def _projected(self, x: Tensor, rotations: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, heads, T, head_dim)."""
        parts = _queries_keys_values(self.attention.project(x), rotations)
        return tuple(each.transpose(1, 2) for each in parts)

    def _updated(self, x: Tensor, given: Tensor, message: Tensor) -> Tensor:
        return self.ffn(x, self.message_norm(attention.mapped(self.attention.out, message)), given)


class SelfBlock(Block):
    """Every point attends to its own image; positions may rotate queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__(config)
        # Constant queries and keys, rotated by positions: at first a point attends to its neighbours.
        width, qkv = config.dim // config.heads, self.attention.qkv
        reach = torch.linspace(4.0, 12.0, config.heads)  # peak of the logits, head by head
        constant = (reach / width**0.5).sqrt().repeat_interleave(width)
        with torch.no_grad():
            if config.bias:
                qkv.weight[: 2 * config.dim] *= 0.5
                qkv.bias[: 2 * config.dim] = constant.repeat(2)
            for weight in (qkv.weight[2 * config.dim :], self.attention.out.weight):
                nn.init.orthogonal_(weight)  # messages keep the norm of the values

    def forward(
        self, x: Tensor, counts: tuple[int, int], rotations: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Tokens (B, T, dim), rotations (B, T, 2, head_dim), `counts` and `mask` of the keys → tokens."""
        given = converted(x, self.attention.qkv.weight.dtype)
        messages = self._messages(given, counts, mask, across=False, rotations=rotations)
        return self._updated(x, given, messages)

    def queries_keys(self, x: Tensor, n: int, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """(heads, T, head_dim) each, of one pair: whose products the attention weights are made of."""
        q, k, _ = self._projected(x, rotations)
        parts = [q[:, :, at] * self._gain(k[:, :, at]) for at in (slice(None, n), slice(n, None))]
        return torch.cat(parts, dim=2)[0], k[0]


def _queries_keys_values(parts: Tensor, rotations: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Projected tokens (B, T, 2 or 3, heads, head_dim) → queries, keys, values (B, T, heads, head_dim)."""
    if rotations is not None:
        return *rotate(parts[:, :, :2], rotations).unbind(2), parts[:, :, 2]
    apart = parts.unbind(2)
    return apart[0], apart[-2], apart[-1]


class CrossBlock(Block):
    """Every point attends to the other image; queries and keys may be one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__(config, shared_qk=config.shared_qk)
        self.sequential = config.sequential_cross
        # At first a point attends to the points of the other image that look like it.
        gain, qkv = (20 / (config.dim / config.heads) ** 0.5) ** 0.5, self.attention.qkv
        with torch.no_grad():
            nn.init.orthogonal_(qkv.weight[: config.dim], gain=gain)
            if not config.shared_qk:
                qkv.weight[config.dim : 2 * config.dim] = qkv.weight[: config.dim]
            if config.bias:
                nn.init.zeros_(qkv.bias)
            for weight in (qkv.weight[-config.dim :], self.attention.out.weight):
                nn.init.orthogonal_(weight)

    def forward(self, x: Tensor, counts: tuple[int, int], mask: Tensor | None) -> Tensor:
        """Tokens (B, T, dim), `counts` and `mask` of the keys → tokens (B, T, dim)."""
        if self.sequential:  # image 0 attends first; image 1 then attends to its updated points (LoFTR)
            (x0, x1), masks = x.split(counts, dim=1), (None, None)
            if mask is not None:
                masks = mask.split(counts, dim=1)
            x0 = self._from(x0, x1, masks[1])
            return torch.cat([x0, self._from(x1, x0, masks[0])], dim=1)
        given = converted(x, self.attention.qkv.weight.dtype)
        return self._updated(x, given, self._messages(given, counts, mask, across=True))

    def _from(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens (B, N, dim) after they attended to those of a source (B, M, dim)."""
        _, k, v = self._projected(source)
        message = self._attend(self._projected(x)[0], k, v, mask)
        return self._updated(x, x, attention.merge_heads(message))

    def queries_keys(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """(heads, T, head_dim) each, of one pair: whose products the attention weights are made of."""
        q, k, _ = self._projected(x)
        if self.sequential:  # the keys of image 0 are those of its updated points
            updated = self(x, (n, x.shape[1] - n), None)
            k = torch.cat([self._projected(updated[:, :n])[1], k[:, :, n:]], dim=2)
        q0, q1 = q[:, :, :n] * self._gain(k[:, :, n:]), q[:, :, n:] * self._gain(k[:, :, :n])
        return torch.cat([q0, q1], dim=2)[0], k[0]


class Layer(nn.Module):
    """A self- and a cross-attention block."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.self_block, self.cross_block = SelfBlock(config), CrossBlock(config)

    def forward(
        self, x: Tensor, n: int, rotations: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, N+M, dim), those of image 0 first, → (B, N+M, dim); what padding holds is of no meaning.

        `rotations` (B, N+M, 2, head_dim) turn queries and keys, if positions do so; all points are valid
        without `mask` (B, N+M).
        """
        total, missing = x.shape[1], 0
        if not (torch.is_grad_enabled() or self.cross_block.sequential):
            missing = attention.missing_rows(total, self.self_block.ffn.narrow.weight)
        if missing:  # padded once, as each map would pad; these rows attend, and nothing attends to them
            x = F.pad(x, (0, 0, 0, missing))
            rotations = None if rotations is None else F.pad(rotations, (0, 0, 0, 0, 0, missing))
            mask = None if mask is None else F.pad(mask, (0, missing))
        counts = (n, total - n)
        x = self.cross_block(self.self_block(x, counts, rotations, mask), counts, mask)
        return x[:, :total] if missing else x

    def queries_keys(
        self, x: Tensor, n: int, rotations: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Queries and keys (heads, T, head_dim) of self- and of cross-attention, for one pair."""
        own = self.self_block.queries_keys(x, n, rotations)
        after = self.self_block(x, (n, x.shape[1] - n), rotations, None)
        return own, self.cross_block.queries_keys(after, n)


@torch.no_grad()
def folded(layer: Layer, dtype: torch.dtype) -> Layer:
    """A frozen copy for inference in `dtype`; linear maps that follow each other have become one.

    The output projection and a batch normalisation become part of the map that widens, where they can.
    """
    layer, device = copy.deepcopy(layer).eval().requires_grad_(False), next(layer.parameters()).device

    def frozen(value: Tensor) -> nn.Parameter:
        return nn.Parameter(value.to(device, torch.float32), requires_grad=False)

    for block in (layer.self_block, layer.cross_block):
        out, ffn = block.attention.out, block.ffn
        if isinstance(block.message_norm, nn.Identity):
            dim = out.in_features
            # On the CPU, since Metal has no float64.
            values, widen = (copy.deepcopy(each).cpu().double() for each in (out, ffn.widen))
            weight, bias = widen.weight.clone(), widen.bias.clone() if widen.bias is not None else 0.0
            weight[:, dim:] = widen.weight[:, dim:] @ values.weight
            if values.bias is not None:
                bias = bias + widen.weight[:, dim:] @ values.bias
            if isinstance(ffn.norm, TokenBatchNorm):
                norm = copy.deepcopy(ffn.norm).cpu().double()
                gain = norm.weight / (norm.running_var + norm.eps).sqrt()
                weight, bias = gain[:, None] * weight, gain * (bias - norm.running_mean) + norm.bias
                ffn.norm = nn.Identity()
            ffn.widen.weight = frozen(weight)
            ffn.widen.bias = frozen(bias) if isinstance(bias, Tensor) else None
            block.attention.out = nn.Identity()
    return layer.to(dtype)
