"""What starting costs, as the modules that are imported: their number is the same on every machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What a command needs beside torch to read, extract, match and verify.
NEEDED = {"matcher", "numpy", "cv2", "PIL", "poselib", "safetensors", "typer"}
SLOW = {
    "matplotlib",
    "kornia",
    "transformers",
    "pycolmap",
    "h5py",
    "scipy",
    "skimage",
    "rich",
    "gradio",
    "ray",
}


def loaded(*steps: str) -> list[list[str]]:
    """Modules that are there after each of some steps of one process."""
    show = "print('\\nMODULES', json.dumps(sorted(sys.modules)))"
    text = "\n".join(["import json, sys", *(line for step in steps for line in (step, show)), ""])
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    return [json.loads(line.removeprefix("MODULES ")) for line in lines]


def roots(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize("arguments", [["--help"], ["match", "-h"]])
def test_help_imports_nothing_heavy(arguments):
    (found,) = loaded(f"from matcher.cli import main\nmain({arguments})")
    assert not roots(found) & ({"torch", "numpy"} | SLOW | NEEDED - {"matcher", "typer"})
    assert len([name for name in found if name.startswith("matcher.")]) < 40


def test_only_the_command_that_was_typed_is_imported():
    (found,) = loaded("from matcher.cli import main\nmain(['presets', '--json'])")
    commands = {"laboratory", "localize", "machine", "pair", "runs", "sfm", "track"}
    assert {name.removeprefix("matcher.cli.") for name in found} & commands == {"machine"}


def test_a_match_imports_little_beside_torch_and_matplotlib_only_for_a_plot(views, tmp_path):
    match = ["match", *map(str, views), "--preset", "hybrid-learned", "--max-keypoints", "64"]
    plot = [*match, "--plot", str(tmp_path / "m.png")]
    alone, plain, drawn = loaded(
        "import torch", f"from matcher.cli import main\nmain({match})", f"main({plot})"
    )
    assert "matplotlib" in roots(drawn)
    assert "matplotlib.pyplot" not in drawn
    found = [name for name in plain if name not in alone]
    assert not roots(found) & SLOW
    assert len([name for name in found if name.startswith("matcher.")]) < 150
    # Of others: OpenCV and Pillow with their formats, PoseLib, typer and what it checks values with.
    assert len([name for name in found if not name.startswith("matcher")]) < 250


def test_a_match_in_onnx_runtime_imports_no_torch(views):
    match = ["match", *map(str, views), "--engine", "onnx", "--max-keypoints", "64", "--no-further-passes"]
    (found,) = loaded(f"from matcher.cli import main\nmain({match})")
    assert not roots(found) & ({"torch", "onnx", "kornia"} | SLOW)
    assert len([name for name in found if name.startswith("matcher.")]) < 70


def test_the_package_alone_costs_nothing():
    assert not roots(*loaded("import matcher")) & {"torch", "numpy", "cv2", "typer"}
