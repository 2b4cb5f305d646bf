"""All front ends but SIFT, by name."""

from __future__ import annotations

from matcher.errors import UsageError, unknown_name
from matcher.extract import learned, superpoint
from matcher.extract.shared import FrontEnd

_OWN = {**learned.FRONT_ENDS, **superpoint.FRONT_ENDS}


def find_front_end(kind: str) -> FrontEnd:
    """The front end of that name.

    Raises:
        UsageError: there is none; the message lists those that exist.
    """
    if kind in _OWN:
        return _OWN[kind]
    from matcher.extract import kornia  # takes a second

    if kind not in kornia.FRONT_ENDS:
        raise UsageError(unknown_name("front end", kind, dict.fromkeys(["sift", *_OWN, *kornia.FRONT_ENDS])))
    return kornia.FRONT_ENDS[kind]
