"""Pairs of keyframes that match: loops, views along the path, and places that only look alike."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from collection_scene import render_photos, synthetic_store
from test_keyframe_map import CAMERA, OUT_AND_BACK, drifting

from matcher.cli.track import _closing as closing_of
from matcher.export.colmap import write_colmap
from matcher.sequence import loops as pose_graph
from matcher.sequence.keyframe_map import KeyframeMap
from matcher.sequence.loops import (
    ClosedTrajectory,
    LoopEdge,
    PoseGraph,
    kind_of_pair,
    path_lengths,
    plot_closing,
    torn_at,
)

pycolmap = pytest.importorskip("pycolmap")


def pose(x=0.0, z=0.0, degrees=0.0):
    """World_from_cam at (x, 0, z), turned about the vertical."""
    angle = np.deg2rad(degrees)
    found = np.eye(4)
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
    path = np.array([pose(), pose(x=3.0), pose(x=3.0, z=4.0), pose()])
    np.testing.assert_allclose(path_lengths(path), [0, 3, 7, 12])


def test_what_looks_alike_closes_no_loop_and_is_in_no_model(tmp_path, monkeypatch):
    """The same photos again, of a path out and back, and of one that tracking says went straight on."""
    world = [np.linalg.inv(pose) for pose in render_photos(tmp_path / "photos", count=10)]
    (tmp_path / "map" / "frames").mkdir(parents=True)
    for index, photo in enumerate(OUT_AND_BACK):
        shutil.copy(
            tmp_path / "photos" / f"photo{photo}.png", tmp_path / "map" / "frames" / f"{index:06d}.png"
        )
    graph = PoseGraph(tmp_path / "map", CAMERA, "nearest", {"max_keypoints": 400})
    collection = graph.match(list(range(10)))
    back = dict(enumerate(drifting([world[photo] for photo in OUT_AND_BACK])))
    loops = graph.loops(collection, back)
    assert len(loops) > 3 and not graph.alike
    straight = {index: pose(z=2.0 * index) for index in range(10)}
    assert graph.loops(collection, straight) == () and len(graph.alike) > 1
    assert not graph.alike & {(f"{index:06d}.png", f"{index + 1:06d}.png") for index in range(9)}
    asked = []

    def made(*_, **how):
        asked.append(how["without"])
        raise RuntimeError

    monkeypatch.setattr(pose_graph, "reconstruct", made)
    for closing in (((0, 9, 50),), ()):
        with pytest.raises(RuntimeError):
            graph.model(collection, straight, closing)
    assert asked == [graph.alike, graph.alike]
    nothing = np.zeros((1, 4, 4))
    closed = ClosedTrajectory(
        np.zeros(1), np.zeros(1), nothing, nothing, (), tmp_path, alike=len(graph.alike)
    )
    assert f"no loop was found, {len(graph.alike)} pairs only look alike" in closing_of(closed)
    assert KeyframeMap(tmp_path / "other", CAMERA, "nearest").closed is None


def test_pairs_are_left_out_of_a_database(tmp_path):
    store, _ = synthetic_store(np.random.default_rng(0), count=4)
    names = sorted(image.name for image in store.images())
    counts = []
    for number, without in enumerate(((), {(names[0], names[1]), (names[1], names[3])})):
        report = write_colmap(store, tmp_path / f"{number}.db", without=without)
        with pycolmap.Database.open(tmp_path / f"{number}.db") as database:
            counts.append((report.pairs, database.num_matched_image_pairs()))
    assert counts == [(6, 6), (4, 4)]


def test_both_paths_are_seen_where_they_agree(tmp_path):
    path = np.array([pose(z=float(step)) for step in range(20)])
    with PIL.Image.open(plot_closing(tmp_path / "path.png", path, path, [])) as drawing:
        pixels = np.asarray(drawing.convert("RGB"))
    for colour in ((153, 153, 153), (0, 114, 178)):
        rows, _ = np.nonzero((pixels == colour).all(axis=2))
        assert len(np.unique(rows)) > 0.6 * pixels.shape[0], colour  # not in the legend alone


@pytest.mark.parametrize(
    ("last", "torn"),
    [
        (pose(x=1.5, z=6.0, degrees=20), False),  # it has drifted
        (pose(x=0.0, z=14.0), True),  # a step of nine instead of one
        (pose(x=0.0, z=5.2), True),
        (pose(x=0.0, z=4.0), True),  # back
    ],
)
def test_a_step_that_drift_cannot_explain(last, torn):
    tracked = {f"{i}.png": np.linalg.inv(pose(z=float(i))) for i in range(7)}
    found = dict(tracked) | {"6.png": np.linalg.inv(last)}
    assert torn_at(tracked, found) == (("5.png", "6.png") if torn else None)
    assert torn_at(tracked, tracked) is None


def test_noise_of_a_camera_that_stands_or_turns_in_its_place_tears_nothing(rng):
    places = [0.0, 1.0, 2.0, 2.0, 2.0, 3.0, 4.0]
    path = {f"{i}.png": np.linalg.inv(pose(z=z, degrees=30.0 * i)) for i, z in enumerate(places)}
    assert torn_at(path, path) is None
    moved = {name: T.copy() for name, T in path.items()}
    for T in moved.values():
        T[:3, 3] += rng.normal(0, 0.02, 3)
    assert torn_at(path, moved) is None
    moved["5.png"][0, 3] = np.nan
    assert torn_at(path, moved) == ("4.png", "5.png")


def test_where_the_global_mapper_tears_the_path_tracked_steps_join_the_graph(tmp_path, monkeypatch):
    tracked = {index: pose(x=0.1 * index, z=float(index)) for index in range(5)}
    right = {pose_graph.name_of(i): np.linalg.inv(each)[:3] for i, each in tracked.items()}
    bad = right | {pose_graph.name_of(4): np.linalg.inv(pose(z=20.0))[:3]}
    answers, starts = {"global": bad, "incremental": right}, []

    class Run(list):
        store = nullcontext()

    def made(store, out, *, mapper, poses=None, **how):
        starts.append(poses)
        return SimpleNamespace(largest=SimpleNamespace(cam_from_world=answers[mapper]))

    def edges(pairs, camera, number):
        assert pairs == [] and number["000004.png"] == 4
        return [LoopEdge(0, 4, np.linalg.inv(tracked[4]))]

    monkeypatch.setattr(pose_graph, "reconstruct", made)
    monkeypatch.setattr(pose_graph, "loop_edges", edges)
    graph = PoseGraph(tmp_path, CAMERA, "nearest", {})
    loops = ((0, 4, 50),)
    found = graph.optimised(Run(), tracked, loops, tmp_path / "graph")
    np.testing.assert_allclose(found[pose_graph.name_of(4)][:3], right[pose_graph.name_of(4)], atol=1e-9)
    assert starts[0] is None and not starts[1].fixed
    start = starts[1].cam_from_world[pose_graph.name_of(4)][:3]
    np.testing.assert_allclose(start, right[pose_graph.name_of(4)], atol=1e-6)
    answers["incremental"] = bad
    with pytest.raises(pose_graph.ReconstructionError, match=r"000003\.png to 000004\.png does not agree"):
        graph.optimised(Run(), tracked, loops, tmp_path / "graph")
