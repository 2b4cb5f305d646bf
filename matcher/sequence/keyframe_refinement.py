"""Points of a frame refined against the keyframe that they are linked to, on the images themselves."""

from __future__ import annotations

from matcher.config import RefineConfig
from matcher.data.matches import Matches
from matcher.refine.refinement import refine_matches
from matcher.sequence.frames import FrameLinks
from matcher.sequence.keyframes import KeptFrame


class KeyframeRefinement:
    """Moves the points of each frame to where their surroundings look most like those in the keyframe.

    The reference of a point is the keyframe, not the frame before: errors of one frame are not handed on to
    the next.
    """

    def __init__(self, config: RefineConfig | None) -> None:
        """`config` None: points stay where the front end found them."""
        self.config = config
        self._last: KeptFrame | None = None  # keyframe

    def refine(self, keyframe: KeptFrame, frame: KeptFrame, links: FrameLinks) -> None:
        """Move the points of `frame` that consistent links join to the keyframe, where that is reliable."""
        if self.config is None or keyframe.pyramid is None or frame.pyramid is None:
            return
        if self._last is not None and self._last is not keyframe:
            self._last.pyramid.release()
        self._last = keyframe
        rows = links.indices[links.consistent]
        points = keyframe.keypoints[rows[:, 0]], frame.keypoints[rows[:, 1]]
        matches = Matches(rows, *points, links.scores[links.consistent])
        refined = refine_matches(keyframe.pyramid, frame.pyramid, matches, self.config)
        accepted = refined.refinement.accepted
        frame.keypoints[rows[accepted, 1]] = refined.points1[accepted]
