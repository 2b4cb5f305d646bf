"""Timing of alternating calls in one process, so that other load on the machine affects all equally."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.config import ContextConfig, Precision
from matcher.errors import UsageError, install_command
from matcher.evaluate.synthetic import LEVELS, draw_homography, warp
from matcher.export.colmap import import_pycolmap
from matcher.images import find_images, read_image
from matcher.kernels.calls import linear_at_once
from matcher.loading import load
from matcher.match.network import AttentionMatcher, MatchingNetwork
from matcher.presets import find_preset
from matcher.sfm.reconstruct import ReconstructionError, reconstruct
from matcher.types import Features
from matcher.weights.conversion import SYSTEMS, choose_layout, convert

# --- memory: Memory of this process; no torch, which would count.

_STATUS = Path("/proc/self/status")


def peak_memory() -> int:
    """The most bytes that this process, or one that it started and that has ended, had in memory."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if sys.platform == "linux":  # ru_maxrss of this process counts what its parent had when it started it
        return max(ended, resident("VmHWM"))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(ended, own * (1 if sys.platform == "darwin" else 1024))


def resident(name: str) -> int:
    """Bytes that Linux gives for this process under a name of its status: VmRSS now, VmHWM at most."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# --- timing: Timing of alternating calls in one process, so that other load on the machine affects all
# equally.

Call = Callable[[], object]
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Samples:
    """Measurements of one call."""

    values: tuple[float, ...]  # seconds or bytes, in the order of measuring

    @property
    def minimum(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def median(self) -> float:
        """The median value."""
        return median(self.values)

    @property
    def maximum(self) -> float:
        """The largest value."""
        return max(self.values)


@dataclass(frozen=True)
class Stopwatch:
    """How calls are timed."""

    device: torch.device
    repeats: int = 5  # of every call, at most
    seconds: float = 40.0  # no new round starts after that
    clock: Callable[[], float] = perf_counter

    def synchronise(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once(self, call: Call) -> float:
        """Seconds of one call, including the work of the device."""
        self.synchronise()
        start = self.clock()
        call()
        self.synchronise()
        return self.clock() - start

    def alternate(self, calls: Mapping[str, Call]) -> dict[str, Samples]:
        """Run every call once as a warm-up, then all alternately, `repeats` times or for `seconds`."""
        for call in calls.values():
            self.once(call)
        found: dict[str, list[float]] = {name: [] for name in calls}
        start = perf_counter()
        for _ in range(self.repeats):
            for name, call in calls.items():
                found[name].append(self.once(call))
            if perf_counter() - start > self.seconds:
                break
        return {name: Samples(tuple(values)) for name, values in found.items()}


def memory_above(call: Call, device: torch.device) -> int | None:
    """Peak memory of a call above the level before it, in bytes; None where it cannot be measured.

    On CUDA the peak of the allocator; on Linux the peak of the resident set, after freed memory was returned
    to the system. The call runs once before it is measured.
    """
    call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform != "linux":
        return None
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR.write_text("5")
    except (AttributeError, OSError):
        return None
    before = resident("VmRSS")
    call()
    return max(resident("VmHWM") - before, 0)


# --- machine: The machine, its peak rates, and the work of a network (a roofline model).


@dataclass(frozen=True)
class Machine:
    """The machine that a benchmark ran on."""

    processor: str
    cores: int
    threads: int
    units: str  # instruction sets for half precision
    device: str
    torch: str


@dataclass(frozen=True)
class PeakRates:
    """The rates that this device reaches in a large matrix product and a large copy."""

    float32: float  # operations per second
    half: float  # in the half precision that "auto" selects here, else bfloat16
    copy: float  # bytes per second, read and written


def describe_machine(device: torch.device) -> Machine:
    """This machine, as far as the operating system describes it."""
    checks = {"amx": torch.cpu._is_amx_tile_supported, "avx512_bf16": torch.cpu._is_avx512_bf16_supported}
    cuda = device.type == "cuda"
    return Machine(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        units=", ".join(name for name, present in checks.items() if present()) or "none",
        device=torch.cuda.get_device_name(device) if cuda else device.type,
        torch=torch.__version__,
    )


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@torch.inference_mode()
def measure_peak_rates(watch: Stopwatch, half: torch.dtype, side: int = 2048) -> PeakRates:
    """Measure products of square matrices of `side`, and a copy of 16 of them, alternately."""
    rng = torch.Generator().manual_seed(0)
    square = torch.randn(side, side, generator=rng).to(watch.device)
    halved, large = square.to(half), square.repeat(16, 1)
    target = torch.empty_like(large)
    times = watch.alternate(
        {
            "float32": lambda: linear_at_once(square, square),  # by the library that is faster here
            "half": lambda: halved @ halved,
            "copy": lambda: target.copy_(large),
        }
    )
    operations = 2 * side**3
    return PeakRates(
        float32=operations / times["float32"].minimum,
        half=operations / times["half"].minimum,
        copy=2 * large.nbytes / times["copy"].minimum,
    )


@dataclass(frozen=True)
class Workload:
    """The least operations and memory traffic of the attention layers and the last similarity."""

    operations: int  # multiplications and additions of matrix products
    bytes: int  # parameters read once, tokens and similarities read or written once by every product

    def seconds(self, operations: float, copy: float) -> float:
        """The roofline time: that of the slower of computation and memory traffic."""
        return max(self.operations / operations, self.bytes / copy)


def count_workload(config: ContextConfig, points0: int, points1: int, width: int) -> Workload:
    """Count the work of one pair without early exit and pruning.

    A token costs 10·dim² multiply-adds in a block with separate queries and keys, 9·dim² where they are
    shared: 3 (2) for queries, keys, values, 1 for the output, 4 and 2 for the feed-forward part.

    Args:
        config: of the context.
        points0, points1: keypoints of the two images.
        width: bytes of a number in the tokens.
    """
    tokens, dim = points0 + points1, config.dim
    projected = (10, 9 if config.shared_qk else 10)  # self, cross
    linear = tokens * dim**2 * sum(projected)
    attention = 2 * dim * (points0**2 + points1**2 + 2 * points0 * points1)
    assignment = tokens * dim**2 + points0 * points1 * dim
    # In and out: projection 1 + 3, attention 3 + 1, output 1 + 1, widening 2 + 2, narrowing 2 + 1.
    moved = 2 * 17 * tokens * dim * width + sum(projected) * dim**2 * width
    return Workload(
        operations=2 * (config.depth * (linear + attention) + assignment),
        bytes=config.depth * moved + 4 * points0 * points1,
    )


# --- opencv_pair: What OpenCV offers for a pair of images: SIFT, FLANN with Lowe's ratio test, and MAGSAC.

Work = Callable[[], dict[str, Any]]  # what is timed in a process of its own; it says what it found
_RATIO = 0.8  # of Lowe's test
_LEAST = 8  # matches for a fundamental matrix


def sift_matches(images: Sequence[np.ndarray], points: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Indices (K, 2) of the matches of two images, and the fundamental matrix (3, 3) that they agree with."""
    sift = cv2.SIFT_create(points)
    (keypoints0, descriptors0), (keypoints1, descriptors1) = (sift.detectAndCompute(i, None) for i in images)
    matches = flann_matches(descriptors0, descriptors1)
    return matches, fundamental(keypoints0, keypoints1, matches)


def flann_matches(descriptors0: np.ndarray | None, descriptors1: np.ndarray | None) -> np.ndarray:
    """Indices (K, 2) of the matches that pass the ratio test."""
    if descriptors0 is None or descriptors1 is None:
        return np.empty((0, 2), int)
    both = cv2.FlannBasedMatcher().knnMatch(descriptors0, descriptors1, k=2)
    good = [m for m, n in (pair for pair in both if len(pair) == 2) if m.distance < _RATIO * n.distance]
    return np.array([(m.queryIdx, m.trainIdx) for m in good], int).reshape(-1, 2)


def fundamental(
    keypoints0: Sequence[cv2.KeyPoint], keypoints1: Sequence[cv2.KeyPoint], matches: np.ndarray
) -> np.ndarray | None:
    """The fundamental matrix (3, 3) of matches (K, 2) by MAGSAC; None of too few."""
    if len(matches) < _LEAST:
        return None
    sides = zip((keypoints0, keypoints1), matches.T, strict=True)
    points = [np.array([keypoints[k].pt for k in column]) for keypoints, column in sides]
    return cv2.findFundamentalMat(*points, cv2.USAC_MAGSAC, 1.0, 0.999)[0]


def resized(images: Sequence[str], size: tuple[int, int]) -> list[np.ndarray]:
    """The pixels of image files at one size (width, height)."""
    return [cv2.resize(read_image(path).pixels, tuple(size), interpolation=cv2.INTER_AREA) for path in images]


# --- views: Made-up views of two images, where a benchmark needs more of them than there are.


def tilted_views(paths: tuple[Path, Path], count: int) -> list[np.ndarray]:
    """Images of one scene: the two, enlarged, and seen a little from the side, from both in turn."""
    made = []
    for number in range(count):
        pixels = read_image(paths[number % 2]).pixels
        height, width = pixels.shape[:2]
        tilt = 0.03 * (number // 2)
        side = np.float32([[0, 0], [1, tilt], [1, 1 - tilt], [0, 1]]) * np.float32([2 * width, 2 * height])
        whole = np.float32([[0, 0], [1, 0], [1, 1], [0, 1]]) * np.float32([width, height])
        warp = cv2.getPerspectiveTransform(whole, side)
        made.append(cv2.warpPerspective(pixels, warp, (2 * width, 2 * height), flags=cv2.INTER_CUBIC))
    return made


def scenes(paths: tuple[Path, ...], count: int, side: int, views_each: int = 10) -> Iterator[np.ndarray]:
    """Grey images (side, side): views of parts of the images, ten of each, warped and in other light.

    A part is cut out and enlarged, so that parts have little in common; every group has another one.
    """
    sources = [cv2.cvtColor(read_image(path).pixels, cv2.COLOR_RGB2GRAY) for path in paths]
    for number in range(count):
        group = number // views_each
        rng = np.random.default_rng([group, 0])
        source = sources[group % len(sources)]
        share = rng.uniform(0.4, 0.6)
        height, width = (int(share * length) for length in source.shape)
        y, x = (rng.integers(0, a - b + 1) for a, b in zip(source.shape, (height, width), strict=True))
        part = cv2.resize(source[y : y + height, x : x + width], (side, side), interpolation=cv2.INTER_CUBIC)
        part = np.rot90(part, int(rng.integers(4)))
        view = np.random.default_rng([group, 1 + number % views_each])
        yield warp(np.ascontiguousarray(part), draw_homography((side, side), LEVELS[1], view))


# --- work_of_others: Work of others, done in a process of its own, which loads nothing of ours that is
# large.


def pair_opencv(images: list[str], size: tuple[int, int], points: int) -> Work:
    """The same pair by OpenCV's SIFT, FLANN and MAGSAC."""
    arrays = resized(images, size)
    sift_matches(arrays, points)
    return lambda: {"matches": len(sift_matches(arrays, points)[0])}


def collection_opencv(folder: str, points: int) -> Work:
    """All pairs of a folder by FLANN and MAGSAC on SIFT found before."""
    sift, found = cv2.SIFT_create(points), []
    for path in find_images(Path(folder)):
        found.append(sift.detectAndCompute(read_image(path, resize=1024).pixels, None))

    def work() -> dict[str, Any]:
        pairs = list(combinations(found, 2))
        for (keypoints0, descriptors0), (keypoints1, descriptors1) in pairs:
            fundamental(keypoints0, keypoints1, flann_matches(descriptors0, descriptors1))
        return {"pairs": len(pairs)}

    return work


def collection_colmap(folder: str, run: str, points: int, threads: int) -> Work:
    """All pairs of a folder by COLMAP's matcher and verification, on its own SIFT found before."""
    pycolmap, database = _colmap(), Path(run) / "matched.db"
    extraction, matching = _colmap_options(pycolmap, threads)
    extraction.sift.max_num_features, extraction.max_image_size = points, 1024
    pycolmap.extract_features(database, folder, extraction_options=extraction)
    count = len(find_images(Path(folder)))

    def work() -> dict[str, Any]:
        pycolmap.match_exhaustive(database, matching_options=matching)
        return {"pairs": count * (count - 1) // 2}

    return work


def sfm_colmap(folder: str, run: str, threads: int) -> Work:
    """The same by COLMAP's own SIFT, matcher and mapper, as they are by default."""
    pycolmap, database = _colmap(), Path(run) / "mapped.db"
    extraction, matching = _colmap_options(pycolmap, threads)
    mapping = pycolmap.IncrementalPipelineOptions(num_threads=threads, random_seed=0, min_model_size=3)

    def work() -> dict[str, Any]:
        pycolmap.extract_features(database, folder, extraction_options=extraction)
        pycolmap.match_exhaustive(database, matching_options=matching)
        models = pycolmap.incremental_mapping(database, folder, run, mapping).values()
        best = max(models, key=lambda model: model.num_reg_images(), default=pycolmap.Reconstruction())
        return {
            "registered": best.num_reg_images(),
            "points": best.num_points3D(),
            "track_length": best.compute_mean_track_length(),
            "error": best.compute_mean_reprojection_error(),
        }

    return work


def _colmap() -> Any:
    pycolmap = import_pycolmap()
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(0)
    return pycolmap


def _colmap_options(pycolmap: Any, threads: int) -> tuple[Any, Any]:
    options = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    for each in options:
        each.num_threads, each.use_gpu = threads, False
    return options


# --- references: Reference implementations (networks of kornia and transformers, plain Sinkhorn) and inputs
# for them.

SIZE = (1024, 768)  # of the images that random keypoints belong to
_PREFIX = "transformers."  # of kornia's LightGlue; the published file has the block's name first


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module with random parameters in evaluation mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval().requires_grad_(False)


def kornia_lightglue() -> nn.Module:
    """kornia's LightGlue for SuperPoint, without early exit and pruning."""
    from kornia.feature.lightglue import LightGlue

    settings = {"depth_confidence": -1, "width_confidence": -1, "filter_threshold": 0.0}
    return seeded(lambda: LightGlue(features=None, **settings))


def lightglue_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The parameters of kornia's LightGlue under the names of the published files."""
    tensors = {}
    for name, value in network.state_dict().items():
        if name.startswith(_PREFIX):
            layer, block, rest = name.removeprefix(_PREFIX).split(".", 2)
            name = f"{block}.{layer}.{rest}"
        if name != "confidence_thresholds":
            tensors[name] = value
    return tensors


def transformers_superglue() -> nn.Module:
    """transformers' SuperGlue.

    Raises:
        UsageError: transformers is not installed.
    """
    try:
        from transformers import SuperGlueConfig, SuperGlueForKeypointMatching
    except ImportError as error:
        raise UsageError(
            "SuperGlue is compared with transformers, which is not installed: "
            + install_command("transformers")
        ) from error
    return seeded(lambda: SuperGlueForKeypointMatching(SuperGlueConfig(matching_threshold=0.0)))


def kornia_loftr() -> nn.Module:
    """kornia's LoFTR with the settings of the outdoor checkpoint."""
    from kornia.feature.loftr.loftr import LoFTR, default_cfg

    coarse = {**default_cfg["coarse"], "temp_bug_fix": False}
    match_coarse = {**default_cfg["match_coarse"], "thr": 0.0}
    config = {**default_cfg, "coarse": coarse, "match_coarse": match_coarse}
    return seeded(lambda: LoFTR(pretrained=None, config=config))


def with_parameters(
    tensors: dict[str, Tensor],
    preset: str,
    device: torch.device,
    precision: Precision,
    **policy: bool,
) -> AttentionMatcher:
    """`network_with` in inference."""
    network = network_with(tensors, preset, **policy)
    return AttentionMatcher(network, device=device, precision=precision)


def network_with(tensors: dict[str, Tensor], preset: str, **policy: bool) -> MatchingNetwork:
    """Our network of a preset with the parameters of a reference, given under their published names.

    The match threshold is 0, as in the references: random parameters give low match probabilities.
    """
    config = find_preset(preset).matcher
    config = replace(config, policy=replace(config.policy, match_threshold=0.0, **policy))
    model = seeded(lambda: MatchingNetwork(config))
    system = next(system for start, system in SYSTEMS.items() if preset.startswith(start))
    layout = choose_layout(tensors, system)
    model.load_state_dict(convert(tensors, model.state_dict(), layout, config.context.heads))
    return model


def random_features(count: int, width: int = 256, seed: int = 0, kind: str = "superpoint") -> Features:
    """Uniformly random keypoints with random unit descriptors."""
    rng = np.random.default_rng(seed)
    descriptors = rng.normal(size=(count, width))
    descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
    return Features(
        keypoints=(rng.random((count, 2)) * (np.array(SIZE) - 1)).astype(np.float32),
        descriptors=descriptors.astype(np.float32),
        scores=rng.random(count).astype(np.float32),
        size=np.array(SIZE, np.float32),
        scales=rng.uniform(2, 20, count).astype(np.float32),
        orientations=rng.uniform(-3, 3, count).astype(np.float32),
        kind=kind,
    )


def random_batch(count: int, batch: int, device: torch.device, seed: int = 0) -> Features:
    """A batch of `batch` images with `count` keypoints each."""
    return Features.stack([random_features(count, seed=batch * seed + b) for b in range(batch)]).to(device)


def noise_image(width: int, height: int, seed: int = 0) -> np.ndarray:
    """(height, width) uint8 of smooth noise."""
    import cv2

    noise = cv2.GaussianBlur(np.random.default_rng(seed).standard_normal((height, width)), (0, 0), 2.0)
    return cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)


def naive_sinkhorn(scores: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Potentials u (B, N+1) and v (B, M+1) by alternating log-sum-exp over rows and columns.

    The textbook form of the algorithm (Cuturi 2013) in the log domain, differentiable, for comparison.

    Args:
        scores: (B, N+1, M+1) with the dustbins last.
        iterations: of a row and a column update each.
    """
    rows, columns = scores.shape[1] - 1, scores.shape[2] - 1
    log_mu, log_nu = (scores.new_ones(len(scores), count + 1) for count in (rows, columns))
    log_mu[:, -1], log_nu[:, -1] = columns, rows
    log_mu, log_nu = log_mu.log(), log_nu.log()
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(scores + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(scores + u.unsqueeze(2), dim=1)
    return u, v


# --- work_of_ours: Our work, and that of kornia, done in a process of its own.


def pair(images: list[str], size: tuple[int, int], points: int) -> Work:
    """One pair of arrays by the default preset; another call came before it."""
    pipe, arrays = load(device="cpu", max_keypoints=points), resized(images, size)
    pipe.match(*arrays)
    return lambda: {"matches": len(pipe.match(*arrays).points0)}


def collection(folder: str, run: str, points: int) -> Work:
    """All pairs of a folder whose features are stored: matched, verified and stored."""
    opened = Collection.open(run, device="cpu", max_keypoints=points, workers=0)
    opened.add_images(folder)
    opened.extract(everything=True)
    opened.add_pairs(exhaustive=True)
    return lambda: {"pairs": opened.run().matched}


def collection_kornia(points: int, pairs: int) -> Work:
    """So many pairs by kornia's LightGlue, with random parameters on random features; nothing is verified."""
    network = kornia_lightglue()
    sides = [random_batch(points, 1, torch.device("cpu"), seed) for seed in (0, 1)]
    data = {
        f"image{i}": {"keypoints": s.keypoints, "descriptors": s.descriptors, "image_size": s.size}
        for i, s in enumerate(sides)
    }

    @torch.inference_mode()
    def work() -> dict[str, Any]:
        for _ in range(pairs):
            network(data)
        return {"pairs": pairs}

    return work


def sfm(folder: str, run: str, threads: int) -> Work:
    """Photos to cameras and points, as `matcher sfm` does by default."""

    def work() -> dict[str, Any]:
        opened = Collection.open(run, device="cpu", workers=0)
        opened.add_images(folder)
        opened.add_pairs(exhaustive=True)
        opened.run()
        try:
            with Store.open(run) as store:
                model = reconstruct(store, Path(run) / "model", threads=threads).largest
        except ReconstructionError:
            return dict.fromkeys(("registered", "points", "track_length", "error"), 0)
        return {
            "registered": model.registered,
            "points": model.points,
            "track_length": model.mean_track_length,
            "error": model.mean_reprojection_error,
        }

    return work
