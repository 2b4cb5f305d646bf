"""Image files and images in memory → `Image`: decoded, scaled to 8 bits, turned upright, made smaller."""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image

from matcher import image_files
from matcher.errors import ImageError, ImageWarning, UsageError, counted
from matcher.geometry import LONGEST_ASPECT, resized, upright_size
from matcher.processes import at_once
from matcher.types import Image, is_tensor, to_numpy

# Where keypoints may lie: masks from files and arrays, in stored pixels.


def read_mask(file: ImageInput, max_pixels: int) -> np.ndarray:
    """(H, W) bool, stored pixels, from an image file or its bytes: where any channel and alpha are not 0."""
    path = image_files.as_path(file) if isinstance(file, (str, os.PathLike)) else None
    raw, opaque, _ = _decoded(file, path, max_pixels, bgr=False)
    keep = ((raw != 0) & (raw == raw)).any(axis=tuple(range(2, raw.ndim)))  # NaN says nothing
    return keep if opaque is None else keep & opaque


def find_mask(folder: Path, name: str) -> Path | None:
    """The mask of the image of that name, as of `a/b.jpg` the file `a/b.jpg`, `a/b.jpg.png` or `a/b.png`
    there; None without one. A link to nothing, a pipe or a device counts, so that reading it fails."""
    path = folder / name
    choices = (path, path.with_name(f"{path.name}.png"), path.with_suffix(".png"))
    return next((mask for mask in choices if os.path.lexists(mask) and not mask.is_dir()), None)


def find_masks(folder: Path, names: Iterable[str], where: str) -> dict[str, Path]:
    """The masks by name of image, of those that have one, relative to the folder of images called `where`;
    `UsageError`: no folder, or one without a mask of any of the images."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of masks")
    names = list(names)
    found = {name: mask for name in names if (mask := find_mask(folder, name)) is not None}
    if not found:
        first = names[0]
        called = dict.fromkeys((first, f"{first}.png", str(Path(first).with_suffix(".png"))))
        raise UsageError(
            f"{folder} holds no mask of any of the {len(names)} images of {where}: the mask of {first} is "
            f"called {' or '.join(called)}"
        )
    return found


def _keep(opaque: np.ndarray | None, mask: Any, shape: tuple[int, int], max_pixels: int) -> np.ndarray:
    """(H, W) bool: where an image (H, W), as stored, is opaque and the caller's mask keeps it."""
    name, mask = str(mask) if isinstance(mask, (str, os.PathLike)) else "the mask", read_once(mask)
    if isinstance(mask, (str, os.PathLike, bytes, bytearray, memoryview, PIL.Image.Image)):
        keep = read_mask(mask, max_pixels)
    else:
        array = channels_last(to_numpy(mask))
        if array.dtype.kind not in "biuf" or array.ndim < 2 or isinstance(mask, np.ma.MaskedArray):
            kind = f"{type(mask).__name__} of {array.dtype}, {array.shape}"
            raise UsageError(f"a mask is a path, an array, a PIL image or a torch tensor, (H, W), not {kind}")
        keep = (array != 0) & (array == array)
        keep = keep.any(axis=2) if keep.ndim == 3 else keep
    if keep.shape != shape:
        found, wanted = (" x ".join(map(str, reversed(size))) for size in (keep.shape, shape))
        said = "a mask has the size of the image as stored, before EXIF orientation and resize"
        raise UsageError(f"{name} is {found} pixels, its image {wanted}; {said}")
    return keep if opaque is None else keep & opaque


# How sharp an image is: the blur of its edges, and the size below which shrinking it would lose detail.


def edge_blur(grey: np.ndarray) -> float:
    """The standard deviation, in pixels, of a Gaussian that blurs the sharper edges of an image (H, W) uint8.

    An edge blurred by σ and seen through Gaussians of σ₁ and σ₂ has gradients of the ratio
    √((σ² + σ₂²) / (σ² + σ₁²)) (after Zhuo and Sim 2011), whatever its contrast. 0 where edges are too few.
    """
    fewest = 20
    patches = _edge_patches(grey, radius=8)
    if (count := len(patches)) < fewest:
        return 0.0
    # Gradients under both Gaussians, each the largest within so many pixels of the patch's centre, by which
    # the coarse image may misplace an edge. All filters along x, then all along y: two products of matrices
    # are faster than many small ones.
    scales, shifts, side = (1.0, 2.0), 2, patches.shape[1]
    x, places = np.arange(side) - side // 2 - np.arange(-shifts, shifts + 1)[:, None], 2 * shifts + 1
    filters = []  # of each scale a Gaussian and its derivative, centred at the places
    for scale in scales:
        gaussian = np.exp(-(x**2) / (2 * scale**2))
        gaussian /= gaussian.sum(1, keepdims=True)
        derivative = gaussian * x
        filters += [gaussian, derivative / (derivative * x).sum(1, keepdims=True)]
    filters = np.concatenate(filters).astype(np.float32)
    along = (patches.reshape(count * side, side) @ filters.T).reshape(count, side, -1)
    both = along.swapaxes(1, 2).reshape(-1, side) @ filters.T
    both = both.reshape(count, 2, 2, places, 2, 2, places)
    own = (both[:, k, :, :, k] for k in range(2))  # (N, filter along x, place, filter along y, place)
    fine, coarse = (np.hypot(one[:, 1, :, 0], one[:, 0, :, 1]).reshape(count, -1).max(1) for one in own)
    clear = coarse > 2.0  # grey values per pixel
    if np.count_nonzero(clear) < fewest:
        return 0.0
    ratio = np.maximum((fine[clear] / coarse[clear]) ** 2, 1.02)  # 1 is an edge of infinite blur
    variance = (scales[1] ** 2 - ratio * scales[0] ** 2) / (ratio - 1)
    # Depth of field, motion and shadows blur most edges.
    return float(np.percentile(np.sqrt(np.maximum(variance, 0.1**2)), 30.0))


def without_blur(pixels: np.ndarray, least: int) -> float:
    """The factor, at most 1, by which an image (H, W) or (H, W, 3), uint8, can be made smaller with little
    loss of detail; its longer side keeps `least` pixels."""
    longer = max(pixels.shape)
    if longer <= least:
        return 1.0
    # Blur, in pixels, that an image has once resized. Chosen on photos and rendered views, enlarged, blurred,
    # darkened, with noise and compression; sharp photos have at most .7.
    sharp = 0.65
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return min(1.0, max(least / longer, sharp / max(edge_blur(grey), sharp)))


def _edge_patches(grey: np.ndarray, radius: int) -> np.ndarray:
    """(N, 2r + 1, 2r + 1) float32 around the 256 strongest edges of the image at a quarter of its size, where
    noise averages out; one in each block of 5 × 5 pixels there."""
    (height, width), block = grey.shape, 5
    side, small = 2 * radius + 1, (width // 4, height // 4)
    if min(small) < 2 * block:
        return np.zeros((0, side, side), np.float32)
    shrunk = cv2.resize(grey, small, interpolation=cv2.INTER_AREA)
    edges = (cv2.Sobel(shrunk, cv2.CV_16S, *order) for order in ((1, 0), (0, 1)))
    strength = cv2.magnitude(*(edge.astype(np.float32) for edge in edges))
    rows, columns = (n // block for n in strength.shape)
    blocks = strength[: rows * block, : columns * block].reshape(rows, block, columns, block)
    blocks = blocks.swapaxes(1, 2).reshape(rows * columns, -1)
    where, best = blocks.argmax(1), np.argsort(-blocks.max(1), kind="stable")[:256]
    block_y, block_x = np.divmod(best, columns)
    y, x = np.divmod(where[best], block)
    at = np.stack([block_x * block + x, block_y * block + y], axis=1)
    at = np.round((at + 0.5) * np.divide([width, height], small) - 0.5).astype(np.int64)
    at = at[np.all((at >= radius) & (at < np.array([width, height]) - radius), axis=1)]
    offsets = np.arange(-radius, radius + 1)
    x, y = at.T
    return grey[y[:, None, None] + offsets[:, None], x[:, None, None] + offsets].astype(np.float32)


# Image files and images in memory → `Image`.

_ACCEPTED = (
    "one image, grey (H, W), RGB (H, W, 3) or RGBA (H, W, 4), as a tensor also (1, H, W), (3, H, W) or "
    "(1, 3, H, W), of uint8, uint16, bool or float in [0, 1]"
)
MAX_PIXELS = 178_000_000
ImageInput = str | Path | np.ndarray | Image | Any  # the last: a PIL image or a torch tensor


def limit_for(size: tuple[int, int]) -> int:
    """`max_pixels` for a file that was read before and had this size: the limit was raised for it then."""
    return max(MAX_PIXELS, size[0] * size[1])


def read_image(
    path: ImageInput,
    *,
    resize: int | None = 1024,
    soft_resize: int | None = None,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    mask: image_files.PathLike | np.ndarray | None = None,
    alpha_mask: bool = True,
    bgr: bool = False,
    keep_stored: bool = False,
    deep: bool = False,
) -> Image:
    """Read an image file, or an image in memory.

    Formats: JPEG, PNG, TIFF, WebP, BMP, PGM, PPM, PBM, PFM, GIF, JPEG 2000, AVIF and (with the `heif`
    extra) HEIC; of several frames or pages the first, with an `ImageWarning`. 16-bit samples are scaled by
    the bits that they use, those of a PFM must lie in [0, 1].

    >>> import matcher, PIL.Image
    >>> PIL.Image.new("L", (1600, 1200)).save("grey.png")
    >>> matcher.read_image("grey.png", resize=800)
    Image(1600 x 1200 stored, 800 x 600 grey, 'grey.png')

    Args:
        path: of the file; or the image itself: an encoded file as `bytes`, or an open one; a PIL image of any
            mode; an array, (H, W) grey, (H, W, 3) RGB or (H, W, 4) RGBA, of uint8, uint16, bool or float in
            [0, 1]; a torch tensor, which may have its channels first; or an `Image`, returned as it is.
        resize: longer side in pixels, only ever made smaller; None keeps the size. An image more than four
            times as long as wide gets the area of an ordinary one instead, with an `ImageWarning`.
        soft_resize: a soft image (enlarged, blurred) is made smaller still, until its edges are sharp, but
            its longer side keeps so many pixels; None: never.
        upright: apply the EXIF orientation; False keeps the stored pixels.
        max_pixels: width · height above which a file is refused from its header, undecoded.
        mask: image file, its `bytes` or (H, W) array, in stored pixels: not 0 = keep.
        alpha_mask: where alpha is 0, the mask is False too; with an `ImageWarning` if it is 0 everywhere.
        bgr: arrays and tensors of three or four channels are BGR or BGRA, as OpenCV reads them.
        keep_stored: also keep the image without colour at the file's resolution and depth, as
            `Image.stored`; `Pipeline.refine` reads it.
        deep: keep samples of 16 bits as they are, for what is to be written; floats get as many.

    Raises:
        ImageError: the file is missing, not a known image, too large, cut short or damaged.
        UsageError: an argument that cannot be used, an array of another shape or type, values outside the
            range, a mask of another size than the stored image, or one beside an `Image`.
    """
    image, path = path, image_files.as_path(path) if isinstance(path, (str, os.PathLike)) else None
    if isinstance(image, Image):
        if mask is not None:
            raise UsageError("an Image carries its own mask: build it with one, and pass none beside it")
        return image
    for name, limit in {"resize": resize, "soft_resize": soft_resize, "max_pixels": max_pixels}.items():
        if limit is not None and limit < 1:
            raise UsageError(f"{name} must be at least 1, not {limit}")
    decoded, name = _decoded(image, path, max_pixels, bgr), "the image" if path is None else str(path)
    try:
        stored = _to_integers(decoded.samples, deep)
    except ValueError as error:
        if path is None:
            raise UsageError(f"the array cannot be used: {error}; accepted: {_ACCEPTED}") from error
        raise ImageError(f"{path}: {error}; convert it to 8- or 16-bit samples") from error
    keep = decoded.opaque if alpha_mask else None
    if keep is not None and not keep.any():
        text = "alpha is 0 everywhere, so there are no keypoints; alpha_mask=False ignores it"
        warnings.warn(f"{name}: {text}", ImageWarning, stacklevel=2)
    if mask is not None:
        keep = _keep(keep, mask, stored.shape[:2], max_pixels)
    size, orientation = stored.shape[1::-1], decoded.orientation if upright else 1
    new_size, _ = resized(upright_size(size, orientation), resize)
    pixels, target = stored, upright_size(new_size, orientation)  # the swap undoes itself
    # It is made smaller before it is turned, so that only the small one is moved.
    if target != size:
        if max(size) > LONGEST_ASPECT * min(size):
            text = f"is a long strip, resized by its area to {target[0]} x {target[1]}; its parts show more"
            warnings.warn(f"{name}: {size[0]} x {size[1]} {text}", ImageWarning, stacklevel=2)
        pixels = cv2.resize(stored, target, interpolation=cv2.INTER_AREA)
    if soft_resize is not None and (factor := without_blur(pixels, soft_resize)) < 1:
        target = tuple(max(1, round(side * factor)) for side in target)
        pixels = cv2.resize(stored, target, interpolation=cv2.INTER_AREA)
    shown = keep
    if keep is not None and target != size:  # kept where more than half of the resized pixel's area is
        shown = cv2.resize(keep * np.uint8(255), target, interpolation=cv2.INTER_AREA) > 127
    ends = (upright_size(target, orientation), upright_size(size, orientation))
    return Image(
        pixels=np.ascontiguousarray(image_files.turned_by(pixels, orientation)),
        size=size,
        scale=tuple(new / old for new, old in zip(*ends, strict=True)),
        orientation=orientation,
        path=path,
        mask=None if shown is None else np.ascontiguousarray(image_files.turned_by(shown, orientation)),
        exif_orientation=None if decoded.orientation == orientation else decoded.orientation,
        stored=Image(_to_integers(decoded.samples, True), size).grey() if keep_stored else None,
        stored_mask=keep if keep_stored else None,
    )


def read_once(image: ImageInput) -> ImageInput:
    """An open file as its bytes, which can be decoded again; other images as they are."""
    if isinstance(image, io.TextIOBase):
        raise UsageError("an image is read from a file that is open for bytes: open(path, 'rb')")
    return image.read() if hasattr(image, "read") else image


def _decoded(image: Any, path: Path | None, max_pixels: int, bgr: bool) -> image_files.Decoded:
    if path is not None:
        return image_files.decode(path, max_pixels)
    image = read_once(image)
    if isinstance(image, PIL.Image.Image):
        return image_files.from_pillow(image)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return image_files.decode_open(io.BytesIO(image), Path("the image in memory"), max_pixels)
    if not isinstance(image, np.ndarray) and not is_tensor(image):
        raise UsageError(
            "an image is a path, an Image, a NumPy array, a PIL image or a torch tensor, "
            f"not {type(image).__name__}; accepted: {_ACCEPTED}"
        )
    if isinstance(image, np.ma.MaskedArray):
        raise UsageError("a masked array: give its data, and with it mask=~numpy.ma.getmaskarray(array)")
    array = channels_last(to_numpy(image)) if is_tensor(image) else image
    channels = array.shape[2:] or (1,)
    if array.ndim not in (2, 3) or channels[0] not in (1, 3, 4) or array.size == 0:
        raise UsageError(f"an array of shape {array.shape} is not an image; accepted: {_ACCEPTED}")
    opaque = array[..., 3] != 0 if channels[0] == 4 else None
    if array.ndim == 3:
        array = array[..., 0 if channels[0] == 1 else slice(2, None, -1) if bgr else slice(3)]
    return image_files.Decoded(array, opaque, orientation=1)


def channels_last(array: np.ndarray) -> np.ndarray:
    """(C, H, W) or (1, C, H, W) with C = 1, 3 or 4 as (H, W, C); other arrays as they are."""
    array = array[0] if array.ndim == 4 and len(array) == 1 else array
    first = array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4)
    return array.transpose(1, 2, 0) if first else array


def _to_integers(raw: np.ndarray, deep: bool) -> np.ndarray:
    """Samples of any accepted depth as uint8, scaled by the full range of their bits (`white`), or, if
    `deep`, those of more as uint16; `ValueError` for others."""
    raw = np.ascontiguousarray(raw, dtype=raw.dtype.newbyteorder("="))
    if raw.dtype == np.uint8:
        return raw
    if raw.dtype == np.bool_:
        return raw * np.uint8(255)
    if raw.dtype == np.uint16:
        return raw if deep else to_8_bits(raw)
    if raw.dtype.kind != "f":
        raise ValueError(f"samples of type {raw.dtype}")
    low, high = float(raw.min()), float(raw.max())  # NaN propagates and fails the comparison
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # a hair of overshoot is interpolation's rounding
        raise ValueError(f"float samples from {low:g} to {high:g}, which should lie in [0, 1]")
    most, kind = (65535, np.uint16) if deep else (255, np.uint8)
    return np.rint(np.clip(raw, 0, 1) * np.float32(most)).astype(kind)


def white(pixels: np.ndarray) -> int:
    """The largest value of the bits that an image uses, but for one sample in a thousand (hot pixels)."""
    depths = (255, 1023, 4095, 16383, 65535)  # cameras of 10 to 14 bits do not fill 16
    return next(top for top in depths if np.count_nonzero(pixels > top) <= pixels.size // 1000)


def at_one_depth(images: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Images of uint8 and uint16 as all of one of the two; uint16 keep their values and share their white."""
    if len({image.dtype for image in images}) == 1:
        return images
    scales = [max(map(white, images)) / 255 if image.dtype == np.uint8 else 1 for image in images]
    return [np.rint(i * np.float32(s)).astype(np.uint16) for i, s in zip(images, scales, strict=True)]


def to_8_bits(pixels: np.ndarray, most: int | None = None) -> np.ndarray:
    """An image of uint8 or uint16 as uint8; `most`: what is white in it, if more than itself tells of it."""
    return cv2.convertScaleAbs(pixels, alpha=255 / (most or white(pixels)))


def read_both(
    read: Callable[[ImageInput, Any], Image], *sides: tuple[ImageInput, Any]
) -> tuple[Image, Image]:
    """Both images of a pair, each of what the user has and its mask, files at once where two threads may be
    used; if both cannot be read, image 0 is the one told."""
    calls = [partial(read, *side) for side in sides]
    # Of images in memory there is little to do, and PIL images may share an open file.
    if all(isinstance(image, (str, Path)) for image, _ in sides):
        return at_once(*calls)
    return calls[0](), calls[1]()


def gradient_image(image: Image, smoothing: float) -> Image:
    """The gradient magnitude of an image relative to the average around each pixel, (H, W) uint8, for pairs
    whose grey values have little in common; `smoothing`: σ in pixels of the Gaussian before the derivatives.
    """
    # By strips, as images may be large. The numbers were chosen on photos whose colours went through random
    # curves.
    grey, rows = image.grey(), 256  # whose derivatives are computed at a time
    magnitude = np.empty(grey.shape, np.float32)
    reach = math.ceil(4 * smoothing) + 2  # pixels that OpenCV's Gaussian and Sobel's derivatives look away
    for top in range(0, len(grey), rows):
        low = max(0, top - reach)
        smooth = cv2.GaussianBlur(grey[low : top + rows + reach].astype(np.float32), (0, 0), smoothing)
        derivatives = (cv2.Sobel(smooth, cv2.CV_32F, dx, 1 - dx) for dx in (1, 0))
        magnitude[top : top + rows] = cv2.magnitude(*derivatives)[top - low : top - low + rows]
    around = cv2.GaussianBlur(magnitude, (0, 0), 20.0)
    around += 0.1 * around.mean()  # so that noise in flat areas stays dark
    magnitude /= np.maximum(around, 0.1, out=around)  # smaller averages are rounding errors
    magnitude *= 90  # grey value of a magnitude equal to the average around it
    pixels = np.minimum(magnitude, 255, out=magnitude).astype(np.uint8)
    return replace(image, pixels=pixels, stored=None, stored_mask=None)


# Image files in folders: which suffixes are images, in what order, and where the shared data lie.

IMAGE_SUFFIXES = (  # all that people and cameras give to the formats that are read
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".tif", ".tiff", ".webp", ".bmp", ".gif"),
    *(".pgm", ".ppm", ".pbm", ".pnm", ".pfm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
    *(".avif", ".avifs", ".heic", ".heics", ".heif", ".heifs", ".hif"),
)
_UNREAD = (  # of pictures, too, but of formats that are not read
    *(".bw", ".cur", ".dcx", ".dds", ".dib", ".exr", ".fits", ".hdr", ".icns", ".ico", ".jxl", ".pcx"),
    *(".pic", ".psd", ".qoi", ".ras", ".rgb", ".rgba", ".sgi", ".sr", ".tga", ".wdp", ".xbm", ".xcf", ".xpm"),
)
DATA_VARIABLE = "MATCHER_DATA"  # environment variable that names the folder of `data_folder`


def is_image(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name has the suffix of an image, in any case."""
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES  # noqa: PTH122 - odd names must not raise


def list_images(folder: Path) -> Iterator[str]:
    """Names of the image files below a folder, relative to it, with forward slashes, in no certain order; but
    for hidden ones. Links to folders are followed, unless they lead to one that is looked at already. With an
    `ImageWarning` if there are RAW photos, or others, which are not read."""
    seen, unread = set[str](), Counter[str]()
    waiting = [Path(folder)]  # links come last: what they lead to may be in the folder itself
    while waiting:
        for where, folders, files in os.walk(waiting.pop(0)):
            if (place := os.path.realpath(where)) in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting += [path for name in folders if (path := Path(where) / name).is_symlink()]
            for file in files:
                if not file.startswith(".") and is_image(file):
                    yield (Path(where) / file).relative_to(folder).as_posix()
                elif not file.startswith("."):
                    unread[os.path.splitext(file)[1].lower()] += 1  # noqa: PTH122 - as `is_image`
    if raw := sum(unread[suffix] for suffix in image_files.RAW_SUFFIXES):
        text = f"left out {counted(raw, 'RAW photo')}; develop to JPEG or TIFF what is to be matched"
        warnings.warn(f"{folder}: {text}", ImageWarning, stacklevel=2)
    if others := [suffix for suffix in _UNREAD if unread[suffix]]:
        count = counted(sum(unread[suffix] for suffix in others), "picture")
        text = f"left out {count} of formats that are not read ({', '.join(others)}); convert them to PNG"
        warnings.warn(f"{folder}: {text}", ImageWarning, stacklevel=2)


def find_images(folder: Path) -> list[Path]:
    """All image files below a folder, sorted by path; `UsageError`: no such folder, or no image in it."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder of images")
    if found := sorted(folder / name for name in list_images(folder)):
        return found
    raise UsageError(f"{folder}: no images here (looked for {', '.join(IMAGE_SUFFIXES)})")


def natural_key(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that compares runs of digits as numbers (frame2 before frame10); the name breaks ties."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(p), "") if p[0] in "0123456789" else (1, 0, p) for p in parts], name


def data_folder() -> Path:
    """Where photos/ and bench/ lie: the folder `$MATCHER_DATA`, else `shared` beside the checkout."""
    named = os.environ.get(DATA_VARIABLE)
    return Path(named) if named else Path(__file__).resolve().parents[2] / "shared"
