"""Pairs matched on a GPU: queued in groups, read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from matcher.config import NetworkConfig
from matcher.data.features import Features
from matcher.match.mutual import MutualBest
from matcher.match.padded.heads import LayerHeads
from matcher.match.padded.run import PairRun
from matcher.match.padded.stages import Captured, Outlook, Queued
from matcher.match.padded.tables import padded_length, paired, uploaded
from matcher.match.padded.transport import TOGETHER

MOST_SCORES = 2**28  # of the pairs that are matched together; a score takes some twenty bytes on the way
GRAPHS_KEPT = 8  # sizes whose graphs are kept


class PairBest(NamedTuple):
    """What was read of one pair; on the processor."""

    layers_run: int
    turns: int  # quarter turns of image 1
    unlike: bool  # descriptors that the network was not trained on
    points0: int
    points1: int
    kept0: int  # points that were not dropped
    kept1: int
    best: MutualBest  # B = 1, of the points of image 0
    keypoints0: Tensor  # (N, 2) float32
    keypoints1: Tensor  # (M, 2)


def suits(config: NetworkConfig, device: torch.device) -> bool:
    """Whether networks of this configuration run padded there."""
    plain = config.refinement is None and not (config.assignment.border or config.assignment.drop_unmatched)
    return device.type == "cuda" and config.context.attention == "softmax" and plain


@dataclass
class PaddedNetwork:
    """A network for inference, run on a GPU for batches of features."""

    network: nn.Module  # `MatchingNetwork`
    device: torch.device
    graphs: bool = False  # capture the stages of each size once, and replay them

    def __post_init__(self) -> None:
        varied = self.network.config.policy.early_exit and len(self.network.heads) > 1
        self.heads = LayerHeads(self.network) if varied else None
        self._captured: OrderedDict[tuple, tuple[PairRun, Captured]] = OrderedDict()
        self._lock = Lock()

    def __call__(
        self, features0: Features, features1: Features, turns: Tensor | None = None
    ) -> list[PairBest]:
        """The best partners in all pairs; the program waits for the device once.

        Args:
            features0, features1: batches, on the processor or on the device.
            turns: (B,) int64 clockwise quarter turns of image 1; chosen where descriptors can turn if absent.
        """
        length = padded_length(max(len(features0), len(features1)))
        packed = []
        # Where this is another device than the program's current one, streams and graphs are of this one.
        with self._lock, torch.cuda.device(self.device):
            for part in _groups(len(features0.mask), length):
                both = paired(features0.entries(part), features1.entries(part), length)
                full = both.mask.device.type == "cpu" and bool(both.mask.all())
                given = None if turns is None else turns[part]
                packed.append(self._queue(both, given, full))
            read = torch.cat(packed).cpu()  # the one wait
        return [_unpacked(row, length) for row in read]

    def _queue(self, both: Features, turns: Tensor | None, full: bool) -> Tensor:
        """Queue the run of a group; what is to be read, as `PairRun.read_off` makes it."""
        given = tuple(f.name for f in fields(both) if getattr(both, f.name) is not None)
        key = (tuple(both.mask.shape), full, turns is None, both.descriptors.dtype, given)
        if not self.graphs:
            run, stages = PairRun(self.network, self.heads, uploaded(both, self.device), full=full), Queued()
        elif key in self._captured:
            self._captured.move_to_end(key)
            run, stages = self._captured[key]
            run.refill(uploaded(both, self.device))
        else:
            run = PairRun(self.network, self.heads, uploaded(both, self.device), full=full)
            stages = Captured(self.device)
            self._captured[key] = run, stages
            if len(self._captured) > GRAPHS_KEPT:
                self._captured.popitem(last=False)
        if turns is not None:
            run.turns.copy_(turns, non_blocking=True)
        self._queue_stages(run, stages, align=turns is None)
        return run.packed.clone()

    def _queue_stages(self, run: PairRun, stages: Queued | Captured, *, align: bool) -> None:
        config = self.network.config
        stages.run("begin", lambda: run.begin(align=align))
        outlook = Outlook(self.device)
        for depth in range(len(self.network.layers)):
            stages.run(f"layer {depth}", lambda d=depth: run.layer(d))
            if config.policy.early_exit:
                if outlook.all_done():
                    break
                outlook.note(run.done)
        stages.run("score", run.score)
        if config.assignment.kind == "sinkhorn":
            for number in range(config.assignment.consensus):
                stages.run(f"consensus {number}", run.consensus_round)
            stages.run("begin transport", run.begin_transport)
            self._queue_transport(run, stages)
        stages.run("read off", run.read_off)
        stages.end_run()

    def _queue_transport(self, run: PairRun, stages: Queued | Captured) -> None:
        """All iterations that are allowed, or until it is known that all pairs have converged."""
        assignment, outlook = self.network.config.assignment, Outlook(self.device)
        for _ in range(0, assignment.max_iterations - 1, TOGETHER):
            stages.run("transport", run.continue_transport)
            if assignment.tolerance is not None:
                if outlook.all_done():
                    break
                outlook.note(run.transport.done)


def _groups(pairs: int, length: int) -> Iterator[slice]:
    """Pairs whose scores fit `MOST_SCORES`, in order."""
    step = max(1, MOST_SCORES // (length + 1) ** 2)
    for start in range(0, pairs, step):
        yield slice(start, min(start + step, pairs))


def _unpacked(row: Tensor, length: int) -> PairBest:
    numbers, partners, best, keypoints = row.split([7, length, length, 4 * length])
    layers, turns, unlike, *counts = numbers.tolist()
    best = best.view(torch.float32)
    found = MutualBest(best[None], partners.long()[None], (partners >= 0)[None])
    return PairBest(
        layers, turns, bool(unlike), *counts, found, *keypoints.view(torch.float32).view(2, -1, 2)
    )
