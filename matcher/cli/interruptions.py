"""Signals that end a program, held until a step is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from matcher.cli.messages import say

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Signals received: the first stops a run after the current step, a second one ends the process."""
    with _held(lambda: say("stopping after this step")) as received:
        yield received


@contextmanager
def whole_step() -> Iterator[None]:
    """A step that Ctrl-C or SIGTERM does not cut in two: it ends first; a second signal does not wait.

    Raises:
        KeyboardInterrupt: after the step, for Ctrl-C.
        SystemExit: after the step, for SIGTERM.
    """
    with _held() as received:
        yield
    if received:
        _end(received[0])


@contextmanager
def _held(at_first: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Ending signals received, of which the second ends; threads other than the first get none."""
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            _end(number)
        at_first()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, receive) for number in _ENDING}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
