"""Kernels in C++, compiled here on request; everything runs without them.

What is between the matrix products of a block, attention on matrix units, the kernel of a transport problem,
the matches nearest to each point, and least-squares matching of windows. `MATCHER_COMPILED=0` in the
environment leaves them alone.
"""

from matcher.kernels.calls import (
    FeedForwardSteps,
    absorb_compiled,
    attend_compiled,
    feed_forward_compiled,
    have_kernels,
    nearest_compiled,
    turn_compiled,
)
from matcher.kernels.library import SWITCH, build, kernels
from matcher.kernels.windows import FitSettings, WindowView, fit_windows_compiled

__all__ = [
    "SWITCH",
    "FeedForwardSteps",
    "FitSettings",
    "WindowView",
    "absorb_compiled",
    "attend_compiled",
    "build",
    "feed_forward_compiled",
    "fit_windows_compiled",
    "have_kernels",
    "kernels",
    "nearest_compiled",
    "turn_compiled",
]
