"""Kernels in C++, compiled here on request; everything runs without them.

What is between the matrix products of a block, attention on matrix units, the kernel of a transport problem
(`calls`), assignment by the best candidates of every point and consensus (`candidates`), the front end's maps
(`maps`), all on torch tensors; and least-squares matching of windows (`windows`), on NumPy arrays.
`MATCHER_COMPILED=0` in the environment leaves them alone.
"""

from matcher.kernels.calls import FitSettings, WindowView, fit_windows_compiled
from matcher.kernels.loader import SWITCH, build, kernels

__all__ = [
    "SWITCH",
    "FitSettings",
    "WindowView",
    "build",
    "fit_windows_compiled",
    "kernels",
]
