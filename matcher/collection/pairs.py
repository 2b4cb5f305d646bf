"""Which pairs to match: lists from files, read line by line and checked, and pairs made from the names.

A pair list is a text file with one pair per line: two image names, relative to the image folder and with `/`.
In a line with a tab, only tabs separate; otherwise spaces do, and a name with spaces needs double quotes.
UTF-8 with or without a byte order mark, any line ending, blank lines and lines that begin with `#` are fine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from matcher.collection.runner import OnProgress, StageProgress
from matcher.collection.settings import Setup, build
from matcher.collection.sources import PairChoice
from matcher.collection.store import Store
from matcher.errors import UsageError
from matcher.files import open_given
from matcher.image_files import read_gps
from matcher.images import natural_key
from matcher.loading import with_estimation
from matcher.match.retrieval import similar_pairs
from matcher.pipeline import Pipeline
from matcher.types import Features, strongest
from matcher.verify.verdict import NOT, verdict_of

# --- pairlists: Which pairs to match: lists from files, read line by line and checked, and pairs made from
# the names.

_CHUNK = 16_384  # lines
_LONGEST_LINE = 16_384  # bytes
_SHOWN = 80  # characters of a line in a message
_WORD = re.compile(r'"([^"]*)"(?=\s|$)|(\S+)')
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")

# What may be wrong with a line. `USED` ones still give their pair.
DUPLICATE = "duplicate"
REVERSED = "reversed duplicate"
SELF = "image paired with itself"
MISSING = "image not in the collection"
ABSOLUTE = "absolute path"
OUTSIDE = "path that leaves the image folder"
COLUMNS = "not two names"
LONG = "line too long"
EXTRA = "more than two columns (the first two are used)"
USED = (EXTRA,)


@dataclass(frozen=True)
class PairFault:
    """A line of a pair list that yields no pair, or one with a warning."""

    line: int  # counted from 1
    kind: str  # one of the texts above
    text: str  # what is wrong, shortened and printable

    def __str__(self) -> str:
        return f"line {self.line}: {self.kind}: {self.text}"


@dataclass
class FaultTally:
    """Counts faults by kind and keeps the first of each; give it to `read_pairs` as `on_fault`."""

    kept: int = 5  # faults of a kind that are kept
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[PairFault]] = field(default_factory=dict)

    def __call__(self, fault: PairFault) -> None:
        """Count one fault."""
        self.counts[fault.kind] += 1
        examples = self.first.setdefault(fault.kind, [])
        if len(examples) < self.kept:
            examples.append(fault)

    @property
    def refused(self) -> int:
        """The number of lines that yielded no pair."""
        return sum(count for kind, count in self.counts.items() if kind not in USED)

    def lines(self) -> list[str]:
        """The tally as text: one line per kind, with the first line numbers."""
        texts = []
        for kind, count in self.counts.most_common():
            where = ", ".join(f"{fault.line} ({fault.text})" for fault in self.first[kind])
            more = ", …" if count > len(self.first[kind]) else ""
            texts.append(f"{count} × {kind}: line {where}{more}")
        return texts


class _Line(NamedTuple):
    number: int
    text: str
    index0: int
    index1: int


def read_pairs(
    path: str | Path,
    names: Iterable[str],
    on_fault: Callable[[PairFault], None] | None = None,
    *,
    chunk: int = _CHUNK,
) -> Iterator[tuple[str, str]]:
    """The pairs of a list, each once, in the order of the file; memory does not grow with bad lines.

    Names are looked up among `names` and never opened, so a list cannot reach outside the collection. Of a
    repeated pair the first line counts, whichever way round. Memory is that of the names and 8 bytes per
    pair.

    Args:
        path: the list; see the module for the format.
        names: the images of the collection.
        on_fault: called with every line that yields no pair or a warning; all other lines are valid.
        chunk: lines that are processed together; affects only speed and memory.

    Raises:
        UsageError: the list cannot be read, or is UTF-16; raised before the first pair.
    """
    table = {name: index for index, name in enumerate(dict.fromkeys(names))}
    try:
        file = open_given(path)  # closed by the generator
        head = file.peek(3)[:2]
    except OSError as error:
        raise UsageError(f"{path}: the pair list cannot be read ({error.strerror or error})") from error
    if head in (b"\xff\xfe", b"\xfe\xff"):
        file.close()
        raise UsageError(f"{path}: the pair list is UTF-16; save it as UTF-8")
    return _pairs(file, table, list(table), on_fault or _ignore, chunk)


def _ignore(_: PairFault) -> None:
    pass


def _pairs(
    file: BinaryIO,
    table: dict[str, int],
    names: list[str],
    on_fault: Callable[[PairFault], None],
    together: int,
) -> Iterator[tuple[str, str]]:
    """Chunk by chunk, because finding repeated pairs is fast and small in sorted arrays."""
    seen = np.zeros(0, np.int64)  # sorted: 2 · pair + 1 if the first line had it the other way round
    with file:
        lines = _known_lines(file, table, on_fault)
        while chunk := list(islice(lines, together)):
            ends = np.array([(line.index0, line.index1) for line in chunk], dtype=np.int64)
            keys = 2 * (ends.min(axis=1) * len(names) + ends.max(axis=1))
            turned = (ends[:, 0] > ends[:, 1]).astype(np.int64)
            _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
            way, old = _first_way(seen, keys[first], turned[first])
            fresh = np.zeros(len(chunk), dtype=bool)
            fresh[first] = ~old
            seen = np.sort(np.concatenate([seen, (keys + turned)[fresh]]), kind="stable")
            for line, is_fresh, same in zip(chunk, fresh.tolist(), turned == way[inverse], strict=True):
                if is_fresh:
                    yield names[line.index0], names[line.index1]
                else:
                    on_fault(PairFault(line.number, DUPLICATE if same else REVERSED, line.text))


def _first_way(seen: np.ndarray, keys: np.ndarray, turned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which way round each pair came first (0 or 1), and whether that was in an earlier chunk."""
    if not len(seen):
        return turned, np.zeros(len(keys), dtype=bool)
    found = seen[np.searchsorted(seen, keys).clip(max=len(seen) - 1)]
    old = found - (found & 1) == keys
    return np.where(old, found & 1, turned), old


def _known_lines(
    file: BinaryIO, table: dict[str, int], on_fault: Callable[[PairFault], None]
) -> Iterator[_Line]:
    """The lines that name two different images of the collection."""
    for number, raw in _raw_lines(file):
        text = raw.decode("utf-8", errors="surrogateescape").strip()
        if not text or text.startswith("#"):
            continue
        shown = _shown(text)
        if len(raw) > _LONGEST_LINE:
            on_fault(PairFault(number, LONG, shown))
            continue
        words = _words(text, table)
        fault = _fault(words, table)
        if fault is not None:
            on_fault(PairFault(number, fault[0], _shown(fault[1])))
            continue
        if len(words) > 2:
            on_fault(PairFault(number, EXTRA, shown))
        yield _Line(number, shown, *(table[word] for word in words[:2]))


def _raw_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines; of one beyond the limit only its beginning is kept, but one byte more than allowed."""
    number = 0
    while raw := file.readline(_LONGEST_LINE + 1):
        number += 1
        rest = raw
        while len(rest) > _LONGEST_LINE and not rest.endswith(b"\n"):
            rest = file.readline(_LONGEST_LINE + 1)
        yield number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw


def _words(text: str, table: dict[str, int]) -> list[str]:
    if "\t" in text:
        words = [word.strip() for word in text.split("\t") if word.strip()]
    elif '"' in text:
        words = [quoted or plain for quoted, plain in _WORD.findall(text)]
    else:
        words = text.split()
    return [word if word in table else word.removeprefix("./") for word in words]


def _fault(words: Sequence[str], table: dict[str, int]) -> tuple[str, str] | None:
    """The kind of fault and the word at fault."""
    if len(words) < 2:
        return COLUMNS, " ".join(words)
    for word in words[:2]:
        if word in table:
            continue
        if word.startswith(("/", "\\")) or _DRIVE.match(word):
            return ABSOLUTE, word
        if ".." in re.split(r"[\\/]", word):
            return OUTSIDE, word
        if len(words) > 2:
            return COLUMNS, f"{' '.join(words)}; put names with spaces in double quotes or use tabs"
        return MISSING, word
    return (SELF, words[0]) if words[0] == words[1] else None


def _shown(text: str) -> str:
    """Printable on any terminal: a list may hold anything."""
    plain = "".join(c if c.isprintable() else "�" for c in text[: _SHOWN + 1])
    return plain if len(plain) <= _SHOWN else f"{plain[:_SHOWN]}…"


def exhaustive(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every pair of different images: N (N − 1) / 2."""
    return combinations(dict.fromkeys(names), 2)


def sequential(names: Sequence[str], k: int) -> Iterator[tuple[str, str]]:
    """Each image with the `k` that follow it, in natural order of the names (`f2` before `f10`).

    Raises:
        UsageError: `k` below 1.
    """
    if k < 1:
        raise UsageError(f"sequential pairs need at least 1 neighbour, not {k}")
    return _neighbours(sorted(dict.fromkeys(names), key=natural_key), k)


def _neighbours(ordered: Sequence[str], k: int) -> Iterator[tuple[str, str]]:
    for index, name in enumerate(ordered):
        for other in ordered[index + 1 : index + 1 + k]:
            yield name, other


# --- pair_finding: The pairs that a choice makes of a run's images.


def chosen_pairs(
    choice: PairChoice, names: Sequence[str], store: Store, setup: Setup, on_progress: OnProgress
) -> Iterable[tuple[str, str]]:
    """The pairs of images for a choice that is no list.

    Args:
        choice: the method.
        names: the images; for methods that compare features, those that have some.
        store: of the run.
        setup: of the run, for methods that match.
        on_progress: called with the progress of those.

    Raises:
        UsageError: "nearby" with fewer than two images whose header has a position.
    """
    if choice.method == "exhaustive":
        return exhaustive(names)
    if choice.method == "sequential":
        return sequential(names, choice.neighbours)

    folder = store.image_folder
    if choice.method == "nearby":
        return nearby_pairs(positions_of(names, folder), choice.neighbours)
    from matcher.match.retrieval import similar_pairs

    if choice.method == "similar":
        return similar_pairs(names, store.features, choice.neighbours)
    return _preemptive(choice.neighbours, names, store, setup, on_progress)


def _preemptive(
    neighbours: int, names: Sequence[str], store: Store, setup: Setup, on_progress: OnProgress
) -> list[tuple[str, str]]:
    """Candidates by looks and, where photos say it, by position, of which those that agree are chosen."""

    positions = positions_of(names, store.image_folder)
    near = nearby_pairs(positions, neighbours) if len(positions) > 1 else []
    known = _paired(store)
    candidates = [
        pair
        for pair in candidate_pairs(names, store.features, neighbours, near)
        if frozenset(pair) not in known
    ]

    def report(done: int, total: int) -> None:
        on_progress(StageProgress("choose", done, 0, total))

    partners = Counter(name for pair in known for name in pair)
    return preemptive_pairs(candidates, store.features, build(setup), partners=partners, on_progress=report)


def _paired(store: Store) -> set[frozenset[str]]:
    """The pairs that the run has, finished or waiting."""
    names = store.names()
    tables = " UNION ".join(f"SELECT image0, image1 FROM {table}" for table in ("pairs", "failed", "waiting"))
    return {frozenset((names[first], names[second])) for first, second in store.rows(tables)}


# --- nearby: Pairs of photos that were taken near each other, by the positions in their headers.

_DEGREE = 111_195.0  # metres of a degree of latitude, on a sphere


def positions_of(names: Sequence[str], folder: Path) -> dict[str, tuple[float, float, float]]:
    """Latitude, longitude (degrees) and altitude (metres) of the photos whose header has them."""
    found = {name: read_gps(folder / name) for name in names if (folder / name).is_file()}
    return {name: position for name, position in found.items() if position is not None}


def nearby_pairs(positions: Mapping[str, Sequence[float]], k: int) -> list[tuple[str, str]]:
    """Each photo with the `k` nearest ones, every pair once; altitudes, the least exact, are left out.

    Args:
        positions: latitude, longitude and altitude by name.
        k: neighbours; a photo may be in more pairs, as the neighbour of others.

    Raises:
        UsageError: k below 1, or fewer than two positions.
    """
    if k < 1:
        raise UsageError(f"pairs of nearby photos need at least 1 neighbour, not {k}")
    if len(positions) < 2:
        raise UsageError(
            f"{len(positions)} of the photos have a GPS position in their EXIF header, and two are needed: "
            "choose pairs in another way, such as by similar images"
        )
    names = list(positions)
    degrees = np.array([list(positions[name])[:2] for name in names], dtype=np.float64)
    metres = _DEGREE * degrees
    east = (degrees[:, 1] - degrees[0, 1] + 180) % 360 - 180  # the shorter way round
    metres[:, 1] = _DEGREE * east * np.cos(np.deg2rad(degrees[0, 0]))
    found: dict[tuple[int, int], None] = {}
    for row, here in enumerate(metres):
        distance = np.linalg.norm(metres - here, axis=1)
        distance[row] = np.inf
        for other in np.argsort(distance, kind="stable")[: min(k, len(names) - 1)].tolist():
            found[min(row, other), max(row, other)] = None
    return [(names[first], names[second]) for first, second in sorted(found)]


# --- preemptive: Pairs worth matching with all keypoints, found by matching their strongest few first.

KEYPOINTS = 512  # strongest ones of an image that are matched first
BEST = 6  # partners of an image that are matched in any case where they agree, those with most inliers
_SURE = 2  # candidates of an image without any likely partner that are matched nevertheless
_CACHED = 128  # images whose strongest keypoints are kept

Progress = Callable[[int, int], None]  # candidates done, of all


def candidate_pairs(
    names: Sequence[str],
    features: Callable[[str], Features],
    k: int,
    nearby: Sequence[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Each image with the `k` most similar ones, all pairs where there are no more, and pairs taken nearby.

    Raises:
        UsageError: k below 1, or descriptors of several sizes.
    """
    names = list(dict.fromkeys(names))
    if k >= len(names) - 1:
        return list(combinations(names, 2))
    similar = list(similar_pairs(names, features, k))
    known = {frozenset(pair) for pair in similar}
    return similar + [pair for pair in nearby if frozenset(pair) not in known]


def preemptive_pairs(
    candidates: Sequence[tuple[str, str]],
    features: Callable[[str], Features],
    pipeline: Pipeline,
    *,
    partners: Mapping[str, int] | None = None,
    on_progress: Progress | None = None,
) -> list[tuple[str, str]]:
    """Of these pairs, those whose strongest keypoints agree.

    A pair is taken where the verdict on its strongest keypoints is not "different places", and where it is
    among the `BEST` of one of its images by the number of inliers. An image without such a pair keeps its
    two best candidates, so that none is lost here, and one with few such pairs those of its partners'
    partners.

    Args:
        candidates: names of two images each, every pair once.
        features: the features of an image, unbatched.
        partners: how many others an image is matched with already; they count among its `BEST`.
        pipeline: matches and verifies; by a fundamental matrix where its geometry needs cameras.
        on_progress: called after every candidate.
    """
    verifier = _without_cameras(pipeline)
    strongest_of = lru_cache(_CACHED)(lambda name: strongest(features(name), KEYPOINTS))
    tried = np.zeros((len(candidates), 2))  # inliers, probability of the same place
    for row, (name0, name1) in enumerate(candidates):
        tried[row] = _agreement(pipeline, verifier, strongest_of(name0), strongest_of(name1))
        if on_progress is not None:
            on_progress(row + 1, len(candidates))
    return _chosen(candidates, tried[:, 0], tried[:, 1] > NOT, partners or {})


def _without_cameras(pipeline: Pipeline) -> Pipeline:
    """The pipeline, with a geometry that needs no cameras."""
    estimation = pipeline.config.estimation
    if estimation.kind != "essential":
        return pipeline
    return with_estimation(pipeline, replace(estimation, kind="fundamental"))


def _agreement(
    pipeline: Pipeline, verifier: Pipeline, features0: Features, features1: Features
) -> tuple[int, float]:
    """Inliers of a pair, and the probability that it shows one place."""
    if min(len(features0), len(features1)) == 0:
        return 0, 0.0
    matches = pipeline.match_features(features0, features1)
    geometry = verifier.verify(features0, features1, matches)
    verdict = verdict_of(matches, geometry, features0.image_size, features1.image_size)
    return int(geometry.inliers.sum()), 1.0 if verdict is None else verdict.probability


def _chosen(
    candidates: Sequence[tuple[str, str]],
    inliers: np.ndarray,
    likely: np.ndarray,
    partners: Mapping[str, int],
) -> list[tuple[str, str]]:
    """The pairs to match, in the order of the candidates."""
    of_image: dict[str, list[int]] = {}
    for row, pair in enumerate(candidates):
        for name in pair:
            of_image.setdefault(name, []).append(row)
    taken: set[int] = set()
    for name, rows in of_image.items():
        best = sorted(rows, key=lambda row: -inliers[row])
        agreeing = [row for row in best if likely[row]]
        before = partners.get(name, 0)
        taken.update(agreeing[: max(0, BEST - before)] if agreeing or before else best[:_SURE])
    _add_indirect(taken, candidates, of_image, inliers, likely)
    return [candidates[row] for row in sorted(taken)]


def _add_indirect(
    taken: set[int],
    candidates: Sequence[tuple[str, str]],
    of_image: Mapping[str, list[int]],
    inliers: np.ndarray,
    likely: np.ndarray,
) -> None:
    """Add pairs of images that agree with a common third one, where they have fewer than `BEST` partners.

    Along a path, such wide pairs are the ones whose rays meet at angles that a reconstruction can begin with.
    """
    agreeing: dict[str, set[str]] = {}
    for row in taken:
        if likely[row]:
            for name, other in (candidates[row], candidates[row][::-1]):
                agreeing.setdefault(name, set()).add(other)
    for name, rows in of_image.items():
        near = agreeing.get(name, set())
        wide = [
            row
            for row in rows
            if row not in taken
            and any(near & agreeing.get(other, set()) for other in candidates[row] if other != name)
        ]
        wide.sort(key=lambda row: -inliers[row])
        taken.update(wide[: max(0, BEST - len(near))])
