"""A few images matched in memory: pairs, and tracks through all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Unpack

import numpy as np

from matcher.collection.cycles import consistent_matches
from matcher.collection.tracks import PairMatches, Tracks, build_tracks
from matcher.config import GRID_KIND
from matcher.data.features import Features
from matcher.data.matches import Matches, TwoViewGeometry
from matcher.data.tensors import to_numpy
from matcher.errors import UsageError
from matcher.loading import open_pipeline
from matcher.options import LoadOptions, refuse_second_pass
from matcher.pipeline import ImageInput, Mask, Pipeline
from matcher.presets import DEFAULT_PRESET


@dataclass(frozen=True, eq=False, repr=False)
class MatchedSet:
    """Images matched with each other, numbered as they were given; `match_set` makes one.

    >>> import matcher, numpy as np
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 400), dtype=np.uint8)
    >>> found = matcher.match_set([scene[:, :320], scene[:, 40:360]], "nearest", max_keypoints=300)
    >>> found.groups(), found.matches(0, 1).shape == (len(found.tracks), 2)
    ([[0, 1]], True)
    """

    names: tuple[str, ...]  # paths, or "image 3" for the array at index 3
    features: tuple[Features, ...]  # of each image
    pairs: Mapping[tuple[int, int], tuple[Matches, TwoViewGeometry]]  # of images i < j
    tracks: Tracks  # of the inliers; its names are those above

    def matches(self, first: int, second: int) -> np.ndarray:
        """(K, 2) int64 keypoints of two images that are in one track, also where the two did not match.

        They are cycle-consistent: going on to a third image and back never leads to another keypoint.

        Raises:
            UsageError: numbers that are not of two images of the set.
        """
        if first == second or not {first, second} <= set(range(len(self.names))):
            raise UsageError(f"{first} and {second} are not two of the images 0 to {len(self.names) - 1}")
        table = self.tracks.table()
        columns = [table[table[:, 1] == image] for image in (first, second)]
        _, *rows = np.intersect1d(columns[0][:, 0], columns[1][:, 0], return_indices=True)
        return np.stack([column[row, 2] for column, row in zip(columns, rows, strict=True)], axis=1)

    def points(self, first: int, second: int) -> tuple[np.ndarray, np.ndarray]:
        """(K, 2) and (K, 2) stored pixels of `matches(first, second)`."""
        indices = self.matches(first, second).T
        ends = zip((first, second), indices, strict=True)
        return tuple(to_numpy(self.features[image].keypoints)[rows] for image, rows in ends)

    def groups(self) -> list[list[int]]:
        """The images joined by verified pairs, the largest group first; an image alone is a group."""
        group = {image: {image} for image in range(len(self.names))}
        for (first, second), (_, geometry) in self.pairs.items():
            if geometry.status == "ok" and group[first] is not group[second]:
                joined = group[first] | group[second]
                group.update(dict.fromkeys(joined, joined))
        distinct = {min(members): sorted(members) for members in group.values()}
        return sorted(distinct.values(), key=lambda members: (-len(members), members))

    def __repr__(self) -> str:
        verified = sum(geometry.status == "ok" for _, geometry in self.pairs.values())
        return (
            f"MatchedSet({len(self.names)} images, {verified} of {len(self.pairs)} pairs verified, "
            f"{len(self.tracks)} tracks)"
        )


def match_set(
    images: Sequence[ImageInput],
    preset: str | Pipeline = DEFAULT_PRESET,
    *,
    masks: Sequence[Mask | None] | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
    **options: Unpack[LoadOptions],
) -> MatchedSet:
    """Match a few images with each other, in memory: panoramas, small sets. `Collection` is for many.

    Matches that agree with their pair's geometry are joined to tracks, the most probable first. Those that
    other images contradict, or that would put two keypoints of an image into one track, are left out.

    >>> import matcher, numpy as np
    >>> scene = np.random.default_rng(0).integers(0, 255, (240, 400), dtype=np.uint8)
    >>> crops = [scene[:, start : start + 320] for start in (0, 40, 80)]
    >>> found = matcher.match_set(crops, "nearest", geometry="homography", max_keypoints=300)
    >>> len(found.pairs), int(found.tracks.lengths.max()), len(found.matches(0, 2)) > 100
    (3, 3, True)

    Args:
        images: at least two, as `Pipeline.match` takes them.
        preset: a preset's name, with `options` of `matcher.load`; or a pipeline.
        masks: one for each image, None where there is none.
        pairs: numbers of the images to match; every pair when absent.

    Raises:
        ImageError: an image cannot be read; the message names it.
        UsageError: fewer than two images, another number of masks, pairs of no images, essential geometry, a
            preset without keypoints, and what `matcher.load` refuses.
    """
    count = len(images)
    if count < 2:
        raise UsageError(f"a set has at least two images, not {count}")
    if masks is not None and len(masks) != count:
        raise UsageError(f"masks must be one for each of the {count} images, not {len(masks)}")
    refuse_second_pass(options, "the pairs of a set share the keypoints of an image")
    chosen = _checked(pairs, count)
    pipeline = open_pipeline(preset, options)
    if pipeline.config.estimation.kind == "essential":
        raise UsageError("a set is verified without cameras; use geometry 'fundamental' or 'homography'")
    if pipeline.config.extractor.kind == GRID_KIND:
        raise UsageError("tracks join keypoints, and this preset has only the cells of a grid; use another")
    features = tuple(pipeline.extract(*one) for one in zip(images, masks or [None] * count, strict=True))
    found = {}
    for first, second in chosen:
        matches = pipeline.match_features(features[first], features[second])
        found[first, second] = matches, pipeline.verify(features[first], features[second], matches)
    names = _names(images)
    return MatchedSet(names, features, found, _tracks(names, features, found))


def _checked(pairs: Sequence[tuple[int, int]] | None, count: int) -> list[tuple[int, int]]:
    """Pairs i < j, each once."""
    if pairs is None:
        return list(combinations(range(count), 2))
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1] or not set(pair) <= set(range(count)):
            raise UsageError(f"pairs must be of two of the images 0 to {count - 1}, not {tuple(pair)}")
    return list(dict.fromkeys((min(pair), max(pair)) for pair in pairs))


def _names(images: Sequence[ImageInput]) -> tuple[str, ...]:
    """A name of its own for each image."""
    names: dict[str, None] = {}
    for number, image in enumerate(images):
        path = image if isinstance(image, (str, Path)) else getattr(image, "path", None)
        name = f"image {number}" if path is None else str(path)
        names[f"{name} ({number})" if name in names else name] = None
    return tuple(names)


def _tracks(
    names: tuple[str, ...],
    features: tuple[Features, ...],
    pairs: Mapping[tuple[int, int], tuple[Matches, TwoViewGeometry]],
) -> Tracks:
    used = {}
    for pair, (matches, geometry) in pairs.items():
        if geometry.status in ("ok", "not_estimated"):
            used[pair] = geometry.inliers if geometry.status == "ok" else np.ones(len(matches), dtype=bool)
    indices = {pair: pairs[pair][0].indices[kept] for pair, kept in used.items()}
    keypoints = [to_numpy(one.keypoints) for one in features]
    scales = [float(np.sqrt(np.prod(to_numpy(one.scale)))) for one in features]
    consistent = consistent_matches(indices, keypoints, scales)
    joined = []
    for (first, second), kept in used.items():
        right, scores = consistent[first, second], pairs[first, second][0].scores[kept]
        rows = indices[first, second][right], scores[right]
        joined.append(PairMatches(names[first], names[second], *rows))
    found = build_tracks(joined, {name: len(f) for name, f in zip(names, features, strict=True)})
    left_out = sum(int((~right).sum()) for right in consistent.values())
    return replace(found, conflicts=found.conflicts + left_out)
