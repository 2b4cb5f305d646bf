"""Promise 1: nothing finished is lost, in runs of 100,000 pairs that are killed again and again."""

import os
import random
import signal
import zlib
from contextlib import suppress
from pathlib import Path
from threading import Timer

import pytest
from collection_runs import photos
from nursery import Nursery

from matcher.collection.store import Store

pytestmark = [
    pytest.mark.promise(1),
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's own count of memory"),
]
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
