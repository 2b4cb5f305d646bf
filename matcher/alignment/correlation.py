"""Templates by normalised cross-correlation: small upright ones as they are, others as proposals.

Icons and buttons are too small or too plain for keypoints, and an instance is a copy up to its size. Larger
templates are proposed where they correlate: several copies take each other's matches, one by itself does not.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from matcher.viz.overlays import resizing

LONGEST = 128  # pixels of the longer side of templates that correlation alone finds


class Copy(NamedTuple):
    """An upright instance."""

    x: float  # of the centre of the template's first pixel, pixels of the image
    y: float
    scale: float
    correlation: float

    def middle(self, template: np.ndarray) -> np.ndarray:
        """(2,) the middle of the instance."""
        return np.array([self.x, self.y]) + self.scale * np.array(template.shape[1::-1]) / 2


def find_copies(
    template: np.ndarray, image: np.ndarray, mask: np.ndarray | None = None, most: int = 20
) -> list[Copy]:
    """At most so many copies of a template, opaque where a mask (h, w) is true, in an image, both (H, W) or
    (H, W, 3) uint8, at .6 to 2.4 times its size, the most similar first. Overlapping ones count once."""
    template, image = (np.dstack([p] * 3) if p.ndim == 2 else p for p in (template, image))
    grey = cv2.cvtColor(template, cv2.COLOR_RGB2GRAY), cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    opaque = template.reshape(-1, 3) if mask is None else template[mask]
    if not len(opaque) or opaque.std(axis=0).max() < 6:  # so plain that it correlates with anything plain
        return []
    candidates: list[Copy] = []
    for scale in np.geomspace(0.6, 2.4, 25):  # steps of 6 %: half of it moves a border of 64 pixels by one
        response = _response(*grey, mask, scale)
        if response is not None:
            peaks = (response == cv2.dilate(response, np.ones((9, 9)))) & (response > 0.7)
            candidates += [Copy(x, y, scale, response[y, x]) for y, x in np.argwhere(peaks).tolist()]
    found: list[Copy] = []
    for one in sorted(candidates, key=lambda copy: -copy.correlation)[:200]:
        offsets = ((one.middle(template) - copy.middle(template)) / copy.scale for copy in found)
        apart = min((2 * np.abs(offset).max() for offset in offsets), default=np.inf)
        if len(found) == most or apart < min(template.shape[:2]):
            continue
        if (best := _fitted(template, image, mask, one)) is not None:
            found.append(best)
    return sorted(found, key=lambda copy: -copy.correlation)


def _response(
    template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, scale: float
) -> np.ndarray | None:
    """The correlation coefficient at every place, for one scale; None where the template does not fit."""
    height, width = (max(4, round(scale * n)) for n in template.shape[:2])
    if height > image.shape[0] or width > image.shape[1]:
        return None
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    small = cv2.resize(template, (width, height), interpolation=how)
    given = {}
    if mask is not None and not mask.all():
        cover = cv2.resize(mask * np.uint8(255), (width, height), interpolation=cv2.INTER_AREA)
        cover = (cover > 127).astype(np.uint8)
        given["mask"] = cover if small.ndim == 2 else np.dstack([cover] * 3)
    response = cv2.matchTemplate(image, small, cv2.TM_CCOEFF_NORMED, **given)
    return np.where(np.isfinite(response) & (response <= 1.001), response, -1).astype(np.float32)


def _fitted(template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, near: Copy) -> Copy | None:
    """The copy near a candidate at the scale that fits best; None if none fits well."""
    height, width = template.shape[:2]
    reach = 3 + round(0.06 * near.scale * max(height, width))
    x, y, wide = int(near.x), int(near.y), round(near.scale * width)
    top, left = max(0, y - reach), max(0, x - reach)
    part = image[top : y + round(near.scale * height) + reach, left : x + wide + reach]
    best = None
    for wider in range(max(4, wide - 3), wide + 4):  # sizes are whole pixels
        scale = wider / width
        if (response := _response(template, part, mask, scale)) is None:
            continue
        row, column = np.unravel_index(response.argmax(), response.shape)
        value = float(response[row, column])
        if best is None or value > best.correlation:
            dx, dy = _vertex(response[row], column), _vertex(response[:, column], row)
            # the centre of the template's first pixel, of pixels that are `scale` pixels wide
            best = Copy(left + column + dx + (scale - 1) / 2, top + row + dy + (scale - 1) / 2, scale, value)
    if best is None or best.correlation < 0.88:
        return None
    x0, y0 = max(0, round(best.x)), max(0, round(best.y))
    x1, y1 = round(best.x) + round(best.scale * width), round(best.y) + round(best.scale * height)
    there = cv2.resize(image[y0:y1, x0:x1], (width, height), interpolation=cv2.INTER_AREA)
    inside = np.ones((height, width), bool) if mask is None else mask
    # Correlation leaves the mean colours out; a copy has those of the template, within 48 grey values.
    difference = np.abs(there[inside].astype(float).mean(axis=0) - template[inside].mean(axis=0)).max()
    return best if difference <= 48 else None


def _vertex(line: np.ndarray, at: int) -> float:
    """The place of a maximum relative to its pixel, by a parabola."""
    if not 0 < at < len(line) - 1:
        return 0.0
    before, middle, after = (float(value) for value in line[at - 1 : at + 2])
    bend = before - 2 * middle + after
    return float(np.clip((before - after) / (2 * bend), -0.5, 0.5)) if bend < 0 else 0.0


def propose(template: np.ndarray, image: np.ndarray, most: int) -> list[np.ndarray]:
    """At most so many similarities (3, 3) from a template to an image, both grey, uint8, where they are alike
    at scales of .3 to 3 and any turn, best first; they are to be matched and verified."""
    found: list[tuple[float, np.ndarray, np.ndarray]] = []
    longer = max(template.shape)
    centre = np.array([(template.shape[1] - 1) / 2, (template.shape[0] - 1) / 2, 1])
    for scale in np.geomspace(0.3, 3.0, 14):
        # Both images are smaller by a factor that leaves a copy of this scale 28 pixels, which suffice.
        factor = min(1.0, 28 / (min(scale, 1.0) * longer))
        size = tuple(max(1, round(n * factor)) for n in image.shape[1::-1])
        shown = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        back = np.linalg.inv(resizing((factor, factor)))
        for degrees in range(0, 360, 15):
            turned, to_turned = _turned(template, scale * factor, degrees)
            if min(turned.shape) < 8 or np.any(np.array(turned.shape) > shown.shape):
                continue
            response = cv2.matchTemplate(shown, turned, cv2.TM_CCOEFF_NORMED)
            peaks = (response == cv2.dilate(response, np.ones((7, 7)))) & (response > 0.55)
            for y, x in np.argwhere(peaks):
                matrix = back @ np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]]) @ to_turned
                found.append((float(response[y, x]), matrix, matrix[:2] @ centre))
    kept: list[tuple[float, np.ndarray, np.ndarray]] = []
    for one in sorted(found, key=lambda each: -each[0]):
        size = np.sqrt(np.linalg.det(one[1][:2, :2])) * longer
        if len(kept) < most and all(np.linalg.norm(one[2] - other[2]) > size / 3 for other in kept):
            kept.append(one)
    return [matrix for _, matrix, _ in kept]


def _turned(template: np.ndarray, scale: float, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """The largest upright part of a scaled and turned template, and (3, 3) from the template to it."""
    height, width = template.shape
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    linear = scale * np.array([[cos, -sin], [sin, cos]])

    def fitting(w: float, h: float) -> tuple[float, float]:
        """The largest upright rectangle of this aspect within the turned one."""
        shrink = min(width / (abs(cos) * w + abs(sin) * h), height / (abs(sin) * w + abs(cos) * h))
        return shrink * w, shrink * h

    inner = max(fitting(width, height), fitting(height, width), key=np.prod)
    size = tuple(max(1, int(scale * n)) for n in inner)
    shift = (np.array(size) - 1) / 2 - linear @ [(width - 1) / 2, (height - 1) / 2]
    smooth = cv2.GaussianBlur(template, (0, 0), 0.4 / scale) if scale < 1 else template
    matrix = np.vstack([np.c_[linear, shift], [0, 0, 1]])
    return cv2.warpAffine(smooth, matrix[:2], size, flags=cv2.INTER_LINEAR), matrix
