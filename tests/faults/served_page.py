"""The page in a process of its own, where every connection to another machine fails."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OFFLINE = (
    "import socket, sys\n"
    "connect = socket.socket.connect\n"
    "def refuse(self, address):\n"
    "    if isinstance(address, tuple) and address[0] not in ('127.0.0.1', '::1', 'localhost'):\n"
    "        print('WENT OUT', address, flush=True)\n"
    "        raise OSError('offline')\n"
    "    return connect(self, address)\n"
    "socket.socket.connect = refuse\n"
    "from matcher.cli import main\n"
    "sys.exit(main(['serve', '--port', '0', '--device', 'cpu', '--max-upload', '1']))"
)


@contextmanager
def served(temporary: Path, end: signal.Signals = signal.SIGINT) -> Iterator[str]:
    """Its address; it may make temporary files in that folder only, and leaves none there."""
    process = subprocess.Popen(
        [sys.executable, "-c", OFFLINE],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    first = process.stdout.readline()
    found = re.search(r"http://127\.0\.0\.1:\d+", first)
    assert found, first + process.stdout.read()
    yield found[0]
    process.send_signal(end)
    rest = process.communicate(timeout=60)[0]
    assert "WENT OUT" not in first + rest
    assert "Traceback" not in rest, rest
    assert [path.name for path in temporary.iterdir()] == []
