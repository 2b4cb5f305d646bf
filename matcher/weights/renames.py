"""Names that weights files had in earlier versions, and what they are called now.

Files are read under either name and written under the new one. Recipes of earlier versions are read by the
same table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# Regular expressions on the beginning of a tensor's name.
TENSORS = (
    (r"((?:fine\.)?layers\.\d+)\.within\.(qkv|out)\.", r"\1.self_block.attention.\2."),
    (r"((?:fine\.)?layers\.\d+)\.across\.(qkv|out)\.", r"\1.cross_block.attention.\2."),
    (r"((?:fine\.)?layers\.\d+)\.within\.attention\.", r"\1.self_block.attention.score."),
    (r"((?:fine\.)?layers\.\d+)\.across\.attention\.", r"\1.cross_block.attention.score."),
    (r"((?:fine\.)?layers\.\d+)\.within\.", r"\1.self_block."),
    (r"((?:fine\.)?layers\.\d+)\.across\.", r"\1.cross_block."),
    (r"guidance\.waves\.", "guidance.frequencies."),
    (r"guidance\.place\.", "guidance.encode_position."),
    (r"guidance\.partner\.", "guidance.predict."),
    (r"guidance\.echo\.", "guidance.encode."),
    (r"guidance\.trust\.", "guidance.confidence."),
    (r"consensus\.widen\.", "consensus.hidden."),
    (r"consensus\.judge\.", "consensus.out."),
    (r"prospect\.", "match_probability."),
)
# Keys of a network's configuration, in whichever of its tables they lie.
KEYS = {
    "in_turn": "sequential_cross",
    "prospects": "match_probability",
    "least_pruned": "min_pruned_share",
    "doubt": "threshold_doubles_at",
}

# Of the policy, where the old form had them at the top.
BESIDE_THE_POLICY = ("match_threshold", "threshold_doubles_at")


def current_name(name: str) -> str:
    """The present name of a tensor.

    >>> current_name("layers.3.within.qkv.weight")
    'layers.3.self_block.attention.qkv.weight'
    >>> current_name("layers.3.self_block.attention.qkv.weight")
    'layers.3.self_block.attention.qkv.weight'
    """
    for pattern, replacement in TENSORS:
        changed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return changed
    return name


def current_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under their present names.

    Raises:
        ValueError: a tensor is there under its old and its present name.
    """
    renamed = {current_name(name): tensor for name, tensor in tensors.items()}
    if len(renamed) < len(tensors):
        twice = sorted(
            name for name in tensors if current_name(name) != name and current_name(name) in tensors
        )
        raise ValueError(f"under an old and a new name: {', '.join(twice)}")
    return renamed


def current_config(values: Any) -> Any:
    """A network's configuration as plain tables in its present form; the old one had thresholds beside it.

    >>> current_config({"doubt": 20.0, "adaptivity": {"prospects": True, "exit_share": 0.9}})
    {'match_probability': True, 'policy': {'exit_share': 0.9, 'threshold_doubles_at': 20.0}}
    """
    if not isinstance(values, dict):
        return values
    values = _renamed(values)
    policy = values.pop("adaptivity", {})
    if "match_probability" in policy:
        values["match_probability"] = policy.pop("match_probability")
    policy |= {key: values.pop(key) for key in BESIDE_THE_POLICY if key in values}
    return values | {"policy": policy | values.get("policy", {})} if policy else values


def _renamed(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {KEYS.get(key, key): _renamed(value) for key, value in values.items()}
