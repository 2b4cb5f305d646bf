"""Create an environment, install, and run the tests on all cores.

    python3 scripts/run_tests.py [pytest options]

One process per core with one thread each; `-n 0` runs the tests in a single process, as `--pdb` does.
"""

import os
import subprocess
import sys

from environment import ROOT, prepare

ONE_PROCESS = ("--pdb", "--trace", "--version", "-V", "--help", "-h", "--collect-only", "--co")


def parallel(arguments: list[str], cores: int) -> list[str]:
    """Options that spread the tests over the cores, unless the caller decides or one process is needed."""
    decided = any(argument.startswith(("-n", "--numprocesses", "--dist")) for argument in arguments)
    if decided or cores < 2 or set(arguments) & set(ONE_PROCESS):
        return []
    # The tests of a file stay in one process, because they share expensive fixtures.
    return ["-n", str(cores), "--dist", "loadfile"]


def main() -> int:
    """Run pytest and return its exit code."""
    python = prepare(("test",))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    arguments = sys.argv[1:]
    environment = {"OMP_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1", **os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process of the tests compiles the sources
    command = [python, "-m", "pytest", *parallel(arguments, cores), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
