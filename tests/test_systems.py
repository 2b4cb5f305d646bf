"""Every system as a user has it: front end and network from files, images in, matches out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from random_front_end import FRONT_ENDS, random_parameters, texture

import matcher
from matcher.config import EstimationConfig, ExtractorConfig, NearestConfig
from matcher.extract.front_end import resolve
from matcher.match.nearest import NearestMatcher
from matcher.match.network import MatchingNetwork
from matcher.pipeline import Pipeline
from matcher.presets import PRESETS
from matcher.torch_engine import build_extractor
from matcher.verify.estimation import RobustEstimator
from matcher.weights.files import save_front_end, save_model

LEARNED = [name for name in PRESETS if name.startswith(("superglue-", "lightglue-")) and "dedode" not in name]


def front_end_file(kind: str, folder: Path, variant: str | None = None) -> Path | None:
    """A front end's random parameters as a converted file; SIFT has none."""
    if kind == "sift":
        return None
    front_end, path = FRONT_ENDS[kind], folder / f"{kind}.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = front_end.build(resolve(ExtractorConfig(kind=kind, variant=variant), front_end.published))
    random_parameters(network)
    save_front_end(network, kind, path)
    return path


def network_file(preset: str, folder: Path) -> Path:
    """An untrained network of the preset, two layers deep, which matches like nearest neighbours."""
    config, path = PRESETS[preset].matcher, folder / f"{preset}.safetensors"
    shallow = replace(config, context=replace(config.context, depth=2))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_model(MatchingNetwork(shallow), path, dtype=torch.float32)
    return path


@pytest.fixture
def pictures(rng) -> tuple[np.ndarray, np.ndarray]:
    """Two cuts of one texture, 16 pixels apart."""
    whole = texture(rng, 208, 160, sigma=1.5)
    return np.ascontiguousarray(whole[:, :192]), np.ascontiguousarray(whole[:, 16:])


@pytest.mark.parametrize("preset", LEARNED)
def test_a_preset_builds_and_runs(preset, tmp_path, pictures):
    kind = PRESETS[preset].extractor.kind
    options = {"weights": network_file(preset, tmp_path), "frontend_weights": front_end_file(kind, tmp_path)}
    pipeline = matcher.load(
        preset, **options, device="cpu", precision="float32", max_keypoints=150, match_threshold=0.0
    )
    assert pipeline.layers == 2
    result = pipeline.match(*pictures)
    assert result.features0.kind == result.features1.kind == kind
    assert len(result.features0.keypoints) > 20
    assert len(result.matches) > 8
    assert np.isfinite(result.scores).all()
    assert result.geometry.status in ("ok", "low_inliers", "degenerate", "no_model", "too_few")
    again = pipeline.match_features(result.features0, result.features1)
    assert np.array_equal(again.indices, result.matches.indices)


@pytest.mark.parametrize("kind", ["disk", "superpoint-open", "keynet"])
def test_any_front_end_goes_with_nearest(kind, tmp_path, pictures):
    """By an option of the preset, and put together in Python."""
    path = front_end_file(kind, tmp_path)
    pipeline = matcher.load("nearest", frontend=kind, frontend_weights=path, max_keypoints=150, device="cpu")
    result = pipeline.match(*pictures)
    assert result.features0.kind == kind
    assert len(result.matches) > 8
    extractor = build_extractor(ExtractorConfig(kind=kind, max_keypoints=150), path)
    own = Pipeline(extractor, NearestMatcher(NearestConfig()), RobustEstimator(EstimationConfig()))
    assert np.array_equal(own.match(*pictures).matches.indices, result.matches.indices)
