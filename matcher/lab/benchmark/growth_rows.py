"""The rows of the benchmark that show how cost grows: with keypoints, with images, and with stored pairs.

Each row compares a size with the one before it, and says with which power of the size the cost grows from
there, and over all sizes so far.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from matcher.collection import runner
from matcher.collection.collection import Collection
from matcher.collection.encoding import checksum, encode_pair
from matcher.collection.jobs import Job, MatchJob, Outcome
from matcher.collection.planning import add_pairs
from matcher.collection.store import Store
from matcher.collection.writer import EncodedPair, Writer
from matcher.data.images import read_image
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.lab.benchmark.network_rows import OFF, BenchmarkRow
from matcher.lab.benchmark.timing import Samples, Stopwatch
from matcher.lab.benchmark.views import scenes
from matcher.loading import load

_SIDE, _POINTS, _SIMILAR = 256, 256, 5  # of small images: pixels, keypoints, images that each is paired with
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
    for number, pixels in enumerate(scenes(paths, size, _SIDE)):
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
