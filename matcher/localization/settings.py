"""How photos are localised, and when a pose is refused."""

from __future__ import annotations

from dataclasses import dataclass

from matcher.errors import UsageError


@dataclass(frozen=True)
class LocalizationConfig:
    """Policy of `Map.localize`; pixels are those of the resized photo.

    Raises:
        UsageError: a value out of range.
    """

    neighbours: int = 10  # most similar images of the map that a photo is matched with, at most
    batch: int = 2  # images matched before the pose is tried
    enough_inliers: int = 150  # after which no more images are matched
    # Where the first batch is not enough, the other images are matched by so many keypoints at first
    # (preemptive matching, Wu 2013), and with all only if so many of these match points; 0: all at once.
    preemptive_keypoints: int = 256
    preemptive_matches: int = 4
    max_error: float = 4.0  # of an inlier
    # Keypoints that agree with a pose, at least, and log10 of the poses with as many that chance would give.
    # Wrong matches are not independent: in a room with several like tables, up to 27 keypoints (SIFT: 32)
    # agreed with a pose at the wrong one, for which log10 is −40 (−73).
    min_inliers: int = 35
    max_log10_false_alarms: float = -80.0
    # Of the matched keypoints, unless `enough_inliers` agree: with a wrong pose at such a table 57 of 313 did
    # once (SIFT), with right ones 23 % or more.
    min_share: float = 0.2
    min_spread: float = 0.005  # share of the photo that the inliers cover
    # And where less than this share of the matched keypoints agree, as elsewhere in the photo they disagree.
    # Where points of the map were inexact 27 to 39 % agreed with poses .4 to .9 m off, on 11 to 13 % of the
    # photo; right ones of as few cover more, but for one of SIFT's.
    few_share: float = 0.45
    min_spread_of_few: float = 0.14
    refine: bool = True  # keypoints of the photo are refined on the images
    seed: int = 0  # of the sampling

    def __post_init__(self) -> None:
        for name in ("neighbours", "batch", "enough_inliers", "min_inliers", "max_error"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)!r}")
        for name in ("preemptive_keypoints", "preemptive_matches"):
            if getattr(self, name) < 0:
                raise UsageError(f"{name} must not be negative, but it is {getattr(self, name)!r}")
