"""Local consensus: exact on affine motion, deaf to outliers, symmetric, silent without support."""

import pytest
import torch

from matcher.config import AssignmentConfig
from matcher.match.consensus import Consensus, fit_local_maps, soft_matches
from matcher.match.nearest import credible_matches
from matcher.match.sinkhorn import assign, mutual_best

SLOPE = torch.tensor([[0.9, 0.3], [-0.2, 1.1]])
SHIFT = torch.tensor([0.1, -0.05])


def mutual_matches(log_scores: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    found = credible_matches(*(x[0].numpy() for x in mutual_best(log_scores[None])), threshold)
    return torch.from_numpy(found[0]), torch.from_numpy(found[1])


def moved_points(count: int = 200, outliers: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Points (1, N, 2), where an affine map takes them, what is observed, and which of it is wrong."""
    rng = torch.Generator().manual_seed(seed)
    points = torch.rand(1, count, 2, generator=rng) * 2 - 1
    truth = points @ SLOPE.t() + SHIFT
    wrong = torch.rand(1, count, generator=rng) < outliers
    noise = torch.rand(1, count, 2, generator=rng) * 2 - 1
    return points, truth, torch.where(wrong.unsqueeze(2), noise, truth), wrong


def test_an_affine_motion_is_predicted_exactly() -> None:
    points, truth, observed, _ = moved_points()
    fit = fit_local_maps(points, observed, torch.ones(1, 200))
    assert (fit.position - truth).norm(
        dim=2
    ).max() < 1e-2  # the ridge tells where points lie outside the others
    assert (fit.position - truth).norm(dim=2).median() < 5e-4
    assert fit.spread.max() < 2e-3
    assert fit.support.min() > 1


def test_a_third_of_wrong_matches_does_not_move_the_prediction() -> None:
    points, truth, observed, wrong = moved_points(400, outliers=0.33)
    fit = fit_local_maps(points, observed, torch.ones(1, 400))
    error = (fit.position - truth).norm(dim=2)
    assert error.median() < 1e-3
    assert error.quantile(0.8) < 0.02
    assert error[wrong].quantile(0.8) < 0.02  # a wrong match has no say in its own prediction


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_matches_give_finite_answers_with_little_support(count: int) -> None:
    points, _, observed, _ = moved_points(10)
    confidence = torch.zeros(1, 10)
    confidence[0, :count] = 1
    fit = fit_local_maps(points, observed, confidence)
    assert all(x.isfinite().all() for x in fit)
    assert fit.support.max() <= count


def test_links_are_the_mutual_best_from_both_sides() -> None:
    scores = torch.randn(1, 9, 7, generator=torch.Generator().manual_seed(2)).log_softmax(2)
    links0, links1 = soft_matches(scores)
    indices, probabilities = mutual_matches(scores[0], 0.05)
    assert len(indices) > 2
    expected0, expected1 = torch.zeros(9), torch.zeros(7)
    expected0[indices[:, 0]], expected1[indices[:, 1]] = probabilities, probabilities
    torch.testing.assert_close(links0.confidence[0], expected0)
    torch.testing.assert_close(links1.confidence[0], expected1)
    assert links0.partner[0, indices[:, 0]].equal(indices[:, 1])
    assert links1.partner[0, indices[:, 1]].equal(indices[:, 0])


def ambiguous_scores(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores (1, N+1, N+1) whose diagonal is right; a third of the points prefer each other's partner."""
    points, truth, _, _ = moved_points(count, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, count + 1, count + 1, generator=rng)
    scores[0, :-1, :-1] += torch.eye(count) * 9
    scores[0, -1, -1] = 0
    for row in range(0, count, 6):
        scores[0, row, row + 1] = scores[0, row, row] + 0.5
        scores[0, row + 1, row] = scores[0, row + 1, row + 1] + 0.5
    return scores, points, truth


def test_ambiguous_points_are_decided_by_their_neighbours() -> None:
    scores, points, truth = ambiguous_scores(90, 5)
    consensus = Consensus()

    def right(s: torch.Tensor) -> int:
        indices, _ = mutual_matches(assign(s, AssignmentConfig()).log_scores[0], 0.2)
        return int((indices[:, 0] == indices[:, 1]).sum())

    with torch.no_grad():
        heard = consensus(scores, points, truth, soft_matches(assign(scores, AssignmentConfig()).log_scores))
    assert right(scores) < 65
    assert right(heard) > 85


def test_swapping_the_images_transposes_the_correction() -> None:
    scores, points, truth = ambiguous_scores(60, 6)
    consensus, assigned = Consensus(), assign(scores, AssignmentConfig()).log_scores
    with torch.no_grad():
        torch.nn.init.normal_(consensus.out.weight, std=0.3)
        there = consensus(scores, points, truth, soft_matches(assigned))
        back = consensus(scores.transpose(1, 2), truth, points, soft_matches(assigned.transpose(1, 2)))
    torch.testing.assert_close(there.transpose(1, 2), back, atol=2e-3, rtol=1e-3)


def test_without_matches_the_neighbours_say_nothing_about_places() -> None:
    points, truth, _, _ = moved_points(20)
    scores = torch.randn(1, 21, 21, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        heard = Consensus()(scores, points, truth, soft_matches(torch.full((1, 20, 20), -20.0)))
    torch.testing.assert_close(heard, scores, atol=1e-4, rtol=0)
