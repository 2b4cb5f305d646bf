"""A time budget for a pair: more time buys more, what is left out is said."""

from dataclasses import replace

import numpy as np
import pytest

import matcher
from matcher.budget import PACE, plan, updated_pace
from matcher.sequence.tracker import for_neighbours


def known(pipeline: matcher.Pipeline) -> matcher.Pipeline:
    """The pipeline on a machine of known speed."""
    costs = {
        "extract": lambda pixels: 20e-6 * pixels,
        "match": lambda points, layers: max(1, layers) * points / 50,
        "refine": lambda matches: matches / 20,
        "verify": lambda matches: matches / 20,
        "verify quickly": lambda matches: matches / 500,
        "other": lambda: 100.0,
    }
    estimator = replace(pipeline.estimator, pose_samples=2000)
    return replace(pipeline, costs={(pipeline.extractor, pipeline.matcher, estimator): costs})


def planned(pipeline, views, budget_ms):
    return plan(known(pipeline), [pipeline.read(view) for view in views], budget_ms, 10.0)


def test_more_time_buys_more_and_what_is_planned_fits(network, views):
    choices = [planned(network, views, float(budget))[2] for budget in range(40, 400, 40)]
    fitting = [choice for choice in choices if choice.fits]
    assert all(choice.predicted_ms <= choice.budget_ms for choice in fitting)
    work = [choice.max_keypoints**0.5 * choice.layers * choice.resize for choice in fitting]
    assert work[0] < work[-1] and (fitting[-1].max_keypoints, fitting[-1].layers) == (600, 3)
    least = planned(network, views, 12.0)[2]
    near, beyond = (str(replace(least, budget_ms=ms)) for ms in (1.02 * least.predicted_ms, 0.5))
    assert not least.fits and "little to spare" in near and "takes longer" not in near
    assert " of 0.5 ms" in beyond and "this takes longer" in beyond


def test_what_is_chosen_is_what_runs(network, views):
    chosen, images, narrow = planned(network, views, 45.0)
    assert max(images[0].pixels.shape) == narrow.resize <= 800
    assert max(map(len, chosen.extractor(images))) <= narrow.max_keypoints + 1  # SIFT: two directions
    assert len(chosen.matcher.model.layers) == narrow.layers
    assert (chosen.config.refine is None) == ("refinement" in narrow.without)


def test_stages_are_left_out_before_keypoints_are_few_and_images_small(views):
    pipeline = matcher.load("hybrid-learned", max_keypoints=600, further_passes=False, precision="float32")
    wide, _, choice = planned(pipeline, views, 1000.0)
    below = lambda one: one.matcher.model.config.policy.other_turns_below  # noqa: E731
    assert choice.without == () and below(wide) > 0 and wide.config.extractor.sparse_resize == 1024
    narrow, _, choice = planned(pipeline, views, 200.0)
    assert choice.without[0] == "other turns" and below(narrow) == 0 and choice.max_keypoints >= 512
    narrow, _, choice = planned(pipeline, views, 100.0)
    assert not narrow.estimator.adjusted and "thorough verification" in choice.without
    assert wide.estimator.adjusted and "without other turns" in str(choice)


def test_further_passes_follow_while_there_is_time(network, views):
    with_passes = replace(network, passes=matcher.load("hybrid-learned").passes)
    chosen, _, choice = planned(with_passes, views, 1000.0)
    assert choice.passes and "for the first pass" in str(choice)
    assert 0 < chosen.passes.limit.own < chosen.passes.limit.total < 1 and chosen.passes.limit.other == 0.1
    chosen, _, choice = planned(with_passes, views, 60.0)
    assert chosen.passes is None and "further passes" in choice.without


def test_real_costs_are_measured_once_and_the_result_tells_the_choice(network, views):
    result = network.match(*views, budget_ms=5000.0)
    measured = {key for key in network.costs if key != PACE}
    again = network.match(*views, budget_ms=40.0)
    assert measured == {key for key in network.costs if key != PACE} and len(measured) == 1
    assert result.budget.fits and result.budget.max_keypoints == 600
    assert again.budget.max_keypoints * again.budget.layers < 600 * 3
    assert len(again.features0) <= again.budget.max_keypoints + 1
    assert str(result.budget) in result.summary()
    assert result.to_dict()["budget"]["budget_ms"] == 5000.0 and network.match(*views).budget is None


def test_plans_learn_from_how_long_pairs_took(network, views):
    pipeline = known(network)
    first = pipeline.match(*views, budget_ms=1e6)
    assert first.budget.pace == 1 and first.budget.took_ms == pytest.approx(1000 * first.seconds["total"])
    pace = 1.0
    for _ in range(30):
        pace = updated_pace(pace, 400.0, 100.0)
    assert pace == pytest.approx(4.0, rel=0.01) and updated_pace(pace, 10.0, 100.0) > 3.5
    pipeline.costs[PACE] = pace
    slower = pipeline.match(*views, budget_ms=280.0).budget
    assert slower.pace == pace and slower.max_keypoints * slower.layers < 600 * 3


@pytest.mark.parametrize(("preset", "shape"), [("nearest", (1, 1)), ("hybrid-learned", (120, 160))])
def test_costs_are_measured_on_noise_where_an_image_is_dark_or_tiny(preset, shape):
    pipeline = matcher.load(preset, further_passes=False, max_keypoints=300, geometry="essential")
    dark, (height, width) = np.zeros(shape, np.uint8), shape
    camera = matcher.Camera(700, 700, 0.5 * (width - 1), 0.5 * (height - 1))
    result = pipeline.match(dark, dark, camera0=camera, budget_ms=5000.0)
    assert len(result.matches) == 0 and result.budget.fits


def test_neighbours_get_half_of_the_layers_and_strangers_all(network):
    near = for_neighbours(network).matcher.model
    assert (len(near.layers), near.config.assignment.max_iterations) == (2, 10)
    assert len(matcher.Tracker(network).pipeline.matcher.model.layers) == 3
