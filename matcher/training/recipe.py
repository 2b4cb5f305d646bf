"""A training recipe: everything that decides what the weights become, in one TOML file."""

from __future__ import annotations

import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from matcher.config import NetworkConfig, from_dict, to_dict
from matcher.types import UsageError


@dataclass(frozen=True)
class SceneRecipe:
    """Views to train on: photos on one plane, or on several planes in space, seen by moving cameras."""

    scenes: int = 6000
    views: int = 4  # of each scene
    spatial_share: float = (
        0.4  # scenes of several planes at different depths and tilts; the rest are one plane
    )
    full_rotation_share: float = 0.25  # views turned by any angle; the others by at most `max_roll`
    max_roll: float = 30.0  # degrees
    max_tilt: float = 55.0  # degrees between a plane and the image plane
    max_zoom: float = 2.2  # largest change of scale of one view
    width: int = 640
    height: int = 480
    max_keypoints: int = 1024


@dataclass(frozen=True)
class PairRecipe:
    """How pairs are drawn from the views of a scene."""

    points: tuple[int, ...] = (256, 256, 512)  # per picture, drawn for each batch
    points_per_batch: int = 8192  # of both pictures; the number of pairs follows
    negative_share: float = 0.06  # pairs of unrelated scenes
    min_overlap: float = 0.25  # of the points; nine in ten pairs with less are drawn again
    crop_share: float = 0.5  # pairs cut to a window, as if it were the whole picture
    dropout: float = 0.15  # keypoints dropped at most
    match_distance: float = 3.0  # pixels; nearer and mutual is a match
    unmatched_distance: float = 5.0  # pixels; farther is unmatched, between is ignored


@dataclass(frozen=True)
class OptimiserRecipe:
    """Muon for the matrices of the layers, AdamW for the rest, warm-up then cosine to zero."""

    steps: int = 5000
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    final_share: float = 0.02  # of the learning rate, at the end
    muon: bool = True
    gradient_clip: float = 1.0
    average_decay: float = 0.999  # exponential moving average of the parameters
    inner_layers: int = 2  # layers below the last that are supervised at each step, drawn at random
    unrolled_iterations: int = 3  # Sinkhorn iterations that carry gradients
    sinkhorn_iterations: int = 10  # iterations that find where to linearise, without gradients
    matchability_weight: float = 0.1
    confidence_steps: int = 600  # second stage: confidence heads on frozen features


@dataclass(frozen=True)
class Recipe:
    """A recipe names its network, its data and its optimisation."""

    name: str = "hybrid"
    seed: int = 0
    network: NetworkConfig = NetworkConfig()
    scene: SceneRecipe = SceneRecipe()
    pair: PairRecipe = PairRecipe()
    optimiser: OptimiserRecipe = OptimiserRecipe()
    validate_every: int = 500  # steps
    save_every: int = 100


def read_recipe(path: Path) -> Recipe:
    """A recipe from TOML.

    Raises:
        UsageError: unreadable, not TOML, an unknown key or a wrong type; the message names the key.
    """
    try:
        return from_dict(Recipe, tomllib.loads(path.read_text(encoding="utf-8")), where=path.name)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a TOML file ({error})") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def fingerprint(value: object) -> str:
    """A short hash of a configuration, to tell whether cached work belongs to it."""
    return hashlib.sha256(json.dumps(to_dict(value), sort_keys=True).encode()).hexdigest()[:16]
