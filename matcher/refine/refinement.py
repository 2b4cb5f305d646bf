"""The stage between matching and verification: every match refined on the images themselves."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from matcher.config import RefineConfig
from matcher.data.image import Image
from matcher.data.matches import REFINEMENTS, Matches, MatchRefinement
from matcher.refine.least_squares import Fit, Fitting, Windows
from matcher.refine.local_maps import fit_affine_maps
from matcher.refine.windows import Grid, Pyramid, middle_frames, zoom_of

T = TypeVar("T")
DEVIATION = 1.0  # of a match before it is refined, along an axis, in pixels of the resized images
_BLOCK = 256  # matches that are worked on together: their windows fit a core's cache
_AT_REST = 0.25  # a longer last step, in pixels of the frame, means that no minimum was found
_LEAST_CONTRAST = 1.0  # grey values of 255; what is flatter is compression and noise
_LEAST_SEEN = 0.5  # share of a window that must be on both images
_MOST_HALVINGS = 4
_FIRST_STEPS, _STEPS = 3, 3  # of Gauss and Newton, before weights are set and after each time


class ImagePyramid(NamedTuple):
    """An image as refinement reads it: at the file's resolution where that is at hand."""

    pyramid: Pyramid
    linear: np.ndarray  # (2, 2) pixels of the pyramid from stored pixels
    offset: np.ndarray  # (2,)
    zoom: float  # pixels of the pyramid for one of the resized image, in which keypoints were found

    @staticmethod
    def of(image: Image) -> ImagePyramid:
        """That of an image: `Image.stored` if it was kept, else the resized pixels."""
        if image.stored is not None:
            zoom = 1 / float(np.sqrt(image.scale[0] * image.scale[1]))
            pyramid = Pyramid(image.stored, image.stored_mask)
            return ImagePyramid(pyramid, np.eye(2), np.zeros(2), zoom)
        linear = np.linalg.inv(image.axes_to_stored)
        return ImagePyramid(
            Pyramid(image.grey(), image.mask), linear, -linear @ image.to_stored(np.zeros(2)), 1.0
        )

    def own(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → float64 pixels of the pyramid."""
        return points.astype(np.float64) @ self.linear.T + self.offset


def refine_matches(
    image0: ImagePyramid,
    image1: ImagePyramid,
    matches: Matches,
    config: RefineConfig,
    maps: tuple[np.ndarray, np.ndarray] | None = None,
) -> Matches:
    """The matches with the points of image 1 where least-squares matching finds those of image 0.

    Each match is moved where the windows around it, under the affine map that the matches around it suggest,
    look most alike (Gruen 1985); see `matcher.refine.least_squares`. Points of image 0 stay. A match that
    is not accepted keeps its place, whatever the reason: so matches between different sensors, which are
    right but do not look alike, are as they were.

    Args:
        image0, image1: of the images.
        matches: of any origin.
        config: window, and what is accepted.
        maps: (K, 2, 2) affine maps of the surroundings, image 1 from image 0, and (K,) whether each is known;
            without them they are fitted to the matches.

    Returns:
        The same matches with `refinement`: its covariances are pixels² of the stored image 1.
    """
    if not len(matches):
        none = np.zeros(0, np.float32)
        nothing = MatchRefinement(none.astype(np.uint8), np.zeros((0, 2, 2), np.float32), none)
        return replace(matches, refinement=nothing)
    points0, points1 = image0.own(matches.points0), image1.own(matches.points1)
    usable = np.isfinite(points0).all(axis=1) & np.isfinite(points1).all(axis=1)
    points0[~usable], points1[~usable] = 0.0, 0.0
    maps, fitted = _maps(points0, points1, usable, config) if maps is None else maps
    frames = middle_frames(maps)
    deviation = _deviation(image0, image1, *frames)
    places = (points0, points1)
    blocks = [slice(i, i + _BLOCK) for i in range(0, len(matches), _BLOCK)]

    def fit(block: slice) -> tuple[Fit, np.ndarray]:
        sides = [_affine(points[block], frame[block]) for points, frame in zip(places, frames, strict=True)]
        return _fit(image0.pyramid, image1.pyramid, *sides, deviation[block], config)

    fits, statuses = zip(*_each(fit, blocks), strict=True)
    found, status = Fit(*map(np.concatenate, zip(*fits, strict=True))), np.concatenate(statuses)
    status[~fitted] = REFINEMENTS.index("no_map")
    status[~usable] = REFINEMENTS.index("outside")
    return _moved(matches, found, status, np.linalg.inv(image1.linear) @ frames[1], deviation)


def _each(work: Callable[[slice], T], blocks: list[slice]) -> Iterator[T]:
    """The blocks on as many threads as torch may use; NumPy and OpenCV let go of the interpreter."""
    threads = min(torch.get_num_threads(), len(blocks), os.cpu_count() or 1)
    if threads < 2:
        return map(work, blocks)
    with ThreadPoolExecutor(threads) as pool:
        return iter(list(pool.map(work, blocks)))


def _affine(points: np.ndarray, maps: np.ndarray) -> np.ndarray:
    return np.concatenate([points[:, :, None], maps], axis=2)


def _maps(
    points0: np.ndarray, points1: np.ndarray, usable: np.ndarray, config: RefineConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Affine maps (K, 2, 2) around the matches and whether each is known."""
    maps, fitted = np.tile(np.eye(2), (len(points0), 1, 1)), np.zeros(len(points0), dtype=bool)
    maps[usable], fitted[usable] = fit_affine_maps(points0[usable], points1[usable], config.neighbours)
    return maps, fitted


def _deviation(
    image0: ImagePyramid, image1: ImagePyramid, frame0: np.ndarray, frame1: np.ndarray
) -> np.ndarray:
    """(K,) deviation of the matches along an axis, in steps of the frame: both keypoints are inexact."""
    sides = ((image0, frame0), (image1, frame1))
    return DEVIATION * np.sqrt(sum((image.zoom / zoom_of(frame)) ** 2 for image, frame in sides) / 2)


def _fit(
    pyramid0: Pyramid,
    pyramid1: Pyramid,
    affine0: np.ndarray,
    affine1: np.ndarray,
    deviation: np.ndarray,
    config: RefineConfig,
) -> tuple[Fit, np.ndarray]:
    """From the resolution in which the keypoints were found to that of the images, by halves; (K,) statuses.

    What one level finds, the next one expects. A match that a level refuses stays with the one before.
    """
    grid, expected, spread = Grid.of(config.window), np.zeros((len(affine0), 6)), deviation
    halvings = min(int(np.rint(np.log2(np.median(deviation).clip(1)))), _MOST_HALVINGS)
    best, status = None, None
    for level in range(halvings, -1, -1):
        step = 2.0**level
        wide, unit = np.array([1, step, step]), np.array([step, step, 1, 1, 1, 1])
        windows = Windows(pyramid0, pyramid1, affine0 * wide, affine1 * wide, spread / step)
        fitting = Fitting(windows, grid, expected / unit)
        fitting.iterate(_FIRST_STEPS)
        for _ in range(config.reweighings):
            fitting.reweigh()
            fitting.iterate(_STEPS)
        found = fitting.finish()
        found = found._replace(change=found.change * unit, covariance=found.covariance * step**2)
        now = _judge(found, deviation, config)
        if best is not None:
            kept = np.flatnonzero((now > 0) & (status == 0))
            now[kept] = 0
            for ours, theirs in zip(found, best, strict=True):
                ours[kept] = theirs[kept]
        best, status = found, now
        expected = np.where(status[:, None] == 0, best.change, 0)
        known = np.sqrt(np.linalg.eigvalsh(best.covariance)[:, 1]).clip(step / 2, deviation)
        spread = np.where(status == 0, known, deviation)
    return best, status


def _judge(found: Fit, deviation: np.ndarray, config: RefineConfig) -> np.ndarray:
    """(K,) uint8 codes of `REFINEMENTS`; the first reason that applies."""
    shift = np.hypot(found.change[:, 0], found.change[:, 1])
    refusals = [
        ("outside", found.seen < _LEAST_SEEN),
        ("flat", ~(found.contrast >= _LEAST_CONTRAST)),
        ("moved_far", ~(shift <= config.max_shift * deviation)),
        ("low_correlation", ~(found.correlation >= config.min_correlation)),
        ("not_converged", ~(found.last_step <= _AT_REST)),
    ]
    status = np.full(len(shift), REFINEMENTS.index("refined"), dtype=np.uint8)
    for name, refused in reversed(refusals):
        status[refused] = REFINEMENTS.index(name)
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
