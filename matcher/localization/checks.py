"""Whether an estimated pose is accepted, and in words why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.localization.pose import (
    Matches3d,
    PoseEstimate,
    PoseStatus,
    refine_pose,
    reprojection_errors,
)
from matcher.localization.sparse_map import LocalizationConfig


class Judgement(NamedTuple):
    """What is said of an estimate."""

    status: PoseStatus
    reason: str  # empty when ok
    log10_false_alarms: float  # how many such poses chance would give


def judge(
    estimates: Sequence[PoseEstimate] | None,
    matches: Sequence[Matches3d],
    max_errors: Sequence[float],
    config: LocalizationConfig,
    *,
    focal_known: bool,
) -> Judgement:
    """Whether enough keypoints agree, and in enough of the picture."""
    joined = Matches3d.joined(matches)
    count = len(np.unique(joined.keypoints))
    if count < config.min_inliers:
        needed = f"{config.min_inliers} needed"
        return Judgement("too_few_matches", f"{count} keypoints match points of the map, {needed}", 0.0)
    if estimates is None:
        return Judgement("no_model", f"no pose agrees with the {count} matches", 0.0)
    size = estimates[0].camera.size
    inliers = np.concatenate([each.inliers for each in estimates])
    agreeing = num_agreeing(estimates, matches)
    alarms = log10_false_alarms(joined, inliers, size[0] * size[1], max(max_errors), focal_known=focal_known)
    least = max(config.min_inliers, min(config.min_share * count, config.enough_inliers))
    if agreeing < least or alarms > config.max_log10_false_alarms:
        reason = f"only {agreeing} of {count} matched keypoints agree with a pose"
        return Judgement("not_significant", reason, alarms)
    covered = spread(joined.points2d[inliers], size)
    if covered < (config.min_spread_of_few if agreeing < config.few_share * count else config.min_spread):
        where = f"lie in one spot, {100 * covered:.1f} % of the photo"
        return Judgement("implausible", f"the {agreeing} of {count} that agree {where}", alarms)
    return Judgement("ok", "", alarms)


def check_camera(
    estimate: PoseEstimate | None,
    matches: Matches3d,
    camera: Camera,
    max_error: float,
    config: LocalizationConfig,
    estimate_freely: Callable[[], PoseEstimate | None],
) -> str:
    """Why the camera that was given seems wrong: another one explains far more matches; else empty.

    That is: fewer than 60 % of the keypoints agree with it, and half as many again with a focal length 15 %
    longer or shorter, or with a principal point in the middle that is 5 % of the focal length away.
    """
    total, agreeing = len(np.unique(matches.keypoints)), num_agreeing([estimate], [matches])
    if agreeing >= 0.6 * total or (free := estimate_freely()) is None:
        return ""
    more, given, found = num_agreeing([free], [matches]), _focal(camera), _focal(free.camera)
    centre, middle = (camera.cx, camera.cy), (free.camera.cx, free.camera.cy)
    another = max(given, found) >= 1.15 * min(given, found) or math.dist(centre, middle) >= 0.05 * given
    if more < 1.5 * agreeing or not another:
        return ""
    if judge([free], [matches], [max_error], config, focal_known=False).status != "ok":
        return ""
    points = ["({:.0f}, {:.0f})".format(*point) for point in (centre, middle)]
    return (
        f"{agreeing} of {total} matched keypoints agree with the camera that is given, of a focal length of "
        f"{given:.0f} pixels and a principal point at {points[0]}, and {more} with one of {found:.0f} and "
        f"{points[1]}: correct the camera, or give none"
    )


def check_rig_pose(
    estimate: PoseEstimate,
    matches: Matches3d,
    max_error: float,
    config: LocalizationConfig,
    estimate_freely: Callable[[], PoseEstimate | None],
) -> str:
    """Why the relative pose of a picture of a rig seems wrong: another one explains far more; else empty.

    That is: fewer than 60 % of its matched keypoints agree with the pose that the others give it, and half as
    many again with one of its own. The other arguments are those of `check_camera`.
    """
    total, agreeing = len(np.unique(matches.keypoints)), num_agreeing([estimate], [matches])
    if total < config.min_inliers or agreeing >= 0.6 * total or (free := estimate_freely()) is None:
        return ""
    more = num_agreeing([free], [matches])
    if more < max(1.5 * agreeing, config.min_inliers):
        return ""
    if judge([free], [matches], [max_error], config, focal_known=True).status != "ok":
        return ""
    return (
        f"{agreeing} of {total} matched keypoints agree with the pose of the rig, and {more} with one of "
        "this picture alone: correct its relative pose"
    )


def check_focal(estimate: PoseEstimate, matches: Matches3d, max_error: float) -> str:
    """Why the focal length of an accepted pose seems wrong: the matches fit another one better; else empty.

    That is one 4 % longer or shorter in x and y, with squared errors a fifth less, those beyond `max_error`
    counting as that. A difference that is only significant would say too little: the points of a map have
    errors of their own, which a focal length may take up.
    """
    fixed, free = (refine_pose(estimate, matches, max_error, refine_focal=each) for each in (False, True))
    if fixed is None or free is None:
        return ""
    given, found = estimate.camera, free.camera
    changes = np.log([found.fx / given.fx, found.fy / given.fy])  # of one sign where the zoom is wrong
    if max(changes.min(), -changes.max()) < np.log(1.04):
        return ""
    errors = [reprojection_errors(matches, each.cam_from_world, each.camera) for each in (fixed, free)]
    before, after = (float(np.square(np.minimum(each, max_error)).sum()) for each in errors)
    if after > 0.8 * before:
        return ""
    return (
        f"the matches fit a focal length of {_focal(found):.0f} pixels, and the camera that is given has "
        f"one of {_focal(given):.0f} pixels: correct the camera, or give none"
    )


def check_ambiguous(
    estimates: Sequence[PoseEstimate],
    matches: Sequence[Matches3d],
    max_errors: Sequence[float],
    config: LocalizationConfig,
    estimate_others: Callable[[list[Matches3d]], Sequence[PoseEstimate] | None],
) -> str:
    """Why an accepted pose may be another one: the other matches agree with that nearly as well; else empty.

    Where things look alike, such as the tables of a room, wrong matches agree with each other. Another pose
    rivals where 55 % as many keypoints agree with it, five times an inlier's largest error away by the
    accepted one: in a kitchen with like tables a wrong pose had .65, right ones at most .43.
    """
    agreeing = num_agreeing(estimates, matches)
    if agreeing >= config.enough_inliers:
        return ""
    others = [
        each.select(np.flatnonzero(~np.isin(each.keypoints, each.keypoints[estimate.inliers])))
        for estimate, each in zip(estimates, matches, strict=True)
    ]
    rivals = estimate_others(others)
    count = 0 if rivals is None else num_agreeing(rivals, others)
    if count < 0.55 * agreeing:
        return ""
    off = [
        reprojection_errors(rest, estimate.cam_from_world, estimate.camera)[rival.inliers] / limit
        for rest, estimate, rival, limit in zip(others, estimates, rivals, max_errors, strict=True)
    ]
    if np.median(np.concatenate(off)) < 5:
        return ""  # it is the same place, seen less exactly
    return f"{agreeing} matched keypoints agree with a pose, and {count} others with another one"


def num_agreeing(estimates: Sequence[PoseEstimate | None], matches: Sequence[Matches3d]) -> int:
    """Keypoints of all pictures with an inlier."""
    pairs = zip(estimates, matches, strict=True)
    return sum(len(np.unique(own.keypoints[each.inliers])) for each, own in pairs if each is not None)


def log10_false_alarms(
    matches: Matches3d, inliers: np.ndarray, area: float, max_error: float, *, focal_known: bool = True
) -> float:
    """log10 of how many poses chance would give that as many keypoints agree with, at most.

    Moisan and Stival 2004, "A probabilistic criterion to detect rigid point matches", for absolute poses.

    Args:
        matches: all that the pose was estimated from.
        inliers: (M,) those that agree.
        area: of the image, stored pixels².
        max_error: of an inlier, stored pixels.
        focal_known: a sample is one larger where it is not.
    """
    total = len(np.unique(matches.keypoints))
    agreeing = len(np.unique(matches.keypoints[inliers]))
    sample = 3 if focal_known else 4
    if agreeing <= sample:
        return math.inf
    chance = min(1.0, math.pi * max_error**2 / area * len(matches.keypoints) / total)

    def choose(n: int, k: int) -> float:
        return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(10)

    tried = math.log10(max(total - sample, 1)) + choose(total, agreeing) + choose(agreeing, sample)
    return tried + (agreeing - sample) * math.log10(chance)


def spread(points: np.ndarray, size: tuple[int, int]) -> float:
    """Share of the image's area under the points' ellipse of two standard deviations."""
    if len(points) < 3:
        return 0.0
    return float(4 * math.pi * math.sqrt(max(np.linalg.det(np.cov(points.T)), 0.0)) / (size[0] * size[1]))


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2
