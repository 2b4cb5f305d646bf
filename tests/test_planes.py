"""Several homographies: of which plane each match is, and where that is shown."""

import json

import cv2
import numpy as np
import PIL.Image
import pytest
from rendered_texture import Texture

import matcher
from matcher.cli import main
from matcher.config import EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.verify.planes import PlanesEstimator

WALLS = (
    np.array([[1.0, 0.05, 20], [-0.02, 1.1, -15], [1e-4, 0, 1]]),
    np.array([[0.8, -0.1, 300], [0.1, 0.9, 60], [-2e-4, 1e-4, 1]]),
    np.array([[1.3, 0.2, -200], [0.0, 1.2, 90], [0, 2e-4, 1]]),
)
CONFIG = EstimationConfig(kind="homographies")


def street(rng, counts=(200, 120, 60), outliers=80, noise=0.5):
    """Matches on planes side by side, and outliers; the plane of each."""
    points0, points1, truth = [], [], []
    for plane, (wall, count) in enumerate(zip(WALLS, counts, strict=False)):
        points = rng.uniform([300 * plane, 0], [300 * plane + 280, 600], (count, 2))
        points0.append(points)
        points1.append(warp_points(points, wall) + rng.normal(0, noise, (count, 2)))
        truth += [plane] * count
    points0.append(rng.uniform(0, 900, (outliers, 2)))
    points1.append(rng.uniform(0, 900, (outliers, 2)))
    order = rng.permutation(len(truth) + outliers)
    truth = np.array(truth + [-1] * outliers)[order]
    return np.concatenate(points0)[order], np.concatenate(points1)[order], truth


def test_every_plane_is_found_and_each_match_goes_to_its_own(rng):
    points0, points1, truth = street(rng)
    found = PlanesEstimator(CONFIG)(points0, points1)
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
    one = PlanesEstimator(CONFIG)(points, warp_points(points, WALLS[0]))
    assert len(one.matrices) == 1 and one.inliers.all()
    np.testing.assert_allclose(one.matrix, WALLS[0], rtol=1e-3, atol=1e-3)
    none = PlanesEstimator(CONFIG)(points, rng.uniform(0, 900, (100, 2)))
    assert none.status == "low_inliers" and none.matrix is None and none.matrices.shape == (0, 3, 3)
    assert not none.inliers.any() and (none.planes == -1).all()
    assert PlanesEstimator(CONFIG)(points[:3], points[:3]).status == "too_few"
    points[0] = np.nan
    assert PlanesEstimator(CONFIG)(points, points).planes.tolist() == [-1] + [0] * 99


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
