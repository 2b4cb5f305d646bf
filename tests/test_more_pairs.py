"""Preemptive matching that was too sparing: further pairs are matched until all photos have a pose."""

from itertools import pairwise
from shutil import copytree, move

import numpy as np
import PIL.Image
import pytest
from collection_scene import render_photos, texture

from matcher.cli import main
from matcher.collection import pairs as preemptive
from matcher.collection.collection import Collection
from matcher.sfm import growing as more_pairs
from matcher.sfm.growing import MorePairs

pytest.importorskip("pycolmap")
FAST = ("--preset", "nearest", "--max-keypoints", "500", "--workers", "0", "--threads", "1")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparing") / "photos"
    render_photos(folder, count=5)
    return folder


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def pairs_of(folder):
    with Collection.open(folder, preset="nearest").store as store:
        return {(pair.name0[5], pair.name1[5]) for pair in store.pairs()}, store.pair_choice


@pytest.mark.parametrize("chosen", [[], [("0", "1"), ("1", "2"), ("0", "2")]])
def test_images_without_a_pose_get_more_pairs(photos, tmp_path, monkeypatch, capfd, chosen):
    chosen = [(f"photo{a}.png", f"photo{b}.png") for a, b in chosen]
    monkeypatch.setattr(preemptive, "preemptive_pairs", lambda *_, **__: chosen)
    monkeypatch.setattr(more_pairs, "BEST", 1)
    assert run("sfm", photos, "--out", tmp_path / "model", "--preemptive", 30, *FAST) == 0
    said = capfd.readouterr()
    assert "registered images: 5 of 5" in said.out
    rounds = [line for line in said.err.splitlines() if "no pose" in line]
    assert f"{5 if not chosen else 2} images have no pose" in rounds[0]
    assert "then all is mapped again" in rounds[0]
    matched, choice = pairs_of(tmp_path / "model-run")
    assert set(chosen) <= {(f"photo{a}.png", f"photo{b}.png") for a, b in matched}
    assert choice.method == "preemptive"  # as later photos are paired
    assert not list(tmp_path.glob(".*"))


def test_what_has_a_model_of_all_images_is_left_alone(photos, tmp_path, monkeypatch, capfd):
    names = sorted(path.name for path in photos.iterdir())
    chain = [*pairwise(names), *zip(names, names[2:], strict=False)]
    monkeypatch.setattr(preemptive, "preemptive_pairs", lambda *_, **__: chain)
    assert run("sfm", photos, "--out", tmp_path / "model", "--preemptive", 30, *FAST) == 0
    assert "no pose" not in capfd.readouterr().err
    assert len(pairs_of(tmp_path / "model-run")[0]) == 7


def test_pairs_are_matched_by_similarity_and_then_all_but_each_once(photos, tmp_path, monkeypatch):
    collection = Collection.open(tmp_path / "run", preset="nearest", max_keypoints=200, workers=0)
    collection.add_images(photos)
    collection.add_pairs(preemptive=30)
    collection.run()
    before, _ = pairs_of(tmp_path / "run")
    monkeypatch.setattr(more_pairs, "BEST", 1)
    rounds = []
    more = MorePairs(collection, on_round=lambda *counts: rounds.append(counts))
    alone = frozenset({"photo0.png"})
    while more(alone):
        pass
    after, _ = pairs_of(tmp_path / "run")
    assert all("0" in pair for pair in after - before) and sum(new for _, new in rounds) == len(
        after - before
    )
    assert {pair for pair in after if "0" in pair} == {("0", other) for other in "1234"}
    assert not MorePairs(collection)(alone)


def test_a_run_whose_pairs_were_asked_for_gets_no_others(photos, tmp_path, capfd):
    listed = tmp_path / "pairs.txt"
    listed.write_text(
        "photo0.png photo1.png\nphoto1.png photo2.png\nphoto0.png photo2.png\nphoto3.png photo4.png\n"
    )
    assert run("sfm", photos, "--out", tmp_path / "model", "--pairs", listed, *FAST) == 4
    assert len(pairs_of(tmp_path / "model-run")[0]) == 4 and "no pose" not in capfd.readouterr().err


def test_a_continued_model_gets_more_pairs_too(photos, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "photos"
    copytree(photos, folder)
    move(folder / "photo4.png", tmp_path / "photo4.png")
    assert run("sfm", folder, "--out", tmp_path / "model", *FAST) == 0
    move(tmp_path / "photo4.png", folder / "photo4.png")
    monkeypatch.setattr(preemptive, "preemptive_pairs", lambda *_, **__: [])
    arguments = ("--continue", tmp_path / "model", "--preemptive", 30, "--workers", 0, "--threads", 1)
    assert run("sfm", folder, "--out", tmp_path / "grown", *arguments) == 0
    said = capfd.readouterr()
    assert "registered images: 5 of 5" in said.out and "1 image has no pose" in said.err


def test_photos_of_nothing_in_common_are_said_plainly(tmp_path, capfd):
    (tmp_path / "walls").mkdir()
    for wall in range(3):
        pixels = texture(np.random.default_rng(wall), 240)
        PIL.Image.fromarray(pixels).save(tmp_path / "walls" / f"{wall}.png")
    assert run("sfm", tmp_path / "walls", "--out", tmp_path / "model", "--preemptive", 5, *FAST) in (2, 4)
    error = capfd.readouterr().err
    assert "Traceback" not in error and not (tmp_path / "model").exists()
