"""What users' own type checkers see: the public names with their types, and misspelt ones as errors."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import matcher

ROOT = Path(matcher.__file__).parent

PROGRAMS = [
    """
pipe: Pipeline = matcher.load("nearest", max_keypoints=512)
result: Result = pipe.match("a.jpg", Path("b.jpg"))
points: np.ndarray = result.points0
geometry: TwoViewGeometry = result.geometry
inliers: int = int(geometry.inliers.sum())
""",
    """
pipe = matcher.load()
features: Features = pipe.extract("a.jpg")
several: list[Matches] = pipe.match_features_batch([(features, features)])
again: Matches = pipe.match_features(features, features)
""",
    """
camera: Camera = Camera(700.0, 700.0, 320.0, 240.0, size=(640, 480))
result = matcher.load(geometry="essential").match(np.zeros((48, 64)), "b.jpg", camera0=camera)
probability: float = result.verdict.probability if result.verdict else 0.0
""",
    """
tracker: Tracker = Tracker(camera=Camera(700.0, 700.0, 320.0, 240.0))
frame: FrameResult = tracker.push("0.jpg", timestamp=0.1)
ids: np.ndarray = frame.track_ids
""",
    """
for found in matcher.match_set(["a.jpg", "b.jpg"]).pairs:
    print(found)
""",
    """
aligned: Alignment = matcher.align("a.jpg", "b.jpg", model="affine")
print(aligned.found)
""",
    """
instances: Detections = matcher.find("logo.png", "photo.jpg", max_instances=3)
print(len(instances))
""",
    """
run: Collection = Collection.open("run", preset="nearest", workers=0)
run.add_images("photos")
run.add_pairs(sequential=3)
run.run()
run.export("colmap", "model.db")
""",
    """
with Map.open("model") as place:
    pose: Pose = place.localize("photo.jpg")
    right: bool = pose.ok
""",
    """
try:
    image: Image = matcher.read_image("a.jpg", resize=800)
except ImageError as error:
    print(error)
""",
]
NAMES = (
    "Alignment, Camera, Collection, Detections, Features, FrameResult, Image, ImageError, Map, Matches, "
    "Pipeline, Pose, Result, Tracker, TwoViewGeometry"
)
HEAD = f"from pathlib import Path\nimport numpy as np\nimport matcher\nfrom matcher import {NAMES}\n"
WRONG = [
    "matcher.lode('nearest')",
    "matcher.load('nearest', max_keypoint=512)",
    "matcher.load('nearest', max_keypoints='many')",
    "matcher.load().match('a.jpg', 'b.jpg').point0",
    "matcher.Camera(1.0, 1.0, 1.0, 1.0).to_K()",
    "matcher.load(geometry='affine')",
    "matcher.load().match('a.jpg')",
]


def complaints(tmp_path: Path, programs: dict[str, str]) -> list[str]:
    for name, program in programs.items():
        (tmp_path / name).write_text(HEAD + program)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", *programs]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    return [line for line in run.stdout.splitlines() if line.startswith(tuple(programs)) and "error:" in line]


def test_the_stub_has_exactly_the_public_names():
    named = re.findall(r"import (\w+) as \1", (ROOT / "__init__.pyi").read_text())
    assert sorted([*named, "__version__"]) == sorted(matcher.__all__)
    assert (ROOT / "py.typed").is_file()


@pytest.mark.slow  # mypy reads the whole package, half a minute
def test_ordinary_programs_are_typed_and_mistakes_are_seen(tmp_path):
    pytest.importorskip("mypy")
    right = {f"program{i}.py": program for i, program in enumerate(PROGRAMS)}
    seen = complaints(tmp_path, right | {"wrong.py": "\n".join(WRONG)})
    first = HEAD.count("\n") + 1
    wanted = [f"wrong.py:{line}" for line in range(first, first + len(WRONG))]
    assert [complaint.rsplit(": error", 1)[0] for complaint in seen] == wanted, seen
