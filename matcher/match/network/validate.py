"""What a network's configuration and the features that it is given must satisfy."""

from __future__ import annotations

import torch

from matcher.config import NetworkConfig
from matcher.data.descriptors import UNNORMALISED, is_raw_sift, typical_norm
from matcher.data.features import RAW_SIFT, Features
from matcher.errors import UsageError

Rules = list[tuple[bool, str]]  # what must hold, and what to say where it does not
_SAMPLED = 64  # descriptors of an image whose norm is looked at
_NORM_TOLERANCE = 0.1  # half precision is far within it


def check_features(config: NetworkConfig, features: Features) -> None:
    """Refuse features that a network was not trained on.

    Raises:
        UsageError: kind, descriptor size or descriptor norm does not fit, or the features are not a batch.
    """
    size = features.descriptors.shape[-1]
    if features.keypoints.dim() != 3:
        raise UsageError("the network takes batches, keypoints (B, N, 2): Features.stack([features])")
    if features.kind not in ("any", config.kind):
        raise UsageError(
            f"this matcher takes {config.kind} features, not {features.kind}; load a preset for "
            f"{features.kind} features, or the front end {config.kind}"
        )
    if size != config.descriptor_dim:
        raise UsageError(f"this matcher takes {config.descriptor_dim}-d descriptors, not {size}-d")
    if config.kind not in UNNORMALISED:
        _check_norms(config.kind, features)
    needed = ["cells", "grid"] if config.assignment.border else []
    needed += ["cells", "affine_frames", "maps"] if config.refinement else []
    if absent := [name for name in needed if getattr(features, name) is None]:
        raise UsageError(f"this matcher needs Features.{absent[0]}, which its own front end gives")


@torch.no_grad()
def _check_norms(kind: str, features: Features) -> None:
    """Refuse a batch with an image most of whose first descriptors are not of norm 1; zeros do not count."""
    some = features.descriptors[:, :_SAMPLED].float()
    norms = some.norm(dim=-1)
    counted = features.mask[:, :_SAMPLED] & (norms > 0)
    wrong = 2 * (counted & ((norms - 1).abs() > _NORM_TOLERANCE)).sum(1) > counted.sum(1)
    if not bool(wrong.any()):
        return
    entry = int(wrong.nonzero()[0])
    image = some[entry][counted[entry]].cpu().numpy()
    if kind == "sift" and is_raw_sift(image):
        raise UsageError(RAW_SIFT)
    raise UsageError(
        f"this matcher takes descriptors of norm 1, not of {typical_norm(image):.3g}; normalise them first"
    )


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
