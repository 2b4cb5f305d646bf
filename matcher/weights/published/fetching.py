"""Published weights from the network, or from a file that the user has, into the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.files import open_given, write_whole
from matcher.weights.manifest import LARGEST_WEIGHTS, WeightsRow
from matcher.weights.published.catalogue import Published, PublishedFile, find_published, locate
from matcher.weights.published.conversion import import_checkpoint
from matcher.weights.published.download import Report, Wanted, download
from matcher.weights.published.first_download import RECORD, read_first, write_first
from matcher.weights.published.frontends import import_front_end

OFFLINE = "MATCHER_OFFLINE"


@dataclass(frozen=True)
class Fetched:
    """Published weights on this machine."""

    path: Path  # what `load(weights=…)` or `load(frontend_weights=…)` takes
    sha256: dict[str, str]  # of the published files by name; empty when the weights were here already
    expected: dict[str, str] = field(default_factory=dict)  # those that were known before, by name


def fetch(
    row: Published,
    *,
    accept_licence: bool = False,
    accept_unverified: bool = False,
    report: Report | None = None,
) -> Fetched:
    """Download published weights to the cache, check them, and convert them.

    Several processes may ask for the same weights at once: one fetches, the others wait for it. A file whose
    hash the catalogue does not know is downloaded only if that is accepted, and must be the same one later.

    Args:
        row: from `find_published`.
        accept_licence: needed for weights that are not for commercial use.
        accept_unverified: needed for the first download of files whose SHA-256 nobody states.
        report: called as bytes arrive.

    Raises:
        UsageError: the licence or unverified files are not accepted, or MATCHER_OFFLINE forbids the network.
        IntegrityError: a file cannot be had, or is not what it should be; nothing half-made is left in use.
    """
    if found := _already_here(row):
        return found
    if os.environ.get(OFFLINE, "0") not in ("", "0"):
        raise UsageError(
            f"{OFFLINE} is set, so {row.name} is not fetched: unset it, or import a file you have"
        )
    if not row.commercial and not accept_licence:
        raise UsageError(
            f"{row.name} is not for commercial use ({row.licence}; {row.source}): if that suits you, run"
            f" `{row.command}`"
        )
    with locked(row):
        if found := _already_here(row):
            return found
        known = {file.name: file.sha256 for file in row.files if file.sha256}
        expected = {**read_first(row.folder), **known}
        if not accept_unverified:
            _check_known(row, expected)
        paths = [row.folder / file.name for file in row.files]
        digests = [_obtain(row, file, expected.get(file.name, ""), report) for file in row.files]
        try:
            path = _make_ready(row, paths, digests)
        except IntegrityError:
            _remove(paths)  # they would fail again in the same way
            raise
        came = dict(zip((p.name for p in paths), digests, strict=True))
        write_first(row.folder, {name: digest for name, digest in came.items() if name not in known})
    return Fetched(path, came, {name: expected[name] for name in came if name in expected})


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _check_known(row: Published, expected: Mapping[str, str]) -> None:
    if unknown := [file for file in row.files if file.name not in expected]:
        raise UsageError(
            f"{' and '.join(file.name for file in unknown)} cannot be verified: no SHA-256 is known that the"
            f" download from {', '.join(file.urls[0] for file in unknown)} should have, so nothing was"
            f" downloaded. If you trust it, run `{row.command} --accept-unverified`; or download it yourself,"
            f" check it, and run `matcher weights import FILE --preset {row.name}`"
        )


def import_files(paths: Sequence[Path], name: str, output: Path | None = None) -> Path:
    """Convert checkpoints that the user has.

    Args:
        paths: one file, or those of a front end of several networks in the catalogue's order.
        name: of the preset, or of the front end, in the catalogue.
        output: of the weights file; when absent, the place in the cache where `load` looks.

    Returns:
        Where the weights file lies.

    Raises:
        UsageError: a name without published weights, too many or few files, or a suffix that is not known.
        IntegrityError: a file cannot be read or its tensors are not those of the network.
    """
    row = find_published(name)
    if len(paths) != len(row.files):
        wanted = ", ".join(file.name for file in row.files)
        raise UsageError(f"{name} is made of {len(row.files)} files ({wanted}), not of {len(paths)}")
    if output is not None:
        _convert(row, paths, output)
        return output
    with locked(row):
        return _make_ready(row, paths, [_sha256(path) if path.is_file() else "" for path in paths])


def _already_here(row: Published) -> Fetched | None:
    try:
        return Fetched(locate(row), {})
    except IntegrityError:
        return None


def _obtain(row: Published, file: PublishedFile, expected: str, report: Report | None) -> str:
    """The sha256 of a published file, fetched unless an earlier call has."""
    path = row.folder / file.name
    digest = _sha256(path) if path.is_file() else ""
    if digest and digest == (expected or digest):
        return digest
    try:
        return download(file.urls, path, Wanted(expected, file.bytes), report)
    except IntegrityError as error:
        if not expected or expected not in str(error):
            raise
        if file.sha256:
            remedy = (
                "which is the published one; if another version is what you want, download it yourself and"
                f" run `matcher weights import FILE --preset {row.name}`"
            )
        else:
            remedy = (
                "as its first download had; if another version is what you want, remove"
                f" {path.with_name(RECORD)}"
            )
        raise IntegrityError(f"{error}, {remedy}") from error


def _make_ready(row: Published, paths: Sequence[Path], digests: Sequence[str]) -> Path:
    """Convert, and write the manifest last: it marks the files as complete."""
    path = row.folder / f"{row.name}.safetensors"
    made = _convert(row, paths, path)
    origin = (f"{p.name} sha256 {digest}" for p, digest in zip(paths, digests, strict=True))
    entry = WeightsRow(
        name=row.name,
        file=path.name,
        sha256=made,
        bytes=path.stat().st_size,
        preset=row.preset,
        licence=row.licence,
        source=f"{row.source}; {', '.join(origin)}",
        trained_on=row.paper,
        metrics="none measured here",
    )
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in asdict(entry).items()]
    write_whole(row.folder / "manifest.toml", "\n".join(["[[weights]]", *lines, ""]).encode())
    return path


def _convert(row: Published, paths: Sequence[Path], output: Path) -> str:
    metadata = {"licence": row.licence, "source": row.source}
    if row.preset:
        return import_checkpoint(paths[0], row.preset, output, metadata)
    parts = [(path, file.part) for path, file in zip(paths, row.files, strict=True)]
    config = ExtractorConfig(kind=row.frontend, variant=row.variant or None)
    return import_front_end(parts, config, output, constants=row.constants, metadata=metadata)


def _sha256(path: Path) -> str:
    with open_given(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST_WEIGHTS:
            raise IntegrityError(f"{path} is larger than {LARGEST_WEIGHTS >> 30} GB: it is no checkpoint")
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(row: Published) -> Iterator[None]:
    """Wait for, hold and release a lock between processes on a row's folder; it ends with its process.

    Raises:
        UsageError: the folder cannot be made or written.
    """
    try:
        row.folder.mkdir(parents=True, exist_ok=True)
        file = (row.folder / ".lock").open("a+b")
    except OSError as error:
        raise UsageError(
            f"{row.folder} cannot be written ({error.strerror}): name another cache in MATCHER_CACHE"
        ) from error
    with file:
        while not _try_lock(file):
            time.sleep(0.2)
        yield


def _try_lock(file: BinaryIO) -> bool:
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
