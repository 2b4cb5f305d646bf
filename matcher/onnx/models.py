"""The models of a preset: its front end and its matcher as ONNX, from the weights files alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from matcher.config import ExtractorConfig, MatchingPolicy, NetworkConfig
from matcher.errors import IntegrityError, UsageError
from matcher.onnx.colmap import colmap_front_end, colmap_matcher
from matcher.onnx.front_end import KIND, SETTINGS, front_end_model
from matcher.onnx.linear import Numbers
from matcher.onnx.opencv import opencv_front_end
from matcher.onnx.pairs import matcher_model
from matcher.weights.arrays import read_arrays
from matcher.weights.header import front_end_of, network_config
from matcher.weights.manifest import read_bytes
from matcher.weights.published.catalogue import find_weights, locate_front_end

T = TypeVar("T")


class Trained(NamedTuple):
    """A trained network as arrays."""

    config: NetworkConfig
    arrays: Mapping[str, np.ndarray]
    name: str
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


def network_model(trained: Trained, *, numbers: Numbers = "float32", fused_attention: bool = False) -> bytes:
    """The ONNX file of a trained network; see `matcher_model`.

    Raises:
        UsageError: a network that cannot be written as ONNX.
        IntegrityError: arrays that its configuration asks for are absent or misshaped.
    """
    options = {"numbers": numbers, "fused_attention": fused_attention}
    return _written(trained.name, lambda: matcher_model(trained.config, trained.arrays, **options))


def extractor_model(
    config: ExtractorConfig, weights: str | Path | None = None, *, numbers: Numbers = "float32"
) -> bytes:
    """The ONNX file of our front end; see `front_end_model`.

    Args:
        config: settings that are None become the published ones.
        weights: file of its parameters; the shipped one when absent.
        numbers: what weights are written in.

    Raises:
        UsageError: another front end.
        IntegrityError: the parameters are absent or damaged.
    """
    config, arrays, path = _front_end(config, weights)
    return _written(path, lambda: front_end_model(config, arrays, numbers=numbers))


def opencv_extractor_model(config: ExtractorConfig, size: tuple[int, int]) -> bytes:
    """The ONNX file of our front end for `cv2.ALIKED`; see `opencv_front_end`.

    Raises:
        UsageError: another front end, or a size that does not fit.
        IntegrityError: the parameters are absent or damaged.
    """
    config, arrays, path = _front_end(config, None)
    return _written(path, lambda: opencv_front_end(config, arrays, size))


def colmap_models(
    config: ExtractorConfig,
    trained: Trained,
    frontend_weights: str | Path | None = None,
    *,
    numbers: Numbers = "float32",
) -> tuple[bytes, bytes]:
    """The ONNX files of our front end and its network for COLMAP; see `colmap_front_end`, `colmap_matcher`.

    Raises:
        UsageError: another front end, or a network that cannot be written as ONNX.
        IntegrityError: the parameters are absent or damaged.
    """
    config, arrays, path = _front_end(config, frontend_weights)
    return (
        _written(path, lambda: colmap_front_end(config, arrays, numbers=numbers)),
        _written(trained.name, lambda: colmap_matcher(trained.config, trained.arrays, numbers=numbers)),
    )


def _front_end(
    config: ExtractorConfig, weights: str | Path | None
) -> tuple[ExtractorConfig, dict[str, np.ndarray], str]:
    """All settings of our front end, its parameters and where they lie."""
    if config.kind != KIND:
        raise UsageError(
            f"the front end {config.kind} cannot be written as ONNX; {KIND} can, and SIFT needs no network"
        )
    path = Path(weights) if weights is not None else locate_front_end(config)
    data = read_bytes(path, "check the path")
    try:
        front_end_of(data, config.kind)
        arrays = read_arrays(data)
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}") from error
    values = {name: getattr(config, name) for name in SETTINGS if getattr(config, name) is not None}
    config = replace(config, **{**SETTINGS, **values})
    return config, arrays, str(path)


def _written(name: str, write: Callable[[], T]) -> T:
    try:
        return write()
    except UsageError:
        raise
    except (KeyError, ValueError, IndexError) as error:
        raise IntegrityError(
            f"the weights {name} do not hold the arrays that their configuration asks for ({error})"
        ) from error
