"""A folder of photos as textures: found, held out, drawn, and counted where they cannot be read."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import cv2
import numpy as np

from matcher.types import UsageError

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"}
SMALLEST_SIDE = 32  # pixels; a smaller picture has nothing to match
HELD_OUT_SHARE = 0.1


def find_photos(folder: Path) -> list[Path]:
    """All pictures below `folder`, sorted.

    Raises:
        UsageError: there is no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder of photos; name one that exists")
    photos = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not photos:
        raise UsageError(f"{folder}: no photos here (looked for {', '.join(sorted(SUFFIXES))})")
    return photos


def read_texture(photo: Path) -> np.ndarray | None:
    """(h, w) uint8 grey, or None where the file cannot be read or the picture is too small."""
    texture = cv2.imread(str(photo), cv2.IMREAD_GRAYSCALE)
    return None if texture is None or min(texture.shape) < SMALLEST_SIDE else texture


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


def photos_digest(photos: Sequence[Path]) -> str:
    """A short hash of names and sizes, to tell whether views were made of these photos."""
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
    """Photos drawn at random as grey textures; those that cannot be read are passed over and remembered."""

    def __init__(self, photos: Sequence[Path]) -> None:
        self.photos = list(photos)
        self.unreadable: set[int] = set()
        self._weights = folder_weights(photos)

    def draw(
        self, count: int, rng: np.random.Generator, avoid: Collection[int] = ()
    ) -> dict[int, np.ndarray]:
        """Up to `count` different photos, number → (h, w) uint8, none of those in `avoid`.

        Fewer where the folder has no more.

        Raises:
            UsageError: not one of the photos can be read.
        """
        found: dict[int, np.ndarray] = {}
        while len(found) < count and len({*found, *avoid, *self.unreadable}) < len(self.photos):
            number = int(rng.choice(len(self.photos), p=self._weights))
            if number in found or number in avoid or number in self.unreadable:
                continue
            texture = read_texture(self.photos[number])
            if texture is None:
                self.unreadable.add(number)
            else:
                found[number] = texture
        if len(self.unreadable) == len(self.photos):
            raise UsageError(f"{self.photos[0].parent}: not one of {len(self.photos)} photos can be read")
        return found
