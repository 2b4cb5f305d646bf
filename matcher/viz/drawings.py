"""What all drawings share: two views placed on a white canvas, a header with a legend, encoding.

Built on matplotlib's objects (no pyplot, so no global state and no window).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import cv2
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from matcher.errors import UsageError, counted
from matcher.files import check_output, write_output
from matcher.geometry import resize_points, stored_to_upright, warp_points
from matcher.images import MAX_PIXELS, read_image
from matcher.types import Image
from matcher.verify.adjustment import epipolar_distance
from matcher.viz.overlays import as_colour

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
# Okabe and Ito's palette
VERMILION, SKY, GREEN, ORANGE = "#d55e00", "#56b4e9", "#009e73", "#e69f00"
BLUE, PINK, YELLOW = "#0072b2", "#cc79a7", "#f0e442"

_SIDE, _GAP, _MIN_WIDTH, _DPI = 800, 12, 960, 100  # pixels; _SIDE: longer side of either image
_ANSWERS = 320  # pixels: height of views from above


@dataclass(frozen=True, eq=False)
class Placed:
    """An image at its scale and position on the canvas."""

    image: Image
    scale: tuple[float, float]  # (sx, sy) = display size / size of image.pixels
    offset: tuple[int, int]  # of the top left pixel on the canvas
    shape: tuple[int, int]  # (width, height) as displayed

    def points(self, points: np.ndarray) -> np.ndarray:
        """Stored pixels (K, 2) → canvas pixels."""
        upright = stored_to_upright(points, self.image.size, self.image.orientation)
        resized = resize_points(upright, self.image.scale)
        return resize_points(resized, self.scale) + np.asarray(self.offset)


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as .png, .jpg, .jpeg, .pdf or .svg; the file appears whole or not at all.

    Raises:
        UsageError: another suffix, or a folder that is absent.
    """
    path = check_output(path, PLOT_SUFFIXES)
    kind, buffer = path.suffix.lower()[1:], io.BytesIO()
    options = {"pdf": {"metadata": {"CreationDate": None}}, "svg": {"metadata": {"Date": None}}}
    options |= {key: {"pil_kwargs": {"quality": 92}} for key in ("jpg", "jpeg")}
    FigureCanvasAgg(figure)
    with matplotlib.rc_context({"svg.hashsalt": "matcher"}):  # the same names of parts every time
        figure.savefig(buffer, format=kind, dpi=_DPI, **options.get(kind, {}))
    write_output(path, buffer.getvalue())
    return path


def figure_pixels(figure: Figure) -> np.ndarray:
    """A figure as an (H, W, 3) uint8 RGB array."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def as_image(image: Image | np.ndarray | str | Path, max_pixels: int = MAX_PIXELS) -> Image:
    """An image by its path, as an array, or as it is; raises as `images.read_image` does."""
    return read_image(image, max_pixels=max_pixels)


def as_points(points: np.ndarray, name: str) -> np.ndarray:
    """(K, 2) float64; `UsageError` naming the argument for another shape or values that are not finite."""
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise UsageError(f"{name} must be (K, 2), not {points.shape}")
    if not np.isfinite(points).all():
        raise UsageError(f"{name} holds values that are not finite (NaN or infinity)")
    return points


def _column(values: np.ndarray | None, count: int, name: str) -> np.ndarray:
    """(K,) values, ones where there are none."""
    values = np.ones(count) if values is None else np.asarray(values)
    if values.shape != (count,):
        raise UsageError(f"{name} must be ({count},), not {values.shape}")
    return values


def two_images(
    image0: Image | np.ndarray | str | Path,
    image1: Image | np.ndarray | str | Path,
    *,
    stacked: bool,
    below: int = 0,
) -> tuple[list[Placed], Figure, Axes]:
    """A figure with both images, of one longer side, beside or above each other, under room for a header, and
    over `below` pixels for what else is drawn."""
    images = as_image(image0), as_image(image1)
    shown = [_display(image.pixels) for image in images]
    rows, columns = ([pixels.shape[axis] for pixels in shown] for axis in (0, 1))
    used = max(columns) if stacked else sum(columns) + _GAP
    width, height = max(_MIN_WIDTH, used), sum(rows) + _GAP if stacked else max(rows)
    canvas = np.full((height, width, 3), 255, np.uint8)
    left, top, placed = (width - used) // 2, 0, []
    for image, pixels, h, w in zip(images, shown, rows, columns, strict=True):
        x, y = ((width - w) // 2, top) if stacked else (left, (height - h) // 2)
        canvas[y : y + h, x : x + w] = pixels
        placed.append(Placed(image, (w / image.pixels.shape[1], h / image.pixels.shape[0]), (x, y), (w, h)))
        left, top = left + w + _GAP, top + h + _GAP
    total = height + header_height(width) + below
    figure = Figure(figsize=(width / _DPI, total / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0.0, below / total, 1.0, height / total))
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_axis_off()
    return placed, figure, axes


def _display(pixels: np.ndarray) -> np.ndarray:
    """(h, w, 3) at display size, darker and paler, so that coloured lines stand out."""
    factor = _SIDE / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor)))
    shown = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    shown = as_colour(shown)
    grey = as_colour(cv2.cvtColor(shown, cv2.COLOR_RGB2GRAY))
    return cv2.addWeighted(shown, 0.425, grey, 0.425, 0)


def header_height(width: float) -> int:
    """Rows above the images of a canvas so wide: it grows with that, to be read when it is shrunk."""
    return round(52 * max(1.0, width / 1000))


def _draw_header(
    figure: Figure,
    title: str,
    texts: Sequence[tuple[str, tuple[float, ...] | str]],
    scale: Colormap | None = None,
    ends: tuple[str, str] = ("", ""),
) -> None:
    """The title, shortened to one line; below it what colours mean: a scale, and texts of a colour each."""
    width, height = figure.get_size_inches() * _DPI
    unit = max(1.0, width / 1000)
    title, room = " ".join(title.split()), int(width / (8.5 * unit))
    title = title if len(title) <= room else title[: room - 1] + "…"
    heading = {"fontsize": 11 * unit, "va": "center", "parse_math": False}
    figure.text(12 * unit / width, 1 - 16 * unit / height, title, **heading)
    y, x = 1 - 38 * unit / height, 12.0 * unit
    style = {"fontsize": 9 * unit, "va": "center", "parse_math": False, "color": "0.25"}
    renderer = FigureCanvasAgg(figure).get_renderer()

    def write(text: str, colour: str | tuple[float, ...] = "0.25") -> float:
        """Text at x; its width in pixels."""
        drawn = figure.text(x / width, y, text, **{**style, "color": colour})
        return drawn.get_window_extent(renderer).width if text else 0.0

    if scale is not None:
        x += write(ends[0]) + 8 * unit
        bar = figure.add_axes((x / width, y - 4 * unit / height, 120 * unit / width, 8 * unit / height))
        bar.imshow(np.linspace(0, 1, 64)[None], cmap=scale, aspect="auto")
        bar.set(xticks=[], yticks=[])
        bar.spines[:].set(color="0.6", linewidth=0.5)  # a scale that begins with white has an end, too
        x += 128 * unit
        x += write(ends[1]) + 24 * unit
    for text, colour in texts:
        if colour != "none":
            white = min(to_rgb(colour)) > 0.95
            x += write("○" if white else "●", "0.25" if white else colour) + 4 * unit
        x += write(text) + 20 * unit


# --- Matches

ColourBy = Literal["confidence", "inliers", "error", "planes", "repeats"]
_PLANES = (SKY, YELLOW, GREEN, PINK, BLUE, ORANGE)  # colours, used again where there are more planes


def draw_matches(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    scores: np.ndarray | None = None,
    inliers: np.ndarray | None = None,
    errors: np.ndarray | None = None,
    planes: np.ndarray | None = None,
    colour_by: ColourBy = "confidence",
    error_limit: float = 5.0,
    stacked: bool = False,
    keypoints0: np.ndarray | None = None,
    keypoints1: np.ndarray | None = None,
    covariances: np.ndarray | None = None,
    title: str | None = None,
    max_lines: int = 200,
    answers: Sequence[tuple[np.ndarray, np.ndarray]] = (),
) -> Figure:
    """Two images, upright, with lines between their matched points.

    Args:
        image0, image1, points0, points1: images as `images.read_image` takes; (K, 2) stored pixels.
        scores, inliers: (K,) in [0, 1], the confidence of a match, 1 when absent; (K,) bool, None where no
            geometry was estimated, then no match counts as an outlier.
        errors, planes, colour_by, error_limit, stacked: (K,) pixels; (K,) plane of each match, or group of
            those that look alike ("repeats"), −1 for none; what colours show; larger errors have one colour;
            one image above the other.
        keypoints0, keypoints1, covariances: (N, 2), (M, 2) all keypoints, as dots; (K, 2, 2) of points1, as
            ellipses of one sigma, enlarged twenty times.
        title, max_lines: the line above; how many inliers, and a quarter of it outliers, spread out.
        answers: poses and points, drawn below side by side as in `draw_answers`.

    Raises:
        UsageError: arrays whose shapes do not fit, or images that cannot be used.
    """
    points0, points1 = as_points(points0, "points0"), as_points(points1, "points1")
    if len(points1) != (count := len(points0)):
        raise UsageError(f"points0 and points1 must be of one length, not {count} and {len(points1)}")
    if max_lines < 0 or not error_limit > 0:
        wrong = f"max_lines must not be negative ({max_lines}), error_limit above 0 pixels ({error_limit})"
        raise UsageError(wrong)
    if colour_by not in get_args(ColourBy):
        raise UsageError(f"colour_by is {', '.join(get_args(ColourBy))}, not {colour_by!r}")
    grouped = colour_by in ("planes", "repeats")
    if (errors if colour_by == "error" else planes if grouped else ()) is None:
        needed = "errors, in pixels," if colour_by == "error" else "planes, or groups,"
        raise UsageError(f"colour_by {colour_by!r} needs {needed} of all matches")
    scores = shares = _column(scores, count, "scores").astype(float)
    good = _column(inliers, count, "inliers").astype(bool)
    if colour_by == "error":
        colours = LinearSegmentedColormap.from_list("error", [SKY, YELLOW, VERMILION])
        shares = np.nan_to_num(_column(errors, count, "errors") / error_limit, nan=1.0)
    elif grouped:
        colours, planes = ListedColormap((*_PLANES, "white")), _column(planes, count, "planes")
        shares = np.where(planes < 0, len(_PLANES), planes % len(_PLANES)) / len(_PLANES)
    elif colour_by == "inliers":
        colours = ListedColormap([SKY])
    else:
        colours = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.4, 1.0, 64)))
    judged = None if inliers is None or colour_by == "error" else good
    agreeing = "" if inliers is None else f", {counted(int(good.sum()), 'inlier')}"
    title = title or counted(count, "match", "matches") + agreeing
    good = good | (colour_by == "error")  # errors tell more than whether a match is an inlier
    below = _ANSWERS if answers else 0
    placed, figure, axes = two_images(image0, image1, stacked=stacked, below=below)
    _draw_answers(figure, answers, below / (figure.get_figheight() * _DPI))
    for side, keypoints in zip(placed, (keypoints0, keypoints1), strict=True):
        if keypoints is not None:
            dots = side.points(as_points(keypoints, "keypoints"))
            axes.scatter(*dots.T, s=2.0, color="white", alpha=0.35, linewidths=0)
    ends = np.stack([side.points(p) for side, p in zip(placed, (points0, points1), strict=True)], axis=1)
    drawn = _draw_lines(axes, ends, scores, good, colours(np.clip(shares, 0, 1)), max_lines)
    if covariances is not None:
        covariances = np.asarray(covariances, dtype=np.float64)
        if covariances.shape != (count, 2, 2):
            raise UsageError(f"covariances must be ({count}, 2, 2), not {covariances.shape}")
        angle = np.linspace(0, 2 * np.pi, 33)
        values, axes_of = np.linalg.eigh(covariances)
        radii = 20 * axes_of * np.sqrt(values.clip(0))[:, None]  # a tenth of a pixel could not be seen
        rings = points1[:, None] + np.stack([np.cos(angle), np.sin(angle)], 1) @ radii.swapaxes(1, 2)
        outlines = placed[1].points(rings.reshape(-1, 2)).reshape(rings.shape)
        axes.add_collection(LineCollection(list(outlines), colors=[YELLOW], linewidths=0.6, alpha=0.8))
    texts = []
    if judged is not None:
        each = {
            "planes": ", a colour for each plane",
            "repeats": ", a colour for what looks alike, white the rest",
        }
        each = each.get(colour_by, "")
        texts.append((f"inliers{each}: {int(judged.sum())}", SKY if colour_by == "inliers" else "none"))
        texts.append((f"outliers, thin: {int((~judged).sum())}", VERMILION))
    if drawn < count:
        texts.append((f"lines drawn: {drawn} of {count}", "none"))
    ends = ("confidence 0", "1") if colour_by == "confidence" else ("error 0", f"{error_limit:g} px or more")
    scale = None if grouped or colour_by == "inliers" else colours
    _draw_header(figure, title, texts, scale, ends)
    return figure


def draw_answers(answers: Sequence[tuple[np.ndarray, np.ndarray]]) -> Figure:
    """Several answers to where the second camera is, side by side, as seen from above the first.

    Args:
        answers: each a pose cam1_from_cam0 (4, 4) and the points (P, 3) of its matches, in the axes of camera
            0: x to the right, z ahead.
    """
    figure = Figure(figsize=(_MIN_WIDTH / _DPI, _ANSWERS / _DPI), dpi=_DPI, facecolor="white")
    _draw_answers(figure, answers, 1.0)
    return figure


def _draw_answers(figure: Figure, answers: Sequence[tuple[np.ndarray, np.ndarray]], height: float) -> None:
    """The panels of `draw_answers` in the lowest part of a figure, of this share of its height."""
    for number, (pose, points) in enumerate(answers):
        wide = 1 / len(answers)
        panel = figure.add_axes(((number + 0.03) * wide, 0.03 * height, 0.94 * wide, 0.83 * height))
        centre = -pose[:3, :3].T @ pose[:3, 3]
        # Without stray points
        near = points[points[:, 2] <= 3 * np.median(points[:, 2])] if len(points) else points
        panel.scatter(near[:, 0], near[:, 2], s=3, color="0.55", linewidths=0)
        size = 0.08 * max(1.0, float(np.ptp(near[:, [0, 2]], axis=0).max())) if len(near) else 0.1
        for name, colour, turn, place in (
            ("0", BLUE, np.eye(3), np.zeros(3)),
            ("1", VERMILION, pose[:3, :3], centre),
        ):
            outline = np.array([[0, 0, 0], [-0.6, 0, 1], [0.6, 0, 1], [0, 0, 0]]) * size @ turn + place
            panel.fill(outline[:, 0], outline[:, 2], color=colour, alpha=0.8)
            panel.annotate(
                name, place[[0, 2]], (0, -11), textcoords="offset points", color=colour, ha="center"
            )
        turned = np.degrees(np.arccos(np.clip((np.trace(pose[:3, :3]) - 1) / 2, -1, 1)))
        likelier = ", the likelier" * (number == 0)
        panel.set_title(
            f"answer {number + 1} of {len(answers)}{likelier}: turned by {turned:.0f}°, from above"
        )
        panel.title.set_fontsize(11)
        panel.set_aspect("equal", adjustable="datalim")
        panel.margins(0.12)
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set(color="0.8")


def match_errors(
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    H_1_from_0: np.ndarray | None = None,
    fundamental: np.ndarray | None = None,
) -> np.ndarray:
    """(K,) how far matches are, in pixels, from what is known of the two views.

    Args:
        points0, points1: (K, 2) stored pixels.
        H_1_from_0: (3, 3) homography; the error is the distance in image 1, infinite beyond the horizon.
        fundamental: (3, 3), of a pose by `geometry.fundamental_from_pose`; symmetric epipolar distance.

    Raises:
        UsageError: not exactly one of the two.
    """
    if (H_1_from_0 is None) == (fundamental is None):
        raise UsageError("match errors need either H_1_from_0 or fundamental")
    if fundamental is not None:
        return epipolar_distance(points0, points1, fundamental)
    return np.nan_to_num(np.linalg.norm(warp_points(points0, H_1_from_0) - points1, axis=1), nan=np.inf)


def _draw_lines(
    axes: Axes, ends: np.ndarray, scores: np.ndarray, good: np.ndarray, colours: np.ndarray, max_lines: int
) -> int:
    """Lines and end points, (K, 2, 2) ends; returns how many lines were drawn."""
    by_score = np.argsort(scores, kind="stable")  # the most confident lie on top
    inner, outer = by_score[good[by_score]], by_score[~good[by_score]]
    lines_in = _spread(inner, ends[:, 0], max_lines)
    lines_out = _spread(outer, ends[:, 0], max_lines // 4)
    crowd = min(1.0, len(lines_in) / 200)
    thin = min(1.0, 200 / max(200, len(lines_in))) ** 0.7  # thousands stay transparent
    alpha, width = (0.9 - 0.35 * crowd) * thin, 1.3 - 0.4 * crowd
    for chosen, look in (
        (lines_out, {"colors": [VERMILION], "linewidths": 0.5, "alpha": 0.55}),
        (lines_in, {"colors": "black", "linewidths": width + 0.8, "alpha": 0.25 * alpha}),
        (lines_in, {"colors": colours[lines_in], "linewidths": width, "alpha": alpha}),
    ):
        axes.add_collection(LineCollection(ends[chosen], **look), autolim=False)
    axes.scatter(*ends[outer].reshape(-1, 2).T, s=3.0, color=VERMILION, alpha=0.8, linewidths=0)
    shown = np.repeat(colours[inner], 2, axis=0)
    axes.scatter(*ends[inner].reshape(-1, 2).T, s=6.0, color=shown, alpha=0.95, linewidths=0)
    return len(lines_in) + len(lines_out)


def _spread(order: np.ndarray, points: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of `order` (best last): the best of each cell of 64 pixels come first."""
    best_first = order[::-1]
    cells = np.floor(points[best_first] / 64).astype(np.int64) @ np.array([1, 1 << 20])
    by_cell = np.argsort(cells, kind="stable")
    starts = np.flatnonzero(np.diff(cells[by_cell], prepend=np.nan))
    rank = np.empty(len(order), np.int64)
    rank[by_cell] = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    chosen = np.argsort(rank, kind="stable")[:limit]
    return best_first[np.sort(chosen)][::-1]


# --- A template and its instances


def draw_instances(
    template: Image | np.ndarray | str | Path,
    image: Image | np.ndarray | str | Path,
    corners: Sequence[np.ndarray],
    *,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """The template on the left, the image on the right, upright, each instance outlined in a colour.

    A dot marks the template's first corner in both, so that the turn shows.

    Args:
        template, image: an Image, a path, or an array as `images.read_image` takes it.
        corners: (4, 2) of each instance, stored pixels of the image; the first is that of the template's
            first pixel.
        labels: a text for each instance; numbers from 1 when absent.
        title: one line above; how many instances there are when absent.

    Raises:
        UsageError: corners of another shape, or images that cannot be used.
    """
    placed, figure, axes = two_images(template, image, stacked=False)
    width, height = placed[0].image.size
    whole = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
    _outline(axes, placed[0], whole, "white", "")
    colours = matplotlib.colormaps["tab10"]
    texts = labels or [str(number) for number in range(1, len(corners) + 1)]
    for number, (quad, text) in enumerate(zip(corners, texts, strict=True)):
        _outline(axes, placed[1], as_points(quad, "corners"), colours(number % 10), text)
    count = "1 instance" if len(corners) == 1 else f"{len(corners)} instances"
    said = "the dot is the template's first corner" if len(corners) else "the template was not found"
    _draw_header(figure, count if title is None else title, [(said, "none")])
    return figure


def _outline(axes: Axes, side: Placed, quad: np.ndarray, colour: object, text: str) -> None:
    edge = [withStroke(linewidth=4.5, foreground="black")]
    points = side.points(quad)
    closed = np.vstack([points, points[:1]])
    axes.plot(closed[:, 0], closed[:, 1], color=colour, linewidth=2.5, path_effects=edge)
    corner = np.clip(points[0], np.add(side.offset, 6), np.add(side.offset, side.shape) - 7)  # whole
    axes.plot(*corner, "o", color=colour, markersize=8, markeredgecolor="black", clip_on=False)
    if text:
        middle = points.mean(axis=0)
        style = {"ha": "center", "va": "center", "fontsize": 14, "weight": "bold", "parse_math": False}
        axes.text(*middle, text, color="white", path_effects=edge, clip_on=True, **style)


# --- Epipolar lines


def draw_epipolar_lines(
    image0: Image | np.ndarray,
    image1: Image | np.ndarray,
    points0: np.ndarray,
    points1: np.ndarray,
    fundamental: np.ndarray,
    *,
    max_lines: int = 20,
    stacked: bool = False,
    title: str | None = None,
) -> Figure:
    """Matched points, each with the epipolar line that its partner draws in the other image.

    Args:
        image0, image1: an Image, or an array as `images.read_image` takes it.
        points0, points1: (K, 2) matched points, stored pixels, best first.
        fundamental: (3, 3) with x1ᵀ F x0 = 0 in stored pixels.
        max_lines: matches drawn, spread evenly over all of them.
        stacked, title: as in `draw_matches`.

    Raises:
        UsageError: arrays whose shapes do not fit.
    """
    points0, points1 = as_points(points0, "points0"), as_points(points1, "points1")
    fundamental = np.asarray(fundamental, dtype=np.float64)
    if len(points0) != len(points1) or fundamental.shape != (3, 3) or not np.isfinite(fundamental).all():
        raise UsageError("epipolar lines need as many points0 as points1 and a finite (3, 3) matrix")
    chosen = np.unique(np.linspace(0, len(points0) - 1, min(max_lines, len(points0))).astype(int))
    placed, figure, axes = two_images(image0, image1, stacked=stacked)
    colours = matplotlib.colormaps["viridis"](np.linspace(0.3, 1.0, max(1, len(chosen))))[: len(chosen)]
    sides = (points0, points1)
    for side, here, there, matrix in zip(
        placed, sides, sides[::-1], (fundamental.T, fundamental), strict=True
    ):
        lines = np.c_[there[chosen], np.ones(len(chosen))] @ matrix.T
        normal, size = lines[:, :2], np.array(side.image.size)
        with np.errstate(divide="ignore", invalid="ignore"):  # where a partner is the epipole
            length = np.linalg.norm(normal, axis=1, keepdims=True)
            nearest = size / 2 - (lines @ [*size / 2, 1.0])[:, None] * normal / length**2  # to the middle
            along = normal[:, ::-1] * (1, -1) / length * size.sum()
        ends = side.points(np.stack([nearest - along, nearest + along], axis=1).reshape(-1, 2))
        segments = LineCollection(ends.reshape(-1, 2, 2), colors=colours, linewidths=1.2)
        axes.add_collection(segments, autolim=False)
        edge = Rectangle(np.subtract(side.offset, 0.5), *side.shape, transform=axes.transData)
        segments.set_clip_path(edge)
        ends = side.points(here[chosen])
        axes.scatter(ends[:, 0], ends[:, 1], s=40, c=colours, edgecolors="black", linewidths=0.8, zorder=3)
    text = f"{len(chosen)} of {len(points0)} matches; a point lies on the line of its colour where they agree"
    _draw_header(figure, "epipolar lines" if title is None else title, [(text, "none")])
    return figure
