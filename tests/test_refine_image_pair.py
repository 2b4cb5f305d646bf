"""Refinement of two images whose grey values correlate, do not, or have nothing to do with each other."""

from dataclasses import replace

import numpy as np
import pytest
from rendered_texture import AFFINE, Texture, move
from test_refine import errors, grid, matches_of, shaken

import matcher
from matcher.config import RefineConfig
from matcher.images import gradient_image
from matcher.refine import ImagePyramid, refine_image_pair, refine_matches

CURVE = np.interp(np.arange(256), np.arange(0, 256, 51), [200, 30, 200, 30, 200, 30])  # of another sensor


def image(values):
    pixels = np.rint(np.clip(values, 0, 255)).astype(np.uint8)
    return matcher.Image(pixels, pixels.shape[::-1])


@pytest.fixture(scope="module")
def views():
    texture = Texture()
    return image(texture.image()), image(texture.image(AFFINE))


@pytest.mark.parametrize("curve", [CURVE, np.arange(256)[::-1]], ids=["another sensor", "negative"])
def test_where_grey_values_do_not_correlate_gradients_decide(views, curve):
    image0, image1 = views[0], image(curve[views[1].pixels])
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    on_grey = refine_matches(ImagePyramid.of(image0), ImagePyramid.of(image1), matches, RefineConfig())
    found = refine_image_pair(image0, image1, matches, RefineConfig())
    assert on_grey.refinement.accepted.mean() < 0.3
    moved, left = found.refinement.accepted, ~found.refinement.accepted
    assert moved.mean() > 0.4
    assert np.median(errors(found)[moved]) < 0.5 * np.median(errors(on_grey)[moved])
    assert np.array_equal(found.points1[left], matches.points1[left])
    assert (found.refinement.correlations[moved] >= RefineConfig().min_correlation).all()


def test_images_that_are_alike_are_refined_on_grey_values_alone(views):
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    on_grey = refine_matches(*map(ImagePyramid.of, views), matches, RefineConfig())
    found = refine_image_pair(*views, matches, RefineConfig())
    assert np.array_equal(found.points1, on_grey.points1)


def test_gradients_are_not_tried_where_enough_matches_are_refined_on_grey_values(views):
    """They could move the matches on the left half here."""
    mixed = views[1].pixels.copy()
    mixed[:, :90] = CURVE[mixed[:, :90]]
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    sides = views[0], image(mixed)
    on_grey = refine_matches(*map(ImagePyramid.of, sides), matches, RefineConfig())
    assert 0.3 < on_grey.refinement.accepted.mean() < 0.8
    assert np.array_equal(refine_image_pair(*sides, matches, RefineConfig()).points1, on_grey.points1)
    edges = (ImagePyramid.of(gradient_image(side, 1.0)) for side in sides)
    on_edges = refine_matches(*edges, on_grey, RefineConfig()).refinement.accepted
    assert (on_edges & ~on_grey.refinement.accepted).any()


def test_images_of_different_things_leave_matches_where_they_were(views):
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    found = refine_image_pair(views[0], image(Texture(seed=5).image()), matches, RefineConfig())
    assert found.refinement.accepted.mean() < 0.2


def test_no_match_is_an_empty_answer(views):
    found = refine_image_pair(*views, matches_of(np.zeros((0, 2)), np.zeros((0, 2))), RefineConfig())
    assert len(found) == 0 and len(found.refinement.status) == 0


def test_no_point_is_moved_out_of_its_mask(views):
    points0 = grid()
    matches = matches_of(points0, shaken(move(points0)))
    free = refine_image_pair(*views, matches, RefineConfig())
    mask = np.ones(views[1].pixels.shape, dtype=bool)
    before, after = matches.points1[:, 0], free.points1[:, 0]
    edge = next(x for x in range(60, 200) if ((before < x + 0.4) & (after > x + 0.6)).any())
    mask[:, edge + 1 :] = False
    found = refine_image_pair(views[0], replace(views[1], mask=mask), matches, RefineConfig())
    accepted = found.refinement.accepted
    assert accepted.sum() > 20 and (found.points1[accepted, 0] <= edge + 0.5).all()
    assert np.array_equal(found.points1[~accepted], matches.points1[~accepted])
