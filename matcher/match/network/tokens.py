"""The points of a batch of pairs as one packed list, and which pair and image each is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from matcher.match.network.correspondence import Side
from matcher.match.network.packed import Layout, image_sums

TOGETHER = 1024  # tokens of a batch that run at once on a CPU; one pair may have more


@dataclass(frozen=True, eq=False)
class Tokens:
    """The live points of the pairs still running, packed."""

    x: Tensor  # (T, dim)
    rotations: Tensor | None  # (T, 2, head_dim/2) cosines and sines that turn queries and keys
    index: Tensor  # (T,) int64, the input point each token is
    layout: Layout
    pairs: tuple[int, ...]  # which input pair each entry of the layout is
    positions: Tensor  # (T, 2) normalised positions
    predicted: Tensor | None = None  # (T, 2) positions of partners as the last layer predicts them, if guided

    def keep(self, keep: Tensor, pairs: list[int]) -> Tokens:
        """Only the tokens marked in `keep` (T,) bool and only the entries `pairs` of the layout."""
        lengths = [int(n) for n in image_sums(keep, self.layout)]
        counts = tuple((lengths[2 * p], lengths[2 * p + 1]) for p in pairs)
        alive = torch.zeros_like(keep)
        for p in pairs:
            alive[self.layout.starts[2 * p] : self.layout.starts[2 * p + 2]] = True
        chosen = (keep & alive).nonzero().squeeze(1)
        return replace(
            self,
            x=self.x[chosen],
            rotations=None if self.rotations is None else self.rotations[chosen],
            index=self.index[chosen],
            positions=self.positions[chosen],
            predicted=None if self.predicted is None else self.predicted[chosen],
            layout=Layout(counts),
            pairs=tuple(self.pairs[p] for p in pairs),
        )


def split_sides(tokens: Tokens) -> list[tuple[Side, Side]]:
    """The two images of every pair."""
    columns = [
        tokens.layout.split(x) for x in (tokens.x, tokens.positions, tokens.predicted) if x is not None
    ]
    return [tuple(Side(*side) for side in zip(*pair, strict=True)) for pair in zip(*columns, strict=True)]


def groups(tokens: Tokens) -> Iterator[Tokens]:
    """Pairs that run together: on a CPU as many as its caches and a few allocations hold, else all.

    Large batches gain nothing there, and memory that is touched for the first time costs more than they save.
    """
    counts = [n + m for n, m in tokens.layout.counts]
    if tokens.x.device.type != "cpu" or sum(counts) <= TOGETHER or len(counts) < 2:
        yield tokens
        return
    everything = torch.ones(len(tokens.x), dtype=torch.bool)
    group: list[int] = []
    for entry, count in enumerate(counts):
        if group and sum(counts[e] for e in group) + count > TOGETHER:
            yield tokens.keep(everything, group)
            group = []
        group.append(entry)
    yield tokens.keep(everything, group)
