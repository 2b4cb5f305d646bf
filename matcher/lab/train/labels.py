"""Training labels: the ground-truth partner of each keypoint of two views, by reprojection.

The error of two keypoints is the mean of their reprojection errors in both views, as in evaluation; it is
infinite where they lie on different surfaces. Keypoints match if they are mutual nearest neighbours with an
error below `match_distance`. A keypoint is unmatched if no keypoint of the other view has an error within
`unmatched_distance`; in between it is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from matcher.data.features import Features
from matcher.data.matches import UNMATCHED
from matcher.lab.pairs.planes import NOTHING
from matcher.lab.train.pair_cache import CorrespondingView
from matcher.lab.train.recipe import PairRecipe
from matcher.lab.train.views import CachedView, plane_of
from matcher.match.minima import mutual_minima
from matcher.match.steering import aligned
from matcher.match.turns import EXIF_TURNS, rotated_descriptors

IGNORED = -2  # a value of partners, beside UNMATCHED: losses ignore the keypoint
QUARTER_TURNS = (1, 8, 3, 6)  # EXIF orientations that are rotations

ViewPair = tuple[CachedView, CachedView]


@dataclass(frozen=True, eq=False)
class PartnerLabels:
    """The partner of each keypoint (UNMATCHED, IGNORED), and its position in the other image."""

    partner0: np.ndarray  # (N,) int64
    partner1: np.ndarray  # (M,)
    corresponding0: np.ndarray  # (N, 2) positions in image 1 of the keypoints of image 0; NaN if not visible
    corresponding1: np.ndarray  # (M, 2)


@dataclass(frozen=True, eq=False)
class PairBatch:
    """B pairs with the same number of keypoints in every image."""

    features0: Features
    features1: Features
    partner0: Tensor  # (B, N) int64
    partner1: Tensor  # (B, M)
    corresponding0: Tensor  # (B, N, 2) float32
    corresponding1: Tensor  # (B, M, 2)
    turns_known: bool = False  # whether features1 are turned to fit by geometry rather than by descriptors

    def __len__(self) -> int:
        """Pairs."""
        return len(self.partner0)


def reproject(points: np.ndarray, source: CachedView, target: CachedView) -> np.ndarray:
    """Project points (N, 2) of one view into another of the same scene; NaN where they are not visible."""
    plane = plane_of(points, source.labels)
    found = np.full((len(points), 2), np.nan)
    for p in np.intersect1d(plane[plane != NOTHING], target.labels):
        on_plane = plane == p
        H = target.homographies[p] @ np.linalg.inv(source.homographies[p])
        projected = np.column_stack([points[on_plane], np.ones(on_plane.sum())]) @ H.T
        # Depths are positive in both views where the plane is visible, so the sign of their ratio decides.
        front = projected[:, 2] > 1e-9
        pixels = np.where(
            front[:, None], projected[:, :2] / np.where(front, projected[:, 2], 1)[:, None], np.nan
        )
        pixels[plane_of(pixels, target.labels) != p] = np.nan
        found[on_plane] = pixels
    return found


def correspondences(view: CachedView, other: CachedView) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, 2) of a view's keypoints in the other view of its pair, NaN where not visible; and (N,)
    bool, whether their visibility is known."""
    if isinstance(view, CorrespondingView):
        return view.corresponding, view.known
    return reproject(view.keypoints, view, other), np.ones(len(view.keypoints), bool)


def label_partners(view0: CachedView, view1: CachedView, recipe: PairRecipe) -> PartnerLabels:
    """Label the partners of two views; among candidates at one position the most similar descriptor wins."""
    if not len(view0.keypoints) or not len(view1.keypoints):
        unmatched = (np.full(len(view.keypoints), UNMATCHED, np.int64) for view in (view0, view1))
        return PartnerLabels(
            *unmatched, *(np.full((len(view.keypoints), 2), np.nan) for view in (view0, view1))
        )
    (corresponding0, known0), (corresponding1, known1) = (
        correspondences(view0, view1),
        correspondences(view1, view0),
    )
    forward = _distances(corresponding0, view1.keypoints)
    backward = _distances(corresponding1, view0.keypoints).T
    # Where one direction is unknown, the other one counts twice.
    error = (np.where(known0[:, None], forward, backward) + np.where(known1, backward, forward)) / 2
    # SIFT has one keypoint per orientation at a position; descriptors decide which of them correspond.
    similarity = view0.unit_descriptors() @ view1.unit_descriptors().T
    cost = np.where(error < recipe.match_distance, error + 2 * (1 - similarity), np.inf)
    rows, columns = mutual_minima(cost)
    partner0 = np.where((error.min(1) > recipe.unmatched_distance) & known0, UNMATCHED, IGNORED)
    partner1 = np.where((error.min(0) > recipe.unmatched_distance) & known1, UNMATCHED, IGNORED)
    partner0[rows], partner1[columns] = columns, rows
    return PartnerLabels(partner0, partner1, corresponding0, corresponding1)


def _distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N, M) distances of points (N, 2) and (M, 2); infinite from points that are NaN."""
    x = points[:, :1] - others[:, 0]
    y = points[:, 1:] - others[:, 1]
    return np.nan_to_num(np.sqrt(x * x + y * y), nan=np.inf)


def as_unrelated(view: CachedView) -> CachedView:
    """The view as part of an unrelated pair: nothing of it is visible in the other image."""
    if isinstance(view, CorrespondingView):
        return view.as_unrelated()
    return replace(view, labels=np.full_like(view.labels, NOTHING))


def to_features(view: CachedView, orientation: int = 1) -> Features:
    """The features of a cached view, upright or rotated by an EXIF orientation."""
    rotations = rotated_descriptors(view.unit_descriptors(), view.kind)
    return Features(
        keypoints=view.keypoints,
        descriptors=rotations[EXIF_TURNS[orientation] % len(rotations)],
        size=np.asarray(view.size, dtype=np.float32),
        scales=view.scales,
        orientations=view.angles,
        view_orientation=np.asarray(orientation),
        kind=view.kind,
    )


def draw_turns(recipe: PairRecipe, rng: np.random.Generator) -> tuple[int, int]:
    """EXIF orientations by which the two images of a pair are rotated."""
    turned = rng.random() < recipe.turned_share
    first = int(rng.integers(4)) if turned else 0
    second = int(rng.integers(4)) if turned and rng.random() < 0.3 else first
    return QUARTER_TURNS[first], QUARTER_TURNS[second]


def collate(pairs: Sequence[ViewPair], recipe: PairRecipe, rng: np.random.Generator) -> PairBatch:
    """A batch of pairs of views with equally many keypoints, with labels; some are rotated by 90° steps."""
    labels = [label_partners(view0, view1, recipe) for view0, view1 in pairs]
    turns = [draw_turns(recipe, rng) for _ in pairs]
    features0, features1 = (
        Features.stack([to_features(pair[side], turn[side]) for pair, turn in zip(pairs, turns, strict=True)])
        for side in (0, 1)
    )
    return PairBatch(
        features0,
        aligned(features0, features1, features0.kind),
        *(_stacked(labels, name, torch.int64) for name in ("partner0", "partner1")),
        *(_stacked(labels, name, torch.float32) for name in ("corresponding0", "corresponding1")),
    )


def _stacked(labels: Sequence[PartnerLabels], name: str, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.stack([getattr(label, name) for label in labels])).to(dtype)
