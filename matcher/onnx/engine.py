"""The engine on ONNX Runtime: SIFT and our front end, and every network of keypoints, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnxruntime  # noqa: F401  its absence is found out here

from matcher.config import GRID_KIND, ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import UsageError
from matcher.extract.sift import SiftExtractor
from matcher.match.nearest import NearestMatcher
from matcher.onnx.extractor import OnnxExtractor
from matcher.onnx.interface import KIND
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.trained import trained_network
from matcher.parts import LearnedParts, policy_of, refuse_for_grid
from matcher.result import WeightsSource
from matcher.types import Extractor


def build(config: PipelineConfig, given: Mapping[str, Any]) -> LearnedParts:
    """The extractor and the matcher of a configuration.

    Raises:
        UsageError: a device, precision, front end or network that this engine does not have.
        IntegrityError: weights that are absent or damaged.
    """
    devices(given.get("device", "auto"))
    precision = given.get("precision", "auto")
    if precision not in ("auto", "float32"):
        raise UsageError(f"engine 'onnx' computes in float32, not in {precision}; leave precision out")
    if config.extractor.kind == GRID_KIND:
        from matcher.onnx.pairs import check_exportable

        refuse_for_grid(given)
        check_exportable(config.matcher)
    extractor = build_extractor(config.extractor, given.get("frontend_weights"))
    if isinstance(config.matcher, NearestConfig):
        return LearnedParts(extractor, NearestMatcher(config.matcher), config, None)
    trained = trained_network(given.get("weights") or config.weights, policy_of(config, given))
    matcher, source = OnnxMatcher(trained), WeightsSource(trained.name, trained.sha256)
    return LearnedParts(extractor, matcher, replace(config, matcher=trained.config), source)


def build_extractor(config: ExtractorConfig, weights: Any = None) -> Extractor:
    """The front end that `config.kind` names.

    Raises:
        UsageError: one that needs torch, or weights for one without any.
    """
    if config.kind == "sift":
        if weights is not None:
            raise UsageError("the front end sift has no weights; leave frontend_weights out")
        return SiftExtractor(config)
    if config.kind != KIND:
        raise UsageError(
            f"engine 'onnx' has the front ends sift and {KIND}, not {config.kind}; use engine 'torch' for it"
        )
    return OnnxExtractor(config, weights)


def devices(name: str) -> list[str]:
    """The CPU, which "auto" and "cpu" stand for.

    Raises:
        UsageError: another device.
    """
    if name not in ("auto", "cpu"):
        raise UsageError(
            f"engine 'onnx' runs on the CPU, not on {name}; leave device out, or use engine 'torch'"
        )
    return ["cpu"]
