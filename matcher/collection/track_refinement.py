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
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from matcher.collection.schema import RefinedKeypoints
from matcher.collection.store import Writer
from matcher.collection.tracks import build_tracks, verified_pairs
from matcher.config import RefineConfig, from_dict
from matcher.errors import IntegrityError
from matcher.images import limit_for, read_image
from matcher.refine import DEVIATION, ImagePyramid, fit_affine_maps, refine_matches
from matcher.types import Matches

if TYPE_CHECKING:
    from matcher.collection.store import Store


class _Step(NamedTuple):
    """A batch: keypoints of one image refined against those of another. A node is a keypoint of the run."""

    pair: int
    reverse: bool  # from image 1 of the pair to image 0
    rows: np.ndarray  # (k,) of the pair's inliers
    parents: np.ndarray  # (k,) nodes
    children: np.ndarray  # (k,) nodes


def refine_run(store: Store, on_progress: Callable[[int, int], None] | None = None) -> str:
    """Refine the keypoints of a run's tracks and store them, once, if its configuration asks for it; returns
    why nothing was done although it does, empty otherwise.

    A keypoint that is in no track, is the reference of its track, or was not accepted keeps its position.
    `on_progress` is called with the number of track keypoints refined so far, and of all. `ImageError`: an
    image cannot be read; `IntegrityError`: it is not what it was when its keypoints were found.
    """
    values = store.settings.get("config", {}).get("refine")
    images = [image for image in store.images() if image.status == "done"]
    if values is None or not images or store.refined_keypoints(images[0].name) is not None:
        return ""
    if absent := [image.name for image in images if not image.path.is_file()]:
        return f"keypoints are not refined: {len(absent)} images are not in their folder, such as {absent[0]}"
    config = from_dict(RefineConfig, values)
    # A larger window is affordable, as a track is refined once for all its pairs.
    config = replace(config, window=max(config.window, 21))
    scales = np.array([store.scale(image.name) for image in images])
    counts = np.array([image.count for image in images], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    points = np.concatenate([store.keypoints(image.name) for image in images]).astype(np.float64)
    found = _Positions(points, np.repeat(DEVIATION**2 / scales.prod(axis=1), counts))
    pairs, numbers = list(verified_pairs(store)), {image.name: index for index, image in enumerate(images)}
    track, image, keypoint = build_tracks(pairs, {i.name: i.count for i in images}).table().T
    track_of = np.full(len(points), -1, dtype=np.int64)
    track_of[starts[image] + keypoint] = track
    ends = [(numbers[pair.name0], numbers[pair.name1]) for pair in pairs]
    nodes = [pair.indices + starts[list(end)] for pair, end in zip(pairs, ends, strict=True)]
    graph = _MatchGraph(nodes, [pair.scores for pair in pairs], track_of)
    zooms = (1 / np.sqrt(scales.prod(axis=1))).tolist()
    read = ImagePyramids([i.path for i in images], [i.size for i in images], zooms)

    def refine(step: _Step) -> Matches:
        order = slice(None, None, -1 if step.reverse else 1)
        columns = nodes[step.pair][:, order].T
        maps, known = fit_affine_maps(*(points[column] for column in columns))
        given = (maps[step.rows], known[step.rows])
        return refine_matches(*map(read, ends[step.pair][order]), found.matches(step), config, given)

    for step in graph.steps():
        refined = refine(step)
        found.take(step, refined)
        graph.reach(step.children[refined.refinement.accepted])
        if on_progress is not None:
            on_progress(graph.reached, graph.total)
    found.average((step, refine(step)) for step in graph.sweep(found.refined))
    parts = [slice(*ends) for ends in pairwise(starts)]
    arrays = found.points.astype(np.float32), found.covariances, found.refined
    with Writer(store.folder) as writer, writer.transaction():
        writer.put_refined(
            {
                image.name: RefinedKeypoints(*(array[part] for array in arrays))
                for image, part in zip(images, parts, strict=True)
            }
        )
    return ""


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
        accepted, covariances = matches.refinement.accepted, matches.refinement.covariances
        children = step.children[accepted]
        self.points[children] = matches.points1[accepted]
        self.covariances[children] = (covariances + self._inherited(step))[accepted]
        self.refined[children] = True

    def average(self, found: Iterable[tuple[_Step, Matches]]) -> None:
        """Move refined keypoints to the mean of several refinements, weighted by their covariances.

        All share the noise of the keypoint's own image, so the covariance is the mean of theirs, no smaller.
        """
        information, sums = np.zeros((len(self.points), 2, 2)), np.zeros((len(self.points), 2))
        counts = np.zeros(len(self.points), dtype=np.int64)
        for step, matches in found:
            covariances = matches.refinement.covariances.astype(np.float64) + self._inherited(step)
            own = np.linalg.inv(covariances)
            away = matches.points1 - self.points[step.children]
            near = np.einsum("ki,kij,kj->k", away, own, away) < 9.0  # beyond it contradicts the others
            used = np.flatnonzero(matches.refinement.accepted & near)
            children = step.children[used]  # each at most once in a step
            information[children] += own[used]
            sums[children] += (own[used] @ matches.points1[used, :, None].astype(np.float64))[:, :, 0]
            counts[children] += 1
        seen = np.flatnonzero(counts)
        self.points[seen] = np.linalg.solve(information[seen], sums[seen, :, None])[:, :, 0]
        self.covariances[seen] = np.linalg.inv(information[seen] / counts[seen, None, None])

    def _inherited(self, step: _Step) -> np.ndarray:
        return self.covariances[step.parents] * self.refined[step.parents, None, None]


class ImagePyramids:
    """Pyramids of images by number, read when they are needed; the last ones are kept, up to a GiB."""

    def __init__(
        self,
        paths: Sequence[Path],
        sizes: Sequence[tuple[int, int]],
        zooms: Sequence[float],
        has_changed: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """Files, their sizes when keypoints were found, and the stored size / resized one."""
        self._paths, self._sizes, self._zooms, self._has_changed = paths, sizes, zooms, has_changed
        self._kept: OrderedDict[int, ImagePyramid] = OrderedDict()

    def __call__(self, number: int) -> ImagePyramid:
        """The pyramid of an image; `ImageError`: it cannot be read, `IntegrityError`: it is not the file in
        which the keypoints were found."""
        path, size = self._paths[number], self._sizes[number]
        if number not in self._kept:
            image = read_image(path, resize=None, upright=False, keep_stored=True, max_pixels=limit_for(size))
            if image.size != size or self._has_changed(number):
                raise IntegrityError(
                    f"{path} has changed ({image.size[0]} x {image.size[1]} pixels now, {size[0]} x "
                    f"{size[1]} before): put the file back in which its keypoints were found, or match again"
                )
            self._kept[number] = ImagePyramid.of(image)._replace(zoom=self._zooms[number])
            # 4 bytes a pixel, and a third more for the levels of the pyramid
            while len(self._kept) > 2 and sum(np.prod(self._sizes[i]) for i in self._kept) * 16 / 3 > 1 << 30:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]


class _MatchGraph:
    """The matches within tracks, traversed best first from the references outwards."""

    def __init__(self, nodes: list[np.ndarray], scores: list[np.ndarray], track_of: np.ndarray) -> None:
        """By pair, (K, 2) nodes and (K,) scores; the track of every node, −1 without one."""
        columns = [(np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64), np.zeros(0, np.float32))]
        for number, (ends, score) in enumerate(zip(nodes, scores, strict=True)):
            first, second = track_of[ends].T
            rows = np.flatnonzero((first >= 0) & (first == second))
            columns.append((ends[rows], np.column_stack([np.full(len(rows), number), rows]), score[rows]))
        ends, where, score = map(np.concatenate, zip(*columns, strict=True))
        best_first = np.argsort(-score, kind="stable")
        self._nodes = ends[best_first]  # (E, 2)
        self._pairs, self._rows = where[best_first].T  # (E,) which pair, and which of its matches
        # The reference of a track is its keypoint of highest degree.
        every = self._nodes.ravel()
        degree = np.bincount(every, minlength=len(track_of))
        order = np.lexsort((every, -degree[every], track_of[every]))
        references = every[order][np.unique(track_of[every][order], return_index=True)[1]]
        self._done = np.zeros(len(track_of), dtype=bool)
        self._done[references] = True
        self.reached, self.total = 0, len(np.unique(every)) - len(references)

    def reach(self, nodes: np.ndarray) -> None:
        """Mark keypoints as refined; others may now be refined against them."""
        self._done[nodes] = True
        self.reached += len(nodes)

    def steps(self) -> Iterator[_Step]:
        """Steps until every keypoint is refined or its three best matches were tried in vain."""
        count = len(self._rows)
        parents, children = (np.concatenate(self._nodes.T[order]) for order in ([0, 1], [1, 0]))
        best_first = np.arange(2 * count).reshape(2, count).T.ravel()
        untried, tries = np.ones(2 * count, dtype=bool), np.zeros(len(self._done), dtype=np.int64)
        while True:
            usable = untried & self._done[parents] & ~self._done[children] & (tries[children] < 3)
            chosen = best_first[usable[best_first]]
            chosen = chosen[np.unique(children[chosen], return_index=True)[1]]
            if not len(chosen):
                return
            untried[chosen] = False
            tries[children[chosen]] += 1
            keys = 2 * self._pairs[chosen % count] + (chosen >= count)
            for key in np.unique(keys).tolist():
                one = chosen[keys == key]
                rows = self._rows[one % count]
                yield _Step(key // 2, bool(key % 2), rows, parents[one], children[one])

    def sweep(self, refined: np.ndarray) -> Iterator[_Step]:
        """Every match of a refined keypoint (N,) with one that is refined or a reference, both ways."""
        order = np.argsort(self._pairs, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(self._pairs[order])) + 1):
            for reverse in (False, True):
                parents, children = self._nodes[rows].T[:: -1 if reverse else 1]
                chosen = self._done[parents] & refined[children]
                if chosen.any():
                    where = rows[chosen]
                    pair = int(self._pairs[where[0]])
                    yield _Step(pair, reverse, self._rows[where], parents[chosen], children[chosen])
