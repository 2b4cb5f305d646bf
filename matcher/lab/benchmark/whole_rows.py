"""The rows of the benchmark that measure a whole pair, from arrays and by the command line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time

import cv2

from matcher.data.images import read_image
from matcher.lab.benchmark.network_rows import BenchmarkRow
from matcher.lab.benchmark.opencv_pair import sift_matches
from matcher.lab.benchmark.timing import Stopwatch
from matcher.loading import load
from matcher.processes import child_command, child_environment


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
