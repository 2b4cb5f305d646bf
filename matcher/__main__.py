"""`python -m matcher`, the same as the command `matcher`."""

import sys
from os.path import dirname  # loaded by every start of Python; pathlib could come from the working folder

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # `-m` put the working folder first, where a file could stand for an installed module. It comes last
        # where the package itself is run from there, as in a checkout, and else it goes.
        folder = sys.path.pop(0)
        if dirname(dirname(__file__)) == folder:  # noqa: PTH120
            sys.path.append(folder)
    from matcher.cli import program

    program()
