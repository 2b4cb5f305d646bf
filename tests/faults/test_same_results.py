"""Promise 3: the same input gives the same result: again, from many threads and processes, in any batch."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from collection_runs import photos

import matcher

pytestmark = pytest.mark.promise(3)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    names = photos(folder, 4)
    return [(folder / names[0], folder / name) for name in names[1:]]


def facts(result: matcher.Result) -> list:
    """Points, scores and inliers, as lists that can be compared."""
    found = result.points0, result.points1, result.scores, result.geometry.inliers
    return [each.tolist() for each in found]


@pytest.mark.parametrize("preset", ["nearest", "hybrid-learned"])
def test_eight_threads_give_serial_results(pairs, preset):
    precision = None if preset == "nearest" else "float32"
    pipe = matcher.load(preset, max_keypoints=96, device="cpu", precision=precision)
    serial = [facts(pipe.match(*pair)) for pair in pairs]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pair: facts(pipe.match(*pair)), pairs * 2))
    assert found == serial * 2


FORKING = """
import os, signal, sys
import torch
import matcher

torch.set_num_threads(2)
pipe = matcher.load(max_keypoints=96, device="cpu", precision="float32", further_passes=False)
points = lambda: pipe.match(*sys.argv[1:3]).points1.tolist()
serial = points()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if points() == serial else 1)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_a_process_with_threads_gives_the_same(pairs):
    """The threads are not there in the fork, which waited for them for ever."""
    environment = {key: value for key, value in os.environ.items() if "NUM_THREADS" not in key}
    command = [sys.executable, "-c", FORKING, *map(str, pairs[0])]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


def test_threads_change_nothing_that_matters(views):
    """The same bits again, and at least 99.9 % of the matches in float32 with another number of threads."""
    options = {"device": "cpu", "precision": "float32", "max_keypoints": 256, "resize": 400}
    pipe, before, found = matcher.load(**options, further_passes=False), torch.get_num_threads(), []
    try:
        for threads in (1, 1, 2):
            torch.set_num_threads(threads)
            result = pipe.match(*views)
            found.append(np.hstack([result.points0, result.points1]))
    finally:
        torch.set_num_threads(before)
    assert len(found[0]) > 80 and np.array_equal(found[0], found[1])
    apart = np.abs(found[0][:, None] - found[2]).max(axis=2)
    assert min((apart.min(axis=side) < 0.05).mean() for side in (0, 1)) >= 0.999
