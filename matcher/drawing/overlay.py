"""One view over the other: images that show whether a known geometry is right."""

from __future__ import annotations

from typing import Literal

import cv2
import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from matcher.data.geometry import resize_points, stored_to_upright
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
    below, above, covered = _laid(
        as_image(image0), as_image(image1), np.asarray(H_1_from_0, dtype=np.float64)
    )
    if kind == "blend":
        canvas, text = _blend(below, above, covered), "image 0 red to orange, image 1 blue, grey: they agree"
    else:
        board = _board(covered.shape, squares)
        canvas = np.where((board & covered)[..., None], above, below)
        edges = (
            np.diff(board, axis=0, append=board[-1:]) | np.diff(board, axis=1, append=board[:, -1:])
        ) & covered
        canvas[edges] = canvas[edges] // 2 + 127  # where the two agree no square could be seen
        text = "squares alternate between image 0, warped, and image 1"
    figure, _ = blank_figure(canvas)
    name = f"image 0 over image 1, {covered.mean():.0%} covered" if title is None else title
    draw_header(figure, name, Legend(((text, "none"),)))
    return figure


def _laid(first: Image, second: Image, H_1_from_0: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Image 1 and image 0 warped onto it, (H, W, 3) at display size, and where image 0 lies, (H, W) bool."""
    if (
        H_1_from_0.shape != (3, 3)
        or not np.isfinite(H_1_from_0).all()
        or np.linalg.matrix_rank(H_1_from_0) < 3
    ):
        raise UsageError("H_1_from_0 must be an invertible (3, 3) matrix of finite numbers")
    height, width = second.pixels.shape[:2]
    factor = _LONGER / max(width, height)
    shape = (max(1, round(width * factor)), max(1, round(height * factor)))
    shrink = np.diag([shape[0] / width, shape[1] / height, 1.0])
    shift = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    to_shown = np.linalg.inv(shift) @ shrink @ shift @ _stored_to_pixels(second)
    warp = to_shown @ H_1_from_0 @ np.linalg.inv(_stored_to_pixels(first))
    below = cv2.resize(_colour(second.pixels), shape, interpolation=cv2.INTER_AREA)
    above = cv2.warpPerspective(_colour(first.pixels), warp, shape, borderMode=cv2.BORDER_REPLICATE)
    covered = cv2.warpPerspective(np.full(first.pixels.shape[:2], 255, np.uint8), warp, shape) > 127
    return below, above, covered


def _stored_to_pixels(image: Image) -> np.ndarray:
    """(3, 3) stored pixels → pixels of `image.pixels`, which is upright and resized."""
    corners = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    moved = resize_points(stored_to_upright(corners, image.size, image.orientation), image.scale)
    linear = np.stack([moved[1] - moved[0], moved[2] - moved[0]], axis=1)
    return np.block([[linear, moved[:1].T], [np.zeros((1, 2)), np.ones((1, 1))]])


def _colour(pixels: np.ndarray) -> np.ndarray:
    return cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB) if pixels.ndim == 2 else pixels


def _board(shape: tuple[int, ...], squares: int) -> np.ndarray:
    """(H, W) bool, every other square."""
    side = max(1.0, max(shape) / squares)
    rows, columns = np.indices(shape)
    return (rows // side + columns // side) % 2 == 0


def _blend(below: np.ndarray, above: np.ndarray, covered: np.ndarray) -> np.ndarray:
    """Red from image 0, blue from image 1, green from both: grey where they agree."""
    grey0, grey1 = (cv2.cvtColor(x, cv2.COLOR_RGB2GRAY) for x in (above, below))
    both = np.stack([grey0, (grey0.astype(np.uint16) + grey1) // 2, grey1], axis=-1).astype(np.uint8)
    return np.where(covered[..., None], both, grey1[..., None] // 2)


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
