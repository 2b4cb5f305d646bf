"""Memory of this process; no torch, which would count."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """The most bytes that this process, or one that it started and that has ended, had in memory."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if sys.platform == "linux":  # ru_maxrss of this process counts what its parent had when it started it
        return max(ended, resident("VmHWM"))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(ended, own * (1 if sys.platform == "darwin" else 1024))


def resident(name: str) -> int:
    """Bytes that Linux gives for this process under a name of its status: VmRSS now, VmHWM at most."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
