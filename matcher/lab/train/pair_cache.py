"""Features of image pairs from any source, cached on disk for training.

One file per pair, about 170 KB: the keypoints of both images and their positions in the other image. The name
of the folder depends on the photos and views, the front end, and the part of the recipe that decides what the
pairs are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from matcher.lab.pairs.dense import HIDDEN_STATE, UNKNOWN_STATE, VISIBLE_STATE, PairSource, transfer
from matcher.lab.pairs.sources import build_mixture
from matcher.lab.pairs.stored import views_digest
from matcher.lab.pairs.textures import PhotoSet, photos_digest
from matcher.lab.train.cache_folder import CacheFolder
from matcher.lab.train.recipe import Recipe, fingerprint
from matcher.lab.train.views import CachedView, detect_and_describe, front_end_suffix

_ARRAYS = ("keypoints", "scales", "angles", "descriptors", "corresponding", "states")
_SCENES = "shows"  # name of that array in the files


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrespondingView(CachedView):
    """Features of one image of a pair, with the position of each keypoint in the other image."""

    corresponding: np.ndarray  # (N, 2) float32 pixels in the other image; NaN where not visible
    states: np.ndarray  # (N,) int8 VISIBLE_STATE, HIDDEN_STATE or UNKNOWN_STATE
    scenes: frozenset[str] = frozenset()  # names of photos or scenes; unrelated views have none in common

    def select(self, index: np.ndarray) -> CorrespondingView:
        """The view with only some of its keypoints."""
        chosen = super().select(index)
        return replace(chosen, corresponding=self.corresponding[index], states=self.states[index])

    @property
    def visible(self) -> np.ndarray:
        """(N,) bool: keypoints that are visible in the other image."""
        return self.states == VISIBLE_STATE

    @property
    def known(self) -> np.ndarray:
        """(N,) bool: keypoints that are known to be visible or hidden in the other image."""
        return self.states != UNKNOWN_STATE

    def as_unrelated(self) -> CorrespondingView:
        """The view as part of an unrelated pair: nothing of it is visible in the other image."""
        return replace(
            self,
            corresponding=np.full_like(self.corresponding, np.nan),
            states=np.full_like(self.states, HIDDEN_STATE),
        )


CorrespondingPair = tuple[CorrespondingView, CorrespondingView]


class PairCache(CacheFolder):
    """A folder of pairs with their features, one file each.

    Args:
        root: the folder that contains it.
        recipe: its `sources`, seed and front end decide what the pairs are.
        photos: textures.
        rendered, real: folders of stored views, where the recipe has a share for them.
    """

    def __init__(
        self,
        root: Path,
        recipe: Recipe,
        photos: Sequence[Path],
        rendered: Path | None = None,
        real: Path | None = None,
    ) -> None:
        self.recipe, self.rendered, self.real = recipe, rendered, real
        self.wanted = recipe.sources.pairs
        made_of = "|".join((photos_digest(photos), views_digest(rendered), views_digest(real)))
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        suffix = front_end_suffix(recipe)
        shape = fingerprint(replace(recipe.sources, pairs=0, share=0.0))
        super().__init__(root / f"image-pairs-{shape}-{recipe.seed}{suffix}-{made_of}")
        self.folder.mkdir(parents=True, exist_ok=True)

    def photo_set(self, photos: Sequence[Path]) -> PhotoSet:
        """The photos as `make` needs them."""
        return PhotoSet(photos, colour=True)

    def make(self, photos: PhotoSet, numbers: Sequence[int]) -> Iterator[int]:
        """Make the pairs that are missing; yields each number as it is done.

        Raises:
            UsageError: not one photo can be read, or a source of the recipe has no views.
            OSError: the disk is full.
        """
        sources, shares = self.recipe.sources, self.recipe.sources.shares()
        missing = [number for number in numbers if not self.path(number).exists()]
        if missing:
            mixture = build_mixture(photos, shares, rendered=self.rendered, real=self.real)
        for number in missing:
            rng = np.random.default_rng([self.recipe.seed, 5, number])
            pair = make_pair(mixture, self.recipe, (sources.width, sources.height), rng)
            arrays = {f"{name}{i}": getattr(view, name) for i, view in enumerate(pair) for name in _ARRAYS}
            scenes = np.array(sorted(pair[0].scenes), dtype=np.str_)
            self.write(number, {**arrays, _SCENES: scenes})
            yield number

    def read(self, number: int) -> CorrespondingPair:
        """A pair.

        Raises:
            IntegrityError: the file is damaged.
        """
        sources = self.recipe.sources
        with self.opened(number) as stored:
            scenes = frozenset(stored[_SCENES].tolist())
            view0, view1 = (
                CorrespondingView(
                    **{name: stored[f"{name}{side}"] for name in _ARRAYS},
                    labels=np.zeros((0, 0), np.uint8),
                    homographies=np.zeros((0, 3, 3)),
                    size=(sources.width, sources.height),
                    kind=self.recipe.network.kind,
                    scenes=scenes,
                )
                for side in (0, 1)
            )
            return view0, view1


def make_pair(
    source: PairSource, recipe: Recipe, size: tuple[int, int], rng: np.random.Generator
) -> CorrespondingPair:
    """The next pair of a source, with the features of the recipe's front end."""
    pair = source.pair(rng, size)
    views = []
    for pixels, positions in ((pair.pixels0, pair.positions0), (pair.pixels1, pair.positions1)):
        points, scales, angles, descriptors = detect_and_describe(
            pixels, recipe.network.kind, recipe.sources.max_keypoints, recipe.front_end
        )
        corresponding, states = transfer(points, positions)
        views.append(
            CorrespondingView(
                points,
                scales,
                angles,
                descriptors,
                np.zeros((0, 0), np.uint8),
                np.zeros((0, 3, 3)),
                size,
                kind=recipe.network.kind,
                corresponding=corresponding,
                states=states,
                scenes=pair.scenes,
            )
        )
    return views[0], views[1]
