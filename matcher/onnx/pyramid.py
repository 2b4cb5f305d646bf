"""Windows of an image at any resolution, as ONNX operations: the same as `matcher.refine`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from matcher.onnx.builder import Builder, Value
from matcher.onnx.matrices import Square

_LEVELS = range(4, 16)  # log₂ of the shorter side from which there is one level more
_FAR = 1e9  # pixels
_BINOMIAL = np.array([1, 4, 6, 4, 1], np.float32) / 16


@dataclass(frozen=True)
class PyramidValues:
    """All levels of an image, one after the other."""

    graph: Builder
    pixels: Value  # (n,), then one row and a pixel more, which have no weight
    sides: Value  # (levels, 2) float32 width and height
    starts: Value  # (levels,) int32 in the pixels

    @staticmethod
    def of(graph: Builder, image: Value, most: Value) -> PyramidValues:
        """The pyramid of grey values (1, 1, H, W) with () int64 levels beside the image itself."""
        g = graph

        def step(number: Value, current: Value, rest: Value):
            smaller = _halved(g, current)
            joined = g.Concat(rest, g.Reshape(smaller, [-1]), axis=0)
            return True, [smaller, joined], [g.Concat(_size(g, smaller), count + g.size(rest, 0), axis=0)]

        whole, first = g.Reshape(image, [-1]), g.Concat(_size(g, image), [0], axis=0)
        count = g.size(whole, 0)
        _, rest, rows = g.loop(most, [image, np.zeros(0, np.float32)], step, gathered=1)
        rows = g.Concat(g.Unsqueeze(first, [0]), rows, axis=0)
        beyond = g.full(g.size(image, 3) + 1, 0.0)
        starts = g.Cast(g.entry(rows, 2, axis=1), to=6)
        pixels = g.Concat(whole, rest, beyond, axis=0)
        return PyramidValues(g, pixels, g.real(g.slice(rows, 1, 0, 2)), starts)

    def sample(self, affine: Value, level: Value, offsets: np.ndarray) -> Value:
        """(K, n) values by bilinear interpolation; the edge is replicated beyond the image.

        By gathering, as ONNX Runtime's GridSample takes several times as long.

        Args:
            affine: (K, 2, 3), from (1, x, y) in the frame to pixels of level 0.
            level: (K,) int64 to sample.
            offsets: (3, n) of a grid.
        """
        g = self.graph
        sides = g.Gather(self.sides, level, axis=0)  # (K, 2)
        scaled = affine * g.Unsqueeze(g.Pow(2.0, -g.real(level)), [1, 2])
        scaled = g.Where(g.Abs(scaled) < _FAR, scaled, 0.0)  # neither is NaN, of which there is no pixel
        end = g.Unsqueeze(g.Transpose(sides, perm=[1, 0]) - 1.0, [2])
        places = g.Transpose(scaled, perm=[1, 0, 2]) @ offsets  # (2, K, n)
        places = g.Min(g.Max(places, 0.0), end)
        corner = g.Floor(places)
        x, y = (g.entry(places - corner, axis) for axis in (0, 1))
        left, top = (g.entry(g.Cast(corner, to=6), axis) for axis in (0, 1))
        width = g.Cast(g.slice(sides, 1, 0, 1), to=6)
        first = top * width + left + g.Unsqueeze(g.Gather(self.starts, level, axis=0), [1])
        second = first + width
        one = np.ones(1, np.int32)
        above, above1, below, below1 = (
            g.Reshape(g.GatherElements(self.pixels, g.Reshape(each, [-1]), axis=0), g.Shape(first))
            for each in (first, first + one, second, second + one)
        )
        above = above + (above1 - above) * x
        return above + (below + (below1 - below) * x - above) * y

    def usable(self, affine: Value, offsets: np.ndarray) -> Value:
        """(K, n) 1.0 for samples on the image, else 0.0; arguments as in `sample`."""
        g = self.graph
        half = (g.slice(self.sides, 0, 0, 1) - 1.0) * 0.5  # (1, 2)
        from_centre = (affine @ offsets) - g.Unsqueeze(half, [2])
        beyond = g.Abs(from_centre) - g.Unsqueeze(half, [2])
        return g.real(g.ReduceMax(beyond, [1], keepdims=0) <= 0.0)

    def contains(self, affine: Value, half: float) -> Value:
        """(K,) bool: windows of half side `half` entirely on the image."""
        g = self.graph
        reach = g.total(g.Abs(g.slice(affine, 2, 1)), 2) * half
        centre = g.Squeeze(g.slice(affine, 2, 0, 1), [2])
        end = g.slice(self.sides, 0, 0, 1) - 1.0
        least = g.Min(centre - reach, end - centre - reach)
        return g.Squeeze(g.ReduceMin(least, [1]), [1]) >= 0.0


def level_of(g: Builder, image: Value, maps: Square) -> Value:
    """(K,) int64 the level of an image (1, 1, H, W) whose pixel is nearest in size to the scale of maps."""
    shorter = g.Min(g.size(image, 2), g.size(image, 3))
    most = g.total(g.integer(shorter >= 2 ** np.array(_LEVELS)), 0)
    level = g.Round(g.Log(g.Max(maps.zoom(), 1e-9)) * (1 / np.log(2)))
    return g.Min(g.integer(g.Max(level, 0.0)), most)


def _halved(g: Builder, image: Value) -> Value:
    """Half the size, after a binomial filter, as OpenCV's pyrDown does it."""
    image = g.Pad(image, np.array([0, 0, 2, 2] * 2), None, mode="reflect")
    for axis in (2, 3):
        strides, shape = [1, 1], [1, 1, 1, 1]
        strides[axis - 2], shape[axis] = 2, 5
        image = g.Conv(image, _BINOMIAL.reshape(shape), strides=strides)
    return image


def _size(g: Builder, image: Value) -> Value:
    """(2,) int64 width and height."""
    return g.Concat(g.size(image, 3), g.size(image, 2), axis=0)
