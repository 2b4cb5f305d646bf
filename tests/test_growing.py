"""Models that grow: photos are added in the model's coordinates, pairs where photos have no pose."""

import json
import shutil

import numpy as np
import PIL.Image
import pytest
from collection_scene import centres, render_photos
from command import run

import matcher
from matcher.cameras import write_named_poses
from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.errors import IntegrityError, UsageError
from matcher.sfm.growing import continue_model, more_pairs
from matcher.sfm.models import read_given_poses

pytest.importorskip("pycolmap")
FAST = ("--preset", "nearest", "--max-keypoints", "600", "--workers", "0", "--threads", "1")
SLIM = ("--workers", 0, "--threads", 1)  # for a model that is continued
CAMERA = ("--camera", "528,528,239.5,179.5")
NEW = ("photo1.png", "photo4.png")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model of four photos, and two more photos in a folder beside them."""
    folder = tmp_path_factory.mktemp("grow")
    render_photos(folder / "photos", count=6)
    (folder / "later").mkdir()
    for name in NEW:
        (folder / "photos" / name).rename(folder / "later" / name)
    assert run("sfm", folder / "photos", "--out", folder / "model", *FAST, *CAMERA) == 0
    (folder / "later").rename(folder / "photos" / "later")
    return folder


def test_photos_are_added_in_the_coordinates_of_the_model(made, tmp_path):
    """After an interruption, too."""
    before = read_given_poses(made / "model").cam_from_world

    def interrupt(*_):
        raise KeyboardInterrupt

    later, how = made / "photos" / "later", {"workers": 0}
    with pytest.raises(KeyboardInterrupt):
        continue_model(made / "model", later, tmp_path / "grown", how=how, on_progress=interrupt)
    collection = Collection.open(made / "model-run", preset="nearest")
    assert not (tmp_path / "grown").exists()
    assert run("sfm", later, "--continue", made / "model", *SLIM, "--out", tmp_path / "grown") == 0
    assert collection.counts().pairs_done == 15
    after = read_given_poses(tmp_path / "grown").cam_from_world
    assert sorted(set(after) - set(before)) == [f"later/{name}" for name in NEW]
    size = np.ptp([np.linalg.inv(pose)[:3, 3] for pose in before.values()], axis=0).max()
    for name, pose in before.items():
        moved = np.linalg.inv(pose)[:3, 3] - np.linalg.inv(after[name])[:3, 3]
        assert np.linalg.norm(moved) < 0.01 * size
    (summary,) = json.loads((tmp_path / "grown" / "summary.json").read_text())["models"]
    assert summary["registered"] == 6 and summary["mean_reprojection_error"] < 1
    assert sorted(read_given_poses(made / "model").cam_from_world) == sorted(before)  # as it was
    with matcher.Map.open(tmp_path / "grown") as place:
        assert len(place.names) == 6
    with pytest.raises(UsageError, match="all 2 photos"):
        continue_model(tmp_path / "grown", later, tmp_path / "again")


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
    assert run("sfm", tmp_path / "photos", "--out", first, *FAST, "--exclude", "later/") == 0
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


def test_cameras_that_were_given_stay_where_photos_are_added(made, tmp_path):
    shutil.copytree(made / "model", tmp_path / "model")
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert summary.pop("cameras_given") is True
    summary["run"] = str(made / "model-run")
    (tmp_path / "model" / "summary.json").write_text(json.dumps(summary))  # one whose camera was refined
    focals = {}
    for name, model, camera in (
        ("kept", made / "model", ()),
        ("same", made / "model", CAMERA),
        ("refined", tmp_path / "model", ()),
    ):
        grow = ("sfm", made / "photos", *SLIM, "--continue", model, *camera)
        assert run(*grow, "--out", tmp_path / name) == 0
        found = read_given_poses(tmp_path / name)
        assert found.keeps_cameras == (name == "same")
        focals[name] = [{c.fx for n, c in found.cameras.items() if ("later" in n) == new} for new in (0, 1)]
    assert focals["kept"][0] == {528} != focals["kept"][1]  # those of another folder are estimated
    assert focals["same"] == [{528}, {528}] and focals["refined"][0] != {528}


def test_poses_are_kept_and_points_triangulated(made, tmp_path, capfd):
    known = read_given_poses(made / "model")
    names = sorted(known.cam_from_world)
    assert run("sfm", made / "photos", "--poses", made / "model", "--out", tmp_path / "points", *FAST) == 0
    found = read_given_poses(tmp_path / "points")
    assert sorted(found.cam_from_world) == names
    for name in names:
        np.testing.assert_allclose(found.cam_from_world[name], known.cam_from_world[name], atol=1e-6)
        assert found.cameras[name] == known.cameras[name]
    (summary,) = json.loads((tmp_path / "points" / "summary.json").read_text())["models"]
    assert summary["points"] > 100
    write_named_poses(tmp_path / "poses.txt", known.cam_from_world)  # of cameras that nobody knows
    arguments = ("sfm", made / "model-run", "--poses", tmp_path / "poses.txt", "--threads", 1)
    assert "is a guess" not in capfd.readouterr().out
    assert run(*arguments, "--out", tmp_path / "guessed") == 0
    assert "is a guess" in capfd.readouterr().out


def test_a_changed_photo_of_the_model_is_not_taken_for_the_old_one(made, tmp_path):
    photo = made / "photos" / "photo0.png"
    held = photo.read_bytes()
    with Store.open(made / "model-run") as store:
        known = store.image("photo0.png").sha256
    try:
        photo.write_bytes((made / "photos" / "later" / NEW[0]).read_bytes())
        with pytest.raises(IntegrityError, match=r"photo0\.png"):
            continue_model(made / "model", made / "photos", tmp_path / "out", how={"workers": 0})
        with Store.open(made / "model-run") as store:
            assert store.image("photo0.png").sha256 == known  # the model still fits its run
        assert not (tmp_path / "out").exists()
    finally:
        photo.write_bytes(held)


def test_mistakes_are_refused_before_any_work(made, tmp_path, capfd):
    model, photos, out = made / "model", made / "photos", tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bad.txt").write_text("no poses\n")
    for arguments, named in (
        ((tmp_path / "elsewhere", "--continue", model), "elsewhere"),
        ((photos, "--continue", tmp_path), "COLMAP model"),
        ((photos, "--continue", model, "--poses", model), "--poses"),
        ((photos, "--continue", model, "--max-keypoints", 5), "settings"),
        ((photos, "--continue", model, "--weights", "hybrid"), "weights"),
        ((photos, "--continue", model, "--mapper", "global"), "global"),
        ((made / "model-run", "--preset", "hybrid"), "already matched"),
        ((photos, "--poses", tmp_path / "none.txt"), "none.txt"),
        ((photos, "--poses", tmp_path / "bad.txt"), "bad.txt"),
        ((made / "model-run", "--poses", model, "--camera", "500,500,240,180"), "camera"),
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
    made = sparing.reconstruct(tmp_path / "model", threads=1)
    assert made.largest.registered == 5
