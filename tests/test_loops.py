"""Loops: which pairs of keyframes are one place, the graph of steps, and when a loop is left open."""

import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from collection_scene import render_photos
from test_keyframe_map import CAMERA, OUT_AND_BACK, drifting

from matcher.sequence.loops import KeyframeGraph, carried, kind_of_pair, name_of, spread

pytest.importorskip("pycolmap")
COUNT = 40


def pose(x=0.0, z=0.0, degrees=0.0):
    """World_from_cam at (x, 0, z), turned about the vertical."""
    angle, found = np.deg2rad(degrees), np.eye(4)
    found[0, 0] = found[2, 2] = np.cos(angle)
    found[0, 2], found[2, 0] = np.sin(angle), -np.sin(angle)
    found[:3, 3] = x, 0, z
    return found


def seen(first, second, noise=0.5):
    """Where cameras at two poses see the same points."""
    rng = np.random.default_rng(2)
    points = rng.uniform((-6, -3, 14), (6, 3, 40), (60, 3))
    sides = []
    for where in (first, second):
        local = (points - where[:3, 3]) @ where[:3, :3]
        image = local[:, :2] / local[:, 2:] * CAMERA.fx + (CAMERA.cx, CAMERA.cy)
        sides.append(image + rng.normal(0, noise, image.shape))
    return sides


def test_a_pair_is_a_loop_where_drift_explains_it():
    like = seen(pose(), pose(x=4.0))  # images as of two cameras side by side
    for tracked, travelled, kind in (
        (pose(x=4.0), 4.0, "along"),  # and so they are
        (pose(z=10.0), 10.0, "alike"),  # straight on by 10
        (pose(z=10.0), 60.0, "loop"),  # there and back, with drift
        (pose(z=10.0, degrees=30), 60.0, "loop"),
        (pose(z=10.0, degrees=170), 60.0, "alike"),  # the camera looks the other way
    ):
        assert kind_of_pair(*like, CAMERA, (pose(), tracked), travelled) == kind, (tracked, travelled)
    ahead = seen(pose(), pose(z=10.0, degrees=3))  # what is far ahead comes nearer
    assert kind_of_pair(*ahead, CAMERA, (pose(), pose(z=10.0, degrees=3)), 10.0) == "along"
    again = seen(pose(), pose())  # the camera stands where it stood, so there is no baseline
    assert kind_of_pair(*again, CAMERA, (pose(), pose(z=5.0)), 60.0) == "loop"


def circle() -> list[np.ndarray]:
    """World_from_cam of cameras on a circle, which look ahead; the last is near the first."""
    poses = [np.eye(4)]
    step = pose(x=0.01, z=1.0, degrees=360 / (COUNT - 1))
    for _ in range(COUNT - 1):
        poses.append(poses[-1] @ step)
    return poses


def shrinking(poses: list[np.ndarray]) -> list[np.ndarray]:
    """The same where every step turns half a degree too far and is .5 % shorter than the one before."""
    found = [poses[0]]
    for number, (before, after) in enumerate(pairwise(poses)):
        step = np.linalg.inv(before) @ after @ pose(degrees=0.5)
        step[:3, 3] *= 0.995**number
        found.append(found[-1] @ step)
    return found


def edge(poses, first: int, second: int) -> tuple[int, int, np.ndarray]:
    found = np.linalg.inv(poses[second]) @ poses[first]
    found[:3, 3] /= np.linalg.norm(found[:3, 3])
    return first, second, found


def gap(poses, truth) -> float:
    """How far the last camera is from where the first should see it."""
    ends = [np.linalg.inv(each[0]) @ each[COUNT - 1] for each in (poses, truth)]
    return float(np.linalg.norm(ends[0][:3, 3] - ends[1][:3, 3]))


TRUTH = circle()
TRACKED = dict(enumerate(shrinking(TRUTH)))
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


@pytest.fixture(scope="module")
def matched(tmp_path_factory):
    """Ten photos of an arc, out and back, matched; and their true poses."""
    folder = tmp_path_factory.mktemp("arc")
    world = [np.linalg.inv(each) for each in render_photos(folder / "photos", count=10)]
    (folder / "map" / "frames").mkdir(parents=True)
    for index, photo in enumerate(OUT_AND_BACK):
        shutil.copy(folder / "photos" / f"photo{photo}.png", folder / "map" / "frames" / name_of(index))
    graph = KeyframeGraph(folder / "map", CAMERA, "nearest", {"max_keypoints": 400})
    return graph, graph.match(list(range(10))), [world[photo] for photo in OUT_AND_BACK]


def test_what_looks_alike_closes_no_loop_and_is_in_no_model(matched):
    """The same photos again, of a path out and back, and of one that tracking says went straight on."""
    graph, collection, truth = matched
    back = dict(enumerate(drifting(truth)))
    assert len(graph.loops(collection, back)) > 3 and not graph.alike
    straight = {index: pose(z=2.0 * index) for index in range(10)}
    assert graph.loops(collection, straight) == () and len(graph.alike) > 1
    assert not graph.alike & {(name_of(index), name_of(index + 1)) for index in range(9)}


def largest_error(poses, truth) -> float:
    found, wanted = (
        np.array([np.linalg.inv(each[0]) @ each[i] for i in range(10)])[:, :3, 3] for each in (poses, truth)
    )
    scale = np.sum(found * wanted) / np.sum(found * found)
    return float(np.linalg.norm(scale * found - wanted, axis=1).max())


def test_a_loop_that_the_matches_do_not_confirm_is_left_open(matched):
    """Matches of one place, said to be of two that tracking knows apart, must not bend the path."""
    graph, collection, truth = matched
    tracked = dict(enumerate(truth))
    loops = graph.loops(collection, tracked)
    closed = graph.model(collection, dict(enumerate(drifting(truth))), loops)
    assert graph.open_because is None and largest_error(closed, truth) < 0.02

    class Forged(list):
        store = property(lambda _: collection.store)

    same = next(pair for pair in collection if (pair.name0, pair.name1) == (name_of(0), name_of(9)))
    others = [pair for pair in collection if (pair.name0, pair.name1) != (name_of(0), name_of(5))]
    forged = Forged([*others, replace(same, name1=name_of(5))])
    found = graph.model(forged, tracked, ((0, 5, 50),))
    assert graph.open_because is not None and largest_error(found, truth) < 0.02


def test_frames_between_keyframes_follow_a_unit_that_has_drifted():
    """Where a loop makes the path between two keyframes a fifth as long, the steps between them are too."""
    tracked = {index: pose(index) for index in (0, 2, 4, 6)}
    adjusted = {0: pose(0), 2: pose(2.1), 4: pose(2.5), 6: pose(2.9)}
    frames = [(index - index % 2, pose(index)) for index in range(8)]
    found = carried(frames, tracked, adjusted)[:, 0, 3]
    np.testing.assert_allclose(found, [0, 1, 2.1, 2.3, 2.5, 2.7, 2.9, 3.1])
    np.testing.assert_allclose(carried(frames, tracked, {})[:, 0, 3], range(8))
