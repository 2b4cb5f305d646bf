"""A Ray cluster as the engine of a run: one actor per GPU or group of cores; only the driver writes.

Actors are sent the features of the tile of images that their pairs come from, once per node, through
Ray's object store; only extracting needs the photos where the actors are. Ray restarts an actor that died and
tries its job once more; where that fails too, the items are tried one by one, three times each, and the
culprit fails.

Anyone who can reach a Ray cluster can run code on it unless it requires a token: use a trusted network.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matcher.collection.jobs import ImageEntry, Job, JobRunner, MatchJob, Outcome
from matcher.collection.settings import Setup
from matcher.collection.store import Store
from matcher.data.features import Features
from matcher.errors import UsageError, install_command
from matcher.threads import thread_environment

_QUEUED = 2  # jobs that an actor has before it
_TICK = 0.5  # seconds after which the caller may do something else
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
                while load < (1 if suspects or self._tainted.get(number) else _QUEUED):
                    self._tainted[number] = bool(suspects)
                    job = suspects.pop() if suspects else next(jobs, None)
                    if job is None:
                        break
                    running[actor.run.remote(job, self._references(job))] = (number, job)
                    load += 1
            if not running:
                return
            finished, _ = self._ray.wait(list(running), timeout=_TICK)
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
