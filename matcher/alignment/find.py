"""Detection of a template in images: several instances, at any scale and rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Unpack

import cv2
import numpy as np

from matcher.alignment.align import planar_pipeline
from matcher.errors import UsageError
from matcher.files import check_output
from matcher.geometry import warp_points
from matcher.loading import takes
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions, from_file, refuse_further_passes
from matcher.types import Features, Image, to_numpy
from matcher.viz import PLOT_SUFFIXES
from matcher.viz.overlays import as_colour, lay_over, resizing, stored_to_pixels


@dataclass(frozen=True, eq=False, repr=False)
class Instance:
    """One detected instance of the template in an image."""

    matrix: np.ndarray  # (3, 3) float64, stored pixels of the template → stored pixels of the image
    corners: np.ndarray  # (4, 2) float64 stored pixels: the template's corners, clockwise from its (0, 0)
    inliers: int  # of the matches after rectification to the template's scale and rotation; 0: by correlation
    share: float  # of the template's keypoints there that are inliers, 0 to 1; or the correlation

    @property
    def scale(self) -> float:
        """Pixels of the image per pixel of the template, at its centre."""
        return float(np.sqrt(abs(np.linalg.det(self._jacobian()))))

    @property
    def angle(self) -> float:
        """Rotation in degrees, −180 to 180, from x towards y (clockwise)."""
        linear = self._jacobian()
        return float(np.degrees(np.arctan2(linear[1, 0] - linear[0, 1], linear[0, 0] + linear[1, 1])))

    @property
    def evidence(self) -> str:
        """What it was found by, in words: inliers, or the correlation of a small template."""
        return f"{self.inliers} inliers" if self.inliers else f"correlation {self.share:.2f}"

    def _jacobian(self) -> np.ndarray:
        middle = warp_points(self.corners.mean(axis=0, keepdims=True), np.linalg.inv(self.matrix))[0]
        steps = warp_points(middle + np.array([[0, 0], [1, 0], [0, 1]]), self.matrix)
        return (steps[1:] - steps[0]).T

    def __repr__(self) -> str:
        x, y = self.corners.mean(axis=0)
        how = f"scale {self.scale:.2f}, {self.angle:.0f}°, {self.evidence}"
        return f"Instance(at {x:.0f}, {y:.0f}, {how})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        plain = {name: getattr(self, name) for name in ("scale", "angle", "inliers", "share")}
        return {"corners": self.corners.tolist(), **plain, "matrix": self.matrix.tolist()}


@dataclass(frozen=True, eq=False)
class Detections:
    """The instances of a template in one image, copies by correlation before those with most inliers.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (300, 400), dtype=np.uint8)
    >>> found = matcher.find(image[50:250, 100:300], image, "nearest", max_keypoints=300)
    >>> len(found), found.size, [round(one.scale, 1) for one in found]
    (1, (400, 300), [1.0])
    """

    instances: tuple[Instance, ...]
    size: tuple[int, int]  # (width, height) of the image, stored pixels
    template: Image
    path: Path | None = None  # of the image
    seconds: float = 0.0
    inverted: bool = False  # found by correlation with a negative of the template, up to 128 pixels large

    def __len__(self) -> int:
        return len(self.instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        width, height = self.size
        found = {"path": None if self.path is None else str(self.path), "width": width, "height": height}
        instances = [instance.to_dict() for instance in self.instances]
        found["inverted"] = self.inverted
        return {**found, "instances": instances, "seconds": round(self.seconds, 3)}

    def plot(self, path: str | Path, image: ImageInput | None = None, *, overwrite: bool = False) -> Path:
        """Draw the template, and the image with the outlines of its instances; whole or not at all.

        To a .png, .jpg, .jpeg, .pdf or .svg, whose path is returned. The image is read again, unless given.

        Raises:
            UsageError: a file that cannot be written or, without `overwrite`, is foreign; no image or path.
            ImageError: the image cannot be read.
        """
        from matcher.viz.drawings import draw_instances, save_figure

        path = check_output(path, PLOT_SUFFIXES, overwrite=overwrite)
        if (shown := self.path if image is None else image) is None:
            raise UsageError("the image was an array: give it to plot(path, image)")
        corners = [instance.corners for instance in self.instances]
        return save_figure(draw_instances(self.template, shown, corners), path)


# An image at several sizes, each cut into overlapping windows whose features are extracted separately


@dataclass(frozen=True, eq=False)
class Window:
    """Features of a part of an image, in pixels of that part."""

    features: Features
    from_stored: np.ndarray  # (3, 3) stored pixels of the image → pixels of the part

    def outside(self, quads: list[np.ndarray]) -> Window:
        """The window without the keypoints inside of quadrilaterals (4, 2) of stored pixels."""
        points = to_numpy(self.features.keypoints).astype(np.float32).tolist()
        corners = [warp_points(quad, self.from_stored).astype(np.float32) for quad in quads]
        keep = [all(cv2.pointPolygonTest(quad, point, False) < 0 for quad in corners) for point in points]
        return self if all(keep) else replace(self, features=self.features.select(np.array(keep)))


def windows(image: Image, factor: float, pipeline: Pipeline) -> Iterator[Window]:
    """The features of an image whose pixels are resized by `factor`, by windows of at most 1,024 pixels a
    side, which overlap by 256 at least."""
    shown, from_stored = resized_by(image, factor)
    for top, left in _places(shown.pixels.shape[:2]):
        part = np.s_[top : top + 1024, left : left + 1024]
        mask = None if shown.mask is None else shown.mask[part]
        if mask is None or mask.any():
            cut = as_it_is(np.ascontiguousarray(shown.pixels[part]), mask)
            shift = np.array([[1.0, 0, -left], [0, 1, -top], [0, 0, 1]])
            yield Window(pipeline.extract(cut), shift @ from_stored)


def _places(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Top and left of each window of a picture (H, W)."""
    counts = (max(1, -(-(length - 256) // (1024 - 256))) for length in shape)
    starts = (np.linspace(0, max(0, n - 1024), count) for n, count in zip(shape, counts, strict=True))
    return list(product(*(each.round().astype(int).tolist() for each in starts)))


def resized_by(image: Image, factor: float) -> tuple[Image, np.ndarray]:
    """An image of its own, upright and resized, and the (3, 3) map from stored pixels to its pixels."""
    shown = image.resized(factor)
    return as_it_is(shown.pixels, shown.mask), stored_to_pixels(shown)


def as_it_is(pixels: np.ndarray, mask: np.ndarray | None = None) -> Image:
    """Pixels as an image that is neither rotated nor resized."""
    return Image(pixels, size=(pixels.shape[1], pixels.shape[0]), mask=mask)


# The search.

RESIZE = 4096  # default longer side that larger images are reduced to
_SIDES = (512, 170)  # longer sides of the template that are searched for, pixels


def find(
    template: ImageInput,
    image: ImageInput,
    preset: str | Pipeline = DEFAULT_PRESET,
    *,
    template_mask: Mask | None = None,
    mask: Mask | None = None,
    max_instances: int = 20,
    **options: Unpack[LoadOptions],
) -> Detections:
    """Find a flat template, such as a sign, a label or a cut-out, in an image; `TemplateFinder` for many.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (300, 400), dtype=np.uint8)
    >>> found = matcher.find(image[50:250, 100:300], image, "nearest", max_keypoints=300)
    >>> len(found), bool(abs(found.instances[0].corners[0] - [99.5, 49.5]).max() < 1)
    (1, True)

    The image and its mask, not zero where keypoints may lie, are as `Pipeline.match` takes them; other
    arguments and the errors are those of `TemplateFinder` and its `find`.
    """
    how = dict(template_mask=template_mask, max_instances=max_instances)
    return TemplateFinder(template, preset, **how, **options).find(image, mask)


class TemplateFinder:
    """Finds one template in many images.

    An image is searched at sizes a factor of three apart, coarse ones first, in windows of 1024 pixels, in
    each until no more homography is found. Every instance is then rectified to the template's scale and
    rotation and matched once more, which refines it and rejects false detections. Where there is none, a
    negative of the template is looked for, by correlation.

    >>> import matcher, numpy as np
    >>> images = np.random.default_rng(0).integers(0, 255, (2, 300, 400), dtype=np.uint8)
    >>> finder = matcher.TemplateFinder(images[0, 50:250, 100:300], "nearest", max_keypoints=300)
    >>> [len(finder.find(image)) for image in images]
    [1, 0]
    """

    def __init__(
        self,
        template: ImageInput,
        preset: str | Pipeline = DEFAULT_PRESET,
        *,
        template_mask: Mask | None = None,
        max_instances: int = 20,
        **options: Unpack[LoadOptions],
    ) -> None:
        """Read the template and find its keypoints.

        Args:
            template: as `Pipeline.match` takes images.
            preset: a preset's name, with `options` of `matcher.load`, of which `resize` is 4096 if absent and
                `max_keypoints` is of a window; or a pipeline, whose estimator is replaced by one of
                homographies.
            template_mask: not zero where keypoints may lie.
            max_instances: in one image.

        Raises:
            ImageError: the template cannot be read.
            UsageError: no instance is to be found, too few keypoints, and what `matcher.load` refuses.
        """
        if max_instances < 1:
            raise UsageError(f"max_instances must be at least 1, not {max_instances}")
        refuse_further_passes(options, "a template is looked for window by window, at all scales")
        if not isinstance(preset, Pipeline):
            preset, options = from_file(preset, options)
            if takes(preset, "resize"):
                options = {"resize": RESIZE, **options}
        self.pipeline = planar_pipeline(preset, options)
        self.max_instances = max_instances
        self.template = self.pipeline.read_full(template, template_mask)
        width, height = self.template.size
        self._outline = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
        self._longer = longer = max(self.template.pixels.shape[:2])
        largest = min(max(longer, 256), 4 * longer, _SIDES[0])  # small ones are enlarged, four times at most
        sides = [largest]
        while sides[-1] >= _SIDES[1] and len(sides) < 3:
            sides.append(sides[-1] / 2)
        scaled = (resized_by(self.template, side / longer) for side in sides)
        self._templates = [Window(self.pipeline.extract(shown), matrix) for shown, matrix in scaled]
        least = self.pipeline.config.estimation.min_inliers
        self._keypoints, name = len(self._templates[0].features), self.template.path or "the template"
        if self._keypoints < least and (
            longer > LONGEST or _is_plain(self.template.pixels, self.template.mask)
        ):
            why = f"it has {self._keypoints} keypoints, and {least} are needed"
            raise UsageError(f"{name} is too plain: {why}; give a cut-out that shows more")
        self._enlarged = max(1.0, largest / longer / 2)

    def find(
        self,
        image: ImageInput,
        mask: Mask | None = None,
        *,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Detections:
        """The instances in one image; `ImageError`: it cannot be read.

        `on_progress` is called with the windows that were searched and how many there are, each time that the
        image is searched as a whole.
        """
        start = perf_counter()
        shown = self.pipeline.read(image, mask)
        found: list[Instance] = []
        to_stored, from_stored = np.linalg.inv(stored_to_pixels(shown)), stored_to_pixels(self.template)
        template = self.template.pixels, shown.pixels, self.template.mask
        for one in _find_copies(*template, self.max_instances) if self._longer <= LONGEST else ():
            inner = np.array([[one.scale, 0, one.x], [0, one.scale, one.y], [0, 0, 1]])
            matrix = to_stored @ inner @ from_stored
            found.append(Instance(matrix, warp_points(self._outline, matrix), 0, one.correlation))
        keypoints = self._keypoints >= self.pipeline.config.estimation.min_inliers
        keypoints &= not (found and self._longer <= LONGEST / 2)
        enlarged_by = [self._enlarged] if self._templates else []
        if self._templates and self._longer > LONGEST and self._keypoints < PLAIN:
            enlarged_by.append(2 * self._enlarged)
        sides = shown.pixels.shape[:2]
        for enlarged in enlarged_by if keypoints else ():
            if found and enlarged > self._enlarged:
                break
            # With two template sizes, steps of 3 leave a change of scale within 1.7 either way.
            factors = [enlarged]
            while max(sides) * factors[-1] / 3 >= 320:
                factors.append(factors[-1] / 3)
            places = (_places([round(side * factor) for side in sides]) for factor in factors)
            done, total = 0, sum(map(len, places))
            on_progress(done, total)
            for factor in factors[::-1]:
                # The small template is for instances that are small even in the largest image.
                templates = self._templates if factor == factors[0] else self._templates[:1]
                for window in windows(shown, factor, self.pipeline):
                    for template in templates:
                        self._search(shown, template, window, found)
                    on_progress(done := done + 1, total)
        failures = 0  # in a row
        # Where the template correlates with the image, each place is matched by itself.
        for matrix in _propose(self.template.grey(), shown.grey(), 40) if keypoints else ():
            if len(found) == self.max_instances or failures == 5:
                break
            matrix = to_stored @ matrix @ from_stored
            corners = self._corners(matrix)
            if corners is None or not _is_new(corners, found):
                continue
            instance = self._confirmed(shown, matrix)
            failures += 1
            right = instance is not None and self._likeness(shown, instance)[0] >= 0.75
            if right and _is_new(instance.corners, found):
                found.append(instance)
                failures = 0
        if found and not found[0].inliers:  # where there are copies, what is less alike is another thing
            alike = [(1.0, 0.0) if not one.inliers else self._likeness(shown, one) for one in found]
            found = [one for one, (most, off) in zip(found, alike, strict=True) if most > 0.88 and off <= 48]
        found.sort(key=lambda instance: (instance.inliers > 0, -instance.inliers))
        inverted = not found and bool(self._templates)
        if inverted:
            negative = copy(self)
            negative.template = replace(self.template, pixels=np.invert(self.template.pixels))
            negative._templates = []
            found = negative.find(shown).instances
        seconds, inverted = perf_counter() - start, inverted and bool(found)
        return Detections(tuple(found), shown.size, self.template, shown.path, seconds, inverted)

    def _likeness(self, image: Image, instance: Instance) -> tuple[float, float]:
        """The correlation of an instance with the template, at the size of the smaller of both, and by how
        many grey values their mean colours differ."""
        longer = self._longer
        side = np.clip(instance.scale * longer * np.sqrt(np.prod(image.scale)), 16, longer)
        shown, from_stored = resized_by(self.template, float(side) / longer)
        laid = lay_over(image, shown, from_stored @ np.linalg.inv(instance.matrix))
        if not laid.covered.any():
            return 0.0, np.inf
        off = np.subtract(*(each[laid.covered].mean(axis=0) for each in laid[:2]))
        pixels = (each[laid.covered] for each in (as_it_is(laid.above).grey(), shown.grey()))
        there, here = (each.astype(np.float64) - each.mean() for each in pixels)
        correlation = there @ here / max(np.sqrt((there @ there) * (here @ here)), 1e-9)
        return float(correlation), float(np.abs(off).max())

    def _search(self, image: Image, template: Window, window: Window, found: list[Instance]) -> None:
        """Add the instances of one window to those found already."""
        least = self.pipeline.config.estimation.min_inliers
        while len(found) < self.max_instances:
            window = window.outside([instance.corners for instance in found])
            if min(len(template.features), len(window.features)) < least:
                return
            matrix, _ = self._homography(template.features, window.features)
            if matrix is not None:
                matrix = np.linalg.inv(window.from_stored) @ matrix @ template.from_stored
            instance = None if matrix is None else self._confirmed(image, matrix)
            if instance is None or not _is_new(instance.corners, found):
                return
            found.append(instance)

    def _homography(self, features0: Features, features1: Features) -> tuple[np.ndarray | None, int]:
        """The homography from image 0 to 1, None without one, and its inliers."""
        matches = self.pipeline.match_features(features0, features1)
        geometry = self.pipeline.verify(features0, features1, matches)
        right = geometry.status == "ok"
        return (geometry.matrix, int(geometry.inliers.sum())) if right else (None, 0)

    def _confirmed(self, image: Image, matrix: np.ndarray) -> Instance | None:
        """The instance refined after rectification; None if the template is not matched there again."""
        if (corners := self._corners(matrix)) is None:
            return None
        # Of a stored pixel of the image to one of the template.
        scale = np.sqrt(cv2.contourArea(corners.astype(np.float32)) / np.prod(self.template.size))
        shown_side = scale * max(self.template.size) * np.sqrt(np.prod(image.scale))
        side = float(np.clip(shown_side, _SIDES[1] / 2, _SIDES[0]))
        shown, from_stored = resized_by(self.template, side / self._longer)
        features = self.pipeline.extract(shown)
        back = from_stored @ np.linalg.inv(matrix)
        laid = lay_over(image, shown, back)
        mask = laid.covered
        if image.mask is not None:
            allowed = replace(image, pixels=image.mask * np.uint8(255))
            mask = mask & (lay_over(allowed, shown, back).above[..., 0] > 127)
        again, inliers = self._homography(features, self.pipeline.extract(as_it_is(laid.above, mask)))
        share = inliers / max(1, len(features))
        if again is None or share < 0.1:
            return None
        matrix = matrix @ np.linalg.inv(from_stored) @ again @ from_stored
        if (corners := self._corners(matrix)) is None:
            return None
        instance = Instance(matrix / matrix[2, 2], corners, inliers, share)
        # With few inliers of a small share it must correlate well, too: a wrong one had 14 and .11.
        doubtful = inliers < 40 and share < 0.3
        return None if doubtful and self._likeness(image, instance)[0] < 0.9 else instance

    def _corners(self, matrix: np.ndarray) -> np.ndarray | None:
        """(4, 2) the template's corners in the image; None if they are implausible for a camera."""
        corners = warp_points(self._outline, matrix)
        if not np.isfinite(corners).all():
            return None
        sides = np.roll(corners, -1, axis=0) - corners
        after = np.roll(sides, -1, axis=0)
        turns = sides[:, 0] * after[:, 1] - sides[:, 1] * after[:, 0]  # twice the triangle at each corner
        # convex, not bent beyond what a camera makes of it, and at least 16 x 16 pixels
        fits = turns.min() > 0 and turns.max() < 5 * turns.min() and turns.sum() / 4 > 16**2
        return corners if fits else None


def _is_new(corners: np.ndarray, found: list[Instance]) -> bool:
    """Whether a quadrilateral (4, 2) covers none of the instances: intersection over union."""
    one, others = corners.astype(np.float32), [instance.corners.astype(np.float32) for instance in found]
    shared = [cv2.intersectConvexConvex(one, other)[0] for other in others]
    joined = [cv2.contourArea(one) + cv2.contourArea(other) for other in others]
    return all(both <= 0.3 * (area - both) for both, area in zip(shared, joined, strict=True))


# Templates by normalised cross-correlation. Icons and buttons are too small or too plain for keypoints, and
# are copies up to their size. Larger templates are proposed where they correlate: several copies take each
# other's matches, one by itself does not.

LONGEST = 128  # pixels of the longer side of templates that correlation alone finds
PLAIN = 300  # keypoints of a template; with fewer, images where it is not found are enlarged


def _is_plain(pixels: np.ndarray, mask: np.ndarray | None) -> bool:
    """Whether a template is so plain that it correlates with anything plain."""
    opaque = as_colour(pixels).reshape(-1, 3)[... if mask is None else mask.ravel()]
    return not len(opaque) or opaque.std(axis=0).max() < 6


class _Copy(NamedTuple):
    """An upright instance."""

    x: float  # of the centre of the template's first pixel, pixels of the image
    y: float
    scale: float
    correlation: float

    def middle(self, template: np.ndarray) -> np.ndarray:
        """(2,) the middle of the instance."""
        return np.array([self.x, self.y]) + self.scale * np.array(template.shape[1::-1]) / 2


def _find_copies(template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, most: int) -> list[_Copy]:
    """At most so many copies of a template, opaque where a mask (h, w) is true, in an image, both (H, W) or
    (H, W, 3) uint8, at .6 to 2.4 times its size, the most similar first. Overlapping ones count once."""
    template, image = as_colour(template), as_colour(image)
    grey = cv2.cvtColor(template, cv2.COLOR_RGB2GRAY), cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    if _is_plain(template, mask):
        return []
    candidates: list[_Copy] = []
    for scale in np.geomspace(0.6, 2.4, 25):  # steps of 6 %: half of it moves a border of 64 pixels by one
        if (response := _response(*grey, mask, scale)) is not None:
            peaks = (response == cv2.dilate(response, np.ones((9, 9)))) & (response > 0.7)
            candidates += [_Copy(x, y, scale, response[y, x]) for y, x in np.argwhere(peaks).tolist()]
    found: list[_Copy] = []

    def is_apart(one: _Copy) -> bool:
        offsets = ((one.middle(template) - other.middle(template)) / other.scale for other in found)
        return all(np.any(2 * np.abs(offset) >= template.shape[1::-1]) for offset in offsets)

    for one in sorted(candidates, key=lambda each: -each.correlation)[:200]:
        if len(found) < most and is_apart(one) and (best := _fitted(template, image, mask, one)) is not None:
            found += [best] * is_apart(best)  # it may have moved
    return sorted(found, key=lambda each: -each.correlation)


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


def _fitted(template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, near: _Copy) -> _Copy | None:
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
            best = _Copy(left + column + dx + (scale - 1) / 2, top + row + dy + (scale - 1) / 2, scale, value)
    if best is None or best.correlation < 0.88:
        return None
    x0, y0 = max(0, round(best.x)), max(0, round(best.y))
    x1, y1 = round(best.x) + round(best.scale * width), round(best.y) + round(best.scale * height)
    there = cv2.resize(image[y0:y1, x0:x1], (width, height), interpolation=cv2.INTER_AREA)
    inside = np.ones((height, width), bool) if mask is None else mask
    # Correlation leaves out the mean colours and the contrast. A copy has those of the template, within 48
    # grey values; what is greyed out has half of its contrast.
    difference = np.abs(there[inside].astype(float).mean(axis=0) - template[inside].mean(axis=0)).max()
    contrast = there[inside].std() / template[inside].std()
    return best if difference <= 48 and 0.6 <= contrast <= 1 / 0.6 else None


def _vertex(line: np.ndarray, at: int) -> float:
    """The place of a maximum relative to its pixel, by a parabola."""
    if not 0 < at < len(line) - 1:
        return 0.0
    before, middle, after = (float(value) for value in line[at - 1 : at + 2])
    bend = before - 2 * middle + after
    return float(np.clip((before - after) / (2 * bend), -0.5, 0.5)) if bend < 0 else 0.0


def _propose(template: np.ndarray, image: np.ndarray, most: int) -> list[np.ndarray]:
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
