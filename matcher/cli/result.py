"""A `Result` as the command line shows and saves it: a JSON object, arrays, a summary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from matcher.cli.messages import detail, show
from matcher.errors import UsageError
from matcher.files import check_output
from matcher.pipeline import Pipeline
from matcher.result import DATA_SUFFIXES, Result


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
        from matcher.drawing.canvas import PLOT_SUFFIXES  # matplotlib is loaded only for those who draw

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
