"""A training recipe: all settings of a training run, in one TOML file."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matcher.config import NetworkConfig
from matcher.config_tables import to_dict
from matcher.lab.pairs.planes import SceneRecipe
from matcher.lab.pairs.sources import SourceShares

SHARES = "above 0 and at most 1, and 1 among them"
DESCRIPTOR_DIMS = {"sift": 128, "learned": 64}  # of the front ends that can be trained on


@dataclass(frozen=True)
class SourceRecipe(SourceShares):
    """Pairs in addition to the scenes: relief and planes made of photos, rendered rooms, real scenes."""

    pairs: int = 0  # to render; each is used several times, with different keypoints
    share: float = 0.0  # of the training pairs
    width: int = 640
    height: int = 480
    max_keypoints: int = 1024


@dataclass(frozen=True)
class PairRecipe:
    """How pairs are drawn from the views of a scene."""

    points: tuple[int, ...] = (256, 256, 512)  # keypoints per image, drawn for each batch
    points_per_batch: int = 4096  # of both images; determines the number of pairs
    negative_share: float = 0.06  # pairs of unrelated scenes
    min_overlap: float = 0.25  # of the keypoints; nine in ten pairs below are drawn again
    crop_share: float = 0.5  # pairs whose keypoints come from a window around a covisible point
    dropout: float = 0.15  # largest share of keypoints that are dropped
    turned_share: float = 0.5  # pairs rotated by a multiple of 90 degrees, mostly both images by the same
    match_distance: float = 3.0  # pixels, mean of both views; mutual nearest neighbours below it match
    unmatched_distance: float = 4.0  # pixels; keypoints above it are unmatched, those in between ignored


@dataclass(frozen=True)
class OptimiserRecipe:
    """Muon for the matrices of the layers, AdamW for the rest; warm-up, a plateau, then a linear decay."""

    steps: int = 5000
    minutes: float = 0.0  # of training at most, which then ends before all steps are done; 0: any
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 60
    hold_share: float = 0.6  # of the steps, before the decay begins
    final_share: float = 0.01  # of the learning rate, at the end
    muon_rate: float = 2.0  # Muon's learning rate relative to AdamW's; 0 leaves everything to AdamW
    gradient_clip: float = 1.0
    frozen_layers: int = 0  # the first layers, and all before them, that keep the parameters of `start`
    average_decay: float = 0.999  # exponential moving average of the parameters
    # Shares of an image's points, the likeliest to match, that go on after one of the first layers, as after
    # pruning; one is drawn at each step. With any below 1 the heads for pruning learn along, where all go on.
    kept_shares: tuple[float, ...] = (1.0,)
    inner_layers: int = 3  # layers below the last that are supervised at each step, drawn at random
    unrolled_iterations: int = 2  # Sinkhorn iterations with gradients
    sinkhorn_iterations: int = 6  # iterations before them, without gradients
    matchability_weight: float = 1.0
    mean_similarity_weight: float = 1e-3  # against a drift of scores that no assignment shows
    correspondence_weight: float = 2.0  # of the predicted correspondences of guided tokens
    start_share: float = 0.0  # weight of the initial parameters in the final ones
    confidence_steps: int = 600  # second stage: confidence and match-probability heads on frozen features


@dataclass(frozen=True)
class Recipe:
    """Network, data and optimisation of a matcher."""

    name: str = "hybrid"
    start: str = ""  # weights to start from, a shipped name or a file; random parameters if empty
    # Layers of `start` that are used, the first is 0; all if empty. Further ones begin without effect.
    start_layers: tuple[int, ...] = ()
    front_end: str = ""  # weights file of the front end of the training views; the shipped one if empty
    # The front end that `start` was trained for, if it is another one, "shipped" or a file: the projection of
    # descriptors is fitted to `front_end` before the first step.
    start_front_end: str = ""
    seed: int = 0
    # Whether the device that trains makes the pairs, new ones for every batch, of warped photos
    # (`sources.planes`) and of stored views; `scene` then only describes what is validated on.
    pairs_on_device: bool = False
    network: NetworkConfig = field(default_factory=NetworkConfig)
    scene: SceneRecipe = field(default_factory=SceneRecipe)
    sources: SourceRecipe = SourceRecipe()
    pair: PairRecipe = PairRecipe()
    optimiser: OptimiserRecipe = OptimiserRecipe()
    validate_every: int = 500  # steps
    validation_scenes: int = 48  # rendered from photos that are not trained on
    validation_pairs: int = 144  # of those scenes
    save_every: int = 100

    def rules(self) -> list[tuple[bool, str]]:
        """Conditions on the values, each with the message for a recipe that violates it."""
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
            *self._device_rules(),
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
            *self._pruning_rules(),
            *self._source_rules(),
            *self._optimiser_rules(),
            (min(optimiser.steps, self.validate_every, self.save_every) >= 1, "steps: at least 1"),
            *((0 <= value <= 1, f"{key}: between 0 and 1") for key, value in shares.items()),
        ]

    @property
    def uses_sources(self) -> bool:
        """Whether there are other pairs than those of scenes."""
        return self.pairs_on_device or self.sources.share > 0

    def used_shares(self) -> dict[str, float]:
        """The shares of the sources, all 0 where only scenes are trained on."""
        shares = self.sources.shares()
        return shares if self.uses_sources else dict.fromkeys(shares, 0.0)

    def _source_rules(self) -> list[tuple[bool, str]]:
        shares, used = self.sources.shares(), self.uses_sources
        return [
            (
                min(shares.values()) >= 0 and (any(shares.values()) or not used),
                "sources: shares of 0 or above, at least one above 0",
            ),
            (
                used or not (shares["rendered"] or shares["real"]),
                "sources.rendered, sources.real: only with sources.share or pairs_on_device",
            ),
        ]

    def _optimiser_rules(self) -> list[tuple[bool, str]]:
        optimiser = self.optimiser
        counts = ("inner_layers", "sinkhorn_iterations", "warmup_steps", "confidence_steps")
        weights = ("weight_decay", "matchability_weight", "mean_similarity_weight", "correspondence_weight")
        return [
            *training_rules(optimiser),
            (self.pair.points_per_batch >= 2, "pair.points_per_batch: at least 2"),
            (optimiser.unrolled_iterations >= 1, "optimiser.unrolled_iterations: at least 1"),
            *((getattr(optimiser, key) >= 0, f"optimiser.{key}: 0 or above") for key in (*counts, *weights)),
            (bool(self.start) or not optimiser.start_share, "optimiser.start_share: only with start"),
            (optimiser.muon_rate >= 0, "optimiser.muon_rate: 0 or above"),
            (
                0 <= optimiser.frozen_layers < self.network.context.depth,
                "optimiser.frozen_layers: from 0 to the last but one of network.context.depth layers",
            ),
            (bool(self.start) or not optimiser.frozen_layers, "optimiser.frozen_layers: only with start"),
        ]

    def _pruning_rules(self) -> list[tuple[bool, str]]:
        kept, network = self.optimiser.kept_shares, self.network
        return [
            (sound_shares(kept), f"optimiser.kept_shares: {SHARES}"),
            (
                (network.match_probability and network.context.depth > 1) or min(kept, default=1) == 1,
                "optimiser.kept_shares: below 1 only with network.match_probability and 2 layers",
            ),
        ]

    def _device_rules(self) -> list[tuple[bool, str]]:
        """What pairs made on the device cannot have, where they are asked for."""
        if not self.pairs_on_device:
            return []
        sources, pair, sides = self.sources, self.pair, (self.sources.width, self.sources.height)
        nothing = {
            "sources.relief": sources.relief,
            "sources.share": sources.share,
            "sources.pairs": sources.pairs,
            "pair.crop_share": pair.crop_share,
            "pair.turned_share": pair.turned_share,
        }
        return [
            (self.network.kind == "learned", "pairs_on_device: only where network.kind is learned"),
            (
                not any(side % 16 for side in sides) and min(sides) >= 64,
                "sources.width, sources.height: multiples of 16, at least 64, where pairs_on_device",
            ),
            *((not value, f"{key}: 0 where pairs_on_device") for key, value in nothing.items()),
        ]

    def _front_end_rules(self) -> list[tuple[bool, str]]:
        return [
            (
                self.network.kind == "learned" or not (self.front_end or self.start_front_end),
                "front_end, start_front_end: only where network.kind is learned",
            ),
            (bool(self.start) or not self.start_front_end, "start_front_end: only with start"),
            (bool(self.start) or not self.start_layers, "start_layers: only with start"),
            (
                list(self.start_layers) == sorted(set(self.start_layers))
                and min(self.start_layers, default=0) >= 0,
                "start_layers: rising numbers from 0",
            ),
        ]


def training_rules(optimiser: Any) -> list[tuple[bool, str]]:
    """Of the optimiser of any recipe."""
    return [
        (0 < optimiser.learning_rate < math.inf, "optimiser.learning_rate: above 0"),
        (optimiser.gradient_clip > 0, "optimiser.gradient_clip: above 0"),
        (0 <= optimiser.minutes < math.inf, "optimiser.minutes: 0 or above"),
    ]


def sound_shares(kept: tuple[float, ...]) -> bool:
    """Whether shares of kept points can be drawn, of which one lets the heads that choose points learn."""
    return 1 in kept and all(0 < share <= 1 for share in kept)


def _network_rules(network: NetworkConfig) -> list[tuple[bool, str]]:
    """Which networks can be trained; `check_config` decides which can be built."""
    kinds = " or ".join(DESCRIPTOR_DIMS)
    dim = DESCRIPTOR_DIMS.get(network.kind)
    return [
        (dim is not None, f"network.kind: {kinds}, the front ends that can be trained on"),
        (network.descriptor_dim == dim, f"network.descriptor_dim: {dim} for network.kind {network.kind}"),
        (
            network.backbone is None and network.refinement is None,
            "network.backbone, network.refinement: dense networks cannot be trained",
        ),
    ]


def fingerprint(value: object) -> str:
    """A short hash of a configuration, to check whether cached work belongs to it."""
    return hashlib.sha256(json.dumps(to_dict(value), sort_keys=True).encode()).hexdigest()[:16]
