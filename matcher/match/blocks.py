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

from matcher.attention import MultiHeadAttention, linear_attention, mapped, merge_heads, scaled_dot_product
from matcher.config import ContextConfig
from matcher.match.position import rotate


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

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        """Tokens (…, dim) and their messages (…, dim) → tokens (…, dim), in the precision of the tokens."""
        hidden = mapped(self.widen, torch.cat([x.to(message.dtype), message], dim=-1))
        hidden = self.activate(self.norm(hidden))
        return self.output_norm(mapped(self.narrow, hidden)).to(x.dtype).add_(x)


class Block(nn.Module):
    """What self- and cross-attention share."""

    def __init__(self, config: ContextConfig, *, shared_qk: bool = False) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            config.dim, config.heads, config.attention, bias=config.bias, shared_qk=shared_qk
        )
        self.scale_above = config.scale_logits_above
        self.message_norm = nn.LayerNorm(config.dim) if config.norm == "output" else nn.Identity()
        self.ffn = FeedForward(config)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """(B, N, heads, head_dim), (B, M, heads, head_dim) twice, mask of the M → message (B, N, dim)."""
        if not q.shape[1] or not k.shape[1]:  # a point that has nothing to attend to gets no message
            return q.new_zeros(*q.shape[:2], q.shape[2] * q.shape[3])
        score = self.attention.score
        q, k, v = (x.transpose(1, 2) for x in (self._sharpened(q, k, mask), k, v))
        if mask is None:
            return merge_heads(score(q, k, v))
        if score is linear_attention:
            return merge_heads(score(q, k, v, mask[:, None]))
        # Finite, so that rows without any valid key are no NaN; their message is 0, because values are.
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -1e4)[:, None, None]
        v = v.masked_fill(~mask[:, None, :, None], 0.0)
        if score is scaled_dot_product:
            return merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
        return merge_heads(score(q, k, v, bias))

    def _sharpened(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Queries whose logits are multiplied by log n / log `scale_above` with n keys, if these are more.

        Softmax over more keys is flatter, and this undoes it (Chiang and Cholak 2022, "Overcoming a
        theoretical limitation of self-attention").
        """
        above = self.scale_above
        traced = torch.compiler.is_compiling()  # when nobody knows how many keys there will be
        if above is None or (not traced and k.shape[1] <= above):
            return q
        if mask is None and not traced:
            return q * (math.log(k.shape[1]) / math.log(above))
        counts = k.new_ones(k.shape[:2]) if mask is None else mask
        gain = counts.sum(1).clamp_min(above).log() / math.log(above)
        return q * gain[:, None, None, None].to(q.dtype)

    def _updated(self, x: Tensor, message: Tensor) -> Tensor:
        return self.ffn(x, self.message_norm(mapped(self.attention.out, message)))


class SelfBlock(Block):
    """Every point attends to its own image; positions may rotate queries and keys."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__(config)
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
        for weight in (qkv.weight[2 * config.dim :], self.attention.out.weight):
            nn.init.orthogonal_(weight)  # messages keep the norm of the values

    def forward(
        self, x: Tensor, n: int, rotations: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Tokens (B, N+M, dim), rotations (B, N+M, 2, head_dim), mask (B, N+M) → tokens (B, N+M, dim)."""
        q, k, v = self._rotated(x, rotations)
        masks = (None, None) if mask is None else (mask[:, :n], mask[:, n:])
        message0 = self._attend(q[:, :n], k[:, :n], v[:, :n], masks[0])
        message1 = self._attend(q[:, n:], k[:, n:], v[:, n:], masks[1])
        return self._updated(x, torch.cat([message0, message1], dim=1))

    def queries_keys(self, x: Tensor, n: int, rotations: Tensor | None) -> tuple[Tensor, Tensor]:
        """(T, heads, head_dim) each, of one pair: whose products the attention weights are made of."""
        q, k, _ = self._rotated(x, rotations)
        parts = [self._sharpened(q[:, at], k[:, at], None) for at in (slice(None, n), slice(n, None))]
        return torch.cat(parts, dim=1)[0], k[0]

    def _rotated(self, x: Tensor, rotations: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.attention.project(x)
        if rotations is None:
            return parts.unbind(2)
        qk = rotate(parts[:, :, :2], rotations[:, :, :, None, None])
        return qk[:, :, 0], qk[:, :, 1], parts[:, :, 2]


class CrossBlock(Block):
    """Every point attends to the other image; queries and keys may be one projection (LightGlue, eq. 5)."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__(config, shared_qk=config.shared_qk)
        self.sequential = config.sequential_cross
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
        for weight in (qkv.weight[-config.dim :], self.attention.out.weight):
            nn.init.orthogonal_(weight)

    def forward(self, x: Tensor, n: int, mask: Tensor | None = None) -> Tensor:
        """Tokens (B, N+M, dim), mask (B, N+M) → tokens (B, N+M, dim)."""
        masks = (None, None) if mask is None else (mask[:, :n], mask[:, n:])
        if self.sequential:  # image 0 attends first; image 1 then attends to its updated points (LoFTR)
            x0, x1 = x[:, :n], x[:, n:]
            x0 = self._from(x0, x1, masks[1])
            return torch.cat([x0, self._from(x1, x0, masks[0])], dim=1)
        parts = self.attention.project(x)
        q, k, v = parts[:, :, 0], parts[:, :, -2], parts[:, :, -1]
        message0 = self._attend(q[:, :n], k[:, n:], v[:, n:], masks[1])
        message1 = self._attend(q[:, n:], k[:, :n], v[:, :n], masks[0])
        return self._updated(x, torch.cat([message0, message1], dim=1))

    def _from(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        """Tokens (B, N, dim) after they attended to those of a source (B, M, dim)."""
        parts = self.attention.project(source)
        return self._updated(
            x, self._attend(self.attention.project(x)[:, :, 0], parts[:, :, -2], parts[:, :, -1], mask)
        )

    def queries_keys(self, x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """(T, heads, head_dim) each, of one pair: whose products the attention weights are made of."""
        parts = self.attention.project(x)
        q, k = parts[:, :, 0], parts[:, :, -2]
        if self.sequential:  # the keys of image 0 are those of its updated points
            k = torch.cat([self.attention.project(self(x, n)[:, :n])[:, :, -2], k[:, n:]], dim=1)
        q = torch.cat(
            [self._sharpened(q[:, :n], k[:, n:], None), self._sharpened(q[:, n:], k[:, :n], None)], 1
        )
        return q[0], k[0]


class Layer(nn.Module):
    """A self- and a cross-attention block."""

    def __init__(self, config: ContextConfig) -> None:
        super().__init__()
        self.self_block, self.cross_block = SelfBlock(config), CrossBlock(config)

    def forward(
        self, x: Tensor, n: int, rotations: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """One layer.

        Args:
            x: tokens (B, N+M, dim), those of image 0 first.
            n: N.
            rotations: (B, N+M, 2, head_dim) cosines and sines that turn queries and keys, if positions do so.
            mask: (B, N+M) bool, True = valid; all are when absent.

        Returns:
            (B, N+M, dim); what padding holds is of no meaning.
        """
        return self.cross_block(self.self_block(x, n, rotations, mask), n, mask)

    def queries_keys(
        self, x: Tensor, n: int, rotations: Tensor | None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Queries and keys (T, heads, head_dim) of self- and of cross-attention, for one pair."""
        own = self.self_block.queries_keys(x, n, rotations)
        return own, self.cross_block.queries_keys(self.self_block(x, n, rotations), n)


@torch.no_grad()
def folded(layer: Layer, dtype: torch.dtype) -> Layer:
    """A frozen copy for inference in `dtype`; linear maps that follow each other have become one.

    The message's output projection and a batch normalisation become part of the map that widens, if nothing
    lies between them.
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
