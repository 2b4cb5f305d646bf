"""Named configurations, each written as its difference from another, and the options that adjust one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

from matcher.config import (
    AssignmentConfig,
    BackboneConfig,
    ContextConfig,
    GeometryKind,
    MatchingPolicy,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    PositionConfig,
    Precision,
    RefinementConfig,
    from_dict,
    to_dict,
)
from matcher.errors import UsageError

# Thresholds and shares were chosen for the shipped weights on training photos; see weights/README.md.
_HYBRID = PipelineConfig(
    matcher=NetworkConfig(
        guided=True,
        assignment=AssignmentConfig(consensus=2),
        match_probability=True,
        policy=MatchingPolicy(
            match_threshold=0.03,
            threshold_doubles_at=20.0,
            exit_share=0.9,
            prune_matchability=0.02,
            prune_confident_only=False,
            min_pruned_share=0.05,
        ),
    ),
    weights="hybrid",
)

# SuperGlue, Sarlin et al. 2020: position and score by an MLP, one learned dustbin, a fixed depth.
_SUPERGLUE = NetworkConfig(
    kind="superpoint",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(kind="mlp", inputs=("xy", "score"), extent=0.7),
    context=ContextConfig(dim=256, heads=4, depth=9, shared_qk=False, norm="batch", activation="relu"),
    assignment=AssignmentConfig(dustbin="learned", every_layer=False, tolerance=None),
    policy=MatchingPolicy(match_threshold=0.2, early_exit=False, pruning=False),
)
# LightGlue, Lindenberger et al. 2023: rotary positions, dual softmax with matchabilities, exit and pruning.
_LIGHTGLUE = NetworkConfig(
    kind="superpoint",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(inputs=("xy",)),
    context=ContextConfig(dim=256, heads=4, depth=9),
    assignment=AssignmentConfig(kind="dual_softmax"),
)
_LIGHTGLUE_128 = replace(_LIGHTGLUE, kind="disk", descriptor_dim=128, project=True)
_LIGHTGLUE_ORIENTED = replace(
    _LIGHTGLUE_128, kind="sift", position=PositionConfig(inputs=("xy", "raw_sigma", "raw_orientation"))
)
_LIGHTERGLUE = replace(
    _LIGHTGLUE,
    kind="xfeat",
    descriptor_dim=64,
    project=True,
    context=ContextConfig(dim=96, heads=1, depth=6),
    policy=MatchingPolicy(early_exit=False, prune_matchability=0.05, prune_confident_only=False),
)
# LoFTR, Sun et al. 2021: cells of a grid, linear attention, dual softmax, windows on a finer map.
_LOFTR = NetworkConfig(
    kind="loftr",
    descriptor_dim=256,
    project=False,
    position=PositionConfig(kind="sine", frequencies="steep"),
    context=replace(RefinementConfig().context, dim=256, depth=4),
    assignment=AssignmentConfig(
        kind="dual_softmax", dustbin="none", every_layer=False, project=False, temperature=0.1, border=2
    ),
    policy=MatchingPolicy(match_threshold=0.2, early_exit=False, pruning=False),
    backbone=BackboneConfig(),
    refinement=RefinementConfig(),
)
# The assignment of the networks that were published as "ot" beside those of dual softmax ("ds").
LOFTR_TRANSPORT = replace(
    _LOFTR.assignment,
    kind="sinkhorn",
    dustbin="learned",
    temperature=1.0,
    max_iterations=3,
    tolerance=None,
    drop_unmatched=True,
)
_ON_GRID = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind="loftr", resize=640))
_ON_LEARNED = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind="learned"))
_ON_SUPERPOINT = replace(_HYBRID, extractor=replace(_HYBRID.extractor, kind="superpoint"))

PRESETS: dict[str, PipelineConfig] = {
    "hybrid": _HYBRID,
    "hybrid-learned": replace(
        _ON_LEARNED,
        matcher=replace(
            _HYBRID.matcher,
            kind="learned",
            descriptor_dim=64,
            position=PositionConfig(inputs=("xy",)),
            policy=replace(
                _HYBRID.matcher.policy, match_threshold=0.1, exit_share=0.95, prune_matchability=0.03
            ),
        ),
        weights="hybrid-learned",
    ),
    "nearest": replace(_HYBRID, matcher=NearestConfig(), weights=None),
    "nearest-learned": replace(_ON_LEARNED, matcher=NearestConfig(ratio=0.87), weights=None),
    "superglue-indoor": replace(_ON_SUPERPOINT, matcher=_SUPERGLUE, weights="superglue-indoor"),
    "superglue-outdoor": replace(_ON_SUPERPOINT, matcher=_SUPERGLUE, weights="superglue-outdoor"),
    "lightglue-superpoint": replace(_ON_SUPERPOINT, matcher=_LIGHTGLUE, weights="lightglue-superpoint"),
    "lightglue-disk": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="disk"),
        matcher=_LIGHTGLUE_128,
        weights="lightglue-disk",
    ),
    "lightglue-aliked": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="aliked"),
        matcher=replace(_LIGHTGLUE_128, kind="aliked"),
        weights="lightglue-aliked",
    ),
    "lightglue-sift": replace(_HYBRID, matcher=_LIGHTGLUE_ORIENTED, weights="lightglue-sift"),
    "lightglue-doghardnet": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="doghardnet"),
        matcher=replace(
            _LIGHTGLUE_ORIENTED,
            kind="doghardnet",
            position=PositionConfig(inputs=("xy", "raw_scale", "raw_counterclockwise")),
        ),
        weights="lightglue-doghardnet",
    ),
    "lightglue-keynet": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="keynet"),
        matcher=replace(
            _LIGHTGLUE_128,
            kind="keynet",
            position=PositionConfig(inputs=("xy", "frame")),
            policy=MatchingPolicy(early_exit=False, pruning=False),
        ),
        weights="lightglue-keynet",
    ),
    "lightglue-dedodeb": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="dedodeb"),
        matcher=replace(_LIGHTGLUE, kind="dedodeb"),
        weights="lightglue-dedodeb",
    ),
    "lightglue-dedodeg": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="dedodeg"),
        matcher=replace(_LIGHTGLUE, kind="dedodeg"),
        weights="lightglue-dedodeg",
    ),
    "lightglue-xfeat": replace(
        _HYBRID,
        extractor=replace(_HYBRID.extractor, kind="xfeat"),
        matcher=_LIGHTERGLUE,
        weights="lightglue-xfeat",
    ),
    "loftr-outdoor": replace(
        _ON_GRID,
        extractor=replace(_ON_GRID.extractor, resize=840),
        matcher=_LOFTR,
        weights="loftr-outdoor",
    ),
    "loftr-indoor": replace(_ON_GRID, matcher=_LOFTR, weights="loftr-indoor"),
    "loftr-indoor-new": replace(
        _ON_GRID,
        matcher=replace(_LOFTR, position=PositionConfig(kind="sine")),
        weights="loftr-indoor-new",
    ),
}
DEFAULT_PRESET = "hybrid-learned"


class LoadOptions(TypedDict, total=False):
    """What adjusts a preset; None always means the preset's own value."""

    weights: str | Path | None  # a name in the manifest or a safetensors file
    frontend: str | None  # another front end, such as "disk"; its features must be what the matcher takes
    variant: str | None  # which of the front end's published networks, such as "aliked-n32"
    frontend_weights: str | Path | None  # of a learned front end
    device: str | None  # "auto" (CUDA when there is one, else the processor), "cpu", "cuda", "cuda:1", "mps"
    precision: Precision | None  # of the network; "auto" is what the device is fast at
    max_keypoints: int | None  # a picture
    resize: int | None  # longer side in pixels; larger pictures are made smaller
    keep: Literal["strongest", "largest"] | None  # of SIFT's points, where there are too many
    match_threshold: float | None  # least score of a match, 0 to 1
    ratio: float | None  # of `nearest`: nearest / second nearest distance, above 0 and at most 1
    early_exit: bool | None  # stop a pair at the layer where it is sure
    pruning: bool | None  # drop points that cannot match
    geometry: GeometryKind | None  # "fundamental", "homography", "essential" or "none"
    upright: bool | None  # turn pictures as their EXIF orientation says
    max_pixels: int | None  # larger pictures are refused before they are decoded


_GRID = _ON_GRID.extractor.kind
# Where an option lies in a configuration; the other options steer how a pipeline is built.
_PLACES = {
    "frontend": ("extractor", "kind"),
    "variant": ("extractor", "variant"),
    "max_keypoints": ("extractor", "max_keypoints"),
    "resize": ("extractor", "resize"),
    "keep": ("extractor", "keep"),
    "geometry": ("estimation", "kind"),
}
_NETWORK = {name: ("matcher", "policy", name) for name in ("match_threshold", "early_exit", "pruning")}
_NEAREST = {name: ("matcher", name) for name in ("match_threshold", "ratio")}


def find_preset(name: str) -> PipelineConfig:
    """The configuration of that name; `UsageError`, with those that exist, if there is none."""
    if name not in PRESETS:
        raise UsageError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]


def configure(config: PipelineConfig, options: Mapping[str, Any]) -> PipelineConfig:
    """The configuration with the options of `LoadOptions` put in their places.

    Raises:
        UsageError: an unknown option, a value of the wrong type or out of range, or an option that the
            configuration has no use for.
    """
    for name in options:
        if name not in LoadOptions.__annotations__:
            raise UsageError(unknown_name("option", name, LoadOptions.__annotations__))
    given = {name: value for name, value in options.items() if value is not None}
    _check_values(given)
    if _GRID in (given.get("frontend"), config.extractor.kind) and given.keys() & {"frontend", "variant"}:
        raise UsageError(f"the cells of a grid ({_GRID}) and a front end cannot stand in for each other")
    values = to_dict(config)
    if isinstance(config.matcher, NearestConfig):
        _check_for_nearest(given, given.get("frontend", config.extractor.kind))
        places = _PLACES | _NEAREST
    elif "ratio" in given:
        raise UsageError("ratio is for the presets without a network (nearest, nearest-learned)")
    else:
        places = _PLACES | _NETWORK
    for name, (*tables, key) in places.items():
        if name in given:
            table = values
            for step in tables:
                table = table[step]
            table[key] = given[name]
    try:
        matcher = from_dict(type(config.matcher), values.pop("matcher"), "matcher")
        return replace(from_dict(PipelineConfig, values), matcher=matcher)
    except ValueError as error:
        raise UsageError(str(error)) from error


def unknown_name(what: str, name: object, known: Mapping[str, Any]) -> str:
    """A message for a name that is not known: the nearest one, and all of them."""
    near = get_close_matches(str(name), known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    return f"unknown {what} {name!r}{hint} Known: {', '.join(known)}"


def depth(config: PipelineConfig) -> int:
    """Depth of the network of a configuration, 0 without one."""
    return config.matcher.context.depth if isinstance(config.matcher, NetworkConfig) else 0


def _check_values(given: dict[str, Any]) -> None:
    for name in ("max_keypoints", "resize", "max_pixels"):
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise UsageError(f"{name} must be a whole number of at least 1, not {given[name]!r}")
    threshold = given.get("match_threshold", 0.0)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise UsageError(f"match_threshold must be a number from 0 to 1, not {threshold!r}")
    ratio = given.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise UsageError(f"ratio must be a number above 0 and at most 1, not {ratio!r}")
    if not isinstance(given.get("upright", True), bool):
        raise UsageError(f"upright must be True or False, not {given['upright']!r}")


def _check_for_nearest(given: dict[str, Any], front_end: str) -> None:
    """Without a network some options mean nothing and are refused; precision is for front ends too."""
    useless = [name for name in ("weights", "early_exit", "pruning") if name in given]
    if front_end == "sift" and given.get("precision", "auto") not in ("auto", "float32"):
        useless.append("precision")
    if useless:
        raise UsageError(f"this preset has no network, so {useless[0]} means nothing to it")
