"""The model of refinement: two images and their matches in, the matches to a fraction of a pixel out.

The same steps as `matcher.refine` and `matcher.refine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from matcher.config import RefineConfig
from matcher.onnx.builder import Builder, Value
from matcher.onnx.gradients import WHITE, gradient_image
from matcher.onnx.least_squares import FitGraph, FitValues, ImageWindows
from matcher.onnx.local_maps import local_maps
from matcher.onnx.matrices import Square
from matcher.onnx.pyramid import PyramidValues, level_of
from matcher.refine import (
    DEVIATION,
    FEW,
    MAX_HALVINGS,
    MAX_LAST_STEP,
    MIN_CONTRAST,
    MIN_VISIBLE,
    SMOOTHING,
    Grid,
)
from matcher.types import REFINEMENTS

KIND = "refine"
_BLOCK = 256  # matches computed together, so that their windows stay in a core's cache


class RefinedValues(NamedTuple):
    """Of K matches."""

    points1: Value  # (K, 2)
    status: Value  # (K,) int64, into `REFINEMENTS`
    covariances: Value  # (K, 2, 2) of points1
    correlations: Value  # (K,)


class _Rows(NamedTuple):
    """Of K matches, in pixels of the images that are refined on."""

    affine0: Value  # (K, 2, 3) from (1, x, y) in the frame to pixels
    affine1: Value
    known: Value  # (K,) bool, whether the local map is
    deviation: Value  # (K,) of the prior, frame pixels


def refinement_model(config: RefineConfig) -> bytes:
    """An ONNX file that refines matches on the images.

    Inputs: `image0`, `image1` (1, 1, H, W) grey in [0, 1] at the file's resolution; `resized0`, `resized1`
    (1, 1, h, w) as the front end had them, whose sizes say how exact keypoints are, and whose edges are
    looked at where grey values do not correlate; `points0`, `points1` (K, 2) the matches, finite, in pixels
    of the files, the centre of the first one being (0, 0). Nothing is masked or turned upright. Outputs:
    `refined1` (K, 2) the points of image 1; `status` (K,) int64, 0 for a match that was refined, else why it
    stayed where it was, an index into `matcher.types.REFINEMENTS`, whose names are the file's metadata
    `status`; `covariances` (K, 2, 2) of these points, in pixels² of the file, of an unrefined match a guess;
    `correlations` (K,) of the windows.

    Args:
        config: window size and acceptance thresholds.
    """
    g = Builder("refine")
    images = [g.input(f"image{side}", "float32", 1, 1, f"H{side}", f"W{side}") for side in (0, 1)]
    small = [g.input(f"resized{side}", "float32", 1, 1, f"h{side}", f"w{side}") for side in (0, 1)]
    points = [g.input(f"points{side}", "float32", "K", 2) for side in (0, 1)]
    found = _PairGraph(g, config)(images, small, points)
    g.output("refined1", found.points1, "float32", "K", 2)
    g.output("status", found.status, "int64", "K")
    g.output("covariances", found.covariances, "float32", "K", 2, 2)
    g.output("correlations", found.correlations, "float32", "K")
    return g.encode({"kind": KIND, "status": " ".join(REFINEMENTS)})


@dataclass(frozen=True)
class _PairGraph:
    """Writes the refinement on grey values and, where few matches were refined, on gradients."""

    graph: Builder
    config: RefineConfig

    def __call__(
        self, images: Sequence[Value], small: Sequence[Value], points: Sequence[Value]
    ) -> RefinedValues:
        """Refined matches of two images (1, 1, H, W), their resized ones and (K, 2) points."""
        g = self.graph
        scales = g.Concat(*(_scale(g, *side) for side in zip(small, images, strict=True)), axis=0)  # (2, 2)
        at_first = g.Pow(g.entry(scales, 0, axis=1) * g.entry(scales, 1, axis=1), -0.5)
        count, same = g.size(points[0], 0), g.value(np.ones((2, 2), np.float32))

        def gradients() -> list[Value]:
            return [gradient_image(g, image, SMOOTHING) for image in small]

        def step(number: Value, image0: Value, image1: Value, shares: Value, zooms: Value, *have: Value):
            before = RefinedValues(*have)
            found = self._scaled((image0, image1), shares, zooms, points[0], before.points1)
            # The second time only matches that were not refined, and now are, move.
            taken = ~g.Equal(before.status, 0) & (g.Equal(found.status, 0) | g.Equal(number, 0))
            now = [
                g.Where(_widened(g, taken, rank), new, old)
                for new, old, rank in zip(found, before, (2, 1, 3, 1), strict=True)
            ]
            accepted = g.scalar(g.total(g.integer(g.Equal(now[1], 0)), 0, keep=True))
            few = (g.real(accepted) < g.real(g.scalar(count)) * FEW) & g.Equal(number, 0)
            following = g.either(few, gradients, lambda: [image0, image1])
            return few, [*following, scales, g.value(np.ones(2, np.float32)), *now], []

        nothing = g.full(g.Concat(count, [2, 2], axis=0), 0.0)
        start = [*images, same, at_first, points[1], g.full(count, 1), nothing, g.full(count, 0.0)]
        return RefinedValues(*g.loop(2, start, step)[4:])

    def _scaled(
        self, images: Sequence[Value], scales: Value, zooms: Value, points0: Value, points1: Value
    ) -> RefinedValues:
        """Matches in pixels of the files, refined on images of (2, 2) times their width and height."""
        g = self.graph
        sides = [(p + 0.5) * g.entry(scales, k) - 0.5 for k, p in enumerate((points0, points1))]
        found = self._refined(images, [g.entry(zooms, k) for k in (0, 1)], *sides)
        scale = g.slice(scales, 0, 1)
        product = g.Unsqueeze(scale, [2]) * g.Unsqueeze(scale, [1])
        shift = (found.points1 - sides[1]) / scale
        return found._replace(points1=points1 + shift, covariances=found.covariances / product)

    def _refined(
        self, images: Sequence[Value], zooms: Sequence[Value], points0: Value, points1: Value
    ) -> RefinedValues:
        """Matches in pixels of the images that are refined on, whose pixels are `zooms` of the resized."""
        g = self.graph
        rows = self._rows(zooms, points0, points1)
        halvings = self._halvings(rows.deviation)
        sides = []
        for image, affine in zip(images, (rows.affine0, rows.affine1), strict=True):
            coarsest = _frame(g, affine).scaled(g.Pow(2.0, g.real(halvings)))
            most = g.ReduceMax(g.Concat(level_of(g, image, coarsest), [0], axis=0), keepdims=0)
            sides.append((image, PyramidValues.of(g, image, most)))

        def fit(start: Value, end: Value) -> list[Value]:
            part = _Rows(*(g.slice(each, 0, start, end) for each in rows))
            status, change, covariance, correlation = self._coarse_to_fine(sides, part, halvings)
            status = g.Where(part.known, status, REFINEMENTS.index("no_map"))
            return [status, change, covariance.stacked(), correlation]

        none = [np.zeros(0, np.int64), *(np.zeros(shape, np.float32) for shape in ((0, 2, 3), (0, 2, 2), 0))]
        status, change, covariance, correlation = self._by_blocks(g.size(points0, 0), none, fit)
        accepted = g.Equal(status, 0)
        to_pixels = g.slice(rows.affine1, 2, 1)
        moved = points1 + g.Squeeze(to_pixels @ g.slice(change, 2, 0, 1), [2])
        unknown = g.Unsqueeze(rows.deviation * rows.deviation, [1, 2]) * np.eye(2, dtype=np.float32)
        spread = g.Where(_widened(g, accepted, 3), covariance, unknown)
        spread = to_pixels @ spread @ g.Transpose(to_pixels, perm=[0, 2, 1])
        points = g.Where(_widened(g, accepted, 2), moved, points1)
        return RefinedValues(points, status, spread, g.Where(g.IsNaN(correlation), 0.0, correlation))

    def _by_blocks(
        self, count: Value, none: Sequence[np.ndarray], compute: Callable[[Value, Value], list[Value]]
    ) -> tuple[Value, ...]:
        """What `compute` gives for all rows, from the first up to the last of each block."""
        g = self.graph

        def step(number: Value, *have: Value):
            start = g.Reshape(number * _BLOCK, [1])
            found = compute(start, start + _BLOCK)
            return True, [g.Concat(*both, axis=0) for both in zip(have, found, strict=True)], []

        blocks = g.scalar(g.Div(count + (_BLOCK - 1), _BLOCK))
        return g.loop(blocks, [g.value(each) for each in none], step)

    def _rows(self, zooms: Sequence[Value], points0: Value, points1: Value) -> _Rows:
        g = self.graph

        def compute(start: Value, end: Value) -> list[Value]:
            rows0, rows1 = (g.slice(each, 0, start, end) for each in (points0, points1))
            maps, known = local_maps(g, points0, points1, rows0, rows1, start, self.config.neighbours)
            frames = _middle_frames(g, maps)
            shares = [zoom / frame.zoom() for zoom, frame in zip(zooms, frames, strict=True)]
            deviation = g.Sqrt((shares[0] * shares[0] + shares[1] * shares[1]) * 0.5) * DEVIATION
            affine = [
                g.Concat(g.Unsqueeze(points, [2]), frame.stacked(), axis=2)
                for points, frame in zip((rows0, rows1), frames, strict=True)
            ]
            return [*affine, known, deviation]

        none = [np.zeros((0, 2, 3), np.float32)] * 2 + [np.zeros(0, bool), np.zeros(0, np.float32)]
        return _Rows(*self._by_blocks(g.size(points0, 0), none, compute))

    def _halvings(self, deviation: Value) -> Value:
        """() int64 how often the images are halved at first, so that keypoints are exact to a pixel."""
        g = self.graph

        def median() -> list[Value]:
            count = g.size(deviation, 0)
            ordered, _ = g.TopK(deviation, count, outputs=2, axis=0)
            middle = g.Gather(ordered, g.Concat(g.Div(count - 1, 2), g.Div(count, 2), axis=0), axis=0)
            return [g.ReduceMean(middle, [0], keepdims=0)]

        some = g.scalar(g.size(deviation, 0)) > 0
        (found,) = g.either(some, median, lambda: [g.value(np.float32(1))])
        halvings = g.Round(g.Log(g.Max(found, 1.0)) * (1 / np.log(2)))
        return g.Min(g.integer(halvings), MAX_HALVINGS)

    def _coarse_to_fine(
        self, sides: Sequence[tuple[Value, PyramidValues]], rows: _Rows, halvings: Value
    ) -> tuple[Value, Value, Square, Value]:
        """Status, change, covariance and correlation, from the resolution of keypoints to the images' own."""
        g = self.graph
        fit = FitGraph(g, Grid.of(self.config.window), self.config.reweighings)
        affine, deviation = (rows.affine0, rows.affine1), rows.deviation

        def step(number: Value, status: Value, prior: Value, spread: Value, *best: Value):
            size = g.Pow(2.0, g.real(halvings - number))  # of a pixel
            wide = _columns(g, size, [0, 1, 1])
            windows = []
            for (image, pyramid), each in zip(sides, affine, strict=True):
                level = level_of(g, image, _frame(g, each).scaled(size))
                windows.append(ImageWindows(pyramid, each * wide, level))
            unit = _columns(g, size, [1, 0, 0])
            found = fit(*windows, spread / size, prior / unit)
            found = found._replace(
                change=found.change * unit, covariance=found.covariance.scaled(size * size)
            )
            now = self._statuses(found, deviation)
            kept = g.Equal(status, 0) & (now > 0)
            ours = (found.change, found.covariance.stacked(), found.correlation)
            best = [
                g.Where(_widened(g, kept, rank), before, after)
                for before, after, rank in zip(best, ours, (3, 3, 1), strict=True)
            ]
            status = g.Where(kept, 0, now)
            known = g.Min(g.Max(_largest(g, Square.of(g, best[1])), size * 0.5), deviation)
            good = g.Equal(status, 0)
            prior = g.Where(_widened(g, good, 3), best[0], 0.0)
            return True, [status, prior, g.Where(good, known, deviation), *best], []

        nothing = rows.affine0 * 0.0
        start = [
            g.full(g.Shape(deviation), 1),  # none was refined
            nothing,
            deviation,
            nothing,
            g.slice(nothing, 2, 1),
            deviation,
        ]
        status, _, _, change, covariance, correlation = g.loop(halvings + 1, start, step)
        return status, change, Square.of(g, covariance), correlation

    def _statuses(self, found: FitValues, deviation: Value) -> Value:
        """(K,) int64 of `REFINEMENTS`; the first reason for rejection that applies."""
        g = self.graph
        move = g.entry(found.change, 0, axis=2)
        shift = g.Sqrt(g.total(move * move, 1))
        rejections = [
            ("outside", found.visible < MIN_VISIBLE),
            ("flat", ~(found.contrast >= MIN_CONTRAST / WHITE)),
            ("moved_far", ~(shift <= deviation * self.config.max_shift)),
            ("low_correlation", ~(found.correlation >= self.config.min_correlation)),
            ("not_converged", ~(found.last_step <= MAX_LAST_STEP)),
        ]
        status = g.full(g.Shape(deviation), 0)
        for name, rejected in reversed(rejections):
            status = g.Where(rejected, REFINEMENTS.index(name), status)
        return status


def _scale(g: Builder, small: Value, image: Value) -> Value:
    """(1, 2) resized width and height as shares of the file's."""
    sides = [g.real(g.Concat(g.size(each, 3), g.size(each, 2), axis=0)) for each in (small, image)]
    return g.Unsqueeze(sides[0] / sides[1], [0])


def _frame(g: Builder, affine: Value) -> Square:
    return Square.of(g, g.slice(affine, 2, 1))


def _middle_frames(g: Builder, maps: Square) -> tuple[Square, Square]:
    """Maps from a frame halfway between the views to image 0 and to image 1; see `matcher.refine`."""
    half = maps.transposed().times(maps).square_root().square_root()
    inverse, area = half.inverse(), g.Abs(maps.determinant())
    zoom = g.Sqrt(g.Sqrt(g.Max(area, 1.0 / area)))
    return inverse.scaled(zoom), maps.times(inverse).scaled(zoom)


def _largest(g: Builder, matrices: Square) -> Value:
    """(K,) roots of the largest eigenvalues of symmetric matrices."""
    a, b, _, d = matrices
    return g.Sqrt((a + d + g.Sqrt((a - d) * (a - d) + b * b * 4.0)) * 0.5)


def _columns(g: Builder, size: Value, chosen: Sequence[int]) -> Value:
    """(1, 1, 3): the size of a pixel in some columns, 1 in the others."""
    mask = np.array(chosen, np.float32).reshape(1, 1, 3)
    return size * mask + (1 - mask)


def _widened(g: Builder, flags: Value, rank: int) -> Value:
    return g.Unsqueeze(flags, list(range(1, rank))) if rank > 1 else flags
