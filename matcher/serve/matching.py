"""What the page does with two photos, apart from its layout."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from matcher.config import GeometryKind
from matcher.data.tensors import to_numpy
from matcher.drawing.canvas import figure_pixels
from matcher.drawing.matches import draw_matches
from matcher.errors import UsageError
from matcher.explain.report.report import report_page
from matcher.loading import load, with_estimation
from matcher.match.network.inference import AttentionMatcher
from matcher.pipeline import Pipeline
from matcher.presets import DEFAULT_PRESET
from matcher.result import Result

_KEPT = 2  # pipelines in memory; each holds a network


@dataclass(frozen=True)
class Choices:
    """What a user may set."""

    preset: str = DEFAULT_PRESET
    threshold: float | None = None  # minimum score of a match; here and below, None means the preset's value
    max_keypoints: int | None = None  # per image
    resize: int | None = None  # pixels, longer side
    geometry: GeometryKind = "fundamental"
    max_error: float | None = None  # pixels of the resized image, of an inlier


@dataclass(frozen=True, eq=False)
class Answer:
    """What the page shows."""

    pipeline: Pipeline
    result: Result
    drawing: np.ndarray  # (H, W, 3) uint8, the matches drawn
    report: bytes | None  # HTML; None where the preset has no network to explain


@dataclass(eq=False)
class Matching:
    """Pipelines by what was chosen; one pair is matched at a time."""

    device: str = "auto"
    max_pixels: int | None = None
    _pipelines: OrderedDict[Choices, Pipeline] = field(default_factory=OrderedDict)
    _busy: Lock = field(default_factory=Lock)

    def answer(
        self,
        image0: Path,
        image1: Path,
        choices: Choices,
        *,
        mask0: Path | None = None,
        mask1: Path | None = None,
        explained: bool = True,
    ) -> Answer:
        """Match two photos, with or without a mask of each.

        Raises:
            ImageError: an image cannot be read.
            UsageError: choices that contradict each other.
            IntegrityError: weights that are not installed; the message explains how to get them.
        """
        with self._busy:
            pipeline = self._pipeline(choices)
            images = pipeline.read(image0), pipeline.read(image1)
            result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1)
            explainable = explained and isinstance(pipeline.matcher, AttentionMatcher)
            report = report_page(pipeline, images, result) if explainable else None
        verified = result.geometry.status != "not_estimated"
        figure = draw_matches(
            *images,
            result.points0,
            result.points1,
            scores=result.scores,
            inliers=result.geometry.inliers if verified else None,
            keypoints0=to_numpy(result.features0.keypoints),
            keypoints1=to_numpy(result.features1.keypoints),
        )
        return Answer(pipeline, result, figure_pixels(figure), report)

    def _pipeline(self, choices: Choices) -> Pipeline:
        if choices not in self._pipelines:
            self._pipelines[choices] = self._load(choices)
        self._pipelines.move_to_end(choices)
        while len(self._pipelines) > _KEPT:
            self._pipelines.popitem(last=False)
        return self._pipelines[choices]

    def _load(self, choices: Choices) -> Pipeline:
        pipeline = load(
            choices.preset,
            device=self.device,
            match_threshold=choices.threshold,
            max_keypoints=choices.max_keypoints,
            resize=choices.resize,
            geometry=choices.geometry,
            max_pixels=self.max_pixels,
        )
        if choices.max_error is None:
            return pipeline
        if not choices.max_error > 0:
            raise UsageError(f"the inlier threshold must be above 0 pixels, not {choices.max_error:g}")
        name = "max_reprojection_error" if choices.geometry.startswith("homograph") else "max_epipolar_error"
        return with_estimation(pipeline, replace(pipeline.config.estimation, **{name: choices.max_error}))


def geometry_rows(result: Result) -> list[list[Any]]:
    """What and value, for a table: status, inliers and the matrix row by row."""
    geometry = result.geometry
    rows: list[list[Any]] = [
        ["geometry", geometry.kind],
        ["status", geometry.status],
        ["inliers", int(geometry.inliers.sum())],
    ]
    for number, line in enumerate([] if geometry.matrix is None else geometry.matrix, 1):
        rows.append([f"matrix, row {number}", "  ".join(f"{value:.6g}" for value in line)])
    return rows
