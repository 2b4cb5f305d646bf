"""Whether an estimated pose is accepted, and in words why not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from matcher.data.camera import Camera
from matcher.localization.absolute_pose import Matches3d, PoseEstimate, log10_false_alarms, spread
from matcher.localization.pose import PoseStatus
from matcher.localization.settings import LocalizationConfig

# A camera that is given is doubted where fewer of the keypoints than this share agree, and this many times as
# many do with a focal length that is so many times longer or shorter.
_DOUBTED_BELOW, _MORE, _OTHER_FOCAL = 0.6, 1.5, 1.15


def doubt_camera(
    verdict: tuple[PoseStatus, str, float],
    estimate: PoseEstimate | None,
    matches: Matches3d,
    camera: Camera,
    max_error: float,
    config: LocalizationConfig,
    estimate_freely: Callable[[], PoseEstimate | None],
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "wrong_camera" where another focal length than the given one explains far more.

    Args:
        verdict: of `judge`.
        estimate: with the given camera.
        matches: M of them.
        camera: the given one.
        max_error: of an inlier, stored pixels.
        config: what is asked of a pose.
        estimate_freely: a pose with its focal length; called only where few agree with the given camera.
    """
    total = len(np.unique(matches.keypoints))
    agreeing = _agreeing(estimate, matches)
    if agreeing >= _DOUBTED_BELOW * total or (free := estimate_freely()) is None:
        return verdict
    more, given, found = _agreeing(free, matches), _focal(camera), _focal(free.camera)
    if more < _MORE * agreeing or max(given, found) < _OTHER_FOCAL * min(given, found):
        return verdict
    if judge(free, matches, max_error, config, focal_known=False)[0] != "ok":
        return verdict
    return (
        "wrong_camera",
        f"{agreeing} of {total} matched keypoints agree with the camera that is given, of a focal length of "
        f"{given:.0f} pixels, and {more} with one of {found:.0f}: correct the camera, or give none",
        verdict[2],
    )


def _agreeing(estimate: PoseEstimate | None, matches: Matches3d) -> int:
    return 0 if estimate is None else len(np.unique(matches.keypoints[estimate.inliers]))


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2


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
    agreeing = _agreeing(estimate, matches)
    alarms = log10_false_alarms(
        matches, inliers, float(size[0] * size[1]), max_error, focal_known=focal_known
    )
    least = max(config.min_inliers, min(config.min_share * count, config.enough_inliers))
    if agreeing < least or alarms > config.max_log10_false_alarms:
        return "not_significant", f"only {agreeing} of {count} matched keypoints agree with a pose", alarms
    covered = spread(matches.points2d[inliers], size)
    if covered < config.min_spread:
        share = f"{100 * covered:.1f} %"
        return "implausible", f"the {agreeing} inliers lie in one spot, {share} of the photo", alarms
    return "ok", "", alarms
