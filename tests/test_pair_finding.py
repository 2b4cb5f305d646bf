"""Pairs that are worth matching: by the strongest keypoints, and by where photos were taken."""

import numpy as np
import PIL.Image
import pytest
from collection_scene import texture
from command import run

import matcher
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
    # The same command again: what did not agree is not matched now either.
    assert pairs_of(photos, tmp_path / "run", "--preemptive", 30) == first


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
    found = pairs_of(folder, tmp_path / "run", "--nearby", 1)
    assert sorted((a[0], b[0]) for a, b in found) == [("0", "1"), ("1", "2"), ("2", "3")]
    # With few similar candidates, the nearest ones are candidates too.
    pairs_of(folder, tmp_path / "run", "--preemptive", 2)
    assert "comparing images: " in capfd.readouterr().err
    given = ("--run", tmp_path / "b", "--preset", "nearest", "--nearby", 1)
    assert run("collection", photos, *given) == 2
    assert "GPS position" in capfd.readouterr().err


def test_wide_pairs_of_a_path_are_chosen_too():
    """Only neighbours of a path agree; pairs two steps apart are matched where partners are few."""
    names = [f"{n}" for n in range(6)]
    candidates = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    steps = np.array([int(b) - int(a) for a, b in candidates])
    chosen = best_pairs(candidates, 100 - 10 * steps, steps == 1, {})
    assert chosen == [pair for pair, step in zip(candidates, steps, strict=True) if step <= 2]
