"""What remains to be done: new or changed images and unfinished pairs, or a shard of them.

All of it lies in the database, so memory does not grow with the number of pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matcher.collection.encoding import decode_camera, parse_json
from matcher.collection.jobs import ExtractJob, ImageEntry, MatchJob
from matcher.collection.schema import DONE, FAILED, TILE_BITS
from matcher.collection.sources import FeatureSource
from matcher.collection.writer import Writer
from matcher.data.camera import Camera
from matcher.errors import ImageError, UsageError

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
