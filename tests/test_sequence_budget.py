from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

import matcher
from matcher import budget
from matcher import budget as frames
from matcher.budget import Choice, FrameCosts, Pace, limited, matching_cost
from matcher.images import read_image
from matcher.sequence.frames import StageTimes
from matcher.sequence.tracker import for_neighbours, with_layers


@pytest.fixture
def network(small_weights) -> matcher.Pipeline:
    return matcher.load("hybrid", weights=small_weights, max_keypoints=600, device="cpu", precision="float32")


def chosen_for(network, image, budget_ms: float, *, stereo: bool = False) -> Choice:
    return FrameCosts(network, image, stereo=stereo).choose(budget_ms)


@pytest.fixture
def made_up_costs(monkeypatch) -> dict[str, float]:
    """Costs that do not depend on this machine: per extraction at full size, per layer and 1000 points."""
    costs = {"extract": 30.0, "layer": 20.0, "refine": 0.0}

    def extraction(pipeline, image):
        return costs["extract"] * image.scale[0], pipeline.extractor([image])[0]

    monkeypatch.setattr(frames, "_extraction", extraction)
    monkeypatch.setattr(
        frames, "matching_cost", lambda *_: lambda n, layers: max(1, layers) * costs["layer"] * n / 1000
    )
    monkeypatch.setattr(frames, "refining_cost", lambda *_: lambda n: costs["refine"] * n / 1000)
    return costs


def test_refinement_is_paid_once_a_frame_and_left_out_before_points_are_few(network, views, made_up_costs):
    image = read_image(views[0])
    made_up_costs["refine"] = 50.0
    wide = chosen_for(network, image, 400.0, stereo=True)
    assert wide.predicted_ms == pytest.approx(2 * (30 + 3 * 20 * 0.6) + 50 * 0.6 + 6)
    assert wide.without == () and limited(network, wide).config.refine is not None
    narrow = chosen_for(network, image, 75.0)
    assert narrow.fits and narrow.without == ("refinement",) and "without refinement" in str(narrow)
    assert limited(network, narrow).config.refine is None


def test_a_wide_budget_takes_everything(network, views, made_up_costs):
    choice = chosen_for(network, read_image(views[0]), 200.0)
    assert (choice.max_keypoints, choice.layers, choice.resize, choice.fits) == (600, 3, 800, True)
    assert choice.predicted_ms == pytest.approx(30 + 3 * 20 * 0.6 + 6)


def test_a_narrow_one_takes_fewer_points_then_a_smaller_image_and_says_so(network, views, made_up_costs):
    image = read_image(views[0])
    middle = chosen_for(network, image, 70.0)
    assert middle.fits and middle.predicted_ms <= 0.85 * 70
    assert middle.max_keypoints * middle.layers < 600 * 3
    narrow = chosen_for(network, image, 40.0)
    assert narrow.fits and narrow.resize < 800
    least = chosen_for(network, image, 5.0)
    assert not least.fits
    assert (least.max_keypoints, least.layers, least.resize) == (128, 2, 400)
    assert "nothing smaller" in str(least) and "2 layers" in str(least)
    assert "nothing smaller" not in str(middle)


def test_pairs_cost_twice(network, views, made_up_costs):
    one = chosen_for(network, read_image(views[0]), 1000.0)
    two = chosen_for(network, read_image(views[0]), 1000.0, stereo=True)
    assert two.predicted_ms - 6 == pytest.approx(2 * (one.predicted_ms - 6))


def test_the_cost_is_fitted_to_what_was_measured(network, views, monkeypatch):
    """Each run is charged as a machine of known speed would: 2 ms, and 1, 3 and 5 ms a layer's terms."""
    measured = []

    def cost(count: int, layers: int) -> float:
        n = count / 1000
        return 2 + layers * (3 * n + 5 * n * n)

    def charge(run) -> float:
        matcher, batch = run.__defaults__
        assert not matcher.model.config.policy.early_exit and not matcher.model.config.policy.pruning
        measured.append((batch.keypoints.shape[1], len(matcher.model.layers)))
        return cost(*measured[-1])

    monkeypatch.setattr(budget, "milliseconds", charge)
    fitted = matching_cost(network, network.extract(views[0]))
    assert {layers for _, layers in measured} == {2, 3} and len({count for count, _ in measured}) == 3
    for count, layers in ((100, 2), (400, 3), (600, 3), (1200, 3)):
        assert fitted(count, layers) == pytest.approx(cost(count, layers), rel=0.02)


def test_a_run_is_timed_by_the_median_and_the_first_is_not_counted(monkeypatch):
    ticks, runs = iter([0.0, 0.010, 1.0, 1.500, 2.0, 2.012]), []
    monkeypatch.setattr(budget, "perf_counter", lambda: next(ticks))
    assert budget.milliseconds(lambda: runs.append(1)) == pytest.approx(12.0)
    assert len(runs) == 4


def test_a_matcher_with_fewer_layers_is_the_first_part_of_the_whole(network, views):
    cut = with_layers(network.matcher, 2)
    assert len(cut.model.layers) == 2
    whole = network.matcher.model.state_dict()
    for name, value in cut.model.state_dict().items():
        assert torch.equal(value, whole[name])
    features = [network.extract(view) for view in views]
    found = replace(network, matcher=cut).match_features(*features)
    assert found.layers_run <= 2 and len(found) > 10
    assert with_layers(network.matcher, 3) is network.matcher
    nearest = matcher.load("nearest").matcher
    assert with_layers(nearest, 1) is nearest


def test_neighbours_get_half_of_the_layers_and_strangers_all(network):
    near = for_neighbours(network).matcher.model
    assert (len(near.layers), near.config.assignment.max_iterations) == (2, 10)
    tracker = matcher.Tracker(network)
    assert len(tracker.pipeline.matcher.model.layers) == 3
    nearest = matcher.load("nearest")
    assert for_neighbours(nearest).matcher is nearest.matcher


def test_the_choice_is_applied(network, views):
    choice = Choice(30.0, 150, 2, 400, 25.0, True)
    pipeline = limited(network, choice)
    image = pipeline.read(views[0])
    assert max(image.pixels.shape) == 400
    assert len(pipeline.extractor([image])[0]) <= 151  # SIFT may give one place two directions
    assert len(pipeline.matcher.model.layers) == 2


def test_the_pace_is_that_of_the_slow_ones():
    pace = Pace()
    assert pace.value == 1.0
    for measured in (20, 50, 10):
        pace.add(measured, predicted=25)
    assert pace.value == 2.0 and pace.differs_from(1.7) and not pace.differs_from(1.9)
    for _ in range(20):
        pace.add(12, predicted=25)
    assert pace.value == 1.0
    for _ in range(2):
        pace.add(250, predicted=25)  # accidents
    assert pace.value == 1.0
    pace.add(75, predicted=25)
    assert pace.value == 3.0


class BusyMachine:
    """A tracker's clock: a frame takes what its plan says without other programs, times the load."""

    def __init__(self, tracker: matcher.Tracker, extract_ms: float) -> None:
        self.tracker, self.load, self.extract_ms = tracker, 1.0, extract_ms
        self.seen_by_extraction = True  # whether the load is there before the frame is matched

    def milliseconds(self, watch: StageTimes) -> dict[str, float]:
        choice = self.tracker.choice
        if choice is None:
            return {"extract": 0.0, "total": 0.0}
        extract = self.extract_ms * choice.resize / 320
        if "match" not in watch._spent:
            extract *= self.load if self.seen_by_extraction else 1.0
            return {"extract": extract, "total": extract}
        factor = choice.pace  # by which what the choice says is slower than this machine alone
        if self.tracker._frames._planned is not choice:
            spent = self.load * extract
            return {"extract": spent, "total": spent + self.load * (choice.predicted_ms - spent) / factor}
        return {"extract": self.load * extract, "total": self.load * choice.predicted_ms / factor}


@pytest.fixture
def busy(monkeypatch, small_weights, made_up_costs) -> BusyMachine:
    options = dict(weights=small_weights, max_keypoints=300, device="cpu", precision="float32")
    made_up_costs["layer"] = 60.0
    machine = BusyMachine(matcher.Tracker("hybrid", budget_ms=110.0, **options), made_up_costs["extract"])
    monkeypatch.setattr(StageTimes, "milliseconds", lambda watch: machine.milliseconds(watch))
    return machine


def test_a_sequence_with_a_budget_says_what_it_chose_at_the_first_frame(busy, views):
    picture, tracker = cv2.resize(cv2.imread(str(views[0])), (320, 240)), busy.tracker
    assert tracker.push(np.zeros_like(picture)).status == "blank"
    assert tracker.choice is None
    first = tracker.push(picture)
    assert tracker.choice.budget_ms == 110.0 and tracker.choice.fits
    assert len(first.keypoints) <= tracker.choice.max_keypoints
    again = tracker.push(picture)
    assert again.status == "tracked"
    assert np.isin(again.track_ids, first.track_ids).mean() > 0.9


def test_a_frame_is_matched_with_less_where_its_extraction_shows_that_the_machine_is_busy(busy, views):
    picture = cv2.resize(cv2.imread(str(views[0])), (320, 240))
    tracker, rows = busy.tracker, []
    for index in range(14):
        busy.load = 1.6 if index >= 10 else 1.0
        rows.append((tracker.push(picture), tracker.choice))
    (before, planned), (first, cut) = rows[9:11]
    assert before.milliseconds["total"] * 1.6 > 110.0  # as the plan would have it
    assert all(result.milliseconds["total"] <= 110.0 for result, _ in rows[1:])
    assert cut.fits and cut.pace == pytest.approx(1.6) and "1.6 times as slow" in str(cut)
    assert cut.max_keypoints * cut.layers < planned.max_keypoints * planned.layers
    assert cut.resize == planned.resize and len(first.keypoints) <= cut.max_keypoints
    assert first.status == "tracked" and np.isin(first.track_ids, before.track_ids).mean() > 0.8
    busy.load = 1.0
    for _ in range(20):
        last = tracker.push(picture)
    assert tracker.choice == planned and len(last.keypoints) == len(before.keypoints)


def test_a_frame_whose_rest_still_fits_is_matched_as_planned(busy, views, made_up_costs):
    picture = cv2.resize(cv2.imread(str(views[0])), (320, 240))
    for load in (1.0, 1.0, 1.0, 1.2, 1.0):
        busy.load = load
        busy.tracker.push(picture)
        assert busy.tracker.choice is busy.tracker._frames._planned


def test_without_time_for_refinement_the_rest_of_a_frame_goes_without(network, views, made_up_costs):
    made_up_costs["refine"] = 50.0
    costs = FrameCosts(network, read_image(views[0]))
    planned = costs.choose(125.0)
    assert planned.without == () and planned.max_keypoints == 600
    assert costs.rest(planned, 32.0, 31.0) is planned
    cut = costs.rest(planned, 48.0, 45.0)
    assert cut.without == ("refinement",) and cut.fits and cut.pace == pytest.approx(1.5)
    hopeless = costs.rest(planned, 300.0, 290.0)
    assert not hopeless.fits and (hopeless.max_keypoints, hopeless.layers) == (128, 2)


def test_a_sequence_plans_less_while_the_machine_is_busy(busy, views, monkeypatch):
    picture = cv2.resize(cv2.imread(str(views[0])), (320, 240))
    tracker, took, choices = busy.tracker, [], []
    busy.seen_by_extraction = False
    for index in range(60):
        busy.load = 1.6 if 10 <= index < 30 else 1.0
        took.append(tracker.push(picture).milliseconds["total"])
        choices.append(tracker.choice)
        monkeypatch.setattr(frames, "_extraction", None)  # nothing is measured again
    assert choices[9].max_keypoints * choices[9].layers == 300 * 3 and choices[9].pace == 1.0
    assert min(took[10:12]) > 110.0 and max(took[12:]) <= 110.0  # one slow frame may be an accident
    assert choices[20].max_keypoints * choices[20].layers < 300 * 3 and "1.6 times as slow" in str(
        choices[20]
    )
    assert choices[-1] == choices[9] and choices[29].fits
    busy.load = 10.0
    for _ in range(9):
        tracker.push(picture)
    assert not tracker.choice.fits and "nothing smaller" in str(tracker.choice)
    assert tracker.choice.resize < 320
