import numpy as np
import pytest

from matcher.evaluate.measure import (
    corner_error,
    distances,
    ground_truth_matches,
    pose_error,
    recall,
    repeatability,
    reprojection_errors,
)
from matcher.evaluate.run import auc, estimate, mean


def trapezoids(errors, threshold):
    """The published definition, written as it is usually computed."""
    ordered = np.concatenate([[0.0], np.sort(errors)])
    share = np.arange(len(ordered)) / len(errors)
    last = np.searchsorted(ordered, threshold)
    x = np.concatenate([ordered[:last], [threshold]])
    y = np.concatenate([share[:last], [share[last - 1]]])
    return np.trapezoid(y, x) / threshold


def test_auc_is_the_published_one(rng):
    errors = rng.gamma(1.0, 4.0, 57)
    errors[:5] = np.inf
    for threshold in (1, 5, 30):
        assert auc(errors, threshold) == pytest.approx(trapezoids(errors, threshold), abs=1e-12)
    assert np.isnan(auc(np.zeros(0), 5))
    many = np.stack([np.zeros(4), np.full(4, np.inf), np.array([1.0, 2.0, np.inf, 9.0])])
    assert np.allclose(auc(many, 5), [1, 0, trapezoids(many[2], 5)])


def test_corner_error_measures_a_shift_in_resized_pixels():
    shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
    assert corner_error(shift, np.eye(3), (640, 480)) == pytest.approx(5)
    assert corner_error(2 * shift, np.eye(3), (640, 480), scale1=0.5) == pytest.approx(2.5)
    behind = np.array([[1, 0, 0], [0, 1, 0], [-0.01, 0, 1.0]])
    assert corner_error(None, np.eye(3), (640, 480)) == corner_error(behind, np.eye(3), (640, 480)) == np.inf


def test_pose_error_in_degrees_without_the_sign_of_the_translation():
    truth, found, angle = np.eye(4), np.eye(4), np.deg2rad(7)
    truth[:3, 3] = [2, 0, 0]
    found[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    found[:3, 3] = [-np.cos(2 * angle), np.sin(2 * angle), 0]
    assert pose_error(found, truth) == pytest.approx((7, 14))
    assert pose_error(truth, truth) == pytest.approx((0, 0), abs=1e-5)
    assert pose_error(None, truth) == (np.inf, np.inf)


def test_reprojection_is_the_mean_of_both_directions():
    H = np.diag([2.0, 2.0, 1.0])
    points0, points1 = np.array([[10.0, 10.0]]), np.array([[24.0, 20.0]])
    assert reprojection_errors(points0, points1, H) == pytest.approx([(4 + 2) / 2])
    assert reprojection_errors(points0, points1, H, 1.0, 0.5) == pytest.approx([(2 + 2) / 2])
    assert reprojection_errors(points1, points0, np.linalg.inv(H)) == pytest.approx([3])


def test_precision_and_recall_of_a_small_case():
    keypoints0 = np.array([[0.0, 0.0], [10.0, 0.0], [20.0, 0.0], [30.0, 0.0]])
    keypoints1 = np.array([[0.5, 0.0], [12.0, 0.0], [90.0, 0.0], [30.2, 0.0]])
    errors = distances(keypoints0[:, None], keypoints1)
    possible = ground_truth_matches(errors, 3)
    assert possible.tolist() == [[0, 0], [1, 1], [3, 3]]
    assert ground_truth_matches(errors, 1).tolist() == [[0, 0], [3, 3]]
    indices = np.array([[0, 0], [1, 2], [2, 1]])  # one right, one wrong, one of an impossible keypoint
    found = errors[indices[:, 0], indices[:, 1]]
    assert recall(indices, found, possible, 3) == pytest.approx(1 / 3)
    assert np.isnan(recall(indices, found, possible[:0], 3))
    assert ground_truth_matches(np.zeros((0, 3)), 3).shape == (0, 2)
    twins = distances(keypoints0[[0, 0, 3], None], keypoints1[[0, 3]])  # two orientations of one position
    for taken in (0, 1):
        match = np.array([[taken, 0]])
        assert recall(match, twins[taken, :1], ground_truth_matches(twins, 3), 3) == 0.5


def test_repeatability_counts_both_pictures():
    errors = np.array([[1.0, 9, 9], [9, 2.5, 9], [9, 9, 3.5], [9, 9, 9]])
    assert repeatability(errors, np.ones(4, bool), np.ones(3, bool), 3) == pytest.approx(4 / 7)
    hidden = np.array([True, False, False, False]), np.array([True, False, False])
    assert repeatability(errors, *hidden, 3) == 1
    assert np.isnan(repeatability(errors, np.zeros(4, bool), np.zeros(3, bool), 3))


def test_intervals_cover_and_those_of_paired_differences_are_narrow(rng):
    covered = 0
    for trial in range(50):
        values = rng.normal(2, 1, (1, 60))
        found = estimate(values, mean, seed=trial)
        covered += found.low < 2 < found.high
    assert 42 <= covered <= 50 and np.isnan(estimate(values[:, :1], mean).low)
    assert estimate(values, mean, seed=7) == estimate(values, mean, seed=7)
    better = values + 0.1 + rng.normal(0, 0.02, (1, 60))
    found, alone = estimate(better, mean, minus=values), estimate(better, mean)
    assert found.low > 0.09 and found.high < 0.11
    assert alone.high - alone.low > 5 * (found.high - found.low)
    assert mean(np.array([1.0, np.nan, 3.0])) == 2 and np.isnan(mean(np.array([np.nan])))
