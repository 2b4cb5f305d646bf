"""The training recipe of a front end."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from matcher.extract.architecture import Architecture
from matcher.lab.pairs.planes import SceneRecipe
from matcher.lab.pairs.sources import SourceShares
from matcher.lab.train.recipe import SHARES, sound_shares, training_rules


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
