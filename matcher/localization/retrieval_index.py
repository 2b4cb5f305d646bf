"""Which images of a map look most like a photo: one global descriptor per image, kept beside the run."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from matcher.collection.run_files import INDEX as FILE
from matcher.data.features import Features
from matcher.files import write_whole
from matcher.match.retrieval import (
    LENGTH,
    WORDS,
    Vocabulary,
    collection_vocabulary,
    global_descriptor,
    strongest_descriptors,
)
from matcher.match.turns import rotated_descriptors

_BLOCK = 128  # rows compared at once, so that they fit a core's cache
# In large maps, images are compared by sums of neighbouring components first, and this many of them exactly.
_SKETCH, _SHORTLIST = 1024, 512
_OVERHEAD = 1 << 16  # bytes of a file beside its arrays
_LONGEST_DESCRIPTOR = 4096  # values


@dataclass(frozen=True, eq=False)
class RetrievalIndex:
    """Global descriptors of the images of a run; a photo is compared in all orientations."""

    vocabulary: Vocabulary | None  # None: no image has any keypoint
    table: np.ndarray  # (I, G) float16 of unit length, zeros for images without keypoints
    kind: str  # of the features

    @classmethod
    def build(cls, names: Sequence[str], features: Callable[[str], Features]) -> RetrievalIndex:
        """The index of these images; their features are read twice and not kept."""
        vocabulary, kind = collection_vocabulary(names, features)
        if vocabulary is None:
            return cls(None, np.zeros((len(names), 1), np.float16), kind)
        rows = [global_descriptor(vocabulary, features(name)) for name in names]
        return cls(vocabulary, np.array(rows, dtype=np.float16), kind)

    def similar(self, features: Features, k: int) -> tuple[np.ndarray, np.ndarray]:
        """(k,) rows of the most similar images, best first, and their similarity, at most 1."""
        if self.vocabulary is None or not bool(features.mask.any()):
            return np.zeros(0, np.int64), np.zeros(0, np.float32)
        described = [
            self.vocabulary.describe(turned)
            for turned in rotated_descriptors(strongest_descriptors(features), self.kind)
        ]
        queries = np.array(described, dtype=np.float32)
        rows = np.arange(len(self.table))
        if len(rows) > 4 * max(_SHORTLIST, k) and self.table.shape[1] % _SKETCH == 0:
            roughly = (self._sketches @ _sketch(queries).T).max(axis=1)
            rows = np.sort(np.argpartition(-roughly, max(_SHORTLIST, k))[: max(_SHORTLIST, k)])
        found = [
            (self.table[rows[start : start + _BLOCK]].astype(np.float32) @ queries.T).max(axis=1)
            for start in range(0, len(rows), _BLOCK)
        ]
        similarity = np.concatenate(found)
        best = np.argsort(-similarity, kind="stable")[:k]
        return rows[best], similarity[best]

    @cached_property
    def _sketches(self) -> np.ndarray:
        """(I, 1024) float32: the components have random signs already, so sums of them keep similarities."""
        blocks = [_sketch(self.table[i : i + _BLOCK]) for i in range(0, len(self.table), _BLOCK)]
        return np.concatenate(blocks)


def _sketch(rows: np.ndarray) -> np.ndarray:
    """(N, 1024) sums of neighbouring components of global descriptors (N, G)."""
    return rows.astype(np.float32).reshape(len(rows), _SKETCH, -1).sum(axis=2)


def open_index(
    folder: Path, names: Sequence[str], digests: Sequence[str], features: Callable[[str], Features]
) -> RetrievalIndex:
    """The index of a run, read from its folder, or made and kept there where it can be written.

    Args:
        folder: of the run.
        names: its images.
        digests: of their content; an index of others is made again.
        features: the features of an image.
    """
    wanted = hashlib.sha256("\n".join(map(" ".join, zip(names, digests, strict=True))).encode()).hexdigest()
    path = folder / FILE
    try:
        if (index := _read(path, wanted, len(names))) is not None:
            return index
    except (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile, zlib.error):
        pass  # absent or damaged: it can be made again
    index = RetrievalIndex.build(names, features)
    _keep(index, path, wanted)
    return index


def _read(path: Path, of: str, images: int) -> RetrievalIndex | None:
    """A kept index, None if it is of other images; errors of many kinds where it is damaged."""
    most = images * LENGTH * 2 + WORDS * _LONGEST_DESCRIPTOR * (4 + 8 + 4) + _OVERHEAD
    with np.load(path, allow_pickle=False) as stored:
        if sum(member.file_size for member in stored.zip.infolist()) > most:
            raise ValueError("it would unpack to more than an index of these images takes")
        if str(stored["of"]) != of:
            return None
        words, target, sign, table = (stored[name] for name in ("words", "target", "sign", "table"))
        length, kind = int(stored["length"]), str(stored["kind"])
    if table.shape != (images, length) or not np.isfinite(table).all():
        raise ValueError("its table is not one of these images")
    if not words.size:
        return RetrievalIndex(None, table, kind)
    if words.ndim != 2 or not np.isfinite(words).all():
        raise ValueError("its words are none")
    if (target.shape, sign.shape) != ((words.size,), (words.size,)) or not (np.abs(sign) == 1).all():
        raise ValueError("its words are not folded as they should be")
    if target.dtype.kind != "i" or not ((target >= 0) & (target < length)).all():
        raise ValueError("its words are folded out of the table")
    return RetrievalIndex(Vocabulary(words, target, sign, length), table, kind)


def _keep(index: RetrievalIndex, path: Path, of: str) -> None:
    """Write an index beside its run; a folder that cannot be written costs time only."""
    own, buffer = index.vocabulary, io.BytesIO()
    words = np.zeros((0, 0), np.float32) if own is None else own.words
    target, sign = (np.zeros(0), np.zeros(0)) if own is None else (own.target, own.sign)
    arrays = dict(words=words, target=target, sign=sign, table=index.table)
    np.savez(buffer, length=index.table.shape[1], kind=index.kind, of=of, **arrays)
    try:
        write_whole(path, buffer.getvalue())
    except OSError:
        return
