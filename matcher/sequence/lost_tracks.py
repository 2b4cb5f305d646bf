"""Tracks that the last frames did not show: detectors miss points, and often find them again later."""

from __future__ import annotations

import numpy as np

from matcher.sequence.frames import FrameLinks
from matcher.sequence.guided import Guide, search_guided
from matcher.sequence.keyframes import KeptFrame


class LostTracks:
    """Points seen up to `patience` frames ago, moved along with what is still seen around them."""

    def __init__(self, patience: int = 6) -> None:
        self._patience = patience
        self.clear()

    def clear(self) -> None:
        """Forget all, as after a loss."""
        self._positions = np.zeros((0, 2), np.float32)
        self._descriptors = np.zeros((0, 0), np.float32)
        self.track_ids = np.zeros(0, np.int64)
        self._ages = np.zeros(0, np.int64)

    def find(self, current: KeptFrame, taken: np.ndarray, guide: Guide) -> np.ndarray:
        """(L, 2) int64: entry of `track_ids`, point of the current frame that is not among `taken` (T,)."""
        free = np.setdiff1d(np.arange(len(current.keypoints)), taken)
        pairs, _ = search_guided(
            self._positions, self._descriptors, current.keypoints[free], current.descriptors[free], guide
        )
        return np.stack([pairs[:, 0], free[pairs[:, 1]]], axis=1)

    def update(self, previous: KeptFrame, current: KeptFrame, links: FrameLinks, guide: Guide) -> None:
        """Take in what the previous frame had and the current one, whose ids are known, has not."""
        if not guide.usable or not links.consistent.any():
            self.clear()
            return
        young = self._ages < self._patience
        ids = np.concatenate([self.track_ids[young], previous.track_ids])
        positions = np.concatenate([self._positions[young], previous.keypoints])
        ages = np.concatenate([self._ages[young] + 1, np.ones(len(previous.track_ids), np.int64)])
        parts = [self._descriptors[young]] if young.any() else []
        descriptors = np.concatenate([*parts, previous.descriptors])
        positions = positions + guide.motion(positions)
        width, height = current.size
        inside = (positions >= 0).all(axis=1) & (positions < (width, height)).all(axis=1)
        gone = ~np.isin(ids, current.track_ids) & inside
        self.track_ids, self._positions = ids[gone], positions[gone].astype(np.float32)
        self._descriptors, self._ages = descriptors[gone], ages[gone]
