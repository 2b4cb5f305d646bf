"""What COLMAP's process made: models read, plotted and summarised."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matcher.collection.exporting.output import ExportReport
from matcher.collection.reconstruction.mapping import CLOUD, RESULT
from matcher.collection.reconstruction.plot import draw_model
from matcher.collection.reconstruction.summary import SUMMARY
from matcher.files import write_whole

PLOT, DEVIATIONS = "reconstruction.png", "deviations.npz"


@dataclass(frozen=True, eq=False)
class SparseModel:
    """One connected reconstruction."""

    cam_from_world: dict[str, np.ndarray]  # name → (3, 4) float64, COLMAP's axes: x right, y down, z ahead
    cameras: dict[str, dict[str, Any]]  # name → model, size, params in COLMAP's pixels
    points: int
    observations: int
    mean_track_length: float
    mean_reprojection_error: float  # stored pixels
    georegistration: dict[str, Any] | None = None  # where on Earth; then units are metres, x east, z up
    positions_unused: str | None = None  # why positions in the photos' headers do not say where on Earth
    began_simply: bool = False  # whether cameras got all their parameters once the images were registered

    @property
    def registered(self) -> int:
        """Images with a pose."""
        return len(self.cam_from_world)

    def centres(self) -> dict[str, np.ndarray]:
        """Camera centres (3,) by name."""
        return {name: -pose[:, :3].T @ pose[:, 3] for name, pose in self.cam_from_world.items()}


def read_described(
    part: Path, report: ExportReport, made_from: Mapping[str, Any], place: Mapping[str, Any] | None
) -> tuple[SparseModel, ...]:
    """Read, plot and summarise the child's output, and remove its temporary files; empty: there is no model.

    Args:
        part: the folder of the output.
        report: of the export.
        made_from: "run", its folder from that of the model, and "features", what they depend on.
        place: the georegistration of the model that the poses come from.
    """
    described = json.loads((part / RESULT).read_text(encoding="utf-8"))
    if not described:
        return ()
    if place is not None:  # the coordinates are those of the model that the poses come from
        described[0]["georegistration"] = described[0]["georegistration"] or dict(place)
    models = tuple(_model(row) for row in described)
    _write_summary(part / SUMMARY, report, described, made_from)
    with np.load(part / CLOUD) as cloud:
        shape = models[0].cam_from_world, models[0].cameras
        draw_model(*shape, cloud["points"], cloud["colours"], part / PLOT)
    for leftover in (RESULT, CLOUD, DEVIATIONS):
        (part / leftover).unlink(missing_ok=True)
    shutil.rmtree(part / "work", ignore_errors=True)
    return models


def _model(row: dict[str, Any]) -> SparseModel:
    poses = {name: np.array(pose, dtype=np.float64) for name, pose in row["cam_from_world"].items()}
    numbers = ("points", "observations", "mean_track_length", "mean_reprojection_error")
    found = {name: row[name] for name in (*numbers, "georegistration", "positions_unused", "began_simply")}
    return SparseModel(poses, row["cameras"], **found)


def _write_summary(
    path: Path, report: ExportReport, described: list[dict[str, Any]], made_from: Mapping[str, Any]
) -> None:
    summary = {
        **made_from,  # the run whose keypoints the model's are, and what they depend on
        "images": report.images,
        "pairs": report.pairs,
        "verified_pairs": report.verified,
        "matches": report.matches,
        "models": described,
    }
    write_whole(path, json.dumps(summary, indent=1).encode())
