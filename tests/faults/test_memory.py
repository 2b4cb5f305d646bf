"""Promise 6: memory is bounded by what was asked for, also in a process that lives long."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from collection_runs import opened, photos
from torch.utils._python_dispatch import TorchDispatchMode

from matcher import attention as cpu
from matcher.collection.workers import StageProgress

pytestmark = pytest.mark.promise(6)
LINUX = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's own count of memory")


class Products(TorchDispatchMode):
    """The shapes of all matrix products and stock attention."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, arguments=(), given=None):
        name = function.__name__
        if any(word in name for word in ("mm", "attention")):
            self.shapes.add((name, *(tuple(x.shape) for x in arguments if isinstance(x, torch.Tensor))))
        return function(*arguments, **(given or {}))


@pytest.mark.parametrize("matrix_units", [False, True])
def test_attention_in_half_precision_has_few_shapes(monkeypatch, matrix_units):
    """oneDNN keeps more than half a megabyte for every shape; every frame has another number of points."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrix_units)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(2, 129, (60, 2), generator=generator).tolist()
    products = Products()
    for n, m in counts:
        q, k, v = (torch.randn(2, size, 32, generator=generator).bfloat16() for size in (n, m, m))
        with products:
            found = cpu.half_on_cpu(q, k, v)
        exact = cpu.whole(q.float(), k.float(), v.float())
        torch.testing.assert_close(found.float(), exact, atol=0.03, rtol=0.03)
    assert 0 < len(products.shapes) <= 12  # two sizes a side; more than 100 where they are not padded


@LINUX
@pytest.mark.slow
def test_many_frames_of_the_default_preset():
    frames = 20_000
    command = [sys.executable, Path(__file__).with_name("sequence_memory.py"), str(frames)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {int(frame): held for frame, held in json.loads(done.stdout).items()}
    (before, *handles), (after, *handles_after) = found[100], found[frames - 1]
    assert after - before < 60 and handles_after == handles, found


@LINUX
@pytest.mark.slow
def test_a_hundred_thousand_pairs(tmp_path):
    """Of cached features, in this process: memory and open files stay, and the store is sound at the end."""
    wanted = 100_000
    images = next(count for count in range(2, 1000) if count * (count - 1) // 2 >= wanted)
    photos(tmp_path / "photos", images, size=(120, 90))
    found = opened(tmp_path / "run", tmp_path / "photos", max_keypoints=64)
    found.add_pairs(exhaustive=True)
    found.extract()
    samples = []

    def sample(progress: StageProgress) -> None:
        if progress.stage == "match":
            held = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            samples.append((progress.done, round(held, 1), len(list(Path("/proc/self/fd").iterdir()))))

    report = found.run(on_progress=sample)
    quarter = samples[len(samples) // 4]
    assert report.all_well and report.counts.pairs_done >= wanted
    assert samples[-1][1] - quarter[1] < 60 and abs(samples[-1][2] - quarter[2]) <= 2, (quarter, samples[-1])
    with found.store as store:
        assert store.check() == []
