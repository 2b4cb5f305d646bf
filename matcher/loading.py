"""From a preset and its options to a pipeline: front end, network with its weights, device and precision."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

from matcher import presets
from matcher.config import GRID_KIND, EstimationConfig, NetworkConfig, PipelineConfig
from matcher.errors import MatcherError, UsageError, is_installed, optional, unknown_name
from matcher.passes import FurtherPasses, LocalMatcher
from matcher.pipeline import Pipeline
from matcher.processes import compute_alone_after_fork, restrain_libraries
from matcher.verify.estimation import RobustEstimator
from matcher.weights.files import front_end_bytes, locate, published_front_end


def load(preset: str | Path = presets.DEFAULT_PRESET, **options: Unpack[presets.LoadOptions]) -> Pipeline:
    """Build the pipeline of a preset.

    >>> import matcher
    >>> matcher.load("nearest", max_keypoints=512, geometry="homography")
    Pipeline('nearest', up to 1024 pixels, homography)

    Args:
        preset: a name in `matcher.PRESETS`, or of a preset that an installed package adds; or a FILE.toml of
            `preset = NAME` and the options below.
        options: weights, max_keypoints, resize, geometry, device and others, each of which
            `help(matcher.presets.LoadOptions)` describes.

    An option that is None or left out is the preset's own. The environment variable
    ONEDNN_PRIMITIVE_CACHE_CAPACITY is set, unless you did, so that torch keeps less in memory, and
    ORT_DISABLE_TELEMETRY, so that ONNX Runtime sends nothing. Processes that are forked from this one compute
    on one thread, because the others do not exist there; torch may hang in one that is
    forked while a thread matches, so start such processes by `spawn`.

    Raises:
        UsageError: an unknown preset, option, device or value, or an option that the preset has no use for.
        IntegrityError: weights that are absent or damaged; those of a front end are read at the first image,
            and beside a network, which also matches other programs' features, `UserWarning` tells of none.
    """
    restrain_libraries()
    compute_alone_after_fork()
    preset, options = presets.from_file(preset, options)
    given = presets.given_options(options)
    if preset not in presets.PRESETS and (plugin := presets.find_plugin(preset)) is not None:
        return _from_plugin(plugin, given)
    if preset not in presets.PRESETS:
        raise UsageError(unknown_name("preset", preset, [*presets.PRESETS, *presets.plugin_names()]))
    return build_pipeline(preset, presets.configure(presets.PRESETS[preset], given), given)


def open_pipeline(preset: str | Pipeline, options: presets.LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline as it is, beside which there may be no options; else as `load`."""
    if not isinstance(preset, Pipeline):
        return load(preset, **options)
    if given := presets.given_options(options):
        raise UsageError(f"a pipeline is complete; {', '.join(given)} cannot be added to it")
    return preset


def engine_of(given: Mapping[str, Any]) -> ModuleType:
    """The module that builds extractors and matchers; `UsageError`: what it needs is not installed."""
    lite = is_installed("onnxruntime") and not is_installed("torch")
    engine = given.get("engine") or ("onnx" if lite else "torch")
    with optional():
        if engine == "onnx":
            from matcher import onnx_engine as module
        else:
            from matcher import torch_engine as module
    return module


def devices(options: Mapping[str, Any]) -> list[str]:
    """The devices that a pipeline of these options could run on, all GPUs for "cuda"; errors as `load`."""
    return engine_of(presets.given_options(options)).devices(options.get("device") or "auto")


def build_pipeline(preset: str, config: PipelineConfig, given: Mapping[str, Any]) -> Pipeline:
    """The pipeline of a complete configuration, called `preset`; `given` are the options of `load` that no
    configuration holds: weights, device, precision, upright … Errors as `load`."""
    extractor, matcher, config, weights = engine_of(given).build(config, given)
    kind, network = config.extractor.kind, config.matcher
    if "frontend_weights" in given:  # before the first image, at which they are read whole
        front_end_bytes(Path(given["frontend_weights"]), kind, header_alone=True)
    if isinstance(network, NetworkConfig) and kind not in (GRID_KIND, network.kind) and network.kind != "any":
        raise UsageError(
            f"this network takes {network.kind} features, which the front end {kind} does not give: name a "
            "preset and front end of one kind"
        )
    row = None if "frontend_weights" in given else published_front_end(config.extractor)
    if row is not None and not row.is_here:
        if not isinstance(network, NetworkConfig):
            locate(row)  # which raises what is told of such weights
        warnings.warn(f"to match pictures, run `{row.command}`: {kind} has no weights here", stacklevel=3)
    passes = None
    if (further := config.further_passes) is not None:  # the other preset is loaded on first use
        names = ("device", "precision", "max_keypoints", "engine", *presets.OF_NETWORKS)
        shared = {name: given.get(name) for name in names}
        other = None if further.preset is None else _OtherMatcher(further.preset, shared)
        local, longer_side = LocalMatcher(extractor, matcher), config.extractor.resize
        passes = FurtherPasses(further, local, other, config.estimation, longer_side)
    options = {name: given[name] for name in _OF_PIPELINES if name in given}
    estimator = RobustEstimator(config.estimation)
    options |= {"preset": preset, "weights": weights}
    return Pipeline(extractor, matcher, estimator, config, passes, **options)


def with_estimation(pipeline: Pipeline, estimation: EstimationConfig) -> Pipeline:
    """A pipeline that verifies its matches, also those of further passes, as another configuration says."""
    passes = pipeline.passes and replace(pipeline.passes, estimation=estimation)
    config = replace(pipeline.config, estimation=estimation)
    return replace(pipeline, config=config, estimator=RobustEstimator(estimation), passes=passes)


def takes(preset: str, option: str) -> bool:
    """Whether a preset has a use for an option; one of another package may have none, and `UsageError` is
    raised where that cannot be imported."""
    plugin = None if preset in presets.PRESETS else presets.find_plugin(preset)
    if plugin is None:
        return True
    taken = inspect.signature(presets.load_plugin(plugin)).parameters.values()
    return any(option == each.name or each.kind is each.VAR_KEYWORD for each in taken)


# Values of options that ask for nothing, and options that any pipeline has by itself.
_ASKS_NOTHING = {"device": "auto", "engine": "torch", "precision": "auto", "further_passes": False}
_OF_PIPELINES = ("upright", "alpha_mask", "bgr", "max_pixels")


def _from_plugin(plugin: EntryPoint, given: dict[str, Any]) -> Pipeline:
    """The pipeline that another package builds; it need not take options that ask nothing of it."""
    build, package = presets.load_plugin(plugin), presets.package_of(plugin)
    whose = f"the preset {plugin.name!r} of {package}"
    foreign = [name for name in given if not takes(plugin.name, name)]
    fields = {name: given[name] for name in foreign if name in _OF_PIPELINES}
    left_out = {name for name in foreign if name in fields or _ASKS_NOTHING.get(name) == given[name]}
    given = {name: value for name, value in given.items() if name not in left_out}
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        raise UsageError(f"{whose} does not take these options: {error}") from None
    try:
        pipeline = build(**given)
    except (MatcherError, MemoryError):
        raise
    except Exception as error:  # whatever it runs into is that package's fault
        raise UsageError(f"{whose} fails ({type(error).__name__}: {error}); update or remove it") from error
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"{whose} must return a matcher.Pipeline, not {type(pipeline).__name__}")
    return replace(pipeline, preset=plugin.name, package=package, **fields)


class _OtherMatcher:
    """The front end and matcher of a preset, loaded on first use; a copy or pickle loads them again."""

    def __init__(self, preset: str, options: Mapping[str, Any]) -> None:
        self.preset, self.options, self._loaded = preset, options, None

    def __call__(self) -> LocalMatcher:
        if self._loaded is None:
            pipeline = load(self.preset, further_passes=False, **self.options)
            self._loaded = LocalMatcher(pipeline.extractor, pipeline.matcher)
        return self._loaded

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.preset, self.options)
