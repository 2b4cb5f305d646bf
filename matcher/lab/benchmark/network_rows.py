"""The rows of the benchmark that compare networks with other implementations, one function per row."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.data.image import Image
from matcher.data.matches import Matches
from matcher.kernels import SWITCH, kernels
from matcher.lab.benchmark.machine import PeakRates, count_workload
from matcher.lab.benchmark.references import (
    kornia_lightglue,
    kornia_loftr,
    lightglue_tensors,
    noise_image,
    random_batch,
    random_features,
    transformers_superglue,
    with_parameters,
)
from matcher.lab.benchmark.timing import Samples, Stopwatch, memory_above
from matcher.match.network.grid import GridExtractor

OFF = {"early_exit": False, "pruning": False}


@dataclass(frozen=True)
class BenchmarkRow:
    """A measurement of this package next to one of another implementation or setting."""

    work: str
    against: str
    ours: Samples
    theirs: Samples
    unit: str = "ms"  # or "s", of values that are seconds; "MiB" of values that are bytes
    note: str = ""

    @property
    def ratio(self) -> float:
        """The ratio of the medians: above 1, ours is faster or smaller."""
        return self.theirs.median / self.ours.median if self.ours.median else float("inf")


def as_kornia(features: Features) -> dict[str, Tensor]:
    """A batch as kornia's LightGlue expects it."""
    return {
        "keypoints": features.keypoints,
        "descriptors": features.descriptors,
        "image_size": features.size,
    }


def lightglue(watch: Stopwatch, points: int, peaks: PeakRates, batch: int = 1) -> Iterator[BenchmarkRow]:
    """LightGlue's architecture (9 layers of 256) in precision "auto" and in float32, against kornia."""
    peer = kornia_lightglue().to(watch.device)
    tensors = lightglue_tensors(peer)
    sides = [random_batch(points, batch, watch.device, seed) for seed in (0, 1)]
    data = {f"image{i}": as_kornia(side) for i, side in enumerate(sides)}
    calls: dict[str, Callable[[], object]] = {}
    networks = {}
    for precision in ("auto", "float32"):
        network = with_parameters(tensors, "lightglue-superpoint", watch.device, precision, **OFF)
        networks.setdefault(network.precision, network)
    if watch.device.type == "cuda":
        graphs = with_parameters(
            tensors, "lightglue-superpoint", watch.device, "auto", cuda_graphs=True, **OFF
        )
        graphs(*sides)  # captured in the next call
        networks[f"{graphs.precision}, CUDA graphs"] = graphs
    for name, network in networks.items():
        calls[name] = lambda n=network: n(*sides)
        if watch.device.type == "cpu" and kernels() is not None:
            calls[f"{name}, no kernels"] = lambda n=network: without_kernels(lambda: n(*sides))
    with torch.inference_mode():
        times = watch.alternate({**calls, "kornia": lambda: peer(data)})
    for name in calls:
        exact = name.startswith("float32")
        workload = count_workload(networks["float32"].model.config.context, points, points, 4 if exact else 2)
        roofline = batch * workload.seconds(peaks.float32 if exact else peaks.half, peaks.copy)
        yield BenchmarkRow(
            f"LightGlue architecture, {batch} × {points} points, {name}",
            "kornia, float32",
            times[name],
            times["kornia"],
            note=f"{roofline / times[name].median:.0%} of the roofline ({1e3 * roofline:.1f} ms); "
            f"{batch / times[name].median:.1f} pairs/s",
        )


def without_kernels(call: Callable[[], object]) -> object:
    """The result of a call with the compiled kernels switched off."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        return call()
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def lightglue_memory(watch: Stopwatch, points: int = 4096) -> Iterator[BenchmarkRow]:
    """Peak memory of a call above the level before it, in precision "auto"."""
    peer = kornia_lightglue().to(watch.device)
    network = with_parameters(lightglue_tensors(peer), "lightglue-superpoint", watch.device, "auto", **OFF)
    sides = [random_batch(points, 1, watch.device, seed) for seed in (0, 1)]
    data = {f"image{i}": as_kornia(side) for i, side in enumerate(sides)}
    with torch.inference_mode():
        ours, theirs = memory_above(lambda: network(*sides), watch.device), None
        if ours is not None:
            theirs = memory_above(lambda: peer(data), watch.device)
    if ours is not None and theirs is not None:
        work = f"memory, LightGlue architecture, {points} points, {network.precision}"
        yield BenchmarkRow(work, "kornia, float32", Samples((ours,)), Samples((theirs,)), unit="MiB")


def superglue(watch: Stopwatch, points: int) -> Iterator[BenchmarkRow]:
    """SuperGlue's architecture with 100 Sinkhorn iterations, in precision "auto"."""
    peer = transformers_superglue().to(watch.device)
    tensors = {k: v for k, v in peer.state_dict().items() if not k.startswith("keypoint_detector.")}
    network = with_parameters(tensors, "superglue-outdoor", watch.device, "auto")
    sides = [random_batch(points, 1, watch.device, seed) for seed in (0, 1)]
    names = ("keypoints", "descriptors", "scores", "mask")
    keypoints, descriptors, scores, mask = (torch.stack([getattr(s, n) for s in sides], 1) for n in names)
    width, height = sides[0].size[0].tolist()

    def theirs() -> object:
        return peer._match_image_pair(keypoints, descriptors, scores, height, width, mask=mask.int())

    with torch.inference_mode():
        times = watch.alternate({"ours": lambda: network(*sides), "theirs": theirs})
    yield BenchmarkRow(
        f"SuperGlue architecture, {points} points, {network.precision}",
        "transformers, float32",
        times["ours"],
        times["theirs"],
        note=f"{network.model.config.assignment.max_iterations} Sinkhorn iterations in both",
    )


def loftr(watch: Stopwatch, width: int = 640, height: int = 480) -> Iterator[BenchmarkRow]:
    """LoFTR from pixels to matches, including the backbone, in precision "auto"."""
    peer = kornia_loftr().to(watch.device)
    network = with_parameters(dict(peer.state_dict()), "loftr-outdoor", watch.device, "auto")
    extractor = GridExtractor(network.model.backbone, "loftr")
    noise = [noise_image(width, height, seed) for seed in (0, 1)]
    images = [Image(pixels, (width, height)) for pixels in noise]
    data = {
        f"image{i}": torch.from_numpy(pixels)[None, None].float().to(watch.device) / 255
        for i, pixels in enumerate(noise)
    }

    def ours() -> Matches:
        features0, features1 = extractor(images)
        return network(Features.stack([features0]), Features.stack([features1]))[0]

    with torch.inference_mode():
        note = f"{len(ours())} and {len(peer(data)['confidence'])} matches refined"
        times = watch.alternate({"ours": ours, "theirs": lambda: peer(data)})
    work = f"LoFTR, {width}×{height}, {network.precision}"
    yield BenchmarkRow(work, "kornia, float32", times["ours"], times["theirs"], note=note)


def ragged(watch: Stopwatch, pairs: int, low: int, high: int) -> Iterator[BenchmarkRow]:
    """Pairs with different numbers of keypoints in one batch, against one by one, in float32."""
    peer = kornia_lightglue()
    network = with_parameters(lightglue_tensors(peer), "lightglue-superpoint", watch.device, "float32", **OFF)
    rng = torch.Generator().manual_seed(0)
    counts = torch.randint(low, high + 1, (pairs, 2), generator=rng).tolist()
    both = [
        [random_features(n, seed=2 * i + side).to(watch.device) for side, n in enumerate(pair)]
        for i, pair in enumerate(counts)
    ]
    singles = [tuple(Features.stack([f]) for f in pair) for pair in both]
    batch = tuple(Features.stack(side) for side in zip(*both, strict=True))
    together, apart = network(*batch), [network(*pair)[0] for pair in singles]
    same = sum(
        {*map(tuple, a.indices.tolist())} == {*map(tuple, b.indices.tolist())}
        for a, b in zip(together, apart, strict=True)
    )
    times = watch.alternate(
        {"batch": lambda: network(*batch), "singles": lambda: [network(*pair) for pair in singles]}
    )
    yield BenchmarkRow(
        f"{pairs} pairs of {low}–{high} points in one batch, float32",
        "one by one",
        times["batch"],
        times["singles"],
        note=f"{same} of {pairs} pairs have the same {sum(map(len, apart))} matches",
    )
