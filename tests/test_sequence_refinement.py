"""Points of a sequence are refined against their keyframe: errors do not add up from frame to frame."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from rendered_texture import SIZE, Texture

import matcher
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.extract.sift import SiftExtractor

FRAMES = 9


class Inexact:
    """SIFT whose keypoints are off by 0.6 pixels along each axis, in each frame anew."""

    def __init__(self) -> None:
        self._sift = SiftExtractor(ExtractorConfig(max_keypoints=200))
        self._rng = np.random.default_rng(3)

    def __call__(self, images):
        found = self._sift(images)
        noise = [torch.from_numpy(self._rng.normal(0, 0.6, each.keypoints.shape)) for each in found]
        return [
            replace(each, keypoints=(each.keypoints + shift).float())
            for each, shift in zip(found, noise, strict=True)
        ]


def view_of(frame: int) -> np.ndarray:
    """(2, 3) from the texture to a frame: a camera that moves, turns and comes nearer."""
    angle, zoom = 0.012 * frame, 1.012**frame
    turn = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = np.array([(SIZE - 1) / 2] * 2)
    return np.column_stack([turn, centre - turn @ centre + np.array([1.7, -0.9]) * frame])


def on_texture(points: np.ndarray, frame: int) -> np.ndarray:
    affine = view_of(frame)
    return (points - affine[:, 2]) @ np.linalg.inv(affine[:, :2]).T


@pytest.fixture(scope="module")
def frames():
    texture = Texture()
    return [
        np.rint(np.clip(texture.image(view_of(frame)), 0, 255)).astype(np.uint8) for frame in range(FRAMES)
    ]


def pipeline(**config) -> matcher.Pipeline:
    return matcher.Pipeline(Inexact(), config=PipelineConfig(matcher=NearestConfig(), **config))


def tracked(frames, **config):
    tracker = matcher.Tracker(pipeline(**config))
    return [tracker.push(frame) for frame in frames]


def drift(results, first: int, last: int) -> float:
    """Median distance in pixels of where tracks are in one frame and where they were in an earlier one."""
    places = defaultdict(dict)
    for result in results:
        at = on_texture(result.keypoints.astype(float), result.index)
        for track, place in zip(result.track_ids.tolist(), at, strict=True):
            places[track][result.index] = place
    both = [seen for seen in places.values() if {first, last} <= seen.keys()]
    assert len(both) > 20
    return float(np.median([np.linalg.norm(seen[first] - seen[last]) for seen in both]))


def test_tracks_do_not_drift(frames):
    found = tracked(frames)
    assert all("refine" in result.milliseconds for result in found[1:])
    plain = tracked(frames, refine=None)
    assert not any("refine" in result.milliseconds for result in plain)
    assert drift(found, 0, 2) < 0.5 * drift(plain, 0, 2)
    assert drift(found, 0, FRAMES - 1) < 0.1  # whatever keyframes lie between
    assert drift(found, 0, FRAMES - 1) < 0.4 * drift(plain, 0, FRAMES - 1)
    assert sum(result.is_keyframe for result in found) < FRAMES / 2


def test_only_points_that_the_keyframe_shows_are_moved(frames):
    found, plain = tracked(frames[:3]), tracked(frames[:3], refine=None)
    assert np.array_equal(found[0].keypoints, plain[0].keypoints)
    last = found[-1]
    linked = np.zeros(len(last.keypoints), bool)
    linked[last.to_keyframe.indices[last.to_keyframe.consistent, 1]] = True
    moved = (last.keypoints != plain[-1].keypoints).any(axis=1)
    assert not moved[~linked].any()
    assert moved[linked].mean() > 0.9
    assert np.abs(last.keypoints - plain[-1].keypoints).max() < 4


def test_features_that_the_front_end_returned_are_not_changed(frames):
    """A front end may hand out the same features again."""
    returned = []

    class Remembering(Inexact):
        def __call__(self, images):
            found = super().__call__(images)
            returned.extend((each, each.keypoints.clone()) for each in found)
            return found

    tracker = matcher.Tracker(matcher.Pipeline(Remembering(), config=PipelineConfig(matcher=NearestConfig())))
    moved = [tracker.push(frame).keypoints for frame in frames[:2]][1]
    assert (moved != returned[1][1].numpy()).any()
    assert all(torch.equal(features.keypoints, before) for features, before in returned)
