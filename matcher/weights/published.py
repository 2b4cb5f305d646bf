"""The field's published weights by name, and where they lie on this machine."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from matcher.config import ExtractorConfig, from_dict
from matcher.errors import IntegrityError, UsageError, unknown_name
from matcher.files import cache_folder
from matcher.weights.files import (
    WeightsBytes,
    check_front_end,
    checked,
    read_bytes,
    read_manifest,
    read_tensors,
    verify,
    weights_bytes,
)

if TYPE_CHECKING:
    from torch import nn

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

    name: str  # as the authors write it; of several networks of one front end, its variant
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
    return {table["name"]: from_dict(Published, table) for table in tables}


def find_published(name: str) -> Published:
    """The row of that name; a front end of several networks stands for its first; `UsageError`: there is
    none; the message lists those that exist."""
    rows = read_catalogue()
    of_front_end = [row for row in rows.values() if row.frontend == name]
    if name not in rows and not of_front_end:
        raise UsageError(unknown_name("published weights", name, rows))
    return rows.get(name) or of_front_end[0]


def locate(row: Published) -> Path:
    """The checked weights file on this machine that was made of published weights; `IntegrityError`: absent
    or damaged; the message names the command to get it."""
    return _of_published(row).path


def _of_published(row: Published) -> WeightsBytes:
    if not (row.folder / "manifest.toml").is_file():
        raise IntegrityError(
            f"the published weights {row.name} are not on this machine: run `{row.command}`, or"
            f" `matcher weights import FILE --preset {row.name}` with a file that you have"
            f" ({row.licence}; {row.source})"
        )
    return weights_bytes(row.name, row.folder, remedy=f"run `{row.command}` again")


def find_weights(weights: str | Path) -> WeightsBytes:
    """The weights file of a matcher's network: by a name in our manifest or in the catalogue, or by its path.

    Raises:
        UsageError: a name of a front end's weights.
        IntegrityError: absent or damaged; the message names the command to get it.
    """
    row = None if isinstance(weights, Path) else read_catalogue().get(weights)
    if row is None:
        return weights_bytes(weights)
    if not row.preset:
        raise UsageError(f"{row.name} is a front end, not a matcher's network")
    return _of_published(row)


def locate_front_end(config: ExtractorConfig) -> Path:
    """The checked file of a front end's parameters: the shipped one, or that of `matcher weights fetch`;
    `IntegrityError`: absent or damaged; the message names the command to get it."""
    rows = [row for row in read_catalogue().values() if row.frontend == config.kind]
    if rows:
        return locate(next(row for row in rows if config.variant in (None, row.variant)))
    if config.kind not in (shipped := read_manifest()):
        raise IntegrityError(
            f"no weights are known for the front end {config.kind!r}: give a file of them as frontend_weights"
        )
    return verify(shipped[config.kind]).path


def fill_extractor(network: nn.Module, config: ExtractorConfig, path: str | Path | None = None) -> None:
    """Put a front end's trained parameters into its network, all of them or none.

    A `network` that has `fit(shapes)` takes the sizes of the parameters. They are those of `path`, a file of
    `save_front_end`, or the shipped or fetched ones that `config` selects.

    Raises:
        IntegrityError: absent, damaged, or not this front end's; the message names the command to get it.
    """
    path, kind = locate_front_end(config) if path is None else Path(path), config.kind
    remedy = "give a file that `matcher train` wrote, or leave it out for the shipped one"
    if kind != "learned":
        remedy = f"get it by `matcher weights fetch {kind}`, or convert a file by `matcher weights import`"
    data = read_bytes(path, remedy)
    try:
        check_front_end(data, kind)
        tensors = read_tensors(data)
        if hasattr(network, "fit"):
            network.fit({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        network.load_state_dict(checked(tensors, network.state_dict(), f"the front end {kind} asks for"))
    except IntegrityError as error:
        raise IntegrityError(f"{path} {error}: {remedy}") from error
