"""Detected instances of a template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from matcher.data.geometry import warp_points
from matcher.data.image import Image
from matcher.errors import UsageError
from matcher.files import check_output


@dataclass(frozen=True, eq=False, repr=False)
class Instance:
    """One detected instance of the template in an image."""

    matrix: np.ndarray  # (3, 3) float64, stored pixels of the template → stored pixels of the image
    corners: np.ndarray  # (4, 2) float64 stored pixels: the template's corners, clockwise from its (0, 0)
    inliers: int  # of the matches after rectification to the template's scale and rotation
    share: float  # of the template's keypoints there that are inliers, 0 to 1

    @property
    def scale(self) -> float:
        """Pixels of the image per pixel of the template, at its centre."""
        return float(np.sqrt(abs(np.linalg.det(self._jacobian()))))

    @property
    def angle(self) -> float:
        """Rotation in degrees, −180 to 180, from x towards y (clockwise)."""
        linear = self._jacobian()
        return float(np.degrees(np.arctan2(linear[1, 0] - linear[0, 1], linear[0, 0] + linear[1, 1])))

    def _jacobian(self) -> np.ndarray:
        middle = warp_points(self.corners.mean(axis=0, keepdims=True), np.linalg.inv(self.matrix))[0]
        steps = warp_points(middle + np.array([[0, 0], [1, 0], [0, 1]]), self.matrix)
        return (steps[1:] - steps[0]).T

    def __repr__(self) -> str:
        x, y = self.corners.mean(axis=0)
        how = f"scale {self.scale:.2f}, {self.angle:.0f}°, {self.inliers} inliers"
        return f"Instance(at {x:.0f}, {y:.0f}, {how})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {
            "corners": self.corners.tolist(),
            "scale": self.scale,
            "angle": self.angle,
            "inliers": self.inliers,
            "share": self.share,
            "matrix": self.matrix.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Detections:
    """The instances of a template in one image, the one with most inliers first; `find` makes them.

    >>> import matcher, numpy as np
    >>> image = np.random.default_rng(0).integers(0, 255, (300, 400), dtype=np.uint8)
    >>> found = matcher.find(image[50:250, 100:300], image, "nearest", max_keypoints=300)
    >>> len(found), found.size, [round(one.scale, 1) for one in found]
    (1, (400, 300), [1.0])
    """

    instances: tuple[Instance, ...]
    size: tuple[int, int]  # (width, height) of the image, stored pixels
    template: Image
    path: Path | None = None  # of the image
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for `json.dumps`."""
        return {
            "path": None if self.path is None else str(self.path),
            "width": self.size[0],
            "height": self.size[1],
            "instances": [instance.to_dict() for instance in self.instances],
            "seconds": round(self.seconds, 3),
        }

    def plot(
        self,
        path: str | Path,
        image: Image | np.ndarray | str | Path | None = None,
        *,
        title: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Draw the template, and the image with the outlines of its instances; whole or not at all.

        Args:
            path: .png, .jpg, .jpeg, .pdf or .svg.
            image: None reads `path` of the image again; give it for arrays.
            title: one line above.
            overwrite: replace an existing file even if matcher did not write it.

        Returns:
            The path written.

        Raises:
            UsageError: another suffix, an absent folder, an existing foreign file, or no image where it has
                no path.
            ImageError: the image cannot be read.
        """
        from matcher.drawing.canvas import PLOT_SUFFIXES, save_figure
        from matcher.drawing.instances import draw_instances

        path = check_output(path, PLOT_SUFFIXES, overwrite=overwrite)
        if image is None and self.path is None:
            raise UsageError("the image was an array: give it to plot(path, image)")
        corners = [instance.corners for instance in self.instances]
        shown = self.path if image is None else image
        return save_figure(draw_instances(self.template, shown, corners, title=title), path)
