"""Accuracy of the geometry in a result, by the least verdict at which several passes accept it.

`matcher evaluate` estimates geometries anew from the matches; this is what `Pipeline.match` itself hands out,
and what it would with other values of `verdict.ACCEPTED`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from matcher.data.camera import Camera
from matcher.data.matches import TwoViewGeometry
from matcher.errors import UsageError
from matcher.lab.evaluate.calibration import as_inputs
from matcher.lab.evaluate.metrics import auc, corner_error, pose_error
from matcher.lab.evaluate.verdict_trial import TrialPair
from matcher.lab.pairs.protocols import HomographyPair, Pair, PairSet, PosePair
from matcher.pipeline import Pipeline
from matcher.result import Result
from matcher.verify.verdict import verdict_of

LEAST = (0.5, 0.4, 0.32, 0.2, 0.1, 0.0)  # probabilities of the same place
THRESHOLDS = {"pose": (5, 10, 20), "depth": (5, 10, 20), "homography": (3, 5, 10)}  # degrees; pixels


@dataclass(frozen=True)
class JudgedGeometry:
    """The geometry of one result before it is accepted or rejected."""

    error: float  # degrees, or pixels of the resized image 1; infinite where none was found
    probability: float  # the verdict; 1 after a single pass, which accepts any verdict

    def error_at(self, least: float) -> float:
        """The error where geometries of less than this probability are rejected."""
        return self.error if self.probability >= least else float("inf")


def judge_set(pair_set: PairSet, pipeline: Pipeline) -> list[JudgedGeometry]:
    """Match every pair of a set of poses or homographies.

    Args:
        pair_set: the pairs.
        pipeline: estimates the kind of geometry that the set has.

    Raises:
        UsageError: a set whose ground truth is neither poses nor homographies.
        ImageError: an image cannot be read.
    """
    if pair_set.protocol not in THRESHOLDS:
        raise UsageError(f"{pair_set.name}: its ground truth is neither poses nor homographies")
    return [_judged(pair, pipeline) for pair in pair_set.pairs]


def _judged(pair: Pair, pipeline: Pipeline) -> JudgedGeometry:
    cameras: dict[str, Camera] = {}
    if isinstance(pair, PosePair):
        cameras = {"camera0": Camera.from_K(pair.K0), "camera1": Camera.from_K(pair.K1)}
    result = pipeline.match(*as_inputs(pair), **cameras)
    geometry, probability = before_rejection(result, pipeline, cameras)
    if geometry.status != "ok":
        return JudgedGeometry(float("inf"), 0.0)
    if isinstance(pair, HomographyPair):
        scale1 = float(result.features1.scale.prod().sqrt())
        size0 = result.features0.image_size
        return JudgedGeometry(corner_error(geometry.matrix, pair.H_1_from_0, size0, scale1), probability)
    return JudgedGeometry(max(pose_error(geometry.cam1_from_cam0, pair.cam1_from_cam0)), probability)


def before_rejection(
    result: Result, pipeline: Pipeline, cameras: dict[str, Camera]
) -> tuple[TwoViewGeometry, float]:
    """The geometry of a result as it was estimated, and the probability that decides about it."""
    if len(result.passes) <= 1:
        return result.geometry, 1.0
    features = result.features0, result.features1
    geometry = pipeline.verify(*features, result.matches, **cameras)
    verdict = verdict_of(result.matches, geometry, *(side.image_size for side in features))
    return geometry, 0.0 if verdict is None else verdict.probability


def accuracy(judged: Sequence[JudgedGeometry], least: float, thresholds: Sequence[float]) -> list[float]:
    """AUC at each threshold where results of less than a probability are rejected."""
    errors = np.array([each.error_at(least) for each in judged])
    return [float(auc(errors, threshold)) for threshold in thresholds]


def most_probable(pairs: Iterable[TrialPair], pipeline: Pipeline) -> dict[str, list[float]]:
    """By kind, the probabilities of the geometries of pairs, the largest first.

    Args:
        pairs: of different places, without cameras.
        pipeline: as it is; its kind of geometry must need no cameras.
    """
    found: dict[str, list[float]] = {}
    for each in pairs:
        result = pipeline.match(*as_inputs(each.pair))
        found.setdefault(each.kind, []).append(before_rejection(result, pipeline, {})[1])
    return {kind: sorted(values, reverse=True) for kind, values in found.items()}


def as_markdown(name: str, judged: Sequence[JudgedGeometry], thresholds: Sequence[float]) -> str:
    """A table: the share of results that are accepted and their AUC, by the least probability."""
    header = ["least probability", "accepted", *(f"AUC@{threshold}" for threshold in thresholds)]
    rows = [[f"{name} ({len(judged)})", *header[1:]], ["---"] * len(header)]
    for least in LEAST:
        accepted = np.mean([np.isfinite(each.error_at(least)) for each in judged])
        figures = accuracy(judged, least, thresholds)
        rows.append([f"{least:g}", f"{accepted:.2f}", *(f"{value:.3f}" for value in figures)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
