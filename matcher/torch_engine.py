"""The engine on torch: front ends and networks of every preset, on any device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from matcher.config import GRID_KIND, ExtractorConfig, NearestConfig, PipelineConfig, Precision
from matcher.errors import CUDA_BUILD, UsageError
from matcher.extract.extractor import SiftExtractor, find_front_end
from matcher.extract.front_end import LearnedExtractor
from matcher.match.loftr import GridExtractor
from matcher.match.nearest import NearestMatcher
from matcher.match.network import DTYPES, AttentionMatcher, resolve_precision
from matcher.pipeline import Learned, policy_of, refuse_for_grid
from matcher.processes import keep_freed_memory
from matcher.result import WeightsSource
from matcher.types import Extractor
from matcher.weights.files import fill_extractor, find_weights, load_model


def build(config: PipelineConfig, given: Mapping[str, Any]) -> Learned:
    """Extractor and matcher of a configuration; `UsageError`: a device, front end or option that does not
    fit; `IntegrityError`: weights that are absent or damaged."""
    keep_freed_memory()
    device = resolve_device(given.get("device", "auto"))
    precision = resolve_precision(given.get("precision", "auto"), device)
    fast = resolve_precision("auto", device)
    if device.type == "cpu" and precision not in ("float32", fast):
        text = f"this processor emulates {precision}, many times as slowly as it computes in {fast}"
        warnings.warn(f"{text}; the precision 'auto' takes {fast}", UserWarning, stacklevel=4)
    on_grid = config.extractor.kind == GRID_KIND
    if on_grid:
        refuse_for_grid(given)
    else:
        extractor = build_extractor(config.extractor, given.get("frontend_weights"), device, precision)
    if isinstance(config.matcher, NearestConfig):
        return extractor, NearestMatcher(config.matcher), config, None
    # Architecture is the weights file's, policy that of the preset and the options.
    network, digest, name = load_model(find_weights(given.get("weights") or config.weights))
    network = network.with_policy(policy_of(config, given))
    matcher = AttentionMatcher(network, device=device, precision=precision)
    if on_grid:  # the front end shares the matcher's parameters and its device
        if matcher.model.backbone is None:
            raise UsageError(f"the weights {name} are of a matcher with a detector; use a preset with one")
        extractor = GridExtractor(matcher.model.backbone, matcher.model.config.kind)
    return extractor, matcher, replace(config, matcher=network.config), WeightsSource(name, digest)


def build_extractor(
    config: ExtractorConfig,
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "auto",
) -> Extractor:
    """The front end that `config.kind` names, read at its first image, not before; `weights` are a file of
    its parameters, None what `matcher weights fetch` made or the shipped one of `learned`, which alone has
    another precision than float32. `UsageError`: an unknown front end, a setting that it does not have, or
    weights for one without any."""
    front_end = None if config.kind == "sift" else find_front_end(config.kind)
    if weights is not None and (front_end is None or front_end.build is None):
        raise UsageError(f"the front end {config.kind} has no weights; leave frontend_weights out")
    if front_end is None:
        return SiftExtractor(config)
    dtype = DTYPES[resolve_precision(precision, torch.device(device))]
    fill = partial(fill_extractor, path=weights)
    return LearnedExtractor(config, front_end, fill, device, dtype, weights)


def resolve_device(name: str) -> torch.device:
    """The device of that name, "auto" being CUDA where there is one, else the CPU; `UsageError`: none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts.get(device.type, 0):
        build = device.type == "cuda" and torch.version.cuda is None
        why = f": this PyTorch ({torch.__version__}) is a build without CUDA, another comes by {CUDA_BUILD}"
        raise UsageError(f"device {name!r} is not available here; use 'auto' or 'cpu'{why * build}")
    return device


def devices(name: str) -> list[str]:
    """The devices that a name stands for: all GPUs for "cuda", else one; errors as `resolve_device`."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is None:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]
