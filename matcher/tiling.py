"""Keypoints of a large image, tile by tile, ranked together and spread over the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral
from time import perf_counter
from typing import Any

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.config import GRID_KIND, EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import UPRIGHT, resized, turn_angles
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result
from matcher.types import Extractor, Features, Image, Matcher, Matches
from matcher.verify.estimation import RobustEstimator

# --- extraction: Keypoints of a large image, tile by tile, ranked together and spread over the image.

TILE = 1024  # pixels a side, without the margin
MARGIN = 64  # pixels of context around a tile; keypoints there belong to the neighbouring tile
# Pixels; tiles start at multiples: maps, of five at most, and octaves are sampled as in the whole image.
_GRID = 32
_TOGETHER = 4  # tiles per batch
_IN_A_CELL = 8  # keypoints per cell of the quota's grid, if they are spread evenly


def tiled_features(image: Image, extractor: Extractor, most: int, near: np.ndarray | None = None) -> Features:
    """The features of an image of any size, in stored pixels, best first.

    A front end's scores are compared over the whole image. Each cell of a grid first keeps its share of the
    keypoints, and the quota that sparse cells leave goes to the best of the rest, which avoids clusters.

    Args:
        image: upright, at the resolution at which keypoints are to be found.
        extractor: a front end; all keypoints that it returns for a tile are ranked.
        most: keypoints of the image, at most.
        near: (K, 2) stored pixels; tiles without such a point in themselves or a neighbour are skipped.
    """
    parts, tiles = [], list(_tiles(image, near))
    for start in range(0, len(tiles), _TOGETHER):
        some = tiles[start : start + _TOGETHER]
        found = extractor([_cut(image, tile) for tile in some])
        parts += [_own(features, tile, image) for features, tile in zip(found, some, strict=True)]
    if not parts:  # no tile is near: empty features of the right kind
        parts = [_own(extractor([_cut(image, (0, 0, 1, 1))])[0], (0, 0, 0, 0), image)]
    whole = _joined(parts)
    return whole.select(spread(to_numpy(whole.keypoints), to_numpy(whole.scores), most))


def spread(points: np.ndarray, scores: np.ndarray, most: int) -> np.ndarray:
    """(K,) int64: the keypoints that a grid's quota keeps, best first.

    Args:
        points: (N, 2).
        scores: (N,) larger is better.
        most: K is at most so many.
    """
    order = np.argsort(-scores, kind="stable")
    if len(points) <= most:
        return order
    extent = np.maximum(np.ptp(points, axis=0), 1.0)
    side = np.sqrt(np.prod(extent) * _IN_A_CELL / most)
    cell = ((points[order] - points.min(axis=0)) // side).astype(np.int64)
    cell = cell[:, 0] + cell[:, 1] * (cell[:, 0].max() + 1)
    _, cell, counts = np.unique(cell, return_inverse=True, return_counts=True)
    by_cell = np.argsort(cell, kind="stable")  # within a cell still best first
    rank = np.empty(len(order), dtype=np.int64)
    rank[by_cell] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    quota = max(1, most // len(counts))
    chosen = np.concatenate([np.flatnonzero(rank < quota), np.flatnonzero(rank >= quota)])[:most]
    return order[np.sort(chosen)]


def _tiles(image: Image, near: np.ndarray | None) -> Iterator[tuple[int, int, int, int]]:
    """Left, top, right and bottom of tiles of equal size that cover the image."""
    height, width = image.pixels.shape[:2]
    columns, rows = (
        np.linspace(0, side, max(1, round(side / TILE)) + 1).round().astype(int) for side in (width, height)
    )
    wanted = None
    if near is not None:
        place = image.from_stored(near)
        at = [
            np.searchsorted(edges[1:-1], side) for edges, side in zip((columns, rows), place.T, strict=True)
        ]
        wanted = np.zeros((len(rows) + 1, len(columns) + 1), dtype=bool)  # padded by one, for neighbours
        for down in range(3):
            for across in range(3):
                wanted[at[1] + down, at[0] + across] = True
    for j in range(len(rows) - 1):
        for i in range(len(columns) - 1):
            if wanted is None or wanted[j + 1, i + 1]:
                yield int(columns[i]), int(rows[j]), int(columns[i + 1]), int(rows[j + 1])


def _with_margin(image: Image, tile: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    left, top, right, bottom = tile
    height, width = image.pixels.shape[:2]
    return (
        max(0, left - MARGIN) // _GRID * _GRID,
        max(0, top - MARGIN) // _GRID * _GRID,
        min(width, right + MARGIN),
        min(height, bottom + MARGIN),
    )


def _cut(image: Image, tile: tuple[int, int, int, int]) -> Image:
    """A tile and its margin as an image of its own."""
    left, top, right, bottom = _with_margin(image, tile)
    part = np.s_[top:bottom, left:right]
    mask = None if image.mask is None else np.ascontiguousarray(image.mask[part])
    return Image(np.ascontiguousarray(image.pixels[part]), size=(right - left, bottom - top), mask=mask)


def _own(features: Features, tile: tuple[int, int, int, int], image: Image) -> Features:
    """The features that lie on the tile, not on its margin, in stored pixels of the whole image."""
    start = np.array(_with_margin(image, tile)[:2], dtype=np.float64)
    points = to_numpy(features.keypoints).astype(np.float64) + start
    left, top, right, bottom = (edge - 0.5 for edge in tile)
    x, y = points.T
    keep = np.flatnonzero((x >= left) & (x < right) & (y >= top) & (y < bottom))
    chosen, points = features.select(keep), points[keep]
    turn, changes = UPRIGHT[image.orientation].T, {}
    if chosen.scales is not None:
        changes["scales"] = chosen.scales / np.float32(np.sqrt(np.prod(image.scale)))
    if chosen.orientations is not None:
        changes["orientations"] = turn_angles(to_numpy(chosen.orientations).astype(np.float64), turn)
    if chosen.affine_frames is not None:
        changes["affine_frames"] = image.axes_to_stored @ to_numpy(chosen.affine_frames).astype(np.float64)
    keypoints = image.to_stored(points).astype(np.float32)
    per_image = {name: value for name, value in image.features_fields().items() if value is not None}
    return replace(chosen, keypoints=keypoints, **changes, **per_image)


def _joined(parts: list[Features]) -> Features:
    """The features of all tiles as those of one image."""
    columns = {}
    for f in fields(Features):
        value = getattr(parts[0], f.name)
        if value is not None and f.name not in (*Features._PER_IMAGE, "kind"):
            value = np.concatenate([to_numpy(getattr(part, f.name)) for part in parts])
        columns[f.name] = value
    return Features(**columns)


# --- windows: Which keypoints are matched with which: windows that correspond by a first pass at an
# ordinary size.

_OWN = 750  # keypoints of image 0 that a window matches
_SEEN = 2048  # keypoints of either image in a window, context included
_AROUND = 0.2  # of the window's side, added on each side as context
_ASTRAY = 0.05  # of the window's side: error of the first pass in the other image, and
_SPREAD = 2.0  # residuals of the window's affine map (depth, distortion) added to it, up to
_FARTHEST = 0.5  # of the window's side
_LEAST = 6  # least matches of the first pass that locate a window
_AFFINE = 12  # matches from which an affine map is fitted instead of a similarity


@dataclass(frozen=True, eq=False)
class WindowPair:
    """Keypoints of both images to be matched with each other."""

    index0: np.ndarray  # (N,) int64 into the features of image 0
    index1: np.ndarray  # (M,)
    own: np.ndarray  # (N,) bool: keypoints whose matches are kept from this window only


def corresponding(
    points0: np.ndarray, points1: np.ndarray, first0: np.ndarray, first1: np.ndarray
) -> list[WindowPair]:
    """Windows of image 0 and the corresponding keypoints of image 1.

    Args:
        points0, points1: (N, 2) and (M, 2) keypoints, stored pixels, best first.
        first0, first1: (K, 2) verified matches of the first pass.
    """
    pairs = []
    for own, low, high in _split(points0, np.arange(len(points0))):
        side = np.maximum(high - low, 1.0)
        found = _local_map(first0, first1, low, high)
        if found is None:
            continue
        linear, residual = found
        near = _inside(points0, low - _AROUND * side, high + _AROUND * side)
        near[own] = False
        index0 = np.concatenate([own, np.flatnonzero(near)[: max(0, _SEEN - len(own))]])
        # Keypoints of image 1 are mapped to image 0, so that rotated windows are as tight as upright ones.
        back = np.linalg.inv(np.vstack([linear, [0, 0, 1]]))
        moved = points1 @ back[:2, :2].T + back[:2, 2]
        astray = np.minimum(_ASTRAY * side + _SPREAD * residual, _FARTHEST * side)
        reach = _AROUND * side + astray
        index1 = np.flatnonzero(_inside(moved, low - reach, high + reach))[:_SEEN]
        if len(index1):
            pairs.append(WindowPair(index0, index1, np.arange(len(index0)) < len(own)))
    return pairs


def window_features(features: Features, index: np.ndarray) -> Features:
    """Keypoints as if of an image of their own, so that their positions are in the range of training."""
    chosen = features.select(index)
    points = to_numpy(chosen.keypoints)
    low, high = points.min(axis=0), points.max(axis=0)
    return replace(chosen, keypoints=points - low, size=np.maximum(high - low, 1.0) + 1.0)


def joined_matches(
    pairs: list[WindowPair], found: list[Matches], points0: np.ndarray, points1: np.ndarray
) -> Matches:
    """The matches of all windows, indexed in the whole images; one per keypoint, the most probable."""
    rows, scores = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.float32)]
    for pair, matches in zip(pairs, found, strict=True):
        own = pair.own[matches.indices[:, 0]]
        ends = matches.indices[own].T
        rows.append(np.stack([pair.index0[ends[0]], pair.index1[ends[1]]], axis=1))
        scores.append(matches.scores[own])
    indices, probabilities = np.concatenate(rows), np.concatenate(scores)
    order = np.argsort(-probabilities, kind="stable")
    _, first = np.unique(indices[order, 1], return_index=True)
    best = order[np.sort(first)]
    joined = Matches.from_indices(indices[best], points0, points1, probabilities[best])
    return replace(joined, layers_run=max((matches.layers_run for matches in found), default=0))


def _split(points: np.ndarray, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Groups of at most `_OWN` points by recursive median splits, each with its bounding box."""
    low, high = points[index].min(axis=0), points[index].max(axis=0)
    if len(index) <= _OWN or np.array_equal(low, high):
        return [(index, low, high)]
    axis = int(np.argmax(high - low))
    order = index[np.argsort(points[index, axis], kind="stable")]
    half = len(order) // 2
    return [group for part in (order[:half], order[half:]) for group in _split(points, np.sort(part))]


def _local_map(
    first0: np.ndarray, first1: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The (2, 3) map of a window to image 1, from the matches in and next to it, and its 90th
    percentile residual in pixels of image 0; None if there are too few."""
    side = np.maximum(high - low, 1.0)
    beyond = np.maximum(np.maximum(low - first0, first0 - high) / side, 0).max(axis=1)
    near = np.flatnonzero(beyond <= _AROUND)
    if len(near) < _LEAST:
        near = np.argsort(beyond, kind="stable")[:_LEAST]
        near = near[beyond[near] <= 1.0]
    if len(near) < _LEAST:
        return None
    source, target = first0[near].astype(np.float64), first1[near].astype(np.float64)
    centre, goal = source.mean(axis=0), target.mean(axis=0)
    x, y = (source - centre).T
    if len(near) >= _AFFINE:
        solution, _, rank, _ = np.linalg.lstsq(np.stack([x, y], 1), target - goal, rcond=1e-3)
        linear = solution.T
        if rank < 2 or abs(np.linalg.det(linear)) < 1e-4:
            return None
    else:
        u, v = (target - goal).T
        weight = max(float((x * x + y * y).sum()), 1e-9)
        a, b = float((x * u + y * v).sum()) / weight, float((x * v - y * u).sum()) / weight
        linear = np.array([[a, -b], [b, a]])
        if a * a + b * b < 1e-4:
            return None
    away = np.linalg.norm((source - centre) @ linear.T + goal - target, axis=1)
    residual = float(np.percentile(away, 90) / np.sqrt(abs(np.linalg.det(linear))))
    return np.hstack([linear, (goal - linear @ centre)[:, None]]), residual


def _inside(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return ((points >= low) & (points <= high)).all(axis=1)


# --- shared: Keypoints by tiles that do not depend on the pair: for collections, whose pairs share those of
# an image.

_FIRST = 2048  # keypoints of either image, the strongest ones of each part of it, that are matched first
_AS_ONE = 4096  # keypoints of either image up to which all are matched with all
_ORDINARY = 1024  # pixels of the longer side to which the threshold of the first matches refers


def by_tiles(pipeline: Pipeline, most: int) -> Pipeline:
    """The pipeline with keypoints at full resolution, by tiles, that all pairs of an image share.

    Two images with many keypoints are matched by the strongest of each part of them first; the geometry of
    these says which windows correspond, and where there is none they are all the matches. No image is made
    smaller and no tile left out for the sake of a pair, so images may differ in scale as much as the matcher
    tolerates. Memory is that of one decoded image, 3 bytes a pixel and once more while it is decoded, of one
    batch of tiles, and of one window.

    >>> import matcher, numpy as np
    >>> from matcher.tiling import by_tiles
    >>> pipeline = by_tiles(matcher.load("nearest", max_keypoints=500), 4000)
    >>> image = np.random.default_rng(0).integers(0, 255, (1000, 1600), dtype=np.uint8)
    >>> len(pipeline.extract(image)) > 700
    True

    Args:
        pipeline: its `max_keypoints` are those of a tile. Where its configuration has no `tiles` yet, images
            keep their full size from here on.
        most: keypoints of an image.

    Raises:
        UsageError: a number of keypoints below 1.
    """
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise UsageError(f"tiles must be a whole number of keypoints of at least 1, not {most!r}")
    extractor = replace(pipeline.config.extractor.of_size(None), tiles=int(most))
    return replace(
        pipeline,
        extractor=TiledExtractor(pipeline.extractor, int(most)),
        matcher=WindowedMatcher(pipeline.matcher),
        config=replace(pipeline.config, extractor=extractor),
        passes=None,
    )


class TiledExtractor:
    """A front end for images of any size."""

    def __init__(self, extractor: Extractor, most: int) -> None:
        """Keep the front end of a tile and the number of keypoints of an image."""
        self.extractor, self.most = extractor, most

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """The features of each image, best first, spread over it."""
        return [tiled_features(image, self.extractor, self.most) for image in images]


class WindowedMatcher:
    """A matcher for any number of keypoints: a few of them say which windows of both images correspond."""

    def __init__(self, matcher: Matcher) -> None:
        """Keep the matcher of a window; where it has a device and a precision, these are known here too."""
        self.matcher = matcher
        for name in ("device", "precision"):
            if hasattr(matcher, name):
                setattr(self, name, getattr(matcher, name))

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch."""
        pairs = zip(features0.unstack(), features1.unstack(), strict=True)
        return [self._pair(*pair) for pair in pairs]

    def _pair(self, features0: Features, features1: Features) -> Matches:
        sides = (features0, features1)
        if max(map(len, sides)) <= _AS_ONE:
            return self._one(*sides)
        points = [to_numpy(features.keypoints) for features in sides]
        chosen = [spread(at, to_numpy(f.scores), _FIRST) for at, f in zip(points, sides, strict=True)]
        first = self._one(*(f.select(index) for f, index in zip(sides, chosen, strict=True)))
        scale = max(1.0, max(max(f.image_size) for f in sides) / _ORDINARY)
        estimate = RobustEstimator(EstimationConfig(kind="fundamental"))
        geometry = estimate(first.points0, first.points1, thresholds_scale=scale)
        if not geometry.verified:
            ends = first.indices.T
            indices = np.stack([index[end] for index, end in zip(chosen, ends, strict=True)], axis=1)
            return replace(first, indices=indices, kept0=len(features0), kept1=len(features1))
        agree = geometry.inliers
        pairs = corresponding(*points, first.points0[agree], first.points1[agree])
        found = [
            self._one(window_features(features0, pair.index0), window_features(features1, pair.index1))
            for pair in pairs
        ]
        return joined_matches(pairs, found, *points)

    def _one(self, features0: Features, features1: Features) -> Matches:
        return self.matcher(Features.stack([features0]), Features.stack([features1]))[0]


# --- tiled: A pipeline for images of any size: a first pass at an ordinary size, then tiles at full
# resolution.

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
        usable = first.geometry.verified or first.geometry.status == "not_estimated"
        if not usable or not len(first.matches):
            return first
        found, spent = self._match_tiles(full, first, **cameras)
        seconds = dict(zip(("read", "first_pass"), np.diff(times).tolist(), strict=True)) | spent
        seconds["total"] = perf_counter() - times[0]
        return self.calibrated(replace(first, **found, seconds=seconds, passes=(), first=None))

    def _match_tiles(
        self, full: list[Image], first: Result, **cameras: Camera | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Features, matches and geometry at full resolution, and the seconds of each stage.

        Images become grey in the list `full` as soon as their keypoints are found: two large images in colour
        beside the pyramids of refinement would be the most memory of all.
        """
        times = [perf_counter()]
        kept = first.inliers if first.geometry.verified else np.ones(len(first.matches), dtype=bool)
        ends = first.points0[kept], first.points1[kept]
        sides = []
        for side, (factor, near) in enumerate(zip(_common_scale(*ends), ends, strict=True)):
            shown = _resized(full[side], factor)
            sides.append(tiled_features(shown, self.extractor, self.most_keypoints, near))
            del shown  # with `full`, it holds the colours, which nothing needs from here on
            full[side] = replace(full[side], pixels=full[side].grey())
        times.append(perf_counter())
        matches = self._match_windows(*sides, *ends)
        seconds = {"extract": times[1] - times[0], "match": perf_counter() - times[1]}
        matches, geometry, spent = self.refined_and_verified(full, *sides, matches, **cameras)
        found = {"features0": sides[0], "features1": sides[1], "matches": matches, "geometry": geometry}
        return found, seconds | spent

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
