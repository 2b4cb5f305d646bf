"""A frame that is slower than others keeps fewer points, so that it still fits its budget."""

import numpy as np
import pytest
from sequence_walls import CAMERA, make_walls, picture

import matcher
from matcher.budget.choice import Choice
from matcher.sequence import extraction, latency
from matcher.sequence.pace import Pace


def usual(budget_ms: float | None) -> Pace:
    """After frames of 436 points that took 20 ms to find and 30 for the rest."""
    pace = Pace(budget_ms)
    for _ in range(20):
        pace.learn(436, 20.0, 30.0)
    return pace


def test_a_frame_as_long_as_others_keeps_its_points():
    assert usual(60.0).points(436, 20.0) == 436
    assert usual(60.0).points(436, 22.0) == 436
    assert usual(None).points(436, 500.0) == 436


@pytest.mark.parametrize("spent", [28.0, 30.0, 35.0])
def test_a_slow_frame_keeps_what_fits_if_the_rest_is_as_slow(spent):
    count = usual(60.0).points(436, spent)
    assert 128 <= count < 436 and count % 32 == 0
    rest = 30.0 * (count + 64) / 500 * spent / 20
    assert spent + rest <= 60.0 or count == 128


def test_the_fewest_points_are_kept_when_the_time_is_over():
    assert usual(60.0).points(436, 300.0) == 128
    assert usual(60.0).points(90, 300.0) == 90


def test_nothing_is_limited_before_times_are_known():
    pace = Pace(60.0)
    pace.learn(436, 2000.0, 30.0)  # the first frame, in which the plan is made
    assert pace.points(436, 300.0) == 436


def test_one_slow_frame_does_not_change_what_is_usual():
    pace = usual(60.0)
    pace.learn(128, 200.0, 400.0)
    assert pace.points(436, 20.0) == 436


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tracker_keeps_its_budget_on_a_machine_that_is_busy_for_a_moment(monkeypatch):
    clock, slow, walls = Clock(), [1.0], make_walls()
    monkeypatch.setattr(latency, "perf_counter", clock)
    plan = Choice(60.0, 400, 0, 320, 45.0, True)
    monkeypatch.setattr(extraction, "choose", lambda *_, **__: plan)
    monkeypatch.setattr(extraction, "limited", lambda pipeline, _: pipeline)
    camera = matcher.Camera(*map(float, CAMERA.split(",")), size=(320, 240))
    tracker = matcher.Tracker("nearest", camera, budget_ms=60.0, max_keypoints=400)
    extract, match = tracker._frames.extract, tracker._match

    def extracting(images):
        clock.now += 0.015 * slow[0]
        return extract(images)

    def matching(features):
        clock.now += 1e-4 * slow[0] * len(features[0])
        return match(features)

    monkeypatch.setattr(tracker._frames, "extract", extracting)
    monkeypatch.setattr(tracker, "_match", matching)
    found = []
    for index in range(14):
        slow[0] = 1.8 if index == 11 else 1.0
        found.append(tracker.push(picture(walls, 0.03 * index)))
    counts = np.array([len(result.keypoints) for result in found])
    assert (np.delete(counts[10:], 1) > 250).all() and counts[11] < 0.75 * counts[10]
    times = [result.milliseconds["total"] for result in found[1:]]
    assert max(times) <= 60.0 < 1.8 * times[9], times
    assert all(
        result.status == "tracked" and result.pose_status in ("ok", "starting") for result in found[1:]
    )
