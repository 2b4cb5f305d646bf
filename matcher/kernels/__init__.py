"""Kernels in C++, compiled here on request; everything runs without them.

What is between the matrix products of a block, attention on matrix units, the kernel of a transport problem,
assignment by the best candidates of every point, consensus, the front end's maps, and least-squares matching
of windows. `MATCHER_COMPILED=0` in the environment leaves them alone.
"""

from matcher.kernels.calls import (
    FeedForwardSteps,
    absorb_compiled,
    attend_compiled,
    feed_forward_compiled,
    have_kernels,
    turn_compiled,
)
from matcher.kernels.candidates import (
    CandidateSet,
    best_candidates,
    find_candidates,
    fit_compiled,
    have_candidates,
    supported_candidates,
    transport_candidates,
)
from matcher.kernels.library import SWITCH, build, kernels
from matcher.kernels.maps import (
    add_enlarged_compiled,
    have_maps,
    peaks_compiled,
    sample_compiled,
    score_pixels_compiled,
)
from matcher.kernels.windows import FitSettings, WindowView, fit_windows_compiled

__all__ = [
    "SWITCH",
    "CandidateSet",
    "FeedForwardSteps",
    "FitSettings",
    "WindowView",
    "absorb_compiled",
    "add_enlarged_compiled",
    "attend_compiled",
    "best_candidates",
    "build",
    "feed_forward_compiled",
    "find_candidates",
    "fit_compiled",
    "fit_windows_compiled",
    "have_candidates",
    "have_kernels",
    "have_maps",
    "kernels",
    "peaks_compiled",
    "sample_compiled",
    "score_pixels_compiled",
    "supported_candidates",
    "transport_candidates",
    "turn_compiled",
]
