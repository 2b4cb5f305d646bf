"""Measure the speed of matching beside other implementations, networks with the same parameters.

    python scripts/benchmark.py [--threads 2] [--device cuda] [--quick] [--only lightglue] [--json FILE]

Times are medians of calls that alternate in one process. The rows of a collection, which take minutes
and need pycolmap, run only if --only names them.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, process_time

import torch

from matcher.benchmark import Bench, describe_machine, run_benchmark
from matcher.errors import MatcherError, check_number
from matcher.files import check_output
from matcher.images import data_folder
from matcher.torch_engine import resolve_device

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: those of torch")
    parser.add_argument("--repeats", type=int, default=5, help="of each call")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that every row runs")
    parser.add_argument("--only", help="rows whose name contains this: lightglue, presets, collection, …")
    parser.add_argument("--photos", type=Path, help="photos of one place, for collection")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("--overwrite", action="store_true", help="replace the file of --json")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="CPU seconds of this process instead of wall-clock seconds, for one thread on a busy machine",
    )
    options = parser.parse_args()
    try:
        if options.json:
            check_output(options.json, (".json",), overwrite=options.overwrite)
        if options.threads is not None:
            torch.set_num_threads(int(check_number(options.threads, "--threads", 1, 1024)))
        photos = options.photos or data_folder() / "multiview" / "train" / "odm_lewis" / "images"
        bench = Bench(
            resolve_device(options.device),
            (ASSETS / "view0.jpg", ASSETS / "view1.jpg"),
            photos=photos if options.photos or photos.is_dir() else None,
            quick=options.quick,
            repeats=options.repeats,
            clock=process_time if options.processor_time else perf_counter,
        )
        rows = run_benchmark(bench, only=options.only, progress=lambda line: print(line, flush=True))
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:  # times in seconds
        found = [{**asdict(row), "ratio": row.ratio} for row in rows]
        table = {"machine": describe_machine(bench.device), "rows": found}
        options.json.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
