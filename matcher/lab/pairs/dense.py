"""Dense ground truth between two images: the position of every pixel of each in the other.

This is the interface between sources of training pairs and training. A pixel is

- visible: it is visible in the other image, and its position there is known to a fraction of a pixel;
- hidden: it is not visible in the other image: occluded, behind the camera, outside the image, or not part
  of the scene (black borders);
- unknown: depth or pose cannot decide. Losses ignore such a pixel. Planes and relief have hardly any,
  rendered rooms have them at depth edges, real scenes have many.

Positions are a (2, H, W) array per image, xy in pixels of the other image (the centre of the first pixel is
(0, 0)). Pixels that are not visible hold `HIDDEN` or `UNKNOWN`, both negative, so `positions[0] >= 0` means
visible and `positions[0] == UNKNOWN` means ignored. `transfer` interpolates between pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import cv2
import numpy as np

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
