"""Templates by normalised cross-correlation: small upright ones as they are, others as proposals.

Icons and buttons are too small or too plain for keypoints, and an instance is a copy up to its size. Larger
templates are proposed where they correlate: several copies take each other's matches, one by itself does not.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

SCALES = (0.6, 2.4)  # of an instance relative to the template, at least and at most
STEP = 1.06  # from one scale to the next; half of it moves the border of 64 pixels by one
LONGEST = 128  # pixels of the template's longer side; larger ones have keypoints
LEAST_DEVIATION = 6.0  # grey values; a plainer template correlates with anything plain
CANDIDATE, ACCEPTED = (
    0.7,
    0.88,
)  # correlation at the nearest scale of the ladder, and after the scale is fitted
MOST_DIFFERENT = 48.0  # grey values between the mean colours, which correlation leaves out
_MOST_CANDIDATES = 200


class Copy(NamedTuple):
    """An upright instance."""

    x: float  # of the centre of the template's first pixel, pixels of the image
    y: float
    scale: float
    correlation: float


def find_copies(
    template: np.ndarray, image: np.ndarray, mask: np.ndarray | None = None, most: int = 20
) -> list[Copy]:
    """The copies of a template in an image, the most similar first; overlapping ones count once.

    Args:
        template: (h, w) or (h, w, 3) uint8.
        image: (H, W) or (H, W, 3) uint8.
        mask: (h, w) bool, where the template is opaque.
        most: so many at most.
    """
    template, image = (np.dstack([p] * 3) if p.ndim == 2 else p for p in (template, image))
    grey = cv2.cvtColor(template, cv2.COLOR_RGB2GRAY), cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    opaque = template.reshape(-1, 3) if mask is None else template[mask]
    if not len(opaque) or opaque.std(axis=0).max() < LEAST_DEVIATION:
        return []
    found: list[Copy] = []
    candidates: list[tuple[float, float, int, int]] = []
    scales = np.geomspace(*SCALES, round(np.log(SCALES[1] / SCALES[0]) / np.log(STEP)) + 1)
    for scale in scales:
        response = _response(*grey, mask, scale)
        if response is None:
            continue
        peaks = response == cv2.dilate(response, np.ones((9, 9)))
        for y, x in np.argwhere(peaks & (response > CANDIDATE)):
            candidates.append((float(response[y, x]), float(scale), int(x), int(y)))
    side = np.array(template.shape[1::-1])
    for _, scale, x, y in sorted(candidates, reverse=True)[:_MOST_CANDIDATES]:
        if len(found) == most:
            break
        middle = np.array([x, y]) + scale * side / 2
        if any(np.abs(middle - _middle(copy, side)).max() < copy.scale * side.min() / 2 for copy in found):
            continue
        best = _fitted(template, image, mask, scale, x, y)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda copy: -copy.correlation)


def _middle(copy: Copy, side: np.ndarray) -> np.ndarray:
    return np.array([copy.x, copy.y]) + copy.scale * side / 2


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


def _fitted(
    template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, scale: float, x: int, y: int
) -> Copy | None:
    """The copy near a candidate at the scale that fits best; None if none fits well."""
    height, width = template.shape[:2]
    reach = 3 + round(0.06 * scale * max(height, width))
    top, left = max(0, y - reach), max(0, x - reach)
    part = image[top : y + round(scale * height) + reach, left : x + round(scale * width) + reach]
    best = None
    # sizes are whole pixels: those around the candidate's
    for wide in range(round(scale * width) - 3, round(scale * width) + 4):
        one = wide / width
        response = _response(template, part, mask, one) if wide >= 4 else None
        if response is None:
            continue
        row, column = np.unravel_index(response.argmax(), response.shape)
        value = float(response[row, column])
        if best is None or value > best.correlation:
            dx, dy = _vertex(response, row, column)
            # the centre of the template's first pixel, of pixels that are `one` pixels wide
            best = Copy(left + column + dx + (one - 1) / 2, top + row + dy + (one - 1) / 2, one, value)
    if best is None or best.correlation < ACCEPTED:
        return None
    x0, y0 = round(best.x), round(best.y)
    there = cv2.resize(
        image[max(0, y0) : y0 + round(best.scale * height), max(0, x0) : x0 + round(best.scale * width)],
        (width, height),
        interpolation=cv2.INTER_AREA,
    )
    inside = np.ones((height, width), bool) if mask is None else mask
    difference = np.abs(there[inside].astype(float).mean(axis=0) - template[inside].mean(axis=0)).max()
    return best if difference <= MOST_DIFFERENT else None


def _vertex(response: np.ndarray, row: int, column: int) -> tuple[float, float]:
    """The place of the maximum relative to its pixel, by parabolas along both axes."""
    shifts = []
    for line, at in ((response[row], column), (response[:, column], row)):
        if 0 < at < len(line) - 1:
            before, middle, after = (float(value) for value in line[at - 1 : at + 2])
            bend = before - 2 * middle + after
            shifts.append(float(np.clip((before - after) / (2 * bend), -0.5, 0.5)) if bend < 0 else 0.0)
        else:
            shifts.append(0.0)
    return shifts[0], shifts[1]


PROPOSED_SCALES = (0.3, 3.0)
_PROPOSED_STEP, _PROPOSED_TURN = (
    1.2,
    15.0,
)  # between the scales, and degrees between the turns, that are tried
_PROPOSED_SIDE = 28  # pixels of the template's longer side, at least, where images are compared
_PROPOSED = 0.55  # correlation; what is proposed is matched and verified


def propose(template: np.ndarray, image: np.ndarray, most: int) -> list[np.ndarray]:
    """Similarities (3, 3) from pixels of a template to those of an image, where they are alike; best first.

    Args:
        template, image: (h, w) and (H, W) uint8.
        most: so many at most.
    """
    found: list[tuple[float, np.ndarray, np.ndarray]] = []
    longer = max(template.shape)
    for scale in np.geomspace(*PROPOSED_SCALES, 14):
        # a copy of this scale has at least so many pixels; both images are smaller by one factor
        factor = min(1.0, _PROPOSED_SIDE / (min(scale, 1.0) * longer))
        shown = _shrunk(image, factor)
        for degrees in np.arange(0.0, 360.0, _PROPOSED_TURN):
            turned, to_turned = _turned(template, scale * factor, degrees)
            if min(turned.shape) < 8 or np.any(np.array(turned.shape) > shown.shape):
                continue
            response = cv2.matchTemplate(shown, turned, cv2.TM_CCOEFF_NORMED)
            peaks = (response == cv2.dilate(response, np.ones((7, 7)))) & (response > _PROPOSED)
            for y, x in np.argwhere(peaks):
                shift = np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])
                back = np.array(
                    [[1 / factor, 0, 0.5 / factor - 0.5], [0, 1 / factor, 0.5 / factor - 0.5], [0, 0, 1]]
                )
                matrix = back @ shift @ to_turned
                middle = matrix[:2] @ [(template.shape[1] - 1) / 2, (template.shape[0] - 1) / 2, 1]
                found.append((float(response[y, x]), matrix, middle))
    kept: list[tuple[float, np.ndarray, np.ndarray]] = []
    for one in sorted(found, key=lambda each: -each[0]):
        size = np.sqrt(np.linalg.det(one[1][:2, :2])) * longer
        if all(np.linalg.norm(one[2] - other[2]) > size / 3 for other in kept):
            kept.append(one)
        if len(kept) == most:
            break
    return [matrix for _, matrix, _ in kept]


def _shrunk(image: np.ndarray, factor: float) -> np.ndarray:
    size = tuple(max(1, round(n * factor)) for n in image.shape[1::-1])
    return cv2.resize(image, size, interpolation=cv2.INTER_AREA)


def _turned(template: np.ndarray, scale: float, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """The largest upright part of a scaled and turned template, and (3, 3) from the template to it."""
    height, width = template.shape
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    linear = scale * np.array([[cos, -sin], [sin, cos]])
    # the upright rectangle of the turned one's centre with its aspect, or the other, that lies within
    a, b = abs(cos), abs(sin)
    inner = max(
        ((w, h) for w, h in ((width, height), (height, width))),
        key=lambda wh: (
            min(width / (a * wh[0] + b * wh[1]), height / (b * wh[0] + a * wh[1])) ** 2 * wh[0] * wh[1]
        ),
    )
    shrink = min(width / (a * inner[0] + b * inner[1]), height / (b * inner[0] + a * inner[1]))
    size = tuple(max(1, int(scale * shrink * n)) for n in inner)
    centre = np.array([(width - 1) / 2, (height - 1) / 2])
    shift = (np.array(size) - 1) / 2 - linear @ centre
    smooth = cv2.GaussianBlur(template, (0, 0), 0.4 / scale) if scale < 1 else template
    matrix = np.vstack([np.c_[linear, shift], [0, 0, 1]])
    return cv2.warpAffine(smooth, matrix[:2], size, flags=cv2.INTER_LINEAR), matrix
