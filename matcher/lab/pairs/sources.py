"""Sources of training pairs, and mixtures of them with the shares of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import UsageError
from matcher.lab.pairs.dense import DensePair, PairSource
from matcher.lab.pairs.photometric import augment, darken
from matcher.lab.pairs.planes import SceneRecipe, View, build_planes, place_camera, plane_positions, render
from matcher.lab.pairs.relief.source import Relief
from matcher.lab.pairs.relief.textures import photo_texture
from matcher.lab.pairs.stored import StoredViews
from matcher.lab.pairs.textures import DrawnPhotos, PhotoSet

DAY_NIGHT_SHARE = 0.25  # of the views of planes, darkened or brightened as between day and night
MIN_OVERLAP = 0.15  # share of the pixels that are visible in the other image, the smaller of both
ATTEMPTS = 50


@dataclass(frozen=True)
class SourceShares:
    """Shares of the sources in a mixture; any positive numbers."""

    planes: float = 0.0
    relief: float = 1.0
    rendered: float = 0.0  # of stored rendered views
    real: float = 0.0  # of stored views of real scenes

    def shares(self) -> dict[str, float]:
        """By the names of the sources."""
        return {name: getattr(self, name) for name in ("planes", "relief", "rendered", "real")}


class Planes:
    """Photos on one plane, or on several planes in space, seen by two cameras.

    Args:
        photos: textures in colour, which each view converts to grey with its own weights.
        scene: tilts, rotations and zooms; its width and height are not used.
    """

    def __init__(self, photos: PhotoSet, scene: SceneRecipe | None = None) -> None:
        self.photos, self.scene = photos, scene or SceneRecipe()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """See `dense.PairSource`.

        Raises:
            UsageError: not one photo can be read.
        """
        for _ in range(ATTEMPTS):
            photos = DrawnPhotos(self.photos)
            views = self._views(photos, rng, replace(self.scene, width=size[0], height=size[1]))
            positions0, positions1 = plane_positions(*views), plane_positions(*views[::-1])
            if min((positions[0] >= 0).mean() for positions in (positions0, positions1)) > MIN_OVERLAP:
                break
        pixels = [
            augment(darken(v.pixels, rng) if rng.random() < DAY_NIGHT_SHARE else v.pixels, rng) for v in views
        ]
        return DensePair(*pixels, positions0, positions1, "planes", frozenset(photos.names))

    def _views(self, photos: DrawnPhotos, rng: np.random.Generator, scene: SceneRecipe) -> tuple[View, View]:
        spatial = rng.random() < scene.spatial_share
        count = int(rng.integers(3, 6)) if spatial else 1
        planes = build_planes([photo_texture(photos, rng, 640) for _ in range(count)], scene, rng)
        views = []
        for _ in range(2):
            camera = place_camera(scene, spatial, rng)
            backdrop = np.full((scene.height, scene.width), int(rng.integers(256)), np.uint8)
            if rng.random() < 0.5:
                backdrop = cv2.resize(photo_texture(photos, rng), backdrop.shape[::-1])
            views.append(render(planes, camera, backdrop))
        return views[0], views[1]


class Mixture:
    """Pairs from several sources, drawn in proportion to their shares."""

    def __init__(self, sources: Mapping[str, PairSource], shares: Mapping[str, float]) -> None:
        """Keep the sources whose share is above 0.

        Raises:
            UsageError: a share names no source, or none is above 0.
        """
        missing = [name for name, share in shares.items() if share > 0 and name not in sources]
        if missing:
            raise UsageError(f"sources.{missing[0]}: there is no such source; known: {', '.join(sources)}")
        self.names = [name for name in sources if shares.get(name, 0) > 0]
        if not self.names:
            raise UsageError("sources: at least one share must be above 0")
        self.sources = dict(sources)
        weights = np.array([shares[name] for name in self.names], float)
        self.shares = weights / weights.sum()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """A pair of one of the sources; see `dense.PairSource`."""
        name = self.names[int(rng.choice(len(self.names), p=self.shares))]
        return self.sources[name].pair(rng, size)


def build_mixture(
    photos: PhotoSet,
    shares: Mapping[str, float],
    *,
    rendered: Path | None = None,
    real: Path | None = None,
    scene: SceneRecipe | None = None,
) -> Mixture:
    """The mixture of planes and relief made of `photos`, and of views stored below two folders.

    Args:
        photos: in colour.
        shares: by source: `planes`, `relief`, `rendered`, `real`; any positive numbers.
        rendered: folder of rendered sets.
        real: folder of sets of real scenes.
        scene: tilts, rotations and zooms of planes.

    Raises:
        UsageError: a source with a share has no views, or a folder holds none.
    """
    sources: dict[str, PairSource] = {"planes": Planes(photos, scene), "relief": Relief(photos)}
    for name, folder in (("rendered", rendered), ("real", real)):
        if folder is not None and shares.get(name, 0) > 0:
            sources[name] = StoredViews(folder, source=name)
    return Mixture(sources, shares)
