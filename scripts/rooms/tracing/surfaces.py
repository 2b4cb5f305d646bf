"""Random materials: plain, mottled, tiled, wooden, woven, or photographed."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from tracing.meshes import PLAIN, Material, Texture

KEPT_PHOTOS = 250  # in memory, 1.5 MB each
WALLS = {"plain": 0.52, "mottled": 0.24, "photo": 0.06, "tiles": 0.06, "bricks": 0.05, "stripes": 0.07}
FLOORS = {"wood": 0.4, "tiles": 0.2, "plain": 0.1, "mottled": 0.15, "photo": 0.1, "weave": 0.05}
THINGS = {"plain": 0.38, "mottled": 0.1, "wood": 0.25, "photo": 0.17, "weave": 0.06, "stripes": 0.04}
MIX = {"walls": WALLS, "floors": FLOORS, "things": THINGS}


@dataclass
class Photos:
    """Photos below a folder, drawn evenly over its subfolders, because one of them holds a third of all."""

    root: Path
    _folders: list[list[Path]] = field(default_factory=list)
    _kept: OrderedDict[Path, Texture] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        paths = sorted(self.root.rglob("*.jpg"))
        if not paths:
            raise SystemExit(f"{self.root}: no photos (*.jpg) here")
        parents = sorted({path.parent for path in paths})
        self._folders = [[path for path in paths if path.parent == parent] for parent in parents]
        self._weights = np.sqrt([len(folder) for folder in self._folders])
        self._weights /= self._weights.sum()

    def draw(self, rng: np.random.Generator) -> Texture:
        """A random photo."""
        folder = self._folders[rng.choice(len(self._folders), p=self._weights)]
        path = folder[rng.integers(len(folder))]
        texture = self._kept.get(path)
        if texture is None:
            texture = self._kept[path] = Texture(cv2.imread(str(path), cv2.IMREAD_COLOR)[..., ::-1])
            if len(self._kept) > KEPT_PHOTOS:
                self._kept.popitem(last=False)
        return texture


def colour(rng: np.random.Generator, saturation: float = 0.35) -> tuple[float, float, float]:
    """A linear colour: mostly greys and browns, sometimes a strong one."""
    level = float(np.exp(rng.uniform(math.log(0.05), math.log(0.8))))
    if rng.random() < 0.25:
        saturation = rng.uniform(0.3, 0.85)
    warm = np.array([1.0, 0.82, 0.6]) if rng.random() < 0.5 else np.ones(3)
    value = level * warm ** rng.uniform(0, 1) * (1 - saturation * rng.uniform(0, 1, 3))
    return tuple((value * level / max(value.mean(), 1e-3)).clip(0.02, 0.85).tolist())


def pale(rng: np.random.Generator) -> tuple[float, float, float]:
    """A linear colour of walls: white, cream, grey, or pastel."""
    level = rng.uniform(0.35, 0.85)
    return tuple((level * (1 - rng.uniform(0, 0.3) * rng.uniform(0, 1, 3))).tolist())


def noise(
    size: int, rng: np.random.Generator, first: int = 2, octaves: int = 6, stretch: int = 1, fall: float = 0.6
) -> np.ndarray:
    """(size, size) of standard deviation 1, periodic: sums of smooth noise, each finer and fainter."""
    total = np.zeros((size, size), np.float32)
    for octave in range(octaves):
        columns = min(first * 2**octave, size // 2)
        rows = max(1, min(columns * stretch, size // 2))
        cells = rng.standard_normal((rows, columns)).astype(np.float32)
        tiled = np.tile(cells, (3, 3))
        large = cv2.resize(tiled, (3 * size, 3 * size), interpolation=cv2.INTER_CUBIC)
        total += fall**octave * large[size : 2 * size, size : 2 * size]
    return (total - total.mean()) / max(float(total.std()), 1e-6)


def _encoded(values: np.ndarray) -> Texture:
    """A texture of factors about 1 (H, W) or (H, W, 3), linear; 1 is stored as .5."""
    grey = values if values.ndim == 3 else np.repeat(values[..., None], 3, -1)
    return Texture((255 * (grey * 0.5).clip(0, 1) ** (1 / 2.2)).astype(np.uint8))


def _mottled(rng: np.random.Generator) -> np.ndarray:
    contrast = float(np.exp(rng.uniform(math.log(0.015), math.log(0.22))))
    fall = rng.uniform(0.45, 0.95)
    return 1 + contrast * noise(512, rng, int(rng.integers(1, 9)), int(rng.integers(3, 8)), 1, fall)


def _wood(rng: np.random.Generator) -> np.ndarray:
    """Planks along x with grain, each of its own tone."""
    size, planks = 512, int(rng.integers(2, 9))
    grain = noise(size, rng, 1, 6, int(rng.integers(8, 24)), 0.8)
    rows = np.arange(size) * planks // size
    value = np.empty((size, size), np.float32)
    gap = rng.uniform(0.3, 0.9)
    for plank in range(planks):
        chosen = np.flatnonzero(rows == plank)
        shifted = np.roll(grain[chosen], int(rng.integers(size)), 1)
        value[chosen] = (1 + rng.uniform(0.05, 0.25) * shifted) * rng.uniform(0.7, 1.25)
        end = int(rng.integers(size))
        value[chosen, end : end + 2] *= gap
        value[chosen[:2]] *= gap
    return value


def _cells(rng: np.random.Generator, columns: int, rows: int, shift: float, spread: float) -> np.ndarray:
    """Rectangles with joints between them, every other row shifted by a share of a cell."""
    size = 512
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
    row = np.floor(y * rows)
    place = x * columns + shift * (row % 2)
    column = np.floor(place) % columns
    tones = 1 + spread * rng.standard_normal((rows, columns)).astype(np.float32)
    value = tones[row.astype(int), column.astype(int)] * (1 + 0.05 * noise(size, rng, 4, 6))
    joint = rng.uniform(0.012, 0.04) * max(columns, rows) / 4
    inside = (place % 1 > joint * columns / max(columns, rows)) & (y * rows % 1 > joint)
    return np.where(inside, value, rng.uniform(0.3, 1.5) * (1 + 0.08 * noise(size, rng, 8, 5)))


def _stripes(rng: np.random.Generator) -> np.ndarray:
    count = int(rng.integers(2, 14))
    tones = rng.uniform(0.5, 1.4, count) if rng.random() < 0.5 else np.tile(rng.uniform(0.6, 1.3, 2), count)
    row = tones[np.arange(512) * len(tones) // 512].astype(np.float32)
    return row[None] * (1 + 0.03 * noise(512, rng, 4, 6))


def _weave(rng: np.random.Generator) -> np.ndarray:
    """A chequered or woven cloth of two or three colours."""
    count = 2 * int(rng.integers(2, 12))
    tones = rng.uniform(0.4, 1.5, (count, 1, 3)) ** rng.uniform(0.3, 1)
    band = np.arange(512) * count // 512
    mixed = (tones[band] + tones[band][:, 0][None]) / 2
    return (mixed * (1 + 0.12 * noise(512, rng, 32, 4))[..., None]).astype(np.float32)


def draw_material(
    rng: np.random.Generator, photos: Photos, use: str = "things", kind: str | None = None
) -> Material:
    """A material for `walls`, `floors` or `things`; `kind` fixes what it looks like."""
    kinds, weights = list(MIX[use]), np.array(list(MIX[use].values()))
    kind = kind or str(rng.choice(kinds, p=weights / weights.sum()))
    tint = np.array(pale(rng) if use == "walls" and rng.random() < 0.85 else colour(rng))
    gloss = float(rng.uniform(0.05, 0.6)) if rng.random() < (0.12 if use == "walls" else 0.45) else 0.0
    shine = float(np.exp(rng.uniform(math.log(12), math.log(250))))
    if kind == "plain":
        return Material(PLAIN, tuple(tint), gloss, shine)
    if kind == "photo":
        span = float(np.exp(rng.uniform(math.log(0.35), math.log(2.5))))
        return Material(photos.draw(rng), (0.9, 0.9, 0.9), gloss, shine, mirrored=True, span=span)
    if kind == "wood" and rng.random() < 0.8:
        tint = np.array([0.42, 0.24, 0.12]) ** rng.uniform(0.5, 1.3) * rng.uniform(0.5, 1.4)
    drawn = {
        "mottled": (_mottled, (0.4, 3.0)),
        "wood": (_wood, (0.5, 1.6)),
        "tiles": (lambda r: _cells(r, *[int(r.integers(2, 5))] * 2, 0.0, r.uniform(0, 0.1)), (0.6, 1.8)),
        "bricks": (lambda r: _cells(r, 4, 8, 0.5, r.uniform(0.05, 0.2)), (0.7, 1.3)),
        "stripes": (_stripes, (0.3, 1.5)),
        "weave": (_weave, (0.2, 1.0)),
    }
    make, (small, large) = drawn[kind]
    span = float(np.exp(rng.uniform(math.log(small), math.log(large))))
    return Material(_encoded(make(rng)), tuple((2 * tint.clip(0, 0.45)).tolist()), gloss, shine, span=span)
