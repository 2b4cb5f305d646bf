"""The rows of the benchmark that measure the default preset on two images of one scene."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import cv2
import numpy as np
import torch
from torch import Tensor

from matcher.config import ExtractorConfig
from matcher.data.features import Features
from matcher.data.images import image_from_array, read_image
from matcher.data.matches import Matches
from matcher.lab.benchmark.network_rows import OFF, BenchmarkRow
from matcher.lab.benchmark.references import naive_sinkhorn
from matcher.lab.benchmark.timing import Samples, Stopwatch
from matcher.loading import load
from matcher.match.assignment import assign
from matcher.match.mutual import mutual_matches
from matcher.match.network.correspondence import Side
from matcher.match.network.inference import AttentionMatcher
from matcher.match.network.tokens import split_sides
from matcher.pipeline import Pipeline
from matcher.torch_engine import build_extractor

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
            sides = (
                Side(*(None if x is None else x.unsqueeze(0) for x in side))
                for side in split_sides(state.tokens)[0]
            )
            return model.scores(*sides, state.layer)
    raise ValueError("the network has no layers")


def sinkhorn(watch: Stopwatch, pipe: Pipeline, features: tuple[Features, Features]) -> Iterator[BenchmarkRow]:
    """Our Sinkhorn, with all iterations and with its stopping rule, against plain log-sum-exp iterations."""
    scores = last_scores(pipe.matcher, *features)
    limit, threshold = (
        pipe.config.matcher.assignment.max_iterations,
        pipe.config.matcher.policy.match_threshold,
    )
    calls = {
        f"all {limit} iterations": lambda: assign(scores, max_iterations=limit, tolerance=None),
        "default stop": lambda: assign(scores, max_iterations=limit),
        "naive": lambda: naive_sinkhorn(scores, limit),
    }
    with torch.inference_mode():
        u, v = calls["naive"]()
        log_plan = scores + u.unsqueeze(2) + v.unsqueeze(1)
        expected = _pairs(log_plan[0, :-1, :-1], threshold)
        found = {name: calls[name]() for name in list(calls)[:2]}
        times = watch.alternate(calls)
    for name, assignment in found.items():
        same = len(expected & _pairs(assignment.log_scores[0], threshold)) / max(len(expected), 1)
        yield BenchmarkRow(
            f"Sinkhorn {scores.shape[1] - 1}×{scores.shape[2] - 1}, {name}",
            f"{limit} plain iterations",
            times[name],
            times["naive"],
            note=f"{assignment.iterations} iterations; {same:.2%} of {len(expected)} matches the same",
        )


def _pairs(log_scores: Tensor, threshold: float) -> set[tuple[int, int]]:
    return set(map(tuple, mutual_matches(log_scores, threshold)[0].tolist()))


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
