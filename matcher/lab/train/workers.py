"""Processes that render views during training."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType

import cv2

from matcher.errors import MatcherError
from matcher.lab.train.pair_cache import PairCache
from matcher.lab.train.views import ViewCache
from matcher.processes import safe_path


class ViewWorkers:
    """Worker processes that fill a cache, stopped when the `with` block ends."""

    def __init__(
        self, cache: ViewCache | PairCache, photos: Sequence[Path], count: int, log: Callable[[str], None]
    ) -> None:
        self.cache, self._log = cache, log
        self.wanted = cache.wanted
        self._unreadable: set[Path] = set()
        spawn = multiprocessing.get_context("spawn")
        with safe_path():  # its locks start a process, too
            self._reports: SimpleQueue = spawn.SimpleQueue()
        missing = len(cache.ready()) < self.wanted
        self._processes = [
            spawn.Process(
                target=make_views,
                args=(cache, photos, range(number, self.wanted, count), self._reports),
                daemon=True,
            )
            for number in range(count if missing else 0)
        ]

    def __enter__(self) -> ViewWorkers:
        self.cache.remove_unfinished()
        for process in self._processes:
            with safe_path():
                process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def alive(self) -> bool:
        """Whether any worker is still running."""
        return any(process.is_alive() for process in self._processes)

    def log_unreadable(self) -> None:
        """Log photos that were found unreadable since the last call.

        Raises:
            MatcherError, OSError: the error that ended a worker, such as a full disk.
        """
        new: set[Path] = set()
        while not self._reports.empty():
            report = self._reports.get()
            if isinstance(report, Exception):
                raise report
            new |= set(report)
        new -= self._unreadable
        if new:
            self._unreadable |= new
            names = ", ".join(path.name for path in sorted(new)[:5])
            more = f" and {len(new) - 5} more" if len(new) > 5 else ""
            self._log(f"skipped {len(self._unreadable)} photos that cannot be read: {names}{more}")


def make_views(
    cache: ViewCache | PairCache, photos: Sequence[Path], scenes: Sequence[int], reports: SimpleQueue
) -> None:
    """Fill a cache; the body of a worker process.

    Reports lists of unreadable photos, or the error that ended the work. Ends with the parent process,
    even if that was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    cv2.setNumThreads(1)
    parent, photo_set, reported = multiprocessing.parent_process(), cache.photo_set(photos), 0
    try:
        for _ in cache.make(photo_set, scenes):
            if len(photo_set.unreadable) > reported:
                reported = len(photo_set.unreadable)
                reports.put([photo_set.photos[number] for number in photo_set.unreadable])
            if parent is not None and not parent.is_alive():
                return
    except (MatcherError, OSError) as error:
        reports.put(error)
