"""Cameras that are fixed to each other: COLMAP's rig_config.json read, mapped with, localised with."""

import json
import re
from time import process_time

import cv2
import numpy as np
import pytest
from collection_scene import CAMERA, render_photos, ring, synthetic_store
from command import run

import matcher
from matcher.cameras import RigCamera, RigConfig, read_rig_config
from matcher.errors import UsageError
from matcher.export.colmap import CameraChoice
from matcher.localization.map import localize_frames
from matcher.sfm.models import read_given_poses
from matcher.sfm.reconstruct import RIG, reconstruct

pycolmap = pytest.importorskip("pycolmap")
BASELINE = 0.5
RIGHT = np.eye(4)
RIGHT[0, 3] = -BASELINE
LEFT_ROW = {"image_prefix": "left/", "ref_sensor": True}
RIGHT_ROW = {
    "image_prefix": "right/",
    "cam_from_rig_rotation": [1, 0, 0, 0],
    "cam_from_rig_translation": [-BASELINE, 0, 0],
}
NAMES = [f"{side}/{frame}.jpg" for frame in range(6) for side in ("left", "right")]


def rig(calibrated=True, camera=CAMERA):
    return RigConfig(
        ((RigCamera("left/", np.eye(4), camera), RigCamera("right/", RIGHT if calibrated else None, camera)),)
    )


@pytest.fixture(scope="module")
def stereo():
    """A store of six pairs of pictures around a scene, 16 units across."""
    rng = np.random.default_rng(5)
    poses = np.array([pose for left in ring(6, rng) for pose in (left, RIGHT @ left)])
    return synthetic_store(rng, points=300, names=NAMES, poses=poses, camera=None)[0]


def baselines(model):
    centres = model.centres()
    return [np.linalg.norm(centres[f"left/{i}.jpg"] - centres[f"right/{i}.jpg"]) for i in range(6)]


def across(model):
    centres = model.centres()
    return np.linalg.norm(centres["left/0.jpg"] - centres["left/3.jpg"])


def written(path, *cameras):
    path.write_text(json.dumps([{"cameras": list(cameras)}]))
    return path


def test_a_rig_keeps_its_shape_and_gives_the_scale(stereo, tmp_path):
    made = reconstruct(stereo, tmp_path / "model", choice=CameraChoice(rig=rig()), threads=1)
    assert made.largest.registered == 12
    np.testing.assert_allclose(baselines(made.largest), BASELINE, rtol=1e-6)
    assert across(made.largest) == pytest.approx(16, rel=0.01)  # without a rig, units are arbitrary
    model = pycolmap.Reconstruction(str(tmp_path / "model" / "sparse" / "0"))
    assert (model.num_rigs(), model.num_frames()) == (1, 6)  # in COLMAP's files
    with pycolmap.Database.open(tmp_path / "model" / "database.db") as database:
        assert (database.num_rigs(), database.num_frames(), database.num_cameras()) == (1, 6, 2)
    read = read_rig_config(tmp_path / "model" / RIG).rigs[0]
    np.testing.assert_allclose(read[1].cam_from_rig, RIGHT, atol=1e-6)
    assert read[1].camera.fx == CAMERA.fx


def test_a_rig_that_is_not_calibrated_is_learnt(stereo, tmp_path):
    choice = CameraChoice(camera=CAMERA, rig=rig(calibrated=False, camera=None))
    made = reconstruct(stereo, tmp_path / "model", choice=choice, threads=1).largest
    assert made.registered == 12
    lengths = np.array(baselines(made)) / across(made) * 16
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-6)  # one shape, in all frames
    assert lengths[0] == pytest.approx(BASELINE, rel=0.01)
    learnt = read_rig_config(tmp_path / "model" / RIG)
    assert learnt.known
    assert np.linalg.norm(learnt.rigs[0][1].cam_from_rig[:3, 3]) == pytest.approx(baselines(made)[0])


def test_a_rig_that_moves_ahead_begins_with_one_moment(tmp_path):
    """COLMAP begins with two moments, and finds none that see points from different directions."""
    left = np.tile(np.eye(4), (6, 1, 1))
    left[:, 2, 3] = 9 - 0.1 * np.arange(6)
    poses = np.array([pose for each in left for pose in (each, RIGHT @ each)])
    store, _ = synthetic_store(np.random.default_rng(5), points=300, names=NAMES, poses=poses, camera=None)
    made = reconstruct(store, tmp_path / "model", choice=CameraChoice(rig=rig()), threads=1).largest
    assert made.registered == 12
    centres = made.centres()
    travelled = np.linalg.norm(centres["left/5.jpg"] - centres["left/0.jpg"])
    assert travelled == pytest.approx(0.5, rel=0.03)


def test_a_model_with_a_rig_is_continued_with_it(stereo, tmp_path):
    choice = CameraChoice(camera=CAMERA, rig=rig(camera=None))
    first = tmp_path / "first"
    reconstruct(stereo, first, choice=choice, only=[n for n in NAMES if "5" not in n], threads=1)
    before = read_given_poses(first, fixed=False)
    choice = CameraChoice(rig=read_rig_config(first / RIG))
    grown = reconstruct(stereo, tmp_path / "second", choice=choice, poses=before, threads=1).largest
    assert grown.registered == 12 and len(before.cam_from_world) == 10
    np.testing.assert_allclose(baselines(grown), BASELINE, rtol=1e-6)
    for name, pose in before.cam_from_world.items():
        assert np.abs(grown.cam_from_world[name] - pose[:3]).max() < 0.02


@pytest.mark.parametrize(
    "cameras",
    [
        [LEFT_ROW],
        [LEFT_ROW, RIGHT_ROW | {"cam_from_rig_rotation": [2, 0, 0, 0]}],
        [LEFT_ROW, RIGHT_ROW | {"camera_model_name": "PINHOLE", "camera_params": [1]}],
        [LEFT_ROW, RIGHT_ROW | {"baseline": 1}],
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, cameras):
    path = written(tmp_path / "rig.json", *cameras)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        read_rig_config(path)


def test_a_megabyte_of_cameras_is_read_soon(tmp_path):
    """Every two prefixes were compared, which took minutes."""
    rows = [LEFT_ROW, *({"image_prefix": f"{number:05}/"} for number in range(30_000))]
    path, begun = written(tmp_path / "rig.json", *rows), process_time()
    assert path.stat().st_size < 1 << 20
    assert len(read_rig_config(path).rigs[0]) == 30_001 and process_time() - begun < 5
    with pytest.raises(UsageError, match="'00007/' and '00007/x/' cannot be told apart"):
        read_rig_config(written(path, *rows, {"image_prefix": "00007/x/"}))


@pytest.fixture(scope="module")
def photographed(tmp_path_factory):
    """Photos of a stereo rig, of which the second moment is not in the model."""
    folder = tmp_path_factory.mktemp("rig")
    truth = {}
    for side, mounted in (("left", np.eye(4)), ("right", RIGHT)):
        poses = render_photos(folder / "photos" / side, count=4, mounted=mounted)
        (folder / "later" / side).mkdir(parents=True)
        name = f"{side}/photo1.png"
        (folder / "photos" / name).rename(folder / "later" / name)
        truth |= {f"{side}/photo{i}.png": pose for i, pose in enumerate(poses)}
    written(folder / "rig.json", LEFT_ROW, RIGHT_ROW)
    arguments = ("--preset", "nearest", "--max-keypoints", 500, "--workers", 0, "--threads", 1)
    camera = ("--camera", "528,528,239.5,179.5", "--rig", folder / "rig.json")
    assert run("sfm", folder / "photos", "--out", folder / "model", *arguments, *camera) == 0
    return folder, truth


def test_the_command_maps_and_localises_with_a_rig(photographed, tmp_path, capfd):
    folder, truth = photographed
    poses = read_given_poses(folder / "model").cam_from_world
    between = poses["right/photo0.png"] @ np.linalg.inv(poses["left/photo0.png"])
    np.testing.assert_allclose(between, RIGHT, atol=1e-6)
    wanted = truth["left/photo3.png"] @ np.linalg.inv(truth["left/photo0.png"])
    found = poses["left/photo3.png"] @ np.linalg.inv(poses["left/photo0.png"])
    np.testing.assert_allclose(found, wanted, atol=0.1)  # in the rig's units
    cv2.imwrite(str(folder / "later" / "right" / "photo9.png"), np.zeros((360, 480), np.uint8))
    out = tmp_path / "poses.json"
    assert run("localize", folder / "model", folder / "later", "--rig", folder / "model" / RIG,
               "--output", out) == 4  # fmt: skip
    rows = json.loads(out.read_text())["poses"]
    left, right = (np.array(rows[f"{side}/photo1.png"]["cam_from_world"]) for side in ("left", "right"))
    between = np.vstack([right, [0, 0, 0, 1]])[:4] @ np.linalg.inv(np.vstack([left, [0, 0, 0, 1]])[:4])
    np.testing.assert_allclose(between, RIGHT, atol=1e-6)
    there = np.vstack([left, [0, 0, 0, 1]])[:4] @ np.linalg.inv(poses["left/photo0.png"])
    wanted = truth["left/photo1.png"] @ np.linalg.inv(truth["left/photo0.png"])
    np.testing.assert_allclose(there, wanted, atol=0.05)
    assert rows["right/photo9.png"]["cam_from_world"] is None  # a moment of one picture is that picture
    assert "right/photo9.png: no pose" in capfd.readouterr().out


def test_the_command_names_what_does_not_fit(photographed, tmp_path, capfd):
    folder, _ = photographed
    model, later = folder / "model", folder / "later"
    bare = written(tmp_path / "bare.json", LEFT_ROW, {"image_prefix": "right/"})
    other = written(tmp_path / "other.json", LEFT_ROW, RIGHT_ROW | {"image_prefix": "top/"})
    new, camera = ("--out", tmp_path / "new"), ("--camera", "500,500,240,180")
    known = {"camera_model_name": "PINHOLE", "camera_params": [528, 528, 240, 180]}
    told = written(tmp_path / "told.json", LEFT_ROW | known, RIGHT_ROW | known)
    export = ("export", folder / "model-run", tmp_path / "e.db", "--to", "colmap")
    for arguments in (
        ("localize", model, later, "--rig", bare),
        ("sfm", folder / "photos", *new, "--rig", other),
        ("sfm", later, *new, "--rig", bare, "--poses", model),
        ("export", folder / "model-run", tmp_path / "e", "--to", "hloc", "--rig", bare),
        ("sfm", folder / "photos", *new, "--rig", told, *camera),
        (*export, "--rig", told, *camera),
    ):
        assert run(*arguments) == 2
        error = capfd.readouterr().err
        assert ("rig" in error or "camera" in error or "top/" in error) and "Traceback" not in error, error
    assert not (tmp_path / "new").exists()
    with matcher.Map.open(model) as place, pytest.raises(UsageError, match=r"intrinsics of left/photo1\.png"):
        nameless = RigConfig((tuple(RigCamera(p, np.eye(4), None) for p in ("left/photo1", "right/photo1")),))
        photos = {f"{side}/photo1.png": later / side / "photo1.png" for side in ("left", "right")}
        list(localize_frames(place, photos, nameless, {}))
