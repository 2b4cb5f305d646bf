"""Kernels in C++, in the wheel or compiled here on request; everything runs without them.

Attention, and least-squares matching of windows. `MATCHER_COMPILED=0` in the environment leaves them alone.
"""
