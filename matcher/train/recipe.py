"""A training recipe: all settings of a training run, in one TOML file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from matcher.config import ALL_LAYERS, MatchingPolicy, NetworkConfig, from_dict
from matcher.errors import UsageError
from matcher.extract.learned import Architecture
from matcher.files import read_toml
from matcher.match.network import check_config
from matcher.weights.files import weights_folder

SIFT, LEARNED = "sift", "learned"
DESCRIPTOR_DIMS = {SIFT: 128, LEARNED: 64}  # of the front ends that a matcher can be trained on
BLOCK = 16  # pixels; sides of training images are multiples, as of JPEG's blocks and most networks' strides


@dataclass(frozen=True)
class SourceRecipe:
    """Shares of the sources in the training pairs; any positive numbers."""

    planes: float = 0.6  # a photo and a warp of it
    spaces: float = 0.4  # photos on several planes in space, seen by two cameras
    rendered: float = 0.0  # stored views of rendered rooms
    real: float = 0.0  # stored views of real places


@dataclass(frozen=True)
class PairRecipe:
    """The images of a batch, how pairs are drawn, and how many of their keypoints."""

    width: int = 640
    height: int = 480
    pairs: int = 0  # of a batch; 0: as many as `points_per_batch` allows
    points: tuple[int, ...] = (256, 256, 512)  # keypoints of an image that are matched, drawn for each batch
    points_per_batch: int = 4096  # of both images of all pairs that are matched
    min_overlap: float = 0.2  # of the pixels; nine in ten pairs with less give way to another
    negative_share: float = 0.0  # pairs of images of different scenes, in which nothing matches
    turned_share: float = 0.0  # pairs of which image 1 is rotated by 90, 180 or 270 degrees
    max_tilt: float = 0.0  # degrees; of the plane of a photo in the second image of `planes`
    dropout: float = 0.15  # largest share that is dropped of the keypoints of a front end that is not trained


@dataclass(frozen=True)
class FrontEndRecipe:
    """The front end that finds the keypoints, and its training. SIFT has no parameters, so none is read."""

    train: bool = False
    name: str = "learned"  # of its weights file
    start: str = "learned"  # weights to start from, or to use: shipped, or a file; random parameters if empty
    # Of larger sizes than those of `start`, if wanted: what is new begins without effect.
    network: Architecture = field(default_factory=Architecture)
    weight_decay: float = 1e-3
    points: int = 300  # of each image, those that score highest; all of them are negatives of each other
    described: int = 192  # of them, whose descriptors are supervised
    match_distance: float = 2.0  # pixels; a keypoint is repeatable if the other image has one within it
    refinement_weight: float = 1.0  # of the loss of positions, relative to those of scores and descriptors


@dataclass(frozen=True)
class MatcherRecipe:
    """The matching network and its training."""

    train: bool = True
    name: str = "hybrid"  # of its weights file
    start: str = ""  # weights to start from: a shipped name or a file; random parameters if empty
    network: NetworkConfig = field(default_factory=NetworkConfig)
    muon_rate: float = 2.0  # Muon's learning rate for the layers' matrices, relative; 0: AdamW for all
    weight_decay: float = 0.01
    gradient: float = 1.0  # of its loss to the descriptors of a front end that is trained, relative
    # Shares of an image's points, the likeliest to match, that go on after one of the first layers, as after
    # pruning; one is drawn at each step. With any below 1 the heads for pruning learn along, where all go on.
    kept_shares: tuple[float, ...] = (1.0,)
    inner_layers: int = 3  # layers below the last that are supervised at each step, drawn at random
    sinkhorn_iterations: int = 6  # without gradients, before those with
    confidence_steps: int = 600  # in the end, for the heads of early exit and pruning alone

    @property
    def prunes(self) -> bool:
        """Whether points are dropped in training, by heads that learn along."""
        return min(self.kept_shares) < 1


@dataclass(frozen=True)
class OptimiserRecipe:
    """Warm-up, a plateau, then a linear decay; a moving average of the parameters."""

    steps: int = 5000
    minutes: float = 0.0  # of training at most, which then ends before all steps are done; 0: any
    learning_rate: float = 1e-3
    warmup_steps: int = 60
    hold_share: float = 0.6  # of the steps, before the decay begins
    final_share: float = 0.01  # of the learning rate, at the end
    gradient_clip: float = 1.0
    average_decay: float = 0.999
    start_share: float = 0.0  # weight of the initial parameters in the final ones (WiSE-FT)


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, and how: a matcher, a front end, or both together."""

    seed: int = 0
    sources: SourceRecipe = SourceRecipe()
    pair: PairRecipe = PairRecipe()
    front_end: FrontEndRecipe = FrontEndRecipe()
    matcher: MatcherRecipe = MatcherRecipe()
    optimiser: OptimiserRecipe = OptimiserRecipe()
    validate_every: int = 500  # steps
    validation_pairs: int = 100  # made of photos that are not trained on
    save_every: int = 100  # steps; at least every five minutes in any case

    @property
    def name(self) -> str:
        """Of the run: that of the weights file of the front end if it is trained, else of the matcher."""
        return self.front_end.name if self.front_end.train else self.matcher.name

    @property
    def kind(self) -> str:
        """The front end of the keypoints."""
        return self.matcher.network.kind if self.matcher.train else LEARNED

    def pairs_of(self, points: int) -> int:
        """Pairs of a batch with so many keypoints in each image."""
        return self.pair.pairs or self.matched_pairs_of(points)

    def matched_pairs_of(self, points: int) -> int:
        """Pairs of a batch that the matcher sees."""
        most = max(1, self.pair.points_per_batch // (2 * points))
        return min(self.pair.pairs, most) if self.pair.pairs else most


def check_recipe(recipe: Recipe, where: str = "recipe") -> None:
    """Refuse values of the right type that cannot be trained with; `UsageError` names the first such key."""

    def need(holds: object, rule: str) -> None:
        if not holds:
            raise UsageError(f"{where}: {rule}")

    pair, optimiser, matcher, front = recipe.pair, recipe.optimiser, recipe.matcher, recipe.front_end
    numbers = {key: value for key, value in vars(recipe).items() if isinstance(value, int)}
    for name in ("sources", "pair", "front_end", "matcher", "optimiser"):
        values = vars(getattr(recipe, name)).items()
        numbers |= {f"{name}.{key}": value for key, value in values if isinstance(value, (int, float))}
    for key, value in numbers.items():
        need(0 <= value < 2**32, f"{key}: a number from 0 to {2**32 - 1}")
    positive = "validate_every save_every validation_pairs front_end.match_distance"
    for key in f"{positive} optimiser.steps optimiser.learning_rate optimiser.gradient_clip".split():
        need(numbers[key] > 0, f"{key}: above 0")
    shares = "pair.min_overlap pair.negative_share pair.turned_share pair.dropout matcher.gradient"
    shares += " optimiser.hold_share optimiser.final_share optimiser.average_decay optimiser.start_share"
    for key in shares.split():
        need(numbers[key] <= 1, f"{key}: between 0 and 1")
    need(matcher.train or front.train, "matcher.train, front_end.train: one of them")
    need(any(vars(recipe.sources).values()), "sources: shares, not all 0")
    whole = all(64 <= side <= 4096 and not side % BLOCK for side in (pair.width, pair.height))
    need(whole, f"pair.width, pair.height: multiples of {BLOCK} from 64 to 4096")
    need(pair.points_per_batch >= 2, "pair.points_per_batch: 2 or above")
    most = pair.width * pair.height // 100
    need(all(0 < n <= most for n in pair.points or (0,)), f"pair.points: from 1 to {most}, for its size")
    need(pair.max_tilt <= 75, "pair.max_tilt: from 0 to 75 degrees")
    several = not pair.negative_share or min(map(recipe.pairs_of, pair.points)) > 1
    need(several, "pair.negative_share: only in batches of 2 pairs or more, whose images are exchanged")
    for name, part in (("matcher", matcher), ("front_end", front)):
        if part.train:
            need(re.fullmatch(r"\w[\w.+ -]{0,49}", part.name), f"{name}.name: must be a plain file name")
            started = bool(part.start) or not optimiser.start_share
            need(started, f"optimiser.start_share: only with {name}.start")
    if matcher.train:
        network, dim = matcher.network, DESCRIPTOR_DIMS.get(matcher.network.kind)
        need(dim is not None, f"matcher.network.kind: one of {', '.join(DESCRIPTOR_DIMS)}")
        need(network.descriptor_dim == dim, f"matcher.network.descriptor_dim: {dim} for {network.kind}")
        sparse = not (network.backbone or network.refinement or network.assignment.border)
        need(sparse, "matcher.network.backbone, refinement, assignment.border: no dense network is trained")
        need(network.position.kind != "sine", "matcher.network.position.kind: 'sine' is for dense networks")
        own = network.policy == MatchingPolicy()
        need(own, "matcher.network.policy: weights do not hold it; it is set where they are loaded")
        kept = 1 in matcher.kept_shares and all(0 < share <= 1 for share in matcher.kept_shares)
        need(kept, "matcher.kept_shares: above 0 and at most 1, and 1 among them")
        can_prune = not matcher.prunes or (network.match_probability and network.context.depth > 1)
        need(can_prune, "matcher.kept_shares: below 1 only with network.match_probability and 2 layers")
        try:
            check_config(replace(network, policy=ALL_LAYERS))
        except UsageError as error:
            raise UsageError(f"{where}: matcher.{error}") from None
    started = front.start or front.train or recipe.kind == SIFT
    need(started, "front_end.start: needed where it is not trained; 'learned' is the shipped one")
    if front.train:
        need(front.name != matcher.name or not matcher.train, "front_end.name: another than matcher.name")
        for holds, rule in front.network.rules():
            need(holds, f"front_end.{rule}")
        stride, described = front.network.stride, 1 <= front.described <= front.points <= most
        need(recipe.kind == LEARNED, f"front_end.train: only where matcher.network.kind is {LEARNED}")
        need(pair.pairs >= 1, "pair.pairs: at least 1 where a front end is trained")
        fits = not (pair.width % stride or pair.height % stride)
        need(fits, f"pair.width, pair.height: multiples of {stride}, for this network")
        need(described, f"front_end.described, points: from 1 to {most}, and not more described")


def read_recipe(path: Path) -> Recipe:
    """A recipe from TOML; `UsageError`: unreadable, or not one, which names the key that is wrong."""
    values = read_toml(path)
    try:
        recipe = from_dict(Recipe, values, where=path.name)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    check_recipe(recipe, path.name)
    return recipe


def find_recipe(given: str | Path) -> Path:
    """A recipe's file, or by name the one of shipped weights, beside them in the package or in a checkout."""
    shipped = weights_folder() / f"{given}.toml"
    return shipped if shipped.is_file() and not Path(given).is_file() else Path(given)


def limited(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with so many steps, at most as many in the last stage, and few pairs to validate on."""
    matcher = replace(recipe.matcher, confidence_steps=min(steps, recipe.matcher.confidence_steps))
    optimiser = replace(recipe.optimiser, steps=steps, minutes=0.0)
    pairs = min(recipe.validation_pairs, 2 * steps)
    return replace(recipe, matcher=matcher, optimiser=optimiser, validation_pairs=pairs)


def enlarged(recipe: Recipe, scale: int) -> Recipe:
    """The recipe with batches `scale` times as large."""
    pairs, points = (scale * number for number in (recipe.pair.pairs, recipe.pair.points_per_batch))
    return replace(recipe, pair=replace(recipe.pair, pairs=pairs, points_per_batch=points))
