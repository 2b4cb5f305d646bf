"""Small pieces of work, such as writing an image, done in their order: in a thread where nobody may wait."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

_MOST = 8  # pieces that may wait; so many images are held in memory


class OrderedWork:
    """Does what it is given, one after the other; after a failure nothing more until that was said."""

    def __init__(self, *, beside: bool) -> None:
        """`beside`: in a thread; otherwise at once. The thread ends what it has when the program ends."""
        self._thread = ThreadPoolExecutor(1, "keyframes") if beside else None
        self._process = os.getpid()
        self._waiting: deque[Future[None]] = deque()
        self._failed = False

    def add(self, work: Callable[[], None]) -> None:
        """Do this next; it waits only while too much is waiting.

        Raises:
            Exception: what made this work fail, or in a thread some work before it.
        """
        self._stay_at_home()
        if self._thread is None:
            work()
            return
        if self.is_done() or len(self._waiting) < _MOST:
            self._waiting.append(self._thread.submit(self._do, work))
            return
        self._waiting[0].exception()  # waits
        self.add(work)

    def is_done(self) -> bool:
        """Whether nothing is waiting.

        Raises:
            Exception: what made some work fail; what came after it is not done.
        """
        self._stay_at_home()
        while self._waiting and self._waiting[0].done():
            problem = self._waiting.popleft().exception()
            if problem is not None:
                for rest in self._waiting:
                    rest.exception()  # waits; it is passed over
                self._waiting.clear()
                self._failed = False
                raise problem
        return not self._waiting

    def wait(self) -> None:
        """Until all is done.

        Raises:
            Exception: as of `is_done`.
        """
        while not self.is_done():
            self._waiting[0].exception()

    def _stay_at_home(self) -> None:
        """A forked child has no thread: what waits is its parent's, and what is new is done at once."""
        if os.getpid() != self._process:
            self._process, self._thread = os.getpid(), None
            self._waiting.clear()

    def _do(self, work: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            work()
        except BaseException:
            self._failed = True
            raise
