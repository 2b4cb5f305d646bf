"""`matcher match`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from matcher.cli import options
from matcher.cli.options import PARTIAL, Given, detail, pair_progress, say, show
from matcher.errors import UsageError
from matcher.files import check_output, write_output
from matcher.pipeline import Pipeline
from matcher.result import DATA_SUFFIXES, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from matcher.evaluate.protocols import PairSet
    from matcher.evaluate.run import Method


# --- match: `matcher match`.

First = Annotated[Path, typer.Argument(metavar="IMAGE0", show_default=False, help="First image.")]
Second = Annotated[Path, typer.Argument(metavar="IMAGE1", show_default=False, help="Second image.")]
MaskFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Mask image; black pixels yield no keypoints.")
]
CameraText = Annotated[
    str | None,
    typer.Option(
        metavar="fx,fy,cx,cy", help="Intrinsics in stored pixels; --camera0 is of both images of one size."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(metavar="MS", help="Choose keypoints, layers and passes to fit this time, once measured."),
]
Tiles = Annotated[
    bool,
    typer.Option(
        "--tiles",
        help="For large images: find keypoints by tiles at full resolution, by default 20000 per image.",
    ),
]


def match(
    image0: First,
    image1: Second,
    given: Given,
    camera0: CameraText = None,
    camera1: CameraText = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    budget_ms: Budget = None,
    tiles: Tiles = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.npz|.json", help="Save keypoints, matches and geometry.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg|…", help="Save a plot of the matches.")
    ] = None,
    ellipses: Annotated[
        bool,
        typer.Option("--ellipses", help="Draw the uncertainty of points in the plot, enlarged."),
    ] = False,
    overwrite: options.Overwrite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fail_if_unmatched: Annotated[
        bool,
        typer.Option(
            "--fail-if-unmatched",
            help="Exit with code 4 if no matches are found or their geometry cannot be verified.",
        ),
    ] = False,
) -> int:
    """Match two images and verify the matches.

    Points are (x, y) in pixels of the stored image, without its EXIF orientation; the centre of the first
    pixel is (0, 0). With --geometry, the estimated matrix is printed too.
    """
    from matcher.loading import load

    check_outputs(output, plot, inputs=(image0, image1, mask0, mask1), overwrite=overwrite)
    if ellipses and plot is None:
        raise typer.BadParameter("--ellipses draws into a plot: add --plot FILE")
    texts = {"camera0": camera0, "camera1": camera1}
    cameras = {name: options.parse_camera(text, f"--{name}") for name, text in texts.items()}
    pipeline = _tiled(given) if tiles else load(**given)
    result = pipeline.match(image0, image1, mask0=mask0, mask1=mask1, budget_ms=budget_ms, **cameras)
    save(result, pipeline, output, plot, ellipses=ellipses)
    written = [path for path in (output, plot) if path]
    show_result(result, as_json=as_json, with_matrix="geometry" in given, written=written)
    return PARTIAL if fail_if_unmatched and is_unmatched(result) else 0


def _tiled(given: dict[str, Any]) -> Pipeline:
    """A pipeline for large images; the first pass and each tile have the preset's number of keypoints."""
    from matcher.loading import load
    from matcher.tiling import MAX_KEYPOINTS, tiled

    most = given.get("max_keypoints", MAX_KEYPOINTS)
    return tiled(load(**{name: value for name, value in given.items() if name != "max_keypoints"}), most)


# --- result: A `Result` as the command line shows and saves it: a JSON object, arrays, a summary.


def check_outputs(
    output: Path | None, plot: Path | None, inputs: Sequence[Path | None], *, overwrite: bool = False
) -> None:
    """Refuse outputs that cannot be written, or that would replace an input or a foreign file.

    Raises:
        UsageError: the message names the output and the reason.
    """
    outputs = []
    if output is not None:
        outputs.append((output, DATA_SUFFIXES))
    if plot is not None:
        from matcher.viz.drawings import PLOT_SUFFIXES

        outputs.append((plot, PLOT_SUFFIXES))
    check_each(outputs, inputs, overwrite=overwrite)


def check_each(
    outputs: Iterable[tuple[Path, Sequence[str]]], inputs: Sequence[Path | None], *, overwrite: bool = False
) -> None:
    """As `check_outputs`, for any outputs, each with the suffixes that it may have."""
    written: set[Path] = set()
    for path, suffixes in outputs:
        if path.resolve() in written:
            raise UsageError(f"{path} is the file of two outputs; name another one for each")
        written.add(path.resolve())
        for taken in inputs:
            if taken is not None and path.exists() and taken.exists() and path.samefile(taken):
                raise UsageError(f"{path} is an input; name another file for the output")
        check_output(path, suffixes, overwrite=overwrite)


def save(
    result: Result, pipeline: Pipeline, output: Path | None, plot: Path | None, *, ellipses: bool = False
) -> None:
    """Write the requested files, each completely or not at all; images are read again for the plot."""
    if output is not None:
        result.save(output, overwrite=True)  # check_outputs has refused files of others
    if plot is not None:
        images = pipeline.read(result.path0), pipeline.read(result.path1)
        result.plot(plot, *images, title=result.heading(), ellipses=ellipses, overwrite=True)


def show_result(
    result: Result,
    *,
    as_json: bool = False,
    with_matrix: bool = False,
    written: Iterable[Path] = (),
) -> None:
    """Print the JSON object alone, or the summary, the matrix (`with_matrix`) and the files written."""
    source = result.weights
    detail(f"weights: {'none' if source is None else f'{source.name}, sha256 {source.sha256}'}")
    if as_json:
        show(json.dumps(result.to_dict(), allow_nan=False), always=True)
        return
    show(result.summary())
    if with_matrix and result.geometry.matrix is not None:
        show(matrix_text(result), always=True)
    for path in written:
        show(f"wrote {path}")


def is_unmatched(result: Result) -> bool:
    """Whether there are no matches, or none whose geometry could be verified."""
    return not len(result.matches) or result.geometry.status not in ("ok", "not_estimated")


def matrix_text(result: Result) -> str:
    """The estimated matrix, and the pose of an essential one, with numbers that `numpy.loadtxt` reads."""
    geometry, rows = result.geometry, []
    parts = [(f"{geometry.kind} matrix, x1ᵀ M x0 = 0:", geometry.matrix)]
    if geometry.kind == "homography":
        parts = [("homography, x1 ~ H x0:", geometry.matrix)]
    if geometry.cam1_from_cam0 is not None:
        parts.append(("cam1_from_cam0, translation of length 1:", geometry.cam1_from_cam0))
    elif geometry.kind == "homographies":
        counts = np.bincount(geometry.planes[geometry.inliers], minlength=len(geometry.matrices))
        headings = (f"homography of {count} inliers, x1 ~ H x0:" for count in counts)
        parts = list(zip(headings, geometry.matrices, strict=True))
    for heading, matrix in parts:
        rows += [f"# {heading}", *(" ".join(f"{value: .10g}" for value in row) for row in matrix)]
    return "\n".join(rows)


# --- explain: `matcher explain`.

ExplainOptions = Annotated[dict[str, Any], ("second_pass", "engine"), {}]  # one pass is explained


def explain(
    image0: First,
    image1: Second,
    output: Annotated[Path, typer.Option(metavar="FILE.html", help="Report to create.", show_default=False)],
    given: ExplainOptions,
    point: Annotated[
        str | None,
        typer.Option(metavar="x,y", help="Show the keypoint nearest to this pixel of IMAGE0 first."),
    ] = None,
    mask0: MaskFile = None,
    mask1: MaskFile = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Match two images and write a report that explains each match: attention, early exit, pruning.

    The report is a single HTML file that works offline.
    """
    from matcher.errors import UsageError
    from matcher.explain.report import write_report
    from matcher.loading import load

    position = None
    if point is not None:
        try:
            x, y = (float(part) for part in point.split(","))
        except ValueError as error:
            raise UsageError(f"--point must be x,y in pixels of {image0}, not {point!r}") from error
        position = (x, y)
    check_each([(output, (".html",))], (image0, image1, mask0, mask1), overwrite=overwrite)
    masks = {"mask0": mask0, "mask1": mask1}
    result = write_report(load(**given), image0, image1, output, position, **masks, overwrite=overwrite)
    show(f"{len(result.matches)} matches, {int(result.geometry.inliers.sum())} inliers; wrote {output}")


# --- curve: The plot of a training run: loss and validation over pairs and over time.


def write_curve(rows: Sequence[dict[str, float]], path: Path, title: str) -> None:
    """Draw the rows of `log.jsonl` (step, pairs, seconds, and loss or precision and recall) as a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=100, layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (key, unit, label) in enumerate(
        (("pairs", 1000, "training pairs / 1000"), ("seconds", 3600, "hours of training"))
    ):
        _lines(axes[0, column], rows, key, unit, ("loss",))
        _lines(axes[1, column], rows, key, unit, ("precision", "recall"))
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("validation")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_output(path, buffer.getvalue())


def _lines(axes: Axes, rows: Sequence[dict[str, float]], key: str, unit: float, names: Sequence[str]) -> None:
    for name in names:
        known = [row for row in rows if name in row]
        x, y = [row[key] / unit for row in known], [row[name] for row in known]
        axes.plot(x, y, marker="." if len(x) < 100 else "", linewidth=1.2, label=name)
    axes.grid(alpha=0.3)
    if len(names) > 1:
        axes.legend()


# --- calibrating: `matcher evaluate --calibration`: how often match probabilities hold, as a table and a
# diagram.

ENDING = "-calibration"  # of the names of its files, after that of the set


def show_calibration(pair_set: PairSet, methods: list[Method], folder: Path | None) -> int:
    """Measure one set, print its table and, where a folder is given, write table and diagram.

    Returns:
        The number of pairs that were skipped.
    """
    from matcher.evaluate.calibration import as_markdown, as_object, predictions
    from matcher.files import write_output
    from matcher.viz.drawings import save_figure
    from matcher.viz.plots import draw_reliability

    skipped: list[str] = []
    with pair_progress(pair_set.name) as progress:
        found = predictions(pair_set, methods, progress=progress, skipped=skipped)
    table = as_object(pair_set, found, skipped)
    show(as_markdown(table), always=True)
    if folder is None:
        return len(skipped)
    path = folder / f"{pair_set.name}{ENDING}"
    texts = {".md": as_markdown(table), ".json": json.dumps(table, indent=1, allow_nan=False)}
    for suffix, text in texts.items():
        write_output(path.with_suffix(suffix), text.encode())
    curves = {row["name"]: (row["confidence"], row["accuracy"], row["count"]) for row in table["rows"]}
    title = f"reliability of match probabilities: {pair_set.name}"
    save_figure(draw_reliability(curves, title=title), path.with_suffix(".png"))
    say(f"wrote {', '.join(str(path.with_suffix(suffix)) for suffix in (*texts, '.png'))}")
    return len(skipped)
