"""Where the right image of a rectified pair shows the left one's points, by correlation along the row.

Detectors do not find every point in both images, and locate coarse ones some pixels off. The images hold
more: windows are compared along the row, to a fraction of a pixel, and what was found without a link is
checked from right to left (Fua 1993, section 2). ORB-SLAM2 places its stereo points so as well (Mur-Artal and
Tardós 2017, section III-A); here windows slant with the surface they show, without which near ground is lost.
"""

from __future__ import annotations

import cv2
import numpy as np

from matcher.data.geometry import resize_points
from matcher.data.image import Image
from matcher.sequence.guided import nearest
from matcher.sequence.surfaces import Surfaces, confirmed, fit, of_one_surface, predict
from matcher.sequence.windows import TEXTURE, WINDOW, correlate, cut, deviation, peaks

MIN_LINKS = 6  # located exactly, from which other points are predicted
_REACH = 4  # pixels that a link may be off, and that a point may be off what its neighbours predict
_LONGEST = 64  # pixels of a row that are searched at most
_BACK = 1.0  # pixels that the search back from the right may be off
_APART = 3  # pixels between the best position and its rival
# Points of the learned front end often lie on contours, where windows show two surfaces and correlate little;
# for them these are strict.
_MIN_LINK, _MIN_NEW = 0.8, 0.9  # least correlation of a link, and of a point that has none
_MIN_SEARCHED = 0.6  # least correlation while the slant is that of a neighbour
_CLEAR = 0.1  # by which a point without a link must be better than its rival


def complete_partners(images: tuple[Image, Image], points: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The points in the right image, located exactly where they were linked and searched for where not.

    A link whose windows do not correlate or that lies on a depth discontinuity is left out; where a window
    has no texture it stays as it was. Rows are those of the links: nothing is assumed of the images but that
    the rows of neighbouring points differ equally.

    Args:
        images: left and right, with their pixels. Images that lie on their side are left as they are.
        points: (N, 2) pixels in the left image.
        right: (N, 2) float32 pixels in the right one, NaN where there is no link.

    Returns:
        (N, 2) float32; `right` itself where fewer than `MIN_LINKS` are linked.
    """
    linked = np.isfinite(right[:, 0])
    if any(image.orientation != 1 for image in images) or np.count_nonzero(linked) < MIN_LINKS:
        return right
    grey = (_grey(images[0]), _grey(images[1]))
    there, back = images[1].scale, (1 / images[1].scale[0], 1 / images[1].scale[1])
    seen = resize_points(points.astype(np.float64), images[0].scale)
    found = resize_points(right.astype(np.float64), there)

    found[linked, 1] = seen[linked, 1] + _rises(seen[linked], found[linked, 1] - seen[linked, 1])
    surfaces, good, textured = _place(grey, seen[linked], found[linked])
    x = np.where(good, surfaces.x, np.where(textured, np.nan, found[linked, 0]))
    if np.count_nonzero(good) >= MIN_LINKS and not linked.all():
        known, exact = seen[linked][good], Surfaces(*(each[good] for each in surfaces))
        rise = (found[linked, 1] - seen[linked, 1])[good]
        found[~linked] = _search(grey, seen[~linked], known, exact, rise)
    found[linked, 0] = x
    found[np.isnan(found[:, 0])] = np.nan
    return resize_points(found, back).astype(np.float32)


def _rises(points: np.ndarray, rises: np.ndarray) -> np.ndarray:
    """(K,) rows that points (K, 2) are lower in the right image: the median of those around, itself included.

    Rows of a rectified pair differ little and alike; a link whose row differs from its neighbours' is inexact
    or wrong there, and would be compared along the wrong row.
    """
    rows = nearest(points, points, min(MIN_LINKS + 1, len(points)))
    return np.median(rises[rows], axis=1)


def _place(
    images: tuple[np.ndarray, np.ndarray], points: np.ndarray, positions: np.ndarray
) -> tuple[Surfaces, np.ndarray, np.ndarray]:
    """Surfaces of linked points (K, 2), whether each link holds (K,), and whether it has texture (K,)."""
    surfaces = fit(*images, points, positions)
    good = (surfaces.correlation >= _MIN_LINK) & (np.abs(surfaces.x - positions[:, 0]) <= _REACH)
    textured = deviation(cut(images[0], points)) >= TEXTURE
    good &= textured & of_one_surface(*images, points, positions[:, 1], surfaces)
    return surfaces, good & confirmed(points, surfaces, good), textured


def _search(
    images: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    known: np.ndarray,
    surfaces: Surfaces,
    rise: np.ndarray,
) -> np.ndarray:
    """(N, 2) positions in the right image of left points (N, 2), NaN where none is certain.

    Each is searched where the surfaces around it predict it.

    Args:
        images: left and right.
        points: those without a link.
        known: (K, 2) left points whose surfaces are known.
        surfaces: of the known points.
        rise: (K,) rows that the known points are lower in the right image.
    """
    rows = nearest(known, points, MIN_LINKS)
    y = points[:, 1] + np.median(rise[rows], axis=1)
    predicted = predict(points, known, surfaces, rows)
    middle = np.median(predicted, axis=1)
    start = np.maximum(predicted.min(axis=1) - _REACH, middle - _LONGEST / 2)
    stop = np.minimum(predicted.max(axis=1) + _REACH, middle + _LONGEST / 2)
    found, good = _search_rows(images, points, y, start, stop, surfaces.slants[rows[:, 0]])
    everything = np.concatenate([points, known])
    both = Surfaces(*(np.concatenate(pair) for pair in zip(found, surfaces, strict=True)))
    good &= confirmed(everything, both, np.concatenate([good, np.ones(len(known), bool)]))[: len(points)]
    return np.where(good[:, None], np.column_stack([found.x, y]), np.nan)


def _search_rows(
    images: tuple[np.ndarray, np.ndarray],
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    slants: np.ndarray,
) -> tuple[Surfaces, np.ndarray]:
    """Surfaces of left points (N, 2) on rows `y` (N,), from `start` to `stop` (N,); and which are certain."""
    x, correlation, clear = _along_rows(*images, points, y, start, stop, slants)
    found = Surfaces(x, slants.copy(), correlation)
    likely = np.flatnonzero(clear & (correlation >= _MIN_SEARCHED))
    seen, guess = points[likely], np.column_stack([x[likely], y[likely]])
    fitted = fit(*images, seen, guess, slants[likely])
    good = (fitted.correlation >= _MIN_NEW) & (np.abs(fitted.x - guess[:, 0]) <= _REACH / 2)
    good &= of_one_surface(*images, seen, guess[:, 1], fitted)
    # The same disparities, seen from the positions found.
    stretch, offset = 1 + fitted.slants[:, :1], guess[:, 0] + seen[:, 0]
    back, _, _ = _along_rows(
        *images[::-1],
        np.column_stack([fitted.x, guess[:, 1]]),
        seen[:, 1],
        offset - stop[likely],
        offset - start[likely],
        np.hstack([1 / stretch - 1, -fitted.slants[:, 1:] / stretch]),
    )
    good &= np.abs(back - seen[:, 0]) <= _BACK
    for whole, part in zip(found, fitted, strict=True):
        whole[likely] = part
    certain = np.zeros(len(points), bool)
    certain[likely[good]] = True
    return found, certain


def _along_rows(
    image: np.ndarray,
    other: np.ndarray,
    points: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    slants: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best positions of points (N, 2) on rows `y` (N,) of the other image, `start` to `stop` (N,).

    Returns:
        x (N,), correlation (N,), and (N,) bool: not at an end of the range, clearly better than any other
        position, and of enough texture.
    """
    if len(points) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0, bool)
    windows = cut(image, points)
    # A strip is cut in steps of one column of the slanted window.
    step = 1 + slants[:, 0]
    counts = np.ceil((stop - start) / step).astype(int) + 1
    most = int(counts.max())
    middles = np.column_stack([start + step * (most - 1) / 2, y])
    scores = correlate(windows, cut(other, middles, most + WINDOW - 1, slants))
    number = np.arange(most)
    scores[number >= counts[:, None]] = -1.0
    best, correlation = scores.argmax(axis=1), scores.max(axis=1)
    # A smooth surface has one broad peak, which is no rival of itself: only another peak is.
    beside = np.pad(scores, ((0, 0), (1, 1)), constant_values=-1.0)
    peaked = (scores >= beside[:, :-2]) & (scores >= beside[:, 2:])
    rival = np.where(peaked & (np.abs(number - best[:, None]) >= _APART), scores, -1.0).max(axis=1)
    clear = (best > 0) & (best < counts - 1) & (correlation - rival >= _CLEAR)
    return start + step * peaks(scores), correlation, clear & (deviation(windows) >= TEXTURE)


def _grey(image: Image) -> np.ndarray:
    """(H, W) float32 of the image as the front end saw it."""
    pixels = image.pixels
    return (pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)).astype(np.float32)
