"""Pairs with few matches, matched after other quarter turns of image 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matcher.data.matches import Matches
from matcher.match.turns import ACCEPTED_GAIN, ACCEPTED_PART, LIKELY_GAIN, OTHER_TURNS, PROBED

# Matches some of the pairs, by number, with image 1 turned further by so many quarter turns; by the strongest
# keypoints only, if so many are given.
Again = Callable[[Sequence[int], int, int | None], list[Matches]]


def try_other_turns(found: list[Matches], enough: Sequence[float], keypoints: int, again: Again) -> list[int]:
    """Replace the matches of pairs that have few by those at a turn that has more, and return the turns.

    Descriptors alone show the turn of hard pairs less clearly than the network's matches do. The strongest
    keypoints show which turn is worth matching all: most pairs with few matches show nothing.

    Args:
        found: the matches of B pairs.
        enough: how many of each are not few.
        keypoints: the most that an image has.
        again: as `Again`.
    """
    turns = [0] * len(found)
    few = [b for b, matches in enumerate(found) if len(matches) < enough[b]]
    if not few:
        return turns
    probed = PROBED if keypoints > PROBED else None
    probes = {turn: again(few, turn, probed) for turn in OTHER_TURNS}
    probes[0] = [found[b] for b in few] if probed is None else again(few, 0, probed)
    for turn in OTHER_TURNS:
        rows = [row for row in range(len(few)) if _likely(probes, row) == turn]
        if not rows:
            continue
        chosen = [few[row] for row in rows]
        others = [probes[turn][row] for row in rows] if probed is None else again(chosen, turn, None)
        for b, other in zip(chosen, others, strict=True):
            if len(other) > max(ACCEPTED_PART * enough[b], ACCEPTED_GAIN * len(found[b])):
                found[b], turns[b] = other, turn
    return turns


def _likely(probes: dict[int, list[Matches]], row: int) -> int | None:
    """The turn at which a pair has most matches, if these are not few beside those without one."""
    counts = {turn: len(matches[row]) for turn, matches in probes.items()}
    turn = max(OTHER_TURNS, key=counts.__getitem__)
    return turn if counts[turn] > LIKELY_GAIN * counts[0] else None
