"""What users' own type checkers see: the public names with their types, and misspelt ones as errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import matcher

ROOT = Path(matcher.__file__).parent

RIGHT = """
import matcher
from matcher import Camera, Features, Matches, Pipeline, Result, Tracker, TwoViewGeometry

pipe: Pipeline = matcher.load("nearest", max_keypoints=512)
result: Result = pipe.match("a.jpg", "b.jpg")
matches: Matches = result.matches
geometry: TwoViewGeometry = result.geometry
inliers: int = int(geometry.inliers.sum())
features: Features = pipe.extract("a.jpg")
again: Matches = pipe.match_features(features, features)
camera: Camera = Camera(700.0, 700.0, 320.0, 240.0)
tracker: Tracker = Tracker(camera=camera)
for found in matcher.match_set(["a.jpg", "b.jpg"]).pairs:
    print(found)
aligned = matcher.align("a.jpg", "b.jpg")
print(aligned.found)
instances = matcher.find("logo.png", "photo.jpg")
print(len(instances))
"""
WRONG = [
    "matcher.lode('nearest')",
    "matcher.load('nearest', max_keypoint=512)",
    "matcher.load('nearest', max_keypoints='many')",
    "matcher.load().match('a.jpg', 'b.jpg').point0",
    "matcher.Camera(1.0, 1.0, 1.0, 1.0).to_K()",
    "matcher.load(geometry='affine')",
    "matcher.load().match('a.jpg')",
]


def complaints(tmp_path: Path, program: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    return [line for line in run.stdout.splitlines() if "program.py" in line and "error:" in line]


def test_the_stub_has_exactly_the_public_names():
    named = re.findall(r"import (\w+) as \1", (ROOT / "__init__.pyi").read_text())
    assert sorted([*named, "__version__"]) == sorted(matcher.__all__)
    assert (ROOT / "py.typed").is_file()


@pytest.mark.slow  # mypy reads the whole package, half a minute
def test_ordinary_programs_are_typed_and_mistakes_are_seen(tmp_path):
    pytest.importorskip("mypy")
    seen = complaints(tmp_path, RIGHT + "\n".join(WRONG))
    lines = [int(complaint.split(":")[1]) for complaint in seen]
    first = RIGHT.count("\n") + 1
    assert lines == list(range(first, first + len(WRONG))), seen
