"""Whether an estimated pose is accepted, and in words why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.localization.pose import (
    Estimates,
    Matches3d,
    PoseEstimate,
    PoseStatus,
    agreeing,
    any_camera,
    estimate_poses,
    refine_poses,
)
from matcher.localization.sparse_map import LocalizationConfig


class Judgement(NamedTuple):
    """What is said of an estimate."""

    status: PoseStatus
    reason: str  # empty when ok
    log10_false_alarms: float  # how many such poses chance would give


def judge(
    estimates: Estimates | None,
    matches: Sequence[Matches3d],
    config: LocalizationConfig,
    *,
    focal_known: bool,
) -> Judgement:
    """Whether enough keypoints agree, and in enough of the picture."""
    count = sum(len(np.unique(each.keypoints)) for each in matches)
    if count < config.min_inliers:
        needed = f"{config.min_inliers} needed"
        return Judgement("too_few_matches", f"{count} keypoints match points of the map, {needed}", 0.0)
    if estimates is None:
        return Judgement("no_model", f"no pose agrees with the {count} matches", 0.0)
    size, found = estimates[0].camera.size, agreeing(estimates)
    area, max_error = size[0] * size[1], max(each.max_error for each in matches)
    chance = min(1.0, math.pi * max_error**2 / area * sum(map(len, matches)) / count)
    alarms = log10_false_alarms(count, found, chance, sample=3 if focal_known else 4)
    least = max(config.min_inliers, min(config.min_share * count, config.enough_inliers))
    if found < least or alarms > config.max_log10_false_alarms:
        reason = f"only {found} of {count} matched keypoints agree with a pose"
        return Judgement("not_significant", reason, alarms)
    # The share of the picture under the inliers' ellipse of two standard deviations.
    points = np.concatenate([each.matches.points2d[each.inliers] for each in estimates])
    covered = 4 * math.pi * math.sqrt(max(np.linalg.det(np.cov(points.T)), 0.0)) / area
    if covered < (config.min_spread_of_few if found < config.few_share * count else config.min_spread):
        where = f"lie in one spot, {100 * covered:.1f} % of the photo"
        return Judgement("implausible", f"the {found} of {count} that agree {where}", alarms)
    return Judgement("ok", "", alarms)


def log10_false_alarms(total: int, found: int, chance: float, sample: int) -> float:
    """log10 of how many poses chance would give that as many of all keypoints agree with, at most.

    Moisan and Stival 2004, "A probabilistic criterion to detect rigid point matches", for absolute poses.
    `chance` is that of a keypoint to agree; a pose is fixed by a `sample`.
    """
    if found <= sample:
        return math.inf

    def choose(n: int, k: int) -> float:
        return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(10)

    tried = math.log10(max(total - sample, 1)) + choose(total, found) + choose(found, sample)
    return tried + (found - sample) * math.log10(chance)


def _better(
    estimate: PoseEstimate | None, matches: Matches3d, config: LocalizationConfig, camera: Camera, known: bool
) -> tuple[PoseEstimate | None, str]:
    """Another pose that far more matches agree with, half as many again, where fewer than 60 % do; how many.

    It is of the matches alone, by the camera, or by one like it whose focal length is not known.
    """
    found, count = agreeing([estimate] if estimate else None), len(np.unique(matches.keypoints))
    if found < 0.6 * count:
        others = estimate_poses([matches], [camera], focal_known=known, seed=config.seed)
        right = others is not None and agreeing(others) >= 1.5 * found
        if right and judge(others, [matches], config, focal_known=known).status == "ok":
            return others[0], f"{found} of {count} matched keypoints agree with"
    return None, ""


def check_camera(
    estimate: PoseEstimate | None, matches: Matches3d, camera: Camera, config: LocalizationConfig
) -> str:
    """Why the camera that was given seems wrong: another one explains far more matches; else empty.

    That is one with a focal length 15 % longer or shorter, or with a principal point in the middle that is
    5 % of the focal length away.
    """
    other, agree = _better(estimate, matches, config, any_camera(camera.size), known=False)
    if other is None:
        return ""
    given, found = _focal(camera), _focal(other.camera)
    centre, middle = (camera.cx, camera.cy), (other.camera.cx, other.camera.cy)
    if max(given, found) < 1.15 * min(given, found) and math.dist(centre, middle) < 0.05 * given:
        return ""
    points = ["({:.0f}, {:.0f})".format(*point) for point in (centre, middle)]
    return (
        f"{agree} the camera that is given, of a focal length of {given:.0f} pixels and a principal point at "
        f"{points[0]}, and {agreeing([other])} with one of {found:.0f} and {points[1]}: correct the camera, "
        "or give none"
    )


def check_rig_pose(estimate: PoseEstimate, config: LocalizationConfig) -> str:
    """Why the relative pose of a picture of a rig seems wrong: another one explains far more; else empty."""
    other, agree = _better(estimate, estimate.matches, config, estimate.camera, known=True)
    if other is None:
        return ""
    alone = f"{agreeing([other])} with one of this picture alone"
    return f"{agree} the pose of the rig, and {alone}: correct its relative pose"


def check_focal(estimate: PoseEstimate) -> str:
    """Why the focal length of an accepted pose seems wrong: the matches fit another one better; else empty.

    That is one 4 % longer or shorter in x and y, with squared errors a fifth less, those beyond an inlier's
    largest counting as that. A difference that is only significant would say too little: the points of a map
    have errors of their own, which a focal length may take up.
    """
    fixed, free = (refine_poses([estimate], refine_focal=each) for each in (False, True))
    if fixed is None or free is None:
        return ""
    given, found = estimate.camera, free[0].camera
    changes = np.log([found.fx / given.fx, found.fy / given.fy])  # of one sign where the zoom is wrong
    if max(changes.min(), -changes.max()) < np.log(1.04):
        return ""
    matches, most = estimate.matches, estimate.matches.max_error
    errors = [matches.errors(each.cam_from_world, each.camera) for each in (*fixed, *free)]
    before, after = (float(np.square(np.minimum(each, most)).sum()) for each in errors)
    if after > 0.8 * before:
        return ""
    return (
        f"the matches fit a focal length of {_focal(found):.0f} pixels, and the camera that is given has "
        f"one of {_focal(given):.0f} pixels: correct the camera, or give none"
    )


def check_ambiguous(estimates: Estimates, config: LocalizationConfig) -> str:
    """Why an accepted pose may be another one: the other matches agree with that nearly as well; else empty.

    Where things look alike, such as the tables of a room, wrong matches agree with each other. Another pose
    rivals where 55 % as many keypoints agree with it, five times an inlier's largest error away by the
    accepted one: in a kitchen with like tables a wrong pose had .65, right ones at most .43.
    """
    found = agreeing(estimates)
    if found >= config.enough_inliers:
        return ""
    others = []
    for each in estimates:
        keypoints = each.matches.keypoints
        others.append(each.matches.select(~np.isin(keypoints, keypoints[each.inliers])))
    rivals = estimate_poses(others, [each.camera for each in estimates], seed=config.seed)
    if (count := agreeing(rivals)) < 0.55 * found:
        return ""
    off = [
        rest.errors(estimate.cam_from_world, estimate.camera)[rival.inliers] / rest.max_error
        for rest, estimate, rival in zip(others, estimates, rivals, strict=True)
    ]
    if np.median(np.concatenate(off)) < 5:
        return ""  # it is the same place, seen less exactly
    return f"{found} matched keypoints agree with a pose, and {count} others with another one"


def _focal(camera: Camera) -> float:
    return (camera.fx + camera.fy) / 2
