"""Dense depth of a posed image by plane sweeping over its neighbours (Collins 1996; Gallup et al. 2007)."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from matcher.lab.pairs.labelling.poses import PosedImage, viewing_angles

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
