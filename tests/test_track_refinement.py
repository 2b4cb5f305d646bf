"""Tracks of a run, refined on images whose truth is known."""

import numpy as np
import PIL.Image
import pytest
from random_collection import fill
from rendered_texture import SIZE, Texture

import matcher
from matcher.collection.store import Store
from matcher.collection.tracks import refine_run, tracks_of
from matcher.errors import IntegrityError
from matcher.export.formats import write_npz

VIEWS = [  # image from texture
    np.eye(2, 3),
    np.array([[1.04, 0.12, -6.0], [-0.1, 0.97, 9.0]]),
    np.array([[0.93, -0.16, 18.0], [0.14, 0.95, -7.0]]),
    np.array([[1.1, 0.05, -14.0], [0.06, 1.02, -9.0]]),
]


@pytest.fixture
def run(tmp_path):
    folder, texture = tmp_path / "photos", Texture(seed=3, shortest=6.0)
    folder.mkdir()
    noise = np.random.default_rng(0)
    for index, view in enumerate(VIEWS):
        values = texture.image(view) + noise.normal(0, 3, (SIZE, SIZE))
        PIL.Image.fromarray(np.rint(values).clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")
    collection = matcher.Collection.open(tmp_path / "run", preset="nearest", max_keypoints=300, workers=0)
    collection.add_images(folder)
    collection.add_pairs(exhaustive=True)
    collection.run()
    return collection


def spread(tracks, keypoints):
    """(T,) how far the observations of a track are apart on the texture, pixels."""
    found = []
    for track in tracks:
        views = [(VIEWS[int(name[0])], keypoints[name][keypoint]) for name, keypoint in track]
        places = np.array([np.linalg.solve(view[:, :2], point - view[:, 2]) for view, point in views])
        found.append(np.linalg.norm(places - places.mean(axis=0), axis=1).max())
    return np.array(found)


def test_the_observations_of_a_track_show_one_point(run, tmp_path):
    with Store.open(run.run_dir) as store:
        (tmp_path / "photos" / "2.png").rename(tmp_path / "2.png")
        assert "2.png" in refine_run(store)
        PIL.Image.new("L", (50, 60)).save(tmp_path / "photos" / "2.png")
        with pytest.raises(IntegrityError, match="50 x 60"):
            refine_run(store)
        (tmp_path / "2.png").replace(tmp_path / "photos" / "2.png")
        write_npz(store, tmp_path / "before.npz")
        assert refine_run(store) == ""
        write_npz(store, tmp_path / "after.npz")
        tracks = tracks_of(store)
        before = {name: store.keypoints(name) for name in tracks.names}
        after = {name: store.refined_keypoints(name) for name in tracks.names}
    places = {name: each.keypoints for name, each in after.items()}
    right = spread(tracks, before) < 3
    assert right.mean() > 0.9 and tracks.mean_length > 2.5
    assert np.median(spread(tracks, places)[right]) < 0.5 * np.median(spread(tracks, before)[right])
    for name, each in after.items():
        moved = (each.keypoints != before[name]).any(axis=1)
        assert np.array_equal(moved, each.refined)
        assert np.median(each.covariances[each.refined, 0, 0]) < 0.25
    assert 0.2 < np.mean([each.refined.mean() for each in after.values()]) < 0.9  # references stay
    still = np.array([sum(not after[name].refined[point] for name, point in track) for track in tracks])
    assert still.min() >= 1 and np.mean(still == 1) > 0.7  # the reference
    # Exports hold the refined keypoints until pairs change.
    before, after = (np.load(tmp_path / f"{name}.npz") for name in ("before", "after"))
    assert np.array_equal(after["keypoints"], np.concatenate([places[name] for name in tracks.names]))
    assert "covariances" not in before and after["covariances"].shape == (len(after["keypoints"]), 3)
    PIL.Image.open(tmp_path / "photos" / "0.png").save(tmp_path / "photos" / "4.png")
    run.add_images(tmp_path / "photos")
    run.add_pairs([("0.png", "4.png")])
    run.run()
    with Store.open(run.run_dir) as store:
        assert store.refined_keypoints("0.png") is None


def test_a_run_without_refinement_stays_as_it_is(tmp_path):
    fill(tmp_path / "run", np.random.default_rng(0), images=2)
    with Store.open(tmp_path / "run") as store:
        assert refine_run(store) == "" and store.refined_keypoints("im 000.jpg") is None
