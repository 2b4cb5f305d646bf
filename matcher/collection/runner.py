"""Processes what is waiting in a store: every image once, every pair once, in small commits.

A single process writes, whichever engine does the work. Committed results survive if this process dies;
uncommitted ones are computed again by the next run, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from matcher.collection.jobs import ExtractedImage, Outcome, PairFailure
from matcher.collection.planning import (
    extract_jobs,
    fail_pairs_of_failed_images,
    images_to_extract,
    match_jobs,
)
from matcher.collection.records import Counts
from matcher.collection.schema import DONE
from matcher.collection.sources import FeatureSource
from matcher.collection.workers import Engine
from matcher.collection.writer import EncodedPair, ImageFacts, Writer
from matcher.data.tensors import to_numpy
from matcher.errors import ImageError

_COMMIT_SECONDS = 0.5
_COMMIT_ITEMS = 512
_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class StageProgress:
    """Progress of one stage of a run; only what has reached the disk counts."""

    stage: str  # "extract", "choose" (which pairs to match) or "match"
    done: int  # failed ones included
    failed: int
    total: int


@dataclass(frozen=True)
class RunReport:
    """What a run did."""

    extracted: int  # images
    matched: int  # pairs, failed ones included
    crashes: int  # worker processes that died and were replaced
    counts: Counts  # of the store afterwards

    @property
    def all_well(self) -> bool:
        """Whether nothing failed, in this run or an earlier one."""
        return not (self.crashes or self.counts.images_failed or self.counts.pairs_failed)


OnProgress = Callable[[StageProgress], None]


def extract(
    writer: Writer,
    engine: Engine,
    source: FeatureSource,
    *,
    everything: bool,
    batch: int,
    on_progress: OnProgress,
) -> int:
    """Extract the waiting images of waiting pairs, or of `everything`; returns how many were tried.

    Raises:
        OSError: the disk is full; committed results are kept.
    """
    names = images_to_extract(writer, everything=everything)
    if names:
        on_progress(StageProgress("extract", 0, 0, len(names)))
        jobs, stage = extract_jobs(names, batch), _Extraction(writer, source)
        _commit_in_groups(engine.run(jobs), stage, len(names), on_progress)
    fail_pairs_of_failed_images(writer)
    return len(names)


def match(writer: Writer, engine: Engine, *, batch: int, on_progress: OnProgress) -> int:
    """Match every waiting pair; returns how many were processed.

    Raises:
        ImageError: there are pairs, but no image could be used.
        OSError: the disk is full; committed results are kept.
    """
    counts = writer.store.counts()
    if counts.images_failed and not counts.images_done:
        failed = next(image for image in writer.store.images() if image.status == "failed")
        raise ImageError(f"no image of {writer.store.image_folder} could be used; {failed.reason}")
    if counts.pairs_waiting:
        on_progress(StageProgress("match", 0, 0, counts.pairs_waiting))
        _commit_in_groups(
            engine.run(match_jobs(writer, batch)), _Matching(writer), counts.pairs_waiting, on_progress
        )
    return counts.pairs_waiting


def _commit_in_groups(
    outcomes: Iterator[Outcome | None], stage: _Extraction | _Matching, total: int, on_progress: OnProgress
) -> None:
    """Commit results in small groups, including those available when the run is interrupted."""
    pending: list[Outcome] = []
    last, size = monotonic(), 0
    try:
        for outcome in outcomes:
            if outcome is not None:
                pending.append(outcome)
                size += stage.size(outcome)
            late = monotonic() - last >= _COMMIT_SECONDS
            if pending and (late or len(pending) >= _COMMIT_ITEMS or size >= _COMMIT_BYTES):
                stage.commit(pending)
                pending, last, size = [], monotonic(), 0
                on_progress(stage.progress(total))
        if pending:
            stage.commit(pending)
            pending = []
            on_progress(stage.progress(total))
    except BaseException:
        if pending:
            with suppress(Exception):
                stage.commit(pending)
        raise


class _Matching:
    """Writes outcomes of pairs."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._done, self._failed = writer, 0, 0

    def commit(self, outcomes: Iterable[Outcome]) -> None:
        outcomes = list(outcomes)
        with self._writer.transaction():
            self._writer.put_pairs(o for o in outcomes if isinstance(o, EncodedPair))
            self._writer.fail_pairs(o for o in outcomes if isinstance(o, PairFailure))
        self._done += len(outcomes)
        self._failed += sum(isinstance(o, PairFailure) for o in outcomes)

    def progress(self, total: int) -> StageProgress:
        return StageProgress("match", self._done, self._failed, total)

    @staticmethod
    def size(outcome: EncodedPair | PairFailure) -> int:
        return len(outcome.data) if isinstance(outcome, EncodedPair) else 0


class _Extraction:
    """Writes outcomes of images."""

    def __init__(self, writer: Writer, source: FeatureSource) -> None:
        self._writer, self._source, self._done, self._failed = writer, source, 0, 0

    def commit(self, outcomes: Iterable[ExtractedImage]) -> None:
        outcomes = list(outcomes)
        with self._writer.transaction():
            for outcome in outcomes:
                self._put(outcome)
        self._done += len(outcomes)
        self._failed += sum(outcome.found is None for outcome in outcomes)

    def _put(self, outcome: ExtractedImage) -> None:
        writer, found = self._writer, outcome.found
        number = writer.number(outcome.name)
        had = writer.execute("SELECT sha256 FROM images WHERE id = ? AND status = ?", (number, DONE))
        if found is None:
            if had:  # its descriptors were deleted and the image is gone: what was matched stays
                pairs = writer.execute(
                    "SELECT image0, image1 FROM waiting WHERE ? IN (image0, image1)", [number]
                )
                writer.fail_pairs((*pair, f"{outcome.name}: {outcome.reason}") for pair in pairs)
            else:
                facts = ImageFacts("", self._source.stamp(outcome.name))
                writer.fail_image(outcome.name, outcome.reason, facts)
            return
        if had and not (
            had[0][0] == found.sha256
            and np.array_equal(writer.store.keypoints(outcome.name), to_numpy(found.features.keypoints))
        ):
            writer.forget([outcome.name])  # its pairs name keypoints that are no more
        facts = ImageFacts(found.sha256, found.stamp)
        writer.put_features(outcome.name, found.features, outcome.record, facts)

    def progress(self, total: int) -> StageProgress:
        return StageProgress("extract", self._done, self._failed, total)

    @staticmethod
    def size(outcome: ExtractedImage) -> int:
        return len(outcome.record)
