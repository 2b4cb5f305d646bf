"""The program of a process beside tracking: `python -m matcher.sequence.background_child SOCKET`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from matcher.errors import MatcherError

_NICE = 10  # tracking goes first


def _yield_to_all() -> None:
    """Compute only while nobody else does: threads that wait for one that was put aside stand still too."""
    os.nice(_NICE)
    if hasattr(os, "SCHED_IDLE"):  # on Linux
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _answered(step: Callable[[], Any]) -> Any:
    try:
        return step()
    except (MatcherError, OSError) as error:
        return MatcherError(str(error))


def main() -> None:
    """Take a task and then requests from the inherited socket, and send the answers, until it closes.

    A task that has a method `prepare` is prepared before the first request.
    """
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    _yield_to_all()
    try:
        task = pickle.loads(connection.recv_bytes())
        answer = _answered(getattr(task, "prepare", lambda: None))
        while True:
            connection.send_bytes(pickle.dumps(answer))
            request = pickle.loads(connection.recv_bytes())
            answer = _answered(lambda request=request: task(request))
    except (EOFError, OSError):
        return  # the parent has ended


if __name__ == "__main__":
    main()
