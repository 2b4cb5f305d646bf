"""The matcher's loss on a batch of labelled pairs: assignment at several layers, predicted positions."""

from __future__ import annotations

import torch
from torch import Tensor

from matcher.lab.train.labelled_layers import LabelledLayer
from matcher.lab.train.losses import (
    assignment_loss,
    correspondence_loss,
    decisions,
    log_dual_softmax,
    match_probability_loss,
    matchability_loss,
    mean_similarity_loss,
)
from matcher.lab.train.optimisers import prunes
from matcher.lab.train.recipe import OptimiserRecipe
from matcher.lab.train.stage import mixed_precision
from matcher.match.network.consensus import mutual_soft_matches
from matcher.match.network.correspondence import Side
from matcher.match.network.model import MatchingNetwork
from matcher.match.sinkhorn import log_assignment


def matching_loss(
    model: MatchingNetwork, layers: list[LabelledLayer], recipe: OptimiserRecipe, rng: torch.Generator
) -> Tensor:
    """Mean over some inner layers, drawn at random, and the last one, plus the loss of the last one.

    Args:
        model: the network. Where points are dropped in training, its heads for that learn along, from batches
            with all points; the network gets no gradient from them.
        layers: from `labelled_layers`.
        recipe: weights of the losses, number of inner layers.
        rng: draws the inner layers.
    """
    device = layers[-1].sides[0].x.device
    learning = len(layers) - 1 - recipe.frozen_layers
    inner = torch.randperm(learning, generator=rng)[: recipe.inner_layers] + recipe.frozen_layers
    inner = inner.tolist()
    if not model.config.assignment.every_layer:  # one head, for the last layer only
        inner = []
    losses = []
    for depth in (*inner, len(layers) - 1):
        sides, partners = layers[depth].sides, layers[depth].labels.partners
        with mixed_precision(device):
            scores = model.scores(*sides, depth)
        steady = recipe.matchability_weight * matchability_loss(scores, *partners)
        steady = steady + recipe.mean_similarity_weight * mean_similarity_loss(scores)
        rounds = 0 if depth in inner else model.config.assignment.consensus
        found = assignments(model, scores, sides, recipe, rounds)
        losses += [assignment_loss(log_p, *partners) + steady for log_p in found]
    loss = torch.stack(losses).mean() + losses[-1]
    if prunes(recipe) and layers[0].labels is layers[-1].labels:
        loss = loss + _pruning_loss(model, layers, decisions(found[-1].detach()))
    if model.guidance is None:
        return loss
    return loss + recipe.correspondence_weight * _correspondence_loss(layers)


def _pruning_loss(model: MatchingNetwork, layers: list[LabelledLayer], final: Tensor) -> Tensor:
    """That of the match-probability heads; `final` (B, N + M) are the decisions of the last layer."""
    losses = []
    for head, layer in zip(model.match_probability, layers[:-1], strict=True):
        x = torch.cat([side.x for side in layer.sides], dim=1).detach()
        losses.append(match_probability_loss(head(x).squeeze(2), final))
    return torch.stack(losses).mean()


def _correspondence_loss(layers: list[LabelledLayer]) -> Tensor:
    """Mean over all layers and both images."""
    losses = []
    for layer in layers:
        for side, target in zip(layer.sides, layer.labels.targets, strict=True):
            visible = target.isfinite().all(-1)
            losses.append(correspondence_loss(side.predicted, target.nan_to_num(0.0), visible))
    return torch.stack(losses).mean()


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
