"""Settings of front ends; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from matcher.config import ExtractorConfig
from matcher.errors import UsageError

_SETTINGS = ("variant", "score_threshold", "nms_radius", "border")


def resolve(config: ExtractorConfig, published: Mapping[str, Any]) -> ExtractorConfig:
    """The configuration with the published value wherever a setting is None.

    Raises:
        UsageError: a setting that the front end does not have, or a value out of range.
    """
    if config.max_keypoints < 1:
        raise UsageError(f"max_keypoints must be at least 1, not {config.max_keypoints}")
    given = {name: getattr(config, name) for name in _SETTINGS if getattr(config, name) is not None}
    if foreign := sorted(set(given) - set(published)):
        has = ", ".join(published) or "none"
        raise UsageError(f"the front end {config.kind} has no {foreign[0]}; settings it has: {has}")
    if config.keep == "largest" and config.kind != "sift":
        raise UsageError(f"the front end {config.kind} keeps its strongest points; 'largest' is for sift")
    for name, least in (("nms_radius", 0), ("border", 0), ("score_threshold", 0.0)):
        if given.get(name, least) < least:
            raise UsageError(f"{name} must be at least {least}, not {given[name]}")
    return replace(config, **{**published, **given})
