"""Identities of points over frames."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class TrackIds:
    """Hands out track ids: a linked point has the id of its partner, any other a number never used before.

    Only the tracks of the frames that the caller still names are remembered, so memory is bounded.
    """

    def __init__(self) -> None:
        self._next = 0
        self._lengths: dict[int, int] = {}

    def extend(
        self, count: int, links: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and lengths of the points of a new frame.

        Args:
            count: its points N.
            links: (ids (M,) of an earlier frame, indices (K, 2) into that frame and this one), the most
                trusted first. A point takes the first id that is offered to it, and an id goes to one point
                only.

        Returns:
            ids (N,) int64 and the number of frames that each was seen in, this one included (N,) int64.
        """
        ids = np.full(count, -1, np.int64)
        for earlier, indices in links:
            offered = earlier[indices[:, 0]]
            free = (ids[indices[:, 1]] < 0) & ~np.isin(offered, ids)
            offered, takers = offered[free], indices[free, 1]
            _, first = np.unique(offered, return_index=True)
            ids[takers[first]] = offered[first]
        new = np.flatnonzero(ids < 0)
        ids[new] = np.arange(self._next, self._next + len(new))
        self._next += len(new)
        lengths = [self._lengths.get(track, 0) + 1 for track in ids.tolist()]
        self._lengths |= zip(ids.tolist(), lengths, strict=True)
        return ids, np.array(lengths, np.int64)

    def forget(self, *kept: np.ndarray) -> None:
        """Remember the lengths of these tracks only."""
        alive = np.unique(np.concatenate(kept)).tolist() if kept else []
        self._lengths = {track: self._lengths[track] for track in alive if track in self._lengths}

    def __len__(self) -> int:
        """Tracks that are remembered."""
        return len(self._lengths)
