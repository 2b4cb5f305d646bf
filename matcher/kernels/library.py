"""Building and loading the compiled kernels.

`build()` compiles the sources beside this file with the machine's own compiler and keeps the library in the
user's cache folder, under a name that changes with the sources and with the processor's instructions,
together with its checksum; `trusted.py` says which libraries are loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from matcher.errors import UsageError
from matcher.files import cache_folder
from matcher.kernels import trusted
from matcher.kernels.signatures import SIGNATURES

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        "attend.cpp",
        "rows.cpp",
        "assign.cpp",
        "candidates.cpp",
        "transport.cpp",
        "consensus.cpp",
        "fit_windows.cpp",
        "maps.cpp",
    )
)
HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("vectors.h", "numbers.h", "products.h", "tiles.h")
)
SWITCH = "MATCHER_COMPILED"
_AVX_512 = frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_FLAGS = (
    "-O3",
    "-fno-math-errno",  # not -ffast-math, which would change the arithmetic of the whole process
    "-fno-trapping-math",
    "-mprefer-vector-width=512",
    "-fopenmp",
    "-shared",
    "-fPIC",
)


def instructions() -> str | None:
    """The instructions to compile for: those of CPUs with AMX, with AVX-512, or none; older vector
    units gain nothing."""
    flags = _processor_flags()
    if {"amx_tile", "amx_bf16", *_AVX_512} <= flags:
        return "sapphirerapids"
    return "x86-64-v4" if flags >= _AVX_512 else None


@cache
def _processor_flags() -> frozenset[str]:
    """What Linux says that the processor can do; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def library_path() -> Path:
    """Where the library of these sources lies, or would lie."""
    parts = [" ".join(_FLAGS).encode(), *(source.read_bytes() for source in SOURCES + HEADERS)]
    name = f"{instructions()}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    return cache_folder() / "kernels" / name


def build() -> Path:
    """Compile the kernels for this machine.

    Raises:
        UsageError: the processor has no AVX-512, there is no compiler, it does not compile, or the library
            cannot be kept or loaded.
    """
    if instructions() is None:
        raise UsageError("this processor has no AVX-512; the kernels are of no use here")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UsageError("no C++ compiler found: install g++ 11 or newer, or clang++ 12")
    path = library_path()
    if _load() is not None:
        return path
    try:
        trusted.make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, f"-march={instructions()}", *_FLAGS, "-o", str(made), *map(str, SOURCES)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"{compiler} cannot compile the kernels:\n{done.stderr.strip()[-2000:]}")
            trusted.keep(made, path)
    except OSError as error:
        raise UsageError(f"the kernels cannot be kept in {path.parent} ({error.strerror})") from error
    _load.cache_clear()
    if _load() is None:
        raise UsageError(f"{path} was compiled but cannot be loaded; may files in that folder be executed?")
    return path


@cache
def _load() -> ctypes.CDLL | None:
    if instructions() is None:
        return None
    try:
        library = trusted.load(library_path())
        if library is None:
            return None
        for name, types in SIGNATURES.items():
            getattr(library, f"matcher_{name}").argtypes = types
        for name in ("join", "peaks"):
            getattr(library, f"matcher_{name}").restype = ctypes.c_long
        if instructions() == "sapphirerapids" and library.matcher_prepare():
            return None  # the system does not let this process use the matrix unit
    except (OSError, RuntimeError, AttributeError):  # no home folder, not ours to read, damaged
        return None
    return library


def kernels() -> ctypes.CDLL | None:
    """The kernels, if they were built, run here and are not switched off."""
    return None if os.environ.get(SWITCH) == "0" else _load()
