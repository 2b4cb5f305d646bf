"""`matcher localize`: what it prints, writes and draws, and what it refuses before any work."""

import json
import shutil
import sys

import numpy as np
import PIL.Image
import pytest
from localized_map import CAMERA, CAMERA_TEXT, QUERIES, SIZE, make_map

import matcher
from matcher.cameras import read_named_poses
from matcher.cli import main
from matcher.sfm.models import find_model

pycolmap = pytest.importorskip("pycolmap")
GIVEN = ("--camera", CAMERA_TEXT)


def run(*arguments: object) -> int:
    return main(["localize", *map(str, arguments)])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("map")
    return folder, make_map(folder)


@pytest.fixture
def asked(made):
    """The arguments that most calls begin with."""
    return made[0] / "model", made[0] / "queries"


@pytest.fixture
def away(made):
    """The pictures of the map are gone."""
    photos = made[0] / "photos"
    photos.rename(made[0] / "away")
    yield
    (made[0] / "away").rename(photos)


def test_poses_are_written_in_the_format_of_the_file(made, asked, tmp_path, capfd):
    """KITTI: twelve numbers, world_from_cam; TUM: a time, a position, a quaternion with w last."""
    truth = made[1]
    back = np.array([np.linalg.inv(truth[query]) for query in QUERIES])
    for name in ("poses.txt", "poses.tum", "poses.kitti", "poses.json"):
        assert run(*asked, *GIVEN, "--output", tmp_path / name) == 0
        assert "2 of 2 photos have a pose" in capfd.readouterr().out
    np.testing.assert_allclose(np.loadtxt(tmp_path / "poses.kitti").reshape(-1, 3, 4), back[:, :3], atol=0.05)
    lines = np.loadtxt(tmp_path / "poses.tum")
    np.testing.assert_allclose(lines[:, 1:4], back[:, :3, 3], atol=0.05)
    x, y, z, w = lines[:, 4:].T
    np.testing.assert_allclose(w**2 + x**2 - y**2 - z**2, back[:, 0, 0], atol=0.05)
    for name in ("poses.txt", "poses.json"):
        poses, cameras = read_named_poses(tmp_path / name)
        assert sorted(poses) == list(QUERIES)
        for query in QUERIES:
            np.testing.assert_allclose(poses[query], truth[query], atol=0.05)
    assert cameras[QUERIES[0]] == CAMERA


def test_photos_are_drawn_and_others_refused(made, tmp_path, capfd):
    folder, _ = made
    query, wall = folder / "queries" / QUERIES[0], folder / "elsewhere" / "wall.png"
    assert run(folder / "model", query, wall, "--plot", tmp_path / "drawn") == 4
    printed = capfd.readouterr().out
    assert "wall.png: no pose (" in printed and "1 of 2 photos have a pose" in printed
    for name in ("photo2.png.png", "wall.png.png"):
        with PIL.Image.open(tmp_path / "drawn" / name) as drawing:
            assert drawing.size[0] > 1000
    lines = tmp_path / "cameras.txt"
    lines.write_text("photo2.png PINHOLE 480 360 528 528 240 180\n")
    assert run(folder / "model", query, "--camera", lines, "--json") == 0
    row = json.loads(capfd.readouterr().out)["poses"]["photo2.png"]
    assert row["camera"]["params"] == [528, 528, 240, 180] and row["inliers"] > 50


@pytest.mark.usefixtures("away")
def test_poses_are_kept_where_the_pictures_of_the_map_are_gone(asked, tmp_path, capfd):
    out, drawn = tmp_path / "poses.json", tmp_path / "drawn"
    assert run(*asked, "--plot", drawn, "--output", out) == 4
    error = capfd.readouterr().err
    assert "photo2.png is not drawn" in error and "--no-refine" in error
    assert sorted(read_named_poses(out)[0]) == list(QUERIES) and list(drawn.iterdir()) == []
    assert run(*asked, "--no-refine") == 0 and "gone" not in capfd.readouterr().err


def test_mistakes_are_refused_before_any_work(made, tmp_path, capfd):
    model, queries = made[0] / "model", made[0] / "queries"
    (tmp_path / "empty").mkdir()
    shutil.copytree(model / "sparse" / "0", tmp_path / "foreign")
    for arguments, named in (
        ((model, tmp_path / "empty"), "no images"),
        ((model, queries, "--output", tmp_path / "a.csv"), "a.csv"),
        ((model, queries, "--camera", "1,2"), "--camera"),
        ((tmp_path / "foreign", queries), "--run"),
        ((model, queries, "--pictures", made[0] / "photos"), "--pictures"),
        ((model, queries, "--masks", made[0]), "no mask"),
        ((model, queries, "--features", tmp_path / "none.h5"), "none.h5"),
        ((model, queries, "--recording", tmp_path / "a.txt"), ".rrd"),
    ):
        assert run(*arguments, "--plot", tmp_path / "drawn") == 2
        error = capfd.readouterr().err
        assert named in error and "Traceback" not in error, error
        assert not (tmp_path / "drawn").exists()


def test_a_model_of_another_program_is_mapped_once(made, tmp_path, monkeypatch, capfd):
    folder, truth = made
    monkeypatch.setattr("matcher.cli.sfm.DEFAULT_PRESET", "nearest")  # is faster
    model, theirs = pycolmap.Reconstruction(find_model(folder / "model")), tmp_path / "theirs"
    theirs.mkdir()
    model.write(theirs)
    command = (theirs, folder / "queries", "--json", *GIVEN)
    assert run(*command) == 2 and "--pictures" in capfd.readouterr().err
    for extracted in (1, 0):
        assert run(*command, "--pictures", folder / "photos") == 0
        printed = capfd.readouterr()
        assert printed.err.count("extracting images: 5 of 5") == extracted
        for name, row in json.loads(printed.out)["poses"].items():
            np.testing.assert_allclose(row["cam_from_world"], truth[name], atol=0.05)
    with matcher.Map.open(tmp_path / "theirs-map") as place:
        assert len(place.names) == 5
    assert run(*command, "--pictures", folder / "photos", "--features", tmp_path / "f.h5") == 2
    image = model.image(model.reg_image_ids()[0])
    pose = image.frame.rig_from_world
    pose.translation = pose.translation + 1
    image.frame.rig_from_world = pose
    model.write(theirs)
    assert run(*command, "--pictures", folder / "photos") == 2
    assert "theirs-map" in capfd.readouterr().err


def test_a_map_of_features_from_a_file_takes_features(made, tmp_path, capfd):
    pytest.importorskip("h5py")
    folder, truth = made
    for name, photos in (("first", "photos"), ("asked", "queries")):
        own = matcher.Collection.open(tmp_path / name, preset="nearest", max_keypoints=400, workers=0)
        own.add_images(folder / photos)
        own.add_pairs(exhaustive=True)
        own.run()
        own.export("hloc", tmp_path / f"{name}-hloc")
    files = [tmp_path / f"{name}-hloc" / "features.h5" for name in ("first", "asked")]
    again = ("sfm", folder / "photos", "--features", files[0], "--poses", folder / "model", "--workers", 0)
    assert main([str(a) for a in (*again, "--preset", "nearest", "--out", tmp_path / "model")]) == 0
    capfd.readouterr()
    arguments, given = (tmp_path / "model", folder / "queries", *GIVEN), ("--features", files[1])
    assert run(*arguments, *given, "--json", "--plot", tmp_path / "drawn") == 0
    rows = json.loads(capfd.readouterr().out)["poses"]
    for name in QUERIES:
        moved = np.array(rows[name]["cam_from_world"]) @ np.linalg.inv(truth[name])
        assert np.linalg.norm(moved[:3, 3]) < 0.1 and rows[name]["inliers"] > 50
    assert len(list((tmp_path / "drawn").iterdir())) == 2
    assert run(*arguments) == 2 and "--features" in capfd.readouterr().err
    absent = (arguments[0], tmp_path / QUERIES[0], *GIVEN, *given)  # the photo itself is not needed
    assert run(*absent, "--plot", tmp_path / "none", "--output", tmp_path / "poses.txt") == 4
    assert "is not drawn" in capfd.readouterr().err
    assert list(read_named_poses(tmp_path / "poses.txt")[0]) == [QUERIES[0]]
    assert run(arguments[0], folder / "elsewhere", *given) == 4 and "wall.png" in capfd.readouterr().err
    assert run(*arguments, *given, "--rig", tmp_path / "rig.json") == 2


def test_the_command_takes_a_folder_of_masks(asked, tmp_path, capfd):
    mask = np.zeros(SIZE[::-1], np.uint8)
    mask[:, :300] = 255
    for name in QUERIES:
        PIL.Image.fromarray(mask).save(tmp_path / name)
    counts = []
    for masks in ((), ("--masks", tmp_path)):
        assert run(*asked, *GIVEN, "--json", *masks) == 0
        poses = json.loads(capfd.readouterr().out)["poses"]
        counts.append([poses[name]["matches"] for name in QUERIES])
    assert all(few < many for many, few in zip(*counts, strict=True))
    PIL.Image.new("L", (20, 20), 255).save(tmp_path / QUERIES[0])
    assert run(*asked, *GIVEN, "--masks", tmp_path) == 2
    assert QUERIES[0] in capfd.readouterr().err


def test_a_recording_holds_the_map_and_the_photos(made, asked, tmp_path, monkeypatch, capfd):
    file = tmp_path / "seen.rrd"
    arguments = (*asked, made[0] / "elsewhere", "--recording", file)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rerun", None)
        assert run(*arguments, "--plot", tmp_path / "drawn") == 2 and not list(tmp_path.iterdir())
        assert "pip install" in capfd.readouterr().err
    pytest.importorskip("rerun")
    assert run(*arguments) == 4  # one photo is of another place
    data = file.read_bytes()
    assert data.startswith(b"RRF") and [path.name for path in tmp_path.iterdir()] == ["seen.rrd"]
    for entity in ("world/points", "world/map/photo0", "world/localized/photo2", "photos/wall"):
        assert entity.encode() in data.replace(b"\\", b""), entity
    assert run(*arguments) == 2 and "--overwrite" in capfd.readouterr().err
