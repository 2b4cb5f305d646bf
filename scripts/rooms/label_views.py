"""Estimate depth and poses for photos of real scenes, as training views for `matcher train --real`.

    python scripts/rooms/label_views.py OUT FOLDER…

Each FOLDER holds photos of one scene; its set is written to OUT/<name of FOLDER>. Poses are those of
`matcher sfm` (extra `sfm`); depth is by plane sweeping, kept where several views agree; pairs are confirmed
by independent matches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from matcher.collection.collection import Collection
from matcher.errors import MatcherError, UsageError
from matcher.export.colmap import import_pycolmap
from matcher.images import find_images
from matcher.match.nearest import mutual_nearest
from matcher.sfm.reconstruct import reconstruct
from matcher.train.views import HIDDEN, UNKNOWN, VISIBLE, Cameras, PosedView, reproject
from matcher.types import root_sift

# --- Poses of the photos of a folder.

MIN_IMAGES = 4  # of a model


@dataclass(frozen=True, eq=False)
class PosedImage:
    """An undistorted image, its camera, and the 3D points that are visible in it."""

    name: str
    pixels: np.ndarray  # (H, W, 3) uint8 blue, green, red
    K: np.ndarray  # (3, 3); the centre of the first pixel is (0, 0)
    cam_from_world: np.ndarray  # (4, 4)
    points: np.ndarray  # (P,) int64 ids of its 3D points, each visible in three images or more
    depths: np.ndarray  # (P,) z of them
    positions: np.ndarray  # (P, 2) pixels, projected


def estimate_poses(folder: Path, work: Path) -> list[list[PosedImage]]:
    """Models of the photos below `folder`, the largest first; files on the way are written to `work`.

    Raises:
        UsageError: no photos, or pycolmap is not installed.
        ReconstructionError: no model was found.
    """
    pycolmap, images = import_pycolmap(), work / "images"
    for photo in find_images(folder):
        # Upright and without EXIF, one folder per size: images of one folder share a camera.
        colour = cv2.imread(str(photo), cv2.IMREAD_COLOR)
        target = images / f"{colour.shape[1]}x{colour.shape[0]}"
        target.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / f"{photo.stem}.png"), colour)
    collection = Collection.open(work / "run", workers=0)
    collection.add_images(images)
    collection.add_pairs(exhaustive=True)
    collection.run()
    with collection.store as store:
        made = reconstruct(store, work / "model", min_images=MIN_IMAGES, threads=1, overwrite=True)
    found, posed = [], set()
    for number, model in enumerate(made.models):
        if len(model.cam_from_world.keys() - posed) >= MIN_IMAGES:  # else a larger one has the same images
            posed |= model.cam_from_world.keys()
            flat = work / f"undistorted{number}"
            pycolmap.undistort_images(flat, made.folder / "sparse" / str(number), images)
            found.append(_posed_images(pycolmap.Reconstruction(flat / "sparse"), flat / "images"))
    return found


def _posed_images(model: Any, folder: Path) -> list[PosedImage]:
    """Those of a model of pinhole cameras, with the points that are certain."""
    found = []
    for image in sorted((model.image(number) for number in model.reg_image_ids()), key=lambda i: i.name):
        pose = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
        K = model.camera(image.camera_id).calibration_matrix()
        K[:2, 2] -= 0.5
        ids = [point.point3D_id for point in image.points2D if point.has_point3D()]
        tracks = {number: model.point3D(number) for number in ids}
        ids = [n for n, point in tracks.items() if len(point.track.elements) >= 3 and point.error < 1.0]
        points = (
            np.array([tracks[number].xyz for number in ids]).reshape(-1, 3) @ pose[:3, :3].T + pose[:3, 3]
        )
        positions = (points @ K.T)[:, :2] / points[:, 2:]
        pixels = cv2.imread(str(folder / image.name), cv2.IMREAD_COLOR)
        own = K, pose, np.array(ids, np.int64), points[:, 2], positions
        found.append(PosedImage(Path(image.name).stem, pixels, *own))
    return found


def viewing_angles(images: Sequence[PosedImage]) -> tuple[np.ndarray, np.ndarray]:
    """(N, N) numbers of common points, and (N, N) triangulation angles in degrees: of the baseline of two
    cameras at the median depth of their common points."""
    count = len(images)
    common, angles = np.zeros((count, count), int), np.zeros((count, count))
    centres = [-p.cam_from_world[:3, :3].T @ p.cam_from_world[:3, 3] for p in images]
    for i in range(count):
        for j in range(count):
            shared = np.isin(images[i].points, images[j].points)
            common[i, j] = shared.sum() if i != j else 0
            if common[i, j]:
                depth = float(np.median(images[i].depths[shared]))
                baseline = float(np.linalg.norm(centres[i] - centres[j]))
                angles[i, j] = np.rad2deg(np.arctan2(baseline, depth))
    return common, angles


# --- Dense depth of a posed image by plane sweeping over its neighbours (Collins 1996; Gallup et al. 2007).

MIN_CORRELATION = 0.5  # mean normalised cross-correlation (ZNCC) with the better half of the neighbours
ANGLES = (1.0, 40.0)  # triangulation angles of neighbours in degrees
MIN_COMMON = 25  # points


def choose_neighbours(images: Sequence[PosedImage]) -> list[list[int]]:
    """For each image the indices of its neighbours: many common points at suitable angles."""
    common, angles = viewing_angles(images)
    suitable = (angles > ANGLES[0]) & (angles < ANGLES[1]) & (common >= MIN_COMMON)
    # Depth is more accurate under wider angles, so points under 8 degrees count more than under 1.
    value = np.where(suitable, common * np.minimum(angles / 8, 1) ** 0.5, 0)
    return [[int(j) for j in np.argsort(-row)[:6] if row[j] > 0] for row in value]


def sweep(image: PosedImage, neighbours: Sequence[PosedImage]) -> np.ndarray:
    """(H, W) float32 inverse depth of the image; 0 where no depth correlates or there is no texture."""
    height, width = image.pixels.shape[:2]
    if not neighbours or len(image.depths) < MIN_COMMON:
        return np.zeros((height, width), np.float32)
    near, far = np.quantile(image.depths, [0.01, 0.99])
    low, high = 0.7 / far, 1.4 / near
    small = _PlaneSweep(image, neighbours, 0.5)
    steps = small.largest_disparity(high - low) / 0.8  # planes, .8 pixels apart in that neighbour
    inverse = np.linspace(low, high, int(np.clip(steps, 48, 160)), dtype=np.float32)
    step = float(inverse[1] - inverse[0])
    best, correlation = small.search(np.float32(0), inverse)
    for reach in (6.0, 3.0):
        # Again along the surface estimated so far, so that windows are slanted like walls and floors.
        surface = _surface(best, correlation, image)
        offsets = np.linspace(-reach, reach, 13, dtype=np.float32) * step
        slanted, new_correlation = small.search(surface, offsets)
        better = new_correlation > correlation
        best = np.where(better & (slanted > 0), slanted, best)
        correlation = np.maximum(correlation, new_correlation)
    good = (correlation > MIN_CORRELATION) & small.textured & (best > low) & (best < high)
    best = np.where(good, best, 0).astype(np.float32)
    full = cv2.resize(best, (width, height), interpolation=cv2.INTER_NEAREST)
    return _refined(_PlaneSweep(image, neighbours, 1.0), full, step)


def _surface(inverse: np.ndarray, correlation: np.ndarray, image: PosedImage) -> np.ndarray:
    """(h, w) float32 smooth inverse depth: a local plane fitted to the reliable pixels."""
    height, width = inverse.shape
    # Pixels of a correlation above .6 are fitted.
    weight = np.where(correlation > 0.6, (correlation - 0.6) ** 2, 1e-7).astype(np.float32)
    inverse = inverse.astype(np.float32).copy()
    factors = np.divide((width, height), image.pixels.shape[1::-1])
    at = np.rint((image.positions + 0.5) * factors - 0.5).astype(int)
    kept = ((at >= 0) & (at < (width, height))).all(1)
    columns, rows = at[kept].T
    inverse[rows, columns], weight[rows, columns] = 1 / image.depths[kept], 1.0
    inverse = cv2.medianBlur(inverse, 5)
    sides = (0, 0), 0.02 * width
    total = cv2.GaussianBlur(weight, *sides)
    # A local plane: the mean, and the slopes by weighted moments about the mean position.
    x = np.arange(width, dtype=np.float32)[None] + np.zeros((height, 1), np.float32)
    y = np.arange(height, dtype=np.float32)[:, None] + np.zeros((1, width), np.float32)

    def mean(values: np.ndarray) -> np.ndarray:
        return cv2.GaussianBlur(weight * values, *sides) / total

    mx, my, mz = mean(x), mean(y), mean(inverse)
    xx, yy, xy = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    xz, yz = mean(x * inverse) - mx * mz, mean(y * inverse) - my * mz
    xx, yy = xx + 2.0, yy + 2.0
    scale = xx * yy - xy * xy
    slope_x, slope_y = (xz * yy - yz * xy) / scale, (yz * xx - xz * xy) / scale
    return (mz + slope_x * (x - mx) + slope_y * (y - my)).astype(np.float32)


def _refined(comparison: _PlaneSweep, inverse: np.ndarray, step: float) -> np.ndarray:
    """The best of a few depths around the estimated one at each pixel, refined by a parabola."""
    for share in (0.5, 0.25):
        offsets = np.array([-2, -1, 0, 1, 2], np.float32) * share * step
        scores = np.stack([comparison.correlation(inverse + offset) for offset in offsets])
        at = scores[1:-1].argmax(0) + 1
        below, middle, above = (np.take_along_axis(scores, (at + d)[None], 0)[0] for d in (-1, 0, 1))
        bend = below - 2 * middle + above
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(bend < -1e-6, 0.5 * (below - above) / bend, 0)
        refined = inverse + (offsets[at] + np.clip(part, -1, 1) * share * step)
        inverse = np.where((inverse > 0) & (middle > MIN_CORRELATION), refined, 0).astype(np.float32)
    return inverse


class _PlaneSweep:
    """An image and its neighbours in one resolution."""

    def __init__(self, image: PosedImage, neighbours: Sequence[PosedImage], scale: float) -> None:
        self.grey, K = _scaled(image, scale)
        self.window = 7 if scale < 1 else 11  # pixels, the side of what is compared
        self.mean = self._box(self.grey)
        self.variance = np.maximum(self._box(self.grey * self.grey) - self.mean**2, 1e-3)
        self.textured = np.sqrt(self.variance) > 2.0  # grey levels
        height, width = self.grey.shape
        self.x = np.arange(width, dtype=np.float32)[None]
        self.y = np.arange(height, dtype=np.float32)[:, None]
        self.others = []
        back = np.linalg.inv(image.cam_from_world)
        for neighbour in neighbours:
            grey, other_K = _scaled(neighbour, scale)
            pose = neighbour.cam_from_world @ back
            rotation = other_K @ pose[:3, :3] @ np.linalg.inv(K)
            translation = other_K @ pose[:3, 3]
            self.others.append((grey, rotation.astype(np.float32), translation.astype(np.float32)))

    def _box(self, values: np.ndarray) -> np.ndarray:
        return cv2.blur(values, (self.window, self.window), borderType=cv2.BORDER_REFLECT)

    def largest_disparity(self, span: float) -> float:
        """The largest disparity in pixels, over the neighbours, for a span of inverse depth."""
        height, width = self.grey.shape
        disparities = []
        for _, rotation, shift in self.others:
            middle = rotation @ [width / 2, height / 2, 1]
            motion = np.hypot(*(shift[:2] - middle[:2] / middle[2] * shift[2]))
            disparities.append(span * motion / abs(middle[2]))
        return float(np.max(disparities))

    def correlation(self, inverse: np.ndarray | np.float32) -> np.ndarray:
        """(H, W) mean correlation with the better half of the neighbours, at inverse depths (H, W) or one
        for all."""
        scores = []
        for grey, rotation, translation in self.others:
            u, v, w = (
                row[0] * self.x + (row[1] * self.y + row[2]) + inverse * s
                for row, s in zip(rotation, translation, strict=True)
            )
            w = np.where(w > 1e-6, w, 1e9)
            warped = cv2.remap(grey, u / w, v / w, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
            mean = self._box(warped)
            variance = np.maximum(self._box(warped * warped) - mean * mean, 1e-3)
            covariance = self._box(warped * self.grey) - mean * self.mean
            scores.append(covariance / np.sqrt(variance * self.variance))
        half = max(1, min(len(scores), (len(scores) + 1) // 2))
        if len(scores) == 1:
            return scores[0]
        ordered = np.sort(np.stack(scores), axis=0)
        return ordered[-half:].mean(0)

    def search(self, surface: np.ndarray | np.float32, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(H, W) inverse depth of the best correlation at offsets (P,) from a surface, and between them, and
        that correlation; −1 where the first or the last offset is the best."""
        shape = self.grey.shape
        score, before, after, previous = (np.full(shape, -1, np.float32) for _ in range(4))
        at = np.zeros(shape, np.int32)
        for number, offset in enumerate(offsets):
            now = cv2.GaussianBlur(self.correlation(surface + offset), (0, 0), 0.8)
            np.copyto(after, now, where=at == number - 1)
            better = now > score
            np.copyto(before, previous, where=better)
            np.copyto(score, now, where=better)
            np.copyto(at, number, where=better)
            previous = now
        bend = np.minimum(before - 2 * score + after, -1e-6)
        part = np.clip(0.5 * (before - after) / bend, -0.5, 0.5)
        inner = (at > 0) & (at < len(offsets) - 1)
        found = surface + offsets[at] + part * (offsets[1] - offsets[0])
        return found, np.where(inner, score, -1)


def _scaled(image: PosedImage, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(h, w) float32 grey and K of the image in another resolution."""
    grey = cv2.cvtColor(image.pixels, cv2.COLOR_BGR2GRAY)
    K = image.K.copy()
    if scale != 1:
        grey = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        factors = np.divide(grey.shape[::-1], image.pixels.shape[1::-1])
        K[:2, 2] += 0.5
        K[:2] *= factors[:, None]
        K[:2, 2] -= 0.5
    return grey.astype(np.float32), K


# --- Consistency of several images: depth confirmed by other views, pairs confirmed by independent matches.

MIN_OVERLAP = 0.01  # visible share of the pixels of either image


def transfer_points(view0: PosedView, view1: PosedView, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, 2) float32 positions in view 1 of points (N, 2) of view 0, and (N,) VISIBLE, HIDDEN or UNKNOWN."""
    own, other = (
        Cameras(
            torch.from_numpy(view.inverse_depth)[None, None],
            torch.from_numpy(view.K)[None],
            torch.from_numpy(view.cam_from_world)[None],
            torch.tensor([view.pixels.shape[::-1]], dtype=torch.float32),
        )
        for view in (view0, view1)
    )
    found = reproject(own, other, torch.from_numpy(np.ascontiguousarray(points, np.float32))[None], 1)
    return found.positions[0].numpy(), found.states[0].numpy()


def transfer_pixels(view0: PosedView, view1: PosedView) -> tuple[np.ndarray, np.ndarray]:
    """(H, W, 2) positions in view 1 of the pixels of view 0, and (H, W) their states."""
    height, width = view0.pixels.shape
    pixels = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1).reshape(-1, 2)
    positions, states = transfer_points(view0, view1, pixels)
    return positions.reshape(height, width, 2), states.reshape(height, width)


def keep_consistent_depth(views: Sequence[PosedView], neighbours: Sequence[Sequence[int]]) -> list[PosedView]:
    """The views with depth only where enough neighbouring views are consistent with it."""
    kept = []
    for view, others in zip(views, neighbours, strict=True):
        votes = np.zeros(view.pixels.shape, np.uint8)
        for other in others:
            votes += transfer_pixels(view, views[other])[1] == VISIBLE
        confirmed = votes >= min(2, max(len(others), 1))
        mask = (confirmed & (view.inverse_depth > 0)).astype(np.uint8)
        _, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
        large = stats[:, cv2.CC_STAT_AREA] >= 60  # smaller islands are dropped
        large[0] = False
        depth = np.where(large[labels], view.inverse_depth, 0).astype(np.float32)
        kept.append(replace(view, inverse_depth=depth))
    return kept


def choose_pairs(views: Sequence[PosedView]) -> list[tuple[int, int, float]]:
    """Pairs (i, j, overlap) with enough overlap, from different viewpoints, and confirmed by SIFT matches."""
    features, chosen = [_sift(view.pixels) for view in views], []
    for i, j in combinations(range(len(views)), 2):
        rows, columns = np.nonzero(views[i].inverse_depth > 0)
        some = slice(None, None, max(1, len(rows) // 400))
        probes = np.column_stack([columns[some], rows[some]])
        if not len(probes) or not (transfer_points(views[i], views[j], probes)[1] == VISIBLE).any():
            continue
        positions, states = transfer_pixels(views[i], views[j])
        overlap = float((states == VISIBLE).mean())
        back = 0.0
        if overlap > MIN_OVERLAP:
            back = float((transfer_pixels(views[j], views[i])[1] == VISIBLE).mean())
        if min(overlap, back) < MIN_OVERLAP or _same_viewpoint(positions, states):
            continue
        (points0, descriptors0), (points1, descriptors1) = features[i], features[j]
        index0, index1 = mutual_nearest(descriptors0, descriptors1, 0.8)[0].T  # Lowe's ratio (2004)
        transferred, states = transfer_points(views[i], views[j], points0[index0])
        error = np.linalg.norm(transferred - points1[index1], axis=1)[states == VISIBLE]
        near = error[error < 12.0]  # others are wrong matches
        if len(near) >= max(12, len(error) / 2) and np.median(near) <= 1.0:
            chosen.append((i, j, round(overlap, 3)))
    return chosen


def _sift(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """SIFT keypoints (N, 2) and RootSIFT descriptors (N, 128)."""
    points, descriptors = cv2.SIFT_create(2000).detectAndCompute(pixels, None)
    if descriptors is None:
        return np.zeros((0, 2), np.float32), np.zeros((0, 128), np.float32)
    return np.array([point.pt for point in points], np.float32), root_sift(descriptors)


def _same_viewpoint(positions: np.ndarray, states: np.ndarray) -> bool:
    """Whether nearly everything is visible in the other image and hardly moves."""
    visible = states == VISIBLE
    rows, columns = np.nonzero(visible)
    motion = np.hypot(positions[visible][:, 0] - columns, positions[visible][:, 1] - rows)
    # Nearly all that is known is visible, or hardly anything is hidden.
    mostly = visible.sum() / max((states != UNKNOWN).sum(), 1) > 0.95 or (states == HIDDEN).mean() < 0.05
    return bool(mostly and np.median(motion) < 0.03 * visible.shape[1])


# --- The set of a folder of photos.

PATCH = 2  # pixels around a point that get its depth
DONE = "DONE"
Log = Callable[[str], None]


def label_views(photos: Path, out: Path, work: Path, log: Log = print) -> list[Path]:
    """Make the sets of a folder of photos, one for each model of at least four images; sets that an earlier
    call finished are kept.

    Args:
        photos: folder of photos of one scene.
        out: folder of the largest model's set; others beside it are named `out`-1, `out`-2, …
        work: folder of intermediate results; it may be deleted afterwards.
        log: receives lines on progress.

    Returns:
        The folders of sets with at least one pair.

    Raises:
        UsageError: no photos, no pycolmap, or a folder of a set that is none.
        ReconstructionError: no model was found.
    """
    if (out / DONE).exists():
        return [folder for folder in sorted(out.parent.glob(f"{out.name}*")) if (folder / DONE).exists()]
    _refuse_foreign(out)
    models = estimate_poses(photos, work)
    log(f"{out.name}: models of {[len(model) for model in models]} images")
    made = []
    for number, model in reversed(list(enumerate(models))):
        folder = out if number == 0 else out.with_name(f"{out.name}-{number}")
        if _label(model, folder, work / f"depth{number}", log):
            made.append(folder)
    return made


def _refuse_foreign(out: Path) -> None:
    """`UsageError` for a folder that is not ours to write: it may hold somebody's photos."""
    if out.exists():
        raise UsageError(f"{out} exists and is no finished set; name another folder for the sets")


def _label(images: Sequence[PosedImage], out: Path, work: Path, log: Log) -> bool:
    # The median depth of the set is 8 m, in the middle of what 16 bits of millimetres hold.
    scale = 8 / float(np.median(np.concatenate([image.depths for image in images])))
    images = [_rescaled(image, scale) for image in images]
    neighbours = choose_neighbours(images)
    work.mkdir(parents=True, exist_ok=True)
    views = []
    for image, others in zip(images, neighbours, strict=True):
        path = work / f"{image.name}.npy"
        if not path.exists():
            np.save(path, sweep(image, [images[j] for j in others]))
        grey = cv2.cvtColor(image.pixels, cv2.COLOR_BGR2GRAY)
        views.append(PosedView(grey, np.load(path), image.K, image.cam_from_world))
    views = keep_consistent_depth(views, neighbours)
    views = [_with_points(view, image) for view, image in zip(views, images, strict=True)]
    known = np.mean([(view.inverse_depth > 0).mean() for view in views])
    pairs = choose_pairs(views)
    log(f"{out.name}: {len(views)} images, depth known for {known:.0%}, {len(pairs)} consistent pairs")
    if pairs:
        _refuse_foreign(out)
        part = out.with_name(f".{out.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _write(images, views, pairs, part)
        part.rename(out)
    return bool(pairs)


def _rescaled(image: PosedImage, scale: float) -> PosedImage:
    """The image in a world `scale` times as large."""
    pose = image.cam_from_world.copy()
    pose[:3, 3] *= scale
    return replace(image, cam_from_world=pose, depths=image.depths * scale)


def _with_points(view: PosedView, image: PosedImage) -> PosedView:
    """The view with the depth of the reconstructed points, on a small patch each, where it was unknown."""
    inverse = view.inverse_depth.copy()
    height, width = inverse.shape
    for (x, y), depth in zip(image.positions, image.depths, strict=True):
        column, row = round(x), round(y)
        if depth > 0 and PATCH <= column < width - PATCH and PATCH <= row < height - PATCH:
            patch = inverse[row - PATCH : row + PATCH + 1, column - PATCH : column + PATCH + 1]
            patch[patch == 0] = 1 / depth
    return replace(view, inverse_depth=inverse)


def _write(
    images: Sequence[PosedImage],
    views: Sequence[PosedView],
    pairs: Sequence[tuple[int, int, float]],
    out: Path,
) -> None:
    out.mkdir(parents=True)
    rows = []
    for image, view in zip(images, views, strict=True):
        quality = [cv2.IMWRITE_JPEG_QUALITY, 96]
        cv2.imwrite(str(out / f"{image.name}.jpg"), image.pixels, quality)
        inverse = view.inverse_depth
        depth = np.divide(1000, inverse, out=np.zeros_like(inverse), where=inverse > 0)
        depth = np.where(depth < 65535, np.rint(depth), 0).astype(np.uint16)
        cv2.imwrite(str(out / f"{image.name}_depth.png"), depth)
        rows.append(
            {
                "image": f"{image.name}.jpg",
                "depth": f"{image.name}_depth.png",
                "group": 0,
                "K": image.K.tolist(),
                "E": image.cam_from_world.tolist(),
            }
        )
    (out / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    content = json.dumps({"depth_step": 1, "views": rows})
    (out / "cameras.json").write_text(content, encoding="utf-8")
    (out / DONE).touch()


def main() -> int:
    """Make the sets of all folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    try:
        for folder in args.folders:
            label_views(folder, args.out / folder.name, args.out / ".work" / folder.name)
    except (MatcherError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
