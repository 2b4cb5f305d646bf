"""Matchers with fewer layers than their network has."""

from __future__ import annotations

from dataclasses import replace


def with_layers(
    matcher: object, layers: int, iterations: int | None = None, *, pruning: bool = True
) -> object:
    """An attention matcher with its first layers only; every other matcher as it is.

    Each layer of a network that may stop early has a head of its own, so any depth gives an assignment.
    `iterations`, if given, is the most that Sinkhorn takes; without `pruning` no point is dropped.
    """
    if not can_be_cut(matcher) or (layers >= len(matcher.model.layers) and iterations is None):
        return matcher
    policy = matcher.model.config.policy
    policy = replace(policy, pruning=pruning and policy.pruning)
    return matcher.adjusted(layers, max_iterations=iterations, policy=policy)


def can_be_cut(matcher: object) -> bool:
    """Whether any number of its layers gives an assignment."""
    return hasattr(matcher, "adjusted") and matcher.model.config.assignment.every_layer
