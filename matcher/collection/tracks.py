"""Tracks: the keypoints of many images that show one point of the scene, joined from pairwise matches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from matcher.cameras import Camera
from matcher.collection.schema import checksum, common_camera, encode_pair
from matcher.collection.store import EncodedPair, Store, Writer
from matcher.config import EstimationConfig, from_dict
from matcher.errors import UsageError
from matcher.verify.adjustment import threshold_scale
from matcher.verify.estimation import RobustEstimator
from matcher.verify.verdict import NOT, reject_improbable

# --- tracks: Tracks: the keypoints of many images that show one point of the scene, joined from pairwise
# matches.


class PairMatches(NamedTuple):
    """The matches of one pair as tracks need them."""

    name0: str
    name1: str
    indices: np.ndarray  # (K, 2) integer, into the keypoints of either image
    scores: np.ndarray | None = None  # (K,), best first joined; all equal when absent


@dataclass(frozen=True, eq=False)
class Tracks:
    """Tracks of two keypoints or more, longest first; no track has two keypoints of one image."""

    names: tuple[str, ...]  # the images, in the order given
    offsets: np.ndarray  # (T + 1,) int64: observations offsets[t] … offsets[t + 1] are track t
    images: np.ndarray  # (O,) int32 into names, ascending within a track
    keypoints: np.ndarray  # (O,) int32
    conflicts: int  # matches left out, as they contradict others: two keypoints of one image in one track

    def __len__(self) -> int:
        """The number of tracks T."""
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[list[tuple[str, int]]]:
        return (self.track(index) for index in range(len(self)))

    def track(self, index: int) -> list[tuple[str, int]]:
        """Name of image and number of keypoint of every observation of one track."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        images, keypoints = self.images[part].tolist(), self.keypoints[part].tolist()
        return [(self.names[image], keypoint) for image, keypoint in zip(images, keypoints, strict=True)]

    @property
    def lengths(self) -> np.ndarray:
        """(T,) int64 images of each track."""
        return np.diff(self.offsets)

    @property
    def mean_length(self) -> float:
        """Images per track, 0 without tracks."""
        return float(self.lengths.mean()) if len(self) else 0.0

    def table(self) -> np.ndarray:
        """(O, 3) int64 rows of track, image and keypoint, for a look-up the other way."""
        track = np.repeat(np.arange(len(self)), self.lengths)
        return np.column_stack([track, self.images, self.keypoints]).astype(np.int64)


def tracks_of(store: Store, *, min_length: int = 2) -> Tracks:
    """The tracks of a run: of the inliers where a pair has a geometry, of no match where it has none.

    Args:
        store: the run, opened.
        min_length: as of `build_tracks`.

    Raises:
        IntegrityError: the store is damaged.
    """
    verified = (pair for pair in store.pairs() if pair.geometry.status in ("ok", "not_estimated"))
    pairs = (
        PairMatches(pair.name0, pair.name1, pair.matches.indices[kept], pair.matches.scores[kept])
        for pair in verified
        for kept in [pair.geometry.inliers if pair.geometry.status == "ok" else slice(None)]
    )
    return build_tracks(pairs, {image.name: image.count for image in store.images()}, min_length=min_length)


def build_tracks(pairs: Iterable[PairMatches], counts: Mapping[str, int], *, min_length: int = 2) -> Tracks:
    """Join matches to tracks, the best first, and leave out those that contradict what is joined already.

    Union-find (Galler and Fischer 1964) with the images of each set kept beside it: two sets that share an
    image are never joined, since one point of the scene is seen once in an image. Best first, so that a
    wrong match, which tends to have a low score, meets tracks that are there already. All matches are held in
    memory, 12 bytes each.

    Args:
        pairs: verified matches; equal scores keep the order given.
        counts: images and how many keypoints each has.
        min_length: shorter tracks are left out; at least 2.

    Raises:
        UsageError: an image that is not in `counts`, an index beyond its keypoints, or a pair of one image.
    """
    names = tuple(counts)
    starts = np.concatenate([[0], np.cumsum([counts[name] for name in names])]).astype(np.int64)
    ends0, ends1, scores = _gathered(pairs, names, starts)
    forest = _Forest(np.repeat(np.arange(len(names)), np.diff(starts)))
    order = np.argsort(-scores, kind="stable")
    matches = zip(ends0[order].tolist(), ends1[order].tolist(), strict=True)
    conflicts = sum(not forest.join(node0, node1) for node0, node1 in matches)
    sets = [s for s in forest.sets() if len(s) >= max(2, min_length)]
    sets.sort(key=lambda s: -len(s))  # stable: equal ones in the order of their first images
    nodes = np.array([node for s in sets for node in s], dtype=np.int64)
    images = np.searchsorted(starts, nodes, side="right") - 1
    return Tracks(
        names=names,
        offsets=np.concatenate([[0], np.cumsum([len(s) for s in sets])]).astype(np.int64),
        images=images.astype(np.int32),
        keypoints=(nodes - starts[images]).astype(np.int32),
        conflicts=conflicts,
    )


def _gathered(
    pairs: Iterable[PairMatches], names: tuple[str, ...], starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All matches as nodes (one number per keypoint of the collection) with their scores."""
    number = {name: index for index, name in enumerate(names)}
    columns: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for pair in pairs:
        nodes = []
        indices = np.asarray(pair.indices).reshape(-1, 2)
        if pair.name0 == pair.name1:
            raise UsageError(f"{pair.name0} is paired with itself; tracks join different images")
        for name, column in zip((pair.name0, pair.name1), indices.T, strict=True):
            if name not in number:
                raise UsageError(f"{name} has matches but is not among the images")
            image = number[name]
            count = starts[image + 1] - starts[image]
            if len(column) and (column.min() < 0 or column.max() >= count):
                raise UsageError(f"a match of {name} names a keypoint beyond its {count}")
            nodes.append((starts[image] + column).astype(np.uint32 if starts[-1] < 2**32 else np.int64))
        scores = np.zeros(len(indices), np.float32) if pair.scores is None else pair.scores
        columns.append((*nodes, np.asarray(scores, dtype=np.float32)))
    if not columns:
        return np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32)
    ends0, ends1, scores = (np.concatenate(column) for column in zip(*columns, strict=True))
    return ends0, ends1, scores


class _Forest:
    """Disjoint sets of keypoints; only those that were joined take memory."""

    def __init__(self, image_of: np.ndarray) -> None:
        self._image_of = image_of
        self._parent: dict[int, int] = {}
        self._members: dict[int, dict[int, int]] = {}  # of a root: image → its keypoint

    def _root(self, node: int) -> int:
        parent = self._parent
        if node not in parent:
            parent[node] = node
            self._members[node] = {int(self._image_of[node]): node}
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]  # halves the path on the way up
        return node

    def join(self, node0: int, node1: int) -> bool:
        """Join the sets of two keypoints; False, and nothing joined, if both have a keypoint of one image."""
        root0, root1 = self._root(node0), self._root(node1)
        if root0 == root1:
            return True
        if len(self._members[root0]) < len(self._members[root1]):
            root0, root1 = root1, root0
        large, small = self._members[root0], self._members[root1]
        if not large.keys().isdisjoint(small):
            return False
        large.update(small)
        del self._members[root1]
        self._parent[root1] = root0
        return True

    def sets(self) -> Iterator[list[int]]:
        """Every set as its sorted keypoints, in the order of their first."""
        return iter(sorted(sorted(members.values()) for members in self._members.values()))


# --- cycles: Matches of several images that contradict each other: going round a third image leads
# elsewhere.

Pair = tuple[int, int]
_SAME_POINT = 1.5  # pixels of the resized images; detectors find some points twice
_FEWEST = 2  # third images that see both keypoints; one alone does not tell which of three matches is wrong
_CONFIRMED = 0.3  # share of them that confirm a right match, at least, even if many other matches are wrong


def consistent_matches(
    pairs: Mapping[Pair, np.ndarray], keypoints: Sequence[np.ndarray], scales: Sequence[float]
) -> dict[Pair, np.ndarray]:
    """Which matches of each pair (K,) bool are confirmed by enough third images, of those that can tell.

    A third image confirms a match if both of its keypoints match the same point there, and contradicts it if
    they match different ones (Zach et al., Disambiguating visual relations using loop constraints, 2010). A
    right match is contradicted where another match of its keypoints is wrong, so in three images none of the
    three is known to be wrong and all are kept; the most probable ones decide then (`build_tracks`).

    Args:
        pairs: (K, 2) keypoints of images i < j, each keypoint once on its side.
        keypoints: (N, 2) stored pixels of every image.
        scales: resized size / stored size of every image.
    """
    partner = _partners(pairs, [len(points) for points in keypoints])
    kept = {}
    for (first, second), indices in pairs.items():
        confirmed, seen = np.zeros((2, len(indices)), np.int64)
        for third in range(len(keypoints)):
            if (first, third) not in partner or (second, third) not in partner:
                continue
            ends = np.stack([partner[first, third][indices[:, 0]], partner[second, third][indices[:, 1]]])
            both = np.flatnonzero((ends >= 0).all(axis=0))
            here, there = keypoints[third][ends[:, both]]
            confirmed[both] += np.linalg.norm(here - there, axis=1) * scales[third] <= _SAME_POINT
            seen[both] += 1
        kept[first, second] = (seen < _FEWEST) | (confirmed >= _CONFIRMED * seen)
    return kept


def _partners(pairs: Mapping[Pair, np.ndarray], counts: Sequence[int]) -> dict[Pair, np.ndarray]:
    """For images (i, j) in either order, the keypoint of j that each of i matches (N,), −1 without one."""
    found = {}
    for (first, second), indices in pairs.items():
        for source, target, (column0, column1) in (
            (first, second, indices.T),
            (second, first, indices.T[::-1]),
        ):
            found[source, target] = np.full(counts[source], -1, np.int64)
            found[source, target][column0] = column1
    return found


# --- reverification: Verifies finished pairs again, from the stored matches.

_PAIRS = "SELECT image0, image1 FROM {table} WHERE image0 IN ({ids}) OR image1 IN ({ids})"


def verify_again(writer: Writer, names: Iterable[str]) -> int:
    """Verify the finished pairs of images whose cameras have changed; their features and matches stay.

    Failed pairs, which may have lacked a camera, are matched again. If the run's geometry uses no
    cameras, nothing is done. To be called inside a transaction, so that a camera is never stored
    beside a geometry that was estimated with another.

    Returns:
        How many pairs were verified.
    """
    store = writer.store
    settings = store.settings
    config = estimation_of(settings)
    numbers = [writer.number(name) for name in names]
    if config.kind != "essential" or not numbers:
        return 0
    ids = ", ".join(map(str, numbers))
    writer.let_failed_pairs_wait(writer.execute(_PAIRS.format(table="failed", ids=ids)))
    verification = _Verification(store, RobustEstimator(config), common_camera(settings))
    pairs = writer.execute(_PAIRS.format(table="pairs", ids=ids))
    for image0, image1 in pairs:
        writer.put_pairs([verification.pair(image0, image1)])
    return len(pairs)


def estimation_of(settings: Mapping[str, Any]) -> EstimationConfig:
    """How the run of these settings estimates geometry.

    Raises:
        UsageError: they do not say, or not as this version does.
    """
    values = settings.get("config", {}).get("estimation")
    if values is None:
        raise UsageError("the settings of the run do not say how its geometry was estimated; match it again")
    return from_dict(EstimationConfig, values)


def check_cameras(store: Store, common: Camera | None) -> None:
    """Refuse a run that could not verify any pair, before any work.

    Args:
        store: the run.
        common: the camera of every image without its own.

    Raises:
        UsageError: essential geometry, and no image has a camera.
    """
    if estimation_of(store.settings).kind != "essential" or common is not None:
        return
    if any(image.camera is not None for image in store.images()):
        return  # pairs of images without one fail with that reason
    raise UsageError(
        "geometry 'essential' needs the camera of every image, and none is known: give "
        "camera=fx,fy,cx,cy for all, or one for each with Collection.set_cameras"
    )


class _Verification:
    """Reads a finished pair and encodes it again with a new geometry."""

    def __init__(self, store: Store, estimator: RobustEstimator, camera: Camera | None) -> None:
        self._store, self._estimator, self._camera = store, estimator, camera
        self._names = store.names()
        self._scales: dict[int, tuple[Any, ...]] = {
            row[0]: row[1:] for row in store.rows("SELECT id, scale_x, scale_y FROM images")
        }

    def pair(self, image0: int, image1: int) -> EncodedPair:
        """The pair as it is to be written."""
        found = self._store.pair(self._names[image0], self._names[image1])
        images = [self._store.image(name) for name in (found.name0, found.name1)]
        cameras = [image.camera or self._camera for image in images]
        matches = found.matches
        geometry = self._estimator(
            matches.points0,
            matches.points1,
            cameras=(cameras[0], cameras[1]),
            scores=matches.scores,
            covariances=matches.covariances,
            thresholds_scale=threshold_scale(
                self._scales[image0], self._scales[image1], self._estimator.config.kind
            ),
        )
        geometry = reject_improbable(geometry, matches, *(image.size for image in images), least=NOT)
        keypoints = (self._store.keypoints(found.name0), self._store.keypoints(found.name1))
        data = encode_pair(matches, geometry, *keypoints)
        return EncodedPair(image0, image1, found.seconds, checksum(data), data)
