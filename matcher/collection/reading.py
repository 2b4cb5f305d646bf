"""Reading ahead: while one image is worked on, a thread reads those that follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
