"""Matches of a photo with the points of a map, through the tracks of the images it is matched with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from matcher.data.matches import Matches
from matcher.localization.absolute_pose import Matches3d
from matcher.localization.sparse_map import SparseMap


@dataclass(eq=False)
class Correspondences:
    """What is known of a photo so far: rows of keypoint, point, map image and its keypoint, and the score."""

    model: SparseMap
    positions: np.ndarray  # (N, 2) of the photo's keypoints, stored pixels
    rows: list[np.ndarray] = field(default_factory=list)  # (k, 4) int64 each: keypoint, point, image, its own
    scores: list[np.ndarray] = field(default_factory=list)  # (k,) each
    images: list[int] = field(default_factory=list)  # matched so far

    def add(self, image: int, matches: Matches) -> int:
        """The matches of a map image (image 0) with the photo (image 1); returns those that have a point."""
        self.images.append(image)
        theirs, ours = matches.indices.T if len(matches) else np.zeros((2, 0), np.int64)
        points = self.model.points[image][theirs]
        kept = points >= 0
        columns = (ours[kept], points[kept], np.full(int(kept.sum()), image), theirs[kept])
        self.rows.append(np.column_stack(columns).astype(np.int64).reshape(-1, 4))
        self.scores.append(np.asarray(matches.scores[kept], dtype=np.float64))
        return int(kept.sum())

    def table(self, images: Sequence[int] | None = None) -> np.ndarray:
        """(M, 4) rows, each pair of keypoint and point once, by its best score.

        Args:
            images: only the matches of these; all when absent.
        """
        if not self.rows:
            return np.zeros((0, 4), np.int64)
        rows, scores = np.concatenate(self.rows), np.concatenate(self.scores)
        if images is not None:
            kept = np.isin(rows[:, 2], list(images))
            rows, scores = rows[kept], scores[kept]
        rows = rows[np.argsort(-scores, kind="stable")]
        _, first = np.unique(rows[:, :2], axis=0, return_index=True)
        return rows[np.sort(first)]

    def matches(self, table: np.ndarray, positions: np.ndarray | None = None) -> Matches3d:
        """Those of a table, at the keypoints' positions or others (M, 2)."""
        points2d = self.positions[table[:, 0]] if positions is None else positions
        return Matches3d(points2d.astype(np.float64), self.model.xyz[table[:, 1]], table[:, 0])

    def inliers_by_image(self, table: np.ndarray, inliers: np.ndarray) -> dict[int, int]:
        """How many of the inliers each image that was matched shows."""
        agreeing = {tuple(row) for row in table[inliers][:, :2].tolist()}
        counts = {}
        for image, rows in zip(self.images, self.rows, strict=True):
            counts[image] = sum(tuple(row) in agreeing for row in rows[:, :2].tolist())
        return counts
