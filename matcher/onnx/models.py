"""The models of a preset as ONNX files: its front end and its matcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from matcher.errors import IntegrityError, UsageError
from matcher.onnx.colmap import colmap_front_end, colmap_matcher
from matcher.onnx.front_end import front_end_model
from matcher.onnx.linear import Numbers
from matcher.onnx.opencv import opencv_front_end
from matcher.onnx.pairs import matcher_model
from matcher.onnx.trained import Trained, TrainedFrontEnd

T = TypeVar("T")


def network_model(trained: Trained, *, numbers: Numbers = "float32", fused_attention: bool = False) -> bytes:
    """The ONNX file of a trained network; see `matcher_model`.

    Raises:
        UsageError: a network that cannot be written as ONNX.
        IntegrityError: arrays that its configuration asks for are absent or misshaped.
    """
    options = {"numbers": numbers, "fused_attention": fused_attention}
    return _written(trained.name, lambda: matcher_model(trained.config, trained.arrays, **options))


def extractor_model(trained: TrainedFrontEnd, *, numbers: Numbers = "float32") -> bytes:
    """The ONNX file of our front end; see `front_end_model`.

    Raises:
        IntegrityError: arrays are absent or misshaped.
    """
    config, arrays = trained.config, trained.arrays
    return _written(str(trained.path), lambda: front_end_model(config, arrays, numbers=numbers))


def opencv_extractor_model(trained: TrainedFrontEnd, size: tuple[int, int]) -> bytes:
    """The ONNX file of our front end for `cv2.ALIKED`; see `opencv_front_end`.

    Raises:
        UsageError: a size that does not fit.
        IntegrityError: arrays are absent or misshaped.
    """
    return _written(str(trained.path), lambda: opencv_front_end(trained.config, trained.arrays, size))


def colmap_models(
    front_end: TrainedFrontEnd, trained: Trained, *, numbers: Numbers = "float32"
) -> tuple[bytes, bytes]:
    """The ONNX files of our front end and its network for COLMAP; see `colmap_front_end`, `colmap_matcher`.

    Raises:
        UsageError: a network that cannot be written as ONNX.
        IntegrityError: arrays are absent or misshaped.
    """
    sides = (front_end.config, front_end.arrays), (trained.config, trained.arrays)
    return (
        _written(str(front_end.path), lambda: colmap_front_end(*sides[0], numbers=numbers)),
        _written(trained.name, lambda: colmap_matcher(*sides[1], numbers=numbers)),
    )


def _written(name: str, write: Callable[[], T]) -> T:
    try:
        return write()
    except UsageError:
        raise
    except (KeyError, ValueError, IndexError) as error:
        raise IntegrityError(
            f"the weights {name} do not hold the arrays that their configuration asks for ({error})"
        ) from error
