"""Pairs that other images contradict: going round three images leads to other points, or to another rotation.

Zach, Klopschitz and Pollefeys, Disambiguating visual relations using loop constraints, CVPR 2010: of a loop
with one false pair all pairs look wrong, so that each is judged by all its loops, the most contradicted
first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from matcher.collection.store import Store

_SAME_POINT = 3.0  # pixels of the resized images
_SEEN = 8  # matches of a pair whose ends both have a partner in the third image; fewer say nothing
_AGREE = 0.5  # share of them that lead to one point
_ROTATION = 20.0  # degrees that the rotations of a loop may miss; those of single pairs are a few degrees off
_LOOPS = 2  # that tell; of one loop no pair is known to be the wrong one
_CONFIRMED = 0.3  # share of a right pair's loops that agree, even if other pairs are wrong
_NEIGHBOURS = 16  # third images of a pair, those with most inliers; more say no more

Ends = tuple[str, str]


class Edge(NamedTuple):
    """A verified pair."""

    indices: np.ndarray  # (K, 2) keypoints of its inliers, of the first and the second name
    rotation: np.ndarray | None  # (3, 3) from the first camera to the second, where it is known


def contradicted_pairs(store: Store, without: Collection[Ends] = ()) -> list[Ends]:
    """The verified pairs of a run, names in order, that its other pairs contradict.

    Args:
        store: the run.
        without: pairs that are not looked at.

    Raises:
        IntegrityError: the store is damaged.
    """
    edges = {}
    for pair in store.pairs():
        if (ends := (pair.name0, pair.name1)) in without or not pair.geometry.verified:
            continue
        pose = pair.geometry.cam1_from_cam0
        rotation = None if pose is None else pose[:3, :3]
        edges[ends] = Edge(pair.matches.indices[pair.geometry.inliers], rotation)
    scaled = {name: store.keypoints(name) * np.array(store.scale(name)) for name in {*sum(edges, ())}}
    return contradicted(edges, scaled)


def contradicted(edges: Mapping[Ends, Edge], keypoints: Mapping[str, np.ndarray]) -> list[Ends]:
    """The pairs, in order, that are contradicted.

    Args:
        edges: by the names of a pair, in any order, each pair once.
        keypoints: (N, 2) of every image, pixels of the resized image.
    """
    directed: dict[str, dict[str, Edge]] = defaultdict(dict)
    for (first, second), edge in edges.items():
        turned = None if edge.rotation is None else edge.rotation.T
        directed[first][second] = edge
        directed[second][first] = Edge(edge.indices[:, ::-1], turned)
    partner = {
        (one, other): _partners(edge.indices, len(keypoints[one]))
        for one, others in directed.items()
        for other, edge in others.items()
    }
    loops: dict[frozenset[str], bool] = {}
    for first, second in edges:
        common = [name for name in directed[first] if name in directed[second]]
        common.sort(key=lambda k: -min(len(directed[first][k].indices), len(directed[second][k].indices)))
        for third in common[:_NEIGHBOURS]:
            names = frozenset((first, second, third))
            if names not in loops:
                ways = directed[first][second], directed[second][third], directed[first][third]
                ends = partner[first, third], partner[second, third]
                if (found := _agrees(*ways, *ends, keypoints[third])) is not None:
                    loops[names] = found
    return sorted(_voted_out(edges, loops))


def _partners(indices: np.ndarray, count: int) -> np.ndarray:
    """(N,) the keypoint that each of an image matches, or −1."""
    found = np.full(count, -1, np.int64)
    found[indices[:, 0]] = indices[:, 1]
    return found


def _agrees(
    along: Edge, onward: Edge, direct: Edge, by_first: np.ndarray, by_second: np.ndarray, points: np.ndarray
) -> bool | None:
    """Whether the way from one image over a second to a third is the direct one; None where little tells."""
    ends = np.stack([by_first[along.indices[:, 0]], by_second[along.indices[:, 1]]])
    here, there = points[ends[:, (ends >= 0).all(axis=0)]]
    if len(here) < _SEEN:
        return None
    if all(each.rotation is not None for each in (along, onward, direct)):
        missed = direct.rotation.T @ onward.rotation @ along.rotation
        if np.degrees(np.arccos(np.clip((np.trace(missed) - 1) / 2, -1, 1))) > _ROTATION:
            return False
    return bool(np.mean(np.linalg.norm(here - there, axis=1) <= _SAME_POINT) >= _AGREE)


def _voted_out(edges: Mapping[Ends, Edge], loops: dict[frozenset[str], bool]) -> list[Ends]:
    """The pairs of which too few loops agree; with each that goes, its loops go, too."""
    gone, loops = [], dict(loops)
    while True:
        votes: dict[frozenset[str], list[bool]] = defaultdict(list)
        for names, agrees in loops.items():
            for name in names:
                votes[names - {name}].append(agrees)
        doubtful = []
        for ends, edge in edges.items():
            said = votes.get(frozenset(ends), [])
            if len(said) >= _LOOPS and np.mean(said) < _CONFIRMED:
                doubtful.append((float(np.mean(said)), -len(said), len(edge.indices), ends))
        if not doubtful:
            return gone
        worst = min(doubtful)[-1]
        gone.append(worst)
        loops = {names: agrees for names, agrees in loops.items() if not names.issuperset(worst)}
