"""Quarter turns of images whose descriptors are steerable.

Rolled by a quarter of their channels, descriptors are nearly those of the image turned by 90 degrees, since
they were trained so (Bökman et al. 2024, "Steerers: A framework for rotation equivariant keypoint
descriptors"). Functions take NumPy arrays or torch tensors; no torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from matcher.types import Features, Matches, library, to_numpy

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 4  # quarter turns of a full one; a descriptor has a group of channels for each
STEERABLE_KIND = "learned"  # `Features.kind` of the front end with steerable descriptors
# The EXIF orientation with one more clockwise turn than orientation 1 … 8; index 0 is unused.
TURNED_EXIF = (0, 6, 7, 8, 5, 2, 3, 4, 1)

FEW, COMPARED = 384, 1024  # strongest keypoints of each image that are compared, and if these decide nothing
# Least ratio of the score of the best turn to that of the second best at which a few keypoints decide. On
# hard indoor pairs that is so for two thirds, and the decision was always that of all keypoints.
DECISIVE = 1.5
# Score per keypoint of no turn above which no other is tried; unrelated images have 0.002.
CERTAIN = 0.04
MIN_GAIN = 0.2  # by which the score of a turn must exceed that of no turn
# Where the turn that the descriptors suggest gives few matches, others are tried until one does not: first
# upside down, as an image is seen from the other side of a table. All keypoints are matched where so many of
# the strongest have so many matches. A turn is accepted if it gives this part of the matches below which it
# was tried, and this many times the matches of the best one before.
OTHER_TURNS, PROBED, PROMISING = (2, 1, 3), 768, 3
ACCEPTED_PART, ACCEPTED_GAIN = 0.5, 1.5


def turned(descriptors: Any, turns: int) -> Any:
    """Steerable descriptors (…, D) as they would be after clockwise quarter turns of their image."""
    if not turns % TURNS:
        return descriptors
    groups = descriptors.reshape(*descriptors.shape[:-1], TURNS, descriptors.shape[-1] // TURNS)
    return library(descriptors).roll(groups, turns, -2).reshape(descriptors.shape)


def rotated_descriptors(descriptors: Any, kind: str) -> list[Any]:
    """Descriptors (…, D) of an image as it is and, if they are steerable, after each quarter turn."""
    return [turned(descriptors, turn) for turn in range(TURNS if kind == STEERABLE_KIND else 1)]


def best_turn(descriptors0: Any, descriptors1: Any) -> int:
    """Clockwise quarter turns of image 1 after which its steerable descriptors fit those of image 0 best.

    Of descriptors (N, D), (M, D) of norm 1, best first; a few of the strongest decide most pairs.
    """
    points = max(len(descriptors0), len(descriptors1))
    for strongest, certain in ((FEW, CERTAIN), (COMPARED, math.inf)):
        scores = turn_scores(descriptors0, descriptors1, STEERABLE_KIND, strongest=strongest, certain=certain)
        scores[0] += MIN_GAIN
        if points <= strongest or len(scores) == 1 or scores.max() > DECISIVE * np.sort(scores)[-2]:
            break
    return int(scores.argmax())


def turn_scores(
    descriptors0: Any, descriptors1: Any, kind: str, *, strongest: int = COMPARED, certain: float = math.inf
) -> np.ndarray:
    """(T,) the `distinctiveness` of the matches after 0 … T - 1 clockwise quarter turns of image 1.

    T is 1 where descriptors do not turn, or the score per keypoint of no turn is above `certain`.
    """
    own, others = descriptors0[:strongest], descriptors1[:strongest]
    scores: list[float] = []
    for candidate in rotated_descriptors(others, kind):
        scores.append(float(distinctiveness(own @ candidate.T)))
        if scores[0] > certain * len(own):
            break
    return np.array(scores)


def distinctiveness(similarity: Any) -> Any:
    """How distinctive the mutual nearest neighbours of similarities (N, M) are, by `distinct_neighbours`. (A
    sum of similarities is dominated by wrong neighbours where views differ by more than a rotation.)"""
    return 0.0 if 0 in similarity.shape else distinct_neighbours(similarity)[1].sum()


def distinct_neighbours(similarity: Any) -> tuple[Any, Any]:
    """The nearest neighbour (N,) in each row of similarities (N, M), and (1 - r)² if it is mutual, else 0.

    r is the ratio of the distances to the nearest and to the second nearest descriptor, the larger one of
    both images.
    """
    xp = library(similarity)
    best0, best1, partner = xp.amax(similarity, 1), xp.amax(similarity, 0), xp.argmax(similarity, 1)
    mutual = best0 == best1[partner]
    second0 = xp.amax(xp.where(similarity == best0[:, None], -1.0, similarity), 1)
    second1 = xp.amax(xp.where(similarity == best1, -1.0, similarity), 0)[partner]
    second = 1 - xp.maximum(second0, second1)  # the larger ratio is that of the smaller distance
    ratio = (1 - best0) / xp.clip(second, 1e-6, None)
    return partner, mutual * xp.clip(1 - ratio, 0, None) ** 2


# Batches of features, on torch.


def steered(descriptors: Tensor, turns: Tensor) -> Tensor:
    """Descriptors (B, N, D) as they would be after turns[b] (B,) clockwise quarter turns of image b."""
    groups = descriptors.unflatten(-1, (TURNS, -1))
    order = (library(turns).arange(TURNS, device=turns.device) - turns[:, None]) % TURNS
    return groups.gather(2, order[:, None, :, None].expand_as(groups)).flatten(-2)


def turned_by(features: Features, turns: int | Tensor) -> Features:
    """Features of B images after clockwise quarter turns, one number or (B,); `view_orientation` has them."""
    view = features.matched_orientation
    further = library(view).tensor(TURNED_EXIF, device=view.device)
    turns = library(view).zeros_like(view) + turns
    for count in range(1, TURNS):
        view = library(view).where(turns >= count, further[view], view)
    return features.with_valid(descriptors=steered(features.descriptors, turns), view_orientation=view)


def quarter_turns(features0: Features, features1: Features) -> list[int]:
    """For each of B pairs the `best_turn` of their valid points."""
    turns = []
    for pair in range(len(features0.mask)):
        sides = (f.descriptors[pair][f.mask[pair]] for f in (features0, features1))
        # On a CPU NumPy takes less time; on a GPU they stay there.
        turns.append(best_turn(*(to_numpy(d) if d.is_cpu else d.detach().float() for d in sides)))
    return turns


def aligned(features0: Features, features1: Features, kind: str) -> Features:
    """`features1` of B pairs turned by quarters to fit `features0` best, if their descriptors are steerable.

    Points stay where they are; `view_orientation` is the turn.
    """
    if kind != STEERABLE_KIND or 0 in (len(features0), len(features1)):
        return features1
    turns = quarter_turns(features0, features1)
    if not any(turns):
        return features1
    return turned_by(features1, features1.mask.new_tensor(turns, dtype=library(features1.mask).int64))


# Pairs with few matches, matched after other quarter turns of image 1: descriptors alone show the turn of
# hard pairs less clearly than the network's matches do.

# Matches some of the pairs, by number, with image 1 turned further by so many quarter turns; by the strongest
# keypoints only, if so many are given.
Again = Callable[[Sequence[int], int, int | None], list[Matches]]


def try_other_turns(
    found: list[Matches], enough: Sequence[float], keypoints: Sequence[int], again: Again
) -> list[int]:
    """Replace the matches of weak pairs, which have few, by those at a turn that has more; return the turns.

    Where the strongest keypoints have no matches, as in most of these pairs, all have too few. `enough`
    matches of each pair are not few; `keypoints` are of that image of each which has more.
    """
    turns = [0] * len(found)
    for turn in OTHER_TURNS:
        weak = [b for b, matches in enumerate(found) if len(matches) < enough[b]]
        probed = [b for b in weak if keypoints[b] > PROBED]
        probes = zip(probed, again(probed, turn, PROBED) if probed else (), strict=True)
        hopeless = {b for b, matches in probes if len(matches) < PROMISING}
        weak = [b for b in weak if b not in hopeless]
        for b, other in zip(weak, again(weak, turn, None) if weak else (), strict=True):
            if len(other) > max(ACCEPTED_PART * enough[b], ACCEPTED_GAIN * len(found[b])):
                found[b], turns[b] = other, turn
    return turns
