"""Readers of published benchmarks in their distributed layouts.

HPatches: `hpatches-sequences-release` (Balntas et al. 2017). ScanNet-1500 and MegaDepth-1500: text lists of
pairs with intrinsics and pose (SuperGlue, glue-factory), or LoFTR's scene files `*.npz`. WxBS: version 1.1.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from matcher.errors import UsageError
from matcher.files import open_given
from matcher.lab.pairs.folders import read_matrix
from matcher.lab.pairs.protocols import CorrespondencePair, HomographyPair, PairImage, PairSet, PosePair

# Sequences beyond 1600 × 1200 pixels, left out since D2-Net (Dusmanu et al. 2019): 540 pairs remain.
_LARGE = (
    "i_contruction",
    "i_crownnight",
    "i_dc",
    "i_pencils",
    "i_whitebuilding",
    "v_artisans",
    "v_astronautis",
    "v_talent",
)
_LONGEST_LINE = 1 << 16  # bytes
_SHORTER_SIDE = 480  # pixels, as in published results
_KINDS = {"i_": "illumination", "v_": "viewpoint"}


def read_hpatches(folder: Path) -> PairSet:
    """SEQUENCE/1.ppm … 6.ppm with H_1_2 … H_1_6; measured at a shorter side of 480 pixels."""
    pairs = []
    for path in sorted(folder.glob("*/H_1_*")):
        sequence, number = path.parent, path.name.removeprefix("H_1_")
        if sequence.name in _LARGE:
            continue
        sides = (PairImage(sequence / "1.ppm"), PairImage(sequence / f"{number}.ppm"))
        group = _KINDS.get(sequence.name[:2], "")
        pairs.append(HomographyPair(f"{sequence.name} 1-{number}", group, *sides, read_matrix(path, (3, 3))))
    note = f"The {len(_LARGE)} large sequences are left out. Shorter side {_SHORTER_SIDE} px"
    return PairSet("hpatches", "homography", tuple(pairs), shorter_side=_SHORTER_SIDE, oracle=True, note=note)


def is_wxbs(folder: Path) -> bool:
    """Whether a folder, or its `v1.1`, has the layout of WxBS."""
    return any(_wxbs_root(folder).glob("*/*/corrs.txt"))


def read_wxbs(folder: Path) -> PairSet:
    """Mishkin et al. 2015, version 1.1: CATEGORY/PAIR/01.png, 02.png, corrs.txt (x0 y0 x1 y1 per line)."""
    pairs, root = [], _wxbs_root(folder)
    for path in sorted(root.glob("*/*/corrs.txt")):
        labels = read_matrix(path, (-1, 4))
        sides = (PairImage(path.parent / "01.png"), PairImage(path.parent / "02.png"))
        name = f"{path.parent.parent.name}/{path.parent.name}"
        both = labels[:, :2], labels[:, 2:]
        pairs.append(CorrespondencePair(name, path.parent.parent.name, *sides, *both, dense=False))
    note = "A few dozen correspondences per pair are labelled by hand; mAA@10 px is the published metric"
    return PairSet("wxbs", "correspondences", tuple(pairs), note=note)


def _wxbs_root(folder: Path) -> Path:
    return next((root for root in (folder / "v1.1", folder) if root.is_dir()), folder)


def is_pair_list(path: Path) -> bool:
    """Whether the first line of a text file is an image pair with intrinsics and pose."""
    try:
        with open_given(path) as file:
            return _parse_line(file.readline(_LONGEST_LINE).decode("utf-8").split()) is not None
    except (OSError, UnicodeDecodeError):
        return False


def read_pair_list(path: Path, images: Path | None = None) -> PairSet:
    """One pair per line: `name0 name1 [rotation0 rotation1] K0 K1 cam1_from_cam0`, matrices row by row.

    SuperGlue writes both rotations and a 4×4 pose (38 words), glue-factory a 4×4 pose or R and t (36 or 32).
    The rotations (multiples of 90°) are not applied: K and pose are those of the stored images.

    Args:
        path: the list.
        images: the folder that the names are relative to; by default the folder of the list, its `images` or
            `scans_test`, or a folder above, whichever has the first image.

    Raises:
        UsageError: a malformed line, or images that are not found.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if line.strip():
            row = _parse_line(line.split())
            if row is None:
                raise UsageError(
                    f"{path}, line {number}: not `name0 name1 [rot0 rot1] K0 K1 cam1_from_cam0` "
                    "(38, 36 or 32 words, the matrices of finite numbers)"
                )
            rows.append(row)
    if not rows:
        raise UsageError(f"{path}: the list is empty")
    root = _image_root(path, rows[0][0], images)
    pairs = tuple(
        PosePair(f"{name0} {name1}", "", PairImage(root / name0), PairImage(root / name1), K0, K1, T)
        for name0, name1, K0, K1, T in rows
    )
    return PairSet(path.stem, "pose", pairs, note="The rotations in the list are not applied")


def read_scene_files(folder: Path, images: Path | None = None) -> PairSet:
    """LoFTR's MegaDepth-1500: `0015_0.1_0.3.npz` … with image_paths, intrinsics, poses, pair_infos.

    Poses are cam_from_world. Image paths begin at MegaDepth's root (`Undistorted_SfM/0015/images/…`).

    Raises:
        UsageError: a file of another layout, or images that are not found.
    """
    pairs: list[PosePair] = []
    for path in scene_files(folder):
        try:
            pairs += _scene_pairs(path, _read_scene(path), images)
        except UsageError:
            raise
        except (TypeError, ValueError, IndexError, np.linalg.LinAlgError) as error:
            raise UsageError(f"{path}: not one of LoFTR's scene files ({error}); fetch it again") from error
    return PairSet("megadepth1500", "pose", tuple(pairs))


def _scene_pairs(path: Path, scene: dict[str, Any], images: Path | None) -> list[PosePair]:
    pairs, root = [], images
    for info in scene["pair_infos"]:
        a, b = (int(i) for i in info[0])
        name0, name1 = str(scene["image_paths"][a]), str(scene["image_paths"][b])
        root = root or _image_root(path, name0, None)
        K0, K1 = (np.asarray(scene["intrinsics"][i], dtype=np.float64).reshape(3, 3) for i in (a, b))
        T0, T1 = (np.asarray(scene["poses"][i], dtype=np.float64).reshape(4, 4) for i in (a, b))
        sides = (PairImage(root / name0), PairImage(root / name1))
        pairs.append(PosePair(f"{path.stem} {a}-{b}", path.stem, *sides, K0, K1, T1 @ np.linalg.inv(T0)))
    return pairs


def scene_files(folder: Path) -> list[Path]:
    """LoFTR's scene files in a folder or its `megadepth_test_1500_scene_info`."""
    found = []
    for path in sorted([*folder.glob("*.npz"), *folder.glob("megadepth_test_1500_scene_info/*.npz")]):
        try:
            with zipfile.ZipFile(path) as archive:
                names = set(archive.namelist())
        except (OSError, zipfile.BadZipFile):
            continue
        if {"image_paths.npy", "intrinsics.npy", "poses.npy", "pair_infos.npy"} <= names:
            found.append(path)
    return found


def _parse_line(words: list[str]) -> tuple[str, str, np.ndarray, np.ndarray, np.ndarray] | None:
    if len(words) not in (32, 36, 38):
        return None
    try:
        values = np.array([float(word) for word in words[4 if len(words) == 38 else 2 :]])
    except ValueError:
        return None
    if not np.isfinite(values).all():
        return None
    T = np.eye(4)
    if len(values) == 30:
        T[:3, :3], T[:3, 3] = values[18:27].reshape(3, 3), values[27:]
    else:
        T = values[18:].reshape(4, 4)
    return words[0], words[1], values[:9].reshape(3, 3), values[9:18].reshape(3, 3), T


def _image_root(source: Path, name: str, images: Path | None) -> Path:
    here = source.parent
    folders = (
        here,
        here / "images",
        here / "scans_test",
        here.parent,
        here.parent / "images",
        here.parent.parent,
    )
    candidates = (images,) if images is not None else folders
    for folder in candidates:
        if (folder / name).is_file():
            return folder
    tried = ", ".join(map(str, candidates))
    raise UsageError(f"{source}: its first image {name} is not in {tried}; give its folder with --images")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays and plain values only: a scene file may come from an untrusted source."""

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "numpy" and name in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a scene file")


def _read_scene(path: Path) -> dict[str, Any]:
    names = ("image_paths", "intrinsics", "poses", "pair_infos")
    try:
        with zipfile.ZipFile(path) as archive:
            scene = {}
            for name in names:
                with archive.open(f"{name}.npy") as file:
                    scene[name] = _read_array(file)
        return scene
    except (OSError, ValueError, KeyError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path}: not one of LoFTR's scene files ({error}); fetch it again") from error


def _read_array(file: BinaryIO) -> np.ndarray:
    """One `.npy`; object arrays go through the restricted unpickler."""
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = reader(file)
    if dtype.hasobject:
        return _ArraysOnly(file, encoding="latin1").load()
    return np.frombuffer(file.read(), dtype=dtype).reshape(shape, order="F" if by_columns else "C")
