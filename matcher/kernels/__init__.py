"""Kernels in C++, compiled here on request; everything runs without them.

What is between the matrix products of a block, attention on matrix units, the kernel of a transport problem,
and the matches nearest to each point. `MATCHER_COMPILED=0` in the environment leaves them alone.
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

__all__ = [
    "SWITCH",
    "FeedForwardSteps",
    "absorb_compiled",
    "attend_compiled",
    "build",
    "feed_forward_compiled",
    "have_kernels",
    "kernels",
    "nearest_compiled",
    "turn_compiled",
]
