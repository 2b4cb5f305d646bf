"""Consensus: where the matches around a point say that its partner should be.

Nearby points move alike: to first order a surface seen twice is an affine map. Around every point such a map
is fitted robustly to the matches nearest to it, its own left out, and candidates near the predicted place
gain score while distant ones lose it; then the points are assigned again. After "moving least squares"
(Schaefer et al. 2006, section 2.1), with weights reestimated for Geman and McClure's loss under a falling
scale (Black and Rangarajan 1996); filters of the field reject matches by the same idea (AdaLAM, Cavalli et
al. 2020).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from matcher.network.assignment import row_blocks

NEIGHBOURS = 16
SCALES = (0.2, 0.08, 0.03, 0.015)  # of residuals, one a pass, in units of normalised positions
LEAST_CONFIDENCE = 0.05
_RIDGE = 1e-3
_TINY = 1e-6


class LocalFit(NamedTuple):
    """What the neighbours of every point predict."""

    place: Tensor  # (B, N, 2) of the partner
    support: Tensor  # (B, N) sum of the weights of the matches that agree
    spread: Tensor  # (B, N) their weighted root mean square residual


class Opinion(NamedTuple):
    """What the points of one side think of where their partners are."""

    place: Tensor  # (B, N, 2) predicted
    gain: Tensor  # (B, N) for candidates there
    loss: Tensor  # (B, N) for those far from it
    tolerance: Tensor  # (B, N) squared distance that halves the gain
    bins: Tensor  # (B, N) added to the dustbin's score


class Links(NamedTuple):
    """Present mutual matches, from one side."""

    partner: Tensor  # (B, N) int64, meaningless without confidence
    confidence: Tensor  # (B, N) probability, 0 for points without a mutual partner


def mutual_links(log_scores: Tensor) -> tuple[Links, Links]:
    """Log probabilities (B, N, M) → mutual best partners, as either side sees them."""
    best, partner = log_scores.max(dim=2)
    mutual = best >= log_scores.amax(dim=1).gather(1, partner)
    confidence = (best.exp() * mutual).clamp(max=1.0)
    confidence = confidence.masked_fill(confidence < LEAST_CONFIDENCE, 0.0)
    chosen = confidence > 0
    here = torch.arange(best.shape[1], device=best.device).expand_as(partner)
    # Rows without a match write into a column beyond the last, which is cut off.
    column = torch.where(chosen, partner, log_scores.shape[2])
    back = partner.new_zeros(len(best), log_scores.shape[2] + 1).scatter(1, column, here)
    heard = confidence.new_zeros(back.shape).scatter(1, column, confidence)
    return Links(partner, confidence), Links(back[:, :-1], heard[:, :-1])


def fit_local_maps(places: Tensor, targets: Tensor, confidence: Tensor) -> LocalFit:
    """Affine maps fitted around every point to the matches nearest to it, its own left out.

    Args:
        places: (B, N, 2) of the points.
        targets: (B, N, 2) of their present partners.
        confidence: (B, N) of those matches, 0 for points without one.
    """
    chosen = confidence.topk(max(1, int((confidence > 0).sum(1).max())), dim=1)
    sources, ends = (_rows(x, chosen.indices) for x in (places, targets))
    distance = torch.cdist(places, sources, compute_mode="donot_use_mm_for_euclid_dist")
    here = torch.arange(places.shape[1], device=places.device)[None, :, None]
    unusable = (chosen.indices.unsqueeze(1) == here) | (chosen.values == 0).unsqueeze(1)
    near = distance.masked_fill(unusable, torch.inf).topk(
        min(NEIGHBOURS, distance.shape[2]), dim=2, largest=False, sorted=False
    )
    usable = near.values.isfinite()
    reach = near.values.masked_fill(~usable, 0.0).amax(2, keepdim=True).clamp_min(0.02) / 1.5
    base = torch.exp(-0.5 * (near.values / reach) ** 2)
    base = base * chosen.values.unsqueeze(1).expand_as(distance).gather(2, near.indices) * usable
    rows = near.indices.flatten(1)
    x = (_rows(sources, rows).view(*near.indices.shape, 2) - places.unsqueeze(2)) / reach.unsqueeze(3)
    return _fit(x, _rows(ends, rows).view(*near.indices.shape, 2), base)


def _fit(x: Tensor, y: Tensor, base: Tensor) -> LocalFit:
    """y ≈ A x + b, robustly; what it predicts at x = 0. x, y (B, N, K, 2), base weights (B, N, K)."""
    # Coordinates as separate planes: the maps are too small for matrix products to pay.
    x0, x1 = (x[..., axis].contiguous() for axis in (0, 1))
    y0, y1 = (y[..., axis].contiguous() for axis in (0, 1))
    weight = base
    for scale in SCALES:
        share = weight / (weight.sum(2, keepdim=True) + _TINY)
        means = [(share * z).sum(2, keepdim=True) for z in (x0, x1, y0, y1)]
        dx0, dx1, dy0, dy1 = (z - mean for z, mean in zip((x0, x1, y0, y1), means, strict=True))
        sx0, sx1 = share * dx0, share * dx1
        xx0, xx1 = ((s * d).sum(2, keepdim=True) + _RIDGE for s, d in ((sx0, dx0), (sx1, dx1)))
        xy = (sx0 * dx1).sum(2, keepdim=True)
        determinant = xx0 * xx1 - xy * xy
        slopes = []
        for dy in (dy0, dy1):
            along0, along1 = (sx0 * dy).sum(2, keepdim=True), (sx1 * dy).sum(2, keepdim=True)
            slopes.append(
                ((along0 * xx1 - along1 * xy) / determinant, (along1 * xx0 - along0 * xy) / determinant)
            )
        rest0, rest1 = (dy - a * dx0 - b * dx1 for dy, (a, b) in zip((dy0, dy1), slopes, strict=True))
        square = rest0 * rest0 + rest1 * rest1
        weight = base / (1 + square / scale**2) ** 2
    place = torch.cat(
        [means[2 + axis] - a * means[0] - b * means[1] for axis, (a, b) in enumerate(slopes)], dim=2
    )
    support = weight.sum(2)
    return LocalFit(place, support, ((weight * square).sum(2) / (support + _TINY)).sqrt())


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x (B, N, C) at rows index (B, K)."""
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


class Consensus(nn.Module):
    """Scores corrected by what neighbouring matches predict; how far they count is learned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.widen = nn.Linear(4, width)
        self.judge = nn.Linear(width, 4)
        nn.init.zeros_(self.judge.weight)
        with torch.no_grad():
            self.judge.bias.copy_(torch.tensor([3.0, 0.5, 0.0, 0.0]))

    def forward(self, scores: Tensor, places0: Tensor, places1: Tensor, log_scores: Tensor) -> Tensor:
        """Scores with dustbins (B, N+1, M+1), corrected.

        Args:
            scores: (B, N+1, M+1) as the head gives them.
            places0, places1: (B, N, 2), (B, M, 2) normalised positions.
            log_scores: (B, N, M) the assignment that they led to so far; no gradient flows through it.
        """
        with torch.autocast(scores.device.type, enabled=False):
            log_scores = log_scores.detach()
            links0, links1 = mutual_links(log_scores)
            side0, side1 = self._side(places0, places1, links0), self._side(places1, places0, links1)
            if torch.is_grad_enabled() and (side0.gain.requires_grad or scores.requires_grad):
                factors = _distance_factors(side0, places1), _distance_factors(side1, places0)
                gains = _gains(side0, side1, *factors, slice(None))
                rows = torch.cat([gains, side0.bins.unsqueeze(2)], dim=2)
                return scores + torch.cat([rows, F.pad(side1.bins, (0, 1)).unsqueeze(1)], dim=1)
            return _corrected(scores, side0, side1, places0, places1)

    def _side(self, places: Tensor, others: Tensor, links: Links) -> Opinion:
        """What the points of one side think."""
        targets = _rows(others, links.partner)
        fit = fit_local_maps(places, targets, links.confidence)
        residual = (targets - fit.place).norm(dim=2)
        return Opinion(fit.place, *self._opinions(fit, residual, links.confidence))

    def _opinions(self, fit: LocalFit, residual: Tensor, confidence: Tensor) -> tuple[Tensor, ...]:
        """(B, N) each: gain at the predicted place, loss far from it, squared tolerance, dustbin's change."""
        own = torch.where(confidence > 0, (residual + 1e-3).log() + 4, 0.0)
        seen = torch.stack(
            [(fit.support + 1).log(), ((fit.spread + 1e-3).log() + 4) / 2, own / 2, confidence], dim=2
        )
        opinion = self.judge(F.gelu(self.widen(seen)))
        gate = fit.support / (fit.support + 1)
        gain, loss = (F.softplus(opinion[..., k]) * gate for k in (0, 1))
        tolerance = (0.012 * opinion[..., 2].clamp(-2, 2).exp()) ** 2 + fit.spread**2
        return gain, loss, tolerance, opinion[..., 3]


def _corrected(scores: Tensor, side0: Opinion, side1: Opinion, places0: Tensor, places1: Tensor) -> Tensor:
    """Scores with dustbins (B, N+1, M+1) with what both sides add, some rows at a time."""
    out, points = scores.clone(), scores.shape[1] - 1
    factors = _distance_factors(side0, places1), _distance_factors(side1, places0)
    out[:, :-1, -1] += side0.bins
    out[:, -1, :-1] += side1.bins
    for part in row_blocks(points, scores.shape[2], scores.device):
        rows = slice(part.start, min(part.stop, points))
        out[:, rows, :-1] += _gains(side0, side1, *factors, rows)
    return out


def _gains(
    side0: Opinion,
    side1: Opinion,
    mine: tuple[Tensor, Tensor],
    yours: tuple[Tensor, Tensor],
    rows: slice,
) -> Tensor:
    """(B, R, M) what both sides add to some rows of the scores, from their `_distance_factors`."""
    near0 = (mine[0][:, rows] @ mine[1].transpose(1, 2)).clamp_min(1.0).reciprocal()
    near1 = (yours[1][:, rows] @ yours[0].transpose(1, 2)).clamp_min(1.0).reciprocal()
    gain0, loss0 = side0.gain[:, rows, None], side0.loss[:, rows, None]
    gain1, loss1 = side1.gain.unsqueeze(1), side1.loss.unsqueeze(1)
    return torch.addcmul(-loss0, near0, gain0 + loss0) + torch.addcmul(-loss1, near1, gain1 + loss1)


def _distance_factors(side: Opinion, others: Tensor) -> tuple[Tensor, Tensor]:
    """(B, N, 4), (B, M, 4) whose products are 1 + |place − other|² / tolerance."""
    a, b, inverse = side.place, others, side.tolerance.reciprocal().unsqueeze(2)
    rows = torch.cat([-2 * a * inverse, inverse, (a * a).sum(2, keepdim=True) * inverse + 1], dim=2)
    return rows, torch.cat([b, (b * b).sum(2, keepdim=True), torch.ones_like(b[..., :1])], dim=2)
