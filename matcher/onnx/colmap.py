"""Models with the names and shapes that COLMAP 4 expects of its ALIKED extractor and LightGlue matcher.

Its feature types are a fixed list, so ours are stored as `ALIKED_N16ROT`; nothing in COLMAP depends on the
width of their descriptors. `front_end` gets the image padded at the right and lower edge to multiples of 32,
and COLMAP drops what is found in that margin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from matcher.config import ExtractorConfig, NetworkConfig
from matcher.onnx.builder import Builder, Value
from matcher.onnx.front_end import GREY, FrontEndGraph
from matcher.onnx.interface import KIND
from matcher.onnx.linear import Linear, Numbers
from matcher.onnx.network import NetworkGraph, no_matches
from matcher.onnx.pairs import PairsGraph, check_exportable
from matcher.onnx.tokens import Points


def colmap_front_end(
    config: ExtractorConfig, arrays: Mapping[str, np.ndarray], *, numbers: Numbers = "float32"
) -> bytes:
    """For `--AlikedExtraction.n16rot_model_path`.

    Inputs: `image` (1, 3, H, W) RGB in [0, 1]; `max_keypoints` () int64; `min_score` () float32, 0.004 for
    as many as the pipeline finds. Outputs, best first: `keypoints` (1, N, 2) from −1, the centre of the first
    pixel, to 1, that of the last; `descriptors` (1, N, 64); `scores` (1, N).

    Args:
        config: of the front end, with all settings.
        arrays: its parameters.
        numbers: what weights are written in.
    """
    g = Builder("front_end")
    image = g.input("image", "float32", "B", 3, "H", "W")
    most = g.input("max_keypoints", "int64")
    least = g.input("min_score", "float32")
    levels = g.ReduceSum(image * np.reshape(GREY, (1, 3, 1, 1)).astype(np.float32), [1]) * 255.0
    front_end = FrontEndGraph(g, config, arrays, numbers)
    height, width = g.size(image, 2), g.size(image, 3)
    everywhere = g.full(g.Concat(height, width, axis=0), True)
    found = front_end(g.Round(levels) / 255.0, everywhere, g.Reshape(most, [1]))
    # In the order of their scores, so that the first ones remain.
    count = g.total(g.integer(found[1] >= least), 0, keep=True)
    keypoints, scores, descriptors = (g.slice(each, 0, 0, count) for each in found)
    sides = g.real(g.Concat(width, height, axis=0)) - 1.0
    outputs = {"keypoints": keypoints * 2.0 / sides - 1.0, "descriptors": descriptors, "scores": scores}
    width_of = {"keypoints": (2,), "descriptors": (len(arrays["descriptor.2.weight"]),), "scores": ()}
    for name, value in outputs.items():
        g.output(name, g.Unsqueeze(value, [0]), "float32", 1, "N", *width_of[name])
    return g.encode({"kind": KIND, "for": "COLMAP's ALIKED_N16ROT"})


def colmap_matcher(
    config: NetworkConfig, arrays: Mapping[str, np.ndarray], *, numbers: Numbers = "float32"
) -> bytes:
    """For `--AlikedMatching.lightglue_model_path`.

    Inputs, S standing for 0 and 1: `kptsS` (1, N, 2) in pixels of the photo, the centre of the first one
    being (0, 0); `descS` (1, N, 64); `image_sizeS` (1, 2) width and height of the photo. Outputs:
    `matches0` (N,) int64, the partner of every point of image 0, −1 where it has none; `mscores0` (N,).

    Args:
        config: of the network, with the policy.
        arrays: its parameters.
        numbers: what weights are written in.

    Raises:
        UsageError: a network that cannot be written as ONNX.
    """
    check_exportable(config)
    g = Builder("matcher")
    network = NetworkGraph(g, config, arrays, Linear(g, numbers), False)
    _OnePair(g, config, network).write()
    return g.encode({"kind": config.kind, "for": "COLMAP's ALIKED_LIGHTGLUE"})


@dataclass(frozen=True)
class _OnePair(PairsGraph):
    def write(self) -> None:
        """Inputs in COLMAP's order, the matches of the pair, and outputs."""
        g, columns = self.graph, self.config.descriptor_dim
        keypoints = [g.input(f"kpts{side}", "float32", "B", "NM"[side], 2) for side in (0, 1)]
        descriptors = [g.input(f"desc{side}", "float32", "B", "NM"[side], columns) for side in (0, 1)]
        sizes = [g.input(f"image_size{side}", "float32", "B", 2) for side in (0, 1)]
        points = [
            Points(*(g.entry(each, 0) for each in one), g.value(1), {})
            for one in zip(keypoints, descriptors, sizes, strict=True)
        ]
        counts = [g.size(each.keypoints, 0) for each in points]
        empty = g.Equal(g.scalar(g.Min(*counts)), 0)
        indices, scores = g.either(empty, lambda: no_matches(g), lambda: self._best_view(*points)[:2])
        rows = g.slice(indices, 1, 0, 1)
        partners = g.Reshape(g.slice(indices, 1, 1, 2), [-1])
        g.output("matches0", self._spread(counts[0], -1, rows, partners), "int64", "N")
        g.output("mscores0", self._spread(counts[0], 0.0, rows, scores), "float32", "N")

    def _spread(self, count: Value, otherwise: float, rows: Value, values: Value) -> Value:
        """(N,) the values at their rows (K, 1)."""
        g = self.graph
        return g.ScatterND(g.full(count, otherwise), rows, values)
