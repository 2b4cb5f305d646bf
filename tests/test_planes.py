"""Several homographies: of which plane each match is, where it is shown; the poses that a plane allows."""

import json
from time import process_time

import cv2
import numpy as np
import PIL.Image
import pytest
from rendered_texture import Texture

import matcher
from matcher.cameras import Camera
from matcher.cli import main
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.verify.adjustment import MatchedPoints, fundamental_from_pose, plane_answers, sampson
from matcher.verify.estimation import RobustEstimator
from matcher.verify.homography import poses_of_plane

WALLS = (
    np.array([[1.0, 0.05, 20], [-0.02, 1.1, -15], [1e-4, 0, 1]]),
    np.array([[0.8, -0.1, 300], [0.1, 0.9, 60], [-2e-4, 1e-4, 1]]),
    np.array([[1.3, 0.2, -200], [0.0, 1.2, 90], [0, 2e-4, 1]]),
)
CONFIG = EstimationConfig(kind="homographies")


def test_every_plane_is_found_and_each_match_goes_to_its_own(rng):
    """Planes lie side by side, and there are outliers."""
    truth = rng.permutation(np.repeat([0, 1, 2, -1], [200, 120, 60, 80]))
    points0, points1 = rng.uniform(0, 900, (2, len(truth), 2))
    for plane, wall in enumerate(WALLS):
        own = truth == plane
        points0[own] = rng.uniform([300 * plane, 0], [300 * plane + 280, 600], (own.sum(), 2))
        points1[own] = warp_points(points0[own], wall) + rng.normal(0, 0.5, (own.sum(), 2))
    found = RobustEstimator(CONFIG)(points0, points1)
    assert found.status == "ok" and found.matrices.shape == (3, 3, 3)
    np.testing.assert_array_equal(found.matrix, found.matrices[0])
    np.testing.assert_array_equal(found.inliers, found.planes >= 0)
    counts = np.bincount(found.planes[found.inliers])
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)
    for plane, wall in enumerate(WALLS):
        assert (found.planes[truth == plane] == plane).mean() > 0.97
        corners = np.array([[300.0 * plane, 0], [300 * plane + 280, 0], [300 * plane + 280, 600]])
        error = warp_points(corners, found.matrices[plane]) - warp_points(corners, wall)
        assert np.abs(error).max() < 2
    assert (found.planes[truth == -1] == -1).mean() > 0.9


def test_one_plane_is_one_and_none_has_the_status_of_a_homography(rng):
    points = rng.uniform(0, 900, (100, 2))
    one = RobustEstimator(CONFIG)(points, warp_points(points, WALLS[0]))
    assert len(one.matrices) == 1 and one.inliers.all()
    np.testing.assert_allclose(one.matrix, WALLS[0], rtol=1e-3, atol=1e-3)
    none = RobustEstimator(CONFIG)(points, rng.uniform(0, 900, (100, 2)))
    assert none.status == "low_inliers" and none.matrix is None and none.matrices.shape == (0, 3, 3)
    assert not none.inliers.any() and (none.planes == -1).all()
    assert RobustEstimator(CONFIG)(points[:3], points[:3]).status == "too_few"
    points[0] = np.nan
    assert RobustEstimator(CONFIG)(points, points).planes.tolist() == [-1] + [0] * 99


@pytest.fixture
def pair(tmp_path):
    """Two photos of a picture that was cut in two halves, which moved apart."""
    pixels = np.clip(np.rint(Texture(shortest=8).image(size=360)), 0, 255).astype(np.uint8)
    moved = np.full((420, 480), 90, np.uint8)
    moved[:360, :170] = pixels[:, :170]
    moved[40:400, 270:450] = cv2.flip(pixels, -1)[::-1, ::-1][:, 180:]
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, image in zip(paths, (pixels, moved), strict=True):
        PIL.Image.fromarray(image).save(path)
    return paths


def test_results_files_plots_and_the_command_line_show_the_planes(pair, tmp_path, capfd):
    out = tmp_path / "m.npz"
    arguments = [*pair, "--preset", "nearest", "--max-keypoints", 600, "--geometry", "homographies"]
    assert main([str(a) for a in ("match", *arguments, "--output", out, "--plot", tmp_path / "m.png")]) == 0
    text = capfd.readouterr().out
    assert "inliers of 2 homographies" in text and text.count("inliers, x1 ~ H x0:") == 2
    saved = np.load(out)
    assert saved["matrices"].shape == (2, 3, 3) and set(saved["planes"]) >= {0, 1}
    shifts = sorted(np.round(m[:2, 2]).tolist() for m in saved["matrices"])
    assert shifts == [[0, 0], [90, 40]]
    assert main([str(a) for a in ("match", *arguments, "--json")]) == 0
    geometry = json.loads(capfd.readouterr().out)["geometry"]
    assert geometry["kind"] == "homographies" and len(geometry["matrices"]) == 2
    assert (tmp_path / "m.png").stat().st_size > 10_000


def test_where_several_models_do_not_fit_they_are_refused(tmp_path, capfd):
    image = np.zeros((64, 64), np.uint8)
    PIL.Image.fromarray(image).save(tmp_path / "a.png")
    folder, run = str(tmp_path), str(tmp_path / "run")
    given = ["collection", folder, "--run", run, "--preset", "nearest", "--geometry", "homographies"]
    assert main(given) == 2 and "use geometry 'homography'" in capfd.readouterr().err
    with pytest.raises(UsageError, match="homography"):
        matcher.align(image, image, "nearest", geometry="homographies")


# --- The two poses that a plane allows: both are found, and what lies off the plane decides.


CAMERAS = Camera(800.0, 780.0, 512.0, 384.0), Camera(600.0, 610.0, 400.0, 300.0)


def pose(degrees=35.0, step=1.0):
    """From one side of a scene three units away to the other."""
    cam1_from_cam0 = np.eye(4)
    cam1_from_cam0[:3, :3] = cv2.Rodrigues(np.radians((0.0, degrees, 0.0)))[0]
    cam1_from_cam0[:3, 3] = step * (np.array([0, 0, 3.0]) - cam1_from_cam0[:3, :3] @ [0, 0, 3.0])
    return cam1_from_cam0


def views(rng, on_plane, beside, cam1_from_cam0, noise=0.0, area=((50, 50), (974, 718))):
    """Matches of a slanted wall and of points before it, in an area of image 0."""
    points0 = rng.uniform(*area, (on_plane + beside, 2))
    rays = np.column_stack([points0, np.ones(len(points0))]) @ np.linalg.inv(CAMERAS[0].K).T
    depth = 3 / (1 + rays @ [0.3, 0.4, 0.0])
    depth[on_plane:] *= rng.uniform(0.6, 0.9, beside)
    scene = depth[:, None] * rays @ cam1_from_cam0[:3, :3].T + cam1_from_cam0[:3, 3]
    projected = scene @ CAMERAS[1].K.T
    return points0, projected[:, :2] / projected[:, 2:] + rng.normal(0, noise, (len(points0), 2))


def degrees_off(found, true):
    turned = (np.trace(found[:3, :3].T @ true[:3, :3]) - 1) / 2
    along = found[:3, 3] @ true[:3, 3] / np.linalg.norm(true[:3, 3])
    return float(np.degrees(np.arccos(np.clip((turned, along), -1, 1))).max())


def estimated(kind, points0, points1):
    cameras = CAMERAS if kind == "essential" else None
    return RobustEstimator(EstimationConfig(kind=kind))(points0, points1, cameras=cameras)


PART = ((500, 350), (900, 700))  # of image 0, which both poses of the wall have in front of the cameras


def test_a_plane_alone_leaves_both_poses_unless_one_has_half_of_it_behind_a_camera(rng):
    points = views(rng, 300, 0, pose(), noise=0.2, area=PART)
    found = estimated("essential", *points)
    assert found.status == "ambiguous" and found.verified and found.planar
    assert found.cam1_from_cam0 is None and found.matrix is None and found.inliers.mean() > 0.95
    off = sorted(degrees_off(each, pose()) for each in found.alternatives)
    assert len(off) == 2 and off[0] < 3 and off[1] > 10
    answers = plane_answers(*points, found, CAMERAS)  # for drawings: the scene as each pose has it
    assert not plane_answers(*points, found, None)
    right = min(answers, key=lambda each: degrees_off(each[0], pose()))[1]
    residual = np.linalg.svd(right - right.mean(axis=0))[1][2] / np.sqrt(len(right))
    assert len(right) == found.inliers.sum() and residual < 0.1 * right[:, 2].mean()
    assert (again := found.without_rejected()).verified and again.inliers.sum() == found.inliers.sum()
    assert found.to_dict()["planar"] and len(found.to_dict()["alternatives"]) == 2 and "e^" in found.likelier
    found = estimated("essential", *views(rng, 300, 0, pose(), noise=0.2))
    assert found.status == "ok" and found.planar and degrees_off(found.cam1_from_cam0, pose()) < 3
    twins = list(poses_of_plane(MatchedPoints(*views(rng, 200, 0, pose()), np.full(200, 0.5)), CAMERAS, 3.0))
    off = sorted(degrees_off(each, pose()) for each in twins)
    assert off[0] < 0.01 and off[-1] > 10
    assert all(np.linalg.norm(each[:3, 3]) == pytest.approx(1) for each in twins)


@pytest.mark.parametrize("kind", ["essential", "fundamental"])
def test_what_lies_off_the_plane_decides(rng, kind):
    points0, points1 = views(rng, 300, 14, pose(), noise=0.2, area=PART)
    points1[:60] = rng.uniform((0, 0), (800, 600), (60, 2))  # wrong
    found = estimated(kind, points0, points1)
    assert found.status == "ok" and found.planar
    true = fundamental_from_pose(CAMERAS[0].K, CAMERAS[1].K, pose())
    assert np.median(sampson(points0[-14:], points1[-14:], true)) < 0.5
    if kind == "essential":
        assert degrees_off(found.cam1_from_cam0, pose()) < 3 and found.evidence > 5
    else:
        assert np.median(sampson(points0[-14:], points1[-14:], found.matrix)) < 1


def test_no_fundamental_matrix_of_a_plane_but_its_homography(rng):
    points0, points1 = views(rng, 300, 0, pose(), noise=0.2)
    points1[:90] = rng.uniform((0, 0), (800, 600), (90, 2))
    found = estimated("fundamental", points0, points1)
    assert found.status == "degenerate" and found.verified and found.matrix is None
    assert np.abs(warp_points(points0, found.homography) - points1)[90:].max() < 2
    assert found.inliers[90:].all() and found.inliers[:90].mean() < 0.1
    points0[-5:] = [*rng.uniform((310, 330), (322, 342), (4, 2)), (600, 200)]  # on next windows
    points1[-5:] = warp_points(points0[-5:], found.homography) + np.array([40, 3])
    assert estimated("fundamental", points0, points1).status == "degenerate"
    edge, scattered = np.arange(150, 440, 12)[:, None] * (1, 0.1) + (0, 200), rng.uniform(150, 440, (25, 2))
    for ends, least, most, status in ((edge, 4, 20, 0), (scattered, 4, 9, 0), (scattered, 12, 30, 1)):
        points0[-25:] = warp_points(ends, np.linalg.inv(found.homography))
        points1[-25:] = ends + rng.uniform(least, most, (25, 1)) * (1, 0.1)
        assert estimated("fundamental", points0, points1).status == ("degenerate", "ok")[status]


def test_a_camera_that_stands_still_is_told_at_once():
    rng = np.random.default_rng(0)
    points0 = rng.uniform((0, 0), (440, 330), (1871, 2))
    points1 = points0 + rng.normal(0, 0.03, points0.shape)
    points1[:5] = points0[:5] + rng.normal(0, 4, (5, 2))  # MAGSAC++ takes half a minute over these
    start = process_time()
    found = RobustEstimator(EstimationConfig("fundamental"))(points0, points1)
    assert (found.status, found.planar) == ("degenerate", True) and found.inliers.sum() > 1860
    assert process_time() - start < 5
