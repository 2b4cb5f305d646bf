"""Pairs worth matching: by what looks alike, by the strongest keypoints, by where photos were taken."""

from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from collection_scene import texture
from command import run

import matcher
from matcher.collection.pairs import BEST, best_pairs, candidate_pairs, preemptive_pairs
from matcher.collection.store import Store, Writer
from matcher.match.retrieval import neighbour_pairs, similar_pairs
from matcher.match.steering import STEERABLE_KIND, steered
from matcher.types import Features


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three photos of each of three walls, and one of a fourth wall."""
    folder = tmp_path_factory.mktemp("walls")
    for wall in range(4):
        pixels = texture(np.random.default_rng(wall), 480)
        for view in range(3 if wall < 3 else 1):
            shown = pixels[10 * view : 10 * view + 240, 20 * view : 20 * view + 320]
            PIL.Image.fromarray(shown).save(folder / f"{'abcd'[wall]}{view}.png")
    return folder


def pairs_of(folder, run_dir, *choice):
    """The pairs of a run that are chosen so."""
    given = ("--preset", "nearest", "--max-keypoints", 300, "--workers", 0, *choice)
    assert run("collection", folder, "--run", run_dir, *given) == 0
    with Store.open(run_dir) as store:
        return {(pair.name0, pair.name1) for pair in store.pairs()}


SAME = {(f"{wall}{i}.png", f"{wall}{j}.png") for wall in "abc" for i, j in ((0, 1), (0, 2), (1, 2))}


def test_pairs_of_one_place_are_chosen(photos, tmp_path, capfd):
    first = pairs_of(photos, tmp_path / "run", "--preemptive", 30)
    assert "comparing images: 45 of 45" in capfd.readouterr().err
    assert {pair for pair in first if pair[0][0] == pair[1][0]} == SAME
    alone = [pair for pair in first if pair not in SAME]
    assert 2 <= len(alone) <= 3 and all("d0.png" in pair for pair in alone)  # it keeps two candidates
    # The same command again: what did not agree is not matched now either, nor compared.
    assert pairs_of(photos, tmp_path / "run", "--preemptive", 30) == first
    with Writer(tmp_path / "run") as writer:
        assert {key[:2] for key in writer.compared()} > SAME and writer.check() == []
        writer.put_compared([(("a0.png", "b0.png", True), (200, True))])
    assert pairs_of(photos, tmp_path / "run", "--preemptive", 30) == {*first, ("a0.png", "b0.png")}
    with Writer(tmp_path / "run") as writer, writer.transaction():
        writer.forget(["c0.png"])
        assert not writer.compared()


def test_an_image_is_matched_with_its_best_partners(photos):
    pipeline = matcher.load("nearest", max_keypoints=200)
    features = {f"{n:02d}": pipeline.extract(photos / "a0.png") for n in range(BEST + 4)}
    names = sorted(features)
    pairs = candidate_pairs(names, features.__getitem__, 30)
    assert len(pairs) == len(names) * (len(names) - 1) // 2
    chosen = preemptive_pairs(pairs, features.__getitem__, pipeline)
    assert len(names) * BEST // 2 <= len(chosen) < len(pairs)
    assert all(sum(name in pair for pair in chosen) >= BEST for name in names)
    assert not preemptive_pairs(pairs, features.__getitem__, pipeline, partners=dict.fromkeys(names, BEST))


def test_positions_of_the_headers_choose_pairs(photos, tmp_path, capfd):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number, name in enumerate(("a0", "b0", "c0", "a1")):
        header = PIL.Image.Exif()
        gps = header.get_ifd(0x8825)
        gps |= {1: "N", 2: (46.0, 0.0, 0.2 * number), 3: "E", 4: (7.0, 0.0, 0.0)}
        header[0x8825] = gps
        with PIL.Image.open(photos / f"{name}.png") as photo:
            photo.convert("L").save(folder / f"{number}{name}.jpg", exif=header, quality=95)
            photo.save(folder / "nowhere.png")
    found = pairs_of(folder, tmp_path / "run", "--nearby", 1)
    assert sorted((a[0], b[0]) for a, b in found) == [("0", "1"), ("1", "2"), ("2", "3")]
    out, err = capfd.readouterr()
    assert "nowhere.png" in err and "1 waiting\n  of these in no pair so far: 1 image: nowhere.png" in out
    # With few similar candidates, the nearest ones are candidates too.
    pairs_of(folder, tmp_path / "run", "--preemptive", 2)
    assert "comparing images: " in capfd.readouterr().err
    given = ("--run", tmp_path / "b", "--preset", "nearest", "--nearby", 1)
    assert run("collection", photos, *given) == 2 and "GPS position" in capfd.readouterr().err


def test_wide_pairs_of_a_path_are_chosen_too():
    """Only neighbours of a path agree; pairs two steps apart are matched where partners are few."""
    names = [f"{n}" for n in range(6)]
    candidates = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    steps = np.array([int(b) - int(a) for a, b in candidates])
    chosen = best_pairs(candidates, 100 - 10 * steps, steps == 1, {})
    assert chosen == [pair for pair, step in zip(candidates, steps, strict=True) if step <= 2]


# --- Images that look alike, on made-up descriptors.


def made_up(rng, scenes, views, points=120, shown=0.6, noise=0.25):
    """Views of scenes: each shows some of the scene's descriptors, disturbed, and as many of its own."""
    table = {}
    for scene in range(scenes):
        local = rng.normal(size=(points, 32))
        for view in range(views):
            seen = local[rng.random(points) < shown]
            seen = seen + noise * rng.normal(size=seen.shape)
            own = rng.normal(size=(points // 2, 32))
            descriptors = np.concatenate([seen, own]).astype(np.float32)
            places = np.zeros((len(descriptors), 2), np.float32)
            table[f"{scene}-{view}"] = Features(places, descriptors, size=(9, 9))
    return table


def recall(pairs, names):
    found = {frozenset(pair) for pair in pairs}
    truth = {frozenset((a, b)) for a in names for b in names if a < b and a.split("-")[0] == b.split("-")[0]}
    return len(found & truth) / len(truth)


def test_views_of_a_scene_find_each_other(rng):
    table = made_up(rng, scenes=40, views=4)
    pairs = list(similar_pairs(list(table), table.__getitem__, 3))
    assert recall(pairs, list(table)) > 0.95
    assert len(set(map(frozenset, pairs))) == len(pairs) <= 160 * 3
    order = {name: index for index, name in enumerate(table)}
    assert all(order[a] < order[b] for a, b in pairs)
    assert pairs == list(similar_pairs(list(table), table.__getitem__, 3))


@pytest.mark.parametrize("rows", [4096, 7])
def test_neighbours_against_a_sorted_table(rng, rows):
    table = rng.normal(size=(30, 8)).astype(np.float32)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    table[11] = 0
    similarity = table @ table.T
    np.fill_diagonal(similarity, -np.inf)
    similarity[:, 11] = -np.inf
    expected = {
        (min(i, j), max(i, j)) for i in range(30) if i != 11 for j in np.argsort(-similarity[i])[:4].tolist()
    }
    found = neighbour_pairs(table, 4, block=rows)
    assert set(map(tuple, found.tolist())) == expected and len(found) == len(expected)
    assert not (found == 11).any()


def test_turned_images_are_found_by_descriptors_that_turn(rng):
    upright = made_up(rng, scenes=12, views=2)
    table = {}
    for number, (name, features) in enumerate(upright.items()):
        turn = torch.tensor([number % 4 if number % 2 else 0])
        descriptors = steered(features.descriptors[None], turn)[0]
        table[name] = replace(features, descriptors=descriptors, kind=STEERABLE_KIND)
    assert recall(similar_pairs(list(table), table.__getitem__, 1), list(table)) > 0.95
    rigid = {name: replace(features, kind="any") for name, features in table.items()}
    assert recall(similar_pairs(list(rigid), rigid.__getitem__, 1), list(rigid)) < 0.5
