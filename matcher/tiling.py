"""Large images: keypoints at full resolution, tile by tile, and matches window by window.

`tiled` is for a pair: a first pass at an ordinary size says what corresponds, and at which scale. `by_tiles`
is for collections, whose pairs share the keypoints of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Integral
from time import perf_counter
from typing import Any

import cv2
import numpy as np

from matcher.config import GRID_KIND, EstimationConfig
from matcher.errors import UsageError
from matcher.geometry import resized, spread
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.result import Result
from matcher.types import Extractor, Features, Image, Matcher, Matches, to_numpy
from matcher.verify.estimation import RobustEstimator

MAX_KEYPOINTS = 20_000
TILE = 1024  # pixels a side, without the margin
WINDOW = 750  # keypoints of image 0 that a window matches
Tile = tuple[int, int, int, int]  # left, top, right, bottom


def tiled_features(image: Image, extractor: Extractor, most: int, near: np.ndarray | None = None) -> Features:
    """The `most` best features of an image of any size, as `spread` chooses, in stored pixels, best first; if
    given, of the tiles that `_tiles` finds for points `near` (K, 2), stored pixels."""
    parts = []
    tiles = list(_tiles(image, near)) or [(0, 0, 0, 0)]  # none: no features, but of the right kind
    for start in range(0, len(tiles), 4):
        some = tiles[start : start + 4]
        cuts, corners = zip(*(_cut(image, tile) for tile in some), strict=True)
        parts += [_own(image, *each) for each in zip(extractor(cuts), some, corners, strict=True)]
    arrays = [part.numpy() for part in parts]
    of_points = [name for name in arrays[0] if name not in Features._PER_IMAGE]
    joined = {name: np.concatenate([each[name] for each in arrays]) for name in of_points}
    whole = Features(**{**arrays[0], **joined}, kind=parts[0].kind)
    return whole.select(spread(to_numpy(whole.keypoints), to_numpy(whole.scores), most))


def _tiles(image: Image, near: np.ndarray | None) -> Iterator[Tile]:
    """Tiles of equal size that cover the image, or those with a point in themselves or a neighbour."""
    height, width = image.pixels.shape[:2]
    columns, rows = (
        np.linspace(0, side, max(1, round(side / TILE)) + 1).round().astype(int) for side in (width, height)
    )
    wanted = np.full((len(rows) - 1, len(columns) - 1), near is None, dtype=np.uint8)
    if near is not None:
        x, y = image.from_stored(near).T
        wanted[np.searchsorted(rows[1:-1], y), np.searchsorted(columns[1:-1], x)] = 1
        wanted = cv2.dilate(wanted, np.ones((3, 3), np.uint8))
    for j, i in np.argwhere(wanted).tolist():
        yield int(columns[i]), int(rows[j]), int(columns[i + 1]), int(rows[j + 1])


def _cut(image: Image, tile: Tile) -> tuple[Image, tuple[int, int]]:
    """A tile with 64 pixels of context, where keypoints belong to the neighbouring tile, and its corner, at
    multiples of 32, so that maps, of five levels at most, and octaves are sampled as in the whole image."""
    left, top = (max(0, edge - 64) // 32 * 32 for edge in tile[:2])
    part = np.s_[top : tile[3] + 64, left : tile[2] + 64]
    pixels = np.ascontiguousarray(image.pixels[part])
    mask = None if image.mask is None else np.ascontiguousarray(image.mask[part])
    return Image(pixels, size=pixels.shape[1::-1], mask=mask), (left, top)


def _own(image: Image, features: Features, tile: Tile, start: tuple[int, int]) -> Features:
    """The features that lie on the tile, not on its margin, in stored pixels of the whole image."""
    points = to_numpy(features.keypoints).astype(np.float64) + np.array(start, dtype=np.float64)
    left, top, right, bottom = (edge - 0.5 for edge in tile)
    x, y = points.T
    keep = np.flatnonzero((x >= left) & (x < right) & (y >= top) & (y < bottom))
    chosen = features.select(keep)
    angles = None if chosen.orientations is None else to_numpy(chosen.orientations).astype(np.float64)
    own = dict(scores=chosen.scores, diameters=chosen.scales, angles=angles, kind=chosen.kind)
    whole = Features.from_image(image, points[keep], chosen.descriptors, **own)
    if (frames := chosen.affine_frames) is not None:
        frames = image.axes_to_stored @ to_numpy(frames).astype(np.float64)
    return replace(whole, mask=chosen.mask, affine_frames=frames)


def match_by_windows(
    match: Callable[[Features, Features], Matches],
    features0: Features,
    features1: Features,
    *first: np.ndarray,
) -> Matches:
    """The matches of all windows, indexed in the whole images; one per keypoint, the most probable.

    `first` are the two points (K, 2) of verified matches. A window has a fifth of its side as context on each
    side, and 2,048 keypoints of either image at most. In image 1 it reaches further by what these may be off:
    a twentieth of the side and two residuals of its map (depth, distortion), up to half of the side.
    """
    points0, points1 = points = [to_numpy(features.keypoints) for features in (features0, features1)]
    rows, scores, layers = [np.zeros((0, 2), np.int64)], [np.zeros(0, np.float32)], 0
    for own, low, high in _split(points0, np.arange(len(points0))) if min(map(len, points)) else ():
        side = np.maximum(high - low, 1.0)
        if (found := _local_map(*first, low, high)) is None:
            continue
        linear, residual = found
        near = _inside(points0, low - 0.2 * side, high + 0.2 * side)
        near[own] = False
        index0 = np.concatenate([own, np.flatnonzero(near)[: max(0, 2048 - len(own))]])
        # Keypoints of image 1 are mapped to image 0, so that rotated windows are as tight as upright ones.
        back = np.linalg.inv(np.vstack([linear, [0, 0, 1]]))
        moved = points1 @ back[:2, :2].T + back[:2, 2]
        reach = 0.2 * side + np.minimum(0.05 * side + 2 * residual, 0.5 * side)
        index1 = np.flatnonzero(_inside(moved, low - reach, high + reach))[:2048]
        if not len(index1):
            continue
        matches = match(_window(features0, index0), _window(features1, index1))
        kept = matches.indices[:, 0] < len(own)  # the others belong to other windows
        ends = matches.indices[kept].T
        rows.append(np.stack([index0[ends[0]], index1[ends[1]]], axis=1))
        scores.append(matches.scores[kept])
        layers = max(layers, matches.layers_run)
    indices, probabilities = np.concatenate(rows), np.concatenate(scores)
    order = np.argsort(-probabilities, kind="stable")
    _, first = np.unique(indices[order, 1], return_index=True)
    best = order[np.sort(first)]
    return replace(Matches.from_indices(indices[best], *points, probabilities[best]), layers_run=layers)


def _window(features: Features, index: np.ndarray) -> Features:
    """Keypoints as if of an image of their own, so that their positions are in the range of training."""
    chosen = features.select(index)
    points = to_numpy(chosen.keypoints)
    low, high = points.min(axis=0), points.max(axis=0)
    return replace(chosen, keypoints=points - low, size=np.maximum(high - low, 1.0) + 1.0)


def _split(points: np.ndarray, index: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Groups of at most `WINDOW` points by recursive median splits, each with its bounding box."""
    low, high = points[index].min(axis=0), points[index].max(axis=0)
    if len(index) <= WINDOW or np.array_equal(low, high):
        return [(index, low, high)]
    axis = int(np.argmax(high - low))
    order = index[np.argsort(points[index, axis], kind="stable")]
    half = len(order) // 2
    return [group for part in (order[:half], order[half:]) for group in _split(points, np.sort(part))]


def _local_map(
    first0: np.ndarray, first1: np.ndarray, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, float] | None:
    """The (2, 3) map of a window to image 1, from the matches in and next to it, and its 90th percentile
    residual in pixels of image 0; None if there are fewer than six. From 12 matches on it is affine, with
    fewer a similarity."""
    side = np.maximum(high - low, 1.0)
    beyond = np.maximum(np.maximum(low - first0, first0 - high) / side, 0).max(axis=1)
    near = np.flatnonzero(beyond <= 0.2)
    if len(near) < 6:
        near = np.argsort(beyond, kind="stable")[:6]
        near = near[beyond[near] <= 1.0]
    if len(near) < 6:
        return None
    source, target = first0[near].astype(np.float64), first1[near].astype(np.float64)
    centre, goal = source.mean(axis=0), target.mean(axis=0)
    x, y = (source - centre).T
    if len(near) >= 12:
        solution, _, rank, _ = np.linalg.lstsq(np.stack([x, y], 1), target - goal, rcond=1e-3)
        linear = solution.T if rank == 2 else np.zeros((2, 2))
    else:
        u, v = (target - goal).T
        weight = max(float((x * x + y * y).sum()), 1e-9)
        a, b = float((x * u + y * v).sum()) / weight, float((x * v - y * u).sum()) / weight
        linear = np.array([[a, -b], [b, a]])
    area = abs(np.linalg.det(linear))
    if area < 1e-4:
        return None
    away = np.linalg.norm((source - centre) @ linear.T + goal - target, axis=1)
    return np.hstack([linear, (goal - linear @ centre)[:, None]]), float(np.percentile(away, 90) / area**0.5)


def _inside(points: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return ((points >= low) & (points <= high)).all(axis=1)


def by_tiles(pipeline: Pipeline, most: int) -> Pipeline:
    """The pipeline with `most` keypoints at full resolution, by tiles, that all pairs of an image share; its
    `max_keypoints` are those of a tile. `UsageError`: a number of keypoints below 1.

    Matches are those of `WindowedMatcher`. No image is made smaller and no tile left out for the sake of a
    pair, so images may differ in scale as much as the matcher tolerates. Memory is that of one decoded image,
    3 bytes a pixel and once more while it is decoded, of one batch of tiles, and of one window.
    """
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise UsageError(f"tiles must be a whole number of keypoints of at least 1, not {most!r}")
    extractor = replace(pipeline.config.extractor.of_size(None), tiles=int(most))
    return replace(
        pipeline,
        extractor=partial(_all_tiled, pipeline.extractor, int(most)),
        matcher=WindowedMatcher(pipeline.matcher),
        config=replace(pipeline.config, extractor=extractor),
        passes=None,
    )


def _all_tiled(extractor: Extractor, most: int, images: Sequence[Image]) -> list[Features]:
    return [tiled_features(image, extractor, most) for image in images]


class WindowedMatcher:
    """A matcher for any number of keypoints: a few of them say which windows of both images correspond; where
    these have no geometry, they are all the matches."""

    as_one = 4096  # keypoints up to which all are matched with all
    first = 2048  # of larger images the strongest of each part, which are matched first

    def __init__(self, matcher: Matcher) -> None:
        """Keep the matcher of a window; where it has a device and a precision, these are known here too."""
        self.matcher = matcher
        for name in ("device", "precision"):
            if hasattr(matcher, name):
                setattr(self, name, getattr(matcher, name))

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        """Matches of every pair of the batch."""
        return [self._pair(*pair) for pair in zip(features0.unstack(), features1.unstack(), strict=True)]

    def _pair(self, *sides: Features) -> Matches:
        if max(map(len, sides)) <= self.as_one:
            return self._one(*sides)
        chosen = [spread(to_numpy(f.keypoints), to_numpy(f.scores), self.first) for f in sides]
        first = self._one(*(f.select(index) for f, index in zip(sides, chosen, strict=True)))
        scale = max(1.0, max(max(f.image_size) for f in sides) / 1024)  # to an ordinary size
        estimate = RobustEstimator(EstimationConfig(kind="fundamental"))
        geometry = estimate(first.points0, first.points1, thresholds_scale=scale)
        if geometry.verified:
            agree = geometry.inliers
            return match_by_windows(self._one, *sides, first.points0[agree], first.points1[agree])
        indices = np.stack([i[end] for i, end in zip(chosen, first.indices.T, strict=True)], axis=1)
        return replace(first, indices=indices, kept0=len(sides[0]), kept1=len(sides[1]))

    def _one(self, features0: Features, features1: Features) -> Matches:
        return self.matcher(Features.stack([features0]), Features.stack([features1]))[0]


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
        **options: Any,
    ) -> Result:
        """Match two images of any size; arguments and errors as of `Pipeline.match`, without `budget_ms`.

        The first pass, at the pipeline's image size, finds which regions correspond and at which scale.
        Keypoints are then extracted there tile by tile, after the image of higher resolution is reduced to
        the scale of the other, and matched window by window. If the first pass finds no geometry, its result
        is returned.
        """
        if options.get("budget_ms") is not None:
            raise UsageError("budget_ms is for one pass at an ordinary size; tiles take the time they need")
        begun = perf_counter()
        config = replace(self.config, extractor=self.config.extractor.of_size(None), refine=None)
        read = replace(self, config=config).read
        full = [read(image0, mask0), read(image1, mask1)]
        seconds = {"read": perf_counter() - begun}
        sizes = [image.pixels.shape[1::-1] for image in full]
        factors = [resized(size, self.config.extractor.resize)[0][0] / size[0] for size in sizes]
        cameras = {name: options.get(name) for name in ("camera0", "camera1")}
        first = super().match(*map(_resized, full, factors), **options)
        usable = first.geometry.verified or first.geometry.status == "not_estimated"
        if not usable or not len(first.matches):
            return first
        seconds["first_pass"] = (now := perf_counter()) - begun - seconds["read"]
        kept = first.inliers if first.geometry.verified else np.ones(len(first.matches), dtype=bool)
        ends, sides = (first.points0[kept], first.points1[kept]), []
        # Factors, at most 1, that give the common region the same scale; an image is not resized for .05.
        spreads = [np.median(np.linalg.norm(p - np.median(p, axis=0), axis=1)).clip(1e-9) for p in ends]
        common = [min(1.0, float(other / own)) for own, other in zip(spreads, spreads[::-1], strict=True)]
        for side, (factor, near) in enumerate(zip(common, ends, strict=True)):
            shown = _resized(full[side], 1.0 if factor > 0.95 else factor)
            sides.append(tiled_features(shown, self.extractor, self.most_keypoints, near))
            # Nothing needs the colours from here on: two large images beside the pyramids of refinement would
            # be the most memory of all.
            del shown
            full[side] = replace(full[side], pixels=full[side].grey())
        seconds["extract"] = (extracted := perf_counter()) - now
        matches = match_by_windows(self.match_features, *sides, *ends)
        seconds["match"] = perf_counter() - extracted
        matches, geometry, spent = self.refined_and_verified(full, sides, matches, cameras)
        seconds |= spent | {"total": perf_counter() - begun}
        found = {"features0": sides[0], "features1": sides[1], "matches": matches, "geometry": geometry}
        return self.calibrated(replace(first, **found, seconds=seconds, passes=(), first=None))


def _resized(image: Image, factor: float) -> Image:
    return image if factor == 1.0 else image.resized(factor)
