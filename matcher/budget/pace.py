"""How much longer work takes than its plan said, because other programs use the machine."""

from __future__ import annotations

from collections import deque

_LAST = 20  # works that are looked at
# Of every so many, one slower work is passed over: less work does not shorten waits for a core, and plans for
# the slowest left half of a sequence's points for nothing.
_EACH = 7
_CHANGE = 0.1  # of the pace, above which it is worth another plan
_FASTEST, _SLOWEST = 1.0, 20.0


class Pace:
    """A running ratio of measured to predicted time, of the slow ones of the last works.

    It is at least 1: that easy pairs take less than predicted says nothing of the next one.

    >>> pace = Pace()
    >>> for milliseconds in (30, 62, 58):
    ...     pace.add(milliseconds, predicted=31)
    >>> pace.value
    2.0
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_LAST)

    def add(self, measured: float, *, predicted: float) -> None:
        """Take in a work that took so many milliseconds, and what its plan said on a machine left alone."""
        self._ratios.append(measured / max(predicted, 1e-6))

    @property
    def value(self) -> float:
        """Times as long as predicted that the next work may take."""
        if not self._ratios:
            return _FASTEST
        slow = sorted(self._ratios)[-1 - len(self._ratios) // _EACH]
        return min(max(slow, _FASTEST), _SLOWEST)

    def differs_from(self, value: float) -> bool:
        """Whether a plan for another pace is out of date."""
        return abs(self.value - value) > _CHANGE * value
