"""The front end's compiled kernels give what its stock operators give."""

import shutil

import pytest
import torch

from matcher import kernels as compiled
from matcher.extract.learned import Architecture, FeatureNetwork, candidates, peaks, sample, try_peaks
from matcher.kernels import calls as maps_of
from matcher.kernels import loader as library

pytestmark = pytest.mark.skipif(
    library.instructions() is None or shutil.which("g++") is None, reason="needs a compiler and vector units"
)


@pytest.fixture(autouse=True)
def _kernels(kernels_folder, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(compiled.SWITCH, library.instructions())  # without trials
    library._load.cache_clear()
    with torch.inference_mode():
        yield
    library._load.cache_clear()


def random_network(dtype: torch.dtype, sizes: Architecture = Architecture()) -> FeatureNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        network = FeatureNetwork(sizes).eval()
    network.prepare(dtype)
    return network


@pytest.mark.parametrize("sizes", [Architecture(), Architecture((20, 24, 72, 40, 24), (1, 2, 1, 2, 1), 80)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.03)])
def test_the_network_with_kernels_is_the_network(
    monkeypatch, dtype: torch.dtype, tolerance: float, sizes: Architecture
) -> None:
    """Images of two sizes, of which one is a single sample of the coarsest map."""
    rng = torch.Generator().manual_seed(1)
    network = random_network(dtype, sizes)
    for batch, height, width in ((2, 96, 176), (1, 16, 16)):
        pixels = torch.rand(batch, 1, height, width, generator=rng)
        points = torch.rand(batch, 50, 2, generator=rng) * torch.tensor([width + 8, height + 8]) - 4
        logits, maps = network(pixels)
        described = network.describe(maps, points)
        assert logits.shape == (batch, height, width) and described.shape == (batch, 50, 64)
        monkeypatch.setenv(compiled.SWITCH, "0")
        monkeypatch.setattr(torch.ops.mkldnn, "_convolution_pointwise", None, raising=False)
        expected, stock = network(pixels)
        for ours, theirs in zip(maps, stock, strict=True):
            torch.testing.assert_close(ours, theirs)
        spread = float(expected.std())
        assert float((logits - expected).abs().max()) < tolerance * max(spread, 0.01)
        torch.testing.assert_close(described, network.describe(stock, points), atol=1e-4, rtol=0)
        monkeypatch.undo()
        monkeypatch.delenv(compiled.SWITCH, raising=False)


def test_a_map_that_does_not_fit_a_coarser_one_is_refused() -> None:
    """The kernel would write beyond its memory."""
    fine, coarse = (
        torch.zeros(1, 8, *size).contiguous(memory_format=torch.channels_last) for size in ((15, 20), (8, 10))
    )
    with pytest.raises(ValueError, match="not twice as large"):
        maps_of.add_enlarged_compiled(fine, coarse)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_samples_are_those_of_the_maps(factor: float) -> None:
    rng = torch.Generator().manual_seed(3)
    maps = torch.randn(1, 20, 13, 17, generator=rng).contiguous(memory_format=torch.channels_last)
    points = torch.rand(1, 300, 2, generator=rng) * 80 - 8
    found = maps_of.sample_compiled([maps, maps.bfloat16()], points, [factor, factor / 2])
    torch.testing.assert_close(found[..., :20], sample(maps, points * factor), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        found[..., 20:], sample(maps.bfloat16(), points * factor / 2), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("radius", [0, 1, 3, 9])
@pytest.mark.parametrize("border", [0, 4])
def test_peaks_are_the_peaks_in_their_order(radius: int, border: int) -> None:
    rng = torch.Generator().manual_seed(6)
    scores = torch.randn(45, 90, generator=rng)[:, :83].round(decimals=1)  # with gaps between rows, and ties
    found = maps_of.peaks_compiled(scores, radius, border, try_peaks)
    assert found.equal(candidates(scores[None], radius, border)[0].nonzero().flip(1))
    flat = torch.zeros(200, 300)  # more of them than expected
    assert maps_of.peaks_compiled(flat, radius, border, try_peaks) is None and bool(
        peaks(flat[None], radius).all()
    )


def test_other_maps_are_left_to_stock_operators(monkeypatch) -> None:
    maps = torch.randn(1, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    assert maps_of.have_maps(maps, maps.bfloat16())
    assert not maps_of.have_maps(maps.double()) and not maps_of.have_maps(maps.contiguous())
    with torch.inference_mode(False), torch.enable_grad():
        assert not maps_of.have_maps(maps) and maps_of.peaks_compiled(maps[0, 0], 1, 0, try_peaks) is None
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert not maps_of.have_maps(maps)
