"""The rows of the benchmark whose work runs in processes of its own: time and memory, ours and of others.

The processes alternate, so that other load on the machine affects all equally.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cv2
import torch

from matcher.data.photos import find_images
from matcher.errors import MatcherError, UsageError
from matcher.lab.benchmark.network_rows import BenchmarkRow
from matcher.lab.benchmark.timing import Samples, Stopwatch
from matcher.lab.benchmark.views import tilted_views
from matcher.processes import child_command, child_environment

_PROGRAM = "matcher.lab.benchmark.process_work"
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
