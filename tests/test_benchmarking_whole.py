"""The benchmark's rows of whole work: that they are of what they say, in small; nothing about speed."""

import os
from dataclasses import replace
from time import sleep

import numpy as np
import pytest
import torch
from collection_scene import render_photos

from matcher.benchmark import rows as growth_rows
from matcher.benchmark import rows as kernel_rows
from matcher.benchmark import rows as process_rows
from matcher.benchmark.report import run_benchmark
from matcher.benchmark.rows import BenchmarkRow
from matcher.benchmark.timing import Samples, Stopwatch, scenes, tilted_views
from matcher.errors import MatcherError, UsageError
from matcher.kernels import SWITCH
from matcher.kernels import loader as library
from matcher.kernels.loader import Trial, supported

WATCH = Stopwatch(torch.device("cpu"), repeats=1)
ALONE = {"threads": 1, "processor_time": False}


def rows_of(images, only: str, **options) -> list[BenchmarkRow]:
    report = run_benchmark(WATCH, images, quick=True, only=only, **options)
    for row in report.rows:
        assert row.ours.minimum > 0 and row.theirs.minimum > 0
    return report.rows


@pytest.mark.slow
def test_a_pair_and_its_memory(views, shipped_weights) -> None:
    rows = rows_of(views, "pairs")
    assert [row.unit for row in rows].count("MiB") == 1
    assert sum("OpenCV" in row.against for row in rows) == 3
    assert any("command" in row.against or "`matcher match" in row.work for row in rows)


@pytest.mark.slow
def test_pairs_of_a_collection_beside_three_others(views, shipped_weights) -> None:
    pytest.importorskip("pycolmap")
    rows = rows_of(views, "collection")
    assert [row.unit for row in rows] == ["ms", "MiB"] * 3
    assert [row.against.split()[0] for row in rows[::2]] == ["kornia's", "OpenCV:", "COLMAP:"]
    assert all("of 3 of a collection" in row.work for row in rows[::2])


@pytest.mark.slow
def test_a_reconstruction_beside_colmaps_own(tmp_path) -> None:
    pytest.importorskip("pycolmap")
    render_photos(tmp_path / "photos")
    time, memory = process_rows.sfm_rows(WATCH, tmp_path / "photos")
    assert time.unit == "s" and memory.unit == "MiB"
    assert time.note.startswith("ours: 5 registered") and "COLMAP: 5 registered" in time.note


def test_without_photos_nothing_is_reconstructed(views) -> None:
    with pytest.raises(UsageError, match="needs photos of one place"):
        run_benchmark(WATCH, views, quick=True, only="sfm")


def test_the_process_of_another_is_small(tmp_path, views) -> None:
    """What is measured of OpenCV has not loaded our networks."""
    options = {"images": [str(path) for path in views], "size": (160, 120), "points": 100}
    found = process_rows.measure_alone("pair, OpenCV", options, **ALONE)
    assert 0 < found.seconds < 5 and set(found.result) == {"matches"}
    assert 20e6 < found.peak_bytes < 250e6


def test_what_a_process_said_before_it_failed() -> None:
    with pytest.raises(MatcherError, match="cannot be opened"):
        options = {"images": ["/nowhere/a.png"] * 2, "size": (8, 8), "points": 1}
        process_rows.measure_alone("pair, OpenCV", options, **ALONE)


def test_processes_alternate(monkeypatch) -> None:
    asked = []

    def alone(name, options, **means):
        asked.append((name, bool(options.get("run"))))
        return process_rows.Measured(1.0, 1, {})

    monkeypatch.setattr(process_rows, "measure_alone", alone)
    found = process_rows.alternate_processes(replace(WATCH, repeats=2), {"a": {"run": ""}, "b": {}})
    assert asked == [("a", True), ("b", False)] * 2
    assert {name: len(values) for name, values in found.items()} == {"a": 2, "b": 2}
    asked.clear()
    process_rows.alternate_processes(replace(WATCH, repeats=9, seconds=0.0), {"a": {}})
    assert len(asked) == 1


def test_photos_are_the_first_ones(tmp_path, views) -> None:
    folder = tmp_path / "all"
    render_photos(folder)
    (tmp_path / "one").mkdir()
    chosen = process_rows.copy_photos(folder, views, tmp_path / "one", 3)
    assert sorted(p.name for p in chosen.iterdir()) == sorted(p.name for p in folder.iterdir())[:3]
    with pytest.raises(UsageError, match="holds 5 photos, and 9 are needed"):
        process_rows.copy_photos(folder, views, tmp_path, 9)


def test_a_power_is_fitted() -> None:
    sizes = (10, 20, 40, 80)
    assert growth_rows.fitted_power(sizes, [3 * n**1.7 for n in sizes]) == pytest.approx(1.7)
    costs = [Samples((n**2.0,)) for n in sizes]
    row = growth_rows.grown("work", "images", sizes, costs)
    assert (row.work, row.against) == ("work, 80 images", "40 images")
    assert row.note == "grows by the power 2.00; 2.00 since 10"


def test_growth_with_keypoints(views, shipped_weights) -> None:
    rows = rows_of(views, "growth of keypoints")
    assert [row.work.split(", ")[-1] for row in rows] == ["64 keypoints", "128 keypoints"]


@pytest.mark.slow
def test_growth_with_images(views, shipped_weights) -> None:
    rows = rows_of(views, "growth of images")
    assert [row.work.split()[0] for row in rows] == ["extracting,", "finding", "matching"]
    assert {row.against for row in rows} == {"4 images"}


def test_growth_with_stored_pairs(views) -> None:
    seconds, disk = growth_rows.stored_pair_rows(WATCH, (30, 300))
    assert (seconds.unit, disk.unit) == ("s", "MiB")
    assert 0.3 < disk.ours.median / 300 / 1024 < 4  # kB a pair


@pytest.mark.slow
def test_two_workers_and_ray_beside_one(views, shipped_weights) -> None:
    rows = rows_of(views, "workers")
    assert rows[0].work.endswith("2 workers") and all(row.against == "1 worker" for row in rows)


def test_scenes_are_seen_ten_times_each(views) -> None:
    made = list(scenes(views, 21, 64))
    assert len(made) == 21 and {image.shape for image in made} == {(64, 64)}
    again = list(scenes(views, 3, 64))
    assert all(np.array_equal(one, two) for one, two in zip(made, again, strict=False))

    def likeness(a, b) -> float:
        inner = np.s_[16:48, 16:48]
        return float(np.corrcoef(a[inner].ravel(), b[inner].ravel())[0, 1])

    within = np.mean([likeness(made[i], made[j]) for i in range(10) for j in range(i)])
    across = np.mean([abs(likeness(made[i], made[j])) for i in range(10) for j in range(10, 20)])
    assert within > across


def test_views_of_two_images(views) -> None:
    made = tilted_views(views, 4)
    assert len(made) == 4 and not np.array_equal(made[0], made[2])


def test_kernels_beside_stock_operators(monkeypatch) -> None:
    """The slow ones are marked; the variable is left as it was."""
    best = next((name for name in supported() if library._load(name) is not None), None)
    if best is None:
        pytest.skip("no kernels were compiled")

    def slow() -> torch.Tensor:
        sleep(0.002)
        return torch.ones(1)

    def make_good() -> Trial:
        return Trial(lambda: torch.ones(1), slow, 0.1)

    def make_bad() -> Trial:
        return Trial(slow, lambda: torch.ones(1), 0.1)

    monkeypatch.setattr(kernel_rows, "supported", lambda: (best,))
    monkeypatch.setattr(kernel_rows, "TRIALS", {"good": make_good, "bad": make_bad})
    monkeypatch.setenv(SWITCH, "0")
    rows = list(kernel_rows.kernel_rows(WATCH))
    assert [(row.work, row.note) for row in rows] == [
        (f"kernel {best}: good", ""),
        (f"kernel {best}: bad", "left alone here"),
    ]
    assert os.environ[SWITCH] == "0"
