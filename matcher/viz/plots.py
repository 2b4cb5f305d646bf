"""Plots of how a pair was decided: layer by layer, confidences, Sinkhorn's error, entropy of attention.

All are 1000 pixels wide and take plain numbers, so that they can be drawn of any record of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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

# --- plots: Plots of how a pair was decided: layer by layer, confidences, Sinkhorn's error, entropy of
# attention.

_COLOURS, _HATCHES = (SKY, VERMILION, GREEN, PINK), ("", "///", "...", "xxx")
_MARKERS = "osD^"


def draw_decisions(
    matches: Sequence[int],
    appeared: Sequence[int],
    vanished: Sequence[int],
    shares: Mapping[str, Sequence[float | None]],
    pruned: Sequence[int],
    *,
    exited: bool = False,
    title: str = "decisions layer by layer",
) -> Figure:
    """Matches that came and went at each layer, shares, and points dropped.

    Args:
        matches, appeared, vanished: of each layer that ran.
        shares: by name, in [0, 1], of each layer; None where a layer has none.
        pruned: points dropped after each layer, both images together.
        exited: the pair stopped at the last of them.
        title: one line above.

    Raises:
        UsageError: lists of different lengths.
    """
    if len({len(values) for values in (matches, appeared, vanished, pruned, *shares.values())}) != 1:
        raise UsageError("decisions need one value of everything for each layer")
    layers = np.arange(1, len(matches) + 1)
    figure = _figure(title, 760)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 1.3))
    above.plot(layers, matches, color="black", marker="o", label="matches")
    above.bar(layers - 0.16, appeared, 0.3, color=SKY, label="appeared")
    above.bar(layers + 0.16, vanished, 0.3, color=VERMILION, hatch="///", edgecolor="white", label="vanished")
    above.set_ylabel("matches")
    for (name, values), colour, marker in zip(shares.items(), _COLOURS, _MARKERS, strict=False):
        known = [(layer, value) for layer, value in zip(layers, values, strict=True) if value is not None]
        if known:
            middle.plot(*np.transpose(known), color=colour, marker=marker, label=name)
    if not middle.lines:
        middle.text(0.5, 0.5, "this network has none", ha="center", transform=middle.transAxes)
    middle.set(ylabel="share", ylim=(-0.03, 1.03))
    below.bar(layers, pruned, 0.5, color="0.55", edgecolor="black", linewidth=0.6, label="points pruned")
    below.set(ylabel="points", xlabel="layer", xlim=(0.4, len(layers) + 0.6))
    below.set_xticks(layers)
    _counted(above)
    _counted(below)
    for axes in (above, middle, below):
        if exited:
            axes.axvline(layers[-1], color="black", linestyle=":", label="exit" if axes is above else None)
        _beside(axes)
    return figure


def draw_confidences(
    groups: Mapping[str, np.ndarray],
    *,
    threshold: float | None = None,
    bins: int = 20,
    what: str = "probability of a match",
    title: str = "confidences",
) -> Figure:
    """Histograms of probabilities, one after another for each group.

    Args:
        groups: by name, (K,) probabilities; as many as four.
        threshold: a line where it lies, such as the least score of a match.
        bins: equal parts of [0, 1].
        what: the values are, with their unit.
        title: one line above.

    Raises:
        UsageError: values outside [0, 1], or no group or more than four.
    """
    if not 1 <= len(groups) <= len(_COLOURS):
        raise UsageError(f"a histogram shows one to {len(_COLOURS)} groups, not {len(groups)}")
    figure = _figure(title, 480)
    axes, edges = figure.subplots(), np.linspace(0, 1, bins + 1)
    width = 0.9 / (bins * len(groups))
    looks = zip(groups.items(), _COLOURS, _HATCHES, strict=False)
    for place, ((name, values), colour, hatch) in enumerate(looks):
        values = np.asarray(values, dtype=np.float64)
        if values.size and not (values.min() >= 0 and values.max() <= 1 + 1e-6):
            raise UsageError(f"{name}: probabilities lie in [0, 1]")
        counts = np.histogram(np.clip(values, 0, 1), edges)[0]
        label = f"{name}: {values.size}, median {np.median(values):.2f}" if values.size else f"{name}: none"
        left = edges[:-1] + 0.05 / bins + place * width
        axes.bar(left, counts, width, align="edge", color=colour, hatch=hatch, edgecolor="white", label=label)
    if threshold is not None:
        axes.axvline(threshold, color="black", linestyle=":", label=f"threshold {threshold:g}")
    axes.set(xlabel=what, ylabel="count", xlim=(0, 1))
    _counted(axes)
    _beside(axes)
    return figure


def draw_marginal_errors(
    errors: Sequence[float], *, tolerance: float | None = None, title: str = "Sinkhorn's marginal error"
) -> Figure:
    """The relative error of the rows' masses after each iteration, on a logarithmic scale.

    Args:
        errors: one per iteration; none where the assignment is not Sinkhorn's or an image has no points.
        tolerance: at which the iterations stop.
        title: one line above.
    """
    figure = _figure(title, 480)
    axes = figure.subplots()
    numbers = np.arange(1, len(errors) + 1)
    if not len(errors):
        why = "no iterations: the assignment is not Sinkhorn's, or an image has no keypoints"
        axes.text(0.5, 0.5, why, ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return figure
    axes.plot(numbers, np.maximum(errors, 1e-9), color=SKY, marker="o", markersize=3, label="rows")
    axes.set(xlabel="iteration", ylabel="relative error of the masses", yscale="log")
    if tolerance is not None:
        axes.axhline(tolerance, color="black", linestyle=":", label=f"tolerance {tolerance:g}")
        axes.set_ylim(bottom=min(axes.get_ylim()[0], tolerance / 2))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _beside(axes)
    return figure


def draw_entropies(
    self_attention: np.ndarray,
    cross_attention: np.ndarray,
    *,
    limit: float,
    title: str = "entropy of attention",
) -> Figure:
    """Entropy by layer and head as coloured tables, dark where a head attends to few points.

    Args:
        self_attention, cross_attention: (L, H) nats.
        limit: the end of the scale, nats: the logarithm of the number of points, where all weights are equal.
        title: one line above.

    Raises:
        UsageError: tables of different shapes.
    """
    tables = np.asarray(self_attention), np.asarray(cross_attention)
    if tables[0].shape != tables[1].shape or tables[0].ndim != 2:
        found = f"{tables[0].shape} and {tables[1].shape}"
        raise UsageError(f"entropies are two tables (layers, heads), not {found}")
    layers, heads = tables[0].shape
    figure = _figure(title, 150 + 46 * max(4, layers))
    sides, shown = figure.subplots(1, 2), None
    for axes, values, name in zip(sides, tables, ("self-attention", "cross-attention"), strict=True):
        shown = axes.imshow(values, cmap="viridis", vmin=0, vmax=limit, aspect="auto")
        for (layer, head), value in np.ndenumerate(values):
            ink = "white" if value < 0.6 * limit else "black"
            axes.text(head, layer, f"{value:.1f}", ha="center", va="center", color=ink, fontsize=10)
        axes.set(title=name, xlabel="head", ylabel="layer")
        axes.set_xticks(range(heads), [str(head + 1) for head in range(heads)])
        axes.set_yticks(range(layers), [str(layer + 1) for layer in range(layers)])
    bar = figure.colorbar(shown, ax=list(sides), shrink=0.9)
    bar.set_label(f"nats ({limit:.1f}: uniform)")
    return figure


def _figure(title: str, height: int) -> Figure:
    """1000 pixels wide, with a title on the left."""
    figure = Figure(figsize=(10, height / 100), dpi=100, facecolor="white", layout="constrained")
    title = " ".join(title.split())
    figure.suptitle(title if len(title) <= 105 else f"{title[:104]}…", x=0.012, ha="left", fontsize=12)
    return figure


def _counted(axes: Axes) -> None:
    """Counts from 0 up, in whole numbers, also where all are 0."""
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))


def _beside(axes: Axes) -> None:
    """Grid lines, and the legend right of the plot, where it hides nothing."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=10)


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
    figure = _figure(title, 640)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="calibrated")
    for (name, (said, right, count)), colour, marker in zip(curves.items(), _COLOURS, _MARKERS, strict=False):
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


# --- attention: What one keypoint attends to, drawn on both images.

Attended = tuple[np.ndarray, np.ndarray]  # positions (k, 2) in stored pixels and their weights (k,)
_BESIDE = 6.0  # canvas pixels from a position to the dot of one head


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
    beside = _BESIDE * (heads > 1) * np.stack([-np.cos(turns), np.sin(turns)], axis=1)
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
    few = [SKY, VERMILION, YELLOW, PINK, GREEN, ORANGE, BLUE, (1.0, 1.0, 1.0)]
    if count <= len(few):
        return few[:count]
    return [tuple(colour) for colour in matplotlib.colormaps["viridis"](np.linspace(0, 1, count))]
