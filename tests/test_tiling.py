"""Images of any size: tiles leave no seams, keypoints are spread, windows correspond."""

import json
import weakref

import cv2
import numpy as np
import PIL.Image
import pytest
from tiled_scene import HOMOGRAPHY, make_small, textured

import matcher
from matcher import tiling as tiled
from matcher import tiling as windows
from matcher.cli import main
from matcher.geometry import warp_points
from matcher.images import read_image
from matcher.tiling import spread, tiled_features


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    return textured()


@pytest.fixture
def small_tiles(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture
def pipeline():
    return matcher.load("nearest", geometry="homography", max_keypoints=300, resize=320)


def test_a_quota_keeps_keypoints_spread(rng):
    clump, sparse = rng.uniform(0, 50, (900, 2)), rng.uniform(0, 1000, (300, 2))
    points = np.vstack([clump, sparse])
    scores = np.concatenate([rng.uniform(0.5, 1, 900), rng.uniform(0, 0.5, 300)])
    chosen = spread(points, scores, 400)
    assert len(chosen) == 400 == len(np.unique(chosen))
    assert np.sum(chosen >= 900) > 200, "by score alone none of the sparse ones would be left"
    assert (np.diff(scores[chosen]) <= 0).all(), "best first"
    assert np.array_equal(spread(points, scores, 5000), np.argsort(-scores, kind="stable"))


def test_tiles_have_no_seams(scene, small_tiles):
    extractor = matcher.load("nearest", max_keypoints=5000).extractor
    image = matcher.Image(scene, size=(600, 480))
    whole, parts = extractor([image])[0], tiled_features(image, extractor, 5000)
    assert abs(len(whole) - len(parts)) < 0.03 * len(whole)
    ours, theirs = parts.keypoints.numpy(), whole.keypoints.numpy()
    nearest = np.array([np.linalg.norm(ours - point, axis=1).min() for point in theirs[:2500:5]])
    assert np.mean(nearest < 0.5) > 0.97
    assert (np.diff(parts.scores.numpy()) <= 0).all()
    seam = np.abs(ours[:, 0] - 299.5) < 6
    assert 0.5 < seam.mean() / (np.abs(theirs[:, 0] - 299.5) < 6).mean() < 2


def test_tiles_of_a_turned_and_resized_file_are_in_its_pixels(scene, small_tiles, tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.png"
    PIL.Image.fromarray(scene).save(path, exif=exif)
    extractor = matcher.load("nearest", max_keypoints=3000).extractor
    image = read_image(path, resize=480)
    whole, parts = extractor([image])[0], tiled_features(image, extractor, 3000)
    assert parts.size.tolist() == [600, 480] and parts.scale.tolist() == whole.scale.tolist()
    theirs, ours = whole.keypoints.numpy(), parts.keypoints.numpy()
    found = 0
    strongest = range(0, len(theirs) // 2, 5)  # a quota chooses others of the weak ones
    for index in strongest:
        near = np.flatnonzero(np.linalg.norm(ours - theirs[index], axis=1) < 0.5)
        turn = parts.orientations.numpy()[near] - whole.orientations.numpy()[index]
        grown = parts.scales.numpy()[near] / whole.scales.numpy()[index]
        found += bool(((np.abs(np.sin(turn / 2)) < 0.05) & (np.abs(grown - 1) < 0.05)).any())
    assert found > 0.95 * len(strongest)


def test_matches_are_many_exact_and_verified(scene, small_tiles, pipeline):
    moved = cv2.warpPerspective(scene, HOMOGRAPHY, (600, 480))
    mask = np.ones(scene.shape, np.uint8)
    mask[:, :150] = 0
    first = pipeline.match(scene, moved)
    result = matcher.tiled(pipeline, 2000).match(scene, moved, mask0=mask)
    assert len(result.features0) <= 2000 and len(result.matches) > 3 * len(first.matches)
    assert result.features0.keypoints[:, 0].min() > 148
    error = np.linalg.norm(warp_points(result.points0.astype(float), HOMOGRAPHY) - result.points1, axis=1)
    assert np.median(error) < 0.3 and np.mean(error < 3) > 0.95
    assert result.geometry.status == "ok" and len(result.inliers) == len(result.matches)
    for side, points in enumerate((result.points0, result.points1)):
        assert len(np.unique(result.matches.indices[:, side])) == len(result.matches), "each at most once"
        keypoints = (result.features0, result.features1)[side].keypoints.numpy()
        away = np.linalg.norm(keypoints[result.matches.indices[:, side]] - points, axis=1)
        assert away.max() == 0 if side == 0 else np.median(away) < 0.5, "refinement moves those of image 1"
    assert {"read", "first_pass", "extract", "match", "refine", "verify", "total"} == set(result.seconds)


def test_colours_are_freed_before_matches_are_refined(scene, small_tiles, pipeline, tmp_path, monkeypatch):
    for name in ("a.png", "b.png"):
        PIL.Image.fromarray(np.dstack([scene] * 3)).save(tmp_path / name)
    colours, left = [], []
    read, refine = tiled.TiledPipeline._read_full, tiled.TiledPipeline.refine

    def reading(self, *given):
        image = read(self, *given)
        assert image.pixels.ndim == 3
        colours.append(weakref.ref(image.pixels if image.pixels.base is None else image.pixels.base))
        return image

    def refining(self, image0, image1, matches):
        if image0.pixels.shape == scene.shape:  # not in the first pass
            left.append([colour() is not None for colour in colours])
        return refine(self, image0, image1, matches)

    monkeypatch.setattr(tiled.TiledPipeline, "_read_full", reading)
    monkeypatch.setattr(tiled.TiledPipeline, "refine", refining)
    result = matcher.tiled(pipeline, 2000).match(tmp_path / "a.png", tmp_path / "b.png")
    assert left == [[False, False]] and result.matches.refinement is not None


def test_the_image_with_more_detail_is_made_smaller(scene, small_tiles, pipeline):
    part = cv2.resize(scene[100:340, 150:450], None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC)
    result = matcher.tiled(pipeline, 2000).match(part, scene)
    assert np.allclose(result.features0.scale, 0.5, atol=0.03) and result.features1.scale.tolist() == [1, 1]
    true = (result.points0.astype(float) + 0.5) / 2 - 0.5 + [150, 100]
    assert np.median(np.linalg.norm(true - result.points1, axis=1)) < 0.5
    inside = result.features1.keypoints.numpy()
    assert inside[:, 0].min() >= 0 and result.features1.size.tolist() == [600, 480]


def test_without_a_first_match_its_result_is_returned(scene, small_tiles, pipeline, rng):
    noise = rng.integers(0, 255, (500, 500), dtype=np.uint8)
    result = matcher.tiled(pipeline).match(scene, noise)
    assert result.geometry.status != "ok" and len(result.features0) <= 300


def test_windows_hold_what_the_first_pass_says_corresponds(rng):
    points0 = rng.uniform(0, 4000, (6000, 2))
    turned = np.array([[0.0, -0.5, 3000], [0.5, 0, 100], [0, 0, 1]])
    points1 = warp_points(points0, turned)
    first0 = rng.uniform(0, 4000, (400, 2))
    pairs = windows.corresponding(points0, points1, first0, warp_points(first0, turned))
    own = np.concatenate([pair.index0[pair.own] for pair in pairs])
    assert len(own) == len(np.unique(own)) == 6000, "each keypoint has one window"
    for pair in pairs:
        assert np.isin(pair.index0[pair.own], pair.index1).all(), "its partner is in the other window"
        assert max(len(pair.index0), len(pair.index1)) <= 2048 and pair.own.sum() <= 750


def test_what_cannot_be_tiled_is_refused(pipeline):
    with pytest.raises(matcher.UsageError, match="at least 1"):
        matcher.tiled(pipeline, 0)
    grid = matcher.Pipeline(config=matcher.presets.find_preset("loftr-outdoor"))
    with pytest.raises(matcher.UsageError, match="cells of a grid"):
        tiled.tiled(grid)


def test_the_command_finds_keypoints_by_tiles(scene, small_tiles, tmp_path, capfd):
    paths = tmp_path / "a.png", tmp_path / "b.png"
    PIL.Image.fromarray(scene).save(paths[0])
    PIL.Image.fromarray(np.ascontiguousarray(scene[30:, 40:])).save(paths[1])
    options = "--preset nearest --tiles --max-keypoints 2200 --resize 300 --json"
    assert main(["match", *map(str, paths), *options.split()]) == 0
    found = json.loads(capfd.readouterr().out)
    assert 2048 < found["keypoints0"] <= 2200 and found["geometry"]["status"] == "ok"
