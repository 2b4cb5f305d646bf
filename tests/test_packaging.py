"""What the project is called where it is installed, and what starting costs; scripts."""

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from matcher.errors import UsageError, install_command, optional

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("*.py", "*.md", "*.toml", "*.txt", "*.js", "*.html")
# `matcher` on the package index is somebody else's project.
FOREIGN = re.compile(
    r"(pip3?|uv|pipx|uvx|poetry)\s+(install|add|run)\b[^\n`]*?[ \t'\"=]matcher(?=[\s'\"\[`,;)]|$)"
)


def texts() -> list[Path]:
    folders = [ROOT / name for name in ("matcher", "scripts", "tests", "weights", "docs", ".ci")]
    found = [path for folder in folders for kind in TEXTS for path in folder.rglob(kind)]
    return [*found, *(path for kind in TEXTS for path in ROOT.glob(kind))]


def test_no_text_advises_to_install_the_foreign_project():
    assert len(texts()) > 200
    advice = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts()
        if path != Path(__file__)
        for match in FOREIGN.finditer(path.read_text("utf-8"))
    ]
    assert advice == []
    # Our own name is not taken for it.
    assert not FOREIGN.search(install_command("app"))
    assert not FOREIGN.search("pip install ./matcher-1.0.0-py3-none-any.whl")


@pytest.mark.parametrize(("kind", "said"), [(ModuleNotFoundError, "not installed"), (ImportError, "libhdf5")])
def test_an_optional_package_that_is_absent_or_broken_is_named_with_its_remedy(kind, said):
    with pytest.raises(UsageError, match=rf"{said}.*pip install 'h5py>="), optional():
        raise kind("libhdf5.so.310: cannot open shared object file", name="h5py._errors")
    with pytest.raises(kind), optional():
        raise kind("no module named x", name="x")


def test_hints_name_what_is_missing_in_the_range_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] != "matcher"
    assert project["scripts"] == {"matcher": "matcher.cli:program"}
    stated = {*project["dependencies"], *(r for e in project["optional-dependencies"].values() for r in e)}
    forms = (r"install_command\(((?:['\"][\w-]+['\"],? ?)+)\)", r"with optional\(\):\n +import (\w+)")
    named = {
        {"rerun": "rerun-sdk"}.get(name, name)
        for path in (ROOT / "matcher").rglob("*.py")
        for form in forms
        for call in re.findall(form, path.read_text("utf-8"))
        for name in re.findall(r"[\w-]+", call)
    }
    assert {"pycolmap", "onnxruntime", "gradio", "pillow-heif"} <= named
    for name in named:
        assert install_command(name).removeprefix("pip install ").strip("'") in stated, name


# --- Scripts explain themselves, and what they compute beside calling the library.


SCRIPTS = ROOT / "scripts"


@pytest.fixture
def script(monkeypatch):
    """Scripts as modules, by name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


@pytest.mark.parametrize("name", ["benchmark", "fit", "gate", "localization", "measure", "release"])
def test_scripts_explain_themselves(script, name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        script(name).main()
    assert "usage" in capsys.readouterr().out


def test_the_benchmark_measures_the_rows_asked_for_and_says_which_there_are(script, views, shipped_weights):
    benchmark = script("benchmark")
    bench = benchmark.Bench(torch.device("cpu"), views, repeats=1, quick=True)
    rows = benchmark.run_benchmark(bench, only="matching")
    assert rows and all(min(row.ours) > 0 and row.work.startswith("matching") for row in rows)
    for only, named in (("collection", "photos"), ("nonsense", "nonsense")):
        with pytest.raises(UsageError, match=named):
            benchmark.run_benchmark(bench, only=only)


@pytest.mark.slow
def test_every_row_of_the_benchmark_runs(script, views, tmp_path, shipped_weights):
    from collection_scene import render_photos

    pytest.importorskip("pycolmap")
    render_photos(tmp_path / "photos")
    benchmark, works = script("benchmark"), ""
    bench = benchmark.Bench(torch.device("cpu"), views, tmp_path / "photos", quick=True, repeats=1)
    for only in (None, "collection"):
        works += " ".join(row.work for row in benchmark.run_benchmark(bench, only=only))
    for part in ("LightGlue", "LoFTR", "front end", "pair of", "matching", "of a collection"):
        assert part in works


def test_documents_and_the_leaderboard_are_those_of_the_stored_results():
    subprocess.run([sys.executable, SCRIPTS / "results.py", "--check"], check=True)


# --- Scripts that make training views.


def test_a_folder_that_is_no_set_is_never_replaced_and_finished_sets_are_kept(tmp_path, monkeypatch):
    """The photos' own folder was deleted where sets were asked for beside it."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "rooms")
    label = importlib.import_module("label_views")
    photos = tmp_path / "castle"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"photo")
    with pytest.raises(UsageError, match="castle exists and is no finished set"):
        label.label_views(photos, photos, tmp_path / "work", print)
    assert (photos / "a.jpg").read_bytes() == b"photo"
    for name in ("house", "house-1", "house-2"):
        (tmp_path / name).mkdir()
    for name in ("house", "house-1"):
        (tmp_path / name / label.DONE).touch()
    found = label.label_views(photos, tmp_path / "house", tmp_path / "work", print)
    assert [folder.name for folder in found] == ["house", "house-1"]


# --- What starting costs, as the modules that are imported: their number is the same on every machine.


# What a command needs beside torch to read, extract, match and verify.
NEEDED = {"matcher", "numpy", "cv2", "PIL", "poselib", "safetensors", "typer"}
SLOW = {"matplotlib", "kornia", "transformers", "pycolmap", "h5py", "scipy", "skimage"}
SLOW |= {"rich", "gradio", "ray"}


def loaded(*steps: str) -> list[list[str]]:
    """Modules that are there after each of some steps of one process."""
    show = "print('\\nMODULES', json.dumps(sorted(sys.modules)))"
    text = "\n".join(["import json, sys", *(line for step in steps for line in (step, show)), ""])
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return [json.loads(line.removeprefix("MODULES ")) for line in lines]


def roots(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_help_imports_nothing_heavy_and_a_command_its_own_file_alone():
    (found,) = loaded("from matcher.cli import main\nmain(['match', '-h'])")
    assert not roots(found) & ({"torch", "numpy"} | SLOW | NEEDED - {"matcher", "typer"})
    assert len([name for name in found if name.startswith("matcher.")]) < 40
    (found,) = loaded("from matcher.cli import main\nmain(['presets', '--json'])")
    commands = {"laboratory", "localize", "machine", "pair", "runs", "sfm", "track"}
    assert {name.removeprefix("matcher.cli.") for name in found} & commands == {"machine"}


def test_a_match_imports_little_beside_torch_and_matplotlib_only_for_a_plot(views, tmp_path):
    match = ["match", *map(str, views), "--max-keypoints", "64", "--resize", "320"]
    plot = [*match, "--plot", str(tmp_path / "m.png")]
    steps = "import torch", f"from matcher.cli import main\nmain({match})", f"main({plot})"
    alone, plain, drawn = loaded(*steps)
    assert "matplotlib" in roots(drawn)
    assert "matplotlib.pyplot" not in drawn
    found = [name for name in plain if name not in alone]
    assert not roots(found) & SLOW
    assert len([name for name in found if name.startswith("matcher.")]) < 150
    # Of others: OpenCV and Pillow with their formats, PoseLib, typer and what it checks values with.
    assert len([name for name in found if not name.startswith("matcher")]) < 250


def test_a_match_in_onnx_runtime_imports_no_torch(views):
    match = ["match", *map(str, views), "--engine", "onnx", "--max-keypoints", "64", "--resize", "320"]
    (found,) = loaded(f"from matcher.cli import main\nmain({match})")
    assert not roots(found) & ({"torch", "onnx", "kornia"} | SLOW)
    assert len([name for name in found if name.startswith("matcher.")]) < 70


def test_the_package_alone_costs_nothing_and_the_report_of_a_run_needs_no_torch():
    assert not roots(*loaded("import matcher")) & {"torch", "numpy", "cv2", "typer"}
    assert "torch" not in roots(*loaded("from matcher.explain.run_report import write_run_report"))
