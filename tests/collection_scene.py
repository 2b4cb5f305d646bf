"""A synthetic scene seen by a ring of cameras, as a run's store in memory."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import cv2
import numpy as np

from matcher.cameras import Camera
from matcher.collection.schema import StoredImage, StoredPair
from matcher.geometry import inside
from matcher.types import Features, Matches, TwoViewGeometry
from matcher.verify.adjustment import fundamental_from_pose, sampson

SIZE = (1024, 768)
K = np.array([[900.0, 0, 511.5], [0, 900, 383.5], [0, 0, 1]])  # stored pixels: the optical axis in the middle
CAMERA = Camera(900.0, 900.0, 511.5, 383.5)


class MemoryStore:
    """What exporters read of a store."""

    settings, folder, image_folder = {"preset": "made up"}, Path("run"), Path("photos")

    def __init__(self, images, keypoints, pairs):
        self._images, self._keypoints, self._pairs = images, keypoints, pairs

    def images(self):
        return iter(self._images)

    def keypoints(self, name):
        return self._keypoints[name]

    def scale(self, name):
        return 1.0, 1.0

    def refined_keypoints(self, name):
        return None

    def features(self, name):
        points = self._keypoints[name]
        size = next(image.size for image in self._images if image.name == name)
        return Features(
            keypoints=points,
            descriptors=np.tile(np.arange(len(points), dtype=np.float32)[:, None], (1, 8)),
            scales=np.full(len(points), 4.0, np.float32),
            size=size,
            kind="sift",
        )

    def pairs(self):
        return iter(self._pairs)

    def waiting(self):
        return iter(())

    failed = waiting


def facing(centre, up):
    """The world-to-camera pose of a camera that looks at the origin."""
    forward = -centre / np.linalg.norm(centre)
    right = np.cross(forward, up)
    right /= np.linalg.norm(right)
    rotation = np.stack([right, np.cross(forward, right), forward])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = rotation, -rotation @ centre
    return pose


def ring(count):
    """World-to-camera poses (count, 4, 4) of cameras that look at the origin from a wavy ring."""
    angles = np.linspace(0, 2 * np.pi, count, endpoint=False)
    ends = np.column_stack([8 * np.cos(angles), 8 * np.sin(angles), 1.5 * np.sin(3 * angles)])
    return np.array([facing(centre, [0, 0, 1.0]) for centre in ends])


def centres(poses):
    return np.array([-pose[:3, :3].T @ pose[:3, 3] for pose in poses])


def synthetic_store(rng, count=10, points=600, wrong=0.3, noise=0.5, camera=CAMERA, names=None, poses=None):
    """A store whose pairs have `wrong` of their matches shuffled and true inliers, and its cameras' poses."""
    poses = ring(count) if poses is None else poses
    world = rng.normal(0, 1.2, (points, 3))
    names = names or [f"ring/{index:03d}.jpg" for index in range(count)]
    keypoints, shown = {}, {}
    for name, pose in zip(names, poses, strict=True):
        local = world @ pose[:3, :3].T + pose[:3, 3]
        seen = local @ K.T
        at = seen[:, :2] / seen[:, 2:] + rng.normal(0, noise, (points, 2))
        visible = np.flatnonzero((local[:, 2] > 0) & inside(at, SIZE) & (rng.random(points) < 0.7))
        order = rng.permutation(visible)
        keypoints[name] = at[order].astype(np.float32)
        shown[name] = order
    images = [
        StoredImage(name, Path("photos") / name, name, SIZE, len(keypoints[name]), camera, "done", "")
        for name in names
    ]
    pairs = []
    for (i, name0), (j, name1) in combinations(enumerate(names), 2):
        both, index0, index1 = np.intersect1d(shown[name0], shown[name1], return_indices=True)
        shuffled = rng.permutation(len(both))[: int(wrong * len(both))]
        index1[shuffled] = np.roll(index1[shuffled], 1)
        scores = rng.random(len(both)).astype(np.float32)
        order = np.argsort(-scores)
        indices = np.column_stack([index0, index1])[order].astype(np.int64)
        F = fundamental_from_pose(K, K, poses[j] @ np.linalg.inv(poses[i]))
        ends = keypoints[name0][indices[:, 0]], keypoints[name1][indices[:, 1]]
        matches = Matches(indices, *ends, scores[order])
        inliers = sampson(matches.points0, matches.points1, F) < 3
        geometry = TwoViewGeometry("fundamental", "ok", inliers, F)
        pairs.append(StoredPair(name0, name1, matches, geometry, 0.1))
    return MemoryStore(images, keypoints, pairs), poses


def renamed(store, names):
    """The same store with other names, in the same order."""
    old = [image.name for image in store.images()]
    table = dict(zip(old, names, strict=True))
    images = [replace(image, name=table[image.name]) for image in store.images()]
    pairs = [replace(p, name0=table[p.name0], name1=table[p.name1]) for p in store.pairs()]
    return MemoryStore(images, {table[name]: store.keypoints(name) for name in old}, pairs)


def render_photos(folder, count=5, size=(480, 360), mounted=None):
    """Photos of boards at several depths, by cameras on an arc or one `mounted` beside each; their poses."""
    rng = np.random.default_rng(3)
    intrinsics = np.array(
        [[1.1 * size[0], 0, (size[0] - 1) / 2], [0, 1.1 * size[0], (size[1] - 1) / 2], [0, 0, 1]]
    )
    boards = [(0, 0, 0, 16.0)] + [
        (x, y, -z, 2.2)
        for x, y, z in ((-2.5, -1.2, 2), (0.2, 1, 3.2), (2.6, -0.4, 2.6), (-0.8, -1.8, 1.2), (-3, 1.6, 3))
    ]
    textures = [texture(rng, 1200 if width > 10 else 400) for *_, width in boards]
    folder.mkdir(parents=True)
    poses = []
    for number, angle in enumerate(np.linspace(-0.35, 0.35, count)):
        centre = np.array([11 * np.sin(angle), 0.6 * np.cos(9 * angle), -11 * np.cos(angle)])
        pose = facing(centre, [0, -1.0, 0])
        pose = pose if mounted is None else mounted @ pose
        photo = np.zeros((size[1], size[0]), np.uint8)
        for (x, y, z, width), board in zip(boards, textures, strict=True):
            scale = width / board.shape[0]
            plane = np.array([[scale, 0, x - width / 2], [0, scale, y - width / 2], [0, 0, z], [0, 0, 1]])
            homography = intrinsics @ pose[:3] @ plane
            area = cv2.warpPerspective(np.ones_like(board), homography, size)
            photo = np.where(
                area > 0, cv2.warpPerspective(board, homography, size, flags=cv2.INTER_AREA), photo
            )
        cv2.imwrite(str(folder / f"photo{number}.png"), photo)
        poses.append(pose)
    return np.array(poses)


def texture(rng, side):
    """(side, side) uint8 blobs of several sizes."""
    layers = [
        cv2.resize(rng.random((side // cell, side // cell)), (side, side), interpolation=cv2.INTER_CUBIC)
        for cell in (8, 20, 50)
    ]
    mixed = sum(layers) / len(layers)
    return np.clip(128 + 420 * (mixed - mixed.mean()), 0, 255).astype(np.uint8)


def aligned(points: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Points (N, 3) after the similarity transform that best aligns them with `target` (Umeyama 1991)."""
    mean0, mean1 = points.mean(axis=0), target.mean(axis=0)
    centred0, centred1 = points - mean0, target - mean1
    u, d, vt = np.linalg.svd(centred1.T @ centred0)
    signs = np.array([1, 1, np.sign(np.linalg.det(u @ vt))])
    scale = (d * signs).sum() / np.square(centred0).sum()
    return scale * centred0 @ (u @ np.diag(signs) @ vt).T + mean1
