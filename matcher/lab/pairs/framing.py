"""How views are framed anew for training: zooms, crops, turns of the camera, lenses, black borders."""

from __future__ import annotations

import cv2
import numpy as np

from matcher.lab.pairs.lens import draw_lens
from matcher.lab.pairs.posed import Framing, PosedView, reframe

ROLL, TURN = 5.0, 2.5  # degrees, deviations
ANY_ROLL_SHARE, BORDER_SHARE, LENS_SHARE = 0.08, 0.12, 0.25


def disturbed_lens(view: PosedView, rng: np.random.Generator) -> PosedView:
    """The view through a lens that distorts, a little zoomed in so that few borders show."""
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
        view: what is framed.
        size: of the new picture.
        centre: xy in the view.
        zoom: new pixels per old one.
        rng: of roll, turn, lens and shift.
    """
    width, height = size
    roll = rng.uniform(-180, 180) if rng.random() < ANY_ROLL_SHARE else rng.normal(0, ROLL)
    axis = np.append(np.deg2rad(rng.normal(0, TURN, 2)), np.deg2rad(roll))
    turn = cv2.Rodrigues(axis)[0]
    centre = _kept_inside(centre, size, zoom, view.size, rng)
    focal = zoom * np.array([view.K[0, 0], view.K[1, 1]])
    ray = turn @ np.linalg.inv(view.K) @ [*centre, 1.0]
    middle = np.array([(width - 1) / 2, (height - 1) / 2])
    principal = middle - focal * ray[:2] / ray[2]
    K = np.array([[focal[0], 0, principal[0]], [0, focal[1], principal[1]], [0, 0, 1.0]])
    lens = draw_lens(size, rng) if rng.random() < LENS_SHARE else None
    return Framing(K, size, turn, lens)


def _kept_inside(
    centre: np.ndarray, size: tuple[int, int], zoom: float, old: tuple[int, int], rng: np.random.Generator
) -> np.ndarray:
    """(2,) middle of a window that has `centre` somewhere in it and mostly does not leave the old picture."""
    half = np.array(size) / zoom / 2
    middle = centre + rng.uniform(-0.6, 0.6, 2) * half
    if rng.random() < BORDER_SHARE:
        return middle
    side = np.array(old, float)
    return np.where(half * 2 < side, np.clip(middle, half, side - half), side / 2)
