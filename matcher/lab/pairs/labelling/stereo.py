"""Dense depth of a posed picture by plane sweeping over its neighbours (Collins 1996; Gallup et al. 2007)."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from matcher.lab.pairs.labelling.poses import PlacedPicture, viewing_angles

SCALE = 0.5  # of the sweep's resolution
WINDOW = 7  # pixels of the sweep, side of what is compared
LEAST_LIKENESS = 0.5  # zero-mean normalised cross-correlation of the best half of the neighbours
LEAST_CONTRAST = 2.0  # grey levels, deviation in the window
PLANES = (48, 160)
STEP = 0.8  # pixels of the sweep between planes in the neighbour that moves most
SLANTED = (6.0, 3.0)  # steps to either side of the surface found so far, in turns
LEANING = 6  # depths to either side of it
LIKELY, POINT_WEIGHT, SMOOTH = 0.6, 1.0, 0.02  # of the surface; the last one in widths
NEIGHBOURS = 6
ANGLES = (1.0, 40.0)  # degrees between a picture and its neighbours
LEAST_COMMON = 25  # points
REFINEMENTS = (0.5, 0.25)  # steps of depth around the best, in full resolution


def choose_neighbours(pictures: Sequence[PlacedPicture]) -> list[list[int]]:
    """For each picture the numbers of those to compare with: many common points at fair angles."""
    common, angles = viewing_angles(pictures)
    fair = (angles > ANGLES[0]) & (angles < ANGLES[1]) & (common >= LEAST_COMMON)
    # Wider angles measure depth better: a point counts more under 8 degrees than under 1.
    value = np.where(fair, common * np.minimum(angles / 8, 1) ** 0.5, 0)
    return [[int(j) for j in np.argsort(-row)[:NEIGHBOURS] if row[j] > 0] for row in value]


def sweep(picture: PlacedPicture, neighbours: Sequence[PlacedPicture]) -> np.ndarray:
    """(H, W) float32 inverse depth of the picture; 0 where nothing is alike or nothing there to compare."""
    height, width = picture.pixels.shape[:2]
    if not neighbours or len(picture.depths) < LEAST_COMMON:
        return np.zeros((height, width), np.float32)
    near, far = np.quantile(picture.depths, [0.01, 0.99])
    low, high = 0.7 / far, 1.4 / near
    small = _Comparison(picture, neighbours, SCALE)
    steps = small.reach(high - low) / STEP
    inverse = np.linspace(low, high, int(np.clip(steps, *PLANES)), dtype=np.float32)
    step = float(inverse[1] - inverse[0])
    best, likeness = small.best(np.float32(0), inverse)
    for reach in SLANTED:
        # Again along the surface found so far: windows lean as walls and floors do.
        surface = _surface(best, likeness, picture)
        offsets = np.linspace(-reach, reach, 2 * LEANING + 1, dtype=np.float32) * step
        leaning, likeness_there = small.best(surface, offsets)
        better = likeness_there > likeness
        best = np.where(better & (leaning > 0), leaning, best)
        likeness = np.maximum(likeness, likeness_there)
    good = (likeness > LEAST_LIKENESS) & small.textured & (best > low) & (best < high)
    best = np.where(good, best, 0).astype(np.float32)
    full = cv2.resize(best, (width, height), interpolation=cv2.INTER_NEAREST)
    return _refined(_Comparison(picture, neighbours, 1.0), full, step)


def _surface(inverse: np.ndarray, likeness: np.ndarray, picture: PlacedPicture) -> np.ndarray:
    """(h, w) float32 smooth inverse depth through what is likely: a local mean that follows slopes."""
    height, width = inverse.shape
    weight = np.where(likeness > LIKELY, (likeness - LIKELY) ** 2, 1e-7).astype(np.float32)
    inverse = inverse.astype(np.float32).copy()
    factors = np.divide((width, height), picture.pixels.shape[1::-1])
    at = np.rint((picture.positions + 0.5) * factors - 0.5).astype(int)
    kept = ((at >= 0) & (at < (width, height))).all(1)
    columns, rows = at[kept].T
    inverse[rows, columns], weight[rows, columns] = 1 / picture.depths[kept], POINT_WEIGHT
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


def _refined(comparison: _Comparison, inverse: np.ndarray, step: float) -> np.ndarray:
    """The likest of a few depths about those found, each pixel with its own; a parabola between them."""
    for share in REFINEMENTS:
        offsets = np.array([-2, -1, 0, 1, 2], np.float32) * share * step
        scores = np.stack([comparison.likeness(inverse + offset) for offset in offsets])
        at = scores[1:-1].argmax(0) + 1
        below, middle, above = (np.take_along_axis(scores, (at + d)[None], 0)[0] for d in (-1, 0, 1))
        bend = below - 2 * middle + above
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(bend < -1e-6, 0.5 * (below - above) / bend, 0)
        moved = inverse + (offsets[at] + np.clip(part, -1, 1) * share * step)
        inverse = np.where((inverse > 0) & (middle > LEAST_LIKENESS), moved, 0).astype(np.float32)
    return inverse


class _Comparison:
    """A picture beside its neighbours in one resolution."""

    def __init__(self, picture: PlacedPicture, neighbours: Sequence[PlacedPicture], scale: float) -> None:
        self.grey, K = _scaled(picture, scale)
        self.window = WINDOW if scale < 1 else 2 * WINDOW - 3
        self.mean = self._box(self.grey)
        self.variance = np.maximum(self._box(self.grey * self.grey) - self.mean**2, 1e-3)
        self.textured = np.sqrt(self.variance) > LEAST_CONTRAST
        height, width = self.grey.shape
        self.x = np.arange(width, dtype=np.float32)[None]
        self.y = np.arange(height, dtype=np.float32)[:, None]
        self.others = []
        back = np.linalg.inv(picture.cam_from_world)
        for neighbour in neighbours:
            grey, there = _scaled(neighbour, scale)
            pose = neighbour.cam_from_world @ back
            turn = there @ pose[:3, :3] @ np.linalg.inv(K)
            self.others.append((grey, turn.astype(np.float32), (there @ pose[:3, 3]).astype(np.float32)))

    def _box(self, values: np.ndarray) -> np.ndarray:
        return cv2.blur(values, (self.window, self.window), borderType=cv2.BORDER_REFLECT)

    def reach(self, span: float) -> float:
        """Pixels by which the neighbour that moves most moves over a span of inverse depth."""
        height, width = self.grey.shape
        moved = []
        for _, turn, shift in self.others:
            middle = turn @ [width / 2, height / 2, 1]
            moved.append(span * np.hypot(*(shift[:2] - middle[:2] / middle[2] * shift[2])) / abs(middle[2]))
        return float(np.max(moved))

    def likeness(self, inverse: np.ndarray | np.float32) -> np.ndarray:
        """(H, W) mean correlation of the better half of the neighbours at inverse depths (H, W) or of a
        plane."""
        scores = []
        for grey, turn, shift in self.others:
            u, v, w = (
                row[0] * self.x + (row[1] * self.y + row[2]) + inverse * s
                for row, s in zip(turn, shift, strict=True)
            )
            w = np.where(w > 1e-6, w, 1e9)
            shown = cv2.remap(grey, u / w, v / w, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
            mean = self._box(shown)
            variance = np.maximum(self._box(shown * shown) - mean * mean, 1e-3)
            covariance = self._box(shown * self.grey) - mean * self.mean
            scores.append(covariance / np.sqrt(variance * self.variance))
        half = max(1, min(len(scores), (len(scores) + 1) // 2))
        if len(scores) == 1:
            return scores[0]
        ordered = np.sort(np.stack(scores), axis=0)
        return ordered[-half:].mean(0)

    def best(self, surface: np.ndarray | np.float32, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(H, W) likest inverse depth of a surface at offsets (P,) and between them, and its likeness; the
        first and the last offset are never the likest."""
        shape = self.grey.shape
        score, before, after, previous = (np.full(shape, -1, np.float32) for _ in range(4))
        at = np.zeros(shape, np.int32)
        for number, offset in enumerate(offsets):
            now = cv2.GaussianBlur(self.likeness(surface + offset), (0, 0), 0.8)
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


def _scaled(picture: PlacedPicture, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """(h, w) float32 grey and K of the picture in another resolution."""
    grey = cv2.cvtColor(picture.pixels, cv2.COLOR_BGR2GRAY)
    K = picture.K.copy()
    if scale != 1:
        grey = cv2.resize(grey, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        factors = np.divide(grey.shape[::-1], picture.pixels.shape[1::-1])
        K[:2, 2] += 0.5
        K[:2] *= factors[:, None]
        K[:2, 2] -= 0.5
    return grey.astype(np.float32), K
