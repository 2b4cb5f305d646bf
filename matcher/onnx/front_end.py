"""The model of our front end: an image in, its keypoints with descriptors out, whatever its size.

The same steps as `matcher.extract.learned`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from matcher.config import ExtractorConfig
from matcher.extract.learned import Architecture, architecture_of
from matcher.onnx.builder import Builder, Value
from matcher.onnx.interface import KIND
from matcher.onnx.linear import Linear, Numbers, stored

WINDOW = 5  # pixels a side, in which a point's position is refined
GREY = (0.299, 0.587, 0.114)  # of red, green and blue
_LEAST_CONTRAST = 0.02


def front_end_model(
    config: ExtractorConfig, arrays: Mapping[str, np.ndarray], *, numbers: Numbers = "float32"
) -> bytes:
    """An ONNX file that finds keypoints.

    Inputs: `image` (1, 1, H, W) grey in [0, 1]; `mask` (H, W) bool, where keypoints may lie;
    `max_keypoints` (1,) int64. Outputs, best first: `keypoints` (N, 2) xy in pixels, the centre of the first
    one being (0, 0); `scores` (N,) in [0, 1]; `descriptors` (N, 64) of norm 1.

    Args:
        config: with all settings of the front end.
        arrays: its parameters by name, float32.
        numbers: what weights are written in; convolutions stay in float16 where int8 is asked for.
    """
    graph = Builder("front_end")
    front_end = FrontEndGraph(graph, config, arrays, numbers)
    image = graph.input("image", "float32", 1, 1, "H", "W")
    mask = graph.input("mask", "bool", "H", "W")
    most = graph.input("max_keypoints", "int64", 1)
    keypoints, scores, descriptors = front_end(image, mask, most)
    graph.output("keypoints", keypoints, "float32", "N", 2)
    graph.output("scores", scores, "float32", "N")
    graph.output("descriptors", descriptors, "float32", "N", len(arrays["descriptor.2.weight"]))
    return graph.encode({"kind": KIND})


@dataclass(frozen=True)
class FrontEndGraph:
    """Writes the front end."""

    graph: Builder
    config: ExtractorConfig
    arrays: Mapping[str, np.ndarray]
    numbers: Numbers

    @cached_property
    def sizes(self) -> Architecture:
        """Of the network that the parameters are of."""
        return architecture_of({name: array.shape for name, array in self.arrays.items()})

    def __call__(self, image: Value, mask: Value, most: Value) -> tuple[Value, Value, Value]:
        """Keypoints (N, 2), scores (N,) and descriptors (N, 64) of an image (1, 1, H, W)."""
        g = self.graph
        height, width = g.size(image, 2), g.size(image, 3)
        logits, maps = self.maps(self._padded(image, height, width))
        logits = g.Slice(logits, [0, 0], g.Concat(height, width, axis=0), [0, 1])
        y, x = self._candidates(logits, mask, height, width)
        scores = g.Sigmoid(g.Gather(g.Reshape(logits, [-1]), y * width + x, axis=0))
        found = g.Squeeze(g.NonZero(scores > self.config.score_threshold), [0])
        scores = g.Gather(scores, found, axis=0)
        scores, order = g.TopK(scores, g.Min(most, g.size(found, 0)), outputs=2, axis=0)
        chosen = g.Gather(found, order, axis=0)
        x, y = (g.Gather(each, chosen, axis=0) for each in (x, y))
        points = self._refined(logits, x, y, width, height)
        return points, scores, self.described(maps, points)

    def _padded(self, image: Value, height: Value, width: Value) -> Value:
        """Repeated at the right and lower edge to multiples of the stride."""
        g, none, stride = self.graph, np.zeros(1, np.int64), self.sizes.stride
        rests = [g.Mod(stride - g.Mod(side, stride), stride) for side in (height, width)]
        zeros = [g.value(none)] * 6
        return g.Pad(image, g.Concat(*zeros, *rests, axis=0), None, mode="edge")

    def maps(self, pixels: Value) -> tuple[Value, list[Value]]:
        """Logits (H, W) of all pixels (1, 1, H, W), and the encoder's maps, finest first."""
        g = self.graph
        x, maps = self._normalised(pixels), []
        for stage, depth in enumerate(self.sizes.depths):
            for block in range(depth):
                stride, kernel = (1 if block else 2), (5 if stage == block == 0 else 3)
                x = g.Relu(self._convolution(f"encoder.{stage}.{block}.0", x, kernel, stride))
            maps.append(x)
        for level in reversed(range(len(maps) - 1)):
            lifted = self._convolution(f"lift.{level}", x, 1, 1)
            scales = np.array([1, 1, 2, 2], np.float32)
            x = maps[level] + g.Resize(lifted, None, scales, mode="linear")
        x = g.Relu(self._convolution("mix.0", x, 3, 1))
        logits = g.DepthToSpace(self._convolution("points", x, 3, 1), blocksize=2, mode="CRD")
        return g.Squeeze(logits, [0, 1]), maps

    def _normalised(self, pixels: Value) -> Value:
        """Pixels of mean 0 and deviation 1, but for images of little contrast."""
        g = self.graph
        # Row by row, because one sum of so many pixels loses digits.
        away = pixels - g.ReduceMean(g.ReduceMean(pixels, [3]), [2])
        count = g.real(g.size(pixels, 2) * g.size(pixels, 3)) - 1.0
        deviation = g.Sqrt(g.ReduceSum(g.ReduceSum(away * away, [3]), [2]) / count)
        return away / (deviation + _LEAST_CONTRAST)

    def _convolution(self, name: str, x: Value, kernel: int, stride: int) -> Value:
        g, numbers = self.graph, "float16" if self.numbers == "int8" else self.numbers
        weight = stored(g, f"{name}.weight", self.arrays[f"{name}.weight"], numbers)
        bias = g.weight(f"{name}.bias", self.arrays[f"{name}.bias"])
        pads, strides = [kernel // 2] * 4, [stride] * 2
        return g.Conv(x, weight, bias, kernel_shape=[kernel] * 2, pads=pads, strides=strides)

    def _candidates(self, logits: Value, mask: Value, height: Value, width: Value) -> list[Value]:
        """y and x (K,) int64 of the peaks inside the mask."""
        g = self.graph
        peaks = self._peaks(logits, height, width) & mask
        return [g.entry(g.NonZero(peaks), axis) for axis in (0, 1)]

    def _peaks(self, logits: Value, height: Value, width: Value) -> Value:
        """(H, W) bool: pixels that are the largest of their surroundings, inside the border."""
        g, radius, border = self.graph, self.config.nms_radius, self.config.border
        highest = g.Unsqueeze(logits, [0, 1])
        for kernel, pad in (([2 * radius + 1, 1], [radius, 0]), ([1, 2 * radius + 1], [0, radius])):
            highest = g.MaxPool(highest, kernel_shape=kernel, pads=[*pad, *pad])
        peaks = g.Equal(logits, g.Squeeze(highest, [0, 1]))
        for axis, side in ((1, height), (0, width)):
            place = g.range(side)
            inner = (place >= border) & (place < side - border)
            peaks = peaks & g.Unsqueeze(inner, [axis])
        return peaks

    def _refined(self, logits: Value, x: Value, y: Value, width: Value, height: Value) -> Value:
        """(N, 2) the centroids of the softmax of the logits around points."""
        g = self.graph
        dy, dx = (each.ravel() - WINDOW // 2 for each in np.mgrid[:WINDOW, :WINDOW])
        across, down = g.Unsqueeze(x, [1]) + dx, g.Unsqueeze(y, [1]) + dy
        inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
        place = self._limited(down, height) * width + self._limited(across, width)
        around = g.Gather(g.Reshape(logits, [-1]), place, axis=0)
        weight = g.Softmax(g.Where(inside, around, -np.float32(np.inf)), axis=1)
        shift = weight @ np.stack([dx, dy], axis=1).astype(np.float32)
        return g.real(g.Concat(g.Unsqueeze(x, [1]), g.Unsqueeze(y, [1]), axis=1)) + shift

    def _limited(self, place: Value, side: Value) -> Value:
        return self.graph.Min(self.graph.Max(place, 0), side - 1)

    def described(self, maps: list[Value], points: Value) -> Value:
        """Unit descriptors (N, 64) at points (N, 2)."""
        g, columns = self.graph, []
        for level, values in enumerate(maps, start=1):
            size = g.real(g.Concat(g.size(values, 3), g.size(values, 2), axis=0))
            grid = (points * 2.0**-level * 2.0 + 1.0) / size - 1.0
            taken = g.GridSample(values, g.Unsqueeze(grid, [0, 1]), padding_mode="border")
            columns.append(g.Transpose(g.Squeeze(taken, [0, 2]), perm=[1, 0]))
        linear, x = Linear(g, self.numbers), g.Concat(*columns, axis=1)
        for part in (0, 2):
            name = f"descriptor.{part}"
            x = linear(name, x, self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"])
            x = g.Relu(x) if part == 0 else x
        return x / g.Max(g.Sqrt(g.total(x * x, 1, keep=True)), 1e-12)
