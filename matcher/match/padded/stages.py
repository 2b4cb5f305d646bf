"""Stages of a run on a device: queued one by one, or captured once as CUDA graphs and replayed.

Work on a GPU is queued by the program and done later. A stage is a function without arguments that reads and
writes tensors that stay where they are, so that what it queued can be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Stage = Callable[[], None]


class Queued:
    """Stages that are queued as they come."""

    def run(self, name: str, stage: Stage) -> None:
        """Queue what the stage does."""
        stage()

    def end_run(self) -> None:
        """All stages of a run were queued."""


class Captured:
    """Stages that are graphs, which replay at the cost of one call each.

    Raises:
        RuntimeError: from a stage that waits for the device; such a stage cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Capture on a stream of that device: torch's own is of the device that was captured on first."""
        self._stream = torch.cuda.Stream(device)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._pool: object | None = None
        self._warm = False

    def run(self, name: str, stage: Stage) -> None:
        """Replay the stage of that name, which is captured in the second run; in the first it only runs."""
        if not self._warm:  # libraries choose their kernels when they are first called, which no graph may do
            stage()
            return
        if name not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            # Other threads may extract features meanwhile, which allocates memory.
            kept = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(graph, **kept):
                stage()
            self._graphs[name] = graph
            self._pool = graph.pool()
        self._graphs[name].replay()

    def end_run(self) -> None:
        """All stages of a run were queued."""
        self._warm = True


class Outlook:
    """Whether all pairs are done, as far as is known without waiting.

    Notes are copied to the host in the background. The program looks at those that have arrived, and queues
    meanwhile what may turn out to be unnecessary; the results do not depend on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._notes: list[tuple[Tensor, torch.cuda.Event]] = []

    def note(self, done: Tensor) -> None:
        """Send home whether all of `done` (B,) bool is true by now."""
        arrived = torch.empty((), dtype=torch.bool, pin_memory=True)
        arrived.copy_(done.all(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._notes.append((arrived, event))

    def all_done(self) -> bool:
        """Whether a note that has arrived says so."""
        while self._notes and self._notes[0][1].query():
            arrived, _ = self._notes.pop(0)
            if arrived:
                return True
        return False
