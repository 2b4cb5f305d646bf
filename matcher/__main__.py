"""`python -m matcher`, the same as the command `matcher`."""

import sys

from matcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
