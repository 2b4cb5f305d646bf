"""Worker processes of one machine that survive the death of any of them.

A worker is a fresh Python process that gets jobs and sends outcomes over a socket. When one dies, the items
that it was working on are tried once more, each alone; an item whose worker dies a second time fails, with
the reason, and the run goes on. Workers end when the run does, however that ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from matcher.collection.jobs import Job, JobRunner, Outcome
from matcher.collection.settings import Setup
from matcher.collection.store import Store
from matcher.errors import MatcherError, UsageError
from matcher.processes import child_command, child_environment

_PROGRAM = "matcher.collection.worker"
_QUEUED = 2  # jobs queued for a worker, so that it never waits for the next
_STRIKES = 2  # deaths of its worker that make an item fail
_STARTS = 3  # workers that may die in a row before any of them is ready
_TICK = 0.5  # seconds after which the caller may do something else
_GRACE = 2.0  # seconds that an idle worker has to end by itself


class Engine(Protocol):
    """Runs jobs."""

    crashes: int  # workers that died

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in any order; None now and then, when there is none."""

    def close(self) -> None:
        """End the workers."""


class InProcess:
    """No workers: everything in this process, with its threads; nothing survives a crash."""

    def __init__(self, run_dir: Path, setup: Setup) -> None:
        self.crashes = 0
        self._run_dir, self._setup = run_dir, setup

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order of the jobs."""
        with Store.open(self._run_dir) as store:
            runner = JobRunner(self._setup, lambda image: store.features(image.name))
            for job in jobs:
                yield from runner.run(job)

    def close(self) -> None:
        """There is nothing to end."""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    device: str
    jobs: deque[Job] = field(default_factory=deque)  # the first one is being worked on
    ready: bool = False


class LocalWorkers:
    """Processes of this machine; a context for `run` that must be closed."""

    def __init__(self, run_dir: Path, setup: Setup, devices: Sequence[str], threads: int) -> None:
        """Start a worker for every entry of `devices`, each with so many threads.

        Raises:
            UsageError: a system without sockets that a child inherits.
        """
        if os.name != "posix":
            raise UsageError("worker processes need Linux or macOS; use workers=0 here")
        self.crashes = 0
        self._run_dir, self._setup, self._threads = run_dir, setup, threads
        self._strikes: Counter[Any] = Counter()
        self._again: deque[Job] = deque()
        self._stillborn = 0
        self._workers: list[_Worker] = []
        self._failures: deque[Outcome] = deque()
        for device in devices:
            self._workers.append(self._start(device))

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order in which they come; None at least twice a second.

        Raises:
            MatcherError: what made a worker give up, or that none can be started.
        """
        jobs = iter(jobs)
        while True:
            for worker in self._workers:
                while len(worker.jobs) < _QUEUED and (job := self._next(jobs)) is not None:
                    worker.jobs.append(job)
                    if not _send(worker.connection, job):
                        break  # it is dead, which shows below
            while self._failures:
                yield self._failures.popleft()
            if not any(worker.jobs for worker in self._workers) and not self._again:
                return
            yield from self._receive()

    def _next(self, jobs: Iterator[Job]) -> Job | None:
        return self._again.popleft() if self._again else next(jobs, None)

    def _receive(self) -> Iterator[Outcome | None]:
        ready = wait([worker.connection for worker in self._workers], timeout=_TICK)
        if not ready:
            yield None
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                message = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError, pickle.UnpicklingError):
                self._bury(worker)
                continue
            if isinstance(message, Exception):
                raise message
            if message is None:
                worker.ready, self._stillborn = True, 0
                continue
            job = worker.jobs.popleft()
            if rest := job.items[1:]:
                worker.jobs.appendleft(replace(job, items=rest))
            yield message

    def _bury(self, worker: _Worker) -> None:
        """Replace a dead worker; what it was at is tried again, alone, or has failed."""
        code = worker.process.wait()
        worker.connection.close()
        self.crashes += 1
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= _STARTS:
                raise MatcherError(
                    f"worker processes cannot be started ({_death(code)}); see their output above"
                )
        jobs = list(worker.jobs)
        if jobs and worker.ready:
            current = jobs[0]
            for item in current.items[: current.batch]:
                self._strikes[item] += 1
                if self._strikes[item] >= _STRIKES:
                    reason = f"its worker process died {_STRIKES} times ({_death(code)})"
                    self._failures.append(current.failure(item, reason))
                else:
                    self._again.append(replace(current, items=(item,), batch=1))
            jobs[0] = replace(current, items=current.items[current.batch :])
        self._again.extend(job for job in jobs if job.items)
        self._workers[self._workers.index(worker)] = self._start(worker.device)

    def _start(self, device: str) -> _Worker:
        ours, theirs = socket.socketpair()
        number = theirs.fileno()
        with theirs:
            process = subprocess.Popen(
                child_command(_PROGRAM, str(number)),
                pass_fds=[number],
                env=child_environment(self._threads),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which decides
            )
        connection = Connection(ours.detach())
        options = {**self._setup.options, "device": device}
        _send(connection, (self._run_dir, replace(self._setup, options=options)))
        return _Worker(process, connection, device)

    def close(self) -> None:
        """End the workers: those that are idle by themselves, the others at once."""
        until = time.monotonic() + _GRACE
        for worker in self._workers:
            worker.connection.close()
        for worker in self._workers:
            if worker.jobs:
                worker.process.kill()
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
        self._workers = []


def _send(connection: Connection, message: Any) -> bool:
    # torch's own pickler would share memory between the processes, which dies with them.
    try:
        connection.send_bytes(pickle.dumps(message))
    except OSError:
        return False
    return True


def _death(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
