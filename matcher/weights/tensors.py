"""The tensors of safetensors files in memory, checked against those that a network has.

Errors are `IntegrityError` and read on after the file's name.
"""

from __future__ import annotations

from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor

from matcher.errors import IntegrityError
from matcher.weights.renames import current_names


def all_tensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file by their present names, numbers with a fraction as float32.

    Raises:
        IntegrityError: the bytes are damaged.
    """
    try:
        tensors = current_names(parse_tensors(data))
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"is not an intact safetensors file ({error})") from error
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def read_tensors(data: bytes, expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file that holds exactly the expected ones; as `all_tensors`, `checked`."""
    return checked(all_tensors(data), expected, owner)


def checked(tensors: dict[str, Tensor], expected: dict[str, Tensor], owner: str) -> dict[str, Tensor]:
    """These tensors, if they are exactly the expected ones.

    Args:
        tensors: by name.
        expected: names and shapes.
        owner: whose tensors they are, for the message.

    Raises:
        IntegrityError: tensors are missing, extra, misshaped or not finite.
    """
    if problems := list_differences(expected, tensors):
        raise IntegrityError(f"does not hold the tensors that {owner} asks for ({'; '.join(problems)})")
    return tensors


def list_differences(expected: dict[str, Tensor], found: dict[str, Tensor], limit: int = 8) -> list[str]:
    """Missing, extra, misshaped and not finite tensors in words, `limit` of each; empty when all is well."""
    common = [name for name in expected if name in found]
    fitting = [name for name in common if found[name].shape == expected[name].shape]
    shapes = [
        f"{name} is {tuple(found[name].shape)}, not {tuple(expected[name].shape)}"
        for name in common
        if found[name].shape != expected[name].shape
    ]
    cases = {
        "missing": [name for name in expected if name not in found],
        "extra": sorted(name for name in found if name not in expected),
        "misshaped": shapes,
        "not finite": [name for name in fitting if not bool(found[name].isfinite().all())],
    }
    return [
        f"{case}: {', '.join(names[:limit])}{f' and {len(names) - limit} more' if len(names) > limit else ''}"
        for case, names in cases.items()
        if names
    ]
