import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

import matcher
from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.images import read_image
from matcher.match.network import AttentionMatcher
from matcher.torch_engine import resolve_device
from matcher.types import Repetition

pytestmark = pytest.mark.usefixtures("compiled")

H_0TO1 = np.array([[0.9, -0.12, 40.0], [0.1, 0.95, -8.0], [1e-4, 5e-5, 1.0]])


@pytest.fixture
def pair(views) -> tuple[np.ndarray, np.ndarray]:
    """An image and its warp by H_0TO1."""
    picture = cv2.cvtColor(cv2.imread(str(views[0])), cv2.COLOR_BGR2RGB)
    return picture, cv2.warpPerspective(picture, H_0TO1, (picture.shape[1], picture.shape[0]))


def share_right(result: matcher.Result, homography: np.ndarray, pixels: float = 3.0) -> float:
    error = np.linalg.norm(warp_points(result.points0, homography) - result.points1, axis=1)
    return float(np.mean(error < pixels))


@pytest.mark.parametrize("preset", ["hybrid", "nearest"])
def test_a_known_homography_is_found(pair, small_weights, preset):
    options = {}
    if preset == "hybrid":
        options = {"weights": small_weights, "device": "cpu", "match_threshold": 0.1}
    pipeline = matcher.load(preset, geometry="homography", max_keypoints=800, **options)
    result = pipeline.match(*pair)
    # The untrained network has no ratio test: it keeps more of what is ambiguous.
    assert share_right(result, H_0TO1) > (0.7 if preset == "hybrid" else 0.8)
    assert result.geometry.status == "ok"
    corners = np.array([[0, 0], [799, 0], [0, 599], [799, 599]], dtype=float)
    moved = (warp_points(corners, matrix) for matrix in (result.geometry.matrix, H_0TO1))
    np.testing.assert_allclose(*moved, atol=2.0)
    assert result.matches.layers_run == pipeline.layers == (3 if preset == "hybrid" else 0)


def test_the_result_is_complete(network, views):
    result = network.match(*views)
    assert (result.path0, result.path1) == views
    assert len(result.matches) > 20
    assert list(result.seconds) == ["read", "extract", "match", "refine", "verify", "total"]
    parts = [value for stage, value in result.seconds.items() if stage != "total"]
    assert sum(parts) == pytest.approx(result.seconds["total"])
    assert result.points0.dtype == result.points1.dtype == result.scores.dtype == np.float32
    keypoints = [f.keypoints.numpy() for f in (result.features0, result.features1)]
    found0, found1 = (keypoints[side][result.matches.indices[:, side]] for side in (0, 1))
    np.testing.assert_array_equal(result.points0, found0)
    kept = ~result.matches.refinement.accepted
    assert 0 < kept.sum() < 0.7 * len(kept)  # an untrained network gives many that are wrong
    np.testing.assert_array_equal(result.points1[kept], found1[kept])
    assert 0 < np.linalg.norm(result.points1 - found1, axis=1).max() < 6


def test_paths_arrays_and_images_give_the_same(network, views):
    by_path = network.match(*views)
    by_text = network.match(*(str(view) for view in views))
    by_image = network.match(*(read_image(view) for view in views))
    arrays = [cv2.cvtColor(cv2.imread(str(view), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB) for view in views]
    by_array = network.match(*arrays)
    for other in (by_text, by_image):
        np.testing.assert_array_equal(by_path.points0, other.points0)
    # Two JPEG decoders differ by a grey level here and there.
    assert abs(len(by_array.matches) - len(by_path.matches)) < 0.1 * len(by_path.matches) + 5
    as_opencv = [np.ascontiguousarray(array[..., ::-1]) for array in arrays]
    for as_given in (np.asarray, torch.from_numpy, lambda x: torch.from_numpy(x.transpose(2, 0, 1))[None]):
        by_opencv = replace(network, bgr=True).match(*map(as_given, as_opencv))
        np.testing.assert_array_equal(by_opencv.points0, by_array.points0)
    drawn = by_opencv.plot(None, *as_opencv, title="a"), by_array.plot(None, *arrays, title="a")
    np.testing.assert_array_equal(*drawn)


def test_extract_once_and_match_many(network, views):
    features, arrays = network.extract(views), np.stack([cv2.imread(str(view), 0) for view in views])
    colour, masks = (
        torch.from_numpy(arrays)[:, None].expand(-1, 3, -1, -1),
        torch.ones(2, 1, *arrays.shape[1:]),
    )
    for several in (network.extract(colour, masks), network.extract(colour.numpy(), arrays | 1)):
        assert [len(each) for each in several] == [len(network.extract(array)) for array in arrays]
    with pytest.raises(UsageError, match="2 images take as many masks"):
        network.extract(colour, masks[:1])
    whole = network.match(*views)
    np.testing.assert_array_equal(network.match_features(*features).indices, whole.matches.indices)
    empty = features[0].select(torch.zeros(len(features[0]), dtype=torch.bool))
    few = features[1].select(torch.arange(40))
    pairs = [tuple(features), (few, features[0]), (empty, features[1]), (features[0], empty), (empty, empty)]
    batch = network.match_features_batch(pairs)
    for pair, together in zip(pairs, batch, strict=True):
        alone = network.match_features(*pair)
        np.testing.assert_array_equal(alone.indices, together.indices)
        np.testing.assert_allclose(alone.scores, together.scores, atol=1e-5)
    assert [len(matches) for matches in batch[2:]] == [0, 0, 0]
    assert network.match_features_batch([]) == []


def test_results_are_in_stored_pixels_whatever_the_resize(pair):
    pipeline = matcher.load("nearest", resize=400, geometry="homography", refine=False)
    large = [cv2.resize(picture, None, fx=2, fy=2, interpolation=cv2.INTER_CUBIC) for picture in pair]
    shift = np.array([[2, 0, 0.5], [0, 2, 0.5], [0, 0, 1]])
    expected = shift @ H_0TO1 @ np.linalg.inv(shift)
    result = pipeline.match(*large)
    assert result.features0.size.tolist() == [1600, 1200]
    # 3 pixels of the resized image are 12 of the stored one.
    assert share_right(result, expected, pixels=12.0) > 0.9
    inliers = result.geometry.inliers
    error = np.linalg.norm(warp_points(result.points0, result.geometry.matrix) - result.points1, axis=1)
    assert 3.0 < error[inliers].max() <= 12.1


def test_essential_needs_cameras_and_others_refuse_them(views):
    camera = Camera(700, 700, 400, 300)
    with pytest.raises(UsageError, match="needs camera0"):
        matcher.load("nearest", geometry="essential").match(*views)
    with pytest.raises(UsageError, match="'essential' only"):
        matcher.load("nearest").match(*views, camera1=camera)
    with pytest.raises(UsageError, match="principal point"):  # as of an image three times the size
        matcher.load("nearest", geometry="essential").match(*views, camera0=(2100, 2100, 1200, 900))


def test_the_pose_of_two_rendered_views_is_found(views):
    rendered = json.loads((views[0].parent / "poses.json").read_text())
    camera = Camera.from_K(rendered["K"])
    cam0, cam1 = (np.array(rendered["cam_from_world"][view.name]) for view in views)
    true = cam1 @ np.linalg.inv(cam0)
    geometry = matcher.load("nearest", geometry="essential").match(*views, camera0=camera).geometry
    found = geometry.cam1_from_cam0
    assert (geometry.kind, geometry.status) == ("essential", "ok")
    assert np.linalg.norm(found[:3, 3]) == pytest.approx(1)
    turned = np.degrees(np.arccos((np.trace(found[:3, :3].T @ true[:3, :3]) - 1) / 2))
    shifted = found[:3, 3] @ true[:3, 3] / np.linalg.norm(true[:3, 3])
    assert turned < 1
    assert np.degrees(np.arccos(shifted)) < 3


def test_options_reach_the_network(small_weights):
    options = {"match_threshold": 0.7, "early_exit": False, "pruning": False, "precision": torch.bfloat16}
    pipeline = matcher.load("hybrid", weights=small_weights, device="cpu", **options)
    assert isinstance(pipeline.matcher, AttentionMatcher) and pipeline.matcher.precision == "bfloat16"
    config = pipeline.matcher.model.config
    assert config == pipeline.config.matcher and pipeline.layers == 3
    policy = config.policy
    assert (policy.match_threshold, policy.early_exit, policy.pruning) == (0.7, False, False)
    default = matcher.load("hybrid", weights=small_weights, device="cpu", precision="FLOAT32").matcher.model
    state = pipeline.matcher.model.state_dict()
    for key, value in default.state_dict().items():
        torch.testing.assert_close(value, state[key].float(), rtol=1e-2, atol=1e-2)


def test_devices():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(UsageError, match="not one of"):
        resolve_device("gpu")
    for name in ["cuda:99", "mps:7", "meta"] + ([] if torch.cuda.is_available() else ["cuda"]):
        with pytest.raises(UsageError, match="not available"):
            resolve_device(name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_matches_of_the_processor(small_weights, pair):
    options = {"weights": small_weights, "precision": "float32", "max_keypoints": 500}
    results = [matcher.load("hybrid", device=device, **options).match(*pair) for device in ("cpu", "cuda")]
    on_cpu, on_gpu = ({tuple(row) for row in result.matches.indices.tolist()} for result in results)
    assert len(on_cpu ^ on_gpu) <= 0.01 * len(on_cpu)


def test_a_rejected_model_is_shown_nowhere(tmp_path):
    """Unrelated noise: what was estimated is no model, but the verdict says how improbable it is."""
    rng = np.random.default_rng(4)
    images = [cv2.GaussianBlur(rng.integers(0, 255, (300, 400), np.uint8), (0, 0), 1.5) for _ in range(2)]
    result = matcher.load("nearest", geometry="homography", ratio=1.0).match(*images)
    assert result.geometry.status == "low_inliers" and result.geometry.rejected.matrix is not None
    assert result.geometry.matrix is None and not result.inliers.any()
    assert result.to_dict()["geometry"]["matrix"] is None
    assert result.to_dict()["geometry"]["rejected_inliers"] == result.geometry.rejected.inliers.sum()
    assert result.verdict.word == "not" and "no match" in result.summary()
    assert "different places" in result.heading() and "repetitive" not in result.heading()
    repeated = replace(result.geometry.rejected, repetition=Repetition(0.2, 1.0))
    assert "repetitive" in replace(result, geometry=repeated).heading()
    with np.load(result.save(tmp_path / "r.npz")) as saved:
        assert saved["matrix"].size == 0 and not saved["inliers"].any()
        assert saved["geometry_status"] == "low_inliers"


@pytest.mark.parametrize("most", [0, 255])
def test_pictures_that_show_too_little_have_no_verdict(rng, most):
    image = rng.integers(0, most, (120, 160), np.uint8, endpoint=True)
    assert matcher.load("nearest", max_keypoints=8).match(image, image).verdict is None
