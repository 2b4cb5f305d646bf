"""PBM, PGM, PPM and PFM files → samples in their depth.

The formats are described at netpbm.sourceforge.net/doc, PFM at pauldebevec.com/Research/HDR/PFM.
"""

from __future__ import annotations

from typing import BinaryIO

import numpy as np

_HEADER = 1 << 16  # bytes; comments belong to it
_CHANNELS = {b"P1": 1, b"P2": 1, b"P3": 3, b"P4": 1, b"P5": 1, b"P6": 3, b"Pf": 1, b"PF": 3}
_PLAIN = (b"P1", b"P2", b"P3")
_BITS, _FLOATS = (b"P1", b"P4"), (b"Pf", b"PF")


def read_header(file: BinaryIO) -> tuple[bytes, int, int, float]:
    """Kind, width, height and the largest value (of PFM, its scale); the file is then at its samples.

    Raises:
        ValueError: no such header.
    """
    head = file.read(_HEADER)
    kind, place, values = head[:2], 2, []
    if kind not in _CHANNELS:
        raise ValueError("it begins with no known kind")
    wanted = 2 if kind in _BITS else 3
    while len(values) < wanted:
        start = place
        while head[place : place + 1].isspace():
            place += 1
        if head[place : place + 1] == b"#":
            while place < len(head) and head[place] not in b"\r\n":
                place += 1
            continue
        stop = place
        while stop < len(head) and not head[stop : stop + 1].isspace():
            stop += 1
        if start == place or stop == len(head):
            raise ValueError(f"its header does not end within {_HEADER} bytes")
        values.append(head[place:stop])
        place = stop
    width, height = (_whole(text) for text in values[:2])
    top = 1.0 if kind in _BITS else float(values[2]) if kind in _FLOATS else float(_whole(values[2]))
    valid = top != 0 and np.isfinite(top) if kind in _FLOATS else 0 < top < 65536
    if not (width > 0 and height > 0 and valid):
        raise ValueError(f"its header holds {width} x {height} and {top:g}")
    file.seek(place + 1)
    return kind, width, height, top


def _whole(text: bytes) -> int:
    if not (text.isdigit() and len(text) < 10):
        raise ValueError(f"its header holds {text[:20]!r}")
    return int(text)


def read_samples(file: BinaryIO, kind: bytes, width: int, height: int, top: float) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8, uint16 or float32; bits, and depths between 8 and 16, by their full range.

    Raises:
        ValueError: fewer samples than the header promises, or larger ones.
    """
    channels = _CHANNELS[kind]
    shape = (height, width) if channels == 1 else (height, width, channels)
    if kind in _FLOATS:
        values = _binary(file, shape, "<f4" if top < 0 else ">f4")
        return values[::-1].astype(np.float32)  # its rows go from the bottom up
    if kind == b"P4":
        rows = _binary(file, (height, -(-width // 8)), "u1")
        return (1 - np.unpackbits(rows, axis=1, count=width)) * np.uint8(255)  # 1 is black
    if kind in _PLAIN:
        values = _plain(file, shape, bits=kind == b"P1")
    else:
        values = _binary(file, shape, "u1" if top < 256 else ">u2")
    if kind == b"P1":
        return ((1 - np.minimum(values, 1)) * 255).astype(np.uint8)
    if values.max() > top:
        raise ValueError(f"a sample of {values.max()} is larger than its {top:g}")
    full = 255 if top < 256 else 65535
    if top == full:
        return values.astype(np.uint8 if full == 255 else np.uint16)
    scaled = np.rint(values * np.float64(full / top))
    return scaled.astype(np.uint8 if full == 255 else np.uint16)


def _binary(file: BinaryIO, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    wanted = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    data = file.read(wanted)
    if len(data) < wanted:
        raise ValueError(f"{wanted - len(data)} bytes are missing")
    return np.frombuffer(data, dtype).reshape(shape)


def _plain(file: BinaryIO, shape: tuple[int, ...], *, bits: bool) -> np.ndarray:
    """Numbers as text; the bits of a PBM need no spaces between them. A comment may follow any line."""
    count = int(np.prod(shape, dtype=object))
    text = b"\n".join(line.partition(b"#")[0] for line in file.read(16 * count + _HEADER).splitlines())
    words = [bytes([word]) for word in b"".join(text.split())] if bits else text.split(None, count)
    if len(words) < count:
        raise ValueError(f"{count - len(words)} samples are missing")
    if not all(word.isdigit() and len(word) < 10 for word in words[:count]):
        raise ValueError("a sample is no number")
    return np.array([int(word) for word in words[:count]], dtype=np.int64).reshape(shape)
