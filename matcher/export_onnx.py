"""Our networks as ONNX graphs, by `torch.onnx.export` of their own modules; needs torch and onnxscript.

For our engine a matcher is three graphs, `begin`, `step` (one layer) and `assign` (the heads of one layer),
which `scripts/build_graphs.py` writes and `matcher.onnx_engine` runs in its loop. For other programs all
layers on all points are one graph.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

from matcher.config import ExtractorConfig, NetworkConfig, PipelineConfig
from matcher.errors import UsageError
from matcher.extract.learned import BORDER, FeatureNetwork, candidates, subpixel
from matcher.files import MARK, check_output, write_whole
from matcher.match.consensus import ROUGH_ITERATIONS, SETTLED, agreement, soft_matches
from matcher.match.nearest import needed_fields
from matcher.match.network import MatchingNetwork
from matcher.match.position import Points, encoded, normalise_positions, position_inputs
from matcher.match.sinkhorn import CHECKED, LARGEST_SCALE, LEAST_EXPONENT, dual_softmax, masses, mutual_best
from matcher.match.steering import MIN_GAIN, STEERABLE_KIND, TURNED_EXIF, TURNS, distinctiveness, turned
from matcher.torch_engine import build_extractor
from matcher.weights import files

Numbers = Literal["float32", "float16", "int8"]
Program = Literal["any", "opencv", "colmap"]
FrontEnd = tuple[FeatureNetwork, ExtractorConfig]
MOST = 1 << 15  # keypoints of an image, and 32 pixels of a side
UNROLLED = 20  # Sinkhorn iterations at the end where a program has no loops


class Part(nn.Module):
    """A part of a network, whose parameters have the names of the weights file after `network.`."""

    def __init__(self, network: nn.Module, config: Any = None) -> None:
        super().__init__()
        self.network, self.config = network, config or network.config


class Begin(Part):
    """Points of two images → tokens (1, N+M, dim), their positions, and what turns queries and keys."""

    def forward(self, points0: dict[str, Tensor], points1: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Points of either image by the names of `Features`."""
        network, position = self.network, self.config.position
        sides = [SimpleNamespace(**points) for points in (points0, points1)]
        x = network.projected(torch.cat([side.descriptors for side in sides], 1))
        positions = torch.cat([normalise_positions(side) for side in sides], 1)
        if network.guidance is not None:
            inputs = [position_inputs(side, position.inputs) for side in sides]
            x = network.guidance.begin(x, torch.cat(inputs, 1))
        codes = network.position(torch.cat([encoded(position, side) for side in sides], 1))
        return (x, positions, codes) if position.kind == "rotary" else (x + codes, positions)


class Assign(Part):
    """Points of both images after a layer → of each of image 0 best log probability, partner, if mutual."""

    loops = True  # whether Sinkhorn stops when it has converged

    def forward(
        self, side0: Sequence[Tensor], side1: Sequence[Tensor], exits: Tensor | None = None, depth: int = 0
    ) -> tuple[Tensor, ...]:
        """Of (1, N, …) and (1, M, …), ordered as `Points`, by the heads of layer `depth`; `exits` (1,) bool:
        whether consensus may settle early. Without it all rounds are done."""
        network, config = self.network, self.config.assignment
        points = Points(*(torch.cat(both, 1) for both in zip(side0, side1, strict=True)))
        scores = network.scores(points, side0[0].shape[1], depth)
        if config.kind == "dual_softmax":
            return mutual_best(dual_softmax(scores).log_scores)[:3]
        columns_first = torch.zeros((), dtype=torch.bool)
        if config.tolerance is not None:  # as in `matcher.match.sinkhorn.sinkhorn`, image 1 may be the rows
            n, m = (torch.ones_like(side).sum() for side in (scores[0, :, -1], scores[0, -1]))
            lower = scores[0, -1, :-1].sum() < scores[0, :-1, -1].sum()
            columns_first = (n > m) | ((n == m) & lower)
        corrected, before, settled = scores, None, None
        u = torch.where(columns_first, 0.0, -scores.amax(2, keepdim=True))
        v = torch.where(columns_first, -scores.amax(1, keepdim=True).mT, 0.0)
        for _ in range(config.consensus):
            found = sinkhorn(corrected, u, v, columns_first, ROUGH_ITERATIONS, 1e-2, False)
            u, v = found if settled is None else _kept(settled, (u, v), found)
            matches = soft_matches((corrected + u + v.mT)[:, :-1, :-1])
            updated = network.consensus(scores, points.positions, matches)
            if before is not None and exits is not None:
                alike = (agreement(before, matches) > SETTLED) & exits
                settled = alike if settled is None else settled | alike
                (updated,) = _kept(settled, (corrected,), (updated,))
            corrected, before = updated, matches
        limit = config.max_iterations if self.loops else UNROLLED
        tolerance = -1.0 if config.tolerance is None else config.tolerance
        u, v = sinkhorn(corrected, u, v, columns_first, limit, tolerance, self.loops)
        return mutual_best((corrected + u + v.mT)[:, :-1, :-1])[:3]


def _kept(settled: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> list[Tensor]:
    return [torch.where(settled[:, None, None], *each) for each in zip(before, after, strict=True)]


def sinkhorn(
    scores: Tensor, u: Tensor, v: Tensor, columns_first: Tensor, limit: int, tolerance: float, loops: bool
) -> tuple[Tensor, Tensor]:
    """`matcher.match.sinkhorn.sinkhorn` of one problem as operations of a graph, potentials to potentials.

    Scores are (1, N+1, M+1) with the dustbins last, u and v (1, N+1, 1) and (1, M+1, 1) to begin with.
    Columns are updated first, and theirs is the error, where `columns_first`. The scales go into the
    potentials whenever the error is looked at; where they were out of their range, one more update follows,
    as there. Without `loops`, by the operator Loop, all iterations are done.
    """
    masks = [torch.ones_like(points, dtype=torch.bool) for points in (scores[:, :-1, 0], scores[:, 0, :-1])]
    (mu, nu), most = masses(scores, *masks), math.log(LARGEST_SCALE)
    # What the errors of points and of the dustbin weigh, of rows and of columns.
    counts = [mass[:, -1:].clamp_min(1.0) for mass in (nu, mu)]
    pairs = ((mu, *counts), (nu, *counts[::-1]))
    weights = [torch.cat([mass[:, :-1] * own.rsqrt(), 1 / other], 1) for mass, own, other in pairs]
    fixed = (scores, mu, nu, *weights, columns_first)

    def scaled(count: int, now: Sequence[Tensor], *fixed: Tensor) -> tuple[Tensor, ...]:
        """The state after some iterations: potentials, whether scales were out of range (0 or 1), error."""
        (u, v, out, _), (scores, mu, nu, weight0, weight1, columns_first) = now, fixed
        kernel = (scores + u + v.mT).clamp(LEAST_EXPONENT, -LEAST_EXPONENT).exp()

        def updated(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a = torch.where(columns_first, a, mu / torch.bmm(kernel, b))
            b = nu / torch.bmm(kernel.mT, a)
            return torch.where(columns_first, mu / torch.bmm(kernel, b), a), b

        ones = torch.ones_like(mu), torch.ones_like(nu)
        a, b = first = [torch.where(out > 0, *each) for each in zip(updated(*ones), ones, strict=True)]
        for _ in range(count):
            a, b = updated(a, b)
        errors = (a * torch.bmm(kernel, b) - mu) * weight0, (b * torch.bmm(kernel.mT, a) - nu) * weight1
        error = torch.where(columns_first, *(each.square().sum().sqrt() for each in errors[::-1]))
        gains = [(each / start).log().abs().max() for each, start in zip((a, b), first, strict=True)]
        out = torch.maximum(*gains) >= most
        return u + a.log(), v + b.log(), out.float(), torch.where(out, math.inf, error)

    now = (u, v, torch.zeros(()), torch.full((), math.inf))
    if loops:

        def go_on(count: Tensor, *state: Tensor) -> Tensor:
            return (count < limit) & ~(state[3] <= tolerance)

        def body(count: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
            found = scaled(CHECKED, state[:4], *state[4:])
            return count + CHECKED, *found, *(each.clone() for each in state[4:])

        start = (torch.zeros((), dtype=torch.int64), *(each.clone() for each in now))
        now = while_loop(go_on, body, (*start, *fixed))[1:5]
    else:
        for start in range(0, limit, CHECKED):
            after = scaled(min(CHECKED, limit - start), now, *fixed)
            now = [torch.where(now[3] <= tolerance, *each) for each in zip(now, after, strict=True)]
    last = scaled(0, now, *fixed)
    return torch.where(now[2] > 0, last[0], now[0]), torch.where(now[2] > 0, last[1], now[1])


class Pair(Assign):
    """Two images' points → matches: all layers on all points, and no other turns than the first."""

    def forward(self, points0: dict[str, Tensor], points1: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """`matches` (1, N, 2), best first, −1 where there are no more, and `scores` (1, N), 0 there."""
        partner, score = self.matched(points0, points1)
        order = score.argsort(dim=1, descending=True)
        score = score.gather(1, order)
        pairs = torch.stack([order, partner.gather(1, order)], 2)
        return torch.where(score.unsqueeze(2) > 0, pairs, -1), score

    def matched(self, points0: dict[str, Tensor], points1: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The partner (1, N) of every point of image 0, −1 where it has none, and its score, 0 there."""
        network, policy = self.network, self.config.policy
        if self.config.kind == STEERABLE_KIND:  # image 1 after the quarter turns that fit image 0 best
            every = torch.stack([turned(points1["descriptors"][0], turn) for turn in range(TURNS)])
            found = torch.stack([distinctiveness(points0["descriptors"][0] @ each.T) for each in every])
            turns = (found + found.new_tensor([MIN_GAIN, 0.0, 0.0, 0.0])).argmax(0, keepdim=True)
            views = [list(range(9))]
            for _ in range(1, TURNS):
                views.append([TURNED_EXIF[view] for view in views[-1]])
            view = turns.new_tensor(views)[turns, points1["matched_orientation"]]
            points1 = points1 | {"descriptors": every[turns], "matched_orientation": view}
        x, positions, *rotations = Begin(network)(points0, points1)
        n = points0["keypoints"].shape[1]
        predicted = None
        for depth, layer in enumerate(network.layers):
            x = layer(x, n, *rotations)
            if network.guidance is not None:
                x, predicted = network.guidance(x, depth)
        columns = [c for c in (x, positions, predicted) if c is not None]
        sides = [c[:, :n] for c in columns], [c[:, n:] for c in columns]
        best, partner, mutual = Assign.forward(self, *sides, depth=len(network.layers) - 1)
        score = best.exp().clamp(max=1.0) * mutual
        expected = (score * (score > policy.match_threshold)).sum().clamp_min(1e-6)
        least = policy.match_threshold * (1 + policy.threshold_doubles_at / expected)
        kept = score > least.clamp_min(policy.match_threshold)
        return torch.where(kept, partner, -1), score * kept


class FrontEndPart(Part):
    """An image → keypoints, best first, with scores and descriptors."""

    def forward(self, image: Tensor, mask: Tensor, max_keypoints: Tensor) -> tuple[Tensor, ...]:
        """`image` (1, 1, H, W) grey in [0, 1]; `mask` (H, W) bool, where points may be; their number (1,)."""
        config = self.config
        logits, maps = self.network(image)
        keep = mask & candidates(logits, config.nms_radius, 0)[0]
        y, x = (keep & (logits[0].sigmoid() > config.score_threshold)).nonzero().unbind(1)
        scores = logits[0][y, x].sigmoid()
        order = scores.argsort(descending=True)
        order = order[torch.arange(order.shape[0]) < max_keypoints]
        points = subpixel(logits, torch.stack([x[order], y[order]], 1)[None])
        return points[0], scores[order], self.network.describe(maps, points)[0]


def traced(
    part: Part, given: tuple[Any, ...], shapes: tuple[Any, ...], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    """The graph of a part, of examples of its arguments, whose axes vary as `shapes` says to `torch.export`,
    with the names of inputs, taken apart, and outputs."""
    # What torch says of its own code and of packages that it would have a use for is nothing to act on.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):
        program = torch.export.export(part.eval(), given, dynamic_shapes=shapes, strict=False)
        made = torch.onnx.export(
            program.run_decompositions({torch.ops.aten.slice_scatter.default: _with_slice}),
            dynamo=True,
            opset_version=20,  # of ONNX Runtime from 1.17 on
            optimize=False,
            verbose=False,
            input_names=list(inputs),
            output_names=list(outputs),
        )
    model = made.model_proto
    model.ir_version = 9  # of ONNX Runtime from 1.17 on
    model.producer_name = MARK.decode()
    del model.metadata_props[:]
    _strip(model.graph)
    return model


def _with_slice(whole: Tensor, part: Tensor, dim: int = 0, start: int = 0, *_: int | None) -> Tensor:
    """`aten.slice_scatter` of step 1 as one join; the exporter's own goes by way of transposes."""
    first = start + whole.shape[dim] if start < 0 else start
    after = first + part.shape[dim]
    rest = whole.narrow(dim, after, whole.shape[dim] - after)
    return torch.cat([whole.narrow(dim, 0, first), part, rest], dim)


def _strip(graph: onnx.GraphProto) -> None:
    """Take out what says where in our sources a node comes from."""
    del graph.metadata_props[:], graph.value_info[:]
    for each in (*graph.node, *graph.input, *graph.output, *graph.initializer):
        del each.metadata_props[:]
        each.doc_string = ""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _strip(attribute.g)


_OF_IMAGE = ("size", "matched_orientation")  # beside them an image's fields have an axis of points
COUNTS = (12, 15)  # of the points that graphs are traced with; any two do


def example(config: NetworkConfig, counts: Sequence[int] = COUNTS) -> tuple[tuple, tuple, list[str]]:
    """Made-up points of both images, which of their axes vary, and the names of the inputs that they are."""
    given = []
    for n in counts:
        made = {
            "keypoints": torch.rand(1, n, 2) * 100,
            "descriptors": nn.functional.normalize(torch.randn(1, n, config.descriptor_dim), dim=2),
            "scores": torch.rand(1, n),
            "scales": torch.rand(1, n) + 1,
            "orientations": torch.rand(1, n),
            "affine_frames": torch.rand(1, n, 2, 2),
            "size": torch.full((1, 2), 100.0),
            "matched_orientation": torch.ones(1, dtype=torch.int64),
        }
        fields = ["keypoints", "descriptors", *needed_fields(config), *_OF_IMAGE]
        given.append({name: made[name] for name in fields})
    varying = [{name: None if name in _OF_IMAGE else {1: dim} for name in fields} for dim in dims()]
    return tuple(given), tuple(varying), [f"{name}{side}" for side in (0, 1) for name in fields]


def dims() -> list[Any]:
    """The numbers of points of two images, which vary."""
    return [Dim(name, min=1, max=MOST) for name in "NM"]


def _sides(stride: int) -> list[Any]:
    return [stride * Dim(name, min=1, max=MOST // stride) for name in "hw"]


def front_end_model(part: FrontEndPart) -> onnx.ModelProto:
    """The graph of our front end."""
    stride = part.network.sizes.stride
    height, width = _sides(stride)
    given = torch.rand(1, 1, 3 * stride, 5 * stride), torch.ones(3 * stride, 5 * stride, dtype=torch.bool)
    return traced(
        part,
        (*given, torch.tensor([500])),
        ({2: height, 3: width}, {0: height, 1: width}, None),
        ["image", "mask", "max_keypoints"],
        ["keypoints", "scores", "descriptors"],
    )


def trained_front_end(config: ExtractorConfig, weights: str | Path | None = None) -> FrontEnd:
    """Our front end with its parameters, and its configuration with all settings."""
    extractor = build_extractor(config, weights, precision="float32")
    return extractor.network, extractor.config


class OpencvFrontEnd(FrontEndPart):
    """For `cv2.ALIKED`: always as many keypoints; the last of an image with fewer have score 0.

    The classes pass positions from −1 to 1 in x and in y, which does not tell how wide an image is, and
    nothing else but descriptors: so two columns, (width, height) / the longer of both, are appended to these.
    """

    points = 512

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """`image` (1, 3, H, W) RGB, 0 to 1 → `keypoints` (N, 2), `descriptors` (N, D + 2), `scores` (N,)."""
        logits, maps = self.network(_grey(image))
        scores, config = logits.sigmoid(), self.config
        keep = candidates(logits, config.nms_radius, BORDER) & (scores > config.score_threshold)
        scores, index = torch.where(keep, scores, 0.0).flatten(1).topk(self.points, dim=1)
        width, sides = image.shape[3], image.new_tensor(image.shape[:1:-1])
        points = torch.stack([index % width, index.div(width, rounding_mode="floor")], dim=2)
        points = subpixel(logits, points)
        descriptors = self.network.describe(maps, points)[0] * (scores[0] > 0).unsqueeze(1)
        aspect = (sides / sides.max()).expand(self.points, 2)
        return points[0] / sides * 2 - 1, torch.cat([descriptors, aspect], 1), scores[0]


class OpencvPair(Pair):
    """For `cv2.LightGlueMatcher`; OpenCV has no loops."""

    loops = False

    def forward(self, kpts0: Tensor, kpts1: Tensor, desc0: Tensor, desc1: Tensor) -> tuple[Tensor, ...]:
        """(1, N, 2) from −1 to 1, (1, N, D + 2) → `matches0` (N, 2), `mscores0` (N,), a row a point."""
        sides = []
        for points, descriptors in ((kpts0, desc0), (kpts1, desc1)):
            size = descriptors[:, 0, -2:]
            size = size / size.amax(1, keepdim=True)  # OpenCV may have divided descriptors by their length
            values = nn.functional.normalize(descriptors[:, :, :-2], dim=2, eps=1e-6)
            # The longer side has 1024 pixels: where the first one's centre is hardly matters.
            sides.append(_side((points + 1) / 2 * size * 1024 - 0.5, values, size * 1024))
        partner, score = self.matched(*sides)
        return torch.stack([torch.arange(score.shape[1]), partner[0]], 1), score[0]


class InnerFrontEnd(FrontEndPart):
    """For other programs: what the engine leaves out by the mask it gives, the graph does by itself."""

    def forward(self, image: Tensor, mask: Tensor, max_keypoints: Tensor) -> tuple[Tensor, ...]:
        """As there, without points near the edge of the image, which ends where the mask does."""
        for axis, side in enumerate(mask.shape):
            at = torch.arange(side)
            end = torch.where(mask.any(1 - axis), at + 1, 0).amax(0)
            mask = mask & ((at >= BORDER) & (at < end - BORDER)).unsqueeze(1 - axis)
        return super().forward(image, mask, max_keypoints)


class ColmapFrontEnd(InnerFrontEnd):
    """For COLMAP's `--AlikedExtraction.n16rot_model_path`."""

    def forward(self, image: Tensor, max_keypoints: Tensor, min_score: Tensor) -> tuple[Tensor, ...]:
        """RGB (1, 3, H, W) in [0, 1], a number, a least score → keypoints from −1, the centre of the first
        pixel, to 1, that of the last, descriptors and scores, (1, N, …) each."""
        whole = torch.ones_like(image[0, 0], dtype=torch.bool)
        grey = (_grey(image) * 255).round() / 255
        points, scores, described = super().forward(grey, whole, max_keypoints)
        good = scores >= min_score
        last = torch.stack([side * torch.ones(()) for side in image.shape[:1:-1]]) - 1
        return (points[good] * 2 / last - 1)[None], described[good][None], scores[good][None]


class ColmapPair(Pair):
    """For COLMAP's `--AlikedMatching.lightglue_model_path`."""

    def forward(
        self, kpts0: Tensor, kpts1: Tensor, desc0: Tensor, desc1: Tensor, size0: Tensor, size1: Tensor
    ) -> tuple[Tensor, ...]:
        """Pixels (1, N, 2), descriptors (1, N, D), sizes (1, 2) → `matches0` (N,), `mscores0` (N,)."""
        partner, score = self.matched(_side(kpts0, desc0, size0), _side(kpts1, desc1, size1))
        return partner[0], score[0]


def _grey(image: Tensor) -> Tensor:
    return (image * image.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _side(keypoints: Tensor, descriptors: Tensor, size: Tensor) -> dict[str, Tensor]:
    view = torch.ones(1, dtype=torch.int64)
    return {"keypoints": keypoints, "descriptors": descriptors, "size": size, "matched_orientation": view}


_FOUND = ["keypoints", "descriptors", "scores"]
_PORTS = ["kpts0", "kpts1", "desc0", "desc1"], ["matches0", "mscores0"]


def _for_opencv(
    network: MatchingNetwork, front_end: FrontEnd, size: tuple[int, int]
) -> list[onnx.ModelProto]:
    """Front end and matcher for images of this size."""
    detector, width = OpencvFrontEnd(*front_end), network.config.descriptor_dim + 2
    given = tuple(torch.rand(1, detector.points, n) for n in (2, 2, width, width))
    first = traced(detector, (torch.rand(1, 3, *size[::-1]),), (None,), ["image"], _FOUND)
    return [_folded(first), _folded(traced(OpencvPair(network), given, (None,) * 4, *_PORTS))]


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph folded to what OpenCV reads: without float64, what ConstantOfShape fills in always given."""
    from onnxscript.optimizer import optimize

    zero = onnx.numpy_helper.from_array(torch.zeros(1).numpy())
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(onnx.helper.make_attribute("value", zero))
        for attribute in node.attribute if node.op_type == "Cast" else ():
            if attribute.i == onnx.TensorProto.DOUBLE:
                attribute.i = onnx.TensorProto.FLOAT
    for array in model.graph.initializer:
        if array.data_type == onnx.TensorProto.DOUBLE:
            values = onnx.numpy_helper.to_array(array).astype("float32")
            array.CopyFrom(onnx.numpy_helper.from_array(values, array.name))
    return optimize(model)


def _for_colmap(network: MatchingNetwork, front_end: FrontEnd) -> list[onnx.ModelProto]:
    """Front end and matcher; COLMAP pads images to multiples of 32 and drops points there."""
    image = torch.rand(1, 3, 96, 160), torch.tensor(500), torch.tensor(0.004)
    shapes = dict(zip((2, 3), _sides(front_end[0].sizes.stride), strict=True)), None, None
    inputs = ["image", "max_keypoints", "min_score"]
    first = traced(ColmapFrontEnd(*front_end), image, shapes, inputs, _FOUND)
    given = [torch.rand(1, n, width) for width in (2, network.config.descriptor_dim) for n in COUNTS]
    given += [torch.full((1, 2), 100.0) for _ in COUNTS]
    varying, inputs = [{1: dim} for dim in dims()], [*_PORTS[0], "image_size0", "image_size1"]
    return [first, traced(ColmapPair(network), tuple(given), (*varying * 2, None, None), inputs, _PORTS[1])]


def in_numbers(model: onnx.ModelProto, numbers: Numbers) -> onnx.ModelProto:
    """A graph whose weights are float32, float16 (widened when a runtime loads it) or int8: maps, whose
    inputs are quantised as they come, convolutions being in float16."""
    if numbers == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxscript.optimizer import optimize

        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("whole.onnx", "int8.onnx")]
            onnx.save(optimize(model), paths[0])
            quantize_dynamic(*paths, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
            model = onnx.load(paths[1])
    if numbers != "float32":
        casts = []
        for array in model.graph.initializer:
            if array.data_type == onnx.TensorProto.FLOAT and math.prod(array.dims) >= 64:
                name, values = array.name, onnx.numpy_helper.to_array(array)
                array.CopyFrom(onnx.numpy_helper.from_array(values.astype("float16"), f"{name} in half"))
                casts.append(onnx.helper.make_node("Cast", [array.name], [name], to=onnx.TensorProto.FLOAT))
        nodes = [*casts, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return model


_PIXELS = "pixels, the centre of the first one at (0, 0)"
_CONVENTIONS = {  # by program: images and keypoints of the front end, and keypoints of the matcher
    "any": ("grey, 0 to 1, sides multiples of 32", _PIXELS, _PIXELS),
    "opencv": ("RGB, 0 to 1, {} x {}", *["-1 to 1 across the image"] * 2),
    "colmap": ("RGB, 0 to 1, any size", "-1 to 1, centres of the first and last pixel", _PIXELS),
}
_PORTS_OF_ANY = {  # their other ports, S standing for 0 and 1
    "front end": {"mask": "rows, columns; true where the image is; no keypoint within 4 pixels of its edge"},
    "matcher": {
        "keypointsS": "at least one; see keypoints",
        "sizeS": "width, height of the image in pixels",
        "matched_orientationS": "EXIF code of how the image was turned, 1 if it was not",
        "matches": "indices of keypoints of image 0 and 1, best first; -1 where there are no more",
    },
}


def export_preset(
    preset: str,
    config: PipelineConfig,
    folder: str | Path,
    program: Program = "any",
    *,
    size: tuple[int, int] = (640, 480),
    numbers: Numbers = "float32",
    weights: str | Path | None = None,
    frontend_weights: str | Path | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Write a preset's front end, if it is ours, and its matcher, if it is a network, as ONNX files.

    `learned.onnx`: `image` (1, 1, H, W) grey in [0, 1], repeated at the right and lower edge to multiples of
    32; `mask` (H, W) bool, True where the image is and keypoints may lie, none of which is within 4 pixels of
    its edge, beyond which all is False; `max_keypoints` (1,) int64. Out, best first: `keypoints` (N, 2) xy in
    pixels, the centre of the first one being (0, 0); `scores` (N,); `descriptors` (N, D).

    `PRESET.onnx`, S standing for 0 and 1: `keypointsS` (1, N, 2) in stored pixels, `descriptorsS` (1, N, D),
    `sizeS` (1, 2) width and height, `matched_orientationS` (1,) int64 EXIF codes, 1 for none; where the
    network needs them `scoresS`, `scalesS`, `orientationsS` (1, N), `affine_framesS` (1, N, 2, 2), as in
    `Features`; at least one keypoint each: without, there are no matches to ask for. Out: `matches` (1, N, 2)
    int64, best first, −1 where there are no more; `scores` (1, N), not calibrated. All layers run on all
    keypoints.

    The program "opencv" gets `opencv-learned.onnx` for `cv2.ALIKED` and `opencv-PRESET.onnx` for
    `cv2.LightGlueMatcher`, of 512 keypoints and images that OpenCV resizes to `size`, width and height,
    multiples of 32; "colmap" `colmap-learned.onnx` for its ALIKED and `colmap-PRESET.onnx` for its LightGlue.
    COLMAP's feature types are a fixed list, so ours are stored as `ALIKED_N16ROT`; nothing there depends on
    the width of their descriptors. The metadata of a file say what it is, takes and gives, and of the weights
    name, SHA-256 and licence. `UsageError`: nothing of the preset can be written so, or a file exists or
    cannot be written; `IntegrityError`: weights are absent or damaged.
    """
    own, trained = config.extractor.kind == STEERABLE_KIND, isinstance(config.matcher, NetworkConfig)
    if program != "any" and not (own and trained):
        raise UsageError(f"this takes our own front end with its network, hybrid-learned, not {preset}")
    if program == "opencv" and any(side < 32 or side % 32 for side in size):
        raise UsageError(f"width and height must be multiples of 32, not {size[0]} and {size[1]}")
    for name, value, has in (("weights", weights, trained), ("frontend_weights", frontend_weights, own)):
        if value is not None and not has:
            raise UsageError(f"{preset} has nothing to export there, so {name} has no effect; leave it out")
    if not own and not trained:
        raise UsageError(f"{preset} has no network of keypoints or matches, so there is nothing to export")
    network, front_end = None, trained_front_end(config.extractor, frontend_weights) if own else None
    first = (frontend_weights or files.locate_front_end(config.extractor)) if own else None
    stored = [] if first is None else [files.weights_bytes(Path(first))]
    if trained:
        stored.append(files.find_weights(weights or config.weights))
        network = files.load_model(stored[-1])[0].with_policy(config.matcher.policy).requires_grad_(False)
        if network.backbone is not None:
            raise UsageError(f"{preset} matches the cells of a grid (LoFTR), which cannot be written as ONNX")
    names = [config.extractor.kind] * own + [preset] * trained
    paths = [Path(folder) / f"{'' if program == 'any' else program + '-'}{name}.onnx" for name in names]
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made a folder ({error.strerror}): name another one") from error
    for path in paths:
        check_output(path, (".onnx",), overwrite=overwrite)
    if program == "any":
        models = [front_end_model(InnerFrontEnd(*front_end))] if own else []
        if trained:
            models.append(traced(Pair(network), *example(network.config), ["matches", "scores"]))
    else:
        given = network, front_end
        models = _for_opencv(*given, size) if program == "opencv" else _for_colmap(*given)
    image, *keypoints = _CONVENTIONS[program]
    parts = [{"part": "front end", "image": image.format(*size), "keypoints": keypoints[0]}] * own
    parts += [{"part": "matcher", "keypoints": keypoints[1], "scores": "not calibrated"}] * trained
    for part in parts if program == "any" else ():
        part |= _PORTS_OF_ANY[part["part"]]
    made = [in_numbers(model, numbers) for model in models]
    package = f"matcher {sys.modules['matcher'].__version__}"
    licences = {row.sha256: row.licence for row in files.read_manifest().values()}
    for path, model, part, file in zip(paths, made, parts, stored, strict=True):
        licence = licences.get(file.sha256) or files.read_header(file.data).get("licence", "unknown")
        part |= {"weights": file.name, "weights_sha256": file.sha256, "weights_licence": licence}
        onnx.helper.set_model_props(model, {"package": package, "preset": preset} | part)
        write_whole(path, model.SerializeToString())
    return paths
