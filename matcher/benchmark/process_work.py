"""One piece of work in a process of its own, so that its memory can be told from that of others.

    python -m matcher.benchmark.process_work NAME OPTIONS

NAME is a key of `WORKS`, OPTIONS a JSON object with the arguments of that function. It prints one line of
JSON: `seconds` and `processor_seconds` of the work without its preparation, `peak_bytes` of the whole
process, and `result`, what the work says about what it found.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from matcher.benchmark.timing import peak_memory

_OURS = {
    "pair": "pair",
    "collection": "collection",
    "collection, kornia": "collection_kornia",
    "sfm": "sfm",
}
_OTHERS = {
    "pair, OpenCV": "pair_opencv",
    "collection, OpenCV": "collection_opencv",
    "collection, COLMAP": "collection_colmap",
    "sfm, COLMAP": "sfm_colmap",
}
WORKS = _OURS | _OTHERS  # name → function


def _find(name: str) -> Callable[..., Callable[[], dict[str, Any]]]:
    """The function of that name; only what it needs is loaded, for memory is measured."""
    if name in _OTHERS:
        from matcher.benchmark import timing as work_of_others

        return getattr(work_of_others, _OTHERS[name])
    from matcher.benchmark import timing as work_of_ours

    return getattr(work_of_ours, _OURS[name])


def main() -> None:
    """Do the work that the arguments of this process name."""
    name, options = sys.argv[1:]
    work = _find(name)(**json.loads(options))
    start, before = perf_counter(), os.times()
    result = work()
    seconds, after = perf_counter() - start, os.times()
    busy = sum(after[:4]) - sum(before[:4])  # of this process and of those that it started
    measured = {"seconds": seconds, "processor_seconds": busy, "peak_bytes": peak_memory()}
    print(json.dumps({**measured, "result": result}))


if __name__ == "__main__":
    main()
