"""A program: the default preset tracks so many frames; prints what it holds at some of them as JSON.

That is [resident megabytes, open files, threads]; how far it is goes to standard error.

    python sequence_memory.py FRAMES

What torch compiles is kept for every number of points, so their number changes from frame to frame here.
"""

import json
import os
import sys
from pathlib import Path

import cv2
import numpy as np
import torch

import matcher

WIDTH, HEIGHT = 240, 180


def held() -> tuple[float, int, int]:
    """Resident megabytes, open files and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1), files, threads


def picture(plane: np.ndarray, number: int) -> np.ndarray:
    """A view of a textured plane that turns, shifts and is covered from the right more and less."""
    angle, zoom = 0.3 * np.sin(number / 37), 1 + 0.2 * np.sin(number / 53)
    c, s = zoom * np.cos(angle), zoom * np.sin(angle)
    move = np.float64([[c, -s, 400 + 200 * np.sin(number / 91)], [s, c, 400 + 150 * np.cos(number / 71)]])
    seen = cv2.warpAffine(plane, move, (WIDTH, HEIGHT), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP)
    seen[:, max(40, int(120 + 100 * np.sin(number / 7.3) + 15 * np.sin(number / 1.7))) :] = 128
    return seen


def main() -> None:
    torch.set_num_threads(1)
    options = {"max_keypoints": 128, "device": "cpu"}
    rng = np.random.default_rng(0)
    noise = cv2.GaussianBlur(rng.standard_normal((1200, 1200)), (0, 0), 2.2)
    plane = cv2.normalize(noise, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    tracker = matcher.Tracker(matcher.load(**options))
    frames, found = int(sys.argv[1]), {}
    shown = {100, frames // 10, frames // 2, frames - 1}
    for number in range(frames):
        tracker.push(picture(plane, number))
        if number in shown:
            found[number] = held()
        if number % 1000 == 999:
            print(number + 1, *held(), file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
