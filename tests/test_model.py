"""The network as a matcher: batches equal singles, symmetries, refusals, and decisions that really happen."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from random_matcher import CONFIG, matcher_with, pair, random_model

from matcher.config import ALL_LAYERS, ContextConfig
from matcher.errors import UsageError
from matcher.match.network import AttentionMatcher, MatchingNetwork, inference_network, resolve_precision
from matcher.types import Features, Matches

COUNTS = [(40, 30), (25, 60), (1, 12), (12, 1), (0, 9), (8, 0), (0, 0), (1, 1), (33, 33), (50, 50), (20, 64)]
SETTINGS = [(e, p) for e in (False, True) for p in (False, True)]


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Features, Features]]:
    return [pair(*counts, seed=seed) for seed, counts in enumerate(COUNTS)]


def run(matcher: AttentionMatcher, pairs: list[tuple[Features, Features]]) -> list[Matches]:
    return matcher(*(Features.stack(side) for side in zip(*pairs, strict=True)))


def as_table(matches: Matches) -> dict[tuple[int, int], float]:
    return dict(zip(map(tuple, matches.indices.tolist()), matches.scores.tolist(), strict=True))


def assert_same(first: Matches, second: Matches, tolerance: float = 1e-5) -> None:
    assert as_table(first) == pytest.approx(as_table(second), abs=tolerance, rel=0)
    names = ("layers_run", "kept0", "kept1")
    assert [getattr(first, n) for n in names] == [getattr(second, n) for n in names]


def test_exit_and_pruning_really_happen(pairs) -> None:
    """The tests below would prove little if no pair ever stopped or dropped a point."""
    full = run(matcher_with(False, False), pairs)
    assert {m.layers_run for m in full} == {CONFIG.context.depth}
    assert [(m.kept0, m.kept1) for m in full] == COUNTS
    exits = run(matcher_with(True, False), pairs)
    assert len({m.layers_run for m in exits}) >= 3
    assert [(m.kept0, m.kept1) for m in exits] == COUNTS
    pruned = run(matcher_with(False, True), pairs)
    assert {m.layers_run for m in pruned} == {CONFIG.context.depth}
    shares = {(m.kept0 + m.kept1) / (a + b) for m, (a, b) in zip(pruned, COUNTS, strict=True) if a + b > 20}
    assert min(shares) < 0.6
    assert len(shares) >= 4
    both = run(matcher_with(True, True), pairs)
    assert len({m.layers_run for m in both}) >= 3
    assert any(m.kept0 + m.kept1 < a + b for m, (a, b) in zip(both, COUNTS, strict=True))
    assert sum(map(len, full)) > 100
    assert any(len(m) < 0.95 * min(c) for m, c in zip(full, COUNTS, strict=True) if min(c) > 20)


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_a_masked_batch_gives_what_single_pairs_give(pairs, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning)
    for whole, single in zip(run(matcher, pairs), pairs, strict=True):
        assert_same(whole, run(matcher, [single])[0])


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_what_fills_the_padding_does_not_matter(pairs, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning)
    batch = [Features.stack(side) for side in zip(*pairs, strict=True)]
    rng = torch.Generator().manual_seed(1)

    def soiled(features: Features) -> Features:
        changed = {}
        for name in ("keypoints", "descriptors", "scores", "scales", "orientations"):
            value = getattr(features, name).clone()
            value[~features.mask] = 1e3 * torch.randn(value[~features.mask].shape, generator=rng)
            changed[name] = value
        return replace(features, **changed)

    for clean, dirty in zip(matcher(*batch), matcher(*map(soiled, batch)), strict=True):
        assert np.array_equal(clean.indices, dirty.indices)
        assert np.array_equal(clean.scores, dirty.scores)


def test_holes_in_a_mask_are_points_that_are_not_there(pairs) -> None:
    matcher = matcher_with()
    features0, features1 = pairs[0]
    flags = torch.rand(len(features0), generator=torch.Generator().manual_seed(2)) < 0.7
    holes = run(matcher, [(replace(features0, mask=flags), features1)])[0]
    without = run(matcher, [(features0.select(flags), features1)])[0]
    assert np.array_equal(holes.indices[:, 0], flags.nonzero()[:, 0].numpy()[without.indices[:, 0]])
    assert np.array_equal(holes.indices[:, 1], without.indices[:, 1])
    assert np.array_equal(holes.points0, without.points0)
    assert holes.kept0 == without.kept0


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_swapping_the_images_transposes_the_assignment(pairs, early_exit: bool, pruning: bool) -> None:
    model = matcher_with(early_exit, pruning).model
    first, second = (Features.stack(side) for side in zip(*pairs, strict=True))
    with torch.no_grad():
        there, back = model(first, second).pairs, model(second, first).pairs
    for a, b in zip(there, back, strict=True):
        assert a.index0.equal(b.index1)
        assert a.index1.equal(b.index0)
        assert a.layers_run == b.layers_run
        columns = [("log_scores", "log_scores"), ("log_unmatched0", "log_unmatched1")]
        for name, mirror in (*columns, ("log_unmatched1", "log_unmatched0")):
            p, q = getattr(a.assignment, name)[0].exp(), getattr(b.assignment, mirror)[0].exp().t()
            assert (p - q).abs().le(2 * CONFIG.assignment.tolerance).all()


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_swapping_the_images_transposes_the_matches(pairs, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning)
    for first, second in zip(run(matcher, pairs), run(matcher, [(b, a) for a, b in pairs]), strict=True):
        mirrored = replace(second, indices=second.indices[:, ::-1], kept0=second.kept1, kept1=second.kept0)
        assert_same(mirrored, first, tolerance=1e-4)


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_permuting_the_points_permutes_the_matches(pairs, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning)
    rng = torch.Generator().manual_seed(3)
    for features0, features1 in pairs:
        order0, order1 = (torch.randperm(len(f), generator=rng) for f in (features0, features1))
        plain = run(matcher, [(features0, features1)])[0]
        mixed = run(matcher, [(features0.select(order0), features1.select(order1))])[0]
        names = [order0.numpy()[mixed.indices[:, 0]], order1.numpy()[mixed.indices[:, 1]]]
        assert_same(replace(mixed, indices=np.stack(names, axis=1)), plain)


def test_matches_hold_what_they_say(pairs) -> None:
    for (features0, features1), matches in zip(pairs, run(matcher_with(), pairs), strict=True):
        assert matches.indices.dtype == np.int64
        assert matches.indices.shape == (len(matches), 2)
        assert matches.points0.dtype == matches.points1.dtype == matches.scores.dtype == np.float32
        assert np.array_equal(matches.points0, features0.keypoints.numpy()[matches.indices[:, 0]])
        assert np.array_equal(matches.points1, features1.keypoints.numpy()[matches.indices[:, 1]])
        assert len(np.unique(matches.indices[:, 0])) == len(np.unique(matches.indices[:, 1])) == len(matches)
        assert (np.diff(matches.scores) <= 0).all()
        assert ((matches.scores > CONFIG.policy.match_threshold) & (matches.scores <= 1)).all()


@pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
def test_the_same_input_gives_the_same_bits(pairs, early_exit: bool, pruning: bool) -> None:
    runs = [run(matcher_with(early_exit, pruning), pairs) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        for f in fields(Matches):
            assert np.array_equal(getattr(first, f.name), getattr(second, f.name)), f.name


def test_no_global_state_is_changed(pairs) -> None:
    def state() -> list:
        return [
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_rng_state().tolist(),
        ]

    model = random_model()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = state()
    for precision in ("float32", "bfloat16"):
        run(AttentionMatcher(model, precision=precision), pairs)
    assert state() == before
    for name, value in model.state_dict().items():
        assert value.equal(weights[name]), name
    assert all(p.requires_grad for p in model.parameters())


def test_half_precision_keeps_the_digits_of_phases_and_heads() -> None:
    model = random_model()
    half = AttentionMatcher(model, precision="bfloat16").model
    assert half.layers[0].self_block.weight.dtype == half.project.weight.dtype == torch.bfloat16
    kept = {
        k: v for k, v in model.state_dict().items() if k.split(".")[0] in ("position", "heads", "confidence")
    }
    assert len(kept) > 10
    for name, value in kept.items():
        assert half.state_dict()[name].equal(value), name


@pytest.mark.parametrize(("early_exit", "pruning"), [(False, False), (True, True)])
def test_bfloat16_finds_the_same_matches(early_exit: bool, pruning: bool) -> None:
    many = [pair(300, 280, seed=seed, noise=0.1) for seed in range(4)]
    exact, coarse = (run(matcher_with(early_exit, pruning, p), many) for p in ("float32", "bfloat16"))
    found = sum(len(as_table(a).keys() & as_table(b).keys()) for a, b in zip(exact, coarse, strict=True))
    total = sum(map(len, exact))
    assert total > 300
    assert found >= 0.99 * total
    assert sum(map(len, coarse)) <= 1.01 * total


def test_training_and_inference_see_the_same_states(pairs) -> None:
    """All layers without decisions, with the gradient path, is what inference runs when it never stops."""
    model = random_model()
    first, second = (Features.stack(side) for side in zip(pairs[8], strict=True))
    states = [state.tokens for state in model.run(model.tokens(first, second), ALL_LAYERS)]
    assert len(states) == CONFIG.context.depth
    assert states[-1].x.requires_grad
    scores = model.heads[-1](*states[-1].x.split([33, 33]))
    prediction = matcher_with(False, False).model(first, second).pairs[0]
    margin = prediction.assignment.log_scores[0] - scores[:-1, :-1].detach()
    # log P − scores is u + v: a sum of a row's and a column's potential.
    rest = margin - margin[:1] - margin[:, :1] + margin[0, 0]
    assert rest.abs().max() < 1e-3


def test_features_of_another_kind_are_refused(pairs) -> None:
    matcher = matcher_with()
    features0, features1 = pairs[0]
    with pytest.raises(UsageError, match="takes sift features, not superpoint"):
        run(matcher, [(replace(features0, kind="superpoint"), features1)])
    with pytest.raises(UsageError, match="takes sift features, not superpoint"):
        run(matcher, [(features0, replace(features1, kind="superpoint"))])
    expected = run(matcher, [(features0, features1)])[0]
    assert_same(run(matcher, [tuple(replace(f, kind="any") for f in (features0, features1))])[0], expected)


def test_descriptors_of_another_size_are_refused(pairs) -> None:
    features0, features1 = pairs[0]
    short = replace(features1, descriptors=features1.descriptors[:, :16])
    with pytest.raises(UsageError, match="takes 32-d descriptors, not 16-d"):
        run(matcher_with(), [(features0, short)])


def test_single_images_and_uneven_batches_are_refused(pairs) -> None:
    matcher = matcher_with()
    with pytest.raises(UsageError, match="stack"):
        matcher(*pairs[0])
    with pytest.raises(UsageError, match="2 images cannot pair with 1"):
        matcher(Features.stack([pairs[0][0]] * 2), Features.stack([pairs[0][1]]))


def test_float64_descriptors_are_taken(pairs) -> None:
    matcher = matcher_with()
    doubled = [tuple(replace(f, descriptors=f.descriptors.double()) for f in pair) for pair in pairs[:2]]
    for first, second in zip(run(matcher, doubled), run(matcher, pairs[:2]), strict=True):
        assert_same(first, second)


def test_names_of_the_parameters() -> None:
    """Weights files hold these names; a change of them makes every file unreadable."""
    names = {
        ".".join("N" if part.isdigit() else part for part in k.split("."))
        for k in random_model().state_dict()
    }
    block = ("attention.qkv", "attention.out", "ffn.widen", "ffn.norm", "ffn.narrow")
    linear = [f"layers.N.{side}_block.{part}" for side in ("self", "cross") for part in block]
    linear += ["project", "heads.N.projection", "heads.N.matchability", "confidence.N"]
    assert names == {f"{n}.{kind}" for n in linear for kind in ("weight", "bias")} | {
        "position.frequencies.weight"
    }


@pytest.mark.parametrize("depth", [1, 2])
def test_shallow_networks_run(pairs, depth: int) -> None:
    torch.manual_seed(0)
    model = MatchingNetwork(replace(CONFIG, context=ContextConfig(dim=48, heads=2, depth=depth)))
    matches = run(AttentionMatcher(model, precision="float32"), pairs[:3])
    assert all(m.layers_run <= depth for m in matches)
    assert len(matches[0]) > 0


def test_a_width_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match=r"context\.dim 50"):
        MatchingNetwork(replace(CONFIG, context=ContextConfig(dim=50, heads=4)))


def test_precision_names() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("float16", cpu) == "float16"
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    assert resolve_precision("auto", cpu) == ("bfloat16" if fast else "float32")
    with pytest.raises(UsageError, match="float64"):
        resolve_precision("float64", cpu)


@pytest.mark.parametrize("together", [1, 200])
def test_batches_run_in_groups_on_a_processor(pairs, monkeypatch, together: int) -> None:
    matcher = matcher_with(False, False)
    expected = run(matcher, pairs)
    sizes = []

    def counted(self, tokens, *arguments):
        sizes.append((len(tokens.pairs), len(tokens.x)))
        return true_run(self, tokens, *arguments)

    true_run = MatchingNetwork.run
    monkeypatch.setattr(MatchingNetwork, "run", counted)
    monkeypatch.setattr("matcher.match.context.TOGETHER", together)
    for found, known in zip(run(matcher, pairs), expected, strict=True):
        assert_same(found, known)
    assert sum(number for number, _ in sizes) == len(pairs)
    assert len(sizes) > 1
    assert all(number == 1 or count <= together for number, count in sizes)


@torch.no_grad()
def test_an_inference_network_shares_nothing_with_its_source(pairs) -> None:
    source = random_model()
    frozen = inference_network(source, precision="float32")
    sides = [Features.stack([f]) for f in pairs[0]]
    before = frozen(*sides).pairs[0].assignment.log_scores
    torch.testing.assert_close(source(*sides).pairs[0].assignment.log_scores, before, atol=1e-3, rtol=1e-3)
    for value in source.state_dict().values():
        value.mul_(1.1).add_(0.01)
    assert torch.equal(frozen(*sides).pairs[0].assignment.log_scores, before)
    changed = inference_network(source, precision="float32")(*sides).pairs[0]
    now = source(*sides).pairs[0]
    assert changed.assignment.log_scores.shape == now.assignment.log_scores.shape
    torch.testing.assert_close(changed.assignment.log_scores, now.assignment.log_scores, atol=1e-3, rtol=1e-3)


def test_a_network_trains_on_after_an_inference_network_was_made(pairs) -> None:
    source = random_model().train()
    tokens = source.tokens(*(Features.stack([f]) for f in pairs[0]))
    frozen = inference_network(source, precision="float32")
    optimiser = torch.optim.SGD(source.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        *_, last = (state.tokens.x for state in source.run(tokens, ALL_LAYERS))
        loss = last.square().mean()
        losses.append(float(loss))
        optimiser.zero_grad()
        loss.backward(retain_graph=True)
        optimiser.step()
    assert source.layers[0].self_block.attention.qkv.weight.grad.abs().sum() > 0
    assert losses[2] < losses[1] < losses[0]
    assert not any(p.requires_grad for p in frozen.parameters()) and source.training and not frozen.training


def test_the_first_layers_are_a_network_of_its_own_and_leave_the_whole_alone(pairs) -> None:
    matcher = matcher_with(early_exit=False, pruning=False)
    cut = matcher.adjusted(2, max_iterations=7)
    assert len(cut.model.layers) == 2 and cut.model.config.context.depth == 2
    assert len(matcher.model.layers) == len(matcher.model.heads) == CONFIG.context.depth
    sides = [Features.stack([f]) for f in pairs[0]]
    found = cut(*sides)[0]
    with torch.inference_mode():
        states = list(matcher.model.run(matcher.model.tokens(*sides)))
        prediction = states[1].assign([0])[0]
    assert found.layers_run == 2 and prediction.layers_run == 2
    assert matcher(*sides)[0].layers_run == CONFIG.context.depth
    strict = matcher.adjusted(policy=replace(matcher.model.config.policy, match_threshold=0.9))
    assert strict(*sides)[0].scores.min(initial=1.0) > 0.9
    assert matcher.model.config.policy.match_threshold == CONFIG.policy.match_threshold
