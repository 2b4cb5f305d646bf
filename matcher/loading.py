"""From a preset and its options to a pipeline: front end, network with its weights, device and precision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Unpack

import torch

from matcher.config import GRID_KIND, ExtractorConfig, NearestConfig, PipelineConfig, Precision
from matcher.data.images import MAX_PIXELS
from matcher.data.protocols import Extractor
from matcher.errors import UsageError, unknown_name
from matcher.extract.registry import find_front_end
from matcher.extract.shared import LearnedExtractor
from matcher.extract.sift import SiftExtractor
from matcher.match.nearest import NearestMatcher
from matcher.match.network.grid import GridExtractor
from matcher.match.network.inference import DTYPES, AttentionMatcher, resolve_precision
from matcher.match.network.model import MatchingNetwork
from matcher.options import LoadOptions, configure, given_options
from matcher.passes.crops import LocalMatcher
from matcher.passes.further import FurtherPasses
from matcher.pipeline import Pipeline
from matcher.plugins import find_plugin, load_plugin, package_of, plugin_names
from matcher.presets import DEFAULT_PRESET, PRESETS
from matcher.result import WeightsSource
from matcher.threads import bound_primitives
from matcher.verify.estimation import RobustEstimator
from matcher.weights.published.catalogue import fill_extractor, load_weights


def load(preset: str = DEFAULT_PRESET, **options: Unpack[LoadOptions]) -> Pipeline:
    """Build the pipeline of a preset.

    >>> import matcher
    >>> matcher.load("nearest", max_keypoints=512, geometry="homography")
    Pipeline('nearest', cpu, up to 1024 pixels, homography)

    Args:
        preset: a name in `matcher.PRESETS`, or of a preset that an installed package adds.
        weights: of the network: a name of `matcher weights list`, or a safetensors file.
        frontend: another front end, such as "disk"; its features must be what the matcher takes.
        variant: which of the front end's published networks, such as "aliked-n32".
        frontend_weights: file of a learned front end's parameters.
        device: "auto" (CUDA where there is one, else the CPU), "cpu", "cuda", "cuda:1" or "mps".
        precision: of the network: "auto" (what the device is fast at), "float32", "bfloat16" or "float16".
        max_keypoints: at most so many in an image.
        resize: longer side in pixels; larger images are made smaller. By default 1024, and the presets of
            the front end `learned` make soft (enlarged, blurred) images smaller still, but not below 640.
        keep: "strongest" or "largest" of SIFT's keypoints, where an image has too many.
        match_threshold: least score of a match, 0 to 1.
        ratio: of the presets without a network: nearest / second nearest distance, above 0 and at most 1.
        early_exit: stop a pair at the layer where it is confident.
        pruning: drop keypoints that cannot match.
        geometry: "fundamental", "homography", "essential" (needs cameras) or "none".
        second_pass: run further passes if the first was not confident; on for `hybrid-learned`,
            off for the other presets.
        refine: move every match to where the images look most alike; by default where there are keypoints.
        upright: apply the EXIF orientation of images; True by default.
        max_pixels: width · height above which a file is refused before it is decoded.

    An option that is None or left out is the preset's own. The environment variable
    ONEDNN_PRIMITIVE_CACHE_CAPACITY is set, unless you did, so that torch keeps less in memory.

    Raises:
        UsageError: an unknown preset, option, device or value, or an option that the preset has no use for.
        IntegrityError: weights that are absent or damaged.
    """
    bound_primitives()
    if preset not in PRESETS and (plugin := find_plugin(preset)) is not None:
        return _from_plugin(plugin, given_options(options))
    if preset not in PRESETS:
        raise UsageError(unknown_name("preset", preset, [*PRESETS, *plugin_names()]))
    return build_pipeline(preset, configure(PRESETS[preset], options), given_options(options))


def open_pipeline(preset: str | Pipeline, options: LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline as it is.

    Raises:
        UsageError: options beside a pipeline, and what `load` refuses.
    """
    if not isinstance(preset, Pipeline):
        return load(preset, **options)
    if given := given_options(options):
        raise UsageError(f"a pipeline is complete; {', '.join(given)} cannot be added to it")
    return preset


def build_pipeline(preset: str, config: PipelineConfig, given: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a complete configuration.

    Args:
        preset: its name, for results and messages.
        config: every setting.
        given: the options of `load` that no configuration holds: weights, device, precision, upright …

    Raises:
        UsageError, IntegrityError: as `load`.
    """
    device = resolve_device(given.get("device", "auto"))
    on_grid = config.extractor.kind == GRID_KIND
    if on_grid:
        _refuse_for_grid(given)
    else:
        extractor = build_extractor(
            config.extractor, given.get("frontend_weights"), device, given.get("precision", "auto")
        )
    if isinstance(config.matcher, NearestConfig):
        matcher, source = NearestMatcher(config.matcher, device=device), None
    else:
        precision = resolve_precision(given.get("precision", "auto"), device)
        network, source = _trained(config, given)
        config = replace(config, matcher=network.config)
        matcher = AttentionMatcher(network, device=device, precision=precision)
        if on_grid:
            extractor = _grid_extractor(matcher, source.name)
    return Pipeline(
        extractor=extractor,
        matcher=matcher,
        estimator=RobustEstimator(config.estimation),
        config=config,
        preset=preset,
        weights=source,
        passes=_further_passes(config, LocalMatcher(extractor, matcher), given),
        upright=given.get("upright", True),
        max_pixels=given.get("max_pixels", MAX_PIXELS),
    )


def _from_plugin(plugin: EntryPoint, given: dict[str, Any]) -> Pipeline:
    """The pipeline that another package builds."""
    build, package = load_plugin(plugin), package_of(plugin)
    whose = f"the preset {plugin.name!r} of {package}"
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise UsageError(f"{whose} does not take these options: {error}") from None
    pipeline = build(**given)
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"{whose} must return a matcher.Pipeline, not {type(pipeline).__name__}")
    return replace(pipeline, preset=plugin.name, package=package)


def _further_passes(
    config: PipelineConfig, own: LocalMatcher, given: Mapping[str, Any]
) -> FurtherPasses | None:
    """What follows where too few matches of the first pass agree; the other preset is loaded on first use."""
    if config.second_pass is None:
        return None
    other = None
    if config.second_pass.preset is not None:
        shared = {name: given.get(name) for name in ("device", "precision", "max_keypoints")}
        other = cache(partial(_local_matcher, config.second_pass.preset, shared))
    return FurtherPasses(config.second_pass, own, other, config.estimation, config.extractor.resize)


def _local_matcher(preset: str, options: Mapping[str, Any]) -> LocalMatcher:
    pipeline = load(preset, second_pass=False, **options)
    return LocalMatcher(pipeline.extractor, pipeline.matcher)


def build_extractor(
    config: ExtractorConfig,
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "auto",
) -> Extractor:
    """The front end that `config.kind` names.

    Args:
        config: of the front end.
        weights: file of a learned front end's parameters; None is what `matcher weights fetch` made. It is
            read at the first image, not before. Those of `learned` are shipped.
        device: where a learned front end runs.
        precision: of the front end `learned`; the others run in float32.

    Raises:
        UsageError: an unknown front end, a setting that it does not have, or weights for one without any.
    """
    if config.kind == "sift":
        if weights is not None:
            raise UsageError("the front end sift has no weights; leave frontend_weights out")
        return SiftExtractor(config)
    front_end = find_front_end(config.kind)
    if front_end.build is None and weights is not None:
        raise UsageError(f"the front end {config.kind} has no weights; leave frontend_weights out")
    dtype = DTYPES[resolve_precision(precision, torch.device(device))]
    fill = partial(fill_extractor, path=weights)
    return LearnedExtractor(config, front_end, fill, device, dtype, weights)


def _refuse_for_grid(given: Mapping[str, Any]) -> None:
    """A grid has all its cells, and the network that describes them lies in the matcher's weights."""
    for name in ("frontend_weights", "max_keypoints"):
        if name in given:
            raise UsageError(
                f"this preset matches the cells of a grid, so {name} has no effect; leave it out"
            )


def _grid_extractor(matcher: AttentionMatcher, weights: str) -> GridExtractor:
    """The front end of a detector-free matcher; it shares the matcher's parameters and its device."""
    if matcher.model.backbone is None:
        raise UsageError(f"the weights {weights} are of a matcher with a detector; use a preset that has one")
    return GridExtractor(matcher.model.backbone, matcher.model.config.kind)


def resolve_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is CUDA when there is one, else the CPU.

    Raises:
        UsageError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise UsageError(f"device {name!r} is not available on this machine; use 'auto' or 'cpu'")
    return device


def _trained(config: PipelineConfig, options: Mapping[str, Any]) -> tuple[MatchingNetwork, WeightsSource]:
    """The trained network: its architecture from the weights file, its policy from the preset and options."""
    network, digest, name = load_weights(options.get("weights") or config.weights)
    return network.with_policy(config.matcher.policy), WeightsSource(name, digest)
