"""Labels of pairs: reprojection, visibility, assignment."""

from dataclasses import replace

import numpy as np
import pytest
from training_data import cached, flat_view, look, texture

from matcher.evaluate.synthetic import NOTHING, SceneRecipe, build_planes, place_camera, render
from matcher.match.steering import STEERABLE
from matcher.train.cached_pairs import (
    IGNORED,
    LABEL_STRIDE,
    CachedView,
    as_unrelated,
    collate,
    label_partners,
    plane_of,
    reproject,
    to_features,
)
from matcher.train.recipe import PairRecipe
from matcher.types import UNMATCHED

RECIPE = SceneRecipe(width=160, height=120)
EMPTY = np.zeros((120, 160), np.uint8)


def two_views(rng: np.random.Generator) -> tuple[list, list[tuple], list[CachedView]]:
    planes = build_planes([texture(rng) for _ in range(4)], RECIPE, rng)
    cameras = [place_camera(RECIPE, True, rng) for _ in range(2)]
    points = rng.uniform(0, (159, 119), (300, 2)).astype(np.float32)
    return planes, cameras, [cached(render(planes, c, EMPTY), points, rng) for c in cameras]


def away_from_edges(points: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) bool: the labels around a point are all the same, so that a stride of 4 cannot matter."""
    offsets = [(x, y) for x in (-4, 0, 4) for y in (-4, 0, 4)]
    around = np.stack([plane_of(points + offset, labels) for offset in offsets])
    return (around == around[0]).all(0)


@pytest.mark.parametrize("seed", range(3))
def test_reproject_agrees_with_rays_and_depths(seed):
    rng = np.random.default_rng([3, seed])
    planes, (camera0, camera1), (view0, view1) = two_views(rng)
    points = view0.keypoints
    label, point = look(planes, camera0, points.astype(float))
    K, R, t = camera1
    lifted = (point @ R.T + t) @ K.T
    expected = lifted[:, :2] / lifted[:, 2:]
    here = (label != NOTHING) & (lifted[:, 2] > 0) & ((expected > 0) & (expected < (159, 119))).all(1)
    seen, _ = look(planes, camera1, np.where(here[:, None], expected, 0))
    visible = here & (seen == label)
    found = reproject(points, view0, view1)
    sure = away_from_edges(points, view0.labels) & away_from_edges(
        np.where(here[:, None], expected, 80), view1.labels
    )
    sure &= here | (label == NOTHING)
    assert (np.isfinite(found[:, 0]) == visible)[sure].all()
    assert (sure & visible).sum() > 15
    assert (sure & here & ~visible).sum() + (sure & (label == NOTHING)).sum() > 0
    np.testing.assert_allclose(found[sure & visible], expected[sure & visible], atol=1e-5)


def test_reproject_there_and_back(rng):
    _, _, (view0, view1) = two_views(rng)
    transferred = reproject(view0.keypoints, view0, view1)
    visible = np.isfinite(transferred[:, 0])
    back = reproject(transferred[visible], view1, view0)
    returned = np.isfinite(back[:, 0])
    assert returned.mean() > 0.9  # the others sit on a label edge
    error = np.linalg.norm(back - view0.keypoints[visible], axis=1)[returned]
    assert np.median(error) < 1e-6


def test_plane_of_takes_the_nearest_label_and_nothing_outside():
    labels = np.array([[0, 1], [2, 3]], np.uint8)
    points = np.array([[0, 0], [1.9, 0], [2.1, 0], [7.4, 7.4], [-0.6, 0], [7.6, 0], [np.nan, 0]])
    assert plane_of(points, labels).tolist() == [0, 0, 1, 3, NOTHING, NOTHING, NOTHING]


def test_labels_read_at_a_stride_are_those_of_the_pixels(rng):
    planes = build_planes([texture(rng) for _ in range(4)], RECIPE, rng)
    view = render(planes, place_camera(RECIPE, True, rng), EMPTY)
    points = rng.uniform(0, (159, 119), (2000, 2))
    pixels = np.rint(points).astype(int)
    wrong = (
        plane_of(points, view.labels[::LABEL_STRIDE, ::LABEL_STRIDE])
        != view.labels[pixels[:, 1], pixels[:, 0]]
    )
    assert wrong.mean() < 0.03


def naive_partners(
    view0: CachedView, view1: CachedView, H: np.ndarray, recipe: PairRecipe
) -> tuple[list, list]:
    """The definition, point by point; H maps view 0 to view 1, and what falls inside is visible."""

    def move(point: np.ndarray, matrix: np.ndarray) -> np.ndarray | None:
        x, y, w = matrix @ [*point, 1]
        inside = -0.5 <= x / w <= 159.5 and -0.5 <= y / w <= 119.5
        return np.array([x / w, y / w]) if inside else None

    def distance(corresponding: np.ndarray | None, other: np.ndarray) -> float:
        return np.inf if corresponding is None else float(np.linalg.norm(corresponding - other))

    points0, points1 = view0.keypoints.astype(float), view1.keypoints.astype(float)
    corresponding0 = [move(p, H) for p in points0]
    corresponding1 = [move(p, np.linalg.inv(H)) for p in points1]
    transferred = np.array([[distance(m, q) for q in points1] for m in corresponding0])
    back = np.array([[distance(m, p) for m in corresponding1] for p in points0])
    roots = [
        np.sqrt(v.descriptors / v.descriptors.sum(1, keepdims=True, dtype=float)) for v in (view0, view1)
    ]
    cost = (transferred + back) / 2
    error = cost.copy()
    cost[cost >= recipe.match_distance] = np.inf
    cost += 2 * (1 - roots[0] @ roots[1].T)
    partner0, partner1 = [], []
    for i, row in enumerate(cost):
        j = int(row.argmin())
        mutual = np.isfinite(row[j]) and int(cost[:, j].argmin()) == i
        lonely = error[i].min() > recipe.unmatched_distance
        partner0.append(j if mutual else UNMATCHED if lonely else IGNORED)
    for j in range(len(points1)):
        lonely = error[:, j].min() > recipe.unmatched_distance
        partner1.append(partner0.index(j) if j in partner0 else UNMATCHED if lonely else IGNORED)
    return partner0, partner1


@pytest.mark.parametrize("seed", range(5))
def test_true_assignment_is_the_naive_loop(seed):
    rng = np.random.default_rng([5, seed])
    H = np.array([[0.9, -0.2, 15], [0.25, 1.05, -6], [4e-4, 2e-4, 1]])
    points0 = rng.uniform(0, (159, 119), (60, 2))
    lifted = np.column_stack([points0[:40], np.ones(40)]) @ H.T
    near = lifted[:, :2] / lifted[:, 2:] + rng.normal(0, 2.0, (40, 2))
    inside = ((near > 0) & (near < (159, 119))).all(1)
    points1 = np.concatenate([near[inside], rng.uniform(0, (159, 119), (15, 2))])
    view0, view1 = flat_view(points0, np.eye(3), rng), flat_view(points1, H, rng)
    partners = label_partners(view0, view1, PairRecipe())
    partner0, partner1 = naive_partners(view0, view1, H, PairRecipe())
    assert partners.partner0.tolist() == partner0
    assert partners.partner1.tolist() == partner1
    assert {UNMATCHED, IGNORED} <= set(partner0)
    assert sum(p >= 0 for p in partner0) > 10


def test_matched_ignored_unmatched_by_distance(rng):
    points0 = np.array([[20.0, 20], [60, 20], [100, 20], [20, 80]])
    points1 = points0 + np.array([[2, 0], [3.5, 0], [4.5, 0], [0, 0]])
    partners = label_partners(
        flat_view(points0, np.eye(3), rng), flat_view(points1, np.eye(3), rng), PairRecipe()
    )
    assert partners.partner0.tolist() == [0, IGNORED, UNMATCHED, 3]
    assert partners.partner1.tolist() == [0, IGNORED, UNMATCHED, 3]


def test_points_on_one_place_are_told_apart_by_descriptor(rng):
    points = np.array([[50.0, 50], [50, 50]])
    view0 = flat_view(points, np.eye(3), rng)
    view1 = replace(view0, descriptors=view0.descriptors[::-1])
    assert label_partners(view0, view1, PairRecipe()).partner0.tolist() == [1, 0]


def test_unrelated_views_have_nothing_in_common(rng):
    points = rng.uniform(0, (159, 119), (30, 2))
    view = flat_view(points, np.eye(3), rng)
    partners = label_partners(view, as_unrelated(view), PairRecipe())
    assert (partners.partner0 == UNMATCHED).all()
    assert (partners.partner1 == UNMATCHED).all()


def test_views_without_points(rng):
    some, none = (flat_view(np.zeros((n, 2)), np.eye(3), rng) for n in (3, 0))
    partners = label_partners(some, none, PairRecipe())
    assert partners.partner0.tolist() == [UNMATCHED] * 3
    assert partners.partner1.tolist() == []


def test_collate_keeps_pairs_and_labels_together(rng):
    points = rng.uniform(0, (150, 110), (8, 2))
    view = flat_view(points, np.eye(3), rng)
    batch = collate([(view, view), (view, as_unrelated(view))], PairRecipe(), rng)
    assert batch.features0.keypoints.shape == (2, 8, 2)
    assert batch.partner0[1].eq(UNMATCHED).all()
    matched = batch.partner0[0] >= 0
    assert matched.sum() >= 6
    assert to_features(view).descriptors.norm(dim=1).allclose(batch.features0.descriptors[0].norm(dim=1))


def test_turned_views_whose_descriptors_turn_are_brought_together(rng):
    view = replace(flat_view(rng.uniform(0, (150, 110), (8, 2)), np.eye(3), rng), kind=STEERABLE)
    sideways = to_features(view, orientation=6)
    assert not sideways.descriptors.equal(to_features(view).descriptors)
    pairs = [(view, view)] * 12
    batch = collate(pairs, PairRecipe(turned_share=1.0), rng)
    assert len(batch.features0.matched_orientation.unique()) > 1
    assert batch.features1.matched_orientation.equal(batch.features0.matched_orientation)
    assert batch.features1.descriptors.equal(batch.features0.descriptors)
