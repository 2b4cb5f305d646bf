"""The graph of tracked steps and loops: drift is spread over all steps, and wrong loops count little."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from matcher.cameras import Camera
from matcher.sequence import loops as step_graph
from matcher.sequence.loops import LoopEdge, loop_edges, spread
from matcher.sfm.reconstruct import ReconstructionError

pytest.importorskip("pycolmap")
COUNT = 40


def turned(degrees: float) -> np.ndarray:
    """(4, 4) about the vertical."""
    pose, angle = np.eye(4), np.deg2rad(degrees)
    pose[0, 0] = pose[2, 2] = np.cos(angle)
    pose[0, 2], pose[2, 0] = np.sin(angle), -np.sin(angle)
    return pose


def circle() -> list[np.ndarray]:
    """World_from_cam of cameras on a circle, which look ahead; the last is near the first."""
    poses = [np.eye(4)]
    for _ in range(COUNT - 1):
        step = turned(360 / (COUNT - 1))
        step[:3, 3] = (0.01, 0.0, 1.0)
        poses.append(poses[-1] @ step)
    return poses


def drifting(poses: list[np.ndarray]) -> list[np.ndarray]:
    """The same where every step turns half a degree too far and is .5 % shorter than the one before."""
    found = [poses[0]]
    for number, (before, after) in enumerate(pairwise(poses)):
        step = np.linalg.inv(before) @ after @ turned(0.5)
        step[:3, 3] *= 0.995**number
        found.append(found[-1] @ step)
    return found


def edge(poses: list[np.ndarray], first: int, second: int) -> LoopEdge:
    pose = np.linalg.inv(poses[second]) @ poses[first]
    pose[:3, 3] /= np.linalg.norm(pose[:3, 3])
    return LoopEdge(first, second, pose)


def gap(poses: dict[int, np.ndarray], truth: list[np.ndarray]) -> float:
    """How far the last camera is from where the first should see it."""
    ends = [np.linalg.inv(each[0]) @ each[COUNT - 1] for each in (poses, truth)]
    return float(np.linalg.norm(ends[0][:3, 3] - ends[1][:3, 3]))


TRUTH = circle()
TRACKED = dict(enumerate(drifting(TRUTH)))
LOOPS = [edge(TRUTH, *ends) for ends in ((0, 39), (1, 39), (0, 38), (2, 39), (1, 37), (3, 38))]


def test_drift_is_spread_over_all_steps():
    found = spread(TRACKED, LOOPS)
    np.testing.assert_allclose(found[0], TRACKED[0], atol=1e-9)
    assert gap(TRACKED, TRUTH) > 2.0 and gap(found, TRUTH) < 0.3
    steps = [
        [np.linalg.inv(each[a]) @ each[b] for a, b in pairwise(range(COUNT))] for each in (found, TRACKED)
    ]
    lengths = np.linalg.norm(np.array(steps)[:, :, :3, 3], axis=2)
    ratios = lengths[0] / lengths[1]
    assert ratios.max() / ratios.min() < 1.4  # as the unit has drifted
    assert np.abs(np.diff(ratios)).max() < 0.05
    turns = [(np.trace(b[:3, :3].T @ a[:3, :3]) - 1) / 2 for a, b in zip(*steps, strict=True)]
    assert np.degrees(np.arccos(np.clip(turns, -1, 1))).max() < 2.0


def test_a_wrong_loop_counts_little():
    wrong = LoopEdge(5, 25, np.linalg.inv(TRUTH[3]) @ TRUTH[0])
    found = spread(TRACKED, [*LOOPS, wrong])
    assert gap(found, TRUTH) < 0.5


def test_what_cannot_be_spread(monkeypatch):
    with pytest.raises(ReconstructionError, match="no pair of keyframes that closes a loop"):
        spread(TRACKED, [])
    monkeypatch.setattr(step_graph, "MOST", COUNT - 1)
    with pytest.raises(ReconstructionError, match="40 keyframes are more than the 39"):
        spread(TRACKED, LOOPS)


def test_the_pose_of_a_loop_is_that_of_its_inliers(rng):
    camera = Camera(500.0, 500.0, 320.0, 240.0)
    points = rng.uniform((-2, -2, 4), (2, 2, 8), (200, 3))
    second = np.linalg.inv(turned(5.0))
    second[:3, 3] = (-1.0, 0.1, 0.2)
    seen = [points @ pose[:3, :3].T + pose[:3, 3] for pose in (np.eye(4), second)]
    pixels = [500 * each[:, :2] / each[:, 2:] + (320.0, 240.0) for each in seen]
    inliers = np.arange(200) < 150
    pixels[1][150:] = rng.uniform(0, 480, (50, 2))
    pair = SimpleNamespace(
        name0="a",
        name1="b",
        matches=SimpleNamespace(points0=pixels[0], points1=pixels[1]),
        geometry=SimpleNamespace(inliers=inliers),
    )
    empty = SimpleNamespace(**{**vars(pair), "geometry": SimpleNamespace(inliers=inliers & False)})
    (found,) = loop_edges([pair, empty], camera, {"a": 3, "b": 9})
    assert (found.first, found.second) == (3, 9)
    direction = second[:3, 3] / np.linalg.norm(second[:3, 3])
    np.testing.assert_allclose(found.cam1_from_cam0[:3, 3], direction, atol=1e-3)
    np.testing.assert_allclose(found.cam1_from_cam0[:3, :3], second[:3, :3], atol=1e-3)
