"""Which pairs to match: lists from files, read line by line and checked, and pairs made from the names.

A pair list is a text file with one pair per line: two image names, relative to the image folder and with `/`.
In a line with a tab, only tabs separate; otherwise spaces do, and a name with spaces needs double quotes.
UTF-8 with or without a byte order mark, any line ending, blank lines and lines that begin with `#` are fine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from matcher.data.photos import natural_key
from matcher.errors import UsageError
from matcher.files import open_given

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
