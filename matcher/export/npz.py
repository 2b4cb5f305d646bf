"""One NumPy archive of a whole run, written in a stream: a collection need not fit in memory."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from matcher.export.output import ExportReport, begin_export, valid_keypoints, valid_pairs, whole_file
from matcher.files import MARK

if TYPE_CHECKING:
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

        def rows(name: str, dtype: type[np.generic], *shape: int) -> _Rows:
            return _Rows(Path(spool) / name, np.dtype(dtype), shape)

        arrays = {
            "keypoints": rows("keypoints", np.float32, 2),
            "covariances": rows("covariances", np.float32, 3),
            "matches": rows("matches", np.int32, 2),
            "scores": rows("scores", np.float32),
            "inliers": rows("inliers", np.bool_),
            "matrices": rows("matrices", np.float64, 3, 3),
            "cam1_from_cam0": rows("poses", np.float64, 4, 4),
            "pairs": rows("pairs", np.int32, 2),
        }
        for image in images:
            arrays["keypoints"].append(valid_keypoints(store, image))
            if (refined := store.refined_keypoints(image.name)) is not None:
                arrays["covariances"].append(refined.covariances.reshape(-1, 4)[:, [0, 1, 3]])
        kinds, statuses = [], []
        for pair in valid_pairs(store, images, report):
            geometry = pair.geometry
            kinds.append(geometry.kind)
            statuses.append(geometry.status)
            for name, values in (
                ("matches", pair.matches.indices),
                ("scores", pair.matches.scores),
                ("inliers", geometry.inliers),
                ("matrices", geometry.matrix),
                ("cam1_from_cam0", geometry.cam1_from_cam0),
                ("pairs", (number[pair.name0], number[pair.name1])),
            ):
                arrays[name].append(values)
        if sum(arrays["covariances"].counts) != sum(arrays["keypoints"].counts):
            del arrays["covariances"]
        small = {
            "names": np.array([image.name for image in images]),
            "sizes": np.array([image.size for image in images], dtype=np.int32),
            "kinds": np.array(kinds, dtype=np.str_),
            "statuses": np.array(statuses, dtype=np.str_),
            "keypoint_offsets": np.cumsum([0, *arrays["keypoints"].counts], dtype=np.int64),
            "match_offsets": np.cumsum([0, *arrays["matches"].counts], dtype=np.int64),
        }
        with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.comment = MARK
            for name, column in arrays.items():
                column.write(archive, name)
            for name, array in small.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    return report


class _Rows:
    """Rows of one type that go to a file, because the header of an array begins with their number."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self._path, self._dtype, self._shape = path, dtype, shape
        self.counts: list[int] = []  # rows of each block
        path.touch()

    def append(self, rows: object) -> None:
        """Add a block of rows; None is one of NaN."""
        rows = np.full(self._shape, np.nan) if rows is None else rows
        array = np.ascontiguousarray(rows, dtype=self._dtype).reshape(-1, *self._shape)
        self.counts.append(len(array))
        with self._path.open("ab") as file:
            file.write(array.tobytes())

    def write(self, archive: zipfile.ZipFile, name: str) -> None:
        """Put the rows into an archive as one array."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (sum(self.counts), *self._shape),
        }
        with archive.open(f"{name}.npy", "w", force_zip64=True) as member, self._path.open("rb") as file:
            np.lib.format.write_array_header_2_0(member, header)
            shutil.copyfileobj(file, member, 1 << 20)
