"""Files that appear whole or not at all, and where the user keeps what can be made again."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matcher.errors import UsageError


def write_whole(path: str | Path, data: bytes) -> None:
    """Write `data` to `path`, replacing what was there, so that no reader ever sees half a file.

    The bytes go to a temporary file in the same folder, reach the disk, and take the name in one step; a
    crash or a full disk leaves the old file as it was.

    Raises:
        OSError: the folder cannot be written or the disk is full.
    """
    path = Path(path)
    part = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_output(path: str | Path, suffixes: Sequence[str]) -> Path:
    """Refuse, before any work is done, an output that could not be written.

    Args:
        path: the file to be written; an existing file will be replaced.
        suffixes: the endings that are understood, such as ".json".

    Raises:
        UsageError: another suffix, a folder that is absent or cannot be written, or a path that is a folder.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"{path}: an output must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: the folder {path.parent} cannot be written")
    return path


def cache_folder(environment: Mapping[str, str] | None = None, platform: str | None = None) -> Path:
    """The user's cache: MATCHER_CACHE, else the platform's own place (XDG_CACHE_HOME on Linux).

    Args:
        environment: variables; this process's when absent.
        platform: as `sys.platform`; this machine's when absent.
    """
    values = os.environ if environment is None else environment
    system = platform or sys.platform
    if values.get("MATCHER_CACHE"):
        return Path(values["MATCHER_CACHE"]).expanduser()
    if system == "win32" and values.get("LOCALAPPDATA"):
        return Path(values["LOCALAPPDATA"]) / "matcher" / "Cache"
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "matcher"
    # The XDG specification says that a relative path is to be ignored.
    given = values.get("XDG_CACHE_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".cache") / "matcher"
