"""Detection of a template in images: several instances, at any scale and rotation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import cv2
import numpy as np
import PIL.Image

from matcher.alignment.align import planar_pipeline
from matcher.errors import UsageError
from matcher.geometry import warp_points
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET, LoadOptions, from_file, refuse_further_passes
from matcher.types import Features, Image, to_numpy
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
    inverted: bool = False  # what was found is a negative of the template
    mirrored: bool = False  # nothing was found but a mirror image of the template, larger than 128 pixels

    def __len__(self) -> int:
        return len(self.instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        width, height = self.size
        found = {"path": None if self.path is None else str(self.path), "width": width, "height": height}
        found |= {"inverted": self.inverted, "mirrored": self.mirrored}
        return {**found, "instances": [one.to_dict() for one in self], "seconds": round(self.seconds, 3)}

    def plot(
        self, path: str | Path | None = None, image: ImageInput | None = None, *, overwrite: bool = False
    ) -> Path | PIL.Image.Image:
        """Draw the template, and the image with the outlines of its instances; whole or not at all.

        To a .png, .jpg, .jpeg, .pdf or .svg, whose path is returned; without a path, the drawing is. The
        image is read again, unless given.

        Raises:
            UsageError: a file that cannot be written or, without `overwrite`, is foreign; no image or path.
            ImageError: the image cannot be read.
        """
        from matcher.viz.drawings import draw_instances, save_figure

        if (shown := self.path if image is None else image) is None:
            raise UsageError("the image was an array: give it to plot(path, image)")
        corners = [instance.corners for instance in self.instances]
        return save_figure(draw_instances(self.template, shown, corners), path, overwrite=overwrite)


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

Progress = Callable[[int, int], None]  # takes how many are done, and of how many
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
    negative of the template is looked for.

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
                `max_keypoints` is of a window; or a pipeline, whose `resize` is replaced by 4096 and its
                estimator by one of homographies.
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
        pipeline = planar_pipeline(preset, options)
        if options.get("resize") is None:
            extractor = replace(pipeline.config.extractor, resize=RESIZE, soft_resize=None)
            pipeline = replace(pipeline, config=replace(pipeline.config, extractor=extractor))
        self.pipeline = pipeline
        self.max_instances = max_instances
        self.template = self.pipeline.read_full(template, template_mask)
        width, height = self.template.size
        self._outline = np.array([[0, 0], [width, 0], [width, height], [0, height]]) - 0.5
        self._longer = longer = max(self.template.pixels.shape[:2])
        largest = min(max(longer, 256), 4 * longer, _SIDES[0])  # small ones are enlarged, four times at most
        sides = [largest / 2**k for k in range(3) if not k or largest / 2**k >= _SIDES[1] / 2]
        scaled = (resized_by(self.template, side / longer) for side in sides)
        self._templates = [Window(self.pipeline.extract(shown), matrix) for shown, matrix in scaled]
        self._least = least = self.pipeline.config.estimation.min_inliers
        self._keypoints, name = len(self._templates[0].features), self.template.path or "the template"
        correlated = longer <= LONGEST and not _is_plain(self.template.pixels, self.template.mask)
        if self._keypoints < least and not correlated:
            why = f"it has {self._keypoints} keypoints, and {least} are needed"
            raise UsageError(f"{name} is too plain: {why}; give a cut-out that shows more")

    def find(
        self,
        image: ImageInput,
        mask: Mask | None = None,
        *,
        on_progress: Progress = lambda done, total: None,
    ) -> Detections:
        """The instances in one image; `ImageError`: it cannot be read.

        `on_progress` is called with the windows that were searched and how many there are.
        """
        start = perf_counter()
        shown = self.pipeline.read(image, mask)
        copies, negatives = self._copies(shown)
        found, negative = list(copies), self._with(np.invert(self.template.pixels), self.template.mask)
        searched = self._keypoints >= self._least
        if searched and not (copies and self._longer <= LONGEST / 2):
            if not copies:
                self._search_windows(shown, found, on_progress)
            # Where the template correlates with the image, each place is matched by itself.
            places, opposite = _propose(self.template.grey(), shown.grey(), 40)
            self._search_places(shown, places, found)
        inverted = not any(self._shows(shown, one) for one in found)
        if inverted:
            copies, found = negatives, [*negatives, *found]
            if searched and not (copies and self._longer <= LONGEST / 2):
                negative._search_places(shown, opposite, found)
        finder = negative if inverted else self
        # Where there are copies, what is less alike is another thing.
        found = [one for one in found if not one.inliers or finder._shows(shown, one, bool(copies))]
        found.sort(key=lambda instance: (instance.inliers > 0, -instance.inliers))
        flipped, mirrored = self._with(self.template.pixels[:, ::-1]), []
        if not found and searched and self._longer > LONGEST:
            flipped._search_places(shown, _propose(flipped.template.grey(), shown.grey(), 40)[0], mirrored)
        told = perf_counter() - start, inverted and bool(found), bool(mirrored)
        return Detections(tuple(found), shown.size, self.template, shown.path, *told)

    def _with(self, pixels: np.ndarray, mask: np.ndarray | None = None) -> TemplateFinder:
        """The finder of a template that is changed, by which places are matched."""
        other = copy(self)
        other.template = replace(self.template, pixels=np.ascontiguousarray(pixels), mask=mask)
        return other

    def _copies(self, image: Image) -> list[list[Instance]]:
        """The upright instances by correlation, at .6 to 2.4 times the template's size, the most similar
        first; and, where there are none, those of its negative."""
        found: list[list[Instance]] = [[], []]
        opaque, grey, whole = self.template.mask, self.template.grey(), image.grey()
        if self._longer > LONGEST or _is_plain(self.template.pixels, opaque):
            return found
        candidates: list[list[Place]] = [[], []]
        for scale in np.geomspace(0.6, 2.4, 25):  # steps of 6 %: half moves a border of 64 pixels by one
            # A copy of 28 pixels suffices to tell where it may be.
            factor = min(1.0, max(28 / scale / self._longer, 1 / min(whole.shape)))
            shown = cv2.resize(whole, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
            response = _response(grey, shown, opaque, scale * factor)
            for listed, peaks in zip(candidates, _peaks(response, 0.7), strict=True):
                listed += [(value, x / factor, y / factor, scale) for x, y, value in peaks]
        pixels, negative = as_colour(image.pixels), self._with(np.invert(self.template.pixels), opaque)
        for listed, kept, finder in zip(candidates, found, (self, negative), strict=True):
            for place in sorted(listed, key=lambda each: -each[0])[:200]:
                new = len(kept) < self.max_instances and self._new_copy(image, kept, place)
                best = _fitted(as_colour(finder.template.pixels), pixels, opaque, place) if new else None
                one = best and self._new_copy(image, kept, best)  # it may have moved
                kept += [one] if one and finder._shows(image, one, strict=True) else []
            if kept:
                break
        return [sorted(kept, key=lambda each: -each.share) for kept in found]

    def _new_copy(self, image: Image, found: list[Instance], place: Place) -> Instance | None:
        """The upright instance at a place; None if it is found already, or masked in the image."""
        correlation, x, y, scale = place
        inner = np.array([[scale, 0, x], [0, scale, y], [0, 0, 1]])
        matrix = np.linalg.inv(stored_to_pixels(image)) @ inner @ stored_to_pixels(self.template)
        corners = warp_points(self._outline, matrix)
        height, width = self.template.pixels.shape[:2]
        middle = int(y + scale * height / 2), int(x + scale * width / 2)
        new = (image.mask is None or image.mask[middle]) and _is_new(corners, found)
        return Instance(matrix, corners, 0, correlation) if new else None

    def _search_windows(self, image: Image, found: list[Instance], on_progress: Progress) -> None:
        """Add the instances that keypoints of windows show."""
        # Smaller templates are enlarged, up to twice; icons are found where they correlate.
        sides, enlarged = image.pixels.shape[:2], LONGEST / self._longer
        factors = [enlarged if 1 < enlarged < 2 else 1.0]
        # With two template sizes, steps of 3 leave a change of scale within 1.7 either way.
        while max(sides) * factors[-1] / 3 >= 320:
            factors.append(factors[-1] / 3)
        places = (_places([round(side * factor) for side in sides]) for factor in factors)
        done, total = 0, sum(map(len, places))
        on_progress(done, total)
        for factor in factors[::-1]:
            # The small template is for instances that are small even in the largest image.
            templates = self._templates if factor == factors[0] else self._templates[:1]
            for window in windows(image, factor, self.pipeline):
                for template in templates:
                    self._search(image, template, window, found)
                on_progress(done := done + 1, total)

    def _search_places(self, image: Image, places: list[np.ndarray], found: list[Instance]) -> None:
        """Add the instances at proposed places, (3, 3) from the template's pixels to those of the image."""
        failures = 0  # in a row
        to_stored, from_stored = np.linalg.inv(stored_to_pixels(image)), stored_to_pixels(self.template)
        for place in places:
            if len(found) == self.max_instances or failures == 5:
                break
            matrix = to_stored @ place @ from_stored
            if (corners := self._corners(matrix)) is None or not _is_new(corners, found):
                continue
            instance = self._confirmed(image, matrix)
            failures += 1
            right = instance is not None and self._likeness(image, instance)[0] >= 0.75
            if right and _is_new(instance.corners, found):
                found.append(instance)
                failures = 0

    def _likeness(self, image: Image, instance: Instance) -> tuple[float, float, float]:
        """The correlation of an instance with the template, at the size of the smaller of both, by how many
        grey values their mean colours differ, and the ratio of their contrasts."""
        size = instance.scale * np.sqrt(np.prod(image.scale))
        shown, from_stored = resized_by(self.template, float(np.clip(size, 16 / self._longer, 1)))
        laid = lay_over(image, shown, from_stored @ np.linalg.inv(instance.matrix))
        inside = laid.covered if shown.mask is None else laid.covered & shown.mask
        if not inside.any():
            return 0.0, np.inf, 0.0
        off = np.subtract(*(each[inside].mean(axis=0) for each in laid[:2]))
        pixels = (each[inside] for each in (as_it_is(laid.above).grey(), shown.grey()))
        there, here = (each.astype(np.float64) - each.mean() for each in pixels)
        contrasts = np.maximum([np.sqrt(there @ there), np.sqrt(here @ here)], 1e-5)
        return there @ here / contrasts.prod(), np.abs(off).max(), contrasts[0] / contrasts[1]

    def _shows(self, image: Image, instance: Instance, strict: bool = False) -> bool:
        """Whether an instance is not of the negative and, if `strict`, a copy, also in the mean colours and
        the contrast that correlation leaves out; what is greyed out has half of that."""
        like, off, contrast = self._likeness(image, instance)
        return like > 0.88 and off <= 48 and 0.6 <= contrast <= 1 / 0.6 if strict else like > -0.3

    def _search(self, image: Image, template: Window, window: Window, found: list[Instance]) -> None:
        """Add the instances of one window to those found already."""
        while len(found) < self.max_instances:
            window = window.outside([instance.corners for instance in found])
            if min(len(template.features), len(window.features)) < self._least:
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
        return (geometry.matrix, int(geometry.inliers.sum())) if geometry.status == "ok" else (None, 0)

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
        # With a small share of inliers it must correlate well, too: wrong ones had 14 and .11, and 96 and .12
        # of the mirror image of a façade.
        doubtful = share < (0.3 if inliers < 40 else 0.2)
        return None if doubtful and self._likeness(image, instance)[0] < 0.95 else instance

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
    """Whether a quadrilateral (4, 2) and none of the instances cover half of each other."""
    one, others = corners.astype(np.float32), [instance.corners.astype(np.float32) for instance in found]
    shared = [cv2.intersectConvexConvex(one, other)[0] for other in others]
    smaller = [min(cv2.contourArea(one), cv2.contourArea(other)) for other in others]
    return all(both <= 0.5 * area for both, area in zip(shared, smaller, strict=True))


# Templates by normalised cross-correlation. Icons and buttons are too small or too plain for keypoints, and
# are copies up to their size. Larger templates are proposed where they correlate: several copies take each
# other's matches, one by itself does not.

Place = tuple[float, float, float, float]  # correlation, x, y of the template's first pixel, and scale
LONGEST = 128  # pixels of the longer side of templates that correlation alone finds


def _is_plain(pixels: np.ndarray, mask: np.ndarray | None) -> bool:
    """Whether a template is so plain that it correlates with anything plain."""
    opaque = as_colour(pixels).reshape(-1, 3)[... if mask is None else mask.ravel()]
    return not len(opaque) or opaque.std(axis=0).max() < 6


def _peaks(response: np.ndarray, least: float) -> Iterator[list[tuple[int, int, float]]]:
    """The places (x, y) where a correlation is largest around, and how large; and the negative's."""
    for values in (response, -response):
        high = np.flatnonzero(values > least)
        if len(high):
            high = high[values.ravel()[high] == cv2.dilate(values, np.ones((9, 9))).ravel()[high]]
        rows, columns = np.unravel_index(high, values.shape)
        yield list(zip(columns.tolist(), rows.tolist(), values.ravel()[high].tolist(), strict=True))


def _response(template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, scale: float) -> np.ndarray:
    """The correlation coefficient at every place, for one scale; one 0 where the template does not fit."""
    height, width = (max(4, round(scale * n)) for n in template.shape[:2])
    if height > image.shape[0] or width > image.shape[1]:
        return np.zeros((1, 1), np.float32)
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    small = cv2.resize(template, (width, height), interpolation=how)
    cover = None
    if mask is not None and not mask.all():
        cover = cv2.resize(mask * np.uint8(255), (width, height), interpolation=cv2.INTER_AREA)
        cover = np.dstack([(cover > 127).astype(np.uint8)] * (1 if small.ndim == 2 else 3))
    response = cv2.matchTemplate(image, small, cv2.TM_CCOEFF_NORMED, mask=cover)
    return np.where(np.isfinite(response) & (np.abs(response) <= 1.001), response, 0).astype(np.float32)


def _fitted(template: np.ndarray, image: np.ndarray, mask: np.ndarray | None, near: Place) -> Place | None:
    """The place near a candidate that fits best; None if none fits well."""
    _, x, y, scale = near
    height, width = template.shape[:2]
    reach, wide = 3 + round(0.06 * scale * max(height, width)), round(scale * width)
    top, left = max(0, int(y) - reach), max(0, int(x) - reach)
    part = image[top : int(y) + round(scale * height) + reach, left : int(x) + wide + reach]
    best = None
    for wider in range(max(4, wide - 3), wide + 4):  # sizes are whole pixels
        scale = wider / width
        response = _response(template, part, mask, scale)
        _, value, _, (column, row) = cv2.minMaxLoc(response)
        if value > (0.88 if best is None else best[0]):
            dx, dy = _vertex(response[row], column), _vertex(response[:, column], row)
            # the centre of the template's first pixel, of pixels that are `scale` pixels wide
            best = value, left + column + dx + (scale - 1) / 2, top + row + dy + (scale - 1) / 2, scale
    return best


def _vertex(line: np.ndarray, at: int) -> float:
    """The place of a maximum relative to its pixel, by a parabola."""
    before, middle, after = np.pad(line, 1, mode="reflect")[at : at + 3].astype(float)
    bend = min(before - 2 * middle + after, -1e-9)
    return float(np.clip((before - after) / (2 * bend), -0.5, 0.5))


def _propose(template: np.ndarray, image: np.ndarray, most: int) -> list[list[np.ndarray]]:
    """At most so many similarities (3, 3) from a template to an image, both grey, uint8, where they are alike
    at scales of .3 to 3 and any turn, best first, and as many from its negative; they are to be matched and
    verified."""
    found: list[list[tuple[float, np.ndarray]]] = [[], []]
    longer, small = max(template.shape), 0.0
    centre = np.array([(template.shape[1] - 1) / 2, (template.shape[0] - 1) / 2, 1])
    scales = np.geomspace(0.3, 3.0, 14)
    for scale in scales[scales**2 * template.size > 16**2]:
        factor = min(1.0, max(22 / scale / longer, 1 / min(image.shape)))  # so many pixels suffice
        shown = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        if abs(small - scale * factor) > 1e-9:
            small = scale * factor
            turned = [_turned(template, small, degrees) for degrees in range(0, 360, 15)]
        back = np.linalg.inv(resizing((factor, factor)))
        for patch, to_patch in turned:
            if min(patch.shape) < 8 or np.any(np.array(patch.shape) > shown.shape):
                continue
            response = cv2.matchTemplate(shown, patch, cv2.TM_CCOEFF_NORMED)
            for listed, peaks in zip(found, _peaks(response, 0.55), strict=True):
                for x, y, value in peaks:
                    listed.append((value, back @ np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]]) @ to_patch))
    kept: list[list[np.ndarray]] = [[], []]
    for listed, best in zip(found, kept, strict=True):
        for _, one in sorted(listed, key=lambda each: -each[0]):
            size = np.sqrt(np.linalg.det(one[:2, :2])) * longer
            if len(best) < most and all(np.linalg.norm((one - o)[:2] @ centre) > size / 3 for o in best):
                best.append(one)
    return kept


def _turned(template: np.ndarray, scale: float, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    """The largest upright part of a scaled and turned template, and (3, 3) from the template to it."""
    height, width = template.shape
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    linear = scale * np.array([[cos, -sin], [sin, cos]])
    # The largest upright rectangle within the turned template, lying or standing.
    inner = np.array([[width, height], [height, width]], float)
    turned = inner @ np.abs([[cos, sin], [sin, cos]])
    inner *= (np.array([width, height]) / turned).min(axis=1, keepdims=True)
    size = tuple(max(1, int(scale * n)) for n in max(inner, key=np.prod))
    shift = (np.array(size) - 1) / 2 - linear @ [(width - 1) / 2, (height - 1) / 2]
    smooth = cv2.GaussianBlur(template, (0, 0), 0.4 / scale) if scale < 1 else template
    matrix = np.vstack([np.c_[linear, shift], [0, 0, 1]])
    return cv2.warpAffine(smooth, matrix[:2], size, flags=cv2.INTER_LINEAR), matrix
