"""Which images of a folder are used: patterns of names, or lists of names in files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path, PurePosixPath

from matcher.errors import UsageError
from matcher.files import read_given


@dataclass(frozen=True)
class Selection:
    """Images to use and to leave out, by patterns of their names.

    A name is a path below the image folder, with `/`. A pattern is a name, a folder that ends in `/`, or a
    glob (`*`, `?`, `[abc]`); a pattern without `/` is compared with the last part of the name. Case
    matters.

        >>> from matcher.collection.selection import Selection
        >>> Selection(include=("left/",), exclude=("*_blurred.jpg",)).apply(["left/a.jpg", "right/a.jpg"])
        ['left/a.jpg']
    """

    include: tuple[str, ...] = ()  # nothing: all images
    exclude: tuple[str, ...] = ()

    @classmethod
    def parse(cls, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
        """Patterns as a user gives them: `@FILE` stands for the names in a file, one per line.

        Raises:
            UsageError: such a file cannot be read, or names nothing.
        """
        return cls(_expanded(include), _expanded(exclude))

    def keeps(self, name: str) -> bool:
        """Whether an image of that name is selected."""
        included = not self.include or any(_fits(name, pattern) for pattern in self.include)
        return included and not any(_fits(name, pattern) for pattern in self.exclude)

    def apply(self, names: Iterable[str]) -> list[str]:
        """The selected names, in the order given.

        Raises:
            UsageError: a pattern that matches no name, or nothing is left.
        """
        names = list(names)
        for pattern in (*self.include, *self.exclude):
            if not any(_fits(name, pattern) for name in names):
                raise UsageError(f"no image is called {pattern!r}; names are paths below the image folder")
        kept = [name for name in names if self.keeps(name)]
        if names and not kept:
            raise UsageError("no image is left: every image is excluded")
        return kept


def _fits(name: str, pattern: str) -> bool:
    if pattern.endswith("/"):
        return name.startswith(pattern)
    tail = name if "/" in pattern else PurePosixPath(name).name
    return name == pattern or fnmatchcase(tail, pattern)


def _expanded(patterns: Sequence[str]) -> tuple[str, ...]:
    found: list[str] = []
    for pattern in patterns:
        if pattern.startswith("@"):
            found += _listed(Path(pattern[1:]))
        else:
            found.append(pattern.removeprefix("./"))
    return tuple(found)


def _listed(path: Path) -> list[str]:
    """The names in a file, which mean themselves; blank lines and lines that begin with # are skipped."""
    try:
        lines = read_given(path).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"{path}: the list of images cannot be read ({reason})") from None
    names = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not names:
        raise UsageError(f"{path}: the list names no image")
    return [name if name.endswith("/") else escape(name.removeprefix("./")) for name in names]
