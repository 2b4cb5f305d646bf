"""What one keypoint attends to, drawn on both pictures."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from matcher.drawing.canvas import (
    PINK,
    SKY,
    VERMILION,
    YELLOW,
    Legend,
    as_image,
    as_points,
    blank_figure,
    draw_header,
    place,
)
from matcher.types import Image, UsageError

Heard = tuple[np.ndarray, np.ndarray]  # places (k, 2) in stored pixels and their weights (k,)


def draw_attention(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    point: tuple[float, float],
    within: Sequence[Heard],
    across: Sequence[Heard],
    *,
    asked_in: int = 0,
    stacked: bool = False,
    title: str = "attention of one keypoint",
) -> Figure:
    """Lines from a keypoint to what it attends to; stronger weights are larger dots, heads have colours.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        point: the keypoint, stored pixels of the picture `asked_in`.
        within, across: for each head the places heard in its own and in the other picture.
        asked_in: 0 or 1, the picture of the keypoint.
        stacked: one picture above the other instead of side by side.
        title: one line above the pictures.

    Raises:
        UsageError: places and weights that do not fit each other, or pictures that cannot be used.
    """
    placed, canvas = place(as_image(image0), as_image(image1), stacked=stacked)
    figure, axes = blank_figure(canvas)
    start = placed[asked_in].points(as_points(np.array([point]), "point"))[0]
    colours = _head_colours(max(len(within), len(across)))
    for side, heads in ((placed[asked_in], within), (placed[1 - asked_in], across)):
        for colour, (places, weights) in zip(colours, heads, strict=False):
            if len(places) != len(weights):
                raise UsageError(f"{len(places)} places cannot have {len(weights)} weights")
            ends = side.points(as_points(np.reshape(places, (-1, 2)), "places"))
            share = np.sqrt(np.clip(weights, 0, 1))
            lines = [[start, end] for end in ends]
            axes.add_collection(
                LineCollection(lines, colors=[colour], linewidths=0.8, alpha=0.6), autolim=False
            )
            axes.scatter(
                ends[:, 0], ends[:, 1], s=6 + 140 * share**2, color=colour, edgecolors="black", linewidths=0.5
            )
    axes.scatter(*start, s=90, marker="*", color="white", edgecolors="black", linewidths=1, zorder=4)
    texts = [(f"head {i + 1}", colour) for i, colour in enumerate(colours)]
    draw_header(figure, title, Legend((*texts, ("star: the keypoint; area of a dot: its weight", "none"))))
    return figure


def _head_colours(count: int) -> list[tuple[float, ...]]:
    few = [SKY, VERMILION, YELLOW, PINK]
    return (
        few[:count] if count <= len(few) else list(matplotlib.colormaps["viridis"](np.linspace(0, 1, count)))
    )
