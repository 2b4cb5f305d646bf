"""Who does the work of a run: this process, worker processes that survive the death of any, or Ray's actors.

A worker is a fresh Python process that gets a job at a time and sends its outcomes over a socket. When
one dies, the items of its job are tried once more, each alone; an item whose worker dies a second time fails,
with the reason, and the run goes on. Workers end when the run does, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from matcher.collection.schema import StoredImage, encode_features, encode_pair
from matcher.collection.settings import Setup, build
from matcher.collection.sources import Extracted
from matcher.collection.store import EncodedPair, Store
from matcher.errors import IntegrityError, MatcherError, UsageError
from matcher.loading import devices
from matcher.processes import child_command, child_environment, thread_environment, usable_cores
from matcher.types import Features, Image, to_numpy
from matcher.verify.verdict import NOT, reject_improbable

# Jobs, and what comes of them.


Outcome = Extracted | EncodedPair


@dataclass(frozen=True)
class Job:
    """Images to extract, by name, or pairs to match, by the numbers of their images."""

    items: tuple[Any, ...]
    batch: int = 1  # items that are worked on together
    images: Mapping[int, StoredImage] | None = None  # of pairs

    def failure(self, item: Any, why: Exception | str) -> Outcome:
        """The outcome for an item that failed, with one line for the store and the terminal."""
        reason = " ".join(str(why).split())[:400]
        if isinstance(why, Exception) and not isinstance(why, MatcherError):
            reason = f"{type(why).__name__}: {reason}"
        return Extracted(item, reason=reason) if self.images is None else EncodedPair(*item, reason=reason)


class JobRunner:
    """A pipeline with a cache of features, fetched by name, in this process, a worker or an actor."""

    def __init__(self, setup: Setup, features_of: Callable[[str], Features]) -> None:
        self.pipeline, self.setup = build(setup), setup
        self._features = lru_cache(64)(features_of)  # as many as the images of one tile of pairs

    def run(self, job: Job) -> Iterator[Outcome]:
        """One outcome per item, in order; `IntegrityError`: the store is damaged, or weights are absent."""
        batches = [job.items[start : start + job.batch] for start in range(0, len(job.items), job.batch)]
        if job.images is not None:
            for batch in batches:
                yield from _in_halves(job, batch, partial(self.match, job))
            return
        with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:  # of the next batch meanwhile

            def read(names: Sequence[str]) -> dict[str, Future[Extracted]]:
                return {name: thread.submit(self.setup.source.read, name, self.pipeline) for name in names}

            ahead = read(batches[0])
            for batch, after in zip(batches, [*batches[1:], ()], strict=True):
                ready, ahead = ahead, read(after)
                yield from _in_halves(job, batch, partial(self.extract, ready))

    def extract(self, ready: Mapping[str, Future[Extracted]], names: Sequence[str]) -> list[Extracted]:
        """Features of images in one batch, from what was read."""
        given = [ready[name].result() for name in names]
        images = [one.features for one in given if isinstance(one.features, Image)]
        found = iter(self.pipeline.features_of(images) if images else ())
        outcomes = []
        for one in given:
            features = next(found) if isinstance(one.features, Image) else one.features
            kept = replace(features, descriptors=np.zeros((len(features), 0), np.float32))
            outcomes.append(one._replace(features=kept, data=encode_features(features)))
        return outcomes

    def match(self, job: Job, pairs: Sequence[tuple[int, int]]) -> list[EncodedPair]:
        """Match and verify pairs in one batch."""
        start, pipeline = perf_counter(), self.pipeline
        sides = [tuple(self._features(job.images[number].name) for number in pair) for pair in pairs]
        found = pipeline.match_features_batch(sides)
        each, outcomes = (perf_counter() - start) / len(pairs), []
        for pair, features, matches in zip(pairs, sides, found, strict=True):
            start, cameras = perf_counter(), [None, None]
            try:
                if pipeline.config.estimation.kind == "essential":
                    ends = [job.images[number] for number in pair]
                    cameras = [end.camera or self.setup.camera for end in ends]
                    if absent := [end.name for end, one in zip(ends, cameras, strict=True) if one is None]:
                        raise MatcherError(
                            f"geometry 'essential' needs the camera of {' and of '.join(absent)}"
                        )
                geometry = pipeline.verify(*features, matches, camera0=cameras[0], camera1=cameras[1])
                # A false edge does more harm to a reconstruction than an absent one.
                sizes = (one.image_size for one in features)
                geometry = reject_improbable(geometry, matches, *sizes, least=NOT)
                data = encode_pair(matches, geometry, *(to_numpy(one.keypoints) for one in features))
            except Exception as error:
                outcomes.append(job.failure(pair, error))
            else:
                outcomes.append(EncodedPair(*pair, each + perf_counter() - start, data))
        return outcomes


def _in_halves(job: Job, items: Sequence[Any], work: Callable[[Sequence[Any]], list]) -> list[Outcome]:
    """The outcomes of a batch; where it does not fit in memory or one item fails, of its halves."""
    try:
        return work(items)
    except IntegrityError:
        raise
    except Exception as error:
        if len(items) == 1:
            return [job.failure(items[0], error)]
    middle = len(items) // 2
    return [*_in_halves(job, items[:middle], work), *_in_halves(job, items[middle:], work)]


# Engines: each runs jobs, and yields outcomes in any order, None now and then, so that its caller may commit.


class InProcess:
    """No workers: everything in this process, with its threads; nothing survives a crash."""

    crashes = 0

    def __init__(self, run_dir: Path, setup: Setup) -> None:
        self._run_dir, self._setup = run_dir, setup

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order of the jobs."""
        with Store.open(self._run_dir) as store:
            runner = JobRunner(self._setup, store.features)
            for job in jobs:
                yield from runner.run(job)

    def close(self) -> None:
        """There is nothing to end."""


class _DiedError(Exception):
    """A worker has died, maybe of its job."""

    def __init__(self, how: str, *, of_job: bool = True) -> None:
        super().__init__(how)
        self.of_job = of_job


class _Pool:
    """Workers with a job each. A subclass has `give`, which begins a job and returns what to wait for;
    `finished`, of which of these something came; and `take` of what came, after which the worker is idle,
    `running` still, or has died."""

    tries = 2  # an item fails when so many workers have died of it

    def __init__(self) -> None:
        self.crashes = 0
        self.idle: list[Any] = []
        self.running: dict[Any, tuple[Any, Job]] = {}  # by what is waited for: the worker, and its job

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order in which they come; None at least twice a second."""
        again: deque[Job] = deque()
        deaths: Counter[Any] = Counter()
        outcomes: list[Outcome] = []
        while True:
            while self.idle and (job := again.popleft() if again else next(jobs, None)) is not None:
                worker = self.idle.pop()
                self.running[self.give(worker, job)] = worker, job
            yield from outcomes or [None]  # which are committed while the workers go on
            if not self.running:
                return
            outcomes = []
            for key in self.finished(0.5):
                worker, job = self.running.pop(key)
                try:
                    outcomes += self.take(key, worker, job)
                except _DiedError as death:
                    self.crashes += 1
                    for item in job.items:
                        deaths[item] += death.of_job
                        if deaths[item] < self.tries:
                            again.append(replace(job, items=(item,), batch=1))
                        else:
                            outcomes.append(job.failure(item, str(death)))


class _Process:
    """A worker process and the socket to it."""

    def __init__(self, run_dir: Path, setup: Setup, threads: int) -> None:
        self.setup, self.ready = setup, False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                child_command("matcher.collection.workers", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=child_environment(threads),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which decides
            )
        self.connection = Connection(ours.detach())
        self.send((run_dir, partial(JobRunner, setup)))

    def send(self, message: Any) -> None:
        """If it is dead, that shows when it is asked for an answer."""
        with contextlib.suppress(OSError):
            # torch's own pickler would share memory between the processes, which dies with them.
            self.connection.send_bytes(pickle.dumps(message))


class LocalWorkers(_Pool):
    """Processes of this machine."""

    def __init__(self, run_dir: Path, setup: Setup, devices: Sequence[str], threads: int) -> None:
        super().__init__()
        if os.name != "posix":
            raise UsageError("worker processes need Linux or macOS; use workers=0 here")
        self._failed_starts = 0
        self._start = partial(_Process, run_dir, threads=threads)
        for device in devices:
            own = replace(setup, options={**setup.options, "device": device})
            self.idle.append(self._start(own))

    def give(self, worker: _Process, job: Job) -> Connection:
        """Send it."""
        worker.send(job)
        return worker.connection

    def finished(self, seconds: float) -> Sequence[Any]:
        """Connections with a message, or that are closed."""
        return wait(list(self.running), seconds)

    def take(self, key: Connection, worker: _Process, job: Job) -> list[Outcome]:
        """One message; the first is None, when the pipeline is loaded."""
        try:
            message = pickle.loads(key.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):  # it is dead: another takes its place
            code = worker.process.wait()
            worker.connection.close()
            named = -code in set(signal.Signals)
            how = f"signal {signal.Signals(-code).name}" if named else f"exit code {code}"
            self._failed_starts += not worker.ready
            if self._failed_starts >= 3:
                raise MatcherError(
                    f"worker processes cannot be started ({how}); see their output above"
                ) from None
            self.idle.append(self._start(worker.setup))
            raise _DiedError(f"its worker process died twice ({how})", of_job=worker.ready) from None
        if isinstance(message, Exception):
            raise message
        if message is None:
            worker.ready, self._failed_starts, message = True, 0, []
            self.running[key] = worker, job
        else:
            self.idle.append(worker)
        return message

    def close(self) -> None:
        """End the workers: those that are idle by themselves within two seconds, the others at once."""
        until = time.monotonic() + 2
        for worker in self.idle:
            worker.connection.close()
        for worker, _ in self.running.values():
            worker.process.kill()
        for worker in (*self.idle, *(worker for worker, _ in self.running.values())):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
            worker.process.kill()
            worker.process.wait()


# Ray: one actor per GPU or group of cores; only the driver writes.


class Actor:
    """The code of an actor: a job runner that receives features with its jobs."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """Relative paths are from the driver's working folder, where this machine has it."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._runner = JobRunner(setup, self._fetch)
        self._references: Mapping[str, Any] = {}

    def run(self, job: Job, references: Mapping[str, Any]) -> list[Outcome]:
        """An outcome per item; `references` are Ray's, of features by name of image."""
        self._references = references
        return list(self._runner.run(job))

    def _fetch(self, name: str) -> Features:
        import ray

        return ray.get(self._references[name])


class RayWorkers(_Pool):
    """Actors on the cluster that RAY_ADDRESS names, or on a Ray of this machine, started here: one per GPU or
    group of cores."""

    tries = 4  # one may fail because the actor is still being restarted

    def __init__(self, run_dir: Path, setup: Setup, count: int | None, threads: int) -> None:
        super().__init__()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
        import ray

        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            options: dict[str, Any] = {"log_to_driver": False}
            if address := os.environ.get("RAY_ADDRESS"):
                options["address"] = address
            else:
                cpus = None if count is None else count * threads
                options |= {"num_cpus": cpus, "include_dashboard": False, "configure_logging": False}
            try:  # workers import from the folder in which it is called: let that be this package's own
                with contextlib.chdir(Path(__file__).parents[2]):
                    ray.init(**options)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(f"Ray cannot be reached or started ({error})") from None
        self._store = Store.open(run_dir)
        self._reference = lru_cache(256)(lambda name: ray.put(self._store.features(name)))
        resources = ray.cluster_resources()
        device = setup.options.get("device", "auto")
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        cores = max(1, int(resources.get("CPU", 1)) // threads)
        # An actor sees only its own GPU; a CPU actor must not search for one.
        setup = replace(setup, options={**setup.options, "device": "auto" if gpus else device})
        actor = ray.remote(Actor).options(
            num_cpus=threads,
            num_gpus=1 if gpus else 0,
            max_restarts=-1,
            max_task_retries=1,
            runtime_env={"env_vars": thread_environment(threads)},
        )
        self.idle = [actor.remote(setup, Path.cwd()) for _ in range(count or gpus or cores)]

    def give(self, worker: Any, job: Job) -> Any:
        """Ray's reference to the outcomes."""
        names = [image.name for image in (job.images or {}).values()]
        return worker.run.remote(job, {name: self._reference(name) for name in names})

    def finished(self, seconds: float) -> Sequence[Any]:
        """References whose outcomes are there."""
        return self._ray.wait(list(self.running), timeout=seconds)[0]

    def take(self, key: Any, worker: Any, job: Job) -> list[Outcome]:
        """Ray itself restarts an actor that has died."""
        self.idle.append(worker)
        try:
            return self._ray.get(key)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            raise _DiedError(f"its Ray actor died repeatedly ({type(error).__name__})") from None

    def close(self) -> None:
        """End the actors, and Ray where this run started it."""
        for actor in (*self.idle, *(actor for actor, _ in self.running.values())):
            self._ray.kill(actor)
        self._store.close()
        if self._ours:
            self._ray.shutdown()


# Which engine.

Engine = InProcess | LocalWorkers | RayWorkers


@dataclass(frozen=True)
class Workers:
    """Which processes do the work; results do not depend on it."""

    engine: Literal["local", "ray"] = "local"
    count: int | None = None  # processes; 0: this one; None: one per core or GPU
    threads: int | None = None  # of each; None: the cores divided by the processes
    batch: int | None = None  # images or pairs worked on together; None: 1 on a CPU, 8 on a GPU


def start_engine(run_dir: Path, setup: Setup, workers: Workers) -> Engine:
    """Start the engine; close it after use; `UsageError`: a missing device or extra."""
    if workers.engine == "ray":
        return RayWorkers(run_dir, setup, workers.count, workers.threads or 1)
    every, cores, count = devices(setup.options), usable_cores(), workers.count
    if count is None:
        count = cores if every == ["cpu"] else len(every)
    if count == 0:
        return InProcess(run_dir, setup)
    chosen = [every[number % len(every)] for number in range(count)]
    return LocalWorkers(run_dir, setup, chosen, workers.threads or max(1, cores // count))


def batch_size(setup: Setup, workers: Workers) -> int:
    """Images that are extracted, or pairs that are matched, together."""
    return workers.batch or (1 if devices(setup.options) == ["cpu"] else 8)


def main() -> None:
    """A worker process: take jobs from the inherited socket of that number, until it closes."""
    connection = Connection(int(sys.argv[1]))
    try:
        run_dir, started = pickle.loads(connection.recv_bytes())
        with Store.open(run_dir) as store:
            runner = started(store.features)
            connection.send_bytes(pickle.dumps(None))
            while True:
                outcomes = list(runner.run(pickle.loads(connection.recv_bytes())))
                connection.send_bytes(pickle.dumps(outcomes))
    except (EOFError, OSError):
        return  # the run has ended
    except MatcherError as error:
        connection.send_bytes(pickle.dumps(error))


if __name__ == "__main__":
    main()
