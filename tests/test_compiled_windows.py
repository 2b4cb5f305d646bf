"""The compiled least-squares matching of windows does what NumPy does."""

import shutil

import cv2
import numpy as np
import pytest
import torch
from rendered_texture import AFFINE, SIZE, Texture, move

from matcher import kernels as compiled
from matcher import refine as fitting
from matcher import refine as least_squares
from matcher.kernels import loader as library
from matcher.refine import Grid, Pyramid, Windows, middle_frames

pytestmark = pytest.mark.skipif(
    library.instructions() is None or shutil.which("g++") is None, reason="needs a compiler and vector units"
)


def forget() -> None:
    library._load.cache_clear()


@pytest.fixture
def kernel(kernels_folder, monkeypatch):
    monkeypatch.setenv("MATCHER_CACHE", str(kernels_folder))
    monkeypatch.setenv(compiled.SWITCH, library.instructions())  # without trials
    forget()
    yield
    forget()


def pyramid(values: np.ndarray, mask: np.ndarray | None = None) -> Pyramid:
    return Pyramid(np.rint(np.clip(values, 0, 255)).astype(np.uint8), mask)


def windows_of(pyramid0: Pyramid, pyramid1: Pyramid, maps: np.ndarray, error: float = 0.5) -> Windows:
    """Windows all over the image, its border and beyond."""
    points0 = np.stack(np.meshgrid(*[np.arange(-3, SIZE + 4, 9.0)] * 2), axis=-1).reshape(-1, 2)
    points1 = move(points0) + np.random.default_rng(1).normal(0, error, points0.shape)
    frames = middle_frames(np.broadcast_to(maps, (len(points0), 2, 2)))
    sides = (
        np.concatenate([p[:, :, None], f], axis=2) for p, f in zip((points0, points1), frames, strict=True)
    )
    return Windows(pyramid0, pyramid1, *sides, np.full(len(points0), 1.0))


def both(monkeypatch, windows: Windows, side: int = 15, reweighings: int = 2):
    """The fits by the kernel and by NumPy."""
    found = []
    for switch in ("1", "0"):
        monkeypatch.setenv(compiled.SWITCH, switch)
        prior = np.zeros((len(windows.affine0), 6))
        found.append(fitting.fit_windows(windows, Grid.of(side), prior, reweighings))
    assert isinstance(found[0].change, np.ndarray)
    return found


def assert_alike(ours, theirs, windows: Windows) -> None:
    """Where the fit is determined both agree; OpenCV rounds positions to 1/32 of a pixel."""
    np.testing.assert_allclose(ours.visible, theirs.visible, atol=0.02)
    clear = (theirs.visible > 0.5) & (theirs.correlation > 0.9) & (theirs.last_step < 0.05)
    assert clear.sum() > 200
    apart = np.linalg.norm((ours.change - theirs.change)[clear, :2], axis=1)
    assert np.median(apart) < 0.005
    assert np.percentile(apart, 98) < 0.05
    assert np.percentile(np.abs(ours.correlation - theirs.correlation)[clear], 98) < 0.01
    assert np.percentile(np.abs(ours.contrast / theirs.contrast - 1)[clear], 98) < 0.02
    sizes = [np.trace(fit.covariance[clear], axis1=1, axis2=2) for fit in (ours, theirs)]
    assert np.percentile(np.abs(np.log(sizes[0] / sizes[1])), 95) < 0.25
    assert (ours.last_step[clear] < 0.25).all()


@pytest.mark.parametrize("side", [9, 15, 21])
def test_the_kernel_fits_what_numpy_fits(kernel, monkeypatch, side: int) -> None:
    texture = Texture()
    windows = windows_of(*(pyramid(texture.image(*view)) for view in ((), (AFFINE,))), AFFINE[:, :2])
    assert_alike(*both(monkeypatch, windows, side), windows)


def test_it_knows_masks_levels_and_images_of_other_sizes(kernel, monkeypatch) -> None:
    texture = Texture(shortest=8.0)
    mask = np.ones((SIZE, SIZE), bool)
    mask[60:90, 40:160] = False
    larger = cv2.resize(texture.image(AFFINE), None, fx=3, fy=2.5, interpolation=cv2.INTER_CUBIC)
    windows = windows_of(pyramid(texture.image(), mask), pyramid(larger), AFFINE[:, :2])
    stretch = np.diag([3, 2.5]) @ windows.affine1
    stretch[:, :, 0] += [1.0, 0.75]  # the centre of the first pixel is (0, 0)
    windows = windows._replace(affine1=stretch)
    assert (windows.pyramid1.level_of(stretch[:, :, 1:]) > 0).all()
    ours, theirs = both(monkeypatch, windows)
    assert_alike(ours, theirs, windows)
    assert (ours.visible < 0.5).sum() > 20


def test_threads_and_neighbours_do_not_change_a_bit(kernel, monkeypatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "1")
    texture = Texture()
    windows = windows_of(*(pyramid(texture.image(*view)) for view in ((), (AFFINE,))), AFFINE[:, :2])
    prior = np.zeros((len(windows.affine0), 6))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(fitting.fit_windows(windows, Grid.of(15), prior, 2))
    finally:
        torch.set_num_threads(threads)
    part = fitting.fit_windows(windows.select(slice(40, 90)), Grid.of(15), prior[40:90], 2)
    for one, two, some in zip(*found, part, strict=True):
        assert np.array_equal(one, two)
        assert np.array_equal(one[40:90], some)


def test_a_fit_by_numpy_does_not_wait_for_others(monkeypatch) -> None:
    """One that has converged takes no further steps while the rest of its block does."""
    monkeypatch.setenv(compiled.SWITCH, "0")
    texture = Texture()
    windows = windows_of(*(pyramid(texture.image(*view)) for view in ((), (AFFINE,))), AFFINE[:, :2])
    together = fitting.fit_windows(windows, Grid.of(15), np.zeros((len(windows.affine0), 6)), 2)
    for k in range(40, 90):
        alone = fitting.fit_windows(windows.select(slice(k, k + 1)), Grid.of(15), np.zeros((1, 6)), 2)
        np.testing.assert_allclose(alone.change[0], together.change[k], atol=1e-4)


def test_windows_without_contrast_stay_regular_for_numpy(monkeypatch) -> None:
    """Their equations are so large that the prior is below float32's last digit; these were singular."""
    monkeypatch.setenv(compiled.SWITCH, "0")
    huge = np.zeros((6, 6), np.float32)
    huge[1, [1, 3, 5]] = [2.0**21, -(2.0**23), -(2.0**24)]
    huge[3, [1, 3, 5]] = [-(2.0**23), 3.1815222e12, 2.0**26]
    huge[5, [1, 3, 5]] = [-(2.0**24), 2.0**26, 2.0**27]
    monkeypatch.setattr(least_squares, "_normal_matrix", lambda light, dx, *_: np.tile(huge, (len(dx), 1, 1)))
    texture = Texture()
    windows = windows_of(*(pyramid(texture.image(*view)) for view in ((), (AFFINE,))), AFFINE[:, :2])
    found = fitting.fit_windows(windows, Grid.of(15), np.zeros((len(windows.affine0), 6)), 2)
    assert np.isfinite(found.change).all()


def test_what_it_declines(kernel, monkeypatch) -> None:
    texture = Texture()
    windows = windows_of(*(pyramid(texture.image(*view)) for view in ((), (AFFINE,))), AFFINE[:, :2])
    prior = np.zeros((len(windows.affine0), 6))
    assert fitting._compiled(windows, Grid.of(15), prior, 1) is not None
    assert fitting._compiled(windows, Grid.of(33), prior, 1) is None
    wide = fitting.fit_windows(windows.select(slice(200, 210)), Grid.of(33), prior[:10], 1)
    assert np.isfinite(wide.change).all()
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert fitting._compiled(windows, Grid.of(15), prior, 1) is None


def test_impossible_windows_do_no_harm(kernel, monkeypatch) -> None:
    image = pyramid(np.full((20, 30), 7.0))
    affine = np.tile(np.array([[5.0, 1, 0], [5.0, 0, 1]]), (5, 1, 1))
    affine[1, :, 0] = np.nan
    affine[2, :, 0] = 1e12
    affine[3, :, 1:] = 0
    windows = Windows(image, image, affine, affine, np.ones(5))
    monkeypatch.setenv(compiled.SWITCH, "1")
    found = fitting.fit_windows(windows, Grid.of(15), np.zeros((5, 6)), 2)
    assert (found.contrast < 1).all()
    assert found.visible[2] == 0
