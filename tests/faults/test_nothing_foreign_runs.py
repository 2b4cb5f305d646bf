"""Promise 5: no code runs that is not ours or was not asked for."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_a_module_in_the_working_folder_is_not_imported(planted, tmp_path, tried):
    """By the command, by its worker, and by COLMAP's process."""
    pytest.importorskip("pycolmap")
    photos(tmp_path / "photos", 2)
    command = [sys.executable, "-m", "matcher", "sfm", tmp_path / "photos", "--out", tmp_path / "model"]
    environment = {**os.environ, "PYTHONPATH": OURS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*map(str, command), *QUICK, "--workers", "1"],
        cwd=planted,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran(tmp_path) == []
    assert done.returncode in (0, 4), done.stderr  # a flat scene may give no model, but COLMAP has run
    assert "Traceback" not in done.stderr and "planted" not in done.stderr
    tried(3 * len(PLANTED))


OPTIONAL = (
    pytest.param(
        ["collection", "photos", "--run", "new", *QUICK, "--exhaustive", "--engine", "ray", "--workers", "1"],
        marks=pytest.mark.slow,  # Ray takes a minute to start and to end
    ),
    ["export", "run", "--to", "hloc", "out"],
    ["serve", "--port", "0"],
)


@pytest.mark.parametrize("command", OPTIONAL)
def test_an_optional_module_in_the_working_folder_is_not_imported(planted, tmp_path, command):
    """By commands that need Ray, h5py, Rerun and Gradio: those that are installed, or a message."""
    if importlib.util.find_spec("gradio") and command[0] == "serve":
        pytest.skip("it would start the page")
    photos(tmp_path / "photos", 2)
    small_run(tmp_path / "run")
    named = [str(tmp_path / word) if word in ("photos", "run", "new", "out") else word for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "matcher", *named],
        cwd=planted,
        env={**os.environ, "PYTHONPATH": OURS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran(tmp_path) == [], done.stderr
    assert done.returncode in (0, 2, 3, 4) and "Traceback" not in done.stderr, done.stderr


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
    path = library.library_path()
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
