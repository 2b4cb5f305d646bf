"""Promise 5, the supply chain: a release says what it is made of; no optional code is imported unasked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.promise(5)
ROOT = Path(__file__).resolve().parent.parent.parent
OPTIONAL = ("pycolmap", "h5py", "gradio", "ray", "rerun", "pillow_heif", "transformers")


def test_the_bill_names_every_package_with_its_licence_and_every_weights_file(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bill_of_materials.py", tmp_path / "bill.json"]
    subprocess.run(command, check=True, capture_output=True)
    bill = json.loads((tmp_path / "bill.json").read_text("utf-8"))
    packages = {part["name"].lower(): part for part in bill["components"] if part["type"] == "library"}
    assert {"torch", "numpy", "pillow", "poselib", "safetensors", "typer"} <= set(packages)
    assert all(part["version"] and part["licenses"] for part in packages.values())
    models = {part["name"] for part in bill["components"]} & {
        path.name for path in (ROOT / "weights").glob("*.safetensors")
    }
    assert models == {path.name for path in (ROOT / "weights").glob("*.safetensors")}


def test_optional_packages_are_not_imported_unasked(views, tried):
    command = ["match", *map(str, views), "--preset", "nearest", "--max-keypoints", "50"]
    code = (
        f"import sys\nfrom matcher.cli import main\nmain({command!r})\n"
        f"print([name for name in {OPTIONAL!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    tried(len(OPTIONAL))
