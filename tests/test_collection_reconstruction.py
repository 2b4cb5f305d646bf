"""A reconstruction from made-up matches: all cameras where they should be, and no crash takes us along."""

import json

import numpy as np
import PIL.Image
import pytest
from collection_scene import CAMERA, MemoryStore, aligned, centres, synthetic_store

from matcher.errors import IntegrityError, UsageError
from matcher.image_files import read_gps
from matcher.sfm.models import GivenPoses, read_given_poses
from matcher.sfm.reconstruct import ReconstructionError, reconstruct

pycolmap = pytest.importorskip("pycolmap")


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


def test_all_cameras_are_found_where_they_are(made):
    result, poses, _ = made
    assert (len(result.models), result.images, result.largest.registered) == (1, 10, 10)
    assert centre_error(result.largest, poses) < 1e-3
    assert 0.3 < result.largest.mean_reprojection_error < 1
    assert result.largest.mean_track_length > 4 and result.largest.points > 400


def test_the_files_are_those_of_the_result(made):
    result, _, out = made
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
    with pytest.raises(ReconstructionError, match="3 images"):
        reconstruct(store, tmp_path / "model", threads=1)
    none = MemoryStore(list(store.images()), store._keypoints, [])
    with pytest.raises(UsageError, match="no matches"):
        reconstruct(none, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_points_alone_are_triangulated_from_given_poses(tmp_path):
    store, poses = synthetic_store(np.random.default_rng(5), count=6)
    names = [image.name for image in store.images()]
    given = GivenPoses(dict(zip(names[:5], poses, strict=False)), dict.fromkeys(names, CAMERA))
    result = reconstruct(store, tmp_path / "model", poses=given, threads=1)
    assert result.largest.registered == 5 and result.largest.points > 300
    for name, pose in zip(names[:5], poses, strict=False):
        np.testing.assert_allclose(result.largest.cam_from_world[name], pose[:3], atol=1e-9)
    assert json.loads((tmp_path / "model" / "summary.json").read_text())["run"]
    read = read_given_poses(tmp_path / "model")
    assert sorted(read.cam_from_world) == names[:5] and read.cameras[names[0]].fx == 900
    with pytest.raises(UsageError, match="0 of the run's 6 images have a given pose"):
        reconstruct(store, tmp_path / "other", poses=GivenPoses({"elsewhere.jpg": poses[0]}))


def test_a_model_is_continued_in_its_own_coordinates(tmp_path):
    store, poses = synthetic_store(np.random.default_rng(5), count=8)
    names = [image.name for image in store.images()]
    reconstruct(store, tmp_path / "first", only=names[:5], threads=1)
    before = read_given_poses(tmp_path / "first", fixed=False)
    result = reconstruct(store, tmp_path / "second", poses=before, threads=1)
    assert result.largest.registered == 8 and centre_error(result.largest, poses) < 2e-3
    old = np.array([before.cam_from_world[name] for name in names[:5]])
    new = np.array([np.vstack([result.largest.cam_from_world[name], [0, 0, 0, 1]]) for name in names[:5]])
    moved = np.linalg.norm(centres(old) - centres(new), axis=1)
    assert moved.max() < 0.005 * np.ptp(centres(old), axis=0).max()
    with pytest.raises(UsageError, match="holds no COLMAP model"):
        read_given_poses(tmp_path)
    (tmp_path / "first" / "sparse" / "0" / "images.bin").write_bytes(b"no")
    with pytest.raises(IntegrityError, match="damaged"):
        read_given_poses(tmp_path / "first")


def test_cameras_that_move_straight_ahead_are_mapped(tmp_path):
    """COLMAP begins with no pair whose motion is ahead, and along a street there is no other."""
    poses = np.tile(np.eye(4), (8, 1, 1))
    poses[:, 2, 3] = 9 - 0.8 * np.arange(8)
    store, _ = synthetic_store(np.random.default_rng(5), count=8, poses=poses)
    made = reconstruct(store, tmp_path / "model", threads=1).largest
    assert made.registered == 8 and centre_error(made, poses) < 0.01


def write_positions(store, metres):
    """Photos whose headers say where they were taken, in metres east, north and up of one place."""
    for image, (east, north, up) in zip(store.images(), metres, strict=True):
        latitude, longitude = 48 + north / 111_200, east / 74_600 - 11  # degrees have about that length
        exif = PIL.Image.Exif()
        halves = [(value, 0.0, 0.0) for value in (latitude, -longitude)]
        exif[0x8825] = {1: "N", 2: halves[0], 3: "W", 4: halves[1], 5: b"\0", 6: 500 + up}
        image.path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.new("L", (1024, 768)).save(image.path, exif=exif)
    return image.path, latitude, longitude, 500 + up


def test_positions_in_headers_put_a_model_on_earth(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, poses = synthetic_store(np.random.default_rng(5), count=6)
    metres = 10 * centres(poses)  # the scene is ten times as large
    path, *written = write_positions(store, metres)
    assert read_gps(path) == pytest.approx(written, abs=1e-7)
    made = reconstruct(store, tmp_path / "model", threads=1).largest
    assert made.georegistration["images"] == 6 and made.georegistration["median_error_metres"] < 1
    found = np.array([centre for _, centre in sorted(made.centres().items())])
    distances, wanted = (np.linalg.norm(p[:, None] - p, axis=2) for p in (found, metres))
    np.testing.assert_allclose(distances, wanted, rtol=0.02, atol=0.5)  # metres
    kept = read_given_poses(tmp_path / "model", fixed=False)
    again = reconstruct(store, tmp_path / "again", poses=kept, threads=1).largest
    assert again.georegistration["origin"] == made.georegistration["origin"]
    assert read_gps(tmp_path / "absent.jpg") is None
