"""Files for OpenCV 5 in `cv2.ALIKED` and `cv2.LightGlueMatcher`, as scripts/opencv_matcher.py uses them."""

import importlib.util
from pathlib import Path

import cv2
import numpy as np
import pytest
from real_pairs import three_pairs

import matcher
from matcher.cli import main

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = [
    pytest.mark.slow,  # exporting takes minutes
    pytest.mark.skipif(not hasattr(cv2, "LightGlueMatcher"), reason="needs OpenCV 5"),
]

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "opencv_matcher.py"
SIZE, POINTS = (640, 480), 512


@pytest.fixture(scope="module")
def matched(tmp_path_factory):
    """Matches (K, 4) of two files by OpenCV and by the pipeline, both files made of one size before."""
    folder = tmp_path_factory.mktemp("opencv")
    command = ["weights", "export", "hybrid-learned", "--onnx", str(folder)]
    assert main([*command, "--opencv", "{}x{}".format(*SIZE)]) == 0
    spec = importlib.util.spec_from_file_location("opencv_matcher", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    options = {"resize": max(SIZE), "further_passes": False, "refine": False, "max_keypoints": POINTS}
    pipeline = matcher.load("hybrid-learned", engine="onnx", **options)

    def of(pair: tuple[Path, Path]) -> tuple[np.ndarray, np.ndarray]:
        images = [cv2.resize(cv2.imread(str(path)), SIZE, interpolation=cv2.INTER_AREA) for path in pair]
        points0, points1, found = script.match(folder, *images, SIZE)
        places = [np.array([point.pt for point in points]) for points in (points0, points1)]
        theirs = np.array([[*places[0][m.queryIdx], *places[1][m.trainIdx]] for m in found])
        ours = pipeline.match(*(np.ascontiguousarray(image[..., ::-1]) for image in images)).matches
        return theirs, np.concatenate([ours.points0, ours.points1], axis=1)

    return of


def near(theirs: np.ndarray, ours: np.ndarray) -> float:
    """The share of matches that are half a pixel at most from one of ours."""
    return np.mean(np.abs(theirs[:, None] - ours).max(axis=2).min(axis=1) < 0.5)


def test_opencv_matches_with_our_weights_what_the_pipeline_matches(matched, capsys):
    for name, pair in three_pairs().items():
        theirs, ours = matched(pair)
        share = near(theirs, ours)
        with capsys.disabled():
            print(f"\n{name}: OpenCV {len(theirs)} matches, {share:.1%} near ours; the pipeline {len(ours)}")
        assert len(theirs) > 100
        assert share > 0.85 and 0.9 < len(theirs) / len(ours) < 1.1
