"""Promise 5: no code runs that is not ours or was not asked for; a release says what it is made of."""

import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
from collection_runs import QUICK, ROOT, photos
from hostile_runs import small_run

from matcher import files
from matcher.kernels import loader as library

pytestmark = pytest.mark.promise(5)

# Modules that some command imports, installed or not, and some that Python itself does.
PLANTED = (
    *("pycolmap", "h5py", "gradio", "ray", "rerun", "pillow_heif", "poselib", "kornia", "numpy", "torch"),
    *("json", "typing", "pathlib", "pickle", "multiprocessing", "sitecustomize", "usercustomize"),
)
OURS = os.environ.get("PYTHONPATH", str(ROOT))


@pytest.fixture
def planted(tmp_path) -> Path:
    """A folder with a file for each of them, that leaves a trace when it is run."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in PLANTED:
        trace = f"open({str(tmp_path / 'ran')!r}, 'a').write({name + chr(10)!r})\n"
        (folder / f"{name}.py").write_text(trace + "raise ImportError('planted')\n")
    return folder


def ran(tmp_path: Path) -> list[str]:
    found = tmp_path / "ran"
    return sorted(set(found.read_text().split())) if found.exists() else []


def test_a_module_in_the_working_folder_is_not_imported(planted, tmp_path):
    """By a command, by its worker, by COLMAP's process, and by a command that needs h5py."""
    for needed in ("pycolmap", "h5py"):
        pytest.importorskip(needed)
    photos(tmp_path / "photos", 2)
    run = small_run(tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": OURS, "OMP_NUM_THREADS": "1"}
    for command in (
        ("sfm", tmp_path / "photos", "--out", tmp_path / "model", *QUICK, "--workers", 1),
        ("export", run, "--to", "hloc", tmp_path / "out"),
    ):
        words = [sys.executable, "-m", "matcher", *map(str, command)]
        done = subprocess.run(words, cwd=planted, env=environment, capture_output=True, text=True)
        assert ran(tmp_path) == [], done.stderr
        assert done.returncode in (0, 4), done.stderr  # a flat scene may give no model, but COLMAP has run
        assert "Traceback" not in done.stderr and "planted" not in done.stderr


PLANT = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
"""


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The place of the kernel library, and a library that leaves a trace when it is loaded."""
    if not library.supported() or shutil.which("cc") is None:
        pytest.skip("needs AVX-512 and a compiler")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    path = library.library_path(library.supported()[0])
    files.make_private(path.parent)
    (tmp_path / "plant.c").write_text(PLANT % (tmp_path / "ran"))
    made = tmp_path / "made.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, tmp_path / "plant.c"], check=True)
    return path, made


def behind_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def over_another(path: Path, made: Path) -> None:
    other = made.with_name("other.so")
    other.write_bytes(b"what was compiled")
    library.keep(other, path)
    shutil.copy(made, path)


PLANTED_LIBRARIES = {
    "over another": over_another,
    "others may write it": lambda path, made: (library.keep(made, path), path.chmod(0o666)),
    "in an open folder": lambda path, made: (library.keep(made, path), path.parent.chmod(0o777)),
    "a link to a folder": lambda path, made: (library.keep(made, path), behind_a_link(path.parent)),
    "of somebody else": lambda path, made: (library.keep(made, path), os.chown(path, 12345, -1)),
}


@pytest.mark.parametrize("name", PLANTED_LIBRARIES)
def test_a_planted_kernel_library_is_not_loaded(kernels, tmp_path, name):
    if name == "of somebody else" and os.geteuid() != 0:
        pytest.skip("needs root")
    made = tmp_path / "copied.so"  # what is kept is moved
    shutil.copy(kernels[1], made)
    PLANTED_LIBRARIES[name](kernels[0], made)
    with pytest.warns(UserWarning, match=r"compiled kernels are not used: .*"):
        assert library.load(kernels[0]) is None
    assert not (tmp_path / "ran").exists()


def test_a_library_that_was_kept_is_loaded(kernels, tmp_path):
    """The same library: what keeps the planted ones out is how they came there."""
    library.keep(kernels[1], kernels[0])
    assert library.load(kernels[0]) is not None and (tmp_path / "ran").exists()


# --- The supply chain: a release says what it is made of.


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
    weights = {path.name for path in (ROOT / "weights").glob("*.safetensors")}
    assert weights <= {part["name"] for part in bill["components"]}


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
