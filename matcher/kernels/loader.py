"""Building and loading the compiled kernels: for the machine at hand, or as the wheel has them.

A compiled library is code: one in the cache folder is loaded only where nobody but this user can have put it
there, and if its bytes are those that were compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import stat
import tempfile
import warnings
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

from matcher.errors import UsageError
from matcher.files import NotOursError, cache_folder, check_own, make_private, open_own
from matcher.kernels.compiling import compile_library, find_compiler, library_name, targets
from matcher.processes import compute_alone_after_fork

SWITCH = "MATCHER_COMPILED"  # "0": without; a target: that one
PREBUILT = Path(__file__).with_name("prebuilt")  # libraries of a wheel
_AVX2 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_INSTRUCTIONS = {"avx512_bf16": (*_AVX512, "avx512_bf16"), "avx512": _AVX512, "avx2": _AVX2}
_SIGNATURES = {
    "attend": [*[c_void_p] * 5, c_int, *[c_long] * 4, c_float, c_void_p, c_int],
    "local_maps": [*[c_void_p] * 3, c_long, c_void_p, c_int],
    "fit_windows": [*[c_void_p] * 5, c_long, c_void_p, c_int],
}


@cache
def processor_flags() -> frozenset[str]:
    """What Linux says that the processor can do; nothing elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def supported() -> tuple[str, ...]:
    """The targets whose instructions this processor has, the best first."""
    return tuple(name for name in targets() if processor_flags().issuperset(_INSTRUCTIONS.get(name, ())))


def kernels() -> ctypes.CDLL | None:
    """The best library that is there and runs here, unless MATCHER_COMPILED is 0 or names another one."""
    named = os.environ.get(SWITCH)
    libraries = map(_load, () if named == "0" else _candidates(named))
    return next((library for library in libraries if library is not None), None)


def library_in_use() -> str:
    """The name of the library that `kernels` gives, "" without."""
    library = kernels()
    return "" if library is None else library.target


@cache
def _candidates(named: str | None) -> tuple[str, ...]:
    able = supported()
    if named not in (None, "", "0", *able):
        known, said = ", ".join(("0", *able)), f"{SWITCH}={named!r} names no kernels of this processor"
        warnings.warn(f"{said} and is ignored; known: {known}", UserWarning, stacklevel=2)
    return (named,) if named in able else able


def library_path(name: str) -> Path:
    """Where the library for a target lies or would lie in the cache."""
    return cache_folder() / "kernels" / library_name(name)


@cache
def _load(name: str) -> ctypes.CDLL | None:
    """The library of a target, from the wheel or the cache."""
    try:
        prebuilt = PREBUILT / library_name(name)
        library = ctypes.CDLL(str(prebuilt)) if prebuilt.is_file() else load(library_path(name))
        if library is None:
            return None
        for function, types in _SIGNATURES.items():
            getattr(library, f"matcher_{function}").argtypes = types
        library.target = library_name(name)
    except (OSError, RuntimeError, AttributeError):  # no home folder, not ours to read, damaged
        return None
    compute_alone_after_fork()
    return library


def build() -> Path:
    """Compile the kernels for this machine, unless the library is there, and return its place; `UsageError`:
    no kernels for this processor, no compiler, it fails, or the library cannot be kept or loaded."""
    names = _candidates(os.environ.get(SWITCH))
    if not names:
        raise UsageError("there are no kernels for this machine: they need AVX2 and Linux, or NEON")
    name, prebuilt = names[0], PREBUILT / library_name(names[0])
    if _load(name) is not None:
        return prebuilt if prebuilt.is_file() else library_path(name)
    if (compiler := find_compiler()) is None:
        raise UsageError("no C++ compiler found: install g++ 11 or newer, or clang++ 12")
    path = library_path(name)
    try:
        make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            if said := compile_library(compiler, name, made):
                raise UsageError(f"{compiler} cannot compile the kernels:\n{said}")
            keep(made, path)
    except OSError as error:
        said = f"the kernels cannot be kept in {path.parent} ({error.strerror})"
        raise UsageError(f"{said}: name another cache in MATCHER_CACHE") from error
    _load.cache_clear()
    if _load(name) is None:
        raise UsageError(f"{path} was compiled but cannot be loaded; may files in that folder be executed?")
    return path


def tell_once() -> str | None:
    """What to say to a user who could have the kernels and has not, unless a file in the cache folder tells
    that it was said before."""
    if os.environ.get(SWITCH) == "0" or not supported() or find_compiler() is None or kernels() is not None:
        return None
    told = cache_folder() / "kernels-told"
    try:
        told.parent.mkdir(parents=True, exist_ok=True)
        told.touch(exist_ok=False)
    except (OSError, RuntimeError):  # said before, or no folder to remember it in
        return None
    return "matching is faster with compiled kernels, which `matcher env --compile` makes here (said once)"


def keep(made: Path, path: Path) -> None:
    """Move a library that was just compiled to `path`, in a folder of this user alone, with its checksum."""
    record = path.with_suffix(".sha256")
    digest = made.with_name(record.name)
    digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), encoding="ascii")
    for file, place in ((digest, record), (made, path)):
        file.chmod(0o644)
        file.replace(place)


def load(path: Path) -> ctypes.CDLL | None:
    """The library that `keep` left at `path`; None, with a warning where there is one, if it cannot be used.

    Folder, library and checksum must belong to this user or to root, be no links, and be writable by nobody
    else; the bytes must be those that were compiled. The file that was checked is the file that is loaded.
    """
    try:
        with open_own(path) as file:
            digest, record = hashlib.file_digest(file, "sha256").hexdigest(), path.with_suffix(".sha256")
            if not record.is_file() or record.read_text("ascii", errors="replace").strip() != digest:
                raise NotOursError(f"{path} is not what was compiled here")
            check_own(record, record.lstat(), stat.S_ISREG)
            descriptor = os.dup(file.fileno())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (NotOursError, OSError) as error:
        remedy = "; delete it and run `matcher env --compile`" * isinstance(error, NotOursError)
        warnings.warn(f"the compiled kernels are not used: {error}{remedy}", UserWarning, stacklevel=2)
        return None
    try:
        # By descriptor, so that no other file can take the name in between. It stays open: the loader knows
        # libraries by their names, and the number must not come to name another one.
        opened = Path("/proc/self/fd")
        return ctypes.CDLL(str(opened / str(descriptor) if opened.is_dir() else path))
    except OSError:  # made for another system, or files may not be executed there
        os.close(descriptor)
        return None
