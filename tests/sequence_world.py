"""A made-up world seen by a moving camera: true points, poses and identities for tests of sequences.

A frame is a tiny image that holds only its number; the front end looks up what is seen there. So a test
knows what every keypoint is, and thousands of frames take seconds.
"""

from dataclasses import dataclass, field

import numpy as np

import matcher
from matcher.cameras import Camera
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.match.nearest import NearestMatcher
from matcher.sequence.frames import FrameResult
from matcher.sequence.pose_tracking import project
from matcher.types import Features
from matcher.verify.estimation import RobustEstimator

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
