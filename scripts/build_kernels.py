"""Compile the CPU kernels for this processor, unless the installed wheel has them. They are optional.

    python scripts/build_kernels.py

Needs a processor with AVX2 or NEON and g++ 11 or newer, or clang++. `MATCHER_COMPILED=0` in the environment
switches them off; `avx512_bf16`, `avx512` or `avx2` there chooses among those that run here.
"""

import argparse
import sys

from matcher.errors import MatcherError
from matcher.kernels.loader import build


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    try:
        print(f"kernels: {build()}")
    except MatcherError as error:
        print(f"no kernels were compiled: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
