"""Sinkhorn against a loop in float64, its invariances, the matches read off it; local consensus."""

import math

import numpy as np
import pytest
import torch
from peers import naive_sinkhorn

from matcher.config import AssignmentConfig, NearestConfig
from matcher.errors import UsageError
from matcher.match.calibration import credible_matches
from matcher.match.consensus import Consensus, fit_local_maps, soft_matches
from matcher.match.nearest import NearestMatcher
from matcher.match.sinkhorn import (
    Assignment,
    AssignmentHead,
    assign,
    dual_softmax,
    log_assignment,
    mutual_best,
    sinkhorn,
)
from matcher.types import Features


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
    return scores.double() + found.u.double() + found.v.double().mT


def assigned(scores: torch.Tensor, *masks: torch.Tensor, **settings) -> Assignment:
    return assign(scores, AssignmentConfig(**settings), *masks)


def mutual_matches(log_scores: torch.Tensor, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Of (N, M)."""
    return credible_matches(*(x[0].numpy() for x in mutual_best(log_scores[None])[:3]), threshold)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (11, 7), (1, 1), (1, 6), (20, 20)])
@pytest.mark.parametrize("iterations", [1, 2, 17])
def test_sinkhorn_is_the_loop(rows: int, columns: int, iterations: int) -> None:
    scores = scores_with_matches(rows, columns, contrast=2.0)
    found = sinkhorn(scores, max_iterations=iterations, tolerance=None)
    u, v = (potential[0].numpy() for potential in naive_sinkhorn(scores.double(), iterations))
    gauge = found.u[0, 0, 0].item() - u[0]
    np.testing.assert_allclose(found.u[0, :, 0] - gauge, u, atol=2e-5)
    np.testing.assert_allclose(found.v[0, :, 0] + gauge, v, atol=2e-5)
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
    """Relative errors of rows and columns: the points' root mean square together with the dustbin's."""
    wanted = torch.tensor([1.0] * rows + [columns]).double(), torch.tensor([1.0] * columns + [rows]).double()
    for seed in range(5):
        scores = scores_with_matches(rows, columns, seed)
        scores[0, -1, :-1] += seed - 2  # so that the dustbins' sums are wrong at first
        options = {"max_iterations": 2000, "tolerance": tolerance}
        found = sinkhorn(scores, **options)
        assert found.converged == [True] and found.iterations[0] < 2000
        plan = log_plan(scores, **options)[0].exp()
        errors = [plan.sum(1 - side) / sums - 1 for side, sums in enumerate(wanted)]
        off = [float((e[:-1].square().mean() + e[-1] ** 2).sqrt()) for e in errors]
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
        mixed = torch.randint(0, 2, scores.shape, generator=rng) * 2 - 1.0
        signs = {"positive": 1.0, "negative": -1.0, "mixed": mixed}[pattern]
        scores = 1e4 * signs * torch.rand(scores.shape, generator=rng).round(decimals=1)
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
            own = whole.log_scores[b, :n, :m], whole.log_unmatched0[b, :n], whole.log_unmatched1[b, :m]
            wanted = alone.log_scores[0], alone.log_unmatched0[0], alone.log_unmatched1[0]
            torch.testing.assert_close(own, wanted, atol=2e-5, rtol=0)
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
    parts = result.log_scores, result.log_unmatched0, result.log_unmatched1, result.mutual_best.mutual
    assert [part.shape[1:] for part in parts] == [(rows, columns), (rows,), (columns,), (rows,)]
    assert result.log_scores.dtype == result.log_unmatched1.dtype == torch.float32


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
    wanted = log_plan(scores, tolerance=1e-6).float().exp()
    torch.testing.assert_close(found.detach().exp(), wanted, atol=1e-4, rtol=0)
    found[:, 0, 0].sum().backward()
    assert scores.grad.isfinite().all() and scores.grad.abs().sum() > 0.1


@pytest.mark.parametrize("dustbin", ["point", "learned"])
def test_head_is_its_formula(dustbin: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        head = AssignmentHead(AssignmentConfig(dustbin=dustbin), 16)
        x, more = torch.randn(2, 9, 16), torch.randn(2, 9, 3)
    (x0, x1), scores = x.split([5, 4], 1), head(x, 5, (more, 2 * more))
    similarity = head.projection(x0) @ head.projection(x1).mT / 4 + 4 * more[:, :5] @ more[:, 5:].mT
    torch.testing.assert_close(scores[:, :-1, :-1], similarity)
    if dustbin == "point":
        torch.testing.assert_close(scores[:, :-1, -1], -head.matchability(x0).squeeze(2))
        torch.testing.assert_close(scores[:, -1, :-1], -head.matchability(x1).squeeze(2))
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
    scores = torch.tensor([[[4.0, 1.0, 1.0], [3.0, 1.0, -4.0], [-5.0, 3.0, -1.0]]])
    settings = {"dustbin": "learned", "tolerance": None, "max_iterations": 1}
    before = assigned(scores, **settings).log_scores[0]
    after = assigned(scores, **settings, drop_unmatched=True).log_scores[0]
    assert mutual_matches(before, 0.01)[0].tolist() == [[0, 0]]
    assert after[0].isneginf().all() and mutual_matches(after, 0.01)[0].tolist() == [[1, 0]]


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.5])
def test_mutual_matches_are_the_loop(threshold: float) -> None:
    log_scores = assigned(scores_with_matches(30, 22)).log_scores[0]
    indices, probabilities = mutual_matches(log_scores, threshold)
    plan, expected = log_scores.exp().numpy(), {}
    for i, j in enumerate(plan.argmax(1).tolist()):
        if plan[:, j].argmax() == i and plan[i, j] > threshold:
            expected[i, j] = plan[i, j]
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


# --- Local consensus: exact on affine motion, deaf to outliers, symmetric, silent without support.


SLOPE = torch.tensor([[0.9, 0.3], [-0.2, 1.1]])
SHIFT = torch.tensor([0.1, -0.05])


def moved_points(count: int = 200, outliers: float = 0.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Points (1, N, 2), where an affine map takes them, what is observed, and which of it is wrong."""
    rng = torch.Generator().manual_seed(seed)
    points = torch.rand(1, count, 2, generator=rng) * 2 - 1
    truth = points @ SLOPE.t() + SHIFT
    wrong = torch.rand(1, count, generator=rng) < outliers
    noise = torch.rand(1, count, 2, generator=rng) * 2 - 1
    return points, truth, torch.where(wrong.unsqueeze(2), noise, truth), wrong


def test_an_affine_motion_is_predicted_exactly_and_by_a_third_of_wrong_matches_not_moved() -> None:
    points, truth, observed, _ = moved_points()
    fit = fit_local_maps(points, observed, torch.ones(1, 200))
    error = (fit.position - truth).norm(dim=2)
    assert error.max() < 1e-2 and error.median() < 5e-4  # the ridge tells beside the other points
    assert fit.spread.max() < 2e-3 and fit.support.min() > 1
    points, truth, observed, wrong = moved_points(400, outliers=0.33)
    error = (fit_local_maps(points, observed, torch.ones(1, 400)).position - truth).norm(dim=2)
    assert error.median() < 1e-3 and error.quantile(0.8) < 0.02
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
    partner, confidence = soft_matches(scores)  # of both images, 9 and 7 points
    indices, probabilities = map(torch.from_numpy, mutual_matches(scores[0], 0.05))
    assert len(indices) > 2
    expected0, expected1 = torch.zeros(9), torch.zeros(7)
    expected0[indices[:, 0]], expected1[indices[:, 1]] = probabilities, probabilities
    torch.testing.assert_close(confidence[0], expected0)
    torch.testing.assert_close(confidence[1, :7], expected1)
    assert partner[0, indices[:, 0]].equal(indices[:, 1]) and not confidence[1, 7:].any()
    assert partner[1, indices[:, 1]].equal(indices[:, 0])


def ambiguous_scores(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores (1, N+1, N+1) whose diagonal is right, positions (1, 2N, 2); a third prefer others' partners."""
    points, truth, _, _ = moved_points(count, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(1, count + 1, count + 1, generator=rng)
    scores[0, :-1, :-1] += torch.eye(count) * 9
    scores[0, -1, -1] = 0
    for row in range(0, count, 6):
        scores[0, row, row + 1] = scores[0, row, row] + 0.5
        scores[0, row + 1, row] = scores[0, row + 1, row + 1] + 0.5
    return scores, torch.cat([points, truth], 1)


def test_ambiguous_points_are_decided_by_their_neighbours() -> None:
    scores, positions = ambiguous_scores(90, 5)
    consensus = Consensus()

    def right(s: torch.Tensor) -> int:
        indices, _ = mutual_matches(assign(s, AssignmentConfig()).log_scores[0], 0.2)
        return int((indices[:, 0] == indices[:, 1]).sum())

    with torch.no_grad():
        heard = consensus(scores, positions, soft_matches(assign(scores, AssignmentConfig()).log_scores))
    assert right(scores) < 65
    assert right(heard) > 85


def test_swapping_the_images_transposes_the_correction() -> None:
    scores, positions = ambiguous_scores(60, 6)
    consensus, assigned = Consensus(), assign(scores, AssignmentConfig()).log_scores
    with torch.no_grad():
        torch.nn.init.normal_(consensus.out.weight, std=0.3)
        there = consensus(scores, positions, soft_matches(assigned))
        back = consensus(scores.mT, positions.roll(60, 1), soft_matches(assigned.mT))
    torch.testing.assert_close(there.transpose(1, 2), back, atol=2e-3, rtol=1e-3)


def test_without_matches_the_neighbours_say_nothing_about_places() -> None:
    positions = torch.cat(moved_points(20)[:2], 1)
    scores = torch.randn(1, 21, 21, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        heard = Consensus()(scores, positions, soft_matches(torch.full((1, 20, 20), -20.0)))
    torch.testing.assert_close(heard, scores, atol=1e-4, rtol=0)


# --- Nearest neighbours.


def make(rng: np.random.Generator, count: int, descriptors: np.ndarray | None = None, **fields) -> Features:
    """Features of one image with random points."""
    if descriptors is None:
        descriptors = rng.normal(size=(count, 16)).astype(np.float32)
    points = rng.uniform(0, 100, size=(count, 2)).astype(np.float32)
    return Features(keypoints=points, descriptors=descriptors, size=(100, 100), **fields)


def match_one(features0: Features, features1: Features, ratio: float = 0.8):
    return NearestMatcher(NearestConfig(ratio))(Features.stack([features0]), Features.stack([features1]))[0]


def reference(descriptors0: np.ndarray, descriptors1: np.ndarray, ratio: float) -> dict:
    """Scores by indices, by loops over float64 distances."""
    distances = np.linalg.norm(descriptors0[:, None].astype(np.float64) - descriptors1[None], axis=2)
    found = {}
    for i, row in enumerate(distances):
        j = int(row.argmin())
        if int(distances[:, j].argmin()) != i:
            continue
        worse = max(row[j] / np.sort(side)[1] for side in (row, distances[:, j]))
        if worse <= ratio:
            found[i, j] = 1 - worse
    return found


@pytest.mark.parametrize("ratio", [0.6, 0.8, 1.0])
def test_it_equals_a_loop_over_all_distances(rng, ratio):
    base = rng.normal(size=(60, 16)).astype(np.float32)
    noisy = (base[rng.permutation(60)[:45]] + rng.normal(scale=0.6, size=(45, 16))).astype(np.float32)
    found = match_one(make(rng, 60, base), make(rng, 45, noisy), ratio)
    expected = reference(base, noisy, ratio)
    scores = dict(zip(map(tuple, found.indices.tolist()), found.scores.tolist(), strict=True))
    assert scores == pytest.approx(expected, abs=1e-5, rel=0) and len(expected) > 5
    assert (np.diff(found.scores) <= 0).all()


def test_duplicates_are_ambiguous(rng):
    twice = np.repeat(rng.normal(size=(1, 16)), 2, axis=0).astype(np.float32)
    others = rng.normal(size=(6, 16)).astype(np.float32)
    found = match_one(*(make(rng, 8, np.concatenate([twice, others])) for _ in range(2)))
    assert sorted(found.indices[:, 0].tolist()) == list(range(2, 8))


def test_a_padded_batch_gives_what_single_pairs_give(rng):
    pairs = [(make(rng, n), make(rng, m)) for n, m in [(40, 25), (3, 30), (0, 12), (1, 9), (7, 1), (5, 0)]]
    batch = NearestMatcher(NearestConfig(1.0))(*(Features.stack(side) for side in zip(*pairs, strict=True)))
    for pair, together in zip(pairs, batch, strict=True):
        alone = match_one(*pair, ratio=1.0)
        np.testing.assert_array_equal(together.indices, alone.indices)
        np.testing.assert_allclose(together.scores, alone.scores, atol=1e-6)
        assert (together.kept0, together.kept1) == (len(pair[0]), len(pair[1]))


def test_what_does_not_fit_is_refused(rng):
    with pytest.raises(UsageError, match="sift and disk"):
        match_one(make(rng, 5, kind="sift"), make(rng, 5, kind="disk"))
    with pytest.raises(UsageError, match="16 and 8"):
        match_one(make(rng, 5), make(rng, 5, np.zeros((5, 8), np.float32)))
    with pytest.raises(UsageError, match="stack the features"):
        NearestMatcher(NearestConfig())(make(rng, 5), make(rng, 5))
    with pytest.raises(UsageError, match="ratio"):
        NearestMatcher(NearestConfig(0.0))
