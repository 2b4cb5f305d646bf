"""Estimate depth and poses for photos of real scenes, as training views for `matcher train --real`.

    python scripts/label_views.py OUT FOLDER…

Each FOLDER holds photos of one scene; its set is written to OUT/<name of FOLDER>. Needs pycolmap (extra
`sfm`).
"""

import argparse
import sys
from pathlib import Path

import cv2

from matcher.errors import MatcherError
from matcher.train.labelling import label_views


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    try:
        for folder in args.folders:
            label_views(folder, args.out / folder.name, args.out / ".work" / folder.name)
    except (MatcherError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
