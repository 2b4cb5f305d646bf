"""The hash of a published file at its first download, which later downloads must have too.

The catalogue does not know the hash of every file. If the user accepts such a file, what came first is
trusted, as SSH trusts the key of a host at the first visit, and a file that is another one later is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from matcher.errors import IntegrityError
from matcher.files import write_whole

RECORD = "first-download.json"
_LARGEST = 1 << 16  # bytes; a record has a line for each file
_SHA256 = re.compile("[0-9a-f]{64}")


def read_first(folder: Path) -> dict[str, str]:
    """SHA-256 by file name; empty where nothing was downloaded yet.

    Raises:
        IntegrityError: the record is damaged.
    """
    path = folder / RECORD
    if not path.exists():
        return {}
    fault = f"{path} is damaged: remove it to accept another first download"
    if not path.is_file() or path.stat().st_size > _LARGEST:
        raise IntegrityError(fault)
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise IntegrityError(fault) from error
    if not isinstance(found, dict) or not all(
        isinstance(digest, str) and _SHA256.fullmatch(digest) for digest in found.values()
    ):
        raise IntegrityError(fault)
    return found


def write_first(folder: Path, digests: Mapping[str, str]) -> None:
    """Keep the hashes of what came; those that are kept already stay.

    Raises:
        IntegrityError: the record is damaged.
        OSError: the folder cannot be written.
    """
    known = read_first(folder)
    wanted = {**digests, **known}
    if wanted != known:
        write_whole(folder / RECORD, json.dumps(wanted, indent=1, sort_keys=True).encode())
