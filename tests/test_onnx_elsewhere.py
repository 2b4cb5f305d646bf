"""Our ONNX files in OpenCV's own classes, and the package where torch is absent."""

import importlib.util
import os
import subprocess
import sys
import venv
from pathlib import Path

import cv2
import numpy as np
import pytest
from real_pairs import three_pairs

import matcher
from matcher.cli import main
from matcher.errors import UsageError
from matcher.onnx.export import export_for_opencv
from matcher.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
SIZE = (320, 256)
WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "kornia", "onnx"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
sys.meta_path.insert(0, Absent())
"""


def opencv_script():
    spec = importlib.util.spec_from_file_location("opencv_matcher", ROOT / "scripts" / "opencv_matcher.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


needs_opencv_5 = pytest.mark.skipif(not hasattr(cv2, "LightGlueMatcher"), reason="needs OpenCV 5")


def by_opencv_and_by_the_pipeline(
    folder: Path, pair: tuple[Path, Path], size: tuple[int, int], keypoints: int
) -> tuple[np.ndarray, np.ndarray]:
    """Matches (K, 4) of two files, made of one size before; the exported files are in a folder."""
    images = [cv2.resize(cv2.imread(str(path)), size, interpolation=cv2.INTER_AREA) for path in pair]
    points0, points1, found = opencv_script().match(folder, *images, size)
    places = [np.array([point.pt for point in points]) for points in (points0, points1)]
    theirs = np.array([[*places[0][m.queryIdx], *places[1][m.trainIdx]] for m in found])
    options = {"resize": max(size), "second_pass": False, "refine": False}
    pipeline = matcher.load("hybrid-learned", engine="onnx", max_keypoints=keypoints, **options)
    matches = pipeline.match(*(np.ascontiguousarray(image[..., ::-1]) for image in images)).matches
    return theirs, np.concatenate([matches.points0, matches.points1], axis=1)


def near(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The share of matches that are half a pixel at most from one of ours."""
    return np.mean(np.abs(theirs[:, None] - ours).max(axis=2).min(axis=1) < 0.5)


@needs_opencv_5
def test_opencv_matches_with_our_weights_what_the_pipeline_matches(views, tmp_path):
    export_for_opencv("hybrid-learned", PRESETS["hybrid-learned"], tmp_path, SIZE, points=256)
    theirs, ours = by_opencv_and_by_the_pipeline(tmp_path, views, SIZE, 256)
    assert len(theirs) > 30
    assert near(theirs, ours) > 0.8
    assert 0.8 < len(theirs) / len(ours) < 1.25


@needs_opencv_5
@pytest.mark.slow
def test_opencv_matches_three_real_pairs(tmp_path, capsys):
    size = (640, 480)
    export_for_opencv("hybrid-learned", PRESETS["hybrid-learned"], tmp_path, size)
    for name, pair in three_pairs().items():
        theirs, ours = by_opencv_and_by_the_pipeline(tmp_path, pair, size, 512)
        with capsys.disabled():
            share = near(theirs, ours)
            print(f"\n{name}: OpenCV {len(theirs)} matches, {share:.1%} near ours; the pipeline {len(ours)}")
        assert share > 0.85 and 0.9 < len(theirs) / len(ours) < 1.1


def test_sizes_and_presets_that_opencv_cannot_have_are_refused(tmp_path, capsys):
    with pytest.raises(UsageError, match="multiples of 32, not 100 and 64"):
        export_for_opencv("hybrid-learned", PRESETS["hybrid-learned"], tmp_path, (100, 64))
    with pytest.raises(UsageError, match=r"not hybrid$"):
        export_for_opencv("hybrid", PRESETS["hybrid"], tmp_path, SIZE)
    command = ["weights", "export", "hybrid-learned", "--onnx", str(tmp_path), "--opencv"]
    assert main([*command, "large"]) == 2
    assert "640x480" in capsys.readouterr().err


def test_the_main_job_runs_where_torch_cannot_be_imported(views, tmp_path):
    code = f"""{WITHOUT_TORCH}
from matcher.cli import main
views = {[str(view) for view in views]!r}
assert main(["match", *views, "--engine", "onnx", "--max-keypoints", "256", "--output", "m.npz"]) == 0
assert not {{"torch", "onnx", "kornia"}} & set(sys.modules)
assert main(["match", *views, "--max-keypoints", "256"]) == 2
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "inliers of one fundamental matrix" in done.stdout
    assert "needs torch, which is not installed: use engine 'onnx'" in done.stderr
    assert len(np.load(tmp_path / "m.npz")["points0"]) > 50


def test_what_other_commands_need_is_imported_without_torch():
    modules = "alignment.align, alignment.find, collection.collection, explain.report.run, sequence.tracker"
    names = [f"matcher.{name}" for name in modules.split(", ")]
    code = f"{WITHOUT_TORCH}\nimport importlib\nfor name in {names}: importlib.import_module(name)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


def test_a_collection_has_the_matches_that_torch_finds(views, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for view in views:
        cv2.imwrite(str(photos / f"{Path(view).stem}.png"), cv2.resize(cv2.imread(str(view)), SIZE))
    found = []
    for engine in ("torch", "onnx"):
        options = {"engine": engine, "precision": "float32", "max_keypoints": 200, "refine": False}
        options |= {"preset": "hybrid-learned", "workers": 0}
        collection = matcher.Collection.open(tmp_path / engine, **options)
        collection.add_images(photos)
        collection.add_pairs(exhaustive=True)
        collection.run()
        (pair,) = collection
        assert pair.geometry.status == "ok"
        rows = np.concatenate([pair.matches.points0, pair.matches.points1], axis=1).round(1)
        found.append({tuple(row) for row in rows.tolist()})
    assert len(found[0] & found[1]) >= 0.98 * len(found[0] | found[1]) > 50


@pytest.mark.slow
def test_other_commands_run_where_torch_cannot_be_imported(views, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for view in views:
        small = cv2.resize(cv2.imread(str(view)), SIZE, interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(photos / f"{Path(view).stem}.png"), small)
    cv2.imwrite(str(tmp_path / "part.png"), small[40:200, 60:260])
    code = f"""{WITHOUT_TORCH}
from matcher.cli import main
options = ["--engine", "onnx", "--max-keypoints", "200"]
views = sorted(map(str, __import__("pathlib").Path("photos").iterdir()))
assert main(["match", *views[:2], *options, "--plot", "m.png"]) == 0
assert main(["align", *views[:2], *options, "--output", "a.png"]) == 0
assert main(["find", "part.png", views[-1], *options, "--output", "f.json"]) == 0
assert main(["collection", "photos", "--run", "run", *options, "--workers", "0"]) == 0
assert main(["report", "run"]) == 0
assert main(["track", "photos", *options]) == 0
assert not {{"torch", "onnx", "kornia"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1 instance" in done.stdout
    for name in ("m.png", "a.png", "f.json", "run/report.html"):
        assert (tmp_path / name).stat().st_size > 100


@pytest.mark.slow
def test_the_small_distribution_matches_verifies_and_runs_collections_without_torch(views, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "check": True}
    subprocess.run([python, "-m", "pip", "install", "-q", ROOT / "lite"], **run)
    folder = tmp_path / "photos"
    folder.mkdir()
    for view in views:
        (folder / view.name).write_bytes(view.read_bytes())
    program = tmp_path / "venv" / "bin" / "matcher"
    options = ["--engine", "onnx", "--max-keypoints", "512"]
    done = subprocess.run([program, "match", *views, *options, "--output", "m.json"], **run)
    assert "inliers of one fundamental matrix" in done.stdout
    done = subprocess.run([program, "collection", folder, "--run", "run", *options, "--workers", "1"], **run)
    assert "1 done" in done.stdout + done.stderr
    listed = subprocess.run([python, "-m", "pip", "list"], **run).stdout
    assert "torch" not in listed
