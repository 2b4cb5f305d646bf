"""Plots: probabilities against what is right, and a training as it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from matcher.viz.drawings import GREEN, PINK, SKY, VERMILION


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


def draw_training(rows: Sequence[Mapping[str, float]], title: str) -> Figure:
    """Loss and validation of a training, by pairs and by hours.

    Args:
        rows: of `log.jsonl`: step, pairs, seconds, and loss or precision and recall.
        title: one line above.
    """
    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    labels = (("pairs", 1000, "training pairs / 1000"), ("seconds", 3600, "hours of training"))
    for column, (key, unit, label) in enumerate(labels):
        for row, names in enumerate((("loss",), ("precision", "recall"))):
            for name in names:
                known = [entry for entry in rows if name in entry]
                x, y = [entry[key] / unit for entry in known], [entry[name] for entry in known]
                axes[row, column].plot(x, y, marker="." if len(x) < 100 else "", linewidth=1.2, label=name)
            axes[row, column].grid(alpha=0.3)
        axes[1, column].legend()
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("validation")
    return figure
