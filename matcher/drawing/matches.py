"""Drawings of matches: two views, lines between matched points, coloured by what is known of them.

Inliers run from teal to yellow with their confidence, outliers are thin and vermilion: they differ in
lightness too, so that colour-blind eyes and grey prints tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure

from matcher.data.geometry import warp_points
from matcher.data.image import Image
from matcher.drawing.canvas import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    YELLOW,
    Legend,
    Placed,
    as_column,
    as_points,
    draw_dots,
    draw_header,
    two_images,
)
from matcher.drawing.ellipses import draw_ellipses
from matcher.errors import UsageError
from matcher.verify.distances import epipolar_distance

ColourBy = Literal["confidence", "inliers", "error", "planes"]
_PLANES = (SKY, YELLOW, GREEN, PINK, BLUE, ORANGE)  # colours, used again where there are more planes

_CELL = 64  # pixels; the drawn lines are spread over cells of this size


def draw_matches(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    scores: np.ndarray | None = None,
    inliers: np.ndarray | None = None,
    errors: np.ndarray | None = None,
    planes: np.ndarray | None = None,
    colour_by: ColourBy = "confidence",
    error_limit: float = 5.0,
    stacked: bool = False,
    keypoints0: np.ndarray | None = None,
    keypoints1: np.ndarray | None = None,
    covariances: np.ndarray | None = None,
    title: str | None = None,
    max_lines: int = 200,
) -> Figure:
    """Two images, upright, with lines between their matched points.

    Args:
        image0, image1, points0, points1: images as `images.image_from_array` takes; (K, 2) stored pixels.
        scores, inliers: (K,) in [0, 1], the confidence of a match, 1 when absent; (K,) bool, None where no
            geometry was estimated, then no match counts as an outlier.
        errors, planes, colour_by, error_limit, stacked: (K,) pixels; (K,) plane of each match, −1 for none;
            what colours show; larger errors have one colour; one image above the other.
        keypoints0, keypoints1, covariances: (N, 2), (M, 2) all keypoints, as dots; (K, 2, 2) of points1, as
            ellipses of one sigma, enlarged twenty times.
        title, max_lines: the line above; how many inliers, and a quarter of it outliers, spread out.

    Raises:
        UsageError: arrays whose shapes do not fit, or images that cannot be used.
    """
    points0, points1 = as_points(points0, "points0"), as_points(points1, "points1")
    count, shown, colours = len(points0), {"error": errors, "planes": planes}, _scale(colour_by)
    scores = as_column(scores, count, "scores", np.ones(count))
    good = as_column(inliers, count, "inliers", np.ones(count)).astype(bool)
    _check(len(points1), count, colour_by, shown, error_limit, max_lines)
    judged = None if inliers is None or colour_by == "error" else good
    title = title or f"{count} matches" + ("" if inliers is None else f", {int(good.sum())} inliers")
    good |= colour_by == "error"  # errors tell more than whether a match is an inlier
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    _draw_keypoints(axes, placed, (keypoints0, keypoints1))
    ends = np.stack([side.points(p) for side, p in zip(placed, (points0, points1), strict=True)], axis=1)
    each = colours(np.clip(_shares(colour_by, scores, shown, error_limit), 0, 1))
    drawn = _draw_lines(axes, ends, scores, good, each, max_lines)
    draw_ellipses(axes, placed[1], points1, covariances)
    draw_header(figure, title, _legend(colour_by, colours, error_limit, judged, drawn))
    return figure


def _shares(
    colour_by: ColourBy, scores: np.ndarray, shown: dict[str, np.ndarray | None], limit: float
) -> np.ndarray:
    """(K,) places on the scale of colours; unknown errors are at the limit."""
    if colour_by == "error":
        return np.nan_to_num(as_column(shown["error"], len(scores), "errors", scores) / limit, nan=1.0)
    if colour_by == "planes":
        planes = as_column(shown["planes"], len(scores), "planes", scores)
        return planes % len(_PLANES) / (len(_PLANES) - 1)
    return scores


def _draw_keypoints(
    axes: Axes, placed: Sequence[Placed], keypoints: tuple[np.ndarray | None, np.ndarray | None]
) -> None:
    for side, points in zip(placed, keypoints, strict=True):
        if points is not None:
            draw_dots(axes, side.points(as_points(points, "keypoints")), "white", 2.0, 0.35)


def match_errors(
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    H_1_from_0: np.ndarray | None = None,
    fundamental: np.ndarray | None = None,
) -> np.ndarray:
    """(K,) how far matches are, in pixels, from what is known of the two views.

    Args:
        points0, points1: (K, 2) stored pixels.
        H_1_from_0: (3, 3) homography; the error is the distance in image 1, infinite beyond the horizon.
        fundamental: (3, 3), of a pose by `geometry.fundamental_from_pose`; symmetric epipolar distance.

    Raises:
        UsageError: not exactly one of the two.
    """
    if (H_1_from_0 is None) == (fundamental is None):
        raise UsageError("match errors need either H_1_from_0 or fundamental")
    if fundamental is not None:
        return epipolar_distance(points0, points1, fundamental)
    return np.nan_to_num(np.linalg.norm(warp_points(points0, H_1_from_0) - points1, axis=1), nan=np.inf)


def _check(
    other: int, count: int, colour_by: str, shown: dict[str, np.ndarray | None], limit: float, max_lines: int
) -> None:
    if other != count:
        raise UsageError(f"points0 and points1 must be of one length, not {count} and {other}")
    if max_lines < 0:
        raise UsageError(f"max_lines must not be negative, got {max_lines}")
    if colour_by not in get_args(ColourBy):
        raise UsageError(f"colour_by is confidence, inliers, error or planes, not {colour_by!r}")
    if colour_by in shown and shown[colour_by] is None:
        needed = "errors, in pixels," if colour_by == "error" else "the planes"
        raise UsageError(f"colour_by {colour_by!r} needs {needed} of all matches")
    if not limit > 0:
        raise UsageError(f"error_limit must be above 0 pixels, not {limit}")


def _draw_lines(
    axes: Axes, ends: np.ndarray, scores: np.ndarray, good: np.ndarray, colours: np.ndarray, max_lines: int
) -> tuple[int, int, int]:
    """Lines and end points, (K, 2, 2) ends; returns lines drawn of inliers, of outliers, and matches."""
    by_score = np.argsort(scores, kind="stable")  # the most confident lie on top
    inner, outer = by_score[good[by_score]], by_score[~good[by_score]]
    lines_in = _spread(inner, ends[:, 0], max_lines)
    lines_out = _spread(outer, ends[:, 0], max_lines // 4)
    crowd = min(1.0, len(lines_in) / 200)
    thin = min(1.0, 200 / max(200, len(lines_in))) ** 0.7  # thousands stay transparent
    alpha, width = (0.9 - 0.35 * crowd) * thin, 1.3 - 0.4 * crowd
    axes.add_collection(
        LineCollection(ends[lines_out], colors=[VERMILION], linewidths=0.5, alpha=0.55), autolim=False
    )
    draw_dots(axes, ends[outer].reshape(-1, 2), VERMILION, 3.0, 0.8)
    under = LineCollection(ends[lines_in], colors="black", linewidths=width + 0.8, alpha=0.25 * alpha)
    axes.add_collection(under, autolim=False)
    over = LineCollection(ends[lines_in], colors=colours[lines_in], linewidths=width, alpha=alpha)
    axes.add_collection(over, autolim=False)
    draw_dots(axes, ends[inner].reshape(-1, 2), np.repeat(colours[inner], 2, axis=0), 6.0, 0.95)
    return len(lines_in), len(lines_out), len(ends)


def _spread(order: np.ndarray, points: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of `order` (best last), spread over the image: the best of each cell come first."""
    best_first = order[::-1]
    cells = np.floor(points[best_first] / _CELL).astype(np.int64) @ np.array([1, 1 << 20])
    by_cell = np.argsort(cells, kind="stable")
    starts = np.flatnonzero(np.diff(cells[by_cell], prepend=np.nan))
    rank = np.empty(len(order), np.int64)
    rank[by_cell] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    chosen = np.argsort(rank, kind="stable")[:limit]
    return best_first[np.sort(chosen)][::-1]


def _scale(colour_by: ColourBy) -> Colormap:
    if colour_by == "error":
        return LinearSegmentedColormap.from_list("error", [SKY, YELLOW, VERMILION])
    if colour_by == "inliers":
        return ListedColormap([SKY])
    if colour_by == "planes":
        return ListedColormap(_PLANES)
    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.4, 1.0, 64)))


def _legend(
    colour_by: ColourBy,
    scale: Colormap,
    limit: float,
    good: np.ndarray | None,
    drawn: tuple[int, int, int],
) -> Legend:
    """What the colours of the lines mean."""
    texts = []
    if good is not None:
        inner = SKY if colour_by == "inliers" else "none"
        each = ", a colour for each plane" * (colour_by == "planes")
        texts.append((f"inliers{each}: {int(good.sum())}", inner))
        texts.append((f"outliers, thin: {int((~good).sum())}", VERMILION))
    if drawn[0] + drawn[1] < drawn[2]:
        texts.append((f"lines drawn: {drawn[0] + drawn[1]} of {drawn[2]}", "none"))
    if colour_by in ("inliers", "planes"):
        return Legend(tuple(texts))
    ends = ("confidence 0", "1") if colour_by == "confidence" else ("error 0", f"{limit:g} px or more")
    return Legend(tuple(texts), scale, ends)
