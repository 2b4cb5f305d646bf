"""Image files and images in memory → `Image`: decoded, scaled to 8 bits, turned upright, made smaller."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image

from matcher.data.arrays import ACCEPTED, as_array, split_alpha, to_grey, to_uint8
from matcher.data.decoding import Decoded, decode, from_pillow, turned_by
from matcher.data.geometry import LONGEST_ASPECT, resized, upright_size
from matcher.data.image import Image
from matcher.data.masks import combined
from matcher.data.probe import PathLike, as_path
from matcher.data.sharpness import without_blur
from matcher.errors import ImageError, ImageWarning, UsageError
from matcher.threads import at_once

MAX_PIXELS = 178_000_000
ImageInput = str | Path | np.ndarray | Image | Any  # the last: a PIL image or a torch tensor


def limit_for(size: tuple[int, int]) -> int:
    """`max_pixels` for a file that was read before and had this size: the limit was raised for it then."""
    return max(MAX_PIXELS, size[0] * size[1])


def read_image(
    path: PathLike,
    *,
    resize: int | None = 1024,
    soft_resize: int | None = None,
    upright: bool = True,
    max_pixels: int = MAX_PIXELS,
    mask: PathLike | np.ndarray | None = None,
    alpha_mask: bool = True,
    keep_stored: bool = False,
) -> Image:
    """Read an image file.

    Formats: JPEG, PNG, TIFF, WebP, BMP, PGM, PPM, PBM, PFM, GIF, JPEG 2000, AVIF and (with the `heif`
    extra) HEIC; of several frames or pages the first, with an `ImageWarning`. 16-bit samples are scaled by
    their full range, those of a PFM must lie in [0, 1].

    >>> import matcher, PIL.Image
    >>> PIL.Image.new("L", (1600, 1200)).save("grey.png")
    >>> matcher.read_image("grey.png", resize=800)
    Image(1600 x 1200 stored, 800 x 600 grey, 'grey.png')

    Args:
        path: the file.
        resize: longer side in pixels, only ever made smaller; None keeps the size. An image more than four
            times as long as wide gets the area of an ordinary one instead, with an `ImageWarning`.
        soft_resize: a soft image (enlarged, blurred) is made smaller still, until its edges are sharp, but
            its longer side keeps so many pixels; None: never.
        upright: apply the EXIF orientation; False keeps the stored pixels.
        max_pixels: width · height above which the file is refused from its header, undecoded.
        mask: image file (not 0 = keep) or (H, W) array, in stored pixels.
        alpha_mask: where alpha is 0, the mask is False too; with an `ImageWarning` if it is 0 everywhere.
        keep_stored: also keep the image without colour at the file's resolution and depth, as
            `Image.stored`; `Pipeline.refine` reads it.

    Raises:
        ImageError: the file is missing, not a known image, too large, cut short or damaged.
        UsageError: an argument that cannot be used, or a mask of another size than the stored image.
    """
    path = as_path(path)
    _check_limits(resize, soft_resize, max_pixels)
    decoded = decode(path, max_pixels)
    try:
        pixels = to_uint8(decoded.samples)
    except ValueError as error:
        raise ImageError(f"{path}: {error}; convert it to 8- or 16-bit samples") from error
    opaque = _opaque(decoded, alpha_mask, str(path))
    keep = combined(opaque, mask, pixels.shape[:2], max_pixels)
    image = _finish(pixels, keep, decoded.orientation, (resize, soft_resize), path, upright=upright)
    return _with_stored(image, decoded.samples, keep) if keep_stored else image


def image_from_array(
    array: Any,
    *,
    resize: int | None = 1024,
    soft_resize: int | None = None,
    upright: bool = True,
    mask: PathLike | np.ndarray | None = None,
    alpha_mask: bool = True,
    keep_stored: bool = False,
) -> Image:
    """An image in memory: a NumPy array, a torch tensor or a PIL image.

    Args:
        array: (H, W) grey, (H, W, 3) RGB or (H, W, 4) RGBA; uint8, uint16, bool or float in [0, 1]. A
            tensor may have its channels first. A PIL image may be of any mode.
        resize, soft_resize, mask, alpha_mask, keep_stored: as in `read_image`.
        upright: apply the EXIF orientation of a PIL image.

    Raises:
        ImageError: a PIL image whose file is damaged.
        UsageError: another shape or dtype, values outside the range, NaN, or a mask of another size.
    """
    _check_limits(resize, soft_resize, MAX_PIXELS)
    if isinstance(array, PIL.Image.Image):
        decoded = from_pillow(array)
    else:
        decoded = Decoded(*split_alpha(as_array(array)), orientation=1)
    try:
        pixels = to_uint8(decoded.samples)
    except ValueError as error:
        raise UsageError(f"the array cannot be used: {error}; accepted: {ACCEPTED}") from error
    opaque = _opaque(decoded, alpha_mask, "the image")
    keep = combined(opaque, mask, pixels.shape[:2], MAX_PIXELS)
    image = _finish(pixels, keep, decoded.orientation, (resize, soft_resize), None, upright=upright)
    return _with_stored(image, decoded.samples, keep) if keep_stored else image


def read_input(
    image: ImageInput,
    *,
    max_pixels: int = MAX_PIXELS,
    mask: PathLike | np.ndarray | None = None,
    **options: Any,
) -> Image:
    """Whatever a user has as an image: a file, an image in memory, or an `Image`, which is taken as it is.

    Raises:
        ImageError, UsageError: as `read_image` and `image_from_array`, which take the other options; or an
            `Image` with a mask beside it.
    """
    if isinstance(image, Image):
        if mask is not None:
            raise UsageError(
                "an Image carries its own mask; build it with one instead of passing a mask beside it"
            )
        return image
    if isinstance(image, (str, Path)):
        return read_image(image, max_pixels=max_pixels, mask=mask, **options)
    return image_from_array(image, mask=mask, **options)


def read_both(
    read: Callable[[ImageInput, Any], Image], *sides: tuple[ImageInput, Any]
) -> tuple[Image, Image]:
    """Both images of a pair, files at once where this process may use two threads.

    Args:
        read: makes an image of what the user has and of its mask.
        sides: image and mask, of image 0 and of image 1; if both cannot be read, image 0 is the one told.
    """
    calls = [partial(read, *side) for side in sides]
    # Of images in memory there is little to do, and PIL images may share an open file.
    if all(isinstance(image, (str, Path)) for image, _ in sides):
        return at_once(*calls)
    return calls[0](), calls[1]()


def _opaque(decoded: Decoded, alpha_mask: bool, name: str) -> np.ndarray | None:
    """(H, W) bool where alpha is not 0, if it is a mask; None: everywhere."""
    opaque = decoded.opaque if alpha_mask else None
    if opaque is not None and not opaque.any():
        warnings.warn(
            f"{name}: alpha is 0 everywhere, so there are no keypoints; alpha_mask=False ignores it",
            ImageWarning,
            stacklevel=4,
        )
    return opaque


def _with_stored(image: Image, samples: np.ndarray, keep: np.ndarray | None) -> Image:
    return replace(image, stored=to_grey(samples), stored_mask=keep)


def _check_limits(resize: int | None, soft_resize: int | None, max_pixels: int) -> None:
    limits = {"resize": resize, "soft_resize": soft_resize, "max_pixels": max_pixels}
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            raise UsageError(f"{name} must be at least 1, not {limit}")


def _finish(
    pixels: np.ndarray,
    keep: np.ndarray | None,
    exif: int,
    sides: tuple[int | None, int | None],
    path: Path | None,
    *,
    upright: bool,
) -> Image:
    """Shrink first, then turn: the same image, and only the small one is moved.

    `sides` are `resize` and `soft_resize`.
    """
    size, orientation = (pixels.shape[1], pixels.shape[0]), exif if upright else 1
    new_size, _ = resized(upright_size(size, orientation), sides[0])
    target = upright_size(new_size, orientation)  # the swap undoes itself
    stored = pixels
    if target != size:
        _warn_of_strips(size, target, path)
        pixels = cv2.resize(stored, target, interpolation=cv2.INTER_AREA)
    if sides[1] is not None and (factor := without_blur(pixels, sides[1])) < 1:
        target = tuple(max(1, round(side * factor)) for side in target)
        pixels = cv2.resize(stored, target, interpolation=cv2.INTER_AREA)
    if keep is not None and target != size:
        # kept where more than half of the resized pixel's area is
        keep = cv2.resize(keep * np.uint8(255), target, interpolation=cv2.INTER_AREA) > 127
    upright = (upright_size(target, orientation), upright_size(size, orientation))
    pixels = np.ascontiguousarray(turned_by(pixels, orientation))
    keep = None if keep is None else np.ascontiguousarray(turned_by(keep, orientation))
    return Image(
        pixels=pixels,
        size=size,
        scale=tuple(new / old for new, old in zip(*upright, strict=True)),
        orientation=orientation,
        path=path,
        mask=keep,
        exif_orientation=None if exif == orientation else exif,
    )


def _warn_of_strips(size: tuple[int, int], target: tuple[int, int], path: Path | None) -> None:
    """A long strip cannot be made small without losing its short side."""
    if max(size) > LONGEST_ASPECT * min(size):
        name = "the image" if path is None else str(path)
        warnings.warn(
            f"{name}: {size[0]} x {size[1]} is a long strip, so it is resized by its area, to {target[0]} x "
            f"{target[1]}; cut into overlapping parts it would keep more detail",
            ImageWarning,
            stacklevel=4,
        )
