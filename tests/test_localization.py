"""Localisation against a map: photos of the place get their pose, others a reason, and nothing is guessed."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from collection_runs import matched, opened
from collection_scene import render_photos, texture
from command import run as command

import matcher
from matcher.cameras import Camera, read_named_poses
from matcher.errors import IntegrityError, UsageError
from matcher.localization.pose import (
    Matches3d,
    check_ambiguous,
    check_camera,
    check_focal,
    estimate_poses,
    judge,
)
from matcher.localization.sparse_map import LocalizationConfig
from matcher.sfm.models import GivenPoses, find_model
from matcher.sfm.reconstruct import reconstruct

pytestmark = pytest.mark.usefixtures("compiled")

SIZE = (480, 360)
CAMERA = Camera(528.0, 528.0, 239.5, 179.5, SIZE)
CAMERA_TEXT = "528,528,239.5,179.5"
QUERIES = ("photo2.png", "photo4.png")


def pose_error(pose: matcher.Pose, truth: np.ndarray) -> tuple[float, float]:
    """Distance of the centres and angle in degrees."""
    turn = pose.cam_from_world[:3, :3].T @ truth[:3, :3]
    angle = np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1)))
    return np.linalg.norm(pose.centre - np.linalg.inv(truth)[:3, 3]), angle


pycolmap = pytest.importorskip("pycolmap")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder with `photos`, `queries`, `elsewhere`, `model`, `model-run`; the true poses by name."""
    folder = tmp_path_factory.mktemp("map")
    poses = render_photos(folder / "photos", count=7)
    (folder / "queries").mkdir()
    for name in QUERIES:
        (folder / "photos" / name).rename(folder / "queries" / name)
    truth = {f"photo{number}.png": pose for number, pose in enumerate(poses)}
    with matched(folder / "model-run", folder / "photos", max_keypoints=600).store as store:
        given = GivenPoses(truth, dict.fromkeys(truth, CAMERA))
        reconstruct(store, folder / "model", poses=given, threads=1)
    (folder / "elsewhere").mkdir()
    elsewhere = texture(np.random.default_rng(77), 480)[:360]
    PIL.Image.fromarray(elsewhere).save(folder / "elsewhere" / "wall.png")
    return folder, truth


@pytest.fixture(scope="module")
def place(made):
    with matcher.Map.open(made[0] / "model") as place:
        yield place


@pytest.fixture
def queries(made):
    return [made[0] / "queries" / name for name in QUERIES]


@pytest.fixture
def pair_of(made):
    """The relative poses of both queries, as of a rig."""
    truth = made[1]
    return [truth[name] @ np.linalg.inv(truth[QUERIES[0]]) for name in QUERIES]


def new_run(folder, photos, preset, **options):
    """The folder of a run without pairs."""
    opened(folder, photos, preset=preset, **options).extract(everything=True)
    return folder


def test_photos_of_the_place_are_localised(made, place, queries):
    for path in queries:
        pose = place.localize(path, CAMERA)
        shift, angle = pose_error(pose, made[1][path.name])
        assert pose.ok and shift < 0.03 and angle < 0.2  # 11 units from the scene
        assert pose.num_inliers > 50 and len(pose.points3d) == len(pose.inliers) == len(pose.point_ids)
        assert set(pose.images) <= set(place.names) and pose.seconds["total"] > 0
        assert 0 < np.sqrt(np.trace(pose.covariance[3:, 3:])) < 0.03


def test_an_unknown_focal_length_is_found(made, place, queries):
    pose = place.localize(queries[0])  # the map has images of this size
    assert pose.ok and pose.camera.fx == pytest.approx(528, rel=0.01)
    small = PIL.Image.open(queries[0]).resize((360, 270))
    pose = place.localize(small)  # and none of this one
    assert pose.ok and pose.camera.fx == pytest.approx(528 * 0.75, rel=0.03)
    assert pose_error(pose, made[1][QUERIES[0]])[0] < 0.3


def test_a_wrong_camera_and_a_photo_of_another_place_are_refused(made, place, queries):
    for focal in (250.0, 1500.0):
        pose = place.localize(queries[0], replace(CAMERA, fx=focal, fy=focal))
        assert pose.status == "wrong_camera" and pose.cam_from_world is None
        assert f"{focal:.0f} pixels" in pose.reason
    for camera in (CAMERA, None):
        pose = place.localize(made[0] / "elsewhere" / "wall.png", camera)
        assert not pose.ok and pose.cam_from_world is None and pose.covariance is None
        assert pose.status in ("too_few_matches", "no_model", "not_significant") and pose.reason
    blank = place.localize(np.full((360, 480), 128, np.uint8), CAMERA)
    assert blank.status == "no_keypoints" and blank.centre is None


# --- What an estimate is worth


def seen(rng, depths, focal=528.0, wrong=0.1):
    """Matches of a camera of this focal length at the origin with points at such depths, some wrong."""
    count = len(depths)
    pixels = rng.uniform((0, 0), SIZE, (count, 2))
    rays = np.column_stack([(pixels - (CAMERA.cx, CAMERA.cy)) / focal, np.ones(count)])
    pixels += rng.normal(0, 0.5, pixels.shape)
    pixels[: int(wrong * count)] = rng.uniform((0, 0), SIZE, (int(wrong * count), 2))
    return Matches3d(pixels, rays * depths[:, None], np.arange(count)[:, None], 4.0)


@pytest.mark.parametrize("factor", [0.95, 1.0])
def test_a_focal_length_that_is_a_little_wrong_is_noticed_where_depths_vary(factor):
    rng = np.random.default_rng(4)
    for depths, tells in ((rng.uniform(2, 8, 300), True), (rng.uniform(4, 4.5, 300), False)):
        said = check_focal(*estimate_poses([seen(rng, depths, 528 * factor)], [CAMERA]))
        assert bool(said) == (tells and factor != 1.0)
        assert not said or f"{528 * factor:.0f} pixels" in said


@pytest.mark.parametrize(("depths", "centre"), [((2, 8), (0, 0)), ((4, 4.5), (120, 90))])
def test_a_wrong_principal_point_is_noticed(depths, centre):
    rng = np.random.default_rng(4)
    matches, config = seen(rng, rng.uniform(*depths, 300)), LocalizationConfig()
    for camera, right in ((CAMERA, True), (replace(CAMERA, cx=centre[0], cy=centre[1]), False)):
        given = estimate_poses([matches], [camera])
        said = check_camera(given and given[0], matches, camera, config)
        assert bool(said) != right
    assert f"({centre[0]:.0f}, {centre[1]:.0f})" in said and "(240, 180)" in said


@pytest.mark.parametrize(
    ("agreeing", "others", "ambiguous"), [(80, 25, False), (80, 50, True), (250, 180, False)]
)
@pytest.mark.parametrize("pictures", [1, 2])
def test_a_pose_that_another_one_rivals_is_ambiguous(agreeing, others, ambiguous, pictures):
    """As in a room with like tables: matches with points of another one agree with each other."""
    rng = np.random.default_rng(6)
    fixed = np.tile(np.eye(4), (pictures, 1, 1))
    fixed[1:, 0, 3] = -0.5
    matches = []
    for pose in fixed:
        right, wrong = (seen(rng, rng.uniform(2, 8, n // pictures), wrong=0.0) for n in (agreeing, others))
        moved = (wrong.points3d - pose[:3, 3]) @ np.diag([-1.0, 1.0, -1.0]) + (0.5, 0.0, 3.0)  # from behind
        points = np.concatenate([right.points3d - pose[:3, 3], moved])
        points2d = np.concatenate([right.points2d, wrong.points2d])
        matches.append(Matches3d(points2d, points, np.arange(len(points))[:, None], 4.0, pose))
    estimates = estimate_poses(matches, [CAMERA] * pictures)
    assert np.abs(estimates[0].cam_from_world - np.eye(4)).max() < 0.1
    assert bool(check_ambiguous(estimates, LocalizationConfig())) == ambiguous


@pytest.mark.parametrize(
    ("agreeing", "count", "width", "status"),
    [
        (60, 200, 1.0, "ok"),
        (60, 500, 1.0, "not_significant"),  # repeated structure lets more agree than chance
        (80, 200, 0.25, "implausible"),  # in one corner, and elsewhere in the photo all others disagree
        (100, 200, 0.25, "ok"),
    ],
)
def test_a_few_matches_that_agree_are_not_enough(agreeing, count, width, status):
    rng = np.random.default_rng(agreeing)
    points = rng.uniform((-2, -2, 5), (2, 2, 8), (count, 3))
    points[:agreeing, :2] = 1 - width + width * points[:agreeing, :2]
    pixels = points[:, :2] / points[:, 2:] * 528 + [239.5, 179.5]
    pixels[agreeing:] = rng.uniform((0, 0), SIZE, (count - agreeing, 2))
    matches = [Matches3d(pixels, points, np.arange(count)[:, None], 4.0)]
    estimates = estimate_poses(matches, [CAMERA])
    assert np.abs(estimates[0].cam_from_world - np.eye(4)).max() < 0.02  # it is right, but who could know?
    verdict = judge(estimates, matches, LocalizationConfig(), focal_known=True)
    assert verdict.status == status and bool(verdict.reason) == (status != "ok")


def test_the_covariance_is_that_of_repeated_measurements():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(80, 3)) * [2, 2, 1] + [0, 0, 6]
    pixels = points[:, :2] / points[:, 2:] * 528 + [239.5, 179.5]
    shifts, predicted = [], []
    for _ in range(60):
        matches = Matches3d(pixels + rng.normal(size=pixels.shape), points, np.arange(80)[:, None], 6.0)
        (estimate,) = estimate_poses([matches], [CAMERA])
        turn, shift = estimate.cam_from_world[:3, :3], estimate.cam_from_world[:3, 3]
        shifts.append([turn[2, 1], turn[0, 2], turn[1, 0], *shift])
        predicted.append(np.sqrt(np.diag(estimate.covariance)))
    ratio = np.std(shifts, axis=0) / np.median(predicted, axis=0)
    assert ((ratio > 0.65) & (ratio < 1.5)).all(), ratio


# --- Pictures of a rig


def test_pictures_of_a_rig_are_localised_together(made, place, queries, pair_of):
    folder, truth = made
    poses = place.localize_rig(queries, pair_of, CAMERA)
    for pose, name in zip(poses, QUERIES, strict=True):
        shift, angle = pose_error(pose, truth[name])
        assert pose.ok and shift < 0.03 and angle < 0.2 and pose.num_inliers > 50
        assert 0 < np.sqrt(np.trace(pose.covariance[3:, 3:])) < 0.03
    between = poses[1].cam_from_world @ np.linalg.inv(poses[0].cam_from_world)
    np.testing.assert_allclose(between, pair_of[1], atol=1e-9)
    for alike in ((528, 528, 239.5, 179.5), CAMERA.K, [CAMERA, CAMERA.K]):
        assert [pose.camera for pose in place.localize_rig(queries, pair_of, alike)] == [CAMERA] * 2
    # A picture that shows nothing of the map has a pose by the other one.
    wall = folder / "elsewhere" / "wall.png"
    for blind in (wall, np.full((360, 480), 128, np.uint8)):
        poses = place.localize_rig([queries[0], blind], pair_of, CAMERA)
        assert poses[1].ok and pose_error(poses[1], truth[QUERIES[1]])[0] < 0.06
    refused = place.localize_rig([wall] * 2, pair_of, CAMERA)
    assert not any(pose.ok for pose in refused) and refused[0].reason
    for arguments in (
        (queries, pair_of[:1], CAMERA),
        (queries, pair_of, [CAMERA]),
        (queries, pair_of, [CAMERA, None]),
        (queries, np.zeros((2, 4, 4)), CAMERA),
        (queries, None, CAMERA),
    ):
        with pytest.raises(UsageError):
            place.localize_rig(*arguments)


def test_a_rig_with_a_wrong_camera_or_relative_pose_has_no_pose(place, queries, pair_of):
    for pose in place.localize_rig(queries, pair_of, [CAMERA, replace(CAMERA, fx=250.0, fy=250.0)]):
        assert pose.status == "wrong_camera" and pose.cam_from_world is None
        assert QUERIES[1] in pose.reason and "250 pixels" in pose.reason
    moved = np.array(pair_of)
    moved[1, :3, 3] += [0.8, 0.0, 0.4]
    for pose in place.localize_rig(queries, moved, CAMERA):
        assert pose.status == "wrong_rig" and pose.cam_from_world is None and pose.reason


# --- Which model and which run


def test_the_run_and_its_index_are_found(made, queries, tmp_path):
    folder, _ = made
    for name in ("model", "model-run"):
        (tmp_path / name).symlink_to(folder / name)  # as after both are moved
    kept = folder / "model-run" / "retrieval.safetensors"
    matcher.Map.open(tmp_path / "model").close()
    before = kept.stat().st_mtime_ns
    matcher.Map.open(folder / "model").close()
    assert kept.stat().st_mtime_ns == before
    kept.write_bytes(b"damaged")
    with matcher.Map.open(folder / "model") as place:
        assert place.localize(queries[0], CAMERA).ok


def test_parts_of_a_model_are_named_and_know_their_run(made, tmp_path, capfd):
    folder, part = made[0], tmp_path / "model" / "sparse" / "1"
    shutil.copytree(folder / "model", tmp_path / "model")
    shutil.copytree(part.with_name("0"), part)
    told = part.parents[1] / "summary.json"
    summary = {"run": str(folder / "model-run"), "models": 2 * json.loads(told.read_text())["models"]}
    told.write_text(json.dumps(summary))
    for model, others in ((tmp_path / "model", 1), (part, 0)):
        assert run(model, folder / "queries" / QUERIES[0], *GIVEN) == 0
        assert capfd.readouterr().err.count(f"5 images, is not searched: {part}") == others


def test_what_does_not_belong_together_is_refused(made, place, queries, tmp_path):
    folder, _ = made
    model = folder / "model"
    for name in ("foreign", "bare"):
        shutil.copytree(model / "sparse" / "0", tmp_path / name)
    bare = pycolmap.Reconstruction(find_model(model))
    for number in list(bare.point3D_ids()):
        bare.delete_point3D(number)
    bare.write(tmp_path / "bare")
    runs = {
        "fewer": new_run(tmp_path / "fewer", folder / "photos", "nearest", max_keypoints=100),
        "larger": new_run(tmp_path / "larger", folder / "photos", "nearest", max_keypoints=600, resize=2000),
    }
    for arguments, fault, named in (
        ((tmp_path / "none",), UsageError, "none"),
        ((tmp_path, folder / "model-run"), UsageError, "COLMAP model"),
        ((tmp_path / "foreign",), UsageError, "run"),  # a model of another program
        ((tmp_path / "bare", folder / "model-run"), UsageError, "no points"),
        ((model, runs["fewer"]), IntegrityError, "600 keypoints"),
        ((model, runs["larger"]), UsageError, "resize"),
    ):
        with pytest.raises(fault, match=named):
            matcher.Map.open(arguments[0], run_dir=(*arguments, None)[1])
    with pytest.raises(UsageError, match="neighbours"):
        LocalizationConfig(neighbours=0)
    with pytest.raises(UsageError, match="100 x 100"):
        place.localize(queries[0], Camera(1, 1, 1, 1, (100, 100)))
    features = matcher.load("nearest-learned", max_keypoints=200).extract(queries[0])
    with pytest.raises(UsageError):
        place.localize(features, CAMERA)


def test_an_image_that_has_changed_is_named(made, queries):
    image = made[0] / "photos" / "photo1.png"
    before = image.read_bytes()
    pixels = np.asarray(PIL.Image.open(image))
    try:
        for other in (np.zeros((50, 60), np.uint8), 255 - pixels):
            PIL.Image.fromarray(other).save(image)
            with matcher.Map.open(made[0] / "model") as place, pytest.raises(IntegrityError, match="photo1"):
                for path in queries:
                    place.localize(path, CAMERA)
        image.unlink()  # without its file, keypoints are not refined on it
        with matcher.Map.open(made[0] / "model") as place:
            assert place.localize(queries[0], CAMERA).ok
            assert place.absent <= {"photo1.png"} and "5 images" in repr(place)
    finally:
        image.write_bytes(before)


def test_a_run_with_the_same_features_shares_the_map(made, queries, tmp_path):
    """A preset that matches the same keypoints and descriptors otherwise shares the map."""
    folder, truth = made
    same = new_run(tmp_path / "hybrid", folder / "photos", "hybrid", max_keypoints=600)
    with matcher.Map.open(folder / "model", run_dir=same) as place:
        pose = place.localize(queries[0], CAMERA)
        assert pose.ok and pose_error(pose, truth[QUERIES[0]])[0] < 0.03


# --- The command.


GIVEN = ("--camera", CAMERA_TEXT)


run = partial(command, "localize")


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
    some = tmp_path / "some"
    shutil.copytree(asked[1], some)
    (some / QUERIES[0]).write_bytes(b"no picture")
    assert run(asked[0], some, *GIVEN, "--output", tmp_path / "some.kitti") == 2
    assert "1 photos have no pose" in capfd.readouterr().err and (tmp_path / "some.json").is_file()
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
    (wrong := tmp_path / "wrong.txt").write_text("photo2.png photo1.png\nphoto2.png photo4.png\n")
    shutil.copytree(model / "sparse" / "0", tmp_path / "foreign")
    shutil.copy(queries / QUERIES[0], spaced := tmp_path / "a b.png")
    for arguments, named in (
        ((model, tmp_path / "empty"), "no images"),
        ((model, queries, "--output", tmp_path / "a.csv"), "a.csv"),
        ((model, queries, spaced, "--output", tmp_path / "poses.txt"), "a b.png"),
        ((model, queries, "--camera", "1,2"), "--camera"),
        ((tmp_path / "foreign", queries), "--run"),
        ((model, queries, "--pictures", made[0] / "photos"), "--pictures"),
        ((tmp_path / "foreign", queries, "--pictures", tmp_path / "empty"), "foreign-map"),
        ((model, queries, "--masks", made[0]), "no mask"),
        ((model, queries, "--features", tmp_path / "none.h5"), "none.h5"),
        ((model, queries, "--recording", tmp_path / "a.txt"), ".rrd"),
        ((model, queries, "--pairs", wrong), f"{wrong}, line 2: 'photo4.png' is"),
    ):
        assert run(*arguments, "--plot", tmp_path / "drawn") == 2
        error = capfd.readouterr().err
        assert named in error and "Traceback" not in error, error
        assert not (tmp_path / "drawn").exists()


def test_a_model_of_another_program_is_mapped_once(made, tmp_path, monkeypatch, capfd):
    folder, truth = made
    monkeypatch.setattr("matcher.cli.sfm.DEFAULT_PRESET", "nearest")  # is faster
    model, theirs = pycolmap.Reconstruction(find_model(folder / "model")), tmp_path / "theirs/sparse/1"
    theirs.mkdir(parents=True)
    model.write(theirs)
    asked = (theirs, folder / "queries" / QUERIES[0], "--json", *GIVEN, "--max-keypoints", 600)
    assert run(*asked) == 2 and "--pictures" in capfd.readouterr().err
    for extracted in (1, 0):
        assert run(*asked, "--pictures", folder / "photos") == 0
        printed = capfd.readouterr()
        assert printed.err.count("extracting images: 5 of 5") == extracted
        for name, row in json.loads(printed.out)["poses"].items():
            np.testing.assert_allclose(row["cam_from_world"], truth[name], atol=0.05)
    with matcher.Map.open(tmp_path / "theirs-1-map") as place:
        assert len(place.names) == 5
    assert run(*asked, "--pictures", folder / "photos", "--features", tmp_path / "f.h5") == 2
    image = model.image(model.reg_image_ids()[0])
    pose = image.frame.rig_from_world
    pose.translation = pose.translation + 1
    image.frame.rig_from_world = pose
    model.write(theirs)
    for pictures in ("photos", "queries"):  # which have other poses now, and which it was not made from
        assert run(*asked, "--pictures", folder / pictures) == 2
        assert "theirs-1-map" in capfd.readouterr().err


def test_a_map_of_features_from_a_file_takes_features(made, tmp_path, capfd):
    pytest.importorskip("h5py")
    folder, truth = made
    for name, photos in (("first", "photos"), ("asked", "queries")):
        own = matched(tmp_path / name, folder / photos, max_keypoints=400)
        own.export("hloc", tmp_path / f"{name}-hloc")
    files = [tmp_path / f"{name}-hloc" / "features.h5" for name in ("first", "asked")]
    again = ("sfm", folder / "photos", "--features", files[0], "--poses", folder / "model", "--workers", 0)
    assert command(*again, "--preset", "nearest", "--out", tmp_path / "model") == 0
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


def test_the_command_takes_masks_and_a_list_of_the_images_to_match(place, asked, tmp_path, capfd):
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
    (listed := tmp_path / "pairs.txt").write_text(
        "queries/photo2.png photos/photo3.png\nphoto2 photo1.png\nphoto9 x\n"
    )
    for more, images in ((), {"photo1.png", "photo3.png"}), (("--neighbours", 1), {"photo3.png"}):
        assert run(*asked, *GIVEN, "--json", "--pairs", listed, *more) == 4
        printed = capfd.readouterr()
        poses = json.loads(printed.out)["poses"]
        assert "photo9" in printed.err  # a photo that was not given
        assert set(poses["photo2.png"]["images"]) == images and poses["photo2.png"]["inliers"] > 20
        assert "listed" in poses["photo4.png"]["reason"]  # which no line names
    pose = place.localize(asked[1] / "photo4.png", partners=iter(2 * ["photo5.png"]))
    assert set(pose.images) == {"photo5.png"}
    with pytest.raises(UsageError, match=r"photo4\.png"):
        place.localize(asked[1] / "photo4.png", partners=["photo4.png"])


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
