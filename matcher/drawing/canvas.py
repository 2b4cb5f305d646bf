"""What all drawings share: two views placed on a white canvas, a header with a legend, encoding.

Built on matplotlib's objects (no pyplot, so no global state and no window).
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
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from matcher.data.geometry import resize_points, stored_to_upright
from matcher.data.image import Image
from matcher.data.images import MAX_PIXELS, image_from_array, read_image
from matcher.errors import UsageError
from matcher.files import check_output, write_output

PLOT_SUFFIXES = (".png", ".jpg", ".jpeg", ".pdf", ".svg")
VERMILION = (0.84, 0.37, 0.0)  # this and those below: of Okabe and Ito's palette
SKY = (0.34, 0.71, 0.91)
GREEN = (0.0, 0.62, 0.45)
ORANGE = (0.9, 0.62, 0.0)
BLUE = (0.0, 0.45, 0.7)
PINK = (0.8, 0.47, 0.65)
YELLOW = (0.94, 0.89, 0.26)

_SIDE, _GAP, _MIN_WIDTH, _DPI = 800, 12, 960, 100  # pixels; _SIDE: longer side of either image
_HEADER = 52  # pixels, of an image 1000 wide; in wider ones the header grows, to be read when they are shrunk
_DIM = 0.85  # brightness of the images below the lines


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


@dataclass(frozen=True)
class Legend:
    """The colour legend of a header: a scale with its two ends, and texts, each in its own colour."""

    texts: tuple[tuple[str, tuple[float, ...] | str], ...] = ()
    scale: Colormap | None = None
    ends: tuple[str, str] = ("", "")


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure as .png, .jpg, .jpeg, .pdf or .svg; the file appears whole or not at all.

    Raises:
        UsageError: another suffix, or a folder that is absent.
    """
    path = check_output(path, PLOT_SUFFIXES)
    write_output(path, _encoded(figure, path.suffix.lower()[1:]))
    return path


def figure_pixels(figure: Figure) -> np.ndarray:
    """A figure as an (H, W, 3) uint8 RGB array."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _encoded(figure: Figure, kind: str) -> bytes:
    FigureCanvasAgg(figure)
    options = {"jpg": {"pil_kwargs": {"quality": 92}}, "pdf": {"metadata": {"CreationDate": None}}}
    options |= {"jpeg": options["jpg"], "svg": {"metadata": {"Date": None}}}
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "matcher"}):  # the same names of parts every time
        figure.savefig(buffer, format=kind, dpi=_DPI, **options.get(kind, {}))
    return buffer.getvalue()


def as_image(image: Image | np.ndarray | str | Path, max_pixels: int = MAX_PIXELS) -> Image:
    """An image by its path, as an array, or as it is; raises as `images.read_image` does."""
    if isinstance(image, (str, Path)):
        return read_image(image, max_pixels=max_pixels)
    return image if isinstance(image, Image) else image_from_array(image)


def as_points(points: np.ndarray, name: str) -> np.ndarray:
    """(K, 2) float64; `UsageError` naming the argument for another shape or values that are not finite."""
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise UsageError(f"{name} must be (K, 2), not {points.shape}")
    if not np.isfinite(points).all():
        raise UsageError(f"{name} holds values that are not finite (NaN or infinity)")
    return points


def as_column(
    values: np.ndarray | None, count: int, name: str, default: np.ndarray | None = None
) -> np.ndarray:
    """(K,) values or the default; `UsageError` naming the argument for another shape."""
    values = default if values is None else np.asarray(values)
    if values.shape != (count,):
        raise UsageError(f"{name} must be ({count},), not {values.shape}")
    return values


def place(image0: Image, image1: Image, *, stacked: bool = False) -> tuple[tuple[Placed, Placed], np.ndarray]:
    """Both images with the same longer side, side by side or one above the other, centred on white.

    Returns:
        Where they lie, and the canvas (H, W, 3) uint8.
    """
    shown = [_display(image.pixels) for image in (image0, image1)]
    rows, columns = ([pixels.shape[axis] for pixels in shown] for axis in (0, 1))
    used = max(columns) if stacked else sum(columns) + _GAP
    width, height = max(_MIN_WIDTH, used), sum(rows) + _GAP if stacked else max(rows)
    canvas = np.full((height, width, 3), 255, np.uint8)
    left, top, placed = (width - used) // 2, 0, []
    for image, pixels, h, w in zip((image0, image1), shown, rows, columns, strict=True):
        x, y = ((width - w) // 2, top) if stacked else (left, (height - h) // 2)
        canvas[y : y + h, x : x + w] = pixels
        placed.append(Placed(image, (w / image.pixels.shape[1], h / image.pixels.shape[0]), (x, y), (w, h)))
        left, top = left + w + _GAP, top + h + _GAP
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


def blank_figure(canvas: np.ndarray) -> tuple[Figure, Axes]:
    """A figure whose axes show the canvas (H, W, 3) pixel by pixel, under room for a header."""
    height, width = canvas.shape[:2]
    total = height + header_height(width)
    figure = Figure(figsize=(width / _DPI, total / _DPI), dpi=_DPI, facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, height / total))
    axes.imshow(canvas, interpolation="nearest", aspect="auto")
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    axes.set_axis_off()
    return figure, axes


def two_images(
    image0: Image | np.ndarray, image1: Image | np.ndarray, *, stacked: bool
) -> tuple[tuple[Placed, Placed], Figure, Axes]:
    """Where both images lie, and a figure that shows them."""
    placed, canvas = place(as_image(image0), as_image(image1), stacked=stacked)
    return placed, *blank_figure(canvas)


def header_height(width: int) -> int:
    """Rows above the images of a canvas so wide."""
    return round(_HEADER * _enlarged(width))


def _enlarged(width: float) -> float:
    return max(1.0, width / 1000)


def draw_dots(axes: Axes, points: np.ndarray, colour: object, area: float, alpha: float) -> None:
    """Filled dots at canvas points (K, 2), `area` in square points."""
    axes.scatter(points[:, 0], points[:, 1], s=area, color=colour, alpha=alpha, linewidths=0)


def draw_header(figure: Figure, title: str, legend: Legend) -> None:
    """The title, shortened to one line, and below it what the colours mean."""
    width, height = figure.get_size_inches() * _DPI
    unit = _enlarged(width)
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

    if legend.scale is not None:
        x += write(legend.ends[0]) + 8 * unit
        bar = figure.add_axes((x / width, y - 4 * unit / height, 120 * unit / width, 8 * unit / height))
        bar.imshow(np.linspace(0, 1, 64)[None], cmap=legend.scale, aspect="auto")
        bar.set(xticks=[], yticks=[])
        bar.spines[:].set(color="0.6", linewidth=0.5)  # a scale that begins with white has an end, too
        x += 128 * unit
        x += write(legend.ends[1]) + 24 * unit
    for text, colour in legend.texts:
        if colour != "none":
            white = min(colour) > 0.95
            x += write("○" if white else "●", "0.25" if white else colour) + 4 * unit
        x += write(text) + 20 * unit
