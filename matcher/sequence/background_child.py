"""The program of a process beside tracking: `python -m matcher.sequence.background_child SOCKET`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection

from matcher.errors import MatcherError

_NICE = 10  # tracking goes first


def main() -> None:
    """Take a task and then requests from the inherited socket, and send the answers, until it closes."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.nice(_NICE)
    try:
        task = pickle.loads(connection.recv_bytes())
        answer = None
        while True:
            connection.send_bytes(pickle.dumps(answer))
            request = pickle.loads(connection.recv_bytes())
            try:
                answer = task(request)
            except (MatcherError, OSError) as error:
                answer = MatcherError(str(error))
    except (EOFError, OSError):
        return  # the parent has ended


if __name__ == "__main__":
    main()
