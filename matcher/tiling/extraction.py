"""Keypoints of a large image, tile by tile, ranked together and spread over the image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from matcher.data.features import Features
from matcher.data.geometry import UPRIGHT, turn_angles
from matcher.data.image import Image
from matcher.data.protocols import Extractor
from matcher.data.tensors import to_numpy

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
