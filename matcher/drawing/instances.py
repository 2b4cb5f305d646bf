"""A template beside an image, with the outline of each of its instances there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from matcher.data.image import Image
from matcher.drawing.canvas import Legend, Placed, as_points, draw_header, two_images


def draw_instances(
    template: Image | np.ndarray | str | Path,
    image: Image | np.ndarray | str | Path,
    corners: Sequence[np.ndarray],
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """The template on the left, the image on the right, upright, each instance outlined in a colour.

    A dot marks the template's first corner in both, so that the turn shows.

    Args:
        template, image: an Image, a path, or an array as `images.image_from_array` takes it.
        corners: (4, 2) of each instance, stored pixels of the image; the first is that of the template's
            first pixel.
        labels: a text for each instance; numbers from 1 when absent.
        title: one line above; how many instances there are when absent.

    Raises:
        UsageError: corners of another shape, or images that cannot be used.
    """
    placed, figure, axes = two_images(template, image, stacked=False)
    width, height = placed[0].image.size
    whole = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
    _outline(axes, placed[0], whole, "white", "")
    colours = matplotlib.colormaps["tab10"]
    texts = labels or [str(number) for number in range(1, len(corners) + 1)]
    for number, (quad, text) in enumerate(zip(corners, texts, strict=True)):
        _outline(axes, placed[1], as_points(quad, "corners"), colours(number % 10), text)
    count = "1 instance" if len(corners) == 1 else f"{len(corners)} instances"
    legend = Legend((("the dot is the template's first corner", "none"),))
    draw_header(figure, count if title is None else title, legend)
    return figure


def _outline(axes: Axes, side: Placed, quad: np.ndarray, colour: object, text: str) -> None:
    edge = [withStroke(linewidth=4.5, foreground="black")]
    points = side.points(quad)
    closed = np.vstack([points, points[:1]])
    axes.plot(closed[:, 0], closed[:, 1], color=colour, linewidth=2.5, path_effects=edge)
    axes.plot(*points[0], "o", color=colour, markersize=8, markeredgecolor="black")
    if text:
        middle = points.mean(axis=0)
        style = {"ha": "center", "va": "center", "fontsize": 14, "weight": "bold", "parse_math": False}
        axes.text(*middle, text, color="white", path_effects=edge, clip_on=True, **style)
