"""From an exception to a message on standard error and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback

import typer

INTERNAL, USAGE, PARTIAL, RESOURCES, INTERRUPTED = 1, 2, 4, 6, 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)
_DEBUG = "MATCHER_DEBUG"


def exit_code_of(error: BaseException) -> int:
    """Say what went wrong, once and readably, and return the exit code for it.

    The package's own errors and the parser's carry their code; they are recognised by that, because importing
    their classes would import torch.
    """
    if os.environ.get(_DEBUG):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone; nothing may be flushed there when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    if hasattr(error, "show"):
        error.show()
        return USAGE
    if _out_of_resources(error):
        typer.echo(f"matcher: out of memory or disk: {_one_line(error)}", err=True)
        return RESOURCES
    if hasattr(error, "exit_code"):
        typer.echo(f"matcher: {error}", err=True)
        return error.exit_code
    typer.echo(f"matcher: internal error: {_one_line(error)}", err=True)
    typer.echo(f"Set {_DEBUG}=1 to see where it happened.", err=True)
    return INTERNAL


def _out_of_resources(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    # A refused allocation is torch's RuntimeError (CPU) or OutOfMemoryError (GPU), or OpenCV's cv2.error.
    refused = any(words in str(error) for words in ("not enough memory", "Insufficient memory"))
    return isinstance(error, MemoryError) or refused or type(error).__name__ == "OutOfMemoryError"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
