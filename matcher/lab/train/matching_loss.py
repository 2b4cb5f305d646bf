"""The matcher's loss on a batch of labelled pairs: assignment at several layers, predicted positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from matcher.config import ALL_LAYERS
from matcher.lab.train.labels import PairBatch
from matcher.lab.train.losses import (
    assignment_loss,
    correspondence_loss,
    log_dual_softmax,
    matchability_loss,
    mean_similarity_loss,
)
from matcher.lab.train.recipe import OptimiserRecipe
from matcher.lab.train.stage import mixed_precision
from matcher.match.network.consensus import mutual_soft_matches
from matcher.match.network.correspondence import Side
from matcher.match.network.model import MatchingNetwork
from matcher.match.network.position import normalise_positions
from matcher.match.network.tokens import Tokens
from matcher.match.sinkhorn import log_assignment


def matching_loss(
    model: MatchingNetwork,
    states: list[tuple[Side, Side]],
    batch: PairBatch,
    recipe: OptimiserRecipe,
    rng: torch.Generator,
) -> Tensor:
    """Mean over some inner layers, drawn at random, and the last one, plus the loss of the last one.

    Args:
        model: the network.
        states: of its layers, from `paired_states`.
        batch: the pairs with their labels.
        recipe: weights of the losses, number of inner layers.
        rng: draws the inner layers.
    """
    device = states[-1][0].x.device
    inner = torch.randperm(len(states) - 1, generator=rng)[: recipe.inner_layers].tolist()
    if not model.config.assignment.every_layer:  # one head, for the last layer only
        inner = []
    partners = batch.partner0.to(device), batch.partner1.to(device)
    losses = []
    for depth in (*inner, len(states) - 1):
        with mixed_precision(device):
            scores = model.scores(*states[depth], depth)
        steady = recipe.matchability_weight * matchability_loss(scores, *partners)
        steady = steady + recipe.mean_similarity_weight * mean_similarity_loss(scores)
        rounds = 0 if depth in inner else model.config.assignment.consensus
        found = assignments(model, scores, states[depth], recipe, rounds)
        losses += [assignment_loss(log_p, *partners) + steady for log_p in found]
    loss = torch.stack(losses).mean() + losses[-1]
    if model.guidance is None:
        return loss
    return loss + recipe.correspondence_weight * _correspondence_loss(states, batch, device)


def _correspondence_loss(states: list[tuple[Side, Side]], batch: PairBatch, device: torch.device) -> Tensor:
    """Mean over all layers and both images."""
    losses = []
    sides = (batch.corresponding0, batch.features1), (batch.corresponding1, batch.features0)
    for side, (positions, other) in enumerate(sides):
        visible = positions.isfinite().all(-1).to(device)
        target = normalise_positions(replace(other, keypoints=positions.nan_to_num(0.0))).to(device)
        losses += [correspondence_loss(pair[side].predicted, target, visible) for pair in states]
    return torch.stack(losses).mean()


def paired_states(
    model: MatchingNetwork, batch: PairBatch, device: torch.device, *, align: bool = True
) -> list[tuple[Side, Side]]:
    """The tokens of image 0 and 1 after each layer, (B, N, …) float32.

    Args:
        model: the network.
        batch: pairs.
        device: of the network.
        align: whether to turn descriptors to fit, where the batch does not know the turn of each image.
    """
    with mixed_precision(device):
        features0, features1 = batch.features0.to(device), batch.features1.to(device)
        tokens = model.tokens(features0, features1, align=align and not batch.turns_known)
        return [_paired(state.tokens) for state in model.run(tokens, ALL_LAYERS)]


def _paired(tokens: Tokens) -> tuple[Side, Side]:
    """Tokens of images with equally many keypoints as (B, N, …)."""
    columns = [x for x in (tokens.x, tokens.positions, tokens.predicted) if x is not None]
    columns = [x.float().view(-1, 2, tokens.layout.uniform, x.shape[-1]) for x in columns]
    return Side(*(x[:, 0] for x in columns)), Side(*(x[:, 1] for x in columns))


def assignments(
    model: MatchingNetwork, scores: Tensor, sides: tuple[Side, Side], recipe: OptimiserRecipe, rounds: int
) -> list[Tensor]:
    """Differentiable log P (B, N+1, M+1) of scores, and after each round of consensus."""
    if model.config.assignment.kind == "dual_softmax":
        return [log_dual_softmax(scores)]
    found = [log_assignment(scores, recipe.sinkhorn_iterations, recipe.unrolled_iterations)]
    for _ in range(rounds):
        matches = mutual_soft_matches(found[-1][:, :-1, :-1])
        updated = model.consensus(scores, *(side.positions for side in sides), matches)
        found.append(log_assignment(updated, recipe.sinkhorn_iterations, recipe.unrolled_iterations))
    return found
