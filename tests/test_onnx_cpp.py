"""scripts/cpp/match.cpp, built against ONNX Runtime's C++ interface, finds Python's matches.

Debian's packages libonnxruntime-dev, libjpeg-dev and libpng-dev hold the headers; where those of ONNX Runtime
lie elsewhere, CPATH names the folder.
"""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest

import matcher
from matcher.export_onnx import export_preset
from matcher.presets import PRESETS

SOURCE = Path(__file__).resolve().parent.parent / "scripts" / "cpp" / "match.cpp"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HEADERS = ["-I/usr/include/onnxruntime", "-I/usr/local/include/onnxruntime"]
NEEDED = "".join(
    f"#if !__has_include(<{name}>)\n#error {name}\n#endif\n"
    for name in ("onnxruntime_cxx_api.h", "jpeglib.h", "png.h")
)


def can_build() -> bool:
    if COMPILER is None:
        return False
    command = [COMPILER, "-x", "c++", "-fsyntax-only", *HEADERS, "-"]
    return subprocess.run(command, input=NEEDED, text=True, capture_output=True).returncode == 0


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program, linked with the library that the Python package brings."""
    if not can_build():
        pytest.skip("needs a C++ compiler and the headers named above")
    folder = tmp_path_factory.mktemp("cpp")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (folder / name).symlink_to(library)
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *HEADERS, SOURCE]
    command += ["-o", folder / "match", f"-L{folder}", f"-Wl,-rpath,{folder}"]
    subprocess.run([*command, "-lonnxruntime", "-ljpeg", "-lpng"], check=True)
    export_preset("hybrid-learned", PRESETS["hybrid-learned"], folder)

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [folder / "match", folder / "learned.onnx", folder / "hybrid-learned.onnx", *arguments]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ)

    return run


@pytest.mark.parametrize(("ending", "pixels"), [("jpg", 1024), ("png", 320)])
def test_two_pictures_have_the_matches_that_python_finds(views, tmp_path, program, ending, pixels):
    files = []
    for view in views:
        files.append(tmp_path / f"{Path(view).stem}.{ending}")
        cv2.imwrite(str(files[-1]), cv2.imread(str(view)))
    done = program(*files, "300", str(pixels))
    assert done.returncode == 0, done.stderr
    theirs = np.array([line.split() for line in done.stdout.splitlines()], float)
    options = {"max_keypoints": 300, "resize": pixels, "further_passes": False, "refine": False}
    pipeline = matcher.load("hybrid-learned", engine="onnx", early_exit=False, pruning=False, **options)
    policy = replace(pipeline.matcher.config.policy, calibration=None)  # which is outside the graph
    pipeline.matcher.config = replace(pipeline.matcher.config, policy=policy)
    matches = pipeline.match(*files).matches
    ours = np.concatenate([matches.points0, matches.points1], axis=1)
    away = np.abs(theirs[:, None, :4] - ours).max(axis=2)
    same = away.min(axis=1) < 0.01
    assert len(ours) > 50
    assert 0.96 < len(theirs) / len(ours) < 1.04
    assert same.mean() >= 0.96  # decoding and resizing may round a pixel differently
    assert np.abs(theirs[same, 4] - matches.scores[away.argmin(axis=1)][same]).max() < 0.02


def test_pictures_without_keypoints_have_no_matches(tmp_path, program):
    cv2.imwrite(str(tmp_path / "flat.png"), np.full((60, 80, 3), 90, np.uint8))
    done = program(tmp_path / "flat.png", tmp_path / "flat.png")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_file_that_cannot_be_used_is_named(views, tmp_path, program):
    (tmp_path / "cut.jpg").write_bytes(Path(views[0]).read_bytes()[:3000])
    (tmp_path / "text.jpg").write_text("no picture")
    for name, message in (
        ("absent.jpg", "cannot be opened"),
        ("text.jpg", "is neither a JPEG nor a PNG file"),
        ("cut.jpg", "the file is cut short or damaged"),
    ):
        done = program(views[0], tmp_path / name)
        assert done.returncode == 1
        assert f"{name}" in done.stderr and message in done.stderr
