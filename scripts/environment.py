"""A virtual environment with the package and its dependencies, for `demo.py` and `run_tests.py`.

Created in `.venv`, or in the folder that `MATCHER_VENV` names, and updated when the dependencies change. Only
the standard library is used, so that this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def prepare(extras: tuple[str, ...] = ()) -> Path:
    """The environment's Python, with the package and these extras installed under `constraints.txt`."""
    if sys.version_info < (3, 11):  # noqa: UP036 - an older Python can start this script
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}")
    folder = Path(os.environ.get("MATCHER_VENV", ROOT / ".venv"))
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / f"installed-{'-'.join(extras) or 'core'}"
    wanted = _fingerprint()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    started = time.monotonic()
    if not python.exists():
        print(f"creating the environment {folder}", flush=True)
        _create(folder)
    print("installing (torch and OpenCV are large: this takes some minutes the first time)", flush=True)
    target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
    options = ["-qq", "--disable-pip-version-check", "--constraint", str(ROOT / "constraints.txt")]
    command = [python, "-m", "pip", "install", *options, "--editable", target]
    if subprocess.run(command).returncode:
        sys.exit("the installation failed; the lines above say why. Is there a network connection?")
    stamp.write_text(wanted)
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    return python


def _create(folder: Path) -> None:
    try:
        venv.create(folder, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"no environment could be created in {folder} ({error}). "
            "On Debian and Ubuntu, install the package python3-venv; then remove that folder and try again."
        )


def _fingerprint() -> str:
    """A hash of everything that the installation depends on."""
    parts = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join([*parts, sys.version.encode(), str(ROOT).encode()])).hexdigest()
