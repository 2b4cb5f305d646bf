"""Work beside tracking: in a process of its own with low priority, or at once where it must be repeatable."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal

from matcher.errors import MatcherError, UsageError
from matcher.processes import child_command, child_environment
from matcher.sequence.ordered_work import OrderedWork

Timing = Literal["background", "inline"]
TIMINGS: tuple[Timing, ...] = ("background", "inline")
_PROGRAM = "matcher.sequence.background_child"
_GRACE = 2.0  # seconds that an idle process has to end by itself

Task = Callable[[Any], Any]  # can be pickled; from a request to an answer


def start(task: Task, timing: Timing) -> Inline | Background:
    """Where the task runs.

    Raises:
        UsageError: an unknown timing, or "background" on a system where a child inherits no sockets.
    """
    if timing not in TIMINGS:
        raise UsageError(f"the timing must be {' or '.join(TIMINGS)}, not {timing!r}")
    return Inline(task) if timing == "inline" else Background(task)


class Inline:
    """In this process, while the caller waits: the same answers every time."""

    beside = False  # whether it needs a core of its own
    problem: str | None = None

    def __init__(self, task: Task) -> None:
        self._task = task
        self._answers: list[Any] = []

    @property
    def busy(self) -> bool:
        """Whether a request is worked on."""
        return False

    def offer(self, request: Any) -> None:
        """Work on a request."""
        self._answers.append(self._task(request))

    def unanswered(self) -> list[Any]:
        """There are none."""
        return []

    def answers(self, *, wait: bool | float = False) -> list[Any]:
        """What has been found since the last call."""
        found, self._answers = self._answers, []
        return found

    def close(self) -> None:
        """There is nothing to end."""


class Background:
    """In a child process. One request is worked on; of those that come meanwhile the last is kept."""

    beside = True

    def __init__(self, task: Task) -> None:
        if os.name != "posix":
            raise UsageError('work in the background needs Linux or macOS; use "inline" here')
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                child_command(_PROGRAM, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=child_environment(threads=1),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps(task))
        self._sending = OrderedWork(beside=True)  # a frame is more than the socket holds
        self._now: tuple[Any] | None = None
        self._next: tuple[Any] | None = None
        self.busy = True  # until it says that it is ready
        self.problem: str | None = None  # why there will be no more answers

    def offer(self, request: Any) -> Any | None:
        """Have a request worked on as soon as the one before is done; it takes no time here.

        It must not change afterwards. Returns the request whose place it has taken, if one was waiting.
        """
        replaced, self._next = self._next, (request,)
        self._send()
        return None if replaced is None else replaced[0]

    def unanswered(self) -> list[Any]:
        """Requests that are worked on, or will be next."""
        return [held[0] for held in (self._now, self._next) if held is not None]

    def answers(self, *, wait: bool | float = False) -> list[Any]:
        """What has been found since the last call.

        Args:
            wait: until everything that was offered is done; seconds: no longer than this for the next answer.

        Raises:
            MatcherError: what made a request fail; others can follow.
        """
        found = []
        seconds = None if wait is True else float(wait)
        while self.problem is None and self.busy and self._connection.poll(seconds):
            try:
                answer = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self.problem = f"the process ended early (code {self._process.wait()})"
                break
            self.busy, self._now = False, None
            seconds = seconds if wait is True else 0.0
            self._send()
            if isinstance(answer, MatcherError):
                raise answer
            if answer is not None:  # it is ready
                found.append(answer)
        return found

    def close(self) -> None:
        """End the process, whatever it does."""
        if not self.busy:
            self._connection.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started, such as COLMAP
        self._process.wait()
        with suppress(OSError):
            self._sending.wait()
        self._connection.close()

    def _send(self) -> None:
        if self.busy or self._next is None or self.problem is not None:
            return
        self._now, self._next = self._next, None
        (request,) = self._now
        self.busy = True
        try:
            self._sending.add(lambda: self._connection.send_bytes(pickle.dumps(request)))
        except OSError:
            self.problem = "the process ended early"
