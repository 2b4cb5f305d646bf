"""The summary that `reconstruct` writes beside a model: which run it was made from, and numbers of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"
KEPT_CAMERAS = "cameras_given"  # in it: whether the user gave all cameras, so that none was adjusted
_LARGEST = 1 << 28  # bytes; an image takes about one thousand


def read_summary(folder: Path) -> dict[str, Any]:
    """What the summary in a folder says, nothing where there is none that can be read.

    The folder may be anybody's: what is not a file is not opened, since a pipe would never end.
    """
    path = folder / SUMMARY
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
