"""Sinkhorn against a log-sum-exp loop in float64, its invariances, and the matches read off it."""

import math

import numpy as np
import pytest
import torch
from peers import naive_sinkhorn

from matcher.config import AssignmentConfig
from matcher.match.nearest import credible_matches
from matcher.match.sinkhorn import (
    Assignment,
    AssignmentHead,
    assign,
    dual_softmax,
    log_assignment,
    mutual_best,
    sinkhorn,
)


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


def assigned(scores: torch.Tensor, *masks: torch.Tensor, **settings) -> Assignment:
    return assign(scores, AssignmentConfig(**settings), *masks)


def mutual_matches(log_scores: torch.Tensor, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Of (N, M)."""
    return credible_matches(*(x[0].numpy() for x in mutual_best(log_scores[None])), threshold)


def relative_errors(log_p: torch.Tensor, rows: int, columns: int) -> tuple[float, float]:
    """Of the rows and of the columns: the points' root mean square together with the dustbin's."""
    mu = torch.tensor([1.0] * rows + [columns], dtype=torch.float64)
    nu = torch.tensor([1.0] * columns + [rows], dtype=torch.float64)
    plan = log_p[0].exp()
    errors = ((plan.sum(1) - mu) / mu, (plan.sum(0) - nu) / nu)
    return tuple(float((e[:-1].square().mean() + e[-1] ** 2).sqrt()) for e in errors)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (11, 7), (1, 1), (1, 6), (20, 20)])
@pytest.mark.parametrize("iterations", [1, 2, 17])
def test_sinkhorn_is_the_loop(rows: int, columns: int, iterations: int) -> None:
    scores = scores_with_matches(rows, columns, contrast=2.0)
    found = sinkhorn(scores, max_iterations=iterations, tolerance=None)
    u, v = (potential[0].numpy() for potential in naive_sinkhorn(scores.double(), iterations))
    gauge = found.u[0, 0].item() - u[0]
    np.testing.assert_allclose(found.u[0] - gauge, u, atol=2e-5)
    np.testing.assert_allclose(found.v[0] + gauge, v, atol=2e-5)
    assert found.iterations == [iterations] and found.converged == [False]


def test_a_start_of_other_scores_leads_to_the_same_plan() -> None:
    scores, others = (scores_with_matches(20, 15, seed, contrast=3.0) for seed in (0, 1))
    options = {"max_iterations": 2000, "tolerance": 1e-5}
    cold, warm = log_plan(scores, **options), log_plan(scores, start=sinkhorn(others), **options)
    torch.testing.assert_close(warm.exp(), cold.exp(), atol=1e-3, rtol=0)
    found = sinkhorn(scores)
    assert sinkhorn(scores, start=found).iterations[0] < found.iterations[0]


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (40, 3), (3, 40), (1, 1), (200, 2)])
def test_marginals_are_right_when_converged(rows: int, columns: int, tolerance: float) -> None:
    for seed in range(5):
        scores = scores_with_matches(rows, columns, seed)
        scores[0, -1, :-1] += seed - 2  # so that the dustbins' sums are wrong at first
        options = {"max_iterations": 2000, "tolerance": tolerance}
        found = sinkhorn(scores, **options)
        assert found.converged == [True] and found.iterations[0] < 2000
        off = relative_errors(log_plan(scores, **options), rows, columns)
        assert max(off) < 1.01 * tolerance + 1e-5
        assert min(off) < 1e-5  # the side that was updated last


def test_the_limit_is_reported() -> None:
    scores = scores_with_matches(30, 30, contrast=3.0)
    short = assigned(scores, max_iterations=3, tolerance=1e-6)
    assert (short.iterations, short.converged) == ([3], [False])
    needed = sinkhorn(scores, max_iterations=500).iterations[0]
    again = sinkhorn(scores, max_iterations=needed)
    assert again.converged == [True] and again.iterations == [needed]
    assert sinkhorn(torch.zeros(1, 4, 4), max_iterations=25, tolerance=None).iterations == [25]


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
    log_p = log_plan(scores, max_iterations=100)
    assert log_p.isfinite().all()
    columns_off = log_p[0].exp().sum(0) / torch.tensor([1.0] * 17 + [12]) - 1
    rows_off = log_p[0].exp().sum(1) / torch.tensor([1.0] * 12 + [17]) - 1
    assert min(columns_off.abs().max(), rows_off.abs().max()) < 0.02  # float32 holds 1e4 to a thousandth


def test_masked_batch_equals_singles() -> None:
    sizes = [(5, 8), (9, 3), (1, 1), (9, 8), (7, 7), (7, 7)]
    batch = torch.full((len(sizes), 10, 9), 50.0)
    mask0, mask1 = torch.zeros(len(sizes), 9, dtype=torch.bool), torch.zeros(len(sizes), 8, dtype=torch.bool)
    singles = [scores_with_matches(n, m, seed) for seed, (n, m) in enumerate(sizes)]
    for b, ((n, m), single) in enumerate(zip(sizes, singles, strict=True)):
        batch[b, :n, :m] = single[0, :-1, :-1]
        batch[b, :n, -1], batch[b, -1, :m], batch[b, -1, -1] = single[0, :-1, -1], single[0, -1, :-1], 0
        mask0[b, :n], mask1[b, :m] = True, True
    for kind in ("sinkhorn", "dual_softmax"):
        whole = assigned(batch, mask0, mask1, kind=kind)
        for b, ((n, m), single) in enumerate(zip(sizes, singles, strict=True)):
            alone = assigned(single, kind=kind)
            torch.testing.assert_close(whole.log_scores[b, :n, :m], alone.log_scores[0], atol=2e-5, rtol=0)
            torch.testing.assert_close(
                whole.log_unmatched0[b, :n], alone.log_unmatched0[0], atol=2e-5, rtol=0
            )
            torch.testing.assert_close(
                whole.log_unmatched1[b, :m], alone.log_unmatched1[0], atol=2e-5, rtol=0
            )
            masked = ~(mask0[b].unsqueeze(1) & mask1[b])
            assert whole.log_scores[b].isneginf().equal(masked)


@pytest.mark.parametrize(("valid0", "valid1"), [(0, 6), (4, 0), (0, 0)])
def test_all_masked_sides(valid0: int, valid1: int) -> None:
    scores = 5 * torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(5))
    mask0, mask1 = (torch.arange(4) < valid0)[None], (torch.arange(6) < valid1)[None]
    for bound in (1.0, 2000.0):
        result = assigned(bound * scores, mask0, mask1)
        assert result.log_scores.isneginf().all()
        assert result.log_unmatched0[mask0].abs().le(2e-2).all()  # nobody there, so unmatched for sure
        assert result.log_unmatched1[mask1].abs().le(2e-2).all()
        assert not result.mutual_best.mutual.logical_and(result.mutual_best.scores > -math.inf).any()


@pytest.mark.parametrize("contrast", [1.0, 4.0])
@pytest.mark.parametrize(("rows", "columns"), [(25, 18), (18, 25), (20, 20), (1, 9)])
def test_transposing_scores_transposes_the_plan(rows: int, columns: int, contrast: float) -> None:
    """Contrast makes convergence slow, where two plans of right marginals may lie far apart."""
    scores = scores_with_matches(rows, columns, contrast=contrast)
    plan, mirrored = log_plan(scores).exp(), log_plan(scores.transpose(1, 2)).exp().transpose(1, 2)
    torch.testing.assert_close(plan, mirrored, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("kind", ["sinkhorn", "dual_softmax"])
def test_no_points(rows: int, columns: int, kind: str) -> None:
    result = assigned(torch.zeros(2, rows + 1, columns + 1, dtype=torch.bfloat16), kind=kind)
    assert result.log_scores.shape == (2, rows, columns)
    assert result.log_unmatched0.shape == (2, rows)
    assert result.log_unmatched1.shape == (2, columns)
    assert result.log_scores.dtype == result.log_unmatched1.dtype == torch.float32
    assert result.mutual_best.mutual.shape == (2, rows)


@pytest.mark.parametrize("tolerance", [None, 1e-4])
def test_scores_so_low_that_exponentials_vanish(tolerance: float | None) -> None:
    """What is cut off at e⁻⁸⁰ must not count."""
    scores = scores_with_matches(40, 30, seed=1)
    scores[:, :-1, :-1] -= 300 * (torch.rand(40, 30, generator=torch.Generator().manual_seed(0)) < 0.3)
    u, v = naive_sinkhorn(scores.double(), 300)
    expected = (scores.double() + u.unsqueeze(2) + v.unsqueeze(1))[:, :-1, :-1]
    found = assigned(scores, max_iterations=300, tolerance=tolerance)
    torch.testing.assert_close(found.log_scores.double(), expected, atol=1e-3, rtol=1e-5)


def test_the_differentiable_plan_is_sinkhorns() -> None:
    scores = torch.cat([scores_with_matches(14, 9, seed) for seed in range(3)]).requires_grad_()
    found = log_assignment(scores, 200, 3)
    torch.testing.assert_close(
        found.detach().exp(), log_plan(scores, tolerance=1e-6).float().exp(), atol=1e-4, rtol=0
    )
    found[:, 0, 0].sum().backward()
    assert scores.grad.isfinite().all() and scores.grad.abs().sum() > 0.1


@pytest.mark.parametrize("dustbin", ["point", "learned"])
def test_head_is_its_formula(dustbin: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        head = AssignmentHead(AssignmentConfig(dustbin=dustbin), 16)
        x0, x1, more0, more1 = (torch.randn(2, n, c) for n, c in ((5, 16), (4, 16), (5, 3), (4, 3)))
    scores = head(x0, x1, (more0, more1))
    similarity = head.projection(x0) @ head.projection(x1).mT / 4 + more0 @ more1.mT
    torch.testing.assert_close(scores[:, :-1, :-1], similarity)
    if dustbin == "point":
        torch.testing.assert_close(scores[:, :-1, -1], -head.logits(x0))
        torch.testing.assert_close(scores[:, -1, :-1], -head.logits(x1))
        assert scores[:, -1, -1].eq(0).all()
    else:
        assert scores[:, -1].eq(1).all() and scores[:, :, -1].eq(1).all()


def test_dual_softmax_is_the_equation() -> None:
    scores = 4 * torch.randn(3, 301, 257, generator=torch.Generator().manual_seed(2))
    scores[0, :, 7] -= 100  # a column far below every row's best
    similarity = scores[:, :-1, :-1].double()
    certain0, certain1 = torch.sigmoid(-scores[:, :-1, -1]), torch.sigmoid(-scores[:, -1, :-1])
    expected = similarity.softmax(2) * similarity.softmax(1) * certain0.unsqueeze(2) * certain1.unsqueeze(1)
    found = dual_softmax(scores)
    torch.testing.assert_close(found.log_scores.exp(), expected.float(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.log_unmatched0.exp(), 1 - certain0)


def test_who_prefers_the_dustbin_frees_the_partner() -> None:
    scores = torch.tensor([[[2.0, -3.0, 4.0], [1.0, -3.0, -5.0], [-5.0, -5.0, 0.0]]])
    settings = {"dustbin": "learned", "tolerance": None, "max_iterations": 1}
    before = assigned(scores, **settings).log_scores[0]
    after = assigned(scores, **settings, drop_unmatched=True).log_scores[0]
    assert mutual_matches(before, 0.01)[0].tolist()[0] == [1, 0] or before[0, 0] < before[1, 0]
    assert after[0].isneginf().all() and mutual_matches(after, 0.01)[0].tolist() == [[1, 0]]


def naive_mutual(log_scores: np.ndarray, threshold: float) -> dict[tuple[int, int], float]:
    found = {}
    for i in range(log_scores.shape[0]):
        j = int(np.argmax(log_scores[i]))
        if int(np.argmax(log_scores[:, j])) == i and np.exp(log_scores[i, j]) > threshold:
            found[i, j] = float(np.exp(log_scores[i, j]))
    return found


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.5])
def test_mutual_matches_are_the_loop(threshold: float) -> None:
    log_scores = assigned(scores_with_matches(30, 22)).log_scores[0]
    indices, probabilities = mutual_matches(log_scores, threshold)
    expected = naive_mutual(log_scores.numpy(), threshold)
    assert expected
    found = dict(zip(map(tuple, indices.tolist()), probabilities.tolist(), strict=True))
    assert found == pytest.approx(expected)
    assert (np.diff(probabilities) <= 0).all() and indices.dtype == np.int64


def test_matches_are_never_masked_of_two_equal_ones_the_first_and_never_above_one() -> None:
    log_scores = torch.full((3, 4), -math.inf)
    assert mutual_matches(log_scores, 0.0)[0].shape == (0, 2)
    log_scores[1, 2] = -0.1
    assert mutual_matches(log_scores, 0.0)[0].tolist() == [[1, 2]]
    log_scores = torch.full((4, 3), -3.0)
    log_scores[1, 2] = log_scores[3, 2] = log_scores[0, 0] = log_scores[0, 1] = -0.1
    assert sorted(mutual_matches(log_scores, 0.1)[0].tolist()) == [[0, 0], [1, 2]]
    assert mutual_matches(torch.tensor([[0.01]]), 0.1)[1].tolist() == [1.0]


def test_few_matches_must_be_more_probable() -> None:
    best = np.log(np.array([0.2, 0.2, 0.9])), np.arange(3), np.ones(3, bool)
    assert len(credible_matches(*best, 0.1)[0]) == 3
    assert len(credible_matches(*best, 0.1, 2.0)[0]) == 1  # 0.1 · (1 + 2 / 1.3)
