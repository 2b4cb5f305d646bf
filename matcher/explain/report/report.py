"""One self-contained HTML file that shows why two images matched: no network, no library, from disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from matcher.config_tables import to_dict
from matcher.data.image import Image
from matcher.explain.explain import explain, nearest_keypoint, network_of
from matcher.explain.report.page import build_page
from matcher.explain.report.pair import (
    BODY,
    SCRIPTS,
    SOURCES,
    STRONGEST,
    add_reasons,
    covariances_of,
    pair_data,
)
from matcher.files import check_output, write_output
from matcher.match.network.inference import AttentionMatcher
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result

_BUDGET = 1_800_000  # bytes of attention before base64 makes them a third more
_TRACED = 512  # points of an image whose rollout is kept: it takes as long as attention of all


def write_report(
    pipeline: Pipeline,
    image0: ImageInput,
    image1: ImageInput,
    path: str | Path,
    point: tuple[float, float] | None = None,
    *,
    mask0: Mask | None = None,
    mask1: Mask | None = None,
    overwrite: bool = False,
) -> Result:
    """Match two images and write the report; the file appears whole or not at all.

    Args:
        pipeline: one with a network; its first pass alone is run and explained.
        image0, image1: images.
        path: .html.
        point: stored pixels of image 0; its nearest keypoint is shown when the report opens.
        mask0, mask1: as `Pipeline.match` takes them.
        overwrite: replace an existing file that is no report; an earlier report is replaced in any case.

    Raises:
        UsageError: no network, a file that cannot or must not be written, a point outside image 0.
        ImageError: an image cannot be read.
    """
    path = check_output(path, (".html",), overwrite=overwrite)
    images = pipeline.read(image0), pipeline.read(image1)
    result = replace(pipeline, passes=None).match(image0, image1, mask0=mask0, mask1=mask1)
    write_output(path, report_page(pipeline, images, result, point))
    return result


def report_page(
    pipeline: Pipeline, images: tuple[Image, Image], result: Result, point: tuple[float, float] | None = None
) -> bytes:
    """The report of a pair that was matched, UTF-8.

    Args:
        pipeline: the one that matched it; it has a network.
        images: as it read them.
        result: of the pair; where further passes followed the first one, that one is explained.
        point: as in `write_report`.

    Raises:
        UsageError: no network, or a point outside image 0.
    """
    network = network_of(pipeline)
    result = result.first or result
    features, config = (result.features0, result.features1), pipeline.config.matcher
    chosen = None if point is None else nearest_keypoint(features[0], point)
    asked = _asked(network, result, chosen)
    traced = tuple(points[:_TRACED] for points in asked)
    explanation = explain(network, *features, *asked, strongest=STRONGEST, traced=traced)
    keypoints = [side.keypoints.cpu().numpy() for side in features]
    covariances = (None, covariances_of(result.matches, len(keypoints[1])))
    origin = _origin(pipeline, images)
    data = pair_data(images, keypoints, result.matches, result.geometry, origin, covariances)
    add_reasons(data, explanation, config)
    data |= {
        "chosen": chosen,
        "seconds": {name: round(value, 3) for name, value in result.seconds.items()},
        "configuration": to_dict(pipeline.config),
    }
    names = " and ".join("array" if image.path is None else Path(image.path).name for image in images)
    return build_page(names, SCRIPTS, BODY, data)


def _asked(network: AttentionMatcher, result: Result, chosen: int | None) -> list[list[int]]:
    """Points whose attention fits the budget: the chosen one, then the matched ones, then the others."""
    context = network.model.config.context
    attended = context.depth * 2 * context.heads * (STRONGEST * 3 + 1)
    limit = _BUDGET // (attended + SOURCES * 3) // 2
    asked = []
    for side, features in enumerate((result.features0, result.features1)):
        first = [] if chosen is None or side else [chosen]
        order = dict.fromkeys([*first, *result.matches.indices[:, side].tolist(), *range(len(features))])
        asked.append(list(order)[:limit])
    return asked


def _origin(pipeline: Pipeline, images: tuple[Image, Image]) -> list[tuple[str, str]]:
    source = pipeline.weights
    return [
        ("preset", pipeline.preset),
        ("weights", "none" if source is None else f"{source.name}, sha256 {source.sha256}"),
        ("image 0", str(images[0].path)),
        ("image 1", str(images[1].path)),
    ]
