"""A training recipe: everything that decides what the weights become, in one TOML file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path

from matcher.config import NetworkConfig, to_dict
from matcher.lab.pairs.planes import SceneRecipe
from matcher.lab.pairs.sources import SourceShares

DESCRIPTOR_DIMS = {"sift": 128, "learned": 64}  # of the front ends that describe training views


@dataclass(frozen=True)
class SourceRecipe(SourceShares):
    """Pairs beside those of the scenes: relief and planes made of photos, rendered rooms, real places."""

    pairs: int = 0  # to make; each is used several times, with other keypoints of it
    share: float = 0.0  # of the pairs to train on
    width: int = 640
    height: int = 480
    max_keypoints: int = 1024


@dataclass(frozen=True)
class PairRecipe:
    """How pairs are drawn from the views of a scene."""

    points: tuple[int, ...] = (256, 256, 512)  # per picture, drawn for each batch
    points_per_batch: int = 4096  # of both pictures; the number of pairs follows
    negative_share: float = 0.06  # pairs of unrelated scenes
    min_overlap: float = 0.25  # of the points; nine in ten pairs with less are drawn again
    crop_share: float = 0.5  # pairs whose points come from a window around a common place
    dropout: float = 0.15  # keypoints dropped at most
    turned_share: float = 0.5  # pairs turned by quarter turns, mostly both alike: a portrait, or upside down
    match_distance: float = 3.0  # pixels, mean of both views; nearer and mutual is a match
    unmatched_distance: float = 4.0  # pixels; farther is unmatched, between is ignored


@dataclass(frozen=True)
class OptimiserRecipe:
    """Muon for the matrices of the layers, AdamW for the rest; warm-up, a plateau, then a line to zero."""

    steps: int = 5000
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 60
    hold_share: float = 0.6  # of the steps before the rate begins to fall
    final_share: float = 0.01  # of the learning rate, at the end
    muon_rate: float = 2.0  # Muon's learning rate relative to AdamW's; 0 leaves everything to AdamW
    gradient_clip: float = 1.0
    average_decay: float = 0.999  # exponential moving average of the parameters
    inner_layers: int = 3  # layers below the last that are supervised at each step, drawn at random
    unrolled_iterations: int = 2  # Sinkhorn iterations that carry gradients
    sinkhorn_iterations: int = 6  # iterations that find where to linearise, without gradients
    matchability_weight: float = 0.1
    correspondence_weight: float = 2.0  # of the predicted correspondences of guided tokens
    start_share: float = 0.0  # of the parameters that the run began with, in what it ends with
    confidence_steps: int = 600  # second stage: confidence and match-probability heads on frozen features


@dataclass(frozen=True)
class Recipe:
    """A recipe names its network, its data and its optimisation."""

    name: str = "hybrid"
    start: str = ""  # weights to continue from, a shipped name or a file; none: random parameters
    front_end: str = ""  # weights file of the front end that describes training views; none: the shipped one
    # The front end that `start` was trained for, if it is another one, "shipped" or a file: the projection of
    # descriptors is fitted to `front_end` before the first step.
    start_front_end: str = ""
    seed: int = 0
    network: NetworkConfig = field(default_factory=NetworkConfig)
    scene: SceneRecipe = field(default_factory=SceneRecipe)
    sources: SourceRecipe = SourceRecipe()
    pair: PairRecipe = PairRecipe()
    optimiser: OptimiserRecipe = OptimiserRecipe()
    validate_every: int = 500  # steps
    validation_scenes: int = 48  # rendered from other photos than those to train on
    validation_pairs: int = 144  # of those scenes
    save_every: int = 100

    def rules(self) -> list[tuple[bool, str]]:
        """What must hold, each with what to tell a user of whom it does not."""
        scene, pair, optimiser = self.scene, self.pair, self.optimiser
        shares = {
            "scene.spatial_share": scene.spatial_share,
            "scene.full_rotation_share": scene.full_rotation_share,
            "sources.share": self.sources.share,
            "pair.negative_share": pair.negative_share,
            "pair.crop_share": pair.crop_share,
            "pair.dropout": pair.dropout,
            "pair.turned_share": pair.turned_share,
            "optimiser.hold_share": optimiser.hold_share,
            "optimiser.final_share": optimiser.final_share,
            "optimiser.start_share": optimiser.start_share,
            "optimiser.average_decay": optimiser.average_decay,
        }
        return [
            (Path(self.name).name == self.name != "", "name: must be a plain file name"),
            *_network_rules(self.network),
            *self._front_end_rules(),
            (scene.scenes >= 2 and scene.views >= 2, "scene.scenes, scene.views: at least 2 of each"),
            (
                self.validation_scenes >= 2 and self.validation_pairs >= 1,
                "validation_scenes, validation_pairs: at least 2 and 1",
            ),
            (
                min(scene.width, scene.height) >= 64 and not (scene.width % 4 or scene.height % 4),
                "scene.width, scene.height: multiples of 4, at least 64",
            ),
            (scene.max_zoom >= 1, "scene.max_zoom: at least 1"),
            (
                self.sources.pairs >= 2 or not self.sources.share,
                "sources.pairs: at least 2 where sources.share is above 0",
            ),
            (
                all(0 < n <= scene.max_keypoints for n in pair.points or (0,)),
                "pair.points: from 1 to scene.max_keypoints",
            ),
            (
                0 < pair.match_distance <= pair.unmatched_distance,
                "pair.match_distance: 0 to unmatched_distance",
            ),
            (optimiser.learning_rate > 0, "optimiser.learning_rate: above 0"),
            (optimiser.muon_rate >= 0, "optimiser.muon_rate: 0 or above"),
            (min(optimiser.steps, self.validate_every, self.save_every) >= 1, "steps: at least 1"),
            *((0 <= value <= 1, f"{key}: between 0 and 1") for key, value in shares.items()),
        ]

    def _front_end_rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.network.kind == "learned" or not (self.front_end or self.start_front_end),
                "front_end, start_front_end: only where network.kind is learned",
            ),
            (bool(self.start) or not self.start_front_end, "start_front_end: only with start"),
        ]


def _network_rules(network: NetworkConfig) -> list[tuple[bool, str]]:
    """Which networks can be trained; `check_config` decides which can be built."""
    kinds = " or ".join(DESCRIPTOR_DIMS)
    dim = DESCRIPTOR_DIMS.get(network.kind)
    return [
        (dim is not None, f"network.kind: {kinds}, the front ends that describe training views"),
        (network.descriptor_dim == dim, f"network.descriptor_dim: {dim} for network.kind {network.kind}"),
        (
            network.backbone is None and network.refinement is None,
            "network.backbone, network.refinement: dense networks cannot be trained",
        ),
    ]


def fingerprint(value: object) -> str:
    """A short hash of a configuration, to tell whether cached work belongs to it."""
    return hashlib.sha256(json.dumps(to_dict(value), sort_keys=True).encode()).hexdigest()[:16]
