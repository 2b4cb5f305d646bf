"""Assignment by candidates is assignment: the kernels against the dense operators that they stand for."""

import shutil
from dataclasses import replace

import pytest
import torch

from matcher import kernels as compiled
from matcher.config import AssignmentConfig
from matcher.kernels import calls as kernel_candidates
from matcher.kernels import loader as library
from matcher.loading import load
from matcher.match import consensus as assigning
from matcher.match import network as model
from matcher.match.consensus import (
    CandidateAssignment,
    Candidates,
    Consensus,
    candidates_of,
    fit_local_maps,
    mutual_soft_matches,
)
from matcher.match.nearest import mutual_best
from matcher.match.position import Side
from matcher.match.sinkhorn import AssignmentHead, plan, sinkhorn

pytestmark = pytest.mark.skipif(
    library.instructions() is None or shutil.which("g++") is None, reason="needs a compiler and vector units"
)


@pytest.fixture(autouse=True)
def _kernels(kernels_folder, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(compiled.SWITCH, library.instructions())  # without trials
    forget()
    with torch.inference_mode():
        yield
    forget()


def forget() -> None:
    library._load.cache_clear()


def described(n: int, m: int, seed: int = 0, noise: float = 0.3) -> tuple[torch.Tensor, ...]:
    """Factors of scores, and dustbins, of two images; half of the points of the smaller one are in both."""
    rng = torch.Generator().manual_seed(seed)
    left, right = torch.randn(n, 70, generator=rng), torch.randn(m, 70, generator=rng)
    common = min(n, m) // 2
    right[:common] = left[:common] + noise * torch.randn(common, 70, generator=rng)
    bins = [torch.randn(k, generator=rng) + 8 for k in (n, m)]
    for side in bins:
        side[:common] -= 8
    return left / 2, right / 2, *bins


def alike(n: int, m: int) -> tuple[torch.Tensor, ...]:
    """The same of points that are hard to tell apart, so that many entries have some weight."""
    left, right, bins0, bins1 = described(n, m, noise=2.0)
    return 0.4 * left, right, bins0 / 4, bins1 / 4


def dense(left, right, bins0, bins1, corner: float = 0.0) -> torch.Tensor:
    """Scores with dustbins (1, N+1, M+1)."""
    rows = torch.cat([left @ right.t(), bins0[:, None]], dim=1)
    return torch.cat([rows, torch.cat([bins1, torch.tensor([corner])])[None]])[None]


@pytest.mark.parametrize(("n", "m"), [(300, 417), (1, 5), (40, 7), (97, 33)])
def test_candidates_are_the_largest_of_rows_and_columns(n: int, m: int) -> None:
    left, right, bins0, bins1 = described(n, m)
    where, values, rests, weights = kernel_candidates.find_candidates(left, right, bins0, bins1, 8)
    odds = left @ right.t() - bins0[:, None] - bins1
    rows = torch.repeat_interleave(torch.arange(n), where.starts.long().diff())
    found = torch.zeros(n, m, dtype=torch.bool)
    found[rows, where.columns.long()] = True
    assert int(found.sum()) == len(values)  # none twice
    expected = odds >= odds.topk(min(8, m), 1).values[:, -1:]
    expected |= odds >= odds.topk(min(8, n), 0).values[-1:]
    near = (found != expected).nonzero()  # but for entries that rounding may put on either side
    assert len(near) <= n * m / 2000
    torch.testing.assert_close(values, odds[found], atol=2e-3, rtol=0)
    outside = odds.clamp(max=8).exp().masked_fill(found, 0)
    for axis, rest in enumerate(rests):
        torch.testing.assert_close(rest, outside.sum(1 - axis), atol=0.02, rtol=5e-3)
    torch.testing.assert_close(weights.float(), outside, atol=1e-4, rtol=8e-3)
    assert int((weights == 0).sum()) == len(values)
    turned = torch.repeat_interleave(torch.arange(m), where.column_starts.long().diff())
    assert (rows[where.order.long()] == where.rows).all() and (
        where.columns[where.order.long()] == turned
    ).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_of_equal_entries_the_first_are_candidates(threads: int) -> None:
    rng, before = torch.Generator().manual_seed(2), torch.get_num_threads()
    left, right = (torch.randint(-1, 2, (count, 6), generator=rng).float() for count in (230, 300))
    torch.set_num_threads(threads)
    try:
        where = kernel_candidates.find_candidates(left, right, torch.zeros(230), torch.zeros(300), 8)[0]
    finally:
        torch.set_num_threads(before)
    found, expected = torch.zeros(2, 230, 300, dtype=torch.bool)
    found[torch.repeat_interleave(torch.arange(230), where.starts.long().diff()), where.columns.long()] = True
    odds = left @ right.t()
    expected.scatter_(1, odds.argsort(stable=True, dim=1, descending=True)[:, :8], True)
    expected.scatter_(0, odds.argsort(stable=True, dim=0, descending=True)[:8], True)
    assert found.equal(expected)


def everything(n: int = 90, m: int = 120, corner: float = 0.0, **kind) -> tuple[Candidates, torch.Tensor]:
    """All entries as candidates, and the dense scores."""
    given = described(n, m, **kind)
    return candidates_of(*given, corner, max(n, m)), dense(*given, corner)


@pytest.mark.parametrize("sizes", [(90, 120), (120, 90), (100, 100)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_transport_is_that_of_the_dense_scores(sizes: tuple[int, int], scale: float) -> None:
    candidates, scores = everything(*sizes, corner=0.5)
    bins = scale * candidates.bins0, scale * candidates.bins1
    nothing = tuple(torch.full_like(x, -1000) for x in candidates.rests)
    candidates = candidates.moved(scale * candidates.scores, bins, nothing)
    scores = scale * scores
    scores[0, -1, -1] = 0.5
    for start in (None, sinkhorn(scores, max_iterations=3)):
        expected = sinkhorn(scores, max_iterations=40, start=start)
        found = candidates.sinkhorn(40, 1e-2, start)
        ours = CandidateAssignment(candidates, found)
        theirs = plan(scores, expected)
        assert abs(ours.iterations - theirs.iterations) <= 1 and ours.converged == theirs.converged
        likely = theirs.log_scores > -5
        torch.testing.assert_close(
            ours.log_scores[likely], theirs.log_scores[likely], atol=0.02 * scale, rtol=0
        )
        torch.testing.assert_close(ours.log_unmatched0, theirs.log_unmatched0, atol=0.02 * scale, rtol=0)
        torch.testing.assert_close(ours.log_unmatched1, theirs.log_unmatched1, atol=0.02 * scale, rtol=0)
        best, dense_best = ours.mutual_best, mutual_best(ours.log_scores)
        assert best.partners.equal(dense_best.partners) and best.mutual.equal(dense_best.mutual)
        torch.testing.assert_close(best.scores, dense_best.scores)


@pytest.mark.parametrize("rounds", ["first", "later"])
@pytest.mark.parametrize("start", [None, "begun"])
@pytest.mark.parametrize("scale", [1.0, 25.0])
@pytest.mark.parametrize("sizes", [(60, 80), (80, 60)])
def test_transport_counts_what_is_no_candidate(rounds: str, start: str | None, scale: float, sizes) -> None:
    """As if every other entry were there: each with its own score at first, then with one of rank one."""
    left, right, *bins = alike(*sizes)
    few = candidates_of(scale * left, right, *bins, 0.3, 3)
    kept = torch.zeros(*sizes, dtype=torch.bool)
    kept[few.rows, few.columns] = True
    scores = torch.full((1, sizes[0] + 1, sizes[1] + 1), -torch.inf)
    scores[0, few.rows, few.columns] = few.scores
    if rounds == "first":
        others = few.weights.float().log() + few.bins0[:, None] + few.bins1
    else:
        few = few.moved(few.scores, (few.bins0, few.bins1), few.rests)
        others = few.rests[0][:, None] + few.rests[1]  # a candidate has this besides its own
    scores[0, :-1, :-1] = torch.logaddexp(scores[0, :-1, :-1], others)
    scores[0, :-1, -1], scores[0, -1, :-1], scores[0, -1, -1] = few.bins0, few.bins1, 0.3
    begun = sinkhorn(scores, max_iterations=3) if start else None
    expected = sinkhorn(scores, max_iterations=60, start=begun)
    found = few.sinkhorn(60, 1e-2, begun)
    outside = (others.masked_fill(kept, -torch.inf) + found.u[0, :-1, None] + found.v[0, :-1]).exp().sum()
    assert outside > 1 or scale > 1
    torch.testing.assert_close(found.u, expected.u, atol=0.02, rtol=0)
    torch.testing.assert_close(found.v, expected.v, atol=0.02, rtol=0)


def test_few_candidates_weigh_as_all_do() -> None:
    """Points that look alike: without what is no candidate, too many of them would have a partner."""
    given = alike(200, 240)
    scores = dense(*given)
    exact = plan(scores, sinkhorn(scores, max_iterations=200, tolerance=1e-4))
    few = candidates_of(*given, 0.0, 4)
    nothing = few.moved(few.scores, (few.bins0, few.bins1), tuple(torch.full_like(x, -80) for x in few.rests))
    off = []
    rank_one = few.moved(few.scores, (few.bins0, few.bins1), few.rests)
    for candidates in (few, rank_one, nothing):
        found = CandidateAssignment(candidates, candidates.sinkhorn(200, 1e-4))
        off.append(float((found.log_unmatched0.exp() - exact.log_unmatched0.exp()).abs().mean()))
    assert off[0] < 0.1 * off[1] < 0.5 * off[2]


def test_consensus_on_candidates_is_consensus() -> None:
    rng = torch.Generator().manual_seed(5)
    candidates, scores = everything(80, 100)
    points0, points1 = torch.rand(1, 80, 2, generator=rng), torch.rand(1, 100, 2, generator=rng)
    points1[:, :40] = points0[:, :40] + 0.1
    matches = mutual_soft_matches(plan(scores, sinkhorn(scores)).log_scores)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        consensus = Consensus()
    expected = consensus(scores, points0, points1, matches)[0]
    found = consensus.on_candidates(candidates, points0, points1, matches)
    inner = expected[candidates.rows, candidates.columns]
    assert float((inner - scores[0, candidates.rows, candidates.columns]).abs().max()) > 1
    torch.testing.assert_close(found.scores, inner, atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(found.bins0, expected[:-1, -1], atol=1e-4, rtol=0)
    torch.testing.assert_close(found.bins1, expected[-1, :-1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("count", [0, 1, 5, 17, 300])
@pytest.mark.parametrize("spread", ["square", "line", "one place"])
def test_local_maps_are_fitted_to_the_nearest_matches(monkeypatch, count: int, spread: str) -> None:
    """However the matches lie and however many there are; a point's own match is left out."""
    rng = torch.Generator().manual_seed(4)
    places, targets = torch.rand(2, 400, 2, generator=rng), torch.rand(2, 400, 2, generator=rng)
    targets = places @ torch.tensor([[0.9, 0.2], [-0.1, 1.1]]) + 0.02 * targets
    if spread != "square":
        places[..., 1] = 0.3
    if spread == "one place":
        places[:, ::2] = places[:, :1]
    confidence = torch.zeros(2, 400)
    for side in confidence:
        side[torch.randperm(400, generator=rng)[:count]] = 0.1 + torch.rand(count, generator=rng)
    if count:
        confidence[1, confidence[1].nonzero()[0]] = 0  # the images have unequal numbers of matches
    found = fit_local_maps(places, targets, confidence)
    monkeypatch.setenv(compiled.SWITCH, "0")
    expected = fit_local_maps(places, targets, confidence)
    if spread == "one place" and count == 300:  # which of the equally near ones count is open
        assert all(x.isfinite().all() for x in found)
        return
    for ours, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, stock, rtol=2e-3, atol=2e-3)


class Network(torch.nn.Module):
    """What `assigning` needs of a network."""

    def __init__(self, rounds: int = 2) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.heads = torch.nn.ModuleList([AssignmentHead(64)])
            self.consensus = Consensus()
        torch.nn.init.orthogonal_(self.heads[0].projection.weight, gain=2.0)
        torch.nn.init.zeros_(self.heads[0].projection.bias)
        torch.nn.init.zeros_(self.heads[0].matchability.weight)
        torch.nn.init.constant_(self.heads[0].matchability.bias, -13.0)
        self.guidance = None
        self.config = type("Config", (), {})()
        self.config.assignment = AssignmentConfig(consensus=rounds)
        self.config.policy = type("Policy", (), {"early_exit": True})()

    def scores(self, side0: Side, side1: Side, depth: int) -> torch.Tensor:
        return self.heads[0](side0.x, side1.x)


def sides(noise: float = 0.3, n: int = 220, m: int = 260) -> tuple[Side, Side]:
    rng = torch.Generator().manual_seed(9)
    x0, x1 = torch.randn(1, n, 64, generator=rng), torch.randn(1, m, 64, generator=rng)
    points0, points1 = torch.rand(1, n, 2, generator=rng), torch.rand(1, m, 2, generator=rng)
    x1[:, :150] = x0[:, :150] + noise * torch.randn(1, 150, 64, generator=rng)
    points1[:, :150] = points0[:, :150] * 0.9 + 0.05
    return Side(x0, points0), Side(x1, points1)


@pytest.mark.parametrize("rounds", [0, 2])
def test_an_assignment_by_candidates_is_the_assignment(rounds: int) -> None:
    network, given = Network(rounds), sides()
    found = assigning.assign_candidates(network, *given, 0)
    expected = assigning.assign_all(network, *given, 0)
    assert isinstance(found, CandidateAssignment)
    for ours, dense_one in zip(found.mutual_best, expected.mutual_best, strict=True):
        likely = expected.mutual_best.mutual & (expected.mutual_best.scores > -2)
        assert int(likely.sum()) >= 80
        torch.testing.assert_close(ours[likely], dense_one[likely], atol=0.02, rtol=0)
    torch.testing.assert_close(found.log_unmatched0, expected.log_unmatched0, atol=0.1, rtol=0.02)
    there, back = found.mutual_best, assigning.assign_candidates(network, *given[::-1], 0).mutual_best
    pairs = {(i, int(there.partners[0, i])) for i in there.mutual[0].nonzero()[:, 0].tolist()}
    assert pairs == {(int(back.partners[0, j]), j) for j in back.mutual[0].nonzero()[:, 0].tolist()}


def test_where_points_look_alike_the_first_round_counts_every_score(monkeypatch) -> None:
    """Taken for a matrix of rank one it gave other matches, which consensus made more."""
    network, given = Network(0), sides()
    torch.nn.init.orthogonal_(network.heads[0].projection.weight, gain=1.2)
    torch.nn.init.zeros_(network.heads[0].matchability.bias)
    expected, off = assigning.assign_all(network, *given, 0), []
    for change in ({}, {"weights": None}):
        monkeypatch.setattr(
            assigning,
            "candidates_of",
            lambda *scores, change=change: replace(candidates_of(*scores, 6), **change),
        )
        found = assigning.assign_candidates(network, *given, 0)
        off.append(float((found.log_unmatched0 - expected.log_unmatched0).abs().max()))
    assert off[0] < 0.001 and off[1] > 0.02


def test_other_kinds_of_assignment_take_all_scores(monkeypatch) -> None:
    network, given = Network(), sides()
    network.config.assignment = AssignmentConfig(kind="dual_softmax")
    assert assigning.assign_candidates(network, *given, 0) is None
    network.config.assignment = AssignmentConfig(drop_unmatched=True)
    assert assigning.assign_candidates(network, *given, 0) is None
    network = Network()
    with torch.inference_mode(False), torch.enable_grad():
        assert assigning.assign_candidates(network, *given, 0) is None
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert assigning.assign_candidates(network, *given, 0) is None


def test_matches_of_two_views_are_those_of_all_scores(views, shipped_weights, monkeypatch) -> None:
    """At least 99.5 % of them."""
    pipe = load(device="cpu", max_keypoints=512)
    features, made = [pipe.extract(path) for path in views], []

    def counted(*given):
        made.append(assigning.assign_candidates(*given))
        return made[-1]

    monkeypatch.setattr(model, "assign_candidates", counted)
    found = pipe.match_features(*features).indices
    assert isinstance(made[-1], CandidateAssignment)
    monkeypatch.setattr(model, "assign_candidates", lambda *_: None)
    expected = pipe.match_features(*features).indices
    same = len({*map(tuple, found.tolist())} & {*map(tuple, expected.tolist())})
    assert len(expected) > 150 and same >= 0.995 * max(len(found), len(expected))


def test_threads_do_not_change_a_bit_of_candidates() -> None:
    given, threads = described(400, 380), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            made = candidates_of(*given, 0.0)
            potentials = made.sinkhorn(30, 1e-2)
            found.append((*made.where, made.scores, *made.rests, potentials.u, potentials.v))
    finally:
        torch.set_num_threads(threads)
    assert all(one.equal(two) for one, two in zip(*found, strict=True))
