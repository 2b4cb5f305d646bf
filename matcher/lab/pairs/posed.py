"""Images with depth and pose: new framings of them, and the positions of their pixels in one another.

Whatever the source (rendered rooms, relief, real scenes), a view is pixels, inverse depth, K and pose, so
that zooms, crops, rotations of the camera and lens distortion are made here only, and stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from matcher.lab.pairs.dense import HIDDEN, UNKNOWN
from matcher.lab.pairs.lens import Lens

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
