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
from typing import NamedTuple

PREBUILT = Path(__file__).with_name("prebuilt")  # libraries of a wheel
_COMMON = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",  # not -ffast-math, which would change the arithmetic of the whole process
    "-fno-trapping-math",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
_X86, _ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")


class Target(NamedTuple):
    """A kind of processor."""

    name: str
    machines: tuple[str, ...]  # of `platform.machine()`
    flags: tuple[str, ...]


TARGETS = (  # of each machine the best first
    Target("amx", _X86, ("-march=sapphirerapids", "-mprefer-vector-width=512")),
    Target("avx512_bf16", _X86, ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512")),
    Target("avx512", _X86, ("-march=x86-64-v4", "-mprefer-vector-width=512")),
    Target("avx2", _X86, ("-march=x86-64-v3",)),
    Target("sve256", _ARM, ("-march=armv8.2-a+sve", "-msve-vector-bits=256")),
    Target("neon", _ARM, ("-march=armv8-a",)),
)


@cache
def targets_of_machine() -> tuple[Target, ...]:
    """Those of this kind of machine, whether or not its processor is one of them."""
    return tuple(target for target in TARGETS if platform.machine() in target.machines)


def sources() -> list[Path]:
    """What is compiled, and the headers."""
    here = Path(__file__).parent
    return sorted([*here.glob("*.cpp"), *here.glob("*.h")])


def find_compiler() -> str | None:
    """The C++ compiler of this system."""
    return shutil.which("g++") or shutil.which("clang++")


@cache
def library_name(target: Target) -> str:
    """That of the library of a target, which changes with the sources and with how they are compiled."""
    parts = [" ".join(_COMMON + target.flags).encode(), *(file.read_bytes() for file in sources())]
    return f"{target.name}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"


def compile_library(compiler: str, target: Target, path: Path) -> str | None:
    """Compile the library of a target to `path`.

    Returns:
        What the compiler says if it cannot, else None.
    """
    command = [
        compiler,
        *target.flags,
        *_COMMON,
        "-o",
        str(path),
        *(str(file) for file in sources() if file.suffix == ".cpp"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-2000:] if done.returncode else None
