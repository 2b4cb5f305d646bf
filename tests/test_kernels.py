"""The compiled kernels against their references; what they decline; and that nothing needs them."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from rendered_texture import AFFINE, SIZE, Texture, move
from torch.nn import functional as F

import matcher
from matcher.attention import scaled_dot_product
from matcher.cli import main
from matcher.errors import UsageError
from matcher.evaluate.methods import Method
from matcher.evaluate.run import as_object, evaluate
from matcher.evaluate.sets import SetOptions, find_sets
from matcher.images import data_folder
from matcher.kernels import loader
from matcher.kernels.calls import Span, attend, local_maps
from matcher.kernels.loader import SWITCH, build, kernels
from matcher.match.consensus import fit_local_maps
from matcher.match.network import DTYPES, resolve_precision
from matcher.match.position import rotate
from matcher.refine import Grid, ImagePyramid, Windows, fit_windows, middle_frames

pytestmark = pytest.mark.usefixtures("compiled")

VECTORS = pytest.mark.skipif(
    not loader.supported() or shutil.which("g++") is None, reason="needs vector units and a compiler"
)


@pytest.fixture(params=["best", "avx2"])
def kernel(request, kernels_folder, monkeypatch) -> str:
    """The name of a target whose kernels are used."""
    name = loader.supported()[0] if request.param == "best" else request.param
    if name not in loader.supported() or (request.param != "best" and name == loader.supported()[0]):
        pytest.skip(f"not for this processor, or tested as its best: {name}")
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(SWITCH, name)
    loader._load.cache_clear()
    assert name in build().name and loader.library_in_use().startswith(f"{name}-")
    yield name
    loader._load.cache_clear()


@pytest.fixture
def no_library(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("MATCHER_CACHE", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    loader._load.cache_clear()
    yield tmp_path
    loader._load.cache_clear()


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(dtype)


@VECTORS
@pytest.mark.parametrize(("count", "n", "m", "width"), [(4, 200, 333, 64), (1, 1, 1, 32), (2, 33, 31, 96)])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.01), (torch.float32, 1e-5)])
def test_attention_is_the_equation(kernel, count, n, m, width, dtype, rounding) -> None:
    # Heads lie side by side in the tokens, as a projection leaves them, with other channels between.
    q, k, v = (heads(2, c, count + 1, width, seed=i)[:, :, 1:].to(dtype) for i, c in enumerate((n, m, m)))
    found, order = attend(q, k, v), torch.randperm(n, generator=torch.Generator().manual_seed(3))
    assert torch.equal(attend(q[:, order], k, v), found[:, order])
    found, q, k, v = (x.transpose(1, 2) for x in (found.view_as(q), q, k, v))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    stock = (F.scaled_dot_product_attention(q, k, v).double() - exact).abs().max()
    assert (found.double() - exact).abs().max() < 2 * stock + rounding * exact.abs().max()


@VECTORS
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.01), (torch.float32, 1e-5)])
def test_rows_of_spans_are_rotated_and_logits_multiplied_on_the_way(kernel, dtype, rounding) -> None:
    q, k, v = (heads(2, 70, 3, 32, seed=i, dtype=dtype) for i in range(3))
    angles = torch.rand(2, 70, 16, generator=torch.Generator().manual_seed(5)) * 6
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=2)
    # The second span attends to less than it holds.
    spans = [Span(0, 40, 0, 40, 1.3), Span(40, 30, 40, 20, 0.7)]
    turns = turns.bfloat16().float()
    found = attend(q, k, v, spans=spans, turns=turns)
    assert torch.equal(attend(q, k, v, spans=spans, turns=turns.bfloat16()), found)
    found, v = (x.transpose(1, 2) for x in (found.view_as(q), v))
    q, k = rotate(torch.stack([q, k], dim=2).float(), turns).permute(2, 0, 3, 1, 4).double()
    for first, rows, key, keys, gain in spans:
        own = slice(key, key + keys)
        asking = slice(first, first + rows)
        exact = F.scaled_dot_product_attention(gain * q[:, :, asking], k[:, :, own], v[:, :, own].double())
        error = found[:, :, asking].double() - exact
        assert error.abs().max() < rounding * exact.abs().max()


@VECTORS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_of_any_size_are_attended_to(kernel, dtype) -> None:
    """Beyond what an exponential holds, and where the greatest comes last."""
    q, k, v = (heads(2, 200, 64, seed=i, dtype=dtype) for i in range(3))
    k[:, -1] = 3 * k[:, 0]
    for factor in (1, 30, 300, -300):
        with torch.inference_mode():
            found = scaled_dot_product(factor * q, k, v)
        exact = F.scaled_dot_product_attention((factor * q).double(), k.double(), v.double())
        assert (found.double() - exact).norm() < (0.03 if dtype == torch.bfloat16 else 1e-3) * exact.norm()
    assert bool(attend(*(x.transpose(0, 1) for x in (q * torch.nan, k, v))).isnan().all())


@VECTORS
def test_what_attention_declines(kernel, monkeypatch) -> None:
    q, k, v = (heads(2, 40, 64, seed=i) for i in range(3))
    assert attend(q, k, v) is not None
    assert attend(q.double(), k.double(), v.double()) is None and attend(q.float(), k, v) is None
    assert attend(*(x[..., :40] for x in (q, k, v))) is None and attend(q, k[:0], v[:0]) is None
    assert attend(q.requires_grad_(), k, v) is None
    monkeypatch.setenv(SWITCH, "0")
    assert attend(q.detach(), k, v) is None


@VECTORS
@pytest.mark.parametrize("wide", [32, 64])
def test_what_is_broadcast_or_of_another_width_is_not_for_the_kernel(kernel, wide) -> None:
    q, k, v = torch.randn(2, 4, 2000, 32), torch.randn(1, 4, 70, 32), torch.randn(1, 4, 70, wide)
    for dtype, rounding in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        given = [x.to(dtype) for x in (q, k, v)]
        found, expected = scaled_dot_product(*given), F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(found.float(), expected, atol=rounding, rtol=0)
        assert attend(*given) is None


@VECTORS
@pytest.mark.parametrize("count", [3, 500])
def test_local_maps_are_those_of_stock_operators(kernel, monkeypatch, count) -> None:
    generator = torch.Generator().manual_seed(count)
    points = torch.rand(2, count, 2, generator=generator) - 0.5
    partners = points @ torch.tensor([[0.9, 0.2], [-0.1, 0.8]]) + 0.05
    partners += 0.003 * torch.randn(partners.shape, generator=generator)
    wrong = torch.rand(2, count, generator=generator) < 0.3
    partners[wrong] = torch.rand(int(wrong.sum()), 2, generator=generator) - 0.5
    confidence = torch.rand(2, count, generator=generator) - 0.3
    confidence[0] = confidence[0].clamp(min=0)
    confidence[1] = 0  # nothing to fit to
    with torch.inference_mode():
        assert local_maps(points, partners, confidence) is not None
        ours = fit_local_maps(points, partners, confidence)
        monkeypatch.setenv(SWITCH, "0")
        theirs = fit_local_maps(points, partners, confidence)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-3)
    assert (ours.position - theirs.position).abs().median() < 1e-6


def pyramid(values: np.ndarray, mask: np.ndarray | None = None) -> ImagePyramid:
    return ImagePyramid(np.rint(np.clip(values, 0, 255)).astype(np.uint8), mask)


def windows_of(pyramid0: ImagePyramid, pyramid1: ImagePyramid, maps: np.ndarray = AFFINE[:, :2]) -> Windows:
    """Windows all over the image, its border and beyond."""
    points0 = np.stack(np.meshgrid(*[np.arange(-3, SIZE + 4, 9.0)] * 2), axis=-1).reshape(-1, 2)
    points1 = move(points0) + np.random.default_rng(1).normal(0, 0.5, points0.shape)
    frames = middle_frames(np.broadcast_to(maps, (len(points0), 2, 2)))
    sides = zip((points0, points1), frames, strict=True)
    affine = (np.concatenate([points[:, :, None], frame], axis=2) for points, frame in sides)
    return Windows(pyramid0, pyramid1, *affine, np.full(len(points0), 1.0))


def textured() -> Windows:
    texture = Texture()
    return windows_of(pyramid(texture.image()), pyramid(texture.image(AFFINE)))


def both(monkeypatch, kernel: str, windows: Windows, side: int = 15):
    """The fits by the kernel and by NumPy."""
    found = []
    for switch in (kernel, "0"):
        monkeypatch.setenv(SWITCH, switch)
        found.append(fit_windows(windows, Grid.of(side), np.zeros((len(windows.affine0), 6))))
    return found


def assert_alike(ours, theirs) -> None:
    """Where the fit is determined both agree; OpenCV rounds positions to 1/32 of a pixel."""
    np.testing.assert_allclose(ours.visible, theirs.visible, atol=0.02)
    clear = (theirs.visible > 0.5) & (theirs.correlation > 0.9) & (theirs.last_step < 0.05)
    assert clear.sum() > 200
    apart = np.linalg.norm((ours.change - theirs.change)[clear, :2], axis=1)
    assert np.median(apart) < 0.005 and np.percentile(apart, 98) < 0.05
    assert np.percentile(np.abs(ours.correlation - theirs.correlation)[clear], 98) < 0.01
    assert np.percentile(np.abs(ours.contrast / theirs.contrast - 1)[clear], 98) < 0.02
    sizes = [np.trace(fit.covariance[clear], axis1=1, axis2=2) for fit in (ours, theirs)]
    assert np.percentile(np.abs(np.log(sizes[0] / sizes[1])), 95) < 0.25
    assert (ours.last_step[clear] < 0.25).all()


@VECTORS
@pytest.mark.parametrize("side", [9, 15, 33])  # the last is too large for the kernel
def test_windows_are_fitted_as_by_numpy(kernel, monkeypatch, side) -> None:
    assert_alike(*both(monkeypatch, kernel, textured(), side))


@VECTORS
def test_windows_of_masks_levels_and_images_of_other_sizes(kernel, monkeypatch) -> None:
    texture, mask = Texture(shortest=8.0), np.ones((SIZE, SIZE), bool)
    mask[60:90, 40:160] = False
    larger = cv2.resize(texture.image(AFFINE), None, fx=3, fy=2.5, interpolation=cv2.INTER_CUBIC)
    windows = windows_of(pyramid(texture.image(), mask), pyramid(larger))
    stretch = np.diag([3, 2.5]) @ windows.affine1
    stretch[:, :, 0] += [1.0, 0.75]  # the centre of the first pixel is (0, 0)
    ours, theirs = both(monkeypatch, kernel, windows._replace(affine1=stretch))
    assert_alike(ours, theirs)
    assert (ours.visible < 0.5).sum() > 20


@VECTORS
def test_threads_and_neighbours_do_not_change_a_bit(kernel) -> None:
    windows, threads, found = textured(), torch.get_num_threads(), []
    q, k, v = (heads(3, 500, 64, seed=i) for i in range(3))
    prior = np.zeros((len(windows.affine0), 6))
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append((*fit_windows(windows, Grid.of(15), prior), attend(q, k, v).float().numpy()))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))
    part = fit_windows(windows.select(slice(40, 90)), Grid.of(15), prior[40:90])
    assert all(np.array_equal(one[40:90], some) for one, some in zip(found[0], part, strict=False))


def test_nothing_is_compiled_without_being_asked(no_library) -> None:
    q = heads(1, 8, 32)
    assert attend(q, q, q) is None and kernels() is None and loader.library_in_use() == ""
    assert list(no_library.iterdir()) == []


@VECTORS
def test_what_cannot_be_compiled_or_kept_is_said(no_library, monkeypatch) -> None:
    (no_library / "file").write_text("")
    monkeypatch.setenv("MATCHER_CACHE", str(no_library / "file" / "folder"))
    with pytest.raises(UsageError, match=r"kept.*MATCHER_CACHE"):
        build()
    monkeypatch.setenv("MATCHER_CACHE", str(no_library))
    monkeypatch.setenv("PATH", str(no_library))
    with pytest.raises(UsageError, match=r"g\+\+"):
        build()
    (no_library / "g++").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    (no_library / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{no_library}:/bin:/usr/bin")
    with pytest.raises(UsageError, match="broken"):
        build()


# --- The path that a user takes who sets nothing: default preset, precision auto, kernels where they build.


def test_kernels_and_precision_are_what_the_machine_is_good_at(compiled):
    assert (kernels() is not None) == compiled
    pipeline = matcher.load(device="cpu")
    assert pipeline.preset == matcher.load().preset == "hybrid-learned"
    found = pipeline.matcher.precision
    assert found == resolve_precision("auto", pipeline.matcher.device)
    matrices = [value for value in pipeline.matcher.model.layers.parameters() if value.dim() == 2]
    assert {value.dtype for value in matrices} == {DTYPES[found]}


def test_the_bare_command_matches_and_verifies(views, tmp_path, capfd):
    assert main(["match", *map(str, views), "--output", str(tmp_path / "r.npz"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["preset"] == "hybrid-learned" and found["geometry"]["status"] == "ok"
    assert found["matches"] > 900
    assert found["geometry"]["inliers"] > 0.85 * found["matches"]
    saved = np.load(tmp_path / "r.npz")
    assert len(saved["points0"]) == len(saved["scores"]) == found["matches"]


@pytest.mark.parametrize(("precision", "least"), [("float32", 0.0), ("auto", 0.6)])
def test_kernels_change_hardly_a_match(views, compiled, monkeypatch, precision, least):
    """In bfloat16 rounding decides matches that are contested; those are left out."""
    if not compiled:
        pytest.skip("no kernels here")
    pipeline = matcher.load(device="cpu", precision=precision)
    features = [pipeline.extract(view) for view in views]
    found = [pipeline.match_features(*features)]
    monkeypatch.setenv(SWITCH, "0")
    found.append(pipeline.match_features(*features))
    fast, stock = ({*map(tuple, each.indices.tolist())} for each in found)
    for ours, others in zip(found, (stock, fast), strict=True):
        sure = {*map(tuple, ours.indices[ours.scores >= least].tolist())}
        assert len(sure & others) > 0.98 * len(sure) > 600


# Least values for the shipped weights, some points under what they reach (weights/README.md): .80, .73, .97
# and .95 on these pairs.
FLOORS = [
    ("oxford_graf", 3, {"AUC@5 px": 0.70, "recall@3 px": 0.60}),
    ("sceaux_castle", 2, {"AUC@5°": 0.90}),
    ("kitti_mini", 1, {"AUC@5°": 0.90}),
]


@pytest.mark.parametrize(("name", "pairs", "floors"), FLOORS)
def test_the_shipped_weights_are_as_accurate_as_they_were(name, pairs, floors):
    if not (Path(data_folder()) / "bench" / name).is_dir():
        pytest.skip(f"MATCHER_DATA has no bench/{name}")
    (found,) = find_sets(name, SetOptions())
    (row,) = as_object(evaluate(found.first(pairs), [Method("default", matcher.load())]))["rows"]
    for measure, least in floors.items():
        assert row["all"][measure]["value"] >= least, measure
