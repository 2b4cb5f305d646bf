"""The rows of the benchmark in ONNX Runtime: our files against torch, and against kornia's networks."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from matcher.config import ExtractorConfig
from matcher.data.features import Features
from matcher.data.images import image_from_array
from matcher.errors import UsageError, install_command
from matcher.lab.benchmark.network_rows import OFF, BenchmarkRow, without_kernels
from matcher.lab.benchmark.preset_rows import enlarged
from matcher.lab.benchmark.references import (
    kornia_lightglue,
    lightglue_tensors,
    network_with,
    random_batch,
    seeded,
)
from matcher.lab.benchmark.timing import Stopwatch
from matcher.loading import load
from matcher.match.network.inference import AttentionMatcher
from matcher.onnx.extractor import OnnxExtractor
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.runtime import Model
from matcher.onnx.trained import Trained
from matcher.torch_engine import build_extractor

_NAMES = ("keypoints0", "descriptors0", "keypoints1", "descriptors1", "size0", "size1")


def preset_rows(watch: Stopwatch, images: tuple[Path, Path], points: int) -> Iterator[BenchmarkRow]:
    """The default preset in one pass on two images, and its matcher alone, against torch in float32."""
    options = {"max_keypoints": points, "precision": "float32", "second_pass": False, "refine": False}
    pipes = {engine: load(engine=engine, resize=2048, **options) for engine in ("onnx", "torch")}
    features = [pipes["torch"].extract(enlarged(path)) for path in images]
    work = {
        f"`hybrid-learned`, matcher alone, {points} points": lambda pipe: pipe.match_features(*features),
        f"`hybrid-learned`, images to matches, {points} points": lambda pipe: pipe.match(*images),
    }
    for name, call in work.items():
        times = watch.alternate(
            {
                "onnx": lambda c=call: c(pipes["onnx"]),
                "torch": lambda c=call: c(pipes["torch"]),
                "plain": lambda c=call: without_kernels(lambda: c(pipes["torch"])),
            }
        )
        yield BenchmarkRow(f"ONNX: {name}", "our torch, float32", times["onnx"], times["torch"])
        yield BenchmarkRow(f"ONNX: {name}", "the same without kernels", times["onnx"], times["plain"])


def front_ends(watch: Stopwatch, image: Path, size: tuple[int, int], points: int) -> Iterator[BenchmarkRow]:
    """Our front end against torch, and against kornia's ALIKED with random parameters, on one image."""
    from kornia.feature import ALIKED

    pixels = np.ascontiguousarray(enlarged(image)[: size[1], : size[0]])
    single = image_from_array(pixels, resize=None)
    config = ExtractorConfig(kind="learned", max_keypoints=points)
    ours, torch_ours = OnnxExtractor(config), build_extractor(config, precision="float32")
    peer = seeded(lambda: ALIKED("aliked-n16", max_num_keypoints=points, detection_threshold=-1.0))
    tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None].float() / 255
    with torch.inference_mode():
        times = watch.alternate(
            {
                "onnx": lambda: ours([single]),
                "torch": lambda: torch_ours([single]),
                "aliked": lambda: peer(tensor),
            }
        )
    name = f"ONNX: front end `learned`, {pixels.shape[1]} × {pixels.shape[0]}, {points} points"
    yield BenchmarkRow(name, "our torch, float32", times["onnx"], times["torch"])
    yield BenchmarkRow(name, "kornia's ALIKED (n16), torch", times["onnx"], times["aliked"])


def lightglue(watch: Stopwatch, points: int) -> Iterator[BenchmarkRow]:
    """LightGlue's architecture, all 9 layers, as we write it, against kornia's as torch exports it.

    Raises:
        UsageError: onnxscript, by which torch exports, is not installed.
    """
    peer = kornia_lightglue()
    model = network_with(lightglue_tensors(peer), "lightglue-superpoint", **OFF)
    arrays = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    ours = AttentionMatcher(model, precision="float32")
    onnx = OnnxMatcher(Trained(model.config, arrays, "random", ""))
    sides = [random_batch(points, 1, torch.device("cpu"), seed) for seed in (0, 1)]
    exported, given = _exported(peer, sides)
    times = watch.alternate(
        {"onnx": lambda: onnx(*sides), "torch": lambda: ours(*sides), "kornia": lambda: exported(**given)}
    )
    name = f"ONNX: LightGlue architecture, {points} points"
    yield BenchmarkRow(name, "our torch, float32", times["onnx"], times["torch"])
    yield BenchmarkRow(name, "kornia's, exported by torch", times["onnx"], times["kornia"])


def _exported(peer: nn.Module, sides: list[Features]) -> tuple[Callable[..., object], dict[str, np.ndarray]]:
    """kornia's LightGlue for so many points in ONNX Runtime, and its inputs."""
    one, other = sides
    tensors = (one.keypoints, one.descriptors, other.keypoints, other.descriptors, one.size, other.size)
    data = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Flat(peer), tensors, data, input_names=_NAMES, dynamo=True, opset_version=20, verbose=False
            )
    except ModuleNotFoundError as error:
        raise UsageError(
            f"torch exports by {error.name}, which is not installed: {install_command('benchmark')}"
        ) from error
    model = Model(data.getvalue())
    arrays = dict(zip(_NAMES, (tensor.numpy() for tensor in tensors), strict=True))
    return model, {name: arrays[name] for name in model.inputs}


class _Flat(nn.Module):
    """kornia's LightGlue with tensors in and out, as an exporter needs it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Partners and scores of the points of image 0, for the tensors named in `_NAMES`."""
        points, size = tensors[:4], tensors[4:]
        found = self.network(
            {
                f"image{i}": {
                    "keypoints": points[2 * i],
                    "descriptors": points[2 * i + 1],
                    "image_size": size[i],
                }
                for i in (0, 1)
            }
        )
        return found["matches0"], found["matching_scores0"]
