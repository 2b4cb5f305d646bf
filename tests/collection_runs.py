"""Small folders of photos, runs over them in this process or another, and what a run holds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np

from matcher.collection.collection import Collection
from matcher.collection.store import Store

ROOT = Path(__file__).resolve().parent.parent
QUICK = ["--preset", "nearest", "--max-keypoints", "150", "--device", "cpu"]


def photos(folder: Path, count: int, size: tuple[int, int] = (200, 160), seed: int = 5) -> list[str]:
    """Views of one textured plane, each moved a little further; their names."""
    rng = np.random.default_rng(seed)
    width, height = size
    noise = cv2.GaussianBlur(rng.standard_normal((height * 2, width * 2)), (0, 0), 2)
    plane = cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number in range(count):
        shift = np.float32([[1, 0.02 * number, -3 * number], [0, 1, -2 * number]])
        names.append(f"view {number:02d}.png")
        cv2.imwrite(str(folder / names[-1]), cv2.warpAffine(plane, shift, (width, height)))
    return names


def opened(run: Path, folder: Path | None = None, **options) -> Collection:
    """A run in this process, of the images of a folder."""
    wanted = {"preset": "nearest", "max_keypoints": 150, "device": "cpu", "workers": 0, **options}
    found = Collection.open(run, **wanted)
    if folder is not None:
        found.add_images(folder)
    return found


def matched(run: Path, folder: Path, pairs: dict | None = None, **options) -> Collection:
    """A finished run of all pairs, or of those chosen."""
    found = opened(run, folder, **options)
    found.add_pairs(**(pairs or {"exhaustive": True}))
    found.run()
    return found


def start(*arguments: object, **options) -> subprocess.Popen:
    """The command line in a process of its own, one thread a process."""
    command = [sys.executable, "-m", "matcher", *map(str, arguments)]
    options |= {"env": {**os.environ, "OMP_NUM_THREADS": "1"}, "stderr": subprocess.PIPE, "text": True}
    # A shell makes background jobs, such as these tests, ignore what Ctrl+C sends, and children would too.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return subprocess.Popen(command, cwd=ROOT, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(condition, process: subprocess.Popen | None = None, seconds: float = 300.0) -> None:
    """Wait until a condition holds; fail if the process ends or time runs out before."""
    until = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the run ended before ({process.returncode}): {process.stderr.read()}")
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


def pairs_done(run: Path) -> int:
    """Pairs that are finished on disk; 0 while there is no store."""
    if not (run / "run.db").is_file():
        return 0
    try:
        with Store.open(run) as store:
            return store.counts().pairs_done
    except Exception:  # it is being made
        return 0


def contents(run: Path) -> dict:
    """Everything that must not depend on how a run went: by name, bytes of keypoints, descriptors, pairs."""
    with Store.open(run) as store:
        names = store.names()
        held = {(image.name, image.sha256, image.status): None for image in store.images()}
        for number, data in store.rows("SELECT image, data FROM keypoints"):
            held["keypoints", names[number]] = data
        for image in store.images():
            if image.status == "done":
                held["descriptors", image.name] = store.features(image.name).descriptors.numpy().tobytes()
        for image0, image1, data in store.rows("SELECT image0, image1, data FROM pairs"):
            held["pair", names[image0], names[image1]] = data
        return held | {("failed", *ends): reason for *ends, reason in store.failed()}


def children(process: int) -> list[int]:
    """Processes that a process has started and that still run (Linux)."""
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").glob("*/children")
        for child in task.read_text().split()
    ]


def alive(process: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
