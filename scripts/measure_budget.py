"""How well time budgets are kept while other programs use the same core, with plans that learn and without.

    python scripts/measure_budget.py pairs --budget-ms 400 --load 4
    python scripts/measure_budget.py sequence --budget-ms 250 --load 1 --count 150

`multiview` must be in the folder that MATCHER_DATA names (default ../shared). Programs that compute without
end are pinned to the core of this one. Both ways take turns, photo by photo, so they meet the same load.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

import matcher
from matcher.budget import pairs
from matcher.budget.pace import Pace
from matcher.sequence import extraction

SCENE = "multiview/val/kitchen/images"
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"  # until this program ends
WAYS = ("as planned once", "learning")
FIRST = 5  # works that are left out of the last figures, since nothing was learnt yet


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
    trackers = [matcher.Tracker(budget_ms=budget_ms, max_keypoints=1024) for _ in WAYS]
    trackers[0]._frames._pace = Unmoved()
    trackers[0].push(photos[0])
    extraction.FrameCosts = lambda *_, **__: trackers[0]._frames._costs
    trackers[1].push(photos[0])
    extraction.FrameCosts = measured

    def way(tracker: matcher.Tracker) -> Callable[[int], object]:
        def run(number: int) -> object:
            tracker.push(photos[number % len(photos)])
            return tracker.choice

        return run

    return [way(tracker) for tracker in trackers]


def main() -> None:
    """Measure alone, then beside the load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("pairs", "sequence"))
    parser.add_argument("--budget-ms", type=float, default=400.0)
    parser.add_argument("--load", type=int, default=1, help="programs beside this one")
    parser.add_argument("--count", type=int, default=40, help="pairs or frames of each measurement")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    photos = sorted((Path(os.environ.get("MATCHER_DATA", "../shared")) / SCENE).glob("*.jpg"))
    runs = {"pairs": of_pairs, "sequence": of_frames}[arguments.kind](photos, arguments.budget_ms)
    for load in (0, arguments.load):
        spent, last = {way: [] for way in WAYS}, {}
        with loaded(load):
            for number in range(arguments.count):
                for way, run in zip(WAYS, runs, strict=True):
                    start = perf_counter()
                    last[way] = run(number)
                    spent[way].append(1000 * (perf_counter() - start))
        for way, times in spent.items():
            median, most = np.percentile(times[FIRST:], (50, 95))
            kept = np.mean(np.array(times[FIRST:]) <= 1.1 * arguments.budget_ms)
            print(
                f"load {load}, {way}: {median:.0f} ms, 95 % within {most:.0f}, {kept:.0%} kept; {last[way]}"
            )


if __name__ == "__main__":
    main()
