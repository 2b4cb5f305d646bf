"""Collections with keypoints by tiles: those of an image are its own, and pairs are matched by windows."""

import cv2
import numpy as np
import PIL.Image
import pytest
from tiled_scene import HOMOGRAPHY, make_small, textured

import matcher
from matcher import tiling as shared
from matcher.cli import main
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.tiling import WindowedMatcher, by_tiles


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    return textured()


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)
    monkeypatch.setattr(shared, "_AS_ONE", 600)
    monkeypatch.setattr(shared, "_FIRST", 400)


@pytest.fixture
def photos(scene, tmp_path, rng):
    """A folder of a scene, the scene moved, and noise."""
    folder = tmp_path / "photos"
    folder.mkdir()
    moved = cv2.warpPerspective(scene, HOMOGRAPHY, (600, 480))
    noise = rng.integers(0, 255, (480, 600), dtype=np.uint8)
    for name, pixels in (("a", scene), ("b", moved), ("c", noise)):
        PIL.Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


class Counting:
    """A matcher that keeps the numbers of keypoints that it was given."""

    def __init__(self, matcher):
        self.matcher, self.seen = matcher, []

    def __call__(self, features0, features1):
        self.seen.append((len(features0), len(features1)))
        return self.matcher(features0, features1)


def test_windows_bound_what_is_matched_with_what(scene, small):
    plain = matcher.load("nearest", geometry="homography", max_keypoints=300)
    moved = cv2.warpPerspective(scene, HOMOGRAPHY, (600, 480))
    pipeline = by_tiles(plain, 2000)
    features = [pipeline.extract(each) for each in (scene, moved)]
    assert all(1200 < len(each) <= 2000 for each in features) and features[0].scale.tolist() == [1, 1]
    counting = Counting(plain.matcher)
    found = WindowedMatcher(counting)(*(matcher.Features.stack([each]) for each in features))[0]
    assert counting.seen[0] == (400, 400) and len(counting.seen) > 8
    assert max(max(pair) for pair in counting.seen) < 1000 < min(map(len, features))
    error = np.linalg.norm(warp_points(found.points0.astype(float), HOMOGRAPHY) - found.points1, axis=1)
    assert len(found) > 600 and np.mean(error < 3) > 0.95
    for side in (0, 1):
        ends = found.indices[:, side]
        assert len(np.unique(ends)) == len(ends)
        np.testing.assert_array_equal(
            features[side].keypoints.numpy()[ends], (found.points0, found.points1)[side]
        )


def test_without_a_first_geometry_the_first_matches_are_all(scene, small, rng):
    plain = matcher.load("nearest", max_keypoints=300)
    pipeline = by_tiles(plain, 2000)
    noise = rng.integers(0, 255, (480, 600), dtype=np.uint8)
    sides = [pipeline.extract(each) for each in (scene, noise)]
    counting = Counting(plain.matcher)
    found = WindowedMatcher(counting)(*(matcher.Features.stack([each]) for each in sides))[0]
    assert counting.seen == [(400, 400)] and (found.kept0, found.kept1) == tuple(map(len, sides))
    for side, points in enumerate((found.points0, found.points1)):
        np.testing.assert_array_equal(sides[side].keypoints.numpy()[found.indices[:, side]], points)


def test_few_keypoints_are_matched_as_without_windows(scene):
    plain = matcher.load("nearest", max_keypoints=300)
    features = [plain.extract(scene), plain.extract(scene[:, 40:])]
    ours = by_tiles(plain, 2000).match_features(*features)
    np.testing.assert_array_equal(ours.indices, plain.match_features(*features).indices)


def test_a_collection_by_tiles_can_be_continued(photos, small, tmp_path, capfd):
    run = tmp_path / "run"
    options = ["--preset", "nearest", "--tiles", "--max-keypoints", "2000", "--workers", "0"]
    command = ["collection", str(photos), "--run", str(run), *options]
    assert main(command) == 0
    found = {(pair.name0, pair.name1): pair for pair in matcher.Collection.reopen(run, workers=0)}
    pair = found["a.png", "b.png"]
    error = np.linalg.norm(
        warp_points(pair.matches.points0.astype(float), HOMOGRAPHY) - pair.matches.points1, axis=1
    )
    assert len(error) > 600 and np.mean(error < 3) > 0.95 and pair.geometry.status == "ok"
    assert found["a.png", "c.png"].geometry.status != "ok"
    capfd.readouterr()
    assert main(command) == 0, "the same command continues it"
    assert main([*command[:-4], "--workers", "0"]) == 2, "20000 keypoints are another run"
    assert "20000" in capfd.readouterr().err


def test_contradictions_are_refused(photos, tmp_path, capfd):
    run = str(tmp_path / "run")
    assert main(["collection", str(photos), "--run", run, "--tiles", "--resize", "800"]) == 2
    assert "leave resize out" in capfd.readouterr().err
    assert main(["collection", str(photos), "--run", run, "--tiles", "--max-keypoints", "0"]) == 2
    assert "at least 1" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="at least 1"):
        by_tiles(matcher.load("nearest"), True)


@pytest.mark.parametrize("command", [("collection", "--run"), ("sfm", "--out")], ids=lambda names: names[0])
def test_help_names_tiles(command, capfd):
    assert main([command[0], "--help"]) == 0
    assert "--tiles" in capfd.readouterr().out
