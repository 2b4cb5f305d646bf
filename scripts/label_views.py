#!/usr/bin/env python3
"""Depth and poses for folders of images of real places, to train on (needs pycolmap).

label_views.py OUT FOLDER…   each FOLDER holds images of one place; OUT/<name of FOLDER> becomes its set.
"""

import sys
from pathlib import Path

import cv2

from matcher.lab.pairs.labelling.label import label_views

if __name__ == "__main__":
    cv2.setNumThreads(1)
    out, *folders = (Path(argument) for argument in sys.argv[1:])
    for folder in folders:
        label_views(folder, out / folder.name, out / ".work" / folder.name)
