from dataclasses import replace

import numpy as np
import pytest

from matcher import cli
from matcher.config import (
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    architecture,
    depth,
    from_dict,
    to_dict,
)
from matcher.errors import UsageError
from matcher.loading import load
from matcher.presets import DEFAULT_PRESET, PRESETS, LoadOptions, configure, find_preset, given_options
from matcher.weights.files import load_model, read_manifest


def test_names_and_default():
    assert {"hybrid", "nearest", "superglue-indoor", "lightglue-superpoint"} <= set(PRESETS)
    assert find_preset(DEFAULT_PRESET).weights == DEFAULT_PRESET == cli.options.DEFAULT_PRESET
    with pytest.raises(UsageError, match="did you mean 'hybrid'"):
        find_preset("hybird")


def test_options_land_in_their_places():
    options = {
        "max_keypoints": 512,
        "resize": 640,
        "geometry": "homography",
        "match_threshold": 0.3,
        "early_exit": False,
        "pruning": False,
        "device": "cpu",
    }
    config = configure(PRESETS["hybrid"], options)
    assert (config.extractor.max_keypoints, config.extractor.resize) == (512, 640)
    assert config.estimation.kind == "homography"
    assert isinstance(config.matcher, NetworkConfig)
    policy = config.matcher.policy
    assert (policy.match_threshold, policy.early_exit, policy.pruning) == (0.3, False, False)
    assert config.matcher.context == PRESETS["hybrid"].matcher.context


def test_numbers_and_names_in_the_forms_that_people_hold():
    given = {"max_keypoints": np.int64(512), "match_threshold": np.float32(0.25), "device": "CPU"}
    config = configure(PRESETS["hybrid"], given)
    assert config.extractor.max_keypoints == 512 and type(config.extractor.max_keypoints) is int
    assert config.matcher.policy.match_threshold == 0.25
    assert given_options({"precision": "bf16", "device": "CUDA:0", "upright": np.bool_(True)}) == {
        "precision": "bfloat16",
        "device": "cuda:0",
        "upright": True,
    }


def test_none_means_the_presets_own_value():
    nothing = dict.fromkeys(LoadOptions.__annotations__)
    for config in PRESETS.values():
        assert configure(config, nothing) == config == from_dict(PipelineConfig, to_dict(config))


def test_nearest_has_a_ratio_and_a_threshold_of_its_score():
    config = configure(PRESETS["nearest"], {"ratio": 0.75, "match_threshold": 0.3})
    assert config.matcher == NearestConfig(ratio=0.75, match_threshold=0.3) and depth(config) == 0
    with pytest.raises(UsageError, match="ratio is for the presets without a network"):
        configure(PRESETS["hybrid"], {"ratio": 0.8})
    for ratio in (0.0, 1.1, "0.8"):
        with pytest.raises(UsageError, match="ratio must be"):
            configure(PRESETS["nearest"], {"ratio": ratio})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_keypoint": 5}, r"did you mean 'max_keypoints'\? Known: weights, .*max_pixels"),
        ({"max_keypoints": 0}, "at least 1"),
        ({"match_threshold": 1.5}, "from 0 to 1"),
        ({"geometry": "homograpy"}, "^geometry: .*did you mean 'homography'"),
        ({"keep": "larges"}, "^keep: "),
        ({"bgr": "yes"}, "True or False"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        configure(PRESETS["hybrid"], options)


@pytest.mark.parametrize("options", [{"weights": "hybrid"}, {"pruning": True}, {"precision": "bfloat16"}])
def test_options_without_use_are_refused(options):
    with pytest.raises(UsageError, match="no network"):
        configure(PRESETS["nearest"], options)
    options = {"precision": "bfloat16"}  # of the front end
    assert configure(PRESETS["nearest-learned"], options) == PRESETS["nearest-learned"]
    assert configure(PRESETS["nearest"], options | {"frontend": "learned"}).extractor.kind == "learned"


def test_presets_agree_with_the_shipped_weights(shipped_weights):
    for row in read_manifest().values():
        preset = PRESETS[row.preset]
        if row.name == preset.extractor.kind:
            continue  # a front end's
        assert preset.weights == row.name
        assert architecture(load_model(row.name)[0].config) == architecture(preset.matcher)


def test_the_policy_is_the_presets_whatever_the_file_was_trained_with(shipped_weights, monkeypatch):
    matcher = PRESETS["hybrid"].matcher
    policy = replace(matcher.policy, match_threshold=0.42, exit_share=0.5, prune_matchability=0.3)
    changed = replace(PRESETS["hybrid"], matcher=replace(matcher, policy=policy))
    monkeypatch.setitem(PRESETS, "hybrid", changed)
    pipeline = load("hybrid", device="cpu")
    assert pipeline.config.matcher.policy == pipeline.matcher.model.config.policy == policy
    other = load("hybrid", device="cpu", match_threshold=0.9, early_exit=False).config.matcher.policy
    assert other == replace(policy, match_threshold=0.9, early_exit=False)
