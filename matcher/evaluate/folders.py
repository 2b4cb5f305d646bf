"""Readers of the benchmark folders used in development: each turns a folder into a `PairSet`."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, BinaryIO, Literal

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.errors import UsageError
from matcher.evaluate.posed import DensePair, PairSource, StoredViews, pairs_of
from matcher.evaluate.protocols import (
    CorrespondencePair,
    DepthCamera,
    DepthPair,
    DrawnPhotos,
    HomographyPair,
    PairImage,
    PairSet,
    PhotoSet,
    PosePair,
    augment,
    darken,
    reproject,
)
from matcher.evaluate.synthetic import SceneRecipe, View, build_planes, place_camera, plane_positions, render
from matcher.files import open_given
from matcher.images import data_folder, find_images, read_image
from matcher.sfm.models import read_given_poses
from matcher.train.relief import Relief, photo_texture

# --- folders: Readers of the benchmark folders used in development: each turns a folder into a `PairSet`.

MAX_LANDMARK_RESIDUAL = 3.0  # pixels; coarser pairs of `multimodal` are left out
FRAME_GAPS = (3, 8, 15)
_VIEW_SUFFIXES = (".png", ".ppm", ".pgm", ".jpg")


def read_affine(folder: Path) -> PairSet:
    """The Oxford affine-covariant layout: img1 … imgN, H1toNp (3×3 text), in the folder or its subfolders."""
    pairs = []
    for sequence in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        for homography in sorted(sequence.glob("H1to*p")):
            number = homography.name.removeprefix("H1to").removesuffix("p")
            if number == "1":
                continue
            sides = (PairImage(_view(sequence, "img1")), PairImage(_view(sequence, f"img{number}")))
            name = f"{sequence.name} 1-{number}"
            pairs.append(HomographyPair(name, sequence.name, *sides, read_matrix(homography, (3, 3))))
    return PairSet(folder.resolve().name, "homography", tuple(pairs), oracle=True)


def read_opencv_homography(folder: Path) -> PairSet:
    """The graf pair of OpenCV's samples: graf1.png → graf3.png, H1to3p.xml (FileStorage)."""
    path = folder / "H1to3p.xml"
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    try:
        matrix = storage.getNode("H13").mat()
    finally:
        storage.release()
    if matrix is None or matrix.shape != (3, 3):
        raise UsageError(f"{path}: no 3×3 matrix named H13; fetch the file again")
    sides = (PairImage(folder / "graf1.png"), PairImage(folder / "graf3.png"))
    pair = HomographyPair("graf 1-3", "graf", *sides, matrix)
    return PairSet(f"{folder.resolve().name}-homography", "homography", (pair,), oracle=True)


def read_opencv_stereo(folder: Path) -> PairSet:
    """The aloe pair of OpenCV's samples: aloeL.jpg, aloeR.jpg, aloeGT.png (disparity, 0 = unknown)."""
    points0, points1 = _disparity_points(folder / "aloeGT.png", 1.0)
    sides = (PairImage(folder / "aloeL.jpg"), PairImage(folder / "aloeR.jpg"))
    pair = CorrespondencePair("aloe", "aloe", *sides, points0, points1)
    return PairSet(f"{folder.resolve().name}-stereo", "correspondences", (pair,), oracle=True)


def read_middlebury(folder: Path) -> PairSet:
    """Middlebury 2003 stereo: SCENE/im2.png, im6.png, disp2.pgm (disparity × 4, 0 = unknown)."""
    pairs = []
    for scene in sorted(path.parent for path in folder.glob("*/disp2.pgm")):
        sides = (PairImage(scene / "im2.png"), PairImage(scene / "im6.png"))
        points = _disparity_points(scene / "disp2.pgm", 0.25)
        pairs.append(CorrespondencePair(scene.name, scene.name, *sides, *points))
    return PairSet(folder.resolve().name, "correspondences", tuple(pairs), oracle=True)


def read_multimodal(folder: Path) -> PairSet:
    """Remote-sensing pairs with homographies fitted to landmarks; coarse and non-rigid pairs are left out."""
    pairs, left_out = [], 0
    keys = ("pair", "category", "image_fix", "image_mov", "landmark_median_residual_px", "nonrigid")
    for row in read_rows(folder / "pairs.json", keys):
        if not row["landmark_median_residual_px"] < MAX_LANDMARK_RESIDUAL or row["nonrigid"]:
            left_out += 1
            continue
        path = folder / f"{row['pair']}_gt.json"
        (row_of_pair,) = read_rows(path, ("H_mov_to_fix_0based",))
        matrix = read_array(row_of_pair["H_mov_to_fix_0based"], (3, 3), path)
        sides = (PairImage(folder / row["image_mov"]), PairImage(folder / row["image_fix"]))
        pairs.append(HomographyPair(row["pair"], Path(row["category"]).name, *sides, matrix))
    note = (
        f"The ground truth is accurate to 1-2 px. {left_out} pairs that are not rigid or whose median "
        f"landmark residual is {MAX_LANDMARK_RESIDUAL:g} px or more are left out"
    )
    return PairSet(folder.resolve().name, "homography", tuple(pairs), oracle=True, note=note)


def read_kitti(folder: Path) -> PairSet:
    """KITTI-like sequences: image_l/*.png, calib.txt (P0 first), poses.txt (world_from_cam)."""
    pairs = []
    for sequence, frames, rows in _sequences(folder):
        K = read_matrix(sequence / "calib.txt", (-1, 12))[0].reshape(3, 4)[:, :3]
        world_from_cam = [np.vstack([pose, [0, 0, 0, 1]]) for pose in rows]
        for gap in FRAME_GAPS:
            for a in range(len(frames) - gap):
                b = a + gap
                name, pose = f"{sequence.name} {a}-{b}", np.linalg.inv(world_from_cam[b]) @ world_from_cam[a]
                sides = (PairImage(frames[a]), PairImage(frames[b]))
                pairs.append(PosePair(name, f"gap {gap}", *sides, K, K, pose))
    return PairSet(folder.resolve().name, "pose", tuple(pairs))


def distant_frames(folder: Path, metres: float) -> list[tuple[Path, Path]]:
    """Pairs of left frames of one of these sequences whose cameras are so many metres apart, or more."""
    return [
        (frames[a], frames[b])
        for _, frames, poses in _sequences(folder)
        for a, b in combinations(range(len(frames)), 2)
        if np.linalg.norm(poses[a][:, 3] - poses[b][:, 3]) >= metres
    ]


def _sequences(folder: Path) -> Iterator[tuple[Path, list[Path], np.ndarray]]:
    """Each sequence, its left frames, and their (N, 3, 4) world_from_cam in metres."""
    for sequence in sorted(path.parent for path in folder.rglob("poses.txt")):
        frames = sorted((sequence / "image_l").glob("*.png"))
        poses = read_matrix(sequence / "poses.txt", (-1, 12)).reshape(-1, 3, 4)
        if len(frames) != len(poses):
            raise UsageError(f"{sequence}: {len(frames)} images but {len(poses)} poses; fetch it again")
        yield sequence, frames, poses


def read_posed(folder: Path) -> PairSet:
    """All pairs of the photos in poses.json: image, K, R (cam_from_world), C (centre); arbitrary scale."""
    path = folder / "poses.json"
    rows = read_rows(path, ("image", "K", "R", "C"))
    present = [view for view in rows if (folder / view["image"]).is_file()]
    pairs = []
    for view0, view1 in combinations(present, 2):
        (K0, pose0), (K1, pose1) = (_camera(view, path) for view in (view0, view1))
        sides = (PairImage(folder / view0["image"]), PairImage(folder / view1["image"]))
        name = f"{Path(view0['image']).stem}-{Path(view1['image']).stem}"
        pairs.append(PosePair(name, "", *sides, K0, K1, pose1 @ np.linalg.inv(pose0)))
    note = "The poses come from structure from motion and are not independent ground truth"
    if len(present) < len(rows):
        note += f". {len(rows) - len(present)} of {len(rows)} listed photos are absent"
    return PairSet(folder.resolve().name, "pose", tuple(pairs), note=note)


def read_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """The numbers of a text file as a float64 array of that shape; −1 stands for any length.

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        matrix = np.loadtxt(path, dtype=np.float64).reshape(shape)
    except (OSError, ValueError) as error:
        wanted = "×".join("n" if side < 0 else str(side) for side in shape)
        raise UsageError(
            f"{path}: not a text file of {wanted} numbers ({error}); fetch the file again"
        ) from error
    if not np.isfinite(matrix).all():
        raise UsageError(f"{path}: has numbers that are not finite; fetch the file again")
    return matrix


def read_rows(path: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON objects of a file, one or a list, each with at least these keys.

    Raises:
        UsageError: the file cannot be read, or an object lacks a key.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    rows = found if isinstance(found, list) else [found]
    if not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows):
        raise UsageError(f"{path}: not the file of a benchmark; objects with {', '.join(keys)} are needed")
    return rows


def read_array(values: Any, shape: tuple[int, ...], path: Path) -> np.ndarray:
    """Values read from `path` as a float64 array of that shape.

    Raises:
        UsageError: the values do not have that shape or are not numbers.
    """
    try:
        return np.array(values, dtype=np.float64).reshape(shape)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {shape} numbers are needed ({error}); fetch the file again") from error


def _view(folder: Path, stem: str) -> Path:
    for suffix in _VIEW_SUFFIXES:
        if (path := folder / f"{stem}{suffix}").is_file():
            return path
    raise UsageError(f"{folder}: no image {stem} ({', '.join(_VIEW_SUFFIXES)}) for its homography")


def _disparity_points(path: Path, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """(K, 2), (K, 2) float32: the pixels of known disparity and their positions in the right image."""
    disparity = read_image(path, resize=None).pixels
    if disparity.ndim == 3:
        disparity = disparity[..., 0]
    y, x = np.nonzero(disparity)
    points0 = np.stack([x, y], axis=1).astype(np.float32)
    points1 = points0.copy()
    points1[:, 0] -= disparity[y, x].astype(np.float32) * np.float32(factor)
    return points0, points1


def _camera(view: dict[str, Any], path: Path) -> tuple[np.ndarray, np.ndarray]:
    """K (3, 3) and cam_from_world (4, 4)."""
    pose = np.eye(4)
    pose[:3, :3] = read_array(view["R"], (3, 3), path)
    pose[:3, 3] = -pose[:3, :3] @ read_array(view["C"], (3,), path)
    return read_array(view["K"], (3, 3), path), pose


# --- sources: Sources of training pairs, and mixtures of them with the shares of a recipe.

DAY_NIGHT_SHARE = 0.25  # of the views of planes, darkened or brightened as between day and night
MIN_OVERLAP = 0.15  # share of the pixels that are visible in the other image, the smaller of both
ATTEMPTS = 50


@dataclass(frozen=True)
class SourceShares:
    """Shares of the sources in a mixture; any positive numbers."""

    planes: float = 0.0
    relief: float = 1.0
    rendered: float = 0.0  # of stored rendered views
    real: float = 0.0  # of stored views of real scenes

    def shares(self) -> dict[str, float]:
        """By the names of the sources."""
        return {name: getattr(self, name) for name in ("planes", "relief", "rendered", "real")}


class Planes:
    """Photos on one plane, or on several planes in space, seen by two cameras.

    Args:
        photos: textures in colour, which each view converts to grey with its own weights.
        scene: tilts, rotations and zooms; its width and height are not used.
    """

    def __init__(self, photos: PhotoSet, scene: SceneRecipe | None = None) -> None:
        self.photos, self.scene = photos, scene or SceneRecipe()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """See `dense.PairSource`.

        Raises:
            UsageError: not one photo can be read.
        """
        for _ in range(ATTEMPTS):
            photos = DrawnPhotos(self.photos)
            views = self._views(photos, rng, replace(self.scene, width=size[0], height=size[1]))
            positions0, positions1 = plane_positions(*views), plane_positions(*views[::-1])
            if min((positions[0] >= 0).mean() for positions in (positions0, positions1)) > MIN_OVERLAP:
                break
        pixels = [
            augment(darken(v.pixels, rng) if rng.random() < DAY_NIGHT_SHARE else v.pixels, rng) for v in views
        ]
        return DensePair(*pixels, positions0, positions1, "planes", frozenset(photos.names))

    def _views(self, photos: DrawnPhotos, rng: np.random.Generator, scene: SceneRecipe) -> tuple[View, View]:
        spatial = rng.random() < scene.spatial_share
        count = int(rng.integers(3, 6)) if spatial else 1
        planes = build_planes([photo_texture(photos, rng, 640) for _ in range(count)], scene, rng)
        views = []
        for _ in range(2):
            camera = place_camera(scene, spatial, rng)
            backdrop = np.full((scene.height, scene.width), int(rng.integers(256)), np.uint8)
            if rng.random() < 0.5:
                backdrop = cv2.resize(photo_texture(photos, rng), backdrop.shape[::-1])
            views.append(render(planes, camera, backdrop))
        return views[0], views[1]


class Mixture:
    """Pairs from several sources, drawn in proportion to their shares."""

    def __init__(self, sources: Mapping[str, PairSource], shares: Mapping[str, float]) -> None:
        """Keep the sources whose share is above 0.

        Raises:
            UsageError: a share names no source, or none is above 0.
        """
        missing = [name for name, share in shares.items() if share > 0 and name not in sources]
        if missing:
            raise UsageError(f"sources.{missing[0]}: there is no such source; known: {', '.join(sources)}")
        self.names = [name for name in sources if shares.get(name, 0) > 0]
        if not self.names:
            raise UsageError("sources: at least one share must be above 0")
        self.sources = dict(sources)
        weights = np.array([shares[name] for name in self.names], float)
        self.shares = weights / weights.sum()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """A pair of one of the sources; see `dense.PairSource`."""
        name = self.names[int(rng.choice(len(self.names), p=self.shares))]
        return self.sources[name].pair(rng, size)


def build_mixture(
    photos: PhotoSet,
    shares: Mapping[str, float],
    *,
    rendered: Path | None = None,
    real: Path | None = None,
    scene: SceneRecipe | None = None,
) -> Mixture:
    """The mixture of planes and relief made of `photos`, and of views stored below two folders.

    Args:
        photos: in colour.
        shares: by source: `planes`, `relief`, `rendered`, `real`; any positive numbers.
        rendered: folder of rendered sets.
        real: folder of sets of real scenes.
        scene: tilts, rotations and zooms of planes.

    Raises:
        UsageError: a source with a share has no views, or a folder holds none.
    """
    sources: dict[str, PairSource] = {"planes": Planes(photos, scene), "relief": Relief(photos)}
    for name, folder in (("rendered", rendered), ("real", real)):
        if folder is not None and shares.get(name, 0) > 0:
            sources[name] = StoredViews(folder, source=name)
    return Mixture(sources, shares)


# --- multiview: Readers of multi-view sets: calibrated views of a scene with depth maps.

OVERLAPS = (0.0, 0.3, 0.5, 1.01)  # bounds of the overlap groups
ANGLES = (0, 15, 30, 60, 181)  # degrees between the optical axes
DRAWN_ANGLES = (8, 30, 60, 110, 181)  # of pairs that are drawn, as many between each two
DRAWN_OVERLAPS = (0.2, 0.75)  # between which they share their views, the smaller one of both directions
MIN_OVERLAP_MULTIVIEW = 0.15  # the smaller one of both directions; pairs below are left out
_TRACKED = (
    "The poses come from the headset's own tracking and reproject to within about 3 px over ten frames: rely "
    "on the pose AUC and on precision@10 px"
)
_SAMPLING = 16  # pixels between the points by which overlap is measured


def is_recorded(folder: Path) -> bool:
    """Whether a folder has the layout of `read_recorded`."""
    return (folder / "cameras.json").is_file() and not is_rendered(folder)


def is_rendered(folder: Path) -> bool:
    """Whether a folder has the layout of `read_rendered`."""
    path = folder / "cameras.json"
    return path.is_file() and (not (folder / "pairs.json").exists() or b'"views"' in path.read_bytes())


def read_recorded(folder: Path) -> list[PairSet]:
    """`images/`, `depth/`, `cameras.json` (K, frames with image and world_from_camera) and `pairs.json`."""
    frames, pairs = _frames(folder), []
    for row in read_rows(folder / "pairs.json", ("image0", "image1", "overlap")):
        names = row["image0"], row["image1"]
        if not set(names) <= frames.keys():
            raise UsageError(
                f"{folder / 'pairs.json'}: {names} are not both among the frames of {folder / 'cameras.json'}"
            )
        pairs.append(_recorded_pair(folder, names, frames, row["overlap"], ANGLES))
    return [PairSet(folder.resolve().name, "depth", tuple(pairs), note=_TRACKED)]


def draw_recorded(folder: Path, count: int, seed: int) -> PairSet:
    """Pairs that `pairs.json` does not list, drawn at random, as many of each kind of angle between views.

    Args:
        folder: as `read_recorded` reads it.
        count: pairs in all, rounded down to as many of every kind; fewer where the frames have no more.
        seed: of what is drawn.
    """
    frames, names = _frames(folder), ("image0", "image1")
    listed = {frozenset(row[n] for n in names) for row in read_rows(folder / "pairs.json", names)}
    wanted = count // (len(DRAWN_ANGLES) - 1)
    drawn: dict[tuple[float, float], list[DepthPair]] = {}
    for pair in np.random.default_rng(seed).permutation(list(combinations(frames, 2))).tolist():
        views, angle = [frames[name] for name in pair], _angle(*(frames[name] for name in pair))
        kind = drawn.setdefault(_between(angle, DRAWN_ANGLES), [])
        if frozenset(pair) in listed or angle < DRAWN_ANGLES[0] or len(kind) == wanted:
            continue
        overlap = overlap_of(*views)
        if overlap > DRAWN_OVERLAPS[0]:
            overlap = min(overlap, overlap_of(*reversed(views)))
        if DRAWN_OVERLAPS[0] < overlap < DRAWN_OVERLAPS[1]:
            kind.append(_recorded_pair(folder, pair, frames, overlap, DRAWN_ANGLES))
    pairs = [pair for _, kind in sorted(drawn.items()) for pair in kind]
    return PairSet(f"{folder.resolve().name}_angles", "depth", tuple(pairs), note=_TRACKED)


def read_rendered(folder: Path) -> list[PairSet]:
    """Two sets: pairs of views of one group from different viewpoints, and pairs from one viewpoint under
    two lights."""
    path = folder / "cameras.json"
    scene = read_object(path, ("views", "depth_step"))
    posed, relit = [], []
    for pair in pairs_of(folder, scene["views"]):
        row0, row1 = (scene["views"][number] for number in pair)
        sides = [PairImage(folder / row["image"]) for row in (row0, row1)]
        views = [_rendered_camera(row, folder, int(scene["depth_step"]), path) for row in (row0, row1)]
        name = "-".join(Path(row["image"]).stem for row in (row0, row1))
        if row0["E"] == row1["E"]:
            group = " and ".join(sorted(_light(row, scene) for row in (row0, row1)))
            relit.append(HomographyPair(name, group, *sides, np.eye(3)))
            continue
        overlap = min(overlap_of(*views), overlap_of(*reversed(views)))
        if overlap >= MIN_OVERLAP_MULTIVIEW:
            light = "same light" if row0.get("light") == row1.get("light") else "different lights"
            groups = _overlap_group(overlap), _angle_group(_angle(*views), ANGLES), light
            posed.append(depth_pair(name, groups, sides, views))
    title = folder.resolve().name
    found = [PairSet(title, "depth", tuple(posed), oracle=True, note="Depth and poses are exact")]
    if relit:
        found.append(PairSet(f"{title}-light", "homography", tuple(relit), oracle=True))
    return found


def _frames(folder: Path) -> dict[str, DepthCamera]:
    """The views of a recorded set, by the names of their images."""
    path = folder / "cameras.json"
    cameras = read_object(path, ("K", "frames"))
    K = read_array(cameras["K"], (3, 3), path)
    frames, stride = {}, int(cameras.get("depth_step", 2))
    for row in cameras["frames"]:
        pose = np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        depth = folder / "depth" / f"{Path(row['image']).stem}.png"
        frames[row["image"]] = DepthCamera(depth, stride, K, pose)
    return frames


def _recorded_pair(
    folder: Path,
    names: Sequence[str],
    frames: dict[str, DepthCamera],
    overlap: float,
    angles: Sequence[float],
) -> DepthPair:
    views = [frames[name] for name in names]
    groups = _overlap_group(overlap), _angle_group(_angle(*views), angles)
    sides = [PairImage(folder / "images" / name) for name in names]
    return depth_pair("-".join(Path(name).stem for name in names), groups, sides, views)


def depth_pair(
    name: str, groups: tuple[str, ...], sides: Sequence[PairImage], views: Sequence[DepthCamera]
) -> DepthPair:
    """A pair with the relative pose of its two views."""
    view0, view1 = views
    pose = view1.cam_from_world @ np.linalg.inv(view0.cam_from_world)
    return DepthPair(name, groups[0], *sides, view0.K, view1.K, pose, view0, view1, groups[1:])


def overlap_of(view0: DepthCamera, view1: DepthCamera) -> float:
    """Share of the pixels of view 0 with known depth that are visible in view 1."""
    height, width = view0.depth().shape
    xs, ys = np.meshgrid(*(np.arange(0, side * view0.stride, _SAMPLING) for side in (width, height)))
    points = np.column_stack([xs.ravel(), ys.ravel()]).astype(np.float64)
    reprojected, visible = reproject(points, view0, view1)
    known = ~np.isnan(reprojected[:, 0])
    return float(visible[known].mean()) if known.any() else 0.0


def _light(row: dict[str, Any], scene: dict[str, Any]) -> str:
    """The kind of light of a view, which the scene lists or the view names itself."""
    lights = scene.get("lights")
    return str(row["light"] if lights is None else lights[row["light"]]["kind"])


def _rendered_camera(row: dict[str, Any], folder: Path, stride: int, path: Path) -> DepthCamera:
    K, pose = read_array(row["K"], (3, 3), path), read_array(row["E"], (4, 4), path)
    return DepthCamera(folder / row["depth"], stride, K, pose)


def _overlap_group(overlap: float) -> str:
    low, high = _between(overlap, OVERLAPS)
    return f"overlap {100 * low:.0f}–{min(100, 100 * high):.0f} %"


def _angle(view0: DepthCamera, view1: DepthCamera) -> float:
    """Degrees between the optical axes."""
    axes = view0.cam_from_world[2, :3] @ view1.cam_from_world[2, :3]
    return float(np.degrees(np.arccos(np.clip(axes, -1, 1))))


def _angle_group(angle: float, bounds: Sequence[float]) -> str:
    low, high = _between(angle, bounds)
    return f"angle {low}–{min(180, high)}°"


def _between(value: float, bounds: Sequence[float]) -> tuple[float, float]:
    at = int(np.clip(np.searchsorted(bounds, value, side="right"), 1, len(bounds) - 1))
    return bounds[at - 1], bounds[at]


def read_object(path: Path, keys: Sequence[str]) -> dict[str, Any]:
    """The JSON object of a file, which has these members.

    Raises:
        UsageError: it cannot be read, or lacks one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read as JSON ({error}); fetch the file again") from error
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UsageError(f"{path}: not in the layout of a multi-view set; {', '.join(keys)} are needed")
    return found


# --- published: Readers of published benchmarks in their distributed layouts.

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


# --- posed_photos: Photos with true poses and cameras in the order of time, from the layouts of the
# benchmark sets.

Split = Literal["last", "blocks", "even"]
SPLITS: tuple[Split, ...] = ("last", "blocks", "even")
_BLOCK = 15  # photos of a block
_NAMED = {
    "kitchen": Path("multiview") / "val" / "kitchen",
    "sceaux_castle": Path("bench") / "sceaux_castle",
    "kitti_mini": Path("bench") / "kitti_mini" / "KITTI_sequence_1",
}


@dataclass(frozen=True, eq=False)
class PosedPhotos:
    """Photos below a folder, their poses cam_from_world (4, 4) and cameras, by name."""

    title: str
    folder: Path
    names: tuple[str, ...]  # in the order of time
    poses: dict[str, np.ndarray]
    cameras: dict[str, Camera]
    with_map: dict[str, str] = field(default_factory=dict)  # photos that enter the map with another: stereo

    def split(self, how: Split) -> tuple[list[str], list[str]]:
        """Photos of the map, and those to localise.

        "last": the last third is localised. "blocks": every third block of 15 photos in the order of time.
        "even": photos of even number are the map, the others are localised.
        """
        count = len(self.names)
        index = np.arange(count)
        if how == "last":
            asked = index >= -(-2 * count // 3)
        elif how == "blocks":
            asked = (index // _BLOCK) % 3 == 2
        else:
            asked = index % 2 == 1
        kept = [name for name, out in zip(self.names, asked, strict=True) if not out]
        beside = [self.with_map[name] for name in kept if name in self.with_map]
        return kept + beside, [name for name, out in zip(self.names, asked, strict=True) if out]

    def extent(self) -> float:
        """Largest distance between two of the cameras."""
        centres = np.array([np.linalg.inv(self.poses[name])[:3, 3] for name in self.names])
        return float(np.linalg.norm(centres[:, None] - centres, axis=2).max())


def find_posed_photos(where: str) -> PosedPhotos:
    """The photos of a set's name, or of a folder: a recorded set, a castle, KITTI, or COLMAP's layout.

    Raises:
        UsageError: no such folder, or none of these layouts.
    """
    folder = data_folder() / _NAMED[where] if where in _NAMED else Path(where)
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; sets with poses are {', '.join(_NAMED)}, or a folder")
    if (folder / "cameras.json").is_file():
        return _recorded(folder)
    if (folder / "calib.txt").is_file():
        return _stereo(folder)
    if (folder / "poses.json").is_file() and (folder / "images").is_dir():
        return _listed(folder)
    given = read_given_poses(folder)  # COLMAP's layout: sparse/ beside images/
    names = sorted(given.cam_from_world)
    return PosedPhotos(
        folder.name, folder / "images", tuple(names), dict(given.cam_from_world), dict(given.cameras)
    )


def find_other_photos(folder: Path, count: int) -> list[Path]:
    """So many photos of a folder, spread over it."""
    found = find_images(folder)
    chosen = np.linspace(0, len(found) - 1, min(count, len(found))).astype(int)
    return [found[index] for index in chosen]


def _recorded(folder: Path) -> PosedPhotos:
    path = folder / "cameras.json"
    values = read_object(path, ("K", "frames"))
    poses = {
        row["image"]: np.linalg.inv(read_array(row["world_from_camera"], (4, 4), path))
        for row in values["frames"]
    }
    camera = Camera.from_K(read_array(values["K"], (3, 3), path))
    return PosedPhotos(
        folder.name, folder / "images", tuple(sorted(poses)), poses, dict.fromkeys(poses, camera)
    )


def _listed(folder: Path) -> PosedPhotos:
    poses, cameras = {}, {}
    for row in read_rows(folder / "poses.json", ("image", "K", "R", "C")):
        name = Path(row["image"]).name
        if not (folder / "images" / name).is_file():
            continue  # the castle's list has one more than there are photos
        pose = np.eye(4)
        pose[:3, :3] = row["R"]
        pose[:3, 3] = -pose[:3, :3] @ np.array(row["C"], dtype=np.float64)
        poses[name], cameras[name] = pose, Camera.from_K(row["K"])
    return PosedPhotos(folder.name, folder / "images", tuple(sorted(poses)), poses, cameras)


def _stereo(folder: Path) -> PosedPhotos:
    left, right = np.loadtxt(folder / "calib.txt").reshape(-1, 3, 4)[:2]
    baseline = np.eye(4)
    baseline[0, 3] = right[0, 3] / right[0, 0]  # of right_from_left
    camera = Camera.from_K(left[:, :3])
    poses = dict(_stereo_poses(folder, baseline))
    names = tuple(sorted(name for name in poses if name.startswith("image_l/")))
    beside = {name: name.replace("image_l/", "image_r/") for name in names}
    return PosedPhotos(folder.name, folder, names, poses, dict.fromkeys(poses, camera), beside)


def _stereo_poses(folder: Path, right_from_left: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    rows = np.loadtxt(folder / "poses.txt").reshape(-1, 3, 4)
    images = sorted((folder / "image_l").iterdir())
    for row, image in zip(rows, images, strict=False):
        pose = np.linalg.inv(np.vstack([row, [0, 0, 0, 1]]))
        yield f"image_l/{image.name}", pose
        yield f"image_r/{image.name}", right_from_left @ pose
