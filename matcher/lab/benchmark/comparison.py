"""Compare two settings of one preset on the same pairs: identical matches, accuracy and time.

For settings that may change speed but not accuracy: half precision against float32, early exit and pruning
on against off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.lab.benchmark.preset_rows import LayerClock
from matcher.lab.benchmark.timing import Stopwatch
from matcher.lab.evaluate.metrics import auc, corner_error
from matcher.lab.pairs.protocols import HomographyPair
from matcher.pipeline import Pipeline

THRESHOLDS = (3.0, 5.0, 10.0)  # pixels


@dataclass
class SettingResult:
    """The results of one pipeline."""

    pipeline: Pipeline
    errors: list[float] = field(default_factory=list)  # corner error in pixels, one per pair
    context: list[float] = field(default_factory=list)  # seconds in the attention layers
    match: list[float] = field(default_factory=list)  # seconds of matching, from given features
    layers: list[int] = field(default_factory=list)  # layers that ran
    kept: list[float] = field(default_factory=list)  # share of the keypoints left after pruning

    def accuracy(self) -> tuple[float, ...]:
        """AUC of the corner error at `THRESHOLDS`."""
        return tuple(float(auc(np.array(self.errors), threshold)) for threshold in THRESHOLDS)


@dataclass
class Comparison:
    """The results of both, and how far their matches agree."""

    first: SettingResult
    second: SettingResult
    same: int = 0  # matches that both found
    either: int = 0  # the larger of both numbers of matches, summed over pairs

    @property
    def identical(self) -> float:
        """Share of the matches that both found."""
        return self.same / max(self.either, 1)

    def lines(self) -> list[str]:
        """The comparison as text."""
        lines = []
        for name, result in (("first", self.first), ("second", self.second)):
            share = ", ".join(
                f"@{t:g} {100 * a:.2f}" for t, a in zip(THRESHOLDS, result.accuracy(), strict=True)
            )
            medians, sums = (
                ", ".join(f"{part} {1e3 * total(getattr(result, part)):.1f}" for part in ("context", "match"))
                for total in (np.median, np.sum)
            )
            depth, kept = np.mean(result.layers), np.mean(result.kept)
            lines.append(
                f"{name}: AUC {share}; layers {depth:.2f}, keypoints kept {kept:.1%}; "
                f"median ms: {medians}; total ms: {sums}"
            )
        context, match = (
            sum(getattr(self.second, part)) / sum(getattr(self.first, part)) for part in ("context", "match")
        )
        lines.append(
            f"{self.identical:.2%} of {self.either} matches identical over {len(self.first.errors)} pairs; "
            f"the first is {context:.2f}× as fast in the attention layers, {match:.2f}× in matching"
        )
        return lines


def compare(
    first: Pipeline,
    second: Pipeline,
    pairs: Sequence[HomographyPair],
    watch: Stopwatch,
    progress: Callable[[int, int], object] | None = None,
) -> Comparison:
    """Match every pair with both pipelines, from the features that the first one extracts.

    Args:
        first, second: with attention networks and homographies as their geometry.
        pairs: with known homographies.
        watch: the device and the clock.
        progress: called after every pair.
    """
    both = Comparison(SettingResult(first), SettingResult(second))
    clocks = [LayerClock(result.pipeline.matcher, watch) for result in (both.first, both.second)]
    for position in range(len(pairs)):
        pair = pairs[position]
        resize = first.config.extractor.resize
        images = [image.open(resize, None) for image in (pair.image0, pair.image1)]
        features = first.extractor(images)
        tables = []
        for result, clock in zip((both.first, both.second), clocks, strict=True):
            if not position:
                result.pipeline.match_features(*features)
            tables.append(_match(result, clock, features, pair, watch))
        both.same += len(tables[0] & tables[1])
        both.either += max(map(len, tables))
        if progress is not None:
            progress(position + 1, len(pairs))
    return both


def _match(
    result: SettingResult, clock: LayerClock, features: list[Features], pair: HomographyPair, watch: Stopwatch
) -> set[tuple[int, int]]:
    found: list[Matches] = []
    clock.seconds = 0.0
    result.match.append(watch.once(lambda: found.append(result.pipeline.match_features(*features))))
    (matches,) = found
    result.context.append(clock.seconds)
    result.layers.append(matches.layers_run)
    result.kept.append((matches.kept0 + matches.kept1) / max(sum(map(len, features)), 1))
    geometry = result.pipeline.estimator(matches.points0, matches.points1, scores=matches.scores)
    result.errors.append(corner_error(geometry.matrix, pair.H_1_from_0, features[0].image_size))
    return set(map(tuple, matches.indices.tolist()))
