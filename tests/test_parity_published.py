"""Our networks against the published code itself, where the reader of these tests has it.

LightGlue (github.com/cvg/LightGlue, Apache-2.0): the installed package `lightglue`, or the path of its
`lightglue.py` in MATCHER_LIGHTGLUE_CODE. SuperGlue (github.com/magicleap/SuperGluePretrainedNetwork, not for
commercial use): the path of its `superglue.py` in MATCHER_SUPERGLUE_CODE. Neither is shipped, and no trained
weights are needed: parameters are drawn here.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType

import peers
import pytest
import torch
from parity import (
    SIZE,
    Pair,
    as_lightglue,
    as_table,
    assert_same,
    assert_telling,
    imported,
    lightglue_matches,
    partners,
    random_pairs,
    run,
)
from test_parity import ADAPTIVE, NEVER, OFF, WIDTHS, make_adaptive

LIGHTGLUE, SUPERGLUE = "MATCHER_LIGHTGLUE_CODE", "MATCHER_SUPERGLUE_CODE"
PUBLISHED = ["lightglue-superpoint", "lightglue-disk", "lightglue-sift", "lightglue-doghardnet"]


def load_file(path: str | Path) -> ModuleType:
    """A module from one file of somebody's."""
    spec = importlib.util.spec_from_file_location(f"published_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def lightglue() -> ModuleType:
    if path := os.environ.get(LIGHTGLUE):
        return load_file(path)
    return pytest.importorskip("lightglue.lightglue", reason=f"no package lightglue, no {LIGHTGLUE}")


def published_lightglue(lightglue: ModuleType, preset: str, **settings) -> torch.nn.Module:
    settings |= {"input_dim": WIDTHS[preset], "flash": False}
    settings["add_scale_ori"] = preset in ("lightglue-sift", "lightglue-doghardnet")
    return peers.decisive_lightglue(peers.seeded(lambda: lightglue.LightGlue(features=None, **settings), 0))


@pytest.mark.parametrize("preset", PUBLISHED)
def test_lightglue_is_the_published(lightglue, preset, tmp_path):
    peer = published_lightglue(lightglue, preset, filter_threshold=0.0, **OFF)
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 0.0, **NEVER)
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset])
    expected = [lightglue_matches(peer, pair) for pair in pairs]
    for batch in (1, 4):
        found = run(ours, pairs, batch)
        for matches, theirs in zip(found, expected, strict=True):
            assert_same(matches, theirs)
        assert_telling(found)


@pytest.mark.parametrize(("preset", "seed", "stop", "share"), ADAPTIVE)
def test_lightglue_with_exit_and_pruning_is_the_published(lightglue, preset, seed, stop, share, tmp_path):
    on = {"depth_confidence": 0.95, "width_confidence": 0.99}
    peer = published_lightglue(lightglue, preset, filter_threshold=1e-3, **on)
    make_adaptive(peer, seed)
    ours = imported(peers.old_lightglue_names(peer), preset, tmp_path, 1e-3)
    pairs = random_pairs(preset.split("-")[1], WIDTHS[preset], [(120, 120), (90, 140), (61, 40)])
    for pair, matches in zip(pairs, run(ours, pairs, 3), strict=True):
        with torch.no_grad():
            theirs = peer({f"image{i}": as_lightglue(pair[i]) for i in (0, 1)})
        assert matches.layers_run == int(theirs["stop"]) == stop
        assert_same(matches, as_table(theirs["matches"][0], theirs["scores"][0]))
        for side, count in enumerate((matches.kept0, matches.kept1)):
            assert count == int((theirs[f"prune{side}"] == stop).sum())


def published_superglue(code: str | Path, tensors: peers.Tensors) -> torch.nn.Module:
    """Its class reads its weights from beside its file when it is built; it is handed these instead."""
    with pytest.MonkeyPatch.context() as patch:
        module = load_file(code)
        patch.setattr(torch, "load", lambda *_, **__: tensors)
        return module.SuperGlue({"weights": "outdoor", "match_threshold": 0.0}).eval()


def superglue_matches(peer: torch.nn.Module, pair: Pair) -> dict[tuple[int, int], float]:
    """One pair in the published calling convention: descriptors (1, D, N), images for their size."""
    data = {}
    for i, features in enumerate(pair):
        data |= {
            f"keypoints{i}": features.keypoints[None],
            f"descriptors{i}": features.descriptors.t()[None].contiguous(),
            f"scores{i}": features.scores[None],
            f"image{i}": torch.empty(1, 1, int(SIZE[1]), int(SIZE[0])),
        }
    with torch.no_grad():
        found = peer(data)
    return partners(found["matches0"][0], found["matching_scores0"][0])


def check_superglue(code: str | Path, folder: Path) -> None:
    network = peers.decisive_superglue(peers.transformers_superglue())
    tensors = peers.official_superglue_names(network)
    peer = published_superglue(code, tensors)
    ours = imported(tensors, "superglue-outdoor", folder, 0.0)
    pairs = random_pairs("superpoint", 256)
    expected = [superglue_matches(peer, pair) for pair in pairs]
    for batch in (1, 4):
        found = run(ours, pairs, batch)
        for matches, theirs in zip(found, expected, strict=True):
            assert_same(matches, theirs)
        assert_telling(found)


def test_superglue_is_the_published(tmp_path):
    if not os.environ.get(SUPERGLUE):
        pytest.skip(f"no {SUPERGLUE}")
    check_superglue(os.environ[SUPERGLUE], tmp_path)


STAND_IN = """
from pathlib import Path
import peers, torch

class SuperGlue(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.threshold = config["match_threshold"]
        self.network = peers.decisive_superglue(peers.transformers_superglue())
        tensors = torch.load(str(Path(__file__).parent / "weights" / "superglue_outdoor.pth"))
        own = peers.official_superglue_names(self.network)
        assert own.keys() == tensors.keys()
        assert all(torch.equal(own[name], tensors[name]) for name in own)

    def forward(self, data):
        sides = []
        for i in "01":
            height, width = data["image" + i].shape[-2:]
            sides.append(peers.Features(
                keypoints=data["keypoints" + i][0], descriptors=data["descriptors" + i][0].t(),
                scores=data["scores" + i][0], size=(width, height)))
        scores = peers.superglue_plan(self.network, *sides)[None].exp()
        best0, best1 = scores.max(2), scores.max(1)
        rows = torch.arange(scores.shape[1])[None]
        mutual = rows == best1.indices.gather(1, best0.indices)
        valid = mutual & (best0.values > self.threshold)
        return {
            "matches0": torch.where(valid, best0.indices, -1),
            "matching_scores0": torch.where(mutual, best0.values, 0.0),
        }
"""


def test_the_comparison_with_superglue_itself(tmp_path):
    """A stand-in of the same calling convention passes; one whose scores are off does not."""
    code = tmp_path / "superglue.py"
    code.write_text(STAND_IN, encoding="utf-8")
    check_superglue(code, tmp_path)
    code.write_text(STAND_IN.replace(".exp()", ".exp() + 2e-4"), encoding="utf-8")
    with pytest.raises(AssertionError):
        check_superglue(code, tmp_path)
