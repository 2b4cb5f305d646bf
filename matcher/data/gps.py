"""Where a photo was taken, from its EXIF header."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

_GPS = 0x8825
_LATITUDE, _LONGITUDE, _ALTITUDE = (1, 2), (3, 4), (5, 6)  # tags of the direction and of the value


def read_gps(path: Path) -> tuple[float, float, float] | None:
    """Latitude and longitude in degrees, north and east positive, and metres above the ellipsoid.

    Without an altitude the third is 0. None where the header has no position, or one that cannot be.
    """
    import PIL.Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with PIL.Image.open(path) as photo:
                tags = photo.getexif().get_ifd(_GPS)
        latitude = _degrees(tags, _LATITUDE, "S")
        longitude = _degrees(tags, _LONGITUDE, "W")
        if abs(latitude) > 90 or abs(longitude) > 180 or latitude == longitude == 0:
            return None
        return latitude, longitude, _altitude(tags)
    except Exception:  # a header can be wrong in any way, and nothing depends on it
        return None


def _degrees(tags: Any, which: tuple[int, int], negative: str) -> float:
    degrees, minutes, seconds = (float(value) for value in tags[which[1]])
    value = degrees + minutes / 60 + seconds / 3600
    if not math.isfinite(value):
        raise ValueError("not a number")
    return -value if str(tags.get(which[0], "")).strip("\0 ").upper() == negative else value


def _altitude(tags: Any) -> float:
    if _ALTITUDE[1] not in tags:
        return 0.0
    value = float(tags[_ALTITUDE[1]])
    below = tags.get(_ALTITUDE[0], b"\0") in (1, b"\1")
    return 0.0 if not math.isfinite(value) else -value if below else value
