"""The work of a run: what is to be done, and who does it: this process, worker processes that survive the
death of any, or Ray's actors.

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
import warnings
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, ClassVar, Literal

import numpy as np

from matcher import processes
from matcher.collection import schema
from matcher.collection.schema import DONE, FAILED, WAITING
from matcher.collection.settings import Setup, build
from matcher.collection.sources import Extracted, FeatureSource
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.errors import ImageError, IntegrityError, MatcherError, UsageError, optional
from matcher.loading import devices, takes
from matcher.types import Features, Image, thinned, to_numpy
from matcher.verify.verdict import NOT, reject_improbable

Outcome = Extracted | EncodedPair


@dataclass(frozen=True)
class Job:
    """Images to extract, by name, or pairs to match, by the numbers of their images."""

    items: tuple[Any, ...]
    batch: int = 1  # items that are worked on together
    images: Mapping[int, schema.StoredImage] | None = None  # of pairs

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
            outcomes.append(one._replace(features=kept, data=schema.encode_features(features)))
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
                        raise MatcherError(f"geometry 'essential' needs the camera of {' and '.join(absent)}")
                geometry = pipeline.verify(*features, matches, camera0=cameras[0], camera1=cameras[1])
                # A false edge does more harm to a reconstruction than an absent one.
                sizes = (one.image_size for one in features)
                geometry = reject_improbable(geometry, matches, *sizes, least=NOT)
                data = schema.encode_pair(matches, geometry, *(to_numpy(one.keypoints) for one in features))
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
    """A worker has died: how, and whether its job may be why."""


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
                    self.crashes, (how, of_job) = self.crashes + 1, death.args
                    for item in job.items:
                        deaths[item] += of_job
                        if deaths[item] < self.tries:
                            again.append(replace(job, items=(item,), batch=1))
                        else:
                            outcomes.append(job.failure(item, how))


class _Process:
    """A worker process and the socket to it."""

    def __init__(self, run_dir: Path, setup: Setup, threads: int) -> None:
        self.setup, self.ready = setup, False
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                processes.child_command("matcher.collection.workers", str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                env=processes.child_environment(threads),
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
        self._failed_starts, self._start = 0, partial(_Process, run_dir, threads=threads)
        given = [{"device": device} if takes(setup.preset, "device") else {} for device in devices]
        own = (replace(setup, options={**setup.options, **each}) for each in given)
        self.idle += map(self._start, own)

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
                raise MatcherError(f"worker processes cannot start ({how}); see their output above") from None
            self.idle.append(self._start(worker.setup))
            raise _DiedError(f"its worker process died twice ({how})", worker.ready) from None
        if isinstance(message, Exception):
            raise message
        if message is None:
            worker.ready, self._failed_starts = True, 0
            self.running[key] = worker, job
            return []
        self.idle.append(worker)
        outcomes, warned = message
        for warning in warned:  # here, where whoever asked for the run hears them
            warnings.warn(warning, stacklevel=2)
        return outcomes

    def close(self) -> None:
        """End the workers: those that are idle by themselves within two seconds, the others at once."""
        until = monotonic() + 2
        for worker in self.idle:
            worker.connection.close()
        for worker, _ in self.running.values():
            worker.process.kill()
        for worker in (*self.idle, *(worker for worker, _ in self.running.values())):
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, until - monotonic()))
            worker.process.kill()
            worker.process.wait()


class Actor:
    """The code of Ray's actors: a job runner that receives features with its jobs."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        import ray

        with contextlib.suppress(OSError):  # relative paths are from there, where this machine has it
            os.chdir(folder)
        self._references: Mapping[str, Any] = {}
        self._runner = JobRunner(setup, lambda name: ray.get(self._references[name]))

    def run(self, job: Job, references: Mapping[str, Any]) -> list[Outcome]:
        """An outcome per item; `references` are Ray's, of features by name of image."""
        self._references = references
        return list(self._runner.run(job))


class RayWorkers(_Pool):
    """Actors on the cluster that RAY_ADDRESS names, or on a Ray of this machine, started here: one per GPU or
    group of cores."""

    tries = 4  # one may fail because the actor is still being restarted

    def __init__(self, run_dir: Path, setup: Setup, count: int | None, threads: int) -> None:
        super().__init__()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # read when Ray starts
        with optional():
            import ray

        self._ray, self._ours = ray, not ray.is_initialized()
        if self._ours:
            options: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS")}
            if not options["address"]:
                cpus = None if count is None else count * threads
                options = {"num_cpus": cpus, "include_dashboard": False, "configure_logging": False}
            try:  # workers import from the folder in which it is called: let that be this package's own
                with contextlib.chdir(Path(__file__).parents[2]):
                    ray.init(log_to_driver=False, **options)
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
        limits = {"env_vars": processes.thread_environment(threads)}
        actor = ray.remote(Actor).options(
            num_cpus=threads, num_gpus=int(gpus > 0), max_restarts=-1, max_task_retries=1, runtime_env=limits
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
            raise _DiedError(f"its Ray actor died repeatedly ({type(error).__name__})", True) from None

    def close(self) -> None:
        """End the actors, and Ray where this run started it."""
        for actor in (*self.idle, *(actor for actor, _ in self.running.values())):
            self._ray.kill(actor)
        self._store.close()
        if self._ours:
            self._ray.shutdown()


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
    every, cores, count = devices(setup.options), processes.usable_cores(), workers.count
    if count is None:
        count = cores if every == ["cpu"] else len(every)
    if count == 0:
        return InProcess(run_dir, setup)
    chosen = [every[number % len(every)] for number in range(count)]
    threads = max(1, min(cores // count, processes.compute_threads()))
    return LocalWorkers(run_dir, setup, chosen, workers.threads or threads)


def _by_tiles(pairs: np.ndarray) -> np.ndarray:
    """Pairs (P, 2) by tiles of 32 images on either side, whose features fit in memory together."""
    first, second = pairs.T
    return pairs[np.lexsort((second, first, second >> 5, first >> 5))]


def add_pairs(
    writer: Writer, pairs: Iterable[tuple[str, str]], shard: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Add the pairs, names read once, that are neither finished nor failed, each once, in either order of its
    images; returns how many different ones there are, and how many of them are new. `UsageError`: a name that
    the store does not have.

    Of a `shard` (i, n) only part i of n: a range of the pairs in the order in which they are matched, which
    depends on names and pairs alone, so that the n runs agree.
    """
    numbers = {name: number for number, name in writer.names().items()}
    ranks = {name: rank for rank, name in enumerate(sorted(numbers))}
    ends = array("q")
    for pair in pairs:
        if pair[0] == pair[1]:
            raise UsageError(f"{pair[0]} cannot be paired with itself")
        if absent := [name for name in pair if name not in ranks]:
            raise UsageError(f"the pair {pair[0]} and {pair[1]}: there is no image {absent[0]!r}")
        ends.extend(ranks[name] for name in pair)
    rows = np.sort(np.array(ends, np.int64).reshape(-1, 2), axis=1)
    keys = np.unique(rows[:, 0] * len(ranks) + rows[:, 1])  # each pair once
    rows = _by_tiles(np.column_stack(np.divmod(keys, max(1, len(ranks)))))
    part, parts = shard or (1, 1)
    rows = rows[len(rows) * (part - 1) // parts : len(rows) * part // parts]
    ids = np.array([numbers[name] for name in ranks], np.int64)[rows].tolist()
    known = "EXISTS (SELECT 1 FROM {} WHERE image0 = ?1 AND image1 = ?2)".format
    new = f"SELECT ?1, ?2 WHERE NOT {known('pairs')} AND NOT {known('failed')}"
    with writer.transaction():
        added = writer.execute_many(f"INSERT OR IGNORE INTO waiting {new}", ids)
    return len(rows), added


def _parts(items: Sequence, batch: int) -> Iterator[Sequence]:
    """Guided self-scheduling (Polychronopoulos and Kuck 1987): a 32nd of what is left, within bounds."""
    while len(items):
        size = max(batch, min(max(8, 2 * batch), len(items) // 32))  # what a kill may cost
        yield items[:size]
        items = items[size:]


def match_jobs(writer: Writer, batch: int) -> Iterator[Job]:
    """Jobs of waiting pairs, tile by tile, smaller towards the end."""
    numbered = {image.number: image for image in writer.images()}
    waiting = writer.rows("SELECT image0, image1 FROM waiting")
    pairs = _by_tiles(np.fromiter((end for pair in waiting for end in pair), np.int64).reshape(-1, 2))
    for part in _parts(pairs, batch):
        items = tuple(map(tuple, part.tolist()))
        yield Job(items, batch, {number: numbered[number] for pair in items for number in pair})


# The stages of a run. A single process writes, in small commits: these survive if it dies; what was not
# committed is computed again by the next run, with the same result.


@dataclass(frozen=True)
class StageProgress:
    """Progress of one stage of a run; only what has reached the disk counts."""

    stage: str  # "extract", "choose" (which pairs to match) or "match"
    done: int  # failed ones included
    failed: int
    total: int


@dataclass(frozen=True)
class RunReport:
    """What a run did."""

    extracted: int  # images
    matched: int  # pairs, failed ones included
    crashes: int  # worker processes that died and were replaced
    counts: schema.Counts  # of the store afterwards

    @property
    def all_well(self) -> bool:
        """Whether nothing failed, in this run or an earlier one."""
        return not (self.crashes or self.counts.images_failed or self.counts.pairs_failed)


OnProgress = Callable[[StageProgress], None]


@dataclass
class Stages:
    """The two stages of a run. `OSError`: the disk is full; committed results are kept."""

    commit_seconds: ClassVar[float] = 0.5  # after which what is finished is written
    writer: Writer
    engine: Engine
    source: FeatureSource
    batch: int  # images or pairs that are worked on together
    on_progress: OnProgress

    def extract(self, *, everything: bool) -> int:
        """Extract the waiting images of waiting pairs, or of `everything`; returns how many were tried."""
        writer, lost, some = self.writer, self.writer.without_descriptors(), None
        ends = writer.execute("SELECT image0 FROM waiting UNION SELECT image1 FROM waiting")
        rows = writer.execute("SELECT id, name, status FROM images ORDER BY name")
        needed, first = {number for (number,) in ends}, not writer.counts().pairs_done
        if writer.settings.get("shard") is not None:  # all parts find overlays by the same images
            some = {number for number, *_ in thinned(rows, 100)}
            needed |= some if first and needed else set()
        rows = [row for row in rows if everything or row[0] in needed]
        names = [name for n, name, status in rows if status == WAITING or (status == DONE and n in lost)]
        jobs = (Job(tuple(part), self.batch) for part in _parts(names, self.batch))
        self._run("extract", jobs, self._put_images, len(names))
        if first and not writer.without_descriptors():
            writer.leave_out_overlays(some)
        with self.writer.transaction():  # pairs that can never be matched
            sql = "SELECT image0, image1, name || ': ' || reason FROM waiting JOIN images"
            failed = self.writer.execute(f"{sql} ON id IN (image0, image1) WHERE status = {FAILED}")
            self.writer.put_pairs(EncodedPair(*ends, reason=reason) for *ends, reason in failed)
        return len(names)

    def match(self) -> int:
        """Match every waiting pair, returns how many; `ImageError`: no image could be used."""
        counts = self.writer.counts()
        if counts.images_failed and not counts.images_done:
            failed = next(image for image in self.writer.images() if image.status == "failed")
            raise ImageError(f"no image of {self.writer.image_folder} could be used; {failed.reason}")
        self._run("match", match_jobs(self.writer, self.batch), self.writer.put_pairs, counts.pairs_waiting)
        return counts.pairs_waiting

    def _run(self, stage: str, jobs: Iterator[Job], commit: Callable[[list], None], total: int) -> None:
        """Commit results in small groups, including those that are there when the run is interrupted."""
        if not total:
            return
        pending: list[Outcome] = []
        done, failed, last = 0, 0, monotonic()

        def write() -> None:
            nonlocal done, failed, last
            group = pending.copy()
            pending.clear()
            with self.writer.transaction():
                commit(group)
            done, failed = done + len(group), failed + sum(not outcome.data for outcome in group)
            last = monotonic()
            self.on_progress(StageProgress(stage, done, failed, total))

        self.on_progress(StageProgress(stage, 0, 0, total))
        try:
            for outcome in self.engine.run(jobs):
                if outcome is not None:
                    pending.append(outcome)
                full = len(pending) >= 512 or sum(len(each.data) for each in pending) >= 64 << 20  # bytes
                if pending and (full or monotonic() - last >= self.commit_seconds):
                    write()
        finally:
            if pending:
                write()

    def _put_images(self, outcomes: Sequence[Extracted]) -> None:
        writer, overlays = self.writer, {overlay.size: overlay for overlay in self.writer.overlays}
        for one in outcomes:
            if one.data and (overlay := overlays.get(one.features.image_size)):
                beside = overlay.beside(to_numpy(one.features.keypoints))
                data = schema.chosen_features(one.data, beside, one.name)
                one = one._replace(features=one.features.select(beside), data=data)
            name, number = one.name, writer.image(one.name).number
            had = writer.execute("SELECT sha256 FROM images WHERE id = ? AND status = ?", number, DONE)
            if one.data:
                points = to_numpy(one.features.keypoints)
                same = had == [(one.sha256,)] and np.array_equal(writer.keypoints(name), points)
                if had and not same:
                    writer.forget([name])  # its pairs name keypoints that are no more
                writer.put_features(name, one.features, one.data, one.sha256, one.stamp)
            elif had:  # its descriptors were deleted and the image is gone: matches stay
                sql = "SELECT image0, image1 FROM waiting WHERE ? IN (image0, image1)"
                waiting, reason = writer.execute(sql, number), f"{name}: {one.reason}"
                writer.put_pairs(EncodedPair(*pair, reason=reason) for pair in waiting)
            else:
                writer.fail_image(name, one.reason, self.source.stamp(name))


def main() -> None:
    """A worker process: take jobs from the inherited socket of that number, until it closes."""
    connection = Connection(int(sys.argv[1]))
    try:
        run_dir, started = pickle.loads(connection.recv_bytes())
        with Store.open(run_dir) as store:
            runner = started(store.features)
            connection.send_bytes(pickle.dumps(None))
            while True:
                with warnings.catch_warnings(record=True) as warned:
                    outcomes = list(runner.run(pickle.loads(connection.recv_bytes())))
                connection.send_bytes(pickle.dumps((outcomes, [each.message for each in warned])))
    except (EOFError, OSError):
        return  # the run has ended
    except MatcherError as error:
        connection.send_bytes(pickle.dumps(error))


if __name__ == "__main__":
    main()
