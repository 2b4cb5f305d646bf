"""Consensus: where the matches around a point predict its partner.

Nearby points move together: to first order a surface seen twice is an affine map. Around every point such a
map is fitted robustly to the matches nearest to it, its own left out, and candidates near the predicted
position gain score while distant ones lose it; then the points are assigned again. After "moving least
squares" (Schaefer et al. 2006, section 2.1), with weights reestimated for Geman and McClure's loss under a
falling scale (Black and Rangarajan 1996); filters of the field reject matches by the same idea (AdaLAM,
Cavalli et al. 2020). `refine.fit_affine_maps` fits such maps to matches that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.kernels.calls import local_maps
from matcher.match.sinkhorn import mutual_best

NEIGHBOURS = 16  # matches that a map is fitted to; three determine one
# Residuals at which a match weighs a quarter, for each reweighting: from 100 to 8 pixels in images of 1024.
SCALES = (0.2, 0.08, 0.03, 0.015)
LEAST_PROBABILITY = 0.05  # of a match that counts
SETTLED = 0.85  # share of the matches that a round leaves unchanged, which makes it the last
ROUGH_ITERATIONS = 7  # of Sinkhorn between rounds; the next goes on where they end
_RIDGE, _TINY = 1e-3, 1e-6
_UNUSABLE = 1e6  # squared distance of a match that must not count for a point


class LocalFit(NamedTuple):
    """What the neighbours of every point predict."""

    position: Tensor  # (B, N, 2) of the partner
    support: Tensor  # (B, N, 1) sum of the weights of the matches that agree
    spread: Tensor  # (B, N, 1) their weighted root mean square residual


class SoftMatches(NamedTuple):
    """Present mutual matches as either image sees them: image 0 of all pairs, then image 1 of all.

    P is the larger number of points; there are none behind those of an image.
    """

    partner: Tensor  # (2B, P) int64, meaningless where the probability is 0
    probability: Tensor  # (2B, P) of these matches, 0 for points without a mutual partner


@torch.no_grad()
def soft_matches(log_scores: Tensor) -> SoftMatches:
    """Log probabilities (B, N, M) → mutual best partners, as either image sees them; no gradients."""
    best, partners, mutual, rows = mutual_best(log_scores)
    probability = F.threshold(best.exp() * mutual, LEAST_PROBABILITY, 0.0)
    back = F.pad(probability, (0, 1)).gather(1, rows)  # 0 where a column has none
    # OpenCV, which runs exported graphs, cannot limit integers.
    traced = torch.compiler.is_compiling()
    rows = rows * (back > 0) if traced else rows.clamp_max(log_scores.shape[1] - 1)
    partner = _stacked(partners, rows)
    return SoftMatches(partner, _stacked(probability, back))


def agreement(before: SoftMatches, after: SoftMatches) -> Tensor:
    """(B,) share of the matches, by probability, that two rounds have in common, of the image of less."""
    least = torch.minimum(before.probability, after.probability) * (before.partner == after.partner)
    common = least.sum(1)
    either = (before.probability + after.probability).sum(1) - common
    return ((common + _TINY) / (either + _TINY)).view(2, -1).amin(0)


def fit_local_maps(positions: Tensor, targets: Tensor, probability: Tensor) -> LocalFit:
    """Affine maps fitted around every point to the matches nearest to it, its own left out.

    Of positions (B, N, 2), `targets` (B, N, 2) of their present partners, and the `probability` (B, N) of
    those matches, 0 for points without one.
    """
    if (found := local_maps(positions, targets, probability)) is not None:
        return LocalFit(*found.split((2, 1, 1), dim=2))
    used = probability.shape[1]
    # Elsewhere the program would wait for the number.
    if probability.device.type == "cpu" and not torch.compiler.is_compiling():
        used = max(1, int((probability > 0).sum(1).max()))
        used = min(-(-used // 8) * 8, probability.shape[1])
    owners = probability.topk(used, dim=1).indices
    # As planes: position, target and probability of every match (B, 5, K), then of every point's neighbours.
    matches = torch.cat([positions, targets, probability.unsqueeze(2)], dim=2).mT
    matches = matches.gather(2, owners.unsqueeze(1).expand(-1, 5, -1))
    distances = _squared_distances(positions, matches, owners)
    distances, nearest = _smallest(distances, min(NEIGHBOURS, used))
    neighbours = matches.gather(2, nearest.mT.flatten(1).unsqueeze(1).expand(-1, 5, -1))
    neighbours = neighbours.view(len(positions), 5, *nearest.mT.shape[1:])
    usable = distances.mT < _UNUSABLE / 2
    # The ranking's products may round; the distances themselves are exact.
    steps = neighbours[:, :2] - positions.mT.unsqueeze(2)
    square = steps.square().sum(1) * usable
    # A Gaussian with the farthest neighbour, or 10 pixels of 1024, at 1.5 deviations.
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
    support = weight.sum(1).unsqueeze(2)
    spread = ((weight * square).sum(1).unsqueeze(2) / (support + _TINY)).sqrt()
    origin0, origin1, offset = centre.split((1, 1, 2), dim=1)
    position = (predicted + offset).addcmul_(slope0, origin0, value=-1).addcmul_(slope1, origin1, value=-1)
    return LocalFit(position.squeeze(2).mT, support, spread)


def _stacked(side0: Tensor, side1: Tensor) -> Tensor:
    """(B, N, …), (B, M, …) → (2B, max(N, M), …), zeros where a side has fewer points."""
    most, traced = max(side0.shape[1], side1.shape[1]), torch.compiler.is_compiling()

    def filled(side: Tensor) -> Tensor:
        missing = most - side.shape[1]
        return F.pad(side, (0, 0) * (side.dim() - 2) + (0, missing)) if traced or missing else side

    return torch.cat([filled(side0), filled(side1)])


def _unstacked(both: Tensor, n: int, m: int, *columns: int) -> tuple[tuple[Tensor, ...], ...]:
    """(2B, P, C) → (B, n, …) of image 0 and (B, …, m) of image 1, taken apart into groups of columns."""
    side0, side1 = both.chunk(2)
    return side0[:, :n].split(columns, dim=2), side1[:, :m].mT.contiguous().split(columns, dim=1)


class Consensus(nn.Module):
    """Scores corrected by what neighbouring matches predict; their weight is learned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, width)
        self.out = nn.Linear(width, 4)
        nn.init.zeros_(self.out.weight)
        with torch.no_grad():
            self.out.bias.copy_(torch.tensor([3.0, 0.5, 0.0, 0.0]))  # untrained: gain near, penalty far

    def forward(self, scores: Tensor, positions: Tensor, matches: SoftMatches) -> Tensor:
        """Scores with dustbins (B, N+1, M+1) of the head, corrected by the matches that they led to so far.

        Positions (B, N+M, 2) are normalised.
        """
        sizes = scores.shape[1] - 1, scores.shape[2] - 1
        with torch.autocast(scores.device.type, enabled=False):
            factors, weights = self._corrections(_stacked(*positions.split(sizes, dim=1)), matches)
            (left0, right0), (left1, right1) = _unstacked(factors, *sizes, 4, 4)
            (gain0, penalty0, bin0), (gain1, penalty1, bin1) = _unstacked(weights, *sizes, 1, 1, 1)
            corrected = scores.clone()  # a gain near the predictions, a penalty elsewhere
            similarity = corrected[:, :-1, :-1].sub_(penalty0).sub_(penalty1)
            for block, gain, left, right in _row_blocks(similarity, gain0, left0, right0):
                block.addcdiv_(gain, (left @ right1).to(scores.dtype).clamp_min_(1.0))
                block.addcdiv_(gain1, (right @ left1).to(scores.dtype).clamp_min_(1.0))
            corrected[:, :-1, -1:].add_(bin0)
            corrected[:, -1:, :-1].add_(bin1)
            return corrected

    def _corrections(self, positions: Tensor, matches: SoftMatches) -> tuple[Tensor, Tensor]:
        """`_distance_factors`, and (2B, P, 3) the gain near the predicted position over places far from it,
        the penalty there, and what is added to the dustbin's score.

        Of positions (2B, P, 2); both images in one batch, as most of the time goes into calls.
        """
        partner, probability = matches.partner.unsqueeze(2), matches.probability.unsqueeze(2)
        targets = positions.roll(len(positions) // 2, 0).gather(1, partner.expand(-1, -1, 2))
        position, support, spread = fit_local_maps(positions, targets, matches.probability)
        residual = (targets - position).norm(dim=2, keepdim=True)
        residual = torch.where(probability > 0, residual, math.exp(-4) - 1e-3)  # makes `errors` 0 below
        errors = (torch.cat([spread, residual], dim=2) + 1e-3).log() / 2 + 2
        hidden = F.gelu(self.hidden(torch.cat([support.log1p(), errors, probability], dim=2)))
        pulls, reach, dustbin = self.out(hidden).split((2, 1, 1), dim=2)
        near, far = (F.softplus(pulls) * (support / (support + 1))).split(1, dim=2)
        reach = reach.clamp(-2, 2).exp()
        tolerance = torch.addcmul(spread.square(), reach, reach, value=0.012**2)  # 6 pixels of 1024
        weights = torch.cat([near + far, far, dustbin], dim=2)
        return _distance_factors(position, positions, tolerance), weights


def _distance_factors(predicted: Tensor, positions: Tensor, tolerance: Tensor) -> Tensor:
    """(…, 8): products of the first four columns with the last four of the other image are
    1 + |predicted − position|² / tolerance, the squared distance at which the gain is half.

    In float64 where the device has it: a tolerance may be 10⁻⁶ of the squared coordinates, which cancel, and
    in float32 so much would be lost that gains are wrong by up to a hundredth.
    """
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    ends = torch.cat([predicted, positions, tolerance], dim=2).to(exact)
    there, here, tolerance = ends.split((2, 2, 1), dim=2)
    one, (length, other) = torch.ones_like(tolerance), (e.square().sum(2, True) for e in (there, here))
    left = torch.cat([-2 * there, one, length + tolerance], dim=2) / tolerance
    return torch.cat([left, here, other, one], dim=2)


def _row_blocks(similarity: Tensor, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows whose distances stay in a processor's caches; all at once on a GPU."""
    whole = similarity.device.type != "cpu" or torch.compiler.is_compiling()
    count = 1 if whole else similarity[0].numel() >> 19
    blocks = ([x] if count <= 1 else x.chunk(count, dim=1) for x in (similarity, *more))
    return zip(*blocks, strict=True)
