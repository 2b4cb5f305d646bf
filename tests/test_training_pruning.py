"""Points that are dropped during training, and the labels of those that are left."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from training_data import TINY, random_batch, with_steps

from matcher.errors import UsageError
from matcher.match.network import MatchingNetwork
from matcher.train.cached_pairs import IGNORED, check_recipe
from matcher.train.losses import PRUNED_AFTER, Labels, Pruning, labelled_layers
from matcher.train.matcher_training import Trainer
from matcher.train.optimisers import build_optimisers
from matcher.types import UNMATCHED

CPU = torch.device("cpu")
FORESEEING = replace(TINY, network=replace(TINY.network, match_probability=True))


def with_shares(*shares: float):
    return replace(FORESEEING, optimiser=replace(FORESEEING.optimiser, kept_shares=shares))


@pytest.fixture
def batch():
    return random_batch(np.random.default_rng(3))


@pytest.fixture
def model() -> MatchingNetwork:
    torch.manual_seed(0)
    return MatchingNetwork(FORESEEING.network)


def test_points_that_go_on_keep_their_partners_and_positions(model, batch):
    before, *_, after = labelled_layers(model, batch, CPU, Pruning(after=0, share=0.5))
    count, kept = batch.partner0.shape[1], after.labels.partners[0].shape[1]
    assert kept == round(count / 2) and after.sides[0].x.shape[1] == kept
    assert before.labels.partners[0] is not after.labels.partners[0]
    for pair in range(len(batch)):
        # Which point each one left was: tokens carry their positions.
        was = [
            torch.cdist(left.positions[pair], all_.positions[pair]).argmin(1)
            for left, all_ in zip(after.sides, before.sides, strict=True)
        ]
        for side in (0, 1):
            old = before.labels.partners[side][pair][was[side]]
            new = after.labels.partners[side][pair]
            for partner, moved in zip(old.tolist(), new.tolist(), strict=True):
                if partner < 0:
                    assert moved == partner
                elif partner in (others := was[1 - side].tolist()):
                    assert others[moved] == partner
                else:
                    assert moved == UNMATCHED
            torch.testing.assert_close(
                after.labels.targets[side][pair],
                before.labels.targets[side][pair][was[side]],
                equal_nan=True,
            )


def test_the_likeliest_points_go_on(model, batch):
    first, second = labelled_layers(model, batch, CPU, Pruning(after=0, share=0.25))[:2]
    for before, after in zip(first.sides, second.sides, strict=True):
        probabilities = model.match_probabilities(before.x.flatten(0, 1), 0).view(len(batch), -1)
        for pair in range(len(batch)):
            was = torch.cdist(after.positions[pair], before.positions[pair]).argmin(1)
            left_out = torch.ones(len(probabilities[pair]), dtype=torch.bool)
            left_out[was] = False
            assert probabilities[pair][was].min() >= probabilities[pair][left_out].max()


def test_without_pruning_all_layers_share_their_labels(model, batch):
    layers = labelled_layers(model, batch, CPU)
    assert all(layer.labels is layers[0].labels for layer in layers)
    assert torch.equal(layers[0].labels.partners[0], batch.partner0)
    visible = batch.corresponding0.isfinite().all(2)
    assert torch.equal(Labels.of(batch, CPU).targets[0].isfinite().all(2), visible) and visible.any()


def test_what_is_pruned_is_drawn():
    rng = torch.Generator().manual_seed(0)
    drawn = [Pruning.drawn((1.0, 0.5), 6, rng) for _ in range(60)]
    assert 15 < sum(each is None for each in drawn) < 45
    assert {each.after for each in drawn if each} == set(range(PRUNED_AFTER))
    assert {Pruning.drawn((0.5,), 2, rng).after for _ in range(20)} == {0}  # never after the last layer
    assert Pruning.drawn((0.5,), 1, rng) is None


def test_the_loss_falls_with_pruning_and_the_heads_learn_along(batch):
    trainer = Trainer(with_steps(with_shares(1.0, 0.7), 60), CPU)
    before = [p.detach().clone() for p in trainer.model.match_probability.parameters()]
    frozen = [p.detach().clone() for p in trainer.model.confidence.parameters()]
    losses = [trainer.step(batch) for _ in range(60)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:3])
    after = trainer.model.match_probability.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(frozen, trainer.model.confidence.parameters(), strict=True))


def test_without_pruning_the_heads_are_left_to_the_second_stage(batch):
    trainer = Trainer(FORESEEING, CPU)
    trainer.step(batch)
    assert all(p.grad is None for p in trainer.model.match_probability.parameters())
    optimised = {
        id(p)
        for optimiser in build_optimisers(trainer.model, FORESEEING.optimiser)
        for group in optimiser.param_groups
        for p in group["params"]
    }
    assert not optimised & {id(p) for p in trainer.model.match_probability.parameters()}


@pytest.mark.parametrize("shares", [(), (1.0, 0.0), (1.0, 1.2), (0.5,)])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(UsageError, match=r"optimiser\.kept_shares: above 0 and at most 1, and 1 among them"):
        check_recipe(with_shares(*shares))


def test_networks_without_heads_for_it_are_not_pruned():
    recipe = replace(with_shares(1.0, 0.5), network=TINY.network)
    with pytest.raises(UsageError, match=r"kept_shares: below 1 only with network\.match_probability"):
        check_recipe(recipe)
    shallow = replace(FORESEEING.network, context=replace(FORESEEING.network.context, depth=1))
    with pytest.raises(UsageError, match=r"kept_shares: .* and 2 layers"):
        check_recipe(replace(with_shares(1.0, 0.5), network=shallow))


def test_ignored_points_stay_ignored(model, batch):
    ignored = replace(batch, partner0=torch.full_like(batch.partner0, IGNORED))
    last = labelled_layers(model, ignored, CPU, Pruning(0, 0.5))[-1]
    assert (last.labels.partners[0] == IGNORED).all()
