"""Statistics of a run, from one pass over its pairs in bounded memory, however many there are."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from matcher.collection.records import StoredPair

BINS = (0, 1, 10, 20, 50, 100, 200, 500, 1000, 2000)  # least count of each bin of a histogram


@dataclass(frozen=True, order=True)
class PairRow:
    """A pair without its matches; rows are ordered, the weakest first."""

    verified: bool  # a geometry was found, or none was asked for
    inliers: int  # matches, where no geometry was asked for
    matches: int
    name0: str
    name1: str
    status: str
    seconds: float


@dataclass
class RunStatistics:
    """What a page shows about a run: counts, and a limited number of rows."""

    limit: int  # rows kept of the weakest pairs
    edges: int  # rows kept of the pairs with most inliers
    pairs: int = 0
    seconds: float = 0.0
    verified_matches: int = 0  # inliers of the verified pairs
    statuses: Counter = field(default_factory=Counter)
    matches: Counter = field(default_factory=Counter)  # pairs by bin
    inliers: Counter = field(default_factory=Counter)
    degree: Counter = field(default_factory=Counter)  # verified pairs of each image
    tried: Counter = field(default_factory=Counter)  # pairs of each image
    weakest: list[PairRow] = field(default_factory=list)  # the weakest first, once all are added
    strongest: list[PairRow] = field(default_factory=list)  # the strongest first


def collect_statistics(pairs: Iterable[StoredPair], limit: int, edges: int) -> RunStatistics:
    """Go once over the pairs of a run.

    Args:
        pairs: as a store gives them.
        limit, edges: how many of the weakest and of the strongest are kept.
    """
    found = RunStatistics(limit, edges)
    weakest: list[tuple] = []
    for pair in pairs:
        row = _row(pair)
        found.pairs += 1
        found.seconds += pair.seconds
        found.verified_matches += row.inliers if row.verified else 0
        found.statuses[row.status] += 1
        found.matches[bin_of(row.matches)] += 1
        found.inliers[bin_of(row.inliers)] += 1
        for name in (row.name0, row.name1):
            found.tried[name] += 1
            found.degree[name] += row.verified
        if row.verified:
            _keep(found.strongest, row, row, edges)
        key = (-row.verified, -row.inliers, -row.matches, found.pairs)  # the last: rows are never compared
        _keep(weakest, key, (key, row), limit)
    found.strongest.sort(reverse=True)
    found.weakest = [row for _, row in sorted(weakest, reverse=True)]
    return found


def _row(pair: StoredPair) -> PairRow:
    status, matches = pair.geometry.status, len(pair.matches)
    free = status == "not_estimated"
    inliers = matches if free else int(pair.geometry.inliers.sum())
    verified = matches > 0 if free else status == "ok"
    return PairRow(verified, inliers, matches, pair.name0, pair.name1, status, pair.seconds)


def _keep(heap: list, key: object, item: object, limit: int) -> None:
    """Keep the `limit` largest items."""
    if len(heap) < limit:
        heapq.heappush(heap, item)
    elif limit and key > (heap[0][0] if isinstance(heap[0], tuple) else heap[0]):
        heapq.heapreplace(heap, item)


def bin_of(count: int) -> int:
    """Which of `BINS` a count falls into."""
    return max(number for number, least in enumerate(BINS) if count >= least)
