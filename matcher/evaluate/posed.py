"""Images with depth and pose: new framings of them, and the positions of their pixels in one another.

Whatever the source (rendered rooms, relief, real scenes), a view is pixels, inverse depth, K and pose, so
that zooms, crops, rotations of the camera and lens distortion are made here only, and stay exact.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Protocol

import cv2
import numpy as np

from matcher.errors import IntegrityError, UsageError
from matcher.evaluate.protocols import LUMA, Lens, augment, capture, draw_grey_weights, draw_lens, to_grey

# --- dense: Dense ground truth between two images: the position of every pixel of each in the other.

HIDDEN, UNKNOWN = -1e4, -2e4  # positions of pixels that are hidden, and of those that are unknown
VISIBLE_STATE, HIDDEN_STATE, UNKNOWN_STATE = 1, 0, -1
STRIDE = 4  # pixels between those that `dominant_turn` looks at


@dataclass(frozen=True, eq=False)
class DensePair:
    """Two grey images and the position of every pixel of each in the other."""

    pixels0: np.ndarray  # (H, W) uint8
    pixels1: np.ndarray
    positions0: np.ndarray  # (2, H, W) float32: pixels of image 0 in image 1, HIDDEN or UNKNOWN
    positions1: np.ndarray  # the same from image 1 to image 0
    source: str = "planes"
    scenes: frozenset[str] = (
        frozenset()
    )  # names of photos or scenes; pairs without a common one are unrelated

    @property
    def overlap(self) -> float:
        """Share of the pixels of known state that are visible in the other image, the smaller of both."""
        shares = []
        for positions in (self.positions0, self.positions1):
            known = (positions[0] != UNKNOWN).sum()
            shares.append(float((positions[0] >= 0).sum() / max(known, 1)))
        return min(shares)

    @property
    def visible_share(self) -> float:
        """Share of all pixels of image 0 that are visible in image 1."""
        return float((self.positions0[0] >= 0).mean())

    def swapped(self) -> DensePair:
        """The same pair with image 1 first."""
        return replace(
            self,
            pixels0=self.pixels1,
            pixels1=self.pixels0,
            positions0=self.positions1,
            positions1=self.positions0,
        )


class PairSource(Protocol):
    """A source of training pairs."""

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """A pair of images of `size` (width, height), the same for the same state of `rng`."""
        ...


def transfer(points: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Transfer points of one image to the other.

    Args:
        points: (N, 2) xy in pixels.
        positions: (2, H, W) as in `DensePair`.

    Returns:
        (N, 2) float32 positions, NaN where not visible, interpolated between four pixels that are all visible
        and neighbours in the other image too; and (N,) int8 states: `VISIBLE_STATE`, `HIDDEN_STATE` where
        the nearest pixel is hidden, else `UNKNOWN_STATE`.
    """
    height, width = positions.shape[1:]
    points = np.asarray(points, np.float32).reshape(-1, 2)
    base = np.floor(points).astype(np.int64).clip(0, (width - 2, height - 2))
    part = (points - base)[..., None].clip(0, 1)  # (N, 2, 1)
    corners = [positions[:, base[:, 1] + dy, base[:, 0] + dx].T for dy in (0, 1) for dx in (0, 1)]
    stack = np.stack(corners)  # (4, N, 2)
    neighbours = (stack[..., 0] >= 0).all(0) & (np.ptp(stack, axis=0).max(-1) < 8)
    upper = corners[0] * (1 - part[:, 0]) + corners[1] * part[:, 0]
    lower = corners[2] * (1 - part[:, 0]) + corners[3] * part[:, 0]
    transferred = upper * (1 - part[:, 1]) + lower * part[:, 1]
    nearest = np.rint(points).astype(np.int64).clip(0, (width - 1, height - 1))
    hidden = positions[0, nearest[:, 1], nearest[:, 0]] == HIDDEN
    transferred[~neighbours] = np.nan
    state = np.where(neighbours, VISIBLE_STATE, np.where(hidden, HIDDEN_STATE, UNKNOWN_STATE)).astype(np.int8)
    return transferred.astype(np.float32), state


def quarter_turned(pair: DensePair, turns: int) -> DensePair:
    """The pair with image 1 rotated clockwise by a number of 90° turns, and the correspondences with it."""
    positions0, positions1, pixels1 = pair.positions0, pair.positions1, pair.pixels1
    for _ in range(turns % 4):
        height = pixels1.shape[0]
        visible = positions0[0] >= 0
        x, y = positions0
        positions0 = np.stack([np.where(visible, height - 1 - y, x), np.where(visible, x, y)])
        positions1 = np.ascontiguousarray(np.rot90(positions1, -1, axes=(1, 2)))
        pixels1 = cv2.rotate(pixels1, cv2.ROTATE_90_CLOCKWISE)
    return replace(pair, pixels1=pixels1, positions0=positions0, positions1=positions1)


def dominant_turn(pair: DensePair) -> int:
    """By how many clockwise 90° rotations image 1 differs from image 0, 0 to 3: 2 if one is upside down.

    Views from opposite sides of a table differ by 2. The mean rotation of the correspondence field decides,
    by differences between pixels `STRIDE` apart; 0 where nothing is visible.
    """
    field = pair.positions0[:, ::STRIDE, ::STRIDE]
    visible = field[0] >= 0
    along_x, along_y = np.diff(field, axis=2)[:, :-1], np.diff(field, axis=1)[:, :, :-1]
    known = visible[:-1, :-1] & visible[:-1, 1:] & visible[1:, :-1]
    known &= (np.abs(along_x).max(0) < 4 * STRIDE) & (np.abs(along_y).max(0) < 4 * STRIDE)
    cosine = (along_x[0] + along_y[1])[known].sum()
    sine = (along_x[1] - along_y[0])[known].sum()
    return round(float(np.arctan2(sine, cosine)) / (np.pi / 2)) % 4


# --- posed: Images with depth and pose: new framings of them, and the positions of their pixels in one
# another.

NOTHING = -1.0  # inverse depth of pixels outside the scene: borders, backdrops
SAME_DEPTH = 0.03  # largest relative difference of the inverse depths of one surface
SAME_PIXEL = 0.8  # largest forward-backward error in pixels
SURELY_SAME_PIXEL = 0.3  # the same whatever the depths are, as those of far points are uncertain


@dataclass(frozen=True, eq=False)
class PosedView:
    """An image of a known camera: x = K (R X + t); the centre of the first pixel is (0, 0)."""

    pixels: np.ndarray  # (H, W) uint8
    inverse_depth: np.ndarray  # (H, W) float32, 1 / z; 0 where unknown, NOTHING outside the scene
    K: np.ndarray  # (3, 3) float64, last row (0, 0, 1)
    cam_from_world: np.ndarray  # (4, 4) float64
    lens: Lens | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(width, height)."""
        return self.pixels.shape[1], self.pixels.shape[0]


@dataclass(frozen=True, eq=False)
class Framing:
    """A new image of a view: its `K` and `size`, and a rotation of the camera."""

    K: np.ndarray  # (3, 3)
    size: tuple[int, int]
    new_from_old: np.ndarray  # (3, 3) rotation of the camera
    lens: Lens | None = None


def reframe(view: PosedView, framing: Framing) -> PosedView:
    """The view as the camera of the framing sees it; black and NOTHING where the old image does not reach."""
    width, height = framing.size
    x = np.tile(np.arange(width, dtype=np.float32), (height, 1))
    y = np.tile(np.arange(height, dtype=np.float32)[:, None], (1, width))
    if framing.lens is not None:
        x, y = x + framing.lens.field[..., 0], y + framing.lens.field[..., 1]
    old_from_new = (view.K @ framing.new_from_old.T @ np.linalg.inv(framing.K)).astype(np.float32)
    u, v, w = (row[0] * x + row[1] * y + row[2] for row in old_from_new)
    u, v = u / w, v / w
    if view.lens is not None:
        u, v = view.lens.from_pinhole(u, v)
    shrink = 1 / np.sqrt(abs(np.linalg.det(framing.K[:2, :2]) / np.linalg.det(view.K[:2, :2])))
    pixels = view.pixels if shrink < 1.2 else cv2.GaussianBlur(view.pixels, (0, 0), 0.45 * float(shrink))
    resampled = cv2.remap(pixels, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT)
    depth = sampled_inverse_depth(view.inverse_depth, u, v)
    # z of the new camera is w · z of the old one along this ray.
    depth = np.where(depth > 0, depth * w, depth)
    pose = np.eye(4)
    pose[:3, :3] = framing.new_from_old
    return PosedView(resampled, depth, framing.K, pose @ view.cam_from_world, framing.lens)


def sampled_inverse_depth(inverse_depth: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Inverse depth at positions: linear on a surface, that of the nearest pixel across depth edges."""
    linear, nearest = _linear_and_nearest(inverse_depth, u, v)
    return np.where(np.abs(linear - nearest) <= SAME_DEPTH * np.abs(nearest), linear, nearest)


def _linear_and_nearest(values: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`values` by linear and by nearest-neighbour interpolation; NOTHING outside the image."""
    border = {"borderMode": cv2.BORDER_CONSTANT, "borderValue": NOTHING}
    return (
        cv2.remap(values, u, v, cv2.INTER_LINEAR, **border),
        cv2.remap(values, u, v, cv2.INTER_NEAREST, **border),
    )


def dense_positions(view0: PosedView, view1: PosedView) -> np.ndarray:
    """(2, H, W) float32: position of each pixel of view 0 in view 1; HIDDEN or UNKNOWN as in `dense`."""
    width, height = view0.size
    x = np.arange(width, dtype=np.float32)[None]
    y = np.arange(height, dtype=np.float32)[:, None]
    if view0.lens is not None:
        x, y = x + view0.lens.field[..., 0], y + view0.lens.field[..., 1]
    return _transferred(view0, view1, x, y, view0.inverse_depth)


def sparse_positions(view0: PosedView, view1: PosedView, points: np.ndarray) -> np.ndarray:
    """(N, 2) float32: positions of points (N, 2) of view 0 in view 1; HIDDEN or UNKNOWN as in `dense`."""
    x, y = (np.ascontiguousarray(column, np.float32)[:, None] for column in points.T)
    inverse0 = sampled_inverse_depth(view0.inverse_depth, x, y)
    if view0.lens is not None:
        x, y = view0.lens.to_pinhole(x, y)
    return _transferred(view0, view1, x, y, inverse0)[:, :, 0].T


def _transferred(
    view0: PosedView, view1: PosedView, x: np.ndarray, y: np.ndarray, inverse0: np.ndarray
) -> np.ndarray:
    """(2, …) positions in view 1 of pinhole positions x, y of view 0, of the shape of `inverse0`."""
    pose = view1.cam_from_world @ np.linalg.inv(view0.cam_from_world)
    rotation = (view1.K @ pose[:3, :3] @ np.linalg.inv(view0.K)).astype(np.float32)
    translation = (view1.K @ pose[:3, 3]).astype(np.float32)
    u, v, w = (
        row[0] * x + (row[1] * y + row[2]) + inverse0 * s
        for row, s in zip(rotation, translation, strict=True)
    )
    front = w > 1e-6
    w = np.where(front, w, 1)
    u, v = u / w, v / w
    if view1.lens is not None:
        u, v = view1.lens.from_pinhole(u, v)
    inside = front & (u >= 0) & (u <= view1.size[0] - 1) & (v >= 0) & (v <= view1.size[1] - 1)
    u, v = np.where(inside, u, 0), np.where(inside, v, 0)
    back = np.linalg.inv(pose)
    step = (view0.K @ back[:3, 3]).astype(np.float32)
    # Pixels in view 0 by which the backward transfer changes per unit of inverse depth in view 1.
    rate = np.hypot(step[0] - x * step[2], step[1] - y * step[2]) * w
    state = np.where(inside, _visible(view1.inverse_depth, u, v, inverse0 / w, rate), 0)
    state = np.where(inverse0 > 0, state, np.where(inverse0 == NOTHING, 0, -1))
    missing = np.where(state < 0, np.float32(UNKNOWN), np.float32(HIDDEN))
    return np.stack([np.where(state > 0, u, missing), np.where(state > 0, v, missing)])


def _visible(
    inverse1: np.ndarray, u: np.ndarray, v: np.ndarray, expected: np.ndarray, rate: np.ndarray
) -> np.ndarray:
    """1 where the surface expected at (u, v) is visible in view 1, 0 where it is occluded or outside the
    scene, −1 where the depth of view 1 is unknown or inconsistent."""
    linear, nearest = _linear_and_nearest(inverse1, u, v)
    error = np.minimum(np.abs(linear - expected), np.abs(nearest - expected))
    pixel_error = error * rate
    same_surface = (error <= SAME_DEPTH * expected) | (pixel_error <= SURELY_SAME_PIXEL)
    visible = same_surface & (pixel_error <= SAME_PIXEL) & (nearest > 0)
    occluded = ~same_surface & (np.minimum(linear, nearest) > expected * (1 + SAME_DEPTH))
    state = np.where(occluded | (nearest == NOTHING), 0, -1)
    return np.where(visible, 1, state)


# --- framing: Random framings of views for training: zooms, crops, camera rotations, lens distortion, black
# borders.

ROLL, ROTATION = 5.0, 2.5  # degrees, standard deviations
ANY_ROLL_SHARE, BORDER_SHARE, LENS_SHARE = 0.08, 0.12, 0.25


def with_distortion(view: PosedView, rng: np.random.Generator) -> PosedView:
    """The view with lens distortion, zoomed in a little so that few black borders are visible."""
    width, height = view.size
    zoom = rng.uniform(1.0, 1.12)
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    K = np.array([[zoom, 0, (1 - zoom) * centre[0]], [0, zoom, (1 - zoom) * centre[1]], [0, 0, 1]]) @ view.K
    return reframe(view, Framing(K, view.size, np.eye(3), draw_lens(view.size, rng)))


def draw_framing(
    view: PosedView,
    size: tuple[int, int],
    centre: np.ndarray,
    zoom: float,
    rng: np.random.Generator,
) -> Framing:
    """A framing of `size` (width, height) in pixels with the view's pixel `centre` (2,) near its middle.

    Args:
        view: the view to crop.
        size: of the new image.
        centre: xy in the view.
        zoom: scale of the new image relative to the view.
        rng: source of roll, rotation, lens and shift.
    """
    width, height = size
    roll = rng.uniform(-180, 180) if rng.random() < ANY_ROLL_SHARE else rng.normal(0, ROLL)
    axis = np.append(np.deg2rad(rng.normal(0, ROTATION, 2)), np.deg2rad(roll))
    rotation = cv2.Rodrigues(axis)[0]
    centre = _window_centre(centre, size, zoom, view.size, rng)
    focal = zoom * np.array([view.K[0, 0], view.K[1, 1]])
    ray = rotation @ np.linalg.inv(view.K) @ [*centre, 1.0]
    middle = np.array([(width - 1) / 2, (height - 1) / 2])
    principal = middle - focal * ray[:2] / ray[2]
    K = np.array([[focal[0], 0, principal[0]], [0, focal[1], principal[1]], [0, 0, 1.0]])
    lens = draw_lens(size, rng) if rng.random() < LENS_SHARE else None
    return Framing(K, size, rotation, lens)


def _window_centre(
    centre: np.ndarray, size: tuple[int, int], zoom: float, old: tuple[int, int], rng: np.random.Generator
) -> np.ndarray:
    """(2,) centre of a window that contains `centre` and usually stays inside the old image."""
    half = np.array(size) / zoom / 2
    middle = centre + rng.uniform(-0.6, 0.6, 2) * half
    if rng.random() < BORDER_SHARE:
        return middle
    side = np.array(old, float)
    return np.where(half * 2 < side, np.clip(middle, half, side - half), side / 2)


# --- stored: Views with depth and poses on disk, rendered or of real scenes, as a source of training pairs.

KEPT_VIEWS = 300  # in memory, 2 MB each
PROBES = 64  # pixels that are transferred to find a covisible point
MIN_VISIBLE_PROBES = 0.08  # share of the probes
MIN_OVERLAP = {"rendered": 0.1, "real": 0.015}  # visible pixels after framing; real ones are mostly unknown
ATTEMPTS = 200


@dataclass(frozen=True, eq=False)
class StoredSet:
    """One folder of views."""

    folder: Path
    views: list[dict]  # as in cameras.json
    step: int
    pairs: np.ndarray  # (P, 2) int64

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def scene(self) -> str:
        """The scene: sets of one scene are named after it and a number, as `castle_7` or `castle-1`."""
        return re.sub(r"[-_]\d+$", "", self.name)


def views_digest(root: Path | None) -> str:
    """A short hash of what the sets below a folder hold, to check whether pairs were made of these views."""
    if root is None:
        return str(None)
    found = hashlib.sha256()
    for path in sorted(root.rglob("cameras.json")):
        found.update(f"{path.relative_to(root)}\n".encode(errors="surrogateescape"))
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def find_sets(root: Path) -> list[StoredSet]:
    """All sets below a folder, sorted; those still being written as far as they are complete.

    Raises:
        UsageError: there is none.
        IntegrityError: a set's cameras.json is damaged.
    """
    sets = [read_set(path.parent) for path in sorted(root.rglob("cameras.json"))]
    sets = [each for each in sets if len(each.pairs)]
    if not sets:
        raise UsageError(f"{root}: no views here (looked for folders with cameras.json)")
    return sets


def read_set(folder: Path) -> StoredSet:
    """The set in a folder.

    Raises:
        IntegrityError: its cameras.json is damaged.
    """
    try:
        stored = json.loads((folder / "cameras.json").read_text(encoding="utf-8"))
        views, step = stored["views"], int(stored["depth_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{folder / 'cameras.json'} is damaged ({error})") from error
    return StoredSet(folder, views, step, pairs_of(folder, views))


def pairs_of(folder: Path, views: Sequence[dict]) -> np.ndarray:
    """(P, 2) int64 the pairs of views that `pairs.json` lists; without it all pairs of a group.

    Raises:
        IntegrityError: the views have no groups, or `pairs.json` is damaged or not of these views.
    """
    path = folder / "pairs.json"
    try:
        if not path.exists():
            path = folder / "cameras.json"
            return _pairs_of_groups([view["group"] for view in views])
        rows = json.loads(path.read_text(encoding="utf-8"))
        pairs = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged ({error})") from error
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < len(views):
        raise IntegrityError(f"{path} lists views that are not in {folder / 'cameras.json'}")
    return pairs


def _pairs_of_groups(groups: list[int]) -> np.ndarray:
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    pairs = [pair for group in members.values() for pair in combinations(group, 2)]
    return np.array(pairs, np.int64).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class ColourView:
    """A view in colour, as it is kept in memory."""

    colour: np.ndarray  # (H, W, 3) uint8 blue, green, red
    inverse_depth: np.ndarray  # (H, W) float32, as in `PosedView`
    K: np.ndarray
    cam_from_world: np.ndarray

    def grey(self, weights: np.ndarray = LUMA) -> PosedView:
        """The view in grey, by the weights (3,) of blue, green and red."""
        return PosedView(to_grey(self.colour, weights), self.inverse_depth, self.K, self.cam_from_world)


def read_view(stored: StoredSet, number: int) -> ColourView:
    """A view of a set.

    Raises:
        IntegrityError: its image or depth map cannot be read.
    """
    view = stored.views[number]
    colour = cv2.imread(str(stored.folder / view["image"]), cv2.IMREAD_COLOR)
    depth = cv2.imread(str(stored.folder / view["depth"]), cv2.IMREAD_UNCHANGED)
    if colour is None or depth is None:
        raise IntegrityError(f"{stored.folder / view['image']}: the image or its depth map cannot be read")
    z = depth.astype(np.float32) / 1000
    inverse = np.divide(1, z, out=np.zeros_like(z), where=z > 0)
    height, width = colour.shape[:2]
    x = (np.arange(width, dtype=np.float32) / stored.step).clip(None, inverse.shape[1] - 1)
    y = (np.arange(height, dtype=np.float32) / stored.step).clip(None, inverse.shape[0] - 1)
    inverse = sampled_inverse_depth(inverse, *(np.ascontiguousarray(a) for a in np.meshgrid(x, y)))
    K, pose = (np.array(view[key], dtype=np.float64) for key in ("K", "E"))
    return ColourView(colour, inverse, K, pose)


class StoredViews:
    """A source of pairs from all sets below a folder, each set as often as the root of its number of pairs.

    Args:
        root: the folder.
        source: the name of the pairs' source; `real` images are changed less, as they come from a camera.

    Raises:
        UsageError: there are no views.
        IntegrityError: a set is damaged.
    """

    def __init__(self, root: Path, source: str = "rendered") -> None:
        self.source, self.sets = source, find_sets(root)
        weights = np.sqrt([len(each.pairs) for each in self.sets])
        self._weights = weights / weights.sum()
        self._kept: OrderedDict[tuple[int, int], ColourView] = OrderedDict()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """Two views, cropped and zoomed around a covisible point; see `dense.PairSource`.

        Raises:
            UsageError: hardly any pair overlaps.
            IntegrityError: an image or its depth map cannot be read.
        """
        for _ in range(ATTEMPTS):
            number = int(rng.choice(len(self.sets), p=self._weights))
            chosen = self.sets[number].pairs[rng.integers(len(self.sets[number].pairs))]
            if rng.random() < 0.5:
                chosen = chosen[::-1]
            view0, view1 = (self._view(number, int(view), rng) for view in chosen)
            framed = framed_pair(view0, view1, size, rng)
            if framed is None:
                continue
            positions0, positions1 = dense_positions(*framed), dense_positions(*framed[::-1])
            if min((p[0] >= 0).mean() for p in (positions0, positions1)) > MIN_OVERLAP.get(self.source, 0.1):
                change = augment if self.source == "real" else capture
                pixels = (change(view.pixels, rng) for view in framed)
                scene = frozenset({self.sets[number].scene})
                return DensePair(*pixels, positions0, positions1, self.source, scene)
        raise UsageError(f"{self.sets[0].folder.parent}: hardly any pair of views overlaps")

    def _view(self, number: int, view: int, rng: np.random.Generator) -> PosedView:
        key = (number, view)
        kept = self._kept.get(key)  # several threads draw pairs, so that it may be gone a moment later
        if kept is None:
            kept = self._kept[key] = read_view(self.sets[number], view)
            if len(self._kept) > KEPT_VIEWS:
                self._kept.popitem(last=False)
        return kept.grey(draw_grey_weights(rng, random_share=0.4, concentration=2))


def framed_pair(
    view0: PosedView, view1: PosedView, size: tuple[int, int], rng: np.random.Generator
) -> tuple[PosedView, PosedView] | None:
    """Both views cropped to `size` around a covisible point; None where they overlap too little."""
    known = np.flatnonzero(view0.inverse_depth > 0)
    if not len(known):
        return None
    probes = np.column_stack(np.divmod(rng.choice(known, PROBES), view0.size[0])[::-1]).astype(np.float64)
    transferred = sparse_positions(view0, view1, probes)
    visible = np.flatnonzero(transferred[:, 0] >= 0)
    if len(visible) < MIN_VISIBLE_PROBES * PROBES:
        return None
    chosen = rng.choice(visible)
    # From the whole image to a window of it, and a change of scale of up to 2.5 between the two.
    fitting = max(wanted / side for wanted, side in zip(size, view0.size, strict=True))
    zoom0 = fitting * float(np.exp(rng.uniform(np.log(1.0), np.log(1.8))))
    zoom1 = zoom0 * float(np.exp(rng.normal(0, 0.35)).clip(0.4, 2.5))
    zoom1 = float(np.clip(zoom1, (0.6 if rng.random() < BORDER_SHARE else 1.0) * fitting, 2.5 * fitting))
    return (
        reframe(view0, draw_framing(view0, size, probes[chosen], zoom0, rng)),
        reframe(view1, draw_framing(view1, size, transferred[chosen], zoom1, rng)),
    )
