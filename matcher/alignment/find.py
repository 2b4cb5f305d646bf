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
import PIL.Image

from matcher.alignment.align import planar_pipeline
from matcher.errors import UsageError, optional
from matcher.geometry import warp_points
from matcher.images import limit_for, read_image
from matcher.match.steering import COMPARED, distinct_neighbours, rotated_descriptors
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
    bgr: bool = False  # whether arrays are BGR, also those that `plot` is given

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
        with optional():
            from matcher.viz.drawings import draw_instances, save_figure

        if (shown := self.path if image is None else image) is None:
            raise UsageError("the image was an array: give it to plot(path, image)")
        shown = read_image(shown, max_pixels=limit_for(self.size), bgr=self.bgr)
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

    Where the template correlates with the image, at scales of .3 to 3 and any turn, it is aligned, and is a
    copy if no part of it differs. Then keypoints are matched, for what is seen obliquely or in another light:
    in windows of 1024 pixels of the image at sizes a factor of three apart; every instance is rectified to
    the template and matched once more. Where there is none, a negative of the template is looked for.

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
            UsageError: no instance is to be found, too few keypoints, edges of one direction, and what
                `matcher.load` refuses.
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
        self._mean = float(np.sqrt(self.template.grey().size))  # side of a square of as many pixels
        largest = min(max(longer, 256), 4 * longer, _SIDES[0])  # small ones are enlarged, four times at most
        sides = [largest / 2**k for k in range(3) if not k or largest / 2**k >= _SIDES[1] / 2]
        scaled = (resized_by(self.template, side / longer) for side in sides)
        self._templates = [Window(self.pipeline.extract(shown), matrix) for shown, matrix in scaled]
        self._least = least = self.pipeline.config.estimation.min_inliers
        keypoints, name = len(self._templates[0].features), self.template.path or "the template"
        self._matched = keypoints >= least
        opaque = as_colour(self.template.pixels)[... if self.template.mask is None else self.template.mask]
        # What is plain correlates with anything plain.
        plain = not opaque.size or opaque.reshape(-1, 3).std(axis=0).max() < 6
        self._is_icon = self._mean <= LONGEST and not plain
        across = _across(self.template)  # noise makes that of an edge .0003; icons have .1, photos' parts .01
        self._squeezed = 1.3 if across < 0.25 else np.inf  # lest any edge fits
        why = "" if self._matched or self._is_icon else f"it has {keypoints} keypoints, {least} are needed"
        if not plain and across < 0.005:
            why = "its edges have one direction, along which it fits anywhere"
        if why:
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
        found: list[Instance] = []
        others: list[Instance] = []  # that differ from the template in a part
        upright = _propose(self.template, shown, turned=False) if self._is_icon else ([], [])
        self._search_places(shown, upright[0], found, others)
        # A drawn icon has exact copies, among which what is turned is another icon.
        exact = any(one.share > 0.95 for one in found) and all(abs(one.angle) < 2 for one in found)
        drawn = exact and self._longer <= LONGEST / 2
        turned = _propose(self.template, shown, turned=True) if self._matched and not drawn else ([], [])
        self._search_places(shown, turned[0], found, others)
        if self._matched and not (found and self._longer <= LONGEST / 2):
            self._search_windows(shown, found, on_progress)
        finder, inverted = self, not any(self._likeness(shown, one).correlation > -0.3 for one in found)
        if inverted:
            finder = self._with(np.invert(self.template.pixels), self.template.mask)
            finder._search_places(shown, [*upright[1], *turned[1]], found, others)
        # Where there are copies of a small template, what is less alike is another thing.
        if self._is_icon and not all(one.inliers for one in found):
            found = [one for one in found if not one.inliers or finder._likeness(shown, one).is_copy]
        found = [one for one in found if not one.inliers or _is_new(one.corners, others)]
        found.sort(key=lambda one: (one.inliers > 0, -one.inliers, -one.share))
        mirrored: list[Instance] = []
        if not found and self._matched and self._longer > LONGEST:
            mask = self.template.mask
            flipped = self._with(self.template.pixels[:, ::-1], None if mask is None else mask[:, ::-1])
            places = _propose(flipped.template, shown, turned=True, dense=False)[0]
            flipped._search_places(shown, places, mirrored, [])
        told = perf_counter() - start, inverted and bool(found), bool(mirrored), self.pipeline.bgr
        return Detections(tuple(found), shown.size, self.template, shown.path, *told)

    def _with(self, pixels: np.ndarray, mask: np.ndarray | None) -> TemplateFinder:
        """The finder of a template that is changed, by which places are matched."""
        other = copy(self)
        other.template = replace(self.template, pixels=np.ascontiguousarray(pixels), mask=mask)
        return other

    def _search_places(
        self, image: Image, places: Sequence[np.ndarray], found: list[Instance], others: list[Instance]
    ) -> None:
        """Add the instances at proposed places, (3, 3) from the template's pixels to those of the image; to
        `others` what is much like the template, but differs from it in a part."""
        failures = vain = 0
        to_stored, from_stored = np.linalg.inv(stored_to_pixels(image)), stored_to_pixels(self.template)
        for place in places:
            one, known = self._at(to_stored @ place @ from_stored), found + others
            if one is None or not _is_free(image, one, known):
                continue
            if vain == 60 or len(found) == self.max_instances:
                break
            one, vain = self._aligned(image, one.matrix), vain + 1
            if one is None or not _is_free(image, one, known):
                continue
            like = self._likeness(image, one)
            if like.is_copy and np.linalg.cond(one._jacobian()) < self._squeezed:
                found.append(replace(one, share=float(like.correlation)))
                vain = 0
            elif self._is_icon and like.correlation > 0.88 and like.detail > 0.8 and like.worst > 0.25:
                others.append(one)
            elif self._matched and like.correlation > 0.75 and like.detail > 0.4 and failures < 3:
                one = self._confirmed(image, one.matrix)
                right = one is not None and self._likeness(image, one).correlation >= 0.75
                if right and _is_free(image, one, known):
                    found.append(one)
                    vain = 0
                failures += not right

    def _aligned(self, image: Image, matrix: np.ndarray) -> Instance | None:
        """The instance where the template is most alike to the image near a place; None if it is nowhere."""
        for side in (24, LONGEST):  # pixels of the template; few at first, which reach farther
            size = np.sqrt(abs(np.linalg.det(matrix[:2, :2])) * np.prod(image.scale))
            factor = max(min(side / self._mean, size, 1), 12 / self._mean)
            shown, from_stored = resized_by(self.template, factor)
            rows, columns = shown.pixels.shape[:2]
            margin = round(0.2 * max(rows, columns))
            shift = np.array([[1.0, 0, margin], [0, 1, margin], [0, 0, 1]])
            canvas = as_it_is(np.zeros((rows + 2 * margin, columns + 2 * margin), np.uint8))
            laid = lay_over(image, canvas, shift @ from_stored @ np.linalg.inv(matrix))
            inner = laid.above[margin : margin + rows, margin : margin + columns]
            stop = cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, 30, 1e-3
            here, there = (as_it_is(each).grey() for each in (_over(shown, inner), laid.above))
            start = shift[:2].astype(np.float32)
            cover = None
            if shown.mask is not None and side == LONGEST:  # near its place; what is behind it has no say
                cover = np.pad(cv2.dilate(shown.mask * np.uint8(255), np.ones((5, 5))), margin)
            try:
                like, moved = cv2.findTransformECC(here, there, start, cv2.MOTION_AFFINE, stop, cover, 3)
            except cv2.error:  # not alike at all
                return None
            moved = np.linalg.inv(shift) @ np.vstack([moved, [0, 0, 1]])
            if like < 0.7 or not 0.6 < np.linalg.det(moved) < 1.6:  # it drifted to something else
                return None
            matrix = matrix @ np.linalg.inv(from_stored) @ moved @ from_stored
        return self._at(matrix)

    def _likeness(self, image: Image, instance: Instance) -> Likeness:
        """How alike an instance is to the template, at the size of the smaller of both."""
        size = instance.scale * np.sqrt(np.prod(image.scale))
        shown, from_stored = resized_by(self.template, float(np.clip(size, 16 / self._longer, 1)))
        laid = lay_over(image, shown, from_stored @ np.linalg.inv(instance.matrix))
        inside = laid.covered if shown.mask is None else laid.covered & shown.mask
        if not inside.any():
            return Likeness(0.0, 0.0, np.inf, np.inf, 0.0)
        laid = laid._replace(below=_over(shown, laid.above))
        means = [each[inside].mean(axis=0) for each in laid[:2]]
        greys = [max(as_it_is(each).grey()[inside].std(), 1e-5) for each in laid[:2]]
        here, there = (_standardised(each, inside) for each in laid[:2])
        fine = [(each - cv2.GaussianBlur(each, (0, 0), 3))[inside] for each in (here, there)]
        detail = (fine[0] * fine[1]).sum() / max(1e-9, np.prod([np.linalg.norm(each) for each in fine]))
        worst = []
        for part in (0.2, 0.3):  # of the shorter side
            side = [max(3, round(part * min(inside.shape)))] * 2
            squares = (here - there) ** 2, here**2 + there**2
            differ, energy = (cv2.blur(each.mean(axis=2), side) for each in squares)
            worst.append((differ / (energy + 0.3)).max())  # a plain part has little energy, and noise
        off, contrast = np.abs(means[0] - means[1]).max(), greys[1] / greys[0]
        return Likeness((here * there)[inside].mean(), detail, max(worst), off, contrast)

    def _search_windows(self, image: Image, found: list[Instance], on_progress: Progress) -> None:
        """Add the instances that keypoints of windows show."""
        # With two template sizes, steps of 3 leave a change of scale within 1.7 either way.
        factors = [3.0**-k for k in range(5) if not k or max(image.pixels.shape[:2]) / 3**k >= 320]
        places = (_places([round(side * factor) for side in image.pixels.shape[:2]]) for factor in factors)
        done, total = 0, sum(map(len, places))
        on_progress(done, total)
        promising: list[tuple[float, Window, Window]] = []
        for factor in factors[::-1]:
            # The small template is for instances that are small even in the largest image.
            templates = self._templates if factor == factors[0] else self._templates[:1]
            for window in windows(image, factor, self.pipeline):
                rest = window.outside([instance.corners for instance in found])
                promising += [(self._promise(template, rest), template, rest) for template in templates]
                on_progress(done := done + 1, total)
        # Where there are copies already, the most promising windows tell whether there is more.
        failures, most = 0, 1 if found else 4
        for promise, template, window in sorted(promising, key=lambda each: -each[0]):
            # Of windows without an instance 95 % promise less, of those with one 3 %.
            while promise > 0.25 and failures < most and len(found) < self.max_instances:
                rest = window.outside([instance.corners for instance in found])
                if min(len(template.features), len(rest.features)) < self._least:
                    break
                matrix, _ = self._homography(template.features, rest.features)
                if matrix is not None:
                    matrix = np.linalg.inv(rest.from_stored) @ matrix @ template.from_stored
                one = None if matrix is None else self._confirmed(image, matrix)
                if one is None or not _is_new(one.corners, found):
                    failures += 1
                    break
                found.append(one)
                failures, promise = 0, self._promise(template, window.outside([one.corners for one in found]))

    def _promise(self, template: Window, window: Window) -> float:
        """How distinctive those nearest neighbours of descriptors are that agree on where the template is."""
        own, others = (to_numpy(each.features.descriptors)[:COMPARED] for each in (template, window))
        here, there = (to_numpy(each.features.keypoints).astype(np.float32) for each in (template, window))
        promise = 0.0
        if min(len(own), len(others)) < self._least:
            return promise
        for candidate in rotated_descriptors(others, self.pipeline.config.extractor.kind):
            partners, distinct = distinct_neighbours(own @ candidate.T)
            best = np.argsort(-distinct)[: min(60, np.count_nonzero(distinct))]
            if len(best) < 4:
                continue
            # Errors are those in the template: in the window they are small where all collapses to a point.
            given = there[partners[best]], here[best]
            how = dict(ransacReprojThreshold=0.03 * float(here.max()), confidence=0.9999, refineIters=0)
            similarity, agree = cv2.estimateAffinePartial2D(*given, **how)
            if similarity is not None and np.linalg.det(similarity[:, :2]) > 0.1:
                promise = max(promise, float(distinct[best][agree.ravel() > 0].sum()))
        return promise

    def _homography(self, features0: Features, features1: Features) -> tuple[np.ndarray | None, int]:
        """The homography from image 0 to 1, None without one, and its inliers."""
        matches = self.pipeline.match_features(features0, features1)
        geometry = self.pipeline.verify(features0, features1, matches)
        return (geometry.matrix, int(geometry.inliers.sum())) if geometry.status == "ok" else (None, 0)

    def _confirmed(self, image: Image, matrix: np.ndarray) -> Instance | None:
        """The instance refined after rectification; None if the template is not matched there again."""
        if (near := self._at(matrix)) is None:
            return None
        shown_side = near.scale * max(self.template.size) * np.sqrt(np.prod(image.scale))
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
        one = self._at(matrix @ np.linalg.inv(from_stored) @ again @ from_stored, inliers, share)
        # With a small share of inliers it must correlate well, too: wrong ones had 14 and .11, and 96 and .12
        # of the mirror image of a façade.
        doubtful = share < (0.3 if inliers < 40 else 0.2)
        return None if one and doubtful and self._likeness(image, one).correlation < 0.95 else one

    def _at(self, matrix: np.ndarray, inliers: int = 0, share: float = 0.0) -> Instance | None:
        """The instance of a (3, 3) map of stored pixels; None if it is implausible for a camera."""
        corners = warp_points(self._outline, matrix)
        if not np.isfinite(corners).all():
            return None
        sides = np.roll(corners, -1, axis=0) - corners
        after = np.roll(sides, -1, axis=0)
        turns = sides[:, 0] * after[:, 1] - sides[:, 1] * after[:, 0]  # twice the triangle at each corner
        # convex, not bent beyond what a camera makes of it, and at least 8 x 8 pixels
        fits = turns.min() > 0 and turns.max() < 5 * turns.min() and turns.sum() / 4 > 8**2
        return Instance(matrix / matrix[2, 2], corners, inliers, share) if fits else None


class Likeness(NamedTuple):
    """How alike a part of an image is to a template."""

    correlation: float  # of colours
    detail: float  # correlation of what is finer than about three pixels
    worst: float  # how much the part that differs most does, of its energy: a digit of a label, say
    off: float  # by how many grey values the mean colours differ, which correlation leaves out
    contrast: float  # of the image to that of the template; what is greyed out has half

    @property
    def is_copy(self) -> bool:
        """Whether it is the template in all parts, in colour and in contrast."""
        # Copies differ by .2 and by 2 grey values at most; a stop sign from a play sign by .15 and 17.
        alike = self.correlation > 0.9 and self.detail > 0.75 and self.worst + self.off / 100 <= 0.25
        return alike and 0.6 <= self.contrast <= 1 / 0.6


def _across(template: Image) -> float:
    """How much of the energy of the slopes of grey lies across their main direction."""
    smooth = cv2.GaussianBlur(template.grey(), (0, 0), 1.5)
    slopes = np.stack([cv2.Sobel(smooth, cv2.CV_32F, *axis) for axis in np.eye(2, dtype=int)], -1)
    slopes = slopes[... if template.mask is None else template.mask].reshape(-1, 2)
    least, most = np.linalg.eigvalsh(slopes.T @ slopes)
    return least / max(most, 1e-9)


def _over(template: Image, image: np.ndarray) -> np.ndarray:
    """(H, W, 3) a template as it would hide the part (H, W, 3) of an image that is behind it."""
    pixels = as_colour(template.pixels)
    return pixels if template.mask is None else np.where(template.mask[..., None], pixels, image)


def _standardised(pixels: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Colours, a little blurred, of mean 0 and a common variance of 1 inside, and 0 outside."""
    smooth = cv2.GaussianBlur(pixels.astype(np.float32), (0, 0), 0.7)
    smooth -= smooth[inside].mean(axis=0)
    return smooth / max(1e-5, np.sqrt((smooth[inside] ** 2).mean())) * inside[..., None]


def _is_free(image: Image, instance: Instance, found: list[Instance]) -> bool:
    """Whether the middle of an instance is not masked in the image and it is none of those found."""
    middle = warp_points(instance.corners.mean(axis=0, keepdims=True), stored_to_pixels(image))[0]
    x, y = np.clip(middle, 0, np.array(image.pixels.shape[1::-1]) - 1).astype(int)
    return (image.mask is None or bool(image.mask[y, x])) and _is_new(instance.corners, found)


def _is_new(corners: np.ndarray, found: list[Instance]) -> bool:
    """Whether a quadrilateral (4, 2) and none of the instances cover half of each other."""
    one, others = corners.astype(np.float32), [instance.corners.astype(np.float32) for instance in found]
    shared = [cv2.intersectConvexConvex(one, other)[0] for other in others]
    smaller = [min(cv2.contourArea(one), cv2.contourArea(other)) for other in others]
    return all(both <= 0.5 * area for both, area in zip(shared, smaller, strict=True))


# Where a template may be, by normalised cross-correlation with the resized and turned template.

LONGEST = 128  # pixels of the side of templates, squares of as many pixels, that correlation alone finds


def _propose(template: Image, image: Image, *, turned: bool, dense: bool = True) -> list[list[np.ndarray]]:
    """The 150 best similarities (3, 3), from the template's pixels to those of the image, where the two
    correlate, and as many where its negative does, best first; they are to be verified."""
    # `side`: pixels of the template, a square of as many, that suffice to tell where it may be.
    if turned:
        scales, turns = np.geomspace(0.3, 3, 14 if dense else 10), range(0, 360, 12 if dense else 15)
        smallest, side, least = 40, 18, 0.45
    else:  # in steps of 6 %, which move the border of an icon of 64 pixels by one at most
        scales, turns, smallest, side, least = np.geomspace(0.6, 2.4, 25), range(1), 8, 28, 0.7
    whole, mean = image.grey(), np.sqrt(template.grey().size)
    small = template.resized(min(1.0, 4 * side / mean))  # of which no more is needed
    shrunk = np.divide(small.scale, template.scale)
    listed: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    for scale in scales[scales * mean >= smallest]:
        factor = min(1.0, max(side / (scale * mean), 1 / min(whole.shape)))
        shown = cv2.resize(whole, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        back = np.linalg.inv(resizing((factor, factor)))
        for degrees in turns:
            patch, cover, to_patch = _turned(small, scale * factor / shrunk[0], degrees)
            if min(patch.shape) < 8 or np.any(np.array(patch.shape) > shown.shape):
                continue
            response = cv2.matchTemplate(shown, patch, cv2.TM_CCOEFF_NORMED, mask=cover)
            if cover is not None:
                response[~(np.abs(response) <= 1.001)] = 0  # it is undefined where the image is plain
            strength = np.abs(response)
            if (high := strength > least).any():
                rows, columns = np.nonzero(high & (strength == cv2.dilate(strength, np.ones((9, 9)))))
                matrices = np.repeat((back @ to_patch @ resizing(shrunk))[None], len(rows), axis=0)
                matrices[:, :2, 2] += np.c_[columns, rows] * back[[0, 1], [0, 1]]
                peaks = response[rows, columns]
                for places, values in zip(listed, (peaks, -peaks), strict=True):
                    places.append((values[values > 0], matrices[values > 0]))
    middle = np.append(np.subtract(template.pixels.shape[1::-1], 1) / 2, 1)
    return [_apart(places, middle, mean / 3) for places in listed]


def _apart(places: list[tuple[np.ndarray, np.ndarray]], middle: np.ndarray, reach: float) -> list[np.ndarray]:
    """The best of maps (N, 3, 3), each given with (N,) scores, that move a point (3,) to places apart."""
    if not places:
        return []
    values, maps = map(np.concatenate, zip(*places, strict=True))
    points = maps[:, :2] @ middle
    reaches = reach * np.sqrt(np.linalg.det(maps[:, :2, :2]))
    rest, best = np.argsort(-values, kind="stable")[:5000], []
    while len(rest) and len(best) < 150:
        best.append(maps[rest[0]])
        rest = rest[np.hypot(*(points[rest] - points[rest[0]]).T) > reaches[rest]]
    return best


def _turned(template: Image, scale: float, turn: float) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """The largest upright part of a scaled and turned template, grey, or, if it is masked, all of it and its
    mask (H, W), uint8; and (3, 3) from the template to it."""
    mask, (height, width) = template.mask, template.pixels.shape[:2]
    cos, sin = np.cos(np.radians(turn)), np.sin(np.radians(turn))
    linear = scale * np.array([[cos, -sin], [sin, cos]])
    sides = np.array([[width, height], [height, width]], float)  # lying or standing
    around = sides @ np.abs([[cos, sin], [sin, cos]])
    sides = around[:1] if mask is not None else sides * (sides[0] / around).min(axis=1, keepdims=True)
    size = tuple(max(1, int(scale * n)) for n in max(sides, key=np.prod))
    shift = (np.array(size) - 1) / 2 - linear @ [(width - 1) / 2, (height - 1) / 2]
    smooth = cv2.GaussianBlur(template.grey(), (0, 0), 0.4 / scale) if scale < 1 else template.grey()
    matrix = np.vstack([np.c_[linear, shift], [0, 0, 1]])
    patch = cv2.warpAffine(smooth, matrix[:2], size, flags=cv2.INTER_LINEAR)
    cover = None if mask is None else cv2.warpAffine(mask * np.uint8(255), matrix[:2], size) // 128
    return patch, cover, matrix
