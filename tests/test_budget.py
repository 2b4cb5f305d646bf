"""A time budget for a pair: what fits is chosen, measured once, and said where nothing fits."""

from dataclasses import replace
from time import sleep

import numpy as np
import pytest

import matcher
from matcher import budget as costs
from matcher import budget as pairs
from matcher.budget import Choice, PairCosts, measured_costs, plan
from matcher.passes import further
from matcher.passes.further import Change, Evidence
from matcher.pipeline import FURTHER_PASSES


@pytest.fixture
def network(small_weights) -> matcher.Pipeline:
    return matcher.load("hybrid", weights=small_weights, max_keypoints=600, device="cpu", precision="float32")


@pytest.fixture
def measured(monkeypatch) -> list[int]:
    """Costs of a machine of known speed; the number of measurements."""
    calls = []

    def measure(pipeline, images) -> PairCosts:
        calls.append(1)
        return PairCosts(
            extract=lambda pixels: 20e-6 * pixels,
            match=lambda points, layers: max(1, layers) * points / 50,
            refine=lambda matches: matches / 20,
            verify=lambda matches: matches / 100,
            verify_pass=lambda matches: matches / 60,
            other=lambda pixels: 100.0,
        )

    monkeypatch.setattr(costs, "_measure", measure)
    return calls


def planned(pipeline, views, budget_ms, reading_ms=10.0):
    images = [pipeline.read(view) for view in views]
    return plan(pipeline, images, budget_ms, reading_ms)


def test_a_wide_budget_takes_everything(network, views, measured):
    chosen, images, choice = planned(network, views, 1000.0)
    assert (choice.max_keypoints, choice.layers, choice.fits) == (600, 3, True)
    assert choice.predicted_ms == pytest.approx(10 + 2 * 9.6 + 3 * 12 + 600 / 20 + 6 + 6)
    assert choice.without == () and chosen.config.refine is not None
    assert images[0].pixels.shape[:2] == (600, 800) and len(chosen.matcher.model.layers) == 3


def test_a_narrow_one_takes_fewer_points_then_smaller_images_and_says_so(network, views, measured):
    _, images, middle = planned(network, views, 70.0)
    assert middle.fits and middle.predicted_ms <= 0.85 * 70 and middle.max_keypoints * middle.layers < 1800
    assert images[0].pixels.shape[:2] == (600, 800)
    chosen, images, narrow = planned(network, views, 45.0)
    assert narrow.fits and max(images[0].pixels.shape) == narrow.resize < 800
    features = chosen.extractor(images)
    assert max(map(len, features)) <= narrow.max_keypoints + 1  # SIFT may give one place two directions
    _, _, least = planned(network, views, 12.0)
    assert not least.fits and "nothing smaller" in str(least)


def test_further_passes_follow_while_there_is_time(network, views, measured):
    with_passes = replace(network, passes=matcher.load("hybrid-learned").passes)
    chosen, _, choice = planned(with_passes, views, 1000.0)
    assert choice.passes and choice.without == () and "for the first pass" in str(choice)
    searched = 20e-6 * 2 * pairs._ASPECT * 1024**2
    limit = chosen.passes.limit
    assert limit.total == pytest.approx((1000 - 600 / 20 - 600 / 100) / 1000)
    assert limit.own == pytest.approx((searched + 3 * 600 / 50 + 600 / 60) / 1000) and limit.other == 0.1
    assert chosen.passes.own.extractor is chosen.extractor
    chosen, _, choice = planned(with_passes, views, 90.0)
    assert chosen.passes is None and choice.without == ("refinement", "further passes")


def test_small_budgets_verify_less_thoroughly_and_say_so(network, views, measured, monkeypatch):
    measure, quick = costs._measure, replace(network.estimator, adjusted=False)

    def slow(*arguments) -> PairCosts:
        one = ((quick, lambda matches: 2.0),)
        return replace(measure(*arguments), verify=lambda matches: 25.0, quicker=one)

    monkeypatch.setattr(costs, "_measure", slow)
    narrow, _, choice = planned(network, views, 100.0)
    assert narrow.estimator is quick and choice.without[0] == "thorough verification" and choice.fits
    assert "without thorough verification" in str(choice)
    wide, _, choice = planned(network, views, 1000.0)
    assert wide.estimator.adjusted and choice.without == ()
    kinds = {kind: matcher.load("nearest", geometry=kind).estimator for kind in ("essential", "homography")}
    assert [each.pose_samples for each in costs._quicker(kinds["essential"])] == [500, 250]
    assert costs._quicker(kinds["homography"]) == [] == costs._quicker(lambda *_, **__: None)
    assert costs._quicker(matcher.load("nearest").estimator) == [replace(quick, pose_samples=5000)]


@pytest.fixture
def unsure(monkeypatch) -> matcher.Pipeline:
    """A pipeline to which no pair is confident, so that it needs all passes, of which one is SIFT's."""
    monkeypatch.setattr(further, "_LOW_INLIERS", 2.0)
    monkeypatch.setattr(further, "best_change", lambda *_, **__: Change("negative", negative=True))
    monkeypatch.setattr(Evidence, "is_confident", lambda *_: False)
    return matcher.load("hybrid-learned", max_keypoints=300, device="cpu")


def passes_within(pipeline, views, **limit) -> tuple[list[str], tuple[str, ...]]:
    """The names of the passes, and what was left out."""
    own_plan = pairs.plan

    def limited(*arguments):
        chosen, images, choice = own_plan(*arguments)
        return replace(chosen, passes=chosen.passes.within(**limit)), images, choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "plan", limited)
        result = pipeline.match(*views, budget_ms=1e6)
    return [one.name for one in result.passes], result.budget.without


def test_each_pass_is_left_out_that_does_not_fit(views, unsure, measured):
    every, without = passes_within(unsure, views, total=600, own=0.1, other=0.1, region=0.1)
    assert len(every) == 9 and "gradients" in every and without == ()
    some, without = passes_within(unsure, views, total=600, own=0.1, other=601, region=0.1)
    assert set(every) - set(some) == {"hybrid"} and without == ("some further passes",)
    none, without = passes_within(unsure, views, total=1e-6, own=0.1, other=0.1, region=0.1)
    assert none == [] and without == ("further passes",)


def test_other_turns_are_tried_where_they_fit(views, measured):
    pipeline = matcher.load("hybrid-learned", max_keypoints=600, second_pass=False, precision="float32")
    below = lambda one: one.matcher.model.config.policy.other_turns_below  # noqa: E731
    wide, _, choice = planned(pipeline, views, 1000.0)
    assert choice.without == () and below(wide) == below(pipeline) > 0
    narrow, _, choice = planned(pipeline, views, 200.0)
    assert choice.without == ("other turns",) and below(narrow) == 0 and choice.max_keypoints >= 512


def test_images_of_few_keypoints_are_enlarged_where_that_fits(views, measured):
    pipeline = matcher.load("hybrid-learned", max_keypoints=600, second_pass=False, precision="float32")
    enlarging = lambda one: one.config.extractor.sparse_resize  # noqa: E731
    first, _, without = planned(pipeline, views, 530.0)
    second, _, choice = planned(pipeline, views, 1000.0)
    assert (enlarging(first), enlarging(second)) == (None, 1024)
    assert choice.predicted_ms - without.predicted_ms == pytest.approx(20e-6 * 2 * 1024 * 768, rel=0.01)


def test_poses_fit_a_budget_too(small_weights, views):
    pipeline = matcher.load("hybrid", weights=small_weights, max_keypoints=300, geometry="essential")
    result = pipeline.match(*views, camera0=matcher.Camera(700, 700, 399.5, 299.5), budget_ms=5000.0)
    assert result.geometry.kind == "essential" and result.budget.fits
    chosen, _, _ = planned(pipeline, views, 5000.0)
    assert chosen.estimator.pose_samples < pipeline.estimator.pose_samples
    quick, _, choice = planned(pipeline, views, 20.0)
    assert quick.estimator.pose_samples < chosen.estimator.pose_samples
    assert "thorough verification" in choice.without
    assert sum(isinstance(each, PairCosts) for each in pipeline.costs.values()) == 1


def test_refinement_is_left_out_before_keypoints_are_few(network, views, measured):
    chosen, _, choice = planned(network, views, 90.0)
    assert choice.fits and choice.without == ("refinement",) and chosen.config.refine is None
    assert choice.max_keypoints >= 512 and "without refinement" in str(choice)


def test_costs_are_measured_once_and_the_result_tells_the_choice(network, views, measured):
    result = network.match(*views, budget_ms=60.0)
    again = network.match(*views, budget_ms=1000.0)
    assert len(measured) == 1
    assert result.budget.max_keypoints < again.budget.max_keypoints == 600
    assert len(result.features0) <= result.budget.max_keypoints + 1
    assert str(result.budget) in result.summary()
    assert result.to_dict()["budget"]["budget_ms"] == 60.0 and network.match(*views).budget is None
    other = matcher.load("nearest", max_keypoints=300)
    other.match(*views, budget_ms=60.0)
    assert len(measured) == 2


def test_real_costs_grow_with_the_work(views):
    pipeline = matcher.load("nearest", max_keypoints=300, resize=320)
    images = [pipeline.read(view) for view in views]
    costs = measured_costs(pipeline, images)
    assert 0 < costs.extract(20_000) <= costs.extract(200_000)
    assert 0 < costs.match(100, 0) <= costs.match(2000, 0)
    assert 0 < costs.verify(100) <= costs.verify(2000) and costs.other(1e6) == 0


@pytest.mark.parametrize("preset", ["nearest", "hybrid-learned"])
@pytest.mark.parametrize("shape", [(600, 800), (300, 400, 3), (20, 31), (1, 1)])
def test_costs_are_measured_on_noise_where_the_first_image_is_dark_or_tiny(preset, shape, views):
    options = dict(second_pass=None if preset == "nearest" else False, max_keypoints=1000)
    after, alone = matcher.load(preset, **options), matcher.load(preset, **options)
    dark = np.zeros(shape, np.uint8)
    result = after.match(dark, dark, budget_ms=5000.0)
    assert len(result.matches) == 0 and result.budget.fits
    for pipeline in (after, alone):
        pipeline.match(*views, budget_ms=5000.0)
    found, expected = (
        next(each for each in pipeline.costs.values() if isinstance(each, PairCosts))
        for pipeline in (after, alone)
    )
    assert 0.2 < found.extract(480_000) / expected.extract(480_000) < 8
    assert 0.2 < found.match(1000, 6) / expected.match(1000, 6) < 8


def test_other_turns_come_before_a_thousand_keypoints_and_not_before_more(views, measured):
    pipeline = matcher.load("hybrid-learned", second_pass=False, precision="float32")
    with_turns = planned(pipeline, views, 900.0)[2]
    without = planned(pipeline, views, 700.0)[2]
    assert with_turns.without == () and 1024 <= with_turns.max_keypoints < 2048
    assert without.without == ("other turns",) and without.max_keypoints > 1024


@pytest.mark.parametrize(
    ("without", "words"),
    [(("a",), "without a,"), (("a", "b"), "without a and b,"), (("a", "b", "c"), "without a, b and c,")],
)
def test_what_is_left_out_is_said_in_words(without, words):
    assert words in str(Choice(100.0, 512, 6, 640, 80.0, True, without))
    assert "without" not in str(Choice(100.0, 512, 6, 640, 80.0, True))


def test_stages_are_left_out_before_images_are_made_smaller(views, measured):
    pipeline = matcher.load("hybrid-learned", max_keypoints=256, second_pass=False, precision="float32")
    for budget in range(150, 420, 15):
        choice = planned(pipeline, views, float(budget))[2]
        assert choice.resize == 800 and choice.max_keypoints == 256


def test_time_on_a_search_that_found_nothing_counts(views, unsure, measured, monkeypatch):
    fits = iter([True])
    monkeypatch.setattr(further._Pair, "has_time", lambda *_: next(fits, False))
    monkeypatch.setattr(further, "best_change", lambda *_, **__: sleep(0.2))
    result = unsure.match(*views, budget_ms=1e6)
    assert result.passes == () and result.seconds[FURTHER_PASSES] >= 0.2
    stages = [time for stage, time in result.seconds.items() if stage != "total"]
    assert result.seconds["total"] == pytest.approx(sum(stages)) == result.budget.took_ms / 1000


def test_an_extractor_of_ones_own_gets_its_strongest_keypoints(measured, views):
    class Grid:
        def __call__(self, images):
            points = np.stack(np.meshgrid(np.arange(40), np.arange(40)), -1).reshape(-1, 2)
            scores = np.arange(len(points))
            values = np.random.default_rng(0).normal(size=(len(points), 8))
            return [matcher.Features.from_image(image, points, values, scores=scores) for image in images]

    result = matcher.Pipeline(extractor=Grid()).match(*views, budget_ms=60.0)
    assert len(result.features0) == result.budget.max_keypoints < 1600
    assert result.features0.scores.min() == 1600 - result.budget.max_keypoints


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf")])
def test_budgets_that_are_none_are_refused(network, views, value):
    with pytest.raises(matcher.UsageError, match="budget_ms must be a positive number"):
        network.match(*views, budget_ms=value)


@pytest.fixture
def machine(monkeypatch) -> dict[str, float]:
    """Pairs take what their plan says on a machine left alone, times the load."""
    state = {"load": 1.0}
    match_once, plan_ = matcher.Pipeline._match_once, pairs.plan

    def planned(*arguments):
        found = plan_(*arguments)
        state["ms"] = found[2].predicted_ms / found[2].pace
        return found

    def timed(*arguments, **how):
        result = match_once(*arguments, **how)
        seconds = {**result.seconds, "total": state["load"] * state["ms"] / 1000}
        return replace(result, seconds=seconds)

    monkeypatch.setattr(matcher.Pipeline, "_match_once", timed)
    monkeypatch.setattr(pairs, "plan", planned)
    return state


def test_plans_learn_from_how_long_pairs_took(network, views, measured, machine):
    before = network.match(*views, budget_ms=300.0).budget
    assert before.max_keypoints == 600 and not before.exceeded and "busy" not in str(before)
    machine["load"] = 4.0
    slow = network.match(*views, budget_ms=300.0)
    assert slow.budget.exceeded and slow.budget.took_ms == pytest.approx(4 * before.took_ms, rel=0.5)
    assert "ms, over the budget" in slow.summary() and slow.to_dict()["budget"]["took_ms"] > 300.0
    after = network.match(*views, budget_ms=300.0).budget
    assert after.fits and not after.exceeded and after.pace == pytest.approx(4.0)
    assert after.max_keypoints * after.layers < 600 * 3 and "4.0 times as slow" in str(after)
    machine["load"] = 40.0
    for _ in range(2):
        least = network.match(*views, budget_ms=300.0).budget
    assert least.exceeded and network.match(*views, budget_ms=300.0).budget.fits is False
    machine["load"] = 1.0
    for _ in range(25):
        again = network.match(*views, budget_ms=300.0).budget
    assert (again.pace, again.max_keypoints) == (1.0, 600)
    assert len(measured) == 1
