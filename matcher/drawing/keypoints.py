"""What became of every keypoint: matched, kept without a partner, or dropped at some layer."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, ListedColormap
from matplotlib.figure import Figure

from matcher.data.image import Image
from matcher.data.matches import MATCHED, UNMATCHED
from matcher.drawing.canvas import (
    SKY,
    VERMILION,
    Legend,
    as_column,
    as_points,
    draw_dots,
    draw_header,
    two_images,
)

_CROWD = 2048  # points of an image beyond which dots are smaller, so that they never cover it


def draw_fates(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    keypoints0: np.ndarray,
    keypoints1: np.ndarray,
    fates0: np.ndarray,
    fates1: np.ndarray,
    *,
    layers: int,
    stacked: bool = False,
    title: str = "what became of every keypoint",
) -> Figure:
    """Two images with their keypoints, coloured by fate.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        keypoints0, keypoints1: (N, 2) and (M, 2) stored pixels.
        fates0, fates1: (N,), (M,) int: `MATCHED`, `UNMATCHED`, or the layer (1 … layers) that pruned it.
        layers: depth of the network, the end of the colour scale.
        stacked: one image above the other instead of side by side.
        title: one line above the images.

    Raises:
        UsageError: arrays whose shapes do not fit, or images that cannot be used.
    """
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    scale, counts = _pruned_colours(), np.zeros(3, int)
    for side, keypoints, fates in zip(placed, (keypoints0, keypoints1), (fates0, fates1), strict=True):
        points = side.points(as_points(keypoints, "keypoints"))
        fates = as_column(fates, len(points), "fates")
        pruned, kept, matched = fates > 0, fates == UNMATCHED, fates == MATCHED
        unit = min(1.0, _CROWD / max(1, len(points)))
        draw_dots(axes, points, "black", 20.0 * unit, 0.35)
        draw_dots(axes, points[pruned], scale((fates[pruned] - 1) / max(1, layers - 2)), 9.0 * unit, 1.0)
        draw_dots(axes, points[kept], VERMILION, 9.0 * unit, 1.0)
        draw_dots(axes, points[matched], SKY, 12.0 * unit, 1.0)
        counts += [matched.sum(), kept.sum(), pruned.sum()]
    texts = [
        (f"matched: {counts[0]}", SKY),
        (f"kept, without a partner: {counts[1]}", VERMILION),
    ]
    if not counts[2]:
        draw_header(figure, title, Legend((*texts, ("pruned: 0", "none"))))
    else:
        ends = (f"pruned ({counts[2]}) at layer 1", str(max(1, layers - 1)))
        draw_header(figure, title, Legend(tuple(texts), scale, ends))
    return figure


def _pruned_colours() -> Colormap:
    return ListedColormap(matplotlib.colormaps["Greys"](np.linspace(0.0, 0.6, 64)))
