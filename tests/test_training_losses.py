"""Losses by hand, against converged and fully unrolled Sinkhorn, and on padded batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from training_data import SIFT, random_batch

from matcher.config import ALL_LAYERS
from matcher.match.network import MatchingNetwork
from matcher.match.sinkhorn import log_assignment
from matcher.train.losses import (
    assignment_loss,
    description_loss,
    head_loss,
    labelled_layers,
    matchability_loss,
    matching_loss,
)
from matcher.train.pairs import IGNORED, Keypoints, PairBatch
from matcher.types import UNMATCHED


def test_the_loss_is_the_mean_log_likelihood_of_the_ground_truth():
    scores = 3 * torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(4))
    scores[:, -1, -1] = 0
    partner0 = torch.tensor([[2, UNMATCHED, IGNORED]])
    partner1 = torch.tensor([[UNMATCHED, IGNORED, 0, UNMATCHED]])
    log_p = log_assignment(scores, 200, 3)[0]
    expected = -0.5 * (log_p[0, 2] + 0.5 * (log_p[1, -1] + (log_p[-1, 0] + log_p[-1, 3]) / 2))
    torch.testing.assert_close(assignment_loss(log_p[None], partner0, partner1), expected)
    ignored = torch.full((1, 3), IGNORED), torch.full((1, 4), IGNORED)
    assert assignment_loss(log_p[None], *ignored) == 0 and matchability_loss(scores, *ignored) == 0


# --- Layers of a network.


def network(seed: int = 0, **changes: object) -> MatchingNetwork:
    torch.manual_seed(seed)
    model = MatchingNetwork(replace(SIFT.matcher.network, policy=ALL_LAYERS, **changes))
    with torch.no_grad():  # no parameter at its special initial value
        for value in model.parameters():
            value += 0.05 * torch.randn(value.shape)
    return model


def padded(batch: PairBatch, more: int) -> PairBatch:
    """The same pairs with further keypoints that do not exist."""

    def longer(values: Tensor, fill: float) -> Tensor:
        shape = (len(values), more, *values.shape[2:])
        return torch.cat([values, values.new_full(shape, fill)], dim=1)

    sides = [
        side.with_valid(
            keypoints=longer(side.keypoints, 7.0),
            descriptors=longer(side.descriptors, 0.1),
            scores=longer(side.scores, 1.0),
            scales=longer(side.scales, 2.0),
            orientations=longer(side.orientations, 0.3),
            mask=longer(side.mask, False),
        )
        for side in (batch.features0, batch.features1)
    ]
    partners = (longer(partner, IGNORED) for partner in (batch.partner0, batch.partner1))
    there = (longer(place, torch.nan) for place in (batch.corresponding0, batch.corresponding1))
    return PairBatch(*sides, *partners, *there)


def test_keypoints_that_do_not_exist_change_no_loss():
    model, batch = network(), random_batch(np.random.default_rng(3))
    recipe, losses, gradients = SIFT.matcher, [], []
    for one in (batch, padded(batch, 5)):
        model.zero_grad()
        loss = matching_loss(model, one, recipe, torch.Generator().manual_seed(1))
        loss.backward()
        losses.append(loss.detach())
        gradients.append(torch.cat([p.grad.flatten() for p in model.layers.parameters()]))
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)  # few iterations of Sinkhorn
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
    heads = [head_loss(model, one, recipe).detach() for one in (batch, padded(batch, 5))]
    torch.testing.assert_close(*heads, rtol=0.02, atol=0)


def test_points_that_are_dropped_are_no_partners():
    model, batch = network(), random_batch(np.random.default_rng(5))
    layers = labelled_layers(model, batch, after=0, share=0.5)
    whole, rest = layers[0].labels, layers[1].labels
    assert [[side.partner.shape[1] for side in sides] for sides in (whole, rest)] == [[12, 12], [6, 6]]
    probabilities = [
        model.match_logits(side.x.flatten(0, 1), 0).view(side.x.shape[:2]) for side in layers[0].sides
    ]
    chosen = [each.topk(6, 1).indices.sort(1).values for each in probabilities]
    for side, kept, theirs in ((0, *chosen), (1, *chosen[::-1])):
        targets = whole[side].target.gather(1, kept[..., None].expand(-1, -1, 2))
        torch.testing.assert_close(rest[side].target, targets, equal_nan=True)
        before, after = whole[side].partner.gather(1, kept), rest[side].partner
        assert torch.equal(after[before < 0], before[before < 0])
        still = (before[..., None] == theirs[:, None]).any(2)
        assert torch.equal(theirs.gather(1, after.clamp_min(0))[still], before[still])
        assert (after[~still & (before >= 0)] == UNMATCHED).all() and still.any()


def test_heads_learn_alone_and_dropping_teaches_those_for_pruning():
    model, batch = network(), random_batch(np.random.default_rng(2))
    head_loss(model, batch, SIFT.matcher).backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    heads = ("confidence.0", "match_probability.0")
    assert with_gradient == {f"{head}.{part}" for head in heads for part in ("weight", "bias")}
    model.zero_grad()
    recipe = replace(SIFT.matcher, kept_shares=(1.0, 0.999))
    for seed in range(4):
        matching_loss(model, batch, recipe, torch.Generator().manual_seed(seed)).backward()
    assert model.match_probability[0].weight.grad.any() and model.confidence[0].weight.grad is None


# --- Keypoints.


def described(own: Tensor, corresponding: Tensor, spacing: float = 20.0) -> tuple[Keypoints, Tensor, Tensor]:
    points = torch.arange(5.0)[None, :, None].expand(2, 5, 2) * spacing
    return Keypoints(points, own, torch.ones(2, 5, dtype=torch.bool)), points, corresponding


def random_descriptors() -> Tensor:
    values = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0)).expand(2, 5, 8)
    return torch.nn.functional.normalize(values, dim=-1)  # the same in both images


def test_description_loss_wants_each_descriptor_at_its_position():
    own, valid, chosen = random_descriptors(), torch.ones(2, 5, dtype=torch.bool), torch.arange(5)
    scale = torch.tensor(20.0)
    right = description_loss(*described(own, own), chosen, valid, scale)
    wrong = description_loss(*described(own, own.roll(1, 1)), chosen, valid, scale)
    assert right < 0.5 < wrong
    crowded = described(own, own.roll(1, 1), spacing=0.1)  # nearer points need not differ
    assert float(description_loss(*crowded, chosen, valid, scale)) == pytest.approx(0, abs=1e-5)
    assert float(description_loss(*described(own, own), chosen, ~valid, scale)) == 0
