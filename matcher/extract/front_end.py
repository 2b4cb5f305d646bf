"""What front ends share: settings, networks that are filled when first needed, the way to `Features`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from matcher.config import ExtractorConfig, resolve
from matcher.errors import UsageError
from matcher.types import Features, Image, all_finite, to_numpy

# Puts the trained parameters of a configuration into its network, strictly, or raises.
Fill = Callable[[nn.Module, ExtractorConfig], None]

_TOGETHER = 8  # images in one batch of a network


@dataclass(frozen=True, eq=False)
class Found:
    """What a front end finds on an upright, resized image within its mask, best first; on any device."""

    points: Tensor  # (N, 2) float xy, pixels of `image.pixels`; the centre of the first one is (0, 0)
    scores: Tensor  # (N,) float, in any unit; larger is better
    descriptors: Tensor  # (N, D) float; of norm 1, unless `types.UNNORMALISED` names the front end
    # (N, 2, 2) columns are the axes of the described patch, in the same pixels; they also give the features'
    # `scales` and `orientations`
    affine_frames: Tensor | None = None


class FrontEnd(NamedTuple):
    """A front end as data: how its network, if it has one, is built and run."""

    build: Callable[[ExtractorConfig], nn.Module] | None  # None: nothing is learned
    # Finds points in one image with the network, which is None where there is none to build.
    find: Callable[[nn.Module | None, Image, ExtractorConfig], Found] | None
    published: Mapping[str, Any]  # the settings that it has, with their published values
    # Instead of `find`, in images of one size at once, by a network that has `prepare(dtype)` and runs in
    # half precision where that is fast.
    find_together: Callable[[nn.Module, Sequence[Image], ExtractorConfig], list[Found]] | None = None


class LearnedExtractor:
    """A front end whose network, if it has one, is built and filled at the first call."""

    def __init__(
        self,
        config: ExtractorConfig,
        front_end: FrontEnd,
        fill: Fill,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        weights: str | Path | None = None,
    ) -> None:
        """Settings that are None become the published ones. `dtype` is of a network that runs in half
        precision; `weights`, the file that `fill` reads if it is not the usual one, distinguishes extractors.
        """
        self.config = resolve(config, front_end.published)
        self.front_end = front_end
        self.device, self.dtype, self.weights = torch.device(device), dtype, weights
        self._fill = fill

    @cached_property
    def network(self) -> nn.Module | None:
        """The network with its parameters, built when it is first used; errors are those of `fill`."""
        if self.front_end.build is None:
            return None
        # Building may draw random numbers; the caller's generator must not notice.
        with torch.random.fork_rng(devices=[]):
            network = self.front_end.build(self.config)
        self._fill(network, self.config)
        network.eval().requires_grad_(False).to(self.device)
        if self.front_end.find_together is not None:
            network.prepare(self.dtype)
        return network

    def limited(self, max_keypoints: int) -> LearnedExtractor:
        """The same with another number of keypoints; the network is shared."""
        _ = self.network  # built once, not by each copy
        changed = copy.copy(self)
        changed.config = replace(self.config, max_keypoints=max_keypoints)
        return changed

    @torch.no_grad()
    def __call__(self, images: Sequence[Image]) -> list[Features]:
        """Features of each image in stored pixels, on the CPU, strongest first."""
        network, config, front_end = self.network, self.config, self.front_end
        if (together := front_end.find_together) is None:
            found = {place: front_end.find(network, image, config) for place, image in enumerate(images)}
        else:
            sizes: dict[tuple[int, ...], list[int]] = {}
            for number, image in enumerate(images):
                sizes.setdefault(image.pixels.shape[:2], []).append(number)
            found = {}
            for numbers in sizes.values():
                for start in range(0, len(numbers), _TOGETHER):
                    batch = numbers[start : start + _TOGETHER]
                    found |= zip(batch, together(network, [images[n] for n in batch], config), strict=True)
        return [to_features(found[number], image, config.kind) for number, image in enumerate(images)]


def grey(images: Sequence[Image], device: torch.device) -> Tensor:
    """(B, 1, H, W) float32 in [0, 1], of B images of one size."""
    return torch.from_numpy(np.stack([image.grey()[None] for image in images])).to(device) / 255


def colour(image: Image, device: torch.device) -> Tensor:
    """(1, 3, H, W) RGB float32 in [0, 1]; a grey image three times."""
    pixels = torch.from_numpy(np.ascontiguousarray(image.pixels)).to(device).float() / 255
    return pixels.expand(1, 3, -1, -1) if pixels.ndim == 2 else pixels.permute(2, 0, 1)[None]


def padded(pixels: Tensor, multiple: int, least: int = 1) -> Tensor:
    """(B, C, H, W) repeated at its right and lower edge to multiples, and to `least` pixels a side."""
    height, width = (max(least, side) for side in pixels.shape[-2:])
    right, bottom = (-width % multiple + width, -height % multiple + height)
    return pad(pixels, (0, right - pixels.shape[-1], 0, bottom - pixels.shape[-2]), mode="replicate")


def mask_of(image: Image, device: torch.device) -> Tensor | None:
    """(H, W) bool where points may lie; None is everywhere."""
    return None if image.mask is None else torch.from_numpy(np.ascontiguousarray(image.mask)).to(device)


def strongest(points: Tensor, scores: Tensor, image: Image, limit: int) -> Tensor:
    """Index (K,) of the best `limit` points on the image and inside its mask; ties in the order given."""
    height, width = image.pixels.shape[:2]
    x, y = points.round().long().unbind(-1)
    keep = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    allowed = mask_of(image, points.device)
    if allowed is not None:
        keep &= allowed[y.clamp(0, height - 1), x.clamp(0, width - 1)]
    index = keep.nonzero()[:, 0]
    return index[torch.argsort(scores[index], descending=True, stable=True)[:limit]]


def to_features(found: Found, image: Image, kind: str) -> Features:
    """Points, affine frames and diameters of the upright, resized image in stored pixels."""
    if not all_finite(found.descriptors):
        raise UsageError(f"the {kind!r} front end gave descriptors that are not finite (NaN or infinity)")
    values = {"keypoints": image.to_stored(to_numpy(found.points).astype(np.float64)).astype(np.float32)}
    values |= image.features_fields()
    if found.affine_frames is not None:
        stored = image.axes_to_stored @ to_numpy(found.affine_frames).astype(np.float64)
        determinant = stored[:, 0, 0] * stored[:, 1, 1] - stored[:, 0, 1] * stored[:, 1, 0]
        values["affine_frames"] = stored.astype(np.float32)
        # A described patch is six times as wide as the keypoint that OpenCV would report for it.
        values["scales"] = (np.sqrt(np.abs(determinant)) / 6).astype(np.float32)
        values["orientations"] = np.arctan2(stored[:, 1, 0], stored[:, 0, 0]).astype(np.float32)
    values = {name: None if value is None else torch.from_numpy(value) for name, value in values.items()}
    descriptors, scores = (x.to("cpu", torch.float32) for x in (found.descriptors, found.scores))
    return Features.of_valid(**values, descriptors=descriptors, scores=scores, kind=kind)


def inner_pixels(maps: Tensor, border: int) -> Tensor:
    """(…, H, W) bool: pixels of such maps that are `border` or more away from the edge."""
    inner = torch.zeros_like(maps, dtype=torch.bool)
    height, width = maps.shape[-2:]
    inner[..., border : height - border, border : width - border] = True
    return inner
