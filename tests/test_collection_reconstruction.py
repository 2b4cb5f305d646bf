"""A reconstruction from made-up matches: all cameras where they should be, rigs too; crashes are said."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import PIL.Image
import pytest
from collection_scene import CAMERA, MemoryStore, aligned, centres, render_photos, ring, synthetic_store
from command import run
from scipy.spatial.transform import Rotation

import matcher
from matcher.cameras import Camera, RigCamera, RigConfig, read_rig_config
from matcher.collection.schema import RefinedKeypoints
from matcher.errors import UsageError
from matcher.export.colmap import CameraChoice
from matcher.localization.map import localize_photos
from matcher.sfm.models import GivenPoses, read_given_poses
from matcher.sfm.reconstruct import RIG, ReconstructionError, check_given_camera, reconstruct
from matcher.types import Matches, TwoViewGeometry

pycolmap = pytest.importorskip("pycolmap")

pytestmark = pytest.mark.usefixtures("compiled")


def centre_error(model, poses):
    """Worst distance of a camera centre after alignment, over the largest distance between cameras."""
    found = np.array([centre for _, centre in sorted(model.centres().items())])
    truth = centres(poses)
    largest = np.linalg.norm(truth[:, None] - truth, axis=2).max()
    return np.linalg.norm(aligned(found, truth) - truth, axis=1).max() / largest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Ten images, 30 % wrong matches, known cameras."""
    store, poses = synthetic_store(np.random.default_rng(5))
    out = tmp_path_factory.mktemp("sfm") / "model"
    return reconstruct(store, out, threads=1), poses, out


def test_all_cameras_are_found_where_they_are_and_the_files_say_so(made):
    result, poses, out = made
    assert (len(result.models), result.images, result.largest.registered) == (1, 10, 10)
    assert centre_error(result.largest, poses) < 1e-3
    assert 0.3 < result.largest.mean_reprojection_error < 1
    assert result.largest.mean_track_length > 4 and result.largest.points > 400
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names == {"sparse", "database.db", "points.ply", "reconstruction.png", "summary.json"}
    model = pycolmap.Reconstruction(str(out / "sparse" / "0"))
    assert (model.num_reg_images(), model.num_points3D()) == (10, result.largest.points)
    pose = next(i for i in model.images.values() if i.name == "ring/003.jpg").cam_from_world().matrix()
    np.testing.assert_allclose(result.largest.cam_from_world["ring/003.jpg"], pose)
    assert (out / "points.ply").read_bytes().startswith(b"ply")
    image = PIL.Image.open(out / "reconstruction.png").convert("RGB")
    red = (np.asarray(image) == (200, 16, 46)).all(axis=2)
    assert image.size == (1600, 800) and red[:, :800].sum() > 500 and red[:, 800:].sum() > 500
    assert json.loads((out / "summary.json").read_text())["models"][0]["registered"] == 10


def test_no_model_and_no_matches_are_said_plainly(tmp_path):
    store, _ = synthetic_store(np.random.default_rng(8), count=3, points=20)
    with pytest.raises(ReconstructionError, match=r"no pair to begin with.*3 images") as raised:
        reconstruct(store, tmp_path / "model", threads=1)
    assert raised.value.exit_code == 4
    none = MemoryStore(list(store.images()), store._keypoints, [])
    with pytest.raises(UsageError, match="no matches in 0 pairs: match"):
        reconstruct(none, tmp_path / "model")
    empty = Matches(*(np.zeros(shape) for shape in ((0, 2), (0, 2), (0, 2), 0)))
    unseen = TwoViewGeometry("fundamental", "too_few", np.zeros(0, bool), None)
    none._pairs = [replace(pair, matches=empty, geometry=unseen) for pair in store.pairs()]
    with pytest.raises(UsageError, match="different things"):
        reconstruct(none, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_two_photos_make_a_model(tmp_path):
    rng, turned = np.random.default_rng(5), np.diag([-1.0, 1, -1, 1])
    poses = ring(10)[:4]
    store, _ = synthetic_store(rng, count=2, poses=poses[:2])
    for mapper in ("incremental", "global"):
        alone = reconstruct(store, tmp_path / mapper, mapper=mapper, threads=1).largest
        assert alone.registered == 2 and alone.points > 150
    known = GivenPoses({f"ring/00{n}.jpg": pose for n, pose in enumerate(poses[:2])})
    assert reconstruct(store, tmp_path / "posed", poses=known, threads=1).largest.points > 150
    known = GivenPoses({name: turned @ pose for name, pose in known.cam_from_world.items()})
    for fixed, remedy in ((True, "poses and cameras of these"), (False, "model of all photos anew")):
        with pytest.raises(ReconstructionError, match=remedy):
            reconstruct(store, tmp_path / "none", poses=replace(known, fixed=fixed), threads=1)
    planar = [
        replace(p, geometry=replace(p.geometry, status="degenerate", homography=np.eye(3)))
        for p in store.pairs()
    ]
    with pytest.raises(ReconstructionError, match=r"one plane.* ring/000.jpg and ring/001.jpg"):
        reconstruct(MemoryStore(store._images, store._keypoints, planar), tmp_path / "plane", threads=1)
    four, _ = synthetic_store(rng, count=4, poses=poses)
    apart = [pair for pair in four.pairs() if (pair.name0[-5] < "2") == (pair.name1[-5] < "2")]
    images = [replace(image, sha256=image.name.replace("3", "2")) for image in four.images()]
    four = MemoryStore(images, four._keypoints, apart)
    made = reconstruct(four, tmp_path / "pairs", threads=1, min_images=2)
    assert any("ring/003.jpg is ring/002.jpg" in note for note in made.export.notes)
    assert [model.registered for model in made.models] == [2, 2]
    assert set(made.unregistered) == set(made.models[1].cam_from_world) and made.export.path.is_file()
    assert '"unregistered": [' in (tmp_path / "pairs" / "summary.json").read_text()


def test_cameras_that_move_straight_ahead_are_mapped(tmp_path):
    """COLMAP begins with no pair whose motion is ahead, and along a street there is no other."""
    poses = np.tile(np.eye(4), (8, 1, 1))
    poses[:, 2, 3] = 9 - 0.8 * np.arange(8)
    store, _ = synthetic_store(np.random.default_rng(5), count=8, poses=poses)
    made = reconstruct(store, tmp_path / "model", threads=1).largest
    assert made.registered == 8 and centre_error(made, poses) < 0.01


# --- Cameras: unknown ones begin simply, wrong ones are said, uncertain observations go.


def test_cameras_get_their_distortion_once_all_images_are_registered(tmp_path):
    """COLMAP registers few images of unknown cameras with many parameters."""
    store, poses = synthetic_store(np.random.default_rng(6), count=8, points=350, camera=None)
    choice = CameraChoice(model="FULL_OPENCV", sharing="single")
    made = reconstruct(store, tmp_path / "model", choice=choice, threads=1).largest
    assert made.registered == 8 and made.mean_reprojection_error < 1 and not made.doubtful
    assert {camera["model"] for camera in made.cameras.values()} == {"FULL_OPENCV"}
    assert centre_error(made, poses) < 0.02
    known = dict.fromkeys(list(made.cameras)[:4], replace(CAMERA, fx=2200, fy=2200))  # for a true 900
    choice = CameraChoice(CAMERA, known=known, refine_known=True)
    far = reconstruct(store, tmp_path / "far", choice=choice, threads=1).largest
    assert far.doubtful == sorted(known)


# --- A camera that was given

FOCAL = 500.0


def camera(focal):
    return Camera(focal, focal, 320, 240, (640, 480))


def pairs(count=30, status="ok", inliers=80):
    """A store's pairs: cameras of `FOCAL` that turn at random, with a little noise."""
    rng = np.random.default_rng(3)
    inverse = np.linalg.inv(camera(FOCAL).K)
    found = []
    for number in range(count):
        cross = np.cross(np.eye(3), rng.standard_normal(3))
        turn = Rotation.from_rotvec(0.3 * rng.standard_normal(3)).as_matrix()
        matrix = inverse.T @ cross @ turn @ inverse * (1 + 1e-3 * rng.standard_normal((3, 3)))
        geometry = TwoViewGeometry("fundamental", status, np.ones(inliers, bool), matrix)
        found.append(SimpleNamespace(name0="a.jpg", name1=f"b{number}.jpg", geometry=geometry))
    return SimpleNamespace(pairs=lambda: iter(found))


@pytest.mark.parametrize("factor", [0.4, 0.95, 1.0, 1.4])
def test_a_wrong_focal_length_is_noticed_and_a_right_one_is_not(factor):
    said = check_given_camera(pairs(), CameraChoice(camera=camera(factor * FOCAL)))
    assert bool(said) == (not 0.9 < factor < 1.1)
    assert not said or int(re.search(r"near (\d+) px", said)[1]) == pytest.approx(FOCAL, rel=0.1)


# --- Uncertain observations

EXACT, INEXACT = 0.1, 1.5  # pixels


def test_models_without_uncertain_observations_are_more_exact(tmp_path):
    """A third are 15 times less certain; all images and most points stay."""
    store, poses = synthetic_store(np.random.default_rng(5), count=7, points=250, wrong=0.1, noise=0.0)
    rng, refined = np.random.default_rng(6), {}
    for image in store.images():
        points = store.keypoints(image.name)
        spread = np.where(rng.random(len(points)) < 1 / 3, INEXACT, EXACT)
        moved = points + spread[:, None] * rng.normal(0, 1, points.shape)
        covariances = spread[:, None, None] ** 2 * np.eye(2)
        refined[image.name] = RefinedKeypoints(moved.astype(np.float32), covariances, spread > 0)
    store.refined_keypoints = refined.get
    every = reconstruct(store, tmp_path / "every", threads=1).largest
    certain = reconstruct(store, tmp_path / "certain", threads=1, max_deviation=0.5).largest
    assert every.registered == certain.registered == 7
    assert every.mean_reprojection_error > 0.4 and certain.mean_reprojection_error < 3 * EXACT
    assert 0.55 < certain.observations / every.observations < 0.75
    assert certain.points > 0.85 * every.points
    assert centre_error(certain, poses) < 0.7 * centre_error(every, poses)


# --- Cameras that are fixed to each other: COLMAP's rig_config.json read, mapped with, localised with.


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
    poses = np.array([pose for left in ring(6) for pose in (left, RIGHT @ left)])
    return synthetic_store(np.random.default_rng(5), points=300, names=NAMES, poses=poses, camera=None)[0]


def distance(model, one, other):
    centres = model.centres()
    return np.linalg.norm(centres[f"{one}.jpg"] - centres[f"{other}.jpg"])


def baselines(model):
    return [distance(model, f"left/{i}", f"right/{i}") for i in range(6)]


def written(path, *cameras):
    path.write_text(json.dumps([{"cameras": list(cameras)}]))
    return path


def test_a_rig_keeps_its_shape_and_gives_the_scale(stereo, tmp_path):
    made = reconstruct(stereo, tmp_path / "model", choice=CameraChoice(rig=rig()), threads=1)
    assert made.largest.registered == 12
    np.testing.assert_allclose(baselines(made.largest), BASELINE, rtol=1e-6)
    # Without a rig, units are arbitrary.
    assert distance(made.largest, "left/0", "left/3") == pytest.approx(16, rel=0.01)
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
    lengths = np.array(baselines(made)) / distance(made, "left/0", "left/3") * 16
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
    assert distance(made, "left/5", "left/0") == pytest.approx(0.5, rel=0.03)


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


def test_a_megabyte_of_cameras_is_read(tmp_path):
    """Every two prefixes are not compared, which would take minutes."""
    rows = [LEFT_ROW, *({"image_prefix": f"{number:05}/"} for number in range(30_000))]
    path = written(tmp_path / "rig.json", *rows)
    assert path.stat().st_size < 1 << 20
    assert len(read_rig_config(path).rigs[0]) == 30_001
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
    found = (rows[f"{side}/photo1.png"]["cam_from_world"] for side in ("left", "right"))
    left, right = (np.vstack([pose, [0, 0, 0, 1]])[:4] for pose in found)
    np.testing.assert_allclose(right @ np.linalg.inv(left), RIGHT, atol=1e-6)
    wanted = truth["left/photo1.png"] @ np.linalg.inv(truth["left/photo0.png"])
    np.testing.assert_allclose(left @ np.linalg.inv(poses["left/photo0.png"]), wanted, atol=0.05)
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
        list(localize_photos(place, photos, nameless, {}))
