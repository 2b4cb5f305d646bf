"""Export the graphs that `--engine onnx` runs without torch, to matcher/graphs; weights are no part of them.

Takes some minutes and needs `pip install 'onnxscript>=0.5'`. To be run after a change of a network's modules.
"""

import copy
import json
import sys
from collections.abc import Sequence

import onnx
import torch
from torch import Tensor

from matcher.config import ExtractorConfig
from matcher.export_onnx import (
    COUNTS,
    Assign,
    Begin,
    FrontEndPart,
    Part,
    dims,
    example,
    front_end_model,
    traced,
    trained_front_end,
)
from matcher.extract.learned import BORDER, FeatureNetwork
from matcher.match.network import MatchingNetwork
from matcher.onnx_engine import GRAPHS, ExportedNetwork, graph_key
from matcher.presets import PRESETS
from matcher.weights.files import find_weights, load_model

NETWORKS = ("hybrid-learned", "hybrid")


class Step(Part):
    """Tokens of both images → tokens after a layer, predicted positions of partners, and what is decided."""

    def forward(self, side0: Sequence[Tensor], side1: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of tokens of either image and their rotations, if any; where there are heads for them, the
        probabilities (1, T) of a partner and of its being known come last."""
        network, joined = self.network, [torch.cat(both, 1) for both in zip(side0, side1, strict=True)]
        found = (network.layers[0](joined[0], side0[0].shape[1], *joined[1:]),)
        if network.guidance is not None:
            found = network.guidance(found[0], 0)
        if not len(network.confidence):
            return found
        return (*found, *network.decision_logits(found[0], 0).sigmoid().unbind(-1))


def fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention (1, heads, N, d) by an operator of ONNX Runtime alone; it needs no matrix of all pairs."""
    rows = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    operator, heads = "com.microsoft::MultiHeadAttention", q.shape[1]
    found = torch.onnx.ops.symbolic(
        operator, rows, {"num_heads": heads}, dtype=q.dtype, shape=rows[0].shape, version=1
    )
    return found.unflatten(2, (heads, q.shape[3])).transpose(1, 2)


def without_weights(model: onnx.ModelProto) -> tuple[bytes, list[str]]:
    """A graph whose parameters are arrays outside it, and their names."""
    names = []
    for array in model.graph.initializer:
        if array.name.startswith("network."):
            names.append(array.name.removeprefix("network."))
            array.ClearField("raw_data")
            array.data_location = onnx.TensorProto.EXTERNAL
            array.external_data.add(key="location", value="weights")
    return model.SerializeToString(), names


def network_graphs(network: MatchingNetwork) -> ExportedNetwork:
    """The three graphs of a network for `matcher.onnx_engine`, without its weights."""
    config, network = network.config, copy.deepcopy(network).requires_grad_(False)
    for layer in network.layers:
        for block in (layer.self_block, layer.cross_block):
            block.attention.score = fused_attention
    given, varying, inputs = example(config)
    begun = dict(zip(("x", "positions", "rotations"), Begin(network)(*given), strict=False))
    models = {"begin": traced(Begin(network), given, varying, inputs, list(begun))}
    begun["predicted"] = begun["positions"]

    def graph(part: Part, names: list[str], outputs: list[str], **more: Tensor) -> onnx.ModelProto:
        """The graph of a part that takes what `Begin` gave, of either image, and `more`."""
        # Clones: a tensor that is given twice would be one input of the graph.
        sides = zip(*(begun[name].clone().split(COUNTS, 1) for name in names), strict=True)
        varying = [[{1: dim}] * len(names) for dim in dims()] + [None] * len(more)
        inputs = [f"{name}{side}" for side in (0, 1) for name in names]
        return traced(part, (*map(list, sides), *more.values()), tuple(varying), [*inputs, *more], outputs)

    found = ["x"] + ["predicted"] * (network.guidance is not None)
    decided = config.assignment.every_layer and config.context.depth > 1
    names = [name for name in ("x", "rotations") if name in begun]
    models["step"] = graph(Step(network), names, found + ["probability", "confidence"] * decided)
    names, best = [found[0], "positions", *found[1:]], ["best", "partner", "mutual"]
    models["assign"] = graph(Assign(network), names, best, exits=torch.ones(1, dtype=torch.bool))
    parts = {name: without_weights(model) for name, model in models.items()}
    settings = {"weights": {name: weights for name, (_, weights) in parts.items()}}
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    return ExportedNetwork(shapes, {name: data for name, (data, _) in parts.items()}, settings)


def front_end_graph(network: FeatureNetwork, config: ExtractorConfig) -> ExportedNetwork:
    """The graph of our front end for `matcher.onnx_engine`, without its weights."""
    settings = {name: getattr(config, name) for name in ("score_threshold", "nms_radius")}
    settings |= {"border": BORDER, "stride": network.sizes.stride}
    shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    model = front_end_model(FrontEndPart(network, config))
    return ExportedNetwork(shapes, {"front_end": without_weights(model)[0]}, settings)


def write(name: str, exported, **settings) -> None:
    """One folder of `matcher/graphs`."""
    folder = GRAPHS / name
    folder.mkdir(parents=True, exist_ok=True)
    for part, data in exported.parts.items():
        (folder / f"{part}.onnx").write_bytes(data)
    described = {"shapes": exported.shapes, "settings": exported.settings | settings}
    (folder / "graph.json").write_text(json.dumps(described, indent=1) + "\n")


def main(names: list[str]) -> None:
    """Export the networks of these names, or all."""
    for name in names or (*NETWORKS, "learned"):
        if name == "learned":
            write(name, front_end_graph(*trained_front_end(ExtractorConfig(kind=name))))
        else:
            network = load_model(find_weights(name))[0].with_policy(PRESETS[name].matcher.policy)
            write(name, network_graphs(network), network=graph_key(network.config))


if __name__ == "__main__":
    main(sys.argv[1:])
