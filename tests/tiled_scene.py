"""An image for tests with tiles, and a warp of it."""

import cv2
import numpy as np

from matcher import tiling as extraction
from matcher import tiling as windows

HOMOGRAPHY = np.array([[0.93, 0.12, 40.0], [-0.1, 0.95, 60], [2e-5, -1e-5, 1]])


def textured() -> np.ndarray:
    """600 x 480 pixels of texture at several sizes."""
    rng = np.random.default_rng(8)
    layers = [rng.integers(0, 255, (480 // k, 600 // k)).astype(np.float32) for k in (4, 10, 40)]
    layers = [cv2.resize(layer, (600, 480), interpolation=cv2.INTER_CUBIC) for layer in layers]
    return np.clip(sum(layers) / 3, 0, 255).astype(np.uint8)


def make_small(monkeypatch) -> None:
    """Tiles and windows so small that an ordinary image has many."""
    monkeypatch.setattr(extraction, "TILE", 160)
    monkeypatch.setattr(windows, "_OWN", 150)
