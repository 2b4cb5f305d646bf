"""Fewer points for a frame that has been slow so far, so that the rest of it still fits the budget."""

from __future__ import annotations

from collections import deque

import numpy as np

from matcher.budget.choice import strongest
from matcher.data.features import Features
from matcher.sequence.latency import StageTimes

_WINDOW = 32  # frames that the usual times are known from
_FEWEST_FRAMES = 8  # before which nothing is limited
_FEWEST_POINTS = 128  # a frame keeps so many
_BASE = 64  # points that would take as long as what a frame needs whatever their number
_STEP = 32  # numbers of points are multiples of it: each is prepared for once
_SHARE = 0.95  # of the budget that is given out


class Pace:
    """Times of the last frames: until their features were found, and after that, for each of their points.

    The plan for a budget is made once, for a machine as it is then. Later other programs may take a core
    now and then: all stages of a frame are then slower alike, and finding the features tells by how much.
    """

    def __init__(self, budget_ms: float | None) -> None:
        """`budget_ms` None: nothing is limited."""
        self._budget_ms = budget_ms
        self._frames: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self._last: tuple[int, float, StageTimes] | None = None

    def limit(self, features: list[Features], times: StageTimes) -> list[Features]:
        """The features of a frame's images, or the strongest that time is left for.

        Args:
            features: of one image or two.
            times: of the frame so far; what it takes in the end is known when the next one comes.
        """
        if self._last is not None:
            count, spent, whole = self._last
            self.learn(count, spent, whole.milliseconds()["total"] - spent)
        spent = times.milliseconds()["total"]
        most = max(len(found) for found in features)
        count = self.points(most, spent)
        self._last = min(count, len(features[0])), spent, times
        return features if count == most else [strongest(found, count) for found in features]

    def points(self, count: int, spent_ms: float) -> int:
        """How many of a frame's points there is time for."""
        if self._budget_ms is None or len(self._frames) < _FEWEST_FRAMES or count <= _FEWEST_POINTS:
            return count
        usual, each = np.median(self._frames, axis=0).tolist()
        slower = max(1.0, spent_ms / usual)
        left = _SHARE * self._budget_ms - spent_ms
        fitting = left / (slower * each) - _BASE
        if fitting >= count:
            return count
        return min(count, max(_FEWEST_POINTS, int(fitting) // _STEP * _STEP))

    def learn(self, count: int, spent_ms: float, rest_ms: float) -> None:
        """Take in a frame that was tracked.

        Args:
            count: its points.
            spent_ms: until they were found.
            rest_ms: after that.
        """
        self._frames.append((max(spent_ms, 1e-3), max(rest_ms, 1e-3) / (count + _BASE)))
