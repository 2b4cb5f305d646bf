"""The public API for SLAM and SfM: verification alone, OpenCV's types, cameras, saving, one-line reprs."""

import cv2
import numpy as np
import pytest

import matcher
from matcher import Features, UsageError
from matcher.types import root_sift


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    noise = cv2.GaussianBlur(rng.uniform(0, 1, (420, 560)), (0, 0), 2.5)
    scene = cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    return scene[:400, :540], scene[12:412, 20:560]


@pytest.fixture(scope="module")
def result(pictures) -> matcher.Result:
    return matcher.load("nearest", max_keypoints=600, geometry="homography").match(*pictures)


def test_verify_alone_gives_what_match_gives(pictures):
    for resize in (1024, 300):
        pipeline = matcher.load("nearest", max_keypoints=600, resize=resize, geometry="homography")
        whole = pipeline.match(*pictures)
        features = [pipeline.extract(picture) for picture in pictures]
        assert features[0].scale.tolist() == pytest.approx([min(1, resize / 540)] * 2, rel=0.01)
        matches = pipeline.refine(*pictures, pipeline.match_features(*features))
        again = pipeline.verify(*features, matches)
        np.testing.assert_array_equal(again.matrix, whole.geometry.matrix)
        np.testing.assert_array_equal(again.inliers, whole.geometry.inliers)


def test_features_of_opencv(pictures, result):
    detector = cv2.SIFT_create(600)
    raw = [detector.detectAndCompute(picture, None) for picture in pictures]
    sides = [Features.from_cv2(*found, size=(540, 400)) for found in raw]
    np.testing.assert_allclose(sides[0].descriptors.norm(dim=1), 1, atol=1e-5)
    np.testing.assert_array_equal(sides[0].descriptors, root_sift(raw[0][1]))
    as_they_are = Features.from_cv2(raw[0][0], root_sift(raw[0][1]), size=(540, 400))
    np.testing.assert_array_equal(as_they_are.descriptors, sides[0].descriptors)
    found = matcher.load("nearest").match_features(*sides)
    assert len(found) > 100
    assert np.abs(np.median(found.points0 - found.points1, axis=0) - [20, 12]).max() < 0.1
    back = sides[0].to_cv2()
    for ours, theirs in zip(back, raw[0][0], strict=True):
        assert ours.pt == pytest.approx(theirs.pt) and ours.size == pytest.approx(theirs.size)
        assert ours.angle == pytest.approx(theirs.angle % 360, abs=1e-3)
    links = found.to_cv2()
    assert [(link.queryIdx, link.trainIdx) for link in links] == [
        tuple(row) for row in found.indices.tolist()
    ]
    assert [1 - link.distance for link in links] == pytest.approx(found.scores.tolist(), abs=1e-6)
    drawn = cv2.drawMatches(pictures[0], back, pictures[1], sides[1].to_cv2(), links, None)
    assert drawn.shape[:2] == (400, 1080)
    assert len(Features.from_cv2([], None, size=(3, 3))) == 0
    with pytest.raises(UsageError, match="binary descriptors"):
        Features.from_cv2(*cv2.ORB_create(50).detectAndCompute(pictures[0], None), size=(540, 400))


def test_raw_sift_is_refused_by_name_and_by_matcher(pictures, small_weights):
    keypoints, raw = cv2.SIFT_create(100).detectAndCompute(pictures[0], None)
    points = np.array([k.pt for k in keypoints])
    with pytest.raises(UsageError, match=r"raw SIFT descriptors.*Features\.from_cv2"):
        Features(points, raw, size=(540, 400), kind="sift")
    pipeline = matcher.load("hybrid", weights=small_weights, device="cpu")
    given = {"size": (540, 400), "scales": np.ones(len(points)), "orientations": np.zeros(len(points))}
    anonymous = Features(points, raw, **given)
    with pytest.raises(UsageError, match="raw SIFT descriptors"):
        pipeline.match_features(anonymous, anonymous)
    long = Features(points, 3 * root_sift(raw) - 0.1, **given)
    with pytest.raises(UsageError, match="descriptors of norm 1, not"):
        pipeline.match_features(long, long)
    right = Features(points, root_sift(raw), **given)
    assert len(pipeline.match_features(right, right)) > 50
    network = pipeline.matcher.model
    network(*[Features.stack([right, right])] * 2)
    for wrong, message in ((anonymous, "raw SIFT descriptors"), (long, "descriptors of norm 1, not")):
        with pytest.raises(UsageError, match=message):  # by the network itself, for one image of a batch
            network(Features.stack([right, right]), Features.stack([right, wrong]))
