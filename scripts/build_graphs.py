"""Export the graphs that `--engine onnx` runs without torch, to matcher/graphs; weights are no part of them.

Takes some minutes and needs `pip install 'onnxscript>=0.5'`. To be run after a change of a network's modules.
"""

import json
import sys

from matcher.config import ExtractorConfig
from matcher.export_onnx import front_end_graph, network_graphs, trained_front_end
from matcher.onnx_engine import GRAPHS, graph_key
from matcher.presets import PRESETS
from matcher.weights.files import find_weights, load_model

NETWORKS = ("hybrid-learned", "hybrid")


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
