"""Match two images with OpenCV 5 alone: `cv2.ALIKED` and `cv2.LightGlueMatcher` with our weights.

First `matcher weights export hybrid-learned --onnx models --opencv 640x480`, then

    python scripts/opencv_matcher.py models A.jpg B.jpg --output matches.jpg

The same lines work in C++ and Java. What is lost to the pipeline: images are resized to one size, the number
of keypoints is fixed, all layers run on all of them, and nothing is refined or verified.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np


def match(models: Path, image0: np.ndarray, image1: np.ndarray, size: tuple[int, int]) -> tuple:
    """Keypoints of both images and their `cv2.DMatch`es, by two ONNX files and OpenCV alone."""
    settings = cv2.ALIKED_Params()
    settings.inputSize = size
    settings.engine = cv2.dnn.ENGINE_NEW
    detector = cv2.ALIKED.create(str(models / "opencv-learned.onnx"), settings)
    matcher = cv2.LightGlueMatcher.create(str(models / "opencv-hybrid-learned.onnx"))
    (points0, first), (points1, second) = (detector.detectAndCompute(each, None) for each in (image0, image1))
    places = [np.array([each.pt for each in points], np.float32) for points in (points0, points1)]
    matcher.setPairInfo(*places, image0.shape[1::-1], image1.shape[1::-1])
    return points0, points1, matcher.match(first, second)


def main() -> None:
    """Match two files and draw the matches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="folder with the exported files")
    parser.add_argument("images", nargs=2, type=Path)
    parser.add_argument("--size", default="640x480", help="as given to the export")
    parser.add_argument("--output", type=Path, default=Path("matches.jpg"))
    given = parser.parse_args()
    width, height = map(int, given.size.split("x"))
    images = [cv2.imread(str(path)) for path in given.images]
    if any(image is None for image in images):
        raise SystemExit("an image cannot be read")
    points0, points1, matches = match(given.models, *images, (width, height))
    drawn = cv2.drawMatches(images[0], points0, images[1], points1, matches, None, matchesThickness=1)
    cv2.imwrite(str(given.output), drawn)
    print(f"{len(matches)} matches, drawn to {given.output}")


if __name__ == "__main__":
    main()
