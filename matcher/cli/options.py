"""Options that several commands share, and the reading of their values."""

from __future__ import annotations

import copy
import errno
import inspect
import logging
import os
import re
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher
from functools import wraps
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_args

import typer

from matcher.errors import MatcherError, UsageError
from matcher.files import MARK, is_ours

if TYPE_CHECKING:
    from rich.progress import Progress

    from matcher.cameras import Camera
    from matcher.collection.runner import StageProgress


# --- options: Options that several commands share, and the reading of their values.

DEFAULT_PRESET = "hybrid-learned"  # that of matcher.presets; a test compares them


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin with `incomplete`, for shell completion."""
    from matcher.presets import PRESETS, plugin_names

    return [name for name in dict.fromkeys([*PRESETS, *plugin_names()]) if name.startswith(incomplete)]


Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        autocompletion=complete_preset,
        help="Front end, matcher and weights; see `matcher presets`.",
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FILE",
        help="Matcher weights: a file, or a name from `matcher weights list`.",
    ),
]
FrontEnd = Annotated[
    str | None,
    typer.Option(
        "--frontend", metavar="NAME", help="Use another front end than the preset's, for example disk."
    ),
]
FrontEndWeights = Annotated[
    str | None,
    typer.Option(
        "--frontend-weights",
        metavar="FILE",
        help="Weights file of the front end; needed only for front ends of your own.",
    ),
]
Variant = Annotated[
    str | None,
    typer.Option("--variant", metavar="NAME", help="Variant of the front end, for example aliked-n32."),
]
MaxKeypoints = Annotated[
    int | None, typer.Option("--max-keypoints", metavar="N", help="Keep at most N keypoints per image.")
]
Resize = Annotated[
    int | None,
    typer.Option(
        "--resize",
        metavar="PX",
        help="Shrink larger images until the longer side has PX pixels. Without it, the learned front end's "
        "presets shrink soft images further, to 640 at least, and enlarge small ones with few keypoints.",
    ),
]
Keep = Annotated[
    Literal["strongest", "largest"] | None,
    typer.Option("--keep", help="Which SIFT keypoints to keep if an image has more than --max-keypoints."),
]
Threshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="P",
        help="Keep matches whose probability, before calibration, is at least P, 0 to 1.",
    ),
]
Ratio = Annotated[
    float | None,
    typer.Option(
        "--ratio",
        metavar="R",
        help="Ratio test of the nearest* presets: keep matches whose distance ratio is at most R, 0 to 1.",
    ),
]
Geometry = Annotated[
    Literal["fundamental", "homography", "homographies", "essential", "none"] | None,
    typer.Option(
        "--geometry",
        help="Model that verifies the matches; homographies: of several planes; essential needs cameras.",
    ),
]
SecondPass = Annotated[
    bool | None,
    typer.Option(
        "--second-pass/--no-second-pass",
        help="Where too few matches of the first pass agree, match other features, scales and the common "
        "region too.",
    ),
]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(
        "--precision", help="Arithmetic of the networks; auto picks the fastest one that suits the device."
    ),
]
Engine = Annotated[
    Literal["torch", "onnx"] | None,
    typer.Option("--engine", help="Library that runs front end and networks; onnx needs no torch."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda|mps", help="Device to run on; auto prefers CUDA.")
]
NoRefine = Annotated[
    bool, typer.Option("--no-refine", help="Leave matches where keypoints were found; faster, less exact.")
]
NoUpright = Annotated[
    bool,
    typer.Option("--no-upright", help="Match images as stored, without applying their EXIF orientation."),
]
NoAlphaMask = Annotated[
    bool,
    typer.Option(
        "--no-alpha-mask",
        help="Ignore transparency. Without this, transparent pixels (alpha 0) yield no keypoints.",
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels", metavar="N", help="Refuse images of more than N pixels before decoding them."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", min=1, help="Number of CPU threads.  [default: all cores]"),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output even if matcher did not write it.")
]


def limit_threads(count: int | None) -> None:
    """Use so many CPU threads, if a number is given; to be called before torch and OpenCV are imported."""
    from matcher.processes import thread_environment

    if count is not None:
        os.environ.update(thread_environment(count))


def parse_camera(text: str | None, option: str) -> Camera | None:
    """`fx,fy,cx,cy` in stored pixels as a camera; None stays None.

    Raises:
        UsageError: not four numbers.
    """
    from matcher.cameras import Camera
    from matcher.errors import UsageError

    if text is None:
        return None
    try:
        fx, fy, cx, cy = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} must be four numbers fx,fy,cx,cy in pixels, not {text!r}") from error
    return Camera(fx, fy, cx, cy)


# --- messages: Output of the command line: results on standard output, notices on standard error, a log
# file.

LOGGER = "matcher"


def show(text: str, *, always: bool = False) -> None:
    """Print a result on standard output; `-q` silences it unless it was asked for (`always`)."""
    level = logging.WARNING if always else logging.INFO
    logging.getLogger(LOGGER).log(level, "%s", text, extra={"is_result": True})


def say(text: str) -> None:
    """Print a notice on standard error; `-q` silences it."""
    logging.getLogger(LOGGER).info("%s", text)


def detail(text: str) -> None:
    """Print a detail on standard error, only with `-v`; a log file gets it too."""
    logging.getLogger(LOGGER).debug("%s", text)


@contextmanager
def results_as_notices() -> Iterator[None]:
    """Print results of a step on the way as notices, so that standard output holds those of the command."""
    logger = logging.getLogger(LOGGER)

    def note(record: logging.LogRecord) -> bool:
        record.is_result = False
        return True

    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)


def complain(text: str) -> None:
    """Print a failure on standard error, even with `-q`."""
    logging.getLogger(LOGGER).error("%s", text)


def wants_progress() -> bool:
    """Whether to show progress: not with `-q`."""
    return any(
        isinstance(handler, _Console) and handler.level <= logging.INFO
        for handler in logging.getLogger(LOGGER).handlers
    )


@contextmanager
def messages() -> Iterator[None]:
    """Print messages to the terminal within this context; `set_messages` adjusts which ones."""
    logger = logging.getLogger(LOGGER)
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.addHandler(_Console(logging.INFO))
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield
    finally:
        for handler in [handler for handler in logger.handlers if handler not in before[2]]:
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before[:2]


def set_messages(*, verbose: bool = False, quiet: bool = False, log: Path | None = None) -> None:
    """Print more or less than usual, and append everything to a log file.

    Raises:
        UsageError: both `verbose` and `quiet`, or a file that cannot be written or is not a log of matcher.
    """
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other; give one of them")
    logger = logging.getLogger(LOGGER)
    for handler in logger.handlers:
        if isinstance(handler, _Console) and (verbose or quiet):
            handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if log is not None:
        logger.addHandler(_log_file(log))


class _Console(logging.Handler):
    """Results on standard output as they are, the rest on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message; a closed pipe raises in the caller."""
        text = record.getMessage()
        if record.exc_info:
            text = "\n".join(filter(None, (text, logging.Formatter().formatException(record.exc_info))))
            typer.echo(text, err=True)
        elif getattr(record, "is_result", False):
            typer.echo(text)
        else:
            with suppress(OSError):  # nobody can be told, and the work goes on
                typer.echo(f"matcher: {text}", err=True)


class _LogFile(logging.FileHandler):
    """A log whose disk may be full: that is said once, and the work goes on."""

    said = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Say that a message is missing."""
        self._say(sys.exc_info()[1])

    def close(self) -> None:
        """Close the file, as far as it can be written."""
        try:
            super().close()
        except OSError as error:
            self._say(error)

    def _say(self, error: BaseException | None) -> None:
        if not self.said:
            self.said = True
            typer.echo(f"matcher: --log {self.baseFilename} is incomplete: {error}", err=True)


def _log_file(path: Path) -> logging.Handler:
    """A handler that appends to a log of matcher, or starts a new one with our mark."""
    try:
        if path.is_fifo():
            raise UsageError(f"--log {path}: it is a pipe; name a file")
        begun = path.exists() and path.stat().st_size > 0
        if begun and not is_ours(path):
            raise UsageError(
                f"--log {path}: the file exists and is not a log of matcher; choose another file"
            )
        handler = _LogFile(path, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log {path}: the file cannot be written ({error.strerror})") from error
    if not begun:
        handler.stream.write(f"# {MARK.decode()}\n")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    return handler


def open_standard_streams() -> None:
    """Open what the caller has closed (`>&-`): files must not get the numbers that libraries print to."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def survive_odd_names() -> None:
    """Escape characters that the terminal's encoding lacks instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


# --- loading: Options that adjust a preset, declared once for the commands that load one.

# Keyword arguments of `matcher.load`, `matcher.Tracker` and `Collection.open` that the user gave. A command
# has one parameter of this type; the metadata are the options that the command lacks, and its own defaults,
# which help shows instead of the preset's.
Given = Annotated[dict[str, Any], (), {}]
Command = Callable[..., Any]

_DECLARED = {
    "preset": (Preset, DEFAULT_PRESET),
    "weights": (Weights, None),
    "frontend": (FrontEnd, None),
    "frontend_weights": (FrontEndWeights, None),
    "variant": (Variant, None),
    "max_keypoints": (MaxKeypoints, None),
    "resize": (Resize, None),
    "keep": (Keep, None),
    "geometry": (Geometry, None),
    "threshold": (Threshold, None),
    "ratio": (Ratio, None),
    "second_pass": (SecondPass, None),
    "precision": (Precision, None),
    "engine": (Engine, None),
    "device": (Device, "auto"),
    "no_refine": (NoRefine, False),
    "no_upright": (NoUpright, False),
    "no_alpha_mask": (NoAlphaMask, False),
    "max_pixels": (MaxPixels, None),
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

    config = find_preset(DEFAULT_PRESET)
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


# --- running: What all commands share: `-v`, `-q`, `--log`, Ctrl-C, and errors that name the options the
# user typed.

Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more details.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only errors and requested output such as --json.")
]
LogFile = Annotated[
    Path | None, typer.Option("--log", metavar="FILE", help="Append all messages, with timestamps, to FILE.")
]
_COMMON = {"verbose": (Verbose, False), "quiet": (Quiet, False), "log": (LogFile, None)}
# Commands that keep finished work and continue from it.
_RESUMABLE = {"collection", "sfm", "train"}


class Interrupted(Exception):
    """Ctrl-C during a command; the message explains how to continue."""


def runnable(command: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The command as typer sees it, with the options that all commands share."""
    inner = with_preset_options(command)
    own = inspect.signature(inner, eval_str=True).parameters
    shared = [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for key, (kind, default) in _COMMON.items()
    ]
    parameters = [
        *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own.values()),
        *shared,
    ]
    options = option_names(parameters)

    @wraps(command)
    def run(**arguments: Any) -> Any:
        set_messages(**{key: arguments.pop(key) for key in _COMMON})
        detail(f"command: {shlex.join(sys.argv)}")
        try:
            return inner(**arguments)
        except KeyboardInterrupt:
            again = " to continue" if name in _RESUMABLE else ""
            raise Interrupted(f"interrupted; run the same command again{again}") from None
        except MatcherError as error:
            error.args = (in_options(str(error), options),)
            raise

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def option_names(parameters: list[inspect.Parameter]) -> dict[str, str]:
    """The option that sets each of the library's names, such as `match_threshold`: `--threshold`."""
    found = {}
    for parameter in parameters:
        declared = [info for info in get_args(parameter.annotation) if type(info).__name__ == "OptionInfo"]
        if declared:
            # In an annotation, typer keeps the first name where a default would be.
            names = [declared[0].default, *(declared[0].param_decls or ())]
            given = next((text for text in names if str(text).startswith("--")), None)
            option = given or f"--{parameter.name.replace('_', '-')}"
            found[LIBRARY_NAMES.get(parameter.name, parameter.name)] = option
    return found


def in_options(text: str, options: dict[str, str]) -> str:
    """A library message in which the user's options replace the library's arguments.

    `overwrite=True` becomes `--overwrite`, `refine=False` `--no-refine`, and `geometry='none'`
    `--geometry none`. A name alone is replaced if it cannot be an ordinary word (`max_keypoints`); others,
    such as `resize`, only where they are the subject of a sentence.
    """
    for name, option in options.items():
        start = rf"(?<![\w./-]){name}"
        text = re.sub(rf"{start}={not option.startswith('--no-')}\b", option, text)
        text = re.sub(rf"{start}='?([^\s;:)']+)'?", rf"{option} \g<1>", text)
        if re.search(r"[_\d]", name):
            text = re.sub(rf"{start}(?![\w./-])", option, text)
        elif not option.startswith("--no-"):  # which means the opposite
            subject = rf"(^|\bso |[:;] ){name}(?= must | is | has | means | does | \d|: )"
            text = re.sub(subject, rf"\g<1>{option}", text)
    return text


# --- exits: From an exception to a message on standard error and an exit code.

INTERNAL, USAGE, PARTIAL, RESOURCES, INTERRUPTED = 1, 2, 4, 6, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_REFUSED = (errno.ENAMETOOLONG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP)
_DEBUG = "MATCHER_DEBUG"
_NEAR = 0.6  # similarity of two names, 0 to 1, from which one may be a slip of the other


def exit_code_of(error: BaseException) -> int:
    """Print a readable message for an exception and return its exit code."""
    if not _is_explained(error):
        logging.getLogger(LOGGER).debug("traceback:", exc_info=error)
    if os.environ.get(_DEBUG):
        traceback.print_exception(error)
    if isinstance(error, (KeyboardInterrupt, Interrupted)):
        complain(str(error) or "interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of our output has gone; Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    if hasattr(error, "show"):  # the parser's
        if getattr(error, "possibilities", None):
            error.possibilities = [name for name in error.possibilities if _near(name, error.option_name)]
        error.show()
        return USAGE
    if _out_of_resources(error):
        complain(f"out of memory or disk space: {_one_line(error)}")
        return RESOURCES
    if isinstance(error, MatcherError):
        complain(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.errno in _REFUSED:  # by the system, wherever it was met
        complain(f"{error.filename}: {error.strerror}; name another file or folder")
        return USAGE
    complain(f"internal error: {_one_line(error)}")
    complain(f"Set {_DEBUG}=1 or use -v to see the traceback.")
    return INTERNAL


def _is_explained(error: BaseException) -> bool:
    """Whether the message is complete, so that a traceback would not help."""
    return isinstance(error, (MatcherError, KeyboardInterrupt, Interrupted)) or hasattr(error, "show")


def _near(option: str, typed: str) -> bool:
    """Whether an option may be the one meant: the parser counts equal dashes as similarity, too."""
    return SequenceMatcher(None, option.strip("-"), typed.strip("-")).ratio() >= _NEAR


def _out_of_resources(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # A refused allocation is torch's RuntimeError (CPU) or OutOfMemoryError (GPU), or OpenCV's cv2.error.
    refused = any(words in str(error) for words in ("not enough memory", "Insufficient memory"))
    return isinstance(error, MemoryError) or refused or type(error).__name__ == "OutOfMemoryError"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


# --- interruptions: Signals that end a program, held until a step is whole.

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Signals received: the first stops a run after the current step, a second one ends the process."""
    with _held(lambda: say("stopping after this step")) as received:
        yield received


@contextmanager
def whole_step() -> Iterator[None]:
    """A step that Ctrl-C or SIGTERM does not cut in two: it ends first; a second signal does not wait.

    Raises:
        KeyboardInterrupt: after the step, for Ctrl-C.
        SystemExit: after the step, for SIGTERM.
    """
    with _held() as received:
        yield
    if received:
        _end(received[0])


@contextmanager
def _held(at_first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Ending signals received, of which the second ends; threads other than the first get none."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            _end(number)
        at_first()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in _ENDING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


# --- progress: Progress of long commands: bars on a terminal, lines elsewhere; on standard error.

_LINE_SECONDS = 10.0  # between two lines where there is no terminal
_DOING = {"extract": "extracting images", "choose": "comparing images", "match": "matching pairs"}


@contextmanager
def stage_progress() -> Iterator[Callable[[StageProgress], None]]:
    """A callback for the `on_progress` of `Collection.run`."""
    progress = _terminal_progress("{task.fields[rate]}")
    if progress is None:
        yield ProgressLines(say)
        return
    with progress as bars:
        tasks: dict[str, tuple[int, float]] = {}

        def update(now: StageProgress) -> None:
            if now.done == 0 or now.stage not in tasks:
                task = bars.add_task(_DOING[now.stage], total=now.total, rate="")
                tasks[now.stage] = (task, monotonic())
            task, start = tasks[now.stage]
            rate = _rate(now.done / max(monotonic() - start, 1e-9))
            failed = f", {now.failed} failed" if now.failed else ""
            bars.update(task, completed=now.done, total=now.total, rate=f"{rate}{failed}")

        yield update


@contextmanager
def pair_progress(name: str) -> Iterator[Callable[[int, int], object]]:
    """A callback for the `progress` of an evaluation of the set `name`: pairs done, and their total."""
    progress = _terminal_progress(transient=True)
    if progress is None:
        yield lambda done, total: _say_pairs(name, done, total)
        return
    with progress as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _say_pairs(name: str, done: int, total: int) -> None:
    """A line for every tenth of the pairs."""
    if done == total or (done * 10) // total > ((done - 1) * 10) // total:
        say(f"{name}: {done} of {total} pairs")


def _terminal_progress(*texts: str, transient: bool = False) -> Progress | None:
    """Bars with these texts before the remaining time; None without a terminal or with `-q`."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal and wants_progress()):
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, texts))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=transient)


class ProgressLines:
    """Progress as lines: the first, the last, and one every ten seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say, self._clock = say, clock
        self._stage, self._start, self._last = "", 0.0, 0.0

    def __call__(self, now: StageProgress) -> None:
        """Print the progress if a line is due."""
        time = self._clock()
        if now.stage != self._stage or now.done == 0:
            self._stage, self._start, self._last = now.stage, time, time
            self._say(f"{_DOING[now.stage]}: {now.total}")
        elif now.done == now.total or time - self._last >= _LINE_SECONDS:
            self._last = time
            elapsed = time - self._start
            rate = now.done / max(elapsed, 1e-9)
            left = (now.total - now.done) / rate if rate else 0.0
            times = (
                f"{_duration(max(left, 1))} left" if now.done < now.total else f"done in {_duration(elapsed)}"
            )
            self._say(
                f"{_DOING[now.stage]}: {now.done} of {now.total}, {now.failed} failed, {_rate(rate)}, {times}"
            )


def _rate(each_second: float) -> str:
    return f"{each_second:.1f}/s" if each_second >= 1 else f"{60 * each_second:.1f}/min"


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{max(seconds, 0.1):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )
