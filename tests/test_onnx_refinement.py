"""The ONNX graph of refinement moves matches as `matcher.refine` does."""

from itertools import pairwise

import cv2
import numpy as np
import onnx
import pytest
from real_pairs import fifty_pairs
from rendered_texture import AFFINE, Texture, move
from test_refine import matches_of, shaken
from test_refine_image_pair import CURVE, image

import matcher
from matcher.config import RefineConfig
from matcher.onnx.builder import Builder
from matcher.onnx.gradients import gradient_image as write_gradients
from matcher.onnx.matrices import inverse_of_6
from matcher.onnx.pyramid import PyramidValues
from matcher.onnx.refinement import refinement_model
from matcher.onnx.runtime import Model
from matcher.refine import Grid, Pyramid, refine_image_pair
from matcher.types import REFINEMENTS, Image, Matches

CONFIG = RefineConfig()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(refinement_model(CONFIG))


@pytest.fixture(scope="module")
def views_of_a_texture() -> tuple[Image, Image]:
    texture = Texture()
    return image(texture.image()), image(texture.image(AFFINE))


def scattered(count: int) -> np.ndarray:
    """Not on a grid, where several neighbours are equally near and either may be taken."""
    return np.random.default_rng(2).uniform(25, 170, (count, 2))


def given(images: tuple[Image, Image], matches: Matches) -> dict[str, np.ndarray]:
    inputs = {"points0": matches.points0, "points1": matches.points1}
    for side, each in enumerate(images):
        whole = each.grey() if each.stored is None else each.stored
        for name, pixels in ((f"image{side}", whole), (f"resized{side}", each.grey())):
            inputs[name] = pixels[None, None].astype(np.float32) / np.float32(255)
    return inputs


def compared(model: Model, images: tuple[Image, Image], matches: Matches) -> tuple[np.ndarray, np.ndarray]:
    """(K,) whether both refine a match or neither does, and (K,) how far apart they leave it, in pixels."""
    theirs, ours = model(**given(images, matches)), refine_image_pair(*images, matches, CONFIG)
    accepted, same = ours.refinement.accepted, (ours.refinement.status == 0) == (theirs["status"] == 0)
    apart = np.abs(ours.points1 - theirs["refined1"]).max(axis=1, initial=0)
    both = accepted & (theirs["status"] == 0)
    if both.any():
        assert np.percentile(np.abs(ours.refinement.correlations - theirs["correlations"])[both], 98) < 0.002
        sizes = [np.trace(each[both], axis1=1, axis2=2) for each in (ours.covariances, theirs["covariances"])]
        assert np.percentile(np.abs(np.log(sizes[0] / sizes[1])), 95) < 0.02
    left = theirs["status"] != 0
    np.testing.assert_allclose(theirs["refined1"][left], matches.points1[left], atol=1e-4)
    return same, apart


def test_the_file_is_valid_and_says_what_its_statuses_mean():
    made = onnx.load_from_string(refinement_model(CONFIG))
    onnx.checker.check_model(made, full_check=True)
    said = {each.key: each.value for each in made.metadata_props}
    assert said["status"].split() == list(REFINEMENTS)


@pytest.mark.parametrize("pixels", [None, 200])
def test_matches_of_photos_are_refined_alike(views, model, pixels):
    options = {"max_keypoints": 400, "second_pass": False, "engine": "onnx"}
    pipeline = matcher.load("hybrid-learned", **options, **({"resize": pixels} if pixels else {}))
    images = tuple(pipeline.read(view) for view in views)
    matches = pipeline.match_features(*(pipeline.extract(each) for each in images))
    assert (images[0].stored.shape == images[0].pixels.shape[:2]) is (pixels is None)
    same, apart = compared(model, images, matches)
    assert len(matches) > 60
    assert same.mean() >= 0.99 and (apart < 0.01).mean() >= 0.98


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 40, 300])
def test_any_number_of_matches_is_refined(views_of_a_texture, model, count):
    points0 = scattered(count)
    same, apart = compared(model, views_of_a_texture, matches_of(points0, shaken(move(points0))))
    assert same.shape == apart.shape == (count,)
    assert same.all() and (apart < 0.01).all()


def test_where_grey_values_do_not_correlate_gradients_decide(views_of_a_texture, model):
    images = views_of_a_texture[0], image(CURVE[views_of_a_texture[1].pixels])
    points0 = scattered(300)
    matches = matches_of(points0, shaken(move(points0)))
    status = model(**given(images, matches))["status"]
    assert np.mean(status == 0) > 0.4
    same, apart = compared(model, images, matches)
    assert same.mean() > 0.99 and np.mean(apart < 0.01) > 0.98


def test_points_beyond_the_images_stay(views_of_a_texture, model):
    points0 = scattered(60)
    points0[:3] = [[-500, 20], [1e7, 1e7], [199, 450]]
    found = model(**given(views_of_a_texture, matches_of(points0, move(points0))))
    assert (found["status"][:3] != 0).all() and np.mean(found["status"][3:] == 0) > 0.8
    assert np.isfinite(found["covariances"][3:]).all()


@pytest.mark.parametrize("shape", [(200, 200), (97, 61), (1, 5)])
def test_windows_are_sampled_at_any_level(shape, rng):
    grid, count = Grid.of(9), 50
    pixels = rng.integers(0, 256, shape, dtype=np.uint8)
    pyramid = Pyramid(pixels)
    maps = np.eye(2) * np.exp2(rng.uniform(0, 3, (count, 1, 1))) + rng.normal(0, 0.1, (count, 2, 2))
    affine = np.concatenate([rng.uniform(-9, 209, (count, 2, 1)), maps], axis=2).astype(np.float32)
    level = pyramid.level_of(affine[:, :, 1:])
    assert level.max() == {200: 3, 97: 2, 1: 0}[shape[0]]
    graph = Builder("windows")
    grey = graph.input("image", "float32", 1, 1, "H", "W")
    inputs = graph.input("affine", "float32", "K", 2, 3), graph.input("level", "int64", "K")
    values = PyramidValues.of(graph, grey, graph.ReduceMax(inputs[1], keepdims=0))
    graph.output("values", values.sample(*inputs, grid.outer), "float32", "K", "n")
    found = Model(graph.encode({}))(image=pixels[None, None].astype(np.float32), affine=affine, level=level)
    np.testing.assert_allclose(found["values"], pyramid.sample(affine, level, grid.outer), atol=0.05)


@pytest.mark.parametrize("shape", [(120, 90), (40, 300), (1, 7)])
def test_gradients_are_those_of_the_package(shape, rng):
    pixels = cv2.GaussianBlur(rng.integers(0, 256, shape).astype(np.uint8), (0, 0), 1.5)
    graph = Builder("gradients")
    made = write_gradients(graph, graph.input("image", "float32", 1, 1, "H", "W"), 1.0)
    graph.output("made", made, "float32", 1, 1, "H", "W")
    given_image = pixels[None, None].astype(np.float32) / np.float32(255)
    found = np.rint(Model(graph.encode({}))(image=given_image)["made"][0, 0] * 255)
    wanted = matcher.images.gradient_image(image(pixels), 1.0).pixels
    assert wanted.std() > 5
    assert np.abs(found - wanted).max() <= 1 and np.mean(found == wanted) > 0.99  # of whole numbers


def test_matrices_are_inverted(rng):
    roots = rng.normal(size=(20, 6, 9)) * np.array([30, 3, 3, 30, 3, 3])[:, None]
    matrices = (roots @ roots.transpose(0, 2, 1)).astype(np.float32)
    graph = Builder("inverse")
    graph.output("inverse", inverse_of_6(graph, graph.input("matrices", "float32", "K", 6, 6)), "float32")
    found = Model(graph.encode({}))(matrices=matrices)["inverse"]
    np.testing.assert_allclose(found @ matrices, np.broadcast_to(np.eye(6), found.shape), atol=2e-3)


@pytest.mark.slow
def test_fifty_real_pairs_are_refined_alike(model, capsys):
    pipeline = matcher.load("hybrid-learned", engine="onnx", max_keypoints=1024, second_pass=False)
    same, apart = [], []
    for photos in fifty_pairs():
        images = [pipeline.read(str(photo)) for photo in photos]
        features = [pipeline.extract(each) for each in images]
        for sides in pairwise(zip(images, features, strict=True)):
            pair, described = zip(*sides, strict=True)
            alike = compared(model, pair, pipeline.match_features(*described))
            same.append(alike[0])
            apart.append(alike[1])
    same, apart = np.concatenate(same), np.concatenate(apart)
    with capsys.disabled():
        print(
            f"\n{len(same)} matches: {np.mean(same):.3%} refined by both or by neither,"
            f" {np.mean(apart < 0.01):.3%} within .01 px"
        )
    assert len(same) > 10000
    assert np.mean(same) >= 0.999 and np.mean(apart < 0.01) >= 0.999
