"""For which processors the kernels are compiled, and how.

Only the standard library is imported: the build of a wheel reads this file by itself.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
_COMMON = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",  # not -ffast-math, which would change the arithmetic of the whole process
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_AVX512 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_X86 = {"avx512_bf16": (*_AVX512, "-mavx512bf16"), "avx512": _AVX512, "avx2": ("-march=x86-64-v3",)}
_ARM = {"neon": ("-march=armv8-a",)}


def targets() -> dict[str, tuple[str, ...]]:
    """The compiler's flags for the kinds of processors of this kind of machine, the best first."""
    machine = platform.machine()
    return _X86 if machine in ("x86_64", "AMD64") else _ARM if machine in ("aarch64", "arm64") else {}


def find_compiler() -> str | None:
    """The C++ compiler of this system."""
    return shutil.which("g++") or shutil.which("clang++")


@cache
def library_name(target: str) -> str:
    """That of the library of a target, which changes with the source and with how it is compiled."""
    flags = " ".join(_COMMON + targets()[target]).encode()
    return f"{target}-{hashlib.sha256(flags + SOURCE.read_bytes()).hexdigest()[:16]}.so"


def compile_library(compiler: str, target: str, path: Path) -> str | None:
    """Compile the library of a target to `path`; returns what the compiler says if it cannot."""
    command = [compiler, *targets()[target], *_COMMON, "-o", str(path), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-2000:] if done.returncode else None
