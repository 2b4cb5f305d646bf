"""Worker processes of one machine that survive the death of any of them.

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
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.collection.schema import checksum, encode_pair
from matcher.collection.settings import Setup, build
from matcher.collection.sources import Extracted, encode_features
from matcher.collection.store import EncodedPair, Store
from matcher.errors import IntegrityError, MatcherError, UsageError, install_command
from matcher.loading import devices
from matcher.pipeline import Pipeline
from matcher.processes import child_command, child_environment, thread_environment
from matcher.types import Features, Image, Matches
from matcher.verify.verdict import NOT, reject_improbable

# --- reading: Reading ahead: while one image is worked on, a thread reads those that follow.

Read = TypeVar("Read")


def read_ahead(
    read: Callable[[str], Read], names: Sequence[str], ahead: int
) -> Iterator[tuple[str, Callable[[], Read]]]:
    """Every name, in order, with a call that gives what `read` gave for it, or raises what it raised.

    Args:
        read: called in another thread, for one name at a time.
        names: what to read.
        ahead: how many more names are read, at most, while the caller works on one.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
    waiting: deque[tuple[str, Future[Read]]] = deque()
    try:
        for name in names:
            waiting.append((name, thread.submit(read, name)))
            if len(waiting) > ahead:
                first, result = waiting.popleft()
                yield first, result.result
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result
    except BaseException:  # the caller stops
        thread.shutdown(cancel_futures=True)
        raise
    thread.shutdown()


# --- jobs: The work on one image or pair, in this process, a worker process or a Ray actor.

_CACHE_BYTES = 512 << 20  # of features held


@dataclass(frozen=True)
class ImageEntry:
    """One side of a pair."""

    number: int  # in the store
    name: str
    camera: Camera | None


class ExtractedImage(NamedTuple):
    """A worker's result for an image: features ready to be stored, or why there are none."""

    name: str
    found: Extracted | None  # without descriptors, which are in the record
    record: bytes = b""
    reason: str = ""


class PairFailure(NamedTuple):
    """A worker's result for a pair that could not be matched."""

    image0: int
    image1: int
    reason: str


@dataclass(frozen=True)
class ExtractJob:
    """Images to extract."""

    items: tuple[str, ...]
    batch: int = 1  # items that are worked on together

    def failure(self, item: str, reason: str) -> ExtractedImage:
        """The result for an item whose worker died."""
        return ExtractedImage(item, None, reason=reason)


@dataclass(frozen=True)
class MatchJob:
    """Pairs to match, by the numbers of their images."""

    items: tuple[tuple[int, int], ...]
    images: Mapping[int, ImageEntry]
    batch: int = 1

    def failure(self, item: tuple[int, int], reason: str) -> PairFailure:
        """The result for an item whose worker died."""
        return PairFailure(*item, reason)


Job = ExtractJob | MatchJob
Outcome = ExtractedImage | EncodedPair | PairFailure
_Read = tuple[str, Callable[[], Extracted]]  # an image's name, and what waits until it was read


class JobRunner:
    """A pipeline with a cache of features."""

    def __init__(self, setup: Setup, features_of: Callable[[ImageEntry], Features]) -> None:
        """Load the pipeline; `features_of` fetches an image's features. Errors are those of `build`."""
        self.pipeline: Pipeline = build(setup)
        self._source, self._camera, self._fetch = setup.source, setup.camera, features_of
        self._cache: OrderedDict[int, Features] = OrderedDict()
        self._cached = 0

    def run(self, job: Job) -> Iterator[Outcome]:
        """One result per item, in order.

        Raises:
            IntegrityError: the store is damaged, or weights are absent.
        """
        if isinstance(job, ExtractJob):
            yield from self._extract_in_turn(job)
        else:
            for start in range(0, len(job.items), job.batch):
                batch = job.items[start : start + job.batch]
                yield from self.match([(job.images[a], job.images[b]) for a, b in batch])

    def _extract_in_turn(self, job: ExtractJob) -> Iterator[ExtractedImage]:
        """Features of the images; a thread reads those that follow while the front end works."""
        batch: list[_Read] = []
        with closing(read_ahead(self._read, job.items, job.batch)) as images:
            for one in images:
                batch.append(one)
                if len(batch) == job.batch:
                    yield from self.extract(batch)
                    batch = []
            if batch:
                yield from self.extract(batch)

    def _read(self, name: str) -> Extracted:
        return self._source.read(name, self.pipeline)

    def extract(self, batch: Sequence[_Read]) -> list[ExtractedImage]:
        """Features of images in one batch; where it does not fit or one fails, in halves."""
        try:
            given = [result() for _, result in batch]
            images = [one.features for one in given if isinstance(one.features, Image)]
            found = iter(self.pipeline.features_of(images) if images else ())
            done = [
                replace(one, features=next(found)) if isinstance(one.features, Image) else one
                for one in given
            ]
            return [_encoded(name, one) for (name, _), one in zip(batch, done, strict=True)]
        except IntegrityError:
            raise
        except Exception as error:  # one image fails, the others continue
            if len(batch) > 1:
                middle = len(batch) // 2
                return [*self.extract(batch[:middle]), *self.extract(batch[middle:])]
            return [ExtractedImage(batch[0][0], None, reason=reason_of(error))]

    def match(self, pairs: Sequence[tuple[ImageEntry, ImageEntry]]) -> list[EncodedPair | PairFailure]:
        """Match and verify pairs in one batch; where it does not fit or fails, in halves."""
        start = perf_counter()
        try:
            sides = [(self._features(a), self._features(b)) for a, b in pairs]
            found = self.pipeline.match_features_batch(sides)
        except IntegrityError:
            raise
        except Exception as error:
            if len(pairs) > 1:
                middle = len(pairs) // 2
                return [*self.match(pairs[:middle]), *self.match(pairs[middle:])]
            return [PairFailure(pairs[0][0].number, pairs[0][1].number, reason_of(error))]
        each = (perf_counter() - start) / len(pairs)
        return [
            self._verify(*pair, *features, matches, each)
            for pair, features, matches in zip(pairs, sides, found, strict=True)
        ]

    def _verify(
        self,
        side0: ImageEntry,
        side1: ImageEntry,
        f0: Features,
        f1: Features,
        matches: Matches,
        seconds: float,
    ) -> EncodedPair | PairFailure:
        start = perf_counter()
        try:
            camera0, camera1 = self._cameras(side0, side1)
            geometry = self.pipeline.verify(f0, f1, matches, camera0=camera0, camera1=camera1)
            # A false edge does more harm to a reconstruction than an absent one.
            geometry = reject_improbable(geometry, matches, f0.image_size, f1.image_size, least=NOT)
            data = encode_pair(matches, geometry, to_numpy(f0.keypoints), to_numpy(f1.keypoints))
        except Exception as error:
            return PairFailure(side0.number, side1.number, reason_of(error))
        seconds += perf_counter() - start
        return EncodedPair(side0.number, side1.number, seconds, checksum(data), data)

    def _cameras(self, side0: ImageEntry, side1: ImageEntry) -> tuple[Camera | None, Camera | None]:
        if self.pipeline.config.estimation.kind != "essential":
            return None, None
        cameras = [side.camera or self._camera for side in (side0, side1)]
        absent = [side.name for side, camera in zip((side0, side1), cameras, strict=True) if camera is None]
        if absent:
            raise MatcherError(f"geometry 'essential' needs the camera of {' and of '.join(absent)}")
        return cameras[0], cameras[1]

    def _features(self, image: ImageEntry) -> Features:
        if image.number in self._cache:
            self._cache.move_to_end(image.number)
            return self._cache[image.number]
        features = self._cache[image.number] = self._fetch(image)
        self._cached += _bytes(features)
        while self._cached > _CACHE_BYTES and len(self._cache) > 2:
            self._cached -= _bytes(self._cache.popitem(last=False)[1])
        return features


def _encoded(name: str, found: Extracted) -> ExtractedImage:
    kept = replace(found.features, descriptors=np.zeros((len(found.features), 0), np.float32))
    return ExtractedImage(name, replace(found, features=kept), encode_features(found.features))


def _bytes(features: Features) -> int:
    return to_numpy(features.descriptors).nbytes


def reason_of(error: Exception) -> str:
    """One line for the store and the terminal."""
    text = " ".join(str(error).split())[:400]
    return text if isinstance(error, MatcherError) else f"{type(error).__name__}: {text}"


# --- workers: Worker processes of one machine that survive the death of any of them.

_PROGRAM = "matcher.collection.worker"
_QUEUED_WORKERS = 2  # jobs queued for a worker, so that it never waits for the next
_STRIKES = 2  # deaths of its worker that make an item fail
_STARTS = 3  # workers that may die in a row before any of them is ready
_TICK_WORKERS = 0.5  # seconds after which the caller may do something else
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
                while len(worker.jobs) < _QUEUED_WORKERS and (job := self._next(jobs)) is not None:
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
        ready = wait([worker.connection for worker in self._workers], timeout=_TICK_WORKERS)
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


# --- cluster: A Ray cluster as the engine of a run: one actor per GPU or group of cores; only the driver
# writes.

_QUEUED_CLUSTER = 2  # jobs that an actor has before it
_TICK_CLUSTER = 0.5  # seconds after which the caller may do something else
# Tries of an item alone before it is blamed: one may fail because the actor is still being restarted.
_DEATHS = 3
_HELD = 256  # images whose features the object store keeps


class Actor:
    """The code of an actor: a job runner that receives features with its jobs."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        # Relative paths are from the driver's working folder, where this machine has it.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._runner = JobRunner(setup, self._fetch)
        self._references: Mapping[int, Any] = {}

    def run(self, job: Job, references: Mapping[int, Any]) -> tuple[int, list[Outcome]]:
        """This process, and an outcome per item; `references` are Ray's, of features by image."""
        self._references = references
        return os.getpid(), list(self._runner.run(job))

    def _fetch(self, image: ImageEntry) -> Features:
        import ray

        return ray.get(self._references[image.number])


class RayWorkers:
    """An engine on the cluster that RAY_ADDRESS names, or on a Ray of this machine, started here."""

    def __init__(self, run_dir: Path, setup: Setup, count: int | None, threads: int | None) -> None:
        """Start `count` actors with `threads` threads each; None means one per GPU, else one per core.

        Raises:
            UsageError: Ray is not installed, or the cluster cannot be reached.
        """
        self.crashes = 0
        self._ray = _import_ray()
        self._ours = not self._ray.is_initialized()
        if self._ours:
            _connect(self._ray, count, threads or 1)
        self._store = Store.open(run_dir)
        self._held: OrderedDict[int, Any] = OrderedDict()
        resources = self._ray.cluster_resources()
        device = setup.options.get("device", "auto")
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        cores = max(1, int(resources.get("CPU", 1)) // (threads or 1))
        # An actor sees only its own GPU; a CPU actor must not search for one.
        setup = replace(setup, options={**setup.options, "device": "auto" if gpus else device})
        actor = self._ray.remote(Actor).options(
            num_cpus=threads or 1,
            num_gpus=1 if gpus else 0,
            max_restarts=-1,
            max_task_retries=1,
            runtime_env={"env_vars": thread_environment(threads or 1)},
        )
        self._actors = [actor.remote(setup, Path.cwd()) for _ in range(count or gpus or cores)]
        self._processes: dict[int, int] = {}  # of the actors, to see when one was replaced
        self._tainted: dict[int, bool] = {}  # actors that have a suspect
        self._deaths: Counter[Any] = Counter()  # of actors, by the item that they had alone

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """Outcomes in the order in which they come; None at least twice a second.

        Raises:
            MatcherError: what made an actor give up.
        """
        suspects: list[Job] = []
        running: dict[Any, tuple[int, Job]] = {}
        jobs = iter(jobs)
        while True:
            for number, actor in enumerate(self._actors):
                # A suspect has an actor for itself: what waits behind it would be blamed as well.
                load = sum(where == number for where, _ in running.values())
                while load < (1 if suspects or self._tainted.get(number) else _QUEUED_CLUSTER):
                    self._tainted[number] = bool(suspects)
                    job = suspects.pop() if suspects else next(jobs, None)
                    if job is None:
                        break
                    running[actor.run.remote(job, self._references(job))] = (number, job)
                    load += 1
            if not running:
                return
            finished, _ = self._ray.wait(list(running), timeout=_TICK_CLUSTER)
            if not finished:
                yield None
            for reference in finished:
                yield from self._take(reference, *running.pop(reference), suspects)

    def _take(self, reference: Any, number: int, job: Job, suspects: list[Job]) -> Iterator[Outcome]:
        """The outcomes of a finished job, or its items for another try where it killed its actor."""
        try:
            process, outcomes = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except self._ray.exceptions.RayError as error:
            self.crashes += 1
            if len(job.items) > 1:
                suspects += [replace(job, items=(item,), batch=1) for item in job.items]
                return
            [item] = job.items
            self._deaths[item] += 1
            if self._deaths[item] < _DEATHS:
                suspects.append(job)
            else:
                yield job.failure(item, f"its Ray actor died repeatedly ({type(error).__name__})")
            return
        self.crashes += self._processes.get(number, process) != process
        self._processes[number] = process
        yield from outcomes

    def _references(self, job: Job) -> dict[int, Any]:
        """Ray's references to the features that a job needs."""
        if not isinstance(job, MatchJob):
            return {}
        for number, image in job.images.items():
            if number not in self._held:
                self._held[number] = self._ray.put(self._store.features(image.name))
            self._held.move_to_end(number)
        found = {number: self._held[number] for number in job.images}
        while len(self._held) > _HELD:
            self._held.popitem(last=False)
        return found

    def close(self) -> None:
        """End the actors, and Ray where this run started it."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._store.close()
        if self._ours:
            self._ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError(f"the engine ray needs Ray: {install_command('ray')}") from None
    return ray


def _connect(ray: Any, count: int | None, threads: int) -> None:
    options: dict[str, Any] = {"log_to_driver": False}
    if address := os.environ.get("RAY_ADDRESS"):
        options["address"] = address
    else:
        cpus = None if count is None else count * threads
        options |= {"num_cpus": cpus, "include_dashboard": False, "configure_logging": False}
    try:
        # Ray has its workers import from the folder in which it is called: let that be this package's own.
        with contextlib.chdir(Path(__file__).parents[2]):
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(f"Ray cannot be reached or started ({error})") from None


# --- engines: Which processes do the work of a run, and how many.

EngineName = Literal["local", "ray"]
_GPU_BATCH = 8  # images or pairs that a GPU works on together


@dataclass(frozen=True)
class Workers:
    """Which processes do the work; results do not depend on it."""

    engine: EngineName = "local"
    count: int | None = None  # processes; 0: this one; None: one per core or GPU
    threads: int | None = None  # of each; None: the cores divided by the processes
    batch: int | None = None  # images or pairs worked on together; None: 1 on a CPU, 8 on a GPU


def start_engine(run_dir: Path, setup: Setup, workers: Workers) -> Engine:
    """Start the engine; close it after use.

    Raises:
        UsageError: a missing device or extra.
    """
    if workers.engine == "ray":
        return RayWorkers(run_dir, setup, workers.count, workers.threads)
    every = devices(setup.options)
    cores = available_cores()
    count = workers.count
    if count is None:
        count = cores if every == ["cpu"] else len(every)
    if count == 0:
        return InProcess(run_dir, setup)
    chosen = [every[number % len(every)] for number in range(count)]
    return LocalWorkers(run_dir, setup, chosen, workers.threads or max(1, cores // count))


def batch_size(setup: Setup, workers: Workers) -> int:
    """Images that are extracted, or pairs that are matched, together."""
    return workers.batch or (1 if devices(setup.options) == ["cpu"] else _GPU_BATCH)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
