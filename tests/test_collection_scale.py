"""Long pair lists, many workers, a cluster: what a run costs beside the matching itself."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from collection_runs import QUICK, ROOT, contents, photos
from random_collection import SETTINGS

from matcher.cli import main
from matcher.collection.collection import Collection
from matcher.collection.runner import add_pairs, extract_jobs, match_jobs
from matcher.collection.store import Store, Writer
from matcher.collection.workers import Workers

# Enters a pair list, fetches the first jobs, says the processor seconds that it took.
LONG_LIST = """
import sys, time
from matcher.collection.pairs import read_pairs
from matcher.collection.runner import add_pairs, match_jobs
from matcher.collection.store import Writer

with Writer(sys.argv[1]) as writer:
    start = time.process_time()
    names = sorted(writer.store.names().values())
    total, added = add_pairs(writer, read_pairs(sys.argv[2], names))
    next(match_jobs(writer, 1))
    seconds = time.process_time() - start
print(total, added, seconds)
"""


def named_store(folder: Path, count: int) -> list[str]:
    """A store that knows so many images by name alone."""
    Store.create(folder, SETTINGS).close()
    names = [f"day {number // 100}/im{number:06d}.jpg" for number in range(count)]
    with Writer(folder) as writer, writer.transaction():
        writer.add_images(names)
    return names


def test_a_list_of_100_000_pairs_starts_at_once(tmp_path):
    names = named_store(tmp_path / "run", 5000)
    rng = random.Random(1)
    with (tmp_path / "pairs.txt").open("w") as file:
        for _ in range(100_000):
            a, b = rng.sample(range(5000), 2)
            file.write(f"{names[a]}\t{names[b]}\n")
    command = [sys.executable, "-c", LONG_LIST, str(tmp_path / "run"), str(tmp_path / "pairs.txt")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    total, added, seconds = map(float, ended.stdout.split())
    assert total == added > 99_000
    assert seconds < 5


def test_jobs_take_the_pairs_tile_by_tile(tmp_path):
    names = named_store(tmp_path, 100)
    with Writer(tmp_path) as writer:
        assert add_pairs(writer, ((a, b) for a in names for b in names if a < b)) == (4950, 4950)
        jobs = list(match_jobs(writer, 1))
        pairs = [pair for job in jobs for pair in job.items]
        assert len(set(pairs)) == 4950
        tiles = [(a >> 5, b >> 5) for a, b in pairs]
        assert (
            len([tile for tile, after in zip(tiles, [*tiles[1:], None], strict=True) if tile != after]) == 10
        )
        assert all(set(job.images) == {n for pair in job.items for n in pair} for job in jobs)
        sizes = [len(job.items) for job in jobs]
        assert sizes[0] == 16 and sizes[-30:] == [1] * 30  # so that workers end together
        assert add_pairs(writer, [(names[3], names[1])]) == (1, 0)


def test_few_images_are_shared_out():
    names = [f"{number}.jpg" for number in range(200)]
    jobs = [job.items for job in extract_jobs(names)]
    assert [name for items in jobs for name in items] == names
    assert len(jobs[0]) == 6
    assert [len(job.items) for job in extract_jobs(names[:10])] == [1] * 10


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_parts_cover_every_pair_once(tmp_path, parts):
    seen = []
    for part in range(parts):
        names = named_store(tmp_path / str(part), 40)
        with Writer(tmp_path / str(part)) as writer:
            add_pairs(writer, ((a, b) for a in names for b in names if a < b), (part + 1, parts))
            seen.append({pair for job in match_jobs(writer, 1) for pair in job.items})
    assert sum(map(len, seen)) == len(set.union(*seen)) == 780
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@pytest.mark.slow
def test_a_local_ray_of_two_workers(tmp_path, monkeypatch, capfd):
    """Also with relative paths, which are from the folder of the command."""
    pytest.importorskip("ray")
    photos(tmp_path / "photos", 8)
    monkeypatch.chdir(tmp_path)
    common = ["collection", "photos", *QUICK, "--exhaustive", "--workers"]
    assert main([*map(str, [*common, 0, "--run", "here"])]) == 0
    assert main([*map(str, [*common, 2, "--run", "ray", "--engine", "ray"])]) == 0
    out, err = capfd.readouterr()
    print(err)
    assert "pairs: 28 done, 0 failed, 0 waiting" in out
    assert contents(tmp_path / "ray") == contents(tmp_path / "here")


@pytest.mark.slow
def test_ray_replaces_an_actor_that_dies(tmp_path, monkeypatch):
    """A pair that kills its actor fails; what was in the same job is matched."""
    pytest.importorskip("ray")
    photos(tmp_path / "photos", 5)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        """
import os, sys
if "default_worker.py" in " ".join(sys.orig_argv):
    from matcher.collection import workers
    match = workers.JobRunner.match

    def deadly(self, job, pairs):
        if any([job.images[end].name for end in pair] == ["view 00.png", "view 02.png"] for pair in pairs):
            os._exit(77)
        return match(self, job, pairs)

    workers.JobRunner.match = deadly
"""
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), str(ROOT)]))
    options = {"preset": "nearest", "max_keypoints": 150, "device": "cpu"}
    found = Collection.open(tmp_path / "run", workers=Workers("ray", count=2, threads=1), **options)
    found.add_images(tmp_path / "photos")
    found.add_pairs(exhaustive=True)
    report = found.run()
    assert report.crashes > 0
    with found.store as store:
        failed = list(store.failed())
        assert [(pair.name0, pair.name1) for pair in failed] == [("view 00.png", "view 02.png")]
        assert "Ray actor died" in failed[0].reason
        assert store.counts().pairs_done == 9


def test_ray_that_is_absent_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    photos(tmp_path / "photos", 2)
    command = ["collection", tmp_path / "photos", "--run", tmp_path / "run", *QUICK, "--engine", "ray"]
    assert main([str(part) for part in (*command, "--exhaustive")]) == 2
    assert "pip install 'matcher-vision[ray]'" in capfd.readouterr().err


def test_similar_images_are_paired(tmp_path):
    photos(tmp_path / "photos" / "a", 3, seed=1)
    photos(tmp_path / "photos" / "b", 3, seed=2)
    found = Collection.open(tmp_path / "run", preset="nearest", max_keypoints=150, device="cpu", workers=0)
    found.add_images(tmp_path / "photos")
    found.add_pairs(similar=1)
    assert found.run().all_well
    pairs = [(pair.name0[0], pair.name1[0], len(pair.matches)) for pair in found]
    assert np.mean([a == b for a, b, _ in pairs]) == 1.0
    assert min(count for _, _, count in pairs) > 10
