"""The rows of the benchmark that measure the shipped preset on two pictures of one scene."""

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
from matcher.lab.benchmark.rows import OFF, Row
from matcher.lab.benchmark.timing import Samples, Stopwatch
from matcher.loading import build_extractor, load
from matcher.match.assignment import assign
from matcher.match.mutual import mutual_matches
from matcher.match.network.inference import AttentionMatcher
from matcher.match.sinkhorn import log_masses
from matcher.pipeline import Pipeline

LONGER_SIDE = 1024


def enlarged(path: Path) -> np.ndarray:
    """A picture with its longer side at twice `LONGER_SIDE`, so that 2048 keypoints are found on it."""
    pixels = read_image(path, resize=2 * LONGER_SIDE).pixels
    factor = 2 * LONGER_SIDE / max(pixels.shape[:2])
    return cv2.resize(pixels, None, fx=factor, fy=factor, interpolation=cv2.INTER_CUBIC)


def naive_sinkhorn(scores: Tensor, iterations: int) -> Tensor:
    """log P (B, N+1, M+1) by alternate log-sum-exp over rows and columns, as it is commonly written."""
    log_mu, log_nu = log_masses(scores)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(scores + v.unsqueeze(1), dim=2)
        v = log_nu - torch.logsumexp(scores + u.unsqueeze(2), dim=1)
    return scores + u.unsqueeze(2) + v.unsqueeze(1)


def last_scores(matcher: AttentionMatcher, features0: Features, features1: Features) -> Tensor:
    """Scores with dustbins (1, N+1, M+1) of the head that one pair comes to."""
    seen: list[Tensor] = []
    hooks = [
        head.register_forward_hook(lambda _, inputs, scores: seen.append(scores))
        for head in matcher.model.heads
    ]
    matcher(Features.stack([features0]), Features.stack([features1]))
    for hook in hooks:
        hook.remove()
    return seen[-1].reshape(1, *seen[-1].shape[-2:])


def sinkhorn(watch: Stopwatch, pipe: Pipeline, features: tuple[Features, Features]) -> Iterator[Row]:
    """Our Sinkhorn, all iterations and with its stop, against naive log-sum-exp iterations."""
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
        expected = _pairs(calls["naive"]()[0, :-1, :-1], threshold)
        found = {name: calls[name]() for name in list(calls)[:2]}
        times = watch.alternate(calls)
    for name, assignment in found.items():
        same = len(expected & _pairs(assignment.log_scores[0], threshold)) / max(len(expected), 1)
        yield Row(
            f"Sinkhorn {scores.shape[1] - 1}×{scores.shape[2] - 1}, {name}",
            f"{limit} naive iterations",
            times[name],
            times["naive"],
            note=f"{assignment.iterations} iterations; {same:.2%} of {len(expected)} matches the same",
        )


def _pairs(log_scores: Tensor, threshold: float) -> set[tuple[int, int]]:
    return set(map(tuple, mutual_matches(log_scores, threshold)[0].tolist()))


class LayerClock:
    """Seconds that a call spends in the context layers."""

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


def adaptivity(watch: Stopwatch, features: tuple[Features, Features]) -> Iterator[Row]:
    """Exit and pruning on, against off: the context layers, and the whole match."""
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
    note = f"{on.layers_run} of {pipes['on'].layers} layers, {on.kept0} and {on.kept1} points kept"
    counts = "×".join(str(len(f)) for f in features)
    yield Row(f"context of the default preset, {counts}", "exit, pruning off", context["on"], context["off"])
    yield Row(
        f"match of the default preset, {counts}", "exit, pruning off", times["on"], times["off"], note=note
    )


def extraction(watch: Stopwatch, path: Path, size: tuple[int, int], points: int) -> Iterator[Row]:
    """The front end of our own against SIFT, on a picture of `size` (width, height)."""
    image = image_from_array(cv2.resize(read_image(path).pixels, size, interpolation=cv2.INTER_AREA))
    sift = build_extractor(ExtractorConfig(max_keypoints=points))
    calls = {"SIFT": lambda: sift([image])}
    for precision in ("auto", "float32"):
        config = ExtractorConfig(kind="learned", max_keypoints=points)
        calls[precision] = partial(build_extractor(config, None, watch.device, precision), [image])
    counts = {name: len(call()[0]) for name, call in calls.items()}
    times = watch.alternate(calls)
    for name in ("auto", "float32"):
        yield Row(
            f"front end learned, {size[0]}×{size[1]}, {name}",
            "SIFT on the processor",
            times[name],
            times["SIFT"],
            note=f"{counts[name]} and {counts['SIFT']} points",
        )


def one_against_many(watch: Stopwatch, pipe: Pipeline, paths: tuple[Path, Path], many: int) -> Iterator[Row]:
    """One picture against many: from features that were extracted once, or from paths every time.

    The second picture stands for all of them. One round of each after a warm-up by one pair: the calls are
    many, and their mean is steady.
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
    note = f"{fresh.middle / many * 1e3:.1f} ms a pair from paths; features of all pictures there before"
    name = f"1 picture against {many}, {len(first)} points, features cached"
    yield Row(name, f"{many} calls on paths", cached, fresh, note=note)


def stages(pipe: Pipeline, paths: tuple[Path, Path], repeats: int) -> dict[str, Samples]:
    """Seconds of every stage of a match of two files that the system has already read, and of all."""
    pipe.match(*paths)
    runs = []
    for _ in range(repeats):
        start = perf_counter()
        runs.append({**pipe.match(*paths).seconds, "call": perf_counter() - start})
    return {name: Samples(tuple(run[name] for run in runs)) for name in runs[0]}
