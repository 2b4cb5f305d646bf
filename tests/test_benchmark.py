"""The benchmark: how calls are timed, its references, and a small run of every row; nothing about speed."""

import pytest
import torch

from matcher.benchmark import (
    OFF,
    Bench,
    as_kornia,
    kornia_lightglue,
    random_batch,
    run_benchmark,
    with_parameters,
)
from matcher.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture
def bench(views) -> Bench:
    return Bench(CPU, views, repeats=1, quick=True)


def test_calls_alternate_after_a_warm_up_that_does_not_count(views) -> None:
    now, log = [0.0], []

    def call(name: str, first: float, later: float) -> None:
        now[0] += first if name not in log else later
        log.append(name)

    bench = Bench(CPU, views, repeats=3, clock=lambda: now[0])
    times = bench.alternate({"a": lambda: call("a", 50, 2), "b": lambda: call("b", 90, 6)})
    assert log == ["a", "b"] * 4
    assert times == {"a": (2, 2, 2), "b": (6, 6, 6)}


def test_a_reference_and_ours_with_its_parameters_find_the_same() -> None:
    peer = kornia_lightglue()
    options = {"device": "cpu", "precision": "float32", **OFF}
    ours = with_parameters(peer.state_dict(), "lightglue-superpoint", **options).matcher
    sides = [random_batch(40, 2, CPU, seed) for seed in (0, 1)]
    with torch.no_grad():
        theirs = peer(as_kornia(*sides))
    for matches, expected in zip(ours(*sides), theirs["matches"], strict=True):
        assert len(matches) > 5
        assert {*map(tuple, matches.indices.tolist())} == {*map(tuple, expected.tolist())}


@pytest.mark.slow
def test_every_row_runs(bench, shipped_weights) -> None:
    pytest.importorskip("transformers")
    lines = []
    works = " ".join(row.work for row in run_benchmark(bench, progress=lines.append))
    for part in ("LightGlue", "SuperGlue", "LoFTR", "front end", "pair of", "`matcher match", "in a batch"):
        assert part in works
    assert len(lines) > 10


def test_only_the_rows_asked_for(bench, shipped_weights) -> None:
    rows = run_benchmark(bench, only="matching")
    assert rows and all(min(row.ours) > 0 and row.work.startswith("matching") for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(("only", "package"), [("onnx", "onnxruntime"), ("collection", "pycolmap")])
def test_slow_rows(only, package, views, tmp_path, shipped_weights) -> None:
    from collection_scene import render_photos

    pytest.importorskip(package)
    render_photos(tmp_path / "photos")
    rows = run_benchmark(Bench(CPU, views, tmp_path / "photos", quick=True, repeats=1), only=only)
    assert rows and all(min(row.ours) > 0 for row in rows)


def test_what_cannot_be_measured_is_said(bench) -> None:
    with pytest.raises(UsageError, match="photos"):
        run_benchmark(bench, only="collection")
