"""Matches between all images of a scene: of SIFT and of the learned front end together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np

from matcher.arrays import root_sift
from matcher.config import ExtractorConfig
from matcher.errors import UsageError
from matcher.evaluate.posed import (
    HIDDEN,
    UNKNOWN,
    VISIBLE_STATE,
    PosedView,
    dense_positions,
    sparse_positions,
    transfer,
)
from matcher.images import find_images
from matcher.match.nearest import mutual_nearest
from matcher.torch_engine import build_extractor
from matcher.types import Image

# --- matching: Matches between all images of a scene: of SIFT and of the learned front end together.

SIFT_POINTS, LEARNED_POINTS = 2500, 2048
RATIOS = (0.8, 0.9)  # of distances to the nearest and the second nearest descriptor: SIFT, learned
ALL_PAIRS_UP_TO = 45  # images; of more only pairs that match with few keypoints
PRESELECTION_POINTS, PRESELECTION_MATCHES = 400, 8  # learned keypoints compared, and matches needed
NEXT = 3  # images, by name, that are matched in any case
MIN_MATCHES_MATCHING = 15


@dataclass(frozen=True, eq=False)
class CombinedFeatures:
    """Keypoints of both kinds, SIFT first."""

    points: np.ndarray  # (N, 2) float32; the centre of the first pixel is (0, 0)
    sift: np.ndarray  # (S, 128) float32 unit vectors of the first S points
    learned: np.ndarray  # (N − S, D) float32 unit vectors of the others, strongest first


def extract_features(paths: Sequence[Path]) -> list[CombinedFeatures]:
    """SIFT and learned features of images."""
    sift = cv2.SIFT_create(SIFT_POINTS, contrastThreshold=0.015)
    extractor = build_extractor(ExtractorConfig(kind="learned", max_keypoints=LEARNED_POINTS))
    found = []
    for path in paths:
        grey = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        points, descriptors = sift.detectAndCompute(grey, None)
        (features,) = extractor([Image(grey, grey.shape[::-1])])
        learned = features.descriptors.float().numpy().reshape(len(features.keypoints), -1)
        positions = np.array([p.pt for p in points], np.float32).reshape(-1, 2)
        found.append(
            CombinedFeatures(
                np.concatenate([positions, features.keypoints.numpy()]),
                root_sift(descriptors) if len(positions) else np.zeros((0, 128), np.float32),
                learned / np.maximum(np.linalg.norm(learned, axis=1, keepdims=True), 1e-9),
            )
        )
    return found


def match_images(images: Sequence[CombinedFeatures]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Pairs (i, j) and indices (M, 2) of their matches; pairs with few are left out."""
    for i, j in combinations(range(len(images)), 2):
        first, second = images[i], images[j]
        if len(images) > ALL_PAIRS_UP_TO and j - i > NEXT:
            preselected = mutual_matches(
                first.learned[:PRESELECTION_POINTS], second.learned[:PRESELECTION_POINTS], RATIOS[1]
            )
            if len(preselected) < PRESELECTION_MATCHES:
                continue
        sift = mutual_matches(first.sift, second.sift, RATIOS[0])
        learned = mutual_matches(first.learned, second.learned, RATIOS[1])
        learned += np.array([len(first.sift), len(second.sift)])
        found = np.concatenate([sift, learned])
        if len(found) >= MIN_MATCHES_MATCHING:
            yield i, j, found


def mutual_matches(first: np.ndarray, second: np.ndarray, ratio: float) -> np.ndarray:
    """(M, 2) int64 indices of unit descriptors (N, D) and (K, D), mutual nearest neighbours that pass the
    ratio test; none where either image has fewer than two."""
    if min(len(first), len(second)) < 2:
        return np.zeros((0, 2), np.int64)
    indices, _ = mutual_nearest(first, second, ratio)
    return indices


# --- agreement: Consistency of several images: depth confirmed by other views, pairs confirmed by
# independent matches.

MIN_CONSISTENT = 2  # neighbouring views (one where there is only one)
SPECKLE = 60  # pixels; smaller islands of depth are dropped
MIN_OVERLAP, MAX_OVERLAP = 0.01, 0.95  # visible share of the pixels of either image
MIN_MOTION = 0.03  # median, relative to the width, for pairs with an overlap above MAX_OVERLAP
MIN_MATCHES = 12  # independent matches within OUTLIER that are needed to accept a pair
OUTLIER = 12.0  # pixels
MAX_MEDIAN_ERROR = 1.0  # pixels
RATIO = 0.8
PROBES = 400  # pixels of a first test


def keep_consistent_depth(views: Sequence[PosedView], neighbours: Sequence[Sequence[int]]) -> list[PosedView]:
    """The views with depth only where enough neighbouring views are consistent with it."""
    kept = []
    for view, others in zip(views, neighbours, strict=True):
        votes = np.zeros(view.pixels.shape, np.uint8)
        for other in others:
            votes += dense_positions(view, views[other])[0] >= 0
        confirmed = votes >= min(MIN_CONSISTENT, max(len(others), 1))
        kept.append(replace(view, inverse_depth=_without_speckles(view.inverse_depth, confirmed)))
    return kept


def _without_speckles(inverse: np.ndarray, confirmed: np.ndarray) -> np.ndarray:
    mask = (confirmed & (inverse > 0)).astype(np.uint8)
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=4)
    large = stats[:, cv2.CC_STAT_AREA] >= SPECKLE
    large[0] = False
    return np.where(large[labels], inverse, 0).astype(np.float32)


def choose_pairs(views: Sequence[PosedView]) -> list[tuple[int, int, float]]:
    """Pairs (i, j, overlap) with enough overlap, from different viewpoints, and confirmed by SIFT matches."""
    features = [sift_features(view.pixels) for view in views]
    chosen = []
    for i in range(len(views)):
        for j in range(i + 1, len(views)):
            if not _may_overlap(views[i], views[j]):
                continue
            positions = dense_positions(views[i], views[j])
            overlap = float((positions[0] >= 0).mean())
            back = (
                float((dense_positions(views[j], views[i])[0] >= 0).mean()) if overlap > MIN_OVERLAP else 0.0
            )
            if min(overlap, back) < MIN_OVERLAP or _same_viewpoint(positions):
                continue
            if sift_error(features[i], features[j], positions) <= MAX_MEDIAN_ERROR:
                chosen.append((i, j, round(overlap, 3)))
    return chosen


def _may_overlap(view0: PosedView, view1: PosedView) -> bool:
    """Whether any of a few pixels of known depth is visible in the other view: a quick test."""
    rows, columns = np.nonzero(view0.inverse_depth > 0)
    some = slice(None, None, max(1, len(rows) // PROBES))
    points = np.column_stack([columns[some], rows[some]]).astype(np.float32)
    return len(points) > 0 and bool((sparse_positions(view0, view1, points)[:, 0] >= 0).any())


def _same_viewpoint(positions: np.ndarray) -> bool:
    """Whether nearly everything is visible in the other image and hardly moves."""
    visible = positions[0] >= 0
    width = visible.shape[1]
    rows, columns = np.nonzero(visible)
    motion = np.hypot(positions[0][visible] - columns, positions[1][visible] - rows)
    known = max((positions[0] != UNKNOWN).sum(), 1)
    mostly = visible.sum() / known > MAX_OVERLAP or (positions[0] == HIDDEN).mean() < 0.05
    return bool(mostly and np.median(motion) < MIN_MOTION * width)


SiftFeatures = tuple[np.ndarray, np.ndarray]


def sift_features(pixels: np.ndarray) -> SiftFeatures:
    """SIFT keypoints (N, 2) and RootSIFT descriptors (N, 128)."""
    points, descriptors = cv2.SIFT_create(2000).detectAndCompute(pixels, None)
    if descriptors is None:
        return np.zeros((0, 2), np.float32), np.zeros((0, 128), np.float32)
    normalised = descriptors / np.maximum(descriptors.sum(1, keepdims=True), 1e-9)
    return np.array([point.pt for point in points], np.float32), np.sqrt(normalised)


def match_errors(first: SiftFeatures, second: SiftFeatures, positions: np.ndarray) -> np.ndarray:
    """(M,) errors in pixels of mutual SIFT matches that pass the ratio test, under positions (2, H, W), where
    the point is visible."""
    index0, index1 = mutual_matches(first[1], second[1], RATIO).T
    transferred, state = transfer(first[0][index0], positions)
    return np.linalg.norm(transferred - second[0][index1], axis=1)[state == VISIBLE_STATE]


def sift_error(first: SiftFeatures, second: SiftFeatures, positions: np.ndarray) -> float:
    """Median of `match_errors` below `OUTLIER`; infinite for few matches or mostly outliers."""
    error = match_errors(first, second, positions)
    near = error[error < OUTLIER]
    return float(np.median(near)) if len(near) >= max(MIN_MATCHES, len(error) / 2) else float("inf")


# --- poses: Poses of the photos of a folder: COLMAP's incremental mapping (extra `sfm`) of SIFT and learned
# matches.

MIN_IMAGES = 4  # of a model
MAX_ERROR = 1.0  # pixels, mean reprojection error of a point


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
    """Models of the photos below `folder`, the largest first; COLMAP's files are written to `work`.

    Raises:
        UsageError: no photos.
        ImportError: pycolmap is not installed.
    """
    import pycolmap

    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    images = work / "images"
    for photo in find_images(folder):
        # Upright and without EXIF, one folder per size: images of one folder share a camera.
        colour = cv2.imread(str(photo), cv2.IMREAD_COLOR)
        target = images / f"{colour.shape[1]}x{colour.shape[0]}"
        target.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / f"{photo.stem}.png"), colour)
    database = work / "database.db"
    if not database.exists():
        _match(pycolmap, database, images)
    models = _map(pycolmap, database, images, work)
    chosen, posed = [], set()
    for model in models:
        names = {model.image(number).name for number in model.reg_image_ids()}
        if len(names - posed) >= MIN_IMAGES:  # otherwise a larger model has the same images
            chosen.append(_posed_images(model, images))
            posed |= names
    return chosen


def _match(pycolmap: object, database: Path, folder: Path) -> None:
    """Fill COLMAP's database: cameras, keypoints, matches and verified matches."""
    new = database.with_suffix(".new")
    new.unlink(missing_ok=True)
    pycolmap.Database.open(new).close()
    reader = pycolmap.ImageReaderOptions()
    reader.camera_model = "SIMPLE_RADIAL"
    pycolmap.import_images(new, folder, camera_mode=pycolmap.CameraMode.PER_FOLDER, options=reader)
    store = pycolmap.Database.open(new)
    images = sorted(store.read_all_images(), key=lambda image: Path(image.name).name)
    features = extract_features([folder / image.name for image in images])
    for image, found in zip(images, features, strict=True):
        store.write_keypoints(image.image_id, found.points + 0.5)
    lines = []
    for i, j, found in match_images(features):
        store.write_matches(images[i].image_id, images[j].image_id, found.astype(np.uint32))
        lines.append(f"{images[i].name} {images[j].name}")
    store.close()
    listed = database.with_name("pairs.txt")
    listed.write_text("\n".join(lines), encoding="utf-8")
    pycolmap.verify_matches(new, listed)
    new.rename(database)


def _map(pycolmap: object, database: Path, folder: Path, work: Path) -> list[object]:
    options = pycolmap.IncrementalPipelineOptions()
    options.num_threads, options.random_seed, options.min_model_size = 1, 0, MIN_IMAGES
    options.mapper.init_min_tri_angle, options.mapper.filter_max_reproj_error = 8.0, 2.0
    output = work / "models"
    output.mkdir(exist_ok=True)
    models = pycolmap.incremental_mapping(database, folder, output, options)
    return sorted(models.values(), key=lambda model: -model.num_reg_images())


def _posed_images(model: object, folder: Path) -> list[PosedImage]:
    images = sorted((model.image(number) for number in model.reg_image_ids()), key=lambda i: i.name)
    return [_undistorted(model, image, folder) for image in images]


def _undistorted(model: object, image: object, folder: Path) -> PosedImage:
    focal, cx, cy, radial = model.camera(image.camera_id).params
    K = np.array([[focal, 0, cx - 0.5], [0, focal, cy - 0.5], [0, 0, 1]])
    pose = np.vstack([image.cam_from_world().matrix(), [0, 0, 0, 1]])
    pixels = cv2.imread(str(folder / image.name), cv2.IMREAD_COLOR)
    ids = [point.point3D_id for point in image.points2D if point.has_point3D()]
    ids = [number for number in ids if _reliable(model.point3D(number))]
    xyz = np.array([model.point3D(number).xyz for number in ids]).reshape(-1, 3)
    points = xyz @ pose[:3, :3].T + pose[:3, 3]
    positions = (points @ K.T)[:, :2] / points[:, 2:]
    pixels = cv2.undistort(pixels, K, np.array([radial, 0.0, 0, 0]))
    return PosedImage(
        Path(image.name).stem, pixels, K, pose, np.array(ids, np.int64), points[:, 2], positions
    )


def _reliable(point: object) -> bool:
    return len(point.track.elements) >= 3 and point.error < MAX_ERROR


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


# --- stereo: Dense depth of a posed image by plane sweeping over its neighbours (Collins 1996; Gallup et
# al. 2007).

SCALE = 0.5  # of the sweep's resolution
WINDOW = 7  # pixels of the sweep, side of the windows that are compared
MIN_CORRELATION = 0.5  # mean normalised cross-correlation (ZNCC) with the better half of the neighbours
MIN_CONTRAST = 2.0  # grey levels, standard deviation in the window
PLANES = (48, 160)
STEP = 0.8  # pixels between planes in the neighbour with the largest disparity
SLANTED_RANGES = (6.0, 3.0)  # steps to either side of the surface estimated so far, one search each
SLANTED_DEPTHS = 6  # depths to either side of it
RELIABLE, POINT_WEIGHT, SMOOTH = 0.6, 1.0, 0.02  # correlation; of a 3D point; width of smoothing / image
NEIGHBOURS = 6
ANGLES = (1.0, 40.0)  # triangulation angles of neighbours in degrees
MIN_COMMON = 25  # points
REFINEMENTS = (0.5, 0.25)  # steps of depth around the best, in full resolution


def choose_neighbours(images: Sequence[PosedImage]) -> list[list[int]]:
    """For each image the indices of its neighbours: many common points at suitable angles."""
    common, angles = viewing_angles(images)
    suitable = (angles > ANGLES[0]) & (angles < ANGLES[1]) & (common >= MIN_COMMON)
    # Depth is more accurate under wider angles, so points under 8 degrees count more than under 1.
    value = np.where(suitable, common * np.minimum(angles / 8, 1) ** 0.5, 0)
    return [[int(j) for j in np.argsort(-row)[:NEIGHBOURS] if row[j] > 0] for row in value]


def sweep(image: PosedImage, neighbours: Sequence[PosedImage]) -> np.ndarray:
    """(H, W) float32 inverse depth of the image; 0 where no depth correlates or there is no texture."""
    height, width = image.pixels.shape[:2]
    if not neighbours or len(image.depths) < MIN_COMMON:
        return np.zeros((height, width), np.float32)
    near, far = np.quantile(image.depths, [0.01, 0.99])
    low, high = 0.7 / far, 1.4 / near
    small = _PlaneSweep(image, neighbours, SCALE)
    steps = small.largest_disparity(high - low) / STEP
    inverse = np.linspace(low, high, int(np.clip(steps, *PLANES)), dtype=np.float32)
    step = float(inverse[1] - inverse[0])
    best, correlation = small.search(np.float32(0), inverse)
    for reach in SLANTED_RANGES:
        # Again along the surface estimated so far, so that windows are slanted like walls and floors.
        surface = _surface(best, correlation, image)
        offsets = np.linspace(-reach, reach, 2 * SLANTED_DEPTHS + 1, dtype=np.float32) * step
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
    weight = np.where(correlation > RELIABLE, (correlation - RELIABLE) ** 2, 1e-7).astype(np.float32)
    inverse = inverse.astype(np.float32).copy()
    factors = np.divide((width, height), image.pixels.shape[1::-1])
    at = np.rint((image.positions + 0.5) * factors - 0.5).astype(int)
    kept = ((at >= 0) & (at < (width, height))).all(1)
    columns, rows = at[kept].T
    inverse[rows, columns], weight[rows, columns] = 1 / image.depths[kept], POINT_WEIGHT
    inverse = cv2.medianBlur(inverse, 5)
    sides = (0, 0), SMOOTH * width
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
    for share in REFINEMENTS:
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
        self.window = WINDOW if scale < 1 else 2 * WINDOW - 3
        self.mean = self._box(self.grey)
        self.variance = np.maximum(self._box(self.grey * self.grey) - self.mean**2, 1e-3)
        self.textured = np.sqrt(self.variance) > MIN_CONTRAST
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


# --- label: A folder of photos → sets as `stored` reads them: posed images, verified depth, consistent
# pairs.

UNITS = 8000  # of a 16-bit depth map at the median depth of a set
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
        UsageError: no photos, or a folder of a set that is none.
        ImportError: pycolmap is not installed.
    """
    if (out / DONE).exists():
        return [folder for folder in sorted(out.parent.glob(f"{out.name}*")) if (folder / DONE).exists()]
    _refuse_foreign(out)
    models = [model for model in estimate_poses(photos, work) if len(model) >= MIN_IMAGES]
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
    scale = 1 / float(np.median(np.concatenate([image.depths for image in images])))
    images = [_rescaled(image, scale * UNITS / 1000) for image in images]
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
