"""Train variants of the default network for the same short time each and compare them.

    python scripts/ablate.py --run runs/ablations [--minutes 20] [--only NAME] [--device cuda] [--threads 1]

Prints one Markdown table and keeps each finished variant in the run folder, so that the same command resumes
an interrupted comparison. Photos are those of `matcher train`: $MATCHER_DATA/photos/train and …/val. The
table has precision, recall and F1 of the most probable partners on photos that are not trained on, with all
layers.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from matcher.config import ALL_LAYERS, NetworkConfig, PositionConfig
from matcher.errors import MatcherError
from matcher.images import data_folder
from matcher.train.recipe import read_recipe, shipped_recipe
from matcher.train.run import RunOptions, train
from matcher.weights.files import load_model, read_header

DEPTH = 5  # of the ablated networks

Change = Callable[[NetworkConfig], NetworkConfig]


def resized(dim: int, depth: int) -> Change:
    """Channels and layers; heads of 64 channels."""
    return lambda net: replace(net, context=replace(net.context, dim=dim, heads=dim // 64, depth=depth))


def assigned(**values: object) -> Change:
    """Other settings of the assignment."""
    return lambda net: replace(net, assignment=replace(net.assignment, **values))


def without_positions(net: NetworkConfig) -> NetworkConfig:
    """No positions in the network: no encoding, guidance or consensus."""
    return replace(assigned(consensus=0)(net), guided=False, position=PositionConfig(kind="none"))


ABLATIONS: dict[str, Change] = {
    "full network": lambda net: net,
    "no positional encoding": without_positions,
    "no guidance": lambda net: replace(net, guided=False),
    "no consensus": assigned(consensus=0),
    "one fixed dustbin, no consensus": assigned(consensus=0, dustbin="learned"),
    "dual softmax, no consensus": assigned(consensus=0, kind="dual_softmax"),
    "half the layers": resized(128, (DEPTH + 1) // 2),
}
SIZES: dict[str, Change] = {
    f"{dim} × {depth}": resized(dim, depth) for dim, depth in [(128, 6), (128, 9), (192, 6), (256, 6)]
}


def main() -> int:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of this comparison")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, for each variant")
    parser.add_argument("--only", choices=[*ABLATIONS, *SIZES], help="one variant; default: all")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    base, photos, rows = read_recipe(shipped_recipe("hybrid")), data_folder() / "photos", []
    for name in [given.only] if given.only else [*ABLATIONS, *SIZES]:
        network = replace(base.matcher.network, match_probability=False, policy=ALL_LAYERS)
        network = (ABLATIONS | SIZES)[name](network if name in SIZES else resized(128, DEPTH)(network))
        matcher = replace(base.matcher, name="variant", start="", network=network, confidence_steps=0)
        optimiser = replace(base.optimiser, steps=10**6, minutes=given.minutes, learning_rate=1e-3)
        recipe = replace(base, matcher=matcher, optimiser=optimiser, validate_every=10**6)
        folder = given.run / name.replace(" ", "-").replace(",", "")
        options = RunOptions(photos / "train", photos / "val", folder, given.device)
        try:
            weights = train(
                recipe, options, lambda line, name=name: print(f"{name}: {line}", file=sys.stderr)
            )
        except MatcherError as error:
            print(error, file=sys.stderr)
            return 2
        run = json.loads(read_header(weights.read_bytes())["training"])
        parameters = sum(value.numel() for value in load_model(weights)[0].parameters())
        found, pairs = run["validation"], run["history"][-1]["pairs"]
        scores = f"{found['precision']:.3f} / {found['recall']:.3f} | {found['f1']:.3f}"
        rows.append(f"| {name} | {parameters:,} | {pairs:,} | {scores} |")
    print(f"| network, {given.minutes:g} minutes each | parameters | pairs | precision / recall | F1 |")
    print("|---|---|---|---|---|", *rows, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
