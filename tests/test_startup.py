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


def loaded(code: str) -> list[str]:
    """Modules that are there after the code has run, without those that `import torch` alone brings."""
    text = f"import json, sys\n{code}\nprint('\\n' + json.dumps(sorted(sys.modules)))\n"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def roots(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


@pytest.mark.parametrize("arguments", [["--help"], ["match", "--help"], ["sfm", "-h"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    found = loaded(f"from matcher.cli import main\nmain({arguments})")
    assert not roots(found) & ({"torch", "numpy"} | SLOW | NEEDED - {"matcher", "typer"})
    assert len([name for name in found if name.startswith("matcher.")]) < 40


def test_a_match_imports_little_beside_torch(views):
    arguments = ["match", *map(str, views), "--preset", "hybrid-learned", "--max-keypoints", "64"]
    alone = set(loaded("import torch"))
    found = [name for name in loaded(f"from matcher.cli import main\nmain({arguments})") if name not in alone]
    assert not roots(found) & SLOW
    assert len([name for name in found if name.startswith("matcher.")]) < 100
    # Of others: OpenCV and Pillow with their formats, PoseLib, typer and what it checks values with.
    assert len([name for name in found if not name.startswith("matcher")]) < 250


def test_the_package_alone_costs_nothing():
    assert not roots(loaded("import matcher")) & {"torch", "numpy", "cv2", "typer"}


def test_matplotlib_comes_with_a_plot_only(views, tmp_path):
    arguments = ["match", *map(str, views), "--preset", "nearest", "--max-keypoints", "64"]
    plain = loaded(f"from matcher.cli import main\nmain({arguments})")
    drawn = loaded(f"from matcher.cli import main\nmain({[*arguments, '--plot', str(tmp_path / 'm.png')]})")
    assert "matplotlib" not in roots(plain)
    assert "matplotlib" in roots(drawn)
    assert "matplotlib.pyplot" not in drawn
