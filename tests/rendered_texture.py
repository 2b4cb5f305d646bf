"""A texture that is known between the pixels, and images of it."""

import numpy as np

SIZE = 200
AFFINE = np.array([[1.05, 0.18, -8.0], [-0.14, 0.96, 14.0]])  # image 1 from image 0


class Texture:
    """A sum of waves, known everywhere; grey values around 128."""

    def __init__(self, seed=0, waves=60, shortest=5.0):
        rng = np.random.default_rng(seed)
        angle, length = rng.uniform(0, 2 * np.pi, waves), shortest * 2 ** rng.uniform(0, 2.5, waves)
        self.k = 2 * np.pi / length * np.stack([np.cos(angle), np.sin(angle)])
        self.phase = rng.uniform(0, 2 * np.pi, waves)

    def at(self, points):
        found = np.concatenate([np.cos(p @ self.k + self.phase).sum(-1) for p in np.array_split(points, 16)])
        return 128 + 30 * found / np.sqrt(len(self.phase) / 2)

    def image(self, affine=None, size=SIZE):
        """The texture seen by an image whose pixels are affine · texture."""
        y, x = np.mgrid[:size, :size].reshape(2, -1)
        pixels = np.stack([x, y], axis=1).astype(float)
        if affine is not None:
            pixels = (pixels - affine[:, 2]) @ np.linalg.inv(affine[:, :2]).T
        return self.at(pixels).reshape(size, size)


def move(points, affine=AFFINE):
    return points @ affine[:, :2].T + affine[:, 2]
