"""The next batch is made while one is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def made_ahead(make: Callable[[int], Made], start: int, stop: int, device: torch.device) -> Iterator[Made]:
    """What `make` gives for the steps start … stop−1.

    On a processor a thread makes the next one meanwhile; a GPU has one queue for everything.
    """
    if device.type != "cpu":
        yield from map(make, range(start, stop))
        return
    with ThreadPoolExecutor(1) as pool:
        ahead = [pool.submit(make, step) for step in range(start, min(start + 1, stop))]
        for step in range(start + 1, stop + 1):
            made = ahead.pop().result()
            if step < stop:
                ahead.append(pool.submit(make, step))
            yield made
