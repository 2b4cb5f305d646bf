"""Train variants of the default network for the same short time each and compare them.

    python scripts/ablate.py --run runs/ablations [--minutes 20] [--only sizes] [--device cuda] [--threads 1]

Prints one Markdown table and keeps each finished variant in the run folder, so that the same command resumes
an interrupted comparison. Photos are those of `matcher train`: $MATCHER_DATA/photos/train and …/val. The
table has precision and recall at the recipe's match distance on views of photos that are not trained on, at
the threshold with the best F1, with all layers.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from matcher.config import NetworkConfig, PositionConfig
from matcher.errors import MatcherError
from matcher.evaluate.protocols import PhotoSet
from matcher.files import write_whole
from matcher.images import data_folder, find_images
from matcher.train.cached_pairs import (
    PairSampler,
    ViewCache,
    ViewPair,
    keep_memory,
    read_recipe,
    shipped_recipe,
)
from matcher.train.matcher_training import Trainer, validate, validation_pairs
from matcher.train.recipe import Recipe, claim_folder

TRIAL_STEPS = 12  # to measure the speed of a variant, which decides its number of steps
VALIDATION_SCENES, VALIDATION_POINTS = 96, 512
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
    without = assigned(consensus=0)(net)
    return replace(without, guided=False, position=PositionConfig(kind="none"))


ABLATIONS: dict[str, Change] = {
    "full network": lambda net: net,
    "no cross-attention": lambda net: net,  # its blocks are disabled in `build`
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of this comparison")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, for each variant")
    parser.add_argument("--only", help="ablations, sizes, or a variant's name; default: everything")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_memory()
    try:
        compare(options)
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def compare(options: argparse.Namespace) -> None:
    """Train what is missing, then print the table.

    Raises:
        MatcherError: no photos, or a folder that belongs to another recipe.
    """
    base = replace(read_recipe(shipped_recipe("hybrid")), name="ablation", start="")
    claim_folder(options.run, base)
    sampler, pairs = open_views(base, options.run.parent / "cache")
    recipes = {name: variant(base, name) for name in chosen(options.only)}
    paces = measure_paces(recipes, sampler, options)
    rows = []
    for name, recipe in recipes.items():
        kept = options.run / f"{name.replace(' ', '-')}-{options.minutes:g}.json"
        if not kept.exists():
            steps = max(1, int(60 * options.minutes / paces[name]))
            recipe = replace(recipe, optimiser=replace(recipe.optimiser, steps=steps))
            write_whole(kept, json.dumps(train_variant(name, recipe, sampler, pairs, options)).encode())
        rows.append(json.loads(kept.read_text(encoding="utf-8")))
    print(
        f"| network, {options.minutes:g} minutes each | parameters | pairs seen | precision / recall | F1 |"
    )
    print("|---|---|---|---|---|")
    for row in rows:
        found = f"{row['precision']:.3f} / {row['recall']:.3f} | {row['f1']:.3f}"
        print(f"| {row['name']} | {row['parameters']:,} | {row['pairs']:,} | {found} |")


def chosen(only: str | None) -> dict[str, Change]:
    groups = {"ablations": ABLATIONS, "sizes": SIZES, None: ABLATIONS | SIZES}
    if only in groups:
        return groups[only]
    if only not in groups[None]:
        raise MatcherError(f"--only {only!r}: not one of ablations, sizes, {', '.join(groups[None])}")
    return {only: groups[None][only]}


def without_early_exit(net: NetworkConfig) -> NetworkConfig:
    """Without early exit and pruning, whose heads are not trained here."""
    policy = replace(net.policy, early_exit=False, pruning=False)
    return replace(net, policy=policy, match_probability=False)


def open_views(recipe: Recipe, cache: Path) -> tuple[PairSampler, list[ViewPair]]:
    """Training pairs and fixed validation pairs; missing views are rendered first."""
    photos = data_folder() / "photos"
    held_out = replace(recipe, seed=recipe.seed + 1, scene=replace(recipe.scene, scenes=VALIDATION_SCENES))
    samplers = []
    for part, ours in (("train", recipe), ("val", held_out)):
        found = find_images(photos / part)
        views = ViewCache(cache, ours, found)
        for _ in views.make(PhotoSet(found), range(ours.scene.scenes)):
            pass
        samplers.append(PairSampler(views, recipe.pair, 0))
    return samplers[0], validation_pairs(samplers[1], VALIDATION_SCENES, VALIDATION_POINTS)


def variant(base: Recipe, name: str) -> Recipe:
    """The recipe of one variant."""
    shape = (ABLATIONS | SIZES)[name](base.network if name in SIZES else resized(128, DEPTH)(base.network))
    return replace(base, network=without_early_exit(shape))


def measure_paces(
    recipes: dict[str, Recipe], sampler: PairSampler, options: argparse.Namespace
) -> dict[str, float]:
    """Seconds per step of every variant, kept in the run folder.

    Measured before any variant is trained, so that later load on the machine does not change their steps.
    """
    kept = options.run / "paces.json"
    paces = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name, recipe in recipes.items():
        if name in paces:
            continue
        trainer, seconds = build(name, recipe, options.device), []
        for step in range(TRIAL_STEPS):
            batch, started = sampler.batch(step), time.perf_counter()
            trainer.step(batch)
            seconds.append(time.perf_counter() - started)
        paces[name] = statistics.median(seconds)
        print(f"{name}: {paces[name]:.2f} s per step", file=sys.stderr)
        write_whole(kept, json.dumps(paces).encode())
    return paces


def train_variant(
    name: str, recipe: Recipe, sampler: PairSampler, pairs: list[ViewPair], options: argparse.Namespace
) -> dict[str, float | str]:
    """Train one variant for the steps of its recipe; returns its row of the table."""
    trainer, steps = build(name, recipe, options.device), recipe.optimiser.steps
    for batch in sampler.batches(0, steps):
        loss = trainer.step(batch)
        if trainer.progress.step % 50 == 0:
            print(f"{name}: step {trainer.progress.step} of {steps}, loss {loss:.3f}", file=sys.stderr)
    network = trainer.average
    best = validate(network, pairs, recipe.pair, options.device)
    parameters = sum(p.numel() for p in network.parameters())
    return {"name": name, "parameters": parameters, "pairs": trainer.progress.pairs, **best}


def build(name: str, recipe: Recipe, device: str) -> Trainer:
    """A new trainer of a variant."""
    trainer = Trainer(recipe, torch.device(device))
    if name == "no cross-attention":
        for network in (trainer.model, trainer.average):
            for layer in network.layers:
                layer.cross_block.forward = lambda x, n, mask=None: x
    return trainer


if __name__ == "__main__":
    sys.exit(main())
