"""Who does the work of a run: this process, worker processes that survive the death of any, or Ray's actors.

A worker is a fresh Python process that gets jobs and sends outcomes over a socket. When one dies, the items
that it was working on are tried once more, each alone; an item whose worker dies a second time fails, with
the reason, and the run goes on. Workers end when the run does, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.collection.schema import encode_features, encode_pair
from matcher.collection.settings import Setup, build
from matcher.collection.sources import Extracted
from matcher.collection.store import EncodedPair, Store
from matcher.errors import IntegrityError, MatcherError, UsageError, install_command
from matcher.loading import devices
from matcher.processes import child_command, child_environment, thread_environment, usable_cores
from matcher.types import Features, Image, Matches
from matcher.verify.verdict import NOT, reject_improbable

# Jobs, and what comes of them.


@dataclass(frozen=True)
class ImageEntry:
    """One side of a pair."""

    number: int  # in the store
    name: str
    camera: Camera | None


class ExtractedImage(NamedTuple):
    """The outcome for an image: features ready to be stored, or why there are none."""

    name: str
    found: Extracted | None  # without descriptors, which are in the record
    data: bytes = b""  # the record
    reason: str = ""

    @property
    def failed(self) -> bool:
        """Whether there are none."""
        return self.found is None


Outcome = ExtractedImage | EncodedPair


@dataclass(frozen=True)
class Job:
    """Images to extract, by name, or pairs to match, by the numbers of their images."""

    items: tuple[Any, ...]
    batch: int = 1  # items that are worked on together
    images: Mapping[int, ImageEntry] | None = None  # of pairs

    def failure(self, item: Any, reason: str) -> Outcome:
        """The outcome for an item that failed."""
        if self.images is None:
            return ExtractedImage(item, None, reason=reason)
        return EncodedPair(*item, reason=reason)


class JobRunner:
    """A pipeline with a cache of features, in this process, a worker or an actor."""

    def __init__(self, setup: Setup, features_of: Callable[[ImageEntry], Features]) -> None:
        """Load the pipeline; `features_of` fetches an image's features. Errors are those of `build`."""
        self.pipeline = build(setup)
        self._source, self._camera, self._fetch = setup.source, setup.camera, features_of
        self._cache: OrderedDict[int, Features] = OrderedDict()

    def run(self, job: Job) -> Iterator[Outcome]:
        """One outcome per item, in order; `IntegrityError`: the store is damaged, or weights are absent."""
        batches = [job.items[start : start + job.batch] for start in range(0, len(job.items), job.batch)]
        if job.images is not None:
            for batch in batches:
                yield from _in_halves(batch, partial(self.match, job), job.failure)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="reading") as thread:  # of the next batch meanwhile

            def read(names: Sequence[str]) -> dict[str, Future[Extracted]]:
                return {name: thread.submit(self._source.read, name, self.pipeline) for name in names}

            ahead = read(batches[0])
            for batch, after in zip(batches, [*batches[1:], ()], strict=True):
                ready, ahead = ahead, read(after)
                yield from _in_halves(batch, partial(self.extract, ready), job.failure)

    def extract(self, ready: Mapping[str, Future[Extracted]], names: Sequence[str]) -> list[ExtractedImage]:
        """Features of images in one batch, from what was read."""
        given = [ready[name].result() for name in names]
        images = [one.features for one in given if isinstance(one.features, Image)]
        found = iter(self.pipeline.features_of(images) if images else ())
        outcomes = []
        for name, one in zip(names, given, strict=True):
            features = next(found) if isinstance(one.features, Image) else one.features
            kept = replace(features, descriptors=np.zeros((len(features), 0), np.float32))
            outcomes.append(ExtractedImage(name, replace(one, features=kept), encode_features(features)))
        return outcomes

    def match(self, job: Job, pairs: Sequence[tuple[int, int]]) -> list[EncodedPair]:
        """Match and verify pairs in one batch."""
        start = perf_counter()
        sides = [(self._features(job.images[a]), self._features(job.images[b])) for a, b in pairs]
        found = self.pipeline.match_features_batch(sides)
        each, outcomes = (perf_counter() - start) / len(pairs), []
        for pair, features, matches in zip(pairs, sides, found, strict=True):
            start = perf_counter()
            try:
                data = self._verified([job.images[number] for number in pair], features, matches)
            except Exception as error:
                outcomes.append(job.failure(pair, reason_of(error)))
                continue
            outcomes.append(EncodedPair(*pair, each + perf_counter() - start, data))
        return outcomes

    def _verified(
        self, ends: Sequence[ImageEntry], features: tuple[Features, Features], matches: Matches
    ) -> bytes:
        cameras = [None, None]
        if self.pipeline.config.estimation.kind == "essential":
            cameras = [end.camera or self._camera for end in ends]
            absent = [end.name for end, camera in zip(ends, cameras, strict=True) if camera is None]
            if absent:
                raise MatcherError(f"geometry 'essential' needs the camera of {' and of '.join(absent)}")
        geometry = self.pipeline.verify(*features, matches, camera0=cameras[0], camera1=cameras[1])
        # A false edge does more harm to a reconstruction than an absent one.
        sizes = (one.image_size for one in features)
        geometry = reject_improbable(geometry, matches, *sizes, least=NOT)
        return encode_pair(matches, geometry, *(to_numpy(one.keypoints) for one in features))

    def _features(self, image: ImageEntry) -> Features:
        if image.number not in self._cache:
            self._cache[image.number] = self._fetch(image)
            held = sum(one.descriptors.nbytes for one in self._cache.values())
            while held > 512 << 20 and len(self._cache) > 2:  # bytes
                held -= self._cache.popitem(last=False)[1].descriptors.nbytes
        self._cache.move_to_end(image.number)
        return self._cache[image.number]


def _in_halves(
    items: Sequence[Any], work: Callable[[Sequence[Any]], list], failure: Callable[[Any, str], Outcome]
) -> list[Outcome]:
    """The outcomes of a batch; where it does not fit in memory or one item fails, of its halves."""
    try:
        return work(items)
    except IntegrityError:
        raise
    except Exception as error:
        if len(items) == 1:
            return [failure(items[0], reason_of(error))]
    middle = len(items) // 2
    return [*_in_halves(items[:middle], work, failure), *_in_halves(items[middle:], work, failure)]


def reason_of(error: Exception) -> str:
    """One line for the store and the terminal."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, MatcherError) else f"{type(error).__name__}: {text}"


# Engines: each runs jobs, and yields outcomes in any order, None now and then, so that its caller may commit.

_TICK = 0.5  # seconds after which the caller may do something else


class InProcess:
    """No workers: everything in this process, with its threads; nothing survives a crash."""

    crashes = 0

    def __init__(self, run_dir: Path, setup: Setup) -> None:
        """Nothing is loaded before it runs."""
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
        self.crashes = self._failed_starts = 0
        self._run_dir, self._setup, self._threads = run_dir, setup, threads
        self._deaths: Counter[Any] = Counter()  # of its worker, by item
        self._again: deque[Job] = deque()
        self._workers: list[_Worker] = []
        for device in devices:
            self._workers.append(self._start(device))

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order in which they come; None at least twice a second.

        Raises:
            MatcherError: what made a worker give up, or that none can be started.
        """
        while True:
            for worker in self._workers:
                while len(worker.jobs) < 2:  # so that it never waits for the next
                    job = self._again.popleft() if self._again else next(jobs, None)
                    if job is None:
                        break
                    worker.jobs.append(job)
                    if not _send(worker.connection, job):
                        break  # it is dead, which shows below
            if not any(worker.jobs for worker in self._workers) and not self._again:
                return
            ready = wait([worker.connection for worker in self._workers], timeout=_TICK)
            if not ready:
                yield None
            for worker in [worker for worker in self._workers if worker.connection in ready]:
                yield from self._receive(worker)

    def _receive(self, worker: _Worker) -> Iterator[Outcome]:
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, pickle.UnpicklingError):
            yield from self._restart(worker)
            return
        if isinstance(message, Exception):
            raise message
        if message is None:
            worker.ready, self._failed_starts = True, 0
            return
        job = worker.jobs.popleft()
        if rest := job.items[1:]:
            worker.jobs.appendleft(replace(job, items=rest))
        yield message

    def _restart(self, worker: _Worker) -> Iterator[Outcome]:
        """Replace a dead worker; what it was at is tried again, alone, or has failed."""
        code = worker.process.wait()
        worker.connection.close()
        named = -code in set(signal.Signals)
        how = f"signal {signal.Signals(-code).name}" if named else f"exit code {code}"
        self.crashes += 1
        self._failed_starts += not worker.ready
        if self._failed_starts >= 3:
            raise MatcherError(f"worker processes cannot be started ({how}); see their output above")
        self._workers[self._workers.index(worker)] = self._start(worker.device)
        if worker.jobs and worker.ready:
            current = worker.jobs.popleft()
            for item in current.items[: current.batch]:
                self._deaths[item] += 1
                if self._deaths[item] > 1:
                    yield current.failure(item, f"its worker process died twice ({how})")
                else:
                    self._again.append(replace(current, items=(item,), batch=1))
            worker.jobs.appendleft(replace(current, items=current.items[current.batch :]))
        self._again.extend(job for job in worker.jobs if job.items)

    def _start(self, device: str) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                child_command("matcher.collection.worker", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=child_environment(self._threads),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which decides
            )
        connection = Connection(ours.detach())
        options = {**self._setup.options, "device": device}
        _send(connection, (self._run_dir, replace(self._setup, options=options)))
        return _Worker(process, connection, device)

    def close(self) -> None:
        """End the workers: those that are idle by themselves within two seconds, the others at once."""
        until = time.monotonic() + 2
        for worker in self._workers:
            worker.connection.close()
            if worker.jobs:
                worker.process.kill()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - time.monotonic()))
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


# Ray: one actor per GPU or group of cores, each with one job; only the driver writes.


class Actor:
    """The code of an actor: a job runner that receives features with its jobs."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """Relative paths are from the driver's working folder, where this machine has it."""
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._runner = JobRunner(setup, self._fetch)
        self._references: Mapping[int, Any] = {}

    def run(self, job: Job, references: Mapping[int, Any]) -> list[Outcome]:
        """An outcome per item; `references` are Ray's, of features by image."""
        self._references = references
        return list(self._runner.run(job))

    def _fetch(self, image: ImageEntry) -> Features:
        import ray

        return ray.get(self._references[image.number])


class RayWorkers:
    """An engine on the cluster that RAY_ADDRESS names, or on a Ray of this machine, started here."""

    def __init__(self, run_dir: Path, setup: Setup, count: int | None, threads: int) -> None:
        """Start `count` actors with `threads` threads each; None means one per GPU, else one per core.

        Raises:
            UsageError: Ray is not installed, or the cluster cannot be reached.
        """
        self.crashes = 0
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
        try:
            import ray
        except ModuleNotFoundError:
            raise UsageError(f"the engine ray needs Ray: {install_command('ray')}") from None
        self._ray = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray, None if count is None else count * threads)
        self._store = Store.open(run_dir)
        self._held: OrderedDict[int, Any] = OrderedDict()
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
        self._actors = [actor.remote(setup, Path.cwd()) for _ in range(count or gpus or cores)]
        self._deaths: Counter[Any] = Counter()  # of actors, by the item that they had alone

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order in which they come; None at least twice a second.

        Raises:
            MatcherError: what made an actor give up.
        """
        again: list[Job] = []
        running: dict[Any, tuple[Any, Job]] = {}
        idle = list(self._actors)
        while True:
            while idle and (job := again.pop() if again else next(jobs, None)) is not None:
                actor = idle.pop()
                running[actor.run.remote(job, self._references(job))] = actor, job
            if not running:
                return
            finished, _ = self._ray.wait(list(running), timeout=_TICK)
            if not finished:
                yield None
            for reference in finished:
                actor, job = running.pop(reference)
                idle.append(actor)
                yield from self._take(reference, job, again)

    def _take(self, reference: Any, job: Job, again: list[Job]) -> Iterator[Outcome]:
        """The outcomes of a finished job, or its items for another try where it killed its actor."""
        try:
            yield from self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            self.crashes += 1
            for item in job.items:
                self._deaths[item] += len(job.items) == 1
                # One try may fail because the actor is still being restarted.
                if self._deaths[item] < 3:
                    again.append(replace(job, items=(item,), batch=1))
                else:
                    yield job.failure(item, f"its Ray actor died repeatedly ({type(error).__name__})")

    def _references(self, job: Job) -> dict[int, Any]:
        """Ray's references to the features that a job needs; those of 256 images are kept."""
        found = {}
        for number, image in (job.images or {}).items():
            if number not in self._held:
                self._held[number] = self._ray.put(self._store.features(image.name))
            self._held.move_to_end(number)
            found[number] = self._held[number]
        while len(self._held) > 256:
            self._held.popitem(last=False)
        return found

    def close(self) -> None:
        """End the actors, and Ray where this run started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._store.close()
        if self._ours:
            self._ray.shutdown()


def _connect(ray: Any, cpus: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False}
    if address := os.environ.get("RAY_ADDRESS"):
        options["address"] = address
    else:
        options |= {"num_cpus": cpus, "include_dashboard": False, "configure_logging": False}
    try:
        # Ray has its workers import from the folder in which it is called: let that be this package's own.
        with contextlib.chdir(Path(__file__).parents[2]):
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"Ray cannot be reached or started ({error})") from None


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
