"""Benchmarks of collections: reconstructions against known poses and COLMAP's features; workers."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from matcher.benchmark.timing import (
    PeakRates,
    Samples,
    Stopwatch,
    count_workload,
    kornia_lightglue,
    kornia_loftr,
    lightglue_tensors,
    memory_above,
    naive_sinkhorn,
    network_with,
    noise_image,
    random_batch,
    random_features,
    scenes,
    seeded,
    sift_matches,
    tilted_views,
    transformers_superglue,
    with_parameters,
)
from matcher.cameras import Camera
from matcher.collection import runner
from matcher.collection.collection import Collection
from matcher.collection.runner import add_pairs
from matcher.collection.schema import checksum, encode_pair
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.collection.workers import Job, MatchJob, Outcome, Workers
from matcher.config import ExtractorConfig
from matcher.errors import MatcherError, UsageError, install_command
from matcher.export.colmap import HALF_PIXEL, CameraChoice, import_pycolmap
from matcher.export.hloc import FEATURES, MATCHES, PAIRS, import_h5py, pair_key
from matcher.extract.learned import try_peaks
from matcher.images import find_images, image_from_array, read_image
from matcher.kernels import SWITCH, kernels
from matcher.kernels.calls import (
    try_absorb,
    try_attention,
    try_candidates,
    try_half_attention,
    try_half_maps,
    try_half_rows,
    try_half_samples,
    try_half_turns,
    try_maps,
    try_rows,
    try_samples,
    try_turns,
)
from matcher.kernels.loader import SLOWER, supported
from matcher.loading import load
from matcher.match.loftr import GridExtractor
from matcher.match.network import AttentionMatcher
from matcher.match.sinkhorn import credible_matches, mutual_best
from matcher.match.sinkhorn import sinkhorn as solve
from matcher.onnx.extractor import OnnxExtractor
from matcher.onnx.matching import OnnxMatcher
from matcher.onnx.runtime import Model
from matcher.onnx.trained import Trained
from matcher.pipeline import Pipeline
from matcher.processes import child_command, child_environment
from matcher.sequence.capture import TrackingLog, read_poses
from matcher.sequence.frames import FrameResult, TrackIds
from matcher.sequence.keyframe_map import KeyframeMap
from matcher.sequence.tracker import Tracker
from matcher.sfm.reconstruct import DATABASE, reconstruct
from matcher.torch_engine import build_extractor
from matcher.types import Features, Image, Matches, TwoViewGeometry
from matcher.verify.adjustment import epipolar_distance, fundamental_from_pose

# --- collections: Benchmarks of collections: reconstructions against known poses and COLMAP's features;
# workers.


def measure_reconstruction(
    folder: Path, work: Path, options: Mapping[str, Any], *, threads: int = 1, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reconstruct one scene in four ways from equally many keypoints, and yield a title and metrics of each.

    With `reconstruct`; with pycolmap from the COLMAP export; with pycolmap from the hloc export, read as hloc
    does and verified by COLMAP; and with COLMAP's own SIFT and matcher. All pairs are matched.

    Args:
        folder: `images` of one camera, and `poses.json`: a list of `image` and `C`, the camera's centre (3).
        work: folder of runs and models; pairs that are matched there already are not matched again.
        options: of `Collection.open`, with `resize` and `max_keypoints`.
        threads: of COLMAP's mapper; with one thread the model is reproducible.
        seed: of COLMAP.

    Raises:
        UsageError: files are absent, or pycolmap or h5py is not installed.
    """
    pycolmap, photos = import_pycolmap(), folder / "images"
    ground_truth = _read_centres(folder / "poses.json")
    import_h5py()
    pycolmap.logging.minloglevel = pycolmap.logging.WARNING.value
    work.mkdir(parents=True, exist_ok=True)
    collection = Collection.open(work / "run", **options)
    collection.add_images(photos)
    collection.add_pairs(exhaustive=True)
    collection.run()
    for old in ("model", "hloc"):
        shutil.rmtree(work / old, ignore_errors=True)
    with collection.store as store:
        reconstruct(store, work / "model", threads=threads, seed=seed)
    model = pycolmap.Reconstruction(work / "model" / "sparse" / "0")
    yield "matcher sfm", _metrics(model, work / "model" / DATABASE, ground_truth)
    collection.export("colmap", work / "colmap.db")
    collection.export("hloc", work / "hloc")
    with pycolmap.Database.open(work / "model" / DATABASE) as database:
        (camera,) = database.read_all_cameras()
    database_from_hloc(work / "hloc", work / "hloc.db", camera)
    database_by_colmap(photos, work / "sift.db", options["max_keypoints"], options["resize"])
    for title, name in (
        ("export --to colmap, pycolmap", "colmap.db"),
        ("export --to hloc, h5py, pycolmap", "hloc.db"),
        ("COLMAP's SIFT and matcher", "sift.db"),
    ):
        mapping = pycolmap.IncrementalPipelineOptions(num_threads=threads, random_seed=seed)
        (work / "maps").mkdir(exist_ok=True)
        models = pycolmap.incremental_mapping(work / name, photos, work / "maps", mapping).values()
        yield title, _metrics(max(models, key=lambda one: one.num_reg_images()), work / name, ground_truth)


def database_from_hloc(folder: Path, path: Path, camera: Any) -> None:
    """A COLMAP database from hloc's files, as hloc makes it: half a pixel is added, and COLMAP verifies.

    Args:
        folder: with hloc's three files.
        path: of the database; an existing one is replaced.
        camera: of all images, a `pycolmap.Camera`.
    """
    pycolmap, h5py = import_pycolmap(), import_h5py()
    path.unlink(missing_ok=True)
    listed = [line.split() for line in (folder / PAIRS).read_text(encoding="utf-8").splitlines()]
    with (
        h5py.File(folder / FEATURES) as features,
        h5py.File(folder / MATCHES) as matches,
        pycolmap.Database.open(path) as database,
        pycolmap.DatabaseTransaction(database),
    ):
        camera_id, numbers = database.write_camera(camera), {}
        for name in sorted({name for pair in listed for name in pair}):
            numbers[name] = database.write_image(pycolmap.Image(name=name, camera_id=camera_id))
            points = features[name]["keypoints"][()].astype(np.float32) + np.float32(HALF_PIXEL)
            database.write_keypoints(numbers[name], points)
        for name0, name1 in listed:
            matches0 = matches[pair_key(name0, name1)]["matches0"][()]
            index0 = np.flatnonzero(matches0 >= 0)
            found = np.column_stack([index0, matches0[index0]]).astype(np.uint32)
            database.write_matches(numbers[name0], numbers[name1], found)
    pycolmap.geometric_verification(path)


def database_by_colmap(photos: Path, path: Path, max_keypoints: int, resize: int) -> None:
    """A database of COLMAP's own SIFT, its exhaustive matcher and its verification, with one camera."""
    pycolmap = import_pycolmap()
    path.unlink(missing_ok=True)
    pycolmap.set_random_seed(0)
    extraction = pycolmap.FeatureExtractionOptions()
    extraction.max_image_size = resize
    extraction.sift.max_num_features = max_keypoints
    mode = pycolmap.CameraMode.SINGLE
    pycolmap.extract_features(path, photos, camera_mode=mode, extraction_options=extraction)
    pycolmap.match_exhaustive(path)


def _read_centres(path: Path) -> dict[str, np.ndarray]:
    try:
        return {Path(row["image"]).name: np.array(row["C"], float) for row in json.loads(path.read_text())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a list of images and camera centres ({error})") from error


def _metrics(model: Any, database: Path, ground_truth: Mapping[str, np.ndarray]) -> dict[str, Any]:
    with import_pycolmap().Database.open(database) as features:
        images, keypoints = features.num_images(), features.num_keypoints()
    estimated = {image.name: image.projection_center() for image in model.images.values() if image.has_pose}
    names = sorted(set(estimated) & set(ground_truth))
    centres = np.array([ground_truth[name] for name in names])
    error = aligned(np.array([estimated[name] for name in names]), centres) - centres
    widest = np.linalg.norm(centres[:, None] - centres[None], axis=2).max()
    tracks = [point.track.elements for point in model.points3D.values()]
    lengths = np.array([len(track) for track in tracks])
    distinct = np.array([len({element.image_id for element in track}) for track in tracks])
    return {
        "registered": model.num_reg_images(),
        "images": images,
        "keypoints": keypoints / images,
        "points": len(lengths),
        "observations": int(lengths.sum()),
        "mean_track_length": float(lengths.mean()),  # as COLMAP counts: an image may be in a track twice
        "mean_images": float(distinct.mean()),
        "tracks_of": {str(n): int((distinct == n).sum()) for n in np.unique(distinct)},  # by number of images
        "mean_reprojection_error": model.compute_mean_reprojection_error(),  # stored pixels
        "worst_centre": float(np.linalg.norm(error, axis=1).max() / widest),  # of the largest distance
    }


def aligned(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Points (N, 3) after the similarity transform that best aligns them with `target` (Umeyama 1991)."""
    mean0, mean1 = points.mean(axis=0), target.mean(axis=0)
    centred0, centred1 = points - mean0, target - mean1
    u, d, vt = np.linalg.svd(centred1.T @ centred0)
    signs = np.array([1, 1, np.sign(np.linalg.det(u @ vt))])
    scale = (d * signs).sum() / np.square(centred0).sum()
    return scale * centred0 @ (u @ np.diag(signs) @ vt).T + mean1


def measure_workers(
    folder: Path,
    work: Path,
    options: Mapping[str, Any],
    arrangements: Mapping[str, Workers],
    *,
    neighbours: int = 12,
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure how fast pairs of a folder are matched from stored features, by processes and threads.

    Args:
        folder: of the images.
        work: folder of the runs; features that are stored there already are not extracted again.
        options: of `Collection.open`.
        arrangements: title → which processes, and how many threads each has.
        neighbours: number of images, following by name, that each image is matched with.

    Yields:
        A title, and `pairs`, `seconds` including the start of the workers, `pairs_per_second` over that time,
        and `steady`, the rate after the first commit (NaN if there was only one).
    """
    extracted = Collection.open(work / "features", workers=0, **options)
    extracted.add_images(folder)
    extracted.extract(everything=True)
    extracted.add_pairs(sequential=neighbours)
    for title, means in arrangements.items():
        run = work / "timed"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(work / "features", run)
        arguments = [str(folder), str(run), json.dumps(asdict(means)), json.dumps(dict(options))]
        command = child_command("matcher.benchmark.timed_run", *arguments)
        pipes = {"stdout": subprocess.PIPE, "text": True}
        ended = subprocess.run(command, env=child_environment(means.threads), **pipes, check=True)
        pairs, seconds, steady = map(float, ended.stdout.split())
        yield (
            title,
            {"pairs": pairs, "seconds": seconds, "pairs_per_second": pairs / seconds, "steady": steady},
        )


# --- network_rows: The rows of the benchmark that compare networks with other implementations, one function
# per row.

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


# --- preset_rows: The rows of the benchmark that measure the default preset on two images of one scene.

LONGER_SIDE = 1024


def enlarged(path: Path) -> np.ndarray:
    """An image enlarged to a longer side of twice `LONGER_SIDE`, enough for 2048 keypoints."""
    pixels = read_image(path, resize=2 * LONGER_SIDE).pixels
    factor = 2 * LONGER_SIDE / max(pixels.shape[:2])
    return cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)


@torch.inference_mode()
def last_scores(matcher: AttentionMatcher, features0: Features, features1: Features) -> Tensor:
    """Scores with dustbins (1, N+1, M+1) of the last head that a pair reaches."""
    model, batch = matcher.model, (Features.stack([features0]), Features.stack([features1]))
    for state in model.run(model.tokens(*batch)):
        if state.exiting:
            return model.scores(*state.tokens.sides, state.layer)
    raise ValueError("the network has no layers")


def sinkhorn(watch: Stopwatch, pipe: Pipeline, features: tuple[Features, Features]) -> Iterator[BenchmarkRow]:
    """Our Sinkhorn, with all iterations and with its stopping rule, against plain log-sum-exp iterations."""
    scores = last_scores(pipe.matcher, *features)
    limit, threshold = (
        pipe.config.matcher.assignment.max_iterations,
        pipe.config.matcher.policy.match_threshold,
    )
    calls = {
        f"all {limit} iterations": lambda: solve(scores, max_iterations=limit, tolerance=None),
        "default stop": lambda: solve(scores, max_iterations=limit),
        "naive": lambda: naive_sinkhorn(scores, limit),
    }
    with torch.inference_mode():
        u, v = calls["naive"]()
        log_plan = scores + u.unsqueeze(2) + v.unsqueeze(1)
        expected = _pairs(log_plan[0, :-1, :-1], threshold)
        found = {name: calls[name]() for name in list(calls)[:2]}
        times = watch.alternate(calls)
    for name, potentials in found.items():
        log_scores = potentials.log_plan(scores)[0, :-1, :-1]
        same = len(expected & _pairs(log_scores, threshold)) / max(len(expected), 1)
        yield BenchmarkRow(
            f"Sinkhorn {scores.shape[1] - 1}×{scores.shape[2] - 1}, {name}",
            f"{limit} plain iterations",
            times[name],
            times["naive"],
            note=f"{potentials.iterations[0]} iterations; {same:.2%} of {len(expected)} matches the same",
        )


def _pairs(log_scores: Tensor, threshold: float) -> set[tuple[int, int]]:
    best = (values[0].numpy() for values in mutual_best(log_scores[None].cpu()))
    return set(map(tuple, credible_matches(*best, threshold)[0].tolist()))


class LayerClock:
    """Measures the seconds that a call spends in the attention layers."""

    def __init__(self, matcher: AttentionMatcher, watch: Stopwatch) -> None:
        self.watch, self.seconds, self._start = watch, 0.0, 0.0
        for layer in matcher.model.layers:
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end)

    def _begin(self, *_: object) -> None:
        self.watch.synchronise()
        self._start = self.watch.clock()

    def _end(self, *_: object) -> None:
        self.watch.synchronise()
        self.seconds += self.watch.clock() - self._start


def adaptivity(watch: Stopwatch, features: tuple[Features, Features]) -> Iterator[BenchmarkRow]:
    """Early exit and pruning on, against off: the attention layers, and matching as a whole."""
    pipes = {"on": load(device=str(watch.device)), "off": load(device=str(watch.device), **OFF)}
    clocks = {name: LayerClock(pipe.matcher, watch) for name, pipe in pipes.items()}
    layers: dict[str, list[float]] = {name: [] for name in pipes}
    found: dict[str, Matches] = {}

    def run(name: str) -> None:
        clocks[name].seconds = 0.0
        found[name] = pipes[name].match_features(*features)
        layers[name].append(clocks[name].seconds)

    times = watch.alternate({name: lambda n=name: run(n) for name in pipes})
    context = {name: Samples(tuple(values[1:])) for name, values in layers.items()}  # the first warmed up
    on = found["on"]
    note = f"{on.layers_run} of {pipes['on'].layers} layers, {on.kept0} and {on.kept1} keypoints kept"
    counts = "×".join(str(len(f)) for f in features)
    work, off = f"of the default preset, {counts}", "early exit and pruning off"
    yield BenchmarkRow(f"attention layers {work}", off, context["on"], context["off"])
    yield BenchmarkRow(f"matching {work}", off, times["on"], times["off"], note=note)


def extraction(watch: Stopwatch, path: Path, size: tuple[int, int], points: int) -> Iterator[BenchmarkRow]:
    """Our learned front end against SIFT, on an image of `size` (width, height)."""
    image = image_from_array(cv2.resize(read_image(path).pixels, size, interpolation=cv2.INTER_AREA))
    sift = build_extractor(ExtractorConfig(max_keypoints=points))
    calls = {"SIFT": lambda: sift([image])}
    for precision in ("auto", "float32"):
        config = ExtractorConfig(kind="learned", max_keypoints=points)
        calls[precision] = partial(build_extractor(config, None, watch.device, precision), [image])
    counts = {name: len(call()[0]) for name, call in calls.items()}
    times = watch.alternate(calls)
    for name in ("auto", "float32"):
        yield BenchmarkRow(
            f"front end learned, {size[0]}×{size[1]}, {name}",
            "SIFT on the CPU",
            times[name],
            times["SIFT"],
            note=f"{counts[name]} and {counts['SIFT']} keypoints",
        )


def refinement(
    watch: Stopwatch, pipe: Pipeline, paths: tuple[Path, Path], most: int
) -> Iterator[BenchmarkRow]:
    """Refining at most so many matches of two images, pyramids included, beside the stage before it."""
    images = tuple(pipe.read(path) for path in paths)
    features = tuple(pipe.extract(image) for image in images)
    points = [found.keypoints.numpy() for found in features]
    matches = pipe.match_features(*features)
    matches = Matches.from_indices(matches.indices[:most], *points, matches.scores[:most])
    refined = pipe.refine(*images, matches).refinement.accepted
    times = watch.alternate(
        {
            "refine": lambda: pipe.refine(*images, matches),
            "match": lambda: pipe.match_features(*features),
        }
    )
    yield BenchmarkRow(
        f"refining {len(matches)} matches",
        f"matching {'×'.join(str(len(found)) for found in features)}, the stage before",
        times["refine"],
        times["match"],
        note=f"{int(refined.sum())} refined",
    )


def one_against_many(
    watch: Stopwatch, pipe: Pipeline, paths: tuple[Path, Path], many: int
) -> Iterator[BenchmarkRow]:
    """One image against many: from cached features, or from paths every time.

    The second image stands in for all the others. Each variant runs once after a warm-up with one pair; over
    that many calls the mean is stable.
    """
    first, other = (pipe.extract(path) for path in paths)
    calls = {
        "cached": lambda: pipe.match_features(first, other),
        "paths": lambda: pipe.match(*paths),
    }
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(many):
        for name, call in calls.items():
            times[name].append(watch.once(call))
    cached, fresh = (Samples((sum(values),)) for values in times.values())
    note = f"{fresh.median / many * 1e3:.1f} ms per pair from paths; all features extracted beforehand"
    name = f"1 image against {many}, {len(first)} keypoints, features cached"
    yield BenchmarkRow(name, f"{many} calls on paths", cached, fresh, note=note)


def stages(pipe: Pipeline, paths: tuple[Path, Path], repeats: int) -> dict[str, Samples]:
    """Seconds of each stage, and of the whole call, for matching two files that are in the file cache."""
    pipe.match(*paths)
    runs = []
    for _ in range(repeats):
        start = perf_counter()
        runs.append({**pipe.match(*paths).seconds, "call": perf_counter() - start})
    return {name: Samples(tuple(run[name] for run in runs)) for name in runs[0]}


# --- device_rows: The rows that measure the default preset on a device: extraction, matches, batches,
# memory.


def _features(pipe: Pipeline, images: tuple[Path, Path]) -> tuple[Features, ...]:
    return tuple(pipe.extract(enlarged(path)) for path in images)


def match_rows(watch: Stopwatch, images: tuple[Path, Path], points: int) -> Iterator[BenchmarkRow]:
    """A match of features on the processor, in precision "auto" against float32."""
    options = {"device": str(watch.device), "max_keypoints": points, "second_pass": False}
    pipes = {precision: load(precision=precision, **options) for precision in ("auto", "float32")}
    features = _features(load(resize=2048, **options), images)
    times = watch.alternate(
        {name: lambda p=pipe: p.match_features(*features) for name, pipe in pipes.items()}
    )
    counts = "×".join(str(len(each)) for each in features)
    found = len(pipes["auto"].match_features(*features))
    work = f"matching {counts} keypoints, default preset"
    note = f"{pipes['auto'].matcher.precision}; {found} matches"
    yield BenchmarkRow(work, "float32", times["auto"], times["float32"], note=note)


def batch_rows(
    watch: Stopwatch, images: tuple[Path, Path], points: int, sizes: tuple[int, ...]
) -> Iterator[BenchmarkRow]:
    """Batches of pairs of cached features, against as many single pairs, and the memory of the largest."""
    pipe = load(device=str(watch.device), max_keypoints=points, second_pass=False)
    features = _features(load(device=str(watch.device), max_keypoints=points, resize=2048), images)
    for size in sizes:
        pairs = [features] * size
        times = watch.alternate(
            {
                "batch": lambda p=pairs: pipe.match_features_batch(p),
                "singles": lambda p=pairs: [pipe.match_features(*pair) for pair in p],
            }
        )
        note = f"{size / times['batch'].median:.1f} pairs a second"
        work = f"{size} pairs of {points} keypoints in a batch, default preset"
        yield BenchmarkRow(work, "one by one", times["batch"], times["singles"], note=note)
    whole, one = (
        memory_above(lambda p=p: pipe.match_features_batch(p), watch.device) for p in (pairs, pairs[:1])
    )
    if whole is not None and one is not None:
        work = f"memory of {sizes[-1]} pairs of {points} keypoints in a batch"
        yield BenchmarkRow(work, "one pair", Samples((whole,)), Samples((one,)), unit="MiB")


def extraction_rows(
    watch: Stopwatch, path: Path, size: tuple[int, int], points: int, count: int
) -> Iterator[BenchmarkRow]:
    """`count` images at once against one by one; reading them is not measured."""
    pixels = cv2.resize(read_image(path).pixels, size, interpolation=cv2.INTER_AREA)
    image = image_from_array(pixels)
    extract = load(device=str(watch.device), max_keypoints=points).extractor
    times = watch.alternate(
        {
            "together": lambda: extract([image] * count),
            "apart": lambda: [extract([image]) for _ in range(count)],
        }
    )
    note = f"{count / times['together'].median:.1f} images a second"
    work = f"front end learned, {count} images of {size[0]}×{size[1]}, {points} keypoints"
    yield BenchmarkRow(work, "one by one", times["together"], times["apart"], note=note)


# --- growth_rows: The rows of the benchmark that show how cost grows: with keypoints, with images, and with
# stored pairs.

_SIDE_GROWTH_ROWS, _POINTS, _SIMILAR = (
    256,
    256,
    5,
)  # of small images: pixels, keypoints, images that each is paired with
_LARGEST = 8192  # pixels of an image with many keypoints: it is not made smaller
_MATCHES = 300  # of a pair that is stored


def fitted_power(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p for which cost = c · size^p fits best, by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def grown(
    work: str, unit: str, sizes: Sequence[int], costs: Sequence[Samples], kind: str = "ms"
) -> BenchmarkRow:
    """The row of the last of the sizes, of at least two."""
    medians = [cost.median for cost in costs]
    note = f"grows by the power {fitted_power(sizes[-2:], medians[-2:]):.2f}"
    if len(sizes) > 2:
        note += f"; {fitted_power(sizes, medians):.2f} since {sizes[0]}"
    return BenchmarkRow(
        f"{work}, {sizes[-1]} {unit}", f"{sizes[-2]} {unit}", costs[-1], costs[-2], unit=kind, note=note
    )


def keypoint_rows(watch: Stopwatch, paths: tuple[Path, Path], sizes: Sequence[int]) -> Iterator[BenchmarkRow]:
    """Matching pairs of ever more keypoints, all layers on all of them."""
    pipe = load(device=str(watch.device), max_keypoints=max(sizes), resize=_LARGEST, **OFF)
    whole = [pipe.extract(image) for image in _tiled(paths, max(sizes))]
    counts: list[int] = []
    times: list[Samples] = []
    for size in sizes:
        given = [features.select(torch.arange(min(size, len(features)))) for features in whole]
        count = min(map(len, given))
        if counts and count <= counts[-1]:
            return  # the images have no more
        counts.append(count)
        times += watch.alternate({"match": lambda g=given: pipe.match_features(*g)}).values()
        if len(counts) > 1:
            yield grown("matching, all layers", "keypoints", counts, times)


def _tiled(paths: tuple[Path, Path], points: int) -> list[np.ndarray]:
    """The two images beside and below themselves so often that enough keypoints are in them."""
    times, made = max(1, int(np.ceil((points / 1024) ** 0.5))), []
    for path in paths:
        pixels = read_image(path).pixels
        made.append(np.tile(pixels, (times, times, *[1] * (pixels.ndim - 2))))
    return made


def image_rows(watch: Stopwatch, paths: tuple[Path, ...], sizes: Sequence[int]) -> Iterator[BenchmarkRow]:
    """Collections of ever more small images: extracting, finding similar pairs, matching them."""
    stages: dict[str, list[Samples]] = {}
    for number, size in enumerate(sizes, start=1):
        with tempfile.TemporaryDirectory() as folder:
            for stage, seconds in _collection_seconds(watch, paths, Path(folder), size).items():
                stages.setdefault(stage, []).append(Samples((seconds,)))
        if number > 1:
            for stage, costs in stages.items():
                yield grown(stage, "images", sizes[:number], costs, "s")


def _collection_seconds(
    watch: Stopwatch, paths: tuple[Path, ...], folder: Path, size: int
) -> dict[str, float]:
    photos = folder / "photos"
    photos.mkdir()
    for number, pixels in enumerate(scenes(paths, size, _SIDE_GROWTH_ROWS)):
        cv2.imwrite(str(photos / f"{number:06d}.jpg"), pixels)
    options = {"device": str(watch.device), "max_keypoints": _POINTS, "workers": 0}
    opened = Collection.open(folder / "run", **options)
    opened.add_images(photos)
    return {
        "extracting": watch.once(lambda: opened.extract(everything=True)),
        f"finding {_SIMILAR} similar ones of each": watch.once(lambda: opened.add_pairs(similar=_SIMILAR)),
        "matching and verifying the pairs": watch.once(opened.run),
    }


class _Answers:
    """An engine that has matched everything already: what remains is the cost of the run itself."""

    crashes = 0

    def __init__(self, data: bytes) -> None:
        self._data, self._checksum = data, checksum(data)

    def run(self, jobs: Iterator[Job]) -> Iterator[Outcome | None]:
        """The same matches for every pair."""
        for job in jobs:
            assert isinstance(job, MatchJob)
            for image0, image1 in job.items:
                yield EncodedPair(image0, image1, 0.0, self._checksum, self._data)

    def close(self) -> None:
        """There is nothing to end."""


def stored_pair_rows(watch: Stopwatch, sizes: Sequence[int]) -> Iterator[BenchmarkRow]:
    """Entering, handing out and storing ever more pairs, and the size of the run on disk."""
    seconds, bytes_ = [], []
    data = _random_pair()
    for number, size in enumerate(sizes, start=1):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            seconds.append(Samples((watch.once(lambda r=run, n=size: _store_pairs(r, n, data)),)))
            bytes_.append(Samples((sum(file.stat().st_size for file in run.rglob("*") if file.is_file()),)))
        if number > 1:
            yield grown(f"storing pairs of {_MATCHES} matches", "pairs", sizes[:number], seconds, "s")
            yield grown("a run on disk", "pairs", sizes[:number], bytes_, "MiB")


def _store_pairs(run: Path, size: int, data: bytes) -> None:
    names = [f"{number:06d}.jpg" for number in range(int(np.ceil((2 * size) ** 0.5)) + 1)]
    settings: dict[str, Any] = {"preset": "nearest", "config": {"extractor": {"max_keypoints": _MATCHES}}}
    Store.create(run, settings).close()
    with Writer(run) as writer:
        with writer.transaction():
            writer.add_images(names)
        add_pairs(writer, islice(combinations(names, 2), size))
        runner.match(writer, _Answers(data), batch=1, on_progress=lambda _: None)


def _random_pair() -> bytes:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 640, (2, 2048, 2)).astype(np.float32)
    indices = np.stack([rng.permutation(2048)[:_MATCHES] for _ in range(2)], axis=1)
    scores = -np.sort(-rng.random(_MATCHES).astype(np.float32))
    matches = Matches.from_indices(indices, *points, scores)
    geometry = TwoViewGeometry("fundamental", "ok", rng.random(_MATCHES) < 0.7, rng.normal(size=(3, 3)))
    return encode_pair(matches, geometry, *points)


# --- kernel_rows: The rows of the benchmark that compare the kernels of every target that runs here with
# stock operators.

TRIALS = {
    "attention, bfloat16": try_half_attention,
    "attention, float32": try_attention,
    "feed-forward steps, bfloat16": try_half_rows,
    "feed-forward steps, float32": try_rows,
    "candidates": try_candidates,
    "maps, bfloat16": try_half_maps,
    "maps, float32": try_maps,
    "samples, bfloat16": try_half_samples,
    "samples, float32": try_samples,
    "peaks": try_peaks,
    "turns, bfloat16": try_half_turns,
    "turns, float32": try_turns,
    "absorption of potentials": try_absorb,
}


@contextmanager
def target(name: str) -> Iterator[None]:
    """While it is open, the kernels of that target are used, or none for "0"."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before


def kernel_rows(watch: Stopwatch) -> Iterator[BenchmarkRow]:
    """Every kind of kernel of every target whose library is there and runs here."""
    for name in supported():
        with target(name):
            if kernels() is None:
                continue  # not compiled: MATCHER_COMPILED=name python scripts/build_kernels.py
            for kind, make in TRIALS.items():
                tried = make()
                with torch.inference_mode():
                    if tried.kernel() is None:
                        continue  # not made for this target
                    times = watch.alternate({"kernel": tried.kernel, "stock": tried.stock})
                used = times["kernel"].minimum <= SLOWER * times["stock"].minimum
                note = "" if used else "left alone here"
                work, against = f"kernel {name}: {kind}", "stock operators"
                yield BenchmarkRow(work, against, times["kernel"], times["stock"], note=note)


# --- onnx_rows: The rows of the benchmark in ONNX Runtime: our files against torch, and against kornia's
# networks.

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


def lightglue_onnx_rows(watch: Stopwatch, points: int) -> Iterator[BenchmarkRow]:
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
            f"torch exports by {error.name}, which is not installed: {install_command(str(error.name))}"
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


# --- process_rows: The rows of the benchmark whose work runs in processes of its own: time and memory, ours
# and of others.

_PROGRAM = "matcher.benchmark.process_work"
_SHOWN = 1500  # characters of what a process that failed said


@dataclass(frozen=True)
class Measured:
    """What a process says of its work."""

    seconds: float  # or processor seconds
    peak_bytes: int
    result: Mapping[str, Any]


def measure_alone(name: str, options: Mapping[str, Any], *, threads: int, processor_time: bool) -> Measured:
    """Do the work of that name (`process_work.WORKS`) in a new process.

    Raises:
        MatcherError: it failed; the message has its last words.
    """
    command = child_command(_PROGRAM, name, json.dumps(dict(options)))
    ended = subprocess.run(command, env=child_environment(threads), capture_output=True, text=True)
    if ended.returncode:
        raise MatcherError(f"the benchmark's process for {name!r} failed:\n{ended.stderr[-_SHOWN:]}")
    said = json.loads(ended.stdout.splitlines()[-1])
    seconds = said["processor_seconds" if processor_time else "seconds"]
    return Measured(seconds, said["peak_bytes"], said["result"])


def alternate_processes(
    watch: Stopwatch, works: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[Measured]]:
    """Every work alternately, as often as the stopwatch says, each in an empty folder where it asks for one.

    Args:
        watch: with the number of repeats, and the seconds after which no new round starts.
        works: their names, and the options of each; `run` is replaced by the path of a new folder.
    """
    found: dict[str, list[Measured]] = {name: [] for name in works}
    start = perf_counter()
    for _ in range(watch.repeats):
        for name, options in works.items():
            with tempfile.TemporaryDirectory() as folder:
                given = {**options, **({"run": folder} if "run" in options else {})}
                means = {"threads": torch.get_num_threads(), "processor_time": watch.clock is process_time}
                found[name].append(measure_alone(name, given, **means))
        if perf_counter() - start > watch.seconds:
            break
    return found


def pair_memory_row(
    watch: Stopwatch, paths: tuple[Path, Path], size: tuple[int, int], points: int
) -> Iterator[BenchmarkRow]:
    """Peak memory of a process that matches a pair of arrays."""
    options = {"images": [str(path.absolute()) for path in paths], "size": size, "points": points}
    found = alternate_processes(watch, {"pair": options, "pair, OpenCV": options})
    yield _memory_row(f"pair of {size[0]}×{size[1]}, {points} keypoints", *found.values(), "OpenCV")


def collection_rows(watch: Stopwatch, photos: Path, points: int, kornia_pairs: int) -> Iterator[BenchmarkRow]:
    """A pair of a collection whose features are stored, against three others on as many keypoints.

    Args:
        watch: the clock and the repeats.
        photos: the folder of images; all pairs are matched.
        points: keypoints of an image.
        kornia_pairs: pairs that kornia's LightGlue matches, as it takes seconds for each.
    """
    folder, threads = str(photos), torch.get_num_threads()
    found = alternate_processes(
        watch,
        {
            "collection": {"folder": folder, "run": "", "points": points},
            "collection, kornia": {"points": points, "pairs": kornia_pairs},
            "collection, OpenCV": {"folder": folder, "points": points},
            "collection, COLMAP": {"folder": folder, "run": "", "points": points, "threads": threads},
        },
    )
    ours, pairs = found.pop("collection"), 0
    for (name, theirs), what in zip(
        found.items(),
        (
            "kornia's LightGlue, all 9 layers, not verified",
            "OpenCV: FLANN on SIFT, MAGSAC",
            "COLMAP: its matcher on SIFT, its verification",
        ),
        strict=True,
    ):
        pairs = ours[0].result["pairs"]
        work = f"a pair of {points} keypoints, of {pairs} of a collection, features stored"
        times = [Samples(tuple(m.seconds / m.result["pairs"] for m in side)) for side in (ours, theirs)]
        rates = " and ".join(f"{1 / time.median:.1f}" for time in times)
        yield BenchmarkRow(work, what, *times, note=f"{rates} pairs a second")
        yield _memory_row(f"a collection of {pairs} pairs", ours, theirs, name.split(", ")[1])


def sfm_rows(watch: Stopwatch, photos: Path) -> Iterator[BenchmarkRow]:
    """From photos to cameras and points, against COLMAP on its own SIFT, each with its defaults."""
    options = {"folder": str(photos), "run": "", "threads": torch.get_num_threads()}
    ours, theirs = alternate_processes(watch, {"sfm": options, "sfm, COLMAP": options}).values()
    times = [Samples(tuple(measured.seconds for measured in side)) for side in (ours, theirs)]
    said = "; ".join(
        f"{name}: {one.result['registered']} registered, {one.result['points']} points, tracks of "
        f"{one.result['track_length']:.2f}, {one.result['error']:.2f} px"
        for name, one in (("ours", ours[-1]), ("COLMAP", theirs[-1]))
    )
    work = f"`matcher sfm` of {len(find_images(photos))} photos"
    yield BenchmarkRow(work, "COLMAP on its own SIFT", *times, unit="s", note=said)
    yield _memory_row(work, ours, theirs, "COLMAP")


def _memory_row(work: str, ours: Sequence[Measured], theirs: Sequence[Measured], peer: str) -> BenchmarkRow:
    both = (Samples(tuple(measured.peak_bytes for measured in side)) for side in (ours, theirs))
    return BenchmarkRow(f"{work}: peak memory of the process", peer, *both, unit="MiB")


def copy_photos(photos: Path | None, images: tuple[Path, Path], folder: Path, count: int) -> Path:
    """A folder of so many images: the first photos by name, or views of two images where there are none.

    Raises:
        UsageError: fewer photos.
    """
    chosen = folder / "photos"
    chosen.mkdir()
    if photos is None:
        for number, pixels in enumerate(tilted_views(images, count)):
            cv2.imwrite(str(chosen / f"{number:02d}.png"), pixels[..., ::-1] if pixels.ndim == 3 else pixels)
        return chosen
    found = find_images(photos)[:count]
    if len(found) < count:
        raise UsageError(f"{photos} holds {len(found)} photos, and {count} are needed")
    for path in found:
        shutil.copy(path, chosen)
    return chosen


# --- whole_rows: The rows of the benchmark that measure a whole pair, from arrays and by the command line.


def pair_rows(
    watch: Stopwatch, paths: tuple[Path, Path], size: tuple[int, int], points: int
) -> Iterator[BenchmarkRow]:
    """Matching two images of `size` (width, height) from arrays, and two files by the command line."""
    images = [cv2.resize(read_image(path).pixels, size, interpolation=cv2.INTER_AREA) for path in paths]
    device = str(watch.device)
    pipes = {
        "default preset": load(device=device, max_keypoints=points),
        "default preset, one pass, not refined": load(
            device=device, max_keypoints=points, refine=False, second_pass=False
        ),
    }
    calls = {name: lambda p=pipe: p.match(*images) for name, pipe in pipes.items()}
    times = watch.alternate({**calls, "opencv": lambda: sift_matches(images, points)})
    for name in pipes:
        note = f"{len(pipes[name].match(*images).points0)} matches"
        work = f"pair of {size[0]}×{size[1]}, {points} keypoints, {name}"
        yield BenchmarkRow(work, "OpenCV: SIFT, FLANN, MAGSAC", times[name], times["opencv"], note=note)
    options = ["--max-keypoints", str(points), "--device", device]
    command = child_command("matcher", "match", *map(str, paths), *options)
    # Processor time is that of the command's process, not of this one, which waits for it.
    clock = _with_children if watch.clock is process_time else watch.clock
    again = replace(watch, clock=clock).alternate(
        {
            "command": lambda: subprocess.run(
                command, env=child_environment(), check=True, capture_output=True
            ),
            "call": lambda: pipes["default preset"].match(*paths),
        }
    )
    yield BenchmarkRow("`matcher match A B`", "the same call in a process", again["command"], again["call"])


def _with_children() -> float:
    """Processor seconds of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


# --- worker_rows: The rows of the benchmark that compare worker processes: one and two, of this package and
# of Ray.

_SIDE_WORKER_ROWS = 480  # pixels of an image
_ONE, _TWO, _RAY = "1 worker", "2 workers", "1 actor of Ray"


def worker_rows(paths: tuple[Path, ...], images: int, points: int, neighbours: int) -> Iterator[BenchmarkRow]:
    """Seconds a pair after the start, with features stored and one thread a process.

    Args:
        paths: of the images that views are made of.
        images: number of views.
        points: keypoints of a view.
        neighbours: views that each is matched with.
    """
    arrangements = {_ONE: Workers(count=1, threads=1), _TWO: Workers(count=2, threads=1)}
    if importlib.util.find_spec("ray") is not None:
        arrangements[_RAY] = Workers("ray", count=1, threads=1)
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        photos.mkdir()
        for number, pixels in enumerate(scenes(paths, images, _SIDE_WORKER_ROWS)):
            cv2.imwrite(str(photos / f"{number:03d}.png"), pixels)
        options = {"preset": "hybrid-learned", "device": "cpu", "max_keypoints": points}
        rows = measure_workers(photos, Path(folder) / "work", options, arrangements, neighbours=neighbours)
        measured = dict(rows)
    times = {name: Samples((1 / _rate(found),)) for name, found in measured.items()}
    for name in list(times)[1:]:
        more = times[name].median - times[_ONE].median
        note = f"{1 / times[name].median:.1f} and {1 / times[_ONE].median:.1f} pairs a second"
        if name == _RAY:
            note += f"; {1e3 * more:+.2f} ms a pair"
        work = f"a pair of {points} keypoints, {name}"
        yield BenchmarkRow(work, _ONE, times[name], times[_ONE], note=note)


def _rate(found: dict[str, float]) -> float:
    """Pairs a second, the start of the processes left out where there were enough pairs to tell."""
    return found["pairs_per_second"] if math.isnan(found["steady"]) else found["steady"]


# --- reconstructions: Reconstructions from our matches against those from COLMAP's own SIFT, by the same
# mapper.

MIN_IMAGES = 3  # of a model


def compare_reconstructions(
    photos: Path,
    folder: Path,
    presets: Sequence[str],
    *,
    one_camera: bool = False,
    threads: int = -1,
    max_deviation: float | None = None,
    camera_model: str = "SIMPLE_RADIAL",
    **options: Any,
) -> dict[str, dict[str, float]]:
    """The largest model of each kind of features: registered images, points, track length, error.

    Every pair is matched, and COLMAP's incremental mapper has its defaults; so has COLMAP's SIFT, with up to
    8192 keypoints an image.

    Args:
        photos: a folder of photos.
        folder: a new folder for runs and models.
        presets: each is measured as `matcher sfm` uses it.
        one_camera: all photos share one; else each has its own.
        threads: of COLMAP; -1: all.
        max_deviation: of `reconstruct`, for the presets.
        camera_model: of all cameras.
        options: those of `matcher.load`.

    Raises:
        UsageError: no model was found, or the folder is not new.
    """
    if folder.exists():
        raise UsageError(f"{folder} is there already; name a new folder")
    folder.mkdir(parents=True)
    found = {"COLMAP's SIFT": _by_sift(photos, folder / "sift", one_camera, camera_model, threads)}
    choice = CameraChoice(sharing="single" if one_camera else "each", model=camera_model)
    mapping = {"threads": threads, "min_images": MIN_IMAGES, "max_deviation": max_deviation}
    for preset in presets:
        collection = Collection.open(folder / preset, preset=preset, workers=0, **options)
        collection.add_images(photos)
        collection.add_pairs(exhaustive=True)
        collection.run()
        with Store.open(folder / preset) as store:
            out = folder / f"{preset} model"
            made = reconstruct(store, out, choice=choice, **mapping).largest
        found[preset] = {
            "registered": made.registered,
            "points": made.points,
            "track_length": made.mean_track_length,
            "reprojection_error": made.mean_reprojection_error,
        }
    return found


def _by_sift(
    photos: Path, folder: Path, one_camera: bool, camera_model: str, threads: int
) -> dict[str, float]:
    import pycolmap

    folder.mkdir()
    database, seed = str(folder / "database.db"), 0
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(seed)
    extraction, matching = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    extraction.num_threads = matching.num_threads = threads
    extraction.use_gpu = matching.use_gpu = False
    mode = pycolmap.CameraMode.SINGLE if one_camera else pycolmap.CameraMode.PER_IMAGE
    reader = pycolmap.ImageReaderOptions(camera_model=camera_model)
    pycolmap.extract_features(
        database, photos, camera_mode=mode, reader_options=reader, extraction_options=extraction
    )
    pycolmap.match_exhaustive(database, matching_options=matching)
    options = pycolmap.IncrementalPipelineOptions()
    options.num_threads, options.random_seed, options.min_model_size = threads, seed, MIN_IMAGES
    models = pycolmap.incremental_mapping(database, photos, folder, options)
    if not models:
        raise UsageError(f"COLMAP's SIFT leads to no model of {photos}")
    best = max(models.values(), key=lambda model: model.num_reg_images())
    return {
        "registered": best.num_reg_images(),
        "points": best.num_points3D(),
        "track_length": best.compute_mean_track_length(),
        "reprojection_error": best.compute_mean_reprojection_error(),
    }


# --- sequences: Benchmarks of sequences on data with ground truth: tracks, odometry, stereo depth, latency.

NEAR = 2.0  # pixels within which a match is correct
_NEAR_DEPTH = 30.0  # metres; depths are compared up to that distance
_EVERY = 5  # frames between those whose depths and plain matches are compared


def read_calibration(path: Path) -> tuple[Camera, float]:
    """Camera and baseline from two lines, the 3×4 projection matrices of a rectified pair (KITTI).

    Raises:
        UsageError: the file cannot be read or holds something else.
    """
    try:
        left, right = np.loadtxt(path).reshape(2, 3, 4)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not two projection matrices of 12 numbers ({error})") from error
    camera = Camera.from_K(left[:, :3])
    return camera, float(-right[0, 3] / right[0, 0])


def measure_driving(folder: Path, pipeline: Pipeline, *, frames: int | None = None) -> dict[str, Any]:
    """Odometry with two cameras and with one, tracks, links and depth.

    Args:
        folder: with image_l, image_r, calib.txt and poses.txt (KITTI).
        pipeline: the pipeline to measure.
        frames: number of frames, from the first; all by default.

    Returns:
        `stereo` and `mono`: segments (length, count, translation, rotation), poses, keyframes;
        `disparity_offset`, in pixels, estimated on the way (`Tracker.disparity_offset`);
        `mean_track_length` of tracks of two or more frames; `link_precision`, the share of links to the
        previous frame within 2 px of the true epipolar geometry; `row_precision`, the share of stereo points
        (including those of the guided search) within 2 px of the row; `stereo_points` per frame;
        `depth_difference`, the median relative difference from OpenCV's SGBM at depths below 30 m.

    Raises:
        UsageError: files that are absent or do not fit each other.
    """
    camera, baseline = read_calibration(folder / "calib.txt")
    _, ground_truth = read_poses(folder / "poses.txt")
    left, right = (sorted((folder / name).glob("*.png"))[:frames] for name in ("image_l", "image_r"))
    if len(left) < 2 or len(left) != len(right) or len(left) > len(ground_truth):
        raise UsageError(
            f"{folder}: image_l and image_r must have the same number of images, and "
            "poses.txt a pose for each"
        )
    stereo = Tracker(pipeline, camera, baseline=baseline)
    pairs = [stereo.push_stereo(*names) for names in zip(left, right, strict=True)]
    mono = Tracker(pipeline, camera)
    singles = [mono.push(name) for name in left]
    rows = np.concatenate([_row_errors(result) for result in pairs])
    return {
        "stereo": _odometry(pairs, ground_truth, with_scale=False),
        "disparity_offset": stereo.disparity_offset,
        "mono": _odometry(singles, ground_truth, with_scale=True),
        "mean_track_length": _logged(pairs).mean_track_length(),
        "link_precision": _link_precision(pairs, ground_truth, camera),
        "row_precision": float(np.mean(rows <= NEAR)),
        "stereo_points": len(rows) / len(pairs),
        "depth_difference": _against_sgbm(pairs, left, right, camera.fx * baseline),
    }


def measure_bare(folder: Path, pipeline: Pipeline, *, frames: int | None = None) -> dict[str, float]:
    """The matcher alone on the same images: no guided search and no keyframes.

    Returns:
        `mean_track_length` of tracks chained from frame to frame; of left/right matches of every fifth frame
        `row_precision` and their number, `stereo_points`; `row_precision_verified` of those that are inliers
        of one fundamental matrix.
    """
    left, right = (sorted((folder / name).glob("*.png"))[:frames] for name in ("image_l", "image_r"))
    tracks, lengths, rows, inliers = TrackIds(), Counter(), [], []
    previous, ids = None, np.zeros(0, np.int64)
    for index, name in enumerate(left):
        features = pipeline.extract(name)
        offers = []
        if previous is not None:
            offers = [(ids, pipeline.match_features(previous, features).indices)]
        ids, _ = tracks.extend(len(features), offers)
        tracks.forget(ids)
        lengths.update(ids.tolist())
        previous = features
        if index % _EVERY == 0:
            found = pipeline.match(name, right[index])
            rows.append(np.abs(found.points0 - found.points1)[:, 1])
            inliers.append(found.geometry.inliers)
    linked = [length for length in lengths.values() if length > 1]
    near, inliers = np.concatenate(rows) <= NEAR, np.concatenate(inliers)
    return {
        "mean_track_length": float(np.mean(linked)) if linked else 0.0,
        "row_precision": float(np.mean(near)) if len(near) else 0.0,
        "row_precision_verified": float(np.mean(near[inliers])) if inliers.any() else 0.0,
        "stereo_points": len(near) / len(rows),
    }


def measure_disparity(folder: Path, pipeline: Pipeline) -> dict[str, float]:
    """Left/right matching against a true disparity map, epipolar window off.

    Args:
        folder: with im2.png (left), im6.png (right) and disp2.pgm, four times the disparity, 0 unknown
            (Middlebury 2003).
        pipeline: the pipeline to measure.

    Returns:
        `matcher_matches`, `matcher_precision`: number of matches whose left point has a known disparity, and
        the share of them within 2 px of it; `tracker_points`, `tracker_precision`: the same for the stereo
        points of `Tracker.push_stereo`. Of these `tracker_contours` have a wrong disparity that is within 1
        px that of a pixel at most 2 px away, as points on the contour of something nearer do; without all
        points that have a farther one within 20 px `inner_points` and `inner_precision` are left.
    """
    ground_truth = cv2.imread(str(folder / "disp2.pgm"), cv2.IMREAD_GRAYSCALE)
    if ground_truth is None:
        raise UsageError(f"{folder / 'disp2.pgm'}: cannot be read")
    left, right = folder / "im2.png", folder / "im6.png"
    bare = pipeline.match(left, right)
    result = Tracker(pipeline).push_stereo(left, right)
    matched = np.isfinite(result.right[:, 0])
    table = {}
    for names, points0, points1 in (
        (("matcher_matches", "matcher_precision"), bare.points0, bare.points1),
        (("tracker_points", "tracker_precision"), result.keypoints[matched], result.right[matched]),
    ):
        x, y = np.rint(points0).astype(int).T
        height, width = ground_truth.shape
        disparity = ground_truth[y.clip(0, height - 1), x.clip(0, width - 1)] / 4.0
        known = disparity > 0
        expected = points0 - np.column_stack([disparity, np.zeros(len(points0))])
        right = np.linalg.norm(points1 - expected, axis=1) <= NEAR
        table |= {names[0]: int(known.sum()), names[1]: _share(right[known])}
    found = (points0 - points1)[:, 0]  # of the tracker
    wrong = known & ~right & _disparity_nearby(ground_truth / 4.0, points0, found)
    inner = known & ~_beside_farther(points0, found)
    return table | {
        "tracker_contours": int(wrong.sum()),
        "inner_points": int(inner.sum()),
        "inner_precision": _share(right[inner]),
    }


def _share(right: np.ndarray) -> float:
    return float(np.mean(right)) if len(right) else 0.0


def _disparity_nearby(ground_truth: np.ndarray, points: np.ndarray, found: np.ndarray) -> np.ndarray:
    """(K,) whether a pixel at most 2 px away has the disparity that was found, within 1 px."""
    padded = np.pad(ground_truth, 2)  # 0: unknown
    x, y = np.rint(points).astype(int).T
    height, width = ground_truth.shape
    x, y = x.clip(0, width - 1), y.clip(0, height - 1)
    around = np.stack([padded[y + j, x + i] for j in range(5) for i in range(5)], axis=1)
    return ((around > 0) & (np.abs(around - found[:, None]) <= 1)).any(axis=1)


def _beside_farther(points: np.ndarray, disparity: np.ndarray) -> np.ndarray:
    """(K,) whether a point within 20 px is farther by more than a slanted surface would make it."""
    distance = np.linalg.norm(points[:, None] - points, axis=2)
    return ((distance <= 20) & (disparity[:, None] - disparity > NEAR + 0.3 * distance)).any(axis=1)


def measure_latency(
    image: np.ndarray,
    pipeline: Pipeline,
    *,
    frames: int = 100,
    size: tuple[int, int] = (640, 480),
    budget_ms: float | None = None,
    map_folder: Path | None = None,
) -> dict[str, Any]:
    """Milliseconds of the stages over frames cut by a window that moves across an image.

    Args:
        image: (H, W[, 3]) uint8, larger than `size`.
        pipeline: the pipeline to measure.
        frames: number of frames; ten more are run first and not counted.
        size: (width, height) of a frame.
        budget_ms: as `Tracker` takes it.
        map_folder: where the keyframes are mapped meanwhile, with loops looked for in the background; new.

    Returns:
        stage → p50, p95, p99, max; under "choice" the settings that the budget led to; with `map_folder` also
        how many "loops" were known before the end.
    """
    warm = 10
    if image.shape[1] <= size[0] or image.shape[0] <= size[1]:
        raise UsageError(f"the image must be larger than a frame of {size[0]} x {size[1]} pixels")
    focal = float(size[0])
    camera = Camera(focal, focal, (size[0] - 1) / 2, (size[1] - 1) / 2, size)
    keyframes = None if map_folder is None else KeyframeMap(map_folder, camera, loops="background")
    tracker = Tracker(pipeline, camera, budget_ms=budget_ms, keyframe_map=keyframes)
    room = np.array([image.shape[1] - size[0], image.shape[0] - size[1]])
    for index in range(warm + frames):
        if index == warm:
            tracker.forget_latency()
        phase = np.array([np.sin(index / 17), np.sin(index / 23)])
        x, y = np.rint((phase + 1) / 2 * room).astype(int)
        tracker.push(np.ascontiguousarray(image[y : y + size[1], x : x + size[0]]))
    choice = tracker.choice
    found = {**tracker.latency(), "choice": None if choice is None else str(choice)}
    if keyframes is None:
        return found
    closed = keyframes.closed
    keyframes.close()
    return {**found, "loops": 0 if closed is None else len(closed.loops)}


def _logged(results: Sequence[FrameResult]) -> TrackingLog:
    log = TrackingLog()
    for result in results:
        log.add(result)
    return log


def _odometry(
    results: Sequence[FrameResult], ground_truth: np.ndarray, *, with_scale: bool
) -> dict[str, Any]:
    log = _logged(results)
    _, _, segments = log.compared_with(None, ground_truth, with_scale=with_scale)
    return {
        "segments": [asdict(segment) for segment in segments],
        "poses": len(log.trajectory()[0]),
        "keyframes": log.counts()["keyframes"],
    }


def _link_precision(results: Sequence[FrameResult], ground_truth: np.ndarray, camera: Camera) -> float:
    K = camera.K
    errors = []
    for result in results:
        links = result.to_previous
        if links is None:
            continue
        T = np.linalg.inv(ground_truth[result.index]) @ ground_truth[links.frame]
        indices = links.indices[links.consistent]
        earlier = results[links.frame].keypoints[indices[:, 0]].astype(np.float64)
        points = result.keypoints[indices[:, 1]].astype(np.float64)
        errors.append(epipolar_distance(earlier, points, fundamental_from_pose(K, K, T)))
    every = np.concatenate(errors)
    return float(np.mean(every <= NEAR)) if len(every) else 0.0


def _row_errors(result: FrameResult) -> np.ndarray:
    """(P,) pixels between the rows of the points that are matched in both images."""
    if result.right is None:
        return np.zeros(0)
    step = np.abs(result.keypoints - result.right)[:, 1]
    return step[np.isfinite(step)]


def _against_sgbm(
    results: Sequence[FrameResult], left: Sequence[Path], right: Sequence[Path], focal_baseline: float
) -> float:
    """Median |z / z_SGBM − 1| of every fifth frame's points nearer than 30 m with a depth in both."""
    block = 5
    matching = cv2.StereoSGBM_create(
        minDisparity=0,
        numDisparities=128,
        blockSize=block,
        P1=8 * block**2,
        P2=32 * block**2,
        disp12MaxDiff=1,
        uniquenessRatio=10,
        speckleWindowSize=100,
        speckleRange=2,
    )
    differences = []
    for result in results[::_EVERY]:
        pair = (cv2.imread(str(names[result.index]), cv2.IMREAD_GRAYSCALE) for names in (left, right))
        disparity = matching.compute(*pair).astype(np.float64) / 16
        x, y = np.rint(result.keypoints).astype(int).T
        dense = disparity[y.clip(0, disparity.shape[0] - 1), x.clip(0, disparity.shape[1] - 1)]
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = np.where(dense > 0, focal_baseline / dense, np.nan)
            measured = np.full(len(x), np.nan)
            if result.right is not None:
                step = (result.keypoints - result.right)[:, 0]
                measured = np.where(step > 0, focal_baseline / step, np.nan)
            near = np.isfinite(depth) & np.isfinite(measured) & (depth < _NEAR_DEPTH)
            differences.append(np.abs(measured[near] / depth[near] - 1))
    every = np.concatenate(differences)
    return float(np.median(every)) if len(every) else float("nan")
