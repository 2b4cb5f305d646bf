"""The path of a sequence before and after its loops were closed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from matcher.sequence.pose_graph import Loop


@dataclass(frozen=True, eq=False)
class ClosedTrajectory:
    """The poses of all frames that had one, before and after their keyframes were adjusted."""

    frames: np.ndarray  # (F,) int64 indices of the frames
    timestamps: np.ndarray  # (F,) seconds; a frame's index where it has none
    before: np.ndarray  # (F, 4, 4) world_from_cam as tracked
    after: np.ndarray  # (F, 4, 4) the same, adjusted
    loops: tuple[Loop, ...]
    folder: Path  # of the model, for `Map.open`
    problem: str | None = None  # why the graph of poses was not optimised although there are loops
    alike: int = 0  # pairs of keyframes that match and cannot show one place, which are left out

    def plot(self, path: str | Path) -> Path:
        """Draw both paths from above and how far each pose was moved, as a PNG."""
        from matcher.sequence.closing_plot import plot_closing

        return plot_closing(Path(path), self.before, self.after, self._joined())

    def record(self, path: str | Path) -> Path:
        """Write the same as a recording (.rrd) for the rerun viewer.

        Raises:
            UsageError: rerun is not installed.
        """
        from matcher.sequence.closing_recording import record_closing

        return record_closing(Path(path), self.before, self.after, self._joined())

    def _joined(self) -> list[tuple[int, int]]:
        rows = {index: row for row, index in enumerate(self.frames.tolist())}
        return [(rows[first], rows[second]) for first, second, _ in self.loops]

    def moved(self) -> np.ndarray:
        """(F,) how far each pose was moved."""
        return np.linalg.norm(self.after[:, :3, 3] - self.before[:, :3, 3], axis=1)
