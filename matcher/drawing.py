"""Pictures of matches: two views side by side, lines between matched points, coloured by confidence.

Built on matplotlib's objects (no pyplot, so no global state and no window). Inliers run from teal to yellow
with their confidence, outliers are thin and vermilion: they differ in lightness too, so that colour-blind
eyes and grey prints tell them apart.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import cv2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from matcher.files import check_output, write_whole
from matcher.geometry import resize_points, stored_to_upright
from matcher.images import image_from_array, read_image
from matcher.types import Image, Result, UsageError

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf")

_SIDE, _GAP, _HEADER, _MIN_WIDTH, _DPI = 800, 12, 52, 960, 100  # pixels; _SIDE: longer side of either picture
_CELL = 64  # pixels; the drawn lines are spread over cells of this size
_DIM = 0.85  # brightness of the pictures below the lines
_OUTLIER = (0.84, 0.37, 0.0)  # vermilion of Okabe and Ito's palette


@dataclass(frozen=True, eq=False)
class _Placed:
    """A picture at its scale and place on the canvas."""

    image: Image
    scale: tuple[float, float]  # (sx, sy) = display size / size of image.pixels
    offset: tuple[int, int]  # of the top left pixel on the canvas

    def points(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → canvas pixels."""
        upright = stored_to_upright(points, self.image.size, self.image.orientation)
        resized = resize_points(upright, self.image.scale)
        return resize_points(resized, self.scale) + np.asarray(self.offset)


def draw_matches(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    scores: np.ndarray | None = None,
    inliers: np.ndarray | None = None,
    keypoints0: np.ndarray | None = None,
    keypoints1: np.ndarray | None = None,
    title: str | None = None,
    max_lines: int = 200,
) -> Figure:
    """Two pictures side by side, upright, with lines between their matched points.

    Args:
        image0, image1: an Image, or an array as `images.image_from_array` takes it.
        points0, points1: (K, 2) matched points in stored-image pixels.
        scores: (K,) in [0, 1], the colour of a match; one colour when absent.
        inliers: (K,) bool; None where no geometry was estimated, then no match counts as an outlier.
        keypoints0, keypoints1: (N, 2) and (M, 2) all keypoints, drawn as small dots.
        title: one line above the pictures.
        max_lines: lines drawn of the inliers, and a quarter of it of the outliers, spread over the picture;
            the end points of all matches are drawn.

    Raises:
        UsageError: arrays whose shapes do not fit, or pictures that cannot be used.
    """
    points0, points1 = _points(points0, "points0"), _points(points1, "points1")
    count = len(points0)
    scores = _column(scores, count, "scores", np.ones(count))
    good = _column(inliers, count, "inliers", np.ones(count)).astype(bool)
    if len(points1) != count:
        raise UsageError(f"points0 and points1 must be of one length, not {count} and {len(points1)}")
    if max_lines < 0:
        raise UsageError(f"max_lines must not be negative, got {max_lines}")
    placed, canvas = _side_by_side(_as_image(image0), _as_image(image1))
    figure, axes = _blank_figure(canvas)
    for side, keypoints in zip(placed, (keypoints0, keypoints1), strict=True):
        if keypoints is not None:
            _dots(axes, side.points(_points(keypoints, "keypoints")), "white", 2.0, 0.35)
    ends = np.stack([placed[0].points(points0), placed[1].points(points1)], axis=1)
    drawn = _draw_lines(axes, ends, scores, good, max_lines)
    _draw_header(figure, title, count, drawn, None if inliers is None else good, scores)
    return figure


def figure_pixels(figure: Figure) -> np.ndarray:
    """A figure as an (H, W, 3) uint8 RGB array."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def plot_result(
    result: Result,
    image0: Image | np.ndarray | str | Path,
    image1: Image | np.ndarray | str | Path,
    path: str | Path,
    title: str | None = None,
    *,
    max_lines: int = 200,
) -> Path:
    """Draw a result and save it; the file appears whole or not at all.

    Args:
        result: what a pipeline said of the two pictures.
        image0, image1: the pictures it was made from.
        path: .png, .jpg, .jpeg or .pdf (lines as vectors); an existing file is replaced.
        title: one line above the pictures; counts of matches and inliers when absent.
        max_lines: as in `draw_matches`.

    Returns:
        The path written.

    Raises:
        UsageError: another suffix, a folder that is absent, or pictures of other sizes than the result's.
        ImageError: a picture given by its path cannot be read.
    """
    path = check_output(path, PLOT_SUFFIXES)
    images = (_as_image(image0), _as_image(image1))
    for index, (image, features) in enumerate(zip(images, (result.features0, result.features1), strict=True)):
        size = tuple(int(value) for value in features.size)
        if image.size != size:
            raise UsageError(f"image{index} is {image.size}, but the result's picture was {size}")
    figure = draw_matches(
        *images,
        result.points0,
        result.points1,
        scores=result.scores,
        inliers=None if result.geometry.status == "not_estimated" else result.geometry.inliers,
        keypoints0=result.features0.keypoints.detach().cpu().numpy(),
        keypoints1=result.features1.keypoints.detach().cpu().numpy(),
        title=title,
        max_lines=max_lines,
    )
    write_whole(path, _encoded(figure, path.suffix.lower()[1:]))
    return path


def _encoded(figure: Figure, kind: str) -> bytes:
    FigureCanvasAgg(figure)
    options = {"jpg": {"pil_kwargs": {"quality": 92}}, "pdf": {"metadata": {"CreationDate": None}}}
    options["jpeg"] = options["jpg"]
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=_DPI, **options.get(kind, {}))
    return buffer.getvalue()


def _as_image(image: Image | np.ndarray | str | Path) -> Image:
    if isinstance(image, (str, Path)):
        return read_image(image)
    return image if isinstance(image, Image) else image_from_array(image)


def _points(points: np.ndarray, name: str) -> np.ndarray:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise UsageError(f"{name} must be (K, 2), not {points.shape}")
    if not np.isfinite(points).all():
        raise UsageError(f"{name} holds values that are not finite (NaN or infinity)")
    return points


def _column(values: np.ndarray | None, count: int, name: str, default: np.ndarray) -> np.ndarray:
    values = default if values is None else np.asarray(values)
    if values.shape != (count,):
        raise UsageError(f"{name} must be ({count},), not {values.shape}")
    return values


def _side_by_side(image0: Image, image1: Image) -> tuple[tuple[_Placed, _Placed], np.ndarray]:
    """Both pictures with the same longer side, centred vertically on a white canvas (H, W, 3)."""
    shown = [_display(image.pixels) for image in (image0, image1)]
    used = shown[0].shape[1] + _GAP + shown[1].shape[1]
    width, height = max(_MIN_WIDTH, used), max(pixels.shape[0] for pixels in shown)
    canvas = np.full((height, width, 3), 255, np.uint8)
    left, placed = (width - used) // 2, []
    for image, pixels in zip((image0, image1), shown, strict=True):
        rows, columns = pixels.shape[:2]
        top = (height - rows) // 2
        canvas[top : top + rows, left : left + columns] = pixels
        scale = (columns / image.pixels.shape[1], rows / image.pixels.shape[0])
        placed.append(_Placed(image, scale, (left, top)))
        left += columns + _GAP
    return (placed[0], placed[1]), canvas


def _display(pixels: np.ndarray) -> np.ndarray:
    """(h, w, 3) at display size, darker and paler, so that coloured lines stand out."""
    factor = _SIDE / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor)))
    shown = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    if shown.ndim == 2:
        return cv2.cvtColor(cv2.convertScaleAbs(shown, alpha=_DIM), cv2.COLOR_GRAY2RGB)
    grey = cv2.cvtColor(cv2.cvtColor(shown, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(shown, 0.5 * _DIM, grey, 0.5 * _DIM, 0)


def _blank_figure(canvas: np.ndarray) -> tuple[Figure, Axes]:
    """A figure whose axes show the canvas pixel by pixel, under a header."""
    height, width = canvas.shape[:2]
    total = height + _HEADER
    figure = Figure(figsize=(width / _DPI, total / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, height / total))
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_axis_off()
    return figure, axes


def _draw_lines(
    axes: Axes, ends: np.ndarray, scores: np.ndarray, good: np.ndarray, max_lines: int
) -> tuple[int, int]:
    """Lines and end points, (K, 2, 2) ends; returns how many lines of inliers and outliers were drawn."""
    by_score = np.argsort(scores, kind="stable")  # the most confident lie on top
    inner, outer = by_score[good[by_score]], by_score[~good[by_score]]
    lines_in = _spread(inner, ends[:, 0], max_lines)
    lines_out = _spread(outer, ends[:, 0], max_lines // 4)
    colours = _confidence_colours()(np.clip(scores, 0, 1))
    crowd = min(1.0, len(lines_in) / 200)
    alpha, width = 0.9 - 0.35 * crowd, 1.3 - 0.4 * crowd
    axes.add_collection(
        LineCollection(ends[lines_out], colors=[_OUTLIER], linewidths=0.5, alpha=0.55), autolim=False
    )
    _dots(axes, ends[outer].reshape(-1, 2), _OUTLIER, 3.0, 0.8)
    under = LineCollection(ends[lines_in], colors="black", linewidths=width + 0.8, alpha=0.25 * alpha)
    axes.add_collection(under, autolim=False)
    over = LineCollection(ends[lines_in], colors=colours[lines_in], linewidths=width, alpha=alpha)
    axes.add_collection(over, autolim=False)
    _dots(axes, ends[inner].reshape(-1, 2), np.repeat(colours[inner], 2, axis=0), 6.0, 0.95)
    return len(lines_in), len(lines_out)


def _spread(order: np.ndarray, points: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of `order` (best last), spread over the picture: the best of each cell come first."""
    best_first = order[::-1]
    cells = np.floor(points[best_first] / _CELL).astype(np.int64) @ np.array([1, 1 << 20])
    by_cell = np.argsort(cells, kind="stable")
    starts = np.flatnonzero(np.diff(cells[by_cell], prepend=np.nan))
    rank = np.empty(len(order), np.int64)
    rank[by_cell] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    chosen = np.argsort(rank, kind="stable")[:limit]
    return best_first[np.sort(chosen)][::-1]


def _confidence_colours() -> ListedColormap:
    return ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.4, 1.0, 64)))


def _dots(axes: Axes, points: np.ndarray, colour: object, area: float, alpha: float) -> None:
    axes.scatter(points[:, 0], points[:, 1], s=area, color=colour, alpha=alpha, linewidths=0)


def _draw_header(
    figure: Figure,
    title: str | None,
    count: int,
    drawn: tuple[int, int],
    good: np.ndarray | None,
    scores: np.ndarray,
) -> None:
    """The title, and below it what the colours mean."""
    width, height = figure.get_size_inches() * _DPI
    if title is None:
        title = f"{count} matches" + ("" if good is None else f", {int(good.sum())} inliers")
    title, room = " ".join(title.split()), int(width / 8)
    title = title if len(title) <= room else title[: room - 1] + "…"
    figure.text(12 / width, 1 - 16 / height, title, fontsize=11, va="center", parse_math=False)
    style = {"fontsize": 8, "va": "center", "color": "0.35"}
    y = 1 - 38 / height
    bar = figure.add_axes((88 / width, y - 4 / height, 120 / width, 8 / height))
    bar.imshow(np.linspace(0, 1, 64)[None], cmap=_confidence_colours(), aspect="auto")
    bar.set_axis_off()
    figure.text(12 / width, y, "confidence 0", **style)
    legend = "1"
    if good is not None:
        legend += f"      inliers: {int(good.sum())}      outliers, thin and orange: {int((~good).sum())}"
    if sum(drawn) < count:
        legend += f"      lines drawn: {sum(drawn)} of {count}"
    figure.text(214 / width, y, legend, **style)
