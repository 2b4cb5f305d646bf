"""Refined keypoints of a run: one file beside its store, deleted as soon as the run's pairs change."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from matcher.errors import IntegrityError
from matcher.files import write_whole

FILE = "refined.npz"


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


def read_refined(run_dir: Path) -> dict[str, RefinedKeypoints]:
    """The refined keypoints of a run by name of image; empty if it has none.

    Raises:
        IntegrityError: the file is damaged.
    """
    path = run_dir / FILE
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            offsets = stored["offsets"].tolist()
            columns = [stored[name] for name in RefinedKeypoints._fields]
            return {
                str(name): RefinedKeypoints(*(column[start:stop] for column in columns))
                for name, start, stop in zip(stored["names"], offsets[:-1], offsets[1:], strict=True)
            }
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise IntegrityError(f"{path} is damaged ({error}): delete it and refine the run again") from error


def delete_refined(run_dir: Path) -> None:
    """Delete refined keypoints, because the pairs that they came from have changed."""
    (run_dir / FILE).unlink(missing_ok=True)
