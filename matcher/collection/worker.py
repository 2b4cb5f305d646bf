"""The program of a worker process: `python -m matcher.collection.worker SOCKET`."""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection

from matcher.collection.store import Store
from matcher.collection.workers import JobRunner
from matcher.errors import MatcherError


def main() -> None:
    """Take jobs from the inherited socket of that number and send their outcomes, until it closes."""
    connection = Connection(int(sys.argv[1]))
    try:
        run_dir, setup = pickle.loads(connection.recv_bytes())
        with Store.open(run_dir) as store:
            runner = JobRunner(setup, store.features)
            connection.send_bytes(pickle.dumps(None))
            while True:
                outcomes = list(runner.run(pickle.loads(connection.recv_bytes())))
                connection.send_bytes(pickle.dumps(outcomes))
    except (EOFError, OSError):
        return  # the run has ended
    except MatcherError as error:
        connection.send_bytes(pickle.dumps(error))


if __name__ == "__main__":
    main()
