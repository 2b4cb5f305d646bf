"""Image retrieval: one global descriptor per image, aggregated from its local ones; no download.

VLAD (Jégou et al., Aggregating local descriptors into a compact image representation, CVPR 2010) over a
vocabulary learned from the collection itself, every word's residual normalised by itself (Arandjelović and
Zisserman, All about VLAD, CVPR 2013), folded by signed hashing (Weinberger et al., Feature hashing for large
scale multitask learning, ICML 2009) to a length that a million images can afford.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from matcher.errors import UsageError
from matcher.match.steering import STEERABLE_KIND, TURNS, rotated_descriptors
from matcher.types import Features, to_numpy

WORDS = 512
LENGTH = 8192  # of a global descriptor; WORDS · D where that is less
STRONGEST = 1024  # keypoints used per image; more of them find fewer of the true pairs
_ROWS = 4096  # compared at once


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words that local descriptors are assigned to, and how their residuals are folded."""

    words: np.ndarray  # (W, D) float32
    target: np.ndarray  # (W · D,) int64 where each residual is added
    sign: np.ndarray  # (W · D,) float32, +1 or −1
    length: int

    def describe(self, descriptors: np.ndarray) -> np.ndarray:
        """Local descriptors (N, D) → a global one (length,) of unit length; zeros without any."""
        count, size = self.words.shape
        if descriptors.ndim != 2 or descriptors.shape[1] != size:
            raise UsageError(f"descriptors of size {size} are needed, not of shape {descriptors.shape}")
        local = _unit_rows(descriptors)
        nearest = _nearest_word(local, self.words)
        residuals = _sum_by(local - self.words[nearest], nearest, count)
        residuals = _unit_rows(residuals).ravel() * self.sign
        folded = np.bincount(self.target, weights=residuals, minlength=self.length)
        return (folded / max(float(np.linalg.norm(folded)), 1e-12)).astype(np.float32)


def learn_vocabulary(sample: np.ndarray) -> Vocabulary:
    """A vocabulary by k-means on a sample (S, D) of local descriptors, S > 0."""
    rng = np.random.default_rng(0)
    local = _unit_rows(sample)
    words = min(WORDS, max(1, len(local) // 16))  # of fewer points words would be the points themselves
    centres = local[rng.choice(len(local), words, replace=False)]
    for _ in range(8):
        nearest = _nearest_word(local, centres)
        counts = np.bincount(nearest, minlength=len(centres))
        means = _sum_by(local, nearest, len(centres)) / np.maximum(counts, 1)[:, None]
        centres = np.where(counts[:, None] > 0, means, local[rng.choice(len(local), len(centres))])
        centres = centres.astype(np.float32)
    length = min(LENGTH, centres.size)
    if length == centres.size:
        target, sign = np.arange(length), np.ones(length, np.float32)
    else:
        target = rng.integers(0, length, centres.size)
        sign = rng.choice(np.array([-1, 1], np.float32), centres.size)
    return Vocabulary(centres, target, sign, length)


def collection_vocabulary(
    names: Sequence[str], features: Callable[[str], Features]
) -> tuple[Vocabulary | None, str]:
    """A vocabulary of a sample of a collection's images, None without any keypoint, and the features' kind;
    `UsageError`: descriptors of several sizes."""
    rng = np.random.default_rng(0)
    chosen = np.linspace(0, len(names) - 1, min(len(names), 512)).astype(int)
    share = -(-65_536 // max(len(chosen), 1))  # of so many points the vocabulary is learned
    samples, kinds = [], set()
    for index in chosen.tolist():
        described = features(names[index])
        kinds.add(described.kind)
        local = strongest_descriptors(described)
        samples.append(local[rng.permutation(len(local))[:share]])
    samples = [sample for sample in samples if len(sample)]
    if len({sample.shape[1] for sample in samples}) > 1:
        raise UsageError("the images have descriptors of several sizes; extract them with one front end")
    kind = kinds.pop() if len(kinds) == 1 else "any"
    return (learn_vocabulary(np.concatenate(samples)) if samples else None), kind


def similar_pairs(
    names: Sequence[str], features: Callable[[str], Features], k: int
) -> Iterator[tuple[str, str]]:
    """Each image with the `k` that look most like it, every pair once, in the order of `names`.

    Features are read twice, for the vocabulary and for the descriptors, and not kept; 16 kB per image are, or
    64 kB where descriptors can be rotated: then images are compared in all four orientations. An image
    without keypoints is in no pair. `UsageError`: k below 1, or descriptors of several sizes.
    """
    if k < 1:
        raise UsageError(f"similar pairs need at least 1 neighbour, not {k}")
    names = list(dict.fromkeys(names))
    vocabulary, kind = collection_vocabulary(names, features)
    if vocabulary is None:
        return
    tables = np.zeros((TURNS if kind == STEERABLE_KIND else 1, len(names), vocabulary.length), np.float16)
    for index, name in enumerate(names):
        local = strongest_descriptors(features(name))
        for table, position in zip(tables, rotated_descriptors(local, kind), strict=True):
            if len(local):
                table[index] = vocabulary.describe(position)
    for first, second in neighbour_pairs(tables[0], k, tables[1:]).tolist():
        yield names[first], names[second]


def neighbour_pairs(
    table: np.ndarray, k: int, turned: Sequence[np.ndarray] = (), *, block: int = _ROWS
) -> np.ndarray:
    """(P, 2) int64 pairs i < j of rows where one is among the `k` most similar of the other, sorted.

    Rows (I, G) are global descriptors of unit length, those of zeros in no pair; of `turned` ones, the same
    images in other orientations, the most similar counts. Only memory depends on `block`.
    """
    usable = np.flatnonzero(np.any(table != 0, axis=1))
    k = min(k, len(usable) - 1)
    if k < 1:
        return np.zeros((0, 2), np.int64)
    keys = []
    for start in range(0, len(usable), block):
        rows = usable[start : start + block]
        best = _most_similar((table, *turned), rows, usable, k, block)
        ends = np.stack([np.repeat(rows, k), best.ravel()])
        keys.append(ends.min(axis=0) * len(table) + ends.max(axis=0))
    unique = np.unique(np.concatenate(keys))
    return np.column_stack(np.divmod(unique, len(table)))


def _most_similar(
    tables: Sequence[np.ndarray], rows: np.ndarray, usable: np.ndarray, k: int, step: int
) -> np.ndarray:
    """(R, k) the rows of the first table most similar to each of `rows`, itself left out, block by block."""
    queries = [table[rows].astype(np.float32) for table in tables]
    similarity = np.zeros((len(rows), 0), np.float32)
    index = np.zeros((len(rows), 0), np.int64)
    for start in range(0, len(usable), step):
        columns = usable[start : start + step]
        others = tables[0][columns].astype(np.float32).T
        block = np.maximum.reduce([query @ others for query in queries])
        block[rows[:, None] == columns] = -np.inf
        similarity = np.concatenate([similarity, block], axis=1)
        index = np.concatenate([index, np.broadcast_to(columns, block.shape)], axis=1)
        kept = np.argpartition(-similarity, min(k, similarity.shape[1]) - 1, axis=1)[:, :k]
        similarity, index = np.take_along_axis(similarity, kept, 1), np.take_along_axis(index, kept, 1)
    return index


def strongest_descriptors(features: Features) -> np.ndarray:
    """(n, D) float32 descriptors of the strongest keypoints."""
    scores, mask = to_numpy(features.scores), to_numpy(features.mask)
    order = np.argsort(-np.where(mask, scores, -np.inf), kind="stable")[: min(STRONGEST, int(mask.sum()))]
    return to_numpy(features.descriptors).astype(np.float32)[order]


def _unit_rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _nearest_word(local: np.ndarray, words: np.ndarray) -> np.ndarray:
    half = np.square(words).sum(axis=1) / 2
    parts = [local[start : start + _ROWS] @ words.T - half for start in range(0, len(local), _ROWS)]
    return np.concatenate([part.argmax(axis=1) for part in parts]) if parts else np.zeros(0, np.int64)


def _sum_by(rows: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
    """(groups, D) sums of the rows of each group."""
    order = np.argsort(group, kind="stable")
    used, first = np.unique(group[order], return_index=True)
    sums = np.zeros((groups, rows.shape[1]), np.float32)
    if len(used):
        sums[used] = np.add.reduceat(rows[order], first, axis=0)
    return sums
