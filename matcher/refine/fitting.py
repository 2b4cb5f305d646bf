"""Least-squares fits of any number of windows: by the compiled kernel where it is there, else by NumPy."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from matcher.kernels import FitSettings, WindowView, fit_windows_compiled
from matcher.refine import least_squares
from matcher.refine.least_squares import Fit, Fitting, Windows
from matcher.refine.windows import Grid, Pyramid
from matcher.threads import compute_threads

FIRST_STEPS, STEPS = 3, 3  # Gauss-Newton steps before the first reweighting, and after each
_BLOCK = 256  # windows that NumPy fits together, so that they stay in a core's cache


def fit_windows(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit:
    """Fit K windows; `prior` (K, 6), as `Fit.change`, is both the initial value and the mean of the prior."""
    found = _compiled(windows, grid, prior, reweighings)
    return _by_numpy(windows, grid, prior, reweighings) if found is None else found


def _compiled(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit | None:
    settings = FitSettings(
        grid.side,
        FIRST_STEPS,
        STEPS,
        reweighings,
        least_squares.DEFORMATION,
        least_squares.ROBUST_SCALE,
        least_squares.VARIANCE_INFLATION,
        least_squares.MIN_RESIDUAL,
        least_squares.NOISE_ENERGY,
        least_squares.MAX_DAMPING,
        least_squares.INITIAL_NOISE,
        least_squares.TOLERANCE,
    )
    sides = (windows.pyramid0, windows.affine0), (windows.pyramid1, windows.affine1)
    views = (_view(*side) for side in sides)
    found = fit_windows_compiled(*views, settings, grid.weights, windows.deviation, prior)
    return None if found is None else Fit(*found[:2], *found[2])


def _view(pyramid: Pyramid, affine: np.ndarray) -> WindowView:
    level = pyramid.level_of(affine[:, :, 1:])
    levels = [pyramid.level(index) for index in range(int(level.max(initial=0)) + 1)]
    return WindowView(levels, pyramid.mask, affine, level)


def _by_numpy(windows: Windows, grid: Grid, prior: np.ndarray, reweighings: int) -> Fit:
    """Blocks on as many threads as this process may use; NumPy and OpenCV release the interpreter lock."""

    def fit(block: slice) -> Fit:
        fitting = Fitting(windows.select(block), grid, prior[block])
        fitting.iterate(FIRST_STEPS)
        for _ in range(reweighings):
            fitting.reweigh()
            fitting.iterate(STEPS)
        return fitting.finish()

    blocks = [slice(i, i + _BLOCK) for i in range(0, len(prior), _BLOCK)]
    threads = min(compute_threads(), len(blocks), os.cpu_count() or 1)
    if threads < 2:
        fits = [fit(block) for block in blocks]
    else:
        with ThreadPoolExecutor(threads) as pool:
            fits = list(pool.map(fit, blocks))
    return Fit(*map(np.concatenate, zip(*fits, strict=True)))
