"""From two images to a verified result: read → extract → match → refine → verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, overload

import numpy as np

from matcher import types
from matcher.cameras import CameraInput, cameras_of_pair
from matcher.config import MatchingPolicy, NearestConfig, NetworkConfig, PipelineConfig, RefineConfig
from matcher.errors import UsageError
from matcher.extract.extractor import SiftExtractor, extracted
from matcher.images import MAX_PIXELS, ImageInput, channels_last, read_both, read_image, read_once
from matcher.match.calibration import calibrated_by_geometry, calibration_of, with_prior_scores
from matcher.match.nearest import NearestMatcher
from matcher.passes import FurtherPasses
from matcher.refine import refine_image_pair
from matcher.result import Result, WeightsSource
from matcher.types import Features, Image, Matches, TwoViewGeometry
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.overlay import without_overlay
from matcher.verify.repetition import repetition
from matcher.verify.verdict import NOT, judged, reject_improbable, surest, verdict_of

Mask = str | Path | np.ndarray | Any  # the last: a PIL image or a torch tensor
FURTHER_PASSES = "further passes"  # among the stages of `Result.seconds`
_CUSTOM = PipelineConfig(matcher=NearestConfig())
# Extractor, matcher, the configuration with the architecture of its weights, and what these are, if any.
Learned = tuple[types.Extractor, types.Matcher, PipelineConfig, WeightsSource | None]


def policy_of(config: PipelineConfig, given: Mapping[str, Any]) -> MatchingPolicy:
    """How a network is used; the calibration of a preset is of its own weights, and others have none."""
    own, policy = given.get("weights") in (None, config.weights), config.matcher.policy
    return policy if own else replace(policy, calibration=None)


def refuse_for_grid(given: Mapping[str, Any]) -> None:
    """`UsageError` for options of a detector: a grid has all cells, its network the matcher's weights."""
    for name in sorted(given.keys() & {"frontend_weights", "max_keypoints"}):
        raise UsageError(f"this preset matches the cells of a grid, so {name} has no effect; leave it out")


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """An extractor, a matcher and an estimator, put together; `matcher.load` builds one from a preset.

    Each part may be your own: anything with the interface in `matcher.types`. A part that is left
    out is SIFT, mutual nearest neighbours, or robust estimation of a fundamental matrix.

    >>> import numpy as np
    >>> from matcher import Features, Pipeline
    >>> class Corners:
    ...     def __call__(self, images):
    ...         return [Features.from_image(image, np.eye(2), np.eye(2), kind="corners") for image in images]
    >>> pipeline = Pipeline(extractor=Corners())
    >>> image = np.zeros((48, 64), np.uint8)
    >>> len(pipeline.match(image, image).matches)
    2
    """

    extractor: types.Extractor | None = None
    matcher: types.Matcher | None = None
    estimator: types.Estimator | None = None
    config: PipelineConfig = _CUSTOM  # size of the images and kind of geometry are read here
    passes: FurtherPasses | None = None  # where too few matches of the first agree; None: it decides
    costs: dict[Any, Any] = field(default_factory=dict)  # measured for time budgets; see `budget.plan`
    preset: str = "custom"
    weights: WeightsSource | None = None
    upright: bool = True
    alpha_mask: bool = True
    bgr: bool = False
    max_pixels: int = MAX_PIXELS
    package: str | None = None  # name and version of the package that added the preset

    def __post_init__(self) -> None:
        for name in ("extractor", "matcher", "estimator"):
            part = getattr(self, name)
            if isinstance(part, type):
                raise UsageError(f"{part.__name__} is a class; give an object, {part.__name__}(…)")
            if part is not None and not callable(part):
                raise UsageError(f"{name} must be callable, not {part!r}; presets are built by matcher.load")
        if self.extractor is None:
            object.__setattr__(self, "extractor", SiftExtractor(self.config.extractor))
        if self.matcher is None:
            own = self.config.matcher if isinstance(self.config.matcher, NearestConfig) else NearestConfig()
            object.__setattr__(self, "matcher", NearestMatcher(own))
        if self.estimator is None:
            object.__setattr__(self, "estimator", RobustEstimator(self.config.estimation))

    def __repr__(self) -> str:
        parts = [repr(self.preset)]
        if self.preset == "custom":
            parts = [f"{name}={type(getattr(self, name)).__name__}" for name in ("extractor", "matcher")]
        parts += [f"{self.layers} layers"] * (self.layers > 0)
        parts += [str(getattr(self.matcher, n)) for n in ("device", "precision") if hasattr(self.matcher, n)]
        resize = self.config.extractor.resize
        parts += ["any size" if resize is None else f"up to {resize} pixels", self.config.estimation.kind]
        return f"Pipeline({', '.join(parts)})"

    @property
    def layers(self) -> int:
        """Depth of the network, 0 without one."""
        matcher = self.config.matcher
        return matcher.context.depth if isinstance(matcher, NetworkConfig) else 0

    def match(
        self,
        image0: ImageInput,
        image1: ImageInput,
        *,
        mask0: Mask | None = None,
        mask1: Mask | None = None,
        camera0: CameraInput | None = None,
        camera1: CameraInput | None = None,
        budget_ms: float | None = None,
    ) -> Result:
        """Match two images and verify the matches; everything in the result is in stored-image pixels.

        Args:
            image0, image1: a path; an encoded file as `bytes`, or an open one; an `Image`; a PIL image; or an
                array: (H, W) grey or (H, W, 3) RGB, of uint8, uint16 or float in [0, 1]; a torch tensor may
                also be (1 or 3, H, W) or (1, 3, H, W). Of BGR arrays, as of `cv2.imread`, with
                `matcher.load(bgr=True)`.
            mask0, mask1: a path, `bytes` or (H, W) array of the stored image, not 0 where keypoints may lie.
            camera0, camera1: for essential geometry only: a `Camera`, fx, fy, cx, cy in stored pixels, or a
                (3, 3) matrix K, either also by name in a dict; images of one size may have one.
            budget_ms: milliseconds for the pair: keypoints, layers, image size and passes are chosen to fit
                (`Result.budget`), with fewer samples of a pose and, if it is small, less thorough
                verification. The first measures.

        Raises:
            ImageError: an image cannot be read; the message names it.
            UsageError: arguments that do not fit each other.
        """
        start, kind = perf_counter(), self.config.estimation.kind
        cameras_of_pair(kind, camera0, camera1)  # before anything is read
        image0, image1, mask0, mask1 = map(read_once, (image0, image1, mask0, mask1))
        images = read_both(self.read, (image0, mask0), (image1, mask1))
        cameras = cameras_of_pair(kind, camera0, camera1, [i.size for i in images]) or (None, None)
        reading, chosen, choice = perf_counter() - start, self, None
        if budget_ms is not None:
            from matcher.budget import learned, plan

            chosen, images, choice = plan(self, images, budget_ms, 1000 * reading)
        # One pass, in the matcher's order, with the probabilities that it gave.
        start, known = perf_counter(), dict(zip(("camera0", "camera1"), cameras, strict=True))
        features = chosen.features_of(images)
        found = perf_counter()
        matches = chosen.match_features(*features)
        seconds = {"read": reading, "extract": found - start, "match": perf_counter() - found}
        matches, geometry, spent = chosen.refined_and_verified(images, features, matches, known)
        seconds |= spent
        seconds["total"] = sum(seconds.values())
        paths, source = (image.path for image in images), (self.preset, self.weights, chosen.layers)
        both = None if None in cameras else cameras
        told = dict(budget=choice, cameras=both, bgr=self.bgr)
        result = Result(*features, matches, geometry, *paths, seconds, *source, **told)
        if chosen.passes is not None:
            given = ((image0, mask0, images[0]), (image1, mask1, images[1]))
            originals = [partial(self._original, *one) for one in given]
            result = chosen._with_further_passes(result, images, originals, known)
        own = isinstance(self.estimator, RobustEstimator)
        if own and kind.startswith("homograph") and not result.geometry.verified:
            # Right matches of a mirror image are seen where more of them may agree.
            looser = replace(chosen.config, estimation=replace(chosen.config.estimation, kind="fundamental"))
            looser = replace(chosen, config=looser, estimator=None)
            looser = looser.verify(result.features0, result.features1, result.matches)
            if looser.status == "mirrored" and looser.inliers.mean() > 0.5:  # pages of like print have less
                result = replace(result, geometry=replace(looser, kind=kind, matrix=None))
        result = self.calibrated(result)
        return result if choice is None else learned(self, result)

    def refined_and_verified(
        self, images: Sequence[Image], features: Sequence[Features], matches: Matches, cameras: dict
    ) -> tuple[Matches, TwoViewGeometry, dict[str, float]]:
        """Matches moved to where the images look most alike, their geometry, and the seconds of both."""
        start = perf_counter()
        matches = self.refine(*images, matches) if self.config.refine else matches
        matches = with_prior_scores(matches, features[1].scale.tolist(), calibration_of(self.matcher))
        refined = perf_counter()
        geometry = self.verify(*features, matches, **cameras)
        seconds = {"refine": refined - start} if self.config.refine else {}
        return matches, geometry, seconds | {"verify": perf_counter() - refined}

    def _with_further_passes(
        self, first: Result, images: Sequence[Image], originals: Sequence[Callable[[], Image]], cameras: dict
    ) -> Result:
        """The result of one pass, or of several where too few matches agree."""
        start, before = perf_counter(), first.seconds["total"]
        features = first.features0, first.features1
        joined = self.passes(images, originals, features, first.matches, first.geometry, before)
        first = replace(first, budget=first.budget.leaving_out(joined.passes)) if joined.left_out else first

        def timed(result: Result) -> Result:
            spent = perf_counter() - start
            return replace(result, seconds=result.seconds | {FURTHER_PASSES: spent, "total": before + spent})

        if len(joined.passes) == 1:
            return first if first.budget is None else timed(first)
        matches = self.refine(*images, joined.matches) if self.config.refine else joined.matches
        scale, matches = joined.features1.scale.tolist(), joined.with_keypoints(matches)
        matches = with_prior_scores(matches, scale, calibration_of(self.matcher), True)
        geometry = self.verify(joined.features0, joined.features1, matches, **cameras)
        sizes = [side.image_size for side in features]
        geometry = judged(geometry, matches, *sizes, partial(repetition, *features))  # with descriptors
        geometry = reject_improbable(geometry, matches, *sizes)
        found = dict(matches=matches, geometry=geometry, passes=joined.passes, first=first)
        return timed(replace(first, features0=joined.features0, features1=joined.features1, **found))

    def calibrated(self, result: Result) -> Result:
        """The result with its final match probabilities, best first; no geometry with improbable inliers."""
        matches, geometry, calibration = result.matches, result.geometry, calibration_of(self.matcher)
        sizes = [features.image_size for features in (result.features0, result.features1)]
        if not result.passes:  # after several, more was asked of it
            geometry = reject_improbable(geometry, matches, *sizes, least=NOT)
        matches = calibrated_by_geometry(matches, geometry, calibration)
        if calibration and geometry.verified and geometry.inliers.any():
            # No match is likelier right than that both show one place. Of doubted pairs fewer are even so.
            most = verdict_of(matches, geometry, *sizes).probability / matches.scores.max()
            scores = matches.scores * np.float32(min(1.0, most) * surest(geometry))
            matches = replace(matches, scores=scores, prior=matches.prior_scores)
        matches, geometry = types.best_first(matches, geometry)
        first = result.first and self.calibrated(result.first)
        return replace(result, matches=matches, geometry=geometry.without_rejected(), first=first)

    def _original(self, given: ImageInput, mask: Mask | None, image: Image) -> Image:
        """The image with more of its pixels, where these show more."""
        resize = self.config.extractor.resize
        if isinstance(given, Image) or image.scale == (1.0, 1.0) or image.is_reduced(resize):
            return image
        return self._read(given, mask, resize=4 * resize)  # of which a part is looked at again

    def read(self, image: ImageInput, mask: Mask | None = None) -> Image:
        """An image upright and resized as this pipeline wants it; an `Image` is taken as it is. Arguments as
        in `match`; `ImageError`: it cannot be read; `UsageError`: no image, or a mask of another size."""
        sizes = {name: getattr(self.config.extractor, name) for name in ("resize", "soft_resize")}
        return self._read(image, mask, **sizes, keep_stored=self.config.refine is not None)

    def read_full(self, image: ImageInput, mask: Mask | None = None, *, deep: bool = False) -> Image:
        """As `read`, at its full size and, if `deep`, with 16 bits where it has them."""
        return self._read(image, mask, resize=None, deep=deep)

    def _read(self, image: ImageInput, mask: Mask | None, **options: Any) -> Image:
        how = dict(max_pixels=self.max_pixels, upright=self.upright, alpha_mask=self.alpha_mask, bgr=self.bgr)
        return read_image(image, mask=mask, **how, **options)

    @overload
    def extract(self, image: list[Any] | tuple[Any, ...], mask: Any = None) -> list[Features]: ...
    @overload
    def extract(self, image: ImageInput, mask: Mask | None = None) -> Features: ...
    def extract(self, image: Any, mask: Any = None) -> Features | list[Features]:
        """Keypoints and descriptors of one image, for `match_features`; arguments as in `match`. Of a list or
        a batch (B, 3, H, W), B > 1, a list of the features of each image; with as many masks, or none."""
        if not isinstance(image, (list, tuple)) and (getattr(image, "ndim", 0) != 4 or len(image) == 1):
            return self.features_of([self.read(image, mask)])[0]
        masks = [None] * len(image) if mask is None else mask
        if isinstance(masks, str) or not hasattr(masks, "__len__") or len(masks) != len(image):
            raise UsageError(f"{len(image)} images take as many masks, or none")
        images = map(channels_last, image) if isinstance(image, np.ndarray) else image
        return self.features_of(list(map(self.read, images, masks)))

    def features_of(self, images: Sequence[Image]) -> list[Features]:
        """Keypoints and descriptors of images that `read` gave."""
        return extracted(self.extractor, images, self.config.extractor)

    def match_features(self, features0: Features, features1: Features) -> Matches:
        """Match the features of two images, from `extract` or elsewhere, with descriptors of norm 1;
        `UsageError`: of another front end or descriptor size, raw SIFT descriptors, or a batch."""
        return self.match_features_batch([(features0, features1)])[0]

    def match_features_batch(self, pairs: Sequence[tuple[Features, Features]]) -> list[Matches]:
        """Match pairs of unbatched features at once; errors as in `match_features`. Matches on a stamp, logo
        or frame that both images have are left out (`matcher.verify.overlay`)."""
        if not types.checked_pairs(pairs):
            return []
        side0, side1 = zip(*pairs, strict=True)
        found = self.matcher(Features.stack(side0), Features.stack(side1))
        listed = types.one_for_each(found, Matches, len(pairs), "matcher", self.matcher)
        for pair, matches in zip(pairs, listed, strict=True):
            counts = np.array([len(side) for side in pair])
            if ((matches.indices < 0) | (matches.indices >= counts)).any():
                name = type(self.matcher).__name__
                raise UsageError(f"the matcher {name} returned indices beyond the {counts} keypoints")
        return [without_overlay(*pair, matches) for pair, matches in zip(pairs, listed, strict=True)]

    def refine(
        self,
        image0: ImageInput,
        image1: ImageInput,
        matches: Matches,
        *,
        mask0: Mask | None = None,
        mask1: Mask | None = None,
    ) -> Matches:
        """Matches of any origin, in stored pixels, each moved to where the images look most alike.

        Points of image 1 move. The matches stay in their order, and have `refinement`: which were refined or
        why not, covariances and correlations. Files are read at their own resolution; images, masks and
        errors as in `read`. See `matcher.refine`.
        """
        config = self.config.refine or RefineConfig()
        reader = self if self.config.refine else replace(self, config=replace(self.config, refine=config))
        images = read_both(reader.read, (image0, mask0), (image1, mask1))
        return refine_image_pair(*images, matches, config)

    def verify(
        self,
        features0: Features,
        features1: Features,
        matches: Matches,
        *,
        camera0: CameraInput | None = None,
        camera1: CameraInput | None = None,
    ) -> TwoViewGeometry:
        """The geometry that the matches agree with, estimated as this pipeline is configured.

        >>> import matcher, numpy as np
        >>> image = np.random.default_rng(0).integers(0, 255, (240, 320), dtype=np.uint8)
        >>> pipeline = matcher.load("nearest", geometry="homography", max_keypoints=200)
        >>> features = pipeline.extract(image)
        >>> geometry = pipeline.verify(features, features, pipeline.match_features(features, features))
        >>> geometry.status, np.allclose(geometry.matrix, np.eye(3), atol=1e-3)
        ('ok', True)

        The `scale` of the features turns thresholds, which are pixels of the resized images, into stored
        pixels; cameras are as in `match`. `UsageError`: cameras without essential geometry, or it without
        them, or of another image size.
        """
        kind, sizes = self.config.estimation.kind, (features0.image_size, features1.image_size)
        cameras = cameras_of_pair(kind, camera0, camera1, sizes)
        estimator, options = self.estimator, {"scores": matches.prior_scores, "cameras": cameras}
        if matches.covariances is not None and getattr(estimator, "takes_covariances", False):
            options["covariances"] = matches.covariances
        scale = threshold_scale(features0.scale.tolist(), features1.scale.tolist(), kind)
        geometry = estimator(matches.points0, matches.points1, thresholds_scale=scale, **options)
        if not isinstance(geometry, TwoViewGeometry) or np.shape(geometry.inliers) != (len(matches),):
            wanted = f"a TwoViewGeometry of {len(matches)} matches"
            raise UsageError(f"estimator {type(estimator).__name__} must return {wanted}, not {geometry!r}")
        return judged(geometry, matches, *sizes, partial(repetition, features0, features1))
