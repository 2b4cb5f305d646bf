"""One layer of the network as ONNX operations: self-attention, cross-attention, and their heads.

The tokens of both images are one list (T, dim), those of image 0 first. Linear maps that follow each other
are multiplied together, as in `matcher.match.context`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from matcher.config import ContextConfig
from matcher.onnx.builder import CONTRIBUTED, Builder, Value
from matcher.onnx.linear import Linear

Arrays = Mapping[str, np.ndarray]  # parameters of a network by name, float32
_EPSILON = 1e-5  # of normalisation


@dataclass(frozen=True)
class Layers:
    """Writes layers of a network."""

    graph: Builder
    config: ContextConfig
    arrays: Arrays
    linear: Linear
    fused_attention: bool  # by ONNX Runtime's own operator, which needs no matrix of all pairs

    def layer(self, number: int, x: Value, rotations: tuple[Value, Value] | None, points0: Value) -> Value:
        """Tokens (T, dim) after layer `number`; `points0` (1,) of them are of image 0."""
        x = self._self_block(f"layers.{number}.self_block", x, rotations, points0)
        return self._cross_block(f"layers.{number}.cross_block", x, points0)

    def _self_block(
        self, name: str, x: Value, rotations: tuple[Value, Value] | None, points0: Value
    ) -> Value:
        g, dim, heads = self.graph, self.config.dim, self.config.heads
        weight, bias = self._scaled(f"{name}.attention.qkv", slice(0, dim))
        if rotations is None:
            qkv = self.linear(f"{name}.qkv", x, weight, bias)
            qk, v = g.slice(qkv, 1, 0, 2 * dim), g.slice(qkv, 1, 2 * dim)
        else:
            # First halves of all heads, then second ones: they rotate together.
            order = np.arange(2 * dim).reshape(2 * heads, 2, -1).transpose(1, 0, 2).ravel()
            order = np.concatenate([order, np.arange(2 * dim, 3 * dim)])
            qkv = self.linear(f"{name}.qkv", x, weight[order], bias[order])
            first = g.Reshape(g.slice(qkv, 1, 0, dim), [0, 2 * heads, -1])
            second = g.Reshape(g.slice(qkv, 1, dim, 2 * dim), [0, 2 * heads, -1])
            cos, sin = rotations
            turned = g.Concat(first * cos - second * sin, second * cos + first * sin, axis=2)
            qk, v = g.Reshape(turned, [0, -1]), g.slice(qkv, 1, 2 * dim)
        q, k = g.slice(qk, 1, 0, dim), g.slice(qk, 1, dim)
        sides = [self._halves(each, points0) for each in (q, k, v)]
        message = g.Concat(*(self._attend(*side) for side in zip(*sides, strict=True)), axis=0)
        return self._feed_forward(name, x, message)

    def _cross_block(self, name: str, x: Value, points0: Value) -> Value:
        g, dim = self.graph, self.config.dim
        shared = self.config.shared_qk
        weight, bias = self._scaled(f"{name}.attention.qkv", slice(0, dim), root=shared)
        parts = self.linear(f"{name}.qkv", x, weight, bias)
        split = [g.slice(parts, 1, start, start + dim) for start in range(0, len(weight), dim)]
        sides = [self._halves(each, points0) for each in (split[0], split[-2], split[-1])]
        q, k, v = (list(each) for each in sides)
        message = g.Concat(self._attend(q[0], k[1], v[1]), self._attend(q[1], k[0], v[0]), axis=0)
        return self._feed_forward(name, x, message)

    def _scaled(self, name: str, queries: slice, *, root: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The projection, its queries (with `root` also its keys, the same) scaled for the products."""
        weight = self.arrays[f"{name}.weight"].copy()
        bias = self.arrays.get(f"{name}.bias", np.zeros(len(weight), np.float32)).copy()
        scale = (self.config.dim / self.config.heads) ** (-0.25 if root else -0.5)
        if not self.fused_attention:
            weight[queries] *= scale
            bias[queries] *= scale
        return weight, bias

    def _halves(self, x: Value, points0: Value) -> tuple[Value, Value]:
        return self.graph.slice(x, 0, 0, points0), self.graph.slice(x, 0, points0)

    def _attend(self, q: Value, k: Value, v: Value) -> Value:
        """Softmax attention of q (N, dim) to k and v (M, dim) → (N, dim)."""
        g, heads, above = self.graph, self.config.heads, self.config.scale_logits_above
        if above is not None:  # see `matcher.match.blocks.scaled_queries`
            q = q * (g.Log(g.Max(g.real(g.size(k, 0)), float(above))) * (1 / math.log(above)))
        if self.fused_attention:
            one = [g.Unsqueeze(each, [0]) for each in (q, k, v)]
            found = g.MultiHeadAttention(*one, domain=CONTRIBUTED, num_heads=heads)
            return g.Squeeze(found, [0])
        q, k, v = (g.Reshape(each, [0, heads, -1]) for each in (q, k, v))
        weights = g.Softmax(g.Transpose(q, perm=[1, 0, 2]) @ g.Transpose(k, perm=[1, 2, 0]), axis=-1)
        message = g.Transpose(weights @ g.Transpose(v, perm=[1, 0, 2]), perm=[1, 0, 2])
        return g.Reshape(message, [0, -1])

    def _feed_forward(self, name: str, x: Value, message: Value) -> Value:
        """x + narrow(activate(norm(widen([x | out(message)]))))."""
        g, dim = self.graph, self.config.dim
        widen, narrow = self._joined_widen(name), self.arrays[f"{name}.ffn.narrow.weight"]
        joint = g.Concat(x, message, axis=1)
        hidden = self.linear(f"{name}.widen", joint, *widen)
        if self.config.norm == "layer":
            norm = [g.value(self.arrays[f"{name}.ffn.norm.{part}"]) for part in ("weight", "bias")]
            hidden = g.LayerNormalization(hidden, *norm, axis=-1, epsilon=_EPSILON)
        hidden = g.Gelu(hidden) if self.config.activation == "gelu" else g.Relu(hidden)
        bias = self.arrays.get(f"{name}.ffn.narrow.bias", np.zeros(dim, np.float32))
        return x + self.linear(f"{name}.narrow", hidden, narrow, bias)

    def _joined_widen(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The map of [tokens | messages] with the output projection of messages, and batch normalisation."""
        arrays, dim = self.arrays, self.config.dim
        weight, out = (
            arrays[f"{name}.{part}.weight"].astype(np.float64) for part in ("ffn.widen", "attention.out")
        )
        bias = arrays.get(f"{name}.ffn.widen.bias", np.zeros(len(weight))).astype(np.float64)
        if f"{name}.attention.out.bias" in arrays:
            bias = bias + weight[:, dim:] @ arrays[f"{name}.attention.out.bias"]
        weight = np.concatenate([weight[:, :dim], weight[:, dim:] @ out], axis=1)
        if self.config.norm == "batch":
            gain, shift = batch_norm(arrays, f"{name}.ffn.norm")
            weight, bias = gain[:, None] * weight, gain * bias + shift
        return weight.astype(np.float32), bias.astype(np.float32)


def batch_norm(arrays: Arrays, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Gain and shift (C,) float64 of a trained batch normalisation."""
    weight, bias, mean, variance = (
        arrays[f"{name}.{part}"].astype(np.float64)
        for part in ("weight", "bias", "running_mean", "running_var")
    )
    gain = weight / np.sqrt(variance + _EPSILON)
    return gain, bias - gain * mean
