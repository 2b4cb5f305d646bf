"""What a run comes to, from one pass over its pairs in bounded memory, however many there are."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from matcher.collection.records import StoredPair

BINS = (0, 1, 10, 20, 50, 100, 200, 500, 1000, 2000)  # least count of each bin of a histogram


@dataclass(frozen=True, order=True)
class PairRow:
    """A pair without its matches; rows are ordered, the worst first."""

    sound: bool  # a geometry was found, or none was asked for
    inliers: int  # matches, where no geometry was asked for
    matches: int
    name0: str
    name1: str
    status: str
    seconds: float


@dataclass
class RunStatistics:
    """Counts, and the rows that a page has room for."""

    room: int  # rows kept of the worst pairs
    edges: int  # rows kept of the pairs with most inliers
    pairs: int = 0
    seconds: float = 0.0
    statuses: Counter = field(default_factory=Counter)
    matches: Counter = field(default_factory=Counter)  # pairs by bin
    inliers: Counter = field(default_factory=Counter)
    degree: Counter = field(default_factory=Counter)  # sound pairs of each image
    tried: Counter = field(default_factory=Counter)  # pairs of each image
    worst: list[PairRow] = field(default_factory=list)  # the worst first, once all are added
    best: list[PairRow] = field(default_factory=list)  # the best first


def collect_statistics(pairs: Iterable[StoredPair], room: int, edges: int) -> RunStatistics:
    """Go once over the pairs of a run.

    Args:
        pairs: as a store gives them.
        room, edges: how many of the worst and of the best are kept.
    """
    found = RunStatistics(room, edges)
    worst: list[tuple] = []
    for pair in pairs:
        row = _row(pair)
        found.pairs += 1
        found.seconds += pair.seconds
        found.statuses[row.status] += 1
        found.matches[bin_of(row.matches)] += 1
        found.inliers[bin_of(row.inliers)] += 1
        for name in (row.name0, row.name1):
            found.tried[name] += 1
            found.degree[name] += row.sound
        if row.sound:
            _keep(found.best, row, row, edges)
        key = (-row.sound, -row.inliers, -row.matches, found.pairs)  # the last: rows are never compared
        _keep(worst, key, (key, row), room)
    found.best.sort(reverse=True)
    found.worst = [row for _, row in sorted(worst, reverse=True)]
    return found


def _row(pair: StoredPair) -> PairRow:
    status, matches = pair.geometry.status, len(pair.matches)
    free = status == "not_estimated"
    inliers = matches if free else int(pair.geometry.inliers.sum())
    sound = matches > 0 if free else status == "ok"
    return PairRow(sound, inliers, matches, pair.name0, pair.name1, status, pair.seconds)


def _keep(heap: list, key: object, item: object, limit: int) -> None:
    """Keep the `limit` largest items."""
    if len(heap) < limit:
        heapq.heappush(heap, item)
    elif limit and key > (heap[0][0] if isinstance(heap[0], tuple) else heap[0]):
        heapq.heapreplace(heap, item)


def bin_of(count: int) -> int:
    """Which of `BINS` a count falls into."""
    return max(number for number, least in enumerate(BINS) if count >= least)
