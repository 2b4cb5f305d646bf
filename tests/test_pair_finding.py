"""Pairs that are worth matching: by the strongest keypoints, and by where photos were taken."""

import numpy as np
import PIL.Image
import pytest
from collection_scene import texture

import matcher
from matcher.cli import main
from matcher.collection.pairs import BEST, best_pairs, candidate_pairs, preemptive_pairs
from matcher.collection.store import Store


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


def inside_walls(pairs):
    return {tuple(sorted(pair)) for pair in pairs if pair[0][0] == pair[1][0]}


SAME = {(f"{wall}{i}.png", f"{wall}{j}.png") for wall in "abc" for i, j in ((0, 1), (0, 2), (1, 2))}


def test_pairs_of_one_place_arebest_pairs(photos, tmp_path, capfd):
    run = tmp_path / "run"
    fast = ("--preset", "nearest", "--max-keypoints", "300", "--workers", "0")
    assert main(["collection", str(photos), "--run", str(run), "--preemptive", "30", *fast]) == 0
    assert "comparing images: 45 of 45" in capfd.readouterr().err
    with Store.open(run) as store:
        found = {(pair.name0, pair.name1) for pair in store.pairs()}
    assert inside_walls(found) == SAME
    alone = [pair for pair in found if pair not in SAME]
    assert 2 <= len(alone) <= 3 and all("d0.png" in pair for pair in alone)  # it keeps two candidates
    # The same command again: what did not agree is not matched now either.
    assert main(["collection", str(photos), "--run", str(run), "--preemptive", "30", *fast]) == 0
    with Store.open(run) as store:
        assert {(pair.name0, pair.name1) for pair in store.pairs()} == found


def test_an_image_is_matched_with_its_best_partners(photos):
    pipeline = matcher.load("nearest", max_keypoints=200)
    features = {f"{n:02d}": pipeline.extract(photos / "a0.png") for n in range(BEST + 4)}
    names = sorted(features)
    pairs = candidate_pairs(names, features.__getitem__, 30)
    assert len(pairs) == len(names) * (len(names) - 1) // 2
    chosen = preemptive_pairs(pairs, features.__getitem__, pipeline)
    assert len(names) * BEST // 2 <= len(chosen) < len(pairs)
    assert all(sum(name in pair for pair in chosen) >= BEST for name in names)
    before = dict.fromkeys(names, BEST)
    assert preemptive_pairs(pairs, features.__getitem__, pipeline, partners=before) == []


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
    fast = ("--preset", "nearest", "--max-keypoints", "100", "--workers", "0")
    run = tmp_path / "run"
    assert main(["collection", str(folder), "--run", str(run), "--nearby", "1", *fast]) == 0
    with Store.open(run) as store:
        found = [(pair.name0[0], pair.name1[0]) for pair in store.pairs()]
    assert sorted(found) == [("0", "1"), ("1", "2"), ("2", "3")]
    # With few similar candidates, the nearest ones are candidates too.
    assert main(["collection", str(folder), "--run", str(run), "--preemptive", "2", *fast]) == 0
    assert "comparing images: " in capfd.readouterr().err
    assert main(["collection", str(photos), "--run", str(tmp_path / "b"), "--nearby", "1", *fast]) == 2
    assert "GPS position" in capfd.readouterr().err


def test_wide_pairs_of_a_path_are_chosen_too():
    """Only neighbours of a path agree; pairs two steps apart are matched where partners are few."""
    names = [f"{n}" for n in range(6)]
    candidates = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    steps = np.array([int(b) - int(a) for a, b in candidates])
    chosen = best_pairs(candidates, 100 - 10 * steps, steps == 1, {})
    assert chosen == [pair for pair, step in zip(candidates, steps, strict=True) if step <= 2]


def test_only_pairs_of_new_images_are_compared(photos, tmp_path):
    collection = matcher.Collection.open(tmp_path / "run", preset="nearest", max_keypoints=100, workers=0)
    collection.add_images(photos)
    totals = set()

    def note(now):
        totals.update([now.total] if now.stage == "choose" else [])

    collection.add_pairs(preemptive=30, of=["a0.png"], on_progress=note)
    assert totals == {9}
    assert all("a0.png" in (pair.name0, pair.name1) for pair in collection)
