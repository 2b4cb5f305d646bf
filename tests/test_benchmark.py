"""The benchmark: how calls are timed, its references, and a small run of every row; nothing about speed."""

import json

import pytest
import torch

from matcher.benchmark import (
    OFF,
    BenchmarkRow,
    Samples,
    Stopwatch,
    as_kornia,
    check_device,
    format_row,
    kornia_lightglue,
    published_names,
    random_batch,
    run_benchmark,
    to_json,
    with_parameters,
)
from matcher.errors import UsageError

CPU = torch.device("cpu")
WATCH = Stopwatch(CPU, repeats=1)


def test_calls_alternate_after_a_warm_up_that_does_not_count() -> None:
    now, log = [0.0], []

    def call(name: str, first: float, later: float) -> None:
        now[0] += first if name not in log else later
        log.append(name)

    watch = Stopwatch(CPU, repeats=3, clock=lambda: now[0])
    times = watch.alternate({"a": lambda: call("a", 50, 2), "b": lambda: call("b", 90, 6)})
    assert log == ["a", "b"] * 4
    assert times == {"a": Samples((2, 2, 2)), "b": Samples((6, 6, 6))}
    assert len(Stopwatch(CPU, repeats=1000, seconds=0.0).alternate({"a": lambda: None})["a"].values) == 1


def test_a_row_has_medians_and_their_ratio() -> None:
    row = BenchmarkRow("work", "peer", Samples((0.1, 0.2, 0.9)), Samples((0.8,)), note="so")
    assert row.ratio == pytest.approx(4.0)
    assert format_row(row) == "| work | peer | 100.0 / 200.0 / 900.0 | 800.0 / 800.0 / 800.0 | 4.00 | so |"


def test_a_reference_and_ours_with_its_parameters_find_the_same() -> None:
    peer = kornia_lightglue()
    options = {"device": "cpu", "precision": "float32", **OFF}
    ours = with_parameters(published_names(peer), "lightglue-superpoint", **options).matcher
    sides = [random_batch(40, 2, CPU, seed) for seed in (0, 1)]
    with torch.no_grad():
        theirs = peer(as_kornia(*sides))
    for matches, expected in zip(ours(*sides), theirs["matches"], strict=True):
        assert len(matches) > 5
        assert {*map(tuple, matches.indices.tolist())} == {*map(tuple, expected.tolist())}


@pytest.mark.slow
def test_every_row_runs(views, shipped_weights) -> None:
    pytest.importorskip("transformers")
    lines = []
    report = run_benchmark(WATCH, views, quick=True, progress=lines.append)
    works = " ".join(row.work for row in report.rows)
    for part in ("LightGlue", "SuperGlue", "LoFTR", "front end", "pair of", "`matcher match", "refining"):
        assert part in works
    assert len(lines) == 4 + len(report.rows)
    data = json.loads(json.dumps(to_json(report)))
    assert [row["work"] for row in data["rows"]] == [row.work for row in report.rows]


def test_only_the_rows_asked_for(views, shipped_weights) -> None:
    report = run_benchmark(WATCH, views, quick=True, only="matching")
    against = {"float32", "early exit and pruning off"}
    assert against <= {row.against for row in report.rows} <= against | {"no kernels"}
    assert all(min(row.ours.values) > 0 and row.work.startswith("matching") for row in report.rows)


@pytest.mark.slow
@pytest.mark.parametrize("only", ["onnx", "collection", "sfm"])
def test_slow_rows(only, views, tmp_path, shipped_weights) -> None:
    from collection_scene import render_photos

    pytest.importorskip("onnxruntime" if only == "onnx" else "pycolmap")
    render_photos(tmp_path / "photos")
    report = run_benchmark(WATCH, views, quick=True, only=only, photos=tmp_path / "photos")
    assert report.rows and all(min(row.ours.values) > 0 for row in report.rows)
    if only == "sfm":
        assert report.rows[0].note.startswith("ours: 5 registered")


def test_what_cannot_be_measured_is_said(views) -> None:
    with pytest.raises(UsageError, match="photos"):
        run_benchmark(WATCH, views, quick=True, only="sfm")
    assert check_device("cpu") == CPU
    with pytest.raises(UsageError, match="mps"):
        check_device("mps")
