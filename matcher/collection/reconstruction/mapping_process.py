"""COLMAP's mapping in a process of its own, which ends with this one."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
from typing import Any

from matcher.errors import MatcherError
from matcher.processes import child_command, child_environment

_CHILD = "matcher.collection.reconstruction.mapping"
_ROOM = 1 << 20  # bytes; where fewer are left, that is why COLMAP's process ended, which does not say so
_SHOWN = 1500  # characters of COLMAP's last words


class ReconstructionError(MatcherError):
    """The matches yield no model, or COLMAP ended early; the message explains why and what may help."""

    exit_code = 4


def run_mapping(job: dict[str, Any]) -> None:
    """Run the mapping in a child process that ends with this one; `OSError` where the disk is full."""
    child = subprocess.Popen(
        child_command(_CHILD),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        _, words = child.communicate(json.dumps(job))
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        if shutil.disk_usage(job["output"]).free < _ROOM:
            raise OSError(errno.ENOSPC, f"{job['output']}: the disk is full")
        raise ReconstructionError(
            f"COLMAP's process ended early ({_ending(child.returncode)}): {_last(words, child.returncode)}"
        )


def _ending(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"code {code}"


def _last(words: str, code: int) -> str:
    """A Python exception is explained by its last line, a C++ crash by several."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return " | ".join(lines[-6 if code < 0 else -1 :])[-_SHOWN:] or "no message"
