"""What frames are matched with: half of the layers for neighbours, and what a time budget allows."""

import cv2
import numpy as np
import pytest

import matcher
from matcher.sequence.tracker import FrameExtractor, for_neighbours


@pytest.fixture
def network(small_weights) -> matcher.Pipeline:
    return matcher.load("hybrid", weights=small_weights, max_keypoints=600, device="cpu", precision="float32")


def test_neighbours_get_half_of_the_layers_and_strangers_all(network):
    near = for_neighbours(network).matcher.model
    assert (len(near.layers), near.config.assignment.max_iterations) == (2, 10)
    tracker = matcher.Tracker(network)
    assert len(tracker.pipeline.matcher.model.layers) == 3
    nearest = matcher.load("nearest")
    assert for_neighbours(nearest).matcher is nearest.matcher


def test_a_sequence_with_a_budget_says_what_it_chose_at_the_first_frame(network, views):
    picture = cv2.resize(cv2.imread(str(views[0])), (320, 240))
    tracker = matcher.Tracker(network, budget_ms=60_000)
    assert tracker.push(np.zeros_like(picture)).status == "blank" and tracker.choice is None
    first = tracker.push(picture)
    assert tracker.choice.budget_ms == 60_000 and tracker.choice.fits
    assert len(first.keypoints) <= tracker.choice.max_keypoints
    again = tracker.push(picture)
    assert again.status == "tracked" and np.isin(again.track_ids, first.track_ids).mean() > 0.9
    least = matcher.Tracker(network, budget_ms=0.01)
    least.push(picture)
    assert not least.choice.fits and least.choice.max_keypoints < tracker.choice.max_keypoints


def test_less_is_planned_while_frames_take_longer_and_as_much_afterwards(network, views):
    extractor = FrameExtractor(network, budget_ms=60_000)
    extractor.read([views[0]])
    planned = extractor.choice
    extractor.took(1.0)  # the first one also measures
    for _ in range(12):
        extractor.took(1000 * extractor.choice.predicted_ms)
    busy = extractor.choice
    assert busy.pace > planned.pace and busy.max_keypoints <= planned.max_keypoints
    for _ in range(60):
        extractor.took(0.1)
    assert extractor.choice == planned


def test_what_extraction_took_leaves_less_for_the_rest_of_the_frame(network, views):
    extractor = FrameExtractor(network, budget_ms=60_000)
    images = extractor.read([views[0]])
    features = extractor.extract(images)
    extractor.took(1.0)
    assert extractor.within_budget(features, {"extract": 0.001, "total": 0.001}) is features
    fewer = extractor.within_budget(features, {"extract": 59_000.0, "total": 59_900.0})
    assert len(fewer[0]) < len(features[0])
