"""The files of docs/integrations, against the packages they are for where these are installed."""

import importlib.util
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
    module = load("kornia_module", PLACE / "kornia_module.py").LearnedMatcher(
        "nearest-learned", max_keypoints=256
    )
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
    features = extract_features.main(
        {
            "output": "features",
            "model": {"name": "matcher_vision", "max_keypoints": 512},
            "preprocessing": {
                "grayscale": True,
                "resize_max": 1024,
                "resize_force": False,
                "interpolation": "cv2_area",
            },
        },
        ROOT / "assets" / "walk",
        tmp_path,
        image_list=["04.jpg", "05.jpg"],
        as_half=False,
    )
    (tmp_path / "pairs.txt").write_text("04.jpg 05.jpg\n")
    conf = {"output": "matches", "model": {"name": "matcher_vision"}}
    matches = match_features.main(conf, tmp_path / "pairs.txt", features, matches=tmp_path / "matches.h5")
    with h5py.File(matches) as file:
        found = file["04.jpg"]["05.jpg"]["matches0"][:]
    assert len(found) == 512 and (found >= 0).sum() > 100
    direct = matcher.load("hybrid-learned", max_keypoints=512)
    pair = [direct.extract(ROOT / "assets" / "walk" / name) for name in ("04.jpg", "05.jpg")]
    assert (found >= 0).sum() == pytest.approx(len(direct.match_features(*pair)), rel=0.2)
