"""For which processors the kernels are compiled, and how.

Only the standard library is imported: the build of a wheel reads this file by itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from matcher.errors import UsageError
from matcher.files import NotOursError, cache_folder, check_own, make_private, open_own
from matcher.processes import compute_alone_after_fork

# --- targets: For which processors the kernels are compiled, and how.

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


# --- trusted: A compiled library is code: it is loaded only where nobody but this user can have put it
# there.

_DESCRIPTORS = Path("/proc/self/fd")


def keep(made: Path, path: Path) -> None:
    """Move a library that was just compiled to `path`, whose folder is only this user's, with its checksum.

    Raises:
        OSError: it cannot be kept there.
    """
    made.chmod(0o644)
    digest = made.with_name(_record_trusted(path).name)
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
    digest.chmod(0o644)
    digest.replace(_record_trusted(path))
    made.replace(path)


def load(path: Path) -> ctypes.CDLL | None:
    """The library that `keep` left at `path`; None, with a warning where there is one, if it cannot be used.

    Folder, library and checksum must belong to this user or to root, be no links, and be writable by nobody
    else; the bytes must be those that were compiled. The file that was checked is the file that is loaded.
    """
    try:
        descriptor = _open_checked(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotOursError, OSError) as error:
        remedy = "; delete it and run `python scripts/build_kernels.py`" * isinstance(error, NotOursError)
        warnings.warn(f"the compiled kernels are not used: {error}{remedy}", UserWarning, stacklevel=2)
        return None
    try:
        # By descriptor, so that no other file can take the name in between. It stays open: the loader knows
        # libraries by their names, and the number must not come to name another one.
        return ctypes.CDLL(str(_DESCRIPTORS / str(descriptor) if _DESCRIPTORS.is_dir() else path))
    except OSError:  # made for another system, or files may not be executed there
        os.close(descriptor)
        return None


def _open_checked(path: Path) -> int:
    """An open descriptor of a library that is ours."""
    with open_own(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = _record_trusted(path)
        if not record.is_file() or record.read_text(encoding="ascii", errors="replace").strip() != digest:
            raise NotOursError(f"{path} is not what was compiled here")
        check_own(record, record.lstat(), stat.S_ISREG)
        return os.dup(file.fileno())


def _record_trusted(path: Path) -> Path:
    return path.with_suffix(".sha256")


# --- signatures: What the functions of the library take, by their names without `matcher_`.

RETURNING_LONG = ("join", "peaks")
SIGNATURES = {
    "attend": [*[c_void_p] * 5, *[c_long] * 4, c_int],
    "attend_vectors": [*[c_void_p] * 5, c_int, *[c_long] * 4, c_int],
    "normalise_gelu": [c_void_p, c_int, c_long, c_long, *[c_void_p] * 3, c_float, c_int],
    "add": [c_void_p, c_void_p, c_int, c_long, c_long, c_void_p, c_void_p, c_int],
    "turn": [c_void_p, c_int, *[c_long] * 4, c_void_p, c_void_p, c_int],
    "absorb": [c_void_p, *[c_long] * 3, c_void_p, c_void_p, c_float, c_void_p, c_int],
    "candidates": [*[c_void_p] * 4, *[c_long] * 4, *[c_void_p] * 7, c_int],
    "join": [*[c_long] * 3, *[c_void_p] * 13],
    "transport": [
        *[c_long] * 2,
        *[c_void_p] * 11,
        c_float,
        *[c_void_p] * 2,
        *[c_int] * 2,
        c_long,
        c_float,
        c_void_p,
        c_int,
    ],
    "best": [c_long, c_long, *[c_void_p] * 8],
    "support": [c_long, *[c_void_p] * 8, c_int],
    "fit": [*[c_void_p] * 3, c_long, *[c_void_p] * 3, c_int],
    "fit_windows": [*[c_void_p] * 5, c_long, c_void_p, c_int],
    "add_enlarged": [c_void_p, c_void_p, c_int, *[c_long] * 3, c_void_p, c_int],
    "score_pixels": [c_void_p, c_int, *[c_long] * 3, *[c_void_p] * 3, c_int],
    "sample": [c_void_p, c_int, *[c_long] * 3, c_void_p, c_long, c_float, c_void_p, c_long, c_int],
    "peaks": [c_void_p, *[c_long] * 5, c_void_p, c_long, c_int],
}


# --- library: Building and loading the compiled kernels.

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
            keep(made, path)
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
        library = ctypes.CDLL(str(prebuilt)) if prebuilt.is_file() else load(library_path(name))
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


# --- trials: Whether kernels are used on this machine: each kind is tried once, against stock operators.

_ROUNDS = 7
_LARGEST = 1 << 20  # bytes of what was found
SLOWER = 1.1  # times the stock operators' time, at most
_running: dict[str, bool] = {}  # trials under way, whose kernels may run


class Trial(NamedTuple):
    """A kernel, the stock operators that do the same, and how far apart their results may be."""

    kernel: Callable[[], Tensor | None]
    stock: Callable[[], Tensor]
    tolerance: float


def granted(name: str, make: Callable[[], Trial]) -> bool:
    """Whether kernels of the kind `name` are used here; always where MATCHER_COMPILED names a target.

    Args:
        name: of the kind.
        make: what tries it.
    """
    if _running.get(name) or os.environ.get(SWITCH) in supported():
        return True
    return _granted(name, make, library_in_use(), torch.get_num_threads())


@cache
def _granted(name: str, make: Callable[[], Trial], library: str, threads: int) -> bool:
    record, key = (
        _record_trials(),
        f"{name} {library} {_processor()} torch {torch.__version__} {threads} threads",
    )
    known = _read(record)
    if isinstance(known.get(key), bool):
        return known[key]
    _running[name] = True
    try:
        with torch.inference_mode():
            known[key] = _passes(make())
    finally:
        _running[name] = False
    _keep(record, known)
    return known[key]


def _passes(tried: Trial) -> bool:
    found, expected = tried.kernel(), tried.stock()
    if found is None or not agree(found, expected, tried.tolerance):
        return False
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for call, seconds in zip((tried.kernel, tried.stock), times, strict=True):
            start = perf_counter()
            call()
            seconds.append(perf_counter() - start)
    return min(times[0]) <= SLOWER * min(times[1])


def agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the results of a kernel are those of stock operators."""
    same_shape = found.shape == expected.shape
    return same_shape and torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=0.02)


def _record_trials() -> Path | None:
    try:
        return cache_folder() / "kernels" / "trials.json"
    except (OSError, RuntimeError):  # no home folder
        return None


def _read(record: Path | None) -> dict[str, bool]:
    try:
        if record is None:
            return {}
        with open_own(record) as file:  # it decides which kernels are trusted
            known = json.loads(file.read(_LARGEST))
    except (NotOursError, OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _keep(record: Path | None, known: dict[str, bool]) -> None:
    if record is None or not record.parent.is_dir():
        return
    with suppress(OSError):  # it is tried again by the next process
        descriptor, name = tempfile.mkstemp(dir=record.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(known, file, indent=1)
        Path(name).replace(record)


@cache
def _processor() -> str:
    information = Path("/proc/cpuinfo")
    with suppress(OSError):
        names = [x for x in information.read_text().splitlines() if x.startswith(("model name", "CPU part"))]
        if names:
            return names[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
