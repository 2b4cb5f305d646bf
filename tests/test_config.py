"""Configurations survive dictionaries, JSON and TOML, and refuse what they do not know."""

import json
import tomllib

import pytest

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
    to_dict,
)

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


@pytest.mark.parametrize("config", [PipelineConfig(), CHANGED, PipelineConfig(matcher=NearestConfig(0.7))])
def test_round_trip(config: PipelineConfig) -> None:
    assert from_dict(PipelineConfig, to_dict(config)) == config
    assert from_dict(PipelineConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_tables_of_toml() -> None:
    assert from_dict(PipelineConfig, {}) == PipelineConfig()
    assert from_dict(ContextConfig, tomllib.loads("depth = 4\nheads = 2\n")) == ContextConfig(
        heads=2, depth=4
    )
    assert from_dict(PipelineConfig, tomllib.loads("[matcher]\nratio = 0.9")).matcher == NearestConfig(0.9)
    whole = from_dict(EstimationConfig, {"max_epipolar_error": 2}).max_epipolar_error
    assert whole == 2.0 and isinstance(whole, float)


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (
            ContextConfig,
            {"dim": 64, "colour": 1, "age": 2},
            "unknown key age, colour; known keys: dim, heads",
        ),
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
