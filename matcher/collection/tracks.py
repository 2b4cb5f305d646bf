"""Tracks: the keypoints of many images that show one point of the scene, joined from pairwise matches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from matcher.collection.store import Store


class PairMatches(NamedTuple):
    """The matches of one pair as tracks need them."""

    name0: str
    name1: str
    indices: np.ndarray  # (K, 2) integer, into the keypoints of either image
    scores: np.ndarray | None = None  # (K,), best first joined; all equal when absent


@dataclass(frozen=True, eq=False)
class Tracks:
    """Tracks of two keypoints or more, longest first; no track has two keypoints of one image."""

    names: tuple[str, ...]  # the images, in the order given
    offsets: np.ndarray  # (T + 1,) int64: observations offsets[t] … offsets[t + 1] are track t
    images: np.ndarray  # (O,) int32 into names, ascending within a track
    keypoints: np.ndarray  # (O,) int32
    conflicts: int  # matches left out, as they contradict others: two keypoints of one image in one track

    def __len__(self) -> int:
        """The number of tracks T."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        return (self.track(index) for index in range(len(self)))

    def track(self, index: int) -> list[tuple[str, int]]:
        """Name of image and number of keypoint of every observation of one track."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        images, keypoints = self.images[part].tolist(), self.keypoints[part].tolist()
        return [(self.names[image], keypoint) for image, keypoint in zip(images, keypoints, strict=True)]

    @property
    def lengths(self) -> np.ndarray:
        """(T,) int64 images of each track."""
        return np.diff(self.offsets)

    @property
    def mean_length(self) -> float:
        """Images per track, 0 without tracks."""
        return float(self.lengths.mean()) if len(self) else 0.0

    def table(self) -> np.ndarray:
        """(O, 3) int64 rows of track, image and keypoint, for a look-up the other way."""
        track = np.repeat(np.arange(len(self)), self.lengths)
        return np.column_stack([track, self.images, self.keypoints]).astype(np.int64)


def verified_pairs(store: Store) -> Iterator[PairMatches]:
    """The matches that tracks are made of: of the inliers where a pair has a geometry, all where none was
    estimated, of no match where there is none; errors as of `Store.pairs`."""
    for pair in store.pairs():
        if pair.geometry.verified or pair.geometry.status == "not_estimated":
            kept = pair.geometry.inliers if pair.geometry.verified else slice(None)
            yield PairMatches(pair.name0, pair.name1, pair.matches.indices[kept], pair.matches.scores[kept])


def tracks_of(store: Store, *, min_length: int = 2) -> Tracks:
    """The tracks of a run's verified pairs; `IntegrityError`: the store is damaged."""
    counts = {image.name: image.count for image in store.images()}
    return build_tracks(verified_pairs(store), counts, min_length=min_length)


def build_tracks(pairs: Iterable[PairMatches], counts: Mapping[str, int], *, min_length: int = 2) -> Tracks:
    """Join matches to tracks, the best first, and leave out those that contradict what is joined already.

    Union-find (Galler and Fischer 1964) with the images of each set kept beside it: two sets that share an
    image are never joined, since one point of the scene is seen once in an image. Best first, so that a
    wrong match, which tends to have a low score, meets tracks that are there already. All matches are held in
    memory, 12 bytes each.

    Args:
        pairs: verified matches of two images each; equal scores keep the order given.
        counts: images and how many keypoints each has.
        min_length: shorter tracks are left out; at least 2.
    """
    names = tuple(counts)
    starts = np.concatenate([[0], np.cumsum([counts[name] for name in names])]).astype(np.int64)
    number, dtype = {name: n for n, name in enumerate(names)}, np.uint32 if starts[-1] < 2**32 else np.int64
    nodes, scores = [np.zeros((0, 2), dtype)], [np.zeros(0, np.float32)]  # a node is a keypoint of the run
    for pair in pairs:
        indices = np.asarray(pair.indices).reshape(-1, 2)
        nodes.append((indices + starts[[number[pair.name0], number[pair.name1]]]).astype(dtype))
        scores.append(np.zeros(len(indices), np.float32) if pair.scores is None else pair.scores)
    best_first = np.argsort(-np.concatenate(scores), kind="stable")
    forest = _Forest(np.repeat(np.arange(len(names)), np.diff(starts)))
    conflicts = sum(not forest.join(*ends) for ends in np.concatenate(nodes)[best_first].tolist())
    sets = [members for members in forest.sets() if len(members) >= max(2, min_length)]
    sets.sort(key=lambda members: -len(members))  # stable: equal ones in the order of their first images
    joined = np.array([node for members in sets for node in members], dtype=np.int64)
    images = np.searchsorted(starts, joined, side="right") - 1
    return Tracks(
        names=names,
        offsets=np.concatenate([[0], np.cumsum([len(members) for members in sets])]).astype(np.int64),
        images=images.astype(np.int32),
        keypoints=(joined - starts[images]).astype(np.int32),
        conflicts=conflicts,
    )


class _Forest:
    """Disjoint sets of keypoints; only those that were joined take memory."""

    def __init__(self, image_of: np.ndarray) -> None:
        self._image_of = image_of
        self._parent: dict[int, int] = {}
        self._members: dict[int, dict[int, int]] = {}  # of a root: image → its keypoint

    def _root(self, node: int) -> int:
        parent = self._parent
        if node not in parent:
            parent[node] = node
            self._members[node] = {int(self._image_of[node]): node}
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]  # halves the path on the way up
        return node

    def join(self, node0: int, node1: int) -> bool:
        """Join the sets of two keypoints; False, and nothing joined, if both have a keypoint of one image."""
        root0, root1 = self._root(node0), self._root(node1)
        if root0 == root1:
            return True
        if len(self._members[root0]) < len(self._members[root1]):
            root0, root1 = root1, root0
        large, small = self._members[root0], self._members[root1]
        if not large.keys().isdisjoint(small):
            return False
        large.update(small)
        del self._members[root1]
        self._parent[root1] = root0
        return True

    def sets(self) -> list[list[int]]:
        """Every set as its sorted keypoints, in the order of their first."""
        return sorted(sorted(members.values()) for members in self._members.values())


# Cycles: going round a third image leads elsewhere where matches contradict each other.


def consistent_matches(
    pairs: Mapping[tuple[int, int], np.ndarray], keypoints: Sequence[np.ndarray], scales: Sequence[float]
) -> dict[tuple[int, int], np.ndarray]:
    """Which matches of each pair (K,) bool are confirmed by enough third images, of those that can tell.

    A third image confirms a match if both of its keypoints match the same point there, and contradicts it if
    they match different ones (Zach et al., Disambiguating visual relations using loop constraints, 2010). A
    right match is contradicted where another match of its keypoints is wrong, so in three images none of the
    three is known to be wrong and all are kept; the most probable ones decide then (`build_tracks`).

    Args:
        pairs: (K, 2) keypoints of images i < j, each keypoint once on its side.
        keypoints: (N, 2) stored pixels of every image.
        scales: resized size / stored size of every image.
    """
    partner = {}  # of images (i, j) in either order, the keypoint of j that each of i matches (N,), or −1
    for (first, second), indices in pairs.items():
        for source, target, (own, other) in ((first, second, indices.T), (second, first, indices.T[::-1])):
            partner[source, target] = np.full(len(keypoints[source]), -1, np.int64)
            partner[source, target][own] = other
    kept = {}
    for (first, second), indices in pairs.items():
        confirmed, seen = np.zeros((2, len(indices)), np.int64)
        for third in range(len(keypoints)):
            if (first, third) not in partner or (second, third) not in partner:
                continue
            ends = np.stack([partner[first, third][indices[:, 0]], partner[second, third][indices[:, 1]]])
            both = np.flatnonzero((ends >= 0).all(axis=0))
            here, there = keypoints[third][ends[:, both]]
            # 1.5 pixels of the resized image: detectors find some points twice
            confirmed[both] += np.linalg.norm(here - there, axis=1) * scales[third] <= 1.5
            seen[both] += 1
        # One third image does not tell which of three matches is wrong; of several, .3 confirm a right match
        # even if many others are wrong.
        kept[first, second] = (seen < 2) | (confirmed >= 0.3 * seen)
    return kept
