"""Whether an estimated pose is accepted, and in words why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import dist

import numpy as np

from matcher.data.camera import Camera
from matcher.localization.absolute_pose import (
    Matches3d,
    PoseEstimate,
    log10_false_alarms,
    refine_pose,
    reprojection_errors,
    spread,
)
from matcher.localization.pose import PoseStatus
from matcher.localization.settings import LocalizationConfig

# A camera that is given is doubted where fewer of the keypoints than this share agree, and this many times as
# many do with a focal length that is so many times longer or shorter, or with a principal point in the middle
# that is so many focal lengths away.
_DOUBTED_BELOW, _MORE, _OTHER_FOCAL, _OTHER_CENTRE = 0.6, 1.5, 1.15, 0.05
# An accepted pose is doubted where its matches fit a focal length better that is so many times longer or
# shorter, by this share of their squared errors.
_NEAR_FOCAL, _LESS_ERROR = 1.04, 0.2
# Another pose rivals the accepted one where this share as many other keypoints agree with it, which are so
# many times the largest error off by the accepted one. In a kitchen with like tables a wrong pose had .65,
# right ones at most .43.
_RIVAL, _ELSEWHERE = 0.55, 5.0


def doubt_camera(
    verdict: tuple[PoseStatus, str, float],
    estimate: PoseEstimate | None,
    matches: Matches3d,
    camera: Camera,
    max_error: float,
    config: LocalizationConfig,
    estimate_freely: Callable[[], PoseEstimate | None],
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "wrong_camera" where another camera than the given one explains far more.

    Args:
        verdict: of `judge`.
        estimate: with the given camera.
        matches: M of them.
        camera: the given one.
        max_error: of an inlier, stored pixels.
        config: what is asked of a pose.
        estimate_freely: a pose with its focal length, the principal point in the middle; called only where
            few agree with the given camera.
    """
    total = len(np.unique(matches.keypoints))
    agreeing = _agreeing(estimate, matches)
    if agreeing >= _DOUBTED_BELOW * total or (free := estimate_freely()) is None:
        return verdict
    more, given, found = _agreeing(free, matches), _focal(camera), _focal(free.camera)
    centre, middle = (camera.cx, camera.cy), (free.camera.cx, free.camera.cy)
    other_focal = max(given, found) >= _OTHER_FOCAL * min(given, found)
    other_centre = dist(centre, middle) >= _OTHER_CENTRE * given
    if more < _MORE * agreeing or not (other_focal or other_centre):
        return verdict
    if judge(free, matches, max_error, config, focal_known=False)[0] != "ok":
        return verdict
    return (
        "wrong_camera",
        f"{agreeing} of {total} matched keypoints agree with the camera that is given, of a focal length of "
        f"{given:.0f} pixels and a principal point at {_place(centre)}, and {more} with one of "
        f"{found:.0f} and {_place(middle)}: correct the camera, or give none",
        verdict[2],
    )


def doubt_focal(
    verdict: tuple[PoseStatus, str, float],
    estimate: PoseEstimate,
    matches: Matches3d,
    max_error: float,
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "wrong_camera" where the matches of an accepted pose fit another focal length better.

    Errors beyond `max_error` count as that. A difference that is only significant would say too little: the
    points of a map have errors of their own, which a focal length may take up.

    Args:
        verdict: of `judge`.
        estimate: the accepted pose, with the given camera.
        matches: M of them.
        max_error: of an inlier, stored pixels.
    """
    fixed, free = (refine_pose(estimate, matches, max_error, refine_focal=each) for each in (False, True))
    if fixed is None or free is None:
        return verdict
    given, found = estimate.camera, free.camera
    changes = np.log([found.fx / given.fx, found.fy / given.fy])  # of one sign where the zoom is wrong
    if max(changes.min(), -changes.max()) < np.log(_NEAR_FOCAL):
        return verdict
    errors = [reprojection_errors(matches, each.cam_from_world, each.camera) for each in (fixed, free)]
    before, after = (float(np.square(np.minimum(each, max_error)).sum()) for each in errors)
    if after > (1 - _LESS_ERROR) * before:
        return verdict
    return (
        "wrong_camera",
        f"the matches fit a focal length of {_focal(found):.0f} pixels, and the camera that is given has "
        f"one of {_focal(given):.0f} pixels: correct the camera, or give none",
        verdict[2],
    )


def doubt_alone(
    verdict: tuple[PoseStatus, str, float],
    estimates: Sequence[PoseEstimate],
    matches: Sequence[Matches3d],
    max_errors: Sequence[float],
    config: LocalizationConfig,
    estimate_others: Callable[[list[Matches3d]], Sequence[PoseEstimate | None] | None],
) -> tuple[PoseStatus, str, float]:
    """The verdict, or "ambiguous" where the other matches agree with another pose nearly as well.

    Where things look alike, such as the tables of a room, wrong matches agree with each other.

    Args:
        verdict: of `judge`.
        estimates: the accepted pose of each picture: of one, or of those of a rig.
        matches: of each.
        max_errors: of an inlier in each, stored pixels.
        config: what is asked of a pose.
        estimate_others: poses from other matches of the same pictures.
    """
    agreeing = sum(map(_agreeing, estimates, matches))
    if agreeing >= config.enough_inliers:
        return verdict
    others = [
        each.select(np.flatnonzero(~np.isin(each.keypoints, each.keypoints[estimate.inliers])))
        for estimate, each in zip(estimates, matches, strict=True)
    ]
    rivals = estimate_others(others)
    count = 0 if rivals is None else sum(map(_agreeing, rivals, others))
    if count < _RIVAL * agreeing:
        return verdict
    off = [
        reprojection_errors(rest, estimate.cam_from_world, estimate.camera)[rival.inliers] / limit
        for rest, estimate, rival, limit in zip(others, estimates, rivals, max_errors, strict=True)
    ]
    if np.median(np.concatenate(off)) < _ELSEWHERE:
        return verdict  # it is the same place, seen less exactly
    reason = f"{agreeing} matched keypoints agree with a pose, and {count} others with another one"
    return "ambiguous", reason, verdict[2]


def _agreeing(estimate: PoseEstimate | None, matches: Matches3d) -> int:
    return 0 if estimate is None else len(np.unique(matches.keypoints[estimate.inliers]))


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2


def _place(point: tuple[float, float]) -> str:
    return f"({point[0]:.0f}, {point[1]:.0f})"


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
    if covered < (config.min_spread_of_few if agreeing < config.few_share * count else config.min_spread):
        share = f"{100 * covered:.1f} %"
        return (
            "implausible",
            f"the {agreeing} of {count} that agree lie in one spot, {share} of the photo",
            alarms,
        )
    return "ok", "", alarms
