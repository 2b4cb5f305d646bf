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
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from matcher.cli.output import Interrupted, complain, detail, set_messages
from matcher.errors import MatcherError, UsageError
from matcher.files import check_output

if TYPE_CHECKING:
    from matcher.cameras import Camera

DEFAULT_PRESET = (
    "hybrid-learned"  # that of matcher.presets, which is not imported for the help; a test compares
)


def option(kind: Any, *names: str, help: str, **more: Any) -> Any:
    """The annotation of an option; a parameter's own name serves where none is given."""
    return Annotated[kind, typer.Option(*names, help=help, **more)]


def argument(kind: Any, metavar: str, help: str) -> Any:
    """The annotation of an argument that must be given."""
    return Annotated[kind, typer.Argument(metavar=metavar, show_default=False, help=help)]


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`, for shell completion."""
    from matcher.presets import PRESETS, plugin_names

    return [name for name in dict.fromkeys([*PRESETS, *plugin_names()]) if name.startswith(incomplete)]


# Of `matcher.load`, in the order of the help; a command has them by a parameter `given: Given`.
PRESET_OPTIONS = {
    "preset": option(
        str,
        metavar="NAME",
        autocompletion=complete_preset,
        help="Front end, matcher and weights; see `matcher presets`.",
    ),
    "weights": option(
        str | None, metavar="FILE", help="Matcher weights: a file, or a name from `matcher weights list`."
    ),
    "frontend": option(
        str | None, metavar="NAME", help="Use another front end than the preset's, for example disk."
    ),
    "frontend_weights": option(
        str | None,
        metavar="FILE",
        help="Weights file of the front end; needed only for front ends of your own.",
    ),
    "variant": option(str | None, metavar="NAME", help="Variant of the front end, for example aliked-n32."),
    "max_keypoints": option(int | None, metavar="N", help="Keep at most N keypoints per image."),
    "resize": option(
        int | None,
        metavar="PX",
        help="Shrink larger images until the longer side has PX pixels. Without it, the learned front end's "
        "presets shrink soft images further, to 640 at least, and enlarge small ones with few keypoints.",
    ),
    "keep": option(
        Literal["strongest", "largest"] | None,
        help="Which SIFT keypoints to keep if an image has more than --max-keypoints.",
    ),
    "geometry": option(
        Literal["fundamental", "homography", "homographies", "essential", "none"] | None,
        help="Model that verifies the matches; homographies: of several planes; essential needs cameras.",
    ),
    "match_threshold": option(
        float | None,
        "--threshold",
        "--match-threshold",
        metavar="P",
        help="Keep matches whose probability, before calibration, is at least P, 0 to 1.",
    ),
    "ratio": option(
        float | None,
        metavar="R",
        help="Ratio test of the nearest* presets: keep matches whose distance ratio is at most R, 0 to 1.",
    ),
    "further_passes": option(
        bool | None,
        help="Where too few matches of the first pass agree, match other features, scales and the common "
        "region too.",
    ),
    "refine": option(
        bool | None,
        help="Move every match to where the images look most alike; without it faster, less exact.",
    ),
    "upright": option(
        bool | None, help="Apply the EXIF orientation of images; without it they are matched as stored."
    ),
    "alpha_mask": option(
        bool | None, help="Find no keypoints where a picture is transparent; without it alpha is ignored."
    ),
    "max_pixels": option(
        int | None, metavar="N", help="Refuse images of more than N pixels before decoding them."
    ),
    "engine": option(
        Literal["torch", "onnx"] | None,
        help="Library that runs front end and networks; onnx needs no torch.",
    ),
    "precision": option(
        Literal["auto", "float32", "bfloat16", "float16"] | None,
        help="Arithmetic of the networks; auto picks the fastest one that suits the device.",
    ),
    "device": option(str, metavar="auto|cpu|cuda|mps", help="Device to run on; auto prefers CUDA."),
}


def of_preset(name: str) -> Any:
    """The annotation of one of them, for commands that have a few."""
    return PRESET_OPTIONS[name]


_ALWAYS = {"preset": DEFAULT_PRESET, "device": "auto"}  # where nothing is given
# The parameter of a command that takes them: the names that it lacks, and its own defaults for the help.
Given = Annotated[dict[str, Any], (), {}]

Threads = option(int | None, metavar="N", min=1, help="Number of CPU threads.  [default: all cores]")
Overwrite = option(bool, "--overwrite", help="Replace an existing output even if matcher did not write it.")
AsJson = option(bool, "--json", help="Print one JSON object and nothing else.")
FailIfUnmatched = option(
    bool,
    "--fail-if-unmatched",
    help="Exit with code 4 if no matches are found, their geometry cannot be verified, or it is not even "
    "likely that the images show the same.",
)
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
    "quiet": (
        option(bool, "--quiet", "-q", help="Print only errors and requested output such as --json."),
        False,
    ),
    "log": (
        option(Path | None, metavar="FILE", help="Append all messages, with timestamps, to FILE."),
        None,
    ),
}
_RESUMABLE = {"collection", "sfm", "train"}  # commands that keep finished work and continue from it


def runnable(command: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The command as typer sees it: with the options of its preset and those that all commands share."""
    parameters: dict[str, inspect.Parameter] = {}
    preset_options: tuple[str, ...] = ()
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == "given":
            _, without, defaults = get_args(parameter.annotation)
            preset_options = tuple(key for key in PRESET_OPTIONS if key not in without)
            for key in preset_options:
                parameters[key] = _keyword(key, _shown(key, defaults), _ALWAYS.get(key))
        else:
            parameters[parameter.name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for key, (kind, default) in _COMMON.items():
        parameters[key] = _keyword(key, kind, default)

    @wraps(command)
    def run(**arguments: Any) -> Any:
        set_messages(**{key: arguments.pop(key) for key in _COMMON})
        detail(f"command: {shlex.join(sys.argv)}")
        if preset_options:
            given = {key: arguments.pop(key) for key in preset_options}
            arguments["given"] = {key: value for key, value in given.items() if value is not None}
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
            error.args = (_as_options(str(error), parameters),)
            raise

    run.__signature__ = inspect.Signature(list(parameters.values()))
    run.__annotations__ = {key: parameter.annotation for key, parameter in parameters.items()}
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _shown(name: str, defaults: dict[str, Any]) -> Any:
    """The annotation of an option of the preset; the help shows the command's or the preset's default."""
    import copy

    from matcher.presets import find_preset

    config = find_preset(DEFAULT_PRESET)
    shown = {
        "max_keypoints": config.extractor.max_keypoints,
        "resize": config.extractor.resize,
        "match_threshold": f"{config.matcher.policy.match_threshold:g}",
        "geometry": config.estimation.kind,
        "keep": config.extractor.keep,
        "further_passes": "further-passes" if config.further_passes else "no-further-passes",
        "precision": "auto",
        "engine": "torch",
        **defaults,
    }
    kind, info = get_args(PRESET_OPTIONS[name])
    info = copy.copy(info)
    info.show_default = str(shown[name]) if name in shown else True
    return Annotated[kind, info]


def _as_options(text: str, parameters: Iterable[str]) -> str:
    """A message of the library with the names of arguments as the options that the user typed."""
    flags = {name: f"--{name.replace('_', '-')}" for name in parameters}
    if "run" in flags:
        flags["run_dir"] = flags.pop("run")
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w./-]){name}=True\b", flag, text)
        text = re.sub(rf"(?<![\w./-]){name}=False\b", f"--no-{flag[2:]}", text)
        text = re.sub(rf"(?<![\w./-]){name}='?([^\s;:)']+)'?", rf"{flag} \g<1>", text)
        if re.search(r"[_\d]", name):
            text = re.sub(rf"(?<![\w./-]){name}(?![\w./-])", flag, text)
        elif text.startswith((f"{name} must ", f"{name} is ", f"{name} has ")):
            text = flag + text.removeprefix(name)
    return text


def limit_threads(count: int | None) -> None:
    """Use so many CPU threads, if a number is given; to be called before torch and OpenCV are imported."""
    from matcher.processes import thread_environment

    if count is not None:
        os.environ.update(thread_environment(count))


def numbers(text: str, count: int, name: str) -> tuple[float, ...]:
    """`1,2,…` as so many numbers.

    Raises:
        UsageError: something else; `name` is the option's.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) != count:
        raise UsageError(f"{name} must be numbers with commas between, {count} of them, not {text!r}")
    return found


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
