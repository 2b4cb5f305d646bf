"""Which pairs to match: lists from files, and pairs by name, by looks, by position, or that agree on trial.

A pair list is a text file with two image names a line, relative to the image folder and with `/`, separated
by spaces, a tab, a comma or a semicolon; a name with spaces needs a tab, a comma or double quotes. UTF-8, or
UTF-16 with a byte order mark, any line ending, blank lines and lines that begin with `#` are fine. Other
forms of names are taken where only one image can be meant (`NameTable`).
"""

from __future__ import annotations

import re
import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, combinations, islice
from pathlib import Path

import numpy as np

from matcher.budget import adjusted
from matcher.collection.schema import one_line
from matcher.collection.settings import Setup, build
from matcher.collection.sources import NameTable, PairChoice
from matcher.collection.store import Writer
from matcher.collection.workers import OnProgress, StageProgress
from matcher.errors import ImageWarning, UsageError, counted, few
from matcher.files import open_text
from matcher.image_files import read_gps
from matcher.images import natural_key
from matcher.loading import with_estimation
from matcher.match.retrieval import similar_pairs
from matcher.pipeline import Pipeline
from matcher.types import Features, strongest
from matcher.verify.repetition import beside_overlay
from matcher.verify.verdict import NOT, verdict_of

_LONGEST_LINE = 16_384  # characters

# What may be wrong with a line; the last two still give their pair.
REPEATED = "repeated pair"
SELF = "image paired with itself"
MISSING = "image not in the collection"
NOT_ASKED = "first image not among those asked for"  # where second names are others
COLUMNS = "not two names"
EXTRA = "more than two columns (the first two are used)"
OTHER_FORM = "another form of an image's name (it is used)"

# Called with a line of a pair list that yields no pair, or one with a warning: its number from 1, one of the
# texts above, and what is wrong, shortened and printable.
OnFault = Callable[[int, str, str], None]


class FaultTally:
    """Counts faults by kind and keeps the first five of each; give it to `read_pairs` as `on_fault`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, list[str]] = defaultdict(list)

    def __call__(self, line: int, kind: str, text: str) -> None:
        """Count one fault."""
        self.counts[kind] += 1
        if self.counts[kind] <= 5:
            self._first[kind].append(f"{line} ({text})")

    def lines(self) -> list[str]:
        """The tally as text: one line per kind, with the first line numbers."""
        return [
            f"{count} × {kind}: line {', '.join(self._first[kind])}{', …' if count > 5 else ''}"
            for kind, count in self.counts.most_common()
        ]


def read_pairs(
    path: str | Path,
    names: Iterable[str],
    on_fault: OnFault = lambda *_: None,
    *,
    folder: Path | None = None,
    partners: NameTable | None = None,
) -> Iterator[tuple[str, str]]:
    """The pairs of a list, as the module describes it, each once, in the order of the file; `UsageError`: it
    cannot be read.

    Names are looked up among `names` and never opened, so a list cannot reach outside the collection;
    `folder` is that of the images, for paths in it, and `partners` are what second names are looked up among,
    where they are others. Of a repeated pair the first line counts, whichever way round. `on_fault` is called
    with every line that yields no pair or a warning. Memory is that of the names and under 100 bytes a line.
    """
    firsts = NameTable(names, folder)
    tables = firsts, firsts if partners is None else partners
    lines, ends = array("q"), array("q")

    def report(line: int, kind: str, what: str) -> None:
        plain = one_line(what[:81])
        on_fault(line, kind, plain if len(plain) <= 80 else f"{plain[:80]}…")

    try:
        with open_text(path) as file:
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):
                number, rest = number + 1, line
                while len(rest) > _LONGEST_LINE and not rest.endswith("\n"):
                    rest = file.readline(_LONGEST_LINE + 1)
                if (pair := _read_line(line, tables, partial(report, number))) is not None:
                    lines.append(number)
                    ends.extend(pair)
    except OSError as error:
        raise UsageError(f"{path}: the pair list cannot be read ({error.strerror or error})") from error
    rows = np.array(ends, dtype=np.int64).reshape(-1, 2)
    keys = (np.sort(rows, axis=1) if partners is None else rows) @ (len(tables[1].names), 1)
    first = np.sort(np.unique(keys, return_index=True)[1])
    for row in np.setdiff1d(np.arange(len(rows)), first).tolist():
        report(lines[row], REPEATED, " ".join(t.names[end] for t, end in zip(tables, rows[row], strict=True)))
    return ((tables[0].names[one], tables[1].names[other]) for one, other in rows[first].tolist())


def _read_line(
    line: str, tables: Sequence[NameTable], fault: Callable[[str, str], None]
) -> tuple[int, int] | None:
    """The images of a line, by the tables of either column; None where it names no two of them, which is
    reported."""
    text = line.removeprefix("\ufeff").strip()  # in the middle, too, where files were joined
    if not text or text.startswith("#"):
        return None
    splits = [text.split(mark) for mark in ("\t", ",", ";") if mark in text]
    quoted = re.findall(r'"([^"]*)"|([^\s,;]+)', text) if '"' in text else []
    splits.append([one or other for one, other in quoted] or text.split())
    readings = [[word.strip().strip('"') for word in split if word.strip()] for split in splits]
    readings = [words for words in readings if len(words) >= 2 and len(line) <= _LONGEST_LINE]
    for words in readings:
        if None not in (ends := [table.find(word) for table, word in zip(tables, words, strict=False)]):
            break
    else:
        two = [words for words in readings if len(words) == 2]
        columns = (zip(tables, words, strict=True) for words in two)
        unknown = [word for table, word in chain.from_iterable(columns) if table.find(word) is None]
        other = tables[0] is not tables[1] and all(tables[0].find(words[0]) is None for words in two)
        missing = NOT_ASKED if other else MISSING
        fault(missing if unknown else COLUMNS, unknown[0] if unknown else text)
        return None
    if tables[0] is tables[1] and ends[0] == ends[1]:
        fault(SELF, words[0])
        return None
    if len(words) > 2:
        fault(EXTRA, text)
    for table, word, end in zip(tables, words, ends, strict=False):
        if table.names[end] not in (word, word.removeprefix("./")):
            fault(OTHER_FORM, f"{word} is {table.names[end]}")
    return ends[0], ends[1]


def chosen_pairs(
    choice: PairChoice,
    names: Sequence[str],
    store: Writer,
    setup: Setup,
    on_progress: OnProgress,
    of: Collection[str] | None = None,
) -> Iterable[tuple[str, str]]:
    """The pairs of a choice that is no list; "preemptive" compares only those with an image `of` these."""
    k, folder = choice.neighbours or 0, store.image_folder
    if choice.method == "exhaustive":
        return combinations(names, 2)
    if choice.method == "sequential":
        return sequential(names, k)
    if choice.method == "similar":
        return similar_pairs(names, store.features, k)
    headers = {name: read_gps(folder / name) for name in names if (folder / name).is_file()}
    positions = {name: position for name, position in headers.items() if position is not None}
    if choice.method == "nearby":
        found = nearby_pairs(positions, k)
        if lacking := [name for name in names if name not in positions]:
            text = f"{counted(len(lacking), 'photo')} without a GPS position, in none of these pairs"
            warnings.warn(f"{folder}: {text}: {few(lacking)}", ImageWarning, stacklevel=3)
        return found
    known = store.known_pairs()
    near = nearby_pairs(positions, k) if len(positions) > 1 else []
    candidates = [
        pair
        for pair in candidate_pairs(names, store.features, k, near)
        if frozenset(pair) not in known and (of is None or not set(pair).isdisjoint(of))
    ]
    partners, compared = Counter(name for pair in known for name in pair), store.compared()
    kept = len(compared)

    def progress(done: int, total: int) -> None:
        nonlocal kept
        if len(compared) - kept >= (1 if done == total else 256):  # half a minute's
            store.put_compared(islice(compared.items(), kept, None))
            kept = len(compared)
        on_progress(StageProgress("choose", done, 0, total))

    how = dict(partners=partners, compared=compared, on_progress=progress)
    return preemptive_pairs(candidates, store.features, build(setup), **how)


def sequential(names: Sequence[str], k: int) -> Iterator[tuple[str, str]]:
    """Each image with the `k` that follow it, in natural order of the names (`f2` before `f10`)."""
    ordered = sorted(dict.fromkeys(names), key=natural_key)
    return ((name, other) for i, name in enumerate(ordered) for other in ordered[i + 1 : i + 1 + k])


def nearby_pairs(positions: Mapping[str, Sequence[float]], k: int) -> list[tuple[str, str]]:
    """Each photo with the `k` nearest ones, each pair once, from latitudes and longitudes; altitudes, the
    least exact, are left out."""
    if len(positions) < 2:
        have = f"{counted(len(positions), 'photo has', 'photos have')} a GPS position in the EXIF header"
        raise UsageError(f"{have}, and two are needed: choose pairs in another way, such as similar ones")
    names = list(positions)
    places = np.array([list(positions[name])[:2] for name in names], dtype=np.float64)  # on a sphere
    places[:, 1] = (places[:, 1] - places[0, 1] + 180) % 360 - 180  # the shorter way round
    places[:, 1] *= np.cos(np.deg2rad(places[0, 0]))
    found: set[tuple[int, int]] = set()
    for row, here in enumerate(places):
        distance = np.linalg.norm(places - here, axis=1)
        distance[row] = -1
        nearest = np.argsort(distance, kind="stable")[1 : k + 1].tolist()
        found.update((min(row, other), max(row, other)) for other in nearest)
    return [(names[first], names[second]) for first, second in sorted(found)]


# Preemptive matching (Wu 2013): pairs whose strongest few keypoints agree are matched with all.

BEST = 6  # partners of an image that are matched in any case where they agree, those with most inliers


def candidate_pairs(
    names: Sequence[str], features: Callable[[str], Features], k: int, nearby: Sequence[tuple[str, str]] = ()
) -> list[tuple[str, str]]:
    """Each image with the `k` most similar ones, all pairs where there are no more, and those nearby."""
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
    compared: dict[tuple[str, str, bool], tuple[int, bool]] | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> list[tuple[str, str]]:
    """Of these pairs, those whose strongest keypoints agree: whose verdict on these is not "different
    places", and which are among the `BEST` of one of their images by inliers; `partners`, whom an image is
    matched with already, count. What was `compared` before is not again, and the rest is added there.

    An image without such a pair keeps its two best candidates, so that none is lost here, and one with few
    those of its partners' partners. Where the pipeline's geometry needs cameras, a fundamental matrix
    verifies.
    """
    if pipeline.config.estimation.kind == "essential":
        pipeline = with_estimation(pipeline, replace(pipeline.config.estimation, kind="fundamental"))
    compared = {} if compared is None else compared
    strongest_of = lru_cache(128)(lambda name: strongest(features(name), 512))
    inliers, likely = np.zeros(len(candidates)), np.zeros(len(candidates), dtype=bool)
    # Other quarter turns, most of the work of a pair without matches, only where an image lacks partners.
    plain = replace(pipeline, matcher=adjusted(pipeline.matcher, other_turns_below=0.0))
    rows, agreeing = list(range(len(candidates))), Counter(partners)
    for comparing in (plain, pipeline)[plain.matcher is pipeline.matcher :]:
        for done, row in enumerate(rows, start=1):
            if (key := (*candidates[row], comparing is pipeline)) not in compared:
                compared[key] = _agreement(comparing, *map(strongest_of, candidates[row]))
            inliers[row], likely[row] = compared[key]
            on_progress(done, len(rows))
        agreeing.update(name for row in np.flatnonzero(likely) for name in candidates[row])
        rows = [row for row in rows if not likely[row] and min(agreeing[n] for n in candidates[row]) < BEST]
    return best_pairs(candidates, inliers, likely, partners or {})


def _agreement(pipeline: Pipeline, first: Features, second: Features) -> tuple[int, bool]:
    """Inliers of a pair, and whether they do not show different places."""
    if not (len(first) and len(second)):
        return 0, False
    geometry = pipeline.verify(first, second, matches := pipeline.match_features(first, second))
    # Of the strongest keypoints what is around them tells too little.
    verdict = verdict_of(matches, beside_overlay(geometry), first.image_size, second.image_size)
    return int(geometry.inliers.sum()), verdict is None or verdict.probability > NOT


def best_pairs(
    candidates: list[tuple[str, str]], inliers: np.ndarray, likely: np.ndarray, partners: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Of candidates with inliers (P,), of which `likely` (P,) agree, those to match, in their order."""
    of_image: dict[str, list[int]] = {name: [] for pair in candidates for name in pair}
    for row in np.argsort(-inliers, kind="stable").tolist():
        for name in candidates[row]:
            of_image[name].append(row)
    taken: set[int] = set()
    for name, best in of_image.items():
        agreeing = [row for row in best if likely[row]]
        before = partners.get(name, 0)
        taken.update(agreeing[: max(0, BEST - before)] if agreeing or before else best[:2])
    near: dict[str, set[str]] = {name: set() for name in of_image}
    for name, other in (candidates[row] for row in taken if likely[row]):
        near[name].add(other)
        near[other].add(name)
    # Images that agree with a common third one, where they have fewer partners: along a path, such wide pairs
    # are the ones whose rays meet at angles that a reconstruction can begin with.
    for name, rows in of_image.items():
        beside = {other for third in near[name] for other in near[third]}
        wide = [n for n in rows if n not in taken and not beside.isdisjoint({*candidates[n]} - {name})]
        taken.update(wide[: max(0, BEST - len(near[name]))])
    return [candidates[row] for row in sorted(taken)]
