"""One NumPy archive of a whole run, written in a stream: a collection need not fit in memory.

Pixels as ours: the centre of the first one is (0, 0).
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.collection.exporting.output import ExportReport, whole_file
from matcher.collection.exporting.validation import begin_export, valid_keypoints, valid_pairs
from matcher.files import MARK

if TYPE_CHECKING:
    from matcher.collection.records import StoredPair
    from matcher.collection.store import Store


def write_npz(store: Store, out: Path) -> ExportReport:
    """An `.npz` to be opened with `np.load`; image i has the rows offsets[i] … offsets[i + 1].

    Images: `names` (I,), `sizes` (I, 2) width and height, `keypoints` (ΣN, 2) float32 with
    `keypoint_offsets` (I + 1,), and of a run that was refined their `covariances` (ΣN, 3), xx, xy and yy.
    Pairs: `pairs` (P, 2) into names, `match_offsets` (P + 1,), `matches` (ΣK, 2) int32 into the keypoints of
    either image, `scores` (ΣK,) float32, `inliers` (ΣK,) bool, `kinds` and `statuses` (P,) of the geometries,
    `matrices` (P, 3, 3) F, H or E, NaN where there is none, and `cam1_from_cam0` (P, 4, 4), NaN but for
    essential geometry.

    Raises:
        UsageError: nothing to write, or a place that cannot be written.
        OSError: the disk is full.
    """
    report, images = begin_export(store, out)
    number = {image.name: index for index, image in enumerate(images)}
    with whole_file(out) as part, tempfile.TemporaryDirectory(dir=part.parent, prefix=".npz-") as spool:
        keypoints = _Rows(Path(spool) / "keypoints", np.float32, 2)
        covariances = _Rows(Path(spool) / "covariances", np.float32, 3)
        for image in images:
            keypoints.append(valid_keypoints(store, image))
            if (refined := store.refined_keypoints(image.name)) is not None:
                covariances.append(refined.covariances.reshape(-1, 4)[:, [0, 1, 3]])
        pairs = _Pairs(Path(spool))
        for pair in valid_pairs(store, images, report):
            pairs.append(pair, number)
        small = {
            "names": np.array([image.name for image in images]),
            "sizes": np.array([image.size for image in images], dtype=np.int32),
            "keypoint_offsets": keypoints.offsets(),
            **pairs.small(),
        }
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.comment = MARK
            image_rows = {"keypoints": keypoints}
            if covariances.offsets()[-1] == keypoints.offsets()[-1]:
                image_rows["covariances"] = covariances
            for name, rows in {**image_rows, **pairs.columns}.items():
                rows.write(archive, name)
            for name, array in small.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    return report


class _Pairs:
    """Matches on their way to the archive, and what there is once per pair."""

    def __init__(self, spool: Path) -> None:
        self.columns = {
            "matches": _Rows(spool / "matches", np.int32, 2),
            "scores": _Rows(spool / "scores", np.float32),
            "inliers": _Rows(spool / "inliers", np.bool_),
        }
        self._models = _Rows(spool / "models", np.float64, 9 + 16)
        self._ends: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        self._statuses: list[str] = []

    def append(self, pair: StoredPair, number: dict[str, int]) -> None:
        """Add one pair."""
        geometry = pair.geometry
        self.columns["matches"].append(pair.matches.indices)
        self.columns["scores"].append(pair.matches.scores)
        self.columns["inliers"].append(geometry.inliers)
        models = ((geometry.matrix, 9), (geometry.cam1_from_cam0, 16))
        flat = [np.full(size, np.nan) if model is None else np.ravel(model) for model, size in models]
        self._models.append(np.concatenate(flat)[None])
        self._ends.append((number[pair.name0], number[pair.name1]))
        self._kinds.append(geometry.kind)
        self._statuses.append(geometry.status)

    def small(self) -> dict[str, np.ndarray]:
        """The arrays with a row per pair."""
        models = self._models.read()
        return {
            "match_offsets": self.columns["matches"].offsets(),
            "pairs": np.array(self._ends, dtype=np.int32).reshape(-1, 2),
            "kinds": np.array(self._kinds, dtype=np.str_),
            "statuses": np.array(self._statuses, dtype=np.str_),
            "matrices": models[:, :9].reshape(-1, 3, 3),
            "cam1_from_cam0": models[:, 9:].reshape(-1, 4, 4),
        }


class _Rows:
    """Rows of one type that go to a file, because the header of an array begins with their number."""

    def __init__(self, path: Path, dtype: type[np.generic], width: int | None = None) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._width = width
        self._counts = [0]
        path.touch()

    def append(self, rows: np.ndarray) -> None:
        """Add rows."""
        shape = (-1,) if self._width is None else (-1, self._width)
        array = np.ascontiguousarray(rows, dtype=self._dtype).reshape(shape)
        self._counts.append(len(array))
        with self._path.open("ab") as file:
            file.write(array.tobytes())

    def offsets(self) -> np.ndarray:
        """(A + 1,) int64: where each appended block begins, and the end."""
        return np.cumsum(self._counts, dtype=np.int64)

    def read(self) -> np.ndarray:
        """All rows."""
        rows = np.fromfile(self._path, self._dtype)
        return rows if self._width is None else rows.reshape(-1, self._width)

    def write(self, archive: zipfile.ZipFile, name: str) -> None:
        """Put the rows into an archive as one array."""
        total = int(sum(self._counts))
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (total,) if self._width is None else (total, self._width),
        }
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member, self._path.open("rb") as file:
            np.lib.format.write_array_header_2_0(member, header)
            shutil.copyfileobj(file, member, 1 << 20)
