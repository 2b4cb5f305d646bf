"""What a network's configuration must keep to."""

from __future__ import annotations

from matcher.config import NetworkConfig
from matcher.errors import UsageError


def check_config(config: NetworkConfig) -> None:
    """Refuse combinations that make no network.

    Raises:
        UsageError: names the setting and what it must be.
    """
    context, assignment, policy = config.context, config.assignment, config.policy
    rules = [
        (
            bool(config.position.inputs) or config.position.kind in ("sine", "none"),
            "position.inputs is empty; the encoding needs at least 'xy'",
        ),
        (
            config.position.inputs[:1] == ("xy",) or not config.guided,
            "guided tokens need position.inputs that begin with 'xy'",
        ),
        (
            not (assignment.consensus and assignment.kind != "sinkhorn"),
            "assignment.consensus goes with assignment.kind 'sinkhorn'",
        ),
        (
            context.dim % (2 * context.heads) == 0,
            f"context.dim {context.dim} must be a multiple of twice context.heads {context.heads}",
        ),
        (
            config.project or config.descriptor_dim == context.dim,
            "without project, descriptor_dim must be context.dim",
        ),
        (
            assignment.every_layer or not (policy.early_exit or policy.pruning),
            "early exit and pruning need assignment.every_layer",
        ),
        (
            assignment.dustbin == "point" or not policy.pruning,
            "pruning needs assignment.dustbin 'point'",
        ),
        (
            assignment.dustbin != ("learned" if assignment.kind == "dual_softmax" else "none"),
            f"{assignment.kind} does not go with assignment.dustbin {assignment.dustbin!r}",
        ),
        (
            config.backbone is None or config.backbone.widths[-1] == config.descriptor_dim,
            "descriptor_dim must be the last of backbone.widths",
        ),
        (
            config.refinement is None
            or config.backbone is None
            or config.refinement.context.dim == config.backbone.widths[0],
            "refinement.context.dim must be the first of backbone.widths",
        ),
    ]
    for kept, rule in rules:
        if not kept:
            raise UsageError(f"network configuration: {rule}")
