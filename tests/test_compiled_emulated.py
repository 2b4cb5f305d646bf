"""The kernels for ARM, compiled for it and run by an emulator: they give what stock operators give here.

Needs `g++-aarch64-linux-gnu` and `qemu-user` of Debian.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from matcher import kernels as compiled
from matcher.kernels.loader import TARGETS, sources
from matcher.match.consensus import fit_local_maps

COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
DRIVER = Path(__file__).with_name("emulated_kernels.cpp")
Case = tuple[list[torch.Tensor], list[torch.Tensor]]  # what goes in, what is expected
pytestmark = [
    pytest.mark.slow,  # a compilation, and an emulator
    pytest.mark.skipif(COMPILER is None or EMULATOR is None, reason="needs a compiler for aarch64, and qemu"),
]


PROCESSORS = {"neon": "cortex-a72", "sve256": "max,sve-max-vq=2"}  # of the emulator


@pytest.fixture(scope="module", params=PROCESSORS)
def program(request, tmp_path_factory) -> list[str | Path]:
    """A command that runs all kernels, compiled with the flags that the library of a target for ARM has."""
    flags = next(target.flags for target in TARGETS if target.name == request.param)
    made = tmp_path_factory.mktemp("emulated") / "kernels"
    common = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-static")
    files = [DRIVER, *(file for file in sources() if file.suffix == ".cpp")]
    subprocess.run([COMPILER, *flags, *common, "-o", made, *files], check=True)
    return [EMULATOR, "-cpu", PROCESSORS[request.param], made]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random.generator)


random.generator = torch.Generator()


def attention() -> Case:
    q, k, v = random(100, 64), random(150, 64), random(150, 64)
    return [q, k, v], [F.scaled_dot_product_attention(q[None], k[None], v[None])[0]]


def candidates() -> Case:
    x, y, bin0, bin1 = random(100, 64) / 2, random(150, 64) / 2, random(100), random(150)
    odds = x @ y.T - bin0[:, None] - bin1
    rows, columns = odds.topk(8, 1), odds.topk(8, 0)
    weights = odds.clamp(max=8).exp()
    return [x, y, bin0, bin1], [rows.values, columns.values.T, weights.sum(1), weights.sum(0)]


def fit() -> Case:
    points = torch.rand(100, 2, generator=random.generator)
    targets = 0.9 * points + 0.02 * torch.rand(100, 2, generator=random.generator)
    confidence = torch.rand(100, generator=random.generator)
    confidence[::3] = 0
    found = fit_local_maps(points[None], targets[None], confidence[None])
    return [points, targets, confidence], [found.position[0], found.support[0], found.spread[0]]


def pixels() -> Case:
    maps, weights, bias = random(10, 14, 16), random(4, 3, 3, 16), random(4)
    scores = F.conv2d(maps.permute(2, 0, 1)[None], weights.permute(0, 3, 1, 2), bias, padding=1)
    return [maps, weights, bias], [F.pixel_shuffle(scores, 2)[0, 0]]


def feed_forward() -> Case:
    x, bias, gain, shift = random(33, 128), random(128), random(128), random(128)
    return [x, bias, gain, shift], [F.gelu(F.layer_norm(x + bias, (128,), gain, shift, 1e-5))]


def transport() -> Case:
    scores, u, v = 9 * random(20, 31), random(20), random(31)
    return [scores, u, v], [(scores + u[:, None] + v).clamp(-80, 87).exp()]


def test_kernels_for_arm_are_the_equations(program, monkeypatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")  # what is expected comes from stock operators
    random.generator.manual_seed(0)
    cases = [make() for make in (attention, candidates, fit, pixels, feed_forward, transport)]
    given = b"".join(x.contiguous().numpy().tobytes() for inputs, _ in cases for x in inputs)
    ended = subprocess.run(program, input=given, capture_output=True, check=True)
    found = _split(np.frombuffer(ended.stdout, np.float32), [y for _, outputs in cases for y in outputs])
    for numbers, (name, expected) in found:
        if name in (1, 2):  # the best of a row or column come in any order
            numbers, expected = (np.sort(side, axis=1) for side in (numbers, expected))
        # Sums of exponentials, and the exponentials of the last one, are right relative to themselves.
        scale, far = (
            (np.abs(expected), 1e-4) if name in (3, 4, 10) else (max(1.0, np.abs(expected).max()), 2e-5)
        )
        np.testing.assert_array_less(np.abs(numbers - expected) / scale, far, err_msg=f"output {name}")


def _split(
    numbers: np.ndarray, expected: list[torch.Tensor]
) -> Iterator[tuple[np.ndarray, tuple[int, np.ndarray]]]:
    """What the program wrote, as arrays of the shapes that are expected, each beside its number."""
    assert len(numbers) == sum(y.numel() for y in expected)
    ends = np.cumsum([y.numel() for y in expected])
    for name, (part, y) in enumerate(zip(np.split(numbers, ends[:-1]), expected, strict=True)):
        yield part.reshape(y.shape), (name, y.numpy())
