"""A pipeline for images of any size: a first pass at an ordinary size, then tiles at full resolution."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from numbers import Integral
from time import perf_counter
from typing import Any

import numpy as np

from matcher.config import GRID_KIND
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.geometry import resized
from matcher.data.image import Image
from matcher.data.matches import Matches, best_first
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError
from matcher.match.calibration import calibrated_by_geometry, calibration_of, weighed_by_refinement
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result
from matcher.tiling.extraction import tiled_features
from matcher.tiling.windows import corresponding, joined_matches, window_features

MAX_KEYPOINTS = 20_000
_NEVER_SMALLER = 0.95  # a factor closer to 1 is not worth resizing an image


def tiled(pipeline: Pipeline, max_keypoints: int = MAX_KEYPOINTS) -> TiledPipeline:
    """The pipeline for large images: panoramas, scans, aerial photos.

    >>> import matcher, numpy as np
    >>> pipeline = matcher.tiled(matcher.load("nearest", max_keypoints=500), max_keypoints=4000)
    >>> image = np.random.default_rng(0).integers(0, 255, (1000, 1600), dtype=np.uint8)
    >>> len(pipeline.match(image, image).matches) > 700
    True

    Args:
        pipeline: its image size and `max_keypoints` apply to the first pass, and `max_keypoints` also to
            each tile of 1024 pixels.
        max_keypoints: of an image, all tiles together.

    Raises:
        UsageError: a pipeline without keypoints, or a number of keypoints below 1.
    """
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("tiles need keypoints, and this preset has only the cells of a grid; use another")
    if not isinstance(max_keypoints, Integral) or max_keypoints < 1:
        raise UsageError(f"max_keypoints must be a whole number of at least 1, not {max_keypoints!r}")
    return TiledPipeline(
        **{f.name: getattr(pipeline, f.name) for f in fields(Pipeline)}, most_keypoints=max_keypoints
    )


@dataclass(frozen=True, eq=False, repr=False)
class TiledPipeline(Pipeline):
    """As `Pipeline`, but `match` finds its keypoints at full resolution; see `tiled`.

    Memory is that of both images, of the keypoints, and of the networks for one tile and one window. Images
    take 3 bytes a pixel as they are decoded, and as much again while one is read. Once its keypoints are
    found, an image is kept in grey, and refinement takes 5 to 7 bytes a pixel for that and its pyramid.
    """

    most_keypoints: int = MAX_KEYPOINTS

    def match(
        self,
        image0: ImageInput,
        image1: ImageInput,
        *,
        mask0: Mask | None = None,
        mask1: Mask | None = None,
        camera0: Camera | None = None,
        camera1: Camera | None = None,
        **options: Any,
    ) -> Result:
        """Match two images of any size.

        The first pass, at the pipeline's image size, finds which regions correspond and at which scale.
        Keypoints are then extracted there tile by tile, after the image of higher resolution is reduced to
        the scale of the other, and matched window by window. If the first pass finds no geometry, its result
        is returned.

        Args:
            image0, image1, mask0, mask1, camera0, camera1: as in `Pipeline.match`.
            options: other options of `Pipeline.match`, for the first pass.

        Raises:
            ImageError: an image cannot be read; the message names it.
            UsageError: as `Pipeline.match`.
        """
        if options.get("budget_ms") is not None:
            raise UsageError("budget_ms is for one pass at an ordinary size; tiles take the time they need")
        times = [perf_counter()]
        full = [self._read_full(*given) for given in ((image0, mask0), (image1, mask1))]
        times.append(perf_counter())
        small = [self._small(image) for image in full]
        cameras = {"camera0": camera0, "camera1": camera1}
        first = super().match(*small, **cameras, **options)
        times.append(perf_counter())
        if first.geometry.status not in ("ok", "not_estimated") or not len(first.matches):
            return first
        found, spent = self._match_tiles(full, first, **cameras)
        seconds = dict(zip(("read", "first_pass"), np.diff(times).tolist(), strict=True)) | spent
        seconds["total"] = perf_counter() - times[0]
        return replace(first, **found, seconds=seconds, passes=(), first=None)

    def _match_tiles(
        self, full: list[Image], first: Result, **cameras: Camera | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Features, matches and geometry at full resolution, and the seconds of each stage.

        Images become grey in the list `full` as soon as their keypoints are found: two large images in colour
        beside the pyramids of refinement would be the most memory of all.
        """
        times = [perf_counter()]
        kept = first.inliers if first.geometry.status == "ok" else np.ones(len(first.matches), dtype=bool)
        ends = first.points0[kept], first.points1[kept]
        sides = []
        for side, (factor, near) in enumerate(zip(_common_scale(*ends), ends, strict=True)):
            shown = _resized(full[side], factor)
            sides.append(tiled_features(shown, self.extractor, self.most_keypoints, near))
            del shown  # with `full`, it holds the colours, which nothing needs from here on
            full[side] = replace(full[side], pixels=full[side].grey())
        times.append(perf_counter())
        matches = self._match_windows(*sides, *ends)
        times.append(perf_counter())
        matches = self.refine(*full, matches) if self.config.refine else matches
        matches = weighed_by_refinement(matches, sides[1].scale.tolist(), calibration_of(self.matcher))
        times.append(perf_counter())
        geometry = self.verify(*sides, matches, **cameras)
        matches = calibrated_by_geometry(matches, geometry, calibration_of(self.matcher))
        matches, geometry = best_first(matches, geometry)
        times.append(perf_counter())
        found = {"features0": sides[0], "features1": sides[1], "matches": matches, "geometry": geometry}
        stages = ("extract", "match", "refine", "verify")
        seconds = dict(zip(stages, np.diff(times).tolist(), strict=True))
        if self.config.refine is None:
            del seconds["refine"]
        return found, seconds

    def _match_windows(self, features0: Features, features1: Features, *first: np.ndarray) -> Matches:
        points = [to_numpy(features.keypoints) for features in (features0, features1)]
        pairs = corresponding(*points, *first) if min(map(len, points)) else []
        found = [
            self.match_features(
                window_features(features0, pair.index0), window_features(features1, pair.index1)
            )
            for pair in pairs
        ]
        return joined_matches(pairs, found, *points)

    def _read_full(self, image: ImageInput, mask: Mask | None) -> Image:
        config = replace(self.config, extractor=self.config.extractor.of_size(None), refine=None)
        return replace(self, config=config).read(image, mask)

    def _small(self, image: Image) -> Image:
        height, width = image.pixels.shape[:2]
        (smaller, _), _ = resized((width, height), self.config.extractor.resize)
        return _resized(image, smaller / width)


def _common_scale(points0: np.ndarray, points1: np.ndarray) -> tuple[float, float]:
    """Factors for both images, at most 1, that give their common region the same scale."""
    spread = [
        np.median(np.linalg.norm(side - np.median(side, axis=0), axis=1)) for side in (points0, points1)
    ]
    ratio = float(max(spread[1], 1e-9) / max(spread[0], 1e-9))
    factors = min(1.0, ratio), min(1.0, 1 / ratio)
    return tuple(1.0 if factor > _NEVER_SMALLER else factor for factor in factors)


def _resized(image: Image, factor: float) -> Image:
    return image if factor == 1.0 else image.resized(factor)
