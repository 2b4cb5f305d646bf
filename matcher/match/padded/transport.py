"""Optimal transport of a batch of pairs as `matcher.match.sinkhorn` solves it, without reading anything.

The iterations are the same. On a CPU a scaling vector is absorbed into the potentials when it is about to
leave the range of float32; here they are absorbed after every few iterations, and the first iteration is in
the log domain. A pair that has converged keeps its scales while the others go on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from matcher.match.network.blocks import exponentials

TOGETHER = 8  # iterations between absorptions
DEAD = -1e4  # score of points that take no part
_LIMIT = 1e30  # of a scale


class Transport:
    """The problems of a batch: scores (B, L, L) with the dustbins last, of images of equally long tables.

    Its tensors stay where they are while it iterates, so the iterations can be a CUDA graph.
    """

    def __init__(self, live0: Tensor, live1: Tensor) -> None:
        """Set the masses, 1 for each live point of (B, L-1), and for a dustbin those of the other image."""
        counts = live0.sum(1, keepdim=True), live1.sum(1, keepdim=True)
        self.mass0 = torch.cat([live0, counts[1]], dim=1).float()
        self.mass1 = torch.cat([live1, counts[0]], dim=1).float()

    def begin(
        self, scores: Tensor, start: tuple[Tensor, Tensor] | None, tolerance: float | None, most: int
    ) -> None:
        """Prepare at most `most` iterations and do the first.

        Args:
            scores: (B, L, L), `DEAD` where a point takes no part.
            start: potentials (B, L), (B, L) to begin with.
            tolerance: of the rows' error, at which a pair stops; None: never.
            most: iterations.
        """
        self.tolerance, self.most = tolerance, most
        first, second = self.mass0, self.mass1
        self.turned = None
        if tolerance is not None:
            self.turned = self._columns_first(scores)
            scores = torch.where(self.turned[:, None, None], scores.mT, scores)
            first, second = _exchanged(self.turned, first, second)
            start = start and _exchanged(self.turned, *start)
        self.scores, self.rows, self.columns = scores, first, second
        v = torch.zeros_like(second) if start is None else start[1]
        self.u = _where_live(first, first.log() - torch.logsumexp(scores + v[:, None], 2))
        self.v = _where_live(second, second.log() - torch.logsumexp(scores + self.u[:, :, None], 1))
        self.a, self.b = torch.ones_like(first), torch.ones_like(second)
        self.kernel = self._absorbed()
        self.iterations = torch.ones_like(scores[:, 0, 0], dtype=torch.int64)
        self.done = torch.zeros_like(self.iterations, dtype=torch.bool)

    def _columns_first(self, scores: Tensor) -> Tensor:
        """(B,) whether the columns come first, in a way that does not depend on which image is called 0."""
        bins0 = (scores[:, :-1, -1] * (self.mass0[:, :-1] > 0)).sum(1)
        bins1 = (scores[:, -1, :-1] * (self.mass1[:, :-1] > 0)).sum(1)
        last0, last1 = self.mass0[:, -1], self.mass1[:, -1]
        return torch.where(last0 == last1, bins1 < bins0, last0 < last1)

    def _absorbed(self) -> Tensor:
        return exponentials(self.scores + self.u[:, :, None] + self.v[:, None])

    def iterate(self, count: int = TOGETHER) -> None:
        """So many further iterations of the pairs that have not stopped."""
        for _ in range(count):
            a = _scale(self.rows, torch.bmm(self.kernel, self.b[:, :, None])[:, :, 0])
            b = _scale(self.columns, torch.bmm(a[:, None], self.kernel)[:, 0])
            if self.tolerance is not None:
                self.done |= self._error(self.a / a) <= self.tolerance
            going = ~self.done & (self.iterations < self.most)
            torch.where(going[:, None], a, self.a, out=self.a)
            torch.where(going[:, None], b, self.b, out=self.b)
            self.iterations += going

    def _error(self, ratios: Tensor) -> Tensor:
        """(B,) as `matcher.match.sinkhorn.row_error`, of the ratios (B, L) of live rows."""
        errors = torch.where(self.rows > 0, (ratios - 1).abs(), 0.0)
        points = (self.rows[:, :-1] > 0).sum(1).clamp_min(1)
        return torch.maximum(errors[:, :-1].norm(dim=1) / points.sqrt(), errors[:, -1])

    def absorb(self) -> None:
        """Move the scales into the potentials."""
        self._move_scales()
        self.kernel.copy_(self._absorbed())

    def _move_scales(self) -> None:
        self.u.add_(_where_live(self.rows, self.a.log()))
        self.v.add_(_where_live(self.columns, self.b.log()))
        self.a.fill_(1.0)
        self.b.fill_(1.0)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Potentials (B, L), (B, L) of the scores as they were given, 0 at points that take no part."""
        self._move_scales()
        found = (self.u, self.v)
        return found if self.turned is None else _exchanged(self.turned, *found)


def _where_live(mass: Tensor, values: Tensor) -> Tensor:
    return torch.where(mass > 0, values, 0.0)


def _scale(mass: Tensor, sums: Tensor) -> Tensor:
    """What makes the sums the masses, 0 where there is no mass, within what float32 holds."""
    return torch.where(mass > 0, (mass / sums).clamp(1 / _LIMIT, _LIMIT).nan_to_num(1.0), 0.0)


def _exchanged(which: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L), (B, L), one for the other in the pairs of `which` (B,)."""
    which = which[:, None]
    return torch.where(which, second, first), torch.where(which, first, second)
