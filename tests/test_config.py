"""Configurations as dictionaries, JSON and TOML, what they refuse; presets and their options."""

import json
import tomllib
from dataclasses import asdict, replace

import pytest

from matcher import Collection, Tracker
from matcher.config import (
    CalibrationConfig,
    ContextConfig,
    EstimationConfig,
    ExtractorConfig,
    MatchingPolicy,
    NearestConfig,
    NetworkConfig,
    PipelineConfig,
    PositionConfig,
    from_dict,
)
from matcher.errors import UsageError
from matcher.loading import load
from matcher.presets import PRESETS, LoadOptions, configure

CHANGED = PipelineConfig(
    matcher=NetworkConfig(
        position=PositionConfig(inputs=("xy",)),
        context=ContextConfig(dim=64, heads=4, depth=2),
        policy=MatchingPolicy(early_exit=False, exit_share=0.5),
    ),
    extractor=ExtractorConfig(max_keypoints=7),
    estimation=EstimationConfig(kind="essential"),
    weights="mine",
)


def test_tables_of_toml() -> None:
    assert from_dict(PipelineConfig, {}) == PipelineConfig()
    small = from_dict(ContextConfig, tomllib.loads("depth = 4\nheads = 2\n"))
    assert small == ContextConfig(heads=2, depth=4)
    assert from_dict(PipelineConfig, tomllib.loads("[matcher]\nratio = 0.9")).matcher == NearestConfig(0.9)
    whole = from_dict(EstimationConfig, {"max_epipolar_error": 2}).max_epipolar_error
    assert whole == 2.0 and isinstance(whole, float)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ContextConfig, {"dim": 64, "colour": 1, "age": 2}, "key age, colour; known keys: dim, heads"),
        (NetworkConfig, {"context": {"dpeth": 3}}, r"NetworkConfig\.context: unknown key dpeth"),
        (ContextConfig, {"dim": "64"}, r"ContextConfig\.dim: expected int, got '64'"),
        (EstimationConfig, {"kind": "affine"}, "unknown value 'affine'. Known: fundamental"),
        (ContextConfig, 5, "expected a table"),
    ],
)
def test_what_does_not_fit_is_refused(cls: type, values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(cls, values)
    with pytest.raises(ValueError, match=r"CalibrationConfig: .*slope"):  # a missing value
        from_dict(CalibrationConfig, {"offset": 3})


# --- Presets.


def test_none_means_the_presets_own_value_and_tables_hold_every_value():
    nothing = dict.fromkeys(LoadOptions.__annotations__)
    for config in (*PRESETS.values(), CHANGED):
        assert configure(config, nothing) == config == from_dict(PipelineConfig, asdict(config))
        assert from_dict(PipelineConfig, json.loads(json.dumps(asdict(config)))) == config


def test_nearest_has_a_ratio_and_a_threshold_of_its_score():
    config = configure(PRESETS["nearest"], {"ratio": 0.75, "match_threshold": 0.3})
    assert config.matcher == NearestConfig(ratio=0.75, match_threshold=0.3)
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
        *(({name: wrong}, f"^{name}") for name in ("weights", "frontend_weights") for wrong in ("", 5)),
        ({"geometry": "homograpy"}, "^geometry: .*did you mean 'homography'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        configure(PRESETS["hybrid"], options)


@pytest.mark.parametrize("options", [{"weights": "hybrid"}, {"pruning": True}, {"precision": "bfloat16"}])
def test_options_without_use_are_refused(options):
    with pytest.raises(UsageError, match=f"takes no {next(iter(options))}"):
        configure(PRESETS["nearest"], options)
    options = {"precision": "bfloat16"}  # of the front end
    assert configure(PRESETS["nearest-learned"], options) == PRESETS["nearest-learned"]
    assert configure(PRESETS["nearest"], options | {"frontend": "learned"}).extractor.kind == "learned"


def test_a_file_names_a_preset_and_its_options(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('\ufeffpreset = "nearest"\nmax_keypoints = 300\nmatch_threshold = 0.1\n')
    config = load(file).config
    with pytest.raises(UsageError, match=r"preset .*None"):
        load(None)
    assert config == configure(PRESETS["nearest"], {"max_keypoints": 300, "match_threshold": 0.1})
    assert load(str(file), max_keypoints=200).config.extractor.max_keypoints == 200
    assert Tracker(preset=str(file)).pipeline.config.matcher == config.matcher
    assert Collection.open(tmp_path / "run", preset=str(file))
    faults = {"ratios = 1": "did you mean 'ratio'", "ratio = 2": "mine.toml: ratio", "preset = 2": "a name"}
    faults |= {'preset = "near"': "mine.toml: unknown preset", 'preset = "a.toml"': "mine.toml: preset must"}
    faults |= {"ratio = ": "not a TOML file"}
    for text, fault in faults.items():
        file.write_text(text)
        with pytest.raises(UsageError, match=fault):
            load(str(file))
    with pytest.raises(UsageError, match=r"absent\.toml: cannot be read"):
        load(str(tmp_path / "absent.toml"))


def test_the_policy_is_the_presets_whatever_the_file_was_trained_with(shipped_weights, monkeypatch):
    matcher = PRESETS["hybrid"].matcher
    policy = replace(matcher.policy, match_threshold=0.42, exit_share=0.5, prune_matchability=0.3)
    changed = replace(PRESETS["hybrid"], matcher=replace(matcher, policy=policy))
    monkeypatch.setitem(PRESETS, "hybrid", changed)
    pipeline = load("hybrid", device="cpu")
    assert pipeline.config.matcher.policy == pipeline.matcher.model.config.policy == policy
    other = load("hybrid", device="cpu", match_threshold=0.9, early_exit=False).config.matcher.policy
    assert other == replace(policy, match_threshold=0.9, early_exit=False)
