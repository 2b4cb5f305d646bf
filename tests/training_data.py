"""Small photos, stored views, recipes and batches for the tests of training."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

from matcher.config import PositionConfig, from_dict
from matcher.extract.learned import Architecture
from matcher.train.pairs import IGNORED, PairBatch
from matcher.train.recipe import FrontEndRecipe, MatcherRecipe, Recipe, SourceRecipe
from matcher.train.views import render_planes
from matcher.types import UNMATCHED, Features

# A matcher of SIFT keypoints, of our front end's, that front end, and both together.
TINY_TOML = """
validate_every = 3
validation_pairs = 2
save_every = 2
sources = {planes = 1.0, spaces = 0.0}
pair = {width = 160, height = 128, points = [32], points_per_batch = 256}
optimiser = {steps = 6, warmup_steps = 2}
[matcher]
name = "tiny"
inner_layers = 1
confidence_steps = 4
network.context = {dim = 32, heads = 2, depth = 2}
network.guided = true
network.assignment.consensus = 1
network.match_probability = true
"""
SIFT = replace(from_dict(Recipe, tomllib.loads(TINY_TOML)), sources=SourceRecipe())
LEARNED_NETWORK = replace(
    SIFT.matcher.network, kind="learned", descriptor_dim=64, position=PositionConfig(inputs=("xy",))
)
LEARNED = replace(
    SIFT,
    pair=replace(SIFT.pair, turned_share=0.3, negative_share=0.1),
    matcher=replace(SIFT.matcher, network=LEARNED_NETWORK, kept_shares=(1.0, 0.5)),
)
FRONT_END = replace(
    LEARNED,
    pair=replace(LEARNED.pair, pairs=2),
    front_end=FrontEndRecipe(
        train=True,
        name="front",
        start="",
        network=Architecture((8, 8, 16), (1, 1, 1), 16),
        points=40,
        described=30,
    ),
    matcher=MatcherRecipe(train=False, network=LEARNED_NETWORK),
)
BOTH = replace(FRONT_END, matcher=LEARNED.matcher)
KINDS = {"sift": SIFT, "learned": LEARNED, "front end": FRONT_END, "both": BOTH}


def texture(rng: np.random.Generator, height: int = 120, width: int = 160, finest: int = 3) -> np.ndarray:
    """(height, width) uint8 noise of several scales; the finest detail spans about `finest` pixels."""
    total = np.zeros((height, width), np.float32)
    for cell in (finest, 2 * finest, 5 * finest, 12 * finest):
        coarse = rng.normal(size=(height // cell + 2, width // cell + 2)).astype(np.float32)
        total += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    return (128 + 35 * total).clip(0, 255).astype(np.uint8)


def write_photos(folder: Path, count: int, seed: int = 0) -> Path:
    """A folder of `count` generated pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        cv2.imwrite(str(folder / f"{number:02d}.png"), texture(np.random.default_rng([seed, number])))
    return folder


def write_views(folder: Path, seed: int) -> None:
    """A set of three stored views of a wall; depth of every second pixel, with a hole in it."""
    folder.mkdir(parents=True)
    pixels = texture(np.random.default_rng(seed), 600, 600, finest=6)
    # Texture pixel (u, v) lies at (u − 299.5, v − 299.5) · 5 / 600 on the wall z = 3.
    wall = np.array([[5 / 600, 0, -2.5], [0, 5 / 600, -2.5], [0, 0, 3.0]])
    K = np.array([[300.0, 0, 159.5], [0, 300.0, 119.5], [0, 0, 1]])
    rows = []
    for number in range(3):
        pose = np.eye(4)
        pose[0, 3] = -0.3 * number
        view = render_planes([pixels], [wall], K, pose, np.zeros((240, 320), np.uint8))
        cv2.imwrite(str(folder / f"{number}.png"), np.stack([view.pixels] * 3, -1))
        depth = np.rint(1000 / view.inverse_depth).astype(np.uint16)
        depth[:10] = 0
        cv2.imwrite(str(folder / f"{number}_depth.png"), depth)
        row = {"image": f"{number}.png", "depth": f"{number}_depth.png", "group": 0}
        rows.append({**row, "K": K.tolist(), "E": pose.tolist()})
    (folder / "cameras.json").write_text(json.dumps({"depth_step": 2, "views": rows}), encoding="utf-8")


def random_batch(rng: np.random.Generator, pairs: int = 3, points: int = 12) -> PairBatch:
    """SIFT features whose second picture is the first one, shuffled and shifted, with some strangers."""
    descriptors = np.abs(rng.normal(size=(pairs, points, 128))).astype(np.float32)
    descriptors /= np.linalg.norm(descriptors, axis=2, keepdims=True)
    order = np.stack([rng.permutation(points) for _ in range(pairs)])
    places = rng.uniform(0, 100, (pairs, points, 2)).astype(np.float32)
    second, moved = (np.take_along_axis(x, order[..., None], 1) for x in (descriptors, places + 5))
    partner0, partner1 = np.argsort(order, axis=1), order.copy()
    for row0, row1 in zip(partner0, partner1, strict=True):
        row1[row0[:2]], row0[:2] = (UNMATCHED, IGNORED), (UNMATCHED, IGNORED)
    features = [
        Features(
            keypoints=xy,
            descriptors=values,
            size=np.full((pairs, 2), 120.0),
            scales=np.full((pairs, points), 3.0),
            orientations=np.zeros((pairs, points)),
            kind="sift",
        )
        for xy, values in ((places, descriptors), (moved, second))
    ]
    there0, there1 = (torch.from_numpy(x.astype(np.float32)) for x in (places + 5, moved - 5))
    there0[:, 2] = torch.nan  # out of sight
    return PairBatch(*features, torch.from_numpy(partner0), torch.from_numpy(partner1), there0, there1)


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, optimiser=replace(recipe.optimiser, steps=steps))


def from_sources(recipe: Recipe, **shares: float) -> Recipe:
    return replace(recipe, sources=replace(SourceRecipe(planes=0.0, spaces=0.0), **shares))
