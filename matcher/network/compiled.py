"""An attention kernel for processors with AMX, compiled here on request; everything runs without it.

`build()` compiles `attend.cpp`, which lies beside this file, with the machine's own compiler and keeps the
library in the user's cache folder, under a name that changes with the source. From then on bfloat16 attention
without gradients uses it; `MATCHER_COMPILED=0` in the environment leaves it alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from matcher.types import UsageError

SOURCE = Path(__file__).with_name("attend.cpp")
SWITCH = "MATCHER_COMPILED"
FLAGS = ("-O3", "-march=sapphirerapids", "-fopenmp", "-shared", "-fPIC")
WIDEST = 128  # channels of a head


def library_path() -> Path:
    """Where the library of this source lies, or would lie."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matcher"
    return folder / f"attend-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"


def build() -> Path:
    """Compile the kernel for this machine.

    Raises:
        UsageError: the processor has no AMX, there is no compiler, or it does not compile.
    """
    if not torch.cpu._is_amx_tile_supported():
        raise UsageError("this processor has no AMX; the kernel is of no use here")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UsageError("no C++ compiler found: install g++ 11 or newer, or clang++ 12")
    path = library_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"{compiler} cannot compile the kernel:\n{done.stderr.strip()[-2000:]}")
        made.replace(path)
    _load.cache_clear()
    return path


@cache
def _load() -> ctypes.CDLL | None:
    if not torch.cpu._is_amx_tile_supported():
        return None
    path = library_path()
    if not path.is_file():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # compiled for another machine
        return None
    library.matcher_attend.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_long] * 4 + [ctypes.c_int]
    return library if library.matcher_prepare() == 0 else None


def compiled_kernel() -> ctypes.CDLL | None:
    """The kernel, if it was built, runs here and is not switched off."""
    return None if os.environ.get(SWITCH) == "0" else _load()


def attend_compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """softmax(q kᵀ / √d) v by the compiled kernel, or None where it is not there or not made for this.

    Args:
        q: (…, heads, N, d) bfloat16 on the CPU. k, v: (…, heads, M, d).

    Returns:
        (…, heads, N, d), N before heads in memory. None also if scores may be too large to do without their
        maximum.
    """
    width, library = q.shape[-1], compiled_kernel()
    suits = q.dtype == torch.bfloat16 and q.dim() >= 3 and width % 32 == 0 and width <= WIDEST
    if library is None or not suits or not q.numel() or not k.numel():
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (heads, n), m, pictures = q.shape[-3:-1], k.shape[-2], q.shape[:-3]
    out = q.new_empty(*pictures, n, heads, width).transpose(-2, -3)
    strides = (ctypes.c_long * 6)(*(x.stride(axis) for x in (q, k, v) for axis in (-2, -3)))
    threads = min(torch.get_num_threads(), math.ceil(n / 32) * heads)
    for picture in product(*map(range, pictures)):
        places = (x[picture].data_ptr() for x in (q, k, v, out))
        if library.matcher_attend(*places, strides, n, m, heads, width, threads):
            return None
    return out
