"""From keypoints to tokens as ONNX operations: the same steps as `matcher.match.position`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

import numpy as np

from matcher.config import NetworkConfig
from matcher.geometry import UPRIGHT
from matcher.onnx.builder import Builder, Value
from matcher.onnx.layers import Arrays, batch_norm

FARTHEST = 1.5  # in normalised positions, of a predicted partner
_TRAINED_SIDE = 1024.0  # of the images that raw scales are pixels of


@dataclass(frozen=True)
class Points:
    """The points of one image."""

    keypoints: Value  # (N, 2) stored pixels
    descriptors: Value  # (N, D)
    size: Value  # (2,) width and height of the stored image
    view: Value  # () int64 EXIF orientation in which positions are normalised
    extra: dict[str, Value]  # by the names of `EXTRA`


@dataclass(frozen=True)
class Encoder:
    """Writes the encoding of positions."""

    graph: Builder
    config: NetworkConfig
    arrays: Arrays

    def positions(self, points: Points, extent: float) -> Value:
        """(N, 2) upright positions in about [−1, 1]."""
        centred = points.keypoints - (points.size - 1.0) * 0.5
        return (self._turned(centred, points) - 0.5) / self._reach(points, extent)

    def _turned(self, directions: Value, points: Points) -> Value:
        """(N, 2) from stored pixels to the view that is matched."""
        turn = self.graph.entry(self.graph.value(UPRIGHT.astype(np.float32)), points.view)
        return directions @ self.graph.Transpose(turn, perm=[1, 0])

    def _reach(self, points: Points, extent: float) -> Value:
        return self.graph.maximum(points.size, 0) * extent

    def inputs(self, points: Points, extent: float) -> list[Value]:
        """The inputs of an encoding, (N, C) each, in the order of the configuration."""
        return [self._column(points, name, extent) for name in self.config.position.inputs]

    def _column(self, points: Points, name: str, extent: float) -> Value:
        g, extra = self.graph, points.extra
        if name == "xy":
            return self.positions(points, extent)
        if name == "score":
            return g.Unsqueeze(extra["scores"], [1])
        if name == "frame":
            return self._axis_ends(points, extent)
        if name.endswith(("orientation", "counterclockwise")):
            return self._direction(points, name)
        scales = g.Unsqueeze(extra["scales"], [1])
        if name in ("raw_scale", "raw_sigma"):
            trained = _TRAINED_SIDE * (0.5 if name == "raw_sigma" else 1.0)
            return scales * trained / self._reach(points, 1.0)
        relative = g.Max(scales, 1e-3) / self._reach(points, 1.0)
        return (g.Log(relative) * (1 / math.log(2.0)) + 6.0) * 0.5

    def _direction(self, points: Points, name: str) -> Value:
        g, angles = self.graph, points.extra["angles"]
        pair = [g.Unsqueeze(each, [1]) for each in (g.Cos(angles), g.Sin(angles))]
        upright = self._turned(g.Concat(*pair, axis=1), points)
        if name == "orientation":
            return upright
        x, y = g.slice(upright, 1, 0, 1), g.slice(upright, 1, 1, 2)
        if name == "raw_orientation":
            return _angle(g, y, x)
        angle = _angle(g, -y, x)
        return g.Where(angle < 0.0, angle + 2 * math.pi, angle)

    def _axis_ends(self, points: Points, extent: float) -> Value:
        g = self.graph
        frames = points.extra["affine_frames"]
        ends = []
        for axis in (0, 1):
            along = self._turned(g.entry(frames, axis, axis=2), points)
            ends.append(self.positions(points, extent) + along / self._reach(points, extent))
        return g.Concat(*ends, axis=1)

    def rotations(self, inputs: Value) -> tuple[Value, Value]:
        """Cosines and sines (T, 1, head_dim/2) that turn queries and keys."""
        g, weight = self.graph, self.arrays["position.frequencies.weight"]
        phases = g.Unsqueeze(inputs @ np.ascontiguousarray(weight.T), [1])
        return g.Cos(phases), g.Sin(phases)

    def perceptron(self, inputs: Value) -> Value:
        """(T, dim) of an MLP of position and score (SuperGlue, eq. 2)."""
        x = inputs
        for number in count():
            name = f"position.hidden.{number}"
            if f"{name}.linear.weight" not in self.arrays:
                break
            gain, shift = batch_norm(self.arrays, f"{name}.norm")
            weight = gain[:, None] * self.arrays[f"{name}.linear.weight"]
            bias = gain * self.arrays[f"{name}.linear.bias"] + shift
            x = self.graph.Relu(x @ weight.T.astype(np.float32) + bias.astype(np.float32))
        weight, bias = self.arrays["position.out.weight"], self.arrays["position.out.bias"]
        return x @ np.ascontiguousarray(weight.T) + bias

    def waves(self, positions: Value) -> Value:
        """(T, 64) cosines and sines of positions (T, 2), for guidance."""
        phases = positions @ np.ascontiguousarray(self.arrays["guidance.frequencies.weight"].T)
        return self.graph.Concat(self.graph.Cos(phases), self.graph.Sin(phases), axis=1)

    def own_position(self, x: Value, inputs: Value) -> Value:
        """Tokens (T, dim) with an encoding of their own position, whose inputs (T, C) begin with it."""
        g, weight = self.graph, self.arrays["guidance.encode_position.weight"]
        joint = g.Concat(self.waves(g.slice(inputs, 1, 0, 2)), g.slice(inputs, 1, 2), axis=1)
        return x + joint @ np.ascontiguousarray(weight.T)

    def predicted_waves(self, predicted: Value) -> Value:
        """`waves` of predicted positions, which are limited first."""
        return self.waves(self.graph.Min(self.graph.Max(predicted, -FARTHEST), FARTHEST))


def _angle(g: Builder, y: Value, x: Value) -> Value:
    """atan2(y, x) in (−π, π]."""
    ratio = g.Atan(y / g.Where(g.Equal(x, 0.0), 1.0, x))
    half = g.Where(y < 0.0, -math.pi, math.pi)
    straight = g.Where(g.Equal(y, 0.0), 0.0, half * 0.5)
    return g.Where(g.Equal(x, 0.0), straight, g.Where(x < 0.0, ratio + half, ratio))
