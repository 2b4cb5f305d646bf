"""Views with depth and poses on disk, rendered or of real scenes, as a source of training pairs.

A set is a folder with `cameras.json` and, for each view, an image and a depth map:

    {"width": W, "height": H, "depth_step": s, "views": [
        {"image": "0000.jpg", "depth": "0000_depth.png", "K": 3×3, "E": 4×4, "group": g}, …]}

E is camera from world; depth maps are 16 bit, z of the pixels (s·i, s·j) in thousandths of the unit of the
poses, 0 unknown; the centre of the first pixel is (0, 0). Views of one group overlap. `pairs.json`, where
there is one, lists pairs [i, j, overlap]; otherwise all pairs of a group are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np

from matcher.errors import IntegrityError, UsageError
from matcher.lab.pairs.dense import DensePair
from matcher.lab.pairs.framing import BORDER_SHARE, draw_framing
from matcher.lab.pairs.photometric import LUMA, augment, capture, draw_grey_weights, to_grey
from matcher.lab.pairs.posed import (
    PosedView,
    dense_positions,
    reframe,
    sampled_inverse_depth,
    sparse_positions,
)

KEPT_VIEWS = 300  # in memory, 2 MB each
PROBES = 64  # pixels that are transferred to find a covisible point
MIN_VISIBLE_PROBES = 0.08  # share of the probes
MIN_OVERLAP = {"rendered": 0.1, "real": 0.015}  # visible pixels after framing; real ones are mostly unknown
ATTEMPTS = 200


@dataclass(frozen=True, eq=False)
class StoredSet:
    """One folder of views."""

    folder: Path
    views: list[dict]  # as in cameras.json
    step: int
    pairs: np.ndarray  # (P, 2) int64

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def scene(self) -> str:
        """The scene: sets of one scene are named after it and a number, as `castle_7` or `castle-1`."""
        return re.sub(r"[-_]\d+$", "", self.name)


def views_digest(root: Path | None) -> str:
    """A short hash of what the sets below a folder hold, to check whether pairs were made of these views."""
    if root is None:
        return str(None)
    found = hashlib.sha256()
    for path in sorted(root.rglob("cameras.json")):
        found.update(f"{path.relative_to(root)}\n".encode(errors="surrogateescape"))
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def find_sets(root: Path) -> list[StoredSet]:
    """All sets below a folder, sorted; those still being written as far as they are complete.

    Raises:
        UsageError: there is none.
        IntegrityError: a set's cameras.json is damaged.
    """
    sets = [read_set(path.parent) for path in sorted(root.rglob("cameras.json"))]
    sets = [each for each in sets if len(each.pairs)]
    if not sets:
        raise UsageError(f"{root}: no views here (looked for folders with cameras.json)")
    return sets


def read_set(folder: Path) -> StoredSet:
    """The set in a folder.

    Raises:
        IntegrityError: its cameras.json is damaged.
    """
    try:
        stored = json.loads((folder / "cameras.json").read_text(encoding="utf-8"))
        views, step = stored["views"], int(stored["depth_step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{folder / 'cameras.json'} is damaged ({error})") from error
    return StoredSet(folder, views, step, pairs_of(folder, views))


def pairs_of(folder: Path, views: Sequence[dict]) -> np.ndarray:
    """(P, 2) int64 the pairs of views that `pairs.json` lists; without it all pairs of a group.

    Raises:
        IntegrityError: the views have no groups, or `pairs.json` is damaged or not of these views.
    """
    path = folder / "pairs.json"
    try:
        if not path.exists():
            path = folder / "cameras.json"
            return _pairs_of_groups([view["group"] for view in views])
        rows = json.loads(path.read_text(encoding="utf-8"))
        pairs = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path} is damaged ({error})") from error
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < len(views):
        raise IntegrityError(f"{path} lists views that are not in {folder / 'cameras.json'}")
    return pairs


def _pairs_of_groups(groups: list[int]) -> np.ndarray:
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    pairs = [pair for group in members.values() for pair in combinations(group, 2)]
    return np.array(pairs, np.int64).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class ColourView:
    """A view in colour, as it is kept in memory."""

    colour: np.ndarray  # (H, W, 3) uint8 blue, green, red
    inverse_depth: np.ndarray  # (H, W) float32, as in `PosedView`
    K: np.ndarray
    cam_from_world: np.ndarray

    def grey(self, weights: np.ndarray = LUMA) -> PosedView:
        """The view in grey, by the weights (3,) of blue, green and red."""
        return PosedView(to_grey(self.colour, weights), self.inverse_depth, self.K, self.cam_from_world)


def read_view(stored: StoredSet, number: int) -> ColourView:
    """A view of a set.

    Raises:
        IntegrityError: its image or depth map cannot be read.
    """
    view = stored.views[number]
    colour = cv2.imread(str(stored.folder / view["image"]), cv2.IMREAD_COLOR)
    depth = cv2.imread(str(stored.folder / view["depth"]), cv2.IMREAD_UNCHANGED)
    if colour is None or depth is None:
        raise IntegrityError(f"{stored.folder / view['image']}: the image or its depth map cannot be read")
    z = depth.astype(np.float32) / 1000
    inverse = np.divide(1, z, out=np.zeros_like(z), where=z > 0)
    height, width = colour.shape[:2]
    x = (np.arange(width, dtype=np.float32) / stored.step).clip(None, inverse.shape[1] - 1)
    y = (np.arange(height, dtype=np.float32) / stored.step).clip(None, inverse.shape[0] - 1)
    inverse = sampled_inverse_depth(inverse, *(np.ascontiguousarray(a) for a in np.meshgrid(x, y)))
    K, pose = (np.array(view[key], dtype=np.float64) for key in ("K", "E"))
    return ColourView(colour, inverse, K, pose)


class StoredViews:
    """A source of pairs from all sets below a folder, each set as often as the root of its number of pairs.

    Args:
        root: the folder.
        source: the name of the pairs' source; `real` images are changed less, as they come from a camera.

    Raises:
        UsageError: there are no views.
        IntegrityError: a set is damaged.
    """

    def __init__(self, root: Path, source: str = "rendered") -> None:
        self.source, self.sets = source, find_sets(root)
        weights = np.sqrt([len(each.pairs) for each in self.sets])
        self._weights = weights / weights.sum()
        self._kept: OrderedDict[tuple[int, int], ColourView] = OrderedDict()

    def pair(self, rng: np.random.Generator, size: tuple[int, int]) -> DensePair:
        """Two views, cropped and zoomed around a covisible point; see `dense.PairSource`.

        Raises:
            UsageError: hardly any pair overlaps.
            IntegrityError: an image or its depth map cannot be read.
        """
        for _ in range(ATTEMPTS):
            number = int(rng.choice(len(self.sets), p=self._weights))
            chosen = self.sets[number].pairs[rng.integers(len(self.sets[number].pairs))]
            if rng.random() < 0.5:
                chosen = chosen[::-1]
            view0, view1 = (self._view(number, int(view), rng) for view in chosen)
            framed = framed_pair(view0, view1, size, rng)
            if framed is None:
                continue
            positions0, positions1 = dense_positions(*framed), dense_positions(*framed[::-1])
            if min((p[0] >= 0).mean() for p in (positions0, positions1)) > MIN_OVERLAP.get(self.source, 0.1):
                change = augment if self.source == "real" else capture
                pixels = (change(view.pixels, rng) for view in framed)
                scene = frozenset({self.sets[number].scene})
                return DensePair(*pixels, positions0, positions1, self.source, scene)
        raise UsageError(f"{self.sets[0].folder.parent}: hardly any pair of views overlaps")

    def _view(self, number: int, view: int, rng: np.random.Generator) -> PosedView:
        key = (number, view)
        kept = self._kept.get(key)  # several threads draw pairs, so that it may be gone a moment later
        if kept is None:
            kept = self._kept[key] = read_view(self.sets[number], view)
            if len(self._kept) > KEPT_VIEWS:
                self._kept.popitem(last=False)
        return kept.grey(draw_grey_weights(rng, random_share=0.4, concentration=2))


def framed_pair(
    view0: PosedView, view1: PosedView, size: tuple[int, int], rng: np.random.Generator
) -> tuple[PosedView, PosedView] | None:
    """Both views cropped to `size` around a covisible point; None where they overlap too little."""
    known = np.flatnonzero(view0.inverse_depth > 0)
    if not len(known):
        return None
    probes = np.column_stack(np.divmod(rng.choice(known, PROBES), view0.size[0])[::-1]).astype(np.float64)
    transferred = sparse_positions(view0, view1, probes)
    visible = np.flatnonzero(transferred[:, 0] >= 0)
    if len(visible) < MIN_VISIBLE_PROBES * PROBES:
        return None
    chosen = rng.choice(visible)
    # From the whole image to a window of it, and a change of scale of up to 2.5 between the two.
    fitting = max(wanted / side for wanted, side in zip(size, view0.size, strict=True))
    zoom0 = fitting * float(np.exp(rng.uniform(np.log(1.0), np.log(1.8))))
    zoom1 = zoom0 * float(np.exp(rng.normal(0, 0.35)).clip(0.4, 2.5))
    zoom1 = float(np.clip(zoom1, (0.6 if rng.random() < BORDER_SHARE else 1.0) * fitting, 2.5 * fitting))
    return (
        reframe(view0, draw_framing(view0, size, probes[chosen], zoom0, rng)),
        reframe(view1, draw_framing(view1, size, transferred[chosen], zoom1, rng)),
    )
