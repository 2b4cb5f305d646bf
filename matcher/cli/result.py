"""A `Result` as the command line shows and saves it: a JSON object, arrays, a summary."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matcher.cli.messages import detail, show
from matcher.data.features import Features
from matcher.data.result import Result
from matcher.errors import UsageError
from matcher.files import check_output, write_output
from matcher.pipeline import Pipeline

DATA_SUFFIXES = (".npz", ".json")
_REASONS = {
    "too_few": "too few matches to estimate it",
    "degenerate": "the points do not determine it",
    "no_model": "no model was found",
    "low_inliers": "too few of them agree",
}


def check_outputs(
    output: Path | None, plot: Path | None, inputs: Sequence[Path | None], *, overwrite: bool = False
) -> None:
    """Refuse outputs that could not be written, or that would replace an input or a file of others.

    Raises:
        UsageError: which, and why.
    """
    outputs = []
    if output is not None:
        outputs.append((output, DATA_SUFFIXES))
    if plot is not None:
        from matcher.drawing.canvas import PLOT_SUFFIXES  # matplotlib is loaded only for those who draw

        outputs.append((plot, PLOT_SUFFIXES))
    for path, suffixes in outputs:
        for taken in inputs:
            if taken is not None and path.exists() and taken.exists() and path.samefile(taken):
                raise UsageError(f"{path} is an input; name another file for the output")
        check_output(path, suffixes, overwrite=overwrite)


def save(result: Result, pipeline: Pipeline, output: Path | None, plot: Path | None) -> None:
    """Write the files asked for, each whole or not at all; the images are read again to be drawn."""
    if output is not None:
        write_output(output, as_bytes(result, pipeline, output.suffix.lower()))
    if plot is not None:
        from matcher.drawing.matches import plot_result

        images = pipeline.read(result.path0), pipeline.read(result.path1)
        plot_result(result, *images, plot, title=title(result, pipeline))


def show_result(
    result: Result,
    pipeline: Pipeline,
    *,
    as_json: bool = False,
    with_matrix: bool = False,
    written: Iterable[Path] = (),
) -> None:
    """Print the JSON object alone, or the summary, the matrix if it is wanted, and what was written."""
    source = pipeline.weights
    detail(f"weights: {'none' if source is None else f'{source.name}, sha256 {source.sha256}'}")
    if as_json:
        show(json.dumps(as_object(result, pipeline), allow_nan=False), always=True)
        return
    show(summary(result, pipeline))
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
    for heading, matrix in parts:
        rows += [f"# {heading}", *(" ".join(f"{value: .10g}" for value in row) for row in matrix)]
    return "\n".join(rows)


def as_object(result: Result, pipeline: Pipeline) -> dict[str, Any]:
    """What `--json` prints: counts, geometry and seconds, ready for `json.dumps`."""
    source, geometry = pipeline.weights, result.geometry
    return {
        "preset": pipeline.preset,
        "weights": None if source is None else {"name": source.name, "sha256": source.sha256},
        "image0": _picture(result.path0, result.features0),
        "image1": _picture(result.path1, result.features1),
        "keypoints0": len(result.features0),
        "keypoints1": len(result.features1),
        "matches": len(result.matches),
        "layers_run": result.matches.layers_run,
        "layers": pipeline.layers,
        "kept0": result.matches.kept0,
        "kept1": result.matches.kept1,
        "geometry": {
            "kind": geometry.kind,
            "status": geometry.status,
            "inliers": int(geometry.inliers.sum()),
            "matrix": None if geometry.matrix is None else geometry.matrix.tolist(),
            "cam1_from_cam0": None if geometry.cam1_from_cam0 is None else geometry.cam1_from_cam0.tolist(),
        },
        "seconds": {stage: round(value, 6) for stage, value in result.seconds.items()},
    }


def as_arrays(result: Result) -> dict[str, np.ndarray]:
    """What an output file holds; a matrix or pose that was not found has shape (0, 0)."""
    geometry, absent = result.geometry, np.zeros((0, 0))
    return {
        "keypoints0": result.features0.keypoints.numpy(),
        "keypoints1": result.features1.keypoints.numpy(),
        "indices": result.matches.indices,
        "points0": result.points0,
        "points1": result.points1,
        "scores": result.scores,
        "inliers": geometry.inliers,
        "geometry_kind": np.array(geometry.kind),
        "matrix": absent if geometry.matrix is None else geometry.matrix,
        "cam1_from_cam0": absent if geometry.cam1_from_cam0 is None else geometry.cam1_from_cam0,
        "size0": np.array(_size(result.features0)),
        "size1": np.array(_size(result.features1)),
    }


def as_bytes(result: Result, pipeline: Pipeline, suffix: str) -> bytes:
    """An output file: `.npz` holds the arrays, `.json` the object and, under "arrays", the same arrays."""
    arrays = as_arrays(result)
    if suffix == ".npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        return buffer.getvalue()
    lists = {name: array.tolist() for name, array in arrays.items()}
    return json.dumps({**as_object(result, pipeline), "arrays": lists}, allow_nan=False).encode()


def summary(result: Result, pipeline: Pipeline) -> str:
    """Some lines for a person."""
    found, geometry, seconds = as_object(result, pipeline), result.geometry, result.seconds
    lines = [
        f"{image['path']}  {image['width']} x {image['height']}  {count} keypoints"
        for image, count in zip(
            (found["image0"], found["image1"]), (found["keypoints0"], found["keypoints1"]), strict=True
        )
    ]
    depth = f", {found['layers_run']} of {found['layers']} layers" if pipeline.layers else ""
    lines.append(f"{found['matches']} matches ({pipeline.preset}{depth})")
    if not len(result.matches):
        lines.append("no match: the images share nothing that was recognised")
    elif is_unmatched(result):
        lines.append(f"no match: the matches fit no common {geometry.kind} ({_REASONS[geometry.status]})")
    elif geometry.kind != "none":
        count = found["geometry"]["inliers"]
        lines.append(f"{count} of them agree with one {geometry.kind} ({geometry.status})")
    stages = ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items() if stage != "total")
    lines.append(f"{seconds['total']:.2f} s ({stages})")
    return "\n".join(lines)


def title(result: Result, pipeline: Pipeline) -> str:
    """One line over a drawing: preset, counts, layers, time."""
    geometry, parts = result.geometry, [pipeline.preset, f"{len(result.matches)} matches"]
    if geometry.kind != "none":
        parts.append(f"{int(geometry.inliers.sum())} on one {geometry.kind}")
    if pipeline.layers:
        parts.append(f"{result.matches.layers_run} of {pipeline.layers} layers")
    return ", ".join([*parts, f"{result.seconds['total']:.2f} s"])


def _picture(path: Path | None, features: Features) -> dict[str, Any]:
    width, height = _size(features)
    return {"path": None if path is None else str(path), "width": width, "height": height}


def _size(features: Features) -> tuple[int, int]:
    width, height = (round(value) for value in features.size.tolist())
    return width, height
