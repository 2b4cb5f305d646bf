"""Which turns of pairs with few matches are tried, and on which keypoints."""

import numpy as np

from matcher.match.steering import PROBED, try_other_turns
from matcher.types import Matches


def matches(count: int) -> Matches:
    indices = np.stack([np.arange(count)] * 2, axis=1)
    points = indices.astype(np.float32)
    return Matches(indices=indices, points0=points, points1=points, scores=np.ones(count, np.float32))


class Turned:
    """Pairs of which the number of matches at every turn is known, for few keypoints and for all."""

    def __init__(self, every: list[list[int]], probes: list[list[int]]) -> None:
        self.every, self.probes, self.calls = every, probes, []

    def __call__(self, few, turn, strongest):
        self.calls.append((list(few), turn, strongest))
        return [matches((self.every if strongest is None else self.probes)[b][turn]) for b in few]

    def tried(self, enough: list[float], *keypoints: int) -> tuple[list[int], list[int]]:
        found = [matches(row[0]) for row in self.every]
        turns = try_other_turns(found, enough, keypoints or [2048] * len(found), self)
        return turns, [len(each) for each in found]


def test_pairs_with_enough_matches_are_not_matched_again():
    pairs = Turned([[80, 500, 500, 500]], [[9] * 4])
    assert pairs.tried([80.0]) == ([0], [80]) and pairs.calls == []


def test_the_strongest_keypoints_show_which_turns_are_matched_whole():
    pairs = Turned([[3, 200, 400, 400]], [[2, 60, 2, 50]])  # upside down is skipped, and one is enough
    assert pairs.tried([80.0]) == ([1], [200])
    assert pairs.calls == [([0], 2, PROBED), ([0], 1, PROBED), ([0], 1, None)]


def test_unrelated_images_are_never_matched_whole_again():
    pairs = Turned([[1, 99, 99, 99], [0, 99, 99, 99]], [[4, 0, 2, 0], [0, 0, 0, 2]])
    assert pairs.tried([80.0, 80.0]) == ([0, 0], [1, 0])
    assert pairs.calls == [([0, 1], turn, PROBED) for turn in (2, 1, 3)]


def test_a_turn_that_all_keypoints_do_not_confirm_is_not_taken():
    pairs = Turned([[50, 0, 70, 0]], [[10, 0, 40, 0]])  # 1.5 times as many are asked
    assert pairs.tried([80.0]) == ([0], [50]) and ([0], 2, None) in pairs.calls
    pairs = Turned([[3, 0, 0, 39]], [[0, 0, 0, 9]])  # and half of what is enough
    assert pairs.tried([80.0]) == ([0], [3])


def test_pairs_of_a_batch_are_turned_each_by_itself():
    every = [[0, 90, 0, 0], [300, 0, 0, 0], [5, 0, 0, 99], [2, 0, 0, 0], [0, 88, 80, 0]]
    pairs = Turned(every, [[count // 3 for count in row] for row in every])
    assert pairs.tried([80.0] * 5) == ([1, 0, 3, 0, 2], [90, 300, 99, 2, 80])
    assert [call for call in pairs.calls if call[2] is None] == [
        ([4], 2, None),
        ([0], 1, None),
        ([2], 3, None),
    ]
