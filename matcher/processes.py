"""Python processes of our own: they import what this one can, and nothing from the working folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matcher.threads import thread_environment

_SAFE = "PYTHONSAFEPATH"  # Python then leaves the working folder off the import path, as with -P


def child_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package; use it with `child_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(threads: int | None = None) -> dict[str, str]:
    """Environment in which a Python process finds what this one imports from, the working folder excepted.

    Args:
        threads: CPU threads of the child; as this process's environment has it when absent.
    """
    # Relative entries, such as the '' of `python -c`, mean the working folder.
    paths = [path for path in sys.path if Path(path).is_absolute()]
    ours = str(Path(__file__).resolve().parent.parent)
    if next((path for path in paths if (Path(path) / "matcher").is_dir()), None) != ours:
        paths.insert(0, ours)  # the child is to run this package, not another one that is installed
    limits = {} if threads is None else thread_environment(threads)
    return {**os.environ, **limits, "PYTHONPATH": os.pathsep.join(paths), _SAFE: "1"}


@contextmanager
def safe_path() -> Iterator[None]:
    """While it is open, Python processes that others start for us leave the working folder off their path."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before
