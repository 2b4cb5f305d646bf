"""Inliers that mostly lie on one plane, and what lies off it: that alone fixes an epipolar geometry.

A homography allows two poses (Malis and Vargas 2007) and a family of fundamental matrices (Chum, Werner and
Matas, Two-view geometry estimation unaffected by a dominant plane, CVPR 2005). A match off the plane by a
distance d agrees with a wrong one of them by chance, the more easily the smaller d is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import log

import cv2
import numpy as np

from matcher.geometry import warp_points
from matcher.verify.adjustment import MatchedPoints, Spread, cross, lifted, sampson
from matcher.verify.homography import facing, transfer_error
from matcher.verify.verdict import epipolar_residuals, half_normal

LEAST_SHARE = 0.5  # of the inliers, on the plane; half of them off it fix any geometry
ENOUGH = 6.0  # logarithm of how much likelier one pose must be than its twin
OWN = 1.4  # the same of the likeliest by all matches, right of 17 of 21 planes with nothing off them
_SURE = 4.0  # standard deviations that a match must lie off the plane
_SAMPLES = 256  # inliers among which a plane is looked for
# Of matches off the plane that may be right, of which the likeliest counts.
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
_PAIRS = 24  # matches off the plane, any two of which give an epipole


def dominant_plane(matched: MatchedPoints, inliers: np.ndarray, threshold: float) -> np.ndarray | None:
    """The homography (3, 3) that most of the inliers (N,) agree with up to a threshold, if there is one."""
    sides = [points[inliers] for points in matched.sides]
    few = [points[:: -(-len(points) // _SAMPLES)] for points in sides]
    # Where half of the matches lie on it, 150 samples of four miss it once in 16,000 times.
    homography, _ = cv2.findHomography(*few, cv2.RANSAC, threshold, maxIters=150, confidence=0.9999)
    for _ in range(2):
        if homography is None or not np.isfinite(homography).all():
            return None
        near = transfer_error(*sides, facing(homography, sides[0])) <= threshold
        if np.mean(near) < LEAST_SHARE:
            return None
        homography, _ = cv2.findHomography(sides[0][near], sides[1][near], 0)
    return None if homography is None else facing(homography, sides[0])


@dataclass(frozen=True, eq=False)
class Parallax:
    """How far the matches lie from a plane, and how exact they are."""

    distance: np.ndarray  # (N,) from the place by the homography, pixels; infinite behind its horizon
    noise: float  # 90th percentile of Sampson's distances of the inliers, pixels
    off: np.ndarray  # (N,) bool: matches off the plane

    @staticmethod
    def of(homography: np.ndarray, matched: MatchedPoints, spread: Spread, residuals: np.ndarray) -> Parallax:
        """That of matches of a pair from a homography (3, 3).

        Noise of deviation s per coordinate gives distances from it a 90th percentile of 3 s, and Sampson's
        one (`residuals`) of 1.6 s. What lies beyond that may have slid along an edge, as far as its
        covariance allows.
        """
        distance = transfer_error(*matched.sides, homography)
        noise = max(float(np.percentile(residuals, 90)), 0.03)
        dx, dy = (warp_points(matched.points0, homography) - matched.points1).T
        xx, yy = spread.xx + spread.first, spread.yy + spread.first
        squared = (yy * dx**2 - 2 * spread.xy * dx * dy + xx * dy**2) / (xx * yy - spread.xy**2)
        near = squared[distance <= 3 * noise]
        usual = np.median(near) / 1.39 if len(near) else 0.0  # the median of χ² of two degrees of freedom
        far = squared > _SURE**2 * max(_least_spread(matched) ** 2, float(usual))
        return Parallax(distance, noise, np.isfinite(distance) & (distance > 3 * noise) & far)


def _least_spread(matched: MatchedPoints) -> float:
    """How much less than their standard deviations, of covariances or guessed, matches may spread."""
    return 0.5 if matched.covariances is None else 1.0


def parallax_evidence(
    fundamental: np.ndarray,
    matched: MatchedPoints,
    spread: Spread,
    parallax: Parallax,
    inliers: np.ndarray,
    possible: np.ndarray,
) -> float:
    """Logarithm of how much likelier the matches off a plane are with an epipolar geometry than by chance.

    As `epipolar_likelihood`; the residuals of the inliers say how much wider than known matches spread.
    """
    off = parallax.off
    residual, deviation = epipolar_residuals(fundamental, matched, spread)
    wider = max(_least_spread(matched), float(np.median(residual[inliers] / deviation[inliers])) / 0.6745)
    density = half_normal(residual[off], wider * deviation[off]) * possible[off]
    # Where nearly all matches lie on the plane, one off it is wrong more often than it seems alone.
    gains = matched.probable[off] * (density * parallax.distance[off].clip(None, 100.0) - 1)
    return max(float(matched.weights[off] @ np.log1p(share * gains)) for share in _SHARES)


def fixed_by_parallax(fundamental: np.ndarray, matched: MatchedPoints, parallax: Parallax) -> bool:
    """Whether more matches off a plane agree with a fundamental matrix than with the best of a family.

    That has an epipole, which two matches fix; each other one agrees with it by chance if it lies off the
    plane in the direction of the epipolar line.
    """
    off, reach = parallax.off, 1.5 * parallax.noise
    agree = int(np.count_nonzero(sampson(*matched.sides, fundamental)[off] <= reach)) - 2
    # Sampson's distance is √2 times shorter than that from a line.
    chance = 2 / np.pi * np.arcsin(np.minimum(1.0, np.sqrt(2) * reach / parallax.distance[off]))
    expected = float(np.sum(chance))
    if agree <= expected:
        return False
    pairs = log(len(chance) * (len(chance) - 1) / 2)
    # Chernoff's bound of a Poisson distribution
    return pairs + agree - expected - agree * log(agree / max(expected, 1e-9)) < 0


def completed(homography: np.ndarray, matched: MatchedPoints, parallax: Parallax) -> np.ndarray | None:
    """The fundamental matrix (3, 3) of a plane and the epipole that most matches off it agree with."""
    off = np.flatnonzero(parallax.off)
    if len(off) < 3:
        return None
    chosen = off[np.argsort(-matched.probable[off], kind="stable")[:_PAIRS]]
    x0, x1 = (lifted(points[chosen]) for points in matched.sides)
    lines = np.cross(x0 @ homography.T, x1)
    lines /= np.linalg.norm(lines, axis=1, keepdims=True)
    sides, best, most = [points[off] for points in matched.sides], None, 0
    for i, j in combinations(range(len(chosen)), 2):
        epipole = np.cross(lines[i], lines[j])
        if (length := np.linalg.norm(epipole)) < 1e-9:
            continue
        fundamental = cross(epipole / length) @ homography
        count = int(np.count_nonzero(sampson(*sides, fundamental) <= 1.5 * parallax.noise))
        if count > most:
            best, most = fundamental, count
    return best
