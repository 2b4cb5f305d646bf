"""The pipeline that a sequence matches with."""

from __future__ import annotations

from matcher.config import GRID_KIND
from matcher.errors import UsageError
from matcher.loading import load
from matcher.options import LoadOptions
from matcher.pipeline import Pipeline

# Tracks and poses live on matches that are right, not on many; single pairs do with less.
MATCH_THRESHOLD = 0.2


def open_pipeline(preset: str | Pipeline, options: LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline as it is.

    Raises:
        UsageError: options beside a pipeline, or a preset without keypoints.
    """
    if isinstance(preset, Pipeline):
        if options:
            raise UsageError(f"a pipeline is complete; {', '.join(options)} cannot be added to it")
        pipeline = preset
    else:
        given = {name: value for name, value in options.items() if value is not None}
        pipeline = load(preset, **{"match_threshold": MATCH_THRESHOLD, **given})
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("a sequence follows keypoints; this preset has only the cells of a grid")
    return pipeline
