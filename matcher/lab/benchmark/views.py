"""Made-up views of two images, where a benchmark needs more of them than there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from matcher.data.images import read_image
from matcher.lab.pairs.synthetic import LEVELS, draw_homography, warp


def tilted_views(paths: tuple[Path, Path], count: int) -> list[np.ndarray]:
    """Images of one scene: the two, enlarged, and seen a little from the side, from both in turn."""
    made = []
    for number in range(count):
        pixels = read_image(paths[number % 2]).pixels
        height, width = pixels.shape[:2]
        tilt = 0.03 * (number // 2)
        side = np.float32([[0, 0], [1, tilt], [1, 1 - tilt], [0, 1]]) * np.float32([2 * width, 2 * height])
        whole = np.float32([[0, 0], [1, 0], [1, 1], [0, 1]]) * np.float32([width, height])
        warp = cv2.getPerspectiveTransform(whole, side)
        made.append(cv2.warpPerspective(pixels, warp, (2 * width, 2 * height), flags=cv2.INTER_CUBIC))
    return made


def scenes(paths: tuple[Path, ...], count: int, side: int, views_each: int = 10) -> Iterator[np.ndarray]:
    """Grey images (side, side): views of parts of the images, ten of each, warped and in other light.

    A part is cut out and enlarged, so that parts have little in common; every group has another one.
    """
    sources = [cv2.cvtColor(read_image(path).pixels, cv2.COLOR_RGB2GRAY) for path in paths]
    for number in range(count):
        group = number // views_each
        rng = np.random.default_rng([group, 0])
        source = sources[group % len(sources)]
        share = rng.uniform(0.4, 0.6)
        height, width = (int(share * length) for length in source.shape)
        y, x = (rng.integers(0, a - b + 1) for a, b in zip(source.shape, (height, width), strict=True))
        part = cv2.resize(source[y : y + height, x : x + width], (side, side), interpolation=cv2.INTER_CUBIC)
        part = np.rot90(part, int(rng.integers(4)))
        view = np.random.default_rng([group, 1 + number % views_each])
        yield warp(np.ascontiguousarray(part), draw_homography((side, side), LEVELS[1], view))
