"""The command line: what it prints and writes, exit codes, messages, help, logs and completion."""

import ast
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
import typer
from command import run

import matcher
from matcher.cli import COMMANDS, build, main
from matcher.cli.machine import VARIABLES
from matcher.cli.output import ProgressLines, exit_code_of, messages
from matcher.kernels.loader import SWITCH
from matcher.presets import DEFAULT_PRESET, find_preset

ROOT = Path(__file__).resolve().parent.parent
EVERY = [name.split() for name in COMMANDS]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> list[Path]:
    """Two photos of one scene, 400 x 300, with a lens of 28 millimetres of film in their EXIF headers."""
    exif, paths = PIL.Image.Exif(), []
    exif.get_ifd(0x8769)[0xA405] = 28
    for number in (0, 1):
        paths.append(tmp_path_factory.mktemp("small") / f"view{number}.jpg")
        photo = PIL.Image.open(ROOT / "assets" / paths[-1].name).resize((400, 300))
        photo.save(paths[-1], exif=exif, quality=95)
    return paths


def match(pair, *options: object) -> int:
    preset = () if "--preset" in options else ("--preset", "nearest")
    return run("match", *pair, *preset, "--max-keypoints", 400, *options)


def expected(pair, **options) -> matcher.Result:
    return matcher.load("nearest", max_keypoints=400, **options).match(*pair)


# --- Results


def test_json_is_one_object_and_nothing_else(small, capfd):
    assert match(small, "--json", "-q") == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert err == "" and found["weights"] is None and found["geometry"]["status"] == "ok"
    assert found["image0"] == {"path": str(small[0]), "width": 400, "height": 300}
    assert list(found["seconds"]) == ["read", "extract", "match", "refine", "verify", "total"]
    assert found == {**expected(small).to_dict(), "seconds": found["seconds"]}


def test_the_summary_names_images_network_and_what_was_found(small, small_weights, capfd):
    assert match(small) == 0
    out, err = capfd.readouterr()
    assert err == "" and "400 keypoints" in out and "are inliers of one fundamental matrix" in out
    assert "x1ᵀ M x0" not in out  # the numbers are for --geometry
    assert "--geometry essential" in out  # both files state a focal length
    given = ("--preset", "hybrid", "--weights", small_weights, "--max-keypoints", 200, "--json")
    assert run("match", *small, *given) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["weights"]["name"] == "small" and len(found["weights"]["sha256"]) == 64
    assert (found["layers_run"], found["layers"]) == (3, 3)


def test_essential_geometry_takes_cameras_from_options_or_exif(small, views, capfd):
    assert match(views, "--geometry", "essential") == 2
    assert "needs --camera0" in capfd.readouterr().err
    assert match(views, "--geometry", "essential", "--camera0", "700,700,400,300", "--json") == 0
    assert np.shape(json.loads(capfd.readouterr().out)["geometry"]["cam1_from_cam0"]) == (4, 4)
    assert match(small, "--geometry", "essential") == 0
    out, err = capfd.readouterr()
    assert "324 and 324 pixels" in err and "cam1_from_cam0" in out  # of a diagonal of 500 pixels


def test_outputs_hold_the_result(small, tmp_path, capfd):
    for suffix in ("npz", "json", "csv") * 2:  # what it wrote it may replace
        assert match(small, "--output", tmp_path / f"r.{suffix}", "--geometry", "homography") == 0
    out = capfd.readouterr().out
    assert f"wrote {tmp_path / 'r.json'}" in out
    result = expected(small, geometry="homography")
    printed = out.split("# homography")[1].splitlines()[1:4]
    np.testing.assert_allclose(np.loadtxt(printed), result.geometry.matrix, rtol=1e-6, atol=1e-12)
    saved, arrays = np.load(tmp_path / "r.npz", allow_pickle=False), result.to_arrays()
    assert set(saved) == set(arrays)
    for name in saved:
        np.testing.assert_array_equal(saved[name], arrays[name])
    found = json.loads((tmp_path / "r.json").read_text())
    assert set(found) == {"software", "arrays", *result.to_dict()}
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    np.testing.assert_allclose([float(row["x1"]) for row in rows], saved["points1"][:, 0], atol=1e-3)
    assert [row["inlier"] == "1" for row in rows] == saved["inliers"].tolist()


def test_a_plot_is_drawn_and_replaces_only_our_own(small, tmp_path, capfd):
    plot = tmp_path / "m.png"
    plot.write_bytes(b"not ours")
    assert match(small, "--plot", plot) == 2
    assert "--overwrite" in capfd.readouterr().err and plot.read_bytes() == b"not ours"
    assert match(small, "--plot", plot, "--overwrite") == 0
    assert match((plot, small[1]), "--plot", plot) == 2 and "is an input" in capfd.readouterr().err
    assert plot.read_bytes().startswith(b"\x89PNG") and len(list(tmp_path.iterdir())) == 1


def test_no_match_is_said_and_can_be_a_failure(small, tmp_path, capfd):
    grey, tiny, noise = (tmp_path / f"{name}.png" for name in ("grey", "tiny", "noise"))
    cv2.imwrite(str(grey), np.full((120, 160), 127, np.uint8))
    cv2.imwrite(str(tiny), np.zeros((1, 1), np.uint8))
    values = np.random.default_rng(3).integers(0, 255, (200, 200), np.uint8)
    cv2.imwrite(str(noise), cv2.GaussianBlur(values, (0, 0), 3))
    assert match((small[0], grey)) == 0 and "share nothing" in capfd.readouterr().out
    assert match((small[0], tiny)) == 0 and "image 1 is too small" in capfd.readouterr().out
    assert match(small, "--resize", 8) == 0 and "too small, 8 x 6 pixels after" in capfd.readouterr().out
    assert match((small[0], grey), "--fail-if-unmatched", "--json") == 4
    assert match((small[0], noise), "--fail-if-unmatched") == 4  # some may match, and none fit together
    assert match((small[0], noise), "--fail-below", 0.5) == 4
    assert match(small, "--fail-below", 0.5, "--geometry", "none") == 2
    assert match(small, "--fail-if-unmatched", "--geometry", "none") == 0


def test_further_passes_are_told_and_keypoints_counted_once(views, shipped_weights, capfd):
    blurred = views[0], views[1].parent / "matches.jpg"
    assert run("match", *blurred, "--max-keypoints", 64, "--resize", 400, "-v") == 0
    out, err = capfd.readouterr()
    assert "64 keypoints" in out and re.search(r"pass 2, [^:]+: \d+ match", err)


def test_kernels_that_could_be_there_are_named_once(views, tmp_path, monkeypatch, capfd):
    from matcher.kernels.compiling import find_compiler
    from matcher.kernels.loader import supported

    if not supported() or find_compiler() is None:
        pytest.skip("no kernels for this machine")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(SWITCH)
    told = []
    for _ in range(2):
        assert run("match", *views, "--preset", "nearest", "--device", "cpu") == 0
        told.append("matcher env --compile" in capfd.readouterr().err)
    assert told == [True, False]


# --- Mistakes and failures


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--camera0", "1,2,3"], 2, "--camera0 must be"),
        (["--geometry", "affine"], 2, "--geometry"),
        (["--threshold", "7"], 2, "--match-threshold must be a number from 0 to 1"),
        (["--output", "r.txt"], 2, ".csv"),
        (["--output", "none/r.npz"], 2, "make it first"),
        (["--refine", "--no-refine", "-q", "-q"], 2, "--refine/--no-refine stands 2 times"),
        (["--keypoints", "1"], 2, "--max-keypoints"),
        (["--mask0", "gone.png"], 3, "gone.png"),
        (["--max-pixels", "1000"], 3, "1000"),
        (["--preset", "hybrid", "--weights", "gone.safetensors"], 5, "gone.safetensors is absent"),
    ],
)
def test_mistakes_have_a_message_and_a_code(views, options, code, message, capfd):
    assert match(views, *options) == code
    out, err = capfd.readouterr()
    assert out == "" and message in err and "Traceback" not in err and "PipelineConfig" not in err


def test_the_command_line_in_a_program_returns(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matcher", "--version"])
    assert main() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 6),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), 6),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), 6),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 6),
        (OSError(5, "Input/output error"), 1),
        (ModuleNotFoundError("No module named 'h5py'", name="h5py"), 2),
        (matcher.ImageError("x"), 3),
        (matcher.IntegrityError("x"), 5),
    ],
)
def test_exit_codes(error, code, capfd):
    with messages():
        assert exit_code_of(error) == code
    err = capfd.readouterr().err
    assert err and ("pip install 'h5py" in err) == ("h5py" in str(error))


def test_internal_errors_have_one_line_and_a_log_their_traceback(small, tmp_path, monkeypatch, capfd):
    def broken(*_, **__):
        raise KeyError("surprise")

    monkeypatch.setattr("matcher.loading.load", broken)
    assert match(small, "--log", tmp_path / "run.log") == 1
    err = capfd.readouterr().err
    assert "KeyError: 'surprise'" in err and "MATCHER_DEBUG=1" in err and "Traceback" not in err
    assert "Traceback" in (tmp_path / "run.log").read_text()
    monkeypatch.setenv("MATCHER_DEBUG", "1")
    assert match(small) == 1 and "Traceback" in capfd.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "number", "code", "words"),
    [
        ("match", signal.SIGTERM, 143, b""),
        ("match", signal.SIGINT, 130, b"run the same command again\n"),
        ("collection", signal.SIGINT, 130, b"run the same command again to continue\n"),
    ],
)
def test_signals_end_a_command_with_a_word(name, number, code, words):
    file = COMMANDS[name]
    text = (
        "import signal, sys, time, matcher.cli as cli\n"
        # A shell that starts the tests in the background has switched Ctrl-C off for all that they start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(): print('ready', flush=True), time.sleep(30)\n"
        f"from matcher.cli import {file}; {file}.{name} = slow\n"
        f"sys.exit(cli.main(['{name}']))\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stderr.read().endswith(words)


def test_a_command_ends_at_once_after_what_others_do_at_the_end(tmp_path):
    text = (
        "import atexit, sys\n"
        "class Library:\n"
        "    def __del__(self): print('taken down')\n"
        "library, sys.argv[1:] = Library(), ['match', 'a.png', 'b.png']\n"
        "atexit.register(print, 'file closed')\n"
        "from matcher.cli import program\n"
        "program()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "file closed\n")
    profiled = [sys.executable, "-m", "cProfile", "-o", str(tmp_path / "profile"), "-m", "matcher", "presets"]
    assert subprocess.run(profiled, cwd=ROOT, capture_output=True).returncode == 0
    assert (tmp_path / "profile").stat().st_size > 10_000


# --- Help, messages, what the shell sees


@pytest.mark.parametrize("command", [[], *EVERY], ids=" ".join)
def test_every_command_says_what_it_does_and_describes_its_options(command, capfd):
    assert run(*command, "-h") == 0
    short = capfd.readouterr().out
    assert re.search(r"^  [A-Z][^\n]+", short, re.MULTILINE), "a sentence"
    assert "Args:" not in short and "{CAMERAS}" not in short
    group = typer.main.get_command(build())
    for name in command:
        group = group.commands[name]
    options = [parameter for parameter in group.params if parameter.param_type_name == "option"]
    assert [option.name for option in options if not option.help] == []
    assert all(option in short for option in ("--verbose", "--quiet", "--log") if command)


def test_help_shows_the_defaults_of_the_preset_or_the_command(capfd):
    config = find_preset(DEFAULT_PRESET)
    defaults = {
        "match": (config.extractor.max_keypoints, config.extractor.resize, config.estimation.kind),
        "sfm": ("2048", "largest"),
        "track": ("0.2",),
        "explain": ("no-further-passes",),
    }
    for command, values in defaults.items():
        assert run(command, "--help") == 0
        text = "".join(capfd.readouterr().out.split())
        assert all(f"[default:({value})]" in text for value in values)


def test_progress_tells_speed_and_time_left_every_ten_seconds():
    said, times = [], iter([0.0, 5.0, 20.0, 40.0])
    progress = ProgressLines(said.append, lambda: next(times))
    for done in (0, 1, 2, 4):
        progress("matching pairs", done, 4, failed=done // 2)
    ProgressLines(said.append, lambda: 7.0)("once", 1, 1)
    assert said.pop() == "once: 1 of 1, done in 0.1 s" and said.pop() == "once: 1"
    late = ProgressLines(said.append, iter([0.0, 5.0, 16.0, 17.0]).__next__, announced=False)
    for done in range(4):
        late("searching", done, 3)
    assert said.pop().startswith("searching: 2 of 3, ")
    assert len(said) == 3 and "2 of 4, 1 failed, 6.0/min, 20 s left" in said[1] and "done in 40 s" in said[2]


def test_a_log_is_appended_to_and_is_never_the_file_of_somebody_else(small, tmp_path, capfd):
    log = tmp_path / "run.log"
    assert match(small, "--log", log, "-q", "--output", tmp_path / "r.npz") == 0
    assert capfd.readouterr() == ("", "") and (tmp_path / "r.npz").is_file()
    assert match((small[0], tmp_path / "gone.jpg"), "--log", log, "-v") == 3
    assert "gone.jpg" in capfd.readouterr().err
    text = log.read_text()
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ DEBUG   command: ", text, re.MULTILINE)
    assert "400 x 300  400 keypoints" in text and re.search(r"ERROR   .*gone\.jpg", text)
    assert [line[-1] for line in text.splitlines() if "exit code" in line] == ["0", "3"]
    before = small[0].read_bytes()
    for path in (small[0], tmp_path / "none" / "x.log"):
        assert match(small, "--log", path) == 2 and "--log" in capfd.readouterr().err
    assert small[0].read_bytes() == before


def test_presets_weights_and_version_are_shown(shelf, small_weights, monkeypatch, capfd):
    assert run("presets") == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == list(matcher.PRESETS)
    assert run("presets", "--show", DEFAULT_PRESET) == 0
    values = dict(line.split(None, 2)[:2] for line in capfd.readouterr().out.splitlines())
    assert values["extractor.max_keypoints"] == "2048" and len(values) > 60
    assert run("presets", "--show", "hybird") == 2 and "'hybrid'" in capfd.readouterr().err
    assert run("--version") == 0 and matcher.__version__ in capfd.readouterr().out
    monkeypatch.setattr("matcher.weights.files.FOLDERS", (shelf,))
    assert run("weights", "list") == 0 and "Apache-2.0" in capfd.readouterr().out
    assert run("weights", "verify") == 0 and "small" in capfd.readouterr().out
    assert run("weights", "verify", "large") == 2
    data = small_weights.read_bytes()
    small_weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run("weights", "verify") == 5
    small_weights.unlink()
    assert run("weights", "verify", "small", "lightglue-disk") == 5
    errors = capfd.readouterr().err
    assert "damaged  small" in errors and "missing  small" in errors and "missing  lightglue-disk" in errors


def test_env_lists_every_variable_that_the_project_reads_and_the_build_of_torch(capfd, monkeypatch):
    sources = [path for folder in ("matcher", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    named = {n for path in sources for n in re.findall(r"\bMATCHER_[A-Z_]+[A-Z]", path.read_text("utf-8"))}
    assert named == {name for name in VARIABLES if name.startswith("MATCHER_")}
    monkeypatch.setenv("MATCHER_CACHE", "/some/where")
    assert run("env") == 0
    out = capfd.readouterr().out
    assert f"matcher {matcher.__version__}, Python" in out and "set to '/some/where'" in out
    assert all(name in out for name in VARIABLES) and re.search(r"PyTorch: .*build (for|without) CUDA", out)
    for value, said in (("0", "switched off by MATCHER_COMPILED"), ("avx9000", "known: 0")):
        monkeypatch.setenv("MATCHER_COMPILED", value)
        assert run("env") == 0 and said in "".join(capfd.readouterr())


def test_a_path_named_like_an_option_is_no_option(small, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "point").write_bytes(b"\xff\xd8\xff")
    for command in (["find", "images", small[0]], ["evaluate", "images"], ["match", "point", small[0]]):
        assert run(*command, "--preset", "nearest") in (2, 3)
        err = capfd.readouterr().err
        assert command[1] in err and "--" not in err
    assert run("match", *small, "--max-keypoints", 0) == 2 and "--max-keypoints" in capfd.readouterr().err


def test_the_library_names_arguments_not_options():
    """Whole commands, between backticks, are the same for all; a lone option means nothing in Python."""
    for path in sorted((ROOT / "matcher").rglob("*.py")):
        if {"cli", "evaluate", "train"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise):
                text = re.sub(r"`[^`]*`", "", ast.unparse(node))
                assert not re.search(r"(?<!\w)--[a-z]", text), (path, text)


@pytest.mark.skipif(os.name == "nt", reason="completion of POSIX shells")
def test_the_shell_completes_commands_options_and_presets():
    def complete(words: str) -> list[str]:
        count = str(len(words.split(" ")))
        asked = {"_MATCHER_COMPLETE": "complete_bash", "COMP_WORDS": f"matcher {words}", "COMP_CWORD": count}
        how = {"env": {**os.environ, **asked}, "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-m", "matcher"], **how).stdout.split()

    assert {"match", "merge"} <= set(complete("m")) and "--max-keypoints" in complete("match --max")
    assert {"superglue-indoor", "superglue-outdoor"} == set(complete("match --preset superglue"))
