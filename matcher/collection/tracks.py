"""Tracks: the keypoints of many images that show one point of the scene, joined from matches and refined.

Loops of three images tell which matches and pairs are false: going round them leads to other points, or to
another rotation (Zach, Klopschitz and Pollefeys, Disambiguating visual relations using loop constraints, CVPR
2010), or a pair is missing that should have had the matches of the two others (Zach, Irschara and Bischof,
What can missing correspondences tell us about 3D structure and motion?, CVPR 2008). Where equal things stand
in several rooms, all loops agree; there all pairs between groups of images tell together that they are apart.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from matcher.collection.schema import RefinedKeypoints
from matcher.collection.store import Store, Writer
from matcher.config import RefineConfig, from_dict
from matcher.errors import IntegrityError
from matcher.images import limit_for, read_image
from matcher.refine import DEVIATION, ImagePyramid, fit_affine_maps, refine_matches
from matcher.types import Matches, TwoViewGeometry


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
    contradicted: tuple[tuple[str, str], ...] = ()  # pairs left out, as `contradicted`

    def __len__(self) -> int:
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
        tracks = np.repeat(np.arange(len(self)), self.lengths)
        return np.column_stack([tracks, self.images, self.keypoints]).astype(np.int64)


def usable_matches(matches: Matches, geometry: TwoViewGeometry) -> tuple[np.ndarray, np.ndarray] | None:
    """Indices and scores of the matches of a pair that tracks are made of: its inliers, or all where no
    geometry was estimated; else None."""
    if not geometry.verified and geometry.status != "not_estimated":
        return None
    kept = geometry.inliers if geometry.verified else slice(None)
    return matches.indices[kept], matches.scores[kept]


def verified_pairs(store: Store, without: Collection[tuple[str, str]] = ()) -> Iterator[PairMatches]:
    """The matches of a run's verified pairs, but for those `without`; errors as of `Store.pairs`."""
    for pair in store.pairs():
        found = usable_matches(pair.matches, pair.geometry)
        if found is not None and (pair.name0, pair.name1) not in without:
            yield PairMatches(pair.name0, pair.name1, *found)


def tracks_of(store: Store, *, min_length: int = 2) -> Tracks:
    """The tracks of a run's verified pairs that no others contradict; `IntegrityError`: a damaged store."""
    counts = {image.name: image.count for image in store.images()}
    gone = tuple(contradicted_pairs(store))
    found = build_tracks(verified_pairs(store, gone), counts, min_length=min_length)
    return replace(found, contradicted=gone)


def build_tracks(pairs: Iterable[PairMatches], counts: Mapping[str, int], *, min_length: int = 2) -> Tracks:
    """Join the matches of pairs, whose images have `counts` keypoints, to tracks of `min_length` keypoints,
    and leave out those that contradict what is joined already.

    Two sets that share an image are never joined, since one point of the scene is seen once in an image. Best
    first, so that a wrong match, which tends to have a low score, meets tracks that are there already. All
    matches are held in memory, 12 bytes each.
    """
    names = tuple(counts)
    starts = np.concatenate([[0], np.cumsum([counts[name] for name in names])]).astype(np.int64)
    number, dtype = {name: n for n, name in enumerate(names)}, np.uint32 if starts[-1] < 2**32 else np.int64
    nodes, scores = [np.zeros((0, 2), dtype)], [np.zeros(0, np.float32)]  # a node is a keypoint of the run
    for pair in pairs:
        indices = np.asarray(pair.indices).reshape(-1, 2)
        nodes.append((indices + starts[[number[pair.name0], number[pair.name1]]]).astype(dtype))
        scores.append(np.zeros(len(indices), np.float32) if pair.scores is None else pair.scores)
    image_of = np.repeat(np.arange(len(names)), np.diff(starts))
    best_first = np.argsort(-np.concatenate(scores), kind="stable")
    set_of: dict[int, dict[int, int]] = {}  # of a keypoint: image → keypoint; only joined ones take memory
    conflicts = 0
    for ends in np.concatenate(nodes)[best_first].tolist():
        large, small = (set_of.setdefault(node, {int(image_of[node]): node}) for node in ends)
        if large is small:
            continue
        if len(large) < len(small):
            large, small = small, large
        if large.keys().isdisjoint(small):
            large.update(small)
            set_of.update(dict.fromkeys(small.values(), large))
        else:
            conflicts += 1
    distinct = {id(each): each for each in set_of.values()}.values()
    sets = [sorted(members.values()) for members in distinct if len(members) >= max(2, min_length)]
    sets.sort(key=lambda members: (-len(members), members))
    joined = np.array([node for members in sets for node in members], dtype=np.int64)
    images = np.searchsorted(starts, joined, side="right") - 1
    return Tracks(
        names=names,
        offsets=np.concatenate([[0], np.cumsum([len(members) for members in sets])]).astype(np.int64),
        images=images.astype(np.int32),
        keypoints=(joined - starts[images]).astype(np.int32),
        conflicts=conflicts,
    )


def _partners(indices: np.ndarray, count: int) -> np.ndarray:
    """(count,) the keypoint that each of one image matches in another one, or −1, from matches (K, 2)."""
    found = np.full(count, -1, np.int64)
    found[indices[:, 0]] = indices[:, 1]
    return found


def consistent_matches(
    pairs: Mapping[tuple[int, int], np.ndarray], keypoints: Sequence[np.ndarray], scales: Sequence[float]
) -> dict[tuple[int, int], np.ndarray]:
    """Which matches of each pair (K,) bool, of images i < j, are confirmed by enough third images, of those
    that can tell; `scales` are resized size / stored size.

    A third image confirms a match if both of its keypoints match the same point there. A right match is
    contradicted where another match of its keypoints is wrong, so in three images none of the three is known
    to be wrong and all are kept; the most probable ones decide then (`build_tracks`).
    """
    either = {**pairs, **{ends[::-1]: indices[:, ::-1] for ends, indices in pairs.items()}}
    partner, kept = {ends: _partners(rows, len(keypoints[ends[0]])) for ends, rows in either.items()}, {}
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


Ends = tuple[Hashable, Hashable]


class Edge(NamedTuple):
    """A verified pair."""

    indices: np.ndarray  # (K, 2) keypoints of its inliers, of the first and the second name
    rotation: np.ndarray | None  # (3, 3) from the first camera to the second, where it is known
    differing: float = 0.0  # `Repetition.differing`

    @staticmethod
    def of(matches: Matches, geometry: TwoViewGeometry) -> Edge:
        """That of a pair."""
        pose, repeated = geometry.cam1_from_cam0, geometry.repetition
        rotation, differing = None if pose is None else pose[:3, :3], repeated.differing if repeated else 0.0
        return Edge(matches.indices[geometry.inliers], rotation, differing)


def contradicted_pairs(store: Store, without: Collection[Ends] = ()) -> list[tuple[str, str]]:
    """The verified pairs of a run, names in order, that others contradict; those `without` are left out."""
    edges, refused = {}, set()
    for pair in store.pairs():
        if (ends := (pair.name0, pair.name1)) in without:
            continue
        if pair.geometry.verified:
            edges[ends] = Edge.of(pair.matches, pair.geometry)
        else:
            refused.add(ends)
    scaled = {name: store.keypoints(name) * np.array(store.scale(name)) for name in {*sum(edges, ())}}
    return contradicted(edges, scaled, refused)


MISSING = 5  # pairs that should have had these matches, or that tell together of two places
# `Repetition.differing` of what may as well be one place as not: of photos of fifteen places no pair goes,
# and 13 of 16 made pairs of rooms with equal furniture or façades are parted.
_APART = 0.03


def contradicted(
    edges: Mapping[Ends, Edge], keypoints: Mapping[Hashable, np.ndarray], refused: Collection[Ends] = ()
) -> list[Ends]:
    """The pairs, in order, of which too few loops agree; keypoints are in pixels of the resized images. Of a
    loop with one false pair all pairs look wrong, so each is judged by all its loops, the most contradicted
    first; with each that goes, its loops go, too.

    A pair without any loop that agrees goes, too, where many of those `refused` miss its matches: they are
    of one of its images and one that shows a third of the matched points of the other image or more. So do
    those between groups of images whose surroundings differ.
    """
    either, near = dict(edges), defaultdict(dict)
    for (first, second), edge in edges.items():
        turned = None if edge.rotation is None else edge.rotation.T
        either[second, first] = Edge(edge.indices[:, ::-1], turned)
        near[first][second] = near[second][first] = None

    @lru_cache(4096)  # those of all pairs of a large run would not fit into memory
    def partner(first: Hashable, second: Hashable) -> np.ndarray:
        return _partners(either[first, second].indices, len(keypoints[first]))

    loops: dict[frozenset[Hashable], bool] = {}
    for (first, second), edge in edges.items():
        common = [name for name in near[first] if name in near[second]]
        common.sort(key=lambda third: -min(len(either[end, third].indices) for end in (first, second)))
        for third in common[:16]:  # those with most inliers; more say no more
            if (names := frozenset((first, second, third))) in loops:
                continue
            ends = [partner(first, third)[edge.indices[:, 0]], partner(second, third)[edge.indices[:, 1]]]
            here, there = keypoints[third][np.stack(ends)[:, np.min(ends, axis=0) >= 0]]
            if len(here) < 8:  # which says nothing
                continue
            same = np.linalg.norm(here - there, axis=1) <= 3.0  # pixels of the resized images
            loops[names] = np.mean(same) >= 0.5
            turns = [either[ends].rotation for ends in ((third, first), (second, third), (first, second))]
            if all(turn is not None for turn in turns):  # those of single pairs are a few degrees off
                cosine = (np.trace(np.linalg.multi_dot(turns)) - 1) / 2
                loops[names] &= np.degrees(np.arccos(np.clip(cosine, -1, 1))) <= 20
    gone = []
    while True:
        votes: dict[frozenset[Hashable], list[bool]] = defaultdict(list)
        for names, agrees in loops.items():
            for ends in combinations(names, 2):
                votes[frozenset(ends)].append(agrees)
        said = {ends: votes[frozenset(ends)] for ends in edges}
        # One loop does not tell which pair is wrong; .3 of a right one's agree even if others are wrong.
        doubtful = [
            (float(np.mean(each)), -len(each), len(edges[ends].indices), ends)
            for ends, each in said.items()
            if len(each) >= 2 and np.mean(each) < 0.3
        ]
        if not doubtful:
            break
        gone.append(min(doubtful)[-1])
        loops = {names: agrees for names, agrees in loops.items() if not names.issuperset(gone[-1])}
    false = {frozenset(ends) for ends in gone}  # which are no witnesses
    for ends, edge in edges.items():
        if frozenset(ends) in false or any(said[ends]):
            continue
        missing = 0
        for here, there, rows in (*ends, edge.indices[:, 0]), (*ends[::-1], edge.indices[:, 1]):
            for third in near[here]:
                missed = (there, third) in refused or (third, there) in refused
                if missed and frozenset((here, third)) not in false:
                    shared = np.count_nonzero(partner(here, third)[rows] >= 0)
                    missing += shared >= max(30, len(rows) / 3)  # of the points, that the third shows, too
        if missing >= MISSING:
            gone.append(ends)
    false.update(map(frozenset, gone))
    kept = {ends: edge for ends, edge in edges.items() if frozenset(ends) not in false}
    return sorted(gone + _apart(kept))


def _apart(edges: Mapping[Ends, Edge]) -> list[Ends]:
    """The pairs between groups of images, which are joined, the most alike first, where what is around the
    matches of all pairs between two of them speaks for one place (as in greedy additive edge contraction,
    Keuper et al., Efficient decomposition of image and mesh graphs, ICCV 2015, section 4)."""
    alike: dict[Hashable, dict[Hashable, float]] = defaultdict(dict)
    for (first, second), edge in edges.items():
        speaks_for = (_APART - edge.differing) * np.log1p(len(edge.indices))
        alike[first][second] = alike[second][first] = speaks_for
    group, members = {name: name for name in alike}, {name: [name] for name in alike}
    for first, second in sorted(edges, key=lambda ends: -alike[ends[0]][ends[1]]):
        few, many = sorted((group[first], group[second]), key=lambda of: len(members[of]))
        if few != many and alike[few][many] > 0:
            for other, speaks_for in alike.pop(few).items():  # sums over the pairs between two groups
                del alike[other][few]
                if other != many:
                    alike[other][many] = alike[many][other] = alike[many].get(other, 0.0) + speaks_for
            group |= dict.fromkeys(members[few], many)
            members[many] += members.pop(few)
    pairs: dict[frozenset[Hashable], list[Ends]] = defaultdict(list)  # of one group, or between two
    for ends in edges:
        pairs[frozenset(group[name] for name in ends)].append(ends)
    within = [edges[ends].differing > _APART for of, found in pairs.items() if len(of) == 1 for ends in found]
    if 20 * sum(within) >= len(within):  # as of trees and blank walls, where it says nothing
        return []
    return [ends for of, found in pairs.items() if len(of) == 2 and len(found) >= MISSING for ends in found]


# Refinement of tracks. Refining each match on its own would give a keypoint a different position in each of
# its pairs. Here the reference of a track is its keypoint with the most matches. Keypoints matched to it are
# refined against it on the images, the remaining ones against those, and so on, so each keypoint has one
# position for all its pairs. Then each is refined against all other observations that it was matched to, and
# takes the mean of what they say.


class _Step(NamedTuple):
    """A batch: keypoints of one image refined against those of another. A node is a keypoint of the run."""

    pair: int
    reverse: bool  # from image 1 of the pair to image 0
    rows: np.ndarray  # (k,) of the pair's inliers
    parents: np.ndarray  # (k,) nodes
    children: np.ndarray  # (k,) nodes


def refine_run(store: Store) -> str:
    """Refine the keypoints of a run's tracks and store them, once, if its configuration asks for it; returns
    why that could not be done, or "". Images whose photo is gone keep what was refined before.

    A keypoint that is in no track, is the reference of its track, or was not accepted keeps its position.
    """
    values = store.settings.get("config", {}).get("refine")
    done = [image for image in store.images() if values is not None and image.status == "done"]
    lacking = {image.name for image in done if store.refined_keypoints(image.name) is None}
    images = [image for image in done if image.path.is_file()]
    if done and not images and next(store.rows("SELECT 1 FROM refined WHERE image < 0"), None):
        with Writer(store.folder) as writer, writer.transaction():
            writer.put_refined({})  # what has expired holds again
        return refine_run(store)
    if lacking.isdisjoint(image.name for image in images):
        return "keypoints are not refined, as no photo is in the folder" * (not images and bool(lacking))
    config = from_dict(RefineConfig, values)
    # A larger window is affordable, as a track is refined once for all its pairs.
    config = replace(config, window=max(config.window, 21))
    scales = np.array([store.scale(image.name) for image in images])
    counts = np.array([image.count for image in images], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    found = np.concatenate([store.keypoints(image.name) for image in images]).astype(np.float64)
    points, refined = found.copy(), np.zeros(len(found), dtype=bool)  # the refined positions, and which are
    variances = np.repeat(DEVIATION**2 / scales.prod(axis=1), counts)
    covariances = (variances[:, None, None] * np.eye(2)).astype(np.float32)
    numbers = {image.name: index for index, image in enumerate(images)}
    pairs = [pair for pair in verified_pairs(store) if numbers.keys() >= {pair.name0, pair.name1}]
    track, image, keypoint = build_tracks(pairs, {i.name: i.count for i in images}).table().T
    track_of = np.full(len(points), -1, dtype=np.int64)
    track_of[starts[image] + keypoint] = track
    ends = [(numbers[pair.name0], numbers[pair.name1]) for pair in pairs]
    nodes = [pair.indices + starts[list(end)] for pair, end in zip(pairs, ends, strict=True)]
    graph = _MatchGraph(nodes, [pair.scores for pair in pairs], track_of)
    zooms = (1 / np.sqrt(scales.prod(axis=1))).tolist()
    read = ImagePyramids([i.path for i in images], [i.size for i in images], zooms)

    def refine(step: _Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions of the children (k, 2), covariances with those of refined parents, which are accepted."""
        order = slice(None, None, -1 if step.reverse else 1)
        maps, known = fit_affine_maps(*(found[column] for column in nodes[step.pair][:, order].T))
        indices = np.stack([step.parents, step.children], axis=1)
        now = (points[column].astype(np.float32) for column in indices.T)
        matches = Matches(indices, *now, np.ones(len(indices), np.float32))
        given = (maps[step.rows], known[step.rows])
        matches = refine_matches(*map(read, ends[step.pair][order]), matches, config, given)
        inherited = covariances[step.parents] * refined[step.parents, None, None]
        own = matches.refinement.covariances.astype(np.float64) + inherited
        return matches.points1, own, matches.refinement.accepted

    for step in graph.steps():
        moved, own, accepted = refine(step)
        children = step.children[accepted]
        points[children], covariances[children] = moved[accepted], own[accepted]
        refined[children] = graph.done[children] = True
    # The means, weighted by the covariances. All share the noise of the keypoint's own image, so the
    # covariance of a mean is the mean of theirs, no smaller.
    information, sums = np.zeros((len(points), 2, 2)), np.zeros((len(points), 2))
    times = np.zeros(len(points), dtype=np.int64)
    for step in graph.sweep(refined):
        moved, own, accepted = refine(step)
        weights, away = np.linalg.inv(own), moved - points[step.children]
        near = np.einsum("ki,kij,kj->k", away, weights, away) < 9.0  # beyond it contradicts the others
        used = np.flatnonzero(accepted & near)
        children = step.children[used]  # each at most once in a step
        information[children] += weights[used]
        sums[children] += (weights[used] @ moved[used, :, None].astype(np.float64))[:, :, 0]
        times[children] += 1
    seen = np.flatnonzero(times)
    points[seen] = np.linalg.solve(information[seen], sums[seen, :, None])[:, :, 0]
    covariances[seen] = np.linalg.inv(information[seen] / times[seen, None, None])
    arrays = points.astype(np.float32), covariances, refined
    keypoints = {
        image.name: RefinedKeypoints(*(array[slice(*part)] for array in arrays))
        for image, part in zip(images, pairwise(starts), strict=True)
    }
    with Writer(store.folder) as writer, writer.transaction():
        writer.put_refined(keypoints)
    return ""


@dataclass
class ImagePyramids:
    """Pyramids of images by number, read when they are needed; the last ones are kept, up to a GiB."""

    paths: Sequence[Path]
    sizes: Sequence[tuple[int, int]]  # when keypoints were found
    zooms: Sequence[float]  # stored size / resized one
    has_changed: Callable[[int], bool] = lambda _: False
    kept: OrderedDict[int, ImagePyramid] = field(default_factory=OrderedDict)

    def __call__(self, number: int) -> ImagePyramid:
        """The pyramid of an image; `IntegrityError`: the file is not that of the keypoints."""
        path, size = self.paths[number], self.sizes[number]
        if number not in self.kept:
            image = read_image(path, resize=None, upright=False, keep_stored=True, max_pixels=limit_for(size))
            if image.size != size or self.has_changed(number):
                now = "{} x {} pixels".format(*image.size)
                raise IntegrityError(f"{path} has changed ({now}): put the old file back, or match again")
            self.kept[number] = ImagePyramid.of(image, self.zooms[number])
            # 4 bytes a pixel, and a third more for the levels of the pyramid
            while len(self.kept) > 2 and sum(np.prod(self.sizes[i]) for i in self.kept) * 16 / 3 > 1 << 30:
                self.kept.popitem(last=False)
        self.kept.move_to_end(number)
        return self.kept[number]


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
        self.done = np.zeros(len(track_of), dtype=bool)  # others may be refined against them
        self.done[references] = True

    def steps(self) -> Iterator[_Step]:
        """Steps until every keypoint is refined or its three best matches were tried in vain."""
        count = len(self._rows)
        parents, children = (np.concatenate(self._nodes.T[order]) for order in ([0, 1], [1, 0]))
        best_first = np.arange(2 * count).reshape(2, count).T.ravel()
        untried, tries = np.ones(2 * count, dtype=bool), np.zeros(len(self.done), dtype=np.int64)
        while True:
            usable = untried & self.done[parents] & ~self.done[children] & (tries[children] < 3)
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
                chosen = self.done[parents] & refined[children]
                if chosen.any():
                    where = rows[chosen]
                    pair = int(self._pairs[where[0]])
                    yield _Step(pair, reverse, self._rows[where], parents[chosen], children[chosen])
