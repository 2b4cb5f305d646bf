"""Plain visual odometry on `matcher.Tracker`: landmarks by track id, a pose for each frame by PnP.

    python scripts/odometry.py LEFT_DIR --camera fx,fy,cx,cy [--right DIR --baseline METRES] > trajectory.tum

Landmarks come from stereo depth or, with one camera, from the first and last view of a track; old ones are
dropped. No bundle adjustment. Prints `frame x y z qx qy qz qw`, camera to world.
"""

import argparse
from pathlib import Path

import cv2
import numpy as np

import matcher

WINDOW, MIN_POINTS, MIN_ANGLE = 15, 12, 1.0  # frames; points for a pose; degrees between two views


def pose_from(landmarks: dict, ids: list, points: np.ndarray, K: np.ndarray) -> np.ndarray | None:
    """(4, 4) world_from_cam by PnP on known landmarks; None with too few."""
    known = [i for i, track in enumerate(ids) if track in landmarks]
    if len(known) < MIN_POINTS:
        return None
    world, seen = np.array([landmarks[ids[i]] for i in known]), points[known].astype(float)
    good, turn, t, rows = cv2.solvePnPRansac(world, seen, K, None, None, None, False, 1000, 1.5, 0.999)
    if not good or rows is None or len(rows) < MIN_POINTS:
        return None
    turn, t = cv2.solvePnPRefineLM(world[rows[:, 0]], seen[rows[:, 0]], K, None, turn, t)
    return np.linalg.inv(np.vstack([np.hstack([cv2.Rodrigues(turn)[0], t]), [0, 0, 0, 1]]))


def triangulate(first: np.ndarray, ray0: np.ndarray, last: np.ndarray, ray1: np.ndarray) -> np.ndarray | None:
    """(3,) world point from the rays of two views; None for a small angle or a point behind a camera."""
    a, b = first[:3, :3] @ ray0, last[:3, :3] @ ray1
    if np.rad2deg(np.arctan2(np.linalg.norm(np.cross(a, b)), a @ b)) < MIN_ANGLE:
        return None
    depths = np.linalg.lstsq(np.stack([a, -b], axis=1), last[:3, 3] - first[:3, 3], rcond=None)[0]
    return first[:3, 3] + depths[0] * a if min(depths) > 0 else None


def as_tum(frame: int, pose: np.ndarray) -> str:
    turn = cv2.Rodrigues(pose[:3, :3])[0].ravel()
    angle = np.linalg.norm(turn)
    values = (*pose[:3, 3], *(turn * np.sinc(angle / (2 * np.pi)) / 2), np.cos(angle / 2))
    return " ".join(f"{value:.9g}" for value in (frame, *values))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("left", type=Path)
parser.add_argument("--camera", required=True, metavar="fx,fy,cx,cy")
parser.add_argument("--right", type=Path)
parser.add_argument("--baseline", type=float)
parser.add_argument("--preset", default="hybrid-learned")
args = parser.parse_args()
camera = matcher.Camera(*map(float, args.camera.split(",")))
K = camera.K
tracker = matcher.Tracker(args.preset, camera, baseline=args.baseline, max_keypoints=1024, resize=1280)
landmarks, views, seen = {}, {}, {}  # by track: world point, first view, last frame
for frame, path in enumerate(sorted(args.left.glob("*.png"))):
    result = tracker.push_stereo(path, args.right / path.name) if args.right else tracker.push(path)
    ids, points = result.track_ids.tolist(), result.keypoints
    # Without landmarks (one camera, unknown scale) the pose is the tracker's.
    pose = pose_from(landmarks, ids, points, K) if landmarks else result.world_from_cam
    if pose is None:
        continue
    print(as_tum(frame, pose), flush=True)
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(K).T
    for i, track in enumerate(ids):
        seen[track], point = frame, None
        if result.depths is not None and args.right and np.isfinite(result.depths[i]):
            point = pose[:3, :3] @ (rays[i] * result.depths[i]) + pose[:3, 3]
        elif not args.right:
            point = triangulate(*views.setdefault(track, (pose, rays[i])), pose, rays[i])
        if point is not None:
            landmarks.setdefault(track, point)
    for track in [track for track, last in seen.items() if last < frame - WINDOW]:
        for table in (seen, landmarks, views):
            table.pop(track, None)
