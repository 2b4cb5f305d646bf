"""One file over HTTP, whole or not at all: resumed where it broke, checked while it streams."""

from __future__ import annotations

import hashlib
import http.client
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.error import HTTPError
from urllib.request import Request, build_opener

from matcher.errors import IntegrityError
from matcher.weights.published.reading import page_fault

Report = Callable[[int, int], None]  # bytes so far, bytes in all or 0

_MOST = 4 << 30  # bytes of a file whose size nobody states
_CHUNK = 1 << 18
_TIMEOUT = 60.0  # seconds without a byte
_ATTEMPTS = 3  # at one address, each of which resumes


class _Refused(Exception):
    """What an address gave cannot be used; the next one may."""


class _Broken(Exception):
    """The connection ended early; what came is kept for the next attempt."""


@dataclass(frozen=True)
class Wanted:
    """What a file must be, as far as it is known."""

    sha256: str = ""
    bytes: int = 0


def download(urls: Sequence[str], path: Path, wanted: Wanted, report: Report | None = None) -> str:
    """Fetch a file; proxies are taken from the environment, as `urllib` does.

    What has arrived lies beside `path` in a `.part` file until it is complete; a later call continues there.

    Args:
        urls: addresses of one and the same file, tried in turn.
        path: of the finished file; an existing one is replaced.
        wanted: its size and hash, if known.
        report: called as bytes arrive.

    Returns:
        The sha256 of the file.

    Raises:
        IntegrityError: no address provided the file; the message gives the reason for each.
        OSError: the file cannot be written.
    """
    failures = []
    for url in urls:
        part = path.with_name(f"{path.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        for attempt in range(_ATTEMPTS):
            try:
                digest = _transfer(url, part, wanted, report)
            except _Broken as error:
                if attempt == _ATTEMPTS - 1:
                    kept = "; what came is kept, run the command again" if part.is_file() else ""
                    failures.append(f"{url}: {error}{kept}")
            except _Refused as error:
                _discard(part)
                failures.append(f"{url}: {error}")
                break
            else:
                part.replace(path)
                for rest in (*path.parent.glob(f"{path.name}.*.part"), part):
                    _discard(rest)
                return digest
    raise IntegrityError(f"{path.name} could not be fetched. " + "; ".join(failures))


def _transfer(url: str, part: Path, wanted: Wanted, report: Report | None) -> str:
    """Append what is missing to `part`, check the whole, and return its sha256."""
    have, request = _resume(url, part, wanted)
    try:
        # A new opener reads the proxy variables as they are now.
        response = build_opener().open(request, timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == 416:  # what is here is not the beginning of what is there
            _discard(part)
            raise _Broken("the file there has changed") from error
        raise _Refused(f"the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Broken(f"no connection ({getattr(error, 'reason', None) or error})") from error
    with response, part.open("r+b" if part.exists() else "w+b") as file:
        if "text/html" in response.headers.get("Content-Type", ""):
            raise _Refused("the server answered with a web page instead of the file")
        goes_on = response.status == 206 and _range_start(response) == have
        if response.status == 206 and not goes_on:
            raise _Refused("the server sent another part than requested")
        have = have if goes_on else 0
        file.truncate(have)
        if not goes_on:
            _tag(part).write_text(_validator(response), encoding="utf-8")
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else 0
        if wanted.bytes and total and total != wanted.bytes:
            raise _Refused(f"the file there has {total} bytes instead of {wanted.bytes}")
        digest = _receive(response, file, total, wanted.bytes or total or _MOST, report)
    return _check(part, digest, wanted)


def _resume(url: str, part: Path, wanted: Wanted) -> tuple[int, Request]:
    """How many bytes are here already, and the request for the rest.

    Without a hash to check, two halves may only be joined if the server vouches that they are of one
    file, by the validator that it gave with the first.
    """
    request = Request(url, headers={"User-Agent": "matcher", "Accept-Encoding": "identity"})
    have = part.stat().st_size if part.is_file() else 0
    validator = _tag(part).read_text(encoding="utf-8") if _tag(part).is_file() else ""
    if not have or not (validator or wanted.sha256):
        return 0, request
    request.add_header("Range", f"bytes={have}-")
    if validator:
        request.add_header("If-Range", validator)
    return have, request


def _validator(response: Any) -> str:
    tag = response.headers.get("ETag", "")
    return response.headers.get("Last-Modified", "") if not tag or tag.startswith("W/") else tag


def _range_start(response: Any) -> int:
    start = response.headers.get("Content-Range", "").removeprefix("bytes ").split("-")[0]
    return int(start) if start.isdigit() else -1


def _receive(response: Any, file: BinaryIO, total: int, most: int, report: Report | None) -> str:
    """Stream to the file and the disk; the sha256 of all of it, the beginning included.

    More than `most` bytes are refused at once: a server may send without an end.
    """
    digest, have = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        have += len(chunk)
    try:
        while chunk := _read(response):
            file.write(chunk)
            digest.update(chunk)
            have += len(chunk)
            if have > most:
                raise _Refused(f"what comes has more than {most} bytes")
            if report is not None:
                report(have, total)
    finally:
        file.flush()
        os.fsync(file.fileno())
    if total and have < total:
        raise _Broken(f"the connection ended after {have} of {total} bytes")
    return digest.hexdigest()


def _read(response: Any) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(f"the connection broke ({error})") from error


def _check(part: Path, digest: str, wanted: Wanted) -> str:
    with part.open("rb") as file:
        fault = page_fault(file.read(512))
    if fault:
        raise _Refused(f"what came {fault}")
    size = part.stat().st_size
    if wanted.bytes and size != wanted.bytes:
        raise _Refused(f"what came has {size} bytes instead of {wanted.bytes}")
    if wanted.sha256 and digest != wanted.sha256:
        raise _Refused(f"what came has sha256 {digest} instead of {wanted.sha256}")
    return digest


def _tag(part: Path) -> Path:
    return part.with_suffix(".tag")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag(part).unlink(missing_ok=True)
