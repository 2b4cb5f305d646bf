"""The projection of descriptors is fitted to another front end before training goes on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_data import TINY, write_photos

from matcher.config import ExtractorConfig
from matcher.errors import IntegrityError, UsageError
from matcher.extract.learned import DESCRIPTOR_DIM
from matcher.images import find_images
from matcher.match.network import MatchingNetwork
from matcher.match.steering import TURNS
from matcher.torch_engine import build_extractor
from matcher.train.cached_pairs import check_recipe
from matcher.train.losses import fit_projection
from matcher.train.matcher_training import RunOptions, train
from matcher.weights.files import save_front_end, save_model

LEARNED = replace(
    TINY,
    network=replace(TINY.network, kind="learned", descriptor_dim=DESCRIPTOR_DIM),
    optimiser=replace(TINY.optimiser, steps=2, confidence_steps=0),
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"), 6)


@pytest.fixture(scope="module")
def mixed_up(tmp_path_factory) -> str:
    """The shipped front end with descriptors whose numbers are mixed, alike in each quarter turn's group."""
    network = build_extractor(ExtractorConfig(kind="learned"), precision="float32").network
    side = DESCRIPTOR_DIM // TURNS
    rotation = torch.linalg.qr(torch.randn(side, side, generator=torch.Generator().manual_seed(0))).Q
    whole = torch.block_diag(*[rotation] * TURNS)
    last = network.descriptor[-1]
    last.weight.data, last.bias.data = whole @ last.weight.data, whole @ last.bias.data
    path = tmp_path_factory.mktemp("weights") / "mixed.safetensors"
    save_front_end(network, "learned", path)
    return str(path)


def test_tokens_stay_what_they_were(photos, mixed_up):
    torch.manual_seed(0)
    model = MatchingNetwork(LEARNED.network)
    before = model.project.weight.detach().clone()
    assert fit_projection(model, "", mixed_up, find_images(photos)) > 0.999
    assert not torch.allclose(model.project.weight, before, atol=1e-2)
    # Back again, so that both descriptors give the same tokens.
    assert fit_projection(model, mixed_up, "", find_images(photos)) > 0.999
    torch.testing.assert_close(model.project.weight, before, atol=2e-3, rtol=0)


def test_a_run_fits_the_projection_and_goes_on(photos, mixed_up, tmp_path):
    torch.manual_seed(0)
    save_model(MatchingNetwork(LEARNED.network), tmp_path / "start.safetensors")
    recipe = replace(
        LEARNED, start=str(tmp_path / "start.safetensors"), front_end=mixed_up, start_front_end="shipped"
    )
    lines: list[str] = []
    options = RunOptions(photos, None, tmp_path / "run", views=tmp_path / "views")
    assert train(recipe, options, lines.append).exists()
    assert any("fitted the projection" in line and "100.0%" in line for line in lines)


def test_what_cannot_be_fitted_is_said(photos, tmp_path):
    model = MatchingNetwork(replace(LEARNED.network, project=False, descriptor_dim=32))
    with pytest.raises(UsageError, match="does not project"):
        fit_projection(model, "", "", find_images(photos))
    with pytest.raises(IntegrityError, match="absent"):
        fit_projection(MatchingNetwork(LEARNED.network), "", "absent.safetensors", find_images(photos))
    for wrong, complaint in [
        (replace(LEARNED, start_front_end="shipped"), "only with start"),
        (replace(TINY, front_end="file.safetensors"), "network.kind is learned"),
    ]:
        with pytest.raises(UsageError, match=complaint):
            check_recipe(wrong)
    with pytest.raises(UsageError, match=r"front_end: cannot read absent\.safetensors"):
        train(
            replace(LEARNED, front_end="absent.safetensors"),
            RunOptions(photos, None, tmp_path / "run", views=tmp_path / "views"),
            lambda line: None,
        )
