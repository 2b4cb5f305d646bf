"""A matching network in ONNX Runtime, behind the `Matcher` protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from matcher.config import CalibrationConfig, NetworkConfig
from matcher.errors import UsageError
from matcher.match.calibration import calibrated
from matcher.match.nearest import check_features
from matcher.onnx.interface import EXTRA
from matcher.onnx.kept import kept_model
from matcher.onnx.runtime import Model
from matcher.onnx.trained import Trained
from matcher.types import Features, Matches

if TYPE_CHECKING:
    from matcher.onnx.linear import Numbers

# Inputs of the model that `Features` has under another name.
_FIELDS = {"angles": "orientations", "affine_frames": "affine_frames", "scales": "scales", "scores": "scores"}


class OnnxMatcher:
    """A network in inference: features of B pairs → mutual matches above the threshold, best first."""

    device, precision = "cpu", "float32"

    def __init__(self, trained: Trained, numbers: Numbers = "float32") -> None:
        """Build the model, its weights written in `numbers`.

        Raises:
            UsageError: a network that cannot be written as ONNX.
            IntegrityError: arrays that its configuration asks for are absent.
        """
        self.config: NetworkConfig = trained.config

        def write() -> bytes:
            from matcher.onnx.models import network_model

            return network_model(trained, numbers=numbers, fused_attention=True)

        # What is not of a file is made for once.
        identity = (trained.sha256, repr(trained.config), numbers)
        self._model = kept_model(identity, write) if trained.sha256 else Model(write())

    @property
    def calibration(self) -> CalibrationConfig | None:
        """Of the match probabilities."""
        return self.config.policy.calibration

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch (features stacked along a leading axis B).

        Raises:
            UsageError: features of another front end or descriptor size.
        """
        sides = (features0, features1)
        for features in sides:
            check_features(self.config, features)
        batch, other = (len(features.mask) for features in sides)
        if batch != other:
            raise UsageError(f"{batch} images cannot pair with {other}")
        arrays = [features.numpy() for features in sides]
        views = [np.asarray(features.matched_orientation) for features in sides]
        given: dict[str, np.ndarray] = {}
        for side, (values, view) in enumerate(zip(arrays, views, strict=True)):
            given |= {f"{name}{side}": value for name, value in self._inputs(values, view).items()}
        found = self._model(**given)
        return [
            _matches(
                {name: value[b] for name, value in found.items()},
                *(values["keypoints"][b] for values in arrays),
                counts=[int(values["mask"][b].sum()) for values in arrays],
                calibration=self.calibration,
            )
            for b in range(batch)
        ]

    def _inputs(self, values: dict[str, np.ndarray], view: np.ndarray) -> dict[str, np.ndarray]:
        inputs = {
            "keypoints": values["keypoints"],
            "descriptors": values["descriptors"].astype(np.float32, copy=False),
            "mask": values["mask"],
            "size": values["size"],
            "orientation": view.astype(np.int64, copy=False),
        }
        for name in {EXTRA[name][0] for name in self.config.position.inputs if name in EXTRA}:
            field = _FIELDS[name]
            if field not in values:
                raise UsageError(f"this matcher needs {field} of the keypoints: Features({field}=…)")
            inputs[name] = values[field]
        return {name: np.ascontiguousarray(value) for name, value in inputs.items()}


def _matches(
    found: dict[str, np.ndarray],
    keypoints0: np.ndarray,
    keypoints1: np.ndarray,
    *,
    counts: Sequence[int],
    calibration: CalibrationConfig | None,
) -> Matches:
    """Those of one pair, from the model's outputs for it."""
    count = int((found["matches"][:, 0] >= 0).sum())
    indices = found["matches"][:count]
    return Matches(
        indices=indices,
        points0=keypoints0[indices[:, 0]],
        points1=keypoints1[indices[:, 1]],
        scores=calibrated(found["scores"][:count], counts, calibration),
        layers_run=int(found["layers"]),
        kept0=int(found["kept"][0]),
        kept1=int(found["kept"][1]),
    )
