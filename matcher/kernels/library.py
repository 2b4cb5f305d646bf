"""Building and loading the compiled kernels.

A library is compiled for each kind of processor (`targets.py`). The best one that runs here is taken: from
the wheel where it has one, else from the cache folder, where `build()` compiles it; `trusted.py` says which
libraries are loaded from there.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import cache
from pathlib import Path

from matcher.errors import UsageError
from matcher.files import cache_folder, make_private
from matcher.kernels import trusted
from matcher.kernels.signatures import RETURNING_LONG, SIGNATURES
from matcher.kernels.targets import (
    PREBUILT,
    TARGETS,
    Target,
    compile_library,
    find_compiler,
    library_name,
    targets_of_machine,
)
from matcher.threads import compute_alone_after_fork

SWITCH = "MATCHER_COMPILED"
_AVX2 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_INSTRUCTIONS = {  # of targets that not every processor of their machines has, in Linux's words
    "amx": (*_AVX512, "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8"),
    "avx512_bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "sve256": ("sve", "vectors of 256 bits"),
}
_SVE_LENGTH = 51  # Linux's PR_SVE_GET_VL; its low 16 bits are bytes


@cache
def supported() -> tuple[str, ...]:
    """The targets whose instructions this processor has, the best first."""
    has = processor_flags()
    return tuple(t.name for t in targets_of_machine() if has.issuperset(_INSTRUCTIONS.get(t.name, ())))


@cache
def processor_flags() -> frozenset[str]:
    """What Linux says that the processor can do; nothing elsewhere."""
    flags = (_said_of_processor("flags", "Features") or "").split()
    if "sve" in flags:
        flags.append(f"vectors of {8 * sve_bytes()} bits")
    return frozenset(flags)


def processor_maker() -> str | None:
    """Who made this x86 processor, as Linux says: GenuineIntel, AuthenticAMD, …; None elsewhere."""
    said = _said_of_processor("vendor_id")
    return None if said is None else said.split(":", 1)[1].strip()


def _said_of_processor(*names: str) -> str | None:
    """The first line of Linux's description of the processor that begins with one of the names."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(names)), None)


def sve_bytes() -> int:
    """Bytes of a vector of ARM's SVE, whose size differs between processors."""
    return ctypes.CDLL(None).prctl(_SVE_LENGTH, 0, 0, 0, 0) & 0xFFFF


def instructions() -> str | None:
    """The best of them, if any, or the one that MATCHER_COMPILED names."""
    named, able = os.environ.get(SWITCH), supported()
    return named if named in able else next(iter(able), None)


def library_path(name: str | None = None) -> Path:
    """Where the library of these sources for a target, that of `instructions`, lies or would lie."""
    return cache_folder() / "kernels" / library_name(_target(name or instructions()))


def _target(name: str | None) -> Target:
    return next(target for target in TARGETS if target.name == name)


def build() -> Path:
    """Compile the kernels for this machine, unless the library is there.

    Raises:
        UsageError: there are none for this processor, no compiler is there, it fails, or the library
            cannot be kept or loaded.
    """
    name = instructions()
    if name is None:
        raise UsageError("there are no kernels for this processor: it has neither AVX2 nor NEON")
    if _load(name) is not None:
        return _place(name)
    compiler = find_compiler()
    if compiler is None:
        raise UsageError("no C++ compiler found: install g++ 11 or newer, or clang++ 12")
    path = library_path(name)
    try:
        make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            if said := compile_library(compiler, _target(name), made):
                raise UsageError(f"{compiler} cannot compile the kernels:\n{said}")
            trusted.keep(made, path)
    except OSError as error:
        raise UsageError(f"the kernels cannot be kept in {path.parent} ({error.strerror})") from error
    _load.cache_clear()
    if _load(name) is None:
        raise UsageError(f"{path} was compiled but cannot be loaded; may files in that folder be executed?")
    return path


def _place(name: str) -> Path:
    prebuilt = PREBUILT / library_name(_target(name))
    return prebuilt if prebuilt.is_file() else library_path(name)


@cache
def _load(name: str) -> ctypes.CDLL | None:
    """The library of a target, from the wheel or the cache."""
    try:
        prebuilt = PREBUILT / library_name(_target(name))
        library = ctypes.CDLL(str(prebuilt)) if prebuilt.is_file() else trusted.load(library_path(name))
        if library is None:
            return None
        for function, types in SIGNATURES.items():
            getattr(library, f"matcher_{function}").argtypes = types
        for function in RETURNING_LONG:
            getattr(library, f"matcher_{function}").restype = ctypes.c_long
        if name == "amx" and library.matcher_prepare():
            return None  # the system does not let this process use the matrix unit
    except (OSError, RuntimeError, AttributeError):  # no home folder, not ours to read, damaged
        return None
    compute_alone_after_fork()
    return library


def library_in_use() -> str:
    """The name of the library that `kernels` gives, "" without."""
    named = os.environ.get(SWITCH)
    for name in (named,) if named in supported() else supported():
        if _load(name) is not None:
            return library_name(_target(name))
    return ""


def kernels() -> ctypes.CDLL | None:
    """The best library that is there and runs here, unless MATCHER_COMPILED is 0 or names another one."""
    named = os.environ.get(SWITCH)
    if named == "0":
        return None
    return _best(named)


@cache
def _names(named: str | None) -> tuple[str, ...]:
    able = supported()
    return (named,) if named in able else able


def _best(named: str | None) -> ctypes.CDLL | None:
    for name in _names(named):
        if (library := _load(name)) is not None:
            return library
    return None
