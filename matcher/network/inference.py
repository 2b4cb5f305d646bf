"""The network behind the `Matcher` protocol: precision, device, and matches read off the assignment."""

from __future__ import annotations

import copy

import numpy as np
import torch

from matcher.config import Precision
from matcher.network.assignment import mutual_matches
from matcher.network.model import Model
from matcher.types import Features, Matches, PairPrediction, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_precision(precision: Precision, device: torch.device) -> str:
    """What "auto" means on this device: bfloat16 where it is fast, float16 on GPUs without, else float32.

    Raises:
        UsageError: a precision that is none of these.
    """
    if precision in DTYPES:
        return precision
    if precision != "auto":
        raise UsageError(f"precision {precision!r} is not one of auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if device.type == "cpu" and torch.cpu._is_amx_tile_supported():
        return "bfloat16"
    return "float32"


class AttentionMatcher:
    """A `Model` in inference: features of B pairs → mutual matches above the threshold, best first."""

    def __init__(
        self, model: Model, *, device: torch.device | str = "cpu", precision: Precision = "auto"
    ) -> None:
        self.device = torch.device(device)
        self.precision = resolve_precision(precision, self.device)
        self.model = copy.deepcopy(model).eval().requires_grad_(False).to(self.device, torch.float32)
        # Phases, similarities and dustbins need more digits than half precision has: they stay in float32.
        for part in (self.model.project, self.model.layers):
            part.to(DTYPES[self.precision])

    @torch.inference_mode()
    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch (features stacked along a leading axis B).

        Raises:
            UsageError: features of another front end or descriptor size.
        """
        moved = [f.to(self.device) for f in (features0, features1)]
        prediction = self.model(*moved)
        keypoints = [f.keypoints.cpu().numpy() for f in (features0, features1)]
        threshold = self.model.config.match_threshold
        return [
            read_matches(pair, keypoints[0][b], keypoints[1][b], threshold)
            for b, pair in enumerate(prediction.pairs)
        ]


def read_matches(
    prediction: PairPrediction, keypoints0: np.ndarray, keypoints1: np.ndarray, threshold: float
) -> Matches:
    """Mutual matches of one pair in the indices of its input points.

    Args:
        prediction: of the pair.
        keypoints0, keypoints1: (N, 2), (M, 2) all input points.
        threshold: least probability.
    """
    local, scores = mutual_matches(prediction.assignment.log_scores[0], threshold)
    index0, index1 = (
        prediction.index0[local[:, 0]].cpu().numpy(),
        prediction.index1[local[:, 1]].cpu().numpy(),
    )
    return Matches(
        indices=np.stack([index0, index1], axis=1),
        points0=keypoints0[index0],
        points1=keypoints1[index1],
        scores=scores.cpu().numpy(),
        layers_run=prediction.layers_run,
        kept0=len(prediction.index0),
        kept1=len(prediction.index1),
    )
