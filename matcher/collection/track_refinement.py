"""Refinement of tracks: every observation of a track is refined against a common reference.

Refining each match on its own would give a keypoint a different position in each of its pairs. Here the
reference of a track is its keypoint with the most matches. Keypoints matched to it are refined against it on
the images, the remaining ones against those, and so on, so each keypoint has one position for all its pairs.
Then each is refined against all other observations that it was matched to, and takes the mean of what they
say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from matcher.collection.sources import RefinedKeypoints, write_refined
from matcher.collection.tracks import tracks_of
from matcher.config import RefineConfig, from_dict
from matcher.errors import IntegrityError
from matcher.images import limit_for, read_image
from matcher.refine import DEVIATION, ImagePyramid, fit_affine_maps, refine_matches
from matcher.types import Matches

if TYPE_CHECKING:
    from matcher.collection.schema import StoredImage
    from matcher.collection.store import Store


_WINDOW = 21  # least window side; larger is affordable, as a track is refined once for all its pairs
_TRIES = 3  # observations of its track that a keypoint is refined against at most, until one is accepted
_SWEEPS = 1  # refinements of every keypoint against all that it was matched to
_FAR = 9.0  # squared Mahalanobis distance beyond which an observation contradicts the others
_CACHE_BYTES = 1 << 30  # of images kept in memory
_GREY_BYTES = 4 * 4 / 3  # per pixel, all pyramid levels included


class _Pair(NamedTuple):
    """The verified matches of one pair, from which tracks are built."""

    first: int  # image
    second: int
    indices: np.ndarray  # (K, 2) of keypoints
    scores: np.ndarray  # (K,)


class _Edges(NamedTuple):
    """Matches between keypoints of one track, best first; a node is a keypoint of the collection."""

    nodes: np.ndarray  # (E, 2) int64
    tracks: np.ndarray  # (E,)
    pairs: np.ndarray  # (E,) int64, which pair
    rows: np.ndarray  # (E,) int64, which of its matches


class _Step(NamedTuple):
    """A batch: keypoints of one image refined against those of another."""

    pair: int
    reverse: bool  # from image 1 of the pair to image 0
    rows: np.ndarray  # (k,) of the pair's inliers
    parents: np.ndarray  # (k,) nodes
    children: np.ndarray  # (k,) nodes


def refine_tracks(
    store: Store, config: RefineConfig, on_progress: Callable[[int, int], None] | None = None
) -> dict[str, RefinedKeypoints]:
    """The keypoints of all images; observations of tracks are refined against their references.

    Args:
        store: a run with its verified pairs; the images are read again.
        config: window size and acceptance thresholds.
        on_progress: called with the number of track keypoints refined so far, and that of all candidates.

    Returns:
        By name of image. A keypoint that is in no track, is the reference of its track, or was not accepted
        keeps its position.

    Raises:
        ImageError: an image cannot be read.
        IntegrityError: an image is not what it was when its keypoints were found; the store is damaged.
    """
    images = [image for image in store.images() if image.status == "done"]
    scales = np.array([store.scale(image.name) for image in images]).reshape(-1, 2)
    counts = np.array([image.count for image in images], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    points = np.concatenate([np.zeros((0, 2)), *(store.keypoints(image.name) for image in images)])
    found = _Positions(points, np.repeat(DEVIATION**2 / scales.prod(axis=1), counts))
    pairs = _pairs(store, {image.name: index for index, image in enumerate(images)})
    read = _Images([(image.path, image.size) for image in images], scales)
    config = replace(config, window=max(config.window, _WINDOW))
    frontier = _Frontier(_edges_of_tracks(store, pairs, images, starts), len(points))

    def refine(step: _Step) -> Matches:
        pair = pairs[step.pair]
        order = (pair.second, pair.first) if step.reverse else (pair.first, pair.second)
        columns = pair.indices[:, ::-1] if step.reverse else pair.indices
        ends = (points[starts[image] + column] for image, column in zip(order, columns.T, strict=True))
        maps, known = fit_affine_maps(*ends, config.neighbours)
        given = (maps[step.rows], known[step.rows])
        return refine_matches(*map(read, order), found.matches(step), config, given)

    for step in frontier.steps():
        refined = refine(step)
        found.take(step, refined)
        frontier.reach(step.children[refined.refinement.accepted])
        if on_progress is not None:
            on_progress(frontier.reached, frontier.total)
    for _ in range(_SWEEPS):
        found.average((step, refine(step)) for step in frontier.sweep(found.refined))
    return {image.name: found.part(slice(*starts[i : i + 2])) for i, image in enumerate(images)}


class _Positions:
    """Positions and covariances of all keypoints, and which of them are refined."""

    def __init__(self, points: np.ndarray, variances: np.ndarray) -> None:
        self.points = points.copy()
        self.covariances = (variances[:, None, None] * np.eye(2)).astype(np.float32)
        self.refined = np.zeros(len(points), dtype=bool)

    def matches(self, step: _Step) -> Matches:
        """The matches of a step at the current positions."""
        indices = np.stack([step.parents, step.children], axis=1)
        ends = (self.points[nodes].astype(np.float32) for nodes in indices.T)
        return Matches(indices, *ends, np.ones(len(indices), np.float32))

    def take(self, step: _Step, matches: Matches) -> None:
        """Update accepted children; the covariances of their parents are added to theirs."""
        accepted = matches.refinement.accepted
        children, parents = step.children[accepted], step.parents[accepted]
        self.points[children] = matches.points1[accepted]
        inherited = self.covariances[parents] * self.refined[parents, None, None]
        self.covariances[children] = matches.refinement.covariances[accepted] + inherited
        self.refined[children] = True

    def average(self, found: Iterable[tuple[_Step, Matches]]) -> None:
        """Move refined keypoints to the mean of several refinements, weighted by their covariances.

        All share the noise of the keypoint's own image, so the covariance is the mean of theirs, no smaller.
        """
        information, sums = np.zeros((len(self.points), 2, 2)), np.zeros((len(self.points), 2))
        counts = np.zeros(len(self.points), dtype=np.int64)
        for step, matches in found:
            inherited = self.covariances[step.parents] * self.refined[step.parents, None, None]
            own = np.linalg.inv(matches.refinement.covariances.astype(np.float64) + inherited)
            away = matches.points1 - self.points[step.children]
            near = np.einsum("ki,kij,kj->k", away, own, away) < _FAR
            used = np.flatnonzero(matches.refinement.accepted & near)
            children = step.children[used]  # each at most once in a step
            information[children] += own[used]
            sums[children] += (own[used] @ matches.points1[used, :, None].astype(np.float64))[:, :, 0]
            counts[children] += 1
        seen = np.flatnonzero(counts)
        self.points[seen] = np.linalg.solve(information[seen], sums[seen, :, None])[:, :, 0]
        self.covariances[seen] = np.linalg.inv(information[seen] / counts[seen, None, None])

    def part(self, rows: slice) -> RefinedKeypoints:
        return RefinedKeypoints(
            self.points[rows].astype(np.float32), self.covariances[rows], self.refined[rows]
        )


class _Images:
    """Image pyramids for refinement, in a least-recently-used cache."""

    def __init__(self, files: list[tuple[Path, tuple[int, int]]], scales: np.ndarray) -> None:
        self._files, self._scales = files, scales
        self._kept: OrderedDict[int, ImagePyramid] = OrderedDict()

    def __call__(self, index: int) -> ImagePyramid:
        if index in self._kept:
            self._kept.move_to_end(index)
            return self._kept[index]
        path, size = self._files[index]
        image = read_image(path, resize=None, upright=False, keep_stored=True, max_pixels=limit_for(size))
        if image.size != size:
            raise IntegrityError(
                f"{path} is {image.size[0]} x {image.size[1]} pixels now, and was {size[0]} x {size[1]} when "
                "its keypoints were found: put the old file back, or match again"
            )
        zoom = 1 / float(np.sqrt(self._scales[index].prod()))
        self._kept[index] = ImagePyramid.of(image)._replace(zoom=zoom)
        bytes_of = sum(np.prod(self._files[i][1]) * _GREY_BYTES for i in self._kept)
        while bytes_of > _CACHE_BYTES and len(self._kept) > 2:
            gone, _ = self._kept.popitem(last=False)
            bytes_of -= np.prod(self._files[gone][1]) * _GREY_BYTES
        return self._kept[index]


def _pairs(store: Store, number: dict[str, int]) -> list[_Pair]:
    """The verified pairs of a run."""
    found = []
    for pair in store.pairs():
        if pair.geometry.status in ("ok", "not_estimated"):
            kept = pair.geometry.inliers if pair.geometry.status == "ok" else slice(None)
            ends = number[pair.name0], number[pair.name1]
            found.append(_Pair(*ends, pair.matches.indices[kept], pair.matches.scores[kept]))
    return found


def _edges_of_tracks(
    store: Store, pairs: list[_Pair], images: Sequence[StoredImage], starts: np.ndarray
) -> _Edges:
    """The matches whose two keypoints are in the same track."""
    tracks = tracks_of(store)
    number = {image.name: index for index, image in enumerate(images)}
    image_of = np.array([number.get(name, -1) for name in tracks.names], dtype=np.int64)
    track, image, keypoint = tracks.table().T
    track_of = np.full(starts[-1], -1, dtype=np.int64)
    track_of[starts[image_of[image]] + keypoint] = track
    columns = [(np.zeros((0, 2), np.int64), *(np.zeros(0, np.int64) for _ in range(4)))]
    for index, pair in enumerate(pairs):
        nodes = pair.indices + starts[[pair.first, pair.second]]
        tracks_of_ends = track_of[nodes]
        rows = np.flatnonzero((tracks_of_ends[:, 0] >= 0) & (tracks_of_ends[:, 0] == tracks_of_ends[:, 1]))
        numbers = np.full(len(rows), index)
        columns.append((nodes[rows], tracks_of_ends[rows, 0], numbers, rows, pair.scores[rows]))
    *edges, scores = map(np.concatenate, zip(*columns, strict=True))
    order = np.argsort(-scores, kind="stable")
    return _Edges(*(column[order] for column in edges))


class _Frontier:
    """Best-first traversal of the match graph, from the references outwards."""

    def __init__(self, edges: _Edges, count: int) -> None:
        self._edges = edges
        self._done = np.zeros(count, dtype=bool)
        self._done[_references(edges, count)] = True
        self._tries = np.zeros(count, dtype=np.int64)
        self.reached = 0
        self.total = len(np.unique(edges.nodes)) - int(self._done.sum())

    def reach(self, nodes: np.ndarray) -> None:
        """Mark keypoints as refined; others may now be refined against them."""
        self._done[nodes] = True
        self.reached += len(nodes)

    def steps(self) -> Iterator[_Step]:
        """Steps until every keypoint is refined or its best matches were tried in vain."""
        edges, count = self._edges, len(self._edges.rows)
        parents, children = (np.concatenate(edges.nodes.T[order]) for order in ([0, 1], [1, 0]))
        best_first = np.arange(2 * count).reshape(2, count).T.ravel()
        untried = np.ones(2 * count, dtype=bool)
        while True:
            usable = untried & self._done[parents] & ~self._done[children] & (self._tries[children] < _TRIES)
            chosen = best_first[usable[best_first]]
            chosen = chosen[np.unique(children[chosen], return_index=True)[1]]
            if not len(chosen):
                return
            untried[chosen] = False
            self._tries[children[chosen]] += 1
            keys = 2 * edges.pairs[chosen % count] + (chosen >= count)
            for key in np.unique(keys).tolist():
                one = chosen[keys == key]
                rows = edges.rows[one % count]
                yield _Step(key // 2, bool(key % 2), rows, parents[one], children[one])

    def sweep(self, refined: np.ndarray) -> Iterator[_Step]:
        """Every match of a refined keypoint (N,) with one that is refined or a reference, both ways."""
        edges = self._edges
        order = np.argsort(edges.pairs, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(edges.pairs[order])) + 1):
            for reverse in (False, True):
                parents, children = edges.nodes[rows].T[:: -1 if reverse else 1]
                chosen = self._done[parents] & refined[children]
                if chosen.any():
                    where = rows[chosen]
                    pair = int(edges.pairs[where[0]])
                    yield _Step(pair, reverse, edges.rows[where], parents[chosen], children[chosen])


def _references(edges: _Edges, count: int) -> np.ndarray:
    """The keypoint of highest degree in every track."""
    degree = np.bincount(edges.nodes.ravel(), minlength=count)
    nodes, tracks = edges.nodes.ravel(), np.repeat(edges.tracks, 2)
    order = np.lexsort((nodes, -degree[nodes], tracks))
    return nodes[order][np.unique(tracks[order], return_index=True)[1]]


def refine_run(store: Store, on_progress: Callable[[int, int], None] | None = None) -> str:
    """Refine a run's tracks and store the result beside its store, once, if its configuration asks for it.

    Returns:
        Why nothing was done although the configuration asks for it; empty otherwise.

    Raises:
        ImageError, IntegrityError: as `refine_tracks`.
        OSError: the disk is full.
    """
    values = store.settings.get("config", {}).get("refine")
    images = [image for image in store.images() if image.status == "done"]
    if values is None or not images or store.refined_keypoints(images[0].name) is not None:
        return ""
    absent = [image.name for image in images if not image.path.is_file()]
    if absent:
        return f"keypoints are not refined: {len(absent)} images are not in their folder, such as {absent[0]}"
    write_refined(store.folder, refine_tracks(store, from_dict(RefineConfig, values), on_progress))
    store.drop_cache()
    return ""
