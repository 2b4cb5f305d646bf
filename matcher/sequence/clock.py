"""Timestamps that may go back."""

from __future__ import annotations

import math

from matcher.errors import UsageError


class Clock:
    """Distinguishes a frame that came too late from a clock that was set back.

    A frame older than the last accepted one is refused. If the next one is older too, but not older than the
    refused one, the clock has been set back, and from then on its new time counts.
    """

    def __init__(self) -> None:
        self._last = -math.inf
        self._refused = math.inf

    def accepts(self, timestamp: float | None) -> bool:
        """Whether a frame of this time (seconds; None: unknown, always accepted) is in order.

        Raises:
            UsageError: a time that is not a finite number.
        """
        if timestamp is None:
            return True
        if not isinstance(timestamp, (int, float)) or not math.isfinite(timestamp):
            raise UsageError(f"a timestamp must be a finite number of seconds, not {timestamp!r}")
        if timestamp < self._last and timestamp < self._refused:
            self._refused = timestamp
            return False
        self._last, self._refused = timestamp, math.inf
        return True
