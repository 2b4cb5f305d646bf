"""Options that several commands share, each declared once, and the reading of their values.

Names are those of the library's arguments: `--max-keypoints` is `max_keypoints`.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from matcher.cli.output import Interrupted, complain, detail, say, set_messages
from matcher.errors import MatcherError, UsageError
from matcher.files import check_output
from matcher.presets import DEFAULT_PRESET, PRESETS, SLOW_FRONT_ENDS, LoadOptions, plugin_names

if TYPE_CHECKING:
    from matcher.cameras import Camera


def option(kind: Any, *names: str, help: str, **more: Any) -> Any:
    """The annotation of an option; a parameter's own name serves where none is given."""
    return Annotated[kind, typer.Option(*names, help=help, **more)]


def argument(kind: Any, metavar: str, help: str) -> Any:
    """The annotation of an argument that must be given."""
    return Annotated[kind, typer.Argument(metavar=metavar, show_default=False, help=help)]


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`, for shell completion."""
    return [name for name in dict.fromkeys([*PRESETS, *plugin_names()]) if name.startswith(incomplete)]


# A parameter `given: Given` of a command takes the options of `matcher.load`: without some, and with other
# defaults for the help.
Given = Annotated[dict[str, Any], (), {}]


@cache
def _loading() -> dict[str, tuple[Any, str, str]]:
    """The options of `matcher.load`, but for those of programs alone: kind, help, what stands for a value."""
    hints = get_type_hints(LoadOptions, include_extras=True)
    return {
        name: get_args(hint) for name, hint in hints.items() if name not in ("early_exit", "pruning", "bgr")
    }


Preset = option(
    str,
    metavar="NAME",
    autocompletion=complete_preset,
    help="Front end, matcher and weights; see `matcher presets`.",
)


def of_preset(name: str, shown: object = None) -> Any:
    """The annotation of an option of `matcher.load`; `shown`: its default in the help, else the preset's."""
    config = PRESETS[DEFAULT_PRESET]
    defaults = {
        "max_keypoints": config.extractor.max_keypoints,
        "resize": config.extractor.resize,
        "match_threshold": f"{config.matcher.policy.match_threshold:g}",
        "geometry": config.estimation.kind,
        "keep": config.extractor.keep,
        "further_passes": "further-passes" if config.further_passes else "no-further-passes",
        "precision": "auto",
        "engine": "torch",
    }
    kind, help, metavar = _loading()[name]
    default = defaults.get(name) if shown is None else shown
    names = ("--threshold", "--match-threshold") if name == "match_threshold" else ()
    more = {"metavar": metavar} if metavar else {}
    kind = str if name == "device" else str | None if Path in get_args(kind) else kind
    return option(kind, *names, help=help, show_default=str(default) if default else True, **more)


Threads = option(int | None, metavar="N", min=1, help="Number of CPU threads.  [default: all cores]")
Overwrite = option(bool, "--overwrite", help="Replace an existing output even if matcher did not write it.")
AsJson = option(bool, "--json", help="Print one JSON object and nothing else.")
MaskFile = option(Path | None, metavar="FILE", help="Mask image; black pixels yield no keypoints.")
Masks = option(
    Path | None,
    "--masks",
    metavar="DIR",
    help="Masks named like the images; black pixels yield no keypoints.",
)
CAMERA_FORMS = "fx,fy,cx,cy|MODEL,w,h,…|FILE"
CAMERA_HELP = (
    "In fx,fy,cx,cy the centre of the first pixel is (0, 0); COLMAP's MODEL,width,height,params have it at "
    "(0.5, 0.5). A FILE is COLMAP's cameras.txt or .bin, lines NAME MODEL WIDTH HEIGHT PARAMS, nerfstudio's "
    "transforms.json or OpenCV's YAML."
)
First = argument(Path, "IMAGE0", "First image.")
Second = argument(Path, "IMAGE1", "Second image.")
RunArgument = argument(Path, "RUN_DIR", "Folder of a run.")

_COMMON = {
    "verbose": (option(bool, "--verbose", "-v", help="Print more details."), False),
    "quiet": (option(bool, "--quiet", "-q", help="Print only errors and what was asked for."), False),
    "log": (option(Path | None, metavar="FILE", help="Append all messages, with timestamps, to FILE."), None),
}
_RESUMABLE = {"collection", "sfm", "train"}  # commands that keep finished work and continue from it


def runnable(command: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The command as typer sees it: with the options of `matcher.load` and those that all commands share."""
    kinds: dict[str, tuple[Any, Any]] = {}  # annotation and default of each parameter
    loading: list[str] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name != "given":
            kinds[parameter.name] = parameter.annotation, parameter.default
            continue
        _, without, defaults = get_args(parameter.annotation)
        loading = ["preset", *(each for each in _loading() if each not in without)]
        kinds["preset"] = Preset, DEFAULT_PRESET
        kinds |= {
            each: (of_preset(each, defaults.get(each)), "auto" if each == "device" else None)
            for each in loading[1:]
        }
    kinds |= _COMMON

    @wraps(command)
    def run(**arguments: Any) -> Any:
        set_messages(**{key: arguments.pop(key) for key in _COMMON})
        detail(f"command: {shlex.join(sys.argv)}")
        if loading:
            given = {key: arguments.pop(key) for key in loading}
            arguments["given"] = {key: value for key, value in given.items() if value is not None}
            _tell_of_slow_front_ends(arguments["given"])
        try:
            return command(**arguments)
        except KeyboardInterrupt:
            again = " to continue" if name in _RESUMABLE else ""
            raise Interrupted(f"interrupted; run the same command again{again}") from None
        except SystemExit as end:
            if end.code == 143 and name in _RESUMABLE:  # SIGTERM
                complain("ended; what is finished is kept: run the same command again to continue")
            raise
        except MatcherError as error:
            error.args = (_as_options(str(error), kinds),)
            raise
        finally:
            _tell_of_kernels()

    only = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(
        [inspect.Parameter(key, only, annotation=kind, default=value) for key, (kind, value) in kinds.items()]
    )
    run.__annotations__ = {key: kind for key, (kind, _) in kinds.items()}
    return run


def _as_options(text: str, names: Iterable[str]) -> str:
    """A message of the library whose arguments are named as the options that the user typed."""

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if not (value or found.start() == 0 or re.search(r"[_\d]", name)):
            return found[0]  # a word like any other
        flag = name.replace("_", "-")
        if value in ("=True", "=False"):
            return f"--{flag}" if value == "=True" else f"--no-{flag}"
        return f"--{flag}{value.replace('=', ' ').replace(chr(39), '')}"

    return re.sub(rf"(?<![\w./'-])({'|'.join(names)})\b(?![/.-])(=True|=False|='?[^\s;:)',]+'?|)", flag, text)


def _tell_of_slow_front_ends(given: dict[str, Any]) -> None:
    """Say what to expect where the front end takes seconds an image on a CPU."""
    from matcher.loading import is_installed

    if (config := PRESETS.get(given["preset"])) is None or not is_installed("torch"):
        return
    kind = given.get("frontend", config.extractor.kind)
    if kind not in SLOW_FRONT_ENDS or given["device"].startswith(("cuda", "mps")):
        return
    import torch

    if given["device"] == "auto" and torch.cuda.is_available():
        return
    side = given.get("resize") or config.extractor.resize
    seconds = SLOW_FRONT_ENDS[kind] * (side / 1024) ** 2
    say(
        f"the front end {kind} takes about {seconds:.0f} s of one core for an image of {side} pixels, and "
        "its matcher some seconds a pair; the default preset takes less than one"
    )


def _tell_of_kernels() -> None:
    """Say once that the kernels are not compiled, after a command that would have used them."""
    if "matcher.torch_engine" not in sys.modules:
        return
    from matcher.kernels.loader import tell_once

    if (said := tell_once()) is not None:
        say(said)


def limit_threads(count: int | None) -> None:
    """Use so many CPU threads, if a number is given; to be called before torch and OpenCV are imported."""
    from matcher.processes import thread_environment

    if count is not None:
        os.environ.update(thread_environment(count))


def parse_camera(text: str | None, name: str) -> Camera | None:
    """One camera for all images, in the forms of `matcher.cameras.CAMERA_FORMS`; None stays None.

    Raises:
        UsageError: something else, or cameras by name of image; `name` is the option's.
    """
    from matcher.cameras import Camera, parse_cameras

    found = None if text is None else parse_cameras(text, name)
    if found is not None and not isinstance(found, Camera):
        raise UsageError(f"{name} {text} holds cameras by name of image, and one for all is needed")
    return found


def check_outputs(
    outputs: Iterable[tuple[Path | None, Sequence[str]]],
    inputs: Iterable[Path | None] = (),
    *,
    overwrite: bool = False,
) -> None:
    """Refuse, before any work, outputs that cannot be written or would replace an input or a foreign file.

    Args:
        outputs: each with the suffixes that it may have; None is passed over.
        inputs: files that are read.
        overwrite: files that matcher did not write may be replaced.

    Raises:
        UsageError: the message names the output and the reason.
    """
    written: set[Path] = set()
    taken = [path for path in inputs if path is not None and path.exists()]
    for path, suffixes in outputs:
        if path is None:
            continue
        if path.resolve() in written:
            raise UsageError(f"{path} is the file of two outputs; name another one for each")
        written.add(path.resolve())
        if path.exists() and any(path.samefile(each) for each in taken):
            raise UsageError(f"{path} is an input; name another file for the output")
        check_output(path, suffixes, overwrite=overwrite)


def expand_images(given: Iterable[Path]) -> dict[str, Path]:
    """Images by name, folders replaced by what is in them: the path below the folder, or the file's name."""
    from matcher.images import find_images

    found: dict[str, Path] = {}
    for start in given:
        for path in find_images(start) if start.is_dir() else [start]:
            name = path.relative_to(start if start.is_dir() else start.parent).as_posix()
            if path not in found.values():
                found[str(path) if name in found else name] = path
    return found
