"""Measure the speed of matching beside other implementations, networks with the same parameters.

    python scripts/benchmark.py [--threads 2] [--device cuda] [--quick] [--only lightglue] [--json FILE]

Times are medians of calls that alternate in one process. --only collection needs pycolmap, and minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, count
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from matcher.collection.collection import Collection
from matcher.errors import MatcherError, UsageError, check_number
from matcher.files import check_output
from matcher.images import data_folder, find_images, read_image
from matcher.kernels.loader import kernels
from matcher.loading import load
from matcher.pipeline import Pipeline
from matcher.torch_engine import resolve_device
from matcher.types import Features
from matcher.weights.published import import_checkpoint

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SIZE = (1024, 768)  # of the images that random keypoints belong to
OFF = {"early_exit": False, "pruning": False}
Call = Callable[[], object]


@dataclass(frozen=True)
class BenchmarkRow:
    """A measurement of this package next to one of another implementation or setting."""

    work: str
    against: str
    ours: tuple[float, ...]  # seconds, in the order of measuring
    theirs: tuple[float, ...]
    note: str = ""

    @property
    def ratio(self) -> float:
        """The ratio of the medians: above 1, ours is faster."""
        return median(self.theirs) / median(self.ours)

    def __str__(self) -> str:
        """A row of the Markdown table: minimum, median and maximum in milliseconds."""
        cells = (
            " / ".join(f"{1e3 * value:.1f}" for value in (min(side), median(side), max(side)))
            for side in (self.ours, self.theirs)
        )
        return f"| {self.work} | {self.against} | {' | '.join(cells)} | {self.ratio:.2f} | {self.note} |"


@dataclass(frozen=True)
class Bench:
    """What rows are measured with."""

    device: torch.device
    images: tuple[Path, Path]  # of one scene
    photos: Path | None = None  # a folder of photos of one place, for collections
    quick: bool = False  # small sizes, to check that every row runs
    repeats: int = 5  # of every call, at most
    seconds: float = 40.0  # no new round starts after that
    clock: Callable[[], float] = perf_counter
    keypoints: int = 1024  # of an image in rows of one size
    frame: tuple[int, int] = (640, 480)  # width and height

    def load(self, preset: str = "hybrid-learned", **options: Any) -> Pipeline:
        """`matcher.load` on the benchmark's device."""
        return load(preset, **{"max_keypoints": self.keypoints, "device": str(self.device)} | options)

    def pictures(self) -> list[np.ndarray]:
        """Both images as arrays of the size of a frame."""
        both = (read_image(path).pixels for path in self.images)
        return [cv2.resize(pixels, self.frame, interpolation=cv2.INTER_AREA) for pixels in both]

    def features(self, keypoints: int) -> list[Features]:
        """Those of both images, enlarged so that they have so many keypoints."""
        pipe, images = self.load(max_keypoints=keypoints, resize=2048), map(read_image, self.images)
        return [pipe.extract(image.resized(2048 / max(image.pixels.shape[:2])).pixels) for image in images]

    def alternate(self, calls: Mapping[str, Call]) -> dict[str, tuple[float, ...]]:
        """Seconds of every call, the device's work included, once it has run as a warm-up: all alternately,
        `repeats` times or for `seconds`."""
        synchronise = getattr(torch, self.device.type).synchronize

        def once(call: Call) -> float:
            synchronise()
            start = self.clock()
            call()
            synchronise()
            return self.clock() - start

        found: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            once(call)
        start = perf_counter()
        for _ in range(self.repeats):
            for name, call in calls.items():
                found[name].append(once(call))
            if perf_counter() - start > self.seconds:
                break
        return {name: tuple(values) for name, values in found.items()}

    def rows(
        self, works: Mapping[str, tuple[Call, str]], against: Mapping[str, Call]
    ) -> Iterator[BenchmarkRow]:
        """A row for each of our works (with its note) against each of the others, all in turns."""
        with torch.inference_mode():
            times = self.alternate({name: call for name, (call, _) in works.items()} | against)
        for name, (_, note) in works.items():
            for other in against:
                yield BenchmarkRow(name, other, times[name], times[other], note)


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


def with_parameters(tensors: Mapping[str, Tensor], preset: str, **options: Any) -> Pipeline:
    """Our pipeline of a preset with the parameters of a reference, given under names of a published layout.

    The match threshold is 0, as in the references: random parameters give low match probabilities.
    """
    with tempfile.TemporaryDirectory() as folder:
        published, weights = Path(folder, "published.pth"), Path(folder, "ours.safetensors")
        torch.save(dict(tensors), published)
        import_checkpoint(published, preset, weights)
        return load(preset, weights=weights, match_threshold=0.0, **options)


def random_batch(count: int, batch: int, device: torch.device, seed: int = 0) -> Features:
    """`batch` images of `count` uniformly random keypoints with random unit descriptors, as SuperPoint's."""
    rng, size = np.random.default_rng([seed, count]), np.array(SIZE, np.float32)
    descriptors = rng.normal(size=(batch, count, 256))
    descriptors /= np.linalg.norm(descriptors, axis=2, keepdims=True)
    scores = rng.random((batch, count)).astype(np.float32)
    keypoints = (rng.random((batch, count, 2)) * (size - 1)).astype(np.float32)
    each = zip(keypoints, descriptors.astype(np.float32), scores, strict=True)
    return Features.stack([Features(*f, size=size, kind="superpoint") for f in each]).to(device)


def as_kornia(*sides: Features) -> dict[str, dict[str, Tensor]]:
    """Two batches as kornia's LightGlue expects them."""
    return {
        f"image{i}": {"keypoints": s.keypoints, "descriptors": s.descriptors, "image_size": s.size}
        for i, s in enumerate(sides)
    }


def verified_by_opencv(side0: tuple[Any, Any], side1: tuple[Any, Any]) -> None:
    """FLANN with Lowe's ratio test and MAGSAC on keypoints and descriptors of OpenCV."""
    (keypoints0, descriptors0), (keypoints1, descriptors1) = side0, side1
    if descriptors0 is None or descriptors1 is None:
        return
    both = cv2.FlannBasedMatcher().knnMatch(descriptors0, descriptors1, k=2)
    good = [pair[0] for pair in both if len(pair) == 2 and pair[0].distance < 0.8 * pair[1].distance]
    if len(good) >= 8:
        points = [[keypoints0[m.queryIdx].pt for m in good], [keypoints1[m.trainIdx].pt for m in good]]
        cv2.findFundamentalMat(*map(np.array, points), cv2.USAC_MAGSAC, 1.0, 0.999)


def lightglue(bench: Bench, points: int, batch: int = 1) -> Iterator[BenchmarkRow]:
    """LightGlue's architecture (9 layers of 256) in precision "auto" and in float32, against kornia."""
    device = bench.device
    peer, works = kornia_lightglue().to(device), {}
    sides = [random_batch(points, batch, device, seed) for seed in (0, 1)]
    data = as_kornia(*sides)
    for precision in ("auto", "float32"):
        options = {"device": str(device), "precision": precision, **OFF}
        network = with_parameters(peer.state_dict(), "lightglue-superpoint", **options).matcher
        name = f"LightGlue architecture, {batch} × {points} points"
        works[f"{name}, {network.precision}"] = (partial(network, *sides), "")
    for row in bench.rows(works, {"kornia, float32": lambda: peer(data)}):
        yield replace(row, note=f"{batch / median(row.ours):.1f} pairs/s")


def loftr(bench: Bench) -> Iterator[BenchmarkRow]:
    """LoFTR from pixels to matches, including the backbone, against kornia."""
    from kornia.feature.loftr.loftr import LoFTR, default_cfg

    device, (width, height) = bench.device, bench.frame
    own = {"coarse": {"temp_bug_fix": False}, "match_coarse": {"thr": 0.0}}
    config = default_cfg | {name: default_cfg[name] | values for name, values in own.items()}
    peer = seeded(lambda: LoFTR(pretrained=None, config=config)).to(device)
    pipe = with_parameters(dict(peer.state_dict()), "loftr-outdoor", device=str(device))
    noise = [np.random.default_rng(seed).standard_normal((height, width)) for seed in (0, 1)]
    noise = [cv2.normalize(cv2.GaussianBlur(n, (0, 0), 2.0), None, 0, 255, cv2.NORM_MINMAX) for n in noise]
    images = [read_image(each.astype(np.uint8)) for each in noise]
    grey = [torch.from_numpy(each.astype(np.float32))[None, None].to(device) / 255 for each in noise]

    work = f"LoFTR, {width}×{height}, {pipe.matcher.precision}"
    ours = {work: (lambda: pipe.matcher(*(Features.stack([f]) for f in pipe.extractor(images))), "")}
    calls = {"kornia, float32": lambda: peer({"image0": grey[0], "image1": grey[1]})}
    yield from bench.rows(ours, calls)


def extraction(bench: Bench) -> Iterator[BenchmarkRow]:
    """Our learned front end on one image, against SIFT."""
    image = read_image(bench.pictures()[0])
    sift, works = bench.load("nearest", device="cpu").extractor, {}
    for precision in ("auto", "float32"):
        extract = bench.load(precision=precision).extractor
        name = f"front end learned, {'×'.join(map(str, bench.frame))}, {precision}"
        works[name] = (partial(extract, [image]), f"{len(extract([image])[0])} keypoints")
    yield from bench.rows(works, {"SIFT on the CPU": lambda: sift([image])})


def presets(bench: Bench) -> Iterator[BenchmarkRow]:
    """A pair of images from arrays by the default preset, all passes and one, against OpenCV."""
    images, works, one = bench.pictures(), {}, {"further_passes": False}
    pipes = {
        "default preset": bench.load(),
        "default preset, one pass": bench.load(**one),
        "default preset, one pass, not refined": bench.load(**one, refine=False),
    }
    for name, pipe in pipes.items():
        work = f"pair of {'×'.join(map(str, bench.frame))}, {bench.keypoints} keypoints, {name}"
        works[work] = (partial(pipe.match, *images), f"{len(pipe.match(*images).points0)} matches")
    find = cv2.SIFT_create(bench.keypoints).detectAndCompute
    opencv = {"OpenCV: SIFT, FLANN, MAGSAC": lambda: verified_by_opencv(*(find(i, None) for i in images))}
    yield from bench.rows(works, opencv)


def matching(bench: Bench, points: int) -> Iterator[BenchmarkRow]:
    """The default network on features, "auto" against float32."""
    features, options = bench.features(points), {"max_keypoints": points, "further_passes": False}
    pipe = bench.load(**options)
    ours = partial(pipe.match_features, *features)
    float32 = partial(bench.load(precision="float32", **options).match_features, *features)
    found, counts = ours(), "×".join(str(len(each)) for each in features)
    note = f"{pipe.matcher.precision}; {len(found)} matches; {found.layers_run} of {pipe.layers} layers"
    works = {f"matching {counts} keypoints, default preset": (ours, note)}
    yield from bench.rows(works, {"float32": float32})


def collection(bench: Bench) -> Iterator[BenchmarkRow]:
    """All pairs of stored features, matched, verified and stored, against OpenCV and COLMAP."""
    from matcher.export.colmap import import_pycolmap

    if bench.photos is None:
        raise UsageError("this row needs a folder of photos of one place: name it (photos)")
    folder, points, pycolmap = bench.photos, 2 * bench.keypoints, import_pycolmap()
    paths, sift = find_images(folder), cv2.SIFT_create(points)
    found = [sift.detectAndCompute(read_image(path, resize=1024).pixels, None) for path in paths]
    pycolmap.logging.minloglevel = pycolmap.logging.ERROR.value
    pycolmap.set_random_seed(0)
    extraction, matching = pycolmap.FeatureExtractionOptions(), pycolmap.FeatureMatchingOptions()
    for each in (extraction, matching):
        each.num_threads, each.use_gpu = torch.get_num_threads(), False
    extraction.sift.max_num_features, extraction.max_image_size = points, 1024
    with tempfile.TemporaryDirectory() as root:
        stored, numbers = Path(root, "extracted.db"), count()
        pycolmap.extract_features(stored, folder, extraction_options=extraction)

        def colmap() -> None:
            database = shutil.copy(stored, Path(root, f"matched{next(numbers)}.db"))
            pycolmap.match_exhaustive(database, matching_options=matching)

        def opened(name: str) -> Collection:
            options = {"max_keypoints": points, "device": str(bench.device)}
            made = Collection.open(Path(root, name), workers=0, **options)
            made.add_images(folder)
            return made

        first = opened("extracted")
        first.extract(everything=True)
        first.add_pairs(exhaustive=True)
        ready = []
        for number in range(bench.repeats + 1):  # a run can be matched once
            shutil.copytree(Path(root, "extracted"), Path(root, f"run{number}"))
            ready.append(opened(f"run{number}"))
        calls: dict[str, Call] = {
            "OpenCV: FLANN on SIFT, MAGSAC": lambda: [verified_by_opencv(*p) for p in combinations(found, 2)],
            "COLMAP: its matcher on SIFT, its verification": colmap,
        }
        pairs = len(paths) * (len(paths) - 1) // 2
        work = f"{pairs} pairs of {points} keypoints of a collection, features stored"
        for row in bench.rows({work: (lambda: ready.pop().run(), "")}, calls):
            rates = " and ".join(f"{pairs / median(side):.1f}" for side in (row.ours, row.theirs))
            yield replace(row, note=f"{rates} pairs a second")


def run_benchmark(
    bench: Bench, *, only: str | None = None, progress: Callable[[str], object] | None = None
) -> list[BenchmarkRow]:
    """The rows whose name contains `only`; those of a collection, which take minutes, run only so. `progress`
    is called with each line of the table as soon as it is measured. `UsageError`: no row has such a name, a
    package to compare with is not installed, or the rows need photos and there are none.
    """
    cuda, sizes = bench.device.type == "cuda", (64,) if bench.quick else (512, 1024, 2048)
    if bench.quick:
        bench = replace(bench, repeats=min(bench.repeats, 2), keypoints=64, frame=(64, 48))
    if cuda:  # a short loan of a machine is enough for the whole table
        bench = replace(bench, seconds=min(bench.seconds, 6.0))
    many = 2 if bench.quick else 32
    plan: dict[str, Callable[[Bench], Iterator[BenchmarkRow]]] = {}
    for points in sizes:
        plan[f"lightglue {points}"] = partial(lightglue, points=points)
        if cuda:
            plan[f"lightglue {points} batch {many}"] = partial(lightglue, points=points, batch=many)
    plan |= {each.__name__: each for each in (loftr, extraction, presets)}
    for points in sizes:
        plan[f"matching {points}"] = partial(matching, points=points)
    plan["collection"] = collection
    check_number(bench.repeats, "repeats", 1, 1000)
    chosen = [name for name in plan if (name != "collection" if only is None else only.lower() in name)]
    if not chosen:
        raise UsageError(f"no row has {only!r} in its name; the rows are {', '.join(plan)}")
    rows, say = [], progress or (lambda line: None)
    said = "{processor}, {cores} cores, {threads} threads; device {device}; torch {torch}; kernels {kernels}"
    head = "| work | against | ours: min / median / max, ms | theirs | ratio | |"
    for line in (said.format(**describe_machine(bench.device)), "", head, "|---|---|---|---|---|---|"):
        say(line)
    for name in chosen:
        try:
            for row in plan[name](bench):
                rows.append(row)
                say(str(row))
        except torch.OutOfMemoryError:  # of a GPU; the other rows may fit
            say(f"| {name} | | the memory of this device is too small for it | | | |")
            torch.cuda.empty_cache()
    return rows


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: those of torch")
    parser.add_argument("--repeats", type=int, default=5, help="of each call")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that every row runs")
    parser.add_argument("--only", help="rows whose name contains this: lightglue, presets, collection, …")
    parser.add_argument("--photos", type=Path, help="photos of one place, for collection")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --json")
    parser.add_argument("--processor-time", action="store_true", help="of this process, not wall-clock time")
    options = parser.parse_args()
    try:
        if options.json:
            check_output(options.json, (".json",), overwrite=options.overwrite)
        if options.threads is not None:
            torch.set_num_threads(int(check_number(options.threads, "--threads", 1, 1024)))
        photos = options.photos or data_folder() / "multiview" / "train" / "odm_lewis" / "images"
        bench = Bench(
            resolve_device(options.device),
            (ASSETS / "view0.jpg", ASSETS / "view1.jpg"),
            photos=photos if options.photos or photos.is_dir() else None,
            quick=options.quick,
            repeats=options.repeats,
            clock=process_time if options.processor_time else perf_counter,
        )
        rows = run_benchmark(bench, only=options.only, progress=lambda line: print(line, flush=True))
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:  # times in seconds
        found = [{**asdict(row), "ratio": row.ratio} for row in rows]
        table = {"machine": describe_machine(bench.device), "rows": found}
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
