"""Surfaces → pixels and inverse depth, nearest first; relief is traced from its highest layer downwards.

Relief mapping as in Policarpo, Oliveira & Comba (2005): a linear search for the first layer below the
surface, then secant steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from matcher.lab.pairs.posed import NOTHING, PosedView
from matcher.lab.pairs.relief.surfaces import Surface

NEAR = 0.05  # metres; the near plane
LAYERS, SECANTS = (3, 10), 3  # fewest and most layers
LAYER_TEXELS = 4.0  # between two layers along a ray, as far as the largest number of layers allows
SUBPIXEL_BITS = 4


@dataclass(frozen=True, eq=False)
class ViewCamera:
    """x = K (R X + t); `size` (width, height)."""

    K: np.ndarray
    R: np.ndarray
    t: np.ndarray
    size: tuple[int, int]

    @property
    def cam_from_world(self) -> np.ndarray:
        """(4, 4)."""
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = self.R, self.t
        return pose

    @property
    def centre(self) -> np.ndarray:
        """(3,) position of the camera in the world."""
        return -self.R.T @ self.t


@dataclass(frozen=True, eq=False)
class _Patch:
    """A surface rendered into a window of the image."""

    pixels: np.ndarray
    inverse_depth: np.ndarray
    covered: np.ndarray


def render(surfaces: list[Surface], camera: ViewCamera, backdrop: np.ndarray) -> PosedView:
    """The nearest surface at each pixel; `backdrop` (H, W) uint8, without depth, where there is none."""
    pixels = backdrop.copy()
    inverse_depth = np.full(backdrop.shape, NOTHING, np.float32)
    for surface in surfaces:
        window = projected_window(surface, camera)
        if window is None:
            continue
        rows, columns, outline = window
        draw = _flat if surface.heights is None else _traced
        patch = draw(surface, camera, rows, columns, outline)
        nearest = patch.covered & (patch.inverse_depth > inverse_depth[rows, columns])
        np.copyto(pixels[rows, columns], patch.pixels, where=nearest)
        np.copyto(inverse_depth[rows, columns], patch.inverse_depth, where=nearest)
    return PosedView(pixels, inverse_depth, camera.K, camera.cam_from_world)


def projected_window(surface: Surface, camera: ViewCamera) -> tuple[slice, slice, np.ndarray] | None:
    """Rows and columns of the image that a surface may cover, and its outline (N, 2) px; None if none."""
    corners = surface.corners()
    outlines = [_outline(corners @ camera.R.T + camera.t, camera.K)]
    if surface.heights is not None:
        raised = corners + surface.facing * float(surface.heights.max())
        outlines.append(_outline(raised @ camera.R.T + camera.t, camera.K))
    corners = np.concatenate(outlines)
    if not len(corners):
        return None
    width, height = camera.size
    low = np.floor(corners.min(0)).clip(0, (width, height)).astype(int)
    high = (np.ceil(corners.max(0)) + 1).clip(0, (width, height)).astype(int)
    if (high - low < 2).any():
        return None
    return slice(low[1], high[1]), slice(low[0], high[0]), outlines[0]


def _outline(corners: np.ndarray, K: np.ndarray) -> np.ndarray:
    """(N, 2) pixels of a polygon (M, 3) in camera axes, clipped at the near plane; empty if behind it."""
    kept = []
    for a, b in zip(corners, np.roll(corners, -1, 0), strict=True):
        if a[2] > NEAR:
            kept.append(a)
        if (a[2] > NEAR) != (b[2] > NEAR):
            kept.append(a + (b - a) * (NEAR - a[2]) / (b[2] - a[2]))
    projected = np.array(kept).reshape(-1, 3) @ K.T
    return projected[:, :2] / projected[:, 2:]


def _flat(surface: Surface, camera: ViewCamera, rows: slice, columns: slice, outline: np.ndarray) -> _Patch:
    H = _homography(surface, camera)
    H = np.array([[1, 0, -columns.start], [0, 1, -rows.start], [0, 0, 1.0]]) @ H
    size = (columns.stop - columns.start, rows.stop - rows.start)
    if abs(np.linalg.det(H)) < 1e-18:  # seen from its edge
        empty = np.zeros(size[::-1], np.float32)
        return _Patch(empty.astype(np.uint8), empty, empty > 0)
    a, b, c = np.linalg.inv(H)[2].astype(np.float32)
    inverse_depth = a * np.arange(size[0], dtype=np.float32) + (
        b * np.arange(size[1], dtype=np.float32)[:, None] + c
    )
    texture, scale = _minified(surface.texture, H, size)
    pixels = cv2.warpPerspective(
        texture, H @ _rescaled(scale), size, flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )
    if surface.solid is not None:
        mask = surface.solid.astype(np.uint8)
        covered = cv2.warpPerspective(mask, H, size, flags=cv2.INTER_NEAREST) > 0
    else:
        mask = np.zeros(size[::-1], np.uint8)
        corners = (outline - (columns.start, rows.start)).clip(-1e4, 1e4) * 2**SUBPIXEL_BITS
        cv2.fillConvexPoly(mask, np.rint(corners).astype(np.int32), 1, shift=SUBPIXEL_BITS)
        covered = mask > 0
    return _Patch(pixels, inverse_depth, covered & (inverse_depth > 0) & (inverse_depth < 1 / NEAR))


def _minified(texture: np.ndarray, H: np.ndarray, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The texture, reduced to the resolution at the middle of a window of `size` if that is lower, and its
    scale (2,) relative to the original."""
    u, v, w = np.linalg.inv(H) @ [size[0] / 2, size[1] / 2, 1]
    height, width = texture.shape
    middle = np.clip([u / w, v / w], 0, (width, height)) if abs(w) > 1e-12 else np.array([width, height]) / 2
    depth = H[2] @ [*middle, 1]
    area = abs(np.linalg.det(H)) / max(abs(depth), 1e-6) ** 3  # pixels per texel
    shrink = float(np.clip(1 / np.sqrt(max(area, 1e-9)), 1, 8))
    if shrink < 1.3:
        return texture, np.ones(2)
    smaller = tuple(max(4, round(side / shrink)) for side in (width, height))
    return cv2.resize(texture, smaller, interpolation=cv2.INTER_AREA), np.divide(smaller, (width, height))


def _rescaled(scale: np.ndarray) -> np.ndarray:
    """(3, 3) from texels of a resized texture to those of the original."""
    (a, b), offset = 1 / scale, 0.5 / scale - 0.5
    return np.array([[a, 0, offset[0]], [0, b, offset[1]], [0, 0, 1.0]])


def _traced(surface: Surface, camera: ViewCamera, rows: slice, columns: slice, outline: np.ndarray) -> _Patch:
    """The first crossing of each pixel's ray with a surface with relief."""
    axes = np.column_stack([surface.right, surface.down, surface.facing])
    to_texels = np.linalg.inv(axes)
    cu, cv, ch = (to_texels @ (camera.centre - surface.origin)).astype(np.float32)
    x = np.arange(columns.start, columns.stop, dtype=np.float32)
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None]
    du, dv, dh = (
        (row[0] * x + (row[1] * y + row[2])).astype(np.float32)
        for row in to_texels @ camera.R.T @ np.linalg.inv(camera.K)
    )
    top = float(surface.heights.max()) * 1.001 + 1e-6
    if ch <= top:  # the camera is inside or behind the relief
        return _Patch(np.zeros(dh.shape, np.uint8), dh, np.zeros(dh.shape, bool))
    downwards = dh < -1e-6
    slope = 1 / np.where(downwards, dh, -1)
    du, dv = du * slope, dv * slope  # texels per metre of height
    heights = _search(surface, (cu - ch * du, cv - ch * dv), (du, dv), top)
    u, v = cu + (heights - ch) * du, cv + (heights - ch) * dv
    size = surface.shape[::-1]
    inside = downwards & (u >= 0) & (v >= 0) & (u <= size[0] - 1) & (v <= size[1] - 1)
    if surface.solid is not None:
        inside &= cv2.remap(surface.solid.astype(np.uint8), u, v, cv2.INTER_NEAREST) > 0
    texture, scale = _minified(surface.texture, _homography(surface, camera), camera.size)
    (a, b), (c, d) = scale, 0.5 * scale - 0.5
    u, v = np.float32(a) * u + np.float32(c), np.float32(b) * v + np.float32(d)
    pixels = cv2.remap(texture, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    inverse_depth = np.where(inside, dh / (heights - ch), 0)
    return _Patch(pixels, inverse_depth, inside & (inverse_depth < 1 / NEAR))


def _homography(surface: Surface, camera: ViewCamera) -> np.ndarray:
    """(3, 3) texels of the surface's plane → pixels; the third coordinate is the depth."""
    R, t = camera.R, camera.t
    return camera.K @ np.column_stack([R @ surface.right, R @ surface.down, R @ surface.origin + t])


def _search(
    surface: Surface,
    start: tuple[np.ndarray, np.ndarray],
    slope: tuple[np.ndarray, np.ndarray],
    top: float,
) -> np.ndarray:
    """(h, w) float32 height at which each ray u = start + height · slope first meets the relief."""

    u, v = np.empty_like(start[0]), np.empty_like(start[1])

    def above(height: np.ndarray | np.float32) -> np.ndarray:
        for texel, first, step in zip((u, v), start, slope, strict=True):
            np.multiply(step, height, out=texel)
            np.add(texel, first, out=texel)
        relief = cv2.remap(
            surface.heights, u, v, cv2.INTER_LINEAR, borderMode=cv2.BORDER_CONSTANT, borderValue=-1
        )
        return height - relief

    length = float(np.quantile(np.hypot(slope[0][::16, ::16], slope[1][::16, ::16]), 0.8)) * top
    layers = int(np.clip(np.ceil(length / LAYER_TEXELS), *LAYERS))
    # Number of layers before the first one below the relief.
    searching, passed = np.ones(start[0].shape, bool), np.zeros(start[0].shape, np.float32)
    for layer in range(layers - 1, 0, -1):
        searching &= above(np.float32(top * layer / layers)) > 0
        passed += searching
    spacing = np.float32(top / layers)
    upper = top - passed * spacing
    lower = np.maximum(upper - spacing, 0)
    upper_gap, lower_gap = np.maximum(above(upper), 1e-9), above(lower)
    for _ in range(SECANTS):
        middle = lower + (upper - lower) * (-lower_gap / np.maximum(upper_gap - lower_gap, 1e-9))
        gap = above(middle)
        below = gap <= 0
        lower, lower_gap = np.where(below, middle, lower), np.where(below, gap, lower_gap)
        upper, upper_gap = np.where(below, upper, middle), np.where(below, upper_gap, gap)
    # The last point on the upper side lies on the relief to a fraction of a texel.
    return lower + (upper - lower) * (-lower_gap / np.maximum(upper_gap - lower_gap, 1e-9))
