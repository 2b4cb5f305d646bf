"""A store filled with made-up images and pairs, without running a matcher."""

from pathlib import Path

import numpy as np

from matcher.collection.schema import StoredPair, encode_features, encode_pair
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.types import Features, Matches, TwoViewGeometry

SETTINGS = {"preset": "nearest", "config": {"extractor": {"max_keypoints": 400}}}


def features(rng: np.random.Generator, count: int = 400) -> Features:
    """Random points with descriptors as SIFT would make them."""
    numbers = rng.integers(0, 256, (count, 128)) * (rng.random((count, 128)) < 0.6)
    numbers[:, 0] = 1
    values = np.sqrt(numbers.astype(np.float32) / numbers.sum(axis=1, keepdims=True, dtype=np.float32))
    return Features(
        keypoints=rng.uniform(0, [640, 480], (count, 2)).astype(np.float32),
        descriptors=values,
        scores=rng.random(count).astype(np.float32),
        size=(640, 480),
        scale=(0.5, 0.5),
        scales=rng.uniform(2, 20, count).astype(np.float32),
        orientations=rng.uniform(-3, 3, count).astype(np.float32),
        exif_orientation=6,
        kind="sift",
    )


def pair(
    rng: np.random.Generator, name0: str, name1: str, points0: np.ndarray, points1: np.ndarray, count: int
) -> StoredPair:
    """Random matches between two images with a made-up fundamental matrix."""
    indices = np.stack([rng.permutation(len(p))[:count] for p in (points0, points1)], axis=1)
    scores = -np.sort(-rng.random(count).astype(np.float32))
    matches = Matches(indices, points0[indices[:, 0]], points1[indices[:, 1]], scores, 5, 380, 390)
    geometry = TwoViewGeometry("fundamental", "ok", rng.random(count) < 0.7, rng.normal(size=(3, 3)))
    return StoredPair(name0, name1, matches, geometry, float(rng.random()))


def put_features(writer: Writer, name: str, found: Features, sha256: str = "") -> None:
    """Store the features of an image."""
    writer.put_features(name, found, encode_features(found), sha256)


def put_pair(writer: Writer, pair: StoredPair) -> None:
    """Store the matches of two images that have keypoints."""
    names = (pair.name0, pair.name1)
    data = encode_pair(pair.matches, pair.geometry, *map(writer.keypoints, names))
    writer.put_pairs([EncodedPair(*(writer.image(name).number for name in names), pair.seconds, data)])


def fill(folder: Path, rng: np.random.Generator, images: int = 4, matches: int = 300) -> list[StoredPair]:
    """Make a store in `folder` with every pair of so many images; what was written."""
    Store.create(folder, SETTINGS, folder.parent / "photos").close()
    names = [f"im {number:03d}.jpg" for number in range(images)]
    made = [features(rng) for _ in names]
    written = []
    with Writer(folder) as writer, writer.transaction():
        for name, found in zip(names, made, strict=True):
            put_features(writer, name, found, "0" * 64)
        for i, name0 in enumerate(names):
            for j in range(i + 1, images):
                points = [made[k].keypoints.numpy() for k in (i, j)]
                written.append(pair(rng, name0, names[j], *points, matches))
                put_pair(writer, written[-1])
    return written
