"""Plots of how a pair was decided: layer by layer, confidences, Sinkhorn's error, entropy of attention.

All are 1000 pixels wide and take plain numbers, so that they can be drawn of any record of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from matcher.drawing.canvas import GREEN, PINK, SKY, VERMILION
from matcher.errors import UsageError

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
