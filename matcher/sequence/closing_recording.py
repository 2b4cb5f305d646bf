"""A recording of a trajectory before and after its loops were closed, for the rerun viewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from matcher.drawing.recording_file import RecordingFile

_BEFORE, _AFTER, _LOOP = (150, 150, 150), (0, 114, 178), (213, 94, 0)


def record_closing(
    path: Path, before: np.ndarray, after: np.ndarray, loops: Sequence[tuple[int, int]]
) -> Path:
    """Write both paths, the tracked poses that loops join, and how far each pose was moved.

    Args:
        path: an .rrd file, which is replaced.
        before, after: (F, 4, 4) world_from_cam, x right, y down, z ahead.
        loops: pairs of rows.

    Raises:
        UsageError: rerun is not installed.
    """
    with RecordingFile(path) as file:
        rr, stream = file.rr, file.stream
        file.lay_out("path and loops", file.views.TimeSeriesView(origin="moved_by", name="moved by"))
        for name, poses, colour in (("tracked", before, _BEFORE), ("adjusted", after, _AFTER)):
            line = rr.LineStrips3D([poses[:, :3, 3]], colors=colour)
            stream.log(f"world/{name}", line, static=True)
        ends = [before[list(rows), :3, 3] for rows in loops]
        if ends:
            stream.log("world/loops", rr.LineStrips3D(ends, colors=_LOOP), static=True)
        moved = np.linalg.norm(after[:, :3, 3] - before[:, :3, 3], axis=1)
        for row, distance in enumerate(moved):
            stream.set_time("pose", sequence=row)
            stream.log("moved_by", rr.Scalars([float(distance)]))
    return path
