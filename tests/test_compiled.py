"""The compiled kernels: what they compute, what they decline, and that nothing needs them."""

import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

from matcher import kernels as compiled
from matcher.attention import scaled_dot_product
from matcher.config import ContextConfig
from matcher.errors import UsageError
from matcher.kernels import library, trusted
from matcher.match.network.context import build_layer
from matcher.match.network.fused import fuse_layer
from matcher.match.network.packed import Layout
from matcher.match.sinkhorn import absorbed

VECTORS = pytest.mark.skipif(
    library.instructions() is None or shutil.which("g++") is None, reason="needs AVX-512 and a compiler"
)
NEEDED = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported() or shutil.which("g++") is None, reason="needs AMX and a compiler"
)


def forget() -> None:
    """Look for the library again."""
    library._load.cache_clear()


@pytest.fixture
def kernel(kernels_folder, monkeypatch):
    """The kernels, in a folder of their own."""
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    forget()
    yield compiled.build()
    forget()


def random_heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@NEEDED
@pytest.mark.parametrize(
    ("heads", "n", "m", "width"), [(4, 200, 333, 64), (1, 1, 1, 32), (2, 33, 31, 96), (3, 64, 32, 128)]
)
def test_the_kernel_is_the_equation(kernel, heads: int, n: int, m: int, width: int) -> None:
    # Heads lie side by side in the tokens, as a projection leaves them, with other channels between.
    q, k, v = (random_heads(2, c, heads + 1, width, seed=i)[:, :, 1:] for i, c in enumerate((n, m, m)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    found = compiled.attend_compiled(q, k, v)
    assert found is not None and found.shape == q.shape
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    stock = F.scaled_dot_product_attention(q, k, v).double()
    assert (found.double() - exact).abs().max() < 2 * (stock - exact).abs().max() + 0.01 * exact.abs().max()
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product(q, k, v), found)


@NEEDED
def test_rows_do_not_depend_on_each_other(kernel) -> None:
    q, k, v = (random_heads(2, 70, 64, seed=i) for i in range(3))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    found = compiled.attend_compiled(q, k, v)
    assert torch.equal(compiled.attend_compiled(q[:, order], k, v), found[:, order])
    assert torch.equal(compiled.attend_compiled(q[:, :33], k, v), found[:, :33])


@NEEDED
def test_threads_do_not_change_a_bit(kernel) -> None:
    q, k, v = (random_heads(3, 500, 64, seed=i) for i in range(3))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(compiled.attend_compiled(q, k, v))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@NEEDED
def test_what_the_kernel_declines(kernel, monkeypatch) -> None:
    q, k, v = (random_heads(2, 40, 64, seed=i) for i in range(3))
    assert compiled.attend_compiled(q, k, v) is not None
    assert compiled.attend_compiled(30 * q, k, v) is None  # scores beyond what needs no maximum
    assert compiled.attend_compiled(q * torch.nan, k, v) is None
    assert compiled.attend_compiled(q.float(), k.float(), v.float()) is None
    assert compiled.attend_compiled(*(x[..., :40] for x in (q, k, v))) is None
    assert compiled.attend_compiled(q, k[:, :0], v[:, :0]) is None
    with torch.inference_mode():
        large = scaled_dot_product(30 * q, k, v)
        expected = F.scaled_dot_product_attention(30 * q, k, v)
    torch.testing.assert_close(large, expected, atol=0.05, rtol=0.05)
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.attend_compiled(q, k, v) is None


@VECTORS
@pytest.mark.parametrize("amx", [True, False])
def test_a_block_with_kernels_is_the_block(tmp_path, monkeypatch, amx: bool) -> None:
    """Prepared for inference with the kernels, as it is trained without them; also where there is no AMX."""
    if not amx:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    forget()
    assert library.instructions() in compiled.build().name
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.15)):
        layer, layout = random_layer(), Layout(((100, 37), (0, 9), (130, 1)))
        rng = torch.Generator().manual_seed(1)
        x = torch.randn(layout.starts[-1], 64, generator=rng)
        angles = 7 * torch.rand(len(x), 16, generator=rng)
        turns = torch.stack([angles.cos(), angles.sin()], dim=1)
        with torch.inference_mode():
            expected = layer(x, turns, layout)
            inference = fuse_layer(layer, dtype)
            found = inference(x, turns, layout)
            monkeypatch.setenv(compiled.SWITCH, "0")
            stock = inference(x, turns, layout)
            monkeypatch.delenv(compiled.SWITCH)
        assert not torch.equal(found, stock)  # so the kernels did run
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert (found - expected).norm() < 1.1 * (stock - expected).norm() + 1e-3
    forget()


@torch.no_grad()
def random_layer() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        layer = build_layer(ContextConfig(dim=64, heads=2)).eval()
        for value in layer.parameters():
            value += 0.1 * torch.randn_like(value)
    return layer.requires_grad_(False)


@VECTORS
def test_kernels_stand_back_for_autocast_and_gradients(kernel) -> None:
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert compiled.have_kernels(x) and not compiled.have_kernels(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not compiled.have_kernels(x)
    assert not compiled.have_kernels(x)


@VECTORS
def test_steps_between_products_are_exact(kernel) -> None:
    """Over the whole range of what activations take, to the rounding of the precision."""
    rng = torch.Generator().manual_seed(2)
    rows, width = 300, 96
    joint = torch.randn(rows, width, generator=rng) * torch.logspace(-3, 3, rows)[:, None]
    vectors = [torch.randn(width, generator=rng) for _ in range(4)]
    maps = [torch.randn(width, width, generator=rng) / width**0.5 for _ in range(2)]
    x, bias, gain, shift, last = torch.randn(rows, width, generator=rng), *vectors
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        steps = compiled.FeedForwardSteps(*(m.to(dtype) for m in maps), bias, gain, shift, 1e-5, last)
        out = torch.empty_like(x)
        compiled.feed_forward_compiled(x, joint.to(dtype), steps, out)
        hidden = F.linear(joint.to(dtype).double(), steps.widen.double(), bias.double())
        hidden = F.gelu(F.layer_norm(hidden, (width,), gain.double(), shift.double()))
        expected = x + F.linear(hidden, steps.narrow.double(), last.double())
        assert (out - expected).abs().max() < tolerance


@VECTORS
@pytest.mark.parametrize("turned", [False, True])
def test_a_transport_kernel_is_absorbed_equally(kernel, monkeypatch, turned: bool) -> None:
    rng = torch.Generator().manual_seed(3)
    scores = 20 * torch.randn(301, 217, generator=rng)[:, :200]  # a view with gaps between its rows
    scores = scores.contiguous().t() if turned else scores
    u, v = -scores.amax(1), 5 * torch.randn(scores.shape[1], generator=rng)
    found = absorbed(scores, u, v)
    monkeypatch.setenv(compiled.SWITCH, "0")
    torch.testing.assert_close(found, absorbed(scores, u, v), rtol=2e-5, atol=0)
    assert float(found.min()) > 0


def test_nothing_is_compiled_without_being_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    forget()
    q = random_heads(1, 8, 32)
    assert compiled.attend_compiled(q, q, q) is None and not compiled.have_kernels(q[0])
    assert list(tmp_path.iterdir()) == []
    forget()


def test_a_library_that_does_not_load_is_left_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    path = library.library_path()
    trusted.make_private(path.parent)
    (tmp_path / "made").write_bytes(b"no library")
    trusted.keep(tmp_path / "made", path)
    forget()
    q = random_heads(1, 8, 32)
    assert compiled.attend_compiled(q, q, q) is None and not compiled.have_kernels(q[0])
    forget()


@VECTORS
def test_a_library_that_cannot_be_kept_or_loaded(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "file" / "folder"))
    forget()
    with pytest.raises(UsageError, match="cannot be kept"):
        compiled.build()
    assert compiled.kernels() is None
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError("not here")))
    with pytest.raises(UsageError, match="cannot be loaded"):
        compiled.build()
    forget()


def test_what_is_missing_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "instructions", lambda: None)
    with pytest.raises(UsageError, match="no AVX-512"):
        compiled.build()
    monkeypatch.setattr(library, "instructions", lambda: "x86-64-v4")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="install g\\+\\+"):
        compiled.build()
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(library, "SOURCES", (broken,))
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    with pytest.raises(UsageError, match="cannot compile"):
        compiled.build()
