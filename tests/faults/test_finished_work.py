"""Promise 1: nothing finished is lost. Runs that are killed, interrupted or run out of room go on soundly."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import collection_runs
import pytest
from collection_runs import QUICK, ROOT, alive, children, contents, pairs_done, photos, start, wait_for
from command import run as here

from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.collection.workers import Workers
from matcher.errors import MatcherError

# For every line that comes in, runs all pairs of a folder in a fork, which says after each commit how many
# pairs are on disk. A fork, so that dying fifty times does not mean importing torch fifty times. The line is
# the time between commits: the shorter, the more of the kills fall into one.
NURSERY = """
import os, sys
from matcher.collection.workers import Stages
from matcher.collection.collection import Collection

folder, run, count = sys.argv[1:]

def drive():
    found = Collection.open(run, workers=int(count), preset="nearest", max_keypoints=150, device="cpu")
    found.add_images(folder)
    found.add_pairs(exhaustive=True)
    before = found.counts().pairs_done
    print(before, flush=True)
    report = found.run(on_progress=lambda p: p.stage == "match" and print(before + p.done, flush=True))
    return 0 if report.all_well else 4

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        Stages.commit_seconds = float(line)
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


pytestmark = [
    pytest.mark.promise(1),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
]


PAIRS = 45


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> tuple[Path, dict]:
    """A folder of ten photos, and what an unbroken run of its 45 pairs holds."""
    folder = tmp_path_factory.mktemp("scene")
    photos(folder / "photos", 10)
    given = ("--run", folder / "whole", *QUICK, "--exhaustive", "--workers", 0)
    assert here("collection", folder / "photos", *given) == 0
    return folder / "photos", contents(folder / "whole")


def finish(folder: Path, run: Path, unbroken: dict, *more: object) -> None:
    """Let a run that was disturbed go on, and compare it with one that was not."""
    assert here("collection", folder, "--run", run, *QUICK, *more, "--workers", 0) == 0
    assert contents(run) == unbroken


@pytest.mark.parametrize(
    ("times", "workers"),
    [(2, 0), pytest.param(50, 0, marks=pytest.mark.slow), pytest.param(50, 2, marks=pytest.mark.slow)],
)
def test_kills_lose_nothing(scene, tmp_path, times, workers):
    """What was acknowledged before a kill is there after it, as it should be; then a run finishes."""
    (folder, unbroken), run = scene, tmp_path / "run"
    rng, acknowledged, done = random.Random(times), [], 0
    nursery = Nursery(folder, run, workers)
    while len(acknowledged) < times or sum(count > 0 for count in acknowledged) <= times // 5:
        nursery.begin(rng.choice([0.0, 0.02, 0.1]))
        # Machines differ in speed, so the moment is one of progress, and a little later.
        ahead = rng.choice([0, 1, 2, 5, 10])
        nursery.wait(target=done + ahead)
        time.sleep(rng.uniform(0, 0.05 if ahead else 0.5))
        with suppress(ProcessLookupError):  # it was quicker
            os.kill(nursery.child, signal.SIGKILL)
        nursery.wait()
        said, held = max(nursery.said), {}
        if (run / "run.db").exists():
            with Store.open(run) as store:
                assert store.check() == [] and store.counts().pairs_done >= said
            held = {key: value for key, value in contents(run).items() if key[0] == "pair"}
        assert len(held) >= said and all(unbroken[key] == value for key, value in held.items())
        done = len(held)
        if nursery.code == -signal.SIGKILL:
            acknowledged.append(said)
        if done == PAIRS:  # begin anew
            shutil.rmtree(run)
            done = 0
    nursery.begin()
    nursery.wait()
    nursery.close()
    assert nursery.code == 0 and contents(run) == unbroken


SITE = """
import os, signal, sys, time
if "matcher.collection.workers" in sys.orig_argv:
    from matcher.collection import workers
    match, fatal, seen, parent = workers.JobRunner.match, {fatal}, [], os.getppid()

    def changed_match(self, job, pairs):
        seen.extend(pairs)
        while {gated} and len(seen) > 8 and os.getppid() == parent:
            time.sleep(0.01)
        if any("+".join(job.images[end].name for end in pair) in fatal for pair in pairs):
            os.kill(os.getpid(), signal.SIGKILL)
        return match(self, job, pairs)

    workers.JobRunner.match = changed_match
"""


def change_workers(folder: Path, fatal: list[str], gated: bool = False) -> None:
    """A `sitecustomize` that makes workers die at the pairs named in `fatal`, or stop after some and wait."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(fatal=fatal, gated=gated))


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_run_is_read_beside_and_ended_by_a_signal(scene, tmp_path, capfd, monkeypatch, sent, code):
    """Workers stop before their 9th pair: others read meanwhile, and none may write; the signal ends all."""
    (folder, unbroken), run = scene, tmp_path / "run"
    change_workers(tmp_path / "site", [], gated=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    command = ("collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers")
    process = start(*command, 2)
    wait_for(lambda: pairs_done(run) > 0, process)
    workers = children(process.pid)
    assert len(workers) == 2
    assert here(*command, 0) == 2 and "written by another run" in capfd.readouterr().err
    assert here("status", run) == here("export", run, "--to", "npz", tmp_path / "m.npz") == 0
    assert here("report", run, "--output", tmp_path / "r.html") == 0
    process.send_signal(sent)
    _, errors = process.communicate(timeout=60)  # a second or two where nothing else runs
    assert process.returncode == code, errors
    assert "Traceback" not in errors and "run the same command again" in errors
    wait_for(lambda: not any(map(alive, workers)), seconds=20)
    with Store.open(run) as store:
        assert store.check() == []
        assert 0 < store.counts().pairs_done < PAIRS
    finish(folder, run, unbroken)


def opened(folder: Path, workers: int) -> Collection:
    photos(folder / "photos", 3)
    how = Workers(count=workers, threads=1, batch=4)
    found = collection_runs.opened(folder / "run", folder / "photos", workers=how)
    found.add_pairs(exhaustive=True)
    return found


def test_what_kills_its_worker_twice_fails_and_the_run_goes_on(tmp_path, monkeypatch):
    change_workers(tmp_path / "site", ["view 00.png+view 02.png"])
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = opened(tmp_path, 1)
    report = found.run()
    assert (report.crashes, report.all_well, report.counts.pairs_done) == (2, False, 2)
    with found.store as store:
        ((*ends, reason),) = store.failed()
    assert ends == ["view 00.png", "view 02.png"] and "signal SIGKILL" in reason
    assert opened(tmp_path, 0).run(retry_failed=True).all_well


def test_workers_that_cannot_start_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    dying = "import os, sys\nif 'matcher.collection.workers' in sys.orig_argv: os._exit(9)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(dying)
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(MatcherError, match=r"exit code 9"):
        opened(tmp_path, 1).run()


def test_a_file_that_may_not_grow_is_a_full_disk(scene, tmp_path):
    (folder, unbroken), limit = scene, 150_000
    run = tmp_path / "run"
    process = start(
        *("collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", 0),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 6, errors
    assert "out of memory or disk" in errors and "Traceback" not in errors
    if (run / "run.db").exists():
        with Store.open(run) as store:
            assert store.check() == []
    finish(folder, run, unbroken, "--exhaustive")
