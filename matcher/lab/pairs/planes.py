"""Scenes made of photo-textured planes, rendered from moving cameras with exact correspondences.

A scene is a list of planes; a view maps each plane's texture pixels to image pixels by a homography whose
third coordinate is the depth, so visibility is a comparison of inverse depths. One plane that fills the
image gives a homography, as in the usual pre-training of matchers; several at different depths give parallax
and occlusion.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from matcher.lab.pairs.dense import HIDDEN

NOTHING = 255  # label of pixels without a plane of the scene


@dataclass(frozen=True)
class SceneRecipe:
    """Views to train on: photos on one plane, or on several planes in space, seen by moving cameras."""

    scenes: int = 4000
    views: int = 5  # of each scene
    spatial_share: float = 0.4  # scenes of several planes, tilted and at different depths; else one plane
    full_rotation_share: float = 0.12  # views turned by any angle; the others by at most `max_roll`
    max_roll: float = 30.0  # degrees
    max_tilt: float = 60.0  # degrees between a plane and the image plane
    max_zoom: float = 2.2  # largest change of scale of a view
    width: int = 640
    height: int = 480
    max_keypoints: int = 1024


@dataclass(frozen=True, eq=False)
class Plane:
    """A photo in space: texture pixel (u, v) lies at origin + u·right + v·down."""

    texture: np.ndarray  # (h, w) uint8
    origin: np.ndarray  # (3,)
    right: np.ndarray  # (3,) per texture pixel
    down: np.ndarray  # (3,)


@dataclass(frozen=True, eq=False)
class View:
    """A rendered image, and the plane of the scene at each of its pixels."""

    pixels: np.ndarray  # (H, W) uint8
    labels: np.ndarray  # (H, W) uint8, index of the visible plane, or NOTHING
    homographies: np.ndarray  # (P, 3, 3) float64, texture pixels → image pixels; third coordinate is depth


def build_planes(textures: list[np.ndarray], recipe: SceneRecipe, rng: np.random.Generator) -> list[Plane]:
    """One upright plane at depth 1 (its longer side 1 wide) or, for several textures, planes in space.

    The first of several is a wall behind the others.
    """
    if len(textures) == 1:
        return [_plane(textures[0], centre=np.array([0, 0, 1.0]), longer=1.0, tilt=0.0, rng=rng)]
    wall = _plane(textures[0], np.array([0, 0, rng.uniform(1.5, 2.5)]), rng.uniform(3.0, 4.5), 20.0, rng)
    planes = [wall]
    for texture in textures[1:]:
        depth = rng.uniform(0.7, 1.5)
        centre = np.array([rng.uniform(-0.5, 0.5) * depth, rng.uniform(-0.4, 0.4) * depth, depth])
        planes.append(_plane(texture, centre, rng.uniform(0.4, 1.1) * depth, recipe.max_tilt, rng))
    return planes


def _plane(
    texture: np.ndarray, centre: np.ndarray, longer: float, tilt: float, rng: np.random.Generator
) -> Plane:
    height, width = texture.shape
    rotation = _tilt(tilt, rng)
    step = longer / max(height, width)
    right, down = rotation[:, 0] * step, rotation[:, 1] * step
    return Plane(texture, centre - right * (width - 1) / 2 - down * (height - 1) / 2, right, down)


def _tilt(limit: float, rng: np.random.Generator) -> np.ndarray:
    """A rotation about a random axis in the image plane by up to `limit` degrees, uniformly distributed."""
    direction, angle = rng.uniform(0, 2 * np.pi), np.deg2rad(limit) * rng.random()
    return cv2.Rodrigues(angle * np.array([np.cos(direction), np.sin(direction), 0.0]))[0]


def place_camera(
    recipe: SceneRecipe, spatial: bool, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A camera (K, R, t) that looks at the middle of the scene from somewhere in front of it.

    For one plane the orbit angle is the tilt of the plane; for several it also changes the occlusions.
    """
    width, height = recipe.width, recipe.height
    focal = rng.uniform(0.8, 1.4) * max(width, height)
    K = np.array([[focal, 0, (width - 1) / 2], [0, focal, (height - 1) / 2], [0, 0, 1.0]])
    roll = 180.0 if rng.random() < recipe.full_rotation_share else recipe.max_roll
    spin = cv2.Rodrigues(np.array([0, 0, np.deg2rad(rng.uniform(-roll, roll))]))[0]
    orbit = _tilt(recipe.max_tilt * (0.6 if spatial else 1.0), rng)
    target = np.array([0, 0, 1.0]) + np.append(rng.uniform(-0.2, 0.2, 2), 0)
    # The distance from which a plane of width 1 more than fills the view.
    fitting = focal / max(width, height) * 0.8
    distance = fitting * recipe.max_zoom ** rng.uniform(-0.6, 0.6)
    R = spin @ orbit
    return K, R, np.array([0, 0, distance]) - R @ target


def project(plane: Plane, K: np.ndarray, R: np.ndarray, t: np.ndarray) -> np.ndarray:
    """(3, 3) texture pixels → image pixels; the third coordinate of the product is the depth."""
    return K @ np.column_stack([R @ plane.right, R @ plane.down, R @ plane.origin + t])


def render(
    planes: list[Plane], camera: tuple[np.ndarray, np.ndarray, np.ndarray], backdrop: np.ndarray
) -> View:
    """The nearest plane at each pixel; `backdrop` (H, W) uint8 where there is none."""
    height, width = backdrop.shape
    pixels, labels = backdrop.copy(), np.full(backdrop.shape, NOTHING, np.uint8)
    nearest = np.zeros(backdrop.shape, np.float32)
    ys, xs = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)[None]
    homographies = np.stack([project(plane, *camera) for plane in planes])
    for number, (plane, H) in enumerate(zip(planes, homographies, strict=True)):
        a, b, c = np.linalg.inv(H)[2].astype(np.float32)  # inverse depth is linear in the pixel
        inverse_depth = a * xs + b * ys + c
        warped = cv2.warpPerspective(_smoothed(plane.texture, H), H, (width, height), flags=cv2.INTER_LINEAR)
        extent = np.full(plane.texture.shape, 255, np.uint8)
        covered = cv2.warpPerspective(extent, H, (width, height), flags=cv2.INTER_NEAREST) > 0
        visible = covered & (inverse_depth > nearest)
        pixels[visible], labels[visible] = warped[visible], number
        nearest[visible] = inverse_depth[visible]
    return View(pixels, labels, homographies)


def _smoothed(texture: np.ndarray, H: np.ndarray) -> np.ndarray:
    """The texture, blurred to avoid aliasing where its projection is smaller than the texture."""
    height, width = texture.shape
    depth = H[2] @ [width / 2, height / 2, 1]
    area = abs(np.linalg.det(H)) / max(abs(depth), 1e-6) ** 3  # image pixels per texture pixel
    shrink = 1 / np.sqrt(max(area, 1e-6))
    return texture if shrink < 1.3 else cv2.GaussianBlur(texture, (0, 0), 0.4 * float(min(shrink, 8)))


def plane_positions(view: View, other: View) -> np.ndarray:
    """(2, H, W) float32: position of each pixel of `view` in `other`, or HIDDEN; none is unknown."""
    height, width = view.labels.shape
    positions = np.full((2, height, width), HIDDEN, np.float32)
    x, y = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
    for plane, (H, other_H) in enumerate(zip(view.homographies, other.homographies, strict=True)):
        on_plane = view.labels == plane
        if not on_plane.any():
            continue
        other_from_own = (other_H @ np.linalg.inv(H)).astype(np.float32)
        u, v, w = (row[0] * x + (row[1] * y + row[2]) for row in other_from_own)
        front = w > 1e-9
        w = np.where(front, w, 1)
        u, v = u / w, v / w
        visible = on_plane & front & (u >= 0) & (v >= 0) & (u <= width - 1) & (v <= height - 1)
        labels = cv2.remap(other.labels, np.where(visible, u, 0), np.where(visible, v, 0), cv2.INTER_NEAREST)
        visible &= labels == plane
        positions[0][visible], positions[1][visible] = u[visible], v[visible]
    return positions
