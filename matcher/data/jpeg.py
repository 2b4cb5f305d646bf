"""How many scans a JPEG has: a decoder goes over the whole picture for each, and 20 bytes can be a scan."""

from __future__ import annotations

import re
from typing import BinaryIO

# A baseline JPEG has 1 to 4, encoders of progressive ones write about 10.
MOST_SCANS = 64
_SCAN, _END, _WITHOUT_LENGTH = 0xDA, 0xD9, (0x01, 0xD8)
# In the samples of a scan, a zero follows each 0xFF that is no marker; restarts lie between them.
_AFTER_SCAN = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)


def check_scans(file: BinaryIO) -> None:
    """Refuse a JPEG of more scans than any encoder writes; the file is at its start before and afterwards.

    Raises:
        ValueError: there are more than `MOST_SCANS`.
    """
    data = file.read()
    file.seek(0)
    if data.count(b"\xff\xda") <= MOST_SCANS:  # the bytes may also lie in a profile or a thumbnail
        return
    at, scans = 2, 0
    while (marker := _marker(data, at)) is not None:
        at, kind = marker
        if kind == _END:
            return
        if kind in _WITHOUT_LENGTH:
            continue
        at += max(2, int.from_bytes(data[at : at + 2], "big"))
        if kind == _SCAN:
            scans += 1
            if scans > MOST_SCANS:
                raise ValueError(f"it has more than {MOST_SCANS} scans")
            after = _AFTER_SCAN.search(data, at)
            at = len(data) if after is None else after.start()


def _marker(data: bytes, at: int) -> tuple[int, int] | None:
    """Where the next marker ends, and its second byte; bytes before it are passed over, as decoders do."""
    found = _AFTER_SCAN.search(data, at)
    return None if found is None else (found.end(), data[found.end() - 1])
