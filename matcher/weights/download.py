"""Published weights from the network, or from a file that the user has, into the user's cache."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.files import open_given, write_whole
from matcher.weights.conversion import import_checkpoint, import_front_end, page_fault
from matcher.weights.files import (
    LARGEST_WEIGHTS,
    Published,
    WeightsRow,
    find_published,
    locate,
)

# One file over HTTP, whole or not at all: resumed where it broke, checked while it streams.

Report = Callable[[int, int], None]  # bytes so far, bytes in all or 0


class _Refused(Exception):
    """What an address gave cannot be used; the next one may."""


class _Broken(Exception):
    """The connection ended early; what came is kept for the next attempt."""


def download(
    urls: Sequence[str], path: Path, sha256: str = "", size: int = 0, report: Report | None = None
) -> str:
    """Fetch a file, of a hash and size if these are known, from one of its addresses; its sha256.

    Proxies are taken from the environment, as `urllib` does. What has arrived lies beside `path` in a `.part`
    file until it is complete; a later call continues there.

    Raises:
        IntegrityError: no address provided the file; the message gives the reason for each.
        OSError: the file cannot be written.
    """
    failures, attempts = [], 3  # at one address, each of which resumes
    for url in urls:
        part = path.with_name(f"{path.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        for attempt in range(attempts):
            try:
                digest = _transfer(url, part, sha256, size, report)
            except _Broken as error:
                if attempt == attempts - 1:
                    kept = "; what came is kept, run the command again" if sha256 and part.is_file() else ""
                    failures.append(f"{url}: {error}{kept}")
            except _Refused as error:
                part.unlink(missing_ok=True)
                failures.append(f"{url}: {error}")
                break
            else:
                part.replace(path)
                for rest in path.parent.glob(f"{path.name}.*.part"):  # of other addresses
                    rest.unlink()
                return digest
    raise IntegrityError(f"{path.name} could not be fetched. " + "; ".join(failures))


def _transfer(url: str, part: Path, sha256: str, size: int, report: Report | None) -> str:
    """Append what is missing to `part`, check the whole, and return its sha256.

    Without a hash, which shows whether two halves are of one file, it begins anew.
    """
    request = Request(url, headers={"User-Agent": "matcher", "Accept-Encoding": "identity"})
    have = part.stat().st_size if part.is_file() and sha256 else 0
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = build_opener().open(request, timeout=60)  # reads the proxy variables as they are now
    except HTTPError as error:
        error.close()
        if error.code == 416:  # what is here is not the beginning of what is there
            part.unlink()
            raise _Broken("the file there has changed") from error
        raise _Refused(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"no connection ({getattr(error, 'reason', None) or error})") from error
    with response, part.open("r+b" if part.exists() else "w+b") as file:
        if "text/html" in response.headers.get("Content-Type", ""):
            raise _Refused("the server answered with a web page instead of the file")
        start = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
        if response.status != 206:
            have = 0
        elif start is None or int(start[1]) != have:
            raise _Refused("the server sent another part than requested")
        file.truncate(have)
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else 0
        if size and total and total != size:
            raise _Refused(f"the file there has {total} bytes instead of {size}")
        digest, chunk, most = hashlib.file_digest(file, "sha256"), b"\0", size or total or LARGEST_WEIGHTS
        try:
            while chunk:
                try:
                    chunk = response.read(1 << 18)
                except (OSError, http.client.HTTPException) as error:
                    raise _Broken(f"the connection broke ({error})") from error
                file.write(chunk)
                digest.update(chunk)
                came = file.tell()
                if came > most:  # a server may send without an end
                    raise _Refused(f"what comes has more than {most} bytes")
                if report is not None:
                    report(came, total)
        finally:
            file.flush()
            os.fsync(file.fileno())
        if came < total:
            raise _Broken(f"the connection ended after {came} of {total} bytes")
        file.seek(0)
        if fault := page_fault(file.read(512)):
            raise _Refused(f"what came {fault}")
    digest = digest.hexdigest()
    if size not in (0, came) or sha256 not in ("", digest):
        raise _Refused(
            f"what came has {came} bytes and sha256 {digest} instead of {size or came} and {sha256}"
        )
    return digest


# What is fetched.

OFFLINE = "MATCHER_OFFLINE"


@dataclass(frozen=True)
class Fetched:
    """Published weights on this machine."""

    path: Path  # what `load(weights=…)` or `load(frontend_weights=…)` takes
    sha256: dict[str, str]  # of the published files by name; empty when the weights were here already


def fetch(
    row: Published,
    *,
    accept_licence: bool = False,
    accept_unverified: bool = False,
    report: Report | None = None,
) -> Fetched:
    """Download published weights to the cache, check them, and convert them.

    Several processes may ask for the same weights at once: one fetches, the others wait for it.

    The licence of weights that are not for commercial use must be accepted, and files whose SHA-256 nobody
    states; `report` is called as bytes arrive.

    Raises:
        UsageError: the licence or unverified files are not accepted, or MATCHER_OFFLINE forbids the network.
        IntegrityError: a file cannot be had, or is not what it should be; nothing half-made is left in use.
    """
    with suppress(IntegrityError):
        return Fetched(locate(row).path, {})
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
        with suppress(IntegrityError):
            return Fetched(locate(row).path, {})
        unknown = [file for file in row.files if not file.sha256]
        if unknown and not accept_unverified:
            raise UsageError(
                f"{' and '.join(file.name for file in unknown)} cannot be verified: no SHA-256 is known that"
                f" the download from {', '.join(file.urls[0] for file in unknown)} should have, so nothing"
                f" was downloaded. If you trust it, run `{row.command} --accept-unverified`; or download it"
                f" yourself, check it, and run `matcher weights import FILE --preset {row.name}`"
            )
        paths = [row.folder / file.name for file in row.files]
        digests = [_sha256(path) if path.is_file() else "" for path in paths]  # of an earlier call
        for number, (file, path) in enumerate(zip(row.files, paths, strict=True)):
            if digests[number] != (file.sha256 or digests[number] or "unknown"):
                digests[number] = download(file.urls, path, file.sha256, file.bytes, report)
        try:
            path = _make_ready(row, paths, digests)
        except IntegrityError:
            for came in paths:  # they would fail again in the same way
                came.unlink(missing_ok=True)
            raise
    return Fetched(path, {path.name: digest for path, digest in zip(paths, digests, strict=True)})


def import_files(paths: Sequence[Path], name: str, output: Path | None = None) -> Path:
    """Convert checkpoints that the user has, of a preset, a front end or a variant of the catalogue.

    Of a front end of several networks they are in the catalogue's order. The path of the weights file is
    returned, by default where `load` looks in the cache.

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
    """Wait for, hold and release a lock between processes on a row's folder; it ends with its process;
    `UsageError`: the folder cannot be made or written."""
    try:
        row.folder.mkdir(parents=True, exist_ok=True)
        lock = sqlite3.connect(row.folder / ".lock", timeout=0.2, isolation_level=None)
        while not lock.in_transaction:
            try:
                lock.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise
    except (OSError, sqlite3.Error) as error:
        raise UsageError(
            f"{row.folder} cannot be written ({error}): name another cache in MATCHER_CACHE"
        ) from error
    with closing(lock):
        yield
