"""Processes what is waiting in a store: every image once, every pair once, in small commits.

A single process writes, whichever engine does the work. Committed results survive if this process dies;
uncommitted ones are computed again by the next run, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from matcher.arrays import to_numpy
from matcher.cameras import Camera
from matcher.collection.schema import DONE, FAILED, TILE_BITS, Counts, decode_camera, parse_json
from matcher.collection.sources import FeatureSource
from matcher.collection.store import EncodedPair, ImageFacts, Writer
from matcher.collection.workers import (
    Engine,
    ExtractedImage,
    ExtractJob,
    ImageEntry,
    MatchJob,
    Outcome,
    PairFailure,
)
from matcher.errors import ImageError, UsageError

# --- planning: What remains to be done: new or changed images and unfinished pairs, or a shard of them.

_ROWS = 4096  # pairs processed together
_PAIRS, _IMAGES = 16, 8  # of a job at most
_SHARE = 32  # a job is at most this part of what is left, or some workers would end long before others
_DONE_ALREADY = "SELECT 1 FROM {0} WHERE {0}.image0 = plan.image0 AND {0}.image1 = plan.image1"


@dataclass(frozen=True)
class ImageChanges:
    """What differs between the images of a folder and those of a store."""

    new: int = 0
    changed: int = 0  # extracted and matched again
    gone: int = 0  # in the store, but no longer in the folder or not selected; their matches are kept
    unusable: tuple[str, ...] = ()  # file names that no store can hold
    images: int = 0  # that were found
    masked: int | None = None  # of them, those with a mask; None where no masks were given


def refresh_images(writer: Writer, source: FeatureSource, masked: int | None = None) -> ImageChanges:
    """Add new images, and reset changed ones with their pairs; unchanged ones are kept."""
    names, unusable = source.names()
    known = {
        name: (status, stamp, sha256)
        for name, status, stamp, sha256 in writer.execute("SELECT name, status, stamp, sha256 FROM images")
    }
    changed, touched = [], []
    for name in (name for name in names if name in known and known[name][0] in (DONE, FAILED)):
        status, old_stamp, old_digest = known[name]
        stamp = source.stamp(name)
        if stamp == old_stamp:
            continue
        if _digest(source, name) == old_digest and status == DONE:
            touched.append((stamp, name))
        else:
            changed.append(name)
    new = [name for name in names if name not in known]
    with writer.transaction():
        writer.add_images(new)
        writer.execute_many("UPDATE images SET stamp = ? WHERE name = ?", touched)
        if changed:
            writer.forget(changed)
        writer.set_image_folder(source.folder)
    gone = len(set(known) - set(names))
    return ImageChanges(len(new), len(changed), gone, tuple(unusable), len(names), masked)


def _digest(source: FeatureSource, name: str) -> str:
    try:
        return source.digest(name)
    except ImageError:
        return ""


def add_pairs(
    writer: Writer, pairs: Iterable[tuple[str, str]], shard: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Add the pairs that are neither finished nor failed, each once, in either order of its images.

    Args:
        writer: of the store.
        pairs: names of images that the store has; read once, as a stream.
        shard: (i, n): only part i of n, a range of the pairs in the order in which they are matched. The
            parts depend on the names and pairs alone, so that the n runs agree on them.

    Returns:
        Different pairs of the plan (of this part), and how many of them were not in the store yet.

    Raises:
        UsageError: a name that the store does not have, or an image with itself.
    """
    numbers = {name: number for number, name in writer.store.names().items()}
    ranks = {number: rank for rank, (_, number) in enumerate(sorted(numbers.items()))}
    order = "tile0, tile1, rank0, rank1"
    with writer.transaction():
        writer.execute(
            f"CREATE TEMP TABLE plan (tile0, tile1, rank0, rank1, image0, image1, PRIMARY KEY ({order}))"
            " WITHOUT ROWID"
        )
        rows = (_plan_row(pair, numbers, ranks) for pair in pairs)
        writer.execute_many("INSERT OR IGNORE INTO plan VALUES (?, ?, ?, ?, ?, ?)", rows)
        total = writer.execute("SELECT count(*) FROM plan")[0][0]
        part, parts = shard or (1, 1)
        first, last = total * (part - 1) // parts, total * part // parts
        added = writer.execute_many(
            f"INSERT OR IGNORE INTO waiting SELECT image0 >> {TILE_BITS}, image1 >> {TILE_BITS}, image0,"
            f" image1 FROM (SELECT image0, image1 FROM plan ORDER BY {order} LIMIT ? OFFSET ?) AS plan"
            f" WHERE NOT EXISTS ({_DONE_ALREADY.format('pairs')})"
            f" AND NOT EXISTS ({_DONE_ALREADY.format('failed')})",
            [(last - first, first)],
        )
        writer.execute("DROP TABLE plan")
    return last - first, added


def _plan_row(
    pair: tuple[str, str], numbers: dict[str, int], ranks: dict[int, int]
) -> tuple[int, int, int, int, int, int]:
    name0, name1 = sorted(pair)
    if name0 == name1:
        raise UsageError(f"{name0} cannot be paired with itself")
    try:
        image0, image1 = numbers[name0], numbers[name1]
    except KeyError as error:
        raise UsageError(f"the pair {name0} and {name1}: there is no image {error.args[0]!r}") from None
    rank0, rank1 = ranks[image0], ranks[image1]
    return rank0 >> TILE_BITS, rank1 >> TILE_BITS, rank0, rank1, image0, image1


def images_to_extract(writer: Writer, *, everything: bool) -> list[str]:
    """Names of the images that have no features (any more), of waiting pairs or of the whole store."""
    lost = writer.without_descriptors()
    needed = "SELECT image0 FROM waiting UNION SELECT image1 FROM waiting"
    where = "" if everything else f"WHERE id IN ({needed})"
    rows = writer.execute(f"SELECT id, name, status FROM images {where} ORDER BY name")
    return [name for number, name, status in rows if status == 0 or (status == DONE and number in lost)]


def extract_jobs(names: Sequence[str], batch: int = 1) -> Iterator[ExtractJob]:
    """Jobs of a few images, smaller towards the end; `batch` of them are worked on together."""
    start = 0
    while start < len(names):
        size = _job_size(len(names) - start, max(_IMAGES, 2 * batch), batch)
        yield ExtractJob(tuple(names[start : start + size]), batch)
        start += size


def _job_size(left: int, most: int, least: int = 1) -> int:
    """Guided self-scheduling (Polychronopoulos and Kuck 1987): a share of what is left, within bounds."""
    return max(least, min(most, left // _SHARE))


def fail_pairs_of_failed_images(writer: Writer) -> None:
    """Pairs that can never be matched, with the reason of their image."""
    sql = (
        "SELECT w.image0, w.image1, images.name || ': ' || images.reason FROM waiting AS w"
        " JOIN images ON images.id IN (w.image0, w.image1) WHERE images.status = 2"
    )
    with writer.transaction():
        writer.fail_pairs(writer.execute(sql))


def match_jobs(writer: Writer, batch: int) -> Iterator[MatchJob]:
    """Jobs of waiting pairs, tile by tile, read while others finish; smaller towards the end."""
    last = (-1, -1, -1, -1)
    columns, most = "tile0, tile1, image0, image1", max(_PAIRS, 4 * batch)
    left = writer.store.counts().pairs_waiting
    sql = f"SELECT {columns} FROM waiting WHERE ({columns}) > (?, ?, ?, ?) ORDER BY {columns} LIMIT {_ROWS}"
    while rows := writer.execute(sql, last):
        last = rows[-1]
        pairs = [row[2:] for row in rows]
        images = _images(writer, {number for pair in pairs for number in pair})
        while pairs:
            size = _job_size(left, most, batch)
            items, pairs = tuple(pairs[:size]), pairs[size:]
            left -= len(items)
            needed = {number: images[number] for pair in items for number in pair}
            yield MatchJob(items, needed, batch)


def _images(writer: Writer, numbers: Iterable[int]) -> dict[int, ImageEntry]:
    sql = "SELECT id, name, camera FROM images WHERE id = ?"
    rows = (row for number in numbers for row in writer.execute(sql, (number,)))
    return {number: ImageEntry(number, name, _camera(camera, name)) for number, name, camera in rows}


def _camera(text: str | None, name: str) -> Camera | None:
    return None if text is None else decode_camera(parse_json(text, f"the camera of {name}"))


# --- runner: Processes what is waiting in a store: every image once, every pair once, in small commits.

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
