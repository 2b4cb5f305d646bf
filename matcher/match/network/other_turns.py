"""Pairs with few matches, matched after other quarter turns of image 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matcher.data.matches import Matches
from matcher.match.turns import ACCEPTED_GAIN, ACCEPTED_PART, OTHER_TURNS, PROBED, PROMISING

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
