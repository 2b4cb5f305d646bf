"""Guided matching: keypoints without a partner look where the homographies around them predict it."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

import matcher
from matcher.config import FurtherPassesConfig
from matcher.geometry import warp_points
from matcher.passes.guided import guided_matches, with_guided
from matcher.types import Features, Matches, TwoViewGeometry

FLOOR = np.array([[0.9, 0.25, 10.0], [-0.1, 0.8, 90], [1e-4, 2e-4, 1]])
WALL = np.array([[1.05, -0.1, 60.0], [0.05, 0.9, 20], [-1e-4, 1e-4, 1]])
EDGE = 320  # column of image 0 where both planes meet


@pytest.fixture(scope="module")
def scene():
    """Two photos of two planes, 640 x 480 pixels."""
    rng = np.random.default_rng(3)
    layers = [rng.integers(0, 255, (480 // k, 640 // k)).astype(np.float32) for k in (5, 14, 50)]
    layers = [cv2.resize(layer, (640, 480), interpolation=cv2.INTER_CUBIC) for layer in layers]
    first = np.clip(sum(layers) / 3, 0, 255).astype(np.uint8)
    left = np.arange(640) < EDGE
    moved = []
    for matrix, own in ((FLOOR, left), (WALL, ~left)):
        mask = cv2.warpPerspective(np.tile(np.uint8(255) * own, (480, 1)), matrix, (640, 480)) > 250
        moved.append((cv2.warpPerspective(first, matrix, (640, 480)), mask))
    second = np.full((480, 640), 90, np.uint8)
    for pixels, mask in moved:
        second[mask] = pixels[mask]
    return first, second


def errors(points0, points1) -> np.ndarray:
    """Distances from where the plane of a point moves it, in image 1."""
    points0 = np.asarray(points0, dtype=float)
    moved = [warp_points(points0, matrix) for matrix in (FLOOR, WALL)]
    return np.linalg.norm(np.where(points0[:, :1] < EDGE, *moved) - points1, axis=1)


def as_set(matches) -> set:
    return set(map(tuple, matches.indices.tolist()))


@pytest.fixture(scope="module")
def results(scene):
    """With all parts, and without guided matching."""
    options = dict(geometry="homographies", max_keypoints=512, ratio=0.7, further_passes=True)
    pipeline = matcher.load("nearest-learned", **options)
    given = [
        replace(pipeline.passes, config=FurtherPassesConfig(passes=names)) for names in (("guided",), ())
    ]
    return tuple(replace(pipeline, passes=passes).match(*scene) for passes in given)


def test_every_plane_of_a_scene_predicts_matches_and_none_is_lost(results):
    guided, plain = results
    assert guided.geometry.status == plain.geometry.status == "ok"
    assert len(plain.geometry.matrices) == 2 and len(guided.matches) == len(guided.inliers)
    before, after = as_set(plain.matches), as_set(guided.matches)
    new = np.array([tuple(row) not in before for row in guided.matches.indices.tolist()])
    right = errors(guided.points0, guided.points1) < 3
    for side in (guided.points0[:, 0] < EDGE, guided.points0[:, 0] >= EDGE):
        assert (new & side).sum() >= 8, "of both planes"
    assert before <= after and right[new].mean() > 0.95 and guided.inliers[new].mean() > 0.9
    assert right.sum() > 1.15 * (errors(plain.points0, plain.points1) < 3).sum()
    old = {tuple(i): tuple(p) for i, p in zip(plain.matches.indices.tolist(), plain.points1, strict=True)}
    kept = guided.matches.indices[~new].tolist()
    assert all(old[tuple(i)] == tuple(p) for i, p in zip(kept, guided.points1[~new], strict=True))


def test_what_is_found_is_part_of_the_result(results):
    guided, plain = results
    assert (np.diff(guided.scores) <= 0).all() and guided.scores.max() <= 1
    assert len(guided.matches.refinement.status) == len(guided.matches)
    np.testing.assert_array_equal(guided.inliers, guided.geometry.planes >= 0)
    np.testing.assert_array_equal(guided.geometry.matrices, plain.geometry.matrices)
    assert "guided matching" in guided.seconds and "guided matching" not in plain.seconds
    for side, count in enumerate((len(guided.features0), len(guided.features1))):
        ends = guided.matches.indices[:, side]
        assert len(np.unique(ends)) == len(ends) and ends.max() < count


def synthetic(rng, unlike=0.0):
    """Features of 60 points on either plane, of which the first half of each is matched, and homographies."""
    sides = [rng.uniform([low, 0], [low + 300, 480], (60, 2)) for low in (0, EDGE + 20)]
    points0 = np.concatenate(sides)
    points1 = np.concatenate([warp_points(side, m) for side, m in zip(sides, (FLOOR, WALL), strict=True)])
    descriptors = rng.normal(size=(120, 16))
    others = descriptors + 0.05 * rng.normal(size=(120, 16))
    others[30:60] += unlike * rng.normal(size=(30, 16))
    features = [
        Features(points, d / np.linalg.norm(d, axis=1, keepdims=True), size=(700, 600))
        for points, d in ((points0, descriptors), (points1, others))
    ]
    chosen = np.r_[0:30, 60:90]
    indices = np.stack([chosen, chosen], axis=1)
    scores = np.linspace(0.9, 0.5, 60).astype(np.float32)
    matches = Matches.from_indices(indices, points0, points1, scores)
    planes = np.repeat([0, 1], 30)
    geometry = TwoViewGeometry(
        "homographies", "ok", planes >= 0, FLOOR, planes=planes, matrices=np.array([FLOOR, WALL])
    )
    return (*features, matches, geometry)


def test_each_keypoint_is_carried_over_by_the_plane_around_it(rng):
    features0, features1, matches, geometry = synthetic(rng)
    found, around = guided_matches(features0, features1, matches, geometry)
    assert (found[:, 0] == found[:, 1]).all() and set(found[:, 0]) <= {*range(30, 60), *range(90, 120)}
    assert (found[:, 0] < 60).sum() > 15 and (found[:, 0] >= 90).sum() > 15
    assert (
        around.shape == (len(found), 4)
        and (found[:, :1] // 60 == matches.indices[around][..., 0] // 60).all()
    )
    halved = replace(matches, prior=matches.scores / 2)
    both, _ = with_guided(features0, features1, halved, geometry)
    assert len(both) == 60 + len(found) and (np.diff(both.scores) <= 0).all()
    np.testing.assert_allclose(both.prior, both.scores / 2)
    assert both.scores.min() >= matches.scores.min() and both.scores.max() <= matches.scores.max()
    one = replace(geometry, matrices=np.array([FLOOR, FLOOR]))  # the second plane predicts wrong places
    found, _ = guided_matches(features0, features1, matches, one)
    assert (found[:, 0] < 60).all()


def test_what_does_not_look_alike_is_no_partner(rng):
    found, _ = guided_matches(*synthetic(rng, unlike=2.0))
    assert len(found) and (found[:, 0] >= 90).all()


def test_other_geometries_and_failed_ones_are_left_alone(rng):
    features0, features1, matches, geometry = synthetic(rng)
    for kind, status in (("fundamental", "ok"), ("homographies", "low_inliers")):
        given = replace(geometry, kind=kind, status=status)
        assert with_guided(features0, features1, matches, given) == (matches, given)
    few = replace(geometry, inliers=np.arange(60) < 11, planes=np.where(np.arange(60) < 11, 0, -1))
    assert with_guided(features0, features1, matches, few)[0] is matches
    assert "guided" in FurtherPassesConfig().passes


def test_a_time_budget_leaves_it_out(scene, monkeypatch):
    pipeline = matcher.load("nearest-learned", geometry="homography", max_keypoints=256, further_passes=True)
    monkeypatch.setattr("matcher.budget.plan", lambda chosen, images, *_: (chosen, images, None))
    monkeypatch.setattr("matcher.pipeline.with_guided", lambda *_: pytest.fail("guided matching ran"))
    assert len(pipeline.match(*scene, budget_ms=1000).matches) > 100
