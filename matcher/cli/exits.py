"""From an exception to a message on standard error and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from difflib import SequenceMatcher

from matcher.cli.messages import LOGGER, complain
from matcher.cli.running import Interrupted
from matcher.errors import MatcherError

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
