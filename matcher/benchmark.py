"""Speed beside other implementations: calls that alternate in one process, medians, and their ratios.

Networks of kornia and transformers have random parameters, and ours the same ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from matcher.collection.collection import Collection
from matcher.errors import UsageError, install_command
from matcher.images import find_images, image_from_array, read_image
from matcher.kernels import SWITCH, kernels
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.processes import child_command, child_environment
from matcher.types import Features
from matcher.weights.conversion import import_checkpoint

SIZE = (1024, 768)  # of the images that random keypoints belong to
OFF = {"early_exit": False, "pruning": False}
Call = Callable[[], object]


@dataclass(frozen=True)
class Samples:
    """Measurements of one call."""

    values: tuple[float, ...]  # seconds, in the order of measuring

    @property
    def median(self) -> float:
        """The median value."""
        return median(self.values)


@dataclass(frozen=True)
class Stopwatch:
    """How calls are timed."""

    device: torch.device
    repeats: int = 5  # of every call, at most
    seconds: float = 40.0  # no new round starts after that
    clock: Callable[[], float] = perf_counter

    def once(self, call: Call) -> float:
        """Seconds of one call, including the work of the device."""
        self._synchronise()
        start = self.clock()
        call()
        self._synchronise()
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

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class BenchmarkRow:
    """A measurement of this package next to one of another implementation or setting."""

    work: str
    against: str
    ours: Samples
    theirs: Samples
    note: str = ""

    @property
    def ratio(self) -> float:
        """The ratio of the medians: above 1, ours is faster."""
        return self.theirs.median / self.ours.median if self.ours.median else float("inf")


@dataclass
class BenchmarkReport:
    """The machine and all measurements."""

    machine: dict[str, Any]
    rows: list[BenchmarkRow] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What rows are measured with."""

    watch: Stopwatch
    images: tuple[Path, Path]  # of one scene
    photos: Path | None  # a folder of photos of one place
    quick: bool  # small sizes

    @property
    def keypoints(self) -> int:
        """Of an image in rows of one size."""
        return 64 if self.quick else 1024

    @property
    def frame(self) -> tuple[int, int]:
        """Width and height of a frame."""
        return (64, 48) if self.quick else (640, 480)

    def load(self, preset: str = "hybrid-learned", **options: Any) -> Pipeline:
        """`matcher.load` on the benchmark's device."""
        return load(preset, **{"max_keypoints": self.keypoints, "device": str(self.watch.device)} | options)

    def pictures(self) -> list[np.ndarray]:
        """Both images as arrays of the size of a frame."""
        paths = self.images
        return [cv2.resize(read_image(p).pixels, self.frame, interpolation=cv2.INTER_AREA) for p in paths]

    def features(self, keypoints: int) -> list[Features]:
        """Those of both images, enlarged so that they have so many keypoints."""
        pipe = self.load(max_keypoints=keypoints, resize=2048)
        found = []
        for path in self.images:
            pixels = read_image(path).pixels
            factor = 2048 / max(pixels.shape[:2])
            large = cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)
            found.append(pipe.extract(large))
        return found

    def rows(
        self, works: Mapping[str, tuple[Call, str]], against: Mapping[str, Call]
    ) -> Iterator[BenchmarkRow]:
        """A row for each of our works (with its note) against each of the others, all in turns."""
        with torch.inference_mode():
            times = self.watch.alternate({**{name: call for name, (call, _) in works.items()}, **against})
        for name, (_, note) in works.items():
            for other in against:
                yield BenchmarkRow(name, other, times[name], times[other], note)


# Networks of others, and ours with their parameters


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module with random parameters in evaluation mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval().requires_grad_(False)


def kornia_lightglue() -> nn.Module:
    """kornia's LightGlue for SuperPoint, without early exit and pruning."""
    from kornia.feature.lightglue import LightGlue

    settings = {"depth_confidence": -1, "width_confidence": -1, "filter_threshold": 0.0}
    return seeded(lambda: LightGlue(features=None, **settings))


def published_names(network: nn.Module) -> dict[str, Tensor]:
    """The parameters of kornia's LightGlue under the names of the published files."""
    tensors = {}
    for name, value in network.state_dict().items():
        if name.startswith("transformers."):  # the published file has the block's name first
            layer, block, rest = name.removeprefix("transformers.").split(".", 2)
            name = f"{block}.{layer}.{rest}"
        if name != "confidence_thresholds":
            tensors[name] = value
    return tensors


def with_parameters(tensors: Mapping[str, Tensor], preset: str, **options: Any) -> Pipeline:
    """Our pipeline of a preset with the parameters of a reference, given under their published names.

    The match threshold is 0, as in the references: random parameters give low match probabilities.
    """
    with tempfile.TemporaryDirectory() as folder:
        published, weights = Path(folder, "published.pth"), Path(folder, "ours.safetensors")
        torch.save(dict(tensors), published)
        import_checkpoint(published, preset, weights)
        return load(preset, weights=weights, match_threshold=0.0, **options)


def random_batch(count: int, batch: int, device: torch.device, seed: int = 0) -> Features:
    """`batch` images of `count` uniformly random keypoints with random unit descriptors, as SuperPoint's."""
    rng, images = np.random.default_rng([seed, count]), []
    for _ in range(batch):
        descriptors = rng.normal(size=(count, 256))
        descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
        features = Features(
            keypoints=(rng.random((count, 2)) * (np.array(SIZE) - 1)).astype(np.float32),
            descriptors=descriptors.astype(np.float32),
            scores=rng.random(count).astype(np.float32),
            size=np.array(SIZE, np.float32),
            kind="superpoint",
        )
        images.append(features)
    return Features.stack(images).to(device)


def as_kornia(*sides: Features) -> dict[str, dict[str, Tensor]]:
    """Two batches as kornia's LightGlue expects them."""
    return {
        f"image{i}": {"keypoints": s.keypoints, "descriptors": s.descriptors, "image_size": s.size}
        for i, s in enumerate(sides)
    }


def without_kernels(call: Call) -> object:
    """The result of a call with the compiled kernels switched off."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        return call()
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


def sift_matches(images: list[np.ndarray], points: int) -> int:
    """The matches of two images by OpenCV: SIFT, FLANN with Lowe's ratio test, MAGSAC."""
    sift = cv2.SIFT_create(points)
    return _verified(*(sift.detectAndCompute(image, None) for image in images))


def _verified(side0: tuple[Any, Any], side1: tuple[Any, Any]) -> int:
    (keypoints0, descriptors0), (keypoints1, descriptors1) = side0, side1
    if descriptors0 is None or descriptors1 is None:
        return 0
    both = cv2.FlannBasedMatcher().knnMatch(descriptors0, descriptors1, k=2)
    good = [pair[0] for pair in both if len(pair) == 2 and pair[0].distance < 0.8 * pair[1].distance]
    if len(good) >= 8:
        points = [[keypoints0[m.queryIdx].pt for m in good], [keypoints1[m.trainIdx].pt for m in good]]
        cv2.findFundamentalMat(*map(np.array, points), cv2.USAC_MAGSAC, 1.0, 0.999)
    return len(good)


# The rows: of networks


def lightglue(bench: Bench, points: int, batch: int = 1) -> Iterator[BenchmarkRow]:
    """LightGlue's architecture (9 layers of 256) in precision "auto" and in float32, against kornia."""
    device = bench.watch.device
    peer = kornia_lightglue().to(device)
    tensors, sides = published_names(peer), [random_batch(points, batch, device, seed) for seed in (0, 1)]
    data, works = as_kornia(*sides), {}
    for precision in ("auto", "float32"):
        options = {"device": str(device), "precision": precision, **OFF}
        network = with_parameters(tensors, "lightglue-superpoint", **options).matcher
        name = f"LightGlue architecture, {batch} × {points} points, {network.precision}"
        works[name] = (lambda n=network: n(*sides), "")
        if device.type == "cpu" and kernels() is not None:
            works[f"{name}, no kernels"] = (lambda n=network: without_kernels(lambda: n(*sides)), "")
    for row in bench.rows(works, {"kornia, float32": lambda: peer(data)}):
        yield replace(row, note=f"{batch / row.ours.median:.1f} pairs/s")


def superglue(bench: Bench) -> Iterator[BenchmarkRow]:
    """SuperGlue's architecture with as many Sinkhorn iterations, against transformers.

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
    device, points = bench.watch.device, 2 * bench.keypoints
    config = SuperGlueConfig(matching_threshold=0.0)
    peer = seeded(lambda: SuperGlueForKeypointMatching(config)).to(device)
    tensors = {k: v for k, v in peer.state_dict().items() if not k.startswith("keypoint_detector.")}
    network = with_parameters(tensors, "superglue-outdoor", device=str(device)).matcher
    sides = [random_batch(points, 1, device, seed) for seed in (0, 1)]
    names = ("keypoints", "descriptors", "scores", "mask")
    keypoints, descriptors, scores, mask = (torch.stack([getattr(s, n) for s in sides], 1) for n in names)

    def theirs() -> object:
        size = (SIZE[1], SIZE[0])
        return peer._match_image_pair(keypoints, descriptors, scores, *size, mask=mask.int())

    work = f"SuperGlue architecture, {points} points, {network.precision}"
    yield from bench.rows({work: (lambda: network(*sides), "")}, {"transformers, float32": theirs})


def loftr(bench: Bench) -> Iterator[BenchmarkRow]:
    """LoFTR from pixels to matches, including the backbone, against kornia."""
    from kornia.feature.loftr.loftr import LoFTR, default_cfg

    device, (width, height) = bench.watch.device, bench.frame
    config = {
        **default_cfg,
        "coarse": {**default_cfg["coarse"], "temp_bug_fix": False},
        "match_coarse": {**default_cfg["match_coarse"], "thr": 0.0},
    }
    peer = seeded(lambda: LoFTR(pretrained=None, config=config)).to(device)
    pipe = with_parameters(dict(peer.state_dict()), "loftr-outdoor", device=str(device))
    pixels = []
    for seed in (0, 1):
        noise = np.random.default_rng(seed).standard_normal((height, width))
        pixels.append(cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 2.0), None, 0, 255, cv2.NORM_MINMAX))
    images = [image_from_array(noise.astype(np.uint8)) for noise in pixels]
    grey = [torch.from_numpy(noise.astype(np.float32))[None, None].to(device) / 255 for noise in pixels]
    data = dict(zip(("image0", "image1"), grey, strict=True))

    def ours() -> object:
        return pipe.matcher(*(Features.stack([found]) for found in pipe.extractor(images)))

    work = f"LoFTR, {width}×{height}, {pipe.matcher.precision}"
    yield from bench.rows({work: (ours, "")}, {"kornia, float32": lambda: peer(data)})


# The rows: of the default preset


def extraction(bench: Bench) -> Iterator[BenchmarkRow]:
    """Our learned front end on one image, against SIFT, and on several images at once."""
    image = image_from_array(bench.pictures()[0])
    sift, works = bench.load("nearest", device="cpu").extractor, {}
    for precision in ("auto", "float32"):
        extract = bench.load(precision=precision).extractor
        name = f"front end learned, {'×'.join(map(str, bench.frame))}, {precision}"
        works[name] = (lambda e=extract: e([image]), f"{len(extract([image])[0])} keypoints")
    yield from bench.rows(works, {"SIFT on the CPU": lambda: sift([image])})
    extract, count = bench.load().extractor, 2 if bench.quick else 8
    work = {f"front end learned, {count} images at once": (lambda: extract([image] * count), "")}
    yield from bench.rows(work, {"one by one": lambda: [extract([image]) for _ in range(count)]})


def presets(bench: Bench) -> Iterator[BenchmarkRow]:
    """A pair of images from arrays by presets, all passes and one, against OpenCV; and the command."""
    images, works = bench.pictures(), {}
    pipes = {
        "default preset": bench.load(),
        "default preset, one pass": bench.load(further_passes=False),
        "default preset, one pass, not refined": bench.load(further_passes=False, refine=False),
        "nearest-learned": bench.load("nearest-learned"),
        "nearest": bench.load("nearest", device="cpu"),
    }
    for name, pipe in pipes.items():
        work = f"pair of {'×'.join(map(str, bench.frame))}, {bench.keypoints} keypoints, {name}"
        works[work] = (lambda p=pipe: p.match(*images), f"{len(pipe.match(*images).points0)} matches")
    peer = {"OpenCV: SIFT, FLANN, MAGSAC": lambda: sift_matches(images, bench.keypoints)}
    yield from bench.rows(works, peer)
    options = ["--max-keypoints", str(bench.keypoints), "--device", str(bench.watch.device)]
    command = child_command("matcher", "match", *map(str, bench.images), *options)

    def run() -> None:
        subprocess.run(command, env=child_environment(), check=True, capture_output=True)

    if bench.watch.clock is process_time:  # that of the command's process, not of this one, which waits
        bench = replace(bench, watch=replace(bench.watch, clock=lambda: sum(os.times()[:4])))
    calls = {"the same call in a process": lambda: pipes["default preset"].match(*bench.images)}
    yield from bench.rows({"`matcher match A B`": (run, "")}, calls)


def matching(bench: Bench, points: int) -> Iterator[BenchmarkRow]:
    """The default network on features: "auto" against float32, full depth and no kernels."""
    features = bench.features(points)
    options = {"max_keypoints": points, "further_passes": False}
    pipe = bench.load(**options)
    found = pipe.match_features(*features)
    others = {
        "float32": bench.load(precision="float32", **options),
        "early exit and pruning off": bench.load(**OFF, **options),
    }
    calls: dict[str, Call] = {name: lambda p=p: p.match_features(*features) for name, p in others.items()}
    if bench.watch.device.type == "cpu" and kernels() is not None:
        calls["no kernels"] = lambda: without_kernels(lambda: pipe.match_features(*features))
    counts = "×".join(str(len(each)) for each in features)
    note = f"{pipe.matcher.precision}; {len(found)} matches; {found.layers_run} of {pipe.layers} layers"
    work = f"matching {counts} keypoints, default preset"
    yield from bench.rows({work: (lambda: pipe.match_features(*features), note)}, calls)


def batches(bench: Bench) -> Iterator[BenchmarkRow]:
    """Pairs of cached features in a batch against one by one, and against reading and extracting again."""
    features = bench.features(bench.keypoints)
    pipe = bench.load(further_passes=False)
    for size in (2,) if bench.quick else (8, 32):
        pairs = [features] * size
        calls = {"one by one": lambda p=pairs: [pipe.match_features(*pair) for pair in p]}
        work = f"{size} pairs of {bench.keypoints} keypoints in a batch, default preset"
        for row in bench.rows({work: (lambda p=pairs: pipe.match_features_batch(p), "")}, calls):
            yield replace(row, note=f"{size / row.ours.median:.1f} pairs a second")
    cached = [pipe.extract(path) for path in bench.images]
    work = f"a pair of {len(cached[0])} keypoints, features cached"
    calls = {"from paths": lambda: pipe.match(*bench.images)}
    yield from bench.rows({work: (lambda: pipe.match_features(*cached), "")}, calls)


def refinement(bench: Bench) -> Iterator[BenchmarkRow]:
    """Refining the matches of two images, beside matching them."""
    pipe = bench.load(further_passes=False)
    images = [pipe.read(path) for path in bench.images]
    features = [pipe.extract(image) for image in images]
    matches = pipe.match_features(*features)
    work = {f"refining {len(matches)} matches": (lambda: pipe.refine(*images, matches), "")}
    yield from bench.rows(work, {"matching them": lambda: pipe.match_features(*features)})


def onnx(bench: Bench, points: int) -> Iterator[BenchmarkRow]:
    """The default preset in ONNX Runtime in one pass, against torch in float32 with and without kernels."""
    options = {"precision": "float32", "further_passes": False, "refine": False, "resize": 2048}
    ours, torch_ours = (bench.load(engine=e, max_keypoints=points, **options) for e in ("onnx", "torch"))
    features = bench.features(points)
    image = image_from_array(bench.pictures()[0])
    for name, call in {
        f"matcher alone, {points} points": lambda pipe: pipe.match_features(*features),
        f"images to matches, {points} points": lambda pipe: pipe.match(*bench.images),
        f"front end, {'×'.join(map(str, bench.frame))}": lambda pipe: pipe.extractor([image]),
    }.items():
        calls = {
            "torch, float32": lambda c=call: c(torch_ours),
            "the same without kernels": lambda c=call: without_kernels(lambda: c(torch_ours)),
        }
        yield from bench.rows({f"ONNX Runtime: {name}": (lambda c=call: c(ours), "")}, calls)


# The rows: of whole collections


def collection(bench: Bench) -> Iterator[BenchmarkRow]:
    """All pairs of stored features, matched, verified and stored, against two workers, OpenCV and COLMAP."""
    folder, points = _needed_photos(bench), 2 * bench.keypoints
    count = len(paths := find_images(folder))
    sift = cv2.SIFT_create(points)
    found = [sift.detectAndCompute(read_image(path, resize=1024).pixels, None) for path in paths]
    with tempfile.TemporaryDirectory() as root:
        options = {"max_keypoints": points, "device": str(bench.watch.device)}

        def opened(run: Path, workers: int) -> Collection:
            made = Collection.open(run, workers=workers, **options)
            made.add_images(folder)
            return made

        first = opened(Path(root, "extracted"), 0)
        first.extract(everything=True)
        first.add_pairs(exhaustive=True)
        ready: dict[int, list[Collection]] = {0: [], 2: []}
        for number in range(bench.watch.repeats + 1):  # a run can be matched once
            for workers, made in ready.items():
                run = Path(root, f"run{workers}-{number}")
                shutil.copytree(Path(root, "extracted"), run)
                made.append(opened(run, workers))
        calls: dict[str, Call] = {
            "two workers, started": lambda: ready[2].pop().run(),
            "OpenCV: FLANN on SIFT, MAGSAC": lambda: [_verified(*pair) for pair in combinations(found, 2)],
            "COLMAP: its matcher on SIFT, its verification": _colmap_matching(folder, Path(root), points),
        }
        pairs = count * (count - 1) // 2
        work = f"{pairs} pairs of {points} keypoints of a collection, features stored"
        for row in bench.rows({work: (lambda: ready[0].pop().run(), "")}, calls):
            rates = " and ".join(f"{pairs / side.median:.1f}" for side in (row.ours, row.theirs))
            yield replace(row, note=f"{rates} pairs a second")


def sfm(bench: Bench) -> Iterator[BenchmarkRow]:
    """From photos to cameras and points, against COLMAP on its own SIFT, each with its defaults."""
    from matcher.sfm.reconstruct import reconstruct

    folder, said = _needed_photos(bench), {}

    def ours() -> None:
        with tempfile.TemporaryDirectory() as root:
            made = Collection.open(Path(root, "run"), workers=0)
            made.add_images(folder)
            made.add_pairs(exhaustive=True)
            made.run()
            with made.store as store:
                best = reconstruct(store, Path(root, "model"), threads=torch.get_num_threads()).largest
            said["ours"] = (best.registered, best.points, best.mean_reprojection_error)

    def theirs() -> None:
        with tempfile.TemporaryDirectory() as root:
            _colmap_matching(folder, Path(root), None)()
            best = colmap_model(folder, Path(root))
            values = best.num_reg_images(), best.num_points3D(), best.compute_mean_reprojection_error()
            said["COLMAP"] = values

    work = f"`matcher sfm` of {len(find_images(folder))} photos"
    for row in bench.rows({work: (ours, "")}, {"COLMAP on its own SIFT": theirs}):
        notes = [f"{name}: {n} registered, {p} points, {e:.2f} px" for name, (n, p, e) in said.items()]
        yield replace(row, note="; ".join(notes))


def _needed_photos(bench: Bench) -> Path:
    if bench.photos is None:
        raise UsageError("this row needs a folder of photos of one place: name it (photos)")
    return bench.photos


def _colmap_matching(folder: Path, root: Path, points: int | None) -> Call:
    """Matching and verifying all pairs by COLMAP; with a number of keypoints its SIFT has run before."""
    from matcher.export.colmap import import_pycolmap

    pycolmap, numbers = import_pycolmap(), iter(range(1000))
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(0)
    extraction, matching = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    for each in (extraction, matching):
        each.num_threads, each.use_gpu = torch.get_num_threads(), False

    def extract(database: Path) -> Path:
        pycolmap.extract_features(database, folder, extraction_options=extraction)
        return database

    if points is None:
        return lambda: pycolmap.match_exhaustive(extract(root / "sift.db"), matching_options=matching)
    extraction.sift.max_num_features, extraction.max_image_size = points, 1024
    data = extract(root / "extracted.db").read_bytes()

    def match() -> None:
        database = root / f"matched{next(numbers)}.db"
        database.write_bytes(data)
        pycolmap.match_exhaustive(database, matching_options=matching)

    return match


def colmap_model(folder: Path, root: Path) -> Any:
    """The largest model that COLMAP's mapper makes of `sift.db` in a folder."""
    import pycolmap

    options = pycolmap.IncrementalPipelineOptions(
        num_threads=torch.get_num_threads(), random_seed=0, min_model_size=3
    )
    models = pycolmap.incremental_mapping(root / "sift.db", folder, root, options).values()
    return max(models, key=lambda model: model.num_reg_images(), default=pycolmap.Reconstruction())


# The benchmark


def _plan(bench: Bench) -> Iterator[tuple[str, Callable[[], Iterator[BenchmarkRow]]]]:
    """Names of rows, each with a function that measures them."""
    cuda = bench.watch.device.type == "cuda"
    sizes = (64,) if bench.quick else (512, 1024, 2048)
    for points in sizes:
        yield f"lightglue {points}", lambda n=points: lightglue(bench, n)
        if cuda:
            many = 2 if bench.quick else 32
            yield f"lightglue {points} batch {many}", lambda n=points, b=many: lightglue(bench, n, b)
    for name, measure in {
        "superglue": superglue,
        "loftr": loftr,
        "extraction": extraction,
        "presets": presets,
        "batches": batches,
        "refinement": refinement,
    }.items():
        yield name, lambda m=measure: m(bench)
    for points in sizes:
        yield f"matching {points}", lambda n=points: matching(bench, n)
        if not cuda:
            yield f"onnx {points}", lambda n=points: onnx(bench, n)
    yield "collection", lambda: collection(bench)
    yield "sfm", lambda: sfm(bench)


SLOW = ("onnx", "collection", "sfm")  # rows of minutes, which run only if they are named


def run_benchmark(
    watch: Stopwatch,
    images: tuple[Path, Path],
    *,
    quick: bool = False,
    only: str | None = None,
    photos: Path | None = None,
    progress: Callable[[str], object] | None = None,
) -> BenchmarkReport:
    """Run the benchmark.

    Args:
        watch: the device, and how often and for how long rows are repeated.
        images: two image files of one scene.
        quick: small sizes and few repeats, to check that every row runs.
        only: run the rows whose name contains this text; those of `SLOW` run only so.
        photos: a folder of photos of one place, for collections and reconstructions.
        progress: called with each line of the table as soon as it is measured.

    Raises:
        UsageError: a package to compare with is not installed, or the rows need photos and there are none.
    """
    if quick:
        watch = replace(watch, repeats=min(watch.repeats, 2))
    if watch.device.type == "cuda":  # a short loan of a machine is enough for the whole table
        watch = replace(watch, seconds=min(watch.seconds, 6.0))
    report, say = BenchmarkReport(describe_machine(watch.device)), progress or (lambda line: None)
    said = "{processor}, {cores} cores, {threads} threads; device {device}; torch {torch}; kernels {kernels}"
    head = "| work | against | ours: min / median / max, ms | theirs | ratio | |"
    for line in (said.format(**report.machine), "", head, "|---|---|---|---|---|---|"):
        say(line)
    for name, measure in _plan(Bench(watch, images, photos, quick)):
        if name.startswith(SLOW) if only is None else only.lower() not in name:
            continue
        try:
            for row in measure():
                report.rows.append(row)
                say(format_row(row))
        except torch.OutOfMemoryError:  # of a GPU; the other rows may fit
            say(f"| {name} | | the memory of this device is too small for it | | | |")
            torch.cuda.empty_cache()
    return report


def describe_machine(device: torch.device) -> dict[str, Any]:
    """This machine, as far as the operating system describes it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "kernels": "off" if kernels() is None else "on",
    }


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        UsageError: neither cpu nor cuda, or no CUDA device here.
    """
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"the benchmark runs on cpu or cuda, not on {name}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device here; use --device cpu")
    return device


def format_row(row: BenchmarkRow) -> str:
    """A row of the Markdown table."""
    ours, theirs = (
        " / ".join(f"{1e3 * value:.1f}" for value in (min(s.values), s.median, max(s.values)))
        for s in (row.ours, row.theirs)
    )
    return f"| {row.work} | {row.against} | {ours} | {theirs} | {row.ratio:.2f} | {row.note} |"


def to_json(report: BenchmarkReport) -> dict[str, Any]:
    """The report as plain data; times in seconds."""
    rows = [{**asdict(row), "ratio": row.ratio} for row in report.rows]
    return {"machine": report.machine, "rows": rows}
