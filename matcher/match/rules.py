"""Rules of early exit, as numbers: shared by every engine that runs the network.

LightGlue (Lindenberger et al. 2023), section 3.3.
"""

from __future__ import annotations

import math

NEGLIGIBLE = 0.5  # matches: a pair of which fewer than this are still open need not go on


def confidence_threshold(layer: int, depth: int) -> float:
    """λ of layer 0 … depth−1: 0.8 + 0.1·exp(−4ℓ/L), eq. 11: early layers need more confidence."""
    return 0.8 + 0.1 * math.exp(-4.0 * layer / depth)
