"""What an engine builds from a configuration, whichever library runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from matcher.config import MatchingPolicy, PipelineConfig
from matcher.errors import UsageError
from matcher.result import WeightsSource
from matcher.types import Extractor, Matcher


class LearnedParts(NamedTuple):
    """The learned parts of a pipeline."""

    extractor: Extractor
    matcher: Matcher
    config: PipelineConfig  # with the architecture that the weights have
    weights: WeightsSource | None  # of the matcher; None where it has none


def policy_of(config: PipelineConfig, given: Mapping[str, Any]) -> MatchingPolicy:
    """How a network is used; the calibration of a preset is of its own weights, and others have none."""
    policy = config.matcher.policy
    if given.get("weights") in (None, config.weights):
        return policy
    return replace(policy, calibration=None)


def refuse_for_grid(given: Mapping[str, Any]) -> None:
    """Refuse options of a detector: a grid has all its cells, and its network is in the matcher's weights;
    `UsageError`: there is such an option."""
    for name in ("frontend_weights", "max_keypoints"):
        if name in given:
            raise UsageError(
                f"this preset matches the cells of a grid, so {name} has no effect; leave it out"
            )


@dataclass(frozen=True)
class ExportedNetwork:
    """An exported network: its parameters' shapes by name, the bytes of its graphs, and what they are for."""

    shapes: Mapping[str, Sequence[int]]
    parts: Mapping[str, bytes]
    settings: Mapping[str, Any]

    @staticmethod
    def read(folder: Path) -> ExportedNetwork:
        """From a folder of `matcher/graphs`."""
        described = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
        parts = {file.stem: file.read_bytes() for file in folder.glob("*.onnx")}
        return ExportedNetwork(described["shapes"], parts, described["settings"])
