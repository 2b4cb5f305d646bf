"""Names that weights files had in earlier versions, and what they are called now.

Files are read under either name and written under the new one. Old configurations also carried thresholds,
which belong to the preset now; `current_config` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Regular expressions on the beginning of a tensor's name.
TENSORS = (
    (r"(fine\.)?layers\.(\d+)\.within\.", r"\g<1>layers.\2.self_block."),
    (r"(fine\.)?layers\.(\d+)\.across\.", r"\g<1>layers.\2.cross_block."),
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


def current_name(name: str) -> str:
    """The present name of a tensor.

    >>> current_name("layers.3.within.qkv.weight")
    'layers.3.self_block.qkv.weight'
    >>> current_name("layers.3.self_block.qkv.weight")
    'layers.3.self_block.qkv.weight'
    """
    for pattern, replacement in TENSORS:
        changed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return changed
    return name


def current_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    """A network's configuration as plain tables, with the present names of its keys."""
    if not isinstance(values, dict):
        return values
    return {KEYS.get(key, key): current_config(value) for key, value in values.items()}
