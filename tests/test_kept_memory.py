"""Memory that is kept between matches; in processes of their own, because a process sets it once."""

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, numpy as np
import matcher
from matcher.threads import keep_freed_memory

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def allocate():
    before = pages()
    for _ in range(8):
        maps = [np.ones(size << 20, np.uint8) for size in (5, 3, 4, 6)]
        del maps
    return pages() - before

allocate()
before = allocate()
{call}
allocate()
print(before, allocate())
"""
LOAD = "matcher.load('nearest-learned', device='cpu')"


def faults(call: str, **environment: str) -> tuple[int, int]:
    """Pages of 18 MiB that are taken from the system eight times over, before and after a call."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FAULTS.format(call=call)]
    told = subprocess.run(command, env=plain | environment, check=True, capture_output=True, text=True).stdout
    before, after = map(int, told.split())
    return before, after


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
@pytest.mark.parametrize("call", ["keep_freed_memory()", LOAD])
def test_freed_memory_is_kept(call: str) -> None:
    before, after = faults(call)
    assert before > 2000  # of 36,864 pages of 4 KiB
    assert after < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator only")
def test_the_users_own_settings_of_glibc_stay() -> None:
    before, after = faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072")
    assert after > before / 2 > 1000
