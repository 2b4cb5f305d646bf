"""Features of image pairs from any source, cached on disk for training.

One file a pair, about 170 KB: the points of both pictures, and where each lies in the other one. The folder
is bound to the part of the recipe that shapes it, to the front end, and to what the pairs are made of.
"""

from __future__ import annotations

import hashlib
import os
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from matcher.errors import IntegrityError
from matcher.lab.pairs.dense import HIDDEN_STATE, SEEN_STATE, UNKNOWN_STATE, PairSource, transfer
from matcher.lab.pairs.sources import build_mixture
from matcher.lab.pairs.textures import PhotoSet, photos_digest
from matcher.lab.train.recipe import Recipe, fingerprint
from matcher.lab.train.views import CachedView, describe, front_end_note

ABANDONED_AFTER = 3600.0  # seconds after which an unfinished file belongs to no living process
_ARRAYS = ("keypoints", "scales", "angles", "descriptors", "corresponding", "states")


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrespondingView(CachedView):
    """Features of one image of a pair, with the position of each keypoint in the other image."""

    corresponding: np.ndarray  # (N, 2) float32 pixels in the other image; NaN where not visible
    states: np.ndarray  # (N,) int8 SEEN_STATE, HIDDEN_STATE or UNKNOWN_STATE
    shows: frozenset[str] = frozenset()  # pairs without anything in common are unrelated

    def select(self, index: np.ndarray) -> CorrespondingView:
        """The same view with only some of its points."""
        chosen = super().select(index)
        return replace(chosen, corresponding=self.corresponding[index], states=self.states[index])

    @property
    def seen(self) -> np.ndarray:
        """(N,) bool: keypoints that are visible in the other image."""
        return self.states == SEEN_STATE

    @property
    def known(self) -> np.ndarray:
        """(N,) bool: keypoints of which it is known whether they are visible in the other image."""
        return self.states != UNKNOWN_STATE

    def alone(self) -> CorrespondingView:
        """The view as part of an unrelated pair: nothing of it is visible in the other image."""
        corresponding, states = (
            np.full_like(self.corresponding, np.nan),
            np.full_like(self.states, HIDDEN_STATE),
        )
        return replace(self, corresponding=corresponding, states=states)


CorrespondingPair = tuple[CorrespondingView, CorrespondingView]


class PairCache:
    """A folder of described pairs, made in order and each only once; several processes may make or read it.

    Args:
        root: where the folder is.
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
        made_of = "|".join((photos_digest(photos), str(rendered), str(real)))
        made_of = hashlib.sha256(made_of.encode()).hexdigest()[:8]
        note = front_end_note(recipe)
        shape = fingerprint(replace(recipe.sources, pairs=0, share=0.0))
        self.folder = root / f"image-pairs-{shape}-{recipe.seed}{note}-{made_of}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, number: int) -> Path:
        """Where a pair is kept."""
        return self.folder / f"{number:06d}.npz"

    def ready(self) -> list[int]:
        """Pairs made so far."""
        return sorted(int(p.stem) for p in self.folder.glob("??????.npz"))

    def album(self, photos: Sequence[Path]) -> PhotoSet:
        """The photos as `make` wants them."""
        return PhotoSet(photos, colour=True)

    def make(self, photos: PhotoSet, numbers: Sequence[int]) -> Iterator[int]:
        """Make the pairs that are missing; yields each number as it is done.

        Raises:
            UsageError: not one photo can be read, or there are no views where the recipe wants some.
            OSError: the disk is full.
        """
        sources, shares = self.recipe.sources, self.recipe.sources.shares()
        missing = [number for number in numbers if not self.path(number).exists()]
        if missing:
            mixture = build_mixture(photos, shares, rendered=self.rendered, real=self.real)
        for number in missing:
            rng = np.random.default_rng([self.recipe.seed, 5, number])
            self._write(number, described(mixture, self.recipe, (sources.width, sources.height), rng))
            yield number

    def _write(self, number: int, pair: CorrespondingPair) -> None:
        columns = {f"{name}{side}": getattr(view, name) for side, view in enumerate(pair) for name in _ARRAYS}
        temporary = self.folder / f".{number:06d}.{os.getpid()}.npz"
        try:
            np.savez(temporary, shows=np.array(sorted(pair[0].shows), dtype=np.str_), **columns)
            temporary.replace(self.path(number))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def read(self, number: int) -> CorrespondingPair:
        """A pair.

        Raises:
            IntegrityError: the file is damaged.
        """
        path, sources = self.path(number), self.recipe.sources
        try:
            with np.load(path, allow_pickle=False) as stored:
                shows = frozenset(stored["shows"].tolist())
                view0, view1 = (
                    CorrespondingView(
                        **{name: stored[f"{name}{side}"] for name in _ARRAYS},
                        labels=np.zeros((0, 0), np.uint8),
                        homographies=np.zeros((0, 3, 3)),
                        size=(sources.width, sources.height),
                        kind=self.recipe.network.kind,
                        shows=shows,
                    )
                    for side in (0, 1)
                )
                return view0, view1
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise IntegrityError(f"{path} is damaged ({error}): delete it, it will be made again") from error

    def sweep(self) -> None:
        """Remove what killed processes left unfinished."""
        for leftover in self.folder.glob(".*.npz"):
            if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER:
                leftover.unlink(missing_ok=True)


def described(
    source: PairSource, recipe: Recipe, size: tuple[int, int], rng: np.random.Generator
) -> CorrespondingPair:
    """The next pair of a source, described by the recipe's front end."""
    pair = source.pair(rng, size)
    views = []
    for pixels, positions in ((pair.pixels0, pair.positions0), (pair.pixels1, pair.positions1)):
        points, scales, angles, descriptors = describe(
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
                shows=frozenset(pair.photos),
            )
        )
    return views[0], views[1]
