"""Options that adjust a preset, declared once for the commands that load one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

from matcher.cli import options

# Keyword arguments of `matcher.load`, `matcher.Sequence` and `Collection.open`, without those not given. A
# command has one parameter of such a type; beside it stand the options that the command has no use for.
Given = Annotated[dict[str, Any], ()]
GivenWithoutGeometry = Annotated[dict[str, Any], ("geometry",)]
Command = Callable[..., Any]

_DECLARED = {
    "preset": (options.Preset, options.DEFAULT_PRESET),
    "weights": (options.Weights, None),
    "frontend": (options.FrontEnd, None),
    "variant": (options.Variant, None),
    "max_keypoints": (options.MaxKeypoints, None),
    "resize": (options.Resize, None),
    "keep": (options.Keep, None),
    "geometry": (options.Geometry, None),
    "threshold": (options.Threshold, None),
    "precision": (options.Precision, None),
    "device": (options.Device, "auto"),
    "no_upright": (options.NoUpright, False),
    "max_pixels": (options.MaxPixels, None),
}


def with_preset_options(command: Command) -> Command:
    """The command with the options that adjust a preset in place of its parameter `given`, if it has one."""
    own = inspect.signature(command, eval_str=True).parameters
    if "given" not in own:
        return command
    names = [name for name in _DECLARED if name not in get_args(own["given"].annotation)[1]]
    declared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in _DECLARED.items()
        if name in names
    ]
    parameters = []
    for name, parameter in own.items():
        by_name = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += declared if name == "given" else [by_name]

    @wraps(command)
    def run(**arguments: Any) -> Any:
        given = {name: arguments.pop(name) for name in names}
        return command(**arguments, given=_renamed(given))

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """The options under the library's names."""
    found = dict(given)
    if "threshold" in found:
        found["match_threshold"] = found.pop("threshold")
    if "no_upright" in found:
        found["upright"] = not found.pop("no_upright")
    return {name: value for name, value in found.items() if value is not None}
