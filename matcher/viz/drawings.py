"""What all drawings share: two views placed on a white canvas, a header with a legend, encoding.

Built on matplotlib's objects (no pyplot, so no global state and no window).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Literal, get_args

import cv2
import matplotlib
import numpy as np
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap, to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from matcher.errors import UsageError, counted
from matcher.files import check_output, write_output
from matcher.geometry import resize_points, spread
from matcher.images import ImageInput, read_image
from matcher.types import Image
from matcher.viz import PLOT_SUFFIXES
from matcher.viz.overlays import as_colour

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
        return resize_points(self.image.from_stored(points), self.scale) + np.asarray(self.offset)


def save_figure(figure: Figure, path: str | Path | None, *, overwrite: bool = True) -> Path | PIL.Image.Image:
    """Write a figure to a file of one of `PLOT_SUFFIXES`, which appears whole or not at all, and return its
    path; without one, return the figure as a picture. Errors as of `check_output`."""
    if path is None:
        return PIL.Image.fromarray(figure_pixels(figure))
    path = check_output(path, PLOT_SUFFIXES, overwrite=overwrite)
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


def as_points(points: np.ndarray, name: str) -> np.ndarray:
    """(K, 2) float64; `UsageError` naming the argument for another shape or values that are not finite."""
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise UsageError(f"{name} must be (K, 2), not {points.shape}")
    if not np.isfinite(points).all():
        raise UsageError(f"{name} holds values that are not finite (NaN or infinity)")
    return points


def two_images(
    image0: ImageInput, image1: ImageInput, *, stacked: bool = False, below: int = 0
) -> tuple[list[Placed], Figure, Axes]:
    """A figure with both images, of one longer side, beside or above each other, under room for a header, and
    over `below` pixels for what else is drawn. Images are darker and paler, so that coloured lines stand out.
    """
    images, shown = (read_image(image0), read_image(image1)), []
    for image in images:
        height, width = image.pixels.shape[:2]
        factor = _SIDE / max(height, width)
        size = max(1, round(width * factor)), max(1, round(height * factor))
        how = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
        pixels = as_colour(cv2.resize(image.pixels, size, interpolation=how))
        grey = as_colour(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY))
        shown.append(cv2.addWeighted(pixels, 0.425, grey, 0.425, 0))
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


def header_height(width: float) -> int:
    """Rows above the images of a canvas so wide: it grows with that, to be read when it is shrunk."""
    return round(52 * max(1.0, width / 1000))


def draw_header(
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
    image0: ImageInput,
    image1: ImageInput,
    points0: np.ndarray,
    points1: np.ndarray,
    *,
    scores: np.ndarray | None = None,
    inliers: np.ndarray | None = None,
    errors: np.ndarray | None = None,
    planes: np.ndarray | None = None,
    colour_by: ColourBy = "confidence",
    stacked: bool = False,
    keypoints0: np.ndarray | None = None,
    keypoints1: np.ndarray | None = None,
    covariances: np.ndarray | None = None,
    title: str | None = None,
    max_lines: int = 200,
    answers: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    overlay: np.ndarray | None = None,
) -> Figure:
    """Two images, upright, with lines between their matched points, (K, 2) stored pixels.

    Args:
        scores, inliers: (K,) in [0, 1], the confidence of a match, 1 when absent; (K,) bool, None where no
            geometry was estimated, then no match counts as an outlier.
        errors, planes, colour_by, stacked: (K,) pixels, of which more than 5 have one colour; (K,) plane of
            each match, or group of those that look alike ("repeats"), −1 for none; what colours show; one
            image above the other.
        keypoints0, keypoints1, covariances: (N, 2), (M, 2) all keypoints, as dots; (K, 2, 2) of points1, as
            ellipses of one sigma, enlarged twenty times.
        title, max_lines: the line above; how many inliers, and a quarter of it outliers, spread out.
        answers: poses and points, drawn below side by side as in `draw_answers`.
        overlay: (L, 2, 2) points of both images that are left out as those of an overlay, as crosses.

    Raises:
        UsageError: arrays whose shapes do not fit, or images that cannot be used.
    """
    points0, points1 = as_points(points0, "points0"), as_points(points1, "points1")
    if len(points1) != (count := len(points0)):
        raise UsageError(f"points0 and points1 must be of one length, not {count} and {len(points1)}")
    if max_lines < 0:
        raise UsageError(f"max_lines must not be negative ({max_lines})")
    if colour_by not in get_args(ColourBy):
        raise UsageError(f"colour_by is {', '.join(get_args(ColourBy))}, not {colour_by!r}")
    grouped = colour_by in ("planes", "repeats")
    if (errors if colour_by == "error" else planes if grouped else ()) is None:
        needed = "errors, in pixels," if colour_by == "error" else "planes, or groups,"
        raise UsageError(f"colour_by {colour_by!r} needs {needed} of all matches")

    def column(values: np.ndarray | None, name: str) -> np.ndarray:
        """(K,) values, ones where there are none."""
        values = np.ones(count) if values is None else np.asarray(values)
        if values.shape != (count,):
            raise UsageError(f"{name} must be ({count},), not {values.shape}")
        return values

    scores = shares = column(scores, "scores").astype(float)
    good, judged = column(inliers, "inliers").astype(bool), inliers is not None and colour_by != "error"
    agreeing = "" if inliers is None else f", {counted(int(good.sum()), 'inlier')}"
    title = title or counted(count, "match", "matches") + agreeing
    texts = []
    if judged:
        more = {"planes": ", a colour for each plane"}
        more["repeats"] = ", a colour for what looks alike, white the rest"
        inner = f"inliers{more.get(colour_by, '')}: {int(good.sum())}"
        texts = [(inner, SKY if colour_by == "inliers" else "none")]
        refused = colour_by == "repeats" and not good.any()  # of other instances: those that look alike show
        texts.append((f"outliers, thin: {int((~good).sum())}", "none" if refused else VERMILION))
    if colour_by == "error":
        colours = LinearSegmentedColormap.from_list("error", [SKY, YELLOW, VERMILION])
        shares = np.nan_to_num(column(errors, "errors") / 5, nan=1.0)
        good = np.ones(count, bool)  # errors tell more than whether a match is an inlier
    elif grouped:
        colours, planes = ListedColormap((*_PLANES, "white")), column(planes, "planes")
        shares = np.where(planes < 0, len(_PLANES), planes % len(_PLANES)) / len(_PLANES)
    elif colour_by == "inliers":
        colours = ListedColormap([SKY])
    else:
        colours = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.4, 1.0, 64)))
    below = _ANSWERS if answers else 0
    placed, figure, axes = two_images(image0, image1, stacked=stacked, below=below)
    if answers:
        draw_answers(answers, figure, below / (figure.get_figheight() * _DPI))
    for side, keypoints in zip(placed, (keypoints0, keypoints1), strict=True):
        if keypoints is not None:
            dots = side.points(as_points(keypoints, "keypoints"))
            axes.scatter(*dots.T, s=2.0, color="white", alpha=0.35, linewidths=0)
    ends = np.stack([side.points(p) for side, p in zip(placed, (points0, points1), strict=True)], axis=1)
    by_score, colour_of = np.argsort(scores, kind="stable"), colours(np.clip(shares, 0, 1))
    if not (judged and refused):
        colour_of[~good] = to_rgba(VERMILION)
    inner, outer = by_score[good[by_score]], by_score[~good[by_score]]  # the most confident lie on top
    lines_in = inner[spread(ends[inner, 0], scores[inner], max_lines)[::-1]]
    lines_out = outer[spread(ends[outer, 0], scores[outer], max_lines // 4)[::-1]]
    crowd = min(1.0, len(lines_in) / 200)
    thin = min(1.0, 200 / max(200, len(lines_in))) ** 0.7  # thousands stay transparent
    alpha, width = (0.9 - 0.35 * crowd) * thin, 1.3 - 0.4 * crowd
    for chosen, look in (
        (lines_out, {"colors": colour_of[lines_out], "linewidths": 0.5, "alpha": 0.55}),
        (lines_in, {"colors": "black", "linewidths": width + 0.8, "alpha": 0.25 * alpha}),
        (lines_in, {"colors": colour_of[lines_in], "linewidths": width, "alpha": alpha}),
    ):
        axes.add_collection(LineCollection(ends[chosen], **look), autolim=False)
    for rows, size, alpha in ((outer, 3.0, 0.8), (inner, 6.0, 0.95)):
        shown = np.repeat(colour_of[rows], 2, axis=0)
        axes.scatter(*ends[rows].reshape(-1, 2).T, s=size, color=shown, alpha=alpha, linewidths=0)
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
    if overlay is not None and len(overlay):
        crosses = np.concatenate([side.points(overlay[:, end]) for end, side in enumerate(placed)])
        axes.scatter(*crosses.T, s=12.0, marker="x", color=PINK, linewidths=0.8)
        texts.append((f"overlay, left out: {len(overlay)}", PINK))
    if (drawn := len(lines_in) + len(lines_out)) < count:
        texts.append((f"lines drawn: {drawn} of {count}", "none"))
    ends = ("confidence 0", "1") if colour_by == "confidence" else ("error 0", "5 px or more")
    scale = None if grouped or colour_by == "inliers" else colours
    draw_header(figure, title, texts, scale, ends)
    return figure


def draw_answers(
    answers: Sequence[tuple[np.ndarray, np.ndarray]], figure: Figure | None = None, height: float = 1.0
) -> Figure:
    """The poses that a plane allows, side by side, as seen from above the first camera, drawn in the lowest
    part of a figure, of this share of its height.

    Each is a pose cam1_from_cam0 (4, 4) and the points (P, 3) of its matches, in the axes of camera 0: x to
    the right, z ahead.
    """
    size = _MIN_WIDTH / _DPI, _ANSWERS / _DPI
    figure = Figure(figsize=size, dpi=_DPI, facecolor="white") if figure is None else figure
    for number, (pose, points) in enumerate(answers):
        wide = 1 / len(answers)
        panel = figure.add_axes(((number + 0.03) * wide, 0.03 * height, 0.94 * wide, 0.83 * height))
        centre = -pose[:3, :3].T @ pose[:3, 3]
        # Without stray points
        near = points[points[:, 2] <= 3 * np.median(points[:, 2])] if len(points) else points
        panel.scatter(near[:, 0], near[:, 2], s=3, color="0.55", linewidths=0)
        size = 0.08 * max(1.0, float(np.ptp(near[:, [0, 2]], axis=0).max())) if len(near) else 0.1
        cameras = ("0", BLUE, np.eye(3), np.zeros(3)), ("1", VERMILION, pose[:3, :3], centre)
        for name, colour, turn, place in cameras:
            outline = np.array([[0, 0, 0], [-0.6, 0, 1], [0.6, 0, 1], [0, 0, 0]]) * size @ turn + place
            panel.fill(outline[:, 0], outline[:, 2], color=colour, alpha=0.8)
            style = {"textcoords": "offset points", "color": colour, "ha": "center"}
            panel.annotate(name, place[[0, 2]], (-14 + 28 * int(name), -4), **style)  # also of close ones
        turned = np.degrees(np.arccos(np.clip((np.trace(pose[:3, :3]) - 1) / 2, -1, 1)))
        heading = f"pose {number + 1} of {len(answers)}{', the likelier' * (number == 0)}"
        panel.set_title(f"{heading}: rotation by {turned:.0f}°, from above")
        panel.title.set_fontsize(11)
        panel.set_aspect("equal", adjustable="datalim")
        panel.margins(0.12)
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set(color="0.8")
    return figure


def draw_instances(template: ImageInput, image: ImageInput, corners: Sequence[np.ndarray]) -> Figure:
    """The template on the left, the image on the right, upright, each instance outlined in a colour, with its
    number from 1. A dot marks the template's first corner in both, so that the turn shows.

    `corners` (4, 2) of each instance are stored pixels of the image; the first is that of the template's
    first pixel. How many instances there are is one line above.
    """
    placed, figure, axes = two_images(template, image)
    width, height = placed[0].image.size
    whole = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
    _outline(axes, placed[0], whole, "white", "")
    colours = matplotlib.colormaps["tab10"]
    for number, quad in enumerate(corners):
        _outline(axes, placed[1], as_points(quad, "corners"), colours(number % 10), str(number + 1))
    said = "the dot is the template's first corner" if len(corners) else "the template was not found"
    draw_header(figure, counted(len(corners), "instance"), [(said, "none")])
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


def draw_reliability(
    curves: Mapping[str, tuple[Sequence[float | None], Sequence[float | None], Sequence[int]]],
    *,
    title: str = "reliability of match probabilities",
) -> Figure:
    """How often predictions are right, against the probability that they state.

    `curves`, by name: mean probability, share that is right and number of predictions, of each bin; None
    where a bin is empty.
    """
    figure = Figure(figsize=(10, 6.4), dpi=100, facecolor="white", layout="constrained")
    figure.suptitle(" ".join(title.split())[:105], x=0.012, ha="left", fontsize=12)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="calibrated")
    for (name, (said, right, count)), colour, marker in zip(
        curves.items(), cycle((SKY, VERMILION, GREEN, PINK)), cycle("osD^v"), strict=False
    ):
        known = [(p, r, n) for p, r, n in zip(said, right, count, strict=True) if None not in (p, r)]
        if known:
            probability, share, number = zip(*known, strict=True)
            above.plot(probability, share, color=colour, marker=marker, label=name)
            below.plot(probability, number, color=colour, marker=marker)
    above.set(ylabel="share that is right", ylim=(0, 1.02))
    above.legend()
    below.set(xlabel="probability", ylabel="matches", xlim=(0, 1), yscale="log")
    below.set_ylim(bottom=0.7)
    return figure


def draw_training(rows: Sequence[Mapping[str, float]], title: str) -> Figure:
    """Loss and validation of a training, by pairs and by hours; `rows` of `log.jsonl`: step, pairs, seconds,
    and loss or precision and recall."""
    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    labels = (("pairs", 1000, "training pairs / 1000"), ("seconds", 3600, "hours of training"))
    for column, (key, unit, label) in enumerate(labels):
        for row, names in enumerate((("loss",), ("precision", "recall"))):
            for name in names:
                known = [entry for entry in rows if name in entry]
                x, y = [entry[key] / unit for entry in known], [entry[name] for entry in known]
                axes[row, column].plot(x, y, marker="." if len(x) < 100 else "", linewidth=1.2, label=name)
            axes[row, column].grid(alpha=0.3)
        axes[1, column].legend()
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("validation")
    return figure
