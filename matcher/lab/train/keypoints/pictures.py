"""Pairs of rendered pictures of one scene with the position of every pixel in the other one.

Each view mixes a photo's colours to a grey of its own: what is bright in one light is dark in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch
from torch import Tensor

from matcher.lab.pairs.photometric import augment, darken
from matcher.lab.pairs.planes import View, build_planes, place_camera, plane_positions, render
from matcher.lab.pairs.textures import PhotoSet
from matcher.lab.train.keypoints.recipe import FrontEndRecipe

_GREY = np.array([0.114, 0.587, 0.299], np.float32)  # of blue, green and red


@dataclass(frozen=True, eq=False)
class PictureBatch:
    """2B pictures; pictures 2b and 2b + 1 show the same scene."""

    pixels: Tensor  # (2B, 1, H, W) float32 in [0, 1]
    positions: Tensor  # (2B, 2, H, W) float32 xy of each pixel in the other picture, or `dense.HIDDEN`
    turns: Tensor  # (2B,) int64 quarter turns, clockwise, that a picture was given

    def __len__(self) -> int:
        """Pairs."""
        return len(self.pixels) // 2

    def to(self, device: torch.device) -> PictureBatch:
        """The same batch on another device."""
        return PictureBatch(self.pixels.to(device), self.positions.to(device), self.turns.to(device))


class PictureSampler:
    """Batches of rendered pairs, the same for the same photos, recipe and step."""

    def __init__(self, photos: PhotoSet, recipe: FrontEndRecipe) -> None:
        """Keep what is needed; `photos` gives colours."""
        self.photos, self.recipe = photos, recipe

    def batch(self, step: int) -> PictureBatch:
        """The batch of a step.

        Raises:
            UsageError: not one photo can be read.
        """
        rng = np.random.default_rng([self.recipe.seed, 3, step])
        pixels, positions, turns = [], [], []
        while len(pixels) < 2 * self.recipe.picture.pairs_per_batch:
            view0, view1 = self._views(rng)
            share = self.recipe.picture.turned_share
            turn = int(rng.integers(1, 4)) if share and rng.random() < share else 0
            view1 = turned(view1, turn)
            there = plane_positions(view0, view1)
            if (there[0] >= 0).mean() >= self.recipe.picture.min_overlap:
                pixels += [view0.pixels, view1.pixels]
                positions += [there, plane_positions(view1, view0)]
                turns += [0, turn]
        grey = torch.from_numpy(np.stack(pixels))[:, None].float() / 255
        return PictureBatch(grey, torch.from_numpy(np.stack(positions)), torch.tensor(turns))

    def batches(self, start: int, stop: int, readers: int = 1) -> Iterator[PictureBatch]:
        """The batches of steps start … stop−1, as many as there are readers (threads) prepared ahead."""
        with ThreadPoolExecutor(readers) as pool:
            ahead = [pool.submit(self.batch, step) for step in range(start, min(stop, start + readers))]
            for step in range(start, stop):
                batch = ahead.pop(0).result()
                if step + readers < stop:
                    ahead.append(pool.submit(self.batch, step + readers))
                yield batch

    def _views(self, rng: np.random.Generator) -> tuple[View, View]:
        recipe = self.recipe
        spatial = rng.random() < recipe.scene.spatial_share
        photos = [
            self._cropped(photo, rng)
            for photo in self.photos.draw(int(rng.integers(3, 6)) if spatial else 1, rng).values()
        ]
        planes = build_planes([photo[..., 0] for photo in photos], recipe.scene, rng)
        views = []
        for _ in range(2):
            camera = place_camera(recipe.scene, len(planes) > 1, rng)
            shown = [
                replace(plane, texture=self._grey(photo, rng))
                for plane, photo in zip(planes, photos, strict=True)
            ]
            view = render(shown, camera, self._backdrop(rng))
            harsh = rng.random() < recipe.picture.harsh_share
            pixels = augment(darken(view.pixels, rng) if harsh else view.pixels, rng)
            views.append(replace(view, pixels=pixels))
        return views[0], views[1]

    def _cropped(self, photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        share = rng.uniform(self.recipe.picture.least_crop, 1)
        sides = [max(1, int(side * share)) for side in photo.shape[:2]]
        top, left = (
            int(rng.integers(side - cut + 1)) for side, cut in zip(photo.shape[:2], sides, strict=True)
        )
        return photo[top : top + sides[0], left : left + sides[1]]

    def _grey(self, photo: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        mixed = rng.random() < self.recipe.picture.mixed_share
        weights = rng.dirichlet((1, 1, 1)).astype(np.float32) if mixed else _GREY
        return cv2.transform(photo, weights[None]).astype(np.uint8)

    def _backdrop(self, rng: np.random.Generator) -> np.ndarray:
        """What is seen beside the scene: one grey, or another photo."""
        size = (self.recipe.scene.width, self.recipe.scene.height)
        if rng.random() < 0.5:
            return np.full(size[::-1], int(rng.integers(256)), np.uint8)
        photo = next(iter(self.photos.draw(1, rng).values()))
        return cv2.resize(self._grey(photo, rng), size, interpolation=cv2.INTER_AREA)


def turned(view: View, turns: int) -> View:
    """A square view after quarter turns clockwise."""
    pixels, labels, homographies = view.pixels, view.labels, view.homographies
    quarter = np.array([[0, -1, len(labels) - 1], [1, 0, 0], [0, 0, 1.0]])
    for _ in range(turns):
        homographies = quarter @ homographies
    return View(*(np.rot90(values, -turns).copy() for values in (pixels, labels)), homographies)
