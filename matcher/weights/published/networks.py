"""Networks filled with trained parameters, shipped or published."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from matcher.config import ExtractorConfig
from matcher.match.network.model import MatchingNetwork
from matcher.weights.files import fill_front_end, load_model
from matcher.weights.published.catalogue import find_place, locate_front_end


def load_weights(weights: str | Path) -> tuple[MatchingNetwork, str, str]:
    """A trained network, of ours or published: as `matcher.weights.files.load_model`, which it extends.

    Args:
        weights: a name in our manifest or in the catalogue, or the path of a weights file.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    place = find_place(weights)
    return load_model(place.weights, place.folder, remedy=place.remedy)


def fill_extractor(network: nn.Module, config: ExtractorConfig, path: str | Path | None = None) -> None:
    """Put a front end's trained parameters into its network: as `fill_front_end`, which it extends.

    Args:
        network: on the CPU, in float32.
        config: of the front end; its kind and variant select the parameters.
        path: a converted file; None is the shipped one, or the one that `matcher weights fetch` made.

    Raises:
        IntegrityError: absent, damaged, or not this front end's; the message names the command to get it.
    """
    fill_front_end(network, config.kind, locate_front_end(config) if path is None else path)
