"""Fixtures that several test files share."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import matcher
from matcher.config import ContextConfig, ExtractorConfig, NetworkConfig
from matcher.extract.extractor import SiftExtractor
from matcher.images import read_image
from matcher.kernels import loader as library
from matcher.kernels.loader import SWITCH, build
from matcher.match.network import MatchingNetwork
from matcher.weights.files import FOLDERS, save_model

ROOT = Path(__file__).resolve().parent.parent
ROW = """
[[weights]]
name = "small"
file = "small.safetensors"
sha256 = "{digest}"
bytes = {size}
preset = "hybrid"
licence = "Apache-2.0"
source = "this test"
trained_on = "nothing"
metrics = "none"
"""


@pytest.fixture(autouse=True, scope="session")
def _one_core_and_stock_operators() -> Iterator[None]:
    """Stock operators, whatever was compiled on this machine; others ask for `compiled`. One core, as
    `run_tests.py` divides them, so that a command starts one worker where it is not told how many. For the
    session, because fixtures of a module are made before those of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "0")
        patch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
        yield


@pytest.fixture(scope="session")
def kernels_folder(tmp_path_factory) -> Path:
    """A cache folder in which the kernels are built, once for all processes of a run of the tests; only for
    tests of machines that can."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MATCHER_CACHE", str(folder))
        patch.delenv(SWITCH, raising=False)
        library._load.cache_clear()
        build()
    library._load.cache_clear()
    return folder


@pytest.fixture(scope="module")
def compiled(request) -> Iterator[bool]:
    """Whether kernels are on, as on a user's machine: built in a folder of the tests, where they can be. Of
    tests of whole commands they take a fifth of the time."""
    able = bool(library.supported()) and library.find_compiler() is not None
    with pytest.MonkeyPatch.context() as patch:
        if able:
            patch.setenv("MATCHER_CACHE", str(request.getfixturevalue("kernels_folder")))
        patch.delenv(SWITCH)
        library._load.cache_clear()
        yield able
    library._load.cache_clear()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260)


@pytest.fixture
def views() -> tuple[Path, Path]:
    """Two images of one scene."""
    return ROOT / "assets" / "view0.jpg", ROOT / "assets" / "view1.jpg"


@pytest.fixture
def small_model(views) -> MatchingNetwork:
    """An untrained network, which matches like nearest neighbours."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = MatchingNetwork(NetworkConfig(context=ContextConfig(dim=48, heads=2, depth=3))).eval()
    (features,) = SiftExtractor(ExtractorConfig(max_keypoints=512))([read_image(views[0])])
    model.standardise(features.descriptors)
    return model


@pytest.fixture
def small_weights(small_model, tmp_path) -> Path:
    """The untrained network as a weights file."""
    save_model(small_model, tmp_path / "small.safetensors")
    return tmp_path / "small.safetensors"


@pytest.fixture
def shelf(small_weights) -> Path:
    """A folder with a manifest and the weights it names."""
    data = small_weights.read_bytes()
    row = ROW.format(digest=hashlib.sha256(data).hexdigest(), size=len(data))
    (small_weights.parent / "manifest.toml").write_text(row)
    return small_weights.parent


@pytest.fixture
def network(small_weights) -> matcher.Pipeline:
    """The preset of SIFT with the untrained network."""
    return matcher.load("hybrid", weights=small_weights, max_keypoints=600, device="cpu", precision="float32")


@pytest.fixture
def shipped_weights() -> Path:
    """The shipped weights of `hybrid`, beside which those of the other presets are."""
    for folder in FOLDERS:
        if (folder / "hybrid.safetensors").is_file():
            return folder / "hybrid.safetensors"
    pytest.skip("weights/hybrid.safetensors is not in this checkout")
