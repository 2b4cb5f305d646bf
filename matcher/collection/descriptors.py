"""Descriptor files beside the database: only matching needs them, so they may be deleted afterwards.

A file is a sequence of records, one per image; a record is a small safetensors file. The database knows where
each begins, how long it is, and its CRC-32; bytes after the last known record are unused and are
overwritten. SIFT descriptors take 8 bits per value, without loss: they are square roots of whole numbers
over their sum (`data.descriptors.root_sift`). Others take 16 bits where these hold them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import load as parse
from safetensors.numpy import save as pack

from matcher.collection.encoding import DamagedError, check, checksum
from matcher.collection.run_files import refuse_irregular
from matcher.data.descriptors import root_sift
from matcher.data.features import Features
from matcher.data.tensors import to_numpy

MAX_BYTES = 1 << 30  # of one file; a record that begins before it may end behind it
_OPTIONAL = ("scales", "orientations", "affine_frames")
_SIFT_STEPS = 8  # the smallest number of a SIFT descriptor that is not 0 is hardly ever larger


class RecordLocation(NamedTuple):
    """Location of a record."""

    file: int
    start: int
    length: int
    crc: int


def file_path(folder: Path, number: int) -> Path:
    """The descriptor file of that number."""
    return folder / f"descriptors-{number:05d}.bin"


class DescriptorWriter:
    """Appends records; only the process that holds the store's lock may have one."""

    def __init__(self, folder: Path, number: int, end: int, max_bytes: int = MAX_BYTES) -> None:
        """Continue in file `number` after byte `end`, where the last known record ends."""
        path = file_path(folder, number)
        if path.is_file() and path.stat().st_size < end:  # cut short: what follows goes to a new file
            number, end = number + 1, 0
        self._folder, self._number, self._end, self._limit = folder, number, end, max_bytes
        self._file: BinaryIO | None = None

    def append(self, record: bytes) -> RecordLocation:
        """Write a record; it has reached the disk after `sync`.

        Raises:
            OSError: the disk is full; partial data are overwritten next time.
        """
        if self._end >= self._limit:
            self.close()
            self._number, self._end = self._number + 1, 0
        if self._file is None:
            path = file_path(self._folder, self._number)
            # A file that was deleted gets no new records: its number stays a sign that it is gone.
            if self._end and not path.is_file():
                self._number, self._end = self._number + 1, 0
                path = file_path(self._folder, self._number)
            refuse_irregular(path)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._file = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        _write_at(self._file, self._end, record)
        place = RecordLocation(self._number, self._end, len(record), checksum(record))
        self._end += len(record)
        return place

    def sync(self) -> None:
        """Wait until all records have reached the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None


def _write_at(file: BinaryIO, start: int, record: bytes) -> None:
    file.seek(start)
    file.truncate()
    view = memoryview(record)
    while view:
        view = view[file.write(view) :]


def read_record(folder: Path, place: RecordLocation) -> bytes:
    """The bytes of a record.

    Raises:
        FileNotFoundError: its file was deleted.
        DamagedError: they are not what was written.
    """
    path = file_path(folder, place.file)
    refuse_irregular(path)
    with path.open("rb") as file:
        file.seek(place.start)
        return check(file.read(place.length), place.crc, f"{path}, byte {place.start}")


def encode_features(features: Features) -> bytes:
    """A record: everything of one image's features but keypoints, size, orientation and kind."""
    arrays = {
        name: to_numpy(getattr(features, name)).astype(np.float32)
        for name in ("scores", *_OPTIONAL)
        if getattr(features, name) is not None
    }
    values = to_numpy(features.descriptors)
    whole = _sift_numbers(values) if values.min(initial=0) >= 0 else None
    if whole is not None:
        arrays["sift"] = whole
    else:
        half = values.astype(np.float16) if np.all(np.abs(values) < 65504) else None
        arrays["descriptors"] = values.astype(np.float32) if half is None else half
    return pack({name: np.ascontiguousarray(array) for name, array in arrays.items()})


def decode_features(record: bytes, keypoints: np.ndarray, **facts: Any) -> Features:
    """Features with float32 descriptors, from a record and what the database knows.

    Args:
        record: as `encode_features` made it.
        keypoints: (N, 2) float32 stored pixels.
        facts: the fields of `Features` that an image has once: size, scale, exif_orientation, kind.

    Raises:
        DamagedError: not a record of that many keypoints.
    """
    try:
        arrays = parse(record)
        numbers = arrays.pop("sift", None)
        found = root_sift(numbers) if numbers is not None else arrays.pop("descriptors").astype(np.float32)
        if "frames" in arrays:  # the name in stores made before
            arrays["affine_frames"] = arrays.pop("frames")
        return Features(keypoints, found, **facts, **arrays)
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"a descriptor record cannot be decoded ({error})") from error


def _sift_numbers(values: np.ndarray) -> np.ndarray | None:
    """(N, D) uint8 from which `root_sift` makes exactly these descriptors; None where there are none such."""
    shares = values.astype(np.float32) ** 2
    smallest = np.where(shares > 0, shares, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    numbers = np.zeros(shares.shape, np.uint8)
    open_rows = np.isfinite(smallest[:, 0])
    for step in range(1, _SIFT_STEPS + 1):
        rows = np.flatnonzero(open_rows)
        tried = np.rint(shares[rows] * (step / smallest[rows]))
        fits = np.all(tried <= 255, axis=1)
        rows, tried = rows[fits], tried[fits].astype(np.uint8)
        exact = np.all(root_sift(tried) == values[rows], axis=1)
        numbers[rows[exact]] = tried[exact]
        open_rows[rows[exact]] = False
    return None if open_rows.any() or not np.array_equal(root_sift(numbers), values) else numbers
