"""The rows of the benchmark that measure whole work.

A pair from arrays and by the command line, many pairs from cached features, and how the time of a pair grows
with its keypoints.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np
import torch

from matcher.data.features import Features
from matcher.data.images import read_image
from matcher.lab.benchmark.network_rows import OFF, BenchmarkRow
from matcher.lab.benchmark.timing import Samples, Stopwatch
from matcher.loading import load
from matcher.processes import child_command, child_environment

_RATIO = 0.8  # of Lowe's test


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
    times = watch.alternate({**calls, "opencv": lambda: _opencv_pair(images, points)})
    for name in pipes:
        note = f"{len(pipes[name].match(*images).points0)} matches"
        work = f"pair of {size[0]}×{size[1]}, {points} keypoints, {name}"
        yield BenchmarkRow(work, "OpenCV: SIFT, FLANN, MAGSAC", times[name], times["opencv"], note=note)
    options = ["--max-keypoints", str(points), "--device", device]
    command = child_command("matcher", "match", *map(str, paths), *options)
    again = watch.alternate(
        {
            "command": lambda: subprocess.run(
                command, env=child_environment(), check=True, capture_output=True
            ),
            "call": lambda: pipes["default preset"].match(*paths),
        }
    )
    yield BenchmarkRow("`matcher match A B`", "the same call in a process", again["command"], again["call"])


def _opencv_pair(images: list[np.ndarray], points: int) -> np.ndarray | None:
    sift = cv2.SIFT_create(points)
    found = [sift.detectAndCompute(image, None) for image in images]
    matches = _flann(*(descriptors for _, descriptors in found))
    if len(matches) < 8:
        return None
    sides = [
        [keypoints[k].pt for k in column] for (keypoints, _), column in zip(found, matches.T, strict=True)
    ]
    return cv2.findFundamentalMat(*(np.array(side) for side in sides), cv2.USAC_MAGSAC, 1.0, 0.999)[0]


def _flann(descriptors0: np.ndarray, descriptors1: np.ndarray) -> np.ndarray:
    """Indices (K, 2) of the matches that pass the ratio test."""
    both = cv2.FlannBasedMatcher().knnMatch(descriptors0, descriptors1, k=2)
    good = [m for m, n in (pair for pair in both if len(pair) == 2) if m.distance < _RATIO * n.distance]
    return np.array([(m.queryIdx, m.trainIdx) for m in good], int).reshape(-1, 2)


def collection_rows(
    watch: Stopwatch, paths: tuple[Path, Path], count: int, points: int
) -> Iterator[BenchmarkRow]:
    """All pairs of `count` images from cached features, against OpenCV's FLANN on as many SIFT points."""
    pipe = load(device=str(watch.device), max_keypoints=points)
    sift, images = cv2.SIFT_create(points), _views(paths, count)
    features = [pipe.extract(image) for image in images]
    descriptors = [sift.detectAndCompute(image, None)[1] for image in images]
    pairs = list(combinations(range(count), 2))
    times = watch.alternate(
        {
            "ours": lambda: [pipe.match_features(features[i], features[j]) for i, j in pairs],
            "opencv": lambda: [_flann(descriptors[i], descriptors[j]) for i, j in pairs],
        }
    )
    work = f"{len(pairs)} pairs of {points} keypoints, features cached"
    note = f"{len(pairs) / times['ours'].median:.1f} pairs a second"
    yield BenchmarkRow(work, "OpenCV's FLANN on SIFT", times["ours"], times["opencv"], note=note)


def _views(paths: tuple[Path, Path], count: int) -> list[np.ndarray]:
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


def growth_rows(watch: Stopwatch, paths: tuple[Path, Path], sizes: tuple[int, ...]) -> Iterator[BenchmarkRow]:
    """Matching pairs of ever more keypoints, all layers on all of them, and the exponent of its growth."""
    pipe = load(device=str(watch.device), max_keypoints=max(sizes), **OFF)
    whole = [pipe.extract(image) for image in _tiled_views(paths, max(sizes))]
    before: tuple[int, Samples] | None = None
    for size in sizes:
        given = [_first(features, size) for features in whole]
        count = min(map(len, given))
        (times,) = watch.alternate({"match": lambda g=given: pipe.match_features(*g)}).values()
        if before is not None and count > before[0]:
            power = np.log(times.median / before[1].median) / np.log(count / before[0])
            work, against = f"matching {count} keypoints, all layers", f"{before[0]} keypoints"
            yield BenchmarkRow(work, against, times, before[1], note=f"grows by the power {power:.2f}")
        before = count, times


def _tiled_views(paths: tuple[Path, Path], points: int) -> list[np.ndarray]:
    """The two images beside and below themselves so often that enough keypoints are in them."""
    times, made = max(1, int(np.ceil((points / 1024) ** 0.5))), []
    for path in paths:
        pixels = read_image(path).pixels
        made.append(np.tile(pixels, (times, times, *[1] * (pixels.ndim - 2))))
    return made


def _first(features: Features, count: int) -> Features:
    return features.select(torch.arange(min(count, len(features))))
