"""Rectified pairs: where the right image shows the left one's points, and how far away they are."""

from __future__ import annotations

import numpy as np

from matcher.config import RefineConfig
from matcher.refine import ImagePyramid, fit_affine_maps, refine_matches
from matcher.sequence.frames import FrameLinks
from matcher.sequence.linking import nearest
from matcher.types import REFINEMENTS, Matches

MIN_LINKS = 6  # from which other points are predicted
NEIGHBOURS = 8  # links that the surface around a point is fitted to
# Points of the learned front end often lie on contours, where windows show two surfaces: this is strict.
LEAST_CORRELATION = (0.9, 0.95)  # of a point that was linked, and of one that was not
_CONFIG = RefineConfig(window=11, max_shift=4.0)


def partners(points0: np.ndarray, points1: np.ndarray, links: FrameLinks) -> np.ndarray:
    """(N, 2) float32 pixels in the right image of the left one's points, by consistent links; else NaN."""
    found = np.full((len(points0), 2), np.nan, np.float32)
    found[links.inliers[:, 0]] = points1[links.inliers[:, 1]]
    return found


def within(points0: np.ndarray, right: np.ndarray, window: float) -> np.ndarray:
    """The same, NaN also where rows differ by more than `window` pixels, and behind the cameras."""
    step = points0 - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= window) & (step[:, 0] > 0)
    return np.where(good[:, None], right, np.float32(np.nan))


def depths_of(points0: np.ndarray, right: np.ndarray, focal: float, baseline: float) -> np.ndarray:
    """(N,) depth along z of the left image's points, in units of the baseline; NaN where unknown.

    z = f·b / (x_left − x_right). Only points have one whose rows agree within 2 pixels, and whose disparity
    is half a pixel at least; below it a depth says little more than "far". Points are pixels (N, 2) of images
    with one focal length (pixels) and one principal point.
    """
    step = points0.astype(np.float64) - right
    with np.errstate(invalid="ignore"):
        good = (np.abs(step[:, 1]) <= 2.0) & (step[:, 0] >= 0.5)
    return np.where(good, focal * baseline / np.where(good, step[:, 0], 1.0), np.nan)


def complete_partners(
    images: tuple[ImagePyramid, ImagePyramid], points: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The points in the right image, located exactly where they were linked and searched for where not.

    A link whose windows do not correlate is left out; where a window has no texture it stays as it was.
    Nothing is assumed of rows but that those of neighbouring points differ equally.

    Args:
        images: left and right.
        points: (N, 2) pixels in the left image.
        right: (N, 2) float32 pixels in the right one, NaN where there is no link.

    Returns:
        (N, 2) float32, `right` itself where fewer than `MIN_LINKS` are linked; and (N,) standard deviations
        of x in pixels, NaN where windows could not be compared.
    """
    linked = np.isfinite(right[:, 0])
    deviations = np.full(len(points), np.nan)
    if np.count_nonzero(linked) < MIN_LINKS:
        return right, deviations
    known, there = points[linked].astype(np.float64), right[linked].astype(np.float64)
    # A link whose row differs from its neighbours' would be compared with another place.
    around = nearest(known, known, min(MIN_LINKS + 1, len(known)))
    there[:, 1] = known[:, 1] + np.median((there - known)[around, 1], axis=1)
    first, status = _located(images, known, there, fit_affine_maps(known, there, NEIGHBOURS)[0])
    good = (status == 0) & (first.refinement.correlations >= LEAST_CORRELATION[0])
    found = right.copy()
    deviations[linked] = np.where(good, np.sqrt(first.refinement.covariances[:, 0, 0]), np.nan)
    found[linked] = np.where((good | (status == REFINEMENTS.index("flat")))[:, None], first.points1, np.nan)
    if np.count_nonzero(good) < MIN_LINKS or linked.all():
        return found, deviations
    known, there = known[good], first.points1[good].astype(np.float64)
    maps, _ = fit_affine_maps(known, there, NEIGHBOURS)
    asked = points[~linked].astype(np.float64)
    rows = nearest(known, asked, MIN_LINKS)
    predicted = np.median(
        there[rows] + np.einsum("nkij,nkj->nki", maps[rows], asked[:, None] - known[rows]), axis=1
    )
    own = maps[rows[:, 0]]
    second, status = _located(images, asked, predicted, own)
    back, returned = _located(images[::-1], second.points1, asked, np.linalg.inv(own))
    good = (status == 0) & (returned == 0) & (second.refinement.correlations >= LEAST_CORRELATION[1])
    good &= np.linalg.norm(back.points1 - asked, axis=1) <= 0.5
    found[~linked] = np.where(good[:, None], second.points1, np.nan)
    deviations[~linked] = np.sqrt(second.refinement.covariances[:, 0, 0])
    return found, deviations


def _located(
    images: tuple[ImagePyramid, ImagePyramid], points0: np.ndarray, points1: np.ndarray, maps: np.ndarray
) -> tuple[Matches, np.ndarray]:
    """Matches refined on the images, and (K,) what became of each, an index into `REFINEMENTS`."""
    indices = np.tile(np.arange(len(points0))[:, None], 2)
    scores = np.ones(len(points0), np.float32)
    matches = Matches(indices, points0.astype(np.float32), points1.astype(np.float32), scores)
    refined = refine_matches(*images, matches, _CONFIG, (maps, np.ones(len(maps), bool)))
    return refined, refined.refinement.status
