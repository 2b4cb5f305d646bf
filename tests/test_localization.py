"""Localisation against a map: photos of the place get their pose, others a reason, and nothing is guessed."""

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from collection_scene import render_photos, texture

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.collection.store import Store
from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.folders import PosedPhotos
from matcher.evaluate.localization import enlarged, time_localization
from matcher.localization import localizer, rig
from matcher.localization.localizer import doubt_alone, doubt_camera, doubt_focal, judge
from matcher.localization.plot import LocalizationRecording, axes_of
from matcher.localization.pose import (
    Matches3d,
    any_camera,
    estimate_pose,
    log10_false_alarms,
    reprojection_errors,
)
from matcher.localization.sparse_map import LocalizationConfig, RetrievalIndex
from matcher.poses import read_named_poses
from matcher.sfm.reconstruct import GivenPoses, find_model, read_georegistration, reconstruct

pytest.importorskip("pycolmap")
SIZE = (480, 360)
CAMERA = Camera(528.0, 528.0, 239.5, 179.5, SIZE)
CAMERA_TEXT = "528,528,239.5,179.5"
QUERIES = ("photo2.png", "photo4.png")


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A map of five photos with known poses, two more photos of the same place, and one of another."""
    folder = tmp_path_factory.mktemp("map")
    poses = render_photos(folder / "photos", count=7)
    (folder / "queries").mkdir()
    for name in QUERIES:
        (folder / "photos" / name).rename(folder / "queries" / name)
    truth = {f"photo{number}.png": pose for number, pose in enumerate(poses)}
    collection = matcher.Collection.open(folder / "model-run", preset="nearest", max_keypoints=600, workers=0)
    collection.add_images(folder / "photos")
    collection.add_pairs(exhaustive=True)
    collection.run()
    given = GivenPoses(truth, dict.fromkeys(truth, CAMERA))
    with collection.store as store:
        reconstruct(store, folder / "model", poses=given, threads=1)
    elsewhere = texture(np.random.default_rng(77), 480)[:360]
    (folder / "elsewhere").mkdir()
    PIL.Image.fromarray(elsewhere).save(folder / "elsewhere" / "wall.png")
    return folder, truth


def pose_error(pose, truth):
    """Distance of the centres and angle in degrees."""
    turn = pose.cam_from_world[:3, :3].T @ truth[:3, :3]
    angle = np.degrees(np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1)))
    return np.linalg.norm(pose.centre - np.linalg.inv(truth)[:3, 3]), angle


def test_photos_of_the_place_are_localised(made):
    folder, truth = made
    with matcher.Map.open(folder / "model") as place:
        assert "5 images" in repr(place)
        for name in QUERIES:
            pose = place.localize(folder / "queries" / name, CAMERA)
            shift, angle = pose_error(pose, truth[name])
            assert pose.ok and shift < 0.03 and angle < 0.2, (name, shift, angle)  # 11 units from the scene
            assert pose.num_inliers > 50 and len(pose.points3d) == len(pose.inliers) == len(pose.point_ids)
            assert set(pose.images) <= set(place.names) and pose.seconds["total"] > 0
            deviation = np.sqrt(np.trace(pose.covariance[3:, 3:]))
            assert 0 < deviation < 0.03


def test_an_unknown_focal_length_is_found(made):
    folder, truth = made
    with matcher.Map.open(folder / "model") as place:
        pose = place.localize(folder / "queries" / QUERIES[0])  # the map has images of this size
        assert pose.ok and pose.camera.fx == pytest.approx(528, rel=0.01)
        small = PIL.Image.open(folder / "queries" / QUERIES[0]).resize((360, 270))
        pose = place.localize(small)  # and none of this one
        assert pose.ok and pose.camera.fx == pytest.approx(528 * 0.75, rel=0.03)
        assert pose_error(pose, truth[QUERIES[0]])[0] < 0.3


@pytest.mark.parametrize("focal", [100.0, 250.0, 1500.0])
def test_a_wrong_camera_is_no_pose(made, focal):
    folder, _ = made
    wrong = replace(CAMERA, fx=focal, fy=focal)
    with matcher.Map.open(folder / "model") as place:
        pose = place.localize(folder / "queries" / QUERIES[0], wrong)
        assert pose.status == "wrong_camera" and pose.cam_from_world is None
        assert f"{focal:.0f} pixels" in pose.reason and "correct the camera, or give none" in pose.reason
        assert place.localize(folder / "queries" / QUERIES[0], CAMERA).ok


def seen(rng, depths, focal, noise=0.5):
    """Matches of a camera of this focal length at the origin with points at such depths, a tenth wrong."""
    count = len(depths)
    pixels = rng.uniform((0, 0), SIZE, (count, 2))
    rays = np.column_stack([(pixels - (CAMERA.cx, CAMERA.cy)) / focal, np.ones(count)])
    pixels += rng.normal(0, noise, pixels.shape)
    pixels[: count // 10] = rng.uniform((0, 0), SIZE, (count // 10, 2))
    return Matches3d(pixels, rays * depths[:, None], np.arange(count))


@pytest.mark.parametrize("factor", [0.9, 0.95, 1.0, 1.05, 1.1])
def test_a_focal_length_that_is_a_little_wrong_is_noticed_where_depths_vary(factor):
    rng = np.random.default_rng(4)
    for depths, tells in ((rng.uniform(2, 8, 300), True), (rng.uniform(4, 4.5, 300), False)):
        matches = seen(rng, depths, 528 * factor)
        estimate = estimate_pose(matches, CAMERA, max_error=4.0, focal_known=True)
        found = doubt_focal(("ok", "", -200.0), estimate, matches, 4.0)
        wrong = tells and factor != 1.0
        assert found[0] == ("wrong_camera" if wrong else "ok"), (factor, tells)
        if wrong:
            assert f"{528 * factor:.0f} pixels" in found[1] and "has one of 528 pixels" in found[1]


@pytest.mark.parametrize(
    ("depths", "centre"), [((2, 8), (179.5, 239.5)), ((2, 8), (0, 0)), ((4, 4.5), (120, 90))]
)
def test_a_wrong_principal_point_is_noticed(depths, centre):
    rng = np.random.default_rng(4)
    matches, config = seen(rng, rng.uniform(*depths, 300), 528), LocalizationConfig()
    for camera, status in ((CAMERA, "ok"), (replace(CAMERA, cx=centre[0], cy=centre[1]), "wrong_camera")):
        estimate, free = (
            estimate_pose(matches, each, max_error=4.0, focal_known=known)
            for each, known in ((camera, True), (any_camera(SIZE), False))
        )
        verdict = judge(estimate, matches, 4.0, config, focal_known=True)
        found = doubt_camera(verdict, estimate, matches, camera, 4.0, config, lambda free=free: free)
        assert found[0] == status
    assert f"a principal point at ({centre[0]:.0f}, {centre[1]:.0f}), and 270 with" in found[1]
    assert "and (240, 180): correct the camera, or give none" in found[1]


def doubted(matches):
    """What `doubt_alone` says of the pose of these matches."""

    def estimate(each):
        return [estimate_pose(each[0], CAMERA, max_error=4.0, focal_known=True)]

    what = estimate([matches]), [matches], [4.0], LocalizationConfig(), estimate
    return doubt_alone(("ok", "", -200.0), *what)


@pytest.mark.parametrize(
    ("agreeing", "others", "status"),
    [(80, 10, "ok"), (80, 25, "ok"), (80, 50, "ambiguous"), (250, 180, "ok")],
)
def test_a_pose_that_another_one_rivals_is_refused(agreeing, others, status):
    """As in a room with like tables: matches with points of another one agree with each other."""
    rng = np.random.default_rng(6)
    right, wrong = (seen(rng, rng.uniform(2, 8, count), 528) for count in (agreeing, others))
    moved = wrong.points3d @ np.diag([-1.0, 1.0, -1.0]) + (0.5, 0.0, 3.0)  # seen from the other side
    matches = Matches3d(
        np.concatenate([right.points2d, wrong.points2d]),
        np.concatenate([right.points3d, moved]),
        np.arange(agreeing + others),
    )
    found = doubted(matches)
    assert found[0] == status
    assert status == "ok" or "agree with a pose, and 4" in found[1]
    near = right.points2d + rng.normal(0, 4, right.points2d.shape)
    near = Matches3d(near, right.points3d, np.arange(agreeing))
    assert doubted(near)[0] == "ok"


@pytest.mark.parametrize("doubt", ["doubt_alone", "doubt_focal"])
def test_an_accepted_pose_that_is_doubted_afterwards_is_not_returned(made, monkeypatch, doubt):
    refused, asked = ("ambiguous", "for a reason", -90.0), []
    monkeypatch.setattr(localizer, doubt, lambda verdict, *_: asked.append(verdict) or refused)
    with matcher.Map.open(made[0] / "model") as place:
        pose = place.localize(made[0] / "queries" / QUERIES[0], CAMERA)
        assert (pose.status, pose.cam_from_world) == ("ambiguous", None) and "for a reason" in pose.reason
        assert [verdict[0] for verdict in asked] == ["ok"]
        place.localize(made[0] / "queries" / QUERIES[0])
        assert len(asked) == (2 if doubt == "doubt_alone" else 1)  # a focal length that was found is not


def test_errors_of_points_behind_the_camera_are_infinite():
    """A median of the largest number that there is overflows."""
    ahead = Matches3d(np.zeros((2, 2)), np.array([[0, 0, 1.0], [0, 0, -1.0]]), np.arange(2))
    errors = reprojection_errors(ahead, np.eye(4), CAMERA)
    assert 0 < errors[0] < 1000 and errors[1] == np.inf


def test_few_images_are_matched_where_the_strongest_keypoints_do_not_match(made, tmp_path):
    """The time of a photo that nothing agrees with is bounded, and others lose nothing."""
    folder, truth = made
    run_of = matcher.Collection.open(tmp_path / "hybrid", workers=0, preset="hybrid", max_keypoints=600)
    run_of.add_images(folder / "photos")
    run_of.extract(everything=True)

    pairs, place = [], matcher.Map.open(folder / "model", run_dir=run_of.store.folder)
    pipeline = replace(place.localizer.pipeline)
    match = pipeline.match_features_batch

    def counting(batch):
        pairs.extend(len(photo) for _, photo in batch)
        return match(batch)

    object.__setattr__(pipeline, "match_features_batch", counting)

    def localized(path, **settings):
        """The pose, and how many pairs were matched with all keypoints and with few."""
        pairs.clear()
        config = LocalizationConfig(batch=1, refine=False, **settings)
        pose = replace(place.localizer, pipeline=pipeline, config=config).localize(place.query(path, CAMERA))
        return pose, sum(count > 150 for count in pairs), sum(count <= 150 for count in pairs)

    few = {"preemptive_keypoints": 150}
    wall = folder / "elsewhere" / "wall.png"
    pose, whole, small = localized(wall, **few)
    assert not pose.ok and whole == 1 and small == 4
    assert localized(wall, preemptive_keypoints=0)[1:] == (5, 0)
    for settings, expected in (({}, (1, 0)), ({"enough_inliers": 10_000}, (5, 4))):
        pose, *pairs = localized(folder / "queries" / QUERIES[0], **few, **settings)
        assert pose.ok and tuple(pairs) == expected
        assert pose_error(pose, truth[QUERIES[0]])[0] < 0.05


def test_a_photo_of_another_place_is_refused(made):
    folder, _ = made
    with matcher.Map.open(folder / "model") as place:
        for camera in (CAMERA, None):
            pose = place.localize(folder / "elsewhere" / "wall.png", camera)
            assert not pose.ok and pose.cam_from_world is None and pose.covariance is None
            assert pose.status in ("too_few_matches", "no_model", "not_significant") and pose.reason
        blank = place.localize(np.full((360, 480), 128, np.uint8), CAMERA)
        assert blank.status == "no_keypoints" and blank.centre is None


def test_chance_gives_no_significant_pose():
    rng = np.random.default_rng(0)
    for seed in range(3):
        points = rng.uniform(0, 400, (200, 2))
        matches = Matches3d(points, rng.normal((0, 0, 5), 1, (200, 3)), np.arange(200))
        found = estimate_pose(matches, CAMERA, max_error=4.0, focal_known=True, seed=seed)
        if found is not None:
            assert log10_false_alarms(matches, found.inliers, 480 * 360, 4.0) > 0


@pytest.mark.parametrize(
    ("agreeing", "count", "status"),
    [(20, 200, "not_significant"), (60, 200, "ok"), (60, 500, "not_significant"), (160, 1000, "ok")],
)
def test_a_few_matches_that_agree_are_not_enough(agreeing, count, status):
    """Repeated structure lets more wrong matches agree than chance does."""
    rng = np.random.default_rng(agreeing)
    points = rng.normal((0, 0, 6), 1.0, (count, 3))
    seen = points[:, :2] / points[:, 2:] * 528 + [239.5, 179.5]
    seen[agreeing:] = rng.uniform((0, 0), SIZE, (count - agreeing, 2))
    matches = Matches3d(seen, points, np.arange(count))
    found = estimate_pose(matches, CAMERA, max_error=4.0, focal_known=True)
    assert np.abs(found.cam_from_world - np.eye(4)).max() < 0.02  # it is right, but who could know?
    verdict = judge(found, matches, 4.0, LocalizationConfig(), focal_known=True)
    assert verdict[0] == status and verdict[2] < -10 and bool(verdict[1]) == (status != "ok")


@pytest.mark.parametrize(
    ("agreeing", "width", "status"),
    [
        (50, 0.25, "implausible"),
        (80, 0.25, "implausible"),
        (50, 1.0, "ok"),
        (80, 1.0, "ok"),
        (100, 0.25, "ok"),
    ],
)
def test_few_matches_that_agree_in_one_corner_are_not_enough(agreeing, width, status):
    """Elsewhere in the photo, all others disagree."""
    rng = np.random.default_rng(agreeing)
    points = rng.uniform((-2, -2, 5), (2, 2, 8), (200, 3))
    points[:agreeing, :2] = 1 - width + width * points[:agreeing, :2]
    seen = points[:, :2] / points[:, 2:] * 528 + [239.5, 179.5]
    seen[agreeing:] = rng.uniform((0, 0), SIZE, (200 - agreeing, 2))
    matches = Matches3d(seen, points, np.arange(200))
    found = estimate_pose(matches, CAMERA, max_error=4.0, focal_known=True)
    verdict = judge(found, matches, 4.0, LocalizationConfig(), focal_known=True)
    assert verdict[0] == status
    assert ("lie in one spot" in verdict[1]) == (status != "ok")


def test_the_covariance_is_that_of_repeated_measurements():
    rng = np.random.default_rng(1)
    points = rng.normal(size=(80, 3)) * [2, 2, 1] + [0, 0, 6]
    seen = points[:, :2] / points[:, 2:] * 528 + [239.5, 179.5]
    shifts, predicted = [], []
    for _ in range(60):
        matches = Matches3d(seen + rng.normal(size=seen.shape), points, np.arange(80))
        found = estimate_pose(matches, CAMERA, max_error=6.0, focal_known=True)
        turn, shift = found.cam_from_world[:3, :3], found.cam_from_world[:3, 3]
        vector = np.array([turn[2, 1], turn[0, 2], turn[1, 0]])
        shifts.append([*vector, *shift])
        predicted.append(np.sqrt(np.diag(found.covariance)))
    ratio = np.std(shifts, axis=0) / np.median(predicted, axis=0)
    assert ((ratio > 0.65) & (ratio < 1.5)).all(), ratio


def test_the_index_is_kept_beside_the_run(made):
    folder, _ = made
    matcher.Map.open(folder / "model").close()
    kept = folder / "model-run" / "retrieval.npz"
    before = kept.stat().st_mtime_ns
    matcher.Map.open(folder / "model").close()
    assert kept.stat().st_mtime_ns == before
    kept.write_bytes(b"damaged")
    with matcher.Map.open(folder / "model") as place:
        assert place.localize(folder / "queries" / QUERIES[0], CAMERA).ok


@pytest.mark.parametrize("name", ["poses.txt", "poses.tum", "poses.json", "images.txt"])
def test_the_command_writes_poses(made, tmp_path, capfd, name):
    folder, truth = made
    out = tmp_path / name
    camera = "528,528,239.5,179.5"
    arguments = ("localize", folder / "model", folder / "queries", "--camera", camera, "--output", out)
    assert run(*arguments) == 0
    printed = capfd.readouterr().out
    assert "2 of 2 photos have a pose" in printed and f"wrote {out}" in printed
    if name == "poses.tum":
        rows = [line.split() for line in out.read_text().splitlines() if line[0] != "#"]
        expected = np.linalg.inv(truth[QUERIES[0]])[:3, 3]
        np.testing.assert_allclose([float(v) for v in rows[0][1:4]], expected, atol=0.05)
        return
    poses, cameras = read_named_poses(out)
    assert sorted(poses) == list(QUERIES)
    for query in QUERIES:
        np.testing.assert_allclose(poses[query], truth[query], atol=0.05)
    if name == "poses.json":
        assert cameras[QUERIES[0]] == replace(CAMERA, size=SIZE)
        assert json.loads(out.read_text())["poses"][QUERIES[0]]["status"] == "ok"


def test_poses_say_where_on_earth_their_map_is(made, tmp_path, capfd):
    folder, _ = made
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "sparse").symlink_to(folder / "model" / "sparse")
    summary = json.loads((folder / "model" / "summary.json").read_text())
    where = {"origin": [48.0, 11.0, 500.0], "images": 5, "median_error_metres": 2.0}
    summary["models"][0]["georegistration"] = where
    (tmp_path / "model" / "summary.json").write_text(json.dumps(summary))
    arguments = ("localize", tmp_path / "model", folder / "queries", "--run", folder / "model-run", "--json")
    assert run(*arguments, "--output", tmp_path / "poses.json") == 0
    printed = json.loads(capfd.readouterr().out.splitlines()[-1])
    written = json.loads((tmp_path / "poses.json").read_text())
    assert printed["georegistration"] == written["georegistration"] == where
    assert sorted(read_named_poses(tmp_path / "poses.json")[0]) == list(QUERIES)
    with matcher.Map.open(folder / "model") as place:
        assert place.georegistration is None
    for wrong in (
        {"origin": [1, 2]},
        {"origin": ["a", "b", "c"]},
        {"images": None},
        {"origin": [1, 2, 1e999]},
    ):
        summary["models"][0]["georegistration"] = {**where, **wrong}
        (tmp_path / "model" / "summary.json").write_text(json.dumps(summary))
        assert read_georegistration(tmp_path / "model") is None


def test_the_command_draws_and_refuses(made, tmp_path, capfd):
    folder, _ = made
    query, wall = folder / "queries" / QUERIES[0], folder / "elsewhere" / "wall.png"
    assert run("localize", folder / "model", query, wall, "--plot", tmp_path / "drawn") == 4
    printed = capfd.readouterr().out
    assert "wall.png: no pose (" in printed and "1 of 2 photos have a pose" in printed
    for name in ("photo2.png.png", "wall.png.png"):
        with PIL.Image.open(tmp_path / "drawn" / name) as drawing:
            assert drawing.size[0] > 1000
    lines = tmp_path / "cameras.txt"
    lines.write_text("photo2.png PINHOLE 480 360 528 528 240 180\n")
    assert run("localize", folder / "model", query, "--camera", lines, "--json") == 0
    row = json.loads(capfd.readouterr().out)["poses"]["photo2.png"]
    assert row["camera"]["params"] == [528, 528, 240, 180] and row["inliers"] > 50


def test_mistakes_name_their_remedy(made, tmp_path, capfd):
    folder, _ = made
    with pytest.raises(UsageError, match="not a folder"):
        matcher.Map.open(tmp_path / "none")
    with pytest.raises(UsageError, match="matcher sfm PHOTOS --out"):
        matcher.Map.open(tmp_path, run_dir=folder / "model-run")
    with pytest.raises(UsageError, match="photos holds no COLMAP model"):
        matcher.Map.open(folder / "photos")
    (tmp_path / "foreign").mkdir()
    for file in (folder / "model" / "sparse" / "0").iterdir():  # a model of another program
        shutil.copy(file, tmp_path / "foreign")
    with pytest.raises(UsageError, match="give run_dir=RUN_DIR; for a model of another program"):
        matcher.Map.open(tmp_path / "foreign")
    with pytest.raises(UsageError, match="resize is the run's own"):
        matcher.Map.open(folder / "model", resize=100)
    other = matcher.Collection.open(tmp_path / "run", preset="nearest", max_keypoints=100, workers=0)
    other.add_images(folder / "photos")
    other.extract(everything=True)
    with pytest.raises(IntegrityError, match="are not the 100 of the run"):
        matcher.Map.open(folder / "model", run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="neighbours must be positive"):
        LocalizationConfig(neighbours=0)
    with matcher.Map.open(folder / "model") as place:
        with pytest.raises(UsageError, match="camera is of images of 100 x 100"):
            place.localize(folder / "queries" / QUERIES[0], Camera(1, 1, 1, 1, (100, 100)))
        with pytest.raises(matcher.ImageError):
            place.localize(tmp_path / "absent.png")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((folder / "model", tmp_path / "empty"), "no images here"),
        ((folder / "model", folder / "queries", "--output", tmp_path / "a.csv"), "must end in"),
        ((folder / "model", folder / "queries", "--camera", "1,2"), "camera must be"),
        ((tmp_path / "empty", folder / "queries"), "holds no COLMAP model"),
        ((tmp_path / "foreign", folder / "queries"), "give --run RUN_DIR"),
    ):
        assert run("localize", *arguments, "--plot", tmp_path / "drawn") == 2
        error = capfd.readouterr().err
        assert message in error and "Traceback" not in error, error
        assert not (tmp_path / "drawn").exists()


def test_an_image_that_has_changed_is_named(made, tmp_path):
    folder, _ = made
    image = folder / "photos" / "photo1.png"
    before = image.read_bytes()
    try:
        PIL.Image.fromarray(np.zeros((50, 60), np.uint8)).save(image)
        with matcher.Map.open(folder / "model") as place, pytest.raises(IntegrityError, match="60 x 50"):
            for name in QUERIES:
                place.localize(folder / "queries" / name, CAMERA)
        pixels = 255 - np.asarray(PIL.Image.open(io.BytesIO(before)))  # another picture of the same size
        PIL.Image.fromarray(pixels).save(image)
        with (
            matcher.Map.open(folder / "model") as place,
            pytest.raises(IntegrityError, match=r"photo1\.png has"),
        ):
            for name in QUERIES:
                place.localize(folder / "queries" / name, CAMERA)
        image.unlink()  # without its file, keypoints are not refined on it
        with matcher.Map.open(folder / "model") as place:
            assert place.localize(folder / "queries" / QUERIES[0], CAMERA).ok
    finally:
        image.write_bytes(before)


def test_poses_are_kept_where_the_pictures_of_the_map_are_gone(made, tmp_path, capfd):
    folder, _ = made
    out, drawn = tmp_path / "poses.json", tmp_path / "drawn"
    (folder / "photos").rename(folder / "away")
    try:
        assert run("localize", folder / "model", folder / "queries", "--plot", drawn, "--output", out) == 4
    finally:
        (folder / "away").rename(folder / "photos")
    error = capfd.readouterr().err
    assert "photo2.png is not drawn" in error and "photo4.png is not drawn" in error
    assert "pictures of the map are gone, such as" in error and "--no-refine" in error
    assert "cannot be opened" in error and sorted(read_named_poses(out)[0]) == list(QUERIES)
    assert list(drawn.iterdir()) == []


def test_without_refinement_nobody_misses_the_pictures_of_the_map(made, capfd):
    folder, _ = made
    (folder / "photos").rename(folder / "away")
    try:
        assert run("localize", folder / "model", folder / "queries", "--no-refine") == 0
    finally:
        (folder / "away").rename(folder / "photos")
    assert "gone" not in capfd.readouterr().err


@pytest.mark.parametrize(("name", "written"), [("poses.txt", "poses.txt"), ("poses.kitti", "poses.json")])
def test_poses_are_kept_where_the_command_is_ended_early(made, tmp_path, monkeypatch, capfd, name, written):
    folder, _ = made
    drawn = []

    def draw(*_):
        drawn.append(1)
        if len(drawn) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("matcher.localization.plot.plot_pose", draw)
    arguments = ("localize", folder / "model", folder / "queries", "--plot", tmp_path / "drawn")
    assert run(*arguments, "--output", tmp_path / name) == 130
    assert f"ended after 2 of 2 photos, whose poses are in {tmp_path / written}" in capfd.readouterr().err
    assert sorted(read_named_poses(tmp_path / written)[0]) == list(QUERIES)


def test_a_model_without_points_and_a_run_of_another_preset_are_refused(made, tmp_path):
    import pycolmap

    folder, _ = made
    bare = pycolmap.Reconstruction(find_model(folder / "model"))
    for number in list(bare.point3D_ids()):
        bare.delete_point3D(number)
    (tmp_path / "bare").mkdir()
    bare.write(tmp_path / "bare")
    with pytest.raises(UsageError, match=r"has no points.*matcher sfm PHOTOS --poses"):
        matcher.Map.open(tmp_path / "bare", run_dir=folder / "model-run")
    other = matcher.Collection.open(tmp_path / "run", preset="nearest-learned", max_keypoints=200, workers=0)
    other.add_images(folder / "photos")
    other.extract(everything=True)
    with pytest.raises(IntegrityError, match=r"not the 200 of the run.*reconstruct again"):
        matcher.Map.open(folder / "model", run_dir=tmp_path / "run")
    features = matcher.load("nearest-learned", max_keypoints=200).extract(folder / "queries" / QUERIES[0])
    with matcher.Map.open(folder / "model") as place, pytest.raises(UsageError):
        place.localize(features, CAMERA)


def test_runs_with_the_same_features_share_a_map(made, tmp_path):
    """A preset that matches the same keypoints and descriptors otherwise; others are refused."""
    folder, truth = made

    def run_of(name, features=None, **options):
        run = matcher.Collection.open(tmp_path / name, workers=0, **options)
        run.add_images(folder / "photos", **({} if features is None else {"features": features}))
        run.extract(everything=True)
        return run.store.folder

    same = run_of("hybrid", preset="hybrid", max_keypoints=600)
    with matcher.Map.open(folder / "model", run_dir=same) as place:
        assert "hybrid" in repr(place)
        pose = place.localize(folder / "queries" / QUERIES[0], CAMERA)
        assert pose.ok and pose_error(pose, truth[QUERIES[0]])[0] < 0.03
    h5py = pytest.importorskip("h5py")
    first = matcher.Collection.open(folder / "model-run", preset="nearest", max_keypoints=600, workers=0)
    first.export("hloc", tmp_path / "hloc")
    with h5py.File(tmp_path / "hloc" / "features.h5", "r+") as file:  # the keypoints, otherwise described
        for name in file:
            file[name]["descriptors"][...] = file[name]["descriptors"][...][::-1]
    described = run_of("described", tmp_path / "hloc" / "features.h5", preset="nearest")
    larger = run_of("larger", preset="nearest", max_keypoints=600, resize=2000)
    for other, difference in (
        (described, "photos in the model, hloc in"),
        (larger, "resize: 1024 in the model"),
    ):
        with pytest.raises(UsageError, match=rf"{difference}.*matcher sfm .* --poses"):
            matcher.Map.open(folder / "model", run_dir=other)


def test_a_model_of_another_program_is_mapped_once(made, tmp_path, monkeypatch, capfd):
    import pycolmap

    folder, truth = made
    monkeypatch.setattr("matcher.cli.sfm.DEFAULT_PRESET", "nearest")  # is faster
    model = pycolmap.Reconstruction(find_model(folder / "model"))
    (tmp_path / "theirs").mkdir()
    model.write(tmp_path / "theirs")
    command = ("localize", tmp_path / "theirs", folder / "queries", "--json", "--camera", CAMERA_TEXT)
    assert run(*command) == 2 and "--pictures" in capfd.readouterr().err
    for said in ("its map is made from", "is the map of 5 of the 5 pictures"):
        assert run(*command, "--pictures", folder / "photos") == 0
        printed = capfd.readouterr()
        rows = json.loads(printed.out)["poses"]
        assert said in printed.err and printed.err.count("extracting images: 5 of 5") == ("made" in said)
        for name in QUERIES:
            np.testing.assert_allclose(rows[name]["cam_from_world"], truth[name], atol=0.05)
    with matcher.Map.open(tmp_path / "theirs-map") as place:
        assert len(place.names) == 5
    assert run(*command, "--pictures", folder / "photos", "--features", tmp_path / "f.h5") == 2
    own = ("localize", folder / "model", folder / "queries", "--pictures", folder / "photos")
    assert run(*own) == 2 and "leave --pictures out" in capfd.readouterr().err
    image = model.image(model.reg_image_ids()[0])
    pose = image.frame.rig_from_world
    pose.translation = pose.translation + 1
    image.frame.rig_from_world = pose
    model.write(tmp_path / "theirs")
    assert run(*command, "--pictures", folder / "photos") == 2
    assert "was not made from the poses" in capfd.readouterr().err


def test_the_run_is_found_after_both_are_moved(made, tmp_path):
    folder, _ = made
    for name in ("model", "model-run"):
        (tmp_path / name).symlink_to(folder / name)
    with Store.open(folder / "model-run") as store:
        assert store.counts().images_done == 5
    assert json.loads((folder / "model" / "summary.json").read_text())["run"] == str(Path("..") / "model-run")
    with matcher.Map.open(tmp_path / "model") as place:
        assert len(place.names) == 5


def test_pictures_of_a_rig_are_localised_together(made):
    folder, truth = made
    queries = [folder / "queries" / name for name in QUERIES]
    first = truth[QUERIES[0]]
    cam_from_rig = [truth[name] @ np.linalg.inv(first) for name in QUERIES]
    with matcher.Map.open(folder / "model") as place:
        found = place.localize_rig(queries, cam_from_rig, CAMERA)
        for pose, name in zip(found, QUERIES, strict=True):
            shift, angle = pose_error(pose, truth[name])
            assert pose.ok and shift < 0.03 and angle < 0.2 and pose.num_inliers > 50
            assert 0 < np.sqrt(np.trace(pose.covariance[3:, 3:])) < 0.03
        between = found[1].cam_from_world @ np.linalg.inv(found[0].cam_from_world)
        np.testing.assert_allclose(between, cam_from_rig[1], atol=1e-9)
        for alike in ((528, 528, 239.5, 179.5), CAMERA.K, [CAMERA, CAMERA.K]):
            assert [pose.camera for pose in place.localize_rig(queries, cam_from_rig, alike)] == [CAMERA] * 2
        # A picture that shows nothing of the map has a pose by the other one.
        blind = place.localize_rig([queries[0], folder / "elsewhere" / "wall.png"], cam_from_rig, CAMERA)
        assert blind[1].ok and pose_error(blind[1], truth[QUERIES[1]])[0] < 0.06
        walls = [folder / "elsewhere" / "wall.png"] * 2
        refused = place.localize_rig(walls, cam_from_rig, CAMERA)
        assert not any(pose.ok for pose in refused) and refused[0].reason
        for arguments, message in (
            ((queries, cam_from_rig[:1], CAMERA), "for each of the 2 pictures"),
            ((queries, cam_from_rig, [CAMERA]), "as many cameras"),
            ((queries, cam_from_rig, [CAMERA, None]), "need their cameras"),
        ):
            with pytest.raises(UsageError, match=message):
                place.localize_rig(*arguments)


@pytest.mark.parametrize("focals", [(250.0, 250.0), (1500.0, 1500.0), (528.0, 250.0), (250.0, 528.0)])
def test_a_rig_with_a_wrong_camera_has_no_pose(made, focals):
    folder, truth = made
    queries = [folder / "queries" / name for name in QUERIES]
    cam_from_rig = [truth[name] @ np.linalg.inv(truth[QUERIES[0]]) for name in QUERIES]
    cameras = [replace(CAMERA, fx=focal, fy=focal) for focal in focals]
    with matcher.Map.open(folder / "model") as place:
        for pose in place.localize_rig(queries, cam_from_rig, cameras):
            assert pose.status == "wrong_camera" and pose.cam_from_world is None
            wrong = focals.index(next(focal for focal in focals if focal != 528))
            assert f"in queries/{QUERIES[wrong]} " in pose.reason
            assert f"{focals[wrong]:.0f} pixels" in pose.reason and "correct the camera" in pose.reason


def test_a_rig_has_no_pose_where_a_focal_length_fits_worse_than_another(made, monkeypatch):
    folder, truth = made
    queries = [folder / "queries" / name for name in QUERIES]
    cam_from_rig = [truth[name] @ np.linalg.inv(truth[QUERIES[0]]) for name in QUERIES]
    refused, asked = ("wrong_camera", "for a reason", -90.0), []
    monkeypatch.setattr(rig, "doubt_focal", lambda verdict, *_: asked.append(verdict) or refused)
    with matcher.Map.open(folder / "model") as place:
        for pose in place.localize_rig(queries, cam_from_rig, CAMERA):
            assert pose.status == "wrong_camera" and "for a reason" in pose.reason
            assert pose.cam_from_world is None
    assert [verdict[0] for verdict in asked] == ["ok"]  # one picture is enough


def test_a_map_of_features_from_a_file_takes_features(made, tmp_path, capfd):
    pytest.importorskip("h5py")
    folder, truth = made
    first = matcher.Collection.open(folder / "model-run", preset="nearest", max_keypoints=600, workers=0)
    first.export("hloc", tmp_path / "hloc")
    again = matcher.Collection.open(tmp_path / "model-run", preset="nearest", workers=0)
    again.add_images(folder / "photos", features=tmp_path / "hloc" / "features.h5")
    again.add_pairs(exhaustive=True)
    again.run()
    given = GivenPoses(truth, dict.fromkeys(truth, CAMERA))
    with again.store as store:
        reconstruct(store, tmp_path / "model", poses=given, threads=1)
    query = folder / "queries" / QUERIES[0]
    found = matcher.load("nearest", max_keypoints=600).extract(query)
    features = matcher.Features(found.keypoints, found.descriptors, found.scores, size=(480, 360))
    with matcher.Map.open(tmp_path / "model") as place:
        pose = place.localize(features, CAMERA)
        assert pose.ok and pose_error(pose, truth[QUERIES[0]])[0] < 0.1
        with pytest.raises(UsageError, match="come from a file"):
            place.localize(query, CAMERA)
    asked = matcher.Collection.open(tmp_path / "asked", preset="nearest", max_keypoints=600, workers=0)
    asked.add_images(folder / "queries")
    asked.add_pairs(exhaustive=True)
    asked.run()
    asked.export("hloc", tmp_path / "queries")
    arguments = ("localize", tmp_path / "model", folder / "queries", "--camera", "528,528,239.5,179.5")
    given = ("--features", tmp_path / "queries" / "features.h5")
    capfd.readouterr()
    assert run(*arguments, *given, "--json", "--plot", tmp_path / "drawn") == 0
    rows = json.loads(capfd.readouterr().out)["poses"]
    for name in QUERIES:
        moved = np.array(rows[name]["cam_from_world"]) @ np.linalg.inv(truth[name])
        assert np.linalg.norm(moved[:3, 3]) < 0.1 and rows[name]["inliers"] > 50
    assert len(list((tmp_path / "drawn").iterdir())) == 2
    assert run(*arguments) == 2 and "--features FILE.h5" in capfd.readouterr().err
    absent = (*arguments[:2], tmp_path / QUERIES[0], *arguments[3:])  # the photo itself is not needed
    assert run(*absent, *given, "--plot", tmp_path / "none", "--output", tmp_path / "poses.txt") == 4
    assert "1 of 1 photos have a pose" in (said := capfd.readouterr()).out and "is not drawn" in said.err
    assert sorted(read_named_poses(tmp_path / "poses.txt")[0]) == [QUERIES[0]]
    assert run(*arguments[:2], folder / "elsewhere", *given) == 4
    assert "has no features of wall.png" in capfd.readouterr().err
    assert run(*arguments, *given, "--rig", tmp_path / "rig.json") == 2
    assert run(*arguments, "--features", tmp_path / "none.h5") == 2
    assert "none.h5" in capfd.readouterr().err


def test_times_in_large_maps_are_simulated(made, tmp_path):
    folder, truth = made
    (tmp_path / "run").symlink_to(folder / "model-run")
    (tmp_path / "model").symlink_to(folder / "model")
    photos = PosedPhotos("walls", folder / "queries", QUERIES, truth, dict.fromkeys(QUERIES, CAMERA))
    rows = time_localization(photos, QUERIES[:1], tmp_path, [5, 400])
    assert [row.images for row in rows] == [5, 400] and rows[1].all_images == 80 * rows[0].all_images
    assert (
        all(0 < row.retrieval < row.seconds <= row.longest for row in rows)
        and "400 images: " in rows[1].line()
    )
    config = LocalizationConfig(neighbours=3)
    with matcher.Map.open(folder / "model", config=config) as place:
        large = enlarged(place.localizer, 400)
        query = place.query(folder / "queries" / QUERIES[0], CAMERA)
        assert large.similar_clusters(query)[0][0] == place.localizer.similar_clusters(query)[0][0]
        assert large.localize(query).ok


def test_the_file_of_a_trajectory_is_that_of_its_format(made, tmp_path):
    """KITTI: twelve numbers, world_from_cam; TUM: a time, a position, a quaternion with w last."""
    folder, truth = made
    for name in ("poses.kitti", "poses.tum"):
        camera = ("--camera", "528,528,239.5,179.5", "--output", tmp_path / name)
        assert run("localize", folder / "model", folder / "queries", *camera) == 0
    rows = np.loadtxt(tmp_path / "poses.kitti").reshape(-1, 3, 4)
    lines = np.loadtxt(tmp_path / "poses.tum")
    said = [line for line in (tmp_path / "poses.tum").read_text().splitlines() if " is " in line]
    assert said == [
        f'# {time:.6f} is "{query}"' for time, query in enumerate(QUERIES)
    ]  # no names are numbers
    for row, line, query in zip(rows, lines, QUERIES, strict=True):
        world_from_cam = np.linalg.inv(truth[query])
        np.testing.assert_allclose(row, world_from_cam[:3], atol=0.05)
        np.testing.assert_allclose(line[1:4], row[:, 3], atol=1e-6)
        x, y, z, w = line[4:]
        np.testing.assert_allclose(w**2 + x**2 - y**2 - z**2, row[0, 0], atol=1e-6)
        np.testing.assert_allclose(2 * (x * y + z * w), row[1, 0], atol=1e-6)


def test_poses_are_kept_where_a_photo_without_one_makes_no_kitti_file(made, tmp_path, capfd):
    """KITTI's lines have no names; the other poses are not lost, and no file is replaced for them."""
    folder, _ = made
    (tmp_path / "photos").mkdir()
    shutil.copy(folder / "queries" / QUERIES[0], tmp_path / "photos")
    noise = np.random.default_rng(0).integers(0, 255, (360, 480), np.uint8)
    PIL.Image.fromarray(noise).save(tmp_path / "photos" / "noise.png")
    camera = ("--camera", "528,528,239.5,179.5", "--output", tmp_path / "poses.kitti")
    command = ("localize", folder / "model", tmp_path / "photos", *camera)
    assert run(*command) == 2
    assert f"the poses are in {tmp_path / 'poses.json'}" in " ".join(capfd.readouterr().err.split())
    assert QUERIES[0] in json.loads((tmp_path / "poses.json").read_text())["poses"]
    assert not (tmp_path / "poses.kitti").exists()
    assert run(*command) == 2 and "poses.json" in capfd.readouterr().err  # before any work


def test_a_large_index_finds_what_comparing_all_finds():
    """Similar images are 0.25 alike at least; the others are as unlike as chance makes them."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((5000, 8192), np.float32)
    table /= np.linalg.norm(table, axis=1)[:, None]
    photo = table[17]
    for row, share in zip((3, 900, 4100), (0.5, 0.35, 0.25), strict=True):
        table[row] = share * photo + np.sqrt(1 - share**2) * table[row]

    class Known:
        def describe(self, _):
            return photo

    index = RetrievalIndex(Known(), table.astype(np.float16), "any")
    features = matcher.Features(np.zeros((1, 2)), np.ones((1, 8)), size=(10, 10))
    rows, similarity = index.similar(features, 4)
    assert rows.tolist() == [17, 3, 900, 4100]
    np.testing.assert_allclose(similarity, [1, 0.5, 0.35, 0.25], atol=0.04)
    whole = index.similar(features, 2000)[0]  # so many are asked for that all are compared
    assert whole[:4].tolist() == rows.tolist()


def test_a_recording_holds_the_map_and_the_photos(made, tmp_path, monkeypatch, capfd):
    folder, _ = made
    file = tmp_path / "seen.rrd"
    arguments = ("localize", folder / "model", folder / "queries", folder / "elsewhere", "--recording", file)
    assert run(*arguments[:-1], tmp_path / "seen.txt") == 2 and ".rrd" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rerun", None)
        assert run(*arguments, "--plot", tmp_path / "drawn") == 2 and not list(tmp_path.iterdir())
        assert "pip install 'matcher-vision[rerun]'" in capfd.readouterr().err
    pytest.importorskip("rerun")
    assert run(*arguments) == 4  # one photo is of another place
    data = file.read_bytes()
    assert data.startswith(b"RRF") and [path.name for path in tmp_path.iterdir()] == ["seen.rrd"]
    for entity in ("world/points", "world/map/photo0", "world/localized/photo2", "photos/wall"):
        assert entity.encode() in data.replace(b"\\", b""), entity
    assert run(*arguments) == 2 and "--overwrite" in capfd.readouterr().err


def test_a_recording_agrees_with_the_poses(made, tmp_path):
    """Read by rerun's own reader: transforms, cameras, and inliers where the camera sees their points."""
    pytest.importorskip("rerun")
    reader = pytest.importorskip("rerun.chunk")
    folder, _ = made
    with (
        matcher.Map.open(folder / "model") as place,
        LocalizationRecording(tmp_path / "a.rrd", place) as file,
    ):
        poses = {name: place.localize(folder / "queries" / name, CAMERA) for name in QUERIES}
        for name, pose in poses.items():
            file.add(name, folder / "queries" / name, pose)
        file.add("wall", folder / "elsewhere" / "wall.png", place.localize(folder / "elsewhere" / "wall.png"))
    rows = {}
    for chunk in reader.RrdReader(tmp_path / "a.rrd").stream():
        batch = chunk.to_record_batch()
        if "log_time" in batch.schema.names:
            batch = batch.drop_columns("log_time")
        for row in batch.to_pylist():
            row = {key.split(":")[-1]: value for key, value in row.items()}
            rows.setdefault((chunk.entity_path, row.get("photo")), {}).update(row)
    for number, (name, pose) in enumerate(poses.items()):
        entity = f"/world/localized/{name}"
        found = rows[entity, number]
        np.testing.assert_allclose(found["translation"][0], pose.centre, atol=1e-6)
        turn = np.reshape(found["mat3x3"][0], (3, 3)).T
        np.testing.assert_allclose(turn, pose.world_from_cam[:3, :3], atol=1e-6)
        points = np.array(rows["/world/inliers", number]["positions"])
        seen = np.array(rows["/photo/inliers", number]["positions"])
        K = np.reshape(rows[f"{entity}/image", number]["image_from_camera"][0], (3, 3)).T
        projected = (points - pose.centre) @ turn @ K.T
        np.testing.assert_allclose(projected[:, :2] / projected[:, 2:], seen, atol=4.5)
        assert rows["/photo", number]["blob"]
    for which in ("world", "photo"):
        assert not rows[f"/{which}/inliers", 2]["positions"]  # not those of the photo before
    assert rows["/photo", 2]["blob"]


@pytest.mark.parametrize(
    ("down", "axes"), [((0, 1, 0), "RIGHT_HAND_Y_DOWN"), ((0.1, 0.2, -0.9), "RIGHT_HAND_Z_UP")]
)
def test_a_recording_shows_a_map_upright(down, axes):
    ahead = np.cross(down, (1.0, 0.0, 0.0))
    rows = [np.cross(down, ahead), down, ahead]
    pose = np.eye(4)
    pose[:3, :3] = [row / np.linalg.norm(row) for row in rows]
    assert axes_of(np.stack([pose, pose])) == axes


@pytest.fixture
def masked(made, tmp_path):
    """Masks that keep the left 300 columns of the queries."""
    folder, _ = made
    mask = np.zeros(SIZE[::-1], np.uint8)
    mask[:, :300] = 255
    for name in QUERIES:
        PIL.Image.fromarray(mask).save(tmp_path / name)
    return folder, tmp_path


def test_photos_are_localised_by_what_their_masks_keep(masked, made, tmp_path):
    folder, truth = made
    with matcher.Map.open(folder / "model") as place:
        path = folder / "queries" / QUERIES[0]
        pose = place.localize(path, CAMERA, mask=tmp_path / QUERIES[0])
        assert pose.ok and pose.points2d[:, 0].max() < 300 < place.localize(path, CAMERA).points2d[:, 0].max()
        assert pose_error(pose, truth[QUERIES[0]])[0] < 0.05
        with pytest.raises(UsageError, match="leave it away with features"):
            features = place.localizer.pipeline.extract(path)
            place.localize(features, CAMERA, mask=tmp_path / QUERIES[0])
        images = [folder / "queries" / name for name in QUERIES]
        step = truth[QUERIES[1]] @ np.linalg.inv(truth[QUERIES[0]])
        both = place.localize_rig(images, [np.eye(4), step], CAMERA, masks=[tmp_path / QUERIES[0], None])
        assert both[0].points2d[:, 0].max() < 300 < both[1].points2d[:, 0].max()
        with pytest.raises(UsageError, match="one for each of the 2 pictures, not 1"):
            place.localize_rig(images, [np.eye(4), step], CAMERA, masks=[None])
        with pytest.raises(UsageError, match="the mask is 4 x 4 pixels"):
            place.localize_rig(images, [np.eye(4), step], CAMERA, masks=np.ones((2, 4, 4)))


def test_the_command_takes_a_folder_of_masks(masked, made, tmp_path, capfd):
    folder, _ = made
    given = ("localize", folder / "model", folder / "queries", "--camera", "528,528,239.5,179.5", "--json")
    assert run(*given, "--masks", tmp_path) == 0
    masked_poses = json.loads(capfd.readouterr().out)["poses"]
    assert run(*given) == 0
    poses = json.loads(capfd.readouterr().out)["poses"]
    assert all(masked_poses[name]["matches"] < poses[name]["matches"] for name in QUERIES)
    for wrong, reason in (
        (folder / "absent", "is not a folder of masks"),
        (folder, "holds no mask of any of the 2 images of the photos"),
    ):
        assert run(*given, "--masks", wrong) == 2
        assert reason in capfd.readouterr().err
    assert run(*given, "--masks", tmp_path, "--features", folder / "f.h5") == 2
    assert "masks only affect the extraction" in capfd.readouterr().err
    PIL.Image.new("L", (20, 20), 255).save(tmp_path / QUERIES[0])
    assert run(*given, "--masks", tmp_path) == 2
    assert f"{QUERIES[0]} is 20 x 20 pixels" in capfd.readouterr().err
