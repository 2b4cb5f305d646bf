"""The benchmark: its arithmetic, its references, and a small run of every row; nothing about speed."""

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from matcher.benchmark import rows as network_rows
from matcher.benchmark.report import check_device, format_row, run_benchmark, to_json
from matcher.benchmark.rows import OFF, BenchmarkRow, as_kornia
from matcher.benchmark.timing import (
    PeakRates,
    Samples,
    Stopwatch,
    Workload,
    count_workload,
    describe_machine,
    kornia_lightglue,
    lightglue_tensors,
    measure_peak_rates,
    memory_above,
    naive_sinkhorn,
    random_batch,
    with_parameters,
)
from matcher.config import ContextConfig, NetworkConfig
from matcher.errors import UsageError
from matcher.match.network import MatchingNetwork
from matcher.match.sinkhorn import sinkhorn
from matcher.types import Features

CPU = torch.device("cpu")
WATCH = Stopwatch(CPU, repeats=2)


class Clock:
    """A clock that calls move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_samples() -> None:
    samples = Samples((3.0, 1.0, 8.0, 2.0))
    assert (samples.minimum, samples.median, samples.maximum) == (1.0, 2.5, 8.0)


def test_calls_alternate_after_a_warm_up_that_does_not_count() -> None:
    clock, log = Clock(), []

    def call(name: str, first: float, later: float) -> None:
        clock.now += first if name not in log else later
        log.append(name)

    watch = Stopwatch(CPU, repeats=3, clock=clock)
    times = watch.alternate({"a": lambda: call("a", 50, 2), "b": lambda: call("b", 90, 6)})
    assert log == ["a", "b"] * 4
    assert times == {"a": Samples((2, 2, 2)), "b": Samples((6, 6, 6))}


def test_no_round_begins_when_the_time_is_over() -> None:
    times = Stopwatch(CPU, repeats=1000, seconds=0.0).alternate({"a": lambda: None})
    assert len(times["a"].values) == 1


def test_ratios_and_units() -> None:
    row = BenchmarkRow("work", "peer", Samples((0.1, 0.2, 0.3)), Samples((0.8,)), note="so")
    assert row.ratio == pytest.approx(4.0)
    assert format_row(row) == (
        "| work | peer | 100.0 / 200.0 / 300.0 ms | 800.0 / 800.0 / 800.0 ms | 4.00 | so |"
    )
    memory = replace(row, ours=Samples((2**20,)), theirs=Samples((3 * 2**20,)), unit="MiB")
    assert "1.0 / 1.0 / 1.0 MiB | 3.0 / 3.0 / 3.0 MiB | 3.00" in format_row(memory)
    assert replace(row, ours=Samples((0.0,))).ratio == float("inf")


@pytest.mark.parametrize("shared", [True, False])
def test_operations_are_those_that_torch_counts(shared: bool) -> None:
    context = ContextConfig(dim=32, heads=2, depth=3, shared_qk=shared)
    with torch.random.fork_rng(devices=[]):
        model = MatchingNetwork(NetworkConfig(descriptor_dim=32, project=False, context=context)).eval()
    model = model.with_policy(replace(model.config.policy, **OFF))
    sides = [replace(random_batch(n, 1, CPU), kind="any") for n in (50, 70)]
    sides = [replace(f, descriptors=normalize(f.descriptors[..., :32], dim=-1)) for f in sides]
    with FlopCounterMode(display=False) as counter:  # with gradients attention is plain matrix products
        model(*sides)
    # Beside the layers and the similarity: upright positions (twice) and directions, phases, matchabilities.
    scale = 2 * (50 + 70)
    upright, phases, logits = scale * 3 * 4, scale * 5 * 8, scale * 32
    workload = count_workload(context, 50, 70, 4)
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mv" not in str(op))
    assert counted == workload.operations + upright + phases + logits


def test_the_roofline_is_the_slower_of_both_limits() -> None:
    assert Workload(operations=100, bytes=10).seconds(10.0, 10.0) == 10.0
    assert Workload(operations=100, bytes=10).seconds(100.0, 0.5) == 20.0


def test_the_machine_and_its_peak_rates() -> None:
    machine = describe_machine(CPU)
    assert machine.processor
    assert machine.threads == torch.get_num_threads()
    peaks = measure_peak_rates(WATCH, torch.bfloat16, side=64)
    assert min(peaks.float32, peaks.half, peaks.copy) > 0


def test_memory_is_what_a_call_allocates() -> None:
    if memory_above(lambda: None, CPU) is None:
        pytest.skip("memory cannot be measured here")
    size = 64 * 2**20
    measured = memory_above(lambda: torch.ones(size, dtype=torch.uint8), CPU)
    assert 0.8 * size < measured < 1.5 * size


def test_naive_sinkhorn_is_ours_without_a_stop() -> None:
    scores = 3 * torch.randn(2, 9, 7, generator=torch.Generator().manual_seed(0))
    u, v = naive_sinkhorn(scores, 30)
    log_p = scores + u.unsqueeze(2) + v.unsqueeze(1)
    ours = sinkhorn(scores, max_iterations=30, tolerance=None).log_plan(scores)
    torch.testing.assert_close(log_p, ours, atol=1e-4, rtol=0)


def test_a_reference_and_ours_with_its_parameters_find_the_same() -> None:
    peer = kornia_lightglue()
    ours = with_parameters(lightglue_tensors(peer), "lightglue-superpoint", CPU, "float32", **OFF)
    sides = [random_batch(40, 2, CPU, seed) for seed in (0, 1)]
    with torch.no_grad():
        theirs = peer({f"image{i}": as_kornia(side) for i, side in enumerate(sides)})
    for matches, expected in zip(ours(*sides), theirs["matches"], strict=True):
        assert len(matches) > 5
        assert {*map(tuple, matches.indices.tolist())} == {*map(tuple, expected.tolist())}


def test_ragged_rows_count_pairs_that_differ(monkeypatch) -> None:
    true_call = network_rows.with_parameters

    def swapped(*arguments, **options):
        matcher = true_call(*arguments, **options)

        def match(features0: Features, features1: Features):
            found = matcher(features0, features1)
            return found[::-1] if len(found) > 1 else found

        return match

    monkeypatch.setattr(network_rows, "with_parameters", swapped)
    (row,) = network_rows.ragged(replace(WATCH, repeats=1), 2, 30, 60)
    assert not row.note.startswith("2 of 2")


def test_every_row_runs(views, shipped_weights) -> None:
    pytest.importorskip("transformers")
    lines = []
    report = run_benchmark(replace(WATCH, repeats=1), views, quick=True, progress=lines.append)
    works = " ".join(row.work for row in report.rows)
    names = "LightGlue", "SuperGlue", "LoFTR", "in one batch", "Sinkhorn", "attention layers"
    for part in (*names, "features cached"):
        assert part in works
    assert len(lines) == 5 + len(report.rows) + 1
    assert all(min(row.ours.minimum, row.theirs.minimum) > 0 for row in report.rows if row.unit == "ms")
    assert set(report.stages) >= {"read", "extract", "match", "verify", "total"}
    data = json.loads(json.dumps(to_json(report)))
    assert [row["work"] for row in data["rows"]] == [row.work for row in report.rows]
    assert data["rows"][0]["ours"]["median"] == pytest.approx(report.rows[0].ours.median)
    refining = next(row for row in report.rows if "refining" in row.work)
    count, accepted = int(refining.work.split()[1]), int(refining.note.split()[0])
    assert refining.work == f"refining {count} matches" and 30 <= count <= 50
    assert count / 2 < accepted <= count
    ragged = next(row for row in report.rows if "in one batch" in row.work)
    assert ragged.note.startswith("3 of 3")


def test_only_the_rows_asked_for(views) -> None:
    report = run_benchmark(WATCH, views, quick=True, only="ragged")
    assert [row.against for row in report.rows] == ["one by one"]
    assert report.stages == {}


@pytest.mark.slow
def test_rows_in_onnx_runtime(views, shipped_weights) -> None:
    pytest.importorskip("onnxscript")
    report = run_benchmark(replace(WATCH, repeats=1), views, quick=True, only="onnx")
    against = {row.against for row in report.rows}
    assert {"our torch, float32", "the same without kernels"} < against
    assert {"kornia's ALIKED (n16), torch", "kornia's, exported by torch"} < against
    assert all(row.ours.minimum > 0 and row.theirs.minimum > 0 for row in report.rows)


def test_devices() -> None:
    assert check_device("cpu") == CPU
    with pytest.raises(UsageError, match="cpu or cuda"):
        check_device("mps")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="no CUDA"):
            check_device("cuda")


def test_rows_say_their_share_of_the_roofline() -> None:
    slow = PeakRates(float32=1e6, half=1e6, copy=1e12)
    row = next(network_rows.lightglue(replace(WATCH, repeats=1), 16, slow))
    workload = count_workload(ContextConfig(dim=256, depth=9), 16, 16, 2)
    assert f"{workload.operations / 1e6 / row.ours.median:.0%} of the roofline" in row.note
