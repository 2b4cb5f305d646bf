"""The rows that measure the default preset on a device: extraction, matches, batches, memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2

from matcher.data.features import Features
from matcher.data.images import image_from_array, read_image
from matcher.lab.benchmark.network_rows import BenchmarkRow
from matcher.lab.benchmark.preset_rows import enlarged
from matcher.lab.benchmark.timing import Samples, Stopwatch, memory_above
from matcher.loading import load
from matcher.pipeline import Pipeline


def _features(pipe: Pipeline, images: tuple[Path, Path]) -> tuple[Features, ...]:
    return tuple(pipe.extract(enlarged(path)) for path in images)


def match_rows(watch: Stopwatch, images: tuple[Path, Path], points: int) -> Iterator[BenchmarkRow]:
    """A match of features on the processor, in precision "auto" against float32, and by CUDA graphs."""
    options = {"device": str(watch.device), "max_keypoints": points, "second_pass": False}
    pipes = {precision: load(precision=precision, **options) for precision in ("auto", "float32")}
    if watch.device.type == "cuda":
        pipes["CUDA graphs"] = load(cuda_graphs=True, **options)
    features = _features(load(resize=2048, **options), images)
    for pipe in pipes.values():  # a graph is captured in the second call
        pipe.match_features(*features)
    times = watch.alternate(
        {name: lambda p=pipe: p.match_features(*features) for name, pipe in pipes.items()}
    )
    counts = "×".join(str(len(each)) for each in features)
    found = len(pipes["auto"].match_features(*features))
    work = f"matching {counts} keypoints, default preset"
    note = f"{pipes['auto'].matcher.precision}; {found} matches"
    yield BenchmarkRow(work, "float32", times["auto"], times["float32"], note=note)
    if "CUDA graphs" in times:
        yield BenchmarkRow(f"{work}, CUDA graphs", "queued", times["CUDA graphs"], times["auto"])


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
