"""Promise 5, the supply chain: a release says what it is made of; no optional code is imported unasked."""

import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

pytestmark = pytest.mark.promise(5)
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("release")


def tiny_wheel(folder: Path, name: str, line: str) -> Path:
    """A wheel of one module."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", line)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def test_pip_refuses_what_differs_from_the_lock(release, tmp_path, monkeypatch):
    """Also what the lock does not name; a version that is not to be had is an error."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    wheel = tiny_wheel(shelf, "tiny", "x = 1\n")
    found = release.resolve({"tiny": "1.0"})
    assert found == {"tiny": ("1.0", hashlib.sha256(wheel.read_bytes()).hexdigest())}
    (tmp_path / "a.lock").write_text(release.lock(found))
    place = tmp_path / "place"
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", place, "--require-hashes", "-r"]
    assert subprocess.run([*command, tmp_path / "a.lock"]).returncode == 0 and (place / "tiny.py").is_file()
    tiny_wheel(shelf, "tiny", "x = 2\n")
    again = subprocess.run([*command, tmp_path / "a.lock", "--upgrade"], capture_output=True, text=True)
    assert again.returncode and "DO NOT MATCH THE HASHES" in again.stderr
    with pytest.raises(SystemExit, match="at the versions that are installed here"):
        release.resolve({"tiny": "2.0"})


def test_the_bill_names_every_package_with_its_licence_and_every_weights_file(release):
    """With its hash too, where a lock has it."""
    hashes = {"numpy": (numpy.__version__, "a" * 64)}
    bill = release.bill(list(release.needed([])), hashes)
    packages = {part["name"].lower(): part for part in bill["components"] if part["type"] == "library"}
    assert {"torch", "numpy", "pillow", "poselib", "safetensors", "typer"} <= set(packages)
    assert all(part["version"] and part["licenses"] for part in packages.values())
    assert packages["numpy"]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert "hashes" not in packages["torch"]
    models = {part["name"] for part in bill["components"]} & {
        path.name for path in (ROOT / "weights").glob("*.safetensors")
    }
    assert models == {path.name for path in (ROOT / "weights").glob("*.safetensors")}


def test_a_release_is_its_files_and_their_checksums(release, tmp_path, monkeypatch):
    """With a wheel of one module, and an index of known hashes."""

    def built(folder):
        tiny_wheel(folder, "tiny", "x = 1\n")
        return list(folder.glob("*.whl"))

    monkeypatch.setattr(release, "built", built)
    monkeypatch.setattr(release, "resolve", lambda asked: {n: (v, "b" * 64) for n, v in asked.items()})
    monkeypatch.setattr(sys, "argv", ["release.py", str(tmp_path / "dist")])
    assert release.main() == 0
    found = {path.name: path.read_bytes() for path in (tmp_path / "dist").iterdir()}
    sums = dict(reversed(line.split("  ")) for line in found.pop("SHA256SUMS").decode().splitlines())
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in found.items()}
    assert sums.keys() == {"matcher.lock", "matcher.cdx.json", "tiny-1.0-py3-none-any.whl"}
    assert b"numpy==" in found["matcher.lock"]
    with zipfile.ZipFile(tmp_path / "dist" / "tiny-1.0-py3-none-any.whl") as file:
        assert file.read("tiny-1.0.dist-info/sboms/matcher.cdx.json") == found["matcher.cdx.json"]
    with pytest.raises(SystemExit):
        release.main()
