"""The tracker in a made-up world: tracks, links, poses, depths, statuses, and what a time budget allows."""

import tracemalloc
from dataclasses import dataclass, field

import cv2
import numpy as np
import pytest

import matcher
from matcher.cameras import Camera
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.errors import ImageError, UsageError
from matcher.match.nearest import NearestMatcher
from matcher.sequence.frames import FrameResult
from matcher.sequence.plot import plot_trajectory
from matcher.sequence.pose_tracking import project
from matcher.sequence.trajectory import TrackingLog
from matcher.types import Features
from matcher.verify.estimation import RobustEstimator

pytestmark = pytest.mark.usefixtures("compiled")

SIZE, CAMERA, BASELINE = (640, 480), Camera(500.0, 500.0, 319.5, 239.5), 0.5
BLACK = 2**24 - 1  # number of an image without anything on it
RIGHT = 2**22  # added to the number of a frame, its right camera's image


@dataclass(eq=False)
class World:
    """A street of points along x; the camera drives along it, looking sideways and a little about."""

    seed: int = 0
    noise: float = 0.2  # pixels
    points_a_metre: int = 25
    step: float = 0.12  # metres a frame
    flicker: float = 0.1  # share of points that a frame does not show
    depths: tuple[float, float] = (3, 9)  # metres
    jump: dict[int, float] = field(default_factory=dict)  # frame → metres that are skipped before it
    length = 40  # metres of street, which then begins again

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        count, far = self.points_a_metre * self.length, self.depths[1] / 9
        low, high = (0, -2 * far, self.depths[0]), (self.length, 2 * far, self.depths[1])
        self.places = rng.uniform(low, high, (count, 3))
        descriptors = rng.normal(size=(count, 32)).astype(np.float32)
        self.descriptors = descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)
        self.seen: dict[int, np.ndarray] = {}  # frame → which point each keypoint is

    def pose(self, frame: int) -> np.ndarray:
        """(4, 4) camera to world."""
        angle, T = 0.05 * np.sin(frame / 7), np.eye(4)
        T[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        x = 5 + self.step * frame + sum(metres for at, metres in self.jump.items() if frame >= at)
        T[:3, 3] = x, 0.1 * np.sin(frame / 5), 0.2 * np.sin(frame / 11)
        return T

    def truth(self, frames) -> np.ndarray:
        """(N, 4, 4) poses in the frame of the first."""
        poses = np.array([self.pose(frame) for frame in frames])
        return np.linalg.inv(poses[0]) @ poses

    def picture(self, frame: int, size: tuple[int, int] = SIZE) -> np.ndarray:
        """(H, W, 3) uint8, black but for the number in its first pixel."""
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        pixels[0, 0] = frame >> 16 & 255, frame >> 8 & 255, frame & 255
        return pixels

    def features(self, number: int, size: tuple[int, int]) -> Features:
        """What the front end finds in the image of that number; keypoints of a frame are shuffled."""
        rng, T = np.random.default_rng((self.seed, number)), self.pose(number % RIGHT)
        if number & RIGHT:
            T[:3, 3] += BASELINE * T[:3, 0]
        relative = self.places - T[:3, 3]
        relative[:, 0] = (relative[:, 0] + self.length / 2) % self.length - self.length / 2
        local = relative @ T[:3, :3]
        pixels = project(local, CAMERA)
        inside = (pixels >= 0).all(axis=1) & (pixels < SIZE).all(axis=1) & (local[:, 2] > 0.5)
        inside &= (rng.random(len(pixels)) >= self.flicker) & (number != BLACK)
        ids = rng.permutation(np.flatnonzero(inside))
        found = pixels[ids] + rng.normal(0, self.noise, (len(ids), 2))
        self.seen[number] = ids
        noise = rng.normal(0, 0.02, (len(ids), 32)).astype(np.float32)
        points = ((found + 0.5) * np.array(size) / SIZE - 0.5).astype(np.float32)
        return Features(points, self.descriptors[ids] + noise, size=size, kind="sift")

    def pipeline(self) -> matcher.Pipeline:
        """A pipeline whose front end sees this world."""

        def extract(images) -> list[Features]:
            numbers = [int(i.pixels[0, 0] @ np.array([1 << 16, 1 << 8, 1])) for i in images]
            return [self.features(n, i.size) for n, i in zip(numbers, images, strict=True)]

        own = ExtractorConfig(max_keypoints=4096)
        config = PipelineConfig(matcher=NearestConfig(), extractor=own, refine=None)
        parts = NearestMatcher(NearestConfig()), RobustEstimator(config.estimation)
        return matcher.Pipeline(extract, *parts, config)

    def tracker(self, **options) -> matcher.Tracker:
        return matcher.Tracker(self.pipeline(), **options)

    def drive(self, tracker: matcher.Tracker, frames, *, stereo: bool = False) -> list[FrameResult]:
        """What a tracker says of these frames; a frame's number is its time."""
        if stereo:
            pairs = ((self.picture(f), self.picture(f + RIGHT), f) for f in frames)
            return [tracker.push_stereo(*pair) for pair in pairs]
        return [tracker.push(self.picture(frame), frame) for frame in frames]


# --- The tests.

PAIRS = {"camera": CAMERA, "baseline": BASELINE}


def test_a_track_is_one_point_and_a_point_seen_on_and_on_is_one_track():
    world = World()
    results = world.drive(world.tracker(), range(25))
    carried = {}
    for frame, result in enumerate(results):
        for track, point in zip(result.track_ids.tolist(), world.seen[frame].tolist(), strict=True):
            carried.setdefault(track, set()).add(point)
    assert np.mean([len(points) == 1 for points in carried.values()]) > 0.995
    last, before = results[-1], results[-2]
    both = np.intersect1d(world.seen[24], world.seen[23], return_indices=True)
    assert (last.track_ids[both[1]] == before.track_ids[both[2]]).mean() > 0.97
    assert len(np.unique(last.track_ids)) == len(last.track_ids) and last.track_lengths.max() > 15
    for frame, result in enumerate(results[1:], start=1):
        assert (result.to_previous.frame, result.to_keyframe.frame) == (frame - 1, result.keyframe)
        for links in (result.to_previous, result.to_keyframe):
            good = links.indices[links.consistent]
            right = world.seen[links.frame][good[:, 0]] == world.seen[frame][good[:, 1]]
            assert len(good) > 50 and right.mean() > 0.99


def test_pairs_give_metric_poses_and_depths():
    world = World()
    results = world.drive(world.tracker(**PAIRS), range(30), stereo=True)
    found, truth = np.array([r.world_from_cam for r in results]), world.truth(range(30))
    assert {r.pose_status for r in results} == {"ok"}
    assert np.linalg.norm(found[-1, :3, 3] - truth[-1, :3, 3]) < 0.02 * 0.12 * 29
    turns = np.trace(found[:, :3, :3].transpose(0, 2, 1) @ truth[:, :3, :3], axis1=1, axis2=2)
    assert np.rad2deg(np.arccos(np.clip((turns - 1) / 2, -1, 1))).max() < 0.6
    result, T = results[5], world.pose(5)
    local = (world.places[world.seen[5]] - T[:3, 3]) @ T[:3, :3]
    known = np.isfinite(result.depths)
    assert known.mean() > 0.6 and np.median(np.abs(result.depths[known] / local[known, 2] - 1)) < 0.02
    assert 2 < sum(r.is_keyframe for r in results) < 15
    for array in (result.keypoints, result.track_ids, result.depths, result.to_previous.indices):
        assert type(array) is np.ndarray and array.flags.c_contiguous
    assert sum(result.milliseconds.values()) == pytest.approx(2 * result.milliseconds["total"])


def test_one_camera_gives_the_path_up_to_scale():
    world = World()
    results = world.drive(world.tracker(camera=CAMERA), range(40))
    known = [i for i, r in enumerate(results) if r.world_from_cam is not None]
    assert known[-30:] == list(range(10, 40))
    found = np.array([results[i].world_from_cam for i in known])[:, :3, 3]
    truth = world.truth(range(40))[known, :3, 3]
    scale = np.sum(found * truth) / np.sum(found * found)
    assert np.linalg.norm(scale * found - truth, axis=1).max() < 0.05 * np.linalg.norm(truth[-1])


def test_one_cameras_unit_is_uncertain_after_a_step_that_few_points_carry_until_it_is_measured_again():
    for jump, settled in ((0.5, "ok"), (5, "uncertain")):
        world = World(step=0.25, jump={12: jump})
        tracker = world.tracker(camera=CAMERA)
        results = [tracker.push(world.picture(frame)) for frame in (*range(20), 80, 5, 6, 7)]
        assert {result.pose_status for result in results[14:20]} == {settled}
        assert (results[20].stretch, results[23].stretch, results[23].pose_status) == (1, 0, "ok")
    far = World(depths=(40, 100), points_a_metre=20)  # 2 % of the first baseline make later steps 20 % wrong
    results = far.drive(far.tracker(camera=CAMERA), range(20))
    assert {result.pose_status for result in results[10:]} == {"uncertain"}


def test_a_step_that_far_points_leave_open_is_uncertain():
    """All is 200 to 600 baselines away: how the camera turned is known, and not how far it went."""
    world = World(depths=(100, 300), points_a_metre=20)
    results = world.drive(world.tracker(**PAIRS), range(6), stereo=True)
    assert [result.pose_status for result in results[1:]].count("uncertain") >= 4
    jumping = World(step=1.0, jump={4: 1.5})  # a step two and a half times as long as those before
    results = jumping.drive(jumping.tracker(**PAIRS), range(6), stereo=True)
    assert [result.pose_status for result in results[1:5]] == ["ok", "ok", "ok", "uncertain"]
    near = World()
    sure = near.drive(near.tracker(**PAIRS), [0, 1, 1, 1], stereo=True)
    assert {result.pose_status for result in sure} == {"ok"}  # also where the camera stands still


def test_identical_frames_are_one_place_and_one_keyframe():
    world = World(flicker=0.0, noise=0.0)
    results = world.drive(world.tracker(**PAIRS), [3] * 5, stereo=True)
    assert [r.is_keyframe for r in results] == [True] + [False] * 4
    for result in results[1:]:
        np.testing.assert_array_equal(result.track_ids, results[0].track_ids)
        np.testing.assert_allclose(result.world_from_cam, np.eye(4), atol=1e-3)
        assert result.parallax == 0.0 and result.kept == 1.0
    alone = world.drive(world.tracker(camera=CAMERA), [3] * 3)
    assert [r.pose_status for r in alone] == ["ok", "starting", "starting"]


def test_black_dropped_and_late_frames_are_passed_over(tmp_path):
    world = World()
    tracker = world.tracker(**PAIRS)
    world.drive(tracker, range(5), stereo=True)
    skipped = [
        tracker.push(world.picture(BLACK), 5),
        tracker.push(None, 6),
        tracker.push_stereo(None, world.picture(RIGHT), 7),
        tracker.push(world.picture(2), 1.5),
    ]
    assert [r.status for r in skipped] == ["blank", "dropped", "dropped", "out_of_order"]
    assert all(r.passed_over and len(r.keypoints) == 0 and r.world_from_cam is None for r in skipped)
    with pytest.raises(ImageError, match="absent"):
        tracker.push(tmp_path / "absent.png", 8)
    (after,) = world.drive(tracker, [9], stereo=True)
    assert (after.index, after.status, after.pose_status, after.to_previous.frame) == (9, "tracked", "ok", 4)
    assert np.linalg.norm(after.world_from_cam[:3, 3] - world.truth(range(10))[-1, :3, 3]) < 0.05
    # A clock that was set back is followed.
    again = [tracker.push(world.picture(10 + i), np.float32(0.1 * i)).status for i in range(2)]
    assert again == ["out_of_order", "tracked"]
    for bad in (float("nan"), "noon"):
        with pytest.raises(UsageError, match="timestamp"):
            tracker.push(world.picture(12), bad)


def test_frames_of_another_size_have_a_pose_if_only_resized():
    world = World(noise=0.05)
    tracker = world.tracker(**PAIRS)
    world.drive(tracker, range(3), stereo=True)
    smaller = tracker.push_stereo(world.picture(3, (320, 240)), world.picture(3 + RIGHT, (320, 240)), 3)
    assert (smaller.size, smaller.status, smaller.pose_status) == ((320, 240), "tracked", "ok")
    assert smaller.camera == Camera(250, 250, 159.5, 119.5, size=(320, 240))
    T = world.pose(3)
    local = (world.places[world.seen[3]] - T[:3, 3]) @ T[:3, :3]
    known = np.isfinite(smaller.depths) & np.isfinite(smaller.right[:, 0])
    assert known.sum() > 50 and abs(np.median(smaller.depths[known] / local[known, 2]) - 1) < 0.01
    other = tracker.push(world.picture(4, (640, 240)), 4)
    assert (other.status, other.pose_status, other.world_from_cam) == ("tracked", "other_size", None)
    (back,) = world.drive(tracker, [5], stereo=True)
    truth = world.truth(range(6))
    for result, frame in ((smaller, 3), (back, 5)):
        assert np.linalg.norm(result.world_from_cam[:3, 3] - truth[frame, :3, 3]) < 0.05


def test_after_a_jump_tracks_begin_anew_and_the_path_goes_on(tmp_path):
    world = World(jump={10: 15.0})
    results = world.drive(world.tracker(**PAIRS), range(20), stereo=True)
    assert [r.status for r in results[9:12]] == ["tracked", "lost", "tracked"]
    assert (results[10].pose_status, results[10].is_keyframe) == ("bridged", True)
    assert not np.isin(results[10].track_ids, np.concatenate([r.track_ids for r in results[:10]])).any()
    step = np.linalg.inv(results[10].world_from_cam) @ results[15].world_from_cam
    np.testing.assert_allclose(step, np.linalg.inv(world.pose(10)) @ world.pose(15), atol=0.03)
    log = TrackingLog()
    for result in results:
        log.add(result)
    log.write(tmp_path / "a.tum")
    assert log.breaks() == [11] and "relative to an extrapolated" in (tmp_path / "a.tum").read_text()
    *_, (error,) = log.compared_with(None, world.truth(range(20)), with_scale=False)
    assert error.translation < 0.05 and error.left_out == 4  # nobody knows how long the jump was
    drawn = plot_trajectory(tmp_path / "a.svg", log.trajectory()[2], breaks=[10])
    assert "<!-- tracking lost before -->" in drawn.read_text()


def test_a_place_seen_before_is_found_again_after_a_loss():
    world = World()
    tracker = world.tracker(**PAIRS)
    before = world.drive(tracker, range(12), stereo=True)
    away = world.drive(tracker, range(200, 203), stereo=True)
    again = tracker.push_stereo(world.picture(4), world.picture(4 + RIGHT))
    assert again.status == "tracked" and again.keyframe <= 11
    np.testing.assert_allclose(again.world_from_cam, before[4].world_from_cam, atol=0.05)
    assert np.isin(again.track_ids, before[4].track_ids).mean() > 0.5
    log = TrackingLog()
    for result in (*before, *away, again):
        log.add(result)
    assert (log.breaks(), log.breaks(back=True)) == ([13], [15])  # where a known place was found again
    assert [result.stretch for result in (*before[-1:], *away, again)] == [0, 1, 1, 1, 0]
    for result in world.drive(tracker, range(450, 453), stereo=True):
        log.add(result)
    assert (log.breaks(), result.stretch) == ([13, 17], 2)


def test_what_cannot_be_tracked_is_refused():
    world = World()
    numbers = (500.0, 500.0, 319.5, 239.5)
    assert matcher.Tracker("nearest", Camera(*numbers).K).camera == Camera(*numbers)
    distorted = Camera(*numbers, model="SIMPLE_RADIAL", distortion=(0.1,))
    for options in ({"window": 1}, {"max_keypoints": 5}, {"camera": distorted}, {"camera": (500.0, 500.0)}):
        with pytest.raises(UsageError, match="undistort|" + "|".join(options)):
            world.tracker(**options)
    with pytest.raises(UsageError, match="fundamental"):
        matcher.Tracker("nearest", geometry="essential")
    tracker = world.tracker()
    with pytest.raises(ImageError, match="one size"):
        tracker.push_stereo(world.picture(0), world.picture(RIGHT, (320, 240)))
    first = world.drive(tracker, [0], stereo=True)[0]
    first.keypoints[:] = 0  # results are copies
    assert world.drive(tracker, [1])[0].to_previous.consistent.sum() > 80


def test_memory_is_bounded():
    world = World(points_a_metre=8, step=0.25)
    tracker = world.tracker(window=3)
    sizes = []
    tracemalloc.start()
    for start in range(0, 48, 12):
        world.drive(tracker, range(start, start + 12))
        world.seen.clear()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert abs(sizes[-1] - sizes[1]) < 200_000 and len(tracker.keyframes) == 3


# --- A time budget.


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
