"""A made-up world seen by a moving camera: true points, poses and identities for tests of sequences.

A frame is a tiny image that holds only its number; the front end looks up what is seen there. So a test
knows what every keypoint is, and thousands of frames take seconds.
"""

from dataclasses import dataclass, field

import numpy as np

from matcher.cameras import Camera
from matcher.config import ExtractorConfig, NearestConfig, PipelineConfig
from matcher.match.nearest import NearestMatcher
from matcher.pipeline import Pipeline
from matcher.types import Features
from matcher.verify.estimation import RobustEstimator

SIZE = (640, 480)
CAMERA = Camera(500.0, 500.0, 319.5, 239.5)
BASELINE = 0.5
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
    length: int = 40  # metres of street, which then begins again
    jump: dict[int, float] = field(default_factory=dict)  # frame → metres that are skipped before it

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        count = self.points_a_metre * self.length
        self.places = np.column_stack(
            [rng.uniform(0, self.length, count), rng.uniform(-2, 2, count), rng.uniform(3, 9, count)]
        )
        descriptors = rng.normal(size=(count, 32)).astype(np.float32)
        self.descriptors = descriptors / np.linalg.norm(descriptors, axis=1, keepdims=True)
        self.seen: dict[int, np.ndarray] = {}  # frame → which point each keypoint is

    def pose(self, frame: int) -> np.ndarray:
        """(4, 4) camera to world."""
        x = 5 + self.step * frame + sum(metres for at, metres in self.jump.items() if frame >= at)
        angle = 0.05 * np.sin(frame / 7)
        T = np.eye(4)
        T[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
        T[:3, 3] = x, 0.1 * np.sin(frame / 5), 0.2 * np.sin(frame / 11)
        return T

    def picture(self, frame: int, size: tuple[int, int] = SIZE) -> np.ndarray:
        """(H, W, 3) uint8, black but for the number in its first pixel."""
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        pixels[0, 0] = frame >> 16 & 255, frame >> 8 & 255, frame & 255
        return pixels

    def features(self, number: int, size: tuple[int, int]) -> Features:
        """What the front end finds in the image of that number; keypoints of a frame are shuffled."""
        rng = np.random.default_rng((self.seed, number))
        T = self.pose(number % RIGHT)
        if number == BLACK:
            return self._features(np.zeros((0, 2)), np.zeros(0, int), size)
        if number & RIGHT:
            T = T.copy()
            T[:3, 3] += BASELINE * T[:3, 0]
        relative = self.places - T[:3, 3]
        half = self.length / 2
        relative[:, 0] = (relative[:, 0] + half) % self.length - half
        local = relative @ T[:3, :3]
        front = np.flatnonzero(local[:, 2] > 0.5)
        pixels = np.column_stack(
            [
                CAMERA.fx * local[front, 0] / local[front, 2] + CAMERA.cx,
                CAMERA.fy * local[front, 1] / local[front, 2] + CAMERA.cy,
            ]
        )
        inside = (pixels >= 0).all(axis=1) & (pixels < SIZE).all(axis=1)
        inside &= rng.random(len(pixels)) >= self.flicker
        order = rng.permutation(np.flatnonzero(inside))
        found = pixels[order] + rng.normal(0, self.noise, (len(order), 2))
        scale = np.array(size) / SIZE
        self.seen[number] = front[order]
        return self._features((found + 0.5) * scale - 0.5, front[order], size)

    def _features(self, points: np.ndarray, ids: np.ndarray, size: tuple[int, int]) -> Features:
        noise = np.random.default_rng(len(ids)).normal(0, 0.02, (len(ids), 32)).astype(np.float32)
        return Features(
            keypoints=points.astype(np.float32).reshape(-1, 2),
            descriptors=self.descriptors[ids] + noise,
            size=size,
            kind="sift",
        )

    def pipeline(self) -> Pipeline:
        """A pipeline whose front end sees this world."""

        def extract(images) -> list[Features]:
            numbers = [int(i.pixels[0, 0] @ np.array([1 << 16, 1 << 8, 1])) for i in images]
            return [self.features(n, i.size) for n, i in zip(numbers, images, strict=True)]

        extractor = ExtractorConfig(max_keypoints=4096)
        config = PipelineConfig(matcher=NearestConfig(), extractor=extractor, refine=None)
        return Pipeline(extract, NearestMatcher(NearestConfig()), RobustEstimator(config.estimation), config)


def truth_of(world: World, frames: list[int]) -> np.ndarray:
    """(N, 4, 4) poses in the frame of the first."""
    poses = np.array([world.pose(frame) for frame in frames])
    return np.linalg.inv(poses[0]) @ poses
