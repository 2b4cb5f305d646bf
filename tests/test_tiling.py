"""Images of any size: tiles leave no seams, windows correspond, collections share keypoints."""

import json

import cv2
import numpy as np
import PIL.Image
import pytest

import matcher
from matcher import tiling
from matcher.cli import main
from matcher.geometry import warp_points
from matcher.images import read_image
from matcher.tiling import WindowedMatcher, by_tiles, spread, tiled_features

pytestmark = pytest.mark.usefixtures("compiled")

HOMOGRAPHY = np.array([[0.93, 0.12, 40.0], [-0.1, 0.95, 60], [2e-5, -1e-5, 1]])


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """600 x 480 pixels of texture at several sizes."""
    rng = np.random.default_rng(8)
    layers = [rng.integers(0, 255, (480 // k, 600 // k)).astype(np.float32) for k in (4, 10, 40)]
    layers = [cv2.resize(layer, (600, 480), interpolation=cv2.INTER_CUBIC) for layer in layers]
    return np.clip(sum(layers) / 3, 0, 255).astype(np.uint8)


@pytest.fixture
def moved(scene) -> np.ndarray:
    return cv2.warpPerspective(scene, HOMOGRAPHY, (600, 480))


@pytest.fixture
def small(monkeypatch):
    """Tiles and windows so small that an ordinary image has many."""
    for where, name, value in (
        (tiling, "TILE", 160),
        (tiling, "WINDOW", 150),
        (WindowedMatcher, "as_one", 600),
        (WindowedMatcher, "first", 400),
    ):
        monkeypatch.setattr(where, name, value)


@pytest.fixture
def pipeline():
    return matcher.load("nearest", geometry="homography", max_keypoints=300, resize=320)


def errors(points0, points1) -> np.ndarray:
    return np.linalg.norm(warp_points(points0.astype(float), HOMOGRAPHY) - points1, axis=1)


def test_a_quota_keeps_keypoints_spread(rng):
    clump, sparse = rng.uniform(0, 50, (900, 2)), rng.uniform(0, 1000, (300, 2))
    points = np.vstack([clump, sparse])
    scores = np.concatenate([rng.uniform(0.5, 1, 900), rng.uniform(0, 0.5, 300)])
    chosen = spread(points, scores, 400)
    assert len(chosen) == 400 == len(np.unique(chosen))
    assert np.sum(chosen >= 900) > 200, "by score alone none of the sparse ones would be left"
    assert (np.diff(scores[chosen]) <= 0).all(), "best first"
    assert np.array_equal(spread(points, scores, 5000), np.argsort(-scores, kind="stable"))


def test_tiles_have_no_seams(scene, small):
    extractor = matcher.load("nearest", max_keypoints=5000).extractor
    image = matcher.Image(scene, size=(600, 480))
    whole, parts = extractor([image])[0], tiled_features(image, extractor, 5000)
    assert abs(len(whole) - len(parts)) < 0.03 * len(whole)
    ours, theirs = parts.keypoints.numpy(), whole.keypoints.numpy()
    nearest = np.array([np.linalg.norm(ours - point, axis=1).min() for point in theirs[:2500:5]])
    assert np.mean(nearest < 0.5) > 0.97
    seam = np.abs(ours[:, 0] - 299.5) < 6
    assert 0.5 < seam.mean() / (np.abs(theirs[:, 0] - 299.5) < 6).mean() < 2


def test_tiles_of_a_turned_and_resized_file_are_in_its_pixels(scene, small, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(scene).save(tmp_path / "turned.png", exif=exif)
    extractor = matcher.load("nearest", max_keypoints=3000).extractor
    image = read_image(tmp_path / "turned.png", resize=480)
    whole, parts = extractor([image])[0], tiled_features(image, extractor, 3000)
    assert parts.size.tolist() == [600, 480] and parts.scale.tolist() == whole.scale.tolist()
    theirs, ours = whole.keypoints.numpy(), parts.keypoints.numpy()
    found, strongest = 0, range(0, len(theirs) // 2, 5)  # a quota chooses others of the weak ones
    for index in strongest:
        near = np.flatnonzero(np.linalg.norm(ours - theirs[index], axis=1) < 0.5)
        turn = parts.orientations.numpy()[near] - whole.orientations.numpy()[index]
        grown = parts.scales.numpy()[near] / whole.scales.numpy()[index]
        found += bool(((np.abs(np.sin(turn / 2)) < 0.05) & (np.abs(grown - 1) < 0.05)).any())
    assert found > 0.95 * len(strongest)


def test_matches_are_many_exact_and_verified(scene, moved, small, pipeline):
    mask = np.ones(scene.shape, np.uint8)
    mask[:, :150] = 0
    first = pipeline.match(scene, moved)
    result = matcher.tiled(pipeline, 2000).match(scene, moved, mask0=mask)
    assert len(result.features0) <= 2000 and len(result.matches) > 3 * len(first.matches)
    assert result.features0.keypoints[:, 0].min() > 148
    error = errors(result.points0, result.points1)
    assert np.median(error) < 0.3 and np.mean(error < 3) > 0.95
    assert result.geometry.status == "ok" and len(result.inliers) == len(result.matches)
    for side in (0, 1):
        assert len(np.unique(result.matches.indices[:, side])) == len(result.matches), "each at most once"
    assert {"read", "first_pass", "extract", "match", "refine", "verify", "total"} == set(result.seconds)


def test_windows_bound_what_is_matched_with_what(scene, moved, small, pipeline):
    shared, seen = by_tiles(pipeline, 2000), []
    features = [shared.extract(each) for each in (scene, moved)]
    assert all(1200 < len(each) <= 2000 for each in features) and features[0].scale.tolist() == [1, 1]

    def counting(features0, features1):
        seen.append((len(features0), len(features1)))
        return pipeline.matcher(features0, features1)

    found = WindowedMatcher(counting)(*(matcher.Features.stack([each]) for each in features))[0]
    assert seen[0] == (400, 400) and len(seen) > 8
    assert max(max(pair) for pair in seen) < 1000 < min(map(len, features))
    assert len(found) > 600 and np.mean(errors(found.points0, found.points1) < 3) > 0.95
    few = [pipeline.extract(scene), pipeline.extract(scene[:, 40:])]
    ours, theirs = (each.match_features(*few) for each in (shared, pipeline))
    np.testing.assert_array_equal(ours.indices, theirs.indices)


def test_commands_find_keypoints_by_tiles(scene, moved, small, tmp_path, capfd):
    """In a pair, and in a collection, which the same command continues."""
    photos, run = tmp_path / "photos", tmp_path / "run"
    photos.mkdir()
    for name, pixels in (("a", scene), ("b", moved)):
        PIL.Image.fromarray(pixels).save(photos / f"{name}.png")
    options = ["--preset", "nearest", "--geometry", "homography", "--tiles", "--max-keypoints", "2000"]
    assert main(["match", *(str(photos / name) for name in ("a.png", "b.png")), *options, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert 1200 < found["keypoints0"] <= 2000 and found["geometry"]["status"] == "ok"
    command = ["collection", str(photos), "--run", str(run), "--workers", "0", *options]
    assert main(command) == 0
    pairs = {(pair.name0, pair.name1): pair for pair in matcher.Collection.reopen(run, workers=0)}
    pair = pairs["a.png", "b.png"]
    assert np.mean(errors(pair.matches.points0, pair.matches.points1) < 3) > 0.95
    assert len(pair.matches) > 600
    assert main(command) == 0, "the same command continues it"
    assert main(command[:-2]) == 2, "20000 keypoints are another run"
    assert "20000" in capfd.readouterr().err
    for given in (("--resize", "800"), ("--max-keypoints", "0")):
        assert main([*command[:3], str(tmp_path / "other"), "--preset", "nearest", "--tiles", *given]) == 2
    assert not (tmp_path / "other").exists()
