"""Tracks from pairwise matches: joined, consistent, and honest about what contradicts."""

from itertools import combinations

import cv2
import numpy as np
import PIL.Image
import pytest
from collection_runs import matched
from command import run as command
from rendered_texture import SIZE, Texture

from matcher.collection.store import Store
from matcher.collection.tracks import (
    Edge,
    PairMatches,
    build_tracks,
    consistent_matches,
    contradicted,
    refine_run,
    tracks_of,
)
from matcher.errors import IntegrityError
from matcher.export.formats import export

COUNTS = {"a": 10, "b": 10, "c": 10}


def test_a_chain_becomes_one_track():
    pairs = PairMatches("a", "b", np.array([[1, 2], [5, 5]])), PairMatches("b", "c", np.array([[2, 3]]))
    tracks = build_tracks(pairs, COUNTS)
    assert tracks.track(0) == [("a", 1), ("b", 2), ("c", 3)]
    assert tracks.track(1) == [("a", 5), ("b", 5)]
    assert tracks.lengths.tolist() == [3, 2] and tracks.mean_length == 2.5 and tracks.conflicts == 0
    assert tracks.table().tolist() == [[0, 0, 1], [0, 1, 2], [0, 2, 3], [1, 0, 5], [1, 1, 5]]


def test_against_connected_components_where_nothing_contradicts(rng):
    """Points seen in random images under random numbers: the tracks are the points."""
    names = [f"image{i}" for i in range(8)]
    numbers = {name: rng.permutation(200) for name in names}
    seen = rng.random((8, 200)) < 0.5
    pairs = []
    for i, j in combinations(range(8), 2):
        both = np.flatnonzero(seen[i] & seen[j])
        indices = np.column_stack([numbers[names[i]][both], numbers[names[j]][both]])
        pairs.append(PairMatches(names[i], names[j], indices, rng.random(len(both)).astype(np.float32)))
    tracks = build_tracks(pairs, dict.fromkeys(names, 200))
    truth = {
        frozenset((names[i], int(numbers[names[i]][p])) for i in np.flatnonzero(seen[:, p]))
        for p in range(200)
        if seen[:, p].sum() >= 2
    }
    assert set(map(frozenset, tracks)) == truth and tracks.conflicts == 0


def test_wrong_matches_never_put_two_keypoints_of_an_image_into_one_track(rng):
    names = [f"image{i}" for i in range(6)]
    pairs = []
    for name0, name1 in combinations(names, 2):
        indices = np.column_stack([np.arange(100), np.arange(100)])
        wrong = rng.choice(100, 30, replace=False)
        indices[wrong, 1] = rng.permutation(indices[wrong, 1])
        scores = np.where(np.isin(np.arange(100), wrong), 0.3, 0.9) + 0.1 * rng.random(100)
        pairs.append(PairMatches(name0, name1, indices, scores.astype(np.float32)))
    tracks = build_tracks(pairs, dict.fromkeys(names, 100))
    for track in tracks:
        assert len({name for name, _ in track}) == len(track)
    assert tracks.conflicts > 100
    pure = sum(len({keypoint for _, keypoint in track}) == 1 for track in tracks)
    assert pure >= 95 and tracks.mean_length > 5.5


# Wrong matches of several images are found by going round third images.

IMAGES, POINTS = 5, 60


def injected(orders: list[np.ndarray], wrong: int) -> dict[tuple[int, int], np.ndarray]:
    """All true matches of every pair, of which `wrong` have their partners exchanged; those come first."""
    rng, found = np.random.default_rng(1), {}
    for first, second in combinations(range(IMAGES), 2):
        indices = np.column_stack([orders[first], orders[second]])[rng.permutation(POINTS)]
        indices[:wrong, 1] = np.roll(indices[:wrong, 1], 1)
        found[first, second] = indices
    return found


def test_wrong_matches_are_contradicted_and_right_ones_stay(rng):
    scene = np.stack(np.meshgrid(np.arange(10), np.arange(6)), -1).reshape(-1, 2) * 20.0 + 10
    orders = [rng.permutation(POINTS) for _ in range(IMAGES)]  # where each point is among an image's
    keypoints = [(scene + 3 * image)[np.argsort(order)] for image, order in enumerate(orders)]
    kept = consistent_matches(injected(orders, 6), keypoints, [1.0] * IMAGES)
    kept = np.array(list(kept.values()))
    assert kept[:, :6].mean() < 0.1 and kept[:, 6:].mean() > 0.97
    clean = consistent_matches(injected(orders, 0), keypoints, [1.0] * IMAGES)
    assert all(each.all() for each in clean.values())


# --- Pairs that loops of three images contradict.


@pytest.fixture
def keypoints(rng):
    return {name: rng.uniform((0, 0), (1000, 700), (POINTS, 2)) for name in "abcdef"}


def edges(rng, names="abcdef"):
    """All pairs of images that show the same points, their keypoint of the same number; a tenth is wrong."""
    found = {}
    for pair in combinations(names, 2):
        indices = np.repeat(np.arange(POINTS)[:, None], 2, axis=1)
        indices[:6, 1] = rng.permutation(indices[:6, 1])
        found[pair] = Edge(indices, None)
    return found


def shifted(edge, by):
    return edge._replace(indices=np.column_stack([edge.indices[:, 0], (edge.indices[:, 1] + by) % POINTS]))


@pytest.mark.parametrize("wrong", [[], [("a", "d")], [("a", "d"), ("b", "e")], [("a", "b"), ("a", "c")]])
def test_wrong_pairs_among_right_ones(rng, keypoints, wrong):
    given = edges(rng)
    given |= {ends: shifted(given[ends], 7 + number) for number, ends in enumerate(wrong)}
    assert contradicted(given, keypoints) == sorted(wrong)
    given = edges(rng, "abc")
    given["a", "b"] = shifted(given["a", "b"], 5)
    assert contradicted(given, keypoints) == []  # one loop does not tell which pair is wrong


def test_rotations_that_do_not_close(rng, keypoints):
    turns = {name: cv2.Rodrigues(rng.normal(0, 0.3, 3))[0] for name in keypoints}
    given = {(a, b): e._replace(rotation=turns[b] @ turns[a].T) for (a, b), e in edges(rng).items()}
    assert contradicted(given, keypoints) == []
    wrong = given["b", "d"]
    given["b", "d"] = wrong._replace(rotation=cv2.Rodrigues(np.array([0.0, 1.2, 0.0]))[0] @ wrong.rotation)
    assert contradicted(given, keypoints) == [("b", "d")]


@pytest.mark.parametrize("refused", [True, False])
def test_a_lone_pair_of_two_places_whose_neighbours_miss_its_matches(rng, keypoints, refused):
    one, other = ("abcd", "efgh")
    keypoints |= {name: keypoints["a"] for name in "gh"}
    given = edges(rng, one) | edges(rng, other)
    given["c", "f"] = given["a", "b"]
    missing = {(a, b) for a in one for b in other} - {("c", "f")} if refused else ()
    assert contradicted(given, keypoints, missing) == [("c", "f")] * refused
    given["b", "f"] = given["c", "e"] = given["a", "b"]  # two more, which agree with it
    assert contradicted(given, keypoints, set(missing) - given.keys()) == []


def test_rooms_with_equal_furniture_are_parted_by_what_is_around_it(rng, keypoints):
    """All loops agree; only what is around the matches differs, which counts where it is as a rule alike."""
    between = {(a, b) for a in "abc" for b in "def"}
    given = {ends: edge._replace(differing=0.07 * (ends in between)) for ends, edge in edges(rng).items()}
    assert contradicted(given, keypoints) == sorted(between)
    given["a", "b"] = given["a", "b"]._replace(differing=0.05)
    assert contradicted(given, keypoints) == []
    assert contradicted({("a", "b"): given["a", "b"]}, keypoints) == []


def test_a_false_pair_is_no_witness_against_a_lone_right_one(rng, keypoints):
    keypoints |= {name: keypoints["a"] for name in "ghijkl"}
    given = edges(rng, "abc") | {("a", "d"): edges(rng, "ad")["a", "d"]}
    false = [(first, second) for first in "abc" for second in "efghij"]
    given |= {ends: shifted(given["a", "b"], 7 + number) for number, ends in enumerate(false)}
    missing = {("d", name) for name in "efghij"}
    assert ("a", "e") in contradicted(given, keypoints)
    assert contradicted(given, keypoints, missing) == contradicted(given, keypoints)


# --- Refined on images whose truth is known.


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
    return matched(tmp_path / "run", folder, max_keypoints=300)


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
        export(store, "npz", tmp_path / "before.npz")
        (tmp_path / "photos" / "2.png").rename(tmp_path / "2.png")
        assert refine_run(store) == ""  # the others are refined
        assert [store.refined_keypoints(f"{n}.png") is None for n in range(4)] == [False, False, True, False]
        # A photo that is gone is left out where headers are read, and named; other exports have it.
        report = export(store, "kapture", tmp_path / "three")
        assert report.images == report.pairs == 3 and "2.png" in report.left_out[0]
        assert command("export", run.run_dir, "--to", "openmvg", tmp_path / "also three") == 4
        report = export(store, "csv", tmp_path / "four.csv")
        assert report.images == 4 and report.pairs == 6 and not report.left_out
        PIL.Image.new("L", (50, 60)).save(tmp_path / "photos" / "2.png")
        with pytest.raises(IntegrityError, match="50 x 60"):
            refine_run(store)
        (tmp_path / "2.png").replace(tmp_path / "photos" / "2.png")
        assert refine_run(store) == ""
        export(store, "npz", tmp_path / "after.npz")
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
    # Exports hold the refined keypoints until pairs change, and then those of a photo that is gone.
    before, after = (np.load(tmp_path / f"{name}.npz") for name in ("before", "after"))
    assert np.array_equal(after["keypoints"], np.concatenate([places[name] for name in tracks.names]))
    assert "covariances" not in before and after["covariances"].shape == (len(after["keypoints"]), 3)
    PIL.Image.open(tmp_path / "photos" / "0.png").save(tmp_path / "photos" / "4.png")
    run.add_images(tmp_path / "photos")
    run.add_pairs([("0.png", "4.png")])
    run.run()
    (tmp_path / "photos").rename(tmp_path / "moved")
    with Store.open(run.run_dir) as store:
        assert store.refined_keypoints("2.png") is None and "no photo" in refine_run(store)
        assert np.array_equal(store.refined_keypoints("2.png").keypoints, places["2.png"])
        (tmp_path / "moved").rename(tmp_path / "photos")
        (tmp_path / "photos" / "2.png").unlink()
        assert refine_run(store) == "" and store.refined_keypoints("4.png") is not None
        assert np.array_equal(store.refined_keypoints("2.png").keypoints, places["2.png"])
