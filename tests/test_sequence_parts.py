"""Parts of sequences: track ids, similar keyframes; files of poses, and their errors; points kept exact."""

from collections import defaultdict
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
from rendered_texture import SIZE, Texture

import matcher
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import UsageError
from matcher.extract.sift import SiftExtractor
from matcher.match.steering import STEERABLE, rotated_descriptors
from matcher.sequence.frames import KeptFrame
from matcher.sequence.linking import TrackIds, most_similar
from matcher.sequence.plot import track_colours
from matcher.sequence.trajectory import (
    align,
    nearest_rows,
    path_length,
    read_poses,
    segment_errors,
    write_trajectory,
)


def turn(axis: tuple[float, float, float], degrees: float) -> np.ndarray:
    return cv2.Rodrigues(np.deg2rad(degrees) * np.array(axis) / np.linalg.norm(axis))[0]


def test_ids_go_to_one_point_each_and_the_first_offer_counts():
    tracks = TrackIds()
    first, lengths = tracks.extend(4, [])
    assert first.tolist() == [0, 1, 2, 3] and lengths.tolist() == [1, 1, 1, 1]
    offers = [
        (first, np.array([[0, 2], [1, 0]])),
        (np.array([0, 9, 3]), np.array([[0, 1], [1, 0], [2, 1], [2, 3]])),  # 0 is taken, so is point 0
    ]
    second, lengths = tracks.extend(4, offers)
    assert second.tolist() == [1, 3, 0, 4] and lengths.tolist() == [2, 2, 2, 1]
    tracks.forget(np.array([3, 4]))
    third, lengths = tracks.extend(2, [(second, np.array([[1, 0], [2, 1]]))])
    assert third.tolist() == [3, 0] and lengths.tolist() == [3, 1]
    assert tracks.extend(1, [])[0].tolist() == [5]


@pytest.mark.parametrize("kind", ["sift", STEERABLE])
def test_the_likeliest_keyframe_has_the_same_points(rng, kind):
    def kept(index, descriptors):
        descriptors = descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)
        points = np.zeros((len(descriptors), 2), np.float32)
        features = matcher.Features(points, descriptors.astype(np.float32), size=(640, 480), kind=kind)
        return KeptFrame(index, features)

    scenes = [rng.normal(size=(150, 32)) for _ in range(8)]
    keyframes = [kept(10 * i, scene) for i, scene in enumerate(scenes)]
    for i in (2, 5, 7):
        seen = (scenes[i] + 0.1 * rng.normal(size=(150, 32))).astype(np.float32)
        query = kept(99, rotated_descriptors(seen, kind)[-1])  # turned, where descriptors turn
        likely = most_similar(query, keyframes, 3)
        assert likely[0].index == 10 * i and len(likely) == 3
    assert most_similar(query, [], 3) == []
    colours = track_colours(np.arange(1000)).astype(int)
    assert np.abs(np.diff(colours, axis=0)).sum(axis=1).min() > 60


@pytest.fixture
def curve() -> np.ndarray:
    """61 poses, a metre apart, in a slow turn."""
    poses, step = [np.eye(4)], np.eye(4)
    step[:3, :3], step[:3, 3] = turn((0, 1, 0), 1.0), (0, 0, 1)
    for _ in range(60):
        poses.append(poses[-1] @ step)
    return np.array(poses)


def test_files_of_poses_go_there_and_back(curve, tmp_path):
    for name, times in (("p.tum", np.arange(61) / 10), ("p.kitti", None)):
        write_trajectory(tmp_path / name, np.arange(61) / 10, curve, bridged=[False] * 60 + [True])
        found, poses = read_poses(tmp_path / name)
        np.testing.assert_allclose(poses, curve, atol=1e-6)
        assert (found is None) == (times is None) and (times is None or np.allclose(found, times))
        marked = [line for line in (tmp_path / name).read_text().splitlines() if "not measured" in line]
        assert len(marked) == 1 and marked[0].startswith("#") and marked[0].endswith(("6.000000", " 60"))
    for text in ("", "1 2 3\n", "0 0 0 0 0 0 0 0\n", "a b\n", "nan 0 0 0 0 0 0 1\n"):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(UsageError, match="bad"):
            read_poses(tmp_path / "bad.txt")
    with pytest.raises(UsageError, match="1 of 62 frames"):  # whose lines have no times
        write_trajectory(tmp_path / "a.kitti", [0.0] * 61, curve, frames=62)


def test_segment_errors(curve):
    other = np.eye(4)
    other[:3, :3], other[:3, 3] = turn((1, 1, 0), 50), (3, -2, 9)
    errors = segment_errors(curve, other @ curve)
    assert [(error.length, error.count) for error in errors] == [(10, 51), (20, 41), (40, 21)]
    assert max(max(error.translation, error.rotation) for error in errors) < 1e-4
    longer = curve.copy()
    longer[:, :3, 3] *= 1.02
    for error in segment_errors(curve, longer):
        assert 0.018 < error.translation < 0.0201 and error.rotation < 1e-4
    tilt, drifting = np.eye(4), [np.eye(4)]
    tilt[:3, :3] = turn((1, 0, 0), 0.01)
    for motion in np.linalg.inv(curve[:-1]) @ curve[1:]:
        drifting.append(drifting[-1] @ motion @ tilt)
    for error in segment_errors(curve, np.array(drifting)):
        assert error.rotation == pytest.approx(0.01, rel=0.05)
    np.testing.assert_allclose(align(curve, longer, with_scale=True), curve, atol=1e-9)
    assert not np.allclose(align(curve, longer, with_scale=False), curve, atol=0.1)
    np.testing.assert_allclose(path_length(curve), np.arange(61), atol=1e-9)
    rows = nearest_rows(np.array([0.001, 0.199, 0.31, 0.35, 9.0]), np.array([0.0, 0.3, 0.1, 0.2]))
    assert rows.tolist() == [0, 3, 1, -1, -1]


# --- Points are refined against their keyframe: errors do not add up from frame to frame.

FRAMES = 9


def view_of(frame: int) -> np.ndarray:
    """(2, 3) from the texture to a frame: a camera that moves, turns and comes nearer."""
    angle, zoom = 0.012 * frame, 1.012**frame
    spin = zoom * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = np.array([(SIZE - 1) / 2] * 2)
    return np.column_stack([spin, centre - spin @ centre + np.array([1.7, -0.9]) * frame])


@pytest.fixture(scope="module")
def frames() -> list[np.ndarray]:
    texture = Texture()
    views = [texture.image(view_of(frame)) for frame in range(FRAMES)]
    return [np.rint(np.clip(view, 0, 255)).astype(np.uint8) for view in views]


def tracked(frames, **config) -> list[matcher.FrameResult]:
    """By SIFT whose keypoints are off by 0.6 pixels along each axis, in each frame anew."""
    sift, rng, returned = SiftExtractor(ExtractorConfig(max_keypoints=200)), np.random.default_rng(3), []

    def extract(images):
        shifted = []
        for each in sift(images):
            shift = torch.from_numpy(rng.normal(0, 0.6, each.keypoints.shape))
            shifted.append(replace(each, keypoints=(each.keypoints + shift).float()))
        returned.extend((each, each.keypoints.clone()) for each in shifted)
        return shifted

    pipeline = matcher.Pipeline(extract, config=PipelineConfig(matcher=NearestConfig(), **config))
    tracker = matcher.Tracker(pipeline)
    found = [tracker.push(frame) for frame in frames]
    # A front end may hand out the same features again.
    assert all(torch.equal(features.keypoints, before) for features, before in returned)
    return found


def drift(results, first: int, last: int) -> float:
    """Median distance in pixels of where tracks are in one frame and where they were in an earlier one."""
    places = defaultdict(dict)
    for result in results:
        affine = view_of(result.index)
        at = (result.keypoints.astype(float) - affine[:, 2]) @ np.linalg.inv(affine[:, :2]).T
        for track, place in zip(result.track_ids.tolist(), at, strict=True):
            places[track][result.index] = place
    both = [seen for seen in places.values() if {first, last} <= seen.keys()]
    assert len(both) > 20
    return float(np.median([np.linalg.norm(seen[first] - seen[last]) for seen in both]))


def test_tracks_do_not_drift(frames):
    found, plain = tracked(frames), tracked(frames, refine=None)
    assert all("refine" in result.milliseconds for result in found[1:])
    assert not any("refine" in result.milliseconds for result in plain)
    assert drift(found, 0, 2) < 0.5 * drift(plain, 0, 2)
    assert drift(found, 0, FRAMES - 1) < min(0.1, 0.4 * drift(plain, 0, FRAMES - 1))
    assert sum(result.is_keyframe for result in found) < FRAMES / 2
    assert np.array_equal(found[0].keypoints, plain[0].keypoints)
    links, moved = found[1].to_keyframe, (found[1].keypoints != plain[1].keypoints).any(axis=1)
    linked = np.isin(np.arange(len(moved)), links.inliers[:, 1])
    assert not moved[~linked].any() and moved[linked].mean() > 0.9
