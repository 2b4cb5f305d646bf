"""What is trained, from the weights files alone: the arrays of a front end and of a matcher."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matcher.config import ExtractorConfig, MatchingPolicy, NetworkConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.learned import architecture_of
from matcher.onnx.interface import KIND, SETTINGS
from matcher.weights.files import check_front_end, network_config, read_arrays, read_bytes
from matcher.weights.published import find_weights, locate_front_end


class Trained(NamedTuple):
    """A trained network as arrays."""

    config: NetworkConfig
    arrays: Mapping[str, np.ndarray]
    name: str
    sha256: str  # of the weights file; empty where there is none


class TrainedFrontEnd(NamedTuple):
    """Our front end as arrays, with all its settings."""

    config: ExtractorConfig
    arrays: Mapping[str, np.ndarray]
    path: Path
    sha256: str


def trained_network(weights: str | Path, policy: MatchingPolicy) -> Trained:
    """A network by the name or path of its weights.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    file = find_weights(weights)
    try:
        config, arrays = network_config(file.data), read_arrays(file.data)
    except IntegrityError as error:
        raise IntegrityError(f"{file.path} {error}: {file.remedy}") from error
    return Trained(replace(config, policy=policy), arrays, file.name, file.sha256)


def trained_front_end(config: ExtractorConfig, weights: str | Path | None = None) -> TrainedFrontEnd:
    """Our front end.

    Args:
        config: settings that are None become the published ones.
        weights: file of its parameters; the shipped one when absent.

    Raises:
        UsageError: another front end.
        IntegrityError: the parameters are absent or damaged.
    """
    if config.kind != KIND:
        raise UsageError(
            f"the front end {config.kind} cannot be written as ONNX; {KIND} can, and SIFT needs no network"
        )
    path = Path(weights) if weights is not None else locate_front_end(config)
    data = read_bytes(path, "check the path")
    try:
        check_front_end(data, config.kind)
        arrays = read_arrays(data)
        architecture_of({name: array.shape for name, array in arrays.items()})
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}") from error
    values = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) is not None}
    config = replace(config, **{**SETTINGS, **values})
    return TrainedFrontEnd(config, arrays, path, hashlib.sha256(data).hexdigest())
