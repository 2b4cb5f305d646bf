"""Pairs that other images contradict: going round three images leads to other points, or to another rotation.

Zach, Klopschitz and Pollefeys, Disambiguating visual relations using loop constraints, CVPR 2010: of a loop
with one false pair all pairs look wrong, so that each is judged by all its loops, the most contradicted
first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from matcher.collection.store import Store
from matcher.types import Matches, TwoViewGeometry

Ends = tuple[Hashable, Hashable]


class Edge(NamedTuple):
    """A verified pair."""

    indices: np.ndarray  # (K, 2) keypoints of its inliers, of the first and the second name
    rotation: np.ndarray | None  # (3, 3) from the first camera to the second, where it is known

    @staticmethod
    def of(matches: Matches, geometry: TwoViewGeometry) -> Edge:
        """That of a pair."""
        pose = geometry.cam1_from_cam0
        return Edge(matches.indices[geometry.inliers], None if pose is None else pose[:3, :3])


def contradicted_pairs(store: Store, without: Collection[Ends] = ()) -> list[tuple[str, str]]:
    """The verified pairs of a run, names in order, that others contradict; those `without` are left out."""
    edges = {}
    for pair in store.pairs():
        if (ends := (pair.name0, pair.name1)) not in without and pair.geometry.verified:
            edges[ends] = Edge.of(pair.matches, pair.geometry)
    scaled = {name: store.keypoints(name) * np.array(store.scale(name)) for name in {*sum(edges, ())}}
    return contradicted(edges, scaled)


def contradicted(edges: Mapping[Ends, Edge], keypoints: Mapping[Hashable, np.ndarray]) -> list[Ends]:
    """The pairs, in order, that are contradicted.

    Args:
        edges: by the names (or numbers) of a pair, in any order, each pair once.
        keypoints: (N, 2) of every image, pixels of the resized image.
    """
    either, near = dict(edges), defaultdict(dict)
    for (first, second), edge in edges.items():
        turned = None if edge.rotation is None else edge.rotation.T
        either[second, first] = Edge(edge.indices[:, ::-1], turned)
        near[first][second] = near[second][first] = None

    @lru_cache(4096)  # those of all pairs of a large run would not fit into memory
    def partner(first: Hashable, second: Hashable) -> np.ndarray:
        return partners(either[first, second].indices, len(keypoints[first]))

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
            turns = (either[ends].rotation for ends in ((first, third), (second, third), (first, second)))
            same = np.linalg.norm(here - there, axis=1) <= 3.0  # pixels of the resized images
            loops[names] = _closes(*turns) and np.mean(same) >= 0.5
    return sorted(_voted_out(edges, loops))


def partners(indices: np.ndarray, count: int) -> np.ndarray:
    """(count,) the keypoint that each of one image matches in another one, or −1, from matches (K, 2)."""
    found = np.full(count, -1, np.int64)
    found[indices[:, 0]] = indices[:, 1]
    return found


def _closes(direct: np.ndarray | None, onward: np.ndarray | None, along: np.ndarray | None) -> bool:
    """Whether rotations lead the same way directly and over a second image, as far as they are known."""
    if direct is None or onward is None or along is None:
        return True
    missed = direct.T @ onward @ along
    # Rotations of single pairs are a few degrees off.
    return np.degrees(np.arccos(np.clip((np.trace(missed) - 1) / 2, -1, 1))) <= 20


def _voted_out(edges: Mapping[Ends, Edge], loops: dict[frozenset[Hashable], bool]) -> list[Ends]:
    """The pairs of which too few loops agree; with each that goes, its loops go, too."""
    gone = []
    while True:
        votes: dict[frozenset[Hashable], list[bool]] = defaultdict(list)
        for names, agrees in loops.items():
            for name in names:
                votes[names - {name}].append(agrees)
        doubtful = []
        for ends, edge in edges.items():
            said = votes.get(frozenset(ends), [])
            # One loop does not tell which pair is wrong; .3 of a right one's agree even if others are wrong.
            if len(said) >= 2 and np.mean(said) < 0.3:
                doubtful.append((float(np.mean(said)), -len(said), len(edge.indices), ends))
        if not doubtful:
            return gone
        worst = min(doubtful)[-1]
        gone.append(worst)
        loops = {names: agrees for names, agrees in loops.items() if not names.issuperset(worst)}
