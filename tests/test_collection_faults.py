"""Runs that are killed, interrupted or run out of room: the store stays sound, and the next run goes on."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from collection_runs import QUICK, ROOT, alive, children, contents, pairs_done, photos, start, wait_for

from matcher.cli import main
from matcher.collection.collection import Collection
from matcher.collection.engines import Workers
from matcher.collection.store import Store

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")

# Matches every pair of a folder and says after each commit how many pairs are on disk.
DRIVER = """
import sys
from matcher.collection.collection import Collection
from matcher.collection.engines import Workers

folder, run, workers = sys.argv[1:]
options = {"preset": "nearest", "max_keypoints": 150, "device": "cpu"}
found = Collection.open(run, workers=Workers(count=int(workers)), **options)
found.add_images(folder)
found.add_pairs(every=True)
before = found.counts().pairs_done
found.run(tell=lambda p: print(before + p.done if p.stage == "match" else before, flush=True))
"""


def drive(folder: Path, run: Path, workers: int) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(folder), str(run), str(workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> tuple[Path, dict]:
    """A folder of 21 photos, and what an unbroken run of its 210 pairs holds."""
    folder = tmp_path_factory.mktemp("scene")
    photos(folder / "photos", 21)
    command = ["collection", folder / "photos", "--run", folder / "whole", *QUICK, "--exhaustive"]
    assert main([str(part) for part in (*command, "--workers", 0)]) == 0
    return folder / "photos", contents(folder / "whole")


def kill_again_and_again(scene: tuple[Path, dict], run: Path, times: int, workers: int) -> list[int]:
    """Kill runs at random moments; what each had acknowledged. Then let one finish, and compare."""
    folder, unbroken = scene
    rng, acknowledged, done = random.Random(times), [], 0
    while len(acknowledged) < times:
        process, said = drive(folder, run, workers), [0]
        target = done + rng.choice([0, 1, 10, 40])  # machines differ in speed: the moment is one of progress
        while said[-1] < target and (line := process.stdout.readline()):
            said.append(int(line))
        time.sleep(rng.uniform(0, 0.6))
        process.kill()
        said += [int(line) for line in process.stdout.read().split()]
        process.wait()
        acknowledged.append(max(said))
        if not (run / "run.db").exists():
            continue
        with Store.open(run) as store:
            assert store.check() == []
            assert store.counts().pairs_done >= acknowledged[-1]
            held = {key: value for key, value in contents(run).items() if key[0] == "pair"}
            assert all(unbroken[key] == value for key, value in held.items())
        done = len(held)
        if done == 210:  # it was finished before it was killed: begin anew
            shutil.rmtree(run)
            done = 0
    process = drive(folder, run, workers)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert contents(run) == unbroken
    return acknowledged


def test_three_kills_lose_nothing(scene, tmp_path):
    acknowledged = kill_again_and_again(scene, tmp_path / "run", 3, workers=0)
    assert max(acknowledged) > 0


@pytest.mark.slow
def test_fifty_kills_lose_nothing(scene, tmp_path):
    acknowledged = kill_again_and_again(scene, tmp_path / "run", 50, workers=2)
    print("acknowledged when killed:", acknowledged)
    assert sum(count > 0 for count in acknowledged) > 10


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_soundly(scene, tmp_path, sent, code):
    folder, unbroken = scene
    run = tmp_path / "run"
    process = start("collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", 2)
    wait_for(lambda: pairs_done(run) > 0, process)
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(sent)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert time.monotonic() - begun < 20  # a second or two where nothing else runs
    wait_for(lambda: not any(map(alive, workers)), seconds=20)
    with Store.open(run) as store:
        assert store.check() == []
        assert 0 < store.counts().pairs_done < 210
    command = ["collection", folder, "--run", run, *QUICK, "--workers", 0]
    assert main([str(part) for part in command]) == 0
    assert contents(run) == unbroken


def test_a_worker_that_is_killed_is_replaced(scene, tmp_path):
    folder, unbroken = scene
    run = tmp_path / "run"
    process = start("collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", 2)
    wait_for(lambda: pairs_done(run) > 0, process)
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 4, errors
    assert "1 worker processes died and were replaced" in errors
    assert contents(run) == unbroken


def test_workers_end_when_the_run_is_killed(scene, tmp_path):
    run = tmp_path / "run"
    process = start("collection", scene[0], "--run", run, *QUICK, "--exhaustive", "--workers", 2)
    wait_for(lambda: pairs_done(run) > 0, process)
    workers = children(process.pid)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(alive, workers)), seconds=30)


def deadly(folder: Path, fatal: list[str]) -> None:
    """A `sitecustomize` that makes workers die at the pairs and pictures named in `fatal`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        f"""
import os, signal, sys
if "matcher.collection.workers" in " ".join(sys.orig_argv):
    from matcher.collection import workbench
    fatal, match, extract = {json.dumps(fatal)}, workbench.Workbench.match, workbench.Workbench.extract

    def deadly_match(self, pairs):
        if any(f"{{a.name}}+{{b.name}}" in fatal for a, b in pairs):
            os.kill(os.getpid(), signal.SIGKILL)
        return match(self, pairs)

    def deadly_extract(self, name):
        if name in fatal:
            os._exit(77)
        return extract(self, name)

    workbench.Workbench.match, workbench.Workbench.extract = deadly_match, deadly_extract
"""
    )


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_what_kills_its_worker_twice_fails_and_the_run_goes_on(tmp_path, monkeypatch, batch):
    photos(tmp_path / "photos", 5)
    deadly(tmp_path / "site", ["view 00.png+view 02.png", "view 04.png"])
    monkeypatch.syspath_prepend(tmp_path / "site")
    options = {"preset": "nearest", "max_keypoints": 150, "device": "cpu"}
    found = Collection.open(tmp_path / "run", workers=Workers(count=2, threads=1, batch=batch), **options)
    found.add_images(tmp_path / "photos")
    found.add_pairs(every=True)
    report = found.run()
    assert report.crashes == 4
    assert not report.all_well
    with found.store as store:
        assert {image.name: image.reason for image in store.images() if image.status == "failed"} == {
            "view 04.png": "its worker process died 2 times (exit code 77)"
        }
        failed = {(pair.name0, pair.name1): pair.reason for pair in store.failed()}
        assert (
            failed.pop(("view 00.png", "view 02.png")) == "its worker process died 2 times (signal SIGKILL)"
        )
        assert len(failed) == 4 and all(pair[1] == "view 04.png" for pair in failed)
        assert store.counts().pairs_done == 5
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path / "site")])
    assert found.run(retry_failed=True).all_well


def test_workers_that_cannot_start_are_an_error(tmp_path, monkeypatch):
    photos(tmp_path / "photos", 2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\nif 'matcher.collection.workers' in ' '.join(sys.orig_argv): os._exit(9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = Collection.open(tmp_path / "run", preset="nearest", device="cpu", workers=Workers(count=2))
    found.add_images(tmp_path / "photos")
    found.add_pairs(every=True)
    with pytest.raises(Exception, match=r"cannot be started \(exit code 9\)"):
        found.run()


def finish(folder: Path, run: Path, unbroken: dict) -> None:
    assert main([str(part) for part in ("collection", folder, "--run", run, *QUICK, "--workers", 0)]) == 0
    assert contents(run) == unbroken


@pytest.mark.parametrize("limit", [150_000, 700_000])
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
    command = ["collection", folder, "--run", run, *QUICK, "--exhaustive", "--workers", 0]
    assert main([str(part) for part in command]) == 0
    assert contents(run) == unbroken


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(scene, tmp_path):
    folder, unbroken = scene
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1300k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        process = start("collection", folder, "--run", disk / "run", *QUICK, "--exhaustive", "--workers", 2)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 6, errors
        assert "out of memory or disk" in errors and "Traceback" not in errors
        with Store.open(disk / "run") as store:
            assert store.check() == []
            done = store.counts()
        assert done.images_done == 21 and done.pairs_done < 210
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        finish(folder, disk / "run", unbroken)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(scene, tmp_path, capfd):
    (tmp_path / "closed").mkdir(mode=0o500)
    arguments = ["collection", scene[0], "--run", tmp_path / "closed" / "run", *QUICK, "--exhaustive"]
    assert main([str(part) for part in arguments]) == 2
    assert "name another folder" in capfd.readouterr().err
