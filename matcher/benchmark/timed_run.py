"""A timed run in its own process, whose number of threads was set before torch was imported.

    python -m matcher.benchmark.timed_run IMAGES RUN_DIR WORKERS OPTIONS

Matches the waiting pairs of a run whose features are stored. Prints the number of pairs, the total seconds,
and the pairs per second after the first commit, when all workers have started ("nan" if there was only one
commit). WORKERS and OPTIONS are JSON objects: the fields of `Workers`, and keyword arguments of
`Collection.open`.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

from matcher.collection.collection import Collection
from matcher.collection.workers import Workers


def main() -> None:
    """Run it with the arguments of this process."""
    folder, run_dir, workers, options = sys.argv[1:]
    means = Workers(**json.loads(workers))
    collection = Collection.open(run_dir, workers=means, **json.loads(options))
    collection.add_images(folder)
    commits: list[tuple[float, int]] = []
    start = perf_counter()
    collection.run(on_progress=lambda now: commits.append((perf_counter() - start, now.done)))
    (first, before), (last, done) = commits[1], commits[-1]
    print(done, last, (done - before) / (last - first) if done > before else "nan")


if __name__ == "__main__":
    main()
