"""From two pictures to a verified result: read → extract → match → verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np
import torch

from matcher.config import ExtractorConfig, GeometryKind, NearestConfig, PipelineConfig, Precision
from matcher.data.camera import Camera
from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.images import MAX_PIXELS, image_from_array, read_image
from matcher.data.matches import Matches
from matcher.data.protocols import Estimator, Extractor, Matcher
from matcher.data.result import Result
from matcher.errors import UsageError
from matcher.extract.registry import find_front_end
from matcher.extract.shared import LearnedExtractor
from matcher.extract.sift import SiftExtractor
from matcher.match.nearest import NearestMatcher
from matcher.match.network.grid import GridExtractor
from matcher.match.network.inference import DTYPES, AttentionMatcher, resolve_precision
from matcher.match.network.model import MatchingNetwork
from matcher.presets import DEFAULT_PRESET, LoadOptions, configure, depth, find_preset
from matcher.verify.estimation import RobustEstimator
from matcher.weights.published.catalogue import fill_extractor, load_weights

Picture = str | Path | np.ndarray | Image
Mask = str | Path | np.ndarray
GRID_KIND = "loftr"  # the front end whose keypoints are the cells of a grid


@dataclass(frozen=True)
class WeightsSource:
    """Which file a network's parameters came from."""

    name: str
    sha256: str


@dataclass(frozen=True, eq=False)
class Pipeline:
    """An extractor, a matcher and an estimator, put together; `load` builds one from a preset."""

    extractor: Extractor
    matcher: Matcher
    estimator: Estimator
    config: PipelineConfig = field(default_factory=PipelineConfig)  # resize and geometry kind are read here
    preset: str = "custom"
    weights: WeightsSource | None = None
    upright: bool = True
    max_pixels: int = MAX_PIXELS

    @property
    def layers(self) -> int:
        """Depth of the network, 0 without one."""
        return depth(self.config)

    def match(
        self,
        image0: Picture,
        image1: Picture,
        *,
        mask0: Mask | None = None,
        mask1: Mask | None = None,
        camera0: Camera | None = None,
        camera1: Camera | None = None,
    ) -> Result:
        """Match two pictures and verify the matches; everything in the result is in stored-image pixels.

        Args:
            image0, image1: a path, an Image, or an array, (H, W) grey or (H, W, 3) RGB, of uint8, uint16 or
                float in [0, 1].
            mask0, mask1: a path or (H, W) array of the stored picture, not zero where keypoints may lie.
            camera0, camera1: pinhole cameras, for essential geometry only; camera1 defaults to camera0.

        Raises:
            ImageError: a picture cannot be read; the message names it.
            UsageError: arguments that do not fit each other.
        """
        cameras = self._cameras(camera0, camera1)
        times = [perf_counter()]
        images = [self.read(image0, mask0), self.read(image1, mask1)]
        times.append(perf_counter())
        features0, features1 = self.extractor(images)
        times.append(perf_counter())
        matches = self.match_features(features0, features1)
        times.append(perf_counter())
        geometry = self.estimator(
            matches.points0,
            matches.points1,
            cameras=cameras,
            scores=matches.scores,
            thresholds_scale=threshold_scale(images[0], images[1], self.config.estimation.kind),
        )
        times.append(perf_counter())
        seconds = dict(zip(("read", "extract", "match", "verify"), np.diff(times).tolist(), strict=True))
        seconds["total"] = times[-1] - times[0]
        return Result(features0, features1, matches, geometry, images[0].path, images[1].path, seconds)

    def read(self, image: Picture, mask: Mask | None = None) -> Image:
        """A picture upright and resized as this pipeline wants it; an `Image` is taken as it is."""
        resize = self.config.extractor.resize
        if isinstance(image, (str, Path)):
            return read_image(
                image, resize=resize, upright=self.upright, max_pixels=self.max_pixels, mask=mask
            )
        if isinstance(image, np.ndarray):
            return image_from_array(image, resize=resize, mask=mask)
        if isinstance(image, Image):
            if mask is not None:
                raise UsageError(
                    "an Image carries its own mask; build it with one instead of passing a mask beside it"
                )
            return image
        raise UsageError(f"a picture is a path, a NumPy array or an Image, not {type(image).__name__}")

    def extract(self, image: Picture, mask: Mask | None = None) -> Features:
        """Keypoints and descriptors of one picture, for `match_features`; errors as in `match`."""
        return self.extractor([self.read(image, mask)])[0]

    def match_features(self, features0: Features, features1: Features) -> Matches:
        """Match the features of two pictures.

        Raises:
            UsageError: features of another front end, descriptor size, or batched ones.
        """
        return self.match_features_batch([(features0, features1)])[0]

    def match_features_batch(self, pairs: Sequence[tuple[Features, Features]]) -> list[Matches]:
        """Match pairs of unbatched features in one padded, masked batch; errors as in `match_features`."""
        if any(features.keypoints.dim() != 2 for pair in pairs for features in pair):
            raise UsageError(
                "features of one picture each are needed, keypoints (N, 2); take a batch apart by unstack()"
            )
        if not pairs:
            return []
        side0, side1 = zip(*pairs, strict=True)
        return self.matcher(Features.stack(side0), Features.stack(side1))

    def _cameras(self, camera0: Camera | None, camera1: Camera | None) -> tuple[Camera, Camera] | None:
        kind = self.config.estimation.kind
        if kind != "essential":
            if camera0 is not None or camera1 is not None:
                raise UsageError(
                    f"cameras are for geometry 'essential' only; this pipeline estimates {kind!r}"
                )
            return None
        if camera0 is None:
            raise UsageError("geometry 'essential' needs camera0 (fx, fy, cx, cy in stored pixels)")
        return camera0, camera1 or camera0


def threshold_scale(image0: Image, image1: Image, kind: GeometryKind) -> float:
    """Stored pixels for one pixel of the resized pictures, for a threshold on the residual of that geometry.

    A homography's residual lies in image 1. An epipolar residual mixes both pictures as Sampson's distance
    does (Hartley and Zisserman, section 11.4.3): 1/e² is the sum of the 1/e² of either picture alone.
    """
    scale0, scale1 = (1 / float(np.sqrt(image.scale[0] * image.scale[1])) for image in (image0, image1))
    return scale1 if kind == "homography" else float(np.sqrt(2 / (scale0**-2 + scale1**-2)))


def load(preset: str = DEFAULT_PRESET, **options: Unpack[LoadOptions]) -> Pipeline:
    """Build the pipeline of a preset.

    Args:
        preset: a name in `PRESETS`.
        options: weights, frontend, variant, frontend_weights, device, precision, max_keypoints, resize,
            match_threshold, early_exit, pruning, geometry, upright, max_pixels; `LoadOptions` describes them.

    Raises:
        UsageError: an unknown preset, option, device or value, or an option that the preset has no use for.
        IntegrityError: weights that are absent or damaged.
    """
    config = configure(find_preset(preset), options)
    given = {name: value for name, value in options.items() if value is not None}
    device = resolve_device(given.get("device", "auto"))
    on_grid = config.extractor.kind == GRID_KIND
    if on_grid:
        _refuse_for_grid(given)
    else:
        extractor = build_extractor(
            config.extractor, given.get("frontend_weights"), device, given.get("precision", "auto")
        )
    if isinstance(config.matcher, NearestConfig):
        matcher, source = NearestMatcher(config.matcher, device=device), None
    else:
        precision = resolve_precision(given.get("precision", "auto"), device)
        model, source = _trained(config, options)
        config = replace(config, matcher=model.config)
        matcher = AttentionMatcher(model, device=device, precision=precision)
        if on_grid:
            extractor = _grid_extractor(matcher, source.name)
    return Pipeline(
        extractor=extractor,
        matcher=matcher,
        estimator=RobustEstimator(config.estimation),
        config=config,
        preset=preset,
        weights=source,
        upright=given.get("upright", True),
        max_pixels=given.get("max_pixels", MAX_PIXELS),
    )


def build_extractor(
    config: ExtractorConfig,
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
    precision: Precision = "auto",
) -> Extractor:
    """The front end that `config.kind` names.

    Args:
        config: of the front end.
        weights: file of a learned front end's parameters; None is what `matcher weights fetch` made. It is
            read at the first picture, not before. Those of `learned` are shipped.
        device: where a learned front end runs.
        precision: of the front end `learned`; the others run in float32.

    Raises:
        UsageError: an unknown front end, a setting that it does not have, or weights for one without any.
    """
    if config.kind == "sift":
        if weights is not None:
            raise UsageError("the front end sift has no weights; leave frontend_weights away")
        return SiftExtractor(config)
    dtype = DTYPES[resolve_precision(precision, torch.device(device))]
    fill = partial(fill_extractor, path=weights)
    return LearnedExtractor(config, find_front_end(config.kind), fill, device, dtype, weights)


def _refuse_for_grid(given: Mapping[str, Any]) -> None:
    """A grid has all its cells, and the network that describes them lies in the matcher's weights."""
    for name in ("frontend_weights", "max_keypoints"):
        if name in given:
            raise UsageError(f"this preset matches the cells of a grid, so {name} means nothing to it")


def _grid_extractor(matcher: AttentionMatcher, weights: str) -> GridExtractor:
    """The front end of a detector-free matcher; it shares the matcher's parameters and its device."""
    if matcher.model.backbone is None:
        raise UsageError(f"the weights {weights} are of a matcher with a detector; use a preset that has one")
    return GridExtractor(matcher.model.backbone, matcher.model.config.kind)


def resolve_device(name: str) -> torch.device:
    """The torch device of that name; "auto" is CUDA when there is one, else the processor.

    Raises:
        UsageError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts.get(device.type, 0):
        raise UsageError(f"device {name!r} is not available on this machine; use 'auto' or 'cpu'")
    return device


def _trained(config: PipelineConfig, options: LoadOptions) -> tuple[MatchingNetwork, WeightsSource]:
    """The trained model with the options applied; its file has the say on its shape."""
    model, digest, name = load_weights(options.get("weights") or config.weights)
    wanted = configure(replace(config, matcher=model.config), options).matcher
    if wanted != model.config:
        with torch.random.fork_rng(devices=[]):
            changed = MatchingNetwork(wanted)
        changed.load_state_dict(model.state_dict())
        model = changed
    return model, WeightsSource(name, digest)
