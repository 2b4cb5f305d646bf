"""A tracker's settings and pipelines: the one it is given, and less of it for neighbouring frames."""

from __future__ import annotations

from dataclasses import replace

from matcher.budget.choice import BUDGETS
from matcher.config import GRID_KIND
from matcher.data.protocols import Estimator
from matcher.errors import UsageError, check_number
from matcher.loading import open_pipeline, takes
from matcher.match.depth import with_layers
from matcher.options import LoadOptions, refuse_second_pass
from matcher.pipeline import Pipeline
from matcher.verify.estimation import RobustEstimator

# Tracks and poses live on matches that are right, not on many; single pairs do with less.
BASELINES = (1e-6, 1e6)  # in the unit of the poses, such as metres
WINDOWS = (1e-3, 1e6)  # pixels
MATCH_THRESHOLD = 0.2
NEIGHBOUR_ITERATIONS = 10  # of Sinkhorn, the last time


def tracking_pipeline(preset: str | Pipeline, options: LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline as it is; its estimator verifies the links.

    Raises:
        UsageError: options beside a pipeline, a preset without keypoints, or another geometry than the
            fundamental matrix.
    """
    given = {name: value for name, value in options.items() if value is not None}
    _need_fundamental(given.get("geometry", "fundamental"))
    refuse_second_pass(given, "frames are matched by one pass each")
    if not isinstance(preset, Pipeline) and takes(preset, "match_threshold"):
        given = {"match_threshold": MATCH_THRESHOLD, **given}
    pipeline = open_pipeline(preset, given)
    _need_fundamental(pipeline.config.estimation.kind)
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError(
            "a tracker follows keypoints, and this preset has only the cells of a grid; use another preset"
        )
    return pipeline


def _need_fundamental(kind: str) -> None:
    if kind != "fundamental":
        raise UsageError(
            f"a tracker verifies its links by the fundamental matrix, not by geometry {kind!r}; leave "
            "geometry out, and give a camera for poses"
        )


def for_neighbours(pipeline: Pipeline) -> Pipeline:
    """The pipeline with what neighbouring frames need: the first half of its layers, all points, a rough
    assignment.

    With earlier weights, 512 points and one driving sequence (26 frames of kitti_mini), 2, 3, 4 and all 6
    layers gave tracks of 4.48, 4.43, 4.44 and 4.41 frames, 95.8 to 96.0 % of the links being right; a rough
    assignment instead of one to its tolerance changed tracks by .01 frames.
    """
    layers = (pipeline.layers + 1) // 2
    return replace(
        pipeline, matcher=with_layers(pipeline.matcher, layers, NEIGHBOUR_ITERATIONS, pruning=False)
    )


def link_estimator(estimator: Estimator) -> Estimator:
    """The estimator for the links of frames: fundamental matrices stay as they are sampled.

    They tell right links from wrong ones, and where to search for others; poses come from depths. Adjusted
    ones cost a tenth of a frame's time and improve neither links nor odometry (measurements/sequences.md).
    """
    return replace(estimator, adjusted=False) if isinstance(estimator, RobustEstimator) else estimator


def check_settings(
    baseline: float | None, budget_ms: float | None, window: int, epipolar_window: float | None
) -> None:
    """Refuse numbers that a tracker cannot use.

    Raises:
        UsageError: one of them.
    """
    given = (
        ("baseline", baseline, BASELINES),
        ("budget_ms", budget_ms, BUDGETS),
        ("epipolar_window", epipolar_window, WINDOWS),
    )
    for name, value, limits in given:
        if value is not None:
            check_number(value, name, *limits)
    if type(window) is not int or window < 2:
        raise UsageError(f"window must be a whole number of at least 2 keyframes, not {window!r}")
