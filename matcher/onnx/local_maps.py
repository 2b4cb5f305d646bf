"""The local affine map at every match as ONNX operations: the same as `matcher.refine`."""

from __future__ import annotations

from typing import NamedTuple

from matcher.onnx.builder import Builder, Value
from matcher.onnx.matrices import Square
from matcher.refine import LEAST_RADIUS, MAX_ANISOTROPY, MAX_SCALE, MIN_NEIGHBOURS, RIDGE, SCALES

_FAR = 1e30  # squared pixels, from a match to itself


class LocalMaps(NamedTuple):
    """Maps from image 0 to image 1; the identity where they are not known."""

    maps: Square
    known: Value  # (K,) bool


def local_maps(
    g: Builder, points0: Value, points1: Value, rows0: Value, rows1: Value, first: Value, neighbours: int
) -> LocalMaps:
    """Affine maps at some matches, fitted to their nearest neighbours among all.

    Args:
        g: the graph.
        points0, points1: (K, 2) all matches.
        rows0, rows1: (B, 2) those whose maps are asked for.
        first: (1,) int64, the number of the first of these.
        neighbours: number of matches that a map is fitted to, the match itself excluded.
    """
    count = g.size(points0, 0)
    nearest = _nearest(g, points0, rows0, first, neighbours)
    offsets = [
        g.Gather(points, nearest, axis=0) - g.Unsqueeze(rows, [1])
        for points, rows in ((points0, rows0), (points1, rows1))
    ]
    x, y, t0, t1 = (g.entry(each, axis, axis=2) for each in offsets for axis in (0, 1))  # (B, n)
    square = x * x + y * y
    radius = g.Max(g.Sqrt(g.maximum(square, 1, keep=True)), LEAST_RADIUS)
    base = g.Exp(square / (radius * radius) * (-0.5 * 1.5**2))
    weights = base
    for scale in (*SCALES, None):
        maps, residual = _fit(g, (x, y), (t0, t1), weights, radius * radius * RIDGE)
        if scale is not None:
            away = residual / (radius * radius * scale**2) + 1.0
            weights = base / (away * away)
    known = _plausible(maps) & (count > MIN_NEIGHBOURS)
    maps = Square(*(g.Where(known, x, float(k in (0, 3))) for k, x in enumerate(maps)))
    return LocalMaps(maps, known)


def _nearest(g: Builder, points: Value, rows: Value, first: Value, wanted: int) -> Value:
    """(B, n) numbers of the nearest other points, unordered; of a single point itself."""
    distances = None
    for axis in (0, 1):
        # Differences first: squares of large coordinates would cancel.
        along = g.slice(rows, 1, axis, axis + 1) - g.Unsqueeze(g.entry(points, axis, axis=1), [0])
        distances = along * along if distances is None else distances + along * along
    own = g.Unsqueeze(g.range(g.size(rows, 0)) + first, [1])
    every = g.Unsqueeze(g.range(g.size(points, 0)), [0])
    distances = g.Where(g.Equal(own, every), _FAR, distances)
    number = g.Max(g.Min(g.size(points, 0) - 1, wanted), 1)
    _, nearest = g.TopK(distances, number, outputs=2, axis=1, largest=0, sorted=0)
    return nearest


def _fit(
    g: Builder, sources: tuple[Value, Value], targets: tuple[Value, Value], weights: Value, ridge: Value
) -> tuple[Square, Value]:
    """Maps by weighted least squares with a translation, and squared residuals (B, n)."""

    def total(values: Value) -> Value:
        return g.total(values, 1, keep=True)

    share = weights / total(weights)
    x, y = (each - total(share * each) for each in sources)
    share_x, share_y = share * x, share * y
    xx, xy, yy = total(share_x * x) + ridge, total(share_x * y), total(share_y * y) + ridge
    one = 1.0 / (xx * yy - xy * xy)
    entries, residual = [], None
    for target in targets:
        t = target - total(share * target)
        xt, yt = total(share_x * t), total(share_y * t)
        along_x, along_y = (xt * yy - yt * xy) * one, (yt * xx - xt * xy) * one
        rest = t - along_x * x - along_y * y
        residual = rest * rest if residual is None else residual + rest * rest
        entries += [along_x, along_y]
    return Square(*(g.Squeeze(each, [1]) for each in entries)), residual


def _plausible(maps: Square) -> Value:
    """(K,) bool: no reflection, no extreme scale or anisotropy."""
    determinant = maps.determinant()
    size = (maps.a * maps.a + maps.b * maps.b + maps.c * maps.c + maps.d * maps.d) * 0.5
    fits = (determinant > MAX_SCALE**-2) & (determinant < MAX_SCALE**2)
    # For singular values a ≥ b: size / determinant = (a / b + b / a) / 2.
    return fits & (size < determinant * ((MAX_ANISOTROPY + 1 / MAX_ANISOTROPY) / 2))
