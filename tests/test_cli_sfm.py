"""`matcher sfm` and `matcher export`, from photos to files that other programs read; models that grow."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
from collection_scene import aligned, centres, render_photos
from command import run

import matcher
from matcher import tiling as extraction
from matcher.cameras import write_named_poses
from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.errors import IntegrityError, UsageError
from matcher.sfm.growing import continue_model, more_pairs
from matcher.sfm.models import read_given_poses

pycolmap = pytest.importorskip("pycolmap")

pytestmark = pytest.mark.usefixtures("compiled")
FAST = ("--preset", "nearest", "--max-keypoints", "1500", "--workers", "0", "--threads", "1")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Photos, their poses, and what `matcher sfm` made of them."""
    folder = tmp_path_factory.mktemp("made")
    poses = render_photos(folder / "photos")
    (folder / "photos" / "broken.jpg").write_bytes(b"no image")
    code = run("sfm", folder / "photos", "--out", folder / "model", *FAST)
    return folder, poses, code


def test_from_photos_to_a_model(made):
    folder, poses, code = made
    assert code == 4  # one photo could not be read
    model = pycolmap.Reconstruction(str(folder / "model" / "sparse" / "0"))
    found = {image.name: image.projection_center() for image in model.images.values()}
    assert sorted(found) == [f"photo{i}.png" for i in range(5)]
    truth = centres(poses)
    error = np.linalg.norm(aligned(np.array([found[name] for name in sorted(found)]), truth) - truth, axis=1)
    assert error.max() < 0.02 * np.linalg.norm(truth[0] - truth[-1])
    assert model.compute_mean_reprojection_error() < 1
    colours = np.array([point.color for point in model.points3D.values()])
    assert colours.std() > 10  # they are those of the photos
    with matcher.Collection.open(folder / "model-run").store as store:
        extractor = store.settings["config"]["extractor"]
    assert (extractor["max_keypoints"], extractor["resize"], extractor["keep"]) == (1500, 2048, "largest")


@pytest.mark.slow
def test_keypoints_by_tiles_make_a_model(made, tmp_path, monkeypatch):
    folder, _, _ = made
    monkeypatch.setattr(extraction, "TILE", 300)
    photos = ("sfm", folder / "photos", "--out", tmp_path / "model")
    assert run(*photos, *FAST, "--tiles", "--exclude", "broken.jpg") == 0
    model = pycolmap.Reconstruction(str(tmp_path / "model" / "sparse" / "0"))
    assert model.num_reg_images() == 5 and model.compute_mean_reprojection_error() < 1
    with matcher.Collection.open(tmp_path / "model-run").store as store:
        extractor = store.settings["config"]["extractor"]
    assert (extractor["tiles"], extractor["resize"], extractor["max_keypoints"]) == (1500, None, 2048)


def test_statistics_are_printed_and_written_and_a_run_exported(made, tmp_path, capfd):
    folder, _, _ = made
    code = run("sfm", folder / "model-run", "--out", folder / "again", "--threads", 1, "--mapper", "global")
    printed = capfd.readouterr().out
    assert code == 0 and "registered images: 5 of 5" in printed and "1 images failed in the run" in printed
    assert "mean track length:" in printed and "px of the stored image\n" in printed
    (summary,) = json.loads((folder / "again" / "summary.json").read_text())["models"]
    assert f"points: {summary['points']}, " in printed
    assert (folder / "again" / "reconstruction.png").stat().st_size > 10_000
    out = tmp_path / "a.npz"
    assert run("export", made[0] / "model-run", "--to", "npz", out) == 0
    printed = capfd.readouterr().out
    assert "5 images with " in printed and "10 pairs (" in printed and f"wrote {out}" in printed
    assert len(np.load(out)["pairs"]) == 10
    (lines := tmp_path / "lines.txt").write_text("photo1.png PINHOLE 480 360 528 528 240 180\n")
    assert run("export", made[0] / "model-run", "--to", "kapture", tmp_path / "k", "--camera", lines) == 0
    assert "5 of 6 photos have no camera" in capfd.readouterr().err


def test_mistakes_have_a_message_and_a_code(made, tmp_path, capfd):
    folder, _, _ = made
    done, photos = folder / "model-run", folder / "photos"
    (lines := folder / "lines.txt").write_text("q.jpg PINHOLE 480 360 528 528 240 180\n")
    new, larger = tmp_path / "m", "SIMPLE_PINHOLE,960,720,1056,480,360"
    named = f"{lines}: the cameras given are those of no photo, such as 'q.jpg'; names are paths below"
    for arguments, printed in (
        (("sfm", photos, "--out", new, "--camera", lines), named),
        (("sfm", done, "--out", new, "--camera", lines, "--dry-run"), named),
        (("export", done, "--to", "colmap", tmp_path / "a.db", "--camera", lines), named),
        (("sfm", photos, "--out", new, "--camera", larger), "photo0.png"),
        (("sfm", photos, "--out", new, "--camera", "528,528,720,180"), "photo0.png"),
        (("localize", folder / "model", photos, "--camera", larger), "photo0.png"),
        (("localize", folder / "model", photos, "--camera", lines), named),
        (("sfm", done, "--out", folder / "model"), "not an empty folder"),
        (("sfm", done, "--out", tmp_path / "m", "--resize", 100), "already matched"),
        (("sfm", done, "--out", tmp_path / "m", "--preset", "hybrid-learned"), "already matched"),
        (("sfm", done, "--out", tmp_path / "m", "--camera", "1,2"), "--camera must be"),
        (("sfm", photos, "--out", tmp_path / "m", "--seed", -2), "--seed"),
        (("sfm", photos, "--out", tmp_path / "no" / "m"), "no folder"),
        (("sfm", tmp_path / "none", "--out", tmp_path / "m"), "none"),
        (("export", folder / "model", "--to", "npz", tmp_path / "a.npz"), "holds no run; give"),
        (("export", done, "--to", "npz", tmp_path / "a.npz", "--camera", "1,1,1,1"), "no cameras"),
        (("export", done, "--to", "npz", tmp_path / "a.npz", "--cameras", "each"), "no cameras"),
    ):
        assert run(*arguments) == 2, arguments
        error = capfd.readouterr().err
        assert printed in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_checks_and_writes_nothing(made, tmp_path, capfd):
    folder, _, _ = made
    photos, model = folder / "photos", tmp_path / "model"
    assert run("sfm", photos, "--out", model, *FAST, "--exclude", "photo0*", "--dry-run") == 0
    printed = capfd.readouterr().out
    assert "images: 5" in printed and "--exhaustive" in printed and f"create {model}" in printed
    assert run("sfm", photos, "--out", model, *FAST, "--nearby", 2, "--dry-run") == 0
    assert "--nearby 2" in capfd.readouterr().out
    assert run("sfm", folder / "model-run", "--out", model, "--dry-run", "--include", "photo[012]*") == 0
    printed = capfd.readouterr().out
    assert "images: 3 of 6" in printed and "pairs: 10 matched" in printed
    again = ("--run", folder / "model-run", "--max-keypoints", 100)
    for more, code, said in (
        (("--masks", tmp_path), 2, "no mask"),
        (("--preset", "nosuch"), 2, "nosuch"),
        (("--weights", "gone.safetensors"), 5, "gone.safetensors"),
        (("--preset", "nearest", "--threshold", 7), 2, "--match-threshold"),
        (("--preset", "nearest", *again), 2, "100"),
    ):
        assert run("sfm", photos, "--out", model, *more, "--dry-run") == code
        assert said in (err := capfd.readouterr()).err and "would" not in err.out
    assert run("sfm", photos, "--out", model, "--preset", "nearest", *again, "--restart", "--dry-run") == 0
    assert "would start anew" in capfd.readouterr().out and list(tmp_path.iterdir()) == []


def test_the_object_reconstructs_and_exports_with_a_choice_of_cameras(made, tmp_path):
    from matcher.export.colmap import CameraChoice

    folder, _, _ = made
    collection = matcher.Collection.open(folder / "model-run")
    choice = CameraChoice(model="SIMPLE_PINHOLE", sharing="single")
    result = collection.reconstruct(tmp_path / "model", cameras=choice, include=["photo[0123]*"], threads=1)
    assert result.largest.registered == result.images == 4
    assert {camera["model"] for camera in result.largest.cameras.values()} == {"SIMPLE_PINHOLE"}
    collection.export("colmap", tmp_path / "a.db", cameras=choice)
    with pycolmap.Database.open(tmp_path / "a.db") as database:
        assert database.num_cameras() == 1
    with pytest.raises(matcher.UsageError, match="unknown option 'max_images'"):
        collection.reconstruct(tmp_path / "other", max_images=3)
    with pytest.raises(matcher.UsageError, match="at least two photos"):
        collection.reconstruct(tmp_path / "other", include=["photo0.png"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db", "model"]


# --- Models that grow: photos are added in the coordinates of the model, pairs where photos have no pose.


QUICK = ("--preset", "nearest", "--max-keypoints", "600", "--workers", "0", "--threads", "1")
SLIM = ("--workers", 0, "--threads", 1)  # for a model that is continued
CAMERA = ("--camera", "528,528,239.5,179.5")
NEW = ("photo1.png", "photo4.png")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of four photos, and two more photos in a folder beside them."""
    folder = tmp_path_factory.mktemp("grow")
    render_photos(folder / "photos", count=6)
    (folder / "later").mkdir()
    for name in NEW:
        (folder / "photos" / name).rename(folder / "later" / name)
    ordered = ("--sequential", 3)  # by names, which say nothing of photos in another folder
    assert run("sfm", folder / "photos", "--out", folder / "model", *QUICK, *CAMERA, *ordered) == 0
    (folder / "later").rename(folder / "photos" / "later")
    return folder


def test_photos_are_added_in_the_coordinates_of_the_model(small, tmp_path):
    """After an interruption, too."""
    before = read_given_poses(small / "model").cam_from_world

    def interrupt(*_):
        raise KeyboardInterrupt

    later, how = small / "photos" / "later", {"workers": 0}
    with pytest.raises(KeyboardInterrupt):
        continue_model(small / "model", later, tmp_path / "grown", how=how, on_progress=interrupt)
    collection = Collection.open(small / "model-run", preset="nearest")
    assert not (tmp_path / "grown").exists()
    assert run("sfm", later, "--continue", small / "model", *SLIM, "--out", tmp_path / "grown") == 0
    assert collection.counts().pairs_done == 15
    after = read_given_poses(tmp_path / "grown").cam_from_world
    assert sorted(set(after) - set(before)) == [f"later/{name}" for name in NEW]
    size = np.ptp([np.linalg.inv(pose)[:3, 3] for pose in before.values()], axis=0).max()
    for name, pose in before.items():
        moved = np.linalg.inv(pose)[:3, 3] - np.linalg.inv(after[name])[:3, 3]
        assert np.linalg.norm(moved) < 0.01 * size
    (summary,) = json.loads((tmp_path / "grown" / "summary.json").read_text())["models"]
    assert summary["registered"] == 6 and summary["mean_reprojection_error"] < 1
    assert sorted(read_given_poses(small / "model").cam_from_world) == sorted(before)  # as it was
    with matcher.Map.open(tmp_path / "grown") as place:
        assert len(place.names) == 6
    with pytest.raises(UsageError, match="all 2 photos"):
        continue_model(tmp_path / "grown", later, tmp_path / "again")
    # Patterns are of names below the folder that is given, as for a new model.
    part, more = ("--out", tmp_path / "part"), ("--out", tmp_path / "more", "--include", f"./{NEW[0]}")
    assert run("sfm", later, "--continue", small / "model", *SLIM, *part, "--include", "later/") == 2
    assert run("sfm", small / "model-run", *part, "--threads", 1, "--include", "photo[023].png") == 0
    archived = shutil.move(small / "photos" / "photo3.png", tmp_path)  # its features are in the run
    assert run("sfm", later, "--continue", part[1], *SLIM, *more) == 0
    shutil.move(archived, small / "photos")
    names = sorted(read_given_poses(more[1]).cam_from_world)  # what was left out stays out
    assert names == [f"later/{NEW[0]}", "photo0.png", "photo2.png", "photo3.png"]


@pytest.mark.slow
def test_a_model_on_earth_stays_there_when_photos_are_added(tmp_path):
    """In metres of the same origin, whatever the headers of the new photos say; maps and poses say so too."""
    poses = render_photos(tmp_path / "photos", count=6)
    metres = 6 * centres(poses)
    for number, (east, north, up) in enumerate(metres):
        degrees = (40 + north / 111_034, 20 + east / 85_394)  # of about that length there
        exif = PIL.Image.Exif()
        values = [(value + 0.0005 * (number == 4), 0.0, 0.0) for value in degrees]  # one header is 70 m off
        exif[0x8825] = {1: "N", 2: values[0], 3: "E", 4: values[1], 5: b"\0", 6: 100 + up}
        with PIL.Image.open(path := tmp_path / "photos" / f"photo{number}.png") as photo:
            photo.save(path, exif=exif)
    (tmp_path / "photos" / "later").mkdir()
    (tmp_path / "photos" / NEW[1]).rename(later := tmp_path / "photos" / "later" / NEW[1])
    first, grown = tmp_path / "model", tmp_path / "grown"
    assert run("sfm", tmp_path / "photos", "--out", first, *QUICK, "--exclude", "later/") == 0
    assert run("sfm", later.parent, "--continue", first, "--out", grown, *SLIM) == 0
    before, after = read_given_poses(first), read_given_poses(grown)
    assert len(after.cam_from_world) == 6 and before.georegistration["images"] == 5
    assert after.georegistration["origin"] == before.georegistration["origin"]
    with matcher.Map.open(grown) as place:
        assert place.georegistration == after.georegistration
    photo0 = np.linalg.inv(before.cam_from_world["photo0.png"])[:3, 3]
    for name, number in (("photo0.png", 0), ("later/photo4.png", 4), ("photo5.png", 5)):
        centre = np.linalg.inv(after.cam_from_world[name])[:3, 3]
        np.testing.assert_allclose(centre - photo0, metres[number] - metres[0], atol=1.5)


def test_cameras_that_were_given_stay_where_photos_are_added(small, tmp_path):
    shutil.copytree(small / "model", tmp_path / "model")
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert summary.pop("cameras_given") is True
    summary["run"] = str(small / "model-run")
    (tmp_path / "model" / "summary.json").write_text(json.dumps(summary))  # one whose camera was refined
    focals = {}
    for name, model, camera in (
        ("kept", small / "model", ()),
        ("same", small / "model", CAMERA),
        ("refined", tmp_path / "model", ()),
    ):
        grow = ("sfm", small / "photos", *SLIM, "--continue", model, *camera)
        assert run(*grow, "--out", tmp_path / name) == 0
        found = read_given_poses(tmp_path / name)
        assert found.keeps_cameras == (name == "same")
        focals[name] = [{c.fx for n, c in found.cameras.items() if ("later" in n) == new} for new in (0, 1)]
    assert focals["kept"][0] == {528} != focals["kept"][1]  # those of another folder are estimated
    assert focals["same"] == [{528}, {528}] and focals["refined"][0] != {528}


def test_poses_are_kept_and_points_triangulated(small, tmp_path, capfd):
    known = read_given_poses(small / "model")
    names = sorted(known.cam_from_world)
    again = ("sfm", small / "model-run", "--poses", small / "model", "--threads", 1)
    assert run(*again, "--out", tmp_path / "points") == 0
    found = read_given_poses(tmp_path / "points")
    assert sorted(found.cam_from_world) == names
    for name in names:
        np.testing.assert_allclose(found.cam_from_world[name], known.cam_from_world[name], atol=1e-6)
        assert found.cameras[name] == known.cameras[name]
    (summary,) = json.loads((tmp_path / "points" / "summary.json").read_text())["models"]
    assert summary["points"] > 100
    photos = ("sfm", small / "photos", "--poses", small / "model", "--out", tmp_path / "photos", *QUICK)
    assert run(*photos) == 0 and "extracting images: 4 of 4" in capfd.readouterr().err
    write_named_poses(tmp_path / "poses.txt", known.cam_from_world)  # of cameras that nobody knows
    arguments = ("sfm", small / "model-run", "--poses", tmp_path / "poses.txt", "--threads", 1)
    assert "is a guess" not in capfd.readouterr().out
    assert run(*arguments, "--out", tmp_path / "guessed") == 0
    assert "is a guess" in capfd.readouterr().out
    gone = (small / "photos" / "photo3.png").rename(small / "photo3.png")
    given = ("sfm", small / "photos", "--run", small / "model-run", "--exclude", "later/", *QUICK, *CAMERA)
    for more, code in ((), 4), (("--include", "photo[025].png"), 0), (("--exclude", "photo3.png"), 0):
        assert run(*given, *more, "--out", tmp_path / f"less{len(''.join(more))}") == code
        printed, lost = capfd.readouterr().out, f"1 image no longer in {small / 'photos'}: photo3.png"
        assert (f"left out: {lost}" in printed) == (code == 4) and "images: 3 of 3" in printed
    gone.rename(small / "photos" / "photo3.png")


def test_a_changed_photo_of_the_model_is_not_taken_for_the_old_one(small, tmp_path):
    photo = small / "photos" / "photo0.png"
    held = photo.read_bytes()
    with Store.open(small / "model-run") as store:
        known = store.image("photo0.png").sha256
    try:
        photo.write_bytes((small / "photos" / "later" / NEW[0]).read_bytes())
        with pytest.raises(IntegrityError, match=r"photo0\.png"):
            continue_model(small / "model", small / "photos", tmp_path / "out", how={"workers": 0})
        with Store.open(small / "model-run") as store:
            assert store.image("photo0.png").sha256 == known  # the model still fits its run
        assert not (tmp_path / "out").exists()
    finally:
        photo.write_bytes(held)


def test_mistakes_of_growing_are_refused_before_any_work(small, tmp_path, capfd):
    model, photos, out = small / "model", small / "photos", tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bad.txt").write_text("no poses\n")
    for arguments, named in (
        ((tmp_path / "elsewhere", "--continue", model), "elsewhere"),
        ((photos, "--continue", tmp_path), "COLMAP model"),
        ((photos, "--continue", model, "--poses", model), "--poses"),
        ((photos, "--continue", model, "--max-keypoints", 5), "settings: leave out --max-keypoints"),
        ((photos, "--continue", model, "--weights", "hybrid"), "weights"),
        ((photos, "--continue", model, "--mapper", "global"), "global"),
        *(((photos, how, model, "--min-images", 5), "--min-images") for how in ("--continue", "--poses")),
        ((photos, "--poses", model, "--cameras", "single"), "--cameras"),
        ((photos, "--poses", model, "--camera-model", "OPENCV", "--features", out), "--camera-model"),
        *(((photos, "--run", photos), "--run"), ((tmp_path,), "--out")),
        ((photos, "--poses", tmp_path / "none.txt"), "none.txt"),
        ((photos, "--poses", tmp_path / "bad.txt"), "bad.txt"),
        ((small / "model-run", "--poses", model, "--camera", "500,500,240,180"), "camera"),
    ):
        assert run("sfm", *arguments, "--out", out) == 2, arguments
        error = capfd.readouterr().err
        assert named in error and "Traceback" not in error, error
    assert not out.exists()


# --- More pairs, where a run's were chosen sparingly


def pairs_of(folder):
    with Collection.open(folder, preset="nearest").store as store:
        return {(pair.name0[5], pair.name1[5]) for pair in store.pairs()}, store.pair_choice


@pytest.fixture
def sparing(tmp_path):
    """A run of five photos, whose pairs were chosen by one keypoint each."""
    render_photos(tmp_path / "photos", count=5)
    collection = Collection.open(tmp_path / "run", preset="nearest", max_keypoints=500, workers=0)
    collection.add_images(tmp_path / "photos")
    collection.add_pairs(preemptive=1)
    return collection


def test_images_without_a_pose_get_more_pairs_but_each_once(sparing, tmp_path):
    sparing.run()
    before, choice = pairs_of(tmp_path / "run")
    rounds, alone = [], frozenset({"photo0.png"})
    more = more_pairs(sparing, on_round=lambda *counts: rounds.append(counts))
    while more(alone):
        pass
    after, kept = pairs_of(tmp_path / "run")
    assert all("0" in pair for pair in after - before)
    assert sum(new for _, new in rounds) == len(after - before)
    assert {pair for pair in after if "0" in pair} == {("0", other) for other in "1234"}
    assert kept == choice and not more_pairs(sparing)(alone)  # later photos are paired as before
    small = sparing.reconstruct(tmp_path / "model", threads=1)
    assert small.largest.registered == 5
