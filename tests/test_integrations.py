"""The files of docs/integrations, against the packages they are for where installed; users' type checkers."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import matcher

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "docs" / "integrations"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tensors() -> list[torch.Tensor]:
    """Two neighbouring views, (3, H, W) in [0, 1]."""
    files = (ROOT / "assets" / "walk" / name for name in ("04.jpg", "05.jpg"))
    return [torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255 for file in files]


def test_torch_hub_loads_both_entries(tensors, shipped_weights):
    for entry in ("matcher", "learned"):
        pipe = torch.hub.load(str(ROOT), entry, source="local", max_keypoints=128)
        assert len(pipe.extract(tensors[0])) == 128


def test_the_module_for_kornia_has_loftrs_dictionary(tensors, shipped_weights):
    loaded = load("kornia_module", PLACE / "kornia_module.py")
    module = loaded.LearnedMatcher("nearest-learned", max_keypoints=256)
    found = module({"image0": torch.stack(tensors), "image1": torch.stack(tensors[::-1])})
    count = len(found["confidence"])
    assert found["keypoints0"].shape == found["keypoints1"].shape == (count, 2)
    assert found["batch_indexes"].bincount().tolist() == pytest.approx([count / 2] * 2, rel=0.3)
    single = module({"image0": tensors[0][None], "image1": tensors[1][None]})
    torch.testing.assert_close(single["keypoints0"], found["keypoints0"][found["batch_indexes"] == 0])


def test_keypoint_matching_has_transformers_dictionary(shipped_weights):
    function = load("keypoint_matching", PLACE / "keypoint_matching.py").keypoint_matching
    files = [ROOT / "assets" / "walk" / name for name in ("04.jpg", "05.jpg")]
    (found,) = function([files], "nearest-learned", max_keypoints=256)
    assert list(found) == ["keypoints0", "keypoints1", "matching_scores"]
    assert found["keypoints0"].shape == (len(found["matching_scores"]), 2)
    assert len(found["matching_scores"]) > 50


def test_colmap_maps_what_was_matched(tmp_path, shipped_weights):
    pytest.importorskip("pycolmap")
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in (2, 4, 6, 8):
        name = f"{number:02d}.jpg"
        (photos / name).symlink_to(ROOT / "assets" / "walk" / name)
    reconstruct = load("colmap_steps", PLACE / "colmap.py").reconstruct
    models = reconstruct(photos, tmp_path, preset="nearest-learned", max_keypoints=512, workers=0)
    assert models[0].num_reg_images() == 4


def test_vismatch_takes_the_seven_values(tensors, shipped_weights):
    pytest.importorskip("vismatch")
    wrapper = load("vismatch_matcher", PLACE / "vismatch_matcher.py").MatcherVision
    found = wrapper(preset="nearest-learned", max_num_keypoints=512)(*tensors)
    assert found["num_inliers"] > 30
    assert len(found["matched_kpts0"]) == len(found["matched_confidences"])
    assert len(found["all_kpts0"]) == len(found["all_desc0"]) == 512


def test_hloc_extracts_and_matches(tmp_path, monkeypatch, shipped_weights):
    """By hloc's own programs, in whose packages the two files are put under the name that they tell."""
    pytest.importorskip("hloc")
    h5py = pytest.importorskip("h5py")
    from hloc import extract_features, match_features

    for kind, file in (("extractors", "extractor.py"), ("matchers", "matcher.py")):
        module = load(f"hloc.{kind}.matcher_vision", PLACE / "hloc" / file)
        for thing in vars(module).values():
            if isinstance(thing, type) and thing.__module__ == module.__name__:
                monkeypatch.setattr(sys.modules[f"hloc.{kind}"], "matcher_vision", module, raising=False)
    walk, names = ROOT / "assets" / "walk", ["04.jpg", "05.jpg"]
    sizes = {"grayscale": True, "resize_max": 1024, "resize_force": False, "interpolation": "cv2_area"}
    model = {"name": "matcher_vision", "max_keypoints": 512}
    conf = {"output": "features", "model": model, "preprocessing": sizes}
    features = extract_features.main(conf, walk, tmp_path, image_list=names, as_half=False)
    (tmp_path / "pairs.txt").write_text("04.jpg 05.jpg\n")
    conf = {"output": "matches", "model": {"name": "matcher_vision"}}
    matches = match_features.main(conf, tmp_path / "pairs.txt", features, matches=tmp_path / "matches.h5")
    with h5py.File(matches) as file:
        found = file["04.jpg"]["05.jpg"]["matches0"][:]
    assert len(found) == 512 and (found >= 0).sum() > 100
    direct = matcher.load("hybrid-learned", max_keypoints=512)
    pair = [direct.extract(walk / name) for name in names]
    assert (found >= 0).sum() == pytest.approx(len(direct.match_features(*pair)), rel=0.2)


# --- What users' own type checkers see: the public names with their types, and misspelt ones as errors.


PROGRAM = """
pipe: Pipeline = matcher.load("nearest", max_keypoints=512)
result: Result = pipe.match("a.jpg", Path("b.jpg"))
points: np.ndarray = result.points0
geometry: TwoViewGeometry = result.geometry
inliers: int = int(geometry.inliers.sum())
pipe = matcher.load()
features: Features = pipe.extract("a.jpg")
several: list[Matches] = pipe.match_features_batch([(features, features)])
again: Matches = pipe.match_features(features, features)
camera: Camera = Camera(700.0, 700.0, 320.0, 240.0, size=(640, 480))
result = matcher.load(geometry="essential").match(np.zeros((48, 64)), "b.jpg", camera0=camera)
probability: float = result.verdict.probability if result.verdict else 0.0
tracker: Tracker = Tracker(camera=camera.K)
frame: FrameResult = tracker.push("0.jpg", timestamp=0.1)
ids: np.ndarray = frame.track_ids
for found in matcher.match_set(["a.jpg", "b.jpg"]).pairs:
    print(found)
aligned: Alignment = matcher.align("a.jpg", "b.jpg", model="affine")
print(aligned.found)
instances: Detections = matcher.find("logo.png", "photo.jpg", max_instances=3)
print(len(instances))
run: Collection = Collection.open("run", preset="nearest", camera=(700.0, 700.0, 320.0, 240.0), workers=0)
run.add_images("photos")
run.add_pairs(sequential=3)
run.run()
run.export("colmap", "model.db")
with Map.open("model") as place:
    pose: Pose = place.localize("photo.jpg")
    right: bool = pose.ok
try:
    image: Image = matcher.read_image("a.jpg", resize=800)
except ImageError as error:
    print(error)
"""
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


def test_the_stub_has_exactly_the_public_names():
    named = re.findall(r"import (\w+) as \1", Path(matcher.__file__).with_name("__init__.pyi").read_text())
    assert sorted([*named, "__version__"]) == sorted(matcher.__all__)
    assert Path(matcher.__file__).with_name("py.typed").is_file()


@pytest.mark.slow  # mypy reads the whole package, half a minute
def test_ordinary_programs_are_typed_and_mistakes_are_seen(tmp_path):
    pytest.importorskip("mypy")
    programs = {"right.py": HEAD + PROGRAM, "wrong.py": HEAD + "\n".join(WRONG)}
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", *programs]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    seen = [line for line in run.stdout.splitlines() if line.startswith(tuple(programs)) and "error:" in line]
    first = HEAD.count("\n") + 1
    wanted = [f"wrong.py:{line}" for line in range(first, first + len(WRONG))]
    assert [complaint.rsplit(": error", 1)[0] for complaint in seen] == wanted, seen
