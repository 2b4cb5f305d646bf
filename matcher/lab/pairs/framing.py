"""Random framings of views for training: zooms, crops, camera rotations, lens distortion, black borders."""

from __future__ import annotations

import cv2
import numpy as np

from matcher.lab.pairs.lens import draw_lens
from matcher.lab.pairs.posed import Framing, PosedView, reframe

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
