"""Localisation against a map: photos of the place get their pose, others a reason, and nothing is guessed."""

import shutil
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
from localized_map import CAMERA, QUERIES, SIZE, make_map, pose_error

import matcher
from matcher.cameras import Camera
from matcher.errors import IntegrityError, UsageError
from matcher.localization.checks import check_ambiguous, check_camera, check_focal, judge
from matcher.localization.pose import Matches3d, estimate_poses
from matcher.localization.sparse_map import LocalizationConfig
from matcher.sfm.models import find_model

pycolmap = pytest.importorskip("pycolmap")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("map")
    return folder, make_map(folder)


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
    """A run without pairs."""
    run = matcher.Collection.open(folder, preset=preset, workers=0, **options)
    run.add_images(photos)
    run.extract(everything=True)
    return run


def test_photos_of_the_place_are_localised(made, place, queries):
    assert "5 images" in repr(place)
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


@pytest.mark.parametrize("focal", [250.0, 1500.0])
def test_a_wrong_camera_is_no_pose(place, queries, focal):
    pose = place.localize(queries[0], replace(CAMERA, fx=focal, fy=focal))
    assert pose.status == "wrong_camera" and pose.cam_from_world is None
    assert f"{focal:.0f} pixels" in pose.reason


def test_a_photo_of_another_place_is_refused(made, place):
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
        ((model, runs["fewer"].store.folder), IntegrityError, "600 keypoints"),
        ((model, runs["larger"].store.folder), UsageError, "resize"),
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
            assert set(place.absent) <= {"photo1.png"}
    finally:
        image.write_bytes(before)


def test_a_run_with_the_same_features_shares_the_map(made, queries, tmp_path):
    """A preset that matches the same keypoints and descriptors otherwise shares the map."""
    folder, truth = made
    same = new_run(tmp_path / "hybrid", folder / "photos", "hybrid", max_keypoints=600).store.folder
    with matcher.Map.open(folder / "model", run_dir=same) as place:
        pose = place.localize(queries[0], CAMERA)
        assert pose.ok and pose_error(pose, truth[QUERIES[0]])[0] < 0.03
