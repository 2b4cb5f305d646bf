"""Promise 5, the supply chain: a release says what it is made of; no optional code is imported unasked."""

import importlib.util
import json
import subprocess
import sys
import zipfile
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


def test_a_wheel_holds_the_bill_and_lists_it(tmp_path):
    """As pip checks it: a list of files, each with its checksum and size."""
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    release = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(release)
    wheel, bill = tmp_path / "a-1-py3-none-any.whl", b'{"components": []}'
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("a/b, c.py", "x = 1\n")
        record = release.recorded(b"a-1.dist-info/RECORD,,\n", "a/b, c.py", b"x = 1\n")
        file.writestr("a-1.dist-info/RECORD", record)
    release.add_bill(wheel, bill)
    with zipfile.ZipFile(wheel) as file:
        assert file.testzip() is None and file.read("a/b, c.py") == b"x = 1\n"
        assert file.read("a-1.dist-info/sboms/matcher.cdx.json") == bill
        rows = file.read("a-1.dist-info/RECORD").decode().splitlines()
    assert rows[0] == "a-1.dist-info/RECORD,," and rows[1].startswith('"a/b, c.py",sha256=')
    assert rows[2].startswith("a-1.dist-info/sboms/matcher.cdx.json,sha256=") and rows[2].endswith(",18")
    with pytest.raises(SystemExit, match="already"):
        release.add_bill(wheel, bill)
    (tmp_path / "no.whl").write_bytes(b"PK\5\6" + bytes(18))
    with pytest.raises(SystemExit, match="is no wheel"):
        release.add_bill(tmp_path / "no.whl", bill)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a-1-py3-none-any.whl", "no.whl"]


def test_optional_packages_are_not_imported_unasked(views, tried):
    command = ["match", *map(str, views), "--preset", "nearest", "--max-keypoints", "50"]
    code = (
        f"import sys\nfrom matcher.cli import main\nmain({command!r})\n"
        f"print([name for name in {OPTIONAL!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    tried(len(OPTIONAL))
