"""What the features that a network is given must satisfy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from matcher.config import NetworkConfig
from matcher.data.descriptors import JOINED, UNNORMALISED, is_raw_sift, typical_norm
from matcher.data.features import RAW_SIFT, Features
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLED = 64  # descriptors of an image whose norm is looked at
_NORM_TOLERANCE = 0.1  # half precision is far within it


def check_features(config: NetworkConfig, features: Features, *, norms: bool = True) -> None:
    """Refuse features that a network was not trained on.

    Args:
        config: of the network.
        features: a batch.
        norms: whether to look at descriptors, too; `unlike_norms` does so on a device.

    Raises:
        UsageError: kind, descriptor size or descriptor norm does not fit, or the features are not a batch.
    """
    size = features.descriptors.shape[-1]
    if features.keypoints.ndim != 3:
        raise UsageError("the network takes batches, keypoints (B, N, 2): Features.stack([features])")
    if features.kind == JOINED:
        raise UsageError(
            "these are the joined features of several passes, which cannot be matched again; take those of "
            "`Pipeline.extract`"
        )
    if features.kind not in ("any", config.kind):
        raise UsageError(
            f"this matcher takes {config.kind} features, not {features.kind}; load a preset for "
            f"{features.kind} features, or the front end {config.kind}"
        )
    if size != config.descriptor_dim:
        raise UsageError(f"this matcher takes {config.descriptor_dim}-d descriptors, not {size}-d")
    if norms and config.kind not in UNNORMALISED:
        _check_norms(config.kind, features)
    needed = ["cells", "grid"] if config.assignment.border else []
    needed += ["cells", "affine_frames", "maps"] if config.refinement else []
    if absent := [name for name in needed if getattr(features, name) is None]:
        raise UsageError(f"this matcher needs Features.{absent[0]}, which its own front end gives")


def _check_norms(kind: str, features: Features) -> None:
    """Refuse a batch with an image most of whose first descriptors are not of norm 1; zeros do not count."""
    some = to_numpy(features.descriptors[:, :_SAMPLED]).astype(np.float32)
    norms = np.linalg.norm(some, axis=-1)
    counted = to_numpy(features.mask[:, :_SAMPLED]) & (norms > 0)
    wrong = 2 * (counted & (np.abs(norms - 1) > _NORM_TOLERANCE)).sum(axis=1) > counted.sum(axis=1)
    if not wrong.any():
        return
    entry = int(np.flatnonzero(wrong)[0])
    image = some[entry][counted[entry]]
    if kind == "sift" and is_raw_sift(image):
        raise UsageError(RAW_SIFT)
    raise UsageError(
        f"this matcher takes descriptors of norm 1, not of {typical_norm(image):.3g}; normalise them first"
    )


def unlike_norms(kind: str, features: Features) -> Tensor:
    """(B,) bool, images whose descriptors `check_features` refuses; torch, on the device of the features."""
    norms = features.descriptors[:, :_SAMPLED].float().norm(dim=-1)
    counted = features.mask[:, :_SAMPLED] & (norms > 0) & (kind not in UNNORMALISED)
    return 2 * (counted & ((norms - 1).abs() > _NORM_TOLERANCE)).sum(1) > counted.sum(1)
