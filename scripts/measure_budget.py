"""How well time budgets are kept while other programs use the same core, with plans that learn and without.

    python scripts/measure_budget.py pairs --budget-ms 400 --load 4
    python scripts/measure_budget.py sequence --budget-ms 250 --load 1 --count 150
    python scripts/measure_budget.py poses --budget-ms 1000 --count 60

`poses` says what a budget costs in accuracy, on as many of the kitchen's pairs, with nothing beside it.
`multiview` must be in the folder that MATCHER_DATA names (default ../shared). Programs that compute without
end are pinned to the core of this one. All ways take turns, photo by photo, so they meet the same load. At
last the load begins several times, after a while without, and the first five photos beside it are looked at.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from time import perf_counter, sleep

import numpy as np
import torch

import matcher
from matcher import budget as pairs
from matcher.budget import Pace
from matcher.evaluate.measure import auc, pose_error
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.sequence import tracker as extraction

SCENE = "multiview/val/kitchen/images"
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # until this program ends
WAYS = {  # what is asked to match the next photo, by its name
    "pairs": ("as planned once", "learning"),
    "sequence": ("as planned once", "learning from frames", "and within a frame"),
}
FIRST = (
    5  # works beside a load of which nothing was known: left out of its figures, and looked at by themselves
)
QUIET = 25  # works without load before it begins again; plans learn from the last 20


class Unmoved(Pace):
    """A pace that learns nothing."""

    def add(self, measured: float, *, predicted: float) -> None:
        """Forget it."""


@contextmanager
def loaded(count: int) -> Iterator[None]:
    """Other programs on this core."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def of_pairs(photos: list[Path], budget_ms: float) -> list[Callable[[int], object]]:
    """What matches the n-th pair of neighbours, both ways, with the same measured costs."""
    pipe = matcher.load(max_keypoints=1024)
    pipe.match(*photos[:2], budget_ms=budget_ms)
    learning = replace(pipe, costs=dict(pipe.costs))
    for each, pace in ((pipe, Unmoved()), (learning, Pace())):
        each.costs.update({key: pace for key, value in each.costs.items() if isinstance(value, Pace)})

    def way(each: matcher.Pipeline) -> Callable[[int], object]:
        def run(number: int) -> object:
            at = number % (len(photos) - 1)
            return each.match(photos[at], photos[at + 1], budget_ms=budget_ms).budget

        return run

    assert not pairs.pace_of(learning).differs_from(1.0)
    return [way(pipe), way(learning)]


def of_frames(photos: list[Path], budget_ms: float) -> list[Callable[[int], object]]:
    """What tracks the n-th frame, both ways, with the same measured costs."""
    measured = extraction.FrameCosts
    once, from_frames, within = (
        matcher.Tracker(budget_ms=budget_ms, max_keypoints=1024) for _ in WAYS["sequence"]
    )
    once._frames._pace = Unmoved()
    once._frames.within_budget = from_frames._frames.within_budget = lambda features, spent: features
    once.push(photos[0])
    extraction.FrameCosts = lambda *_, **__: once._frames._costs
    for tracker in (from_frames, within):
        tracker.push(photos[0])
    extraction.FrameCosts = measured

    def way(tracker: matcher.Tracker) -> Callable[[int], object]:
        def run(number: int) -> object:
            tracker.push(photos[number % len(photos)])
            return tracker.choice

        return run

    return [way(tracker) for tracker in (once, from_frames, within)]


def measure_poses(budget_ms: float, count: int) -> None:
    """Print the accuracy of the poses of real rooms within a budget, and how well it is kept."""
    pipe = matcher.load(geometry="essential")
    errors, times, passes = [], [], []
    for number, pair in enumerate(find_sets("kitchen", SetOptions(pairs=count))[0].pairs):
        cameras = dict(camera0=pair.K0, camera1=pair.K1)
        files = pair.image0.path, pair.image1.path
        if not number:
            pipe.match(*files, **cameras, budget_ms=budget_ms)  # which measures what the machine needs
        start = perf_counter()
        result = pipe.match(*files, **cameras, budget_ms=budget_ms)
        times.append(1000 * (perf_counter() - start))
        errors.append(max(pose_error(result.geometry.cam1_from_cam0, pair.cam1_from_cam0)))
        passes.append(max(1, len(result.passes)))
    accuracy = "/".join(f"{auc(np.array(errors), degrees):.3f}" for degrees in (5, 10, 20))
    kept = described(np.array(times), budget_ms)
    print(f"pose AUC@5/10/20 {accuracy}, {np.mean(passes):.1f} passes; {kept}; {result.budget}")


def main() -> None:
    """Measure alone, then beside the load, then each time it begins."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=(*WAYS, "poses"))
    parser.add_argument("--budget-ms", type=float, default=400.0)
    parser.add_argument("--load", type=int, default=1, help="programs beside this one")
    parser.add_argument("--count", type=int, default=40, help="pairs or frames of each measurement")
    parser.add_argument("--beginnings", type=int, default=8, help="times that the load begins, at last")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    photos = sorted((Path(os.environ.get("MATCHER_DATA", "../shared")) / SCENE).glob("*.jpg"))
    kind, budget_ms = arguments.kind, arguments.budget_ms
    if kind == "poses":
        torch.set_num_threads(1)
        measure_poses(budget_ms, arguments.count)
        return
    runs = {"pairs": of_pairs, "sequence": of_frames}[kind](photos, budget_ms)
    numbers, last = count(), {}

    def spent(works: int) -> np.ndarray:
        """Milliseconds (works, ways)."""
        return np.array([[turn(way, run, next_) for way, run in named] for next_ in islice(numbers, works)])

    def turn(way: str, run: Callable[[int], object], number: int) -> float:
        start = perf_counter()
        last[way] = run(number)
        return 1000 * (perf_counter() - start)

    named = list(zip(WAYS[kind], runs, strict=True))
    for load in (0, arguments.load):
        with loaded(load):
            times = spent(arguments.count)[FIRST:]
        for way, column in zip(WAYS[kind], times.T, strict=True):
            print(f"load {load}, {way}: {described(column, budget_ms)}; {last[way]}")
    first = []
    for _ in range(arguments.beginnings):
        spent(QUIET)
        with loaded(arguments.load):
            sleep(0.1)  # until the others compute
            first.append(spent(FIRST))
    for way, columns in zip(WAYS[kind], np.array(first).reshape(-1, FIRST, len(runs)).T, strict=True):
        if columns.size:
            print(f"the first {FIRST} beside load {arguments.load}, {way}: {described(columns, budget_ms)}")


def described(times: np.ndarray, budget_ms: float) -> str:
    """Percentiles and how often a budget was kept."""
    median, most = np.percentile(times, (50, 95))
    kept, nearly = (np.mean(times <= factor * budget_ms) for factor in (1, 1.1))
    return f"{median:.0f} ms, 95 % within {most:.0f}, {kept:.0%} kept, {nearly:.0%} within 110 %"


if __name__ == "__main__":
    main()
