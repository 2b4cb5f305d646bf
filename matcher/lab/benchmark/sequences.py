"""Benchmarks of sequences on data with ground truth: tracks, odometry, stereo depth, latency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from matcher.data.camera import Camera
from matcher.errors import UsageError
from matcher.pipeline import Pipeline
from matcher.sequence.frames import FrameResult
from matcher.sequence.keyframe_map import KeyframeMap
from matcher.sequence.log import TrackingLog
from matcher.sequence.tracker import Tracker
from matcher.sequence.tracks import TrackIds
from matcher.sequence.trajectory import read_poses
from matcher.verify.distances import epipolar_distance, fundamental_from_pose

NEAR = 2.0  # pixels within which a match is correct
_NEAR_DEPTH = 30.0  # metres; depths are compared up to that distance
_EVERY = 5  # frames between those whose depths and plain matches are compared


def read_calibration(path: Path) -> tuple[Camera, float]:
    """Camera and baseline from two lines, the 3×4 projection matrices of a rectified pair (KITTI).

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        left, right = np.loadtxt(path).reshape(2, 3, 4)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not two projection matrices of 12 numbers ({error})") from error
    camera = Camera.from_K(left[:, :3])
    return camera, float(-right[0, 3] / right[0, 0])


def measure_driving(folder: Path, pipeline: Pipeline, *, frames: int | None = None) -> dict[str, Any]:
    """Odometry with two cameras and with one, tracks, links and depth.

    Args:
        folder: with image_l, image_r, calib.txt and poses.txt (KITTI).
        pipeline: the pipeline to measure.
        frames: number of frames, from the first; all by default.

    Returns:
        `stereo` and `mono`: segments (length, count, translation, rotation), poses, keyframes;
        `disparity_offset`, in pixels, estimated on the way (`Tracker.disparity_offset`);
        `mean_track_length` of tracks of two or more frames; `link_precision`, the share of links to the
        previous frame within 2 px of the true epipolar geometry; `row_precision`, the share of stereo points
        (including those of the guided search) within 2 px of the row; `stereo_points` per frame;
        `depth_difference`, the median relative difference from OpenCV's SGBM at depths below 30 m.

    Raises:
        UsageError: files that are absent or do not fit each other.
    """
    camera, baseline = read_calibration(folder / "calib.txt")
    _, ground_truth = read_poses(folder / "poses.txt")
    left, right = (sorted((folder / name).glob("*.png"))[:frames] for name in ("image_l", "image_r"))
    if len(left) < 2 or len(left) != len(right) or len(left) > len(ground_truth):
        raise UsageError(
            f"{folder}: image_l and image_r must have the same number of images, and "
            "poses.txt a pose for each"
        )
    stereo = Tracker(pipeline, camera, baseline=baseline)
    pairs = [stereo.push_stereo(*names) for names in zip(left, right, strict=True)]
    mono = Tracker(pipeline, camera)
    singles = [mono.push(name) for name in left]
    rows = np.concatenate([_row_errors(result) for result in pairs])
    return {
        "stereo": _odometry(pairs, ground_truth, with_scale=False),
        "disparity_offset": stereo.disparity_offset,
        "mono": _odometry(singles, ground_truth, with_scale=True),
        "mean_track_length": _logged(pairs).mean_track_length(),
        "link_precision": _link_precision(pairs, ground_truth, camera),
        "row_precision": float(np.mean(rows <= NEAR)),
        "stereo_points": len(rows) / len(pairs),
        "depth_difference": _against_sgbm(pairs, left, right, camera.fx * baseline),
    }


def measure_bare(folder: Path, pipeline: Pipeline, *, frames: int | None = None) -> dict[str, float]:
    """The matcher alone on the same images: no guided search and no keyframes.

    Returns:
        `mean_track_length` of tracks chained from frame to frame; of left/right matches of every fifth frame
        `row_precision` and their number, `stereo_points`; `row_precision_verified` of those that are inliers
        of one fundamental matrix.
    """
    left, right = (sorted((folder / name).glob("*.png"))[:frames] for name in ("image_l", "image_r"))
    tracks, lengths, rows, inliers = TrackIds(), Counter(), [], []
    previous, ids = None, np.zeros(0, np.int64)
    for index, name in enumerate(left):
        features = pipeline.extract(name)
        offers = []
        if previous is not None:
            offers = [(ids, pipeline.match_features(previous, features).indices)]
        ids, _ = tracks.extend(len(features), offers)
        tracks.forget(ids)
        lengths.update(ids.tolist())
        previous = features
        if index % _EVERY == 0:
            found = pipeline.match(name, right[index])
            rows.append(np.abs(found.points0 - found.points1)[:, 1])
            inliers.append(found.geometry.inliers)
    linked = [length for length in lengths.values() if length > 1]
    near, inliers = np.concatenate(rows) <= NEAR, np.concatenate(inliers)
    return {
        "mean_track_length": float(np.mean(linked)) if linked else 0.0,
        "row_precision": float(np.mean(near)) if len(near) else 0.0,
        "row_precision_verified": float(np.mean(near[inliers])) if inliers.any() else 0.0,
        "stereo_points": len(near) / len(rows),
    }


def measure_disparity(folder: Path, pipeline: Pipeline) -> dict[str, float]:
    """Left/right matching against a true disparity map, epipolar window off.

    Args:
        folder: with im2.png (left), im6.png (right) and disp2.pgm, four times the disparity, 0 unknown
            (Middlebury 2003).
        pipeline: the pipeline to measure.

    Returns:
        `matcher_matches`, `matcher_precision`: number of matches whose left point has a known disparity, and
        the share of them within 2 px of it; `tracker_points`, `tracker_precision`: the same for the stereo
        points of `Tracker.push_stereo`. Of these `tracker_contours` have a wrong disparity that is within 1
        px that of a pixel at most 2 px away, as points on the contour of something nearer do; without all
        points that have a farther one within 20 px `inner_points` and `inner_precision` are left.
    """
    ground_truth = cv2.imread(str(folder / "disp2.pgm"), cv2.IMREAD_GRAYSCALE)
    if ground_truth is None:
        raise UsageError(f"{folder / 'disp2.pgm'}: cannot be read")
    left, right = folder / "im2.png", folder / "im6.png"
    bare = pipeline.match(left, right)
    result = Tracker(pipeline).push_stereo(left, right)
    matched = np.isfinite(result.right[:, 0])
    table = {}
    for names, points0, points1 in (
        (("matcher_matches", "matcher_precision"), bare.points0, bare.points1),
        (("tracker_points", "tracker_precision"), result.keypoints[matched], result.right[matched]),
    ):
        x, y = np.rint(points0).astype(int).T
        height, width = ground_truth.shape
        disparity = ground_truth[y.clip(0, height - 1), x.clip(0, width - 1)] / 4.0
        known = disparity > 0
        expected = points0 - np.column_stack([disparity, np.zeros(len(points0))])
        right = np.linalg.norm(points1 - expected, axis=1) <= NEAR
        table |= {names[0]: int(known.sum()), names[1]: _share(right[known])}
    found = (points0 - points1)[:, 0]  # of the tracker
    wrong = known & ~right & _disparity_nearby(ground_truth / 4.0, points0, found)
    inner = known & ~_beside_farther(points0, found)
    return table | {
        "tracker_contours": int(wrong.sum()),
        "inner_points": int(inner.sum()),
        "inner_precision": _share(right[inner]),
    }


def _share(right: np.ndarray) -> float:
    return float(np.mean(right)) if len(right) else 0.0


def _disparity_nearby(ground_truth: np.ndarray, points: np.ndarray, found: np.ndarray) -> np.ndarray:
    """(K,) whether a pixel at most 2 px away has the disparity that was found, within 1 px."""
    padded = np.pad(ground_truth, 2)  # 0: unknown
    x, y = np.rint(points).astype(int).T
    height, width = ground_truth.shape
    x, y = x.clip(0, width - 1), y.clip(0, height - 1)
    around = np.stack([padded[y + j, x + i] for j in range(5) for i in range(5)], axis=1)
    return ((around > 0) & (np.abs(around - found[:, None]) <= 1)).any(axis=1)


def _beside_farther(points: np.ndarray, disparity: np.ndarray) -> np.ndarray:
    """(K,) whether a point within 20 px is farther by more than a slanted surface would make it."""
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    return ((distance <= 20) & (disparity[:, None] - disparity > NEAR + 0.3 * distance)).any(axis=1)


def measure_latency(
    image: np.ndarray,
    pipeline: Pipeline,
    *,
    frames: int = 100,
    size: tuple[int, int] = (640, 480),
    budget_ms: float | None = None,
    map_folder: Path | None = None,
) -> dict[str, Any]:
    """Milliseconds of the stages over frames cut by a window that moves across an image.

    Args:
        image: (H, W[, 3]) uint8, larger than `size`.
        pipeline: the pipeline to measure.
        frames: number of frames; ten more are run first and not counted.
        size: (width, height) of a frame.
        budget_ms: as `Tracker` takes it.
        map_folder: where the keyframes are mapped meanwhile, with loops looked for in the background; new.

    Returns:
        stage → p50, p95, p99, max; under "choice" the settings that the budget led to; with `map_folder` also
        how many "loops" were known before the end.
    """
    warm = 10
    if image.shape[1] <= size[0] or image.shape[0] <= size[1]:
        raise UsageError(f"the image must be larger than a frame of {size[0]} x {size[1]} pixels")
    focal = float(size[0])
    camera = Camera(focal, focal, (size[0] - 1) / 2, (size[1] - 1) / 2, size)
    keyframes = None if map_folder is None else KeyframeMap(map_folder, camera, loops="background")
    tracker = Tracker(pipeline, camera, budget_ms=budget_ms, keyframe_map=keyframes)
    room = np.array([image.shape[1] - size[0], image.shape[0] - size[1]])
    for index in range(warm + frames):
        if index == warm:
            tracker.forget_latency()
        phase = np.array([np.sin(index / 17), np.sin(index / 23)])
        x, y = np.rint((phase + 1) / 2 * room).astype(int)
        tracker.push(np.ascontiguousarray(image[y : y + size[1], x : x + size[0]]))
    choice = tracker.choice
    found = {**tracker.latency(), "choice": None if choice is None else str(choice)}
    if keyframes is None:
        return found
    closed = keyframes.closed
    keyframes.close()
    return {**found, "loops": 0 if closed is None else len(closed.loops)}


def _logged(results: Sequence[FrameResult]) -> TrackingLog:
    log = TrackingLog()
    for result in results:
        log.add(result)
    return log


def _odometry(
    results: Sequence[FrameResult], ground_truth: np.ndarray, *, with_scale: bool
) -> dict[str, Any]:
    log = _logged(results)
    _, _, segments = log.compared_with(None, ground_truth, with_scale=with_scale)
    return {
        "segments": [asdict(segment) for segment in segments],
        "poses": len(log.trajectory()[0]),
        "keyframes": log.counts()["keyframes"],
    }


def _link_precision(results: Sequence[FrameResult], ground_truth: np.ndarray, camera: Camera) -> float:
    K = camera.K
    errors = []
    for result in results:
        links = result.to_previous
        if links is None:
            continue
        T = np.linalg.inv(ground_truth[result.index]) @ ground_truth[links.frame]
        indices = links.indices[links.consistent]
        earlier = results[links.frame].keypoints[indices[:, 0]].astype(np.float64)
        points = result.keypoints[indices[:, 1]].astype(np.float64)
        errors.append(epipolar_distance(earlier, points, fundamental_from_pose(K, K, T)))
    every = np.concatenate(errors)
    return float(np.mean(every <= NEAR)) if len(every) else 0.0


def _row_errors(result: FrameResult) -> np.ndarray:
    """(P,) pixels between the rows of the points that are matched in both images."""
    if result.right is None:
        return np.zeros(0)
    step = np.abs(result.keypoints - result.right)[:, 1]
    return step[np.isfinite(step)]


def _against_sgbm(
    results: Sequence[FrameResult], left: Sequence[Path], right: Sequence[Path], focal_baseline: float
) -> float:
    """Median |z / z_SGBM − 1| of every fifth frame's points nearer than 30 m with a depth in both."""
    block = 5
    matching = cv2.StereoSGBM_create(
        minDisparity=0,
        numDisparities=128,
        blockSize=block,
        P1=8 * block**2,
        P2=32 * block**2,
        disp12MaxDiff=1,
        uniquenessRatio=10,
        speckleWindowSize=100,
        speckleRange=2,
    )
    differences = []
    for result in results[::_EVERY]:
        pair = (cv2.imread(str(names[result.index]), cv2.IMREAD_GRAYSCALE) for names in (left, right))
        disparity = matching.compute(*pair).astype(np.float64) / 16
        x, y = np.rint(result.keypoints).astype(int).T
        dense = disparity[y.clip(0, disparity.shape[0] - 1), x.clip(0, disparity.shape[1] - 1)]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.where(dense > 0, focal_baseline / dense, np.nan)
            measured = np.full(len(x), np.nan)
            if result.right is not None:
                step = (result.keypoints - result.right)[:, 0]
                measured = np.where(step > 0, focal_baseline / step, np.nan)
            near = np.isfinite(depth) & np.isfinite(measured) & (depth < _NEAR_DEPTH)
            differences.append(np.abs(measured[near] / depth[near] - 1))
    every = np.concatenate(differences)
    return float(np.median(every)) if len(every) else float("nan")
