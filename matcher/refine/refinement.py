"""The stage between matching and verification: subpixel refinement of every match on the images."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from matcher.config import RefineConfig
from matcher.data.image import Image
from matcher.data.matches import REFINEMENTS, Matches, MatchRefinement
from matcher.refine.fitting import fit_windows
from matcher.refine.least_squares import Fit, Windows
from matcher.refine.local_maps import fit_affine_maps
from matcher.refine.windows import Grid, Pyramid, middle_frames, zoom_of

DEVIATION = 1.0  # prior standard deviation of a match along an axis, in pixels of the resized images
MAX_LAST_STEP = 0.25  # pixels of the frame; after a longer last step a match has not converged
MIN_CONTRAST = 1.0  # grey values of 255; below it there is only compression and noise
MIN_VISIBLE = 0.5  # share of a window that must be inside both images
MAX_HALVINGS = 4


class ImagePyramid(NamedTuple):
    """The pyramid of an image, at the file's resolution where that is available."""

    pyramid: Pyramid
    linear: np.ndarray  # (2, 2) pixels of the pyramid from stored pixels
    offset: np.ndarray  # (2,)
    zoom: float  # pixels of the pyramid per pixel of the resized image, in which keypoints were found

    @staticmethod
    def of(image: Image) -> ImagePyramid:
        """The pyramid of `Image.stored` if it was kept, else of the resized pixels."""
        if image.stored is not None:
            zoom = 1 / float(np.sqrt(image.scale[0] * image.scale[1]))
            pyramid = Pyramid(image.stored, image.stored_mask)
            return ImagePyramid(pyramid, np.eye(2), np.zeros(2), zoom)
        linear = np.linalg.inv(image.axes_to_stored)
        return ImagePyramid(
            Pyramid(image.grey(), image.mask), linear, -linear @ image.to_stored(np.zeros(2)), 1.0
        )

    def release(self) -> None:
        """Free memory that can be computed again."""
        self.pyramid.release()

    def from_stored(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → float64 pixels of the pyramid."""
        return points.astype(np.float64) @ self.linear.T + self.offset


def refine_matches(
    image0: ImagePyramid,
    image1: ImagePyramid,
    matches: Matches,
    config: RefineConfig,
    maps: tuple[np.ndarray, np.ndarray] | None = None,
) -> Matches:
    """The matches with their points of image 1 refined by least-squares matching against image 0.

    The windows around a match, related at first by the affine map fitted to its neighbours, are aligned by
    least squares (Gruen 1985); see `matcher.refine.least_squares`. Points of image 0 stay. A match that is
    not accepted, for whatever reason, keeps its position: correct matches between different sensors, whose
    windows do not correlate, are unchanged.

    Args:
        image0, image1: the pyramids of both images.
        matches: from any matcher.
        config: window size and acceptance thresholds.
        maps: (K, 2, 2) local affine maps, image 1 from image 0, and (K,) whether each is known; None fits
            them to the matches.

    Returns:
        The same matches with `refinement`: its covariances are pixels² of the stored image 1.
    """
    if not len(matches):
        none = np.zeros(0, np.float32)
        nothing = MatchRefinement(none.astype(np.uint8), np.zeros((0, 2, 2), np.float32), none)
        return replace(matches, refinement=nothing)
    points0, points1 = image0.from_stored(matches.points0), image1.from_stored(matches.points1)
    usable = np.isfinite(points0).all(axis=1) & np.isfinite(points1).all(axis=1)
    points0[~usable], points1[~usable] = 0.0, 0.0
    maps, known = _maps(points0, points1, usable, config) if maps is None else maps
    frames = middle_frames(maps)
    deviation = _deviation(image0, image1, *frames)
    sides = (_affine(*side) for side in zip((points0, points1), frames, strict=True))
    found, status = _coarse_to_fine(image0.pyramid, image1.pyramid, *sides, deviation, config)
    status[~known] = REFINEMENTS.index("no_map")
    status[~usable] = REFINEMENTS.index("outside")
    return _moved(matches, found, status, np.linalg.inv(image1.linear) @ frames[1], deviation)


def _affine(points: np.ndarray, maps: np.ndarray) -> np.ndarray:
    return np.concatenate([points[:, :, None], maps], axis=2)


def _maps(
    points0: np.ndarray, points1: np.ndarray, usable: np.ndarray, config: RefineConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Local affine maps (K, 2, 2) at the matches and whether each is known."""
    maps, known = np.tile(np.eye(2), (len(points0), 1, 1)), np.zeros(len(points0), dtype=bool)
    maps[usable], known[usable] = fit_affine_maps(points0[usable], points1[usable], config.neighbours)
    return maps, known


def _deviation(
    image0: ImagePyramid, image1: ImagePyramid, frame0: np.ndarray, frame1: np.ndarray
) -> np.ndarray:
    """(K,) prior standard deviation along an axis, in frame pixels; both keypoints are uncertain."""
    sides = ((image0, frame0), (image1, frame1))
    return DEVIATION * np.sqrt(sum((image.zoom / zoom_of(frame)) ** 2 for image, frame in sides) / 2)


def _coarse_to_fine(
    pyramid0: Pyramid,
    pyramid1: Pyramid,
    affine0: np.ndarray,
    affine1: np.ndarray,
    deviation: np.ndarray,
    config: RefineConfig,
) -> tuple[Fit, np.ndarray]:
    """Coarse to fine, from the resolution at which keypoints were found to the images' own; (K,) statuses.

    The estimate of one level is the prior of the next. A match that a level rejects keeps that of the level
    before.
    """
    grid, prior, spread = Grid.of(config.window), np.zeros((len(affine0), 6)), deviation
    halvings = min(int(np.rint(np.log2(np.median(deviation).clip(1)))), MAX_HALVINGS)
    best, status = None, None
    for level in range(halvings, -1, -1):
        step = 2.0**level
        wide, unit = np.array([1, step, step]), np.array([step, step, 1, 1, 1, 1])
        windows = Windows(pyramid0, pyramid1, affine0 * wide, affine1 * wide, spread / step)
        found = fit_windows(windows, grid, prior / unit, config.reweighings)
        found = found._replace(change=found.change * unit, covariance=found.covariance * step**2)
        now = _statuses(found, deviation, config)
        if best is not None:
            kept = np.flatnonzero((now > 0) & (status == 0))
            now[kept] = 0
            for ours, theirs in zip(found, best, strict=True):
                ours[kept] = theirs[kept]
        best, status = found, now
        prior = np.where(status[:, None] == 0, best.change, 0)
        known = np.sqrt(np.linalg.eigvalsh(best.covariance)[:, 1].clip(0)).clip(step / 2, deviation)
        spread = np.where(status == 0, known, deviation)
    return best, status


def _statuses(found: Fit, deviation: np.ndarray, config: RefineConfig) -> np.ndarray:
    """(K,) uint8 codes of `REFINEMENTS`; the first reason for rejection that applies."""
    shift = np.hypot(found.change[:, 0], found.change[:, 1])
    rejections = [
        ("outside", found.visible < MIN_VISIBLE),
        ("flat", ~(found.contrast >= MIN_CONTRAST)),
        ("moved_far", ~(shift <= config.max_shift * deviation)),
        ("low_correlation", ~(found.correlation >= config.min_correlation)),
        ("not_converged", ~(found.last_step <= MAX_LAST_STEP)),
    ]
    status = np.full(len(shift), REFINEMENTS.index("refined"), dtype=np.uint8)
    for name, rejected in reversed(rejections):
        status[rejected] = REFINEMENTS.index(name)
    return status


def _moved(
    matches: Matches, found: Fit, status: np.ndarray, to_stored: np.ndarray, deviation: np.ndarray
) -> Matches:
    accepted = status == REFINEMENTS.index("refined")
    shift = (to_stored @ found.change[:, :2, None])[:, :, 0]
    spread = np.where(accepted[:, None, None], found.covariance, (deviation**2)[:, None, None] * np.eye(2))
    points1 = matches.points1.astype(np.float32)
    points1[accepted] = (matches.points1[accepted] + shift[accepted]).astype(np.float32)
    covariances = (to_stored @ spread @ to_stored.transpose(0, 2, 1)).astype(np.float32)
    correlations = np.nan_to_num(found.correlation).astype(np.float32)
    return replace(matches, points1=points1, refinement=MatchRefinement(status, covariances, correlations))
