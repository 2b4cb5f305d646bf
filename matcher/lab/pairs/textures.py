"""A folder of photos as textures: the validation split, random draws, and photos that cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import cv2
import numpy as np

from matcher.data.images import read_image
from matcher.data.photos import find_images
from matcher.errors import ImageError, UsageError

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
