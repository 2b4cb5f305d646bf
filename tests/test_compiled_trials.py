"""Kernels are used where they are right and not slower; what was found is kept."""

import json
import shutil
from time import process_time, sleep

import pytest
import torch

from matcher.extract.learned import try_peaks
from matcher.kernels import (
    SWITCH,
    calls,
)
from matcher.kernels import (
    calls as candidates,
)
from matcher.kernels import (
    calls as maps,
)
from matcher.kernels import (
    loader as library,
)
from matcher.kernels import (
    loader as targets,
)
from matcher.kernels import (
    loader as trials,
)
from matcher.kernels.calls import (
    try_absorb,
    try_attention,
    try_candidates,
    try_half_attention,
    try_half_maps,
    try_half_rows,
    try_half_samples,
    try_half_turns,
    try_maps,
    try_rows,
    try_samples,
    try_turns,
)
from matcher.kernels.loader import Trial, granted
from matcher.match.consensus import try_local_maps

TRIALS = {
    "attention, bfloat16": try_half_attention,
    "attention, float32": try_attention,
    "feed-forward steps, bfloat16": try_half_rows,
    "feed-forward steps, float32": try_rows,
    "candidates": try_candidates,
    "maps, bfloat16": try_half_maps,
    "maps, float32": try_maps,
    "samples, bfloat16": try_half_samples,
    "samples, float32": try_samples,
    "peaks": try_peaks,
    "turns, bfloat16": try_half_turns,
    "turns, float32": try_turns,
    "absorption of potentials": try_absorb,
    "local maps": try_local_maps,
}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The file of what was found, in a cache of this test."""
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(trials, "library_in_use", lambda: "a library")
    (tmp_path / "kernels").mkdir()
    trials._granted.cache_clear()
    yield tmp_path / "kernels" / "trials.json"
    trials._granted.cache_clear()


def right() -> torch.Tensor:
    return torch.ones(3)


def slow() -> torch.Tensor:
    sleep(0.004)
    return torch.ones(3)


@pytest.mark.parametrize(
    ("kernel", "stock", "used"),
    [
        (right, slow, True),
        (slow, right, False),
        (lambda: right() + 0.5, slow, False),
        (lambda: right() * torch.nan, slow, False),
        (lambda: None, slow, False),
    ],
)
def test_a_kernel_must_be_right_and_not_slower(record, kernel, stock, used: bool) -> None:
    made = []

    def make() -> Trial:
        made.append(None)
        return Trial(kernel, stock, 0.01)

    assert granted("a kind", make) is used
    assert granted("a kind", make) is used and len(made) == 1
    trials._granted.cache_clear()  # as another process
    assert granted("a kind", make) is used and len(made) == 1
    assert list(json.loads(record.read_text()).values()) == [used]


@pytest.mark.parametrize("content", ["", "[1]", '{"x": 3}', "\xff"])
def test_a_damaged_record_is_replaced(record, content: str) -> None:
    record.write_text(content)
    assert granted("a kind", lambda: Trial(right, slow, 0.01))
    assert True in json.loads(record.read_text()).values()


def test_without_a_cache_the_process_remembers(record) -> None:
    record.parent.rmdir()
    made = []

    def make() -> Trial:
        made.append(None)
        return Trial(right, slow, 0.01)

    assert granted("a kind", make) and granted("a kind", make) and len(made) == 1
    assert not record.exists()


def test_a_kernel_under_trial_runs(record) -> None:
    asked = []

    def kernel() -> torch.Tensor:
        asked.append(granted("a kind", make))
        return right()

    def make() -> Trial:
        return Trial(kernel, right, 0.01)

    granted("a kind", make)
    assert asked and all(asked)


def test_a_named_target_needs_no_trial(record, monkeypatch) -> None:
    monkeypatch.setattr(trials, "supported", lambda: ("avx2",))
    monkeypatch.setenv(SWITCH, "avx2")
    assert granted("a kind", lambda: pytest.fail("tried"))


def test_asking_again_takes_no_time(record) -> None:
    """Every call of a kernel asks: nothing is read or computed again."""
    make = right_and_slow
    granted("a kind", make)
    library.library_in_use()
    start = process_time()
    for _ in range(1000):
        granted("a kind", make)
        library.library_in_use()
    assert process_time() - start < 0.1


def right_and_slow() -> Trial:
    return Trial(right, slow, 0.01)


@pytest.mark.parametrize("kind", sorted(TRIALS))
def test_every_trial_is_passed_by_the_results_of_its_kernel(kernels_folder, monkeypatch, kind: str) -> None:
    """On the best target that runs here; how fast it is, is not asked."""
    if library.instructions() is None or shutil.which("g++") is None:
        pytest.skip("needs a compiler and vector units")
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(SWITCH, library.instructions())
    library._load.cache_clear()
    try:
        library.build()
        with torch.inference_mode():
            tried = TRIALS[kind]()
            found, expected = tried.kernel(), tried.stock()
    finally:
        library._load.cache_clear()
    assert trials.agree(found, expected, tried.tolerance)
    assert not trials.agree(found + 2 * tried.tolerance + 0.1 * expected.abs(), expected, tried.tolerance)


def test_what_fails_its_trial_is_left_alone(kernels_folder, monkeypatch) -> None:
    """Each kind by itself."""
    if library.instructions() is None or shutil.which("g++") is None:
        pytest.skip("needs a compiler and vector units")
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(SWITCH, library.instructions())
    library._load.cache_clear()
    refused: set[str] = set()
    for part in (calls, maps, candidates):
        monkeypatch.setattr(part, "granted", lambda name, _: name.split()[0] not in refused)
    square, row, places = torch.zeros(20, 20), torch.zeros(20), torch.rand(1, 20, 2)
    level = torch.zeros(1, 8, 4, 4).to(memory_format=torch.channels_last)
    used = {
        "rows": lambda: calls.have_kernels(square),
        "turns": lambda: calls.have_turns(square),
        "absorb": lambda: calls.absorb_compiled(square, row, row, -80.0) is not None,
        "maps": lambda: maps.have_maps(level),
        "samples": lambda: maps.have_samples(level),
        "peaks": lambda: maps.peaks_compiled(square, 1, 0, right_and_slow) is not None,
        "local": lambda: candidates.fit_compiled(places, places, row[None], right_and_slow) is not None,
    }
    try:
        library.build()
        with torch.inference_mode():
            for kind in ("", *used):
                refused = {kind}
                assert {name for name, ask in used.items() if not ask()} == refused - {""}
    finally:
        library._load.cache_clear()


@pytest.mark.parametrize(
    ("machine", "features", "vector", "expected"),
    [
        ("aarch64", "fp asimd sve", 32, ("sve256", "neon")),
        ("aarch64", "fp asimd sve", 64, ("neon",)),
        ("aarch64", "fp asimd", 0, ("neon",)),
        ("riscv64", "", 0, ()),
    ],
)
def test_targets_of_arm_depend_on_the_size_of_its_vectors(
    monkeypatch, tmp_path, machine: str, features: str, vector: int, expected
) -> None:
    information = tmp_path / "cpuinfo"
    information.write_text(f"processor\t: 0\nFeatures\t: {features}\n\n")
    monkeypatch.setattr(library, "Path", lambda _: information)
    monkeypatch.setattr(library, "sve_bytes", lambda: vector)
    monkeypatch.setattr(targets.platform, "machine", lambda: machine)
    cached = (library.supported, library.processor_flags, targets.targets_of_machine)
    for one in cached:
        one.cache_clear()
    try:
        assert library.supported() == expected
    finally:
        monkeypatch.undo()
        for one in cached:
            one.cache_clear()
