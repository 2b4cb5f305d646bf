"""One view over the other: drawings that show whether a known geometry is right."""

from __future__ import annotations

from typing import Literal

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from matcher.data.image import Image
from matcher.drawing.canvas import (
    Legend,
    Placed,
    as_image,
    as_points,
    blank_figure,
    draw_header,
    two_images,
)
from matcher.drawing.composites import blend, checkerboard, lay_over
from matcher.errors import UsageError

_LONGER = 960  # pixels, of an overlay


def draw_overlay(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    H_1_from_0: np.ndarray,
    *,
    kind: Literal["checkerboard", "blend"] = "checkerboard",
    squares: int = 8,
    title: str | None = None,
) -> Figure:
    """Image 0, warped by a homography, over image 1: edges that run on show that the homography is right.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        H_1_from_0: (3, 3), stored pixels of image 0 → stored pixels of image 1.
        kind: alternating squares, or both at once, image 0 in vermilion and image 1 in blue (grey where the
            two agree).
        squares: of the checkerboard, along the longer side.
        title: one line above the image.

    Raises:
        UsageError: a matrix of another shape, not finite or singular, another kind, or no squares.
    """
    if kind not in ("checkerboard", "blend") or squares < 1:
        raise UsageError("an overlay is a checkerboard of at least 1 square, or a blend")
    first, second = as_image(image0), as_image(image1)
    height, width = second.pixels.shape[:2]
    factor = _LONGER / max(width, height)
    shape = (max(1, round(width * factor)), max(1, round(height * factor)))
    laid = lay_over(first, second, H_1_from_0, shape)
    if kind == "blend":
        canvas, text = blend(laid), "image 0 red to orange, image 1 blue, grey: they agree"
    else:
        canvas, text = checkerboard(laid, squares), "squares alternate between image 0, warped, and image 1"
    figure, _ = blank_figure(canvas)
    name = f"image 0 over image 1, {laid.covered.mean():.0%} covered" if title is None else title
    draw_header(figure, name, Legend(((text, "none"),)))
    return figure


def draw_epipolar_lines(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    fundamental: np.ndarray,
    *,
    max_lines: int = 20,
    stacked: bool = False,
    title: str | None = None,
) -> Figure:
    """Matched points, each with the epipolar line that its partner draws in the other image.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        points0, points1: (K, 2) matched points, stored pixels, best first.
        fundamental: (3, 3) with x1ᵀ F x0 = 0 in stored pixels.
        max_lines: matches drawn, spread evenly over all of them.
        stacked, title: as in `matches.draw_matches`.

    Raises:
        UsageError: arrays whose shapes do not fit.
    """
    points0, points1 = as_points(points0, "points0"), as_points(points1, "points1")
    fundamental = np.asarray(fundamental, dtype=np.float64)
    if len(points0) != len(points1) or fundamental.shape != (3, 3) or not np.isfinite(fundamental).all():
        raise UsageError("epipolar lines need as many points0 as points1 and a finite (3, 3) matrix")
    chosen = np.unique(np.linspace(0, len(points0) - 1, min(max_lines, len(points0))).astype(int))
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.3, 1.0, max(1, len(chosen))))[: len(chosen)]
    sides = (points0, points1)
    for side, here, there, matrix in zip(
        placed, sides, sides[::-1], (fundamental.T, fundamental), strict=True
    ):
        lines = np.c_[there[chosen], np.ones(len(chosen))] @ matrix.T
        pieces = [(c, p) for c, line in zip(colours, lines, strict=True) if len(p := _visible(side, line))]
        segments = LineCollection([p for _, p in pieces], colors=[c for c, _ in pieces], linewidths=1.2)
        axes.add_collection(segments, autolim=False)
        ends = side.points(here[chosen])
        axes.scatter(ends[:, 0], ends[:, 1], s=40, c=colours, edgecolors="black", linewidths=0.8, zorder=3)
    text = f"{len(chosen)} of {len(points0)} matches; a point lies on the line of its colour where they agree"
    draw_header(figure, "epipolar lines" if title is None else title, Legend(((text, "none"),)))
    return figure


def _visible(side: Placed, line: np.ndarray) -> np.ndarray:
    """The part (2, 2), canvas pixels, of a line a·x + b·y + c = 0 of stored pixels that its image shows."""
    width, height = side.image.size
    a, b, c = line
    x, y = np.array([-0.5, width - 0.5]), np.array([-0.5, height - 0.5])
    with np.errstate(divide="ignore", invalid="ignore"):
        ends = np.concatenate([np.stack([x, -(a * x + c) / b], 1), np.stack([-(b * y + c) / a, y], 1)])
    inside = (
        np.isfinite(ends).all(1) & (ends >= -0.501).all(1) & (ends <= [width - 0.499, height - 0.499]).all(1)
    )
    ends = ends[inside]
    if len(ends) < 2:
        return np.zeros((0, 2))
    far = np.linalg.norm(ends - ends[0], axis=1).argmax()
    return side.points(ends[[0, far]])
