"""What the command line prints and returns: results, notices, a log file, progress, exit codes, signals."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, NoReturn

import typer

from matcher.errors import MatcherError, UsageError, absent_module, duration
from matcher.files import MARK, is_ours

if TYPE_CHECKING:
    from matcher.collection.workers import StageProgress

LOGGER = "matcher"
INTERNAL, USAGE, PARTIAL, RESOURCES, INTERRUPTED = 1, 2, 4, 6, 130
_DEBUG = "MATCHER_DEBUG"
_CLEAR = "\r\033[K"  # to the start of the line, and what is there is deleted


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


def complain(text: str) -> None:
    """Print a failure on standard error, even with `-q`."""
    logging.getLogger(LOGGER).error("%s", text)


class _Console(logging.Handler):
    """Results on standard output as they are, the rest on standard error; a closed pipe raises."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if sys.stderr.isatty():
            typer.echo(_CLEAR, err=True, nl=False)  # of a line of progress
        if record.exc_info:
            typer.echo(f"{text}\n{logging.Formatter().formatException(record.exc_info)}", err=True)
        elif getattr(record, "is_result", False):
            typer.echo(text)
        else:
            with suppress(OSError):  # nobody can be told, and the work goes on
                typer.echo(f"matcher: {text}", err=True)


class _LogFile(logging.FileHandler):
    """A log whose disk may be full: that is said once, and the work goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        typer.echo(f"matcher: --log {self.baseFilename} is incomplete: {sys.exc_info()[1]}", err=True)
        logging.getLogger(LOGGER).removeHandler(self)
        with suppress(OSError):
            self.close()


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
        for handler in set(logger.handlers).difference(before[2]):
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before[:2]


def set_messages(*, verbose: bool = False, quiet: bool = False, log: Path | None = None) -> None:
    """Print more or less than usual, and append everything to a log file."""
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other; give one of them")
    logger = logging.getLogger(LOGGER)
    for handler in logger.handlers:
        if isinstance(handler, _Console) and (verbose or quiet):
            handler.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if log is None:
        return
    try:
        if log.is_fifo():
            raise UsageError(f"--log {log}: it is a pipe; name a file")
        begun = log.exists() and log.stat().st_size > 0
        if begun and not is_ours(log):
            raise UsageError(f"--log {log}: the file exists and is not a log of matcher; choose another file")
        handler = _LogFile(log, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--log {log}: the file cannot be written ({error.strerror})") from error
    if not begun:
        handler.stream.write(f"# {MARK.decode()}\n")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logger.addHandler(handler)


def open_standard_streams() -> None:
    """Open what the caller has closed (`>&-`): files must not get the numbers that libraries print to.

    Characters that the terminal's encoding lacks are escaped.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


# From an exception to a message on standard error and an exit code.


class Interrupted(Exception):
    """Ctrl-C during a command, with how to continue; the parser ends a KeyboardInterrupt without a word."""


def exit_code_of(error: BaseException) -> int:
    """Print a readable message for an exception and return its exit code."""
    from_parser, interrupted = hasattr(error, "show"), isinstance(error, (KeyboardInterrupt, Interrupted))
    if not (from_parser or interrupted or isinstance(error, MatcherError)):
        logging.getLogger(LOGGER).debug("traceback:", exc_info=error)
    if os.environ.get(_DEBUG):
        traceback.print_exception(error)
    if interrupted:
        complain(str(error) or "interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader of our output has gone; Python must not flush to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    if from_parser:
        if known := getattr(error, "possibilities", None):  # it counts equal dashes as similarity, too
            names = {name.strip("-"): name for name in known}
            near = get_close_matches(error.option_name.strip("-"), names)
            error.possibilities = [names[name] for name in near]
        if message := getattr(error, "message", None):
            error.message = message.replace("Value error, ", "")  # what pydantic puts before ours
        error.show()
        return USAGE
    text = " ".join(str(error).split())[:300]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    number = error.errno if isinstance(error, OSError) else None
    # A refused allocation is torch's RuntimeError (CPU) or OutOfMemoryError (GPU), or OpenCV's cv2.error.
    words = "enough memory", "allocate memory", "Insufficient memory", "failed to map segment", "bad_alloc"
    refused = any(each in str(error) for each in words)
    refused |= isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM) or (refused and number is None):
        complain(f"out of memory or disk space: {line}")
        return RESOURCES
    if isinstance(error, MatcherError):
        complain(str(error))
        return error.exit_code
    if number in (errno.ENAMETOOLONG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR):
        complain(f"{error.filename2 or error.filename}: {error.strerror}; name another file or folder")
        return USAGE
    if isinstance(error, ModuleNotFoundError) and (remedy := absent_module(error)) is not None:
        complain(remedy)
        return USAGE
    complain(f"internal error: {line}")
    complain(f"Set {_DEBUG}=1 or use -v to see the traceback.")
    return INTERNAL


# Signals that end a program, held until a step is whole.


@contextmanager
def stop_signals(at_first: str = "stopping after this step") -> Iterator[list[int]]:
    """Signals received: the first stops a run after the current step, a second one ends the process."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            _end(number)
        if at_first:
            say(at_first)

    if threading.current_thread() is not threading.main_thread():  # others get none
        yield received
        return
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def whole_step() -> Iterator[None]:
    """A step that Ctrl-C or SIGTERM does not cut in two: it ends first; a second signal does not wait."""
    with stop_signals("") as received:
        yield
    if received:
        _end(received[0])


def _end(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


# Progress of long commands, on standard error: a line that is written again on a terminal, lines elsewhere.

_DOING = {"extract": "extracting images", "choose": "comparing images", "match": "matching pairs"}


def wants_progress() -> bool:
    """Whether to write a line of progress again and again: on a terminal, and not with `-q`."""
    handlers = logging.getLogger(LOGGER).handlers
    shown = any(isinstance(handler, _Console) and handler.level <= logging.INFO for handler in handlers)
    return shown and sys.stderr.isatty()


class ProgressLines:
    """Steps of one work after another: how many are done, how fast, and how long the rest will take. A work
    that is not `announced` is told of only while it is long."""

    def __init__(
        self,
        say: Callable[[str], None] = say,
        clock: Callable[[], float] = monotonic,
        *,
        announced: bool = True,
    ) -> None:
        self._say, self._clock, self._terminal, self._announced = say, clock, wants_progress(), announced
        self._work, self._start, self._last = "", 0.0, 0.0

    def __call__(self, work: str, done: int, total: int, failed: int = 0) -> None:
        """Say how far a work is, if a line is due."""
        time = self._clock()
        if work != self._work or done == 0:
            self._work, self._start, self._last = work, time, time
            if self._announced:
                self._say(f"{work}: {total}")
        ended = done == total
        if ended and not self._announced:
            return
        every = 0.2 if self._terminal else 10.0  # seconds
        if done == 0 or not (ended or time - self._last >= every):
            return
        self._last, elapsed = time, time - self._start
        rate = done / max(elapsed, 1e-9)
        left = f"done in {duration(elapsed)}" if ended else f"{duration((total - done) / rate)} left"
        speed = f"{rate:.1f}/s, " if rate >= 1 else f"{60 * rate:.1f}/min, "
        speed = speed if elapsed >= 0.1 else ""  # a shorter time says nothing of a rate
        text = f"{work}: {done} of {total}{f', {failed} failed' if failed else ''}, {speed}{left}"
        if self._terminal and not ended:
            typer.echo(f"{_CLEAR}{text}", err=True, nl=False)
        else:
            self._say(text)

    def stage(self, now: StageProgress) -> None:
        """The `on_progress` of `Collection.run`."""
        self(_DOING[now.stage], now.done, now.total, now.failed)
