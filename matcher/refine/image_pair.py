"""Refinement of the matches of two images: on grey values, or on gradients where those do not correlate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from matcher.config import RefineConfig
from matcher.data.gradients import gradient_image
from matcher.data.image import Image
from matcher.data.matches import Matches, MatchRefinement
from matcher.refine.refinement import ImagePyramid, refine_matches

FEW = 0.3  # share of the matches; with half, rooms seen from far apart lose a little
SMOOTHING = 1.0  # pixels; chosen like that of the pass on gradients, .7 and 1.4 being level


def refine_image_pair(image0: Image, image1: Image, matches: Matches, config: RefineConfig) -> Matches:
    """The matches refined on grey values and, where few of them were, the others on gradient magnitudes.

    Infrared and visible light, or day and night, agree about where edges are, not about which side of them
    is the brighter one.

    Args:
        image0, image1: at the file's resolution where that was kept; gradients are those of the resized ones.
        matches: from any matcher.
        config: window size and acceptance thresholds.
    """
    refined = refine_matches(ImagePyramid.of(image0), ImagePyramid.of(image1), matches, config)
    before = refined.refinement
    if not len(refined) or before.accepted.mean() >= FEW:
        return refined
    sides = (ImagePyramid.of(gradient_image(image, SMOOTHING)) for image in (image0, image1))
    again = refine_matches(*sides, refined, config)
    moved = np.flatnonzero(~before.accepted & again.refinement.accepted)
    points1 = refined.points1.copy()
    points1[moved] = again.points1[moved]
    chosen = {name: values.copy() for name, values in vars(before).items()}
    for name, values in chosen.items():
        values[moved] = getattr(again.refinement, name)[moved]
    return replace(refined, points1=points1, refinement=MatchRefinement(**chosen))
