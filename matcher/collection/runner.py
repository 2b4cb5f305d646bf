"""Processes what is waiting in a store: every image once, every pair once, in small commits.

A single process writes, whichever engine does the work. Committed results survive if this process dies;
uncommitted ones are computed again by the next run, with the same result.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar

import numpy as np

from matcher.cameras import Camera
from matcher.collection.schema import DONE, FAILED, WAITING, Counts, common_camera, encode_pair
from matcher.collection.sources import Extracted, FeatureSource
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.collection.workers import Engine, Job, Outcome
from matcher.config import EstimationConfig, from_dict
from matcher.errors import ImageError, UsageError
from matcher.types import to_numpy
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import NOT, reject_improbable

# What remains to be done: new or changed images and unfinished pairs, or a shard of them.


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
    known = {name: row for name, *row in writer.execute("SELECT name, status, stamp, sha256 FROM images")}
    changed, touched = [], []
    for name in names:
        status, old_stamp, old_digest = known.get(name, (WAITING, "", ""))
        if status == WAITING or (stamp := source.stamp(name)) == old_stamp:
            continue
        digest = ""
        with suppress(ImageError):
            digest = source.digest(name)
        if digest == old_digest and status == DONE:
            touched.append((stamp, name))
        else:
            changed.append(name)
    new = [name for name in names if name not in known]
    with writer.transaction():
        writer.add_images(new)
        writer.execute_many("UPDATE images SET stamp = ? WHERE name = ?", touched)
        if changed:
            writer.forget(changed)
        writer.set_meta("image_folder", str(source.folder.absolute()))
    gone = len(known.keys() - set(names))
    return ImageChanges(len(new), len(changed), gone, tuple(unusable), len(names), masked)


def _by_tiles(pairs: np.ndarray) -> np.ndarray:
    """Pairs (P, 2) by tiles of 32 images on either side, whose features fit in memory together."""
    first, second = pairs.T
    return pairs[np.lexsort((second, first, second >> 5, first >> 5))]


def add_pairs(
    writer: Writer, pairs: Iterable[tuple[str, str]], shard: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Add the pairs, names read once, that are neither finished nor failed, each once, in either order of its
    images; returns how many different ones there are, and how many of them are new. `UsageError`: a name that
    the store does not have.

    Of a `shard` (i, n) only part i of n: a range of the pairs in the order in which they are matched, which
    depends on names and pairs alone, so that the n runs agree.
    """
    numbers = {name: number for number, name in writer.names().items()}
    ranks = {name: rank for rank, name in enumerate(sorted(numbers))}
    ends = array("q")
    for pair in pairs:
        if pair[0] == pair[1]:
            raise UsageError(f"{pair[0]} cannot be paired with itself")
        if absent := [name for name in pair if name not in ranks]:
            raise UsageError(f"the pair {pair[0]} and {pair[1]}: there is no image {absent[0]!r}")
        ends.extend(ranks[name] for name in pair)
    rows = np.sort(np.array(ends, np.int64).reshape(-1, 2), axis=1)
    keys = np.unique(rows[:, 0] * len(ranks) + rows[:, 1])  # each pair once
    rows = _by_tiles(np.column_stack(np.divmod(keys, max(1, len(ranks)))))
    part, parts = shard or (1, 1)
    rows = rows[len(rows) * (part - 1) // parts : len(rows) * part // parts]
    ids = np.array([numbers[name] for name in ranks], np.int64)[rows].tolist()
    known = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM {table} WHERE image0 = ?1 AND image1 = ?2)"
        for table in ("pairs", "failed")
    )
    with writer.transaction():
        added = writer.execute_many(f"INSERT OR IGNORE INTO waiting SELECT ?1, ?2 WHERE {known}", ids)
    return len(rows), added


def _parts(items: Sequence, batch: int) -> Iterator[Sequence]:
    """Guided self-scheduling (Polychronopoulos and Kuck 1987): a 32nd of what is left, within bounds."""
    while len(items):
        size = max(batch, min(max(8, 2 * batch), len(items) // 32))  # what a kill may cost
        yield items[:size]
        items = items[size:]


def match_jobs(writer: Writer, batch: int) -> Iterator[Job]:
    """Jobs of waiting pairs, tile by tile, smaller towards the end."""
    images = {image.name: image for image in writer.images()}
    numbered = {number: images[name] for number, name in writer.names().items()}
    waiting = writer.rows("SELECT image0, image1 FROM waiting")
    pairs = _by_tiles(np.fromiter((end for pair in waiting for end in pair), np.int64).reshape(-1, 2))
    for part in _parts(pairs, batch):
        items = tuple(map(tuple, part.tolist()))
        yield Job(items, batch, {number: numbered[number] for pair in items for number in pair})


# The stages of a run.


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


@dataclass
class Stages:
    """The two stages of a run. `OSError`: the disk is full; committed results are kept."""

    commit_seconds: ClassVar[float] = 0.5  # after which what is finished is written
    writer: Writer
    engine: Engine
    source: FeatureSource
    batch: int  # images or pairs that are worked on together
    on_progress: OnProgress

    def extract(self, *, everything: bool) -> int:
        """Extract the waiting images of waiting pairs, or of `everything`; returns how many were tried."""
        lost = self.writer.without_descriptors()
        needed = "SELECT image0 FROM waiting UNION SELECT image1 FROM waiting"
        where = "" if everything else f"WHERE id IN ({needed})"
        rows = self.writer.execute(f"SELECT id, name, status FROM images {where} ORDER BY name")
        names = [name for n, name, status in rows if status == WAITING or (status == DONE and n in lost)]
        jobs = (Job(tuple(part), self.batch) for part in _parts(names, self.batch))
        self._run("extract", jobs, self._put_images, len(names))
        with self.writer.transaction():  # pairs that can never be matched
            sql = "SELECT image0, image1, name || ': ' || reason FROM waiting JOIN images"
            failed = self.writer.execute(f"{sql} ON id IN (image0, image1) WHERE status = {FAILED}")
            self.writer.put_pairs(EncodedPair(*ends, reason=reason) for *ends, reason in failed)
        return len(names)

    def match(self) -> int:
        """Match every waiting pair, returns how many; `ImageError`: no image could be used."""
        counts = self.writer.counts()
        if counts.images_failed and not counts.images_done:
            failed = next(image for image in self.writer.images() if image.status == "failed")
            raise ImageError(f"no image of {self.writer.image_folder} could be used; {failed.reason}")
        self._run("match", match_jobs(self.writer, self.batch), self.writer.put_pairs, counts.pairs_waiting)
        return counts.pairs_waiting

    def _run(
        self, stage: str, jobs: Iterator[Job], commit: Callable[[list[Outcome]], None], total: int
    ) -> None:
        """Commit results in small groups, including those that are there when the run is interrupted."""
        if not total:
            return
        pending: list[Outcome] = []
        done, failed, last = 0, 0, monotonic()

        def write() -> None:
            nonlocal done, failed, last
            group = pending.copy()
            pending.clear()
            with self.writer.transaction():
                commit(group)
            done, failed = done + len(group), failed + sum(not outcome.data for outcome in group)
            last = monotonic()
            self.on_progress(StageProgress(stage, done, failed, total))

        self.on_progress(StageProgress(stage, 0, 0, total))
        try:
            for outcome in self.engine.run(jobs):
                if outcome is not None:
                    pending.append(outcome)
                full = len(pending) >= 512 or sum(len(each.data) for each in pending) >= 64 << 20  # bytes
                if pending and (full or monotonic() - last >= self.commit_seconds):
                    write()
        finally:
            if pending:
                write()

    def _put_images(self, outcomes: Sequence[Extracted]) -> None:
        writer = self.writer
        for one in outcomes:
            name, number = one.name, writer.number(one.name)
            had = writer.execute("SELECT sha256 FROM images WHERE id = ? AND status = ?", number, DONE)
            if one.data:
                points = to_numpy(one.features.keypoints)
                same = had == [(one.sha256,)] and np.array_equal(writer.keypoints(name), points)
                if had and not same:
                    writer.forget([name])  # its pairs name keypoints that are no more
                writer.put_features(name, one.features, one.data, one.sha256, one.stamp)
            elif had:  # its descriptors were deleted and the image is gone: matches stay
                sql = "SELECT image0, image1 FROM waiting WHERE ? IN (image0, image1)"
                waiting, reason = writer.execute(sql, number), f"{name}: {one.reason}"
                writer.put_pairs(EncodedPair(*pair, reason=reason) for pair in waiting)
            else:
                writer.fail_image(name, one.reason, self.source.stamp(name))


# Verifying again, where cameras have changed.


def _estimation_of(store: Store) -> EstimationConfig:
    values = store.settings.get("config", {}).get("estimation")
    if values is None:
        raise UsageError("the settings of the run do not say how its geometry was estimated; match it again")
    return from_dict(EstimationConfig, values)


def check_cameras(store: Store, common: Camera | None) -> None:
    """Refuse a run of essential geometry without any camera before any work (`UsageError`)."""
    if _estimation_of(store).kind != "essential" or common is not None:
        return
    if all(image.camera is None for image in store.images()):  # else pairs without one fail with that reason
        raise UsageError(
            "geometry 'essential' needs the camera of every image, and none is known: give "
            "camera=fx,fy,cx,cy for all, or one for each with Collection.set_cameras"
        )


def verify_again(writer: Writer, names: Iterable[str]) -> int:
    """Verify the finished pairs of images whose cameras have changed, from stored matches, where the geometry
    uses cameras; returns how many. Failed pairs, which may have lacked a camera, are matched again.

    Call it in a transaction, so that a camera is never stored beside a geometry that was estimated with
    another.
    """
    names, config = set(names), _estimation_of(writer)
    if config.kind != "essential" or not names:
        return 0
    numbers = {name: number for number, name in writer.names().items()}
    writer.wait_again("failed", ", ".join(str(numbers[name]) for name in names))
    images = {image.name: image for image in writer.images()}
    estimator, common, rows = RobustEstimator(config), common_camera(writer.settings), []
    for pair in writer.pairs(names):
        ends, matches = (pair.name0, pair.name1), pair.matches
        geometry = estimator(
            matches.points0,
            matches.points1,
            cameras=tuple(images[name].camera or common for name in ends),
            scores=matches.scores,
            thresholds_scale=threshold_scale(*map(writer.scale, ends), config.kind),
        )
        geometry = reject_improbable(geometry, matches, *(images[name].size for name in ends), least=NOT)
        data = encode_pair(matches, geometry, *map(writer.keypoints, ends))
        rows.append(EncodedPair(*(numbers[name] for name in ends), pair.seconds, data))
    writer.put_pairs(rows)
    return len(rows)
