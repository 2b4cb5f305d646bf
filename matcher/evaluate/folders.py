"""Readers of benchmark folders in their distributed layouts: each turns a folder into pairs."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.errors import MALFORMED, IntegrityError, UsageError, counted
from matcher.evaluate.protocols import (
    CorrespondencePair,
    DepthCamera,
    DepthPair,
    HomographyPair,
    PairImage,
    PairSet,
    PosePair,
    reproject,
)
from matcher.files import open_text, read_text
from matcher.images import read_image

# Sequences beyond 1600 × 1200 pixels, left out since D2-Net (Dusmanu et al. 2019): 540 pairs remain.
_LARGE_I = ("i_contruction", "i_crownnight", "i_dc", "i_pencils", "i_whitebuilding")
_LARGE = (*_LARGE_I, "v_artisans", "v_astronautis", "v_talent")

# Files of a layout, one of which a folder has, and what the tables say of its ground truth.
HPATCHES, WXBS = ("*/H_1_2", "hpatches-sequences-release/*/H_1_2"), ("*/*/corrs.txt", "v1.1/*/*/corrs.txt")
BY_HAND = "A few dozen correspondences per pair are labelled by hand; mAA@10 px is the published metric"
BY_LANDMARKS = "Accurate to 1-2 px; without pairs not rigid or of a median landmark residual of 3 px or more"
BY_SFM = "The poses come from structure from motion and are not independent ground truth"

DRAWN_ANGLES = (8, 30, 60, 110, 181)  # degrees between optical axes; of drawn pairs as many between each two
TRACKED = "The poses are of the headset's tracking, to some 3 px: rely on the pose AUC and on precision@10 px"


def _sides(folder: Path, name0: str, name1: str) -> tuple[PairImage, PairImage]:
    return PairImage(folder / name0), PairImage(folder / name1)


def _name(images: Sequence[str]) -> str:
    return "-".join(Path(name).stem for name in images)


def hpatches(folder: Path) -> Iterator[HomographyPair]:
    """SEQUENCE/1.ppm … 6.ppm with H_1_2 … H_1_6, in the folder or its `hpatches-sequences-release`."""
    kinds = {"i_": "illumination", "v_": "viewpoint"}
    for path in sorted([*folder.glob("*/H_1_*"), *folder.glob("hpatches-sequences-release/*/H_1_*")]):
        sequence, number = path.parent, path.name.removeprefix("H_1_")
        if sequence.name not in _LARGE:
            name, group = f"{sequence.name} 1-{number}", kinds.get(sequence.name[:2], "")
            sides = _sides(sequence, "1.ppm", f"{number}.ppm")
            yield HomographyPair(name, group, *sides, read_homography(path))


def hpatches_note(folder: Path) -> str:
    """What a table says of these pairs: sequences that lack homographies, and how many are left out."""
    found = sorted({path.parent for path in folder.rglob("1.ppm")} - {folder})
    counts = {path.name: len([*path.glob("H_1_*")]) for path in found if path.name not in _LARGE}
    few = [f"{name} has {number} of 5 homographies" for name, number in counts.items() if number < 5]
    notes, large = [f"Incomplete: {', '.join(few)}"] * bool(few), len(found) - len(counts)
    return ". ".join(notes + [f"Left out for their size: {counted(large, 'sequence')}"] * bool(large))


def affine(folder: Path) -> Iterator[HomographyPair]:
    """The Oxford affine-covariant layout: img1 … imgN, H1toNp (3×3 text), in the folder or its subfolders."""

    def view(stem: str) -> PairImage:
        for suffix in (suffixes := (".png", ".ppm", ".pgm", ".jpg")):
            if (path := sequence / f"{stem}{suffix}").is_file():
                return PairImage(path)
        raise UsageError(f"{sequence}: no image {stem} ({', '.join(suffixes)}) for its homography")

    for path in sorted([*folder.glob("H1to*p"), *folder.glob("*/H1to*p")]):
        sequence, number = path.parent, path.name.removeprefix("H1to").removesuffix("p")
        if number != "1":
            name, sides = f"{sequence.name} 1-{number}", (view("img1"), view(f"img{number}"))
            yield HomographyPair(name, sequence.name, *sides, read_homography(path))


def middlebury(folder: Path) -> Iterator[CorrespondencePair]:
    """Middlebury 2003: SCENE/im2.png, im6.png, disp2.pgm (disparity × 4; 0 is unknown)."""
    for path in sorted(folder.glob("*/disp2.pgm")):
        disparity = read_image(path, resize=None).pixels
        disparity = disparity if disparity.ndim == 2 else disparity[..., 0]
        y, x = np.nonzero(disparity)
        points0, points1 = (np.stack([x, y], axis=1).astype(np.float32) for _ in range(2))
        points1[:, 0] -= np.float32(0.25) * disparity[y, x]
        name, sides = path.parent.name, _sides(path.parent, "im2.png", "im6.png")
        yield CorrespondencePair(name, name, *sides, points0, points1)


def wxbs(folder: Path) -> Iterator[CorrespondencePair]:
    """Mishkin et al. 2015, version 1.1: CATEGORY/PAIR/01.png, 02.png, corrs.txt (x0 y0 x1 y1 per line)."""
    for path in sorted([*folder.glob("*/*/corrs.txt"), *folder.glob("v1.1/*/*/corrs.txt")]):
        labels, category = read_matrix(path, (-1, 4)), path.parent.parent.name
        name, sides = f"{category}/{path.parent.name}", _sides(path.parent, "01.png", "02.png")
        yield CorrespondencePair(name, category, *sides, labels[:, :2], labels[:, 2:], dense=False)


def multimodal(folder: Path) -> Iterator[HomographyPair]:
    """Remote-sensing pairs with homographies fitted to landmarks; coarse and non-rigid pairs are left out."""
    if (folder / "cameras.json").is_file():
        return
    keys = ("pair", "category", "image_fix", "image_mov", "landmark_median_residual_px", "nonrigid")
    for row in read_rows(folder / "pairs.json", keys):
        if row["landmark_median_residual_px"] < 3 and not row["nonrigid"]:
            path, key = folder / f"{row['pair']}_gt.json", "H_mov_to_fix_0based"
            matrix = read_homography(path, read_rows(path, (key,))[0][key])
            sides = _sides(folder, row["image_mov"], row["image_fix"])
            yield HomographyPair(row["pair"], Path(row["category"]).name, *sides, matrix)


def kitti(folder: Path) -> Iterator[PosePair]:
    """KITTI-like sequences: image_l/*.png, calib.txt (P0 first), poses.txt (world_from_cam)."""
    for sequence, frames, poses in sequences(folder):
        path = sequence / "calib.txt"
        K = read_K(read_matrix(path, (-1, 12))[0].reshape(3, 4)[:, :3], path)
        for gap in (3, 8, 15):
            for a, b in enumerate(range(gap, len(frames))):
                sides, pose = (PairImage(frames[a]), PairImage(frames[b])), np.linalg.inv(poses[b]) @ poses[a]
                yield PosePair(f"{sequence.name} {a}-{b}", f"gap {gap}", *sides, K, K, pose)


def sequences(folder: Path) -> Iterator[tuple[Path, list[Path], np.ndarray]]:
    """Each sequence, its left frames, and their (N, 4, 4) world_from_cam in metres."""
    for sequence in sorted(path.parent for path in folder.rglob("poses.txt")):
        frames = sorted((sequence / "image_l").glob("*.png"))
        path = sequence / "poses.txt"
        poses = np.insert(read_matrix(path, (-1, 12)).reshape(-1, 3, 4), 3, [0, 0, 0, 1], axis=1)
        for number, pose in enumerate(poses, 1):
            read_pose(pose, f"{path}, pose {number}")
        if len(frames) != len(poses):
            raise UsageError(f"{sequence}: {len(frames)} images but {len(poses)} poses; fetch it again")
        yield sequence, frames, poses


def posed(folder: Path) -> Iterator[PosePair]:
    """All pairs of the photos in poses.json: image, K, R (cam_from_world), C (centre); arbitrary scale."""
    path = folder / "poses.json"
    rows = [row for row in read_rows(path, ("image", "K", "R", "C")) if (folder / row["image"]).is_file()]
    for row0, row1 in combinations(rows, 2):
        (K0, pose0), (K1, pose1) = (camera_of(row, path) for row in (row0, row1))
        images, pose = (row0["image"], row1["image"]), pose1 @ np.linalg.inv(pose0)
        yield PosePair(_name(images), "", *_sides(folder, *images), K0, K1, pose)


def camera_of(view: dict[str, Any], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """K (3, 3) and cam_from_world (4, 4) of a row with K, R and C that was read from `path`."""
    pose = np.eye(4)
    pose[:3, :3] = read_array(view["R"], (3, 3), path)
    pose[:3, 3] = -pose[:3, :3] @ read_array(view["C"], (3,), path)
    return read_K(view["K"], path), read_pose(pose, path)


# Files of these folders; `UsageError` where one is damaged or of another kind.


def read_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The numbers of a text file as a float64 array of that shape; −1 stands for any length."""
    try:
        values = np.loadtxt(read_text(path).splitlines(), dtype=np.float64)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a text file of numbers ({error}); fetch the file again") from error
    return read_array(values, shape, path)


def read_array(values: Any, shape: tuple[int, ...], where: Path | str) -> np.ndarray:
    """Values read from `where` as a finite float64 array of that shape; −1 stands for any length."""
    try:
        found = np.array(values, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {shape} numbers are needed ({error}); correct the file") from error
    if not np.isfinite(found).all():
        raise UsageError(f"{where}: has numbers that are not finite; correct the file")
    return found


def read_homography(path: Path, values: Any = None) -> np.ndarray:
    """An invertible (3, 3) matrix of these values, by default the numbers of the text file."""
    matrix = read_matrix(path, (3, 3)) if values is None else read_array(values, (3, 3), path)
    if np.linalg.cond(matrix) > 1e12:  # in pixels, those of views are far below
        raise UsageError(f"{path}: a singular matrix is no homography between images; correct the file")
    return matrix


def read_K(values: Any, where: Path | str) -> np.ndarray:
    """A (3, 3) calibration matrix with positive focal lengths and no skew."""
    matrix = read_array(values, (3, 3), where)
    try:
        return Camera.from_K(matrix).K
    except UsageError as error:
        raise UsageError(f"{where}: {error}; correct it") from error


def read_pose(values: Any, where: Path | str, *, moved: bool = False) -> np.ndarray:
    """A (4, 4) rigid motion, as files round its numbers; of two views that must be apart, `moved`."""
    pose, wrong = read_array(values, (4, 4), where), None
    R = pose[:3, :3]
    if np.abs(R.T @ R - np.eye(3)).max() > 1e-2 or np.linalg.det(R) < 0:
        wrong = "has no rotation in its first three columns"
    elif np.abs(pose[3] - [0, 0, 0, 1]).max() > 1e-2:
        wrong = "does not end with 0 0 0 1"
    elif moved and np.abs(pose[:3, 3]).max() < 1e-9:  # no more than rounding leaves of one view twice
        wrong = "has no translation, so that the pair has no epipolar geometry"
    if wrong is not None:
        raise UsageError(f"{where}: the pose {wrong}; correct it")
    return pose


def read_step(value: Any, path: Path) -> int:
    """Pixels from one sample of the depth maps to the next."""
    if (step := int(value)) < 1:
        raise UsageError(f"{path}: depth_step must be at least 1, not {step}")
    return step


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file, one or a list, each with at least these keys."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    rows = found if isinstance(found, list) else [found]
    if not rows or not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows):
        raise UsageError(f"{path}: not the file of a benchmark; objects with {', '.join(keys)} are needed")
    return rows


# Lists of pairs, and the scene files of MegaDepth-1500: the images may lie elsewhere.


def is_pair_list(path: Path) -> bool:
    """Whether the first row of a text file is an image pair with intrinsics and pose."""
    try:
        with open_text(path) as file:
            start = file.read(1 << 16).splitlines()
    except OSError:
        return False
    return any(_parse_line(words) is not None for _, words in islice(_rows(start), 1))


def _rows(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Number and words of each line that is neither empty nor a comment."""
    split = ((number, line.split()) for number, line in enumerate(lines, 1))
    return ((number, words) for number, words in split if words and not words[0].startswith("#"))


def pair_list(path: Path, images: Path | None = None) -> PairSet:
    """One pair per line: `name0 name1 [rotation0 rotation1] K0 K1 cam1_from_cam0`, matrices row by row, of
    the stored images: the rotations (multiples of 90°) are not applied. SuperGlue writes 38 words,
    glue-factory 36, or 32 with R and t."""
    pairs, root = [], images
    with open_text(path) as file:
        for number, words in _rows(file):
            where = f"{path}, line {number}"
            if (row := _parse_line(words)) is None:
                strange = [f", {word!r} among them" for word in words[2:] if not _is_finite(word)][:1]
                raise UsageError(
                    f"{where}: {counted(len(words), 'word')}{''.join(strange)}; a list of pairs has lines of "
                    "38, 36 or 32: name0 name1 [rot0 rot1] K0 K1 cam1_from_cam0, finite numbers but for names"
                )
            name0, name1, K0, K1, pose = row
            truth = read_K(K0, where), read_K(K1, where), read_pose(pose, where, moved=True)
            root = root if pairs else _image_root(path, name0, images)
            pairs.append(PosePair(f"{name0} {name1}", "", *_sides(root, name0, name1), *truth))
    if not pairs:
        raise UsageError(f"{path}: an empty list of pairs")
    return PairSet(path.stem, "pose", tuple(pairs), note="The rotations in the list are not applied")


def _parse_line(words: list[str]) -> tuple[str, str, np.ndarray, np.ndarray, np.ndarray] | None:
    numbers = words[4 if len(words) == 38 else 2 :]  # 32: R and t; 36: a matrix; 38: that with rotations
    if len(words) not in (32, 36, 38) or not all(map(_is_finite, numbers)):
        return None
    values = np.array(numbers, dtype=float)
    T = np.eye(4)
    if len(values) == 30:
        T[:3] = np.column_stack([values[18:27].reshape(3, 3), values[27:]])
    else:
        T = values[18:].reshape(4, 4)
    return words[0], words[1], values[:9].reshape(3, 3), values[9:18].reshape(3, 3), T


def _is_finite(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _image_root(source: Path, name: str, images: Path | None) -> Path:
    """Where the first image of a list is: `images`, or a folder beside, below or above the list."""
    here, above = source.parent, source.parent.parent
    usual = (here, here / "images", here / "scans_test", above, above / "images", above.parent)
    candidates = usual if images is None else (images,)
    for folder in candidates:
        if (folder / name).is_file():
            return folder
    tried = ", ".join(map(str, candidates))
    raise UsageError(f"{source}: its first image {name} is not in {tried}; give its folder with --images")


def megadepth(folder: Path, images: Path | None = None) -> Iterator[PosePair]:
    """LoFTR's MegaDepth-1500: `0015_0.1_0.3.npz` … with image_paths, intrinsics, poses (cam_from_world) and
    pair_infos, in the folder or its `megadepth_test_1500_scene_info`; image paths from MegaDepth's root."""
    for path in sorted([*folder.glob("*.npz"), *folder.glob("megadepth_test_1500_scene_info/*.npz")]):
        if not (zipfile.is_zipfile(path) and zipfile.Path(path, "pair_infos.npy").exists()):
            continue
        try:
            keys, found = ("image_paths", "intrinsics", "poses", "pair_infos"), []
            with zipfile.ZipFile(path) as archive:
                names, K, poses, infos = (_read_array(archive.open(f"{key}.npy")) for key in keys)
            for a, b in (map(int, info[0]) for info in infos):
                where = f"{path}, images {a} and {b}"
                T0, T1 = (read_pose(poses[i], where) for i in (a, b))
                pose = read_pose(T1 @ np.linalg.inv(T0), where, moved=True)
                views = *(names[i] for i in (a, b)), *(read_K(K[i], where) for i in (a, b))
                found.append((f"{path.stem} {a}-{b}", *views, pose))
        except UsageError:
            raise
        except (*MALFORMED, pickle.UnpicklingError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path}: not one of LoFTR's scene files ({error}); fetch it again") from error
        root = _image_root(path, str(found[0][1]), images) if found else path.parent
        for name, name0, name1, *truth in found:
            yield PosePair(name, path.stem, *_sides(root, str(name0), str(name1)), *truth)


class _ArraysOnly(pickle.Unpickler):
    """Unpickles NumPy arrays and plain values only: a scene file may come from an untrusted source."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"}
        if module.split(".")[0] == "numpy" and name in allowed:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a scene file")


def _read_array(file: BinaryIO) -> np.ndarray:
    """One `.npy`; object arrays go through the restricted unpickler."""
    version = np.lib.format.read_magic(file)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, dtype = reader(file)
    if dtype.hasobject:
        return _ArraysOnly(file, encoding="latin1").load()
    return np.frombuffer(file.read(), dtype=dtype).reshape(shape, order="F" if by_columns else "C")


# Calibrated views with depth maps, to measure and to train on.


def recorded(folder: Path) -> Iterator[DepthPair]:
    """`images/`, `depth/`, `cameras.json` (K, frames with image and world_from_camera) and `pairs.json`."""
    if _is_rendered(folder):
        return
    frames, path = frames_of(folder), folder / "pairs.json"
    for row in read_rows(path, ("image0", "image1", "overlap")):
        names = row["image0"], row["image1"]
        if not set(names) <= frames.keys():
            raise UsageError(f"{path}: {names} are not both among the frames of {folder / 'cameras.json'}")
        yield _pair(folder / "images", names, [frames[name] for name in names], row["overlap"])


def drawn(folder: Path, count: int, seed: int) -> tuple[DepthPair, ...]:
    """`count` pairs of a `recorded` set at random that `pairs.json` does not list, as many of each kind of
    angle."""
    frames, names = frames_of(folder), ("image0", "image1")
    listed = {frozenset(row[n] for n in names) for row in read_rows(folder / "pairs.json", names)}
    wanted = count // (len(DRAWN_ANGLES) - 1)
    found: dict[tuple[float, float], list[DepthPair]] = {}
    for pair in np.random.default_rng(seed).permutation(list(combinations(frames, 2))).tolist():
        views = [frames[name] for name in pair]
        angle = _angle(*views)
        kind = found.setdefault(_between(angle, DRAWN_ANGLES), [])
        if frozenset(pair) in listed or angle < DRAWN_ANGLES[0] or len(kind) == wanted:
            continue
        overlap = overlap_of(*views)
        if overlap > 0.2:
            overlap = min(overlap, overlap_of(*reversed(views)))
        if 0.2 < overlap < 0.75:  # neither hopeless nor easy
            kind.append(_pair(folder / "images", pair, views, overlap, DRAWN_ANGLES))
    return tuple(pair for _, kind in sorted(found.items()) for pair in kind)


def frames_of(folder: Path) -> dict[str, DepthCamera]:
    """The views of a recorded set, by the names of their images."""
    path = folder / "cameras.json"
    cameras = read_rows(path, ("K", "frames"))[0]
    K, stride, frames = read_K(cameras["K"], path), read_step(cameras.get("depth_step", 2), path), {}
    for row in cameras["frames"]:
        pose = np.linalg.inv(read_pose(row["world_from_camera"], f"{path}, {row['image']}"))
        depth = folder / "depth" / f"{Path(row['image']).stem}.png"
        frames[row["image"]] = DepthCamera(depth, stride, K, pose)
    return frames


def rendered(folder: Path, relit: bool = False) -> Iterator[DepthPair | HomographyPair]:
    """`cameras.json` (depth_step, views with image, depth, K, E and group): pairs of different viewpoints, or
    those of one viewpoint under two lights."""
    if not _is_rendered(folder):
        return
    path = folder / "cameras.json"
    scene = read_rows(path, ("views", "depth_step"))[0]
    for pair in pairs_of(folder, scene["views"]):
        rows = [scene["views"][number] for number in pair]
        images, lights = [row["image"] for row in rows], [row.get("light") for row in rows]
        if (rows[0]["E"] == rows[1]["E"]) != relit:
            continue
        if relit:
            kinds = (str(scene["lights"][k]["kind"] if scene.get("lights") else k) for k in lights)
            group = " and ".join(sorted(kinds))
            yield HomographyPair(_name(images), group, *_sides(folder, *images), np.eye(3))
            continue
        views = []
        for row in rows:
            where = f"{path}, {row['image']}"
            K, E = read_K(row["K"], where), read_pose(row["E"], where)
            views.append(DepthCamera(folder / row["depth"], read_step(scene["depth_step"], path), K, E))
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= 0.15:  # less is hopeless
            light = "same light" if lights[0] == lights[1] else "different lights"
            yield _pair(folder, images, views, overlap, more=f"; {light}")


def _is_rendered(folder: Path) -> bool:
    return not (folder / "pairs.json").exists() or b'"views"' in (folder / "cameras.json").read_bytes()


def _pair(
    folder: Path,
    images: Sequence[str],
    views: Sequence[DepthCamera],
    overlap: float,
    angles: Sequence[float] = (0, 15, 30, 60, 181),
    more: str = "",
) -> DepthPair:
    least, most = _between(overlap, (0.0, 0.3, 0.5, 1.01))
    low, high = _between(_angle(*views), angles)
    group = f"overlap {100 * least:.0f}–{min(100, 100 * most):.0f} %; angle {low}–{min(180, high)}°{more}"
    pose = views[1].cam_from_world @ np.linalg.inv(views[0].cam_from_world)
    K0, K1 = (view.K for view in views)
    return DepthPair(_name(images), group, *_sides(folder, *images), K0, K1, pose, *views)


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that are visible in view 1."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, 16) for side in (width, height)))  # enough
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    reprojected, visible = reproject(points, view0, view1)
    known = ~np.isnan(reprojected[:, 0])
    return float(visible[known].mean()) if known.any() else 0.0


def _angle(view0: DepthCamera, view1: DepthCamera) -> float:
    """Degrees between the optical axes."""
    axes = view0.cam_from_world[2, :3] @ view1.cam_from_world[2, :3]
    return float(np.degrees(np.arccos(np.clip(axes, -1, 1))))


def _between(value: float, bounds: Sequence[float]) -> tuple[float, float]:
    at = int(np.clip(np.searchsorted(bounds, value, side="right"), 1, len(bounds) - 1))
    return bounds[at - 1], bounds[at]


class StoredSet(NamedTuple):
    """A folder of views in the layout of `rendered`, of rooms or real places, to train on."""

    folder: Path
    views: list[dict[str, Any]]  # as in cameras.json
    step: int  # pixels from one sample of the depth maps to the next
    pairs: np.ndarray  # (P, 2) int64


def find_stored_sets(root: Path) -> list[StoredSet]:
    """All sets below a folder, sorted, that have pairs; `UsageError` without any."""
    sets = []
    for path in sorted(root.rglob("cameras.json")):
        try:
            stored = json.loads(read_text(path))
            views, step = list(stored["views"]), read_step(stored["depth_step"], path)
            for view in views:
                _sides(path.parent, view["image"], view["depth"])
                read_K(view["K"], view["image"])
                read_pose(view["E"], view["image"])
        except MALFORMED as error:
            raise IntegrityError(f"{path} is damaged ({error})") from error
        sets.append(StoredSet(path.parent, views, step, pairs_of(path.parent, views)))
    sets = [each for each in sets if len(each.pairs)]
    if not sets:
        raise UsageError(f"{root}: no views here (looked for folders with cameras.json)")
    return sets


def pairs_of(folder: Path, views: Sequence[dict[str, Any]]) -> np.ndarray:
    """(P, 2) int64 the pairs of views that `pairs.json` lists, or without it all pairs of a group."""
    path = folder / "pairs.json"
    try:
        if path.exists():
            pairs = [row[:2] for row in json.loads(read_text(path))]
        else:
            path = folder / "cameras.json"
            groups = [view["group"] for view in views]
            pairs = [(i, j) for i, j in combinations(range(len(views)), 2) if groups[i] == groups[j]]
        found = np.array(pairs, np.int64).reshape(-1, 2)
    except MALFORMED as error:
        raise IntegrityError(f"{path} is damaged ({error})") from error
    if found.size and not 0 <= found.min() <= found.max() < len(views):
        raise IntegrityError(f"{path} lists views that are not in {folder / 'cameras.json'}")
    return found
