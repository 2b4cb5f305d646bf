"""A run over a folder of photos: what it holds, what is done again, how pairs are chosen, what is refused."""

import os
import shutil
import sqlite3
import sys
import unicodedata
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
from collection_runs import QUICK, ROOT, contents, matched, opened, photos
from command import run

import matcher
from matcher.cameras import Camera
from matcher.collection.collection import Collection
from matcher.collection.schema import DATABASE, DESCRIPTORS, Counts, encode_features, encode_keypoints
from matcher.collection.sources import PairChoice, Selection, default_choice
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.collection.workers import Workers
from matcher.errors import ImageError, ImageWarning, UsageError
from matcher.sfm.growing import PAIRS
from matcher.types import Features, to_numpy

NEAR, FAR = Camera(200, 200, 99.5, 79.5), Camera(900, 900, 99.5, 79.5)
NAMES = [f"view 0{number}.png" for number in range(6)]


def collect(folder: Path, run_dir: Path, *more: object) -> int:
    other = [i for i, name in enumerate(QUICK[::2]) if name not in more]  # an option is given once
    quick = [word for i in other for word in QUICK[2 * i : 2 * i + 2]]
    return run("collection", folder, "--run", run_dir, *quick, "--workers", 0, *more)


def pairs_of(run_dir: Path) -> set[tuple[int, int]]:
    return {(int(pair.name0[5:7]), int(pair.name1[5:7])) for pair in opened(run_dir)}


@pytest.fixture
def folder(tmp_path) -> Path:
    photos(tmp_path / "photos", 4)
    return tmp_path / "photos"


def test_every_pair_is_matched_once_as_a_pipeline_would(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "run", "--exhaustive") == 0
    out, err = capfd.readouterr()
    assert "pairs: 6 done" in out and "matching pairs: 6 of 6" in err
    # A keypoint has one position in all pairs of a run: refinement comes later, track by track.
    pipe = matcher.load("nearest", max_keypoints=150, device="cpu", refine=False)
    pairs = list(opened(tmp_path / "run"))
    assert len(pairs) == 6 and max(len(pair.matches) for pair in pairs) > 20
    for pair in pairs:
        wanted = pipe.match(folder / pair.name0, folder / pair.name1)
        assert np.array_equal(pair.matches.indices, wanted.matches.indices)
        assert np.array_equal(pair.matches.points1, wanted.points1)
        assert np.allclose(pair.matches.scores, wanted.scores, atol=1e-5)
        assert np.array_equal(pair.geometry.inliers, wanted.geometry.inliers)
        assert pair.geometry.status == wanted.geometry.status


def test_workers_and_batches_give_the_same(tmp_path):
    """Convolutions of some processors depend on the batch, by a rounding."""
    photos(tmp_path / "photos", 4, (320, 240))
    (tmp_path / "photos" / "view 01a.png").write_bytes(b"no image")
    frames = [PIL.Image.new("L", (320, 240), grey) for grey in (0, 255)]
    frames[0].save(tmp_path / "photos" / "frames.gif", save_all=True, append_images=frames[1:])
    runs = []
    for means in (Workers(count=0), Workers(count=0, batch=4), Workers(count=2)):
        place = tmp_path / f"run {len(runs)}"
        with pytest.warns(ImageWarning, match="2 frames"):  # of another process, too
            found = matched(place, tmp_path / "photos", preset="nearest-learned", workers=means)
        assert (found.counts().images_done, found.counts().images_failed) == (5, 1)
        runs.append(contents(found.run_dir))
    assert runs[0] == runs[2] and runs[0].keys() == runs[1].keys()
    alone, batch = (sum(len(pair.matches) for pair in opened(tmp_path / f"run {n}")) for n in (0, 1))
    assert batch == pytest.approx(alone, rel=0.02)


def test_nothing_is_done_twice_and_a_changed_image_is(folder, tmp_path, capfd):
    run_dir = matched(tmp_path / "run", folder).run_dir
    before = contents(run_dir)
    os.utime(folder / NAMES[1], (1, 1))  # touched, the same bytes
    assert collect(folder, run_dir) == 0
    err = capfd.readouterr().err
    assert "extracting" not in err and "matching" not in err and contents(run_dir) == before
    shutil.copy(folder / NAMES[2], folder / NAMES[1])
    assert collect(folder, run_dir) == 0
    err = capfd.readouterr().err
    assert "extracting images: 1 of 1" in err and "matching pairs: 3 of 3" in err
    after = contents(run_dir)
    changed = {key[1:] for key in before if after.get(key) != before[key]}
    assert changed >= {(NAMES[0], NAMES[1]), (NAMES[1], NAMES[2]), (NAMES[1], NAMES[3])}
    assert after["pair", NAMES[0], NAMES[2]] == before["pair", NAMES[0], NAMES[2]]


def test_other_settings_are_refused_by_name_unless_restarted(folder, tmp_path, capfd):
    run_dir = matched(tmp_path / "run", folder, {"sequential": 1}).run_dir
    for options, name in (
        (["--max-keypoints", 140], "keypoints"),
        (["--shard", "1/2"], "shard"),
        (["--masks", folder], "source.masks"),
        (["--preset", "nearest-learned"], "nearest-learned"),
    ):
        assert collect(folder, run_dir, *options) == 2
        assert name in (err := capfd.readouterr().err) and "restart" in err
    (run_dir / "notes.txt").write_text("mine")
    assert collect(folder, run_dir, "--max-keypoints", 140, "--sequential", 1, "--restart") == 0
    with Store.open(run_dir) as store:
        assert max(image.count for image in store.images()) == 140
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_images_that_cannot_be_read_fail_with_their_pairs(folder, tmp_path, capfd):
    good = (folder / NAMES[1]).read_bytes()
    (folder / NAMES[1]).write_bytes(good[: len(good) // 2])
    (folder / "text.jpg").write_text("no image")
    assert collect(folder, tmp_path / "run", "--exhaustive") == 4
    out = capfd.readouterr().out
    assert "images: 3 done, 2 failed" in out and "pairs: 3 done, 7 failed" in out and "text.jpg" in out
    assert collect(folder, tmp_path / "run", "--exhaustive") == 4  # and nothing is tried again in vain
    assert "extracting" not in capfd.readouterr().err
    (folder / NAMES[1]).write_bytes(good)
    (folder / "text.jpg").unlink()
    assert collect(folder, tmp_path / "run") == 4
    assert "pairs: 6 done, 4 failed" in (out := capfd.readouterr().out) and "no longer" not in out
    for bad in ("bad/a.jpg", "bad/b.jpg", "none/text"):
        (tmp_path / bad).parent.mkdir(exist_ok=True)
        (tmp_path / bad).write_text("no image")
    for place, code in (("bad", 3), ("none", 2), ("absent", 2)):
        assert collect(tmp_path / place, tmp_path / f"run {place}", "--exhaustive") == code
        assert place in capfd.readouterr().err
    with pytest.raises(ImageError):
        matched(tmp_path / "library", tmp_path / "bad")


def test_masks_keep_keypoints_away(folder, tmp_path, capfd):
    masks, run_dir = tmp_path / "masks", tmp_path / "run"
    masks.mkdir()
    assert collect(folder, run_dir, "--masks", masks, "--exhaustive") == 2
    assert "no mask" in capfd.readouterr().err and not run_dir.exists()
    mask = np.zeros((160, 200), np.uint8)
    mask[:, 100:] = 255
    for name, file in ((NAMES[0], "view 00.png.png"), (NAMES[1], NAMES[1])):
        cv2.imwrite(str(masks / file), mask)
        assert collect(folder, run_dir, "--masks", masks, "--sequential", 1) == 0
        assert "of 4 images have a mask" in capfd.readouterr().err
        with Store.open(run_dir) as store:
            assert store.keypoints(name)[:, 0].min() > 95 and store.keypoints(NAMES[2])[:, 0].min() < 60


def test_parts_are_disjoint_and_join_to_the_whole(folder, tmp_path, capfd):
    whole, joined = contents(matched(tmp_path / "whole", folder).run_dir), tmp_path / "joined"
    parts = [matched(tmp_path / f"part{n}", folder, shard=f"{n}/4").run_dir for n in (1, 2, 3, 4)]
    held = [{key for key in contents(part) if key[0] == "pair"} for part in parts]
    assert [len(keys) for keys in held] == [1, 2, 1, 2] and len(set.union(*held)) == 6
    assert run("merge", parts[0], parts[2], "--into", tmp_path / "odd") == 0
    assert ": 2/4, 4/4 " in capfd.readouterr().err
    for _ in range(2):  # the second time nothing is new
        assert run("merge", *parts, "--into", joined, "--descriptors") == 0
        assert "/4 " not in capfd.readouterr().err and contents(joined) == whole
    assert collect(folder, joined, "--exhaustive") == 0 and "matching" not in capfd.readouterr().err
    assert run("merge", *parts, "--into", parts[0]) == 2
    fewer = matched(tmp_path / "fewer", folder, {"sequential": 1}, max_keypoints=100).run_dir
    shutil.copy(folder / NAMES[3], folder / NAMES[0])
    changed = matched(tmp_path / "changed", folder, {"sequential": 1}).run_dir
    for other, said in ((fewer, "max_keypoints"), (changed, NAMES[0])):
        assert run("merge", tmp_path / "whole", other, "--into", tmp_path / "no") == 2
        assert said in capfd.readouterr().err and not (tmp_path / "no").exists()  # before anything is written
    (folder / NAMES[3]).unlink()
    with Writer(parts[1]) as writer:
        writer.set_meta("image_folder", str(tmp_path))
    assert run("merge", *parts, "--into", tmp_path / "apart") == 0
    assert f"perhaps in {tmp_path}:" in capfd.readouterr().err


def test_what_a_merge_replaces(folder, tmp_path, capfd):
    """Finished pairs replace failed ones, those waiting ones; pairs of other keypoints are matched again."""
    whole = matched(tmp_path / "whole", folder).run_dir
    other, into = tmp_path / "other", tmp_path / "into"
    for copy in (other, into):
        shutil.copytree(whole, copy)
    with Writer(into) as writer, writer.transaction():
        writer.execute("DELETE FROM pairs WHERE id > 1")
        writer.put_pairs([EncodedPair(1, 3, reason="because"), EncodedPair(1, 4, reason="because")])
        writer.execute("INSERT INTO waiting VALUES (2, 3), (2, 4)")
    with Writer(other) as writer, writer.transaction():
        writer.execute("DELETE FROM pairs WHERE (image0, image1) IN (VALUES (1, 4), (2, 3))")
        writer.put_pairs([EncodedPair(2, 3, reason="here too")])
        points = np.zeros_like(writer.keypoints(NAMES[3]))
        writer.execute("UPDATE keypoints SET data = ? WHERE image = 4", encode_keypoints(points))
    assert run("merge", other, "--into", into) == 4
    with Store.open(into) as store:
        assert store.counts() == Counts(4, 0, 0, 6, 2, 2)
        found = {(pair.name0, pair.name1) for pair in store.pairs()}
        assert found == {(NAMES[0], NAMES[1]), (NAMES[0], NAMES[2])}
        assert {reason for *_, reason in store.failed()} == {"because", "here too"}
    assert run("export", into, "--to", "npz", tmp_path / "a.npz") == 0
    assert capfd.readouterr().out.count(": 2 pairs;") == 2  # waiting, and failed
    assert opened(into, folder).run(retry_failed=True, everything=True).all_well
    assert contents(into) == contents(whole)


def test_deleted_descriptors_are_made_again_where_they_are_needed(folder, tmp_path, capfd):
    run_dir = matched(tmp_path / "run", folder, {"sequential": 1}).run_dir
    before = contents(run_dir)
    (run_dir / DESCRIPTORS).unlink()
    assert collect(folder, run_dir, "--sequential", 1) == 0
    assert "extracting" not in capfd.readouterr().err
    assert collect(folder, run_dir, "--exhaustive") == 0
    assert "extracting images: 4 of 4" in capfd.readouterr().err
    after = contents(run_dir)
    assert {key: after[key] for key in before} == before
    (run_dir / DESCRIPTORS).unlink()
    assert collect(folder, run_dir, "--descriptors") == 0 and contents(run_dir) == after


def test_features_from_elsewhere(folder, tmp_path, capfd):
    h5py = pytest.importorskip("h5py")
    pipe = matcher.load("nearest", max_keypoints=150, device="cpu")
    with h5py.File(tmp_path / "features.h5", "w") as file:
        for name in NAMES[:4]:
            features = pipe.extract(folder / name)
            group = file.create_group(f"sub/{name}")
            group["keypoints"] = features.keypoints.numpy()
            group["descriptors"] = features.descriptors.numpy().T
            group["scores"] = features.scores.numpy().astype(np.float16)
            group["image_size"] = np.array([200, 160], np.float16)
        file.create_group("sub/bad.png")["keypoints"] = np.zeros((3, 2))

    def command(run_dir: Path, preset: str, *more: object) -> int:
        given = ("--features", tmp_path / "features.h5", "--preset", preset, *more)
        return run("collection", folder, "--run", run_dir, "--device", "cpu", "--workers", 0, *given)

    assert command(tmp_path / "no", "nearest", "--exhaustive", "--max-keypoints", 100) == 2
    assert command(tmp_path / "run", "nearest", "--exhaustive") == 4
    assert "pairs: 6 done, 4 failed" in capfd.readouterr().out
    own = matched(tmp_path / "own", folder)
    for pair, wanted in zip(opened(tmp_path / "run"), own, strict=True):
        assert pair.name0 == f"sub/{wanted.name0}"
        assert np.array_equal(pair.matches.indices, wanted.matches.indices)
    with h5py.File(tmp_path / "features.h5", "a") as file:
        file[f"sub/{NAMES[0]}/keypoints"][0] += 1
    assert command(tmp_path / "run", "nearest") == 4
    assert "matching pairs: 3 of 3" in capfd.readouterr().err


def test_cameras_for_essential_geometry(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "none", "--geometry", "essential", "--exhaustive") == 2
    assert "--camera" in capfd.readouterr().err and not (tmp_path / "none").exists()
    found = opened(tmp_path / "run", folder, geometry="essential")
    found.add_pairs(exhaustive=True)
    for attempt in (found.run, lambda: found.add_pairs(similar=1)):
        with pytest.raises(UsageError, match="set_cameras"):  # before anything is extracted
            attempt()
    found.set_cameras(dict.fromkeys(NAMES[:3], NEAR))
    report = found.run()
    assert (report.matched, report.counts.pairs_failed, report.all_well) == (6, 3, False)
    assert next(iter(found)).geometry.kind == "essential"
    # A camera that arrives late lets failed pairs wait; finished ones have theirs.
    assert found.set_cameras({NAMES[3]: NEAR}) == 0
    assert (found.counts().pairs_failed, found.counts().pairs_waiting) == (0, 3)
    report = found.run()
    assert (report.extracted, report.matched, report.all_well) == (0, 3, True)
    # Cameras that change leave features and matches.
    before = contents(found.run_dir)
    again = Collection.open(found.run_dir)
    assert again.set_cameras({NAMES[0]: FAR}) == 3
    assert again.set_cameras({NAMES[0]: FAR}) == 0  # it is that camera already
    after = contents(found.run_dir)
    changed = {key for key in before if before[key] != after[key]}
    assert changed and all(key[0] == "pair" and NAMES[0] in key for key in changed)
    with Writer(found.run_dir) as writer, writer.transaction():  # as if the picture were mirrored
        data = encode_keypoints(writer.keypoints(NAMES[0]) * (-1, 1) + (199, 0))
        writer.execute("UPDATE keypoints SET data = ? WHERE image = ?", data, writer.image(NAMES[0]).number)
    assert again.set_cameras({NAMES[0]: NEAR}) == 3
    assert {pair.geometry.status for pair in again if pair.name0 == NAMES[0]} == {"mirrored"}
    with pytest.raises(UsageError, match=r"x\.png"):
        found.set_cameras({"x.png": NEAR})


def test_status_looks_for_damage_and_measures_tracks(folder, tmp_path, capfd):
    run_dir = matched(tmp_path / "run", folder).run_dir
    with Writer(run_dir):  # one run at a time, and readers beside it
        assert collect(folder, run_dir, "--sequential", 1) == 2
        assert collect(folder, run_dir, "--restart") == 2
        assert run("status", run_dir, "--check", "--tracks") == 0
    tracks = opened(run_dir).tracks()
    assert len(tracks) > 20 and tracks.lengths.max() == 4
    assert len(opened(run_dir).tracks(min_length=4)) == (tracks.lengths == 4).sum()
    out, err = capfd.readouterr()
    assert "nothing is damaged; pairs that show one place: 6 likely, 0 unsure, 0 unlikely\n" in out
    assert "geometries of pairs: 6 degenerate, planar\n" in out  # which is all that there is
    assert f"tracks: {len(tracks)}" in out and "another run" in err
    with Writer(run_dir) as writer, writer.transaction():
        writer.put_descriptors(1, b"another record")
    assert run("status", run_dir, "--check") == 5 and run("status", tmp_path) == 2


# Which images and pairs take part.


def test_images_are_selected_by_name_folder_glob_or_list(folder, tmp_path, capfd):
    names = ["left/a[1].png", *NAMES[:4]]
    for include, exclude, kept in (
        ((), (), names),
        (("view*",), (), names[1:]),
        (("left/",), (), names[:1]),
        (("view 01.png", "./view 02.png"), (), names[2:4]),
        ((), ("left/*", "view 0[01].png"), names[3:]),
    ):
        assert Selection.parse(include, exclude).apply(names) == kept
    (tmp_path / "list.txt").write_text("\ufeff# best ones\nleft/a[1].png\n\nview 03.png\n", encoding="utf-8")
    assert Selection.parse([f"@{tmp_path / 'list.txt'}"]).apply(names) == [names[0], names[4]]
    decomposed = unicodedata.normalize("NFD", "été.png")  # as macOS stores names
    assert Selection.parse(["été.png"]).apply([decomposed]) == [decomposed]
    for selection in ({"include": ["x*"]}, {"include": ["@absent.txt"]}, {"exclude": ["*"]}):
        with pytest.raises(UsageError):
            Selection.parse(**selection).apply(names)
    assert collect(folder, tmp_path / "run", "--exclude", NAMES[3]) == 0
    assert collect(folder, tmp_path / "run", "--exclude", NAMES[2]) == 0
    assert "not selected: 1 image of the run" in capfd.readouterr().err
    assert pairs_of(tmp_path / "run") == {(0, 1), (0, 2), (1, 2), (0, 3), (1, 3)}


def test_a_default_follows_the_number_of_images(folder, tmp_path, capfd):
    assert default_choice(50) == PairChoice("exhaustive", by_default=True)
    assert default_choice(51) == PairChoice("similar", 20, by_default=True)
    assert default_choice(13, **PAIRS) == PairChoice("preemptive", 30, by_default=True)  # for a model
    found = opened(tmp_path / "run", folder)
    first = found.suggest_pairs(exhaustive_up_to=4, neighbours=2)
    assert first.method == "exhaustive" and found.add_pairs(first) == (6, 6)
    assert found.suggest_pairs() is None
    photos(folder, 5)
    found.add_images(folder)
    second = found.suggest_pairs(exhaustive_up_to=4, neighbours=2)
    assert second == PairChoice("similar", 2, by_default=True)
    found.add_pairs(second)
    assert found.suggest_pairs() is None
    (folder / "raw.dng").touch()
    assert collect(folder, tmp_path / "asked") == 0
    out, err = capfd.readouterr()
    assert "pairs: 10 done" in out and "--exhaustive" in err and err.count("1 RAW photo") == 1


def test_added_images_are_paired_as_before(folder, tmp_path, capfd):
    run_dir = matched(tmp_path / "run", folder, {"sequential": 1}).run_dir
    photos(folder, 5)
    assert collect(folder, run_dir) == 0 and "--sequential 1" in capfd.readouterr().err
    assert pairs_of(run_dir) == {(0, 1), (1, 2), (2, 3), (3, 4)}
    (tmp_path / "pairs.txt").write_text('"view 00.png" "view 02.png"\n')
    assert collect(folder, run_dir, "--pairs", tmp_path / "pairs.txt") == 0
    photos(folder, 6)
    assert collect(folder, run_dir) == 0  # after a list only the user knows the pairs of new images
    out, err = capfd.readouterr()
    assert "some images have no pair" in err and "pairs: 5 done" in out
    assert opened(run_dir, folder).add_pairs(exhaustive=True, of=["view 05.png"]) == (5, 5)


# A cluster.

DEADLY = """
import os, sys
if "default_worker.py" in " ".join(sys.orig_argv):
    from matcher.collection import workers
    match = workers.JobRunner.match

    def deadly(self, job, pairs):
        if any([job.images[end].name for end in pair] == ["view 00.png", "view 02.png"] for pair in pairs):
            os._exit(77)
        return match(self, job, pairs)

    workers.JobRunner.match = deadly
"""


@pytest.mark.slow
def test_a_local_ray_of_two_workers(tmp_path, monkeypatch):
    """Also with relative paths, which are from the command's folder; a pair that kills its actor fails."""
    pytest.importorskip("ray")
    photos(tmp_path / "photos", 5)
    monkeypatch.chdir(tmp_path)
    common = ["collection", "photos", *QUICK, "--exhaustive", "--workers"]
    assert run(*common, 0, "--run", "here") == 0
    assert run(*common, 2, "--run", "ray", "--engine", "ray") == 0
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(ROOT)]))
    found = opened(tmp_path / "run", tmp_path / "photos", workers=Workers("ray", count=2, threads=1))
    found.add_pairs(exhaustive=True)
    assert found.run().crashes > 0
    with found.store as store:
        ((*ends, reason),) = store.failed()
        assert ends == [NAMES[0], NAMES[2]] and "Ray actor" in reason
        assert store.counts().pairs_done == 9


def test_ray_that_is_absent_is_said(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["collection", folder, "--run", tmp_path / "run", *QUICK, "--engine", "ray"]
    assert run(*command, "--exhaustive") == 2 and "pip install" in capfd.readouterr().err


def test_a_run_killed_between_its_files_leaves_out_an_overlay_when_it_continues(rng, tmp_path):
    """Descriptors reach the disk first; then they are fewer than the keypoints."""
    stamp, made = rng.uniform(20, 90, (40, 2)), tmp_path / "run"
    Store.create(made, {}).close()
    with Writer(made) as writer, closing(sqlite3.connect(":memory:")) as before:
        for number in range(9):
            points = np.concatenate([stamp, rng.uniform((0, 120), (320, 240), (60, 2))]).astype(np.float32)
            features = Features(points, rng.random((100, 8), np.float32), size=(320, 240))
            with writer.transaction():
                writer.put_features(f"{number}.png", features, encode_features(features))
        with closing(sqlite3.connect(made / DATABASE)) as database:
            database.backup(before)
            writer.leave_out_overlays()
            before.backup(database)
    with Writer(made) as writer:
        writer.leave_out_overlays()
        assert max(len(writer.features(f"{number}.png")) for number in range(9)) <= 60


def stamped(rng, path: Path, text: str = "CAMERA 7") -> Path:
    noise = cv2.GaussianBlur(rng.normal(0, 1, (240, 320)), (0, 0), 1.5)
    pixels = (128 + 200 * noise).clip(0, 255).astype(np.uint8)
    cv2.putText(pixels, text, (60, 220), cv2.FONT_HERSHEY_SIMPLEX, 1.2, 255, 3)
    path.parent.mkdir(exist_ok=True)
    cv2.imwrite(str(path), pixels)
    return path


def test_parts_leave_out_what_the_whole_leaves_out_also_when_interrupted(rng, tmp_path, capfd):
    for number in range(12):
        stamped(rng, (folder := tmp_path / "photos") / f"{number:02d}.png")
    whole = matched(tmp_path / "whole", folder, {"sequential": 1})

    def part(number: int) -> Path:  # of four or five images
        found = opened(tmp_path / f"part{number}", folder, shard=f"{number}/3")
        found.add_pairs(sequential=1)
        with pytest.raises(KeyboardInterrupt):
            found.run(on_progress=interrupt)
        assert found.run().all_well
        return found.run_dir

    def interrupt(progress) -> None:
        if progress.done:
            raise KeyboardInterrupt

    parts = list(map(part, (1, 2, 3)))
    assert run("merge", *parts, "--into", tmp_path / "joined", "--descriptors") == 0
    assert "an overlay lies on" in (said := capfd.readouterr()).out and "differ" not in said.err
    assert contents(tmp_path / "joined") == contents(whole.run_dir)
    with Writer(parts[1]) as writer:
        writer.set_meta("overlays", "[]")
    assert run("merge", *parts, "--into", tmp_path / "odd") == 0
    assert "part2: 4 pairs joined; its images of 320 x 240 keep" in capfd.readouterr().err


def test_an_overlay_is_looked_for_anew_where_all_images_have_changed(rng, tmp_path, capfd):
    paths = [stamped(rng, tmp_path / "photos" / f"{number:02d}.png") for number in range(9)]
    for count, text, said in ((9, "CAMERA 7", False), (3, "", True), (9, "", False)):
        for path in paths[:count]:
            stamped(rng, path, text)
        assert collect(tmp_path / "photos", tmp_path / "run", "--sequential", 1) == 0
        out, err = capfd.readouterr()
        assert ("--restart" in err) == said and ("an overlay lies on" in out) == (text != "" or said)


def test_what_lies_over_most_photos_gives_no_keypoints(rng, tmp_path, capsys):
    folder, made = tmp_path / "photos", tmp_path / "run"
    paths = [stamped(rng, folder / f"{number:02d}.png") for number in range(9)]
    assert collect(folder, made, "--sequential", 1) == 0
    stamped(rng, folder / "09.png")
    assert collect(folder, made, "--sequential", 1) == 0  # the tenth as well, though it is found alone
    assert "an overlay lies on" in capsys.readouterr().out
    with Store.open(made) as store:
        (overlay,) = store.overlays
        for image in store.images():
            assert overlay.beside(store.keypoints(image.name)).all()
            assert image.count == len(store.features(image.name)) > 50
        assert len(store.check()) == 0 and all(pair.geometry.status != "ok" for pair in store.pairs())
    assert run("merge", made, "--into", tmp_path / "joined", "--descriptors") == 0
    stamped(rng, folder / "10.png")  # its keypoints on it go in the joined run, too
    assert collect(folder, tmp_path / "joined", "--sequential", 1) == 0
    with Store.open(tmp_path / "joined") as store:
        assert overlay.beside(store.keypoints("10.png")).all()
    run("report", made, "--pages", 0)
    assert "320 x 240: on " in (made / "report.html").read_text()
    several = matcher.match_set(paths, "nearest", max_keypoints=150, pairs=[(0, 1)])
    assert all(overlay.beside(to_numpy(each.keypoints)).all() for each in several.features)
    for wrong in ("[[[320, 240], [1, 1], [[1, NaN]]]]", "[[[320], [1, 1], []]]", "[[[9, 9], [0, 1], []]]"):
        with Writer(made) as writer, writer.transaction():
            writer.set_meta("overlays", wrong)
        assert run("status", made) == 5
