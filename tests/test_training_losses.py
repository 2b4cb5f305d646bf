"""The loss and its gradient against converged and fully unrolled Sinkhorn."""

import pytest
import torch
from torch import Tensor

from matcher.benchmark.timing import naive_sinkhorn
from matcher.match.sinkhorn import log_assignment, sinkhorn
from matcher.train.cached_pairs import IGNORED
from matcher.train.losses import (
    assignment_loss,
    confidence_loss,
    correspondence_loss,
    decisions,
    match_probability_loss,
    matchability_loss,
    mean_similarity_loss,
)
from matcher.train.recipe import OptimiserRecipe
from matcher.types import UNMATCHED

RECIPE = OptimiserRecipe()


def random_scores(rows: int = 9, columns: int = 12, spread: float = 3.0) -> Tensor:
    scores = spread * torch.randn(2, rows + 1, columns + 1, generator=torch.Generator().manual_seed(4))
    scores[:, -1, -1] = 0
    return scores


def unrolled(scores: Tensor, iterations: int) -> Tensor:
    """The log plan of plain Sinkhorn, every iteration differentiated."""
    u, v = naive_sinkhorn(scores, iterations)
    return scores + u.unsqueeze(2) + v.unsqueeze(1)


def test_log_assignment_is_the_converged_sinkhorn():
    scores = random_scores()
    found = sinkhorn(scores, max_iterations=500, tolerance=1e-6)
    expected = scores + found.u.unsqueeze(2) + found.v.unsqueeze(1)
    torch.testing.assert_close(log_assignment(scores, 300, 3), expected, atol=1e-4, rtol=0)
    mass = log_assignment(scores, 300, 3).exp()
    torch.testing.assert_close(mass[:, :-1].sum(2), torch.ones(2, 9), atol=1e-4, rtol=0)
    torch.testing.assert_close(mass[:, :, :-1].sum(1), torch.ones(2, 12), atol=1e-4, rtol=0)


def test_log_assignment_with_the_recipes_iterations_is_near():
    scores = random_scores()
    near = log_assignment(scores, RECIPE.sinkhorn_iterations, RECIPE.unrolled_iterations)
    change = near.exp() - log_assignment(scores, 500, 3).exp()
    assert change[:, :-1, :-1].abs().max() < 0.06  # of a probability


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_log_assignment_stays_finite_for_large_scores(size):
    scores = (size * torch.randn(2, 20, 20, generator=torch.Generator().manual_seed(1))).requires_grad_()
    log_p = log_assignment(scores, 10, 3)
    log_p[:, :5, :5].mean().backward()
    assert log_p.isfinite().all()
    assert scores.grad.isfinite().all()


def gradient(scores: Tensor, function) -> Tensor:
    scores = scores.clone().requires_grad_()
    log_p = function(scores)
    (-log_p[:, 0, 1] - log_p[:, 3, -1] - log_p[:, -1, 5]).sum().backward()
    return scores.grad


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_gradient_of_long_unrolling_is_finite_differences():
    """The reference itself, in float64."""
    scores = random_scores().double()
    expected = gradient(scores, lambda s: unrolled(s, 400))
    for row, column in ((0, 1), (2, 2), (3, 12), (9, 5)):
        step = torch.zeros_like(scores)
        step[0, row, column] = 1e-5

        def value(s: Tensor) -> Tensor:
            log_p = unrolled(s, 400)
            return (-log_p[:, 0, 1] - log_p[:, 3, -1] - log_p[:, -1, 5]).sum()

        slope = (value(scores + step) - value(scores - step)) / 2e-5
        assert float(slope) == pytest.approx(float(expected[0, row, column]), abs=1e-6)


def test_truncated_gradient_approaches_the_exact_one():
    """Relative error in the 2-norm: within 15 % with the recipe's iterations, falling with more unrolled."""
    scores = random_scores(spread=2.0)
    exact = gradient(scores.double(), lambda s: unrolled(s, 400)).float()
    errors = [
        relative(gradient(scores, lambda s, n=n: log_assignment(s, 300, n)), exact) for n in (1, 3, 10, 40)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3
    recipe = lambda s: log_assignment(s, RECIPE.sinkhorn_iterations, RECIPE.unrolled_iterations)  # noqa: E731
    assert relative(gradient(scores, recipe), exact) < 0.15


def test_loss_is_the_mean_log_likelihood_of_the_ground_truth():
    scores = random_scores(3, 4)[:1]
    partner0 = torch.tensor([[2, UNMATCHED, IGNORED]])
    partner1 = torch.tensor([[UNMATCHED, IGNORED, 0, UNMATCHED]])
    log_p = log_assignment(scores, 200, 3)[0]
    expected = -0.5 * (log_p[0, 2] + 0.5 * (log_p[1, -1] + (log_p[-1, 0] + log_p[-1, 3]) / 2))
    torch.testing.assert_close(assignment_loss(log_p[None], partner0, partner1), expected)


def test_ignored_points_have_no_say():
    scores = random_scores(3, 3)[:1]
    ignored = torch.full((1, 3), IGNORED)
    assert assignment_loss(log_assignment(scores, 10, 2), ignored, ignored) == 0
    assert matchability_loss(scores, ignored, ignored) == 0


def test_loss_falls_on_a_toy_and_finds_the_ground_truth():
    partner0 = torch.tensor([[1, 0, UNMATCHED, 3]])
    partner1 = torch.tensor([[1, 0, UNMATCHED, 3]])
    scores = torch.zeros(1, 5, 5, requires_grad=True)
    optimiser = torch.optim.Adam([scores], lr=0.2)
    losses = []
    for _ in range(80):
        loss = assignment_loss(log_assignment(scores, 10, 3), partner0, partner1)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.05 * losses[0]
    assert decisions(log_assignment(scores.detach(), 50, 0)).tolist() == [
        [1, 0, UNMATCHED, 3, 1, 0, UNMATCHED, 3]
    ]


def test_decisions_are_the_most_probable_partners():
    scores = random_scores()
    log_p = log_assignment(scores, 50, 0)
    found = decisions(log_p)
    assert found.shape == (2, 9 + 12)
    rows, columns = log_p[:, :-1].argmax(2), log_p[:, :, :-1].argmax(1)
    expected = torch.cat([rows.where(rows < 12, UNMATCHED), columns.where(columns < 9, UNMATCHED)], dim=1)
    assert found.equal(expected)
    assert (found == UNMATCHED).any()
    assert (found >= 0).any()


def test_confidence_loss_rewards_being_sure_of_the_final_decision():
    here = torch.tensor([[1, 2, 3, UNMATCHED, 4]])
    final = torch.tensor([[1, 2, 0, UNMATCHED, UNMATCHED]])
    right = confidence_loss(torch.tensor([[9.0, 9, -9, -9, 9]]), here, final)
    wrong = confidence_loss(torch.tensor([[-9.0, 9, -9, 9, -9]]), here, final)
    assert right < 1e-3  # whatever is said of the points without a partner at the end
    assert wrong > 2


def test_match_probability_loss_rewards_foreseeing_who_is_matched():
    final = torch.tensor([[1, UNMATCHED, 0]])
    assert match_probability_loss(torch.tensor([[9.0, -9, 9]]), final) < 1e-3
    assert match_probability_loss(torch.tensor([[9.0, 9, 9]]), final) > 2


def test_matchability_loss_is_the_cross_entropy_of_known_points():
    scores = torch.zeros(1, 3, 4)
    scores[0, 0, -1], scores[0, 1, -1], scores[0, -1, :3] = -2.0, 5.0, torch.tensor([1.0, 7.0, -3.0])
    found = matchability_loss(scores, torch.tensor([[1, IGNORED]]), torch.tensor([[UNMATCHED, IGNORED, 0]]))
    softplus = torch.nn.functional.softplus
    expected = softplus(torch.tensor(-2.0)) + softplus(torch.tensor([-1.0, -3.0])).mean()
    torch.testing.assert_close(found, expected)


def test_mean_similarity_loss_sees_what_assignments_do_not():
    scores = random_scores(4, 4)[:1]
    raised = scores.clone()
    raised[:, 2] += 9.0  # all scores of a point, its dustbin's included
    before, after = (log_assignment(each, 200, 2) for each in (scores, raised))
    torch.testing.assert_close(before, after, atol=1e-4, rtol=1e-4)
    means = scores[:, :-1, :-1].mean(2), scores[:, :-1, :-1].mean(1)
    torch.testing.assert_close(
        mean_similarity_loss(scores), means[0].square().mean() + means[1].square().mean()
    )
    assert mean_similarity_loss(raised) > mean_similarity_loss(scores) + 9


def test_correspondence_loss_counts_visible_points_only_and_is_steep_for_small_errors():
    target = torch.zeros(1, 3, 2)
    stated = torch.tensor([[[0.05, 0.0], [0.0, 0.15], [9.0, 9.0]]])
    visible = torch.tensor([[True, True, False]])
    expected = 0.25 * (torch.tensor(2.0).log() + torch.tensor(4.0).log()) / 2
    torch.testing.assert_close(correspondence_loss(stated, target, visible), expected)
