"""Consensus: where the matches around a point predict its partner.

Nearby points move together: to first order a surface seen twice is an affine map. Around every point such a
map is fitted robustly to the matches nearest to it, its own left out, and candidates near the predicted
position gain score while distant ones lose it; then the points are assigned again. After "moving least
squares" (Schaefer et al. 2006, section 2.1), with weights reestimated for Geman and McClure's loss under a
falling scale (Black and Rangarajan 1996); filters of the field reject matches by the same idea (AdaLAM,
Cavalli et al. 2020).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.kernels.calls import local_maps
from matcher.match.sinkhorn import MutualBest, mutual_best

NEIGHBOURS = 16
SCALES = (0.2, 0.08, 0.03, 0.015)  # of residuals, one per pass, in units of normalised positions
LEAST_CONFIDENCE = 0.05  # of a match that counts
SETTLED = 0.85  # share of the matches that a round leaves unchanged, which makes it the last
ROUGH_ITERATIONS = 7  # of Sinkhorn between rounds
_RIDGE, _TINY = 1e-3, 1e-6
_UNUSABLE = 1e6  # squared distance of a match that must not count for a point


class LocalFit(NamedTuple):
    """What the neighbours of every point predict."""

    position: Tensor  # (B, N, 2) of the partner
    support: Tensor  # (B, N) sum of the weights of the matches that agree
    spread: Tensor  # (B, N) their weighted root mean square residual


class SoftMatches(NamedTuple):
    """Present mutual matches, from one side."""

    partner: Tensor  # (B, N) int64, meaningless without confidence
    confidence: Tensor  # (B, N) probability, 0 for points without a mutual partner


class PartnerPrior(NamedTuple):
    """Where points expect their partners, and how much that counts; both images of a pair in one batch."""

    position: Tensor  # (2B, N, 2) predicted
    gain: Tensor  # (2B, N) for candidates there, over those far from it
    penalty: Tensor  # (2B, N) for those far from it
    tolerance: Tensor  # (2B, N) squared distance that halves the gain
    dustbin: Tensor  # (2B, N) added to the dustbin's score


def soft_matches(log_scores: Tensor) -> tuple[SoftMatches, SoftMatches]:
    """Log probabilities (B, N, M) → mutual best partners, as either side sees them; no gradients."""
    found: MutualBest = mutual_best(log_scores.detach())
    columns = log_scores.shape[2]
    confidence = (found.scores.exp() * found.mutual).clamp(max=1.0)
    confidence = F.threshold(confidence, LEAST_CONFIDENCE, 0.0)
    here = torch.arange(confidence.shape[1], device=confidence.device).expand_as(found.partners)
    # Rows without a match write into a column beyond the last, which is cut off.
    column = torch.where(confidence > 0, found.partners, columns)
    back = found.partners.new_zeros(len(column), columns + 1).scatter_(1, column, here)
    reverse = confidence.new_zeros(back.shape).scatter_(1, column, confidence)
    return SoftMatches(found.partners, confidence), SoftMatches(back[:, :-1], reverse[:, :-1])


def agreement(before: SoftMatches, after: SoftMatches) -> Tensor:
    """(B,) share of the matches, by confidence, that two rounds have in common, from either image."""
    least = torch.minimum(before.confidence, after.confidence) * (before.partner == after.partner)
    common = least.sum(1)
    either = before.confidence.sum(1) + after.confidence.sum(1) - common
    return torch.where(either > 0, common / either.clamp_min(_TINY), 1.0)


def fit_local_maps(positions: Tensor, targets: Tensor, confidence: Tensor) -> LocalFit:
    """Affine maps fitted around every point to the matches nearest to it, its own left out.

    Of positions (B, N, 2), `targets` (B, N, 2) of their present partners, and the `confidence` (B, N) of
    those matches, 0 for points without one.
    """
    if (found := local_maps(positions, targets, confidence)) is not None:
        return LocalFit(found[..., :2], *found[..., 2:].unbind(2))
    used = confidence.shape[1]
    # Elsewhere the program would wait for the number.
    if confidence.device.type == "cpu" and not torch.compiler.is_compiling():
        used = max(1, int((confidence > 0).sum(1).max()))
        used = min(-(-used // 8) * 8, confidence.shape[1])
    owners = confidence.topk(used, dim=1).indices
    # As planes: position, target and confidence of every match (B, 5, K), then of every point's neighbours.
    matches = torch.cat([positions, targets, confidence.unsqueeze(2)], dim=2).mT
    matches = matches.gather(2, owners.unsqueeze(1).expand(-1, 5, -1))
    distances = _squared_distances(positions, matches, owners)
    distances, nearest = _smallest(distances, min(NEIGHBOURS, used))
    neighbours = matches.gather(2, nearest.mT.flatten(1).unsqueeze(1).expand(-1, 5, -1))
    neighbours = neighbours.view(len(positions), 5, *nearest.mT.shape[1:])
    usable = distances.mT < _UNUSABLE / 2
    # The ranking's products may round; the distances themselves are exact.
    steps = neighbours[:, :2] - positions.mT.unsqueeze(2)
    square = steps.square().sum(1) * usable
    reach = square.amax(1, keepdim=True).sqrt_().clamp_min_(0.02) / 1.5
    base = torch.exp(square / (-2 * reach * reach)) * neighbours[:, 4] * usable
    return _fit(torch.cat([steps / reach.unsqueeze(1), neighbours[:, 2:4]], dim=1), base)


def _smallest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The smallest of each row of (B, N, K), in any order, and their columns: (B, N, count) each.

    They lie in as many groups, those of the smallest minima: sought there, it takes a third of the time.
    """
    groups = values.shape[2] // 8
    plain = values.device.type != "cpu" or torch.compiler.is_compiling()
    if plain or values.shape[2] % 8 or groups <= count:
        return values.topk(count, 2, largest=False, sorted=False)
    best = values.unflatten(2, (8, groups)).amin(2).topk(count, 2, largest=False, sorted=False).indices
    columns = torch.cat([best + k * groups for k in range(8)], dim=2)
    found, places = values.gather(2, columns).topk(count, 2, largest=False, sorted=False)
    return found, columns.gather(2, places)


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
    """y ≈ A x + b, robustly; what it predicts at x = 0. Planes x, y (B, 4, K, N), base weights (B, K, N)."""
    # Sums of all products at once: the maps are too small for matrix products to pay.
    weight, total = base, base.sum(1, keepdim=True).unsqueeze(1) + _TINY
    centre = (base.unsqueeze(1) * points).sum(2, keepdim=True) / total  # about which the sums do not cancel
    points = points - centre
    x, y = points.split(2, dim=1)
    x0, x1 = x.split(1, dim=1)
    products = torch.cat([points, x * x, x0 * x1, x0 * y, x1 * y], dim=1)
    for scale in SCALES:
        weight = weight.unsqueeze(1)
        means = (weight * products).sum(2, keepdim=True) / (weight.sum(2, keepdim=True) + _TINY)
        mean, target, own, xy, along0, along1 = means.split((2, 2, 2, 1, 2, 2), dim=1)
        mean0, mean1 = mean.split(1, dim=1)
        xx0, xx1 = torch.addcmul(own + _RIDGE, mean, mean, value=-1).split(1, dim=1)
        xy = torch.addcmul(xy, mean0, mean1, value=-1)
        along0 = torch.addcmul(along0, mean0, target, value=-1)
        along1 = torch.addcmul(along1, mean1, target, value=-1)
        determinant = torch.addcmul(xx0 * xx1, xy, xy, value=-1)
        slope0 = torch.addcmul(along0 * xx1, along1, xy, value=-1) / determinant
        slope1 = torch.addcmul(along1 * xx0, along0, xy, value=-1) / determinant
        predicted = torch.addcmul(target, slope0, mean0, value=-1).addcmul_(slope1, mean1, value=-1)
        rest = (y - predicted).addcmul_(slope0, x0, value=-1).addcmul_(slope1, x1, value=-1)
        square = rest.square_().sum(1)
        weight = base / (square * scale**-2 + 1).square_()
    support = weight.sum(1)
    spread = ((weight * square).sum(1) / (support + _TINY)).sqrt()
    origin0, origin1, offset = centre.split((1, 1, 2), dim=1)
    position = (predicted + offset).addcmul_(slope0, origin0, value=-1).addcmul_(slope1, origin1, value=-1)
    return LocalFit(position.squeeze(2).mT, support, spread)


def _stacked(side0: Tensor, side1: Tensor) -> Tensor:
    """(B, N, …), (B, M, …) → (2B, max(N, M), …), zeros where a side has fewer points."""
    most = max(side0.shape[1], side1.shape[1])
    ends = [(0, 0) * (side0.dim() - 2) + (0, most - side.shape[1]) for side in (side0, side1)]
    return torch.cat([F.pad(side, end) for side, end in zip((side0, side1), ends, strict=True)])


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
        """Scores with dustbins (B, N+1, M+1) of the head, corrected by the matches that they led to so far.

        Positions are normalised, (B, N, 2) and (B, M, 2).
        """
        (batch, n), m = positions0.shape[:2], positions1.shape[1]
        with torch.autocast(scores.device.type, enabled=False):
            prior, positions = self._prior(positions0, positions1, *matches)
            left, right = _distance_factors(prior, positions)
            left0, right0 = (factor[:batch, :n] for factor in (left, right))
            left1, right1 = (factor[batch:, :m].mT for factor in (left, right))
            gain0, gain1 = prior.gain[:batch, :n].unsqueeze(2), prior.gain[batch:, :m].unsqueeze(1)
            corrected = scores.clone()  # a gain near the predictions, a penalty elsewhere
            similarity = corrected[:, :-1, :-1]
            similarity.sub_(prior.penalty[:batch, :n].unsqueeze(2))
            similarity.sub_(prior.penalty[batch:, :m].unsqueeze(1))
            for rows in _row_blocks(scores):
                block = similarity[:, rows]
                block.addcdiv_(gain0[:, rows], (left0[:, rows] @ right1).to(scores.dtype).clamp_min_(1.0))
                block.addcdiv_(gain1, (right0[:, rows] @ left1).to(scores.dtype).clamp_min_(1.0))
            corrected[:, :-1, -1].add_(prior.dustbin[:batch, :n])
            corrected[:, -1, :-1].add_(prior.dustbin[batch:, :m])
            return corrected

    def _prior(
        self, positions0: Tensor, positions1: Tensor, matches0: SoftMatches, matches1: SoftMatches
    ) -> tuple[PartnerPrior, Tensor]:
        """The prior of both images, and their positions, in one batch: most of the time goes into calls."""
        partners = ((positions1, matches0), (positions0, matches1))
        targets = _stacked(*(at.gather(1, m.partner.unsqueeze(2).expand(-1, -1, 2)) for at, m in partners))
        confidence = _stacked(matches0.confidence, matches1.confidence)
        positions = _stacked(positions0, positions1)
        fit = fit_local_maps(positions, targets, confidence)
        residual = (targets - fit.position).norm(dim=2)
        own = torch.where(confidence > 0, (residual + 1e-3).log() + 4, 0.0)
        seen = [(fit.support + 1).log(), ((fit.spread + 1e-3).log() + 4) / 2, own / 2, confidence]
        near, far, reach, dustbin = self.out(F.gelu(self.hidden(torch.stack(seen, dim=2)))).unbind(2)
        trust = fit.support / (fit.support + 1)
        gain, penalty = F.softplus(near) * trust, F.softplus(far) * trust
        tolerance = (0.012 * reach.clamp(-2, 2).exp()) ** 2 + fit.spread**2
        return PartnerPrior(fit.position, gain + penalty, penalty, tolerance, dustbin), positions


def _distance_factors(prior: PartnerPrior, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(2B, N, 4) twice: products of the first with the second of the other image are
    1 + |predicted − position|² / tolerance.

    In float64 where the device has it: a tolerance may be 10⁻⁶ of the squared coordinates, which cancel, and
    in float32 so much would be lost that gains are wrong by up to a hundredth.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    ends = torch.stack([prior.position, positions]).to(exact)
    tolerance = prior.tolerance.unsqueeze(2).to(exact)
    (length, other), one = ends.square().sum(3, keepdim=True).unbind(0), torch.ones_like(tolerance)
    left = torch.cat([-2 * ends[0], one, length + tolerance], dim=2) / tolerance
    return left, torch.cat([ends[1], other, one], dim=2)


def _row_blocks(scores: Tensor) -> list[slice]:
    """Rows whose distances stay in a processor's caches; all at once on a GPU."""
    rows, columns = scores.shape[1] - 1, scores.shape[2]
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return [slice(0, rows)]
    step = max(1, 2**19 // columns)
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
