"""Promise 1: nothing finished is lost. Runs that are killed, interrupted or run out of room go on soundly."""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from pathlib import Path
from threading import Timer

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


def kill_again_and_again(scene: tuple[Path, dict], run: Path, times: int, workers: int) -> list[int]:
    """Kill runs at random moments; what each had acknowledged. Then let one finish, and compare."""
    folder, unbroken = scene
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
        done = check_sound(run, unbroken, max(nursery.said))
        if nursery.code == -signal.SIGKILL:
            acknowledged.append(max(nursery.said))
        else:
            assert nursery.code == 0
        if done == 210:  # begin anew
            shutil.rmtree(run)
            done = 0
    nursery.begin()
    nursery.wait()
    nursery.close()
    assert nursery.code == 0
    assert contents(run) == unbroken
    return acknowledged


def check_sound(run: Path, unbroken: dict, acknowledged: int) -> int:
    """The store opens, is whole, has all that was acknowledged, as it should be; the pairs that it has."""
    if not (run / "run.db").exists():
        assert acknowledged == 0
        return 0
    with Store.open(run) as store:
        assert store.check() == []
        assert store.counts().pairs_done >= acknowledged
    held = {key: value for key, value in contents(run).items() if key[0] == "pair"}
    assert all(unbroken[key] == value for key, value in held.items())
    return len(held)


@pytest.mark.parametrize(
    ("times", "workers"),
    [(3, 0), pytest.param(50, 0, marks=pytest.mark.slow), pytest.param(50, 2, marks=pytest.mark.slow)],
)
def test_kills_lose_nothing(scene, tmp_path, tried, times, workers):
    acknowledged = kill_again_and_again(scene, tmp_path / "run", times, workers)
    tried(times)
    print("acknowledged when killed:", acknowledged)
    assert sum(count > 0 for count in acknowledged) > times // 5


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
    assert "Traceback" not in errors
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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk(scene, tmp_path, gate):
    folder, unbroken = scene
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        process = started(folder, disk / "run", workers=1)
        with suppress(OSError), (disk / "others").open("wb", buffering=0) as others:
            while True:  # until nothing is left
                others.write(bytes(4096))
        gate.touch()
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 6, errors
        assert "out of memory or disk" in errors and "Traceback" not in errors
        (disk / "others").unlink()
        with Store.open(disk / "run") as store:
            assert store.check() == []
            done = store.counts()
        assert done.images_done == 21 and 0 < done.pairs_done < 210
        finish(folder, disk / "run", unbroken)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


IMAGES = 448  # all their pairs are 100,128


def on_disk(run: Path) -> dict[tuple[int, int], int]:
    """A checksum of each finished pair; the store opens and is sound."""
    with Store.open(run) as store:
        assert store.check() == []
        return {
            (image0, image1): zlib.crc32(data)
            for image0, image1, data in store.rows("SELECT image0, image1, data FROM pairs")
        }


def stop(process: int, held: list) -> None:
    """Kill a process, and keep the megabytes and the open files that it had."""
    with suppress(OSError):  # it has ended
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        files = len(list(Path(f"/proc/{process}/fd").iterdir()))
        os.kill(process, signal.SIGKILL)
        held.append((round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), files))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "seconds"),
    [
        pytest.param("nearest", (1.5, 6), id="every-few-seconds"),  # a half to three minutes of work
        pytest.param("hybrid-learned", (10, 40), id="every-half-minute"),  # five minutes of work and more
    ],
)
def test_a_hundred_thousand_pairs_killed_again_and_again(tmp_path, capsys, tried, preset, seconds):
    """What was said to be done, and what was on disk after a kill, is there at the end, to the bit."""
    folder, run, rng, held, kills = tmp_path / "photos", tmp_path / "run", random.Random(1), [], []
    photos(folder, IMAGES, size=(120, 90))
    nursery, before = Nursery(folder, run, workers=0, keypoints=64, preset=preset), {}
    while len(before) < IMAGES * (IMAGES - 1) // 2:
        nursery.begin()
        timer = Timer(rng.uniform(*seconds), stop, (nursery.child, held))
        timer.start()
        nursery.wait()
        timer.cancel()
        timer.join()
        assert nursery.code in (0, -signal.SIGKILL)
        if not (run / "run.db").exists():
            assert max(nursery.said) == 0
            continue
        now = on_disk(run)
        assert len(now) >= max(nursery.said)
        assert before.items() <= now.items()
        if nursery.code:
            kills.append(max(nursery.said))
            with capsys.disabled():
                print(
                    f"\nkilled at {kills[-1]} pairs; on disk {len(now)}; (MB, open files) {held[-1]}", end=""
                )
        before = now
    nursery.close()
    assert len(kills) > 5
    sizes, files = zip(*held[1:], strict=True)  # the first was extracting images
    half = len(sizes) // 2
    assert max(sizes[half:]) < max(sizes[:half]) + 60
    assert max(files[half:]) <= max(files[:half]) + 2  # fewer where it was killed before it had begun
    tried(len(before))
