"""Pictures with known relative poses, such as a rig, a stereo pair or the last frames, localised together.

Their rays make one generalised camera, whose pose PoseLib finds by LO-RANSAC over GP3P (Kukelova et al. 2016)
and pycolmap refines; pictures with too few matches of their own help each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.export.colmap import import_pycolmap, to_colmap
from matcher.localization.localizer import (
    Attempt,
    Correspondences,
    Localizer,
    Query,
    as_pose,
    covisibility_clusters,
    doubt_alone,
    doubt_camera,
    doubt_focal,
    judge,
)
from matcher.localization.pose import (
    CONFIDENCE,
    ITERATIONS,
    LOSS,
    MIN_MATCHES,
    Matches3d,
    Pose,
    PoseEstimate,
    PoseStatus,
    any_camera,
    as_colmap_camera,
    as_rigid,
    covariance_of,
    estimate_pose,
    reprojection_errors,
    undistorted,
)
from matcher.localization.sparse_map import LocalizationConfig

_CLUSTERS = 2  # groups of map images that are tried
_ROUNDS = 3  # of refinement and a new choice of inliers


def localize_rig(localizer: Localizer, queries: Sequence[Query], cam_from_rig: np.ndarray) -> list[Pose]:
    """The pose of each picture, all with one pose of the rig; the same status for all.

    Args:
        localizer: of the map.
        queries: R pictures with cameras.
        cam_from_rig: (R, 4, 4).
    """
    best: tuple[list[Correspondences], list[Attempt]] | None = None
    for cluster in _clusters(localizer, queries):
        found = [_correspond(localizer, query, cluster) for query in queries]
        attempts = _attempts(localizer, queries, found, cam_from_rig)
        if best is None or sum(a.count for a in attempts) > sum(a.count for a in best[1]):
            best = found, attempts
        if attempts[0].verdict[0] == "ok":
            break
    if best is None:
        return [Pose("no_similar_image", "the map holds nothing to compare with") for _ in queries]
    return [as_pose(*each) for each in zip(queries, *best, strict=True)]


def _clusters(localizer: Localizer, queries: Sequence[Query]) -> list[list[int]]:
    """Groups of images that are similar to any of the pictures."""
    rows: dict[int, None] = {}
    for query in queries:
        rows |= dict.fromkeys(row for group in localizer.similar_clusters(query) for row in group)
    return covisibility_clusters(localizer.model, list(rows))[:_CLUSTERS]


def _correspond(localizer: Localizer, query: Query, cluster: list[int]) -> Correspondences:
    """A picture's matches with the points of a cluster, by the images that are similar to it."""
    positions = to_numpy(query.features.keypoints).astype(np.float64)
    found = Correspondences(localizer.model, positions)
    own = [row for group in localizer.similar_clusters(query) for row in group if row in cluster]
    images = (own or cluster)[: localizer.config.neighbours // 2 or 1]
    for start in range(0, len(images), localizer.config.batch):
        localizer.match(query, found, images[start : start + localizer.config.batch])
    return found


def _attempts(
    localizer: Localizer,
    queries: Sequence[Query],
    found: Sequence[Correspondences],
    cam_from_rig: np.ndarray,
) -> list[Attempt]:
    """One for each picture, from a common pose and a common verdict."""
    config = localizer.config
    tables = [each.table() for each in found]
    matches = [each.matches(table) for each, table in zip(found, tables, strict=True)]
    errors = [query.stored_pixels(config.max_error) for query in queries]
    cameras = [query.camera for query in queries]
    estimates = estimate_rig(matches, cameras, cam_from_rig, errors, seed=config.seed)
    joined = _joined(matches)
    if estimates is None:
        verdict = judge(None, joined, errors[0], config, focal_known=True)
        estimates = [None] * len(queries)
    else:
        inliers = np.concatenate([estimate.inliers for estimate in estimates])
        together = PoseEstimate(estimates[0].cam_from_world, cameras[0], inliers)
        verdict = judge(together, joined, max(errors), config, focal_known=True)
    if verdict[0] != "too_few_matches":
        verdict = _doubted(verdict, queries, matches, estimates, errors, config)
    if verdict[0] == "ok":
        how = dict(cameras=cameras, cam_from_rig=cam_from_rig, max_errors=errors, seed=config.seed)
        verdict = doubt_alone(
            verdict, estimates, matches, errors, config, lambda others: estimate_rig(others, **how)
        )
    rows = zip(tables, matches, estimates, strict=True)
    return [Attempt(table, each, estimate, verdict) for table, each, estimate in rows]


def _doubted(
    verdict: tuple[PoseStatus, str, float],
    queries: Sequence[Query],
    matches: Sequence[Matches3d],
    estimates: Sequence[PoseEstimate | None],
    errors: Sequence[float],
    config: LocalizationConfig,
) -> tuple[PoseStatus, str, float]:
    """The common verdict, or "wrong_camera" where a picture alone says that its camera does not fit."""
    for number, (query, own, estimate, error) in enumerate(
        zip(queries, matches, estimates, errors, strict=True)
    ):
        free = partial(
            estimate_pose, own, any_camera(query.size), focal_known=False, max_error=error, seed=config.seed
        )
        found = doubt_camera(verdict, estimate, own, query.camera, error, config, free)
        if found[0] == "ok" and judge(estimate, own, error, config, focal_known=True)[0] == "ok":
            found = doubt_focal(found, estimate, own, error)
        if found is not verdict:
            path = query.path
            name = f"picture {number}" if path is None else f"{path.parent.name}/{path.name}"
            return found[0], f"in {name} {found[1]}", found[2]
    return verdict


def estimate_rig(
    matches: Sequence[Matches3d],
    cameras: Sequence[Camera],
    cam_from_rig: np.ndarray,
    max_errors: Sequence[float],
    *,
    seed: int = 0,
) -> list[PoseEstimate] | None:
    """The poses of R cameras that are fixed to each other, None where there is none.

    Args:
        matches: of each camera's picture.
        cameras: with their sizes.
        cam_from_rig: (R, 4, 4).
        max_errors: of an inlier in each picture, stored pixels.
        seed: of the sampling.
    """
    import poselib

    if sum(len(each.points2d) for each in matches) < MIN_MATCHES:
        return None
    bare = [undistorted(each.points2d, camera) for each, camera in zip(matches, cameras, strict=True)]
    outside = []
    for pose in cam_from_rig:
        fixed = poselib.CameraPose()
        fixed.R, fixed.t = pose[:3, :3], pose[:3, 3]
        outside.append(fixed)
    error = float(np.mean(max_errors))
    ransac = {"max_reproj_error": error, "max_error": error, "max_iterations": ITERATIONS, "seed": seed}
    pose, info = poselib.estimate_generalized_absolute_pose(
        [points for points, _ in bare],
        [each.points3d for each in matches],
        outside,
        [pinhole for _, pinhole in bare],
        {**ransac, "success_prob": CONFIDENCE},
        {"max_iterations": 50},
    )
    inliers = [np.asarray(part, dtype=bool) for part in info["inliers"]]
    if sum(int(part.sum()) for part in inliers) < MIN_MATCHES:
        return None
    start = np.vstack([pose.Rt, [0, 0, 0, 1]])
    return _refined(start, inliers, matches, cameras, cam_from_rig, max_errors)


def _refined(
    rig_from_world: np.ndarray,
    inliers: list[np.ndarray],
    matches: Sequence[Matches3d],
    cameras: Sequence[Camera],
    cam_from_rig: np.ndarray,
    max_errors: Sequence[float],
) -> list[PoseEstimate] | None:
    pycolmap = import_pycolmap()
    options = pycolmap.AbsolutePoseRefinementOptions(loss_function_scale=LOSS)
    joined = _joined(matches)
    number = np.concatenate([np.full(len(each.points2d), index) for index, each in enumerate(matches)])
    theirs = [as_colmap_camera(camera) for camera in cameras]
    for _ in range(_ROUNDS):
        result = pycolmap.refine_generalized_absolute_pose(
            as_rigid(rig_from_world),
            to_colmap(joined.points2d),
            joined.points3d,
            np.concatenate(inliers),
            number.tolist(),
            [as_rigid(pose) for pose in cam_from_rig],
            theirs,
            options,
            return_covariance=True,
        )
        if result is None:
            return None
        rig_from_world = np.vstack([result["rig_from_world"].matrix(), [0, 0, 0, 1]])
        poses = [pose @ rig_from_world for pose in cam_from_rig]
        errors = [reprojection_errors(*each) for each in zip(matches, poses, cameras, strict=True)]
        used = np.concatenate(inliers)
        inliers = [error < limit for error, limit in zip(errors, max_errors, strict=True)]
    covariance = covariance_of(result, np.concatenate(errors), used)
    rows = zip(poses, cameras, inliers, cam_from_rig, strict=True)
    return [
        PoseEstimate(pose, camera, part, _turned(covariance, fixed)) for pose, camera, part, fixed in rows
    ]


def _turned(covariance: np.ndarray | None, cam_from_rig: np.ndarray) -> np.ndarray | None:
    """The covariance of a camera's pose from that of the rig's."""
    if covariance is None:
        return None
    turn = np.kron(np.eye(2), cam_from_rig[:3, :3])
    return turn @ covariance @ turn.T


def _joined(matches: Sequence[Matches3d]) -> Matches3d:
    """All pictures' matches, keypoints numbered on."""
    starts = np.cumsum([0, *(int(each.keypoints.max(initial=-1)) + 1 for each in matches)])
    return Matches3d(
        np.concatenate([each.points2d for each in matches]),
        np.concatenate([each.points3d for each in matches]),
        np.concatenate([each.keypoints + start for each, start in zip(matches, starts, strict=False)]),
    )


def check_rig(queries: Sequence[Query], cam_from_rig: object) -> np.ndarray:
    """The relative poses (R, 4, 4) of R ≥ 2 pictures with cameras.

    Raises:
        UsageError: another number of poses than pictures, values that are no poses, or no camera.
    """
    poses = np.asarray(cam_from_rig, dtype=np.float64)
    if poses.shape != (len(queries), 4, 4) or not np.isfinite(poses).all():
        raise UsageError(
            f"cam_from_rig must be a pose (4, 4) for each of the {len(queries)} pictures, not {poses.shape}"
        )
    if any(query.camera is None for query in queries):
        raise UsageError("the pictures of a rig need their cameras")
    return poses
