"""The whole of `matcher evaluate`: rows, tables, calibration, bad input."""

import json
import re

import cv2
import numpy as np
import PIL.Image
import pytest
from random_front_end import build

import matcher
from matcher.cli import main
from matcher.evaluate.methods import Method, MethodOptions, build_methods
from matcher.evaluate.run import as_markdown, as_object, evaluate
from matcher.evaluate.sets import NAMES
from matcher.evaluate.synthetic import synthetic_set, unrelated_set
from matcher.images import find_images
from matcher.weights.files import save_front_end


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture
def photos(tmp_path, rng):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        noise = rng.integers(0, 256, (60, 80, 3)).astype(np.uint8)
        large = cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(folder / f"{number}.png"), large)
    return folder


@pytest.fixture
def found(photos):
    methods = [
        Method(name, matcher.load("nearest", max_keypoints=count))
        for name, count in (("few", 60), ("nearest", 300))
    ]
    return evaluate(synthetic_set(find_images(photos), count=12, levels=(1, 4)), methods)


def table_of(folder, name="synthetic"):
    return json.loads((folder / f"{name}.json").read_text())


def test_metrics_of_easy_and_hard_pairs(found):
    assert found.groups == (("level 1",), ("level 4",)) * 6 and found.skipped == ()
    nearest = found.values["nearest"]
    assert np.all(nearest["precision1"] <= nearest["precision3"])
    assert nearest["precision3"].mean() > 0.8 and nearest["recall3"].mean() > 0.5
    assert np.median(nearest["error"]) < 2
    assert np.all(nearest["wall"] > 0) and np.all(nearest["kept"] == 1)
    assert nearest["matches"].mean() > found.values["few"]["matches"].mean()


def test_tables_say_how_they_were_made(found):
    table = as_object(found)
    json.dumps(table, allow_nan=False)
    assert table["pairs"] == 12 and table["pairs_by_group"] == {"level 1": 6, "level 4": 6}
    assert table["estimator"]["geometry"] == "homography" and table["estimator"]["threshold_px"] == 3.0
    few, nearest = table["rows"]
    for averages in (nearest["all"], nearest["groups"]["level 1"], few["minus_baseline"]):
        value = averages["AUC@5 px"]
        assert value["low"] <= value["value"] <= value["high"]
    apart = few["all"]["recall@3 px"]["value"] - nearest["all"]["recall@3 px"]["value"]
    assert few["minus_baseline"]["recall@3 px"]["value"] == pytest.approx(apart, abs=1e-5)
    text = as_markdown(table)
    assert "12 pairs, 0 skipped" in text and "| level 4 | 6 | nearest |" in text


def test_unrelated_pairs_count_what_is_kept(photos):
    methods = [Method("nearest", matcher.load("nearest"))]
    values = evaluate(unrelated_set(find_images(photos), count=4), methods).values["nearest"]
    assert values["accepted"].mean() == 0 and "precision3" not in values


def test_command_runs_networks_side_by_side(photos, small_weights, tmp_path, capsys):
    code = run(
        "evaluate", photos, "--preset", "hybrid", "--weights", small_weights, "--full-depth", "--pairs", 4,
        "--max-keypoints", 100, "--levels", "1,2", "--output", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    printed, table = capsys.readouterr().out, table_of(tmp_path / "out")
    assert [row["name"] for row in table["rows"]] == ["nearest", "hybrid small", "hybrid small, full depth"]
    full = table["rows"][2]
    assert full["depth"] == full["all"]["layers"]["value"] == 3 and len(full["weights"]["sha256"]) == 64
    assert full["all"]["keypoints"]["value"] <= 100 and full["all"]["keypoints kept"]["value"] == 1
    assert (tmp_path / "out" / "synthetic.md").read_text().split("<!--")[0] in printed


def test_two_front_end_files_are_measured_apart(photos, tmp_path):
    save_front_end(build("learned").network, "learned", other := tmp_path / "other.safetensors")
    code = run(
        "evaluate", photos, "--preset", "nearest-learned", "--frontend-weights", "shipped",
        "--frontend-weights", other, "--pairs", 2, "--max-keypoints", 200, "--output", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    rows = {row["name"]: row for row in table_of(tmp_path / "out")["rows"]}
    shipped, ours = (rows[f"nearest-learned with {x}"] for x in ("the shipped front end", "other"))
    assert shipped["all"]["repeatability@3 px"]["value"] > ours["all"]["repeatability@3 px"]["value"]
    assert (ours["frontend_weights"], shipped["frontend_weights"]) == (str(other), None)


def test_nearest_neighbours_of_the_same_front_end_are_a_row_too():
    options = MethodOptions(network={"precision": "float32"})
    methods = {method.name: method.pipeline for method in build_methods(["hybrid-learned"], options=options)}
    assert list(methods) == ["nearest", "nearest-learned", "hybrid-learned"]
    assert methods["nearest-learned"].extractor.dtype == methods["hybrid-learned"].extractor.dtype


def test_compare_presets(photos, tmp_path, capsys):
    compared = ["--compare", "nearest-learned", "--compare", "nearest"]
    small = ["--pairs", 4, "--levels", 1, "--max-keypoints", 200]
    assert run("evaluate", photos, *compared, *small, "--output", tmp_path) == 0
    table = table_of(tmp_path)
    first, second = table["rows"]
    assert table["baseline"] == first["name"] == "nearest-learned" and "minus_baseline" not in first
    apart = second["all"]["AUC@5 px"]["value"] - first["all"]["AUC@5 px"]["value"]
    assert second["minus_baseline"]["AUC@5 px"]["value"] == pytest.approx(apart, abs=1e-5)
    assert "Difference from `nearest-learned`" in capsys.readouterr().out


def test_the_onnx_engine_is_measured_as_torch_is(photos, tmp_path):
    pytest.importorskip("onnxruntime")
    counts = []
    for engine in ("torch", "onnx"):
        chosen = ["--preset", "nearest-learned", "--engine", engine, "--precision", "float32", "--no-refine"]
        small = ["--pairs", 2, "--levels", 1, "--max-keypoints", 128]
        assert run("evaluate", photos, *chosen, *small, "--output", tmp_path / engine) == 0
        counts.append(table_of(tmp_path / engine)["rows"][-1]["all"]["matches"]["value"])
    assert counts[1] == pytest.approx(counts[0], rel=0.02)


def test_calibration_on_the_command_line(photos, tmp_path, capfd):
    compared = ["--compare", "nearest", "--compare", "nearest-learned", "--calibration"]
    small = ["--pairs", 2, "--max-keypoints", 200]
    assert run("evaluate", photos, *compared, *small, "--output", tmp_path) == 0
    assert (tmp_path / "synthetic-calibration.md").read_text().split("<!--")[0] in capfd.readouterr().out
    table = table_of(tmp_path, "synthetic-calibration")
    assert len(table["rows"]) == 2 and sum(table["rows"][0]["verdicts"].values()) == 2
    assert 0 <= table["rows"][1]["expected_calibration_error"] <= 1
    assert (tmp_path / "synthetic-calibration.png").stat().st_size > 5000


def test_help_names_every_set(capsys):
    assert run("evaluate", "--help") == 0
    assert set(NAMES) <= set(re.findall(r"\w+", capsys.readouterr().out))


def test_unreadable_photos_are_skipped_and_counted(photos, tmp_path, capsys):
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert (
        run("evaluate", photos, "--preset", "nearest", "--pairs", 8, "--levels", 1, "--output", tmp_path) == 4
    )
    out = capsys.readouterr().out
    assert "6 pairs, 2 skipped" in out and "broken.png" in out
    assert len(table_of(tmp_path)["skipped"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["{empty}"], 2, "empty"),
        (["{text}"], 2, "text.txt"),
        (["no_such_folder"], 2, "synthetic"),
        (["{broken}", "--preset", "nearest"], 3, "a.jpg"),
        (["{photos}", "--levels", "1,9", "--preset", "nearest"], 2, "levels"),
        (["{photos}", "--levels", "easy", "--preset", "nearest"], 2, "--levels"),
        (["{photos}", "--images", "{photos}"], 2, "--images"),
        (["{graf}", "--levels", "1"], 2, "--levels"),
        (["{photos}", "--preset", "nearest", "--weights", "w.safetensors"], 2, "weights"),
        (["{photos}", "--preset", "hybrid", "--frontend-weights", "f"], 2, "frontend-weights"),
        (["{photos}", "--pairs", "0", "--preset", "nearest"], 2, "at least 1"),
        (["{photos}", "--preset", "nosuch"], 2, "nosuch"),
        (["{photos}", "--peer", "nosuch"], 2, "lightglue-aliked"),
        (["{photos}", "--weights", "absent.safetensors"], 5, "absent.safetensors"),
        (["{photos}", "--preset", "nearest", "--output", "{text}"], 2, "--output"),
        (["{photos}", "--compare", "nearest"], 2, "--compare"),
        (["{photos}", "--compare", "nearest", "--compare", "nosuch"], 2, "nosuch"),
        (["{photos}", "--compare", "nearest", "--compare", "{text}"], 5, "text.txt"),
    ],
)
def test_bad_input_is_a_message_and_a_code(photos, tmp_path, capsys, arguments, code, named):
    places = {name: tmp_path / name for name in ("empty", "broken", "graf")}
    for place in places.values():
        place.mkdir()
    (places["broken"] / "a.jpg").write_bytes(b"no picture")
    places["text"] = tmp_path / "text.txt"
    places["text"].write_text("some words\n")
    (places["graf"] / "H1to2p").write_text("1 0 0\n0 1 0\n0 0 1\n")
    for number in (1, 2):
        PIL.Image.new("L", (40, 30)).save(places["graf"] / f"img{number}.png")
    given = [argument.format(photos=photos, **places) for argument in arguments]
    assert run("evaluate", *given) == code
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err
