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
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        if received:
            _end(number)
        received.append(number)
        say("stopping after this step")

    with _handled_by(receive):
        yield received


@contextmanager
def whole_step() -> Iterator[None]:
    """A step that Ctrl-C or SIGTERM does not cut in two: it ends first; a second signal does not wait.

    Raises:
        KeyboardInterrupt: after the step, for Ctrl-C.
        SystemExit: after the step, for SIGTERM.
    """
    received: list[int] = []

    def receive(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            _end(number)

    with _handled_by(receive):
        yield
    if received:
        _end(received[0])


def _end(number: int) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)


@contextmanager
def _handled_by(receive: Callable[[int, object], None]) -> Iterator[None]:
    """Ending signals go to `receive`; in a thread other than the first, which gets none, they stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
