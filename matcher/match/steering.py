"""Quarter turns of the steerable descriptors of a batch of features, on torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from matcher.geometry import UPRIGHT
from matcher.types import Features, Matches

# --- turns: Quarter turns of steerable descriptors of one pair; NumPy.

TURNS = 4  # quarter turns of a full one; a descriptor has a group of values for each
STEERABLE = "learned"  # the front end with steerable descriptors
# Clockwise quarter turns of the EXIF orientations without reflection.
EXIF_TURNS = {1: 0, 6: 1, 3: 2, 8: 3}
# The EXIF orientation with one more clockwise turn than orientation 1 … 8; index 0 is unused.
TURNED_EXIF = (0, 6, 7, 8, 5, 2, 3, 4, 1)

COMPARED = 1024  # keypoints of each image, the strongest when they come from a front end
FEW = 384  # keypoints that are compared first
# Least ratio of the evidence of the best turn to that of the second best at which a few keypoints decide. On
# hard indoor pairs that is so for two thirds, and the decision was always that of all keypoints.
DECISIVE = 1.5
MIN_DISTANCE = 1e-6  # cosine distance below which descriptors count as equal
# Evidence per keypoint for no turn above which no other is tried; unrelated images have 0.002.
CERTAIN = 0.04
MIN_GAIN = 0.2  # margin of evidence by which a turn must exceed no turn
# Where the turn that the descriptors suggest gives few matches, others are tried until one does not: first
# upside down, as an image is seen from the other side of a table. All keypoints are matched where so many of
# the strongest have so many matches. A turn is accepted if it gives this part of the matches below which it
# was tried, and this many times the matches of the best one before.
OTHER_TURNS, PROBED, PROMISING = (2, 1, 3), 768, 3
ACCEPTED_PART, ACCEPTED_GAIN = 0.5, 1.5


def turned(descriptors: np.ndarray, turns: int) -> np.ndarray:
    """Steerable descriptors (N, D) as they would be after clockwise quarter turns of their image."""
    groups = descriptors.reshape(len(descriptors), TURNS, descriptors.shape[1] // TURNS)
    return np.roll(groups, turns, axis=1).reshape(descriptors.shape)


def rotated_descriptors(descriptors: np.ndarray, kind: str) -> list[np.ndarray]:
    """Descriptors (N, D) of an image as it is and, if they are steerable, after each quarter turn."""
    turns = TURNS if kind == STEERABLE else 1
    return [turned(descriptors, turn) if turn else descriptors for turn in range(turns)]


def best_turn(descriptors0: np.ndarray, descriptors1: np.ndarray) -> int:
    """Clockwise quarter turns of image 1 after which its steerable descriptors fit those of image 0 best.

    A few of the strongest keypoints decide most pairs; for the others more keypoints are compared.
    """
    few = evidence_of_turns(descriptors0, descriptors1, STEERABLE, strongest=FEW, certain=CERTAIN)
    few[0] += MIN_GAIN
    if len(few) < 2 or max(len(descriptors0), len(descriptors1)) <= FEW:
        return int(few.argmax())
    second, best = np.sort(few)[-2:]
    if best > DECISIVE * second:
        return int(few.argmax())
    many = evidence_of_turns(descriptors0, descriptors1, STEERABLE)
    many[0] += MIN_GAIN
    return int(many.argmax())


def evidence_of_turns(
    descriptors0: np.ndarray,
    descriptors1: np.ndarray,
    kind: str,
    *,
    strongest: int = COMPARED,
    certain: float = math.inf,
) -> np.ndarray:
    """(T,) evidence that image 1 matches image 0 after 0 … T - 1 clockwise quarter turns.

    It measures how distinctive mutual nearest neighbours are: the sum of (1 - r)², with r the ratio of the
    distances to the nearest and to the second nearest descriptor, the larger one of both images. (A sum of
    similarities is dominated by wrong neighbours where views differ by more than a rotation.)

    Args:
        descriptors0, descriptors1: (N, D), (M, D) of norm 1, best first.
        kind: their front end; T is 1 if its descriptors are not steerable.
        strongest: how many keypoints of each image are compared.
        certain: evidence per keypoint for no turn above which no other turn is tried (T is 1).
    """
    own, others = (each[:strongest].astype(np.float32, copy=False) for each in (descriptors0, descriptors1))
    evidence: list[float] = []
    for candidate in rotated_descriptors(others, kind):
        evidence.append(_evidence_turns(own @ candidate.T))
        if evidence[0] > certain * len(own):
            break
    return np.array(evidence)


def _evidence_turns(similarity: np.ndarray) -> float:
    """Of similarities (N, M)."""
    if not similarity.size:
        return 0.0
    best0, best1 = similarity.max(axis=1, keepdims=True), similarity.max(axis=0, keepdims=True)
    top0, top1 = similarity == best0, similarity == best1
    row, column = np.nonzero(top0 & top1)
    second0 = np.where(top0, np.float32(-1), similarity).max(axis=1)[row]
    second1 = np.where(top1, np.float32(-1), similarity).max(axis=0)[column]
    second_distance = 1 - np.maximum(second0, second1)  # the larger ratio is that of the smaller distance
    ratio = (1 - best0[row, 0]) / np.maximum(second_distance, MIN_DISTANCE)
    return float((np.maximum(1 - ratio, 0) ** 2).sum())


# --- tables: Constant tables, kept on every device that uses them: to bring one there each time would hold
# a GPU up.


@cache
def upright_maps(device: torch.device) -> Tensor:
    """(9, 2, 2) float32: stored directions to upright ones, by EXIF orientation."""
    with torch.inference_mode(False):
        return torch.as_tensor(UPRIGHT, dtype=torch.float32).to(device)


@cache
def turned_orientations(device: torch.device) -> Tensor:
    """(9,) int64: the EXIF orientation with one more clockwise quarter turn."""
    with torch.inference_mode(False):
        return torch.tensor(TURNED_EXIF).to(device)


# --- steering: Quarter turns of the steerable descriptors of a batch; torch. `matcher.match.steering` says
# what they are.


def steered(descriptors: Tensor, turns: Tensor) -> Tensor:
    """Descriptors (B, N, D) as they would be after turns[b] (B,) clockwise quarter turns of image b."""
    groups = descriptors.unflatten(-1, (TURNS, -1))
    order = (torch.arange(TURNS, device=turns.device) - turns[:, None]) % TURNS
    return groups.gather(2, order[:, None, :, None].expand_as(groups)).flatten(-2)


def aligned(features0: Features, features1: Features, kind: str) -> Features:
    """`features1` of B pairs turned by quarters to fit `features0` best.

    Points stay where they are; `view_orientation` is the turn.

    Args:
        features0, features1: batches.
        kind: the front end that made them; features whose descriptors are not steerable are returned as
            they are.
    """
    if kind != STEERABLE or 0 in (len(features0), len(features1)):
        return features1
    turns = quarter_turns(features0, features1)
    if not bool(turns.any()):
        return features1
    return _turned(features1, turns)


def turned_by(features: Features, turns: int | Tensor) -> Features:
    """Features of B images after clockwise quarter turns, one number or (B,); `view_orientation` has them."""
    if isinstance(turns, int):
        turns = torch.full((len(features.mask),), turns, device=features.mask.device)
    return _turned(features, turns)


def _turned(features: Features, turns: Tensor) -> Features:
    view, further = features.matched_orientation, turned_orientations(turns.device)
    for count in range(1, TURNS):
        view = torch.where(turns >= count, further[view], view)
    return features.with_valid(descriptors=steered(features.descriptors, turns), view_orientation=view)


@torch.no_grad()
def quarter_turns(features0: Features, features1: Features) -> Tensor:
    """(B,) clockwise quarter turns of image 1 after which its descriptors fit those of image 0 best.

    A few of the strongest keypoints decide most pairs; for the others more keypoints are compared.
    """
    few = turn_evidence(features0, features1, strongest=FEW, certain=CERTAIN)
    sure = few[0] > CERTAIN * features0.mask[:, :FEW].sum(1)  # whatever the other pairs of the batch are
    few[0] += MIN_GAIN
    turns = few.argmax(0).masked_fill(sure, 0)
    if len(few) < 2 or max(len(features0), len(features1)) <= FEW:
        return turns
    best, second = few.topk(2, dim=0).values
    undecided = (~sure & (best <= DECISIVE * second)).nonzero()[:, 0]
    if len(undecided):
        many = turn_evidence(*(f.entries(undecided) for f in (features0, features1)))
        many[0] += MIN_GAIN
        turns[undecided] = many.argmax(0)
    return turns


@torch.no_grad()
def turn_evidence(
    features0: Features, features1: Features, *, strongest: int = COMPARED, certain: float = math.inf
) -> Tensor:
    """(T, B) evidence that image 1 matches image 0 after 0 … T - 1 clockwise quarter turns.

    It measures how distinctive mutual nearest neighbours are: the sum of (1 - r)², with r the ratio of the
    distances to the nearest and to the second nearest descriptor, the larger one of both images. (A sum of
    similarities is dominated by wrong neighbours where views differ by more than a rotation.)

    Args:
        features0, features1: batches of B images, of steerable descriptors whatever their `kind` says.
        strongest: how many keypoints of each image are compared.
        certain: evidence per keypoint for no turn above which no other turn is tried (T is 1).
    """
    own, others = (f.descriptors[:, :strongest].float() for f in (features0, features1))
    valid0, valid1 = (f.mask[:, :strongest] for f in (features0, features1))
    padding = ~(valid0[:, :, None] & valid1[:, None])
    evidence = []
    with torch.autocast(own.device.type, enabled=False):
        for turn in torch.arange(TURNS, device=others.device):
            evidence.append(_evidence_steering(own @ steered(others, turn.expand(len(own))).mT, padding))
            if bool((evidence[0] > certain * valid0.sum(1)).all()):
                break
    return torch.stack(evidence)


def _evidence_steering(similarity: Tensor, padding: Tensor) -> Tensor:
    """(B,) evidence from similarities (B, N, M); those of padding do not count."""
    similarity = similarity.masked_fill(padding, -1.0)
    best0, best1 = similarity.amax(2, keepdim=True), similarity.amax(1, keepdim=True)
    # Reductions over values alone are several times as fast as those that return indices too.
    top0, top1 = similarity == best0, similarity == best1
    pair, row, column = (top0 & top1 & ~padding).nonzero(as_tuple=True)
    second0 = similarity.masked_fill(top0, -1.0).amax(2)[pair, row]
    second1 = similarity.masked_fill(top1, -1.0).amax(1)[pair, column]
    second_distance = 1 - torch.maximum(second0, second1)  # the larger ratio is that of the smaller distance
    ratio = (1 - best0[pair, row, 0]) / second_distance.clamp(min=MIN_DISTANCE)
    evidence = similarity.new_zeros(len(similarity))
    return evidence.index_add_(0, pair, (1 - ratio).clamp(min=0) ** 2)


# --- rules: Rules of early exit, as numbers: shared by every engine that runs the network.

NEGLIGIBLE = 0.5  # matches: a pair of which fewer than this are still open need not go on


def confidence_threshold(layer: int, depth: int) -> float:
    """λ of layer 0 … depth−1: 0.8 + 0.1·exp(−4ℓ/L), eq. 11: early layers need more confidence."""
    return 0.8 + 0.1 * math.exp(-4.0 * layer / depth)


# --- other_turns: Pairs with few matches, matched after other quarter turns of image 1.

# Matches some of the pairs, by number, with image 1 turned further by so many quarter turns; by the strongest
# keypoints only, if so many are given.
Again = Callable[[Sequence[int], int, int | None], list[Matches]]


def try_other_turns(
    found: list[Matches], enough: Sequence[float], keypoints: Sequence[int], again: Again
) -> list[int]:
    """Replace the matches of pairs that have few by those at a turn that has more, and return the turns.

    Descriptors alone show the turn of hard pairs less clearly than the network's matches do. Where the
    strongest keypoints have no matches, as in most of these pairs, all have too few.

    Args:
        found: the matches of B pairs.
        enough: how many of each are not few.
        keypoints: of that image of each which has more.
        again: as `Again`.
    """
    turns = [0] * len(found)
    for turn in OTHER_TURNS:
        few = [b for b, matches in enumerate(found) if len(matches) < enough[b]]
        many = [b for b in few if keypoints[b] > PROBED]
        probes = zip(many, again(many, turn, PROBED) if many else (), strict=True)
        hopeless = {b for b, matches in probes if len(matches) < PROMISING}
        few = [b for b in few if b not in hopeless]
        for b, other in zip(few, again(few, turn, None) if few else (), strict=True):
            if len(other) > max(ACCEPTED_PART * enough[b], ACCEPTED_GAIN * len(found[b])):
                found[b], turns[b] = other, turn
    return turns
