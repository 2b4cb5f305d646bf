"""Cameras that are fixed to each other: COLMAP's rig_config.json read, mapped with, localised with."""

import json
from dataclasses import replace
from time import process_time

import cv2
import numpy as np
import pytest
from collection_scene import CAMERA, MemoryStore, renamed, render_photos, ring, synthetic_store

import matcher
from matcher.cameras import Camera, RigCamera, RigConfig, read_rig_config
from matcher.cli import main
from matcher.errors import UsageError
from matcher.export.colmap import CameraChoice
from matcher.export.formats import export
from matcher.localization import rig as rig_localisation
from matcher.localization.localizer import doubt_alone
from matcher.localization.map import localize_frames
from matcher.localization.pose import Matches3d
from matcher.localization.rig import estimate_rig
from matcher.localization.sparse_map import LocalizationConfig
from matcher.sfm.reconstruct import RIG, GivenPoses, read_given_poses, reconstruct

pycolmap = pytest.importorskip("pycolmap")
BASELINE = 0.5
PHOTOGRAPHED = Camera(528.0, 528.0, 239.5, 179.5)  # of `render_photos`
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
        (
            (
                RigCamera("left/", np.eye(4), camera),
                RigCamera("right/", RIGHT if calibrated else None, camera),
            ),
        )
    )


@pytest.fixture(scope="module")
def stereo():
    """A store of six pairs of pictures around a scene, 16 units across."""
    rng = np.random.default_rng(5)
    poses = np.array([pose for left in ring(6, rng) for pose in (left, RIGHT @ left)])
    return synthetic_store(rng, names=NAMES, poses=poses, camera=None)[0]


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


@pytest.mark.parametrize("mapper", ["incremental", "global"])
def test_a_rig_that_is_not_calibrated_is_learnt(stereo, tmp_path, mapper):
    choice = CameraChoice(camera=CAMERA, rig=rig(calibrated=False, camera=None))
    made = reconstruct(stereo, tmp_path / "model", choice=choice, mapper=mapper, threads=1).largest
    assert made.registered == 12
    lengths = np.array(baselines(made)) / across(made) * 16
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-6)  # one shape, in all frames
    assert lengths[0] == pytest.approx(BASELINE, rel=0.01)
    learnt = read_rig_config(tmp_path / "model" / RIG)
    assert learnt.known
    assert np.linalg.norm(learnt.rigs[0][1].cam_from_rig[:3, 3]) == pytest.approx(baselines(made)[0])


def test_the_global_mapper_keeps_cameras_that_are_all_given(stereo, tmp_path):
    choice = CameraChoice(rig=rig())
    made = reconstruct(stereo, tmp_path / "all", choice=choice, mapper="global", threads=1)
    assert made.largest.registered == 12 and not any("adjusts" in note for note in made.export.notes)
    model = pycolmap.Reconstruction(str(tmp_path / "all" / "sparse" / "0"))
    assert {tuple(camera.params[:2]) for camera in model.cameras.values()} == {(CAMERA.fx, CAMERA.fy)}


def test_a_rig_that_moves_ahead_begins_with_one_moment(tmp_path):
    """COLMAP begins with two moments, and finds none that see points from different directions."""
    left = np.tile(np.eye(4), (6, 1, 1))
    left[:, 2, 3] = 9 - 0.1 * np.arange(6)
    poses = np.array([pose for each in left for pose in (each, RIGHT @ each)])
    store, _ = synthetic_store(np.random.default_rng(5), names=NAMES, poses=poses, camera=None)
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


def test_pictures_of_no_rig_are_mapped_beside_it(stereo, tmp_path):
    """They never share the camera of a rig, which COLMAP's database could not hold."""
    table = {name: name.replace("left/5", "alone") for name in NAMES}
    names = [table[name] for name in NAMES]
    report = export(renamed(stereo, names), "colmap", tmp_path / "a.db", CameraChoice(rig=rig()))
    assert report.images == 12
    with pycolmap.Database.open(tmp_path / "a.db") as database:
        frames = sorted(len(list(frame.data_ids)) for frame in database.read_all_frames())
        assert frames == [1, 1, 2, 2, 2, 2, 2] and database.num_cameras() == 3


@pytest.mark.parametrize(
    ("cameras", "message"),
    [
        ([LEFT_ROW], "at least two cameras"),
        ([LEFT_ROW, LEFT_ROW], "only one, has"),
        ([RIGHT_ROW, {"image_prefix": "x"}], "only one, has"),
        ([LEFT_ROW, {}], "has an image_prefix"),
        ([LEFT_ROW, RIGHT_ROW | {"cam_from_rig_rotation": [2, 0, 0, 0]}], "length 1, not 2"),
        ([LEFT_ROW, RIGHT_ROW | {"cam_from_rig_translation": [1, 2]}], "four finite numbers"),
        ([LEFT_ROW, RIGHT_ROW | {"cam_from_rig_translation": [1, 2, float("nan")]}], "four finite numbers"),
        ([LEFT_ROW, RIGHT_ROW | {"cam_from_rig_translation": [1e308, 0, 0]}], "too far away"),
        ([LEFT_ROW, {"image_prefix": "right/", "cam_from_rig_rotation": [1, 0, 0, 0]}], "go together"),
        ([LEFT_ROW, RIGHT_ROW | {"camera_model_name": "PINHOLE"}], "go together"),
        ([LEFT_ROW, RIGHT_ROW | {"camera_model_name": "PINHOLE", "camera_params": [1]}], "4 parameters"),
        ([LEFT_ROW, RIGHT_ROW | {"image_prefix": "left/2/"}], "cannot be told apart"),
        ([LEFT_ROW, RIGHT_ROW | {"baseline": 1}], "has no 'baseline'"),
        ([LEFT_ROW | {"cam_from_rig_rotation": [1, 0, 0, 0], "cam_from_rig_translation": [1, 0, 0]},
          RIGHT_ROW], "the identity"),
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(tmp_path, cameras, message):
    path = written(tmp_path / "rig.json", *cameras)
    with pytest.raises(UsageError, match=message) as raised:
        read_rig_config(path)
    assert str(path) in str(raised.value)


def test_a_megabyte_of_cameras_is_read_soon(tmp_path):
    """Every two prefixes were compared, which took minutes."""
    rows = [LEFT_ROW, *({"image_prefix": f"{number:05}/"} for number in range(30_000))]
    path, begun = written(tmp_path / "rig.json", *rows), process_time()
    assert path.stat().st_size < 1 << 20
    assert len(read_rig_config(path).rigs[0]) == 30_001 and process_time() - begun < 5
    with pytest.raises(UsageError, match="'00007/' and '00007/x/' cannot be told apart"):
        read_rig_config(written(path, *rows, {"image_prefix": "00007/x/"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"rigs": []}]', '[{"cameras": 1}]', "[" * 9999])
def test_a_file_that_is_no_rig_is_refused(tmp_path, text):
    (tmp_path / "rig.json").write_text(text)
    with pytest.raises(UsageError, match=r"rig.json: cannot be read"):
        read_rig_config(tmp_path / "rig.json")
    with pytest.raises(UsageError, match="Is a directory"):
        read_rig_config(tmp_path)


def test_images_that_do_not_fit_the_rig_are_named(stereo, tmp_path):
    out = tmp_path / "model"
    with pytest.raises(UsageError, match=r"no picture's name begins with 'right/'.*such as left/0.jpg"):
        reconstruct(stereo, out, choice=CameraChoice(rig=rig()), only=NAMES[::2])
    apart = [name for name in NAMES if ("left" in name) == (name[-5] in "012")]
    with pytest.raises(UsageError, match=r"same after the prefix, unlike left/0\.jpg and right/3\.jpg"):
        reconstruct(stereo, out, choice=CameraChoice(rig=rig()), only=apart)
    images = [
        replace(each, size=(99, 99)) if each.name == "right/3.jpg" else each for each in stereo.images()
    ]
    mixed = MemoryStore(images, {name: stereo.keypoints(name) for name in NAMES}, list(stereo.pairs()))
    with pytest.raises(
        UsageError, match=r"by one camera, but right/0.jpg has 1024 x 768.*right/3.jpg 99 x 99"
    ):
        reconstruct(mixed, out, choice=CameraChoice(rig=rig(camera=None)))
    with pytest.raises(UsageError, match="leave the sharing at auto"):
        CameraChoice(rig=rig(), sharing="single")
    with pytest.raises(UsageError, match="need no rig"):
        given = GivenPoses({name: np.eye(4) for name in NAMES})
        reconstruct(stereo, out, choice=CameraChoice(rig=rig()), poses=given)
    with pytest.raises(UsageError, match="export to colmap"):
        export(stereo, "kapture", out, CameraChoice(rig=rig()))
    assert not out.exists()


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


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
    for arguments, message in (
        (("localize", model, later, "--rig", bare), "does not say how its cameras are fixed"),
        (("localize", model, later, "--rig", other), "no picture's name begins with 'top/'"),
        (("localize", model, later, "--rig", tmp_path / "none.json"), "cannot be read as COLMAP's"),
        (("sfm", folder / "photos", *new, "--rig", other), "no picture's name begins with 'top/'"),
        (("sfm", folder / "model-run", *new, "--rig", other), "no picture's name begins with 'top/'"),
        (("sfm", later, *new, "--rig", bare, "--continue", model), "leave --rig out"),
        (("sfm", later, *new, "--rig", bare, "--poses", model), "need no --rig"),
        (("export", folder / "model-run", tmp_path / "e", "--to", "hloc", "--rig", bare), "no cameras"),
        (("sfm", folder / "photos", *new, "--rig", told, *camera), "of no photo: all"),
        ((*export, "--rig", told, *camera), "of no photo: all"),
    ):
        assert run(*arguments) == 2
        error = capfd.readouterr().err
        assert message in " ".join(error.split()) and "Traceback" not in error, error
    assert not (tmp_path / "new").exists()
    with matcher.Map.open(model) as place, pytest.raises(UsageError, match=r"intrinsics of left/photo1\.png"):
        nameless = RigConfig((tuple(RigCamera(p, np.eye(4), None) for p in ("left/photo1", "right/photo1")),))
        photos = {f"{side}/photo1.png": later / side / "photo1.png" for side in ("left", "right")}
        list(localize_frames(place, photos, nameless, {}))


@pytest.mark.parametrize(("others", "status"), [(5, "ok"), (30, "ambiguous")])
def test_a_pose_of_a_rig_that_another_one_rivals_is_refused(rng, others, status):
    """As in a room with like tables: in both pictures matches with another one agree with each other."""
    fixed = np.tile(np.eye(4), (2, 1, 1))
    fixed[1, 0, 3] = -0.5
    elsewhere = np.diag([-1.0, 1.0, -1.0, 1.0])  # the rig, as these other matches have it
    elsewhere[:3, 3] = 0.5, 0.0, 3.0
    matches = []
    for pose in fixed:
        sides = []
        for count, rig_from_world in ((50, np.eye(4)), (others, elsewhere)):
            cam = rng.uniform((-1.5, -1, 3), (1.5, 1, 8), (count, 3))
            pixels = cam[:, :2] / cam[:, 2:] * CAMERA.fx + (CAMERA.cx, CAMERA.cy)
            back = np.linalg.inv(pose @ rig_from_world)
            sides.append((pixels, cam @ back[:3, :3].T + back[:3, 3]))
        points2d, points3d = (np.concatenate(each) for each in zip(*sides, strict=True))
        points2d = points2d + rng.normal(0, 0.5, points2d.shape)
        matches.append(Matches3d(points2d, points3d, np.arange(len(points2d))))
    how = dict(cameras=[CAMERA, CAMERA], cam_from_rig=fixed, max_errors=[4.0, 4.0])
    estimates = estimate_rig(matches, **how)
    assert np.linalg.norm(estimates[0].cam_from_world - np.eye(4)) < 0.1
    what = estimates, matches, how["max_errors"], LocalizationConfig()
    found = doubt_alone(("ok", "", -200.0), *what, lambda rest: estimate_rig(rest, **how))
    assert found[0] == status


def test_a_rig_is_asked_whether_its_pose_is_the_only_one(photographed, monkeypatch):
    refused, asked = ("ambiguous", "for a reason", -90.0), []
    monkeypatch.setattr(rig_localisation, "doubt_alone", lambda verdict, *_: asked.append(verdict) or refused)
    folder, _ = photographed
    queries = [folder / "later" / side / "photo1.png" for side in ("left", "right")]
    with matcher.Map.open(folder / "model") as place:
        poses = place.localize_rig(queries, [np.eye(4), RIGHT], PHOTOGRAPHED)
    assert [verdict[0] for verdict in asked] == ["ok"]
    assert {pose.status for pose in poses} == {"ambiguous"} and poses[0].cam_from_world is None
