"""The field's published weights by name, and where they lie on this machine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from matcher.config import ExtractorConfig
from matcher.config_tables import from_dict
from matcher.errors import IntegrityError, UsageError, unknown_name
from matcher.files import cache_folder
from matcher.weights.manifest import RESTORE, WeightsBytes, read_manifest, verify, weights_bytes

CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True)
class PublishedFile:
    """One file, wherever it lies."""

    urls: tuple[str, ...]  # the source first, then its mirrors
    sha256: str = ""  # empty where it is not known
    sha256_from: str = ""  # how it is known: "measured", "several reports", "one report"
    bytes: int = 0  # 0 where it is not known
    part: str = ""  # what our names have before the file's

    @property
    def name(self) -> str:
        """As it is published."""
        return PurePosixPath(urlsplit(self.urls[0]).path).name


@dataclass(frozen=True)
class Published:
    """Published weights of one preset's network or one front end."""

    name: str
    files: tuple[PublishedFile, ...]
    megabytes: float  # about
    licence: str
    commercial: bool  # whether the licence allows commercial use
    source: str
    paper: str
    preset: str = ""  # whose network it is, or
    frontend: str = ""  # which front end
    variant: str = ""  # of the front end
    note: str = ""
    constants: tuple[str, ...] = ()  # beginnings of names of ours that are not trained and in no file

    @property
    def folder(self) -> Path:
        """Where the file and what is made of it lie on this machine."""
        return cache_folder() / "weights" / self.name

    @property
    def command(self) -> str:
        """What a user types to get it."""
        return f"matcher weights fetch {self.name}{'' if self.commercial else ' --accept-licence'}"


def read_catalogue(path: Path | None = None) -> dict[str, Published]:
    """All published weights by name; `path` is another catalogue than the package's."""
    tables = tomllib.loads((path or CATALOGUE).read_text(encoding="utf-8"))["published"]
    rows = [from_dict(Published, table) for table in tables]
    return {row.name: row for row in rows}


def find_published(name: str) -> Published:
    """The row of that name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    rows = read_catalogue()
    if name not in rows:
        raise UsageError(unknown_name("published weights", name, rows))
    return rows[name]


def locate(row: Published) -> Path:
    """The checked weights file on this machine that was made of published weights.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    _check_presence(row)
    manifest = read_manifest(row.folder, remedy=_remedy(row))
    if row.name not in manifest:
        raise IntegrityError(f"{row.folder / 'manifest.toml'} is damaged: {_remedy(row)}")
    return verify(manifest[row.name], row.folder, remedy=_remedy(row))


class WeightsPlace(NamedTuple):
    """What `weights_bytes` needs to find a file."""

    weights: str | Path
    folder: Path | None
    remedy: str


def find_place(weights: str | Path) -> WeightsPlace:
    """Where the weights of a matcher's network are; arguments and errors as of `find_weights`."""
    rows = read_catalogue()
    if isinstance(weights, Path) or weights not in rows:
        return WeightsPlace(weights, None, RESTORE)
    row = rows[weights]
    if not row.preset:
        raise UsageError(f"{row.name} is a front end, not a matcher's network")
    _check_presence(row)
    return WeightsPlace(row.name, row.folder, _remedy(row))


def find_weights(weights: str | Path) -> WeightsBytes:
    """The weights file of a matcher's network, of ours or published: as `weights_bytes`, which it extends.

    Args:
        weights: a name in our manifest or in the catalogue, or the path of a weights file.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    place = find_place(weights)
    return weights_bytes(place.weights, place.folder, remedy=place.remedy)


def locate_front_end(config: ExtractorConfig) -> Path:
    """The checked file of a front end's parameters: the shipped one, or that of `matcher weights fetch`.

    Raises:
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    rows = [row for row in read_catalogue().values() if row.frontend == config.kind]
    if not rows:
        if config.kind not in (shipped := read_manifest()):
            raise IntegrityError(
                f"no weights are known for the front end {config.kind!r}: give a file of them "
                "as frontend_weights"
            )
        return verify(shipped[config.kind])
    return locate(next(row for row in rows if config.variant in (None, row.variant)))


def _check_presence(row: Published) -> None:
    if not (row.folder / "manifest.toml").is_file():
        raise IntegrityError(
            f"the published weights {row.name} are not on this machine: run `{row.command}`, or"
            f" `matcher weights import FILE --preset {row.name}` with a file that you have"
            f" ({row.licence}; {row.source})"
        )


def _remedy(row: Published) -> str:
    return f"run `{row.command}` again"
