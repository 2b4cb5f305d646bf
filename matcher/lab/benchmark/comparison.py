"""One preset twice, with different settings, on the same pairs: equal matches, accuracy, and time.

For what may change speed but not quality: half precision against float32, early exit and pruning against
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.lab.benchmark.shipped import LayerClock
from matcher.lab.benchmark.timing import Stopwatch
from matcher.lab.evaluate.metrics import auc, corner_error
from matcher.lab.pairs.protocols import HomographyPair
from matcher.pipeline import Pipeline

THRESHOLDS = (3.0, 5.0, 10.0)  # pixels


@dataclass
class Twin:
    """What one pipeline did."""

    pipeline: Pipeline
    errors: list[float] = field(default_factory=list)  # of corners, pixels, a pair each
    context: list[float] = field(default_factory=list)  # seconds in the layers
    match: list[float] = field(default_factory=list)  # seconds of the whole match, features given
    layers: list[int] = field(default_factory=list)  # that ran
    kept: list[float] = field(default_factory=list)  # share of the points after pruning

    def accuracy(self) -> tuple[float, ...]:
        """AUC of the corner error at `THRESHOLDS`."""
        return tuple(float(auc(np.array(self.errors), threshold)) for threshold in THRESHOLDS)


@dataclass
class Comparison:
    """Both, and how far they agree."""

    first: Twin
    second: Twin
    same: int = 0  # matches that both found
    either: int = 0  # the greater number of matches of both, summed over pairs

    @property
    def identical(self) -> float:
        """Share of the matches that both found."""
        return self.same / max(self.either, 1)

    def lines(self) -> list[str]:
        """The comparison as text."""
        lines = []
        for name, twin in (("first", self.first), ("second", self.second)):
            share = ", ".join(
                f"@{t:g} {100 * a:.2f}" for t, a in zip(THRESHOLDS, twin.accuracy(), strict=True)
            )
            medians, sums = (
                ", ".join(f"{part} {1e3 * reduce(getattr(twin, part)):.1f}" for part in ("context", "match"))
                for reduce in (np.median, np.sum)
            )
            depth, kept = np.mean(twin.layers), np.mean(twin.kept)
            lines.append(
                f"{name}: AUC {share}; layers {depth:.2f}, points kept {kept:.1%}; "
                f"median ms {medians}; all pairs ms {sums}"
            )
        context, match = (
            sum(getattr(self.second, part)) / sum(getattr(self.first, part)) for part in ("context", "match")
        )
        lines.append(
            f"{self.identical:.2%} of {self.either} matches identical over {len(self.first.errors)} pairs; "
            f"first is {context:.2f}× as fast on the context, {match:.2f}× on the match"
        )
        return lines


def compare(
    first: Pipeline,
    second: Pipeline,
    pairs: Sequence[HomographyPair],
    watch: Stopwatch,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Match every pair with both pipelines in turn, from features that the first one's front end extracts.

    Args:
        first, second: with attention networks and homographies as their geometry.
        pairs: with known homographies.
        watch: the device and the clock.
        progress: called after every pair.
    """
    both = Comparison(Twin(first), Twin(second))
    clocks = [LayerClock(twin.pipeline.matcher, watch) for twin in (both.first, both.second)]
    for position in range(len(pairs)):
        pair = pairs[position]
        resize = first.config.extractor.resize
        images = [picture.open(resize, None) for picture in (pair.image0, pair.image1)]
        features = first.extractor(images)
        tables = []
        for twin, clock in zip((both.first, both.second), clocks, strict=True):
            if not position:
                twin.pipeline.match_features(*features)
            tables.append(_match(twin, clock, features, pair, watch))
        both.same += len(tables[0] & tables[1])
        both.either += max(map(len, tables))
        if progress is not None:
            progress(position + 1, len(pairs))
    return both


def _match(
    twin: Twin, clock: LayerClock, features: list[Features], pair: HomographyPair, watch: Stopwatch
) -> set[tuple[int, int]]:
    found: list[Matches] = []
    clock.seconds = 0.0
    twin.match.append(watch.once(lambda: found.append(twin.pipeline.match_features(*features))))
    (matches,) = found
    twin.context.append(clock.seconds)
    twin.layers.append(matches.layers_run)
    twin.kept.append((matches.kept0 + matches.kept1) / max(sum(map(len, features)), 1))
    geometry = twin.pipeline.estimator(matches.points0, matches.points1, scores=matches.scores)
    twin.errors.append(
        corner_error(geometry.matrix, pair.H_1_from_0, tuple(int(n) for n in features[0].size.tolist()))
    )
    return set(map(tuple, matches.indices.tolist()))
