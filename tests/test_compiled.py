"""The compiled kernels: what they compute, what they decline, and that nothing needs them."""

import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn import functional as F

from matcher import files
from matcher import kernels as compiled
from matcher.attention import scaled_dot_product
from matcher.errors import UsageError
from matcher.kernels import calls
from matcher.kernels import loader as library
from matcher.kernels import loader as targets
from matcher.kernels import loader as trusted

VECTORS = pytest.mark.skipif(
    library.instructions() is None or shutil.which("g++") is None, reason="needs vector units and a compiler"
)
SLOW = pytest.mark.slow  # another compilation


def forget() -> None:
    """Look for the library again."""
    library._load.cache_clear()


@pytest.fixture(
    params=["best", "avx2", *(pytest.param(name, marks=SLOW) for name in ("avx512", "avx512_bf16"))]
)
def kernel(request, kernels_folder, monkeypatch):
    """The kernels of a target, in a folder of their own, without trials."""
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    name = library.instructions() if request.param == "best" else request.param
    if name not in library.supported() or (request.param != "best" and name == library.instructions()):
        pytest.skip(f"not for this processor, or tested as its best: {name}")
    monkeypatch.setenv(compiled.SWITCH, name)
    forget()
    path = compiled.build()
    assert name in path.name and compiled.kernels() is not None
    yield name
    forget()


def random_heads(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@VECTORS
@pytest.mark.parametrize(
    ("heads", "n", "m", "width"), [(4, 200, 333, 64), (1, 1, 1, 32), (2, 33, 31, 96), (3, 64, 32, 128)]
)
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.01), (torch.float32, 1e-5)])
def test_the_kernel_is_the_equation(
    kernel, heads: int, n: int, m: int, width: int, dtype: torch.dtype, rounding: float
) -> None:
    # Heads lie side by side in the tokens, as a projection leaves them, with other channels between.
    q, k, v = (random_heads(2, c, heads + 1, width, seed=i)[:, :, 1:] for i, c in enumerate((n, m, m)))
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    found = calls.attend_compiled(q, k, v)
    assert found is not None and found.shape == q.shape
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    stock = F.scaled_dot_product_attention(q, k, v).double()
    assert (found.double() - exact).abs().max() < 2 * (
        stock - exact
    ).abs().max() + rounding * exact.abs().max()
    with torch.inference_mode():
        assert torch.equal(scaled_dot_product(q, k, v), found)


@VECTORS
def test_rows_do_not_depend_on_each_other(kernel) -> None:
    q, k, v = (random_heads(2, 70, 64, seed=i) for i in range(3))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    found = calls.attend_compiled(q, k, v)
    assert torch.equal(calls.attend_compiled(q[:, order], k, v), found[:, order])
    assert torch.equal(calls.attend_compiled(q[:, :33], k, v), found[:, :33])


@VECTORS
def test_threads_do_not_change_a_bit(kernel) -> None:
    q, k, v = (random_heads(3, 500, 64, seed=i) for i in range(3))
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(calls.attend_compiled(q, k, v))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@VECTORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_any_size_are_attended_to(kernel, dtype: torch.dtype) -> None:
    """Beyond what an exponential holds, and where the greatest comes last."""
    q, k, v = (random_heads(2, 200, 64, seed=i).to(dtype) for i in range(3))
    k[:, -1] = 3 * k[:, 0]
    for factor in (1, 30, 300, -300):
        with torch.inference_mode():
            found = scaled_dot_product(factor * q, k, v)
        assert torch.equal(calls.attend_compiled(factor * q, k, v), found)
        exact = F.scaled_dot_product_attention((factor * q).double(), k.double(), v.double())
        assert (found.double() - exact).norm() < (0.03 if dtype == torch.bfloat16 else 1e-3) * exact.norm()


@VECTORS
def test_what_the_kernel_declines(kernel, monkeypatch) -> None:
    q, k, v = (random_heads(2, 40, 64, seed=i) for i in range(3))
    assert calls.attend_compiled(q, k, v) is not None
    with torch.inference_mode():
        assert bool(scaled_dot_product(q * torch.nan, k, v).isnan().all())
    assert calls.attend_compiled(q.double(), k.double(), v.double()) is None
    assert calls.attend_compiled(q.float(), k, v) is None
    assert calls.attend_compiled(*(x[..., :40] for x in (q, k, v))) is None
    assert calls.attend_compiled(q, k[:, :0], v[:, :0]) is None
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert calls.attend_compiled(q, k, v) is None


@VECTORS
def test_kernels_stand_back_for_autocast_and_gradients(kernel) -> None:
    x = torch.randn(4, 64)
    with torch.no_grad():
        assert calls.have_kernels(x) and not calls.have_kernels(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not calls.have_kernels(x)
    assert not calls.have_kernels(x)


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
        steps = calls.FeedForwardSteps(*(m.to(dtype) for m in maps), bias, gain, shift, 1e-5, last)
        out = torch.empty_like(x)
        calls.feed_forward_compiled(x, joint.to(dtype), steps, out)
        hidden = F.linear(joint.to(dtype).double(), steps.widen.double(), bias.double())
        hidden = F.gelu(F.layer_norm(hidden, (width,), gain.double(), shift.double()))
        expected = x + F.linear(hidden, steps.narrow.double(), last.double())
        assert (out - expected).abs().max() < tolerance


def test_nothing_is_compiled_without_being_asked(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    forget()
    q = random_heads(1, 8, 32)
    assert calls.attend_compiled(q, q, q) is None and not calls.have_kernels(q[0])
    assert list(tmp_path.iterdir()) == []
    forget()


def test_a_library_that_does_not_load_is_left_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    path = library.library_path()
    files.make_private(path.parent)
    (tmp_path / "made").write_bytes(b"no library")
    trusted.keep(tmp_path / "made", path)
    forget()
    q = random_heads(1, 8, 32)
    assert calls.attend_compiled(q, q, q) is None and not calls.have_kernels(q[0])
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
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    forget()
    monkeypatch.setattr(library, "instructions", lambda: None)
    with pytest.raises(UsageError, match="neither AVX2 nor NEON"):
        compiled.build()
    monkeypatch.setattr(library, "instructions", lambda: "avx2")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match="install g\\+\\+"):
        compiled.build()
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no C++")
    monkeypatch.setattr(targets, "sources", lambda: [broken])
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable)
    with pytest.raises(UsageError, match="cannot compile"):
        compiled.build()
    forget()


@VECTORS
def test_a_target_that_is_named_is_taken(kernel) -> None:
    assert library.library_in_use().startswith(f"{kernel}-")
    assert library.instructions() == kernel


def test_libraries_of_a_wheel_come_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.setattr(library, "supported", lambda: ("avx512", "avx2"))
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    (tmp_path / targets.library_name(targets.TARGETS[3])).write_bytes(b"of a wheel")
    opened = []
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: opened.append(path) or MagicMock())
    forget()
    assert compiled.kernels() is not None
    assert [Path(path).name.split("-")[0] for path in opened] == ["avx2"]
    forget()
