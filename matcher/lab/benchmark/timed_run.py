"""One timed run in a process of its own, whose threads were set before torch was loaded.

    python -m matcher.lab.benchmark.timed_run IMAGES RUN_DIR WORKERS THREADS OPTIONS

Matches the waiting pairs of a run whose features are there. Prints the number of pairs, the seconds in all,
and pairs a second from the first commit on, when every worker has started ("nan" where there was one commit
only).
OPTIONS is a JSON object with keyword arguments of `Collection.open`.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

from matcher.collection.collection import Collection
from matcher.collection.engines import Workers


def main() -> None:
    """Run it with the arguments of this process."""
    folder, run_dir, workers, threads, options = sys.argv[1:]
    means = Workers(count=int(workers), threads=int(threads))
    collection = Collection.open(run_dir, workers=means, **json.loads(options))
    collection.add_images(folder)
    commits: list[tuple[float, int]] = []
    start = perf_counter()
    collection.run(on_progress=lambda now: commits.append((perf_counter() - start, now.done)))
    (first, before), (last, done) = commits[1], commits[-1]
    print(done, last, (done - before) / (last - first) if done > before else "nan")


if __name__ == "__main__":
    main()
