"""Runs over a folder of photos that are forked again and again, to be killed."""

import os
import subprocess
import sys
from pathlib import Path

from collection_runs import ROOT

# For every line that comes in, runs all pairs of a folder in a fork, which says after each commit how many
# pairs are on disk. A fork, so that dying fifty times does not mean importing torch fifty times. The line is
# the time between commits: the shorter, the more of the kills fall into one.
NURSERY = """
import os, sys
from matcher.collection import workers
from matcher.collection.collection import Collection

folder, run, workers = sys.argv[1:]

def drive():
    found = Collection.open(run, workers=int(workers), preset="nearest", max_keypoints=150, device="cpu")
    found.add_images(folder)
    found.add_pairs(exhaustive=True)
    before = found.counts().pairs_done
    print(before, flush=True)
    report = found.run(on_progress=lambda p: p.stage == "match" and print(before + p.done, flush=True))
    return 0 if report.all_well else 4

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        workers.Stages.commit_seconds = float(line)
        print("child", os.getpid(), flush=True)
        os._exit(drive())
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Starts runs; `said` holds what the present one has acknowledged."""

    def __init__(self, folder: Path, run: Path, workers: int) -> None:
        command = [sys.executable, "-c", NURSERY, str(folder), str(run), str(workers)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def begin(self, commit_seconds: float = 0.5) -> None:
        self.process.stdin.write(f"{commit_seconds}\n")
        self.process.stdin.flush()
        self.child = int(self.process.stdout.readline().removeprefix("child "))
        self.said, self.code = [0], None

    def wait(self, target: int = 1_000_000) -> None:
        """Until it has acknowledged so many pairs, or has ended."""
        while self.code is None and self.said[-1] < target:
            line = self.process.stdout.readline()
            if line.startswith("ended"):
                self.code = int(line.split()[1])
            else:
                self.said.append(int(line))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
