"""Sinkhorn against a log-sum-exp loop in float64, its invariances, and the matches read off it."""

import math

import numpy as np
import pytest
import torch

from matcher.benchmark.timing import naive_sinkhorn
from matcher.match.nearest import mutual_matches, mutual_minima
from matcher.match.sinkhorn import AssignmentHead, assign, dual_softmax, log_masses, row_error, sinkhorn


def scores_with_matches(rows: int, columns: int, seed: int = 0, contrast: float = 1.0) -> torch.Tensor:
    """(1, N+1, M+1): noise, a third of the points with a clear partner, varied dustbins, corner 0."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, rows + 1, columns + 1, generator=rng)
    pairs = min(rows, columns) // 3
    i = torch.randperm(rows, generator=rng)[:pairs]
    j = torch.randperm(columns, generator=rng)[:pairs]
    scores[0, i, j] += 6.0
    scores *= contrast
    scores[0, -1, -1] = 0
    return scores


def log_plan(scores: torch.Tensor, **options) -> torch.Tensor:
    found = sinkhorn(scores, **options)
    return scores.double() + found.u.double().unsqueeze(2) + found.v.double().unsqueeze(1)


def relative_errors(log_p: torch.Tensor, rows: int, columns: int) -> tuple[float, float]:
    """Of the rows and of the columns: the points' root mean square, or the dustbin's if that is greater."""
    mu = torch.tensor([1.0] * rows + [columns], dtype=torch.float64)
    nu = torch.tensor([1.0] * columns + [rows], dtype=torch.float64)
    plan = log_p[0].exp()
    errors = ((plan.sum(1) - mu).abs() / mu, (plan.sum(0) - nu).abs() / nu)
    return tuple(float(torch.maximum(e[:-1].square().mean().sqrt(), e[-1])) for e in errors)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (11, 7), (1, 1), (1, 6), (20, 20)])
@pytest.mark.parametrize("iterations", [1, 2, 17])
def test_sinkhorn_is_the_loop(rows: int, columns: int, iterations: int) -> None:
    scores = scores_with_matches(rows, columns, contrast=2.0)
    found = sinkhorn(scores, max_iterations=iterations, tolerance=None)
    u, v = (potential[0].numpy() for potential in naive_sinkhorn(scores.double(), iterations))
    gauge = found.u[0, 0].item() - u[0]
    np.testing.assert_allclose(found.u[0] - gauge, u, atol=2e-5)
    np.testing.assert_allclose(found.v[0] + gauge, v, atol=2e-5)
    expected = scores[0].double().numpy() + u[:, None] + v
    np.testing.assert_allclose(
        log_plan(scores, max_iterations=iterations, tolerance=None)[0], expected, atol=2e-5
    )
    assert found.iterations.tolist() == [iterations]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tolerance", [None, 1e-9])
def test_sinkhorn_goes_on_where_it_stopped(masked: bool, tolerance: float | None) -> None:
    scores = scores_with_matches(12, 9, contrast=2.0)
    masks = (torch.arange(12)[None] < 10, torch.arange(9)[None] > 1) if masked else (None, None)
    whole = sinkhorn(scores, *masks, max_iterations=17, tolerance=tolerance)
    part = sinkhorn(scores, *masks, max_iterations=5, tolerance=tolerance)
    rest = sinkhorn(scores, *masks, max_iterations=12, tolerance=tolerance, start=part)
    expected, found = ((scores + p.u.unsqueeze(2) + p.v.unsqueeze(1)).exp() for p in (whole, rest))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_start_of_other_scores_leads_to_the_same_plan() -> None:
    scores, others = (scores_with_matches(20, 15, seed, contrast=3.0) for seed in (0, 1))
    options = {"max_iterations": 2000, "tolerance": 1e-5}
    cold, warm = log_plan(scores, **options), log_plan(scores, start=sinkhorn(others), **options)
    torch.testing.assert_close(warm.exp(), cold.exp(), atol=1e-3, rtol=0)
    found = sinkhorn(scores)
    assert sinkhorn(scores, start=found).iterations[0] < found.iterations[0]


def test_the_loop_and_sinkhorn_meet_where_scaling_leaves_float32() -> None:
    """Scores of ±60 drive the scaling vectors out of range, so that they are absorbed on the way."""
    scores = scores_with_matches(12, 9, contrast=20.0)
    u, v = (potential[0].numpy() for potential in naive_sinkhorn(scores.double(), 3000))
    expected = np.exp(scores[0].double().numpy() + u[:, None] + v)
    plan = log_plan(scores, max_iterations=3000, tolerance=None)[0].exp()
    np.testing.assert_allclose(plan, expected, atol=1e-3)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (40, 3), (3, 40), (1, 1)])
def test_marginals_are_right_when_converged(rows: int, columns: int, tolerance: float) -> None:
    scores = scores_with_matches(rows, columns)
    found = sinkhorn(scores, max_iterations=2000, tolerance=tolerance)
    assert found.converged.all()
    assert found.iterations[0] < 2000
    rows_off, columns_off = relative_errors(
        log_plan(scores, max_iterations=2000, tolerance=tolerance), rows, columns
    )
    assert max(rows_off, columns_off) < 1.01 * tolerance + 1e-5
    assert min(rows_off, columns_off) < 1e-5  # the side that was updated last


def test_the_dustbin_row_counts_too() -> None:
    """Two hundred rows each within tolerance may add up to a dustbin row that is not."""
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for trial in range(60):
        scores = torch.randn(1, 201, 3, generator=rng) * (1 + trial % 4)
        scores[0, -1, :-1] += trial % 7 - 3
        scores[0, :-1, -1] += trial % 5 - 2
        options = {"max_iterations": 500, "tolerance": 1e-3}
        assert sinkhorn(scores, **options).converged.all()
        worst = max(worst, relative_errors(log_plan(scores, **options), 200, 2)[0])
    assert worst < 1.01e-3


def test_the_error_of_rows_is_that_of_the_points_or_of_the_dustbin() -> None:
    assert row_error(torch.tensor([1.3, 0.6, 1.05])) == pytest.approx(0.125**0.5)
    assert row_error(torch.tensor([1.3, 0.6, 0.5])) == pytest.approx(0.5)
    assert row_error(torch.tensor([0.75])) == pytest.approx(0.25)


def test_the_limit_is_reported() -> None:
    scores = scores_with_matches(30, 30, contrast=3.0)
    short = sinkhorn(scores, max_iterations=3, tolerance=1e-6)
    assert short.iterations.tolist() == [3]
    assert not short.converged.any()
    assignment = assign(scores, max_iterations=3, tolerance=1e-6)
    assert (assignment.iterations, assignment.converged) == (3, False)


def test_convergence_at_the_last_iteration_is_seen() -> None:
    scores = scores_with_matches(10, 10)
    needed = int(sinkhorn(scores, max_iterations=500).iterations)
    again = sinkhorn(scores, max_iterations=needed)
    assert again.converged.all()
    assert not sinkhorn(scores, max_iterations=needed - 1).converged.any()


def test_no_tolerance_runs_all_iterations() -> None:
    found = sinkhorn(torch.zeros(1, 4, 4), max_iterations=25, tolerance=None)
    assert found.iterations.tolist() == [25]


def test_pairs_stop_one_by_one() -> None:
    easy, hard = torch.zeros(1, 9, 9), scores_with_matches(8, 8, contrast=3.0)
    both = sinkhorn(torch.cat([easy, hard]))
    assert both.iterations[0] < both.iterations[1]
    assert both.iterations[1] == sinkhorn(hard).iterations[0]


@pytest.mark.parametrize("pattern", ["positive", "negative", "mixed", "dustbins"])
def test_extreme_scores_stay_finite(pattern: str) -> None:
    rng = torch.Generator().manual_seed(4)
    scores = torch.zeros(1, 13, 18)
    if pattern == "dustbins":
        scores[0, :, -1], scores[0, -1, :] = 1e4, -1e4
    else:
        signs = {"positive": 1.0, "negative": -1.0}.get(pattern)
        chosen = torch.randint(0, 2, scores.shape, generator=rng) * 2 - 1.0 if signs is None else signs
        scores = 1e4 * chosen * torch.rand(scores.shape, generator=rng).round(decimals=1)
    found = sinkhorn(scores, max_iterations=100)
    assert found.u.isfinite().all()
    assert found.v.isfinite().all()
    log_p = log_plan(scores, max_iterations=100)
    assert log_p.isfinite().all()
    columns_off = log_p[0].exp().sum(0) / torch.tensor([1.0] * 17 + [12]) - 1
    assert columns_off.abs().max() < 0.02  # float32 holds 1e4 to a thousandth


def test_masked_batch_equals_singles() -> None:
    sizes = [(5, 8), (9, 3), (1, 1), (9, 8)]
    batch = torch.full((len(sizes), 10, 9), 50.0)
    mask0, mask1 = torch.zeros(len(sizes), 9, dtype=torch.bool), torch.zeros(len(sizes), 8, dtype=torch.bool)
    singles = [scores_with_matches(n, m, seed=n) for n, m in sizes]
    for b, ((n, m), single) in enumerate(zip(sizes, singles, strict=True)):
        batch[b, :n, :m] = single[0, :-1, :-1]
        batch[b, :n, -1], batch[b, -1, :m], batch[b, -1, -1] = single[0, :-1, -1], single[0, -1, :-1], 0
        mask0[b, :n], mask1[b, :m] = True, True
    whole = assign(batch, mask0, mask1)
    for b, ((n, m), single) in enumerate(zip(sizes, singles, strict=True)):
        alone = assign(single)
        torch.testing.assert_close(whole.log_scores[b, :n, :m], alone.log_scores[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(whole.log_unmatched0[b, :n], alone.log_unmatched0[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(whole.log_unmatched1[b, :m], alone.log_unmatched1[0], atol=1e-5, rtol=0)
        masked = ~(mask0[b].unsqueeze(1) & mask1[b])
        assert whole.log_scores[b].isneginf().equal(masked)


@pytest.mark.parametrize(("valid0", "valid1"), [(0, 6), (4, 0), (0, 0)])
def test_all_masked_sides(valid0: int, valid1: int) -> None:
    scores = 5 * torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(5))
    mask0, mask1 = (torch.arange(4) < valid0)[None], (torch.arange(6) < valid1)[None]
    for bound in (1.0, 2000.0):
        result = assign(bound * scores, mask0, mask1)
        assert result.log_scores.isneginf().all()
        assert result.log_unmatched0.isneginf().equal(~mask0)
        assert result.log_unmatched1.isneginf().equal(~mask1)
        assert result.log_unmatched0[mask0].abs().le(1e-2).all()  # nobody there, so unmatched for sure
        assert result.log_unmatched1[mask1].abs().le(1e-2).all()
        assert result.converged


def test_masses_count_valid_points() -> None:
    mask0, mask1 = torch.tensor([[True, False, True]]), torch.tensor([[True, False]])
    log_mu, log_nu = log_masses(torch.zeros(1, 4, 3), mask0, mask1)
    torch.testing.assert_close(log_mu.exp(), torch.tensor([[1.0, 0, 1, 1]]))
    torch.testing.assert_close(log_nu.exp(), torch.tensor([[1.0, 0, 2]]))


@pytest.mark.parametrize("contrast", [1.0, 4.0])
@pytest.mark.parametrize(("rows", "columns"), [(25, 18), (18, 25), (20, 20), (1, 9)])
def test_transposing_scores_transposes_the_plan(rows: int, columns: int, contrast: float) -> None:
    """Contrast makes convergence slow, where two plans of right marginals may lie far apart."""
    scores = scores_with_matches(rows, columns, contrast=contrast)
    plan, mirrored = log_plan(scores).exp(), log_plan(scores.transpose(1, 2)).exp().transpose(1, 2)
    torch.testing.assert_close(plan, mirrored, atol=1e-5, rtol=0)


def test_transposing_a_masked_batch_transposes_the_plans() -> None:
    scores = torch.cat([scores_with_matches(12, 12, seed=s, contrast=3.0) for s in range(4)])
    rng = torch.Generator().manual_seed(8)
    mask0, mask1 = torch.rand(2, 4, 12, generator=rng) < 0.6
    there, back = assign(scores, mask0, mask1), assign(scores.transpose(1, 2), mask1, mask0)
    for first, second in (
        (there.log_scores, back.log_scores.transpose(1, 2)),
        (there.log_unmatched0, back.log_unmatched1),
        (there.log_unmatched1, back.log_unmatched0),
    ):
        torch.testing.assert_close(first.exp(), second.exp(), atol=1e-5, rtol=0)


def test_permuting_rows_permutes_the_plan() -> None:
    scores = scores_with_matches(25, 18)
    order = torch.cat([torch.randperm(25, generator=torch.Generator().manual_seed(6)), torch.tensor([25])])
    torch.testing.assert_close(log_plan(scores[:, order]), log_plan(scores)[:, order], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
def test_no_points(rows: int, columns: int) -> None:
    result = assign(torch.zeros(2, rows + 1, columns + 1, dtype=torch.bfloat16))
    assert result.log_scores.shape == (2, rows, columns)
    assert result.log_unmatched0.shape == (2, rows)
    assert result.log_unmatched1.shape == (2, columns)
    assert result.log_unmatched0.eq(0).all()
    assert result.log_scores.dtype == result.log_unmatched1.dtype == torch.float32


def test_half_precision_scores_are_solved_in_float32() -> None:
    scores = scores_with_matches(9, 9).bfloat16()
    expected, found = assign(scores.float()).log_scores, assign(scores).log_scores
    assert found.dtype == torch.float32
    assert found.equal(expected)


def test_head_is_its_formula() -> None:
    torch.manual_seed(7)
    head = AssignmentHead(16)
    x0, x1 = torch.randn(5, 16), torch.randn(4, 16)
    scores = head(x0, x1)
    similarity = head.projection(x0) @ head.projection(x1).T / 4
    torch.testing.assert_close(scores[:-1, :-1], similarity)
    torch.testing.assert_close(scores[:-1, -1], -head.logits(x0))
    torch.testing.assert_close(scores[-1, :-1], -head.logits(x1))
    assert scores[-1, -1] == 0


def test_a_matchable_point_shuns_the_dustbin() -> None:
    scores = torch.zeros(1, 4, 4)
    scores[0, 0, -1] = -5.0
    result = assign(scores)
    assert result.log_unmatched0[0, 0] < result.log_unmatched0[0, 1:].min() - 1


def naive_mutual(log_scores: np.ndarray, threshold: float) -> dict[tuple[int, int], float]:
    found = {}
    for i in range(log_scores.shape[0]):
        j = int(np.argmax(log_scores[i]))
        if int(np.argmax(log_scores[:, j])) == i and np.exp(log_scores[i, j]) > threshold:
            found[i, j] = float(np.exp(log_scores[i, j]))
    return found


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.5])
def test_mutual_matches_are_the_loop(threshold: float) -> None:
    log_scores = assign(scores_with_matches(30, 22)).log_scores[0]
    indices, probabilities = mutual_matches(log_scores, threshold)
    expected = naive_mutual(log_scores.numpy(), threshold)
    assert expected
    found = dict(zip(map(tuple, indices.tolist()), probabilities.tolist(), strict=True))
    assert found == pytest.approx(expected)
    assert probabilities.diff().le(0).all()
    assert indices.dtype == torch.int64


def test_matches_never_touch_masked_points() -> None:
    log_scores = torch.full((3, 4), -math.inf)
    indices, probabilities = mutual_matches(log_scores, 0.0)
    assert indices.shape == (0, 2)
    assert probabilities.shape == (0,)
    log_scores[1, 2] = -0.1
    assert mutual_matches(log_scores, 0.0)[0].tolist() == [[1, 2]]


def test_of_equal_partners_only_the_first_is_matched() -> None:
    """Two points described alike are equally good partners of one; it still gets a single match."""
    log_scores = torch.full((4, 3), -3.0)
    log_scores[1, 2] = log_scores[3, 2] = log_scores[0, 0] = log_scores[0, 1] = -0.1
    indices, _ = mutual_matches(log_scores, 0.1)
    assert sorted(indices.tolist()) == [[0, 0], [1, 2]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_no_matches_without_points(shape: tuple[int, int]) -> None:
    indices, probabilities = mutual_matches(torch.zeros(shape), 0.1)
    assert indices.shape == (0, 2)
    assert probabilities.shape == (0,)


def test_probabilities_never_exceed_one() -> None:
    assert mutual_matches(torch.tensor([[0.01]]), 0.1)[1].tolist() == [1.0]


@pytest.mark.parametrize("tolerance", [None, 1e-4])
def test_scores_so_low_that_exponentials_vanish(tolerance: float | None) -> None:
    """What is cut off at e⁻⁸⁰ must not count: neither in plans nor in dual softmax."""
    scores = scores_with_matches(40, 30, seed=1)
    scores[:, :-1, :-1] -= 300 * (torch.rand(40, 30, generator=torch.Generator().manual_seed(0)) < 0.3)
    u, v = naive_sinkhorn(scores.double(), 300)
    expected = (scores.double() + u.unsqueeze(2) + v.unsqueeze(1))[:, :-1, :-1]
    found = assign(scores, max_iterations=300, tolerance=tolerance)
    torch.testing.assert_close(found.log_scores.double(), expected, atol=1e-3, rtol=1e-5)


def test_dual_softmax_without_gradients_is_the_equation() -> None:
    scores = 4 * torch.randn(3, 301, 257, generator=torch.Generator().manual_seed(2))
    scores[0, :, 7] -= 100  # a column far below every row's best
    expected = dual_softmax(scores.clone().requires_grad_(True))
    found = dual_softmax(scores)
    torch.testing.assert_close(found.log_scores, expected.log_scores.detach(), atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_unmatched0, expected.log_unmatched0.detach())


def test_mutual_minima_are_the_least_of_row_and_column():
    rng = np.random.default_rng(3)
    costs = rng.random((30, 40))
    costs[rng.random(costs.shape) < 0.3] = np.inf
    costs[5] = np.inf
    wanted = [
        (i, j)
        for i in range(30)
        for j in range(40)
        if np.isfinite(costs[i, j]) and costs[i, j] == costs[i].min() == costs[:, j].min()
    ]
    assert list(zip(*mutual_minima(costs), strict=True)) == wanted and len(wanted) > 5
    assert [len(side) for side in mutual_minima(np.zeros((0, 4)))] == [0, 0]
