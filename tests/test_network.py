"""The network as a matcher: batches equal singles, symmetries, refusals, and decisions that really happen."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from random_matcher import CONFIG, WITH_MATCH_PROBABILITY, as_table, matcher_with, pair, random_model

from matcher.config import ALL_LAYERS, AssignmentConfig, MatchingPolicy
from matcher.errors import UsageError
from matcher.match.adaptivity import decide
from matcher.match.network import AttentionMatcher, MatchingNetwork, resolve_precision
from matcher.types import Features, Matches

COUNTS = [(40, 30), (25, 60), (1, 12), (12, 1), (0, 9), (8, 0), (0, 0), (1, 1), (33, 33), (50, 50), (20, 64)]
GUIDED = replace(WITH_MATCH_PROBABILITY, guided=True, assignment=AssignmentConfig(consensus=2))
LIGHTGLUE = replace(
    CONFIG,
    assignment=AssignmentConfig(kind="dual_softmax"),
    policy=replace(CONFIG.policy, match_threshold=0.005),
)
CONFIGS = {"plain": CONFIG, "predicted": WITH_MATCH_PROBABILITY, "guided": GUIDED, "dual softmax": LIGHTGLUE}
SETTINGS = [(e, p) for e in (False, True) for p in (False, True)]
settings = pytest.mark.parametrize(("early_exit", "pruning"), SETTINGS)
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Features, Features]]:
    return [pair(*counts, seed=seed) for seed, counts in enumerate(COUNTS)]


def run(matcher: AttentionMatcher, pairs: list[tuple[Features, Features]]) -> list[Matches]:
    return matcher(*(Features.stack(side) for side in zip(*pairs, strict=True)))


@torch.inference_mode()
def run_padded(matcher: AttentionMatcher, pairs: list[tuple[Features, Features]]) -> list[Matches]:
    """All pairs in one batch with a mask, as on a GPU."""
    sides, found = [Features.stack(side) for side in zip(*pairs, strict=True)], {}
    for state in matcher.model.run(matcher.model.tokens(*sides)):
        if state.exiting:
            prediction = state.assign()
            found |= zip(prediction.tokens.pairs, matcher.read(prediction, *sides), strict=True)
    return [found[number] for number in range(len(pairs))]


def assert_same(first: Matches, second: Matches, tolerance: float = 1e-5) -> None:
    assert as_table(first) == pytest.approx(as_table(second), abs=tolerance, rel=0)
    names = ("layers_run", "kept0", "kept1")
    assert [getattr(first, n) for n in names] == [getattr(second, n) for n in names]


@configs
def test_exit_and_pruning_really_happen(pairs, config) -> None:
    """The tests below would prove little if no pair ever stopped or dropped a point."""
    full = run(matcher_with(False, False, config=config), pairs)
    assert {m.layers_run for m in full} == {config.context.depth}
    assert [(m.kept0, m.kept1) for m in full] == COUNTS
    assert len({m.layers_run for m in run(matcher_with(True, False, config=config), pairs)}) >= 3
    pruned = run(matcher_with(False, True, config=config), pairs)
    shares = {(m.kept0 + m.kept1) / (a + b) for m, (a, b) in zip(pruned, COUNTS, strict=True) if a + b > 20}
    assert min(shares) < 0.8 and len(shares) >= 4
    assert sum(map(len, full)) > 40


@settings
@configs
def test_a_padded_batch_gives_what_single_pairs_give(pairs, config, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning, config=config)
    alone = [run(matcher, [each])[0] for each in pairs]
    for found in (run(matcher, pairs), run_padded(matcher, pairs)):
        for whole, single in zip(found, alone, strict=True):
            assert_same(whole, single)


@settings
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
    without = run(matcher, [(features0.select(flags), features1)])[0]
    for how in (run, run_padded):
        holes = how(matcher, [(replace(features0, mask=flags), features1), pairs[1]])[0]
        assert np.array_equal(holes.indices[:, 0], flags.nonzero()[:, 0].numpy()[without.indices[:, 0]])
        assert np.array_equal(holes.indices[:, 1], without.indices[:, 1])
        assert np.array_equal(holes.points0, without.points0)
        assert holes.kept0 == without.kept0


@settings
@configs
def test_swapping_the_images_transposes_the_matches(pairs, config, early_exit: bool, pruning: bool) -> None:
    matcher = matcher_with(early_exit, pruning, config=config)
    for first, second in zip(run(matcher, pairs), run(matcher, [(b, a) for a, b in pairs]), strict=True):
        mirrored = replace(second, indices=second.indices[:, ::-1], kept0=second.kept1, kept1=second.kept0)
        assert_same(mirrored, first, tolerance=1e-3)


@settings
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


def test_the_same_input_gives_the_same_bits_and_changes_no_global_state(pairs) -> None:
    def state() -> list:
        settings = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()
        return [*settings, torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()]

    model = random_model(config=GUIDED)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = state()
    for precision in ("float32", "bfloat16"):
        matcher = AttentionMatcher(model, precision=precision)
        for first, second in zip(run(matcher, pairs), run(matcher, pairs), strict=True):
            for f in fields(Matches):
                assert np.array_equal(getattr(first, f.name), getattr(second, f.name)), f.name
    assert state() == before
    assert all(value.equal(weights[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@configs
def test_training_and_inference_see_the_same_states(pairs, config) -> None:
    """All layers without decisions, with the gradient path, is what inference runs when it never stops."""
    model = random_model(config=config)
    first, second = (Features.stack(side) for side in zip(pairs[8], strict=True))
    states = [state.tokens for state in model.run(model.tokens(first, second), ALL_LAYERS)]
    assert len(states) == config.context.depth
    assert states[-1].x.requires_grad
    with torch.no_grad():
        folded = matcher_with(False, False, config=config).model
        *_, last = folded.run(folded.tokens(first, second))
    torch.testing.assert_close(last.tokens.x, states[-1].x.detach(), atol=1e-3, rtol=1e-3)
    scores = (m.scores(t.points, t.n, 4) for m, t in ((model, states[-1]), (folded, last.tokens)))
    torch.testing.assert_close(*(s.detach() for s in scores), atol=1e-2, rtol=1e-3)


def test_gradients_are_those_of_the_assignment(pairs) -> None:
    network, sides = matcher_with(False, False).model, [Features.stack([side]) for side in pairs[0]]

    def loss(descriptors):
        (found,) = network(replace(sides[0], descriptors=descriptors), sides[1])
        return found.assignment.log_scores.amax(2).mean()

    start = sides[0].descriptors.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(start), start)
    step = 1e-2 * gradient / gradient.norm()
    with torch.no_grad():
        change = loss(start + step) - loss(start - step)
    assert float(change) == pytest.approx(2e-2 * float(gradient.norm()), rel=0.1)


def test_attention_is_sharper_among_many_keys(pairs) -> None:
    """Logits are multiplied by log n / log k with n > k keys (Chiang and Cholak 2022), also where padded."""
    block, above = random_model().layers[0].self_block, CONFIG.context.scale_logits_above
    x = torch.randn(1, 100, 48, generator=torch.Generator().manual_seed(0))
    q = block.attention.project(x)[0, :, 0].transpose(0, 1)
    sharp, plain = (block.queries_keys(x, n, None)[0] for n in (100, 40))
    torch.testing.assert_close(plain[:, :40], q[:, :40])
    torch.testing.assert_close(plain[:, 40:], q[:, 40:] * math.log(60) / math.log(above))
    torch.testing.assert_close(sharp, q * math.log(100) / math.log(above))
    with pytest.raises(UsageError, match="scale_logits_above"):
        MatchingNetwork(replace(CONFIG, context=replace(CONFIG.context, scale_logits_above=1)))


@pytest.mark.parametrize(
    ("probability", "confident", "share", "stops"),
    [
        ([1.0] * 20, [True] * 15 + [False] * 5, 0.7, True),
        ([1.0] * 20, [True] * 15 + [False] * 5, 0.8, False),
        ([1.0] * 4 + [0.0] * 96, [False] * 4 + [True] * 96, 0.9, False),  # who cannot match does not count
        ([1.0] * 4 + [0.0] * 96, [True] * 4 + [False] * 96, 0.9, True),
        ([0.001] * 20, [False] * 20, 0.99, True),  # nothing is expected
        ([], [], 0.99, True),
    ],
)
def test_a_pair_stops_when_enough_of_its_expected_matches_are_sure(probability, confident, share, stops):
    valid, policy = torch.ones(1, len(probability), dtype=torch.bool), MatchingPolicy(exit_share=share)
    given = torch.tensor([confident], dtype=torch.bool), torch.tensor([probability])
    assert bool(decide(valid, *given, valid.sum(1), policy, predicted=True)[0]) == stops


def test_features_that_do_not_fit_are_refused(pairs) -> None:
    matcher = matcher_with()
    features0, features1 = pairs[0]
    for wrong in (
        (replace(features0, kind="superpoint"), features1),
        (features0, replace(features1, kind="superpoint")),
        (features0, replace(features1, descriptors=features1.descriptors[:, :16])),
    ):
        with pytest.raises(UsageError, match="takes"):
            run(matcher, [wrong])
    expected = run(matcher, [(features0, features1)])[0]
    assert_same(run(matcher, [tuple(replace(f, kind="any") for f in (features0, features1))])[0], expected)
    with pytest.raises(UsageError, match="stack"):
        matcher(*pairs[0])
    with pytest.raises(UsageError, match="2 images"):
        matcher(Features.stack([features0] * 2), Features.stack([features1]))
    doubled = tuple(replace(f, descriptors=f.descriptors.double()) for f in pairs[0])
    assert_same(run(matcher, [doubled])[0], expected)


def test_precision_names() -> None:
    cpu = torch.device("cpu")
    assert resolve_precision("float16", cpu) == "float16"
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    assert resolve_precision("auto", cpu) == ("bfloat16" if fast else "float32")
    with pytest.raises(UsageError, match="float64"):
        resolve_precision("float64", cpu)


def test_the_first_layers_are_a_network_of_its_own_and_leave_the_whole_alone(pairs) -> None:
    matcher = matcher_with(early_exit=False, pruning=False)
    cut = matcher.first_layers(2, max_iterations=7)
    assert len(cut.model.layers) == 2 and cut.model.config.context.depth == 2
    assert len(matcher.model.layers) == len(matcher.model.heads) == CONFIG.context.depth
    sides = [Features.stack([f]) for f in pairs[0]]
    found = cut(*sides)[0]
    assert found.layers_run == 2
    assert matcher(*sides)[0].layers_run == CONFIG.context.depth
    strict = matcher.with_policy(replace(matcher.model.config.policy, match_threshold=0.9))
    assert strict(*sides)[0].scores.min(initial=1.0) > 0.9
    assert matcher.model.config.policy.match_threshold == CONFIG.policy.match_threshold
