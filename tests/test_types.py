"""Features from users' arrays: what is taken, how it is kept, and what is refused; from and to OpenCV."""

import cv2
import numpy as np
import pytest
import torch

import matcher
from matcher.errors import UsageError
from matcher.types import Features, Matches, root_sift


def arrays(count: int = 6, dim: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "keypoints": rng.uniform(0, (100, 80), (count, 2)).astype(np.float32),
        "descriptors": rng.normal(size=(count, dim)).astype(np.float32),
        "scores": rng.uniform(size=count).astype(np.float32),
        "size": np.array([100, 80], np.float32),
        "scales": rng.uniform(1, 9, count).astype(np.float32),
        "orientations": rng.uniform(-3, 3, count).astype(np.float32),
        "mask": np.ones(count, bool),
    }


def assert_same(first: Features, second: Features) -> None:
    assert first.kind == second.kind
    ours, theirs = first.numpy(), second.numpy()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name])


def test_defaults_copies_of_read_only_arrays_and_descriptors_as_floats() -> None:
    features = Features([[1, 2], [3, 4]], [[1, 0], [0, 1]], size=(10, 20))
    assert features.keypoints.dtype == features.descriptors.dtype == features.size.dtype == torch.float32
    assert features.scores.tolist() == [1, 1] and features.mask.tolist() == [True, True]
    assert features.exif_orientation.shape == () and features.exif_orientation == 1
    assert features.scales is None and features.orientations is None and len(features) == 2
    assert_same(Features(**arrays()), Features(**{k: torch.from_numpy(v) for k, v in arrays().items()}))
    values = arrays()
    for value in values.values():
        value.flags.writeable = False
    features = Features(**values)  # torch would warn of tensors on memory that may not be written
    features.keypoints[0, 0] = -7
    assert values["keypoints"][0, 0] != -7
    for dtype in (np.uint8, np.uint64, np.float16, bool):
        features = Features(**(arrays() | {"descriptors": np.ones((6, 8), dtype)}))
        assert features.descriptors.is_floating_point() and features.descriptors.eq(1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("keypoints", wrong) for wrong in (np.zeros((6, 3)), np.full((6, 2), np.nan), [[1, 2], [3]])),
        ("keypoints", [[-0.5, 80]] * 5 + [[80, 99]]),  # of (height, width); the others are on the border
        ("descriptors", np.zeros((5, 8))),
        ("scores", ["a"] * 6),
        ("size", (0, 80)),
        ("exif_orientation", 9),
        ("descriptors", np.full((6, 8), np.inf)),
    ],
)
def test_impossible_values_are_refused(name: str, value) -> None:
    with pytest.raises(UsageError, match=rf"Features.*{name}"):
        Features(**(arrays() | {name: value}))
    stray = [[90, 20], *[[40, 20]] * 99]  # one of 100, as refinement leaves them, is kept
    assert len(Features(stray, np.zeros((100, 4)), size=(80, 60))) == 100
    with pytest.raises(UsageError, match="size"):  # it is never guessed
        Features(np.zeros((3, 2)), np.zeros((3, 4)))


def test_impossible_matches_are_refused() -> None:
    points, scores = np.arange(6.0).reshape(3, 2), ([0.5], [0.5, 5], [0.5, np.nan], "x")
    faults = [([[0, 0], wrong], [0.5, 0.5]) for wrong in ([1, -1], [9, 1], [0, 1], [1, 0.5], [1])]
    for indices, given in [*faults, *(([[0, 0], [1, 1]], wrong) for wrong in scores)]:
        with pytest.raises(UsageError, match="matches"):
            Matches.from_indices(indices, points, points, given)
    with pytest.raises(UsageError, match="keypoints1"):
        Matches.from_indices([[0, 0]], points, points * np.nan, [1])
    for indices, said in ((np.zeros((3, 2), int), "Matches need"), ([[0, 1]], "from_indices")):
        with pytest.raises(UsageError, match=said):
            Matches(indices, points[:1], points[:1], np.ones(1))


def test_stack_and_unstack_round_trip() -> None:
    items = [Features(**arrays(n, seed=n), exif_orientation=1 + n % 8, kind="sift") for n in (4, 0, 7, 1)]
    batch = Features.stack(items)
    assert batch.keypoints.shape == (4, 7, 2)
    assert batch.exif_orientation.tolist() == [5, 1, 8, 2]
    assert batch.mask.sum(1).tolist() == [4, 0, 7, 1]
    with pytest.raises(UsageError, match="unstack"):
        _ = batch.image_size
    assert batch.descriptors[~batch.mask].eq(0).all()
    for item, back in zip(items, batch.unstack(), strict=True):
        assert_same(item, back)
    mask = np.array([True, False, True, True, False, True])
    features = Features(**(arrays() | {"mask": mask}))
    batch = Features.stack([features, Features(**arrays(8))])
    assert batch.mask[0].tolist() == [*mask.tolist(), False, False]
    assert_same(batch.unstack()[0], features.select(torch.from_numpy(mask)))


def test_stack_of_optional_columns_and_what_does_not_belong_together() -> None:
    full, bare = Features(**arrays()), Features(**{k: v for k, v in arrays().items() if k != "scales"})
    batch = Features.stack([full, bare])
    assert batch.scales is None and batch.orientations is not None
    sift = Features(**arrays(), kind="sift")
    for items in ([sift, full], [sift, Features(**arrays(dim=4), kind="sift")], []):
        with pytest.raises(UsageError):
            Features.stack(items)


# --- Verification alone, and OpenCV's types.


@pytest.fixture(scope="module")
def pictures() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    noise = cv2.GaussianBlur(rng.uniform(0, 1, (420, 560)), (0, 0), 2.5)
    scene = cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    return scene[:400, :540], scene[12:412, 20:560]


@pytest.fixture(scope="module")
def result(pictures) -> matcher.Result:
    return matcher.load("nearest", max_keypoints=600, geometry="homography").match(*pictures)


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
    assert [[link.queryIdx, link.trainIdx] for link in links] == found.indices.tolist()
    assert [1 - link.distance for link in links] == pytest.approx(found.scores.tolist(), abs=1e-6)
    drawn = cv2.drawMatches(pictures[0], back, pictures[1], sides[1].to_cv2(), links, None)
    assert drawn.shape[:2] == (400, 1080)
    assert len(Features.from_cv2([], None, size=(3, 3))) == 0
    with pytest.raises(UsageError, match=r"outside .*\(width, height\)"):
        Features.from_cv2(*raw[0], size=(400, 540))
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
