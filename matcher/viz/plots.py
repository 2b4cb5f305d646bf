"""Plots of probabilities against what is right, and of what one keypoint attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from matcher.errors import UsageError
from matcher.types import Image
from matcher.viz.drawings import (
    BLUE,
    GREEN,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    YELLOW,
    Legend,
    as_points,
    draw_header,
    two_images,
)

Attended = tuple[np.ndarray, np.ndarray]  # positions (k, 2) in stored pixels and their weights (k,)


def draw_reliability(
    curves: Mapping[str, tuple[Sequence[float | None], Sequence[float | None], Sequence[int]]],
    *,
    title: str = "reliability of match probabilities",
) -> Figure:
    """How often predictions are right, against the probability that they state.

    Args:
        curves: by name: mean probability, share that is right and number of predictions, of each bin; None
            where a bin is empty.
        title: one line above.
    """
    figure = Figure(figsize=(10, 6.4), dpi=100, facecolor="white", layout="constrained")
    figure.suptitle(" ".join(title.split())[:105], x=0.012, ha="left", fontsize=12)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="calibrated")
    for (name, (said, right, count)), colour, marker in zip(
        curves.items(), (SKY, VERMILION, GREEN, PINK), "osD^", strict=False
    ):
        known = [(p, r, n) for p, r, n in zip(said, right, count, strict=True) if None not in (p, r)]
        if known:
            probability, share, number = zip(*known, strict=True)
            above.plot(probability, share, color=colour, marker=marker, label=name)
            below.plot(probability, number, color=colour, marker=marker)
    above.set(ylabel="share that is right", ylim=(0, 1.02))
    above.legend()
    below.set(xlabel="probability", ylabel="matches", xlim=(0, 1), yscale="log")
    below.set_ylim(bottom=0.7)
    return figure


def draw_attention(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    point: tuple[float, float],
    self_attention: Sequence[Attended],
    cross_attention: Sequence[Attended],
    *,
    side: int = 0,
    names: Sequence[str] | None = None,
    stacked: bool = False,
    title: str = "attention of one keypoint",
) -> Figure:
    """Lines from a keypoint to what it attends to; larger weights are larger dots, heads have colours.

    The dots of several heads lie around the position that they mean, so that none hides another.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        point: the keypoint, stored pixels of the image `side`.
        self_attention, cross_attention: for each head what it attends to in its own and the other image.
        side: 0 or 1, the image of the keypoint.
        names: of the heads, for the legend; "head 1" and so on when absent.
        stacked: one image above the other instead of side by side.
        title: one line above the images.

    Raises:
        UsageError: positions and weights that do not fit each other, or images that cannot be used.
    """
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    start = placed[side].points(as_points(np.array([point]), "point"))[0]
    heads = max(len(self_attention), len(cross_attention))
    colours, turns = _head_colours(heads), 2 * np.pi * np.arange(heads) / max(1, heads)
    beside = 6.0 * (heads > 1) * np.stack([-np.cos(turns), np.sin(turns)], axis=1)
    largest = max((float(np.max(w)) for _, w in (*self_attention, *cross_attention) if len(w)), default=0.0)
    for image, attended in ((placed[side], self_attention), (placed[1 - side], cross_attention)):
        for colour, shift, (positions, weights) in zip(colours, beside, attended, strict=False):
            if len(positions) != len(weights):
                raise UsageError(f"{len(positions)} positions cannot have {len(weights)} weights")
            ends = image.points(as_points(np.reshape(positions, (-1, 2)), "positions")) + shift
            ends = np.clip(ends, image.offset, np.add(image.offset, image.shape) - 1)
            _draw_rays(axes, start, ends, np.clip(weights, 0, None) / max(largest, 1e-9), colour)
    axes.scatter(*start, s=170, marker="*", color="white", edgecolors="black", linewidths=1, zorder=4)
    names = [f"head {number}" for number in range(1, heads + 1)] if names is None else names
    if heads > 4:  # else the line would be too long
        names = [names[0], *(name.removeprefix("head ") for name in names[1:])]
    scale = f"star: the keypoint; area of a dot: its weight, the largest {largest:.2g}"
    draw_header(figure, title, Legend((*zip(names, colours, strict=True), (scale, "none"))))
    return figure


def _draw_rays(
    axes: Axes, start: np.ndarray, ends: np.ndarray, share: np.ndarray, colour: tuple[float, ...]
) -> None:
    """Lines from one point to others (k, 2), wider and with larger dots the larger their share (k,)."""
    lines = LineCollection(
        [[start, end] for end in ends],
        colors=[(*to_rgb(colour), 0.15 + 0.75 * s) for s in share],
        linewidths=0.5 + 2 * share,
    )
    axes.add_collection(lines, autolim=False)
    axes.scatter(*ends.T, s=5 + 150 * share, color=colour, edgecolors="black", linewidths=0.5, zorder=3)


def _head_colours(count: int) -> list[tuple[float, ...]]:
    few = [SKY, VERMILION, YELLOW, PINK, GREEN, ORANGE, BLUE, "#ffffff"]
    if count <= len(few):
        return few[:count]
    return [tuple(colour) for colour in matplotlib.colormaps["viridis"](np.linspace(0, 1, count))]
