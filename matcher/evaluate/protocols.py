"""Sets of image pairs with ground truth; the kind of ground truth is the protocol of evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from matcher.errors import ImageError, UsageError
from matcher.images import find_images, image_from_array, read_image
from matcher.types import Image

# --- depth: Reprojection of points from one image into another by depth and pose.

EDGE = 0.05  # relative difference of neighbouring depths beyond which they belong to two surfaces
AGREEMENT = 0.03  # relative difference of depths up to which a point is visible in the other image
_SLACK = 0.02  # metres, added to that difference
_MILLIMETRES = 1e-3


@dataclass(frozen=True, eq=False)
class DepthCamera:
    """The camera and the depth map of an image."""

    path: Path  # of the depth map, a 16-bit PNG in millimetres
    stride: int
    K: np.ndarray  # (3, 3) of the stored image
    cam_from_world: np.ndarray  # (4, 4), metres

    def depth(self) -> np.ndarray:
        """(h, w) float32 metres.

        Raises:
            ImageError: the file cannot be read.
        """
        found = cv2.imread(str(self.path), cv2.IMREAD_UNCHANGED)
        if found is None or found.ndim != 2:
            raise ImageError(f"{self.path}: no depth map; a grey 16-bit PNG in millimetres is needed")
        return found.astype(np.float32) * np.float32(_MILLIMETRES)


def depth_at(points: np.ndarray, camera: DepthCamera) -> np.ndarray:
    """(N,) depth at points (N, 2), interpolated bilinearly in inverse depth.

    NaN where it is unknown, outside the image, or at a depth edge.
    """
    depth = camera.depth()
    at = np.nan_to_num(points, nan=-1e6).clip(-1e6, 1e6) / camera.stride
    low = np.floor(at).astype(np.int64)
    height, width = depth.shape
    known = (low >= 0).all(axis=1) & (low[:, 0] < width - 1) & (low[:, 1] < height - 1)
    x, y = (low * known[:, None]).T
    corners = np.stack([depth[y, x], depth[y, x + 1], depth[y + 1, x], depth[y + 1, x + 1]], axis=1)
    nearest, farthest = corners.min(axis=1), corners.max(axis=1)
    known &= (nearest > 0) & (farthest <= nearest * (1 + EDGE))
    u, v = (at - low).T
    weights = np.stack([(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v], axis=1)
    inverse = (weights / np.where(corners > 0, corners, 1)).sum(axis=1)
    return np.where(known, 1 / np.where(known, inverse, 1), np.nan)


def reproject(points: np.ndarray, source: DepthCamera, target: DepthCamera) -> tuple[np.ndarray, np.ndarray]:
    """Project points (N, 2) of one image into another.

    Returns:
        (N, 2) stored pixels of the target: NaN where the depth cannot decide, infinite where the point is not
        visible in the target (occluded, behind the camera or outside the image); and (N,) bool, the points
        that are visible.
    """
    z = depth_at(points, source)
    rays = np.column_stack([points, np.ones(len(points))]) @ np.linalg.inv(source.K).T
    pose = target.cam_from_world @ np.linalg.inv(source.cam_from_world)
    points1 = (rays * z[:, None]) @ pose[:3, :3].T + pose[:3, 3]
    front = points1[:, 2] > 1e-6
    projected = points1 @ target.K.T
    pixels = projected[:, :2] / np.where(front, points1[:, 2], 1)[:, None]
    measured = depth_at(np.where(front[:, None], pixels, np.nan), target)
    height, width = target.depth().shape
    limit = np.array([width, height]) * target.stride
    with np.errstate(invalid="ignore"):
        outside = front & ((pixels < -0.5) | (pixels > limit - 0.5)).any(axis=1)
        consistent = np.abs(measured - points1[:, 2]) < AGREEMENT * points1[:, 2] + _SLACK
    visible = np.isfinite(z) & front & consistent
    hidden = np.isfinite(z) & (~front | outside | (np.isfinite(measured) & ~consistent))
    pixels = np.where(hidden[:, None], np.inf, pixels)
    return np.where((visible | hidden)[:, None], pixels, np.nan), visible


# --- protocols: Sets of image pairs with ground truth; the kind of ground truth is the protocol of
# evaluation.

ProtocolName = Literal["homography", "pose", "depth", "correspondences", "unrelated"]


@dataclass(frozen=True, eq=False)
class PairImage:
    """One image of a pair: a file, or pixels rendered from it."""

    path: Path
    pixels: np.ndarray | None = None  # (H, W) or (H, W, 3) uint8; if given, these are the stored image

    def open(
        self, resize: int | None, shorter_side: int | None = None, soft_resize: int | None = None
    ) -> Image:
        """The image, resized for a front end.

        Args:
            resize: the longer side in pixels; images are never enlarged.
            shorter_side: the shorter side instead (480 for HPatches); images are never enlarged.
            soft_resize: as in `read_image`; not used with `shorter_side`, which a benchmark prescribes.

        Raises:
            ImageError: the file cannot be read.
        """
        if self.pixels is None and shorter_side is None:
            return read_image(self.path, resize=resize, soft_resize=soft_resize)
        pixels = self.pixels
        if pixels is None:
            pixels = read_image(self.path, resize=None, upright=False).pixels
        if shorter_side is not None:
            height, width = pixels.shape[:2]
            resize, soft_resize = round(shorter_side * max(width, height) / min(width, height)), None
        return replace(image_from_array(pixels, resize=resize, soft_resize=soft_resize), path=self.path)


@dataclass(frozen=True, eq=False)
class _Pair:
    name: str
    group: str  # of which results are reported: a level, a frame gap, a category
    image0: PairImage
    image1: PairImage

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups that the pair belongs to."""
        return (self.group,)


@dataclass(frozen=True, eq=False)
class HomographyPair(_Pair):
    """Two images of a plane, or from one viewpoint."""

    H_1_from_0: np.ndarray  # (3, 3) stored pixels of image 0 to stored pixels of image 1


@dataclass(frozen=True, eq=False)
class PosePair(_Pair):
    """Two calibrated images with their relative pose."""

    K0: np.ndarray  # (3, 3) of the stored image
    K1: np.ndarray
    cam1_from_cam0: np.ndarray  # (4, 4), the translation up to scale


@dataclass(frozen=True, eq=False)
class DepthPair(PosePair):
    """Two calibrated images with their relative pose and depth maps."""

    view0: DepthCamera
    view1: DepthCamera
    more_groups: tuple[str, ...] = ()

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of overlap, angle and light."""
        return (self.group, *self.more_groups)


@dataclass(frozen=True, eq=False)
class CorrespondencePair(_Pair):
    """Two images with labelled correspondences: set by hand, or one per pixel from a disparity map."""

    points0: np.ndarray  # (K, 2) stored pixels
    points1: np.ndarray  # (K, 2)
    dense: bool = True  # whether labels are dense enough to decide about single matches


@dataclass(frozen=True, eq=False)
class UnrelatedPair(_Pair):
    """Two images of different things: every match is wrong."""


Pair = HomographyPair | PosePair | DepthPair | CorrespondencePair | UnrelatedPair


@dataclass(frozen=True, eq=False)
class PairSet:
    """A benchmark; `pairs[i]` may read or render images, so only one pair is in memory at a time."""

    name: str
    protocol: ProtocolName
    pairs: Sequence[Pair]
    shorter_side: int | None = None  # of the resized images, where published results prescribe it
    oracle: bool = False  # whether the ground truth decides which keypoints correspond
    note: str = ""  # printed with the table

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.pairs)

    def first(self, count: int) -> PairSet:
        """`count` pairs spread evenly over the set, or all if it has fewer.

        Raises:
            UsageError: a count below 1.
        """
        if count < 1:
            raise UsageError(f"the number of pairs must be at least 1, not {count}")
        if count >= len(self):
            return self
        index = np.linspace(0, len(self) - 1, count).round().astype(int).tolist()
        return replace(self, pairs=PairSubset(self.pairs, tuple(index)))


@dataclass(frozen=True, eq=False)
class PairSubset(Sequence[Pair]):
    """Some pairs of a sequence, opened one at a time."""

    pairs: Sequence[Pair]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> Pair:
        return self.pairs[self.indices[position]]

    def __iter__(self) -> Iterator[Pair]:
        return (self.pairs[i] for i in self.indices)


# --- textures: A folder of photos as textures: the validation split, random draws, and photos that cannot
# be read.

MIN_SIDE = 32  # pixels; a smaller image has nothing to match
HELD_OUT_SHARE = 0.1
KEPT_BYTES = 1 << 30  # of decoded photos in memory


def read_texture(photo: Path, *, colour: bool = False) -> np.ndarray | None:
    """(h, w) uint8 grey or (h, w, 3) BGR; None where the file cannot be read or the image is too small."""
    texture = cv2.imread(str(photo), cv2.IMREAD_COLOR if colour else cv2.IMREAD_GRAYSCALE)
    if texture is None:
        texture = _read_with_pillow(photo, colour=colour)
    return None if texture is None or min(texture.shape[:2]) < MIN_SIDE else texture


def _read_with_pillow(photo: Path, *, colour: bool) -> np.ndarray | None:
    """As `read_texture`, for what OpenCV cannot read, such as HEIC."""
    try:
        pixels = read_image(photo, resize=None).pixels
    except ImageError:
        return None
    if pixels.ndim == 2:
        return cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR) if colour else pixels
    return cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR if colour else cv2.COLOR_RGB2GRAY)


def hold_out(photos: Sequence[Path], seed: int) -> tuple[list[Path], list[Path]]:
    """Photos to train on and, a tenth of them, photos to validate on; the same for the same photos and seed.

    Raises:
        UsageError: fewer than two photos can be read.
    """
    wanted = max(1, round(HELD_OUT_SHARE * len(photos)))
    order = np.random.default_rng([seed, 2]).permutation(len(photos)).tolist()
    chosen: set[int] = set()
    for number in order[:-1]:
        if len(chosen) < wanted and read_texture(photos[number]) is not None:
            chosen.add(number)
    if not chosen:
        raise UsageError(
            f"{photos[0].parent}: photos to train on and others to validate on are needed; "
            f"of {len(photos)} here fewer than two can be read"
        )
    kept = [photo for number, photo in enumerate(photos) if number not in chosen]
    return kept, [photos[number] for number in sorted(chosen)]


def split_photos(folder: Path, validation: Path | None, seed: int) -> tuple[list[Path], list[Path]]:
    """Photos to train on and photos to validate on, none in both; a tenth is held out without `validation`.

    Raises:
        UsageError: a folder without photos, or nothing left to train on.
    """
    photos = find_images(folder)
    if validation is None:
        return hold_out(photos, seed)
    held_out = find_images(validation)
    taken = {photo.resolve() for photo in held_out}
    training = [photo for photo in photos if photo.resolve() not in taken]
    if not training:
        raise UsageError(f"{folder}: every photo is also one to validate on; give different folders")
    return training, held_out


def photos_digest(photos: Sequence[Path]) -> str:
    """A short hash of names and sizes, to check whether views were made of these photos."""
    lines = [f"{photo.parent.name}/{photo.name} {photo.stat().st_size}" for photo in photos]
    return hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()[:16]


def folder_weights(photos: Sequence[Path]) -> np.ndarray:
    """Probabilities that damp large folders by the square root of their size, so that no source dominates."""
    counts: dict[Path, int] = {}
    for photo in photos:
        counts[photo.parent] = counts.get(photo.parent, 0) + 1
    weights = np.array([counts[photo.parent] ** -0.5 for photo in photos])
    return weights / weights.sum()


class PhotoSet:
    """Photos drawn at random as textures; those that cannot be read are skipped and remembered."""

    def __init__(self, photos: Sequence[Path], *, colour: bool = False) -> None:
        self.photos, self.colour = list(photos), colour
        self._kept: dict[int, np.ndarray] = {}
        self.unreadable: set[int] = set()
        self._weights = folder_weights(photos)

    def draw(
        self, count: int, rng: np.random.Generator, avoid: Collection[int] = ()
    ) -> dict[int, np.ndarray]:
        """Up to `count` different photos, number → (h, w[, 3]) uint8, none of those in `avoid`.

        Fewer where the folder has no more.

        Raises:
            UsageError: not one of the photos can be read.
        """
        found: dict[int, np.ndarray] = {}
        while len(found) < count and len({*found, *avoid, *self.unreadable}) < len(self.photos):
            number = int(rng.choice(len(self.photos), p=self._weights))
            if number in found or number in avoid or number in self.unreadable:
                continue
            texture = self._texture(number)
            if texture is None:
                self.unreadable.add(number)
            else:
                found[number] = texture
        if len(self.unreadable) == len(self.photos):
            raise UsageError(f"{self.photos[0].parent}: not one of {len(self.photos)} photos can be read")
        return found

    def _texture(self, number: int) -> np.ndarray | None:
        """A photo, kept in memory as long as there is room."""
        if number in self._kept:
            return self._kept[number]
        texture = read_texture(self.photos[number], colour=self.colour)
        if texture is not None and sum(kept.nbytes for kept in list(self._kept.values())) < KEPT_BYTES:
            self._kept[number] = texture
        return texture


class DrawnPhotos:
    """Photos of a set, with the names of those that were drawn."""

    def __init__(self, photos: PhotoSet) -> None:
        self.photos = photos
        self.names: set[str] = set()

    def draw(
        self, count: int, rng: np.random.Generator, avoid: Collection[int] = ()
    ) -> dict[int, np.ndarray]:
        """As `PhotoSet.draw`."""
        drawn = self.photos.draw(count, rng, avoid)
        self.names.update(f"{p.parent.name}/{p.name}" for p in (self.photos.photos[n] for n in drawn))
        return drawn


# --- photometric: Photometric augmentation: random changes of lighting, blur, sensor noise and compression.

LUMA = np.array([0.114, 0.587, 0.299], np.float32)  # weights of blue, green and red in a grey image


def draw_grey_weights(rng: np.random.Generator, random_share: float, concentration: float = 1) -> np.ndarray:
    """(3,) float32 weights of blue, green and red: `LUMA`, or random ones in `random_share` of the cases.

    Args:
        rng: the source of randomness.
        random_share: from 0 to 1.
        concentration: of the symmetric Dirichlet distribution of random weights; larger is closer to equal.
    """
    return rng.dirichlet((concentration,) * 3).astype(np.float32) if rng.random() < random_share else LUMA


def to_grey(colour: np.ndarray, weights: np.ndarray = LUMA) -> np.ndarray:
    """(H, W) uint8 from (H, W, 3) uint8 blue, green, red, by their weights (3,)."""
    return cv2.transform(colour, weights[None])


def degrade(pixels: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Photometric augmentation of (H, W[, 3]) uint8: gain, gamma, shading gradient, blur, noise and JPEG."""
    height, width = pixels.shape[:2]
    gain, gamma = 1 + 0.35 * strength * rng.uniform(-1, 1), 2 ** (0.6 * strength * rng.uniform(-1, 1))
    direction, depth = rng.uniform(0, 2 * np.pi), 0.4 * strength * rng.random()
    blur, noise = 1.2 * strength * rng.random(), 8 * strength * rng.random()
    quality = round(95 - 40 * strength * rng.random())
    x, y = np.linspace(-0.5, 0.5, width), np.linspace(-0.5, 0.5, height)[:, None]
    shading = 1 - depth * (0.5 + x * np.cos(direction) + y * np.sin(direction))
    shading = shading.astype(np.float32) if pixels.ndim == 2 else shading.astype(np.float32)[..., None]
    light = (pixels.astype(np.float32) / 255) ** np.float32(gamma) * np.float32(255 * gain) * shading
    if blur > 0.2:
        light = cv2.GaussianBlur(light, (0, 0), blur)
    light += rng.standard_normal(light.shape, dtype=np.float32) * np.float32(noise)
    view = np.clip(np.rint(light), 0, 255).astype(np.uint8)
    return _compressed(view, quality)


def augment(grey: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A photometrically changed copy of (H, W) uint8: tone, shading, blur, noise, compression."""
    image = grey.astype(np.float32) / 255
    if rng.random() < 0.7:
        image = _tone(image, rng)
    if rng.random() < 0.4:
        image = image * _shading(image.shape, rng)
    if rng.random() < 0.35:
        image = _blur(image, rng)
    if rng.random() < 0.5:
        image = image + rng.normal(0, rng.uniform(0.003, 0.04), image.shape).astype(np.float32)
    stored = (image.clip(0, 1) * 255).astype(np.uint8)
    return _compressed(stored, int(rng.integers(25, 95))) if rng.random() < 0.5 else stored


def capture(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W) uint8 as a phone would take and store it: lens, exposure, motion blur, noise, compression.

    Every image gets sensor noise, as no surface is perfectly plain in a photo.
    """
    image = pixels.astype(np.float32) / 255
    if rng.random() < 0.4:
        image = _blur(image, rng)
    if rng.random() < 0.5:
        image *= _vignette(image.shape, rng)
    if rng.random() < 0.5:
        image = _tone(image, rng)
    image += _sensor_noise(image, rng)
    stored = (image * 255).clip(0, 255).astype(np.uint8)
    if rng.random() < 0.25:
        stored = cv2.bilateralFilter(stored, 5, rng.uniform(5, 25), 3)  # a camera's own noise reduction
    return _compressed(stored, int(rng.integers(30, 97))) if rng.random() < 0.7 else stored


def _compressed(pixels: np.ndarray, quality: int) -> np.ndarray:
    """(H, W[, 3]) uint8 after JPEG compression."""
    encoded = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
    return cv2.imdecode(encoded, cv2.IMREAD_GRAYSCALE if pixels.ndim == 2 else cv2.IMREAD_COLOR)


def _vignette(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """(h, w) float32: 1 in the middle, darker towards the corners."""
    height, width = shape
    x = np.linspace(-1, 1, width, dtype=np.float32)
    y = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    return 1 - np.float32(rng.uniform(0.05, 0.35)) * (x * x + y * y) / 2


def _sensor_noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Read noise and shot noise, relative to white; sometimes coarser than a pixel."""
    noise = rng.standard_normal(image.shape, np.float32)
    if rng.random() < 0.4:
        noise = cv2.GaussianBlur(noise, (0, 0), rng.uniform(0.5, 1.0)) * 2
    reading, light = np.exp(rng.uniform(np.log(0.002), np.log(0.025), 2)).astype(np.float32)
    return noise * (reading + light * np.sqrt(image.clip(0, 1)))


def darken(grey: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(H, W) uint8 as at another time of day: a steep tone curve, little contrast, sensor noise."""
    image = grey.astype(np.float32) / 255
    image = image ** np.exp(rng.uniform(-1.2, 1.2)) * rng.uniform(0.25, 1) + rng.uniform(0, 0.1)
    image += rng.normal(0, rng.uniform(0.005, 0.05), image.shape).astype(np.float32)
    return (image.clip(0, 1) * 255).astype(np.uint8)


def _tone(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    gamma = np.exp(rng.uniform(-0.7, 0.7))
    contrast, brightness = rng.uniform(0.5, 1.3), rng.uniform(-0.15, 0.15)
    return ((image**gamma - 0.5) * contrast + 0.5 + brightness).clip(0, 1)


def _shading(shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A smooth illumination field, or one shadow with a sharp edge."""
    if rng.random() < 0.6:
        coarse = rng.uniform(0.5, 1.2, (3, 4)).astype(np.float32)
        return cv2.resize(coarse, shape[::-1], interpolation=cv2.INTER_CUBIC)
    field = np.ones(shape, np.float32)
    height, width = shape
    polygon = rng.uniform(-0.3, 1.3, (3, 2)) * (width, height)
    cv2.fillPoly(field, [polygon.astype(np.int32)], float(rng.uniform(0.35, 0.8)))
    return cv2.GaussianBlur(field, (0, 0), rng.uniform(0.5, 6))


def _blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if rng.random() < 0.6:
        return cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 2.0))
    length = int(rng.integers(3, 12))
    kernel = np.zeros((length, length), np.float32)
    direction = rng.uniform(0, np.pi)
    offset = np.array([np.cos(direction), np.sin(direction)]) * length / 2
    centre = np.array([(length - 1) / 2] * 2)
    start, end = (tuple(round(float(x)) for x in centre + sign * offset) for sign in (-1, 1))
    cv2.line(kernel, start, end, 1.0)
    return cv2.filter2D(image, -1, kernel / kernel.sum())


# --- lens: Smooth distortions of an image: radial, as of lenses, and free-form, interpolated between coarse
# knots.

GRID = (13, 17)  # rows and columns of the coarse field
ITERATIONS = 4  # of the inverse; each reduces its error to about a tenth (the slope of the field)


@dataclass(frozen=True, eq=False)
class Lens:
    """A lens distortion: pixel p of the image corresponds to pixel p + field(p) of a pinhole camera."""

    field: np.ndarray  # (H, W, 2) float32, pixels

    def to_pinhole(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions (float32 arrays of one shape) in this image → positions in the pinhole image."""
        offset = _sampled(self.field, x, y)
        return x + offset[..., 0], y + offset[..., 1]

    def from_pinhole(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions in the pinhole image → positions in this image, to about 0.01 pixels."""
        u, v = x, y
        for _ in range(ITERATIONS):
            offset = _sampled(self.field, u, v)
            u, v = x - offset[..., 0], y - offset[..., 1]
        return u, v


def _sampled(field: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(…, 2) field at positions of any shape; outside the image that of its border."""
    flat = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(-1, 1)
    found = cv2.remap(
        field,
        np.ascontiguousarray(flat, np.float32),
        np.ascontiguousarray(y.reshape(flat.shape), np.float32),
        cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return found.reshape(*x.shape, 2)


def draw_lens(size: tuple[int, int], rng: np.random.Generator) -> Lens:
    """A radial distortion, a free-form one, or both, for images of `size` (width, height)."""
    width, height = size
    rows, columns = GRID
    x, y = np.meshgrid(np.linspace(-1, 1, columns) * width / 2, np.linspace(-1, 1, rows) * height / 2)
    field = np.zeros((rows, columns, 2))
    kind = rng.random()
    if kind < 0.7:
        radius = np.hypot(width, height) / 2
        square = (x * x + y * y) / radius**2
        factor = rng.uniform(-0.1, 0.1) * square + rng.uniform(-0.04, 0.04) * square**2
        field += np.stack([x * factor, y * factor], -1)
    if kind > 0.5:
        knots = rng.uniform(-0.012, 0.012, (4, 5, 2)) * max(size)
        field += cv2.resize(knots, (columns, rows), interpolation=cv2.INTER_CUBIC)
    return Lens(cv2.resize(field.astype(np.float32), (width, height), interpolation=cv2.INTER_CUBIC))
