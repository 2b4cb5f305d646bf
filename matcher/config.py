"""Frozen configuration of every part, to and from plain tables (TOML, JSON)."""

from __future__ import annotations

import inspect
import types as pytypes
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from matcher.errors import UsageError, unknown_name

Precision = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["torch", "onnx"]  # the library that runs front ends and networks
GeometryKind = Literal["fundamental", "homography", "essential", "none", "homographies"]
GeometryStatus = Literal[
    "ok", "too_few", "degenerate", "no_model", "low_inliers", "not_estimated", "ambiguous", "mirrored"
]
PlanarModel = Literal["homography", "affine", "similarity"]  # maps of a plane, from 8, 6 and 4 numbers
GRID_KIND = "loftr"  # the front end whose keypoints are the cells of a grid


@dataclass(frozen=True)
class PositionConfig:
    """Where a point lies: rotations of queries and keys, or an encoding added to its descriptor."""

    kind: Literal["rotary", "mlp", "sine", "none"] = "rotary"
    inputs: tuple[str, ...] = ("xy", "scale", "orientation")
    extent: float = 0.5  # positions are (p − size/2) / (extent · max(size)); SuperGlue has 0.7
    hidden: tuple[int, ...] = (32, 64, 128, 256)  # widths of the MLP
    # Of sines: from 1 down to 1/10000 a cell, or e⁻²ᵏ, which LoFTR's first networks were trained with.
    frequencies: Literal["geometric", "steep"] = "geometric"


@dataclass(frozen=True)
class ContextConfig:
    """Alternating self- and cross-attention layers, x + ffn([x | message])."""

    dim: int = 128
    heads: int = 2
    depth: int = 6
    attention: Literal["softmax", "linear", "additive", "general"] = "softmax"
    # Softmax attention to n > k keypoints has its logits multiplied by log n / log k, so that it stays as
    # sharp as among the k that the network was trained with (Chiang and Cholak 2022, "Overcoming a
    # theoretical limitation of self-attention"). None: never.
    scale_logits_above: int | None = None
    shared_qk: bool = True  # cross-attention has one projection for queries and keys
    # In the middle of the feed-forward part, or ("output") of the message and of what is added at the end.
    norm: Literal["layer", "batch", "output"] = "layer"
    activation: Literal["gelu", "relu"] = "gelu"
    bias: bool = True  # of the linear maps
    sequential_cross: bool = False  # image 1 attends to the updated tokens of image 0, not to the old ones


@dataclass(frozen=True)
class AssignmentConfig:
    """From token states to a partial assignment.

    `sinkhorn` is optimal transport in the log domain (SuperGlue, Sarlin et al. 2020, section 3.2),
    `dual_softmax` the product of row and column softmax with matchabilities (LightGlue, Lindenberger et al.
    2023, eq. 8).
    """

    kind: Literal["sinkhorn", "dual_softmax"] = "sinkhorn"
    # Minus the point's matchability logit, or one number; without any, every point is matchable.
    dustbin: Literal["point", "learned", "none"] = "point"
    project: bool = True  # similarities are products of projections / √dim; without, of the tokens / dim
    temperature: float = 1.0  # divides the similarities
    drop_unmatched: bool = False  # points that prefer the dustbin are removed before matches are chosen
    border: int = 0  # cells along the edge of a grid that find no partner
    consensus: int = 0  # rounds in which points are assigned again, guided by their neighbours' matches
    every_layer: bool = True  # each layer has its own head; needed for early exit and pruning
    max_iterations: int = 100
    tolerance: float | None = 1e-2  # relative error of the rows at which a pair stops; None: never


@dataclass(frozen=True)
class RefinedCalibrationConfig:
    """From probabilities to the prior scores of refined matches (`matcher.match.calibration`)."""

    offset: float
    slope: float  # of the log odds before
    refined: float  # for a match that was refined, beside the share of the pair's matches that were
    variance_slope: float  # of the logarithm of the variance of a refined position
    further_passes: float  # for pairs that one pass was not enough for


@dataclass(frozen=True)
class VerifiedCalibrationConfig:
    """From probabilities to those given the epipolar geometry (`matcher.match.calibration`)."""

    offset: float
    slope: float  # of the log odds before
    inlier: float  # for an inlier
    share_slope: float  # of the log odds of the share that inliers have of all probabilities


@dataclass(frozen=True)
class CalibrationConfig:
    """From a network's probabilities to how often its matches are right (`matcher.match.calibration`)."""

    offset: float
    slope: float  # of the log odds that the network gives
    share_slope: float  # of the logarithm of the share of keypoints that find a partner
    refined: RefinedCalibrationConfig | None = None  # for matches that were refined on the images
    verified: VerifiedCalibrationConfig | None = None  # where an epipolar geometry was estimated


@dataclass(frozen=True)
class MatchingPolicy:
    """How a trained network is used: when it stops, which points it drops, which matches count.

    It belongs to the preset; a weights file carries no policy. Early exit and point pruning follow
    LightGlue (Lindenberger et al. 2023, section 3.3), decided per pair; `match.adaptivity.decide` says
    what is otherwise where the network has heads for the probability of a partner, as the default has.
    """

    match_threshold: float = 0.1  # least probability that the network gives a match
    # The number of expected matches at which the threshold doubles: a few matches must be more probable than
    # many.
    threshold_doubles_at: float = 0.0
    early_exit: bool = True
    exit_share: float = 0.95  # of points, or of expected matches: the share that stops a pair
    pruning: bool = True
    prune_matchability: float = 0.01  # points below it are pruned
    prune_confident_only: bool = True  # if they are confident
    min_pruned_share: float = 0.0  # of a pair's points; dropping fewer costs more time than it saves
    other_turns_below: float = 0.04  # matches per point below which other quarter turns are tried
    calibration: CalibrationConfig | None = None  # of scores; None: they are what the network gives


# Every layer on all points: what training and comparisons look at.
ALL_LAYERS = MatchingPolicy(early_exit=False, pruning=False)


@dataclass(frozen=True)
class BackboneConfig:
    """The residual pyramid that describes the cells of a grid (LoFTR, Sun et al. 2021, section 3.1)."""

    widths: tuple[int, ...] = (128, 196, 256)  # channels at 1/2, 1/4, 1/8; the fine map has the first


# Of what refines a match; the network before it has 4 layers 256 wide.
LOFTR_CONTEXT = ContextConfig(
    heads=8, depth=1, attention="linear", shared_qk=False, norm="output", activation="relu", bias=False,
    sequential_cross=True,
)  # fmt: skip


@dataclass(frozen=True)
class RefinementConfig:
    """Matches of cells to a fraction of a pixel (LoFTR, section 3.4)."""

    window: int = 5  # sides of the square around a cell's position on the fine map
    stride: int = 4  # from one cell to the next on the fine map
    context: ContextConfig = LOFTR_CONTEXT


@dataclass(frozen=True)
class NetworkConfig:
    """The attentional matcher: projection, position, context, assignment; without a detector more.

    All but `policy` is architecture: a weights file's header holds it, and it must be that of the weights.
    """

    kind: str = "sift"  # front end whose features it accepts
    descriptor_dim: int = 128
    project: bool = True  # descriptors are projected first; without it their size is context.dim
    position: PositionConfig = PositionConfig()
    context: ContextConfig = ContextConfig()
    guided: bool = False  # tokens carry their position and, after each layer, their likely partner's
    assignment: AssignmentConfig = AssignmentConfig()
    # Heads of their own predict, below the last layer, which points will be matched; exit and pruning then
    # depend on them instead of the dustbins' logits.
    match_probability: bool = False
    backbone: BackboneConfig | None = None  # makes the features itself, of the cells of a grid
    refinement: RefinementConfig | None = None  # moves the points of image 1
    policy: MatchingPolicy = MatchingPolicy()


def architecture(config: NetworkConfig) -> dict[str, Any]:
    """What the parameters of a network were trained as, without the policy: the header of a weights file."""
    return {key: value for key, value in asdict(config).items() if key != "policy"}


@dataclass(frozen=True)
class NearestConfig:
    """Mutual nearest neighbours with the ratio test (Lowe 2004, section 7.1)."""

    ratio: float = 0.8  # nearest / second nearest distance, at most; 1 switches the test off
    match_threshold: float = 0.0  # least score of a match, 1 − the larger of its two ratios


@dataclass(frozen=True)
class ExtractorConfig:
    """Front end and the size of the images it sees."""

    kind: str = "sift"
    max_keypoints: int = 2048
    resize: int | None = 1024  # longer side in pixels; larger images are made smaller; None: never
    # Longer side to which soft images (enlarged, blurred) are made smaller until they are sharp; None: never.
    soft_resize: int | None = None
    # An image with fewer keypoints than `max_keypoints`, and than 2,048, is searched enlarged, twice at most,
    # to this longer side; None: never.
    sparse_resize: int | None = None
    # Keypoints of large images, found by tiles that have `max_keypoints` each; None: images are seen whole.
    tiles: int | None = None
    # Which of SIFT's points stay where there are more: large ones are found again in more images.
    keep: Literal["strongest", "largest"] = "strongest"
    # Of learned front ends; None is the published value, and one that a front end does not have is refused.
    variant: str | None = None  # which of its published networks: aliked-n16, aliked-n16rot …
    score_threshold: float | None = None  # points score more
    nms_radius: int | None = None  # pixels around a point in which it is the strongest

    def of_size(self, resize: int | None) -> ExtractorConfig:
        """The same for images that are resized so, whatever they show."""
        return replace(self, resize=resize, soft_resize=None, sparse_resize=None)


def resolve(config: ExtractorConfig, published: Mapping[str, Any]) -> ExtractorConfig:
    """The configuration with the published value wherever a setting is None; `UsageError`: one that the front
    end does not have, or out of range."""
    if config.max_keypoints < 1:
        raise UsageError(f"max_keypoints must be at least 1, not {config.max_keypoints}")
    names = ("variant", "score_threshold", "nms_radius")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    if foreign := sorted(set(given) - set(published)):
        has = ", ".join(published) or "none"
        raise UsageError(f"the front end {config.kind} has no {foreign[0]}; settings it has: {has}")
    if config.keep == "largest" and config.kind != "sift":
        raise UsageError(f"the front end {config.kind} keeps its strongest points; 'largest' is for sift")
    for name in ("nms_radius", "score_threshold"):
        if given.get(name, 0) < 0:
            raise UsageError(f"{name} must be at least 0, not {given[name]}")
    return replace(config, **{**published, **given})


@dataclass(frozen=True)
class RefineConfig:
    """Least-squares matching of every match on the images (Gruen 1985)."""

    window: int = 15  # samples a side, in pixels of the image that shows the place smaller; odd
    max_shift: float = 3.0  # pixels of the resized images


@dataclass(frozen=True)
class EstimationConfig:
    """Robust geometry; thresholds are pixels of the resized image."""

    kind: GeometryKind = "fundamental"
    max_epipolar_error: float = 1.5
    max_reprojection_error: float = 3.0
    min_inliers: int = 12
    seed: int = 0  # of the sampling; used by essential only


@dataclass(frozen=True)
class FurtherPassesConfig:
    """Further passes over a pair whose first pass was not confident; none follows once one is.

    - `scale`: where there are few inliers, at the change of scale that descriptors suggest.
    - `gradients`: where there are few inliers, on images of gradient magnitude.
    - `features`: by another front end and matcher (`preset`).
    - `tilt_y`, `tilt_y_turned`: both images stretched vertically, then with one turned by 45 degrees.
    - `tilt_x`: either image stretched horizontally.
    - `region`: the common region of the inliers at equal scale, with all keypoints there; before the others
      where the inliers are many.
    """

    passes: tuple[str, ...] = (
        "scale", "gradients", "features", "tilt_y", "tilt_y_turned", "tilt_x", "region",
    )  # fmt: skip
    preset: str | None = "hybrid"  # the other front end and matcher; None: without


@dataclass(frozen=True)
class PipelineConfig:
    """A preset: everything that turns two images into verified matches."""

    matcher: NetworkConfig | NearestConfig = NetworkConfig()
    extractor: ExtractorConfig = ExtractorConfig()
    estimation: EstimationConfig = EstimationConfig()
    refine: RefineConfig | None = RefineConfig()  # None: points stay where the front end found them
    weights: str | None = None  # name in the weights manifest
    further_passes: FurtherPassesConfig | None = None  # None: one pass decides


def described(config: Any, prefix: str = "") -> list[tuple[str, Any, str]]:
    """Every value of a configuration: its dotted name, the value, and what the comment beside it says."""
    rows, comment = [], []
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    for line in inspect.getsource(type(config)).splitlines():
        text = line.strip()
        if text.startswith("# "):
            comment.append(text[2:])
            continue
        name = text.partition(":")[0]
        if name in values and line.startswith(f"    {name}:"):
            value = values.pop(name)
            meaning = " ".join([*comment, text.partition("  # ")[2]]).strip()
            if is_dataclass(value):
                rows += described(value, f"{prefix}{name}.")
            else:
                rows.append((f"{prefix}{name}", value, meaning))
        comment = []
    return rows


T = TypeVar("T")


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """A configuration from plain dictionaries; `ValueError`: an unknown or missing key, or a wrong value."""
    name = where or cls.__name__
    if not isinstance(values, dict):
        raise ValueError(f"{name}: expected a table, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    if unknown := sorted(str(key) for key in set(values) - set(known)):
        raise ValueError(f"{name}: unknown key {', '.join(unknown)}; known keys: {', '.join(known)}")
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - set(values)):
        raise ValueError(f"{name}: missing key {', '.join(missing)}")
    return cls(**{key: _convert(hints[key], value, f"{name}.{key}") for key, value in values.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return from_dict(hint, value, where)
    if origin is Literal:
        if value in args:
            return value
        raise ValueError(f"{where}: {unknown_name('value', value, map(str, args))}")
    if origin in (typing.Union, pytypes.UnionType):
        if value is None and type(None) in args:
            return None
        if isinstance(value, dict):
            tables = [option for option in args if is_dataclass(option)]
            fitting = [option for option in tables if set(value) <= {f.name for f in fields(option)}]
            return from_dict((fitting or tables)[0], value, where)
        for option in args:
            with suppress(ValueError, TypeError):
                return _convert(option, value, where)
        raise ValueError(f"{where}: {value!r} fits none of {', '.join(o.__name__ for o in args)}")
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where}: expected a list, got {value!r}")
        return tuple(_convert(args[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{where}: the number is too large") from None
    if not isinstance(value, hint) or (hint in (int, float) and isinstance(value, bool)):
        raise ValueError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
