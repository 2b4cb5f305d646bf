"""Models with the names and shapes that OpenCV 5's classes `ALIKED` and `LightGlueMatcher` expect.

OpenCV's own engine has neither branches nor loops nor points that are dropped, so here all layers run on all
points, with a fixed number of Sinkhorn iterations. The classes pass keypoints from −1 to 1 in x and in y,
which does not tell how wide an image is, and nothing else but descriptors: the front end therefore appends
two columns to them, (width, height) / the longer of both, which the matcher takes off again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from matcher.config import ExtractorConfig, NetworkConfig
from matcher.errors import UsageError
from matcher.match.steering import COMPARED, MIN_GAIN, STEERABLE, TURNS
from matcher.onnx.builder import Builder, Value
from matcher.onnx.consensus import ConsensusGraph
from matcher.onnx.front_end import GREY, FrontEndGraph
from matcher.onnx.linear import Linear
from matcher.onnx.network import Compared, NetworkGraph
from matcher.onnx.pairs import check_exportable
from matcher.onnx.reading import best_of_both
from matcher.onnx.steering import turn_evidence, turned_view
from matcher.onnx.tokens import Encoder, Points
from matcher.onnx.transport import Masses, PotentialValues, beginning, masses, raised

_GROUP = 16  # values of a descriptor that move together
ROUGH, FINAL = 7, 20  # Sinkhorn iterations between rounds of consensus, and at the end


def opencv_front_end(
    config: ExtractorConfig, arrays: Mapping[str, np.ndarray], size: tuple[int, int]
) -> bytes:
    """For `cv2.ALIKED`: `image` (1, 3, H, W) RGB in [0, 1] → `keypoints`, `descriptors`, `scores`.

    There are always `config.max_keypoints`, (N, 2) from −1 to 1, with (N, 66) descriptors. Where an image has
    fewer, the last ones have score 0 and a descriptor of zeros.

    Args:
        config: of the front end, with all settings.
        arrays: its parameters.
        size: width and height of the network's image, to which OpenCV resizes all.

    Raises:
        UsageError: sides that are no multiples of the stride of the coarsest map, 32 in the shipped network.
    """
    g = Builder("front_end")
    front_end = StaticFrontEnd(g, config, arrays, "float32")
    stride = front_end.sizes.stride
    if any(side < stride or side % stride for side in size):
        raise UsageError(f"width and height must be multiples of {stride}, not {size[0]} and {size[1]}")
    width, height = size
    image = g.input("image", "float32", 1, 3, height, width)
    keypoints, scores, descriptors = front_end.best(
        g.ReduceSum(image * np.reshape(GREY, (1, 3, 1, 1)), [1]), width, height
    )
    sides = np.array([[width, height]], np.float32)
    aspect = np.repeat(sides / sides.max(), config.max_keypoints, axis=0)
    descriptors = g.Concat(descriptors * g.real(g.Unsqueeze(scores, [1]) > 0.0), aspect, axis=1)
    g.output("keypoints", keypoints / sides * 2.0 - 1.0, "float32", config.max_keypoints, 2)
    g.output("descriptors", descriptors, "float32", config.max_keypoints, "D")
    g.output("scores", scores, "float32", config.max_keypoints)
    return g.encode({"kind": "learned", "for": "cv2.ALIKED"})


@dataclass(frozen=True)
class StaticFrontEnd(FrontEndGraph):
    """The front end with a fixed number of points on images of a fixed size."""

    def best(self, image: Value, width: int, height: int) -> tuple[Value, Value, Value]:
        """Keypoints (N, 2), scores (N,) and descriptors (N, 64) of an image (1, 1, H, W)."""
        g, config = self.graph, self.config
        sides = [g.value(np.array([side])) for side in (height, width)]
        logits, maps = self.maps(image)
        scores = g.Where(self._peaks(logits, *sides), g.Sigmoid(logits), 0.0)
        scores = g.Where(scores > config.score_threshold, scores, 0.0)
        scores, place = g.TopK(g.Reshape(scores, [-1]), [config.max_keypoints], outputs=2, axis=0)
        y = place / sides[1]
        points = self._refined(logits, place - y * sides[1], y, sides[1], sides[0])
        return points, scores, self.described(maps, points)


def opencv_matcher(config: NetworkConfig, arrays: Mapping[str, np.ndarray], points: int) -> bytes:
    """For `cv2.LightGlueMatcher`: `kpts0`, `kpts1`, `desc0`, `desc1` → `matches0` (N, 2), `mscores0` (N,).

    Row i is of keypoint i of image 0, with −1 where it has no partner.

    Args:
        config: of the network.
        arrays: its parameters.
        points: how many keypoints either image has.

    Raises:
        UsageError: a network that cannot be written as ONNX.
    """
    check_exportable(config)
    g = Builder("matcher")
    config = replace(config, policy=replace(config.policy, early_exit=False, pruning=False))
    network = StaticNetwork(g, config, arrays, Linear(g, "float32"), False)
    sides = []
    for side in (0, 1):
        keypoints = g.input(f"kpts{side}", "float32", 1, points, 2)
        descriptors = g.input(f"desc{side}", "float32", 1, points, config.descriptor_dim + 2)
        sides.append(_points(g, keypoints, descriptors, config.descriptor_dim))
    if config.kind == STEERABLE:
        sides[1] = _turned(g, *sides)
    matches, scores = network.matched(*sides)
    g.output("matches0", matches, "int64", points, 2)
    g.output("mscores0", scores, "float32", points)
    return g.encode({"kind": config.kind, "for": "cv2.LightGlueMatcher"})


def _points(g: Builder, keypoints: Value, descriptors: Value, width: int) -> Points:
    """Of an image whose longer side is 1; OpenCV may have divided the descriptors by their length."""
    keypoints, descriptors = g.Reshape(keypoints, [-1, 2]), g.Reshape(descriptors, [-1, width + 2])
    aspect = g.Squeeze(g.Slice(descriptors, [0, width], [1, width + 2], [0, 1]), [0])
    size = aspect / g.maximum(aspect, 0)
    values = g.slice(descriptors, 1, 0, width)
    values = values / g.Max(g.Sqrt(g.total(values * values, 1, keep=True)), 1e-6)
    return Points((keypoints + 1.0) * 0.5 * size, values, size, g.value(1), {})


def _turned(g: Builder, points0: Points, points1: Points) -> Points:
    """Image 1 after the quarter turns that fit image 0 best."""
    own, others = (g.slice(each.descriptors, 0, 0, COMPARED) for each in (points0, points1))
    evidence = [
        g.Unsqueeze(turn_evidence(g, own @ g.Transpose(_rolled(g, others, turn), perm=[1, 0])), [0])
        for turn in range(TURNS)
    ]
    margin = np.array([MIN_GAIN] + [0.0] * (TURNS - 1), np.float32)
    turns = g.ArgMax(g.Concat(*evidence, axis=0) + margin, axis=0, keepdims=0)
    every = g.Concat(*(g.Unsqueeze(_rolled(g, points1.descriptors, t), [0]) for t in range(TURNS)), axis=0)
    return replace(points1, descriptors=g.entry(every, turns), view=turned_view(g, points1.view, turns))


def _rolled(g: Builder, descriptors: Value, turn: int) -> Value:
    if not turn:
        return descriptors
    cut = (TURNS - turn) * _GROUP
    last = g.slice(descriptors, 1, cut, TURNS * _GROUP)
    return g.Concat(last, g.slice(descriptors, 1, 0, cut), axis=1)


class StaticEncoder(Encoder):
    """Positions of keypoints that are already shares of the longer side."""

    def positions(self, points: Points, extent: float) -> Value:
        """(N, 2) upright positions in about [−1, 1]."""
        return self._turned(points.keypoints - points.size * 0.5, points) / extent


@dataclass(frozen=True)
class StaticNetwork(NetworkGraph):
    """The network without branches and loops."""

    def matched(self, points0: Points, points1: Points) -> tuple[Value, Value]:
        """Matches (N, 2) int64 and scores (N,)."""
        sides, count = self._after_layers(points0, points1), len(Compared._fields)
        return self._assigned(Compared(*sides[:count]), Compared(*sides[count : 2 * count]))

    def _encoder(self) -> Encoder:
        return StaticEncoder(self.graph, self.config, self.arrays)

    def _transported(self, side0: Compared, side1: Compared) -> Value:
        g, rounds = self.graph, self.config.assignment.consensus
        scores = self._scores(side0, side1)
        mass = masses(g, *(g.size(side.index, 0) for side in (side0, side1)))
        corrected, found = scores, beginning(g, scores)
        if rounds:
            consensus = StaticConsensus(g, self.arrays, rounds, False)
            corrected, found = consensus(scores, side0.positions, side1.positions, mass, found)
        return raised(g, corrected, unrolled(g, corrected, mass, found, FINAL))

    def _assigned(self, side0: Compared, side1: Compared) -> tuple[Value, Value]:
        """The partner of every point of image 0, −1 where it has none, and their probabilities."""
        g, policy = self.graph, self.config.policy
        best, partner, mutual = best_of_both(g, self._transported(side0, side1), dustbins=True)
        probability = g.Min(g.Exp(best), 1.0) * g.real(mutual)
        above = g.real(probability > policy.match_threshold)
        expected = g.total(probability * above, 0)
        least = (expected + policy.threshold_doubles_at) * policy.match_threshold / g.Max(expected, 1e-6)
        kept = probability > g.Max(least, policy.match_threshold)
        rows = g.range(g.size(best, 0))
        pairs = [g.Unsqueeze(each, [1]) for each in (rows, g.Where(kept, partner, -1))]
        return g.Concat(*pairs, axis=1), probability * g.real(kept)


@dataclass(frozen=True)
class StaticConsensus(ConsensusGraph):
    """All rounds, every point a candidate."""

    def __call__(
        self, scores: Value, positions0: Value, positions1: Value, mass: Masses, start: PotentialValues
    ) -> tuple[Value, PotentialValues]:
        """As that of the base class."""
        corrected, found = scores, start
        for _ in range(self.rounds):
            found = unrolled(self.graph, corrected, mass, found, ROUGH)
            matches = self._matches(raised(self.graph, corrected, found))
            corrected = self._corrected(scores, positions0, positions1, *matches)
        return corrected, found

    def _owners(self, confidence: Value) -> Value:
        return self.graph.range(self.graph.size(confidence, 0))

    def _exact(self, x: Value) -> Value:
        return x  # OpenCV has no float64


def unrolled(
    g: Builder, scores: Value, mass: Masses, start: PotentialValues, iterations: int
) -> PotentialValues:
    """Potentials after so many updates of rows and columns."""
    rows, columns = g.Unsqueeze(start.u, [1]), g.Unsqueeze(start.v, [0])
    kernel = g.Exp(g.Max(scores + rows + columns, -80.0))
    a, b = None, g.full(g.size(scores, 1), 1.0)
    for _ in range(iterations):
        a = mass.rows / g.Squeeze(kernel @ g.Unsqueeze(b, [1]), [1])
        b = mass.columns / g.Squeeze(g.Unsqueeze(a, [0]) @ kernel, [0])
    return PotentialValues(start.u + g.Log(a), start.v + g.Log(b))
