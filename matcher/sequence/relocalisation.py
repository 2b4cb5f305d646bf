"""Which keyframe shows the same place: candidates by a global descriptor, verified by matching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from matcher.data.features import Features
from matcher.data.matches import Matches
from matcher.match.retrieval import Vocabulary, learn_vocabulary
from matcher.match.turns import STEERABLE, best_turn, rotated_descriptors, turned
from matcher.sequence.frames import FrameLinks
from matcher.sequence.keyframes import KeptFrame
from matcher.sequence.linking import MIN_LINKS, Linker

MatchPairs = Callable[[Sequence[tuple[Features, Features]]], list[Matches]]
_WORDS, _SAMPLE = 64, 4096  # enough for the few dozen keyframes of a window, and learned in milliseconds


class KeyframeIndex:
    """Global descriptors (VLAD) of keyframes, over a vocabulary learned from those that are kept.

    The vocabulary is learned when it is first asked for, and again when half of what it came from is gone.
    """

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._learned_from: frozenset[int] = frozenset()
        self._described: dict[int, np.ndarray] = {}  # keyframe → global descriptor

    def candidates(self, frame: KeptFrame, keyframes: Sequence[KeptFrame], count: int) -> list[KeptFrame]:
        """At most `count` of the keyframes, the one that looks most like the frame first."""
        keyframes = [keyframe for keyframe in keyframes if len(keyframe.descriptors)]
        if not keyframes or len(frame.descriptors) == 0:
            return []
        self._learn(keyframes)
        present = {keyframe.index for keyframe in keyframes}
        self._described = {index: row for index, row in self._described.items() if index in present}
        for keyframe in keyframes:
            if keyframe.index not in self._described:
                self._described[keyframe.index] = self._vocabulary.describe(keyframe.descriptors)
        shown = rotated_descriptors(frame.descriptors, frame.features.kind)
        queries = np.stack([self._vocabulary.describe(position) for position in shown])
        similarity = np.stack([queries @ self._described[k.index] for k in keyframes]).max(1)
        return [keyframes[i] for i in np.argsort(-similarity, kind="stable")[:count]]

    def _learn(self, keyframes: Sequence[KeptFrame]) -> None:
        present = frozenset(keyframe.index for keyframe in keyframes)
        if self._vocabulary is not None and 2 * len(present & self._learned_from) >= len(present):
            return
        share = max(1, _SAMPLE // len(keyframes))
        rng = np.random.default_rng(0)
        samples = [k.descriptors[rng.permutation(len(k.descriptors))[:share]] for k in keyframes]
        self._vocabulary = learn_vocabulary(np.concatenate(samples), words=_WORDS)
        self._learned_from, self._described = present, {}


def verify_candidates(
    match: MatchPairs, linker: Linker, frame: KeptFrame, candidates: Sequence[KeptFrame]
) -> tuple[KeptFrame, FrameLinks] | None:
    """The candidate that most points of the frame agree with in one epipolar geometry, and the links to it.

    None where no candidate has `MIN_LINKS` consistent ones.
    """
    if not candidates or len(frame.keypoints) == 0:
        return None
    pairs = [(candidate.features, frame.features) for candidate in candidates]
    best: tuple[KeptFrame, FrameLinks] | None = None
    most = MIN_LINKS - 1
    for candidate, matches in zip(candidates, match(pairs), strict=True):
        links, _ = linker.verify(candidate, _facing(candidate, frame), matches)
        if (agreeing := int(links.consistent.sum())) > most:
            best, most = (candidate, links), agreeing
    return best


def _facing(candidate: KeptFrame, frame: KeptFrame) -> KeptFrame:
    """The frame with descriptors turned as the candidate is."""
    if frame.features.kind != STEERABLE or 0 in (len(candidate.descriptors), len(frame.descriptors)):
        return frame
    turn = best_turn(candidate.descriptors, frame.descriptors)
    return replace(frame, descriptors=turned(frame.descriptors, turn))
