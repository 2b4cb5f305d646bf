"""Carries out what waits in a store: every picture once, every pair once, results in small commits.

One process writes, whatever does the work. What was committed survives the death of this process at any
moment; what was not is done again by the next run, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from matcher.collection.planning import (
    extract_jobs,
    fail_pairs_of_failed_pictures,
    match_jobs,
    pictures_to_extract,
)
from matcher.collection.records import Counts
from matcher.collection.sources import Source
from matcher.collection.workbench import ExtractedPicture, FailedMatch, Outcome
from matcher.collection.workers import Engine
from matcher.collection.writer import DONE, EncodedPair, ImageFacts, Writer
from matcher.errors import ImageError

_COMMIT_SECONDS = 0.5
_COMMIT_ITEMS = 512
_COMMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Progress:
    """How far one stage of a run is; only what has reached the disk counts."""

    stage: str  # "extract" or "match"
    done: int  # failed ones included
    failed: int
    total: int


@dataclass(frozen=True)
class RunReport:
    """What a run did."""

    extracted: int  # pictures
    matched: int  # pairs, failed ones included
    crashes: int  # worker processes that died and were replaced
    counts: Counts  # of the store afterwards

    @property
    def all_well(self) -> bool:
        """Nothing failed, in this run or an earlier one."""
        return not (self.crashes or self.counts.images_failed or self.counts.pairs_failed)


Tell = Callable[[Progress], None]


def extract(writer: Writer, engine: Engine, source: Source, *, everything: bool, tell: Tell) -> int:
    """Features of the pictures that wait and whose pairs wait, or of `everything`; how many were tried.

    Raises:
        OSError: the disk is full; what was committed stays.
    """
    names = pictures_to_extract(writer, everything=everything)
    if names:
        tell(Progress("extract", 0, 0, len(names)))
        _settle(engine.run(extract_jobs(names)), _Extraction(writer, source), len(names), tell)
    fail_pairs_of_failed_pictures(writer)
    return len(names)


def match(writer: Writer, engine: Engine, *, batch: int, tell: Tell) -> int:
    """Every pair that waits; how many were done.

    Raises:
        ImageError: there are pairs, and no picture at all could be used.
        OSError: the disk is full; what was committed stays.
    """
    counts = writer.store.counts()
    if counts.images_failed and not counts.images_done:
        failed = next(image for image in writer.store.images() if image.status == "failed")
        raise ImageError(f"no picture of {writer.store.image_folder} could be used; {failed.reason}")
    if counts.pairs_waiting:
        tell(Progress("match", 0, 0, counts.pairs_waiting))
        _settle(engine.run(match_jobs(writer, batch)), _Matching(writer), counts.pairs_waiting, tell)
    return counts.pairs_waiting


def _settle(
    outcomes: Iterator[Outcome | None], stage: _Extraction | _Matching, total: int, tell: Tell
) -> None:
    """Commit outcomes in small groups, also those that are at hand when the run is interrupted."""
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
                tell(stage.progress(total))
        if pending:
            stage.commit(pending)
            pending = []
            tell(stage.progress(total))
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
            self._writer.fail_pairs(o for o in outcomes if isinstance(o, FailedMatch))
        self._done += len(outcomes)
        self._failed += sum(isinstance(o, FailedMatch) for o in outcomes)

    def progress(self, total: int) -> Progress:
        return Progress("match", self._done, self._failed, total)

    @staticmethod
    def size(outcome: EncodedPair | FailedMatch) -> int:
        return len(outcome.data) if isinstance(outcome, EncodedPair) else 0


class _Extraction:
    """Writes outcomes of pictures."""

    def __init__(self, writer: Writer, source: Source) -> None:
        self._writer, self._source, self._done, self._failed = writer, source, 0, 0

    def commit(self, outcomes: Iterable[ExtractedPicture]) -> None:
        outcomes = list(outcomes)
        with self._writer.transaction():
            for outcome in outcomes:
                self._put(outcome)
        self._done += len(outcomes)
        self._failed += sum(outcome.found is None for outcome in outcomes)

    def _put(self, outcome: ExtractedPicture) -> None:
        writer, found = self._writer, outcome.found
        number = writer.number(outcome.name)
        had = writer.execute("SELECT sha256 FROM images WHERE id = ? AND status = ?", (number, DONE))
        if found is None:
            if had:  # its descriptors were deleted and the picture is gone: what was matched stays
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
            and np.array_equal(writer.store.keypoints(outcome.name), found.features.keypoints.numpy())
        ):
            writer.forget([outcome.name])  # its pairs name keypoints that are no more
        facts = ImageFacts(found.sha256, found.stamp, found.scale)
        writer.put_record(outcome.name, found.features, outcome.record, facts)

    def progress(self, total: int) -> Progress:
        return Progress("extract", self._done, self._failed, total)

    @staticmethod
    def size(outcome: ExtractedPicture) -> int:
        return len(outcome.record)
