"""A training recipe: all settings of a training run, in one TOML file."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from matcher.config import NetworkConfig, to_dict
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import SourceShares
from matcher.evaluate.protocols import photos_digest
from matcher.evaluate.synthetic import SceneRecipe
from matcher.extract.learned import Architecture
from matcher.files import is_ours, write_whole

# --- recipe: A training recipe: all settings of a training run, in one TOML file.

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


# --- recipe: The training recipe of a front end.


@dataclass(frozen=True)
class SmallScene(SceneRecipe):
    """Scenes in smaller images, rolled further."""

    width: int = 320
    height: int = 256
    max_roll: float = 45.0


@dataclass(frozen=True)
class BatchRecipe:
    """Batches of pairs, drawn at random at every step."""

    pairs: int = 8
    # Pairs of which one image is rotated by 90, 180 or 270 degrees. Without any, descriptors do not become
    # equivariant, and matchers cannot choose the rotation between two images by them.
    turned_share: float = 0.0
    # Pairs of images of different scenes, from which a matcher learns that nothing may match; only where
    # `pairs_on_device`.
    negative_share: float = 0.0


@dataclass(frozen=True)
class KeypointRecipe:
    """AdamW with warm-up, a plateau, then a linear decay; weights of the losses."""

    steps: int = 6000
    minutes: float = 0.0  # as `optimiser.minutes` of a matcher's recipe
    learning_rate: float = 2e-3
    weight_decay: float = 1e-3
    warmup_steps: int = 50
    hold_share: float = 0.5
    final_share: float = 0.01
    gradient_clip: float = 5.0
    average_decay: float = 0.998
    start_share: float = 0.0  # weight of the initial parameters in the final ones
    points: int = 300  # of each image, those that score highest; all of them are negatives of each other
    described: int = 192  # of them, whose descriptors are supervised
    match_distance: float = 2.0  # pixels; a keypoint is repeatable if the other image has one within it
    refinement_weight: float = 1.0
    reliability_weight: float = 1.0
    description_weight: float = 1.0


@dataclass(frozen=True)
class JointRecipe:
    """A matcher that is trained along with the front end; its loss is added to those of the keypoints."""

    start: str = ""  # its weights to start from, a shipped name or a file; no matcher is trained if empty
    name: str = "hybrid-learned"  # of its weights file
    weight: float = 1.0  # of its loss
    learning_rate: float = 0.25  # relative to the front end's
    muon_rate: float = 0.0  # as `optimiser.muon_rate` of a matcher's recipe, relative to that
    points: tuple[int, ...] = (256, 384)  # keypoints of each image that are matched, drawn for each batch
    points_per_batch: int = 0  # of the pairs that are matched, fewer where points are many; 0: all pairs
    gradient: float = 1.0  # of its loss to the descriptors, relative to that to its own parameters
    kept_shares: tuple[float, ...] = (1.0,)  # as `optimiser.kept_shares` of a matcher's recipe
    confidence_steps: int = 0  # in the end, for the heads of early exit and pruning alone


@dataclass(frozen=True)
class FrontEndRecipe:
    """A front end, its training pairs and its optimisation."""

    trains: Literal["front end"]
    name: str = "learned"
    start: str = ""  # weights to start from, the shipped "learned" or a file; random parameters if empty
    start_also: tuple[str, ...] = ()  # more of them: training starts from the mean parameters of all
    seed: int = 0
    # Of larger sizes than those of `start`, if wanted: what is new begins without effect.
    network: Architecture = field(default_factory=Architecture)
    # Whether the device that trains makes the pairs, as in a matcher's recipe; `scene` is only its size then,
    # and what is validated on.
    pairs_on_device: bool = False
    scene: SmallScene = SmallScene()  # of planes; its width and height are those of all images
    sources: SourceShares = field(default_factory=lambda: SourceShares(planes=1.0, relief=0.0))
    batch: BatchRecipe = BatchRecipe()
    optimiser: KeypointRecipe = KeypointRecipe()
    matcher: JointRecipe = JointRecipe()
    validate_every: int = 500  # steps
    validation_pairs: int = 40  # made of photos that are not trained on
    validation_points: int = 1024  # of each of their images
    save_every: int = 100

    def rules(self) -> list[tuple[bool, str]]:
        """Conditions on the values, each with the message for a recipe that violates it."""
        sizes = self.network.rules()
        return sizes if not all(holds for holds, _ in sizes) else self._other_rules()

    def _other_rules(self) -> list[tuple[bool, str]]:
        """Those of a recipe whose network can be built."""
        scene, batch, optimiser = self.scene, self.batch, self.optimiser
        shares = {
            "batch.turned_share": batch.turned_share,
            "batch.negative_share": batch.negative_share,
            "scene.spatial_share": scene.spatial_share,
            "scene.full_rotation_share": scene.full_rotation_share,
            "optimiser.hold_share": optimiser.hold_share,
            "optimiser.final_share": optimiser.final_share,
            "optimiser.average_decay": optimiser.average_decay,
            "optimiser.start_share": optimiser.start_share,
        }
        return [
            *self._image_rules(),
            (Path(self.name).name == self.name != "", "name: must be a plain file name"),
            (
                bool(self.start) or not (self.start_also or optimiser.start_share),
                "start_also, optimiser.start_share: only with start",
            ),
            (1 <= optimiser.described <= optimiser.points, "optimiser.described: from 1 to optimiser.points"),
            (
                optimiser.points <= scene.width * scene.height // 100,
                "optimiser.points: at most one to 100 pixels of the scene",
            ),
            (min(optimiser.steps, self.validate_every, self.save_every) >= 1, "steps: at least 1"),
            (
                min(self.validation_pairs, self.validation_points) >= 1,
                "validation_pairs, validation_points: at least 1",
            ),
            *training_rules(optimiser),
            *self._matcher_rules(),
            *((0 <= value <= 1, f"{key}: between 0 and 1") for key, value in shares.items()),
        ]

    def _image_rules(self) -> list[tuple[bool, str]]:
        scene, batch, shares = self.scene, self.batch, self.sources.shares()
        # Changes of images on the device are made by squares of 8 pixels.
        stride = max(self.network.stride, 8 if self.pairs_on_device else 1)
        return [
            (min(scene.width, scene.height) >= 64, "scene.width, scene.height: at least 64"),
            (
                not (scene.width % stride or scene.height % stride),
                f"scene.width, scene.height: multiples of {stride}",
            ),
            (
                scene.width == scene.height or not batch.turned_share or self.pairs_on_device,
                "batch.turned_share: only square images can be rotated, scene.width = scene.height",
            ),
            (scene.max_zoom >= 1, "scene.max_zoom: at least 1"),
            (batch.pairs >= 1, "batch.pairs: at least 1"),
            (
                min(shares.values()) >= 0 and any(shares.values()),
                "sources: shares of 0 or above, at least one above 0",
            ),
            (not (self.pairs_on_device and shares["relief"]), "sources.relief: 0 where pairs_on_device"),
            (
                self.pairs_on_device or not batch.negative_share,
                "batch.negative_share: only with pairs_on_device",
            ),
        ]

    def _matcher_rules(self) -> list[tuple[bool, str]]:
        matcher, most = self.matcher, self.scene.width * self.scene.height // 100
        return [
            (
                Path(matcher.name).name == matcher.name != "" and matcher.name != self.name,
                "matcher.name: must be a plain file name, another than name",
            ),
            (
                not matcher.start or min(matcher.weight, matcher.learning_rate) > 0,
                "matcher.weight, matcher.learning_rate: above 0",
            ),
            (
                not matcher.start or all(0 < n <= most for n in matcher.points or (0,)),
                "matcher.points: at least 1, at most one to 100 pixels of the scene",
            ),
            (matcher.points_per_batch >= 0, "matcher.points_per_batch: 0 or above"),
            (matcher.muon_rate >= 0, "matcher.muon_rate: 0 or above"),
            (matcher.confidence_steps >= 0, "matcher.confidence_steps: 0 or above"),
            (matcher.gradient >= 0, "matcher.gradient: 0 or above"),
            (sound_shares(matcher.kept_shares), f"matcher.kept_shares: {SHARES}"),
            (bool(matcher.start) or matcher == JointRecipe(), "matcher: only with matcher.start"),
        ]


# --- folder: The folder of a run, which belongs to one recipe.

HELD_OUT = "held_out"  # in recipe.json: a digest of the photos that are validated on


def claim_folder(folder: Path, recipe: Recipe, held_out: Sequence[Path] = ()) -> None:
    """Make the folder of a run, or check that it belongs to this recipe and is validated on these photos.

    Raises:
        UsageError: it is another recipe's, other photos are held out, it holds files but no run, or it cannot
            be made.
        IntegrityError: its recipe.json is damaged or was changed.
    """
    note = folder / "recipe.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not note.exists():
            _refuse_files(folder)
            values = {"fingerprint": fingerprint(recipe), "recipe": to_dict(recipe)}
            values |= {HELD_OUT: photos_digest(held_out)} if held_out else {}
            write_whole(note, json.dumps(values, indent=1).encode())
            return
        stored = json.loads(note.read_text(encoding="utf-8"))
        owner, values, photos = stored["fingerprint"], stored["recipe"], stored.get(HELD_OUT)
    except UsageError:  # a ValueError, too
        raise
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UsageError(
            f"{folder}: no run can be kept there ({error.strerror}); give another --run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{note} is damaged; restore it or delete the run folder") from error
    if owner != fingerprint(recipe):
        changes = ", ".join(differences(values, json.loads(json.dumps(to_dict(recipe)))))
        if not changes:
            raise IntegrityError(
                f"{note} was changed: its fingerprint is not that of the recipe in it; give another --run or "
                "delete the folder"
            )
        raise UsageError(
            f"{folder} holds a run of another recipe ({changes}); give another --run or delete the folder"
        )
    if held_out and photos not in (None, photos_digest(held_out)):
        raise UsageError(
            f"{folder} holds a run that is validated on other photos, some of which would be trained on now: "
            "give the photos as they were, or another --run"
        )


def _refuse_files(folder: Path) -> None:
    """Refuse a folder with files that no training run wrote, except hidden files and our own logs."""
    found = sorted(file.name for file in folder.iterdir() if file.name[0] != "." and not is_ours(file))
    if found:
        others = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UsageError(
            f"{folder} holds {found[0]}{others}, but no training run; give another folder with --run"
        )


def differences(before: Any, after: Any, key: str = "") -> list[str]:
    """The differences of two nested dictionaries, as `key before → after`."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{key} {before} → {after}"]
    names = dict.fromkeys([*before, *after])
    return [
        change
        for name in names
        for change in differences(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    ]


# --- state: Checkpoints: written whole or not at all; a damaged one is an error.


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint to a temporary file and rename it, so that the last good one survives a failure.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    try:
        write_whole(path, buffer.getvalue())
    except OSError as error:
        left = "the last good one is kept" if path.exists() else "there was none before"
        raise OSError(error.errno, f"{error.strerror}: this checkpoint is lost, {left}", str(path)) from error


def load_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint, its tensors on the CPU.

    Raises:
        IntegrityError: absent, cut short or damaged; the message names the file and the remedy.
    """
    remedy = "restore a copy of it, or delete the run folder to start again"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise IntegrityError(f"{path} is absent: {remedy}") from None
    except (OSError, RuntimeError, ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise IntegrityError(f"{path} is damaged ({reason}): {remedy}") from error
    if not isinstance(state, dict):
        raise IntegrityError(f"{path} is not a checkpoint: {remedy}")
    return state
