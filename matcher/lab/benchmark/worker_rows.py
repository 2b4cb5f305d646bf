"""The rows of the benchmark that compare worker processes: one and two, of this package and of Ray."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import cv2

from matcher.collection.engines import Workers
from matcher.lab.benchmark.collections import measure_workers
from matcher.lab.benchmark.network_rows import BenchmarkRow
from matcher.lab.benchmark.timing import Samples
from matcher.lab.benchmark.views import scenes

_SIDE = 480  # pixels of an image
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
        for number, pixels in enumerate(scenes(paths, images, _SIDE)):
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
