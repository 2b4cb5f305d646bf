"""Whether an estimated pose is accepted, and in words why not."""

from __future__ import annotations

import numpy as np

from matcher.localization.absolute_pose import Matches3d, PoseEstimate, log10_false_alarms, spread
from matcher.localization.pose import PoseStatus
from matcher.localization.settings import LocalizationConfig


def judge(
    estimate: PoseEstimate | None,
    matches: Matches3d,
    max_error: float,
    config: LocalizationConfig,
    *,
    focal_known: bool,
) -> tuple[PoseStatus, str, float]:
    """Status, reason, and log10 of the number of false alarms.

    Args:
        estimate: from these matches.
        matches: M of them.
        max_error: of an inlier, stored pixels.
        config: what is asked of a pose.
        focal_known: before the estimation.
    """
    count = len(np.unique(matches.keypoints))
    if count < config.min_inliers:
        return (
            "too_few_matches",
            f"{count} keypoints match points of the map, {config.min_inliers} needed",
            0.0,
        )
    if estimate is None:
        return "no_model", f"no pose agrees with the {count} matches", 0.0
    size = estimate.camera.size
    inliers = estimate.inliers
    agreeing = len(np.unique(matches.keypoints[inliers]))
    alarms = log10_false_alarms(
        matches, inliers, float(size[0] * size[1]), max_error, focal_known=focal_known
    )
    if agreeing < config.min_inliers or alarms > config.max_log10_false_alarms:
        return "not_significant", f"only {agreeing} of {count} matched keypoints agree with a pose", alarms
    covered = spread(matches.points2d[inliers], size)
    if covered < config.min_spread:
        share = f"{100 * covered:.1f} %"
        return "implausible", f"the {agreeing} inliers lie in one spot, {share} of the photo", alarms
    return "ok", "", alarms
