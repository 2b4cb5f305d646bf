"""Options that adjust a preset, declared once for the commands that load one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_args

from matcher.cli import options

# Keyword arguments of `matcher.load`, `matcher.Tracker` and `Collection.open` that the user gave. A command
# has one parameter of this type; the metadata are the options that the command lacks, and its own defaults,
# which help shows instead of the preset's.
Given = Annotated[dict[str, Any], (), {}]
Command = Callable[..., Any]

_DECLARED = {
    "preset": (options.Preset, options.DEFAULT_PRESET),
    "weights": (options.Weights, None),
    "frontend": (options.FrontEnd, None),
    "frontend_weights": (options.FrontEndWeights, None),
    "variant": (options.Variant, None),
    "max_keypoints": (options.MaxKeypoints, None),
    "resize": (options.Resize, None),
    "keep": (options.Keep, None),
    "geometry": (options.Geometry, None),
    "threshold": (options.Threshold, None),
    "ratio": (options.Ratio, None),
    "second_pass": (options.SecondPass, None),
    "precision": (options.Precision, None),
    "engine": (options.Engine, None),
    "device": (options.Device, "auto"),
    "no_refine": (options.NoRefine, False),
    "no_upright": (options.NoUpright, False),
    "no_alpha_mask": (options.NoAlphaMask, False),
    "max_pixels": (options.MaxPixels, None),
}


# What the library calls an option that has another name here.
LIBRARY_NAMES = {
    "threshold": "match_threshold",
    "no_refine": "refine",
    "no_upright": "upright",
    "no_alpha_mask": "alpha_mask",
    "run": "run_dir",
}


def with_preset_options(command: Command) -> Command:
    """The command with the options that adjust a preset in place of its parameter `given`, if it has one."""
    own = inspect.signature(command, eval_str=True).parameters
    if "given" not in own:
        return command
    _, left_out, own_defaults = get_args(own["given"].annotation)
    names = [name for name in _DECLARED if name not in left_out]
    shown = preset_defaults() | own_defaults
    declared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=_with_default(kind, shown[name]) if name in shown else kind,
        )
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


def preset_defaults() -> dict[str, object]:
    """The default preset's values of these options, for the help."""
    from matcher.presets import find_preset

    config = find_preset(options.DEFAULT_PRESET)
    return {
        "max_keypoints": config.extractor.max_keypoints,
        "resize": config.extractor.resize,
        "threshold": f"{config.matcher.policy.match_threshold:g}",
        "geometry": config.estimation.kind,
        "keep": config.extractor.keep,
        "second_pass": "second-pass" if config.second_pass else "no-second-pass",
        "precision": "auto",
        "engine": "torch",
    }


def _with_default(annotation: Any, value: object) -> Any:
    """The annotation of an option whose help shows this default."""
    kind, info = get_args(annotation)
    info = copy.copy(info)
    info.show_default = str(value)
    return Annotated[kind, info]


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """The options under the library's names."""
    found = {LIBRARY_NAMES.get(name, name): value for name, value in given.items()}
    if "no_upright" in given:
        found["upright"] = not given["no_upright"]
    if "no_alpha_mask" in given:
        found["alpha_mask"] = False if given["no_alpha_mask"] else None
    if "no_refine" in given:
        found["refine"] = False if given["no_refine"] else None
    return {name: value for name, value in found.items() if value is not None}
