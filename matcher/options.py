"""The options that adjust a preset: their names, what each means, and where it lies in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from matcher.config import (
    GRID_KIND,
    Engine,
    GeometryKind,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    Precision,
    RefineConfig,
    SecondPassConfig,
)
from matcher.config_tables import from_dict, to_dict
from matcher.errors import UsageError, unknown_name


class LoadOptions(TypedDict, total=False):
    """What adjusts a preset; None always means the preset's own value."""

    weights: str | Path | None  # a name in the manifest or a safetensors file
    frontend: str | None  # another front end, such as "disk"; its features must be what the matcher takes
    variant: str | None  # which of the front end's published networks, such as "aliked-n32"
    frontend_weights: str | Path | None  # of a learned front end
    engine: Engine | None  # "torch", or "onnx": ONNX Runtime on the CPU, without torch
    device: str | None  # "auto" (CUDA when there is one, else the CPU), "cpu", "cuda", "cuda:1", "mps"
    precision: Precision | None  # of the network; "auto" is what the device is fast at
    cuda_graphs: bool | None  # on a GPU, capture a network's work for each size once and replay it
    max_keypoints: int | None  # an image
    # Longer side in pixels; larger images are made smaller. By default soft ones still smaller where a preset
    # does so; a size that is given is kept.
    resize: int | None
    keep: Literal["strongest", "largest"] | None  # of SIFT's points, where there are too many
    match_threshold: float | None  # least score of a match, 0 to 1
    ratio: float | None  # of `nearest`: nearest / second nearest distance, above 0 and at most 1
    early_exit: bool | None  # stop a pair at the layer where it is confident
    pruning: bool | None  # drop points that cannot match
    geometry: GeometryKind | None  # "fundamental", "homography", "homographies", "essential" or "none"
    second_pass: bool | None  # look again, in other ways, at a pair whose first pass was not confident
    refine: bool | None  # refine every match on the images; presets with keypoints do
    upright: bool | None  # apply the EXIF orientation of images
    alpha_mask: bool | None  # no keypoints where alpha is 0; False: alpha is ignored
    max_pixels: int | None  # larger images are refused before they are decoded


# Where an option lies in a configuration; the other options steer how a pipeline is built.
_FIELDS = {
    "frontend": ("extractor", "kind"),
    "variant": ("extractor", "variant"),
    "max_keypoints": ("extractor", "max_keypoints"),
    "resize": ("extractor", "resize"),
    "keep": ("extractor", "keep"),
    "geometry": ("estimation", "kind"),
}
OF_NETWORKS = ("match_threshold", "early_exit", "pruning")  # how a network is used
_NETWORK = {name: ("matcher", "policy", name) for name in OF_NETWORKS}
_NEAREST = {name: ("matcher", name) for name in ("match_threshold", "ratio")}


def configure(config: PipelineConfig, options: Mapping[str, Any]) -> PipelineConfig:
    """The configuration with the options of `LoadOptions` applied.

    Raises:
        UsageError: an unknown option, a value of the wrong type or out of range, or an option that the
            configuration has no use for.
    """
    given = given_options(options)
    if GRID_KIND in (given.get("frontend"), config.extractor.kind) and given.keys() & {"frontend", "variant"}:
        raise UsageError(
            f"the cells of a grid ({GRID_KIND}) are no front end: leave frontend and variant out"
        )
    values = to_dict(config)
    if isinstance(config.matcher, NearestConfig):
        _check_for_nearest(given, given.get("frontend", config.extractor.kind))
        fields = _FIELDS | _NEAREST
    elif "ratio" in given:
        raise UsageError(
            "ratio is for the presets without a network (nearest, nearest-learned); use match_threshold here"
        )
    elif isinstance(config.matcher, NetworkConfig):
        fields = _FIELDS | _NETWORK
    else:
        fields = _FIELDS
        if useless := sorted(given.keys() & _NETWORK.keys()):
            raise UsageError(f"this preset has no network, so {useless[0]} has no effect; leave it out")
    for name, (*tables, key) in fields.items():
        if name in given:
            table = values
            for step in tables:
                table = table[step]
            table[key] = given[name]
    sizes = values["extractor"]
    if sizes["kind"] != config.extractor.kind:
        sizes["sparse_resize"] = None  # only the preset's own front end is known to gain
    if "resize" in given:
        sizes["soft_resize"] = None
        if None not in (sizes["sparse_resize"], given["resize"]):
            sizes["sparse_resize"] = min(sizes["sparse_resize"], given["resize"])
    if "second_pass" in given:
        values["second_pass"] = _second_pass(config, given["second_pass"])
    if "refine" in given:
        values["refine"] = to_dict(config.refine or RefineConfig()) if given["refine"] else None
    try:
        matcher = from_dict(type(config.matcher), values.pop("matcher"), "matcher")
        return replace(from_dict(PipelineConfig, values), matcher=matcher)
    except ValueError as error:
        raise UsageError(str(error)) from error


def option_at(path: str) -> str:
    """The option that sets a value of a configuration, by the value's dotted path; other paths as they are.

    >>> option_at("estimation.kind"), option_at("estimation.seed")
    ('geometry', 'estimation.seed')
    """
    fields = [*_FIELDS.items(), *_NETWORK.items(), *_NEAREST.items()]
    return next((name for name, steps in fields if ".".join(steps) == path), path)


def _second_pass(config: PipelineConfig, wanted: bool) -> dict[str, Any] | None:
    """The preset's further passes, or for a preset without any those of its own features alone."""
    if not wanted:
        return None
    if config.extractor.kind == GRID_KIND:
        raise UsageError("second_pass needs keypoints; this preset has only the cells of a grid")
    return to_dict(config.second_pass or SecondPassConfig(preset=None))


def refuse_second_pass(options: Mapping[str, Any], reason: str) -> None:
    """Refuse `second_pass=True` where pairs are matched by one pass, for a reason.

    Raises:
        UsageError: it is among the options.
    """
    if options.get("second_pass"):
        raise UsageError(f"{reason}; leave second_pass away")


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not None.

    Raises:
        UsageError: an unknown option, or a value of the wrong type or out of range.
    """
    for name in options:
        if name not in LoadOptions.__annotations__:
            raise UsageError(unknown_name("option", name, LoadOptions.__annotations__))
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("max_keypoints", "resize", "max_pixels"):
        if name in given and (type(given[name]) is not int or given[name] < 1):
            raise UsageError(f"{name} must be a whole number of at least 1, not {given[name]!r}")
    threshold = given.get("match_threshold", 0.0)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise UsageError(f"match_threshold must be a number from 0 to 1, not {threshold!r}")
    ratio = given.get("ratio", 1.0)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise UsageError(f"ratio must be a number above 0 and at most 1, not {ratio!r}")
    if given.get("engine", "torch") not in get_args(Engine):
        raise UsageError(f"engine must be one of {', '.join(get_args(Engine))}, not {given['engine']!r}")
    for name in ("upright", "alpha_mask", "second_pass", "refine", "cuda_graphs"):
        if not isinstance(given.get(name, True), bool):
            raise UsageError(f"{name} must be True or False, not {given[name]!r}")
    return given


def _check_for_nearest(given: dict[str, Any], front_end: str) -> None:
    """Without a matching network some options mean nothing and are refused; precision is of our front end."""
    useless = [name for name in ("weights", "early_exit", "pruning") if name in given]
    if front_end != "learned" and given.get("precision", "auto") not in ("auto", "float32"):
        useless.append("precision")
    if useless:
        raise UsageError(f"this preset has no network, so {useless[0]} has no effect; leave it out")
