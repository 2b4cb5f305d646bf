"""The whole of `matcher evaluate`: rows, tables, bad input."""

import json
import os
import re

import cv2
import numpy as np
import PIL.Image
import pytest
from random_front_end import build

import matcher
from matcher.cli import main
from matcher.evaluate.run import (
    FrontEndKey,
    Method,
    MethodOptions,
    as_markdown,
    as_object,
    build_methods,
    evaluate,
)
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
        cv2.imwrite(
            str(folder / f"{number}.png"), cv2.resize(noise, (320, 240), interpolation=cv2.INTER_CUBIC)
        )
    return folder


@pytest.fixture
def found(photos):
    methods = [Method("nearest", matcher.load("nearest", max_keypoints=300))]
    return evaluate(synthetic_set(find_images(photos), count=12, levels=(1, 4)), methods)


def test_rows_and_bounds(found):
    assert list(found.values) == ["nearest", "oracle"]
    assert found.groups == (("level 1",), ("level 4",)) * 6
    oracle, nearest = found.values["oracle"], found.values["nearest"]
    assert np.all(oracle["precision3"] == 1) and np.all(oracle["recall3"] == 1)
    assert np.all((nearest["precision3"] >= 0) & (nearest["precision3"] <= 1))
    assert np.all(nearest["precision1"] <= nearest["precision3"])
    assert nearest["precision3"].mean() > 0.8 and nearest["recall3"].mean() > 0.5
    assert np.median(nearest["error"]) < 2
    assert np.all(np.isfinite(nearest["milliseconds"])) and np.all(nearest["kept"] == 1)
    assert np.all(np.isnan(oracle.get("milliseconds", np.nan)))  # nothing was matched, so nothing was timed


def test_the_onnx_engine_is_measured_as_torch_is(photos, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    options = ["--pairs", 2, "--levels", 1, "--max-keypoints", 128, "--output"]
    tables = {}
    for engine in ("torch", "onnx"):
        chosen = ["--engine", engine, "--precision", "float32", "--no-further-passes", "--no-refine"]
        assert (
            run("evaluate", photos, "--preset", "nearest-learned", *chosen, *options, tmp_path / engine) == 0
        )
        rows = json.loads((tmp_path / engine / "synthetic.json").read_text())["rows"]
        tables[engine] = {row["name"]: row["all"] for row in rows}
    assert tables["torch"].keys() == tables["onnx"].keys()
    for name, row in tables["torch"].items():
        assert tables["onnx"][name]["matches"]["value"] == pytest.approx(row["matches"]["value"], rel=0.02), (
            name
        )
    capsys.readouterr()
    assert run("evaluate", photos, "--preset", "loftr-outdoor", "--engine", "onnx", "--pairs", 1) == 2
    assert "loftr" in capsys.readouterr().err.lower()


def test_tables_say_how_they_were_made(found):
    table = as_object(found)
    json.dumps(table, allow_nan=False)
    assert table["pairs"] == 12 and table["pairs_by_group"] == {"level 1": 6, "level 4": 6}
    assert table["estimator"] == {
        "geometry": "homography",
        "method": "OpenCV USAC_MAGSAC, refined (weighed by covariances of refined matches)",
        "threshold_px": 3.0,
        "seeds": [0],
    }
    figure = table["rows"][0]["all"]["AUC@5 px"]
    assert figure["low"] <= figure["value"] <= figure["high"]
    difference = table["rows"][1]["minus_baseline"]["recall@3 px"]
    assert difference["value"] == pytest.approx(1 - table["rows"][0]["all"]["recall@3 px"]["value"], abs=1e-5)
    text = as_markdown(table)
    assert (
        "USAC_MAGSAC, refined (weighed by covariances of refined matches) at 3 px" in text
        and "12 pairs, 0 skipped" in text
        and "| level 4 | 6 | oracle |" in text
    )


def test_unrelated_pairs_count_what_is_kept(photos):
    found = evaluate(
        unrelated_set(find_images(photos), count=4), [Method("nearest", matcher.load("nearest"))]
    )
    assert list(found.values) == ["nearest"]
    assert set(found.values["nearest"]) >= {"matches", "accepted"}
    assert found.values["nearest"]["accepted"].mean() == 0


def test_command_runs_networks_side_by_side(photos, small_weights, tmp_path, capsys, monkeypatch):
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"):
        monkeypatch.setenv(variable, "2")  # given back after the test
    code = run(
        "evaluate", photos, "--preset", "hybrid", "--weights", small_weights, "--full-depth", "--pairs", 4,
        "--max-keypoints", 100, "--levels", "1,2", "--output", tmp_path / "out", "--threads", 1,
    )  # fmt: skip
    assert code == 0 and os.environ["OPENCV_FOR_THREADS_NUM"] == "1"
    printed, said = capsys.readouterr()
    table = json.loads((tmp_path / "out" / "synthetic.json").read_text())
    names = [row["name"] for row in table["rows"]]
    assert names == ["nearest", "hybrid small", "hybrid small, full depth", "oracle"]
    assert table["max_keypoints"] == 100 and table["mean_keypoints"] <= 100
    full = table["rows"][2]
    assert (
        full["depth"] == 3
        and full["all"]["layers"]["value"] == 3
        and full["all"]["keypoints kept"]["value"] == 1
    )
    assert len(full["weights"]["sha256"]) == 64
    assert (tmp_path / "out" / "synthetic.md").read_text().split("<!--")[0] in printed
    assert "synthetic: 4 of 4 pairs" in said


def test_two_front_end_files_are_measured_apart(photos, tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    network = build("learned").network
    save_front_end(network, "learned", other)
    code = run(
        "evaluate", photos, "--preset", "nearest-learned", "--frontend-weights", "shipped",
        "--frontend-weights", other, "--pairs", 2, "--max-keypoints", 200, "--output", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    rows = {r["name"]: r for r in json.loads((tmp_path / "out" / "synthetic.json").read_text())["rows"]}
    shipped, ours = (rows[f"nearest-learned with {x}"] for x in ("the shipped front end", "other"))
    assert shipped["all"]["repeatability@3 px"]["value"] > ours["all"]["repeatability@3 px"]["value"]
    assert {"oracle (sift)", "oracle (learned shipped)", f"oracle (learned {other})"} < rows.keys()


def test_methods_of_two_precisions_get_their_own_features(photos):
    """Each method of a run has the metrics that it has in a run of its own."""
    pair_set = synthetic_set(find_images(photos), count=2, levels=(1,))
    options = {"max_keypoints": 200, "device": "cpu"}
    methods = [
        Method(precision, matcher.load("nearest-learned", precision=precision, **options))
        for precision in ("float32", "bfloat16")
    ]
    together = evaluate(pair_set, methods).values
    for method in methods:
        alone = evaluate(pair_set, [method]).values[method.name]
        for key in ("error", "precision3", "repeatability", "matches"):
            assert np.array_equal(together[method.name][key], alone[key])
    assert not np.array_equal(together["float32"]["residual"], together["bfloat16"]["residual"])


def test_nearest_neighbours_extract_in_the_precision_asked_for():
    options = MethodOptions(network={"precision": "float32"})
    methods = {method.name: method.pipeline for method in build_methods(["hybrid-learned"], options=options)}
    assert list(methods) == ["nearest", "nearest-learned", "hybrid-learned"]
    assert FrontEndKey.of(methods["nearest-learned"]) == FrontEndKey.of(methods["hybrid-learned"])


def compare(photos, out, *arguments):
    code = run(
        "evaluate", photos, "--pairs", 4, "--levels", 1, "--max-keypoints", 200, "--output", out, *arguments
    )  # fmt: skip
    assert code == 0
    return json.loads((out / "synthetic.json").read_text())


def test_compare_presets(photos, tmp_path, capsys):
    table = compare(photos, tmp_path, "--compare", "nearest-learned", "--compare", "nearest")
    assert table["baseline"] == "nearest-learned"
    rows = {row["name"]: row for row in table["rows"]}
    assert list(rows)[:2] == ["nearest-learned", "nearest"] and "hybrid-learned" not in rows
    assert "minus_baseline" not in rows["nearest-learned"]
    for column in ("precision@3 px", "AUC@5 px"):
        difference = rows["nearest"]["minus_baseline"][column]
        apart = [rows[name]["all"][column]["value"] for name in ("nearest", "nearest-learned")]
        assert difference["value"] == pytest.approx(apart[0] - apart[1], abs=1e-5)
        assert difference["low"] <= difference["value"] <= difference["high"]
    assert "Difference from `nearest-learned` on the same pairs:" in capsys.readouterr().out


def test_compare_front_ends(photos, tmp_path):
    other = tmp_path / "other.safetensors"
    save_front_end(build("learned").network, "learned", other)
    arguments = ("--preset", "nearest-learned", "--compare", other, "--compare", "shipped")
    table = compare(photos, tmp_path / "out", *arguments)
    ours, shipped = table["rows"][:2]
    assert (ours["name"], shipped["name"]) == ("nearest-learned other", "nearest-learned shipped")
    assert (ours["frontend_weights"], shipped["frontend_weights"]) == (str(other), None)
    assert shipped["minus_baseline"]["recall@3 px"]["value"] != 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--compare", "nearest"], 2, "at least two"),
        (["--compare", "nearest", "--compare", "nearest"], 2, "at least two"),
        (["--compare", "nearest", "--compare", "nosuch"], 2, "neither a preset nor a file"),
        (["--compare", "nearest", "--compare", "{photos}/0.png"], 5, "not a safetensors file"),
        (["--compare", "nearest", "--compare", "hybrid", *["--preset", "hybrid"] * 2], 2, "--preset can be"),
    ],
)
def test_comparisons_that_cannot_be_made(photos, capsys, arguments, code, message):
    assert run("evaluate", photos, *(argument.format(photos=photos) for argument in arguments)) == code
    assert message in capsys.readouterr().err


def test_help_names_every_set(capsys):
    assert run("evaluate", "--help") == 0
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(NAMES) <= words


def test_unreadable_photos_are_skipped_and_counted(photos, tmp_path, capsys):
    (photos / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    code = run("evaluate", photos, "--preset", "nearest", "--pairs", 8, "--levels", 1, "--output", tmp_path)
    out, err = capsys.readouterr()
    assert code == 4
    assert "6 pairs, 2 skipped" in out and "broken.png" in out and "2 pairs were skipped" in err
    assert len(json.loads((tmp_path / "synthetic.json").read_text())["skipped"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{empty}"], 2, "is empty"),
        (["{text}"], 2, "not a list of pairs"),
        (["{folder_of_text}"], 2, "no known layout"),
        (["no_such_folder"], 2, "the sets are synthetic"),
        (["{broken}", "--preset", "nearest"], 3, "no pair could be read"),
        (["{photos}", "--levels", "1,9", "--preset", "nearest"], 2, "levels"),
        (["{photos}", "--levels", "easy", "--preset", "nearest"], 2, "--levels"),
        (["{photos}", "--images", "{photos}"], 2, "so --images has no effect"),
        (["{graf}", "--levels", "1"], 2, "so --levels has no effect"),
        (["{photos}", "--preset", "nearest", "--weights", "w.safetensors"], 2, "weights has no effect"),
        (["{photos}", "--preset", "nearest", "--full-depth"], 2, "full-depth has no effect"),
        (
            ["{photos}", "--preset", "hybrid", "--frontend-weights", "f"],
            2,
            "frontend-weights has no effect",
        ),
        (["{photos}", "--pairs", "0", "--preset", "nearest"], 2, "at least 1"),
        (["{photos}", "--preset", "nosuch"], 2, "unknown preset"),
        (["{photos}", "--weights", "absent.safetensors"], 5, "absent.safetensors"),
        (["{photos}", "--preset", "nearest", "--output", "{text}"], 2, "--output"),
    ],
)
def test_bad_input_is_a_message_and_a_code(photos, tmp_path, capsys, arguments, code, message):
    places = {name: tmp_path / name for name in ("empty", "folder_of_text", "broken")}
    for place in places.values():
        place.mkdir()
    (places["broken"] / "a.jpg").write_bytes(b"no picture")
    places["text"] = places["folder_of_text"] / "text.txt"
    places["text"].write_text("some words\n")
    places["graf"] = tmp_path / "graf"
    places["graf"].mkdir()
    (places["graf"] / "H1to2p").write_text("1 0 0\n0 1 0\n0 0 1\n")
    for number in (1, 2):
        PIL.Image.new("L", (40, 30)).save(places["graf"] / f"img{number}.png")
    given = [argument.format(photos=photos, **places) for argument in arguments]
    assert run("evaluate", *given) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
