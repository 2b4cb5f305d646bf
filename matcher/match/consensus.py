"""Consensus: where the matches around a point predict its partner.

Nearby points move together: to first order a surface seen twice is an affine map. Around every point such a
map is fitted robustly to the matches nearest to it, its own left out, and candidates near the predicted
position gain score while distant ones lose it; then the points are assigned again. After "moving least
squares" (Schaefer et al. 2006, section 2.1), with weights reestimated for Geman and McClure's loss under a
falling scale (Black and Rangarajan 1996); filters of the field reject matches by the same idea (AdaLAM,
Cavalli et al. 2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.config import AssignmentConfig
from matcher.kernels.calls import (
    CandidateSet,
    best_candidates,
    find_candidates,
    fit_compiled,
    have_candidates,
    supported_candidates,
    transport_candidates,
)
from matcher.kernels.loader import Trial
from matcher.match.blocks import row_blocks, widest_float
from matcher.match.nearest import MutualBest, mutual_best
from matcher.match.position import Side
from matcher.match.sinkhorn import Assignment, Potentials, assigned, plan, sinkhorn

# --- candidates: Optimal transport between the candidates of every point, and the dustbins.

# Of a row, and of a column. With 24 up to 8 % of the matches of a pair are others than with all scores.
MOST = 96
_TINY_CANDIDATES = 1e-30


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one pair of images, and the dustbins."""

    where: CandidateSet
    scores: Tensor  # (E,)
    bins0: Tensor  # (N,) scores of the dustbins
    bins1: Tensor  # (M,)
    corner: float
    rests: tuple[Tensor, Tensor]  # (N,), (M,) whose sums are the scores of all other entries
    weights: Tensor | None = None  # (N, M) bfloat16, exp(scores − bins0 − bins1) of the others instead

    @cached_property
    def rows(self) -> Tensor:
        """(E,) int64, the row of each candidate."""
        starts = self.where.starts.long()
        return torch.repeat_interleave(torch.arange(len(self.bins0)), starts.diff())

    @cached_property
    def columns(self) -> Tensor:
        """(E,) int64."""
        return self.where.columns.long()

    def sinkhorn(self, max_iterations: int, tolerance: float, start: Potentials | None = None) -> Potentials:
        """Potentials of the plan, as `sinkhorn.sinkhorn` finds them for dense scores (B = 1)."""
        n, m = len(self.bins0), len(self.bins1)
        columns_first = m < n if m != n else bool(self.bins1.sum() < self.bins0.sum())
        begin = None if start is None else (start.u[0], start.v[0])
        bins, limits = (self.bins0, self.bins1, self.corner), (max_iterations, tolerance)
        rests = self.rests if self.weights is None else bins[:2]
        u, v, iterations, converged = transport_candidates(
            self.where, self.scores, bins, rests, self.weights, begin, limits, columns_first
        )
        return Potentials(u[None], v[None], torch.tensor([iterations]), torch.tensor([converged]))

    def unmatched(self, found: Potentials) -> tuple[Tensor, Tensor]:
        """Log probabilities (N,), (M,) that points have no partner."""
        u, v = found.u[0], found.v[0]
        return self.bins0 + u[:-1] + v[-1], self.bins1 + v[:-1] + u[-1]

    def mutual_best(self, found: Potentials) -> MutualBest:
        """The best candidate of every row (B = 1)."""
        best = best_candidates(self.where, self.scores, found.u[0], found.v[0])
        return MutualBest(*(x[None] for x in best))

    def moved(self, scores: Tensor, bins: tuple[Tensor, Tensor], rests: tuple[Tensor, Tensor]) -> Candidates:
        """The same candidates with other scores; the other entries are of rank one."""
        changed = replace(self, scores=scores, bins0=bins[0], bins1=bins[1], rests=rests, weights=None)
        for name in ("rows", "columns"):  # computed at most once
            if name in self.__dict__:
                changed.__dict__[name] = self.__dict__[name]
        return changed


@dataclass(frozen=True, eq=False)
class CandidateAssignment:
    """A soft partial assignment of candidates; to its readers an `Assignment` with B = 1."""

    candidates: Candidates
    potentials: Potentials
    row_errors: tuple[tuple[float, ...], ...] = ()

    @property
    def iterations(self) -> int:
        """Sinkhorn iterations run."""
        return int(self.potentials.iterations)

    @property
    def converged(self) -> bool:
        """False: the iteration limit ended it."""
        return bool(self.potentials.converged)

    @property
    def log_unmatched0(self) -> Tensor:
        """(1, N) log probability that point i of image 0 has no partner."""
        return self.candidates.unmatched(self.potentials)[0][None]

    @property
    def log_unmatched1(self) -> Tensor:
        """(1, M)."""
        return self.candidates.unmatched(self.potentials)[1][None]

    @cached_property
    def log_scores(self) -> Tensor:
        """(1, N, M) log probability that i and j are the same point, −∞ but for candidates."""
        found, (u, v) = self.candidates, (self.potentials.u[0], self.potentials.v[0])
        out = found.scores.new_full((1, len(found.bins0), len(found.bins1)), -torch.inf)
        out[0, found.rows, found.columns] = found.scores + u[found.rows] + v[found.columns]
        return out

    @cached_property
    def mutual_best(self) -> MutualBest:
        """The best partner of every row."""
        return self.candidates.mutual_best(self.potentials)


def candidates_of(
    left: Tensor, right: Tensor, bins0: Tensor, bins1: Tensor, corner: float, most: int = MOST
) -> Candidates:
    """The candidates of scores left rightᵀ with dustbins; needs `have_candidates`.

    Args:
        left, right: (N, D), (M, D), neither empty.
        bins0, bins1: (N,), (M,) finite scores of the dustbins.
        corner: that of the dustbins with each other.
        most: candidates of a row, and of a column.
    """
    where, odds, left_out, weights = find_candidates(left, right, bins0, bins1, most)
    shares = [x.clamp_min(_TINY_CANDIDATES).log() for x in left_out]
    total = float(left_out[0].sum() + left_out[1].sum()) / 2
    half = math.log(max(total, _TINY_CANDIDATES)) / 2
    rests = shares[0] + bins0 - half, shares[1] + bins1 - half
    made = Candidates(where, odds, bins0, bins1, corner, rests)
    scores = odds + bins0[made.rows] + bins1[made.columns]
    return replace(made.moved(scores, (bins0, bins1), rests), weights=weights)


# --- consensus: Consensus: where the matches around a point predict its partner.

NEIGHBOURS = 16
SCALES = (0.2, 0.08, 0.03, 0.015)  # of residuals, one per pass, in units of normalised positions
LEAST_CONFIDENCE = 0.05
_RIDGE = 1e-3
_TINY_CONSENSUS = 1e-6
_UNUSABLE = 1e6  # squared distance of a match that must not count for a point
_BLOCK = 2**16  # scores that are corrected at once, a few matrices of them in a core's cache


class LocalFit(NamedTuple):
    """What the neighbours of every point predict."""

    position: Tensor  # (B, N, 2) of the partner
    support: Tensor  # (B, N) sum of the weights of the matches that agree
    spread: Tensor  # (B, N) their weighted root mean square residual


class PartnerPrior(NamedTuple):
    """Where the points of one image expect their partners, and how much that counts."""

    position: Tensor  # (B, N, 2) predicted
    gain: Tensor  # (B, N) for candidates there
    penalty: Tensor  # (B, N) for those far from it
    tolerance: Tensor  # (B, N) squared distance that halves the gain
    dustbin: Tensor  # (B, N) added to the dustbin's score


class SoftMatches(NamedTuple):
    """Present mutual matches, from one side."""

    partner: Tensor  # (B, N) int64, meaningless without confidence
    confidence: Tensor  # (B, N) probability, 0 for points without a mutual partner


def mutual_soft_matches(log_scores: Tensor) -> tuple[SoftMatches, SoftMatches]:
    """Log probabilities (B, N, M) → mutual best partners, as either side sees them; no gradients."""
    return soft_matches(mutual_best(log_scores.detach()), log_scores.shape[2])


def soft_matches(found: MutualBest, columns: int) -> tuple[SoftMatches, SoftMatches]:
    """Best partners of every row → mutual ones, as either side sees them; the other one has `columns`."""
    best, partner, mutual = found
    confidence = (best.exp() * mutual).clamp(max=1.0)
    confidence = confidence.masked_fill(confidence < LEAST_CONFIDENCE, 0.0)
    here = torch.arange(best.shape[1], device=best.device).expand_as(partner)
    # Rows without a match write into a column beyond the last, which is cut off.
    column = torch.where(confidence > 0, partner, columns)
    back = partner.new_zeros(len(best), columns + 1).scatter(1, column, here)
    reverse = confidence.new_zeros(back.shape).scatter(1, column, confidence)
    return SoftMatches(partner, confidence), SoftMatches(back[:, :-1], reverse[:, :-1])


def agreement(before: SoftMatches, after: SoftMatches) -> float:
    """The least of `agreements`."""
    return float(agreements(before, after).min())


def agreements(before: SoftMatches, after: SoftMatches) -> Tensor:
    """(B,) share of the matches, by confidence, that two rounds have in common, from either image."""
    least = torch.minimum(before.confidence, after.confidence) * (before.partner == after.partner)
    common = least.sum(1)
    either = before.confidence.sum(1) + after.confidence.sum(1) - common
    return (common / either.clamp_min(_TINY_CONSENSUS)).masked_fill(either == 0, 1.0)


def fit_local_maps(positions: Tensor, targets: Tensor, confidence: Tensor) -> LocalFit:
    """Affine maps fitted around every point to the matches nearest to it, its own left out.

    Args:
        positions: (B, N, 2) of the points.
        targets: (B, N, 2) of their present partners.
        confidence: (B, N) of those matches, 0 for points without one.
    """
    if (found := fit_compiled(positions, targets, confidence, try_local_maps)) is not None:
        return LocalFit(*found)
    return _fit_by_operators(positions, targets, confidence)


def try_local_maps() -> Trial:
    """Those of 512 points of two images, half of them matched."""
    rng = torch.Generator().manual_seed(0)
    places = torch.rand(2, 512, 2, generator=rng)
    targets = places * 0.9 + 0.01 * torch.rand(2, 512, 2, generator=rng)
    confidence = torch.rand(2, 512, generator=rng) * (torch.arange(512) % 2)

    def kernel() -> Tensor | None:
        found = fit_compiled(places, targets, confidence, try_local_maps)
        return None if found is None else found[0]

    return Trial(kernel, lambda: _fit_by_operators(places, targets, confidence).position, 5e-3)


def _fit_by_operators(positions: Tensor, targets: Tensor, confidence: Tensor) -> LocalFit:
    chosen = confidence.topk(_most_matches(confidence), dim=1)
    # As planes: position, target and confidence of every match (B, 5, K), then of every point's neighbours.
    matches = torch.cat([positions, targets, confidence.unsqueeze(2)], dim=2).transpose(1, 2)
    matches = matches.gather(2, chosen.indices.unsqueeze(1).expand(-1, 5, -1))
    wanted = min(NEIGHBOURS, chosen.indices.shape[1])
    distances, nearest = _squared_distances(positions, matches, chosen.indices).topk(
        wanted, 2, largest=False, sorted=False
    )
    neighbours = matches.gather(2, nearest.flatten(1).unsqueeze(1).expand(-1, 5, -1))
    neighbours = neighbours.view(len(positions), 5, *nearest.shape[1:])
    # The ranking's products may round; the distances themselves are exact.
    steps = neighbours[:, :2] - positions.transpose(1, 2).unsqueeze(3)
    usable = distances < _UNUSABLE / 2
    square = (steps[:, 0].square() + steps[:, 1].square()) * usable
    reach = square.amax(2, keepdim=True).sqrt_().clamp_min_(0.02) / 1.5
    base = torch.exp(square / (-2 * reach * reach)) * neighbours[:, 4] * usable
    return _fit(torch.cat([steps / reach.unsqueeze(1), neighbours[:, 2:4]], dim=1), base)


def _most_matches(confidence: Tensor) -> int:
    """Columns that hold every match of (B, N); all on a GPU, where the program would wait for the number."""
    if confidence.device.type != "cpu":
        return confidence.shape[1]
    return max(1, int((confidence > 0).sum(1).max()))


def _squared_distances(positions: Tensor, matches: Tensor, owners: Tensor) -> Tensor:
    """(B, N, K) from positions (B, N, 2) to matches (B, 5, K), large where one is the point's own or invalid.

    One product: |p|² + |m|² − 2 p·m. `owners` (B, K) are the points that the matches belong to.
    """
    ones = torch.ones_like(positions[..., :1])
    left = torch.cat([-2 * positions, positions.square().sum(2, keepdim=True), ones], dim=2)
    lengths = matches[:, :2].square().sum(1, keepdim=True) + _UNUSABLE * (matches[:, 4:] == 0)
    distances = left @ torch.cat([matches[:, :2], torch.ones_like(lengths), lengths], dim=1)
    return distances.scatter_(1, owners.unsqueeze(1), _UNUSABLE)


def _fit(points: Tensor, base: Tensor) -> LocalFit:
    """y ≈ A x + b, robustly; what it predicts at x = 0. Planes x, y (B, 4, N, K), base weights (B, N, K)."""
    # Coordinates as separate planes: the maps are too small for matrix products to pay.
    weight = base
    for scale in SCALES:
        share = (weight / (weight.sum(2, keepdim=True) + _TINY_CONSENSUS)).unsqueeze(1)
        means = (share * points).sum(3, keepdim=True)
        offsets = points - means
        from0, from1 = (((share * offsets[:, k : k + 1]) * offsets).sum(3) for k in (0, 1))
        xx0, xx1, xy = from0[:, :1] + _RIDGE, from1[:, 1:2] + _RIDGE, from0[:, 1:2]
        along0, along1, determinant = from0[:, 2:], from1[:, 2:], xx0 * xx1 - xy * xy
        slope0 = ((along0 * xx1 - along1 * xy) / determinant).unsqueeze(3)
        slope1 = ((along1 * xx0 - along0 * xy) / determinant).unsqueeze(3)
        rest = offsets[:, 2:] - slope0 * offsets[:, :1] - slope1 * offsets[:, 1:2]
        square = rest.square().sum(1)
        weight = base / (1 + square / scale**2) ** 2
    position = means[:, 2:] - slope0 * means[:, :1] - slope1 * means[:, 1:2]
    support = weight.sum(2)
    return LocalFit(
        position.squeeze(3).transpose(1, 2),
        support,
        ((weight * square).sum(2) / (support + _TINY_CONSENSUS)).sqrt(),
    )


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x (B, N, C) at rows index (B, K)."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def _stacked(side0: Tensor, side1: Tensor) -> Tensor:
    """(B, N, …), (B, M, …) → (2B, max(N, M), …), zeros where a side has fewer points."""
    most = max(side0.shape[1], side1.shape[1])
    out = side0.new_zeros(2 * len(side0), most, *side0.shape[2:])
    out[: len(side0), : side0.shape[1]] = side0
    out[len(side0) :, : side1.shape[1]] = side1
    return out


class Consensus(nn.Module):
    """Scores corrected by what neighbouring matches predict; their weight is learned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, width)
        self.out = nn.Linear(width, 4)
        nn.init.zeros_(self.out.weight)
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([3.0, 0.5, 0.0, 0.0]))

    def forward(
        self, scores: Tensor, positions0: Tensor, positions1: Tensor, matches: tuple[SoftMatches, SoftMatches]
    ) -> Tensor:
        """Scores with dustbins (B, N+1, M+1), corrected.

        Args:
            scores: (B, N+1, M+1) as the head gives them.
            positions0, positions1: (B, N, 2), (B, M, 2) normalised positions.
            matches: the matches that they led to so far.
        """
        with torch.autocast(scores.device.type, enabled=False):
            side0, side1 = self._sides(positions0, positions1, *matches)
            if torch.is_grad_enabled() and (side0.gain.requires_grad or scores.requires_grad):
                gains = _gains(side0, positions1) + _gains(side1, positions0).transpose(1, 2)
                rows = torch.cat([gains, side0.dustbin.unsqueeze(2)], dim=2)
                return scores + torch.cat([rows, F.pad(side1.dustbin, (0, 1)).unsqueeze(1)], dim=1)
            return _corrected(scores, side0, side1, positions0, positions1)

    def on_candidates(
        self,
        candidates: Candidates,
        positions0: Tensor,
        positions1: Tensor,
        matches: tuple[SoftMatches, SoftMatches],
    ) -> Candidates:
        """Candidates with their scores as the head gives them, corrected; arguments as of a call (B = 1)."""
        side0, side1 = self._sides(positions0, positions1, *matches)
        scores = supported_candidates(
            candidates.where,
            candidates.scores,
            (_packed(side0), _packed(side1)),
            (positions0[0], positions1[0]),
        )
        sides, rests = (side0, side1), candidates.rests
        bins = tuple(
            b + side.dustbin[0] for b, side in zip((candidates.bins0, candidates.bins1), sides, strict=True)
        )
        # What is no candidate counts as far from where it is expected.
        rests = tuple(x - side.penalty[0] for x, side in zip(rests, sides, strict=True))
        return candidates.moved(scores, bins, rests)

    def _sides(
        self, positions0: Tensor, positions1: Tensor, matches0: SoftMatches, matches1: SoftMatches
    ) -> Iterator[PartnerPrior]:
        """The priors of both sides, computed in one batch: most of the time goes into calls."""
        targets = _stacked(_rows(positions1, matches0.partner), _rows(positions0, matches1.partner))
        confidence = _stacked(matches0.confidence, matches1.confidence)
        fit = fit_local_maps(_stacked(positions0, positions1), targets, confidence)
        residual = (targets - fit.position).norm(dim=2)
        both = PartnerPrior(fit.position, *self._priors(fit, residual, confidence))
        halves = zip(*(x.chunk(2) for x in both), strict=True)
        for half, count in zip(halves, (positions0.shape[1], positions1.shape[1]), strict=True):
            yield PartnerPrior(*(x[:, :count] for x in half))

    def _priors(self, fit: LocalFit, residual: Tensor, confidence: Tensor) -> tuple[Tensor, ...]:
        """(B, N) each: gain near the prediction, penalty far from it, squared tolerance, dustbin."""
        own = torch.where(confidence > 0, (residual + 1e-3).log() + 4, 0.0)
        seen = torch.stack(
            [(fit.support + 1).log(), ((fit.spread + 1e-3).log() + 4) / 2, own / 2, confidence], dim=2
        )
        prior = self.out(F.gelu(self.hidden(seen)))
        gate = fit.support / (fit.support + 1)
        gain, penalty = (F.softplus(prior[..., k]) * gate for k in (0, 1))
        tolerance = (0.012 * prior[..., 2].clamp(-2, 2).exp()) ** 2 + fit.spread**2
        return gain, penalty, tolerance, prior[..., 3]


def _packed(side: PartnerPrior) -> Tensor:
    """(N, 5) of one pair, as `supported_candidates` takes them."""
    columns = [side.tolerance.reciprocal(), side.gain + side.penalty, side.penalty]
    return torch.cat([side.position, torch.stack(columns, dim=2)], dim=2)[0]


def _gains(side: PartnerPrior, others: Tensor) -> Tensor:
    """(B, N, M) added to the scores by one side: a gain near the predictions, a penalty elsewhere."""
    left, right = _distance_factors(side, others)
    near = (left @ right).to(others.dtype).clamp_min(1.0).reciprocal()
    return (side.gain + side.penalty).unsqueeze(2) * near - side.penalty.unsqueeze(2)


def _corrected(
    scores: Tensor, side0: PartnerPrior, side1: PartnerPrior, positions0: Tensor, positions1: Tensor
) -> Tensor:
    """Scores with dustbins (B, N+1, M+1) with what both sides add (`_gains`), some rows at a time."""
    out, points = torch.empty_like(scores), scores.shape[1] - 1
    torch.add(scores[:, :-1, -1], side0.dustbin, out=out[:, :-1, -1])
    torch.add(scores[:, -1, :-1], side1.dustbin, out=out[:, -1, :-1])
    out[:, -1, -1] = scores[:, -1, -1]
    left0, right0 = _distance_factors(side0, positions1)
    left1, right1 = (x.transpose(1, 2) for x in _distance_factors(side1, positions0))
    height0, height1 = (side0.gain + side0.penalty).unsqueeze(2), (side1.gain + side1.penalty).unsqueeze(1)
    for part in row_blocks(points, scores.shape[2], scores.device, _BLOCK):
        # Division and addition apart: they take a fifth of the time of one operation with four operands.
        block = height0[:, part] / (left0[:, part] @ right0).to(scores.dtype).clamp_min_(1.0)
        block += height1 / (right1[:, part] @ left1).to(scores.dtype).clamp_min_(1.0)
        block -= side0.penalty[:, part, None]
        block -= side1.penalty.unsqueeze(1)
        torch.add(scores[:, part, :-1], block, out=out[:, part, :-1])
    return out


def _distance_factors(side: PartnerPrior, others: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N, 4), (B, 4, M) whose product is 1 + |position − other|² / tolerance.

    In float64 where the device has it: a tolerance may be 10⁻⁶ of the squared coordinates, which cancel, and
    in float32 so much would be lost that gains are wrong by up to a hundredth.
    """
    exact = widest_float(others.device)
    a, b = side.position.to(exact), others.to(exact)
    inverse = side.tolerance.to(exact).reciprocal().unsqueeze(2)
    left = torch.cat([-2 * a * inverse, inverse, (a * a).sum(2, keepdim=True) * inverse + 1], dim=2)
    right = torch.cat([b, (b * b).sum(2, keepdim=True), torch.ones_like(b[..., :1])], dim=2)
    return left, right.transpose(1, 2)


# --- assigning: From the states of two images to their assignment, with rounds of consensus where the
# network has them.

SETTLED = 0.85  # share of the matches that a round of consensus left unchanged, which makes it the last
ROUGH_ITERATIONS = 7  # of Sinkhorn between rounds of consensus


def assign_all(
    network: nn.Module, side0: Side, side1: Side, depth: int, *, record_errors: bool = False
) -> Assignment:
    """The assignment of one pair (B = 1) after layer `depth`, of all its scores."""
    scores = network.scores(side0, side1, depth)
    scores, start = _with_consensus(network, scores, side0.positions, side1.positions)
    return assigned(scores, network.config.assignment, start, record_errors=record_errors)


def _with_consensus(
    network: nn.Module, scores: Tensor, positions0: Tensor, positions1: Tensor
) -> tuple[Tensor, Potentials | None]:
    """Scores after the rounds of consensus, and potentials to begin with.

    Each assignment goes on from the one before, so between the rounds a few iterations are enough. With early
    exit the rounds end when the last one has changed little.
    """
    corrected, found, before, empty = scores, None, None, 1 in scores.shape[1:]
    for _ in range(0 if empty else network.config.assignment.consensus):
        found = sinkhorn(corrected, max_iterations=ROUGH_ITERATIONS, start=found)
        matches = mutual_soft_matches(plan(corrected, found).log_scores)
        if _settled(network, before, matches[0]):
            break
        corrected, before = network.consensus(scores, positions0, positions1, matches), matches[0]
    return corrected, found


def assign_candidates(network: nn.Module, side0: Side, side1: Side, depth: int) -> CandidateAssignment | None:
    """As `assign_all`, by candidates; None for other kinds of assignment and where no kernel is there."""
    config = network.config.assignment
    if 0 in (side0.x.shape[1], side1.x.shape[1]) or not (_by_transport(config) and have_candidates(side0.x)):
        return None
    first = _candidates(network, side0, side1, depth)
    candidates, found, before = first, None, None
    for _ in range(config.consensus):
        found = candidates.sinkhorn(ROUGH_ITERATIONS, config.tolerance, found)
        matches = soft_matches(candidates.mutual_best(found), side1.x.shape[1])
        if _settled(network, before, matches[0]):
            break
        candidates = network.consensus.on_candidates(first, side0.positions, side1.positions, matches)
        before = matches[0]
    found = candidates.sinkhorn(config.max_iterations, config.tolerance, found)
    return CandidateAssignment(candidates, found)


def _by_transport(config: AssignmentConfig) -> bool:
    return (
        config.kind == "sinkhorn"
        and config.dustbin != "none"
        and config.tolerance is not None
        and not config.drop_unmatched
    )


def _candidates(network: nn.Module, side0: Side, side1: Side, depth: int) -> Candidates:
    head = network.heads[depth if network.config.assignment.every_layer else 0]
    left, right = head.compared(side0.x, side1.x)
    if network.guidance is not None:
        more = network.guidance.factors(side0, side1, depth)
        left, right = (torch.cat(pair, dim=-1) for pair in zip((left, right), more, strict=True))
    bins0, bins1, corner = head.dustbins(side0.x, side1.x)
    return candidates_of(left[0], right[0], bins0[0], bins1[0], float(corner))


def _settled(network: nn.Module, before: SoftMatches | None, after: SoftMatches) -> bool:
    if before is None or not network.config.policy.early_exit:
        return False
    return agreement(before, after) > SETTLED
