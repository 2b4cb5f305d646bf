"""Promise 1 where standard input, output or errors are closed or full: the work is done, the store sound."""

import subprocess
import sys
from pathlib import Path

import pytest
from collection_runs import QUICK, photos

from matcher.collection.store import Store

pytestmark = [
    pytest.mark.promise(1),
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux"),
]
WAYS = {
    "all closed": ("<&- >&- 2>&-", 0),
    "output closed": (">&-", 0),
    "errors to a full disk": ("2> /dev/full", 0),
    "output to a full disk": ("> /dev/full", 6),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_whose_messages_nobody_reads(tmp_path, way):
    """With all three closed, a database had the number to which libraries print."""
    photos(tmp_path / "photos", 3)
    redirection, code = WAYS[way]
    command = [sys.executable, "-P", "-m", "matcher", "collection", tmp_path / "photos", "--run"]
    command += [tmp_path / "run", *QUICK, "--exhaustive", "--workers", "0"]
    shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *map(str, command)]
    assert subprocess.run(shell, check=False).returncode == code
    with Store.open(tmp_path / "run") as store:
        assert store.check() == [] and store.counts().pairs_done == 3
