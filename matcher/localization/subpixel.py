"""A photo's keypoints moved to where it looks most like the map's images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from matcher.config import RefineConfig
from matcher.data.images import limit_for, read_image
from matcher.data.matches import Matches
from matcher.errors import IntegrityError
from matcher.localization.sparse_map import SparseMap
from matcher.refine.refinement import ImagePyramid, refine_matches

_KEPT = 16  # pyramids of map images in memory


class MapImages:
    """Pyramids of the map's images, read when they are needed; the last few are kept."""

    def __init__(
        self,
        model: SparseMap,
        path: Callable[[str], Path],
        zoom: Callable[[str], float],
        has_changed: Callable[[str], bool],
    ) -> None:
        """By name of image: its file, resized for stored pixels, and whether it is another file now."""
        self._model, self._path, self._zoom, self._has_changed = model, path, zoom, has_changed
        self._kept: OrderedDict[int, ImagePyramid] = OrderedDict()
        self.absent: set[str] = set()  # names of images that were asked for and whose files are gone

    def __call__(self, image: int) -> ImagePyramid | None:
        """The pyramid of an image, None if its file is not there any more.

        Raises:
            IntegrityError: the file is not the one in which the keypoints were found.
        """
        if image in self._kept:
            self._kept.move_to_end(image)
            return self._kept[image]
        name, wanted = self._model.names[image], self._model.cameras[image].size
        path = self._path(name)
        if not path.is_file():
            self.absent.add(name)
            return None
        pixels = read_image(path, resize=None, upright=False, keep_stored=True, max_pixels=limit_for(wanted))
        if pixels.size != wanted:
            raise IntegrityError(
                f"{path} is {pixels.size[0]} x {pixels.size[1]} pixels now, and was {wanted[0]} x "
                f"{wanted[1]} when the map was made: put the old file back, or make the map again"
            )
        if self._has_changed(name):
            raise IntegrityError(
                f"{path} has changed since its keypoints were found: put the old file back, or make the map "
                "again"
            )
        self._kept[image] = ImagePyramid.of(pixels)._replace(zoom=self._zoom(name))
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return self._kept[image]


def refined_positions(
    images: MapImages,
    model: SparseMap,
    photo: ImagePyramid,
    positions: np.ndarray,
    table: np.ndarray,
    config: RefineConfig,
) -> np.ndarray:
    """(M, 2) positions in the photo; those that cannot be refined stay.

    Args:
        images: of the map.
        model: the map.
        photo: the photo's pyramid.
        positions: (N, 2) of its keypoints.
        table: (M, 4) inliers: keypoint, point, map image, its keypoint.
        config: window and acceptance.
    """
    found = positions[table[:, 0]].astype(np.float64)
    for image in np.unique(table[:, 2]).tolist():
        rows = np.flatnonzero(table[:, 2] == image)
        pyramid = images(image)
        if pyramid is None:
            continue
        indices = table[rows][:, [3, 0]]
        ends = model.keypoints[image][indices[:, 0]], found[rows]
        ends = tuple(end.astype(np.float32) for end in ends)
        matches = Matches(indices, *ends, np.ones(len(rows), np.float32))
        refined = refine_matches(pyramid, photo, matches, config)
        accepted = refined.refinement.accepted
        found[rows[accepted]] = refined.points1[accepted]
    return found
