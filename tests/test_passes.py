"""Further passes: when they are run, what they look at, and how their matches are joined."""

import copy
import pickle
from dataclasses import replace

import cv2
import numpy as np
import pytest

import matcher
from matcher.config import FurtherPassesConfig
from matcher.errors import UsageError
from matcher.images import read_image
from matcher.passes import JOINED, PassMatches, Support, crop, union_of_passes
from matcher.types import Features, Image, Matches, TwoViewGeometry

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def photo(views) -> np.ndarray:
    """One view, 768 pixels wide."""
    return read_image(views[0], resize=768).pixels


def found(name: str, points0, points1, scores) -> PassMatches:
    return PassMatches(
        name, *(np.array(p, np.float32).reshape(-1, 2) for p in (points0, points1)), np.float32(scores)
    )


@pytest.mark.parametrize("orientation", range(1, 9))
def test_points_of_a_view_are_carried_back_to_the_file(rng, orientation):
    upright = (50, 40) if orientation < 5 else (40, 50)
    image = Image(
        np.zeros((40, 50, 3), np.uint8),
        size=(2 * upright[0], 4 * upright[1]) if orientation < 5 else (4 * upright[0], 2 * upright[1]),
        scale=(0.5, 0.25),
        orientation=orientation,
    )
    points = rng.uniform(0, 30, (5, 2))
    np.testing.assert_allclose(image.from_stored(image.to_stored(points)), points, atol=1e-9)
    view = crop(image, (10, 20, 50, 40), 1.5)
    assert view.pixels.shape == (30, 60, 3)
    inner = (points + 0.5) / 1.5 - 0.5 + [10, 20]
    np.testing.assert_allclose(view.to_stored(points), image.to_stored(inner), atol=1e-9)


def test_confident_means_many_inliers_that_are_most_matches():
    def confident(matches: int, inliers: int, keypoints: int, status: str = "ok", probable=None) -> bool:
        agree = np.arange(matches) < inliers
        counted = np.arange(matches) < (matches if probable is None else probable)
        geometry = TwoViewGeometry("fundamental", status, agree)
        return Support.of(geometry, counted, keypoints).is_confident

    assert confident(600, 410, 2000) and confident(60, 50, 90)
    assert not confident(600, 390, 2000)  # few
    assert not confident(900, 410, 2000)  # most are wrong
    assert not confident(600, 410, 2000, "degenerate")
    assert not confident(0, 0, 0, "too_few")
    assert confident(600, 410, 2000, probable=405) and not confident(600, 410, 2000, probable=390)


def test_points_of_two_passes_that_are_the_same_count_once():
    points = np.array([[10, 10], [50, 50], [90, 90]], np.float32)
    features = Features(points, np.eye(3, dtype=np.float32), size=(200, 200), scale=(0.5, 0.5))
    indices = np.repeat(np.arange(3)[:, None], 2, axis=1)
    first = Matches.from_indices(indices, points, points, [0.9, 0.8, 0.3])
    further = found(
        "region",
        [[11, 11], [52, 50], [91, 90], [150, 150]],
        [[11, 10], [180, 20], [120, 90], [160, 160]],
        [0.5, 0.95, 0.2, 0.4],
    )
    features0, features1, union = union_of_passes(features, features, first, [further], radius=1.5)
    # 3 stored pixels: the first new match repeats one, the second wins over one, the third loses to one.
    assert union.scores.tolist() == pytest.approx([0.95, 0.9, 0.4, 0.3])
    assert union.indices.tolist() == [[3, 3], [0, 0], [4, 4], [2, 2]]
    for features_of, side in ((features0, 0), (features1, 1)):
        where = (union.points0, union.points1)[side]
        np.testing.assert_array_equal(features_of.keypoints.numpy()[union.indices[:, side]], where)
    assert features0.kind == JOINED and len(features0) == 5
    with pytest.raises(UsageError, match=JOINED):
        matcher.load("hybrid-learned", device="cpu").match_features(features0, features1)


def test_images_whose_scales_differ_four_times_are_matched(photo):
    small = cv2.resize(photo, None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA)
    # At the preset's lower threshold, or with the small image enlarged, the first pass finds enough here that
    # other scales are not asked.
    pipeline = matcher.load(max_keypoints=1024, device="cpu", match_threshold=0.2)
    as_stored = pipeline.config.extractor.of_size(1024)
    pipeline = replace(pipeline, config=replace(pipeline.config, extractor=as_stored))
    result = pipeline.match(photo, small)
    error = np.abs((result.points0 + 0.5) / 4 - 0.5 - result.points1).max(axis=1)
    assert (error < 1).sum() > 50 and (error < 1).mean() > 0.8
    assert np.median(error) < 0.1 and result.matches.refinement.accepted.mean() > 0.8
    assert [one.name for one in result.passes][:2] == ["first", "scale 0.29"]
    assert result.first.passes == () and len(result.first.matches) == result.passes[0].matches
    for points, features, side in (
        (result.points0, result.features0, 0),
        (result.points1, result.features1, 1),
    ):
        found = features.keypoints.numpy()[result.matches.indices[:, side]]
        as_found = ~result.matches.refinement.accepted if side == 1 else slice(None)
        np.testing.assert_array_equal(found[as_found], points[as_found])
        assert len(np.unique(result.matches.indices[:, side])) == len(points)
    assert "passes, because too few matches of the first agreed: first" in result.summary()
    assert [one["name"] for one in result.to_dict()["passes"]] == [one.name for one in result.passes]
    assert result.seconds["total"] > result.seconds["further passes"] > 0
    alone = replace(pipeline, passes=None).match(photo, small)
    assert len(alone.matches) == len(result.first.matches) and alone.passes == ()


def test_a_confident_pair_is_matched_by_one_pass(photo):
    pipeline = matcher.load(max_keypoints=512, device="cpu")

    def unwanted():
        raise AssertionError("no other features are needed")

    pipeline = replace(pipeline, passes=replace(pipeline.passes, other=unwanted))
    moved = np.roll(photo, 20, axis=1)
    result = pipeline.match(photo, moved)
    assert result.passes == () and result.first is None and "further passes" not in result.seconds


def test_images_of_another_sensor_are_matched_by_their_gradients(photo):
    """Grey values go up and down along the curve; the first pass and the other front end find little."""
    grey = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY)
    other = np.interp(grey, np.arange(0, 256, 51), [200, 30, 200, 30, 200, 30]).astype(np.uint8)
    pipeline = matcher.load(max_keypoints=512, device="cpu", resize=512)
    result = pipeline.match(grey, other)
    assert "gradients" in [one.name for one in result.passes]

    def right(one: matcher.Result) -> int:
        return int((np.abs(one.points0 - one.points1).max(axis=1) < 2).sum())

    assert right(result) > 2 * right(result.first) + 100


def oblique(photo: np.ndarray, azimuth: float, tilt: float) -> tuple[np.ndarray, np.ndarray]:
    """A photo lying on the floor, seen from `tilt` degrees off its normal; and its homography to the view."""
    height, width = photo.shape[:2]
    side = max(height, width)
    lying = np.array([[1 / side, 0, -width / side / 2], [0, 1 / side, -height / side / 2], [0, 0, 1]])
    around, off = np.radians([azimuth, tilt])
    axis = -np.array([np.sin(off) * np.sin(around), np.sin(off) * np.cos(around), -np.cos(off)])
    right = np.cross([0, 0, 1], axis) / np.sin(off)
    rotation = np.stack([right, np.cross(axis, right), axis])
    camera = np.array([[420, 0, 239.5], [0, 420, 179.5], [0, 0, 1]])
    homography = camera @ np.c_[rotation[:, :2], 1.9 * rotation @ axis] @ lying
    return cv2.warpPerspective(photo, homography, (480, 360), flags=cv2.INTER_AREA), homography


def test_a_floor_seen_obliquely_from_two_sides_is_matched_from_above(photo):
    """Its views differ by an affine map that no rotation and no change of scale comes near."""
    (view0, to0), (view1, to1) = (oblique(photo, azimuth, 62) for azimuth in (0, 90))
    pipeline = matcher.load(max_keypoints=512, device="cpu", geometry="homography")
    pipeline = replace(pipeline, passes=replace(pipeline.passes, other=None))

    def right(result: matcher.Result) -> int:
        moved = np.c_[result.points0, np.ones(len(result.points0))] @ (to1 @ np.linalg.inv(to0)).T
        return int((np.linalg.norm(moved[:, :2] / moved[:, 2:] - result.points1, axis=1) < 2).sum())

    result = pipeline.match(view0, view1)
    assert "tilt_y" in [one.name for one in result.passes]
    assert right(result.first) < 30 and right(result) > 200


def test_a_wall_that_one_image_shows_from_the_side_is_matched(photo):
    """Neither rotation nor stretching both images brings these two closer to each other."""
    foreshortened = cv2.resize(photo, None, fx=0.16, fy=1, interpolation=cv2.INTER_AREA)
    pipeline = matcher.load(max_keypoints=512, device="cpu", geometry="homography")
    passes = replace(pipeline.passes, other=None, config=FurtherPassesConfig(passes=("tilt_x",)))

    def right(passes) -> tuple[int, list[str]]:
        result = replace(pipeline, passes=passes).match(photo, foreshortened)
        expected = (result.points0 + 0.5) * [0.16, 1] - 0.5
        names = [one.name for one in result.passes[1:]]
        return int((np.linalg.norm(expected - result.points1, axis=1) < 2).sum()), names

    found, names = right(passes)
    assert "tilt_x of image 1" in names
    assert found > 3 * right(None)[0] and found > 80


def test_a_hopeless_pair_is_given_up_after_the_first_tilted_view(photo, rng):
    pipeline = matcher.load(max_keypoints=512, device="cpu")
    noise = cv2.resize(rng.integers(0, 256, (30, 40), dtype=np.uint8), (640, 480))
    result = pipeline.match(photo, noise)
    assert not result.geometry.verified
    assert [one.name for one in result.passes] == ["first", "gradients", "hybrid", "tilt_y"]


def test_further_passes_are_switched_off():
    assert matcher.load("hybrid-learned", device="cpu", further_passes=False).passes is None
    assert matcher.load("nearest").passes is None
    own = matcher.load("nearest", further_passes=True).passes
    assert own.config.preset is None and own.other is None
    with pytest.raises(UsageError, match="further_passes must be True or False"):
        matcher.load("hybrid-learned", further_passes="yes")
    with pytest.raises(UsageError, match="further_passes needs keypoints"):
        matcher.load("loftr-outdoor", further_passes=True)


def test_collections_and_sequences_refuse_further_passes(tmp_path, photo):
    cv2.imwrite(str(tmp_path / "a.png"), photo[:64, :64])
    run = matcher.Collection.open(tmp_path / "run", preset="nearest", further_passes=True)
    with pytest.raises(UsageError, match="leave further_passes away"):
        run.add_images(tmp_path)
    refusing = (
        lambda: matcher.Tracker("nearest", further_passes=True),
        lambda: matcher.match_set([photo, photo], "nearest", further_passes=True),
        lambda: matcher.TemplateFinder(photo, "nearest", further_passes=True),
    )
    for refused in refusing:
        with pytest.raises(UsageError, match="leave further_passes away"):
            refused()


def test_the_other_preset_has_the_options_that_were_given(views, shipped_weights):
    """Its matches were those of its own threshold, so that `match_threshold=1` gave hundreds."""
    pipeline = matcher.load(max_keypoints=128, match_threshold=0.9, early_exit=False, precision="float32")
    policy = pipeline.passes.other().matcher.model.config.policy
    assert (policy.match_threshold, policy.early_exit) == (0.9, False)
    assert len(matcher.load(max_keypoints=128, match_threshold=1.0, resize=320).match(*views).matches) == 0


def test_a_pipeline_with_further_passes_can_be_pickled(views, shipped_weights):
    pipeline = matcher.load(max_keypoints=128, resize=320, precision="float32")
    first = pipeline.match(*views)
    pipeline.passes.other()  # what is loaded is not pickled, too
    for again in (pickle.loads(pickle.dumps(pipeline)), copy.deepcopy(pipeline)):
        assert np.array_equal(again.match(*views).matches.indices, first.matches.indices)
        assert again.passes.other().matcher is not pipeline.passes.other().matcher
