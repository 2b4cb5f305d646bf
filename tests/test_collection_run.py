import os
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from collection_runs import QUICK, contents, photos

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.cli.output import ProgressLines
from matcher.collection.collection import Collection
from matcher.collection.runner import StageProgress
from matcher.collection.schema import Counts
from matcher.collection.settings import differences, parse_shard
from matcher.collection.store import Store, Writer, file_path
from matcher.errors import ImageError, UsageError

HERE = 0  # workers: this process


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def collect(folder: Path, run_dir: Path, *more: object) -> int:
    return run("collection", folder, "--run", run_dir, *QUICK, "--workers", 0, *more)


def opened(run_dir: Path, **options) -> Collection:
    wanted = {"preset": "nearest", "max_keypoints": 150, "device": "cpu", "workers": HERE, **options}
    return Collection.open(run_dir, **wanted)


@pytest.fixture
def folder(tmp_path) -> Path:
    photos(tmp_path / "photos", 4)
    return tmp_path / "photos"


def test_every_pair_is_matched_once_as_a_pipeline_would(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "run", "--exhaustive") == 0
    out, err = capfd.readouterr()
    assert "images: 4 done, 0 failed, 0 waiting" in out
    assert "pairs: 6 done, 0 failed, 0 waiting" in out
    assert "extracting images: 4 of 4, 0 failed" in err and "matching pairs: 6 of 6" in err
    # A keypoint has one position in all pairs of a run: refinement comes later, track by track.
    pipe = matcher.load("nearest", max_keypoints=150, device="cpu", refine=False)
    pairs = list(opened(tmp_path / "run"))
    assert len(pairs) == 6
    for pair in pairs:
        wanted = pipe.match(folder / pair.name0, folder / pair.name1)
        assert np.array_equal(pair.matches.indices, wanted.matches.indices)
        assert np.array_equal(pair.matches.points0, wanted.points0)
        assert np.array_equal(pair.matches.points1, wanted.points1)
        assert np.allclose(pair.matches.scores, wanted.scores, atol=1e-5)
        assert np.array_equal(pair.geometry.inliers, wanted.geometry.inliers)
        assert pair.geometry.status == wanted.geometry.status
        assert (pair.geometry.matrix is None) == (wanted.geometry.matrix is None)
    assert max(len(pair.matches) for pair in pairs) > 20


def test_a_learned_front_end_is_named_in_the_run(folder, tmp_path, capfd):
    """Its parameters are shipped; others would make another run."""
    arguments = ("--exhaustive", "--preset", "nearest-learned")
    assert collect(folder, tmp_path / "run", *arguments) == 0
    assert "pairs: 6 done, 0 failed" in capfd.readouterr().out
    assert collect(folder, tmp_path / "run", "--exhaustive", "--preset", "nearest") == 2
    assert "the preset nearest-learned, not nearest" in capfd.readouterr().err


def test_scales_are_kept_along_the_stored_axes(tmp_path):
    """The photo is shown upright at 500 x 217 pixels."""
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 255, (1301, 3001), dtype=np.uint8)
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        PIL.Image.fromarray(pixels).save(tmp_path / "photos" / name, exif=exif)
    collection = opened(tmp_path / "run", resize=500, max_keypoints=50)
    collection.add_images(tmp_path / "photos")
    collection.add_pairs(exhaustive=True)
    collection.run()
    expected = (
        matcher.load("nearest", resize=500, max_keypoints=50).extract(tmp_path / "photos" / "a.png").scale
    )
    with Store.open(tmp_path / "run") as store:
        assert np.allclose(store.features("a.png").scale, expected)
        assert np.allclose(store.scale("a.png"), expected) and expected[0] != expected[1]


def test_worker_processes_give_the_same(folder, tmp_path):
    assert collect(folder, tmp_path / "here", "--exhaustive") == 0
    command = ["collection", folder, "--run", tmp_path / "there", *QUICK, "--workers", 2, "--exhaustive"]
    assert run(*command) == 0
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_nothing_is_done_twice_and_a_changed_image_is(folder, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert collect(folder, run_dir, "--exhaustive") == 0
    before = contents(run_dir)
    capfd.readouterr()
    assert collect(folder, run_dir, "--exhaustive") == 0
    assert "extracting" not in (err := capfd.readouterr().err) and "matching" not in err
    os.utime(folder / "view 01.png", (1, 1))  # touched, the same bytes
    assert collect(folder, run_dir) == 0
    assert "matching" not in capfd.readouterr().err
    assert contents(run_dir) == before
    shutil.copy(folder / "view 02.png", folder / "view 01.png")
    assert collect(folder, run_dir) == 0
    err = capfd.readouterr().err
    assert "1 image has changed" in err
    assert "extracting images: 1 of 1" in err and "matching pairs: 3 of 3" in err
    after = contents(run_dir)
    assert {key[1:] for key in before if key not in after or after[key] != before[key]} >= {
        ("view 00.png", "view 01.png"), ("view 01.png", "view 02.png"), ("view 01.png", "view 03.png"),
    }  # fmt: skip
    assert after["pair", "view 00.png", "view 02.png"] == before["pair", "view 00.png", "view 02.png"]
    photos(folder, 5)
    assert collect(folder, run_dir, "--sequential", 1) == 0
    with Store.open(run_dir) as store:
        assert store.counts() == Counts(5, 0, 0, 7, 0, 0)


@pytest.mark.parametrize("name", ["refined", "verified"])
def test_a_run_is_continued_whatever_later_stages_say_of_probabilities(name):
    def settings(offset, refined):
        calibration = {"offset": offset, **refined}
        return {"config": {"matcher": {"policy": {"calibration": calibration}}}}

    former, now = settings(0.9, {}), settings(0.9, {name: {"offset": 0.5, "slope": 0.8}})
    assert differences(former, now) == differences(settings(0.9, {name: {"offset": 1.0}}), now) == []
    assert len(differences(settings(0.8, {}), now)) == 1


def test_other_settings_are_refused_by_name_unless_restarted(folder, tmp_path, small_weights, capfd):
    run_dir = tmp_path / "run"
    assert collect(folder, run_dir, "--sequential", 1) == 0
    for options, name in (
        (["--max-keypoints", 140], "keypoints: 150 in the run, 140 now"),
        (["--resize", 150], "resize: "),
        (["--threshold", 0.3], "threshold: "),
        (["--no-upright"], "upright: True in the run, False now"),
        (["--shard", "1/2"], "shard: None in the run, 1/2 now"),
        (["--masks", folder], "source.masks"),
    ):
        assert collect(folder, run_dir, *options) == 2
        err = capfd.readouterr().err
        assert name in err and "restart" in err
    hybrid = ["--preset", "hybrid", "--weights", small_weights]
    assert collect(folder, run_dir, *hybrid) == 2
    assert "the preset nearest, not hybrid" in capfd.readouterr().err
    (run_dir / "notes.txt").write_text("mine")
    assert collect(folder, run_dir, "--max-keypoints", 140, "--sequential", 1, "--restart") == 0
    with Store.open(run_dir) as store:
        assert max(image.count for image in store.images()) == 140
    assert (run_dir / "notes.txt").read_text() == "mine"


def test_presets_without_keypoints_of_an_image_are_refused(folder, tmp_path, capfd):
    assert run("collection", folder, "--run", tmp_path / "run", "--preset", "loftr-outdoor") == 2
    err = capfd.readouterr().err
    assert "loftr-outdoor finds new keypoints for every pair" in err and "hybrid" in err
    assert not (tmp_path / "run").exists()


def test_images_that_cannot_be_read_fail_with_their_pairs(folder, tmp_path, capfd):
    good = (folder / "view 01.png").read_bytes()
    (folder / "view 01.png").write_bytes(good[: len(good) // 2])
    (folder / "text.jpg").write_text("no image")
    (folder / "empty.png").touch()
    assert collect(folder, tmp_path / "run", "--exhaustive") == 4
    out = capfd.readouterr().out
    assert "images: 3 done, 3 failed, 0 waiting" in out and "pairs: 3 done, 12 failed, 0 waiting" in out
    assert "text.jpg: not an image" in out or "text.jpg" in out
    assert run("status", tmp_path / "run") == 4
    with Store.open(tmp_path / "run") as store:
        failed = {(pair.name0, pair.name1): pair.reason for pair in store.failed()}
    assert "cut short or damaged" in failed["view 00.png", "view 01.png"]
    assert collect(folder, tmp_path / "run", "--exhaustive") == 4  # and nothing is tried again in vain
    assert "extracting" not in capfd.readouterr().err
    (folder / "view 01.png").write_bytes(good)
    assert collect(folder, tmp_path / "run") == 4
    out, err = capfd.readouterr()
    assert "matching pairs: 3 of 3" in err and "pairs: 6 done, 9 failed" in out


def test_no_image_at_all(folder, tmp_path, capfd):
    (tmp_path / "bad").mkdir()
    for name in ("a.jpg", "b.jpg"):
        (tmp_path / "bad" / name).write_text("no image")
    assert collect(tmp_path / "bad", tmp_path / "run", "--exhaustive") == 3
    assert "no image of" in capfd.readouterr().err
    (tmp_path / "none").mkdir()
    assert collect(tmp_path / "none", tmp_path / "run2", "--exhaustive") == 2
    assert "holds no images" in capfd.readouterr().err
    assert collect(tmp_path / "absent", tmp_path / "run3", "--exhaustive") == 2
    assert "not a folder" in capfd.readouterr().err


def test_a_pair_list_with_everything_wrong(folder, tmp_path, capfd):
    rows = [
        b"\xef\xbb\xbf# comment", b'"view 00.png" "view 01.png"', b"", b'"view 01.png" "view 00.png"',
        b'"view 00.png" "view 01.png"', b'"view 02.png" "view 02.png"', b'"view 02.png" absent.png',
        b'"view 02.png" ../../etc/passwd', b'/etc/passwd "view 02.png"',
    ]  # fmt: skip
    (tmp_path / "pairs.txt").write_bytes(b"\r\n".join(rows))
    assert collect(folder, tmp_path / "run", "--pairs", tmp_path / "pairs.txt") == 0
    out, err = capfd.readouterr()
    assert "pairs: 1 done, 0 failed, 0 waiting" in out
    assert "images: 2 done, 0 failed, 2 waiting" in out
    for fault in ("line 4", "line 5", "line 6", "line 7", "line 8", "9 ("):
        assert fault in err


def test_masks_keep_keypoints_away(folder, tmp_path):
    import cv2

    (tmp_path / "masks").mkdir()
    mask = np.zeros((160, 200), np.uint8)
    mask[:, 100:] = 255
    cv2.imwrite(str(tmp_path / "masks" / "view 00.png.png"), mask)
    run_dir = tmp_path / "run"
    assert collect(folder, run_dir, "--masks", tmp_path / "masks", "--sequential", 1) == 0
    with Store.open(run_dir) as store:
        assert store.keypoints("view 00.png")[:, 0].min() > 95
        assert store.keypoints("view 01.png")[:, 0].min() < 60
    cv2.imwrite(str(tmp_path / "masks" / "view 01.png.png"), mask)
    assert collect(folder, run_dir, "--masks", tmp_path / "masks", "--sequential", 1) == 0
    with Store.open(run_dir) as store:
        assert store.keypoints("view 01.png")[:, 0].min() > 95


def test_parts_are_disjoint_and_join_to_the_whole(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "whole", "--exhaustive") == 0
    parts = [tmp_path / f"part{number}" for number in (1, 2, 3, 4)]
    for number, part in enumerate(parts, 1):
        assert collect(folder, part, "--exhaustive", "--shard", f"{number}/4") == 0
    held = [{key for key in contents(part) if key[0] == "pair"} for part in parts]
    assert [len(keys) for keys in held] == [1, 2, 1, 2]
    assert len(set.union(*held)) == 6
    assert collect(folder, parts[0], "--exhaustive", "--shard", "1/4") == 0  # again: the same part
    assert run("merge", *parts, "--into", tmp_path / "joined", "--descriptors") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    assert run("merge", *parts, "--into", tmp_path / "joined") == 0
    assert contents(tmp_path / "joined") == contents(tmp_path / "whole")
    capfd.readouterr()
    assert collect(folder, tmp_path / "joined", "--exhaustive") == 0
    assert "matching" not in capfd.readouterr().err
    assert run("merge", *parts, "--into", parts[0]) == 2
    assert "one of the runs" in capfd.readouterr().err


def test_only_runs_that_fit_are_joined(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "a", "--sequential", 1) == 0
    assert collect(folder, tmp_path / "b", "--sequential", 1, "--max-keypoints", 100) == 0
    assert run("merge", tmp_path / "a", tmp_path / "b", "--into", tmp_path / "ab") == 2
    assert "max_keypoints" in capfd.readouterr().err
    shutil.copytree(folder, tmp_path / "other")
    shutil.copy(folder / "view 03.png", tmp_path / "other" / "view 00.png")
    assert collect(tmp_path / "other", tmp_path / "c", "--sequential", 1) == 0
    assert run("merge", tmp_path / "a", tmp_path / "c", "--into", tmp_path / "ac") == 2
    assert "view 00.png is one image in" in capfd.readouterr().err
    assert not (tmp_path / "ac").exists()  # said before anything is written


def test_deleted_descriptors_are_made_again_where_they_are_needed(folder, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert collect(folder, run_dir, "--sequential", 1) == 0
    before = contents(run_dir)
    file_path(run_dir, 0).unlink()
    capfd.readouterr()
    assert collect(folder, run_dir, "--sequential", 1) == 0
    assert "extracting" not in capfd.readouterr().err
    assert collect(folder, run_dir, "--exhaustive") == 0
    assert "extracting images: 4 of 4" in capfd.readouterr().err
    after = contents(run_dir)
    assert {key: after[key] for key in before} == before
    file_path(run_dir, 1).unlink()
    assert collect(folder, run_dir, "--descriptors") == 0
    assert contents(run_dir) == after


def test_features_from_elsewhere(folder, tmp_path, rng, capfd):
    h5py = pytest.importorskip("h5py")
    names = sorted(path.name for path in folder.iterdir())
    pipe = matcher.load("nearest", max_keypoints=150, device="cpu")
    with h5py.File(tmp_path / "features.h5", "w") as file:
        for name in names:
            features = pipe.extract(folder / name)
            group = file.create_group(f"sub/{name}")
            group["keypoints"] = features.keypoints.numpy()
            group["descriptors"] = features.descriptors.numpy().T
            group["scores"] = features.scores.numpy().astype(np.float16)
            group["image_size"] = np.array([200, 160])
        file.create_group("sub/bad.png")["keypoints"] = np.zeros((3, 2))
    run_dir = tmp_path / "run"
    with_features = ["--features", tmp_path / "features.h5"]

    def matched(run_dir: Path, *more: object) -> int:
        return run("collection", folder, "--run", run_dir, "--device", "cpu", "--workers", 0, *more)

    nearest = ["--preset", "nearest"]
    for useless in (("--max-keypoints", 100), ("--no-upright",)):
        assert matched(tmp_path / "no", "--exhaustive", *with_features, *nearest, *useless) == 2
        assert f"taken as they are, so {useless[0]}" in capfd.readouterr().err
    assert matched(run_dir, "--exhaustive", *with_features, *nearest) == 4
    out = capfd.readouterr().out
    assert "pairs: 6 done, 4 failed" in out and "has no descriptors" in out
    assert collect(folder, tmp_path / "own", "--exhaustive") == 0
    own, found = list(opened(tmp_path / "own")), list(opened(run_dir))
    for pair, wanted in zip(found, own, strict=True):
        assert pair.name0 == f"sub/{wanted.name0}"
        assert np.array_equal(pair.matches.indices, wanted.matches.indices)
        assert np.array_equal(pair.geometry.inliers, wanted.geometry.inliers)
    with h5py.File(tmp_path / "features.h5", "a") as file:
        file[f"sub/{names[0]}/keypoints"][0] += 1
    assert matched(run_dir, *with_features, *nearest) == 4
    assert "matching pairs: 3 of 3" in capfd.readouterr().err
    (tmp_path / "no.h5").write_text("text")
    assert matched(tmp_path / "x", "--features", tmp_path / "no.h5", "--exhaustive", *nearest) == 2
    assert "not a readable HDF5" in capfd.readouterr().err
    assert matched(tmp_path / "x", *with_features, "--preset", "hybrid", "--exhaustive") == 3
    with Store.open(tmp_path / "x") as store:
        assert "hybrid needs every keypoint's scale" in store.images()[1].reason


def test_cameras_for_essential_geometry(folder, tmp_path):
    found = opened(tmp_path / "run", geometry="essential")
    found.add_images(folder)
    found.set_cameras({"view 00.png": Camera(200, 200, 100, 80), "view 01.png": Camera(200, 200, 100, 80)})
    found.add_pairs(sequential=1)
    report = found.run()
    assert (report.matched, report.counts.pairs_failed, report.all_well) == (3, 2, False)
    with found.store as store:
        assert "needs the camera of view 02.png" in next(store.failed()).reason
    assert next(iter(found)).geometry.kind == "essential"
    common = opened(tmp_path / "all", geometry="essential", camera=Camera(200, 200, 100, 80))
    common.add_images(folder)
    common.add_pairs(sequential=1)
    assert common.run().all_well
    assert run("export", tmp_path / "all", "--to", "kapture", tmp_path / "kapture") == 0
    line, *_ = (tmp_path / "kapture" / "sensors" / "sensors.txt").read_text("utf-8").splitlines()[2:]
    assert "PINHOLE" in line and line.endswith("200.0, 200.0, 100.5, 80.5")


def test_the_object_says_what_is_missing(folder, tmp_path):
    found = opened(tmp_path / "run")
    with pytest.raises(UsageError, match="add_images"):
        found.run()
    with pytest.raises(UsageError, match="holds no run"):
        next(iter(found))
    found.add_images(folder)
    for bad in ({}, {"exhaustive": True, "sequential": 1}):
        with pytest.raises(UsageError, match="one of"):
            found.add_pairs(**bad)
    with pytest.raises(UsageError, match="no image 'x'"):
        found.add_pairs([("view 00.png", "x")])
    with pytest.raises(UsageError, match="itself"):
        found.add_pairs([("view 00.png", "view 00.png")])
    assert found.add_pairs([("view 01.png", "view 00.png"), ("view 00.png", "view 01.png")]) == (1, 1)
    assert found.counts().pairs_waiting == 1
    with pytest.raises(UsageError, match="unknown option"):
        opened(tmp_path / "run", wrong=1).add_images(folder)
    for bad in ("0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(UsageError, match="i/n"):
            parse_shard(bad)


def test_two_runs_on_one_store(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "run", "--sequential", 1) == 0
    with Writer(tmp_path / "run"):
        assert collect(folder, tmp_path / "run", "--sequential", 1) == 2
        assert "is being written by another run" in capfd.readouterr().err
        assert collect(folder, tmp_path / "run", "--restart") == 2
        assert run("status", tmp_path / "run") == 0


def test_status_looks_for_damage(folder, tmp_path, capfd):
    assert collect(folder, tmp_path / "run", "--sequential", 1) == 0
    assert run("status", tmp_path / "run", "--check") == 0
    assert "nothing is damaged" in capfd.readouterr().out
    data = bytearray(file_path(tmp_path / "run", 0).read_bytes())
    data[5000] ^= 1
    file_path(tmp_path / "run", 0).write_bytes(data)
    assert run("status", tmp_path / "run", "--check") == 5
    assert run("status", tmp_path) == 2


def test_names_that_cannot_be_stored_are_left_out(folder, tmp_path, capfd):
    shutil.copy(folder / "view 00.png", folder / "line\nbreak.png")
    shutil.copy(folder / "view 00.png", os.fsencode(folder) + b"/\xff.png")
    (folder / "sub").mkdir()
    shutil.copy(folder / "view 00.png", folder / "sub" / "größe ß.PNG")
    shutil.copy(folder / "view 00.png", folder / ".hidden.png")
    (folder / "sub" / "loop").symlink_to(folder)
    assert collect(folder, tmp_path / "run", "--exhaustive") == 0
    assert "left out because their names cannot be stored: 2 files" in capfd.readouterr().err
    with Store.open(tmp_path / "run") as store:
        assert next(image.name for image in store.images()) == "sub/größe ß.PNG"
        assert store.counts().images == 5


def test_lines_of_progress(capsys):
    said, now = [], [0.0]
    lines = ProgressLines(said.append, lambda: now[0])
    for time, done in ((0, 0), (1, 10), (12, 120), (13, 130), (23, 300), (40, 4000)):
        now[0] = time
        lines(StageProgress("match", done, done // 100, 4000))
    assert said == [
        "matching pairs: 4000",
        "matching pairs: 120 of 4000, 1 failed, 10.0/s, 6 min 28 s left",
        "matching pairs: 300 of 4000, 3 failed, 13.0/s, 4 min 44 s left",
        "matching pairs: 4000 of 4000, 40 failed, 100.0/s, done in 40 s",
    ]
    now[0] = 0.0
    lines(StageProgress("match", 0, 0, 9))
    now[0] = 20.0
    lines(StageProgress("match", 3, 0, 9))
    assert said[-1] == "matching pairs: 3 of 9, 0 failed, 9.0/min, 40 s left"


def test_no_images_is_an_error_of_the_library_too(tmp_path):
    photos(tmp_path / "photos", 2)
    found = opened(tmp_path / "run")
    found.add_images(tmp_path / "photos")
    for path in (tmp_path / "photos").iterdir():
        path.write_bytes(b"")
    found.add_pairs(exhaustive=True)
    with pytest.raises(ImageError, match="no image"):
        found.run()
