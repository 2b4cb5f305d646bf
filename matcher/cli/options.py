"""From a function to the command line of its command: every option is declared once.

A command is a function. Its parameters before `/` are arguments, the others options: `max_keypoints` is
`--max-keypoints` as in the library, `json_` is `--json`. Below "Args:" its docstring says what each of them
is and, in parentheses, what stands for a value; what several commands share is said in `SHARED`. A parameter
whose type is a dataclass takes a group of options, which that class declares in the same way. The parameter
`given` takes those options of `matcher.load` that were typed, as `LoadOptions` declares them.
"""

from __future__ import annotations

import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, wraps
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from matcher.cli.output import Interrupted, complain, detail, say, set_messages
from matcher.errors import MatcherError, UsageError
from matcher.files import check_output
from matcher.presets import DEFAULT_PRESET, PRESETS, SLOW_FRONT_ENDS, LoadOptions, from_file, plugin_names
from matcher.processes import thread_environment

if TYPE_CHECKING:
    from matcher.cameras import Camera

SHARED = """
Args:
    preset (NAME|FILE.toml): Front end, matcher and weights; see `matcher presets`.
    image0 (IMAGE0): First image.
    image1 (IMAGE1): Second image.
    images (IMAGES...): Images, or folders of images.
    run (RUN_DIR): Folder of a run.
    mask0, mask1 (FILE): Mask image; black pixels yield no keypoints.
    masks (DIR): Masks named like the images; black pixels yield no keypoints.
    threads (N): Number of CPU threads.  [default: OMP_NUM_THREADS if set, else all cores]
    overwrite: Replace an existing output even if matcher did not write it.
    json_: Print one JSON object and nothing else.
    fail_below (SHARE): Exit with code 4 if a smaller share of the matches agrees, as in scenes with depth;
        `stitch` needs .1 in any case.
    verbose: Print more details.
    quiet: Print only errors, and any JSON, matrices, settings or finds of `find` that were asked for.
    log (FILE): Append all messages, with timestamps, to FILE.
"""
NAMES = {  # where they are not those of the parameter
    "match_threshold": ("--threshold", "--match-threshold"),
    "bridged": ("--bridged/--no-bridged",),
    "verbose": ("--verbose", "-v"),
    "quiet": ("--quiet", "-q"),
}
_WORDS = {  # that stand in braces in what is said of options
    "DEFAULT_PRESET": DEFAULT_PRESET,
    "CAMERAS": (
        "In fx,fy,cx,cy the centre of the first pixel is (0, 0); COLMAP's MODEL,width,height,params have it "
        "at (0.5, 0.5). A FILE is COLMAP's cameras.txt or .bin, lines NAME MODEL WIDTH HEIGHT PARAMS, "
        "nerfstudio's transforms.json, KITTI's calib.txt, or the YAML of OpenCV, ROS or EuRoC."
    ),
}
_OWN_THREADS = {"evaluate", "track", "train"}  # commands whose --threads are those of this process
_RESUMABLE = {"collection", "sfm", "train"}  # commands that keep finished work and continue from it


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`, for shell completion."""
    return [name for name in dict.fromkeys([*PRESETS, *plugin_names()]) if name.startswith(incomplete)]


# Types of values, with what typer asks of them.
Count = Annotated[int, ("min", 1)]
Natural = Annotated[int, ("min", 0)]
Share = Annotated[float, ("min", 0), ("max", 1)]
PresetName = Annotated[str, ("autocompletion", complete_preset)]


def loading(*without: str, only: Sequence[str] = (), **shown: object) -> Any:
    """The annotation of `given`: all options of `matcher.load` but some, or `only` these without the preset.

    `shown`: defaults for the help where they are not the preset's.
    """
    names = only or ("preset", *(name for name in _of_load() if name not in without))
    return Annotated[dict[str, Any], names, shown]


@cache
def _of_load() -> dict[str, Any]:
    """The kinds of the options of `matcher.load`, but for those of programs alone."""
    hints = get_type_hints(LoadOptions)
    return {name: hints[name] for name in hints if name not in ("early_exit", "pruning", "bgr")}


def _described(text: str) -> dict[str, tuple[str | None, str]]:
    """What stands for the value of each parameter below "Args:" of a docstring, and what the parameter is."""
    rows = inspect.cleandoc(text).partition("Args:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    ([\w, ]+?)(?: \((.+?)\))?: (.+(?:\n {5}.+)*)", rows, re.MULTILINE)
    return {
        name: (value or None, re.sub(r"\n +", " ", said).format(**_WORDS))
        for names, value, said in found
        for name in names.split(", ")
    }


def _more(kind: Any) -> dict[str, Any]:
    """What the parts of a type ask of typer."""
    found: dict[str, Any] = {}
    for part in get_args(kind):
        found |= [part] if isinstance(part, tuple) else _more(part)
    return found


def _option(name: str, kind: Any, default: Any, metavar: str | None, help: str, **more: Any) -> Any:
    typed = "--" + name.strip("_").replace("_", "-")
    if bool in (kind, *get_args(kind)) and default is not False:
        typed += f"/--no{typed[1:]}"
    option = typer.Option(*NAMES.get(name, (typed,)), metavar=metavar, help=help, **more)
    return Annotated[kind, option], default


def _option_of_load(name: str, shown: dict[str, Any]) -> Any:
    """An option of `matcher.load`, with the default preset's value as default in the help."""
    if name == "preset":
        more = dict(show_default=DEFAULT_PRESET, autocompletion=complete_preset)
        return _option(name, str | None, None, *_described(SHARED)[name], **more)
    kind, config = _of_load()[name], PRESETS[DEFAULT_PRESET]
    defaults = {
        **{key: getattr(config.extractor, key) for key in ("max_keypoints", "resize", "keep")},
        "match_threshold": f"{config.matcher.policy.match_threshold:g}",
        "geometry": config.estimation.kind,
        "further_passes": "further-passes" if config.further_passes else "no-further-passes",
        "precision": "auto",
        "device": "auto",
        "engine": "torch",
    }
    kind, text = str | None if Path in get_args(kind) else kind, str((defaults | shown).get(name, ""))
    said = _described(LoadOptions.__doc__ or "").get(name, (None, ""))  # without it under `python -OO`
    return _option(name, kind, None, *said, show_default=text or True)


def declared(owner: Callable[..., Any]) -> tuple[dict[str, tuple[Any, Any]], Callable[..., Any]]:
    """Annotation and default of each option of a command or group, and what calls it with all values."""
    hints, kinds = get_type_hints(owner, include_extras=True), get_type_hints(owner)
    said = _described(SHARED) | _described(owner.__doc__ or "")  # without it under `python -OO`
    parameters = inspect.signature(owner).parameters
    found: dict[str, tuple[Any, Any]] = {}
    taken: dict[str, Callable[..., Any]] = {}  # what each parameter gets of the values of all options
    for name, parameter in parameters.items():
        kind, default, taken[name] = kinds[name], parameter.default, itemgetter(name)
        metavar, help = said.get(name, (None, ""))
        if name == "given":
            _, names, shown = get_args(hints[name])
            found |= {each: _option_of_load(each, shown) for each in names}
            taken[name] = lambda values, names=names: {n: values[n] for n in names if values[n] is not None}
        elif is_dataclass(kind):
            options, taken[name] = declared(kind)
            found |= options
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            argument = typer.Argument(metavar=metavar, show_default=False, help=help, **_more(hints[name]))
            found[name] = Annotated[kind, argument], default
        else:
            found[name] = _option(name, kind, default, metavar, help, **_more(hints[name]))

    def call(values: dict[str, Any]) -> Any:
        given = {name: take(values) for name, take in taken.items()}
        first = [given.pop(name) for name, each in parameters.items() if each.kind is each.POSITIONAL_ONLY]
        return owner(*first, **given)

    return found, call


class OnceEach(TyperCommand):
    """A command that refuses an option typed twice, of which only the last value would count."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """The arguments that are left over, as typer has it."""
        _, _, typed = self.make_parser(ctx).parse_args(args=list(args))
        for option in self.params:
            alike = typed.count(option) > 1 and not (option.multiple or ctx.resilient_parsing)
            if alike and not (option.is_flag and not option.secondary_opts):  # -q -q says nothing else
                name, count = "/".join([*option.opts, *option.secondary_opts]), typed.count(option)
                ctx.fail(f"{name} stands {count} times, here or in an alias of your shell; give it once")
        return super().parse_args(ctx, args)


def runnable(command: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The command as typer sees it, with the options that all commands share."""
    common, prepare = declared(set_messages)
    options, call = declared(command)
    kinds = options | common

    @wraps(command)
    def run(**values: Any) -> Any:
        prepare(values)
        detail(f"command: {shlex.join(sys.argv)}")
        if isinstance(values.get("preset"), str):
            preset, given = from_file(values["preset"], {key: values.get(key) for key in _of_load()})
            values |= {"preset": preset, **{key: value for key, value in given.items() if key in values}}
        try:
            if name in _OWN_THREADS and values["threads"] is not None:  # before torch and OpenCV are imported
                os.environ.update(thread_environment(values["threads"]))
            _tell_of_slow_front_ends(values)
            return call(values)
        except KeyboardInterrupt:
            again = " to continue" if name in _RESUMABLE else ""
            raise Interrupted(f"interrupted; run the same command again{again}") from None
        except SystemExit as end:
            if end.code == 143 and name in _RESUMABLE:  # SIGTERM
                complain("ended; what is finished is kept: run the same command again to continue")
            raise
        except MatcherError as error:
            error.args = (_as_options(str(error), kinds, values),)
            raise
        finally:
            if "matcher.torch_engine" in sys.modules:
                from matcher.kernels.loader import tell_once

                if (said := tell_once()) is not None:  # that kernels could be compiled
                    say(said)

    only = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature(
        [inspect.Parameter(key, only, annotation=kind, default=value) for key, (kind, value) in kinds.items()]
    )
    run.__annotations__ = {key: kind for key, (kind, _) in kinds.items()}
    run.__doc__ = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:\n")[0]
    return run


def _as_options(text: str, names: Iterable[str], values: Mapping[str, Any]) -> str:
    """A message of the library whose arguments are named as the options that the user typed, but at its start
    for what may be one of their values there: a path or its stem."""
    each = [one for value in values.values() for one in (value if isinstance(value, list) else [value])]
    given = [Path(one) for one in each if isinstance(one, str | Path)]
    paths = {word for path in given for word in (str(path), path.stem)}

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        starts = found.start() == 0 and name not in paths
        if not (value or starts or re.search(r"[_\d]", name)):
            return found[0]  # a word like any other
        typed = name.replace("_", "-")
        if value in ("=True", "=False"):
            return f"--{'no-' * (value == '=False')}{typed}"
        return f"--{typed}{value.replace('=', ' ').replace(chr(39), '')}"

    return re.sub(rf"(?<![\w./'-])({'|'.join(names)})\b(?![/.-])(=True|=False|='?[^\s;:)',]+'?|)", flag, text)


def _tell_of_slow_front_ends(given: dict[str, Any]) -> None:
    """Say what to expect where the front end takes seconds an image on a CPU."""
    config = PRESETS.get(given["preset"] or DEFAULT_PRESET) if "frontend" in given else None
    kind = config and (given["frontend"] or config.extractor.kind)
    if kind not in SLOW_FRONT_ENDS:
        return
    with suppress(ModuleNotFoundError):  # without torch none of them runs
        from matcher.torch_engine import resolve_device

        if resolve_device(given["device"] or "auto").type == "cpu":
            side = given["resize"] or config.extractor.resize
            seconds = SLOW_FRONT_ENDS[kind] * (side / 1024) ** 2
            say(
                f"the front end {kind} takes about {seconds:.0f} s of one core for an image of {side} "
                "pixels, that of the default preset less than one"
            )


# Values that several commands read and check.


def parse_camera(text: str | None, name: str) -> Camera | None:
    """One camera for all images, in the forms of `matcher.cameras.CAMERA_FORMS`; `name` is the option's."""
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

    `outputs`: each with the suffixes that it may have; None is passed over.
    """
    written, taken = set(), [path for path in inputs if path is not None and path.exists()]
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
    again: dict[Path, None] = {}
    for start in given:
        for path in find_images(start) if start.is_dir() else [start]:
            name = path.relative_to(start if start.is_dir() else start.parent).as_posix()
            if path in found.values():
                again[path] = None
            else:
                found[str(path) if name in found else name] = path
    if again:
        say(f"given more than once, taken once: {', '.join(map(str, islice(again, 5)))}")
    return found
