"""What a network's configuration must satisfy."""

from __future__ import annotations

from math import inf

from matcher.config import NetworkConfig
from matcher.errors import UsageError

Rules = list[tuple[bool, str]]  # what must hold, and what to say where it does not


def check_config(config: NetworkConfig) -> None:
    """Refuse combinations that make no network.

    Raises:
        UsageError: names the setting and what it must be.
    """
    for kept, rule in (*_inputs(config), *_shapes(config), *_assignment(config), *_policy(config)):
        if not kept:
            raise UsageError(f"network configuration: {rule}")


def _inputs(config: NetworkConfig) -> Rules:
    encoded = config.position.kind in ("rotary", "mlp")
    return [
        (
            bool(config.position.inputs) or not encoded,
            f"position.inputs is empty, but position.kind {config.position.kind!r} needs 'xy' at least",
        ),
        (
            config.position.inputs[:1] == ("xy",) or not config.guided,
            "guided tokens need position.inputs that begin with 'xy'",
        ),
        (0 < config.position.extent < inf, "position.extent must be a number above 0"),
    ]


def _shapes(config: NetworkConfig) -> Rules:
    context, backbone, refinement = config.context, config.backbone, config.refinement
    return [
        (context.depth >= 1, "context.depth must be at least 1"),
        (
            context.heads >= 1 and context.dim % (2 * context.heads) == 0,
            f"context.dim {context.dim} must be a multiple of twice context.heads {context.heads}",
        ),
        (
            context.scale_logits_above is None or context.attention == "softmax",
            "context.scale_logits_above goes with context.attention 'softmax'",
        ),
        (
            context.scale_logits_above is None or context.scale_logits_above >= 2,
            "context.scale_logits_above must be at least 2",
        ),
        (
            config.project or config.descriptor_dim == context.dim,
            "without project, descriptor_dim must be context.dim",
        ),
        (
            backbone is None or backbone.widths[-1] == config.descriptor_dim,
            "descriptor_dim must be the last of backbone.widths",
        ),
        (
            refinement is None or backbone is None or refinement.context.dim == backbone.widths[0],
            "refinement.context.dim must be the first of backbone.widths",
        ),
    ]


def _assignment(config: NetworkConfig) -> Rules:
    assignment = config.assignment
    return [
        (
            not (assignment.consensus and assignment.kind != "sinkhorn"),
            "assignment.consensus goes with assignment.kind 'sinkhorn'",
        ),
        (
            assignment.dustbin != ("learned" if assignment.kind == "dual_softmax" else "none"),
            f"{assignment.kind} does not go with assignment.dustbin {assignment.dustbin!r}",
        ),
        (
            assignment.every_layer or not config.match_probability,
            "match_probability heads need assignment.every_layer",
        ),
    ]


def _policy(config: NetworkConfig) -> Rules:
    assignment, policy = config.assignment, config.policy
    return [
        (
            assignment.every_layer or not (policy.early_exit or policy.pruning),
            "early exit and pruning need assignment.every_layer; switch both off (early_exit, pruning)",
        ),
        (
            assignment.dustbin == "point" or not policy.pruning,
            "pruning needs assignment.dustbin 'point'; switch it off (pruning)",
        ),
        (0 <= policy.match_threshold <= 1, "policy.match_threshold must be from 0 to 1"),
    ]
