"""Compile the attention kernel for processors with AMX, which bfloat16 on a CPU then uses.

    python scripts/build_kernel.py

Needs g++ 11 or newer, or clang++. `MATCHER_COMPILED=0` in the environment goes back to the stock kernel.
"""

import argparse
import sys

from matcher.network.compiled import build
from matcher.types import MatcherError


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    try:
        print(build())
    except MatcherError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
