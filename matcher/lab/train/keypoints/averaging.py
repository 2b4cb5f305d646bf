"""Averages of the parameters of several front ends.

Networks that were trained on from the same parameters with other data have means that are better than each
of them (model soups, Wortsman et al., ICML 2022), as have initial and final parameters (WiSE-FT, Wortsman et
al., CVPR 2022). Batch normalisation is folded into the convolutions before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from matcher.config import ExtractorConfig
from matcher.errors import UsageError
from matcher.extract.architecture import Architecture
from matcher.extract.feature_network import FeatureNetwork, grown
from matcher.torch_engine import build_extractor

SHIPPED = "learned"


def mean_of(files: Sequence[str], sizes: Architecture) -> FeatureNetwork:
    """The network with the mean parameters of weights files, `SHIPPED` among them, each grown to the sizes.

    Raises:
        IntegrityError: a file is absent, damaged, or of another network.
        UsageError: one holds a larger network.
    """
    networks = [_read(file, sizes) for file in files]
    for number, network in enumerate(networks[1:], start=2):
        blend(networks[0], network, 1 / number)
    return networks[0]


@torch.no_grad()
def blend(network: FeatureNetwork, other: FeatureNetwork, share: float) -> None:
    """Move the parameters of `network` towards those of `other` by `share`, 0 to 1."""
    for ours, theirs in zip(network.parameters(), other.parameters(), strict=True):
        ours.lerp_(theirs.to(ours), share)


def _read(file: str, sizes: Architecture) -> FeatureNetwork:
    path = None if file == SHIPPED else file
    network = build_extractor(ExtractorConfig(kind="learned"), path, precision="float32").network
    if not sizes.contains(network.sizes):
        raise UsageError(f"network: {sizes} is smaller than that of {file}, {network.sizes}")
    return grown(network, sizes)
