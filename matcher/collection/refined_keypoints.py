"""Refined keypoints of a run: one file beside its store, deleted as soon as the run's pairs change."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np

from matcher.collection.run_files import REFINED as FILE
from matcher.errors import IntegrityError
from matcher.files import write_whole

_BYTES_A_POINT = 8 + 16 + 1  # keypoint, covariance and whether it was refined
_BYTES_AN_IMAGE = 8 + 4 * 1024  # where its points begin, and its name
_OVERHEAD = 1 << 16


class RefinedKeypoints(NamedTuple):
    """The keypoints of one image; track observations are refined against their track's reference."""

    keypoints: np.ndarray  # (N, 2) float32 stored pixels
    covariances: np.ndarray  # (N, 2, 2) float32 stored pixels²; the prior for keypoints not refined
    refined: np.ndarray  # (N,) bool


def write_refined(run_dir: Path, found: Mapping[str, RefinedKeypoints]) -> Path:
    """Write the refined keypoints of all images of a run; this replaces earlier ones."""
    names = list(found)
    columns = [np.concatenate(column) for column in zip(*found.values(), strict=True)]
    arrays = dict(zip(RefinedKeypoints._fields, columns, strict=True))
    offsets = np.cumsum([0, *(len(each.keypoints) for each in found.values())])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, names=np.array(names, dtype=np.str_), offsets=offsets, **arrays)
    write_whole(run_dir / FILE, buffer.getvalue())
    return run_dir / FILE


def read_refined(run_dir: Path, counts: Mapping[str, int]) -> dict[str, RefinedKeypoints]:
    """The refined keypoints of a run by name of image; empty if it has none.

    Args:
        run_dir: of the run.
        counts: the number of keypoints of each of its images.

    Raises:
        IntegrityError: the file is damaged, or is not of these images.
    """
    path = run_dir / FILE
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            _check_size(stored.zip, counts)
            offsets = stored["offsets"].tolist()
            columns = [stored[name] for name in RefinedKeypoints._fields]
            found = {
                str(name): RefinedKeypoints(*(column[start:stop] for column in columns))
                for name, start, stop in zip(stored["names"], offsets[:-1], offsets[1:], strict=True)
            }
        _check_columns(found, counts)
        return found
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        EOFError,
        RuntimeError,
        BadZipFile,
        zlib.error,
    ) as error:
        raise IntegrityError(f"{path} is damaged ({error}): delete it and refine the run again") from error


def _check_size(archive: ZipFile, counts: Mapping[str, int]) -> None:
    """Refuse what would unpack to more than the points of the run."""
    most = _BYTES_A_POINT * sum(counts.values()) + _BYTES_AN_IMAGE * (len(counts) + 1) + _OVERHEAD
    if (size := sum(member.file_size for member in archive.infolist())) > most:
        raise ValueError(f"{size} bytes are more than the run's keypoints take")


def _check_columns(found: Mapping[str, RefinedKeypoints], counts: Mapping[str, int]) -> None:
    for name, (points, covariances, refined) in found.items():
        count = counts.get(name, -1)
        shapes = (points.shape, covariances.shape, refined.shape)
        if shapes != ((count, 2), (count, 2, 2), (count,)):
            raise ValueError(f"{name}: arrays of {shapes} are not those of {max(count, 0)} keypoints")
        if not (np.isfinite(points).all() and np.isfinite(covariances).all()):
            raise ValueError(f"{name}: a value is not finite")


def delete_refined(run_dir: Path) -> None:
    """Delete refined keypoints, because the pairs that they came from have changed."""
    (run_dir / FILE).unlink(missing_ok=True)
