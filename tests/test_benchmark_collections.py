"""Measurements of collections, on scenes whose truth is known."""

import json

import numpy as np
import pytest
from collection_runs import photos
from collection_scene import centres, render_photos

from matcher.benchmark.rows import aligned, measure_reconstruction, measure_workers
from matcher.collection.workers import Workers
from matcher.errors import UsageError

OPTIONS = {"preset": "nearest", "device": "cpu"}


def test_a_scene_is_reconstructed_in_four_ways(tmp_path):
    pytest.importorskip("pycolmap")
    pytest.importorskip("h5py")
    truth = centres(render_photos(tmp_path / "scene" / "images"))
    rows = [{"image": f"images/photo{i}.png", "C": list(centre)} for i, centre in enumerate(truth)]
    (tmp_path / "scene" / "poses.json").write_text(json.dumps(rows))
    options = {**OPTIONS, "workers": 0, "max_keypoints": 1000, "resize": 480}
    found = dict(measure_reconstruction(tmp_path / "scene", tmp_path / "work", options))
    assert len(found) == 4
    for title, row in found.items():
        assert row["registered"] == row["images"] == 5, title
        assert row["worst_centre"] < 0.02, title
        assert row["mean_track_length"] == pytest.approx(row["observations"] / row["points"])
        assert sum(row["tracks_of"].values()) == row["points"]
    ours, exported = found["matcher sfm"], found["export --to colmap, pycolmap"]
    assert ours["mean_track_length"] == pytest.approx(exported["mean_track_length"], rel=0.02)


def test_a_scene_without_its_truth(tmp_path):
    pytest.importorskip("pycolmap")
    with pytest.raises(UsageError, match=r"poses\.json: not a list"):
        next(measure_reconstruction(tmp_path, tmp_path / "work", OPTIONS))


def test_alignment_undoes_a_similarity(rng):
    truth = rng.normal(size=(6, 3))
    turn, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    turn *= np.linalg.det(turn)
    np.testing.assert_allclose(aligned(3.7 * truth @ turn + [1, 2, 3], truth), truth, atol=1e-12)


def test_workers_are_timed_from_features_that_are_there(tmp_path):
    photos(tmp_path / "photos", 4)
    options = {**OPTIONS, "max_keypoints": 150}
    means = {"here": Workers(count=0, threads=1)}
    timed = measure_workers(tmp_path / "photos", tmp_path / "work", options, means, neighbours=2)
    ((title, row),) = timed
    assert (title, row["pairs"]) == ("here", 5)
    assert row["pairs_per_second"] == pytest.approx(5 / row["seconds"])
