import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import typer
from command import run

import matcher
from matcher import loading as loading_module
from matcher.cli.output import exit_code_of, messages

ROOT = Path(__file__).resolve().parent.parent
KEYS = [
    "preset", "weights", "image0", "image1", "keypoints0", "keypoints1", "matches", "layers_run", "layers",
    "refinement", "passes", "budget", "kept0", "kept1", "geometry", "verdict", "seconds",
]  # fmt: skip
ARRAYS = {
    "keypoints0", "keypoints1", "indices", "points0", "points1", "scores", "prior_scores", "inliers",
    "geometry_kind", "matrix", "cam1_from_cam0", "size0", "size1", "refinement", "covariances",
    "correlations",
}  # fmt: skip


def match(views: tuple[Path, Path], *options: object) -> int:
    return run("match", *views, "--preset", "nearest", "--max-keypoints", 400, *options)


def test_json_is_one_object_and_nothing_else(views, capfd):
    assert match(views, "--json") == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err == ""
    assert list(found) == KEYS
    assert found["preset"] == "nearest"
    assert found["weights"] is None
    assert found["image0"] == {"path": str(views[0]), "width": 800, "height": 600}
    assert list(found["geometry"]) == [
        "kind", "status", "inliers", "rejected_inliers", "matrix", "cam1_from_cam0", "matrices",
    ]  # fmt: skip
    assert found["geometry"]["kind"] == "fundamental"
    assert found["geometry"]["status"] == "ok"
    assert 12 <= found["geometry"]["inliers"] <= found["matches"]
    assert np.shape(found["geometry"]["matrix"]) == (3, 3)
    assert list(found["seconds"]) == ["read", "extract", "match", "refine", "verify", "total"]


def test_the_network_is_named(views, small_weights, capfd):
    assert (
        run(
            "match",
            *views,
            "--preset",
            "hybrid",
            "--weights",
            small_weights,
            "--json",
            "--max-keypoints",
            200,
        )
        == 0
    )
    found = json.loads(capfd.readouterr().out)
    assert found["preset"] == "hybrid"
    assert found["weights"]["name"] == "small"
    assert len(found["weights"]["sha256"]) == 64
    assert (found["layers_run"], found["layers"]) == (3, 3)


def test_the_default_call_works_with_shipped_weights(views, shipped_weights, capfd):
    assert run("match", *views) == 0
    out = capfd.readouterr().out
    assert "hybrid" in out
    assert "are inliers of one fundamental matrix" in out


def test_a_ratio_is_for_nearest_neighbours(views, capfd):
    counts = []
    for ratio in (0.9, 0.7):
        assert match(views, "--ratio", ratio, "--json") == 0
        counts.append(json.loads(capfd.readouterr().out)["matches"])
    expected = [
        len(matcher.load("nearest", max_keypoints=400, ratio=r).match(*views).matches) for r in (0.9, 0.7)
    ]
    assert counts == expected and counts[0] > counts[1] > 0


def test_the_summary(views, capfd):
    assert match(views) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "400 keypoints" in out
    assert "are inliers of one fundamental matrix" in out
    assert "x1ᵀ M x0" not in out  # the numbers are for --geometry


def test_a_geometry_that_was_asked_for_is_printed(views, capfd):
    assert match(views, "--geometry", "homography") == 0
    printed = capfd.readouterr().out.partition("# homography")[2].splitlines()[1:]
    expected = matcher.load("nearest", max_keypoints=400, geometry="homography").match(*views).geometry.matrix
    np.testing.assert_allclose(np.loadtxt(printed), expected, rtol=1e-6, atol=1e-12)


@pytest.fixture
def strangers(views, tmp_path) -> tuple[Path, Path]:
    """An image of something, and one of nothing."""
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((120, 160), 127, np.uint8))
    return views[0], tmp_path / "grey.png"


def test_no_match_is_said_and_can_be_a_failure(views, strangers, capfd):
    assert match(strangers) == 0
    assert "no match: the images share nothing that was recognised" in capfd.readouterr().out
    assert match(strangers, "--fail-if-unmatched") == 4
    assert match(strangers, "--fail-if-unmatched", "--json") == 4
    assert match(views, "--fail-if-unmatched") == 0
    assert match(views, "--fail-if-unmatched", "--geometry", "none") == 0


def test_matches_without_a_common_geometry_are_no_match(views, strangers, capfd):
    """With hardly any points of two different things, some may match and none fit together."""
    noise = np.random.default_rng(3).integers(0, 255, (200, 200), np.uint8)
    cv2.imwrite(str(strangers[1]), cv2.GaussianBlur(noise, (0, 0), 3))
    assert match(strangers, "--preset", "nearest", "--fail-if-unmatched", "--json") == 4
    found = json.loads(capfd.readouterr().out)
    assert found["geometry"]["status"] in ("too_few", "low_inliers", "no_model", "degenerate")


def found_refined(result: matcher.Result) -> int:
    return result.to_dict()["refinement"]["refined"]


def test_outputs_hold_the_result(views, tmp_path, capfd):
    assert match(views, "--output", tmp_path / "r.npz", "--geometry", "homography") == 0
    assert match(views, "--output", tmp_path / "r.json", "--geometry", "homography") == 0
    result = matcher.load("nearest", max_keypoints=400, geometry="homography").match(*views)
    saved = np.load(tmp_path / "r.npz", allow_pickle=False)
    assert set(saved) == ARRAYS
    np.testing.assert_array_equal(saved["points1"], result.points1)
    np.testing.assert_array_equal(saved["inliers"], result.geometry.inliers)
    np.testing.assert_array_equal(saved["matrix"], result.geometry.matrix)
    np.testing.assert_array_equal(saved["covariances"], result.matches.refinement.covariances)
    assert (saved["refinement"] == "refined").sum() == found_refined(result) > 20
    assert str(saved["geometry_kind"]) == "homography"
    assert saved["cam1_from_cam0"].shape == (0, 0)
    assert saved["size0"].tolist() == [800, 600]
    found = json.loads((tmp_path / "r.json").read_text())
    assert set(found) == {"software", *KEYS, "arrays"}
    np.testing.assert_allclose(found["arrays"]["points0"], saved["points0"])
    assert f"wrote {tmp_path / 'r.json'}" in capfd.readouterr().out


def test_a_plot_is_drawn_and_replaced(views, tmp_path, capfd):
    (tmp_path / "m.png").write_bytes(b"not ours")
    assert match(views, "--plot", tmp_path / "m.png") == 2
    assert "--overwrite" in capfd.readouterr().err
    assert (tmp_path / "m.png").read_bytes() == b"not ours"
    assert match(views, "--plot", tmp_path / "m.png", "--overwrite") == 0
    first = (tmp_path / "m.png").stat().st_ino
    assert match(views, "--plot", tmp_path / "m.png") == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "m.png").stat().st_ino != first
    assert len(list(tmp_path.iterdir())) == 1


def test_essential_needs_a_camera(views, capfd):
    assert match(views, "--geometry", "essential") == 2
    assert "needs --camera0" in capfd.readouterr().err
    assert match(views, "--geometry", "essential", "--camera0", "700,700,400,300", "--json") == 0
    geometry = json.loads(capfd.readouterr().out)["geometry"]
    assert (geometry["kind"], geometry["status"]) == ("essential", "ok")
    assert np.shape(geometry["cam1_from_cam0"]) == (4, 4)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--camera0", "1,2,3"], 2, "--camera0 must be"),
        (["--camera0", "1,2,3,4"], 2, "'essential' only"),
        (["--geometry", "affine"], 2, "--geometry"),
        (["--preset", "superglue"], 2, "Known: hybrid, hybrid-learned"),
        (["--threshold", "7"], 2, "must be a number from 0 to 1"),
        (["--ratio", "7"], 2, "--ratio must be"),
        (["--preset", "hybrid-learned", "--ratio", "0.7"], 2, "--ratio"),
        (["--max-keypoints", "0"], 2, "--max-keypoints must be a whole number of at least 1"),
        (["--resize", "0"], 2, "--resize must be a whole number of at least 1"),
        (["--device", "abacus"], 2, "abacus"),
        (["--output", "r.txt"], 2, ".npz or .json"),
        (["--output", "none/r.npz"], 2, "make it first"),
        (["--plot", "r.gif"], 2, ".png"),
        (["--nonsense"], 2, "--nonsense"),
        (["--mask0", "gone.png"], 3, "gone.png"),
        (["--max-pixels", "1000"], 3, "1000"),
        (["--preset", "hybrid", "--weights", "gone.safetensors"], 5, "gone.safetensors is absent"),
    ],
)
def test_mistakes_have_a_message_and_a_code(views, options, code, message, capfd):
    assert match(views, *options) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_an_input_is_never_replaced(views, tmp_path, capfd):
    picture = tmp_path / "a.png"
    picture.write_bytes(views[0].read_bytes())
    assert run("match", picture, views[1], "--preset", "nearest", "--plot", picture) == 2
    assert "is an input" in capfd.readouterr().err
    assert picture.read_bytes() == views[0].read_bytes()


@pytest.mark.parametrize("content", [None, b"", b"hello", b"half"])
def test_images_that_cannot_be_read(views, tmp_path, content, capfd):
    path = tmp_path / "bad.jpg"
    if content is not None:
        path.write_bytes(views[0].read_bytes()[:20000] if content == b"half" else content)
    assert run("match", path, views[1], "--preset", "nearest") == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert "bad.jpg" in err
    assert "Traceback" not in err


def test_damaged_weights_exit_5(views, small_weights, capfd):
    small_weights.write_bytes(small_weights.read_bytes()[:5000])
    assert run("match", *views, "--weights", small_weights) == 5
    assert "small.safetensors" in capfd.readouterr().err


def test_presets_and_version(capfd):
    assert run("presets") == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(matcher.PRESETS)
    assert run("--version") == 0
    assert capfd.readouterr().out == f"matcher {matcher.__version__}\n"


def test_weights_are_listed_and_verified(small_weights, monkeypatch, capfd):
    folder = small_weights.parent
    data = small_weights.read_bytes()
    row = {
        "name": "small", "file": small_weights.name, "sha256": hashlib.sha256(data).hexdigest(),
        "preset": "hybrid", "licence": "CC0-1.0", "source": "s", "trained_on": "nothing", "metrics": "none",
    }  # fmt: skip
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())
    (folder / "manifest.toml").write_text(f"[[weights]]\nbytes = {len(data)}\n{text}")
    monkeypatch.setattr("matcher.weights.files.FOLDERS", (folder,))
    assert run("weights", "list") == 0
    assert "CC0-1.0" in capfd.readouterr().out
    assert run("weights", "verify") == 0
    assert "ok       small" in capfd.readouterr().out
    assert run("weights", "verify", "large") == 2
    small_weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run("weights", "verify") == 5
    assert "1 of 1 weights files" in capfd.readouterr().err


def test_internal_errors_have_one_line_and_a_hint(views, monkeypatch, capfd):
    def broken(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr(loading_module, "load", broken)
    assert match(views) == 1
    err = capfd.readouterr().err
    assert "internal error: KeyError: 'surprise'" in err
    assert "MATCHER_DEBUG=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("MATCHER_DEBUG", "1")
    assert match(views) == 1
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 6),
        (OSError(28, "No space left on device"), 6),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), 6),
        (OSError(5, "Input/output error"), 1),
        (matcher.UsageError("x"), 2),
        (matcher.ImageError("x"), 3),
        (matcher.IntegrityError("x"), 5),
        (typer.BadParameter("x"), 2),
    ],
)
def test_exit_codes(error, code, capfd):
    with messages():
        assert exit_code_of(error) == code
    assert capfd.readouterr().err


def test_an_interrupt_returns_130(views, monkeypatch, capfd):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading_module, "load", interrupted)
    assert match(views) == 130
    assert capfd.readouterr().err == "matcher: interrupted; run the same command again\n"


def test_a_full_disk_exits_6_and_leaves_nothing(views, tmp_path, monkeypatch, capfd):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert match(views, "--output", tmp_path / "r.npz") == 6
    assert list(tmp_path.iterdir()) == []


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "matcher", *(str(argument) for argument in arguments)]


def test_as_a_command(views, tmp_path):
    arguments = command("match", *views, "--preset", "nearest", "--json", "--output", tmp_path / "r.npz")
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["matches"] > 50
    assert (tmp_path / "r.npz").exists()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "number", "code", "words"),
    [
        ("match", signal.SIGTERM, 143, b""),
        ("match", signal.SIGINT, 130, b"matcher: interrupted; run the same command again\n"),
        ("collection", signal.SIGINT, 130, b"matcher: interrupted; run the same command again to continue\n"),
    ],
)
def test_signals_end_a_command_with_a_word(name, number, code, words):
    text = (
        "import signal, sys, time, matcher.cli as cli\n"
        # A shell that starts the tests in the background has switched Ctrl-C off for all that they start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(): print('ready', flush=True), time.sleep(30)\n"
        f"cli.COMMANDS['{name}'] = '__main__:slow'\n"
        f"sys.exit(cli.main(['{name}']))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read() == words
