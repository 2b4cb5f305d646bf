"""Old names that still work, with a warning, until the next version."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from matcher.result import Result
from matcher.types import Image


def plot_result(
    result: Result,
    image0: Image | np.ndarray | str | Path,
    image1: Image | np.ndarray | str | Path,
    path: str | Path,
    title: str | None = None,
    **drawing: Any,
) -> Path:
    """Old name of `Result.plot`, which replaces it; it overwrites, and will be removed."""
    warnings.warn("plot_result is now result.plot(path)", DeprecationWarning, stacklevel=2)
    return result.plot(path, image0, image1, title=title, overwrite=True, **drawing)
