"""The trial of verdicts: which pairs it draws, that kept features change nothing, and how it counts."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest

import matcher
from matcher.errors import UsageError
from matcher.evaluate.calibration import (
    LOOKALIKES,
    SCENES,
    UNRELATED,
    Findings,
    KeptFeatures,
    KindResult,
    TrialPair,
    TrialSize,
    as_markdown_verdict_trial,
    trial_pairs,
    try_verdicts,
    upper_bound,
    with_kept_features,
)
from matcher.evaluate.folders import distant_frames
from matcher.evaluate.protocols import PairImage, UnrelatedPair
from matcher.images import read_image


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A source of 20 photos, one of 3, and two scenes."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    folders = {"photos/val/many": 20, "photos/val/few": 3, "multiview/train/a": 2, "multiview/val/b": 2}
    for folder, count in folders.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)
            cv2.imwrite(str(root / folder / f"{number}.png"), pixels)
    return root


def test_pairs_of_different_sources_lookalikes_and_scenes(data):
    kinds: dict[str, list[TrialPair]] = {}
    for each in islice(trial_pairs(data, TrialSize(unrelated=30, lookalikes=8, related=2)), 46):
        kinds.setdefault(each.kind, []).append(each)
    assert {kind: len(pairs) for kind, pairs in kinds.items()} == {UNRELATED: 30, LOOKALIKES: 8, SCENES: 8}
    folders = {
        kind: {(p.pair.image0.path.parent.name, p.pair.image1.path.parent.name) for p in pairs}
        for kind, pairs in kinds.items()
    }
    assert folders[UNRELATED] <= {("many", "few"), ("few", "many")}
    assert folders[LOOKALIKES] == {("many", "many")} and folders[SCENES] <= {("a", "b"), ("b", "a")}
    assert len({pair.pair.name for pair in kinds[UNRELATED]}) == 30
    assert not any(pair.same for pairs in kinds.values() for pair in pairs)


def test_depth_maps_are_no_views_of_a_scene(tmp_path, data):
    (tmp_path / "photos").symlink_to(data / "photos")
    pixels = np.zeros((40, 48), np.uint8)
    for name in ("a/0.png", "a/0_depth.png", "b/images/0.png", "b/depth/0.png"):
        path = tmp_path / "multiview" / "val" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), pixels)
    drawn = islice(trial_pairs(tmp_path, TrialSize(unrelated=0, lookalikes=40, related=0)), 80)
    scenes = [each.pair for each in drawn if each.kind == SCENES]
    paths = {side.path for pair in scenes for side in (pair.image0, pair.image1)}
    root = tmp_path / "multiview" / "val"
    assert len(scenes) == 40 and paths == {root / "a" / "0.png", root / "b" / "images" / "0.png"}


def test_distant_frames_are_so_many_metres_apart(tmp_path):
    (tmp_path / "image_l").mkdir()
    for number in range(4):
        (tmp_path / "image_l" / f"{number}.png").touch()
    rows = [[1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 20 * number] for number in range(4)]
    np.savetxt(tmp_path / "poses.txt", rows)
    found = distant_frames(tmp_path, 40.0)
    assert [(a.stem, b.stem) for a, b in found] == [("0", "2"), ("0", "3"), ("1", "3")]


def test_without_scenes_there_is_no_trial(tmp_path, data):
    (tmp_path / "photos").symlink_to(data / "photos")
    with pytest.raises(UsageError, match="at least two scenes"):
        list(trial_pairs(tmp_path, TrialSize(1, 1, 1)))


def test_kinds_can_be_left_out(data):
    drawn = trial_pairs(data, TrialSize(unrelated=3, lookalikes=0, related=0))
    assert [each.kind for each in islice(drawn, 3)] == [UNRELATED] * 3


def test_kept_features_give_the_same_verdicts(views):
    pipeline = matcher.load(max_keypoints=200, resize=320, device="cpu")
    pictures = [read_image(view, resize=320).pixels for view in views]
    pictures.append(np.random.default_rng(0).integers(0, 255, (200, 320), dtype=np.uint8))
    sides = [PairImage(Path(f"{i}.png"), pixels) for i, pixels in enumerate(pictures)]
    pairs = [TrialPair(UNRELATED, UnrelatedPair(f"{i}", "", sides[0], sides[i])) for i in (1, 2, 1)]
    found = try_verdicts(pipeline, iter(pairs))[0]
    expected = [pipeline.match(pictures[0], pictures[i]).verdict.probability for i in (1, 2, 1)]
    assert found.probabilities == pytest.approx(expected, abs=1e-6)
    assert found.wrong == ["1", "1"]


def test_a_trial_is_continued(views, tmp_path):
    pipeline = matcher.load("nearest", max_keypoints=200, resize=320)
    sides = [PairImage(view) for view in views]
    pairs = [TrialPair(UNRELATED, UnrelatedPair(f"{i}", "", sides[0], sides[i % 2])) for i in range(3)]
    path = tmp_path / "trial.jsonl"
    first = try_verdicts(pipeline, pairs[:2], known=Findings(path))[0]
    assert len(path.read_text().splitlines()) == 2
    path.write_text(path.read_text() + '{"kind": "photos of')  # stopped while it wrote

    class Asked:
        def __call__(self, images):
            asked.extend(images)
            return pipeline.extractor(images)

    asked: list = []
    again = try_verdicts(replace(pipeline, extractor=Asked()), pairs, known=Findings(path))[0]
    assert len(asked) == 1 and again.probabilities[:2] == pytest.approx(first.probabilities)
    assert len(path.read_text().splitlines()) == 3 and Findings(path).get(pairs[2]) is not None
    path.write_text('{"kind": 1}\n')
    with pytest.raises(UsageError, match="line 1 holds no evidence"):
        Findings(path)


def test_features_are_computed_once_and_forgotten_in_turn(views):
    calls = []

    class Counting:
        def __call__(self, images):
            calls.extend(images)
            return matcher.load("nearest", max_keypoints=20).extractor(images)

    kept = KeptFeatures(Counting())
    image = read_image(views[0], resize=200)
    first, second = kept([image]), kept([image, image])
    assert len(calls) == 1 and second[1] is first[0]
    assert with_kept_features(matcher.load("nearest")).passes is None


def test_the_bound_on_the_share_of_errors():
    assert upper_bound(0, 3000) < 0.001 < upper_bound(0, 2000)
    assert upper_bound(30, 100) == pytest.approx(0.38, abs=0.01) and upper_bound(0, 0) == 1


def test_the_table_names_wrong_pairs():
    table = as_markdown_verdict_trial([KindResult(UNRELATED, [0.01, 0.95, 0.5], ["a", "b", "c"])])
    assert "| photos of different sources | 3 | 1 | 1 | 1 |" in table
    assert table.endswith("wrong, photos of different sources: b\n")
