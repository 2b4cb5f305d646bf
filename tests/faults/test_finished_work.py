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

import pytest
from collection_runs import QUICK, alive, children, contents, pairs_done, photos, start, wait_for
from nursery import Nursery

from matcher.cli import main
from matcher.collection.collection import Collection
from matcher.collection.store import Store
from matcher.collection.workers import Workers

pytestmark = [
    pytest.mark.promise(1),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux"),
]


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> tuple[Path, dict]:
    """A folder of 21 photos, and what an unbroken run of its 210 pairs holds."""
    folder = tmp_path_factory.mktemp("scene")
    photos(folder / "photos", 21)
    command = ["collection", folder / "photos", "--run", folder / "whole", *QUICK, "--exhaustive"]
    assert main([str(part) for part in (*command, "--workers", 0)]) == 0
    return folder / "photos", contents(folder / "whole")


def finish(folder: Path, run: Path, unbroken: dict, *more: object) -> None:
    """Let a run that was disturbed go on, and compare it with one that was not."""
    command = ("collection", folder, "--run", run, *QUICK, *more, "--workers", 0)
    assert main([str(part) for part in command]) == 0
    assert contents(run) == unbroken


@pytest.mark.parametrize(
    ("times", "workers"),
    [(3, 0), pytest.param(50, 0, marks=pytest.mark.slow), pytest.param(50, 2, marks=pytest.mark.slow)],
)
def test_kills_lose_nothing(scene, tmp_path, tried, times, workers):
    """What was acknowledged before a kill is there after it, as it should be; then a run finishes."""
    (folder, unbroken), run = scene, tmp_path / "run"
    rng, acknowledged, done = random.Random(times), [], 0
    nursery = Nursery(folder, run, workers)
    while len(acknowledged) < times:
        nursery.begin(rng.choice([0.0, 0.02, 0.1]))
        # Machines differ in speed, so the moment is one of progress, and a little later.
        nursery.wait(target=done + rng.choice([0, 1, 2, 5, 10]))
        time.sleep(rng.uniform(0, 0.05 if done else 0.5))
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
        if done == 210:  # begin anew
            shutil.rmtree(run)
            done = 0
    nursery.begin()
    nursery.wait()
    nursery.close()
    assert nursery.code == 0 and contents(run) == unbroken
    assert sum(count > 0 for count in acknowledged) > times // 5
    tried(times)


SITE = """
import os, signal, sys, time
from pathlib import Path
if "matcher.collection.worker" in sys.orig_argv:
    from matcher.collection import workers
    gate = Path(__file__).with_name("open")
    match, extract = workers.JobRunner.match, workers.JobRunner.extract
    fatal, seen, parent = {fatal}, [], os.getppid()

    def changed_match(self, job, pairs):
        seen.extend(pairs)
        while {gated} and len(seen) > 20 and not gate.exists() and os.getppid() == parent:
            time.sleep(0.01)
        if any("+".join(job.images[end].name for end in pair) in fatal for pair in pairs):
            os.kill(os.getpid(), signal.SIGKILL)
        return match(self, job, pairs)

    def changed_extract(self, ready, names):
        if set(names) & set(fatal):
            os._exit(77)
        return extract(self, ready, names)

    workers.JobRunner.match, workers.JobRunner.extract = changed_match, changed_extract
"""


def change_workers(folder: Path, fatal: list[str], gated: bool = False) -> None:
    """A `sitecustomize` that makes workers die at the pairs and images named in `fatal`, or stop and wait."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(fatal=fatal, gated=gated))


@pytest.fixture
def gate(tmp_path, monkeypatch) -> Path:
    """Every worker stops before its 21st pair until this file is there: a run that no disturbance misses."""
    change_workers(tmp_path / "site", [], gated=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "site" / "open"


def started(folder: Path, run: Path, workers: int = 2) -> subprocess.Popen:
    """A run in workers that has finished some of its pairs."""
    process = start("collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", workers)
    wait_for(lambda: pairs_done(run) > 0, process)
    return process


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_ends_the_run_soundly(scene, tmp_path, gate, sent, code):
    folder, unbroken = scene
    run = tmp_path / "run"
    process = started(folder, run)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(sent)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors and "run the same command again" in errors
    assert time.monotonic() - begun < 20  # a second or two where nothing else runs
    wait_for(lambda: not any(map(alive, workers)), seconds=20)
    with Store.open(run) as store:
        assert store.check() == []
        assert 0 < store.counts().pairs_done < 210
    finish(folder, run, unbroken)


def test_a_worker_that_is_killed_is_replaced(scene, tmp_path, gate):
    folder, unbroken = scene
    run = tmp_path / "run"
    process = started(folder, run, workers=1)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    gate.touch()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 4, errors
    assert "1 worker process crashed and had to be replaced" in errors
    assert contents(run) == unbroken


def test_what_kills_its_worker_twice_fails_and_the_run_goes_on(tmp_path, monkeypatch):
    photos(tmp_path / "photos", 5)
    change_workers(tmp_path / "site", ["view 00.png+view 02.png", "view 04.png"])
    monkeypatch.syspath_prepend(tmp_path / "site")
    options = {"preset": "nearest", "max_keypoints": 150, "device": "cpu"}
    found = Collection.open(tmp_path / "run", workers=Workers(count=2, threads=1, batch=4), **options)
    found.add_images(tmp_path / "photos")
    found.add_pairs(exhaustive=True)
    report = found.run()
    assert (report.crashes, report.all_well, report.counts.pairs_done) == (4, False, 5)
    with found.store as store:
        (lost,) = (image for image in store.images() if image.status == "failed")
        failed = {(pair.name0, pair.name1): pair.reason for pair in store.failed()}
    assert lost.name == "view 04.png" and "exit code 77" in lost.reason
    last = [(f"view 0{n}.png", "view 04.png") for n in range(4)]
    assert failed.keys() == {("view 00.png", "view 02.png"), *last}
    assert "signal SIGKILL" in failed["view 00.png", "view 02.png"]
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "site")])
    assert found.run(retry_failed=True).all_well


def test_workers_that_cannot_start_are_an_error(tmp_path, monkeypatch):
    photos(tmp_path / "photos", 2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\nif 'matcher.collection.worker' in sys.orig_argv: os._exit(9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = Collection.open(tmp_path / "run", preset="nearest", device="cpu", workers=2)
    found.add_images(tmp_path / "photos")
    found.add_pairs(exhaustive=True)
    with pytest.raises(Exception, match=r"cannot be started \(exit code 9\)"):
        found.run()


@pytest.mark.parametrize("limit", [pytest.param(150_000, marks=pytest.mark.slow), 400_000])
def test_a_file_that_may_not_grow_is_a_full_disk(scene, tmp_path, limit):
    folder, unbroken = scene
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


def test_readers_beside_a_run_see_it_whole(scene, tmp_path, capfd, tried):
    """`status`, `report` and `export` while the run writes; and a second run on its folder is refused."""
    folder, unbroken = scene
    run = tmp_path / "run"
    process = started(folder, run, workers=1)
    second = ["collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", "0"]
    codes, refused = set(), None
    readers = (
        ["status", run],
        ["export", run, "--to", "npz", tmp_path / "m.npz", "--overwrite"],
        ["report", run, "--output", tmp_path / "r.html", "--overwrite"],
    )
    while process.poll() is None:
        if refused is None:
            refused = main([*map(str, second)])
        for reader in readers:
            codes.add(main([*map(str, reader)]))
            tried()
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    said = capfd.readouterr().err
    assert codes == {0} and refused == 2
    assert "written by another run" in said and "internal error" not in said
    assert contents(run) == unbroken
