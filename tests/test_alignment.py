"""`matcher align`: maps of the plane are recovered, and pictures show what they say."""

import json

import cv2
import numpy as np
import PIL.Image
import pytest
from command import run

import matcher
from matcher.config import EstimationConfig
from matcher.geometry import warp_points
from matcher.verify.planes import estimate_planar

TURN = np.deg2rad(25)
SIMILARITY = np.array(
    [[0.8 * np.cos(TURN), -0.8 * np.sin(TURN), 90], [0.8 * np.sin(TURN), 0.8 * np.cos(TURN), 10], [0, 0, 1]]
)
AFFINE = np.array([[0.9, 0.2, 20.0], [-0.1, 1.2, 15], [0, 0, 1]])
HOMOGRAPHY = np.array([[0.9, 0.1, 30.0], [-0.05, 1.0, 20], [2e-4, 1e-4, 1]])


@pytest.fixture
def pair(views, tmp_path):
    """A view and its warp, as files, and the pixels."""
    pixels = cv2.resize(cv2.imread(str(views[0])), (400, 300), interpolation=cv2.INTER_AREA)
    moved = cv2.warpPerspective(pixels, HOMOGRAPHY, (400, 300))
    paths = tmp_path / "a.png", tmp_path / "b.png"
    for path, image in zip(paths, (pixels, moved), strict=True):
        PIL.Image.fromarray(image).save(path)
    return paths, pixels, moved


@pytest.mark.parametrize(("model", "true"), [("similarity", SIMILARITY), ("affine", AFFINE)])
def test_a_map_is_recovered_among_outliers(rng, model, true):
    points0 = rng.uniform(0, 1000, (300, 2))
    points1 = warp_points(points0, true) + rng.normal(0, 0.5, (300, 2))
    points1[200:] = rng.uniform(0, 1000, (100, 2))
    found = estimate_planar(points0, points1, model, EstimationConfig(), 1.5)
    assert found.status == "ok" and found.inliers[:200].mean() > 0.98 and found.inliers[200:].sum() < 5
    corners = np.array([[0.0, 0], [1000, 0], [1000, 1000], [0, 1000]])
    assert np.abs(warp_points(corners, found.matrix) - warp_points(corners, true)).max() < 1.5


def test_a_similarity_does_not_mirror(rng):
    points = rng.uniform(0, 1000, (100, 2))
    mirrored = points * [-1, 1] + [1000, 0]
    assert estimate_planar(points, mirrored, "affine", EstimationConfig()).status == "ok"
    assert estimate_planar(points, mirrored, "similarity", EstimationConfig()).status == "low_inliers"


def test_the_aligned_image_is_the_other_one(pair):
    (a, b), _, moved = pair
    found = matcher.align(a, b, "nearest", max_keypoints=500)
    picture = found.image()
    assert found.found and picture.shape == (*moved.shape[:2], 4) and found.error < 0.5
    inner = cv2.erode(picture[..., 3], np.ones((9, 9))) > 0
    assert inner.mean() > 0.5
    assert np.abs(picture[..., :3].astype(int) - moved)[inner].mean() < 4
    assert found.image("difference")[inner].mean() < 4
    board = found.image("checkerboard")
    assert np.abs(board.astype(int) - moved)[inner].mean() < 12 and board.shape == moved.shape
    grey = found.image("blend")[inner].astype(int)
    assert np.ptp(grey, axis=1).mean() < 5
    with pytest.raises(matcher.UsageError, match="unknown view 'sideways'"):
        found.image("sideways")


def test_orientations_of_both_files_are_respected(pair, tmp_path):
    (_, b), pixels, moved = pair
    turned = tmp_path / "turned.png"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a viewer
    PIL.Image.fromarray(np.rot90(pixels)).save(turned, exif=exif)
    found = matcher.align(turned, b, "nearest", max_keypoints=500)
    corner = np.array([[10.0, 20.0]])
    np.testing.assert_allclose(
        warp_points(corner, found.matrix_upright), warp_points(corner, HOMOGRAPHY), atol=1
    )
    picture = found.image()
    inner = cv2.erode(picture[..., 3], np.ones((9, 9))) > 0
    assert np.abs(picture[..., :3].astype(int) - moved)[inner].mean() < 5


def test_the_command_writes_all_views_and_prints_the_matrix(pair, tmp_path, capfd):
    (a, b), _, _ = pair
    files = {name: tmp_path / f"{name}.png" for name in ("output", "blend", "checkerboard", "difference")}
    asked = [text for name, path in files.items() for text in (f"--{name}", path)]
    quick = ("--preset", "nearest", "--max-keypoints", 500, "--model", "affine")
    assert run("align", a, b, *asked, *quick) == 0
    text = capfd.readouterr().out
    assert "inliers of one affine map" in text and "# affine, x1 ~ H x0" in text
    assert all(PIL.Image.open(path).size == (400, 300) for path in files.values())
    assert PIL.Image.open(files["output"]).mode == "RGBA"
    assert run("align", a, b, *quick, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["model"] == "affine" and found["status"] == "ok" and len(found["matrix"]) == 3


def test_nothing_is_overwritten_and_no_match_is_said(pair, tmp_path, capfd):
    (a, b), _, _ = pair
    quick = ("--preset", "nearest", "--max-keypoints", 200)
    mine = tmp_path / "mine.png"
    mine.write_bytes(b"mine")
    assert run("align", a, b, "--output", mine, *quick) == 2
    assert run("align", a, b, "--output", a.with_name("d.png"), "--blend", a.with_name("d.png"), *quick) == 2
    assert run("align", a, b, "--output", a, "--overwrite", *quick) == 2
    assert "is an input" in capfd.readouterr().err and mine.read_bytes() == b"mine"
    noise = tmp_path / "noise.png"
    PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), dtype=np.uint8)).save(noise)
    out = tmp_path / "out.png"
    assert run("align", a, noise, "--output", out, *quick) == 4
    assert "not aligned" in capfd.readouterr().err and not out.exists()
    found = matcher.align(a, noise, "nearest", max_keypoints=200)
    with pytest.raises(matcher.UsageError, match="not aligned"):
        found.image()


def test_a_scene_with_depth_is_told_of(capfd, tmp_path):
    """Three parts of a picture move differently: one is aligned, and most of the matches disagree."""
    noise = np.random.default_rng(5).integers(0, 255, (400, 600), np.uint8)
    scene = cv2.GaussianBlur(noise, (0, 0), 2)
    parts = zip((0, 200, 400), (9, -14, 31), strict=True)
    moved = np.concatenate([np.roll(scene[:, x : x + 200], shift, axis=0) for x, shift in parts], axis=1)
    found = matcher.align(scene, moved, "nearest", max_keypoints=800)
    assert found.found and found.agreeing < 0.5 and "no plane" in found.summary()
    cv2.imwrite(str(tmp_path / "0.png"), scene)
    cv2.imwrite(str(tmp_path / "1.png"), moved)
    command = ("align", tmp_path / "0.png", tmp_path / "1.png", "--preset", "nearest")
    assert run(*command) == 0 and run(*command, "--fail-below", 0.5) == 4
