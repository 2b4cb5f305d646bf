"""The pipeline for planar scenes, and reading of images at full size."""

from __future__ import annotations

from dataclasses import replace

from matcher.data.image import Image
from matcher.errors import UsageError
from matcher.loading import open_pipeline, with_estimation
from matcher.options import LoadOptions
from matcher.pipeline import ImageInput, Mask, Pipeline


def planar_pipeline(preset: str | Pipeline, options: LoadOptions) -> Pipeline:
    """A preset with options, or a pipeline, that verifies its matches by a homography.

    Raises:
        UsageError: options beside a pipeline, another geometry, and what `matcher.load` refuses.
    """
    if options.get("geometry") not in (None, "homography"):
        raise UsageError(f"planes are matched by geometry 'homography', not {options['geometry']!r}")
    given = {name: value for name, value in options.items() if name != "geometry"}
    pipeline = open_pipeline(preset, given)
    if pipeline.config.estimation.kind == "homography":
        return pipeline
    return with_estimation(pipeline, replace(pipeline.config.estimation, kind="homography"))


def read_full(pipeline: Pipeline, image: ImageInput, mask: Mask | None = None) -> Image:
    """An image upright and at its full size, as `Pipeline.read` reads it; an `Image` is taken as it is."""
    config = pipeline.config
    config = replace(config, extractor=config.extractor.of_size(None), refine=None)
    return replace(pipeline, config=config).read(image, mask)
