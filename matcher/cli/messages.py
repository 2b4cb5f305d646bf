"""Output of the command line: results on standard output, notices on standard error, a log file.

Everything goes through Python's logger `matcher`, so `-q`, `-v` and `--log` are decided here only.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from matcher.errors import UsageError
from matcher.files import MARK, is_ours

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
